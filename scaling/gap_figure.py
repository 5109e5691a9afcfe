"""Draw paired gaps with the noise that is known of them; the figure of scaling/precision.py.

Two noises are told apart. Seed noise: other seeds would give another gap. Its bar is the 95 %
t-interval over independent pairs. Evaluation noise: other validation sequences would give another
gap. It is the smaller of the two and says nothing of seeds. A single pair knows its evaluation
noise alone, so its marker is hollow and its bar thin."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lib.plots import STYLES, counts_axis, settle, sheet, styled, styles
from scaling.gap_words import KIND, words_of
from scaling.paired.estimates import Estimate
from scaling.paired.published import kumar_gap, sun_gap
from scaling.verdicts import Margin

NORMAL_95 = 1.96  # standard errors in half a 95 % interval of many values
FARTHEST = 1.5e9  # parameters: the published laws are drawn up to the largest model of the study
MARGIN_LINE = {"color": "#000000", "linewidth": 0.8, "linestyle": (0, (4, 2))}
NULL_COLOURS = "#8C8C8C", "#4D4D4D"  # of other seeds, of the same seed
NULL_WIDTH = 0.07  # of the panel, kept free for each null
GAP_ROOM = 1.2  # the axis ends at so many times the farthest gap
MARGIN_ROOM = 1.3  # or at so many times the margin: its lines keep off the edges
MOST_MARGINS = 4  # an axis longer than so many margins is logarithmic beyond the margin
MOST_TICKS = 4  # on one side beyond the margin
# The published laws that the figure draws: name, nats(N, D), range of N that the law was fitted to,
# look.
LAWS = (
    (
        "Kumar INT8, no offsets",
        lambda N, D: kumar_gap(N, offsets=False),
        (30e6, 220e6),
        "#444444",
        "-",
    ),
    ("Kumar INT8", lambda N, D: kumar_gap(N), (30e6, 220e6), "#888888", (0, (5, 1))),
    ("Sun E4M3, block 128", sun_gap, (41e6, 679e6), "#000000", "-."),
)


@dataclass(frozen=True)
class DrawnGap:
    """One marker: the mean gap of the pairs at one size, budget and recipe, in the panel's unit."""

    x: float
    mean: float
    n: int  # independent pairs
    seed_half: float | None  # half the 95 % interval over the pairs; None where they show no spread
    evaluation_half: float | None  # half the 95 % interval over validation sequences, where known

    @property
    def is_single(self) -> bool:
        return self.seed_half is None

    @property
    def half(self) -> float:
        """Half the length of the bar; 0 where no noise is known."""
        known = self.evaluation_half if self.seed_half is None else self.seed_half
        return known or 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """What the axis holds: the bar, but of two pairs the mean alone, since their interval is
        12.7 standard errors long."""
        half = 0.0 if self.n == 2 else self.half
        return self.mean - half, self.mean + half


def gap_at(x: float, gap: Estimate, evaluation_se: float | None) -> DrawnGap:
    """The marker of an estimated gap; evaluation_se: of a single pair, in the unit of the gap."""
    evaluation_half = None if evaluation_se is None else NORMAL_95 * evaluation_se
    return DrawnGap(x, gap.mean, gap.n, gap.half, evaluation_half)


def draw_gaps(panel: Axes, gaps: Iterable[DrawnGap], look: dict) -> None:
    """Draw the markers: filled with the interval over pairs, hollow with a thin bar."""
    gaps = list(gaps)
    for is_single in (False, True):
        chosen = [gap for gap in gaps if gap.is_single is is_single]
        if not chosen:
            continue
        panel.errorbar(
            [gap.x for gap in chosen],
            [gap.mean for gap in chosen],
            [gap.half for gap in chosen],
            **look,
            linestyle="none",
            markerfacecolor="white" if is_single else look["color"],
            markeredgewidth=1.1,
            capsize=0 if is_single else 2.5,
            elinewidth=0.6 if is_single else 1.3,
            zorder=3,
        )


def gap_handles(gaps: Iterable[DrawnGap]) -> list[Line2D]:
    """The legend of the markers that are drawn, in grey: which is a mean over pairs, which one
    pair."""
    gaps = list(gaps)
    grey = {"color": "#666666", "marker": "o", "markersize": 4.5, "linestyle": "none"}
    handles = []
    if any(not gap.is_single for gap in gaps):
        handles.append(Line2D([], [], **grey, label="mean of pairs, 95 % interval"))
    if any(gap.is_single for gap in gaps):
        has_noise = any(gap.is_single and gap.evaluation_half for gap in gaps)
        label = "single pair, evaluation noise" if has_noise else "single pair, noise unknown"
        handles.append(Line2D([], [], **grey, markerfacecolor="white", label=label))
    return handles


