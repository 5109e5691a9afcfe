"""Draw the gap of each recipe against tokens per parameter: does what FP8 costs grow with training?

A panel a recipe, a line of markers a size, and the law of the gap or, where no trend is told, the
one gap that is the same everywhere; the second figure of scaling/precision.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lib.plots import GREY, STYLES, settle, sheet, styled
from lib.text import si
from scaling.gap_figure import DrawnGap, draw_gaps, gap_handles
from scaling.gap_words import words_of
from scaling.paired.gap_law import GapLaw
from scaling.precision_figure import MARGIN_LINE, drawn_gaps, gap_title
from scaling.precision_result import PrecisionResult, SizeGap

FEWEST_RATIOS = 3  # of tokens to parameters: two show no form, and the law asks for as many
COLUMNS = 3
PANEL_HEIGHT = 1.75  # inches
SIDE_BY_SIDE = 1.07  # the factor between the places of two sizes at one ratio
ROOM = 1.25  # an axis ends at so many times its farthest value
LAW_LINE: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (1, 1.5)), "zorder": 2}


@styled
def draw_budgets(result: PrecisionResult) -> Figure | None:
    """The figure; None where no size has so many ratios of tokens to parameters that a line could
    be seen."""
    ratios = _ratios(result.sizes)
    if len(ratios) < FEWEST_RATIOS:
        return None
    sizes = sorted({size.N for size in result.sizes})
    gaps = drawn_gaps(result, _places(result.sizes, sizes), "percent")
    looks = _looks(sizes)

    recipes = list(result.common)
    n_rows = -(-len(recipes) // COLUMNS)
    figure, panels = sheet(
        (7.4, 0.9 + PANEL_HEIGHT * n_rows),
        n_rows,
        min(COLUMNS, len(recipes)),
        gap_title(result, words_of(result.table, result.loss)),
        "Each panel has its own scale. Dotted: the law of the gap where a trend is told from zero,"
        " else the gap that is the same everywhere.",
        _handles(looks, gaps, result),
        5,
    )
    rows = list(zip(result.sizes, gaps, strict=True))
    for panel, recipe in zip(panels.flat, recipes, strict=False):
        rows_of_recipe = [(size, gap) for size, gap in rows if size.recipe == recipe]
        _draw_recipe(panel, result, recipe, rows_of_recipe, looks, ratios)
    for panel in panels.flat[len(recipes) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel("gap [%]")
    for panel in panels[-1]:
        panel.set_xlabel("tokens per parameter")
    return settle(figure)


def _ratios(sizes: Sequence[SizeGap]) -> list[float]:
    """Tokens per parameter of the study, ascending, those of rounding apart."""
    return sorted({round(size.tokens / size.N, 1) for size in sizes})


def _places(rows: Sequence[SizeGap], sizes: Sequence[float]) -> list[float]:
    """Where each row stands on the axis of ratios: the smallest size furthest left."""
    middle = (len(sizes) - 1) / 2
    return [row.tokens / row.N * SIDE_BY_SIDE ** (sizes.index(row.N) - middle) for row in rows]


def _looks(sizes: Sequence[float]) -> dict[float, dict]:
    """A style for each size."""
    looks = {}
    for number, N in enumerate(sizes):
        style = STYLES[number % len(STYLES)]
        looks[N] = {"color": style["color"], "marker": style["marker"], "markersize": 4.0}
    return looks


def _handles(
    looks: dict[float, dict], gaps: Sequence[DrawnGap], result: PrecisionResult
) -> list[Line2D]:
    handles = [
        Line2D([], [], linestyle="none", **style, label=f"{si(N)} parameters")
        for N, style in looks.items()
    ]
    if result.margin is not None:
        handles.append(Line2D([], [], **MARGIN_LINE, label=f"margin, ±{result.margin.percent:g} %"))
    return handles + gap_handles(gaps)


def _draw_recipe(
    panel: Axes,
    result: PrecisionResult,
    recipe: str,
    rows: Sequence[tuple[SizeGap, DrawnGap]],
    looks: dict[float, dict],
    ratios: Sequence[float],
) -> None:
    panel.set_title(recipe, loc="left")
    panel.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    ends = [0.0]
    if result.margin is not None:
        ends += [-result.margin.percent, result.margin.percent]
        for end in ends[1:]:
            panel.axhline(end, **MARGIN_LINE, zorder=1)
    for N, style in looks.items():
        of_size = [gap for size, gap in rows if size.N == N]
        draw_gaps(panel, of_size, style)
        ends += [end for gap in of_size for end in gap.ends]
    law = result.gap_laws.get(recipe)
    if law is not None:
        _draw_law(panel, law, sorted({size.N for size, _ in rows}), looks, ratios)
    panel.set(
        xscale="log",
        xlim=(min(ratios) / 1.5, max(ratios) * 1.5),
        ylim=(ROOM * min(ends), ROOM * max(ends)),
    )
    panel.xaxis.set_major_locator(FixedLocator(list(ratios)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    panel.xaxis.set_minor_locator(NullLocator())


def _draw_law(
    panel: Axes,
    law: GapLaw,
    sizes: Sequence[float],
    looks: dict[float, dict],
    ratios: Sequence[float],
) -> None:
    """The law over the ratios: a line a size where the gap changes with size, else one."""
    curve = np.geomspace(min(ratios), max(ratios), 60)
    if not law.trend or law.k is None:
        panel.plot(curve, np.full_like(curve, law.constant), color=GREY, **LAW_LINE)
        return
    if law.a is None:
        panel.plot(curve, law.gap_at(law.N0, curve * law.N0), color=GREY, **LAW_LINE)
        return
    for N in sizes:
        panel.plot(curve, law.gap_at(N, curve * N), color=looks[N]["color"], **LAW_LINE)
