"""Draw the gaps of a study beside their nulls and published laws; the figure of
scaling/precision.py."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lib.plots import STYLES, counts_axis, settle, sheet, styled, styles
from scaling.gap_figure import DrawnGap, draw_gaps, gap_at, gap_handles
from scaling.gap_words import KIND, Words, words_of
from scaling.paired.nulls import Null
from scaling.paired.published import kumar_gap, sun_gap
from scaling.precision_result import PrecisionResult, SizeGap
from scaling.verdicts import Margin

FARTHEST = 1.5e9  # parameters: the published laws are drawn up to the largest model of the study
MARGIN_LINE: dict[str, Any] = {"color": "#000000", "linewidth": 0.8, "linestyle": (0, (4, 2))}
NULL_COLOURS = "#8C8C8C", "#4D4D4D"  # of other seeds, of the same seed
NULL_WIDTH = 0.07  # of the panel, kept free for each null
GAP_ROOM = 1.2  # the axis ends at so many times the farthest gap
MARGIN_ROOM = 1.3  # or at so many times the margin: its lines keep off the edges
MOST_MARGINS = 4  # an axis longer than so many margins is logarithmic beyond the margin
MOST_TICKS = 4  # on one side beyond the margin
MOST_MARKERS = 40  # more hide each other


@dataclass(frozen=True)
class PublishedLaw:
    """A law of what low precision costs that the figure draws."""

    name: str
    nats: Callable[[np.ndarray, np.ndarray], np.ndarray]  # of N and D
    fitted: tuple[float, float]  # smallest and largest N that it was fitted to
    colour: str
    dash: Any


LAWS = (
    PublishedLaw(
        "Kumar INT8, no offsets",
        lambda N, D: kumar_gap(N, offsets=False),
        (30e6, 220e6),
        "#444444",
        "-",
    ),
    PublishedLaw("Kumar INT8", lambda N, D: kumar_gap(N), (30e6, 220e6), "#888888", (0, (5, 1))),
    PublishedLaw("Sun E4M3, block 128", sun_gap, (41e6, 679e6), "#000000", "-."),
)


@styled
def draw_precision(result: PrecisionResult) -> Figure:
    """Left: each gap in per cent at its size; rows that share a size stand side by side, more
    tokens further right. Right: each gap above 0 in nats at its total parameters, as the published
    laws beside them count. Of more than MOST_MARKERS gaps each recipe's with the most tokens at a
    size are shown; the figure budgets has all of them."""
    words = words_of(result.table, result.loss)
    title = gap_title(result, words)
    is_crowded = len(result.sizes) > MOST_MARKERS
    if is_crowded:
        result = replace(result, sizes=_with_most_tokens(result.sizes))
    looks = _looks(result.common)
    percents = drawn_gaps(result, _places(result.sizes), "percent")
    nats = drawn_gaps(result, [size.params_total for size in result.sizes], "nats")
    nulls = _nulls(result.null, words.seed)
    limit = gap_limit(percents, result.margin)
    is_log = _is_log(result.margin, limit)
    ratio = _mean_ratio(result.sizes)
    has_arrows = any(gap.mean > 0 >= gap.mean - gap.half for gap in nats)

    handles = _null_handles(nulls, result.margin)
    for name, style in looks.items():
        handles.append(Line2D([], [], linestyle="none", **style, label=name))
    handles += gap_handles(percents)
    figure, panels = sheet(
        (7.4, 3.8),
        1,
        2,
        title,
        _caption(ratio, is_log, has_arrows, is_crowded),
        handles,
        4,
    )
    percent_panel, nats_panel = panels[0]
    _draw_percents(percent_panel, result, percents, looks, nulls, limit)
    # a table does not say which parameters it counts
    kind = KIND["nonembed"] if result.conventions.N == "params_nonembed" else ""
    percent_panel.set(ylabel="gap [%]", xlabel=f"{kind}parameters N")
    _draw_nats(nats_panel, result.sizes, nats, looks, ratio)
    return settle(figure)


def gap_title(result: PrecisionResult, words: Words) -> str:
    """What the gaps of a figure are, and how many."""
    estimates = [
        gap.bf16 if result.loss == "bf16" else gap.as_trained for gap in result.common.values()
    ]
    independent = sum(estimate.n for estimate in estimates)
    return (
        f"Loss minus that of {words.baseline}, {words.evaluated} (n = {len(result.pairs)} pairs,"
        f" {independent} independent)"
    )


def _mean_ratio(sizes: Sequence[SizeGap]) -> float:
    """Geometric mean of the tokens per parameter, all of them counted."""
    logs = [math.log(size.tokens / size.params_total) for size in sizes]
    return float(np.exp(np.mean(logs)))


def _is_log(margin: Margin | None, limit: float) -> bool:
    """Whether the gaps would squeeze the margin on a linear axis."""
    return margin is not None and limit > MOST_MARGINS * margin.percent


def gap_limit(gaps: Iterable[DrawnGap], margin: Margin | None) -> float:
    """Where the gap's axis ends on both sides [%]: scaled by the gaps and the margin, never by a
    null."""
    farthest = max(max(map(abs, gap.ends)) for gap in gaps)
    limit = GAP_ROOM * max(1e-3, farthest)
    return limit if margin is None else max(limit, MARGIN_ROOM * margin.percent)


def _looks(recipes: Iterable[str]) -> dict[str, dict]:
    recipes = list(recipes)
    looks = {}
    for recipe, style in zip(recipes, styles(["bf16", *recipes])[1:], strict=True):
        looks[recipe] = {"color": style["color"], "marker": style["marker"], "markersize": 4.5}
    return looks


def _with_most_tokens(sizes: Sequence[SizeGap]) -> list[SizeGap]:
    """Of each recipe at each size the row with the most tokens."""
    most: dict[tuple[str, int], SizeGap] = {}
    for size in sizes:
        key = (size.recipe, size.N)
        if key not in most or size.tokens > most[key].tokens:
            most[key] = size
    return list(most.values())


def _caption(ratio: float, is_log: bool, has_arrows: bool, is_crowded: bool) -> str:
    which = "at each size further right: more tokens"
    if is_crowded:
        which = "at each size each recipe's with its most tokens"
    beyond = "; beyond the margin the axis is logarithmic" if is_log else ""
    arrows = " (arrows: bars down to 0 or below)" if has_arrows else ""
    return (
        f"Left, {which}{beyond}. Right: gaps above 0{arrows} and"
        f" published laws at {ratio:.3g} tokens per parameter, dotted beyond the sizes they were"
        " fitted to."
    )


def _places(sizes: Sequence[SizeGap]) -> list[float]:
    """Where each row stands on the axis of sizes, those of one size side by side around it."""
    levels = sorted({size.N for size in sizes})
    room = min([0.9, *(0.6 * np.diff(np.log(levels)))])
    places = []
    for N, count in Counter(size.N for size in sizes).items():
        places += [N * math.exp(room * ((i + 0.5) / count - 0.5)) for i in range(count)]
    return places


def drawn_gaps(
    result: PrecisionResult, places: Sequence[float], unit: Literal["percent", "nats"]
) -> list[DrawnGap]:
    """A marker for each row of sizes, in per cent of the loss or in nats."""
    is_bf16 = result.loss == "bf16"
    gap_of_run = {
        pair.fp8: pair.gap_bf16 if is_bf16 else pair.gap_as_trained for pair in result.pairs
    }
    gaps = []
    for x, size in zip(places, result.sizes, strict=True):
        estimate = size.nats
        if unit == "percent":
            estimate = size.bf16 if is_bf16 else size.as_trained
        first = gap_of_run[size.runs[0]]
        evaluation_se = first.se_percent if unit == "percent" else first.se
        gaps.append(gap_at(x, estimate, evaluation_se if estimate.n == 1 else None))
    return gaps


@dataclass(frozen=True)
class DrawnNull:
    """The scatter of differences that are no effect."""

    label: str
    band: float  # half of what holds 95 % of the differences [%]
    colour: str


def _nulls(null: Null, seed: str) -> list[DrawnNull]:
    """The nulls that were measured; seed: what the runs of the first differ by."""
    nulls = []
    for name, pooled, colour in (
        (f"other {seed}", null.pooled, NULL_COLOURS[0]),
        (f"same {seed}", null.same_seed.pooled, NULL_COLOURS[1]),
    ):
        if pooled is not None:
            label = f"null, {name}, ±{pooled.band:.2g} %"
            nulls.append(DrawnNull(label, pooled.band, colour))
    return nulls


def _null_handles(nulls: Sequence[DrawnNull], margin: Margin | None) -> list[Line2D]:
    style: dict[str, Any] = {
        "marker": "|",
        "markersize": 9,
        "markeredgewidth": 2.2,
        "linestyle": "none",
    }
    handles = [Line2D([], [], color=null.colour, **style, label=null.label) for null in nulls]
    if margin is not None:
        handles.append(margin_handle(margin))
    return handles


def margin_handle(margin: Margin) -> Line2D:
    label = f"margin, ±{margin.percent:g} %"
    if not margin.is_declared:
        label += ", after the fact"
    return Line2D([], [], **MARGIN_LINE, label=label)


def _draw_percents(
    panel: Axes,
    result: PrecisionResult,
    gaps: Sequence[DrawnGap],
    looks: dict[str, dict],
    nulls: Sequence[DrawnNull],
    limit: float,
) -> None:
    places = [gap.x for gap in gaps]
    first, last = min(places) / 1.5, 1.5 * max(places)
    free = NULL_WIDTH * len(nulls)
    first *= (first / last) ** (free / (1 - free))  # room for the nulls, left of all gaps
    panel.set(xscale="log", xlim=(first, last))
    _gap_axis(panel, result.margin, limit)
    if result.margin is not None:
        for sign in (-1, 1):
            panel.axhline(sign * result.margin.percent, **MARGIN_LINE, zorder=1)
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.2, zorder=2.5)
    for i, null in enumerate(nulls):
        _draw_null(panel, NULL_WIDTH * (i + 0.6), null, limit)
    for recipe, style in looks.items():
        draw_gaps(panel, _gaps_of_recipe(recipe, result.sizes, gaps), style)
    counts_axis(panel.xaxis)
    panel.set_xticks(_labelled_sizes(result.sizes))
    panel.set_xticks([], minor=True)


def _gaps_of_recipe(
    recipe: str, sizes: Sequence[SizeGap], gaps: Sequence[DrawnGap]
) -> list[DrawnGap]:
    drawn_gaps = zip(sizes, gaps, strict=True)
    return [gap for size, gap in drawn_gaps if size.recipe == recipe]


def _gap_axis(panel: Axes, margin: Margin | None, limit: float) -> None:
    """Linear; where the gaps would squeeze the margin, logarithmic beyond it."""
    if margin is not None and _is_log(margin, limit):
        panel.set_yscale("symlog", linthresh=margin.percent)
        panel.yaxis.set_major_locator(FixedLocator(_ticks_beyond(margin.percent, limit)))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(
            FuncFormatter(lambda gap, _: f"{gap:g}".replace("-", "\N{MINUS SIGN}"))
        )
    panel.set_ylim(-limit, limit)


def _ticks_beyond(margin: float, limit: float) -> list[float]:
    """0, the margin, and round values beyond it, on both sides."""
    decades = range(math.floor(math.log10(margin)), math.ceil(math.log10(limit)) + 1)
    round_values = [digit * 10.0**decade for decade, digit in itertools.product(decades, (1, 2, 5))]
    beyond = [value for value in round_values if 1.4 * margin < value <= limit]
    step = max(1, math.ceil(len(beyond) / MOST_TICKS))
    positive = [margin, *beyond[step - 1 :: step]]
    return [*(-value for value in positive[::-1]), 0.0, *positive]


def _draw_null(panel: Axes, place: float, null: DrawnNull, limit: float) -> None:
    """A bracket over ±band at a share of the panel's width; arrows where it leaves the panel."""
    leaves = null.band > limit
    end = limit if leaves else null.band
    style: dict[str, Any] = {
        "transform": panel.get_yaxis_transform(),
        "color": null.colour,
        "clip_on": False,
    }
    panel.plot([place, place], [-end, end], linewidth=2.2, solid_capstyle="butt", **style, zorder=2)
    for sign, arrow in ((-1, "v"), (1, "^")):
        marker = arrow if leaves else "_"
        panel.plot([place], [sign * end], marker=marker, markersize=7, **style, zorder=2)
    panel.text(
        place,
        0.8,
        f"±{null.band:.2g} %",
        transform=panel.transAxes,
        rotation=90,
        ha="center",
        va="center",
        fontsize=7,
        color=null.colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        zorder=2.2,
    )