@styled
def draw_precision(result: dict) -> Figure:
    """The figure of precision.analyse's result.

    Left: each gap in per cent at its size; rows that share a size stand side by side, more tokens
    further right. Right: each gap above 0 in nats at its total parameters, as the published laws
    beside them count."""
    words = words_of(result)
    sizes, margin = result["sizes"], result["margin"]
    looks = _looks(result["common"])
    percents = _drawn_gaps(result, _places(sizes), "percent")
    nats = _drawn_gaps(result, [row["params_total"] for row in sizes], "nats")
    nulls = _nulls(result["null"], words.seed)
    limit = gap_limit(percents, margin)
    is_log = margin is not None and limit > MOST_MARGINS * margin.percent

    handles = _null_handles(nulls, margin)
    handles += [
        Line2D([], [], linestyle="none", **look, label=name) for name, look in looks.items()
    ]
    handles += gap_handles(percents)
    independent = sum(row[result["loss"]].n for row in result["common"].values())
    title = (
        f"Loss minus that of {words.baseline}, {words.evaluated} (n = {len(result['pairs'])} pairs,"
        f" {independent} independent)"
    )
    ratio = float(np.exp(np.mean([math.log(row["tokens"] / row["params_total"]) for row in sizes])))
    figure, ((left, right),) = sheet((7.4, 3.8), 1, 2, title, _caption(ratio, is_log), handles, 4)

    _draw_percents(left, sizes, percents, looks, nulls, margin, limit)
    convention = result["conventions"]["N"].removeprefix("params_")
    kind = KIND.get(convention, "")  # a table does not say which parameters it counts
    left.set(ylabel="gap [%]", xlabel=f"{kind}parameters N")
    _draw_nats(right, sizes, nats, looks, ratio)
    return settle(figure)


def gap_limit(gaps: Iterable[DrawnGap], margin: Margin | None) -> float:
    """Where the gap's axis ends on both sides [%]: scaled by the gaps and the margin, never by a
    null."""
    farthest = max(max(map(abs, gap.ends)) for gap in gaps)
    limit = GAP_ROOM * max(1e-3, farthest)
    return limit if margin is None else max(limit, MARGIN_ROOM * margin.percent)


def _looks(recipes) -> dict[str, dict]:
    looks = {}
    for recipe, style in zip(recipes, styles(["bf16", *recipes])[1:], strict=True):
        looks[recipe] = {"color": style["color"], "marker": style["marker"], "markersize": 4.5}
    return looks


def _caption(ratio: float, is_log: bool) -> str:
    beyond = "; beyond the margin the axis is logarithmic" if is_log else ""
    return (
        f"Left, at each size further right: more tokens{beyond}. Right: gaps above 0 and published"
        f" laws at {ratio:.3g} tokens per parameter, dotted beyond the sizes they were fitted to."
    )


def _places(sizes: list[dict]) -> list[float]:
    """Where each row stands on the axis of sizes, those of one size side by side around it."""
    levels = sorted({row["N"] for row in sizes})
    room = min([0.9, *(0.6 * np.diff(np.log(levels)))])
    places = []
    for N, count in Counter(row["N"] for row in sizes).items():
        places += [N * math.exp(room * ((i + 0.5) / count - 0.5)) for i in range(count)]
    return places


def _drawn_gaps(result: dict, places, unit: str) -> list[DrawnGap]:
    """A marker for each row of sizes, in "percent" of the loss or in "nats"."""
    arm = result["loss"]
    gap_of_run = {pair["fp8"]: pair[f"gap_{arm}"] for pair in result["pairs"]}
    gaps = []
    for x, row in zip(places, result["sizes"], strict=True):
        estimate = row[arm] if unit == "percent" else row["nats"]
        first = gap_of_run[row["runs"][0]]
        evaluation_se = first.se_percent if unit == "percent" else first.se
        gaps.append(gap_at(x, estimate, evaluation_se if estimate.n == 1 else None))
    return gaps


@dataclass(frozen=True)
class Null:
    """The scatter of differences that are no effect."""

    label: str
    band: float  # half of what holds 95 % of the differences [%]
    colour: str


