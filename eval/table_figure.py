"""The figure of eval.table: a panel a task."""

import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eval.table_rows import (
    BEYOND,
    Column,
    ScoredModel,
    chance_of,
    heading,
    is_accuracy,
    label,
    sort_columns,
    sort_models,
)
from lib.plots import RC, settle, sheet

# Okabe-Ito; BF16 is blue in every figure of this project. Shapes tell the same in grey.
OTHER = "public or not finished"
STYLES = {"BF16": ("#0072B2", "o"), "FP8": ("#D55E00", "s"), OTHER: ("#000000", "D")}
CHANCE: dict[str, Any] = {
    "color": "#666666",
    "linestyle": (0, (1, 1.5)),
    "linewidth": 1.1,
    "label": "chance",
}


def draw(models: list[ScoredModel]) -> Figure | None:
    """A panel for each whole task; None where there is none."""
    columns = [column for column in sort_columns(models) if column.limit is None]
    models = [model for model in sort_models(models) if model.has_any(columns)]
    if not columns:
        return None
    n_wide = min(4, len(columns))
    n_deep = math.ceil(len(columns) / n_wide)
    with matplotlib.rc_context(RC):
        figure, panels = sheet(
            (7.4, n_deep * (0.29 * len(models) + 0.62) + 0.75),
            n_deep,
            n_wide,
            "Scores of models",
            "Bars: one standard error over documents, nothing of what another seed would change.",
            _legend(models, columns),
            5,
            sharey=True,
        )
        for column, panel in zip(columns, panels.flat, strict=False):
            _draw_scores(panel, models, column)
            title = "\n".join(heading(column, columns))
            panel.set_title(title, loc="left", fontsize=7.5, parse_math=False)
        for panel in panels.flat[len(columns) :]:
            panel.remove()
        names = [label(model).replace(", ", "\n") for model in models]
        panels[0, 0].set_yticks(range(len(models)), names, parse_math=False)
        panels[0, 0].set_ylim(len(models) - 0.5, -0.5)
        figure.set_dpi(200)  # as render() has it: the width of small text depends on it
        return settle(figure)


def _legend(models: list[ScoredModel], columns: list[Column]) -> list[Line2D]:
    kinds = {_kind(model) for model in models}
    handles = []
    for kind, (color, marker) in STYLES.items():
        if kind in kinds:
            style: dict[str, Any] = {
                "color": color,
                "marker": marker,
                "linestyle": "none",
                "markersize": 4.5,
            }
            handles.append(Line2D([], [], label=kind, **style))
    if any(chance_of(models, column) is not None for column in columns):
        handles.append(Line2D([], [], **CHANCE))
    return handles


def _draw_scores(panel: Axes, models: list[ScoredModel], column: Column) -> None:
    """A point a model, from top to bottom, and chance."""
    factor = 100 if is_accuracy(column) else 1
    chance = chance_of(models, column)
    if chance is not None:
        panel.axvline(factor * chance, zorder=1, **CHANCE)
    for y, model in enumerate(models):
        score = model.scores.get(column)
        if score is None or not abs(score.value) < BEYOND:
            continue
        color, marker = STYLES[_kind(model)]
        panel.errorbar(
            factor * score.value,
            y,
            xerr=None if score.se is None else factor * score.se,
            color=color,
            marker=marker,
            markersize=4.5,
            capsize=2,
            elinewidth=1.1,
            linestyle="none",
            zorder=3,
        )
    panel.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
    panel.margins(x=0.12)
    panel.tick_params(axis="y", length=0)


def _kind(model: ScoredModel) -> str:
    if model.precision is None:
        return OTHER
    return "BF16" if model.is_trained_in_bf16 and model.fp8 == "off" else "FP8"
