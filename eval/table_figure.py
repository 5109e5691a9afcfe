"""Draw the scores of several models as dots, a panel for each task."""

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.scores import Column, Row
from eval.table import heading, is_accuracy, label, levels, sort_columns, sort_rows
from scaling.figures import RC, page

COLUMNS = 4                 # panels side by side
# Okabe-Ito; BF16 is blue in every figure of this project. Shapes tell the same in grey.
STYLES = {"bf16": ("#0072B2", "o", "BF16"), "fp8": ("#D55E00", "s", "FP8"), "other": ("#000000", "D", "public or not finished")}
CHANCE = {"color": "#666666", "linestyle": (0, (1, 1.5)), "linewidth": 1.1}
MAJORITY = {"color": "#009E73", "linestyle": (0, (5, 2)), "linewidth": 1.1}


def draw(rows: list[Row]) -> Figure | None:
    """The figure of all whole tasks, of the limited ones where there are no others; None where nothing can be drawn."""
    columns = sort_columns({c for row in rows for c in row.scores})
    limit = next((c.limit for c in columns if c.limit is None), columns[0].limit if columns else None)
    columns = [c for c in columns if c.limit == limit and any(c in r.scores and abs(r.scores[c].value) < 1e6 for r in rows)]
    rows = [row for row in sort_rows(rows) if any(c in row.scores for c in columns)]
    if not columns:
        return None
    wide = min(COLUMNS, len(columns))
    deep = -(-len(columns) // wide)
    names = [f"{row.name[:14]}…{row.name[-15:]}" * (len(row.name) > 30) or row.name for row in rows]
    names = [name + label(row).removeprefix(row.name).replace(", ", "\n") for name, row in zip(names, rows, strict=True)]
    title = f"Scores of {len(rows)} model{'s' * (len(rows) > 1)}" + (f", limit={limit}: parts of the tasks" if limit else "")
    caption = "Bars: one standard error over documents, nothing of what another seed would change. " + (
        "Dotted: chance. " if any(levels(rows, c)[0] is not None for c in columns) else "") + (
        "Dashed: the share of the most frequent answer, where every question has the same answers."
        if any(levels(rows, c)[1] is not None for c in columns) else "")
    with matplotlib.rc_context(RC):
        inches = (0.29 if any("\n" in name for name in names) else 0.2) * len(rows)
        longest = max(len(line) for name in names for line in name.split("\n"))
        figure, panels = page(deep * (inches + 0.62) + 0.75, deep, wide, title, caption, top=0.72, wspace=0.16,
                              hspace=0.71 / inches, sharey=True)
        figure.subplots_adjust(left=0.03 + 0.0085 * longest)
        for column, panel in zip(columns, panels.flat, strict=False):
            _fill(panel, rows, column, columns)
        for panel in panels.flat[len(columns):]:
            panel.remove()
        for panel in panels[:, 0]:
            panel.set_yticks(range(len(rows)), names, parse_math=False)
        panels[0, 0].set_ylim(len(rows) - 0.5, -0.5)
        kinds = [kind for kind in STYLES if kind in {_kind(row) for row in rows}]
        handles = [matplotlib.lines.Line2D([], [], color=STYLES[k][0], marker=STYLES[k][1], linestyle="none", markersize=4.5,
                                           label=STYLES[k][2]) for k in kinds]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.065, 1 - 0.22 / figure.get_figheight()),
                      ncols=len(handles), frameon=False, borderpad=0, borderaxespad=0, columnspacing=1.5)
        FigureCanvasAgg(figure).draw()          # ticks take these settings now, not savefig's
    return figure


def _kind(row: Row) -> str:
    return "other" if row.recipe is None else "bf16" if (row.recipe, row.fp8) == ("bf16", "off") else "fp8"


def _fill(panel, rows: list[Row], column: Column, columns: list[Column]) -> None:
    factor = 100 if is_accuracy(column) else 1
    chance, majority = levels(rows, column)
    for level, style in ((chance, CHANCE), (majority, MAJORITY)):
        if level is not None and is_accuracy(column):
            panel.axvline(factor * level, zorder=1, **style)
    for y, row in enumerate(rows):
        score = row.scores.get(column)
        if score is not None and abs(score.value) < 1e6:
            color, marker, _ = STYLES[_kind(row)]
            panel.errorbar(factor * score.value, y, xerr=None if score.se is None else factor * score.se, color=color,
                           marker=marker, markersize=4.5, capsize=2, elinewidth=1.1, linestyle="none", zorder=3)
    panel.set_title("\n".join(heading(column, columns)), loc="left", fontsize=7.5, parse_math=False)
    panel.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
    panel.margins(x=0.12)
    panel.tick_params(axis="y", length=0)
    panel.grid(True, axis="x", color="#EEEEEE", linewidth=0.5)
    panel.set_axisbelow(True)
