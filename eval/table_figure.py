"""The figure of eval.table: a panel a task."""

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eval.table_rows import (
    BEYOND,
    Row,
    chance,
    heading,
    is_accuracy,
    label,
    sort_columns,
    sort_rows,
)
from lib.plots import RC, settle, sheet

# Okabe-Ito; BF16 is blue in every figure of this project. Shapes tell the same in grey.
OTHER = "public or not finished"
STYLES = {"BF16": ("#0072B2", "o"), "FP8": ("#D55E00", "s"), OTHER: ("#000000", "D")}
CHANCE = {"color": "#666666", "linestyle": (0, (1, 1.5)), "linewidth": 1.1, "label": "chance"}


def draw(rows: list[Row]) -> Figure | None:
    """A panel for each whole task; None where there is none."""
    columns = [c for c in sort_columns(rows) if c.limit is None]
    rows = [row for row in sort_rows(rows) if any(c in row.scores for c in columns)]
    if not columns:
        return None
    n_wide = min(4, len(columns))
    n_deep = -(-len(columns) // n_wide)
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="none", markersize=4.5, label=kind)
        for kind, (color, marker) in STYLES.items()
        if kind in map(_kind, rows)
    ]
    handles += (
        [Line2D([], [], **CHANCE)] if any(chance(rows, c) is not None for c in columns) else []
    )
    with matplotlib.rc_context(RC):
        figure, panels = sheet(
            (7.4, n_deep * (0.29 * len(rows) + 0.62) + 0.75),
            n_deep,
            n_wide,
            "Scores of models",
            "Bars: one standard error over documents, nothing of what another seed would change.",
            handles,
            5,
            sharey=True,
        )
        for column, panel in zip(columns, panels.flat, strict=False):
            factor, level = 100 if is_accuracy(column) else 1, chance(rows, column)
            if level is not None:
                panel.axvline(factor * level, zorder=1, **CHANCE)
            for y, row in enumerate(rows):
                score = row.scores.get(column)
                if score is not None and abs(score.value) < BEYOND:
                    color, marker = STYLES[_kind(row)]
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
            panel.set_title(
                "\n".join(heading(column, columns)), loc="left", fontsize=7.5, parse_math=False
            )
        for panel in panels.flat[len(columns) :]:
            panel.remove()
        panels[0, 0].set_yticks(
            range(len(rows)), [label(row).replace(", ", "\n") for row in rows], parse_math=False
        )
        panels[0, 0].set_ylim(len(rows) - 0.5, -0.5)
        figure.set_dpi(200)  # as render() has it: the width of small text depends on it
        return settle(figure)


def _kind(row: Row) -> str:
    return (
        OTHER
        if row.recipe is None
        else "BF16"
        if (row.recipe, row.fp8) == ("bf16", "off")
        else "FP8"
    )
