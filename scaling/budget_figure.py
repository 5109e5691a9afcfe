"""Draw the gap of each recipe against tokens per parameter: does what FP8 costs grow with training?

A panel a recipe, markers for each size, and the law of the gap or, where no trend is told, the mean
of all pairs; the second figure of scaling/precision.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lib.plots import GREY, counts_axis, settle, sheet, styled, styles
from lib.text import si
from scaling.gap_figure import DrawnGap, draw_gaps, gap_handles
from scaling.gap_words import KIND, words_of
from scaling.paired.gap_law import GapLaw, levels, misfit
from scaling.precision_figure import MARGIN_LINE, drawn_gaps, gap_title, margin_handle
from scaling.precision_result import PrecisionResult, SizeGap
from scaling.verdicts import Margin

FEWEST_RATIOS = 3  # of tokens to parameters at one size: two show no form of a growth
COLUMNS = 3
PANEL_HEIGHT = 1.75  # inches
# Sizes at one ratio stand side by side: each so far from the next, all within this share of the way
# to the next ratio; on the logarithmic axis.
SIDE_BY_SIDE, SHARE_OF_STEP = 0.07, 0.5
ROOM = 1.25  # an axis ends at so many times its farthest value
MOST_TICKS = 6  # more ratios are too many to label each
LAW_LINE: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (1, 1.5)), "zorder": 2}


@dataclass(frozen=True)
class Marker:
    """A gap with its size, ratio of tokens to parameters, and place."""

    N: float
    ratio: float
    recipe: str
    gap: DrawnGap


@styled
def draw_budgets(result: PrecisionResult) -> Figure | None:
    """The figure; None where no size has so many ratios of tokens to parameters that a growth
    could be seen."""
    if _most_ratios(result.sizes) < FEWEST_RATIOS:
        return None
    gaps = drawn_gaps(result, _places(result.sizes), "percent")
    markers = [
        Marker(size.N, size.tokens / size.N, size.recipe, gap)
        for size, gap in zip(result.sizes, gaps, strict=True)
    ]
    looks = _looks(sorted({size.N for size in result.sizes}))
    kind = KIND["nonembed"] if result.conventions.N == "params_nonembed" else ""

    recipes = list(result.common)
    n_rows = -(-len(recipes) // COLUMNS)
    n_columns = min(COLUMNS, len(recipes))
    title = gap_title(result, words_of(result.table, result.loss))
    figure, panels = sheet(
        (7.4, 0.9 + PANEL_HEIGHT * n_rows),
        n_rows,
        n_columns,
        f"{title}, against tokens per parameter",
        _caption(gaps),
        _handles(looks, gaps, result.margin, kind),
        5,
    )
    ratios = levels(np.array([marker.ratio for marker in markers]))
    for panel, recipe in zip(panels.flat, recipes, strict=False):
        of_recipe = [marker for marker in markers if marker.recipe == recipe]
        _draw_recipe(panel, recipe, of_recipe, looks, result.margin, result.gap_laws.get(recipe))
        _ratio_axis(panel, ratios, [marker.gap.x for marker in markers])
    _label(panels, len(recipes), f"tokens per {kind}parameter")
    return settle(figure)


def _label(panels: np.ndarray, n_used: int, x_label: str) -> None:
    """Hide the panels behind the first n_used; name the axes at the left and at the foot.

    panels: (rows, columns) of Axes."""
    for panel in panels.flat[n_used:]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel("gap [%]")
    for column in panels.T:
        lowest = [panel for panel in column if panel.get_visible()][-1]
        lowest.set_xlabel(x_label)


def _most_ratios(sizes: Sequence[SizeGap]) -> int:
    """Ratios of tokens to parameters at the size that has the most."""
    ratios: dict[float, list[float]] = {}
    for size in sizes:
        ratios.setdefault(size.N, []).append(size.tokens / size.N)
    return max((len(levels(np.array(of_size))) for of_size in ratios.values()), default=0)


def _places(sizes: Sequence[SizeGap]) -> list[float]:
    """Where each row stands on the axis of ratios: those of several sizes at one ratio side by
    side around it, the smallest furthest left; a row alone at its ratio."""
    ratios = np.array([size.tokens / size.N for size in sizes])
    starts = np.array(levels(ratios))
    level_of_row = np.searchsorted(starts, ratios, side="right") - 1
    step = min([*np.diff(np.log(starts)), 1.0])
    places = []
    for size, ratio, level in zip(sizes, ratios, level_of_row, strict=True):
        at_level = [row for row, other in zip(sizes, level_of_row, strict=True) if other == level]
        numbers = sorted({row.N for row in at_level})
        distance = min(SIDE_BY_SIDE, SHARE_OF_STEP * step / len(numbers))
        position = numbers.index(size.N) - (len(numbers) - 1) / 2
        places.append(float(ratio * np.exp(distance * position)))
    return places


def _looks(sizes: Sequence[float]) -> dict[float, dict]:
    """A style for each size."""
    looks = {}
    for N, style in zip(sizes, styles([f"{N:g}" for N in sizes]), strict=True):
        looks[N] = {"color": style["color"], "marker": style["marker"], "markersize": 4.0}
    return looks


def _caption(gaps: Sequence[DrawnGap]) -> str:
    caption = (
        "Each panel has its own scale. Dotted: the law of the gap where a trend is told from zero,"
        " else the mean of all pairs, unless they refute that it is the same everywhere."
    )
    if any(gap.n == 2 for gap in gaps):
        caption += " Bars of two pairs may leave the panel."
    return caption


def _handles(
    looks: Mapping[float, dict], gaps: Sequence[DrawnGap], margin: Margin | None, kind: str
) -> list[Line2D]:
    handles = [
        Line2D([], [], linestyle="none", **style, label=f"{si(N)} {kind}parameters")
        for N, style in looks.items()
    ]
    if margin is not None:
        handles.append(margin_handle(margin))
    return handles + gap_handles(gaps)


def _draw_recipe(
    panel: Axes,
    recipe: str,
    markers: Sequence[Marker],
    looks: Mapping[float, dict],
    margin: Margin | None,
    law: GapLaw | None,
) -> None:
    panel.set_title(recipe, loc="left")
    panel.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    ends = [0.0]
    if margin is not None:
        ends += [-margin.percent, margin.percent]
        for end in ends[1:]:
            panel.axhline(end, **MARGIN_LINE, zorder=1)
    for N, style in looks.items():
        of_size = [marker.gap for marker in markers if marker.N == N]
        draw_gaps(panel, of_size, style)
        ends += [end for gap in of_size for end in gap.ends]
    if law is not None:
        _draw_law(panel, law, markers, looks)
    if max(ends) > min(ends):
        panel.set_ylim(ROOM * min(ends), ROOM * max(ends))


def _draw_law(
    panel: Axes, law: GapLaw, markers: Sequence[Marker], looks: Mapping[float, dict]
) -> None:
    """The law over the recipe's ratios: a line a size where the gap changes with size, else one."""
    ratios = [marker.ratio for marker in markers]
    curve = np.geomspace(min(ratios), max(ratios), 60)
    if not law.trend or law.k is None:
        if misfit(law, "constant") is None:
            constant = np.full_like(curve, law.constant)
            panel.plot(curve, in_percent(constant), color=GREY, **LAW_LINE)
        return
    if law.a is None:
        gaps = law.gap_at(law.N0, curve * law.N0)
        panel.plot(curve, in_percent(gaps), color=GREY, **LAW_LINE)
        return
    for N in sorted({marker.N for marker in markers}):
        gaps = law.gap_at(N, curve * N)
        panel.plot(curve, in_percent(gaps), color=looks[N]["color"], **LAW_LINE)


def in_percent(gap: np.ndarray) -> np.ndarray:
    """100 (L_FP8 / L_BF16 - 1), as markers have it, of the law's 100 ln(L_FP8 / L_BF16)."""
    return 100 * np.expm1(gap / 100)


def _ratio_axis(panel: Axes, ratios: Sequence[float], places: Sequence[float]) -> None:
    """Logarithmic, with the ratios themselves as ticks while they are few."""
    panel.set(xscale="log", xlim=(min(places) / 1.3, max(places) * 1.3))
    if len(ratios) > MOST_TICKS:
        counts_axis(panel.xaxis)
        return
    panel.xaxis.set_major_locator(FixedLocator(list(ratios)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:.3g}"))
    panel.xaxis.set_minor_locator(NullLocator())