def _labelled_sizes(sizes: Sequence[SizeGap]) -> list[float]:
    """The sizes whose labels have room."""
    levels: list[float] = sorted({size.N for size in sizes})
    width = math.log(2.25 * levels[-1] / levels[0])
    labelled = levels[:1]
    for N in levels[1:]:
        if math.log(N / labelled[-1]) > 0.08 * width:
            labelled.append(N)
    return labelled


def _draw_nats(
    panel: Axes,
    sizes: Sequence[SizeGap],
    gaps: Sequence[DrawnGap],
    looks: dict[str, dict],
    ratio: float,
) -> None:
    totals = [size.params_total for size in sizes]
    N = np.geomspace(min(totals) / 2, max(1.5 * max(totals), 1.3 * FARTHEST), 200)
    values = []
    for law in LAWS:
        nats = law.nats(N, ratio * N)
        _draw_published(panel, N, nats, law)
        values += [nats.min(), nats.max()]
    above = [gap for gap in gaps if gap.mean > 0]
    values += [gap.mean for gap in above]
    floor = min(values) / 2.5
    for recipe, style in looks.items():
        of_recipe = [gap for gap in _gaps_of_recipe(recipe, sizes, gaps) if gap.mean > 0]
        draw_gaps(panel, of_recipe, style, floor)
    panel.set(
        xscale="log",
        yscale="log",
        xlim=(N[0], N[-1]),
        ylim=(floor, 12 * max(values)),
        xlabel="parameters N, all",
        ylabel="gap [nats/token]",
    )
    counts_axis(panel.xaxis)
    panel.legend(
        loc="upper right",
        frameon=False,
        fontsize=7,
        borderaxespad=0,
        handlelength=2.8,
        labelspacing=0.25,
    )


def _draw_published(panel: Axes, N: np.ndarray, nats: np.ndarray, law: PublishedLaw) -> None:
    """A published law over N, dotted beyond the sizes that it was fitted to."""
    smallest, largest = law.fitted
    is_fitted = (smallest <= N) & (largest >= N)
    panel.plot(N, nats, color=law.colour, linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
    line: dict[str, Any] = {
        "color": law.colour,
        "linestyle": law.dash,
        "linewidth": 1.8,
        "label": law.name,
    }
    panel.plot(N[is_fitted], nats[is_fitted], **line, zorder=1)
