"""Set the scores of several models beside each other, as Markdown and as a figure.

    python -m eval.table out/* [out=DIR]            or python -m eval.harness --table out/*

Writes DIR/table.md, scores.png and scores.svg and prints the table: per task each model's score
with one standard error, an FP8 run below its BF16 partner with their difference over the same
documents, and chance. Public models stand in it where the same command has scored them (hf:NAME);
published numbers follow apart. A score is compared with another only where both answered the same
documents: a column is a task, a metric, a hash of the documents, the number of examples in the
prompt, the task's version and the limit, if any. Scores of a step before the end have their own
row."""

from dataclasses import dataclass
from pathlib import Path

from eval.table_figure import draw
from eval.table_rows import (
    BEYOND,
    Column,
    Row,
    base_of,
    chance,
    heading,
    is_accuracy,
    label,
    paired_difference,
    read_rows,
    sort_columns,
    sort_rows,
)
from eval.tasks import FULL
from lib.command import command, run_command
from lib.plots import name_recipe, write_with
from lib.text import grid, si
from lib.values import FilePath

PUBLISHED = Path(__file__).with_name("published.md")


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[FilePath, ...]  # runs, or folders of runs
    out: FilePath = "out/table"  # folder that gets the files


LEGEND = """± is one standard error over documents; of a difference, over the documents that both models answered. It holds
nothing of what another seed would change. FP8 runs are scored with plain BF16 matmuls unless the row says otherwise.
Rows without tokens: public models, and runs that have not finished."""


def build(rows: list[Row]) -> str:
    """The page: a table of whole tasks, one for each limit=, what the marks mean, the published
    numbers."""
    columns, parts = sort_columns(rows), ["# Scores"]
    for limit in sorted({c.limit for c in columns}, key=lambda limit: limit or 0):
        parts.append(
            f"## limit={limit}: parts of tasks, to be compared with nothing else"
            if limit
            else "## By this command"
        )
        parts.append(grid(table_of(rows, [c for c in columns if c.limit == limit])))
    parts += [
        LEGEND,
        *([PUBLISHED.read_text("utf-8").rstrip()] if {c.task for c in columns} & set(FULL) else []),
    ]
    return "\n\n".join(parts) + "\n"


def table_of(rows: list[Row], columns: list[Column]) -> list[list[str]]:
    """Cells: a heading, chance, each model, its difference from what it is compared with."""
    rows = [row for row in sort_rows(rows) if any(c in row.scores for c in columns)]
    lines = [
        [
            "model",
            "parameters",
            "tokens",
            "precision",
            *("<br>".join(heading(c, columns)) for c in columns),
        ]
    ]
    if any(chance(rows, c) is not None for c in columns):
        lines.append(["*chance*", "", "", "", *(_value(c, chance(rows, c)) for c in columns)])
    for row in rows:
        precision = name_recipe(row.recipe) if row.recipe else ""
        lines.append(
            [
                label(row),
                *(si(n) if n else "" for n in (row.params, row.tokens)),
                precision,
                *(
                    _value(c, row.scores[c].value, row.scores[c].se) if c in row.scores else ""
                    for c in columns
                ),
            ]
        )
        base = base_of(row, rows)
        if base and row.scores.keys() & base.scores.keys() & set(columns):
            lines.append(
                [
                    f"*minus {label(base)}*",
                    "",
                    "",
                    "",
                    *(
                        (
                            _value(
                                c, *paired_difference(c, row.scores[c], base.scores[c]), signed=True
                            )
                            if c in row.scores and c in base.scores
                            else ""
                        )
                        for c in columns
                    ),
                ]
            )
    return lines


def _value(
    column: Column, value: float | None, error: float | None = None, signed: bool = False
) -> str:
    if value is None:
        return ""
    factor, digits = (
        (100, 1) if is_accuracy(column) else (1, 4 if column.metric == "bits_per_byte" else 2)
    )
    form = ".3g" if abs(value) * factor >= BEYOND else f".{digits}f"
    text = f"{value * factor:{'+' if signed else ''}{form}}".replace("-", "−")
    return text + ("" if error is None else f" ± {error * factor:{form}}")


@command(__doc__, Options, "paths")
def main(options: Options) -> str:
    """Write the files, return the page."""
    rows = read_rows(options.paths)
    page = build(rows)
    return f"{page}\n{write_with(Path(options.out), 'scores', draw(rows), {'table.md': page})}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
