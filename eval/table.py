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
    ScoredModel,
    base_of,
    chance_of,
    heading,
    is_accuracy,
    label,
    paired_difference,
    read_models,
    sort_columns,
    sort_models,
)
from eval.tasks import FULL
from lib.command import command, run_command
from lib.plots import write_with
from lib.text import grid, si
from lib.values import FilePath

PUBLISHED = Path(__file__).with_name("published.md")


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[FilePath, ...]  # runs, or folders of runs
    out: FilePath = "out/table"  # folder that gets the files


LEGEND = (
    "± is one standard error over documents; of a difference, over the documents that both models"
    " answered. It holds\nnothing of what another seed would change. FP8 runs are scored with"
    " plain BF16 matmuls unless the row says otherwise.\nRows without tokens: public models, and"
    " runs that have not finished."
)


def build(models: list[ScoredModel]) -> str:
    """The page: a table of whole tasks, one for each limit=, what the marks mean, the published
    numbers."""
    columns = sort_columns(models)
    parts = ["# Scores"]
    for limit in sorted({column.limit for column in columns}, key=lambda limit: limit or 0):
        title = "By this command"
        if limit:
            title = f"limit={limit}: parts of tasks, to be compared with nothing else"
        parts.append(f"## {title}")
        parts.append(grid(table_of(models, [c for c in columns if c.limit == limit])))
    parts.append(LEGEND)
    if {column.task for column in columns} & set(FULL):
        parts.append(PUBLISHED.read_text("utf-8").rstrip())
    return "\n\n".join(parts) + "\n"


def table_of(models: list[ScoredModel], columns: list[Column]) -> list[list[str]]:
    """Cells: a heading, chance, each model, its difference from what it is compared with."""
    models = [model for model in sort_models(models) if model.has_any(columns)]
    headings = ["<br>".join(heading(column, columns)) for column in columns]
    lines = [["model", "parameters", "tokens", "precision", *headings]]
    chances = [chance_of(models, column) for column in columns]
    if any(chance is not None for chance in chances):
        cells = [_value(column, chance) for column, chance in zip(columns, chances, strict=True)]
        lines.append(["*chance*", "", "", "", *cells])
    for model in models:
        lines.append(_model_line(model, columns))
        base = base_of(model, models)
        if base and model.scores.keys() & base.scores.keys() & set(columns):
            cells = [_difference(column, model, base) for column in columns]
            lines.append([f"*minus {label(base)}*", "", "", "", *cells])
    return lines


def _model_line(model: ScoredModel, columns: list[Column]) -> list[str]:
    cells = []
    for column in columns:
        score = model.scores.get(column)
        cells.append("" if score is None else _value(column, score.value, score.se))
    return [
        label(model),
        si(model.params) if model.params else "",
        si(model.tokens) if model.tokens else "",
        model.precision.display_name if model.precision else "",
        *cells,
    ]


def _difference(column: Column, model: ScoredModel, base: ScoredModel) -> str:
    if column not in model.scores or column not in base.scores:
        return ""
    difference, error = paired_difference(column, model.scores[column], base.scores[column])
    return _value(column, difference, error, signed=True)


def _value(
    column: Column, value: float | None, error: float | None = None, signed: bool = False
) -> str:
    """A score or a difference with its standard error, in the column's unit."""
    if value is None:
        return ""
    factor = 100 if is_accuracy(column) else 1
    digits = 1 if is_accuracy(column) else 2
    if column.metric == "bits_per_byte":
        digits = 4
    form = ".3g" if abs(value) * factor >= BEYOND else f".{digits}f"
    sign = "+" if signed else ""
    text = f"{value * factor:{sign}{form}}".replace("-", "−")
    return text if error is None else f"{text} ± {error * factor:{form}}"


@command(__doc__, Options, "paths")
def main(options: Options) -> str:
    """Write the files, return the page."""
    models = read_models(options.paths)
    page = build(models)
    return f"{page}\n{write_with(Path(options.out), 'scores', draw(models), {'table.md': page})}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