def _nulls(null: dict, seed: str) -> list[Null]:
    """The nulls that were measured; seed: what the runs of the first differ by."""
    nulls = []
    for name, pooled, colour in (
        (f"other {seed}", null["pooled"], NULL_COLOURS[0]),
        (f"same {seed}", null["same_seed"]["pooled"], NULL_COLOURS[1]),
    ):
        if pooled:
            label = f"null, {name}, ±{pooled['band']:.2g} %"
            nulls.append(Null(label, pooled["band"], colour))
    return nulls


def _null_handles(nulls: list[Null], margin: Margin | None) -> list[Line2D]:
    look = {"marker": "|", "markersize": 9, "markeredgewidth": 2.2, "linestyle": "none"}
    handles = [Line2D([], [], color=null.colour, **look, label=null.label) for null in nulls]
    if margin is not None:
        label = f"margin, ±{margin.percent:g} %"
        if not margin.is_declared:
            label += ", after the fact"
        handles.append(Line2D([], [], **MARGIN_LINE, label=label))
    return handles


def _draw_percents(panel, sizes, gaps, looks, nulls, margin, limit: float) -> None:
    places = [gap.x for gap in gaps]
    first, last = min(places) / 1.5, 1.5 * max(places)
    free = NULL_WIDTH * len(nulls)
    first *= (first / last) ** (free / (1 - free))  # room for the nulls, left of all gaps
    panel.set(xscale="log", xlim=(first, last))
    _gap_axis(panel, margin, limit)
    for sign in (-1, 1) if margin else ():
        panel.axhline(sign * margin.percent, **MARGIN_LINE, zorder=1)
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.2, zorder=2.5)
    for i, null in enumerate(nulls):
        _draw_null(panel, NULL_WIDTH * (i + 0.6), null, limit)
    for recipe, look in looks.items():
        rows = zip(sizes, gaps, strict=True)
        draw_gaps(panel, [gap for row, gap in rows if row["recipe"] == recipe], look)
    counts_axis(panel.xaxis)
    panel.set_xticks(_labelled_sizes(sizes))
    panel.set_xticks([], minor=True)


def _gap_axis(panel, margin: Margin | None, limit: float) -> None:
    """Linear; where the gaps would squeeze the margin, logarithmic beyond it."""
    if margin is not None and limit > MOST_MARGINS * margin.percent:
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


def _draw_null(panel, place: float, null: Null, limit: float) -> None:
    """A bracket over ±band at a share of the panel's width; arrows where it leaves the panel."""
    leaves = null.band > limit
    end = limit if leaves else null.band
    look = {"transform": panel.get_yaxis_transform(), "color": null.colour, "clip_on": False}
    panel.plot([place, place], [-end, end], linewidth=2.2, solid_capstyle="butt", **look, zorder=2)
    for sign, arrow in ((-1, "v"), (1, "^")):
        marker = arrow if leaves else "_"
        panel.plot([place], [sign * end], marker=marker, markersize=7, **look, zorder=2)
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


def _labelled_sizes(sizes: list[dict]) -> list[float]:
    """The sizes whose labels have room."""
    levels = sorted({row["N"] for row in sizes})
    width = math.log(2.25 * levels[-1] / levels[0])
    labelled = levels[:1]
    for N in levels[1:]:
        if math.log(N / labelled[-1]) > 0.08 * width:
            labelled.append(N)
    return labelled


def _draw_nats(panel, sizes, gaps, looks, ratio: float) -> None:
    totals, values = [row["params_total"] for row in sizes], []
    N = np.geomspace(min(totals) / 2, max(1.5 * max(totals), 1.3 * FARTHEST), 200)
    for name, law, fitted, colour, dash in LAWS:
        nats = law(N, ratio * N)
        is_fitted = (fitted[0] <= N) & (fitted[1] >= N)
        panel.plot(N, nats, color=colour, linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
        line = {"color": colour, "linestyle": dash, "linewidth": 1.8, "label": name}
        panel.plot(N[is_fitted], nats[is_fitted], **line, zorder=1)
        values += [nats.min(), nats.max()]
    for recipe, look in looks.items():
        rows = zip(sizes, gaps, strict=True)
        above = [gap for row, gap in rows if row["recipe"] == recipe and gap.mean > 0]
        draw_gaps(panel, above, look)
        values += [gap.mean for gap in above]
    panel.set(
        xscale="log",
        yscale="log",
        xlim=(N[0], N[-1]),
        ylim=(min(values) / 2.5, 12 * max(values)),
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
