"""Set the scores of several models beside each other, as Markdown and as a figure.

    python -m eval.harness --table out/* [out=DIR]

Paths are runs, or folders of runs. Writes DIR/table.md, scores.png and scores.svg (DIR is out/table) and prints the table:
per task each model's score with one standard error, an FP8 run below its BF16 partner with their difference over the same
documents, chance, and the share of the most frequent answer where every question has the same answers (letters, yes and
no). Public models stand in it where the same command has scored them (hf:NAME); published numbers follow apart. Scores
with limit=, or on other documents, never share a column; those of a step before the end stand in a row of their own.
"""

import math
import os
import sys
from pathlib import Path

from eval.published import published
from eval.scores import RATIOS, SETTINGS, Column, Row, majority, paired_difference, read_rows, read_samples
from runtime.cli import UserError

# The order of the columns: what a small model learns first stands first; other tasks follow by name.
ORDER = ("val_ppl", "val_cloze", "wikitext", "lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa",
         "sciq", "boolq", "winogrande", "commonsense_qa", "mmlu")


def build(rows: list[Row], notes: list[str]) -> str:
    """The page: a table of whole tasks, one for each limit=, the published numbers, what the marks mean."""
    from runtime.cli import grid

    columns = sort_columns({column for row in rows for column in row.scores})
    parts = ["# Scores"]
    for limit in sorted({c.limit for c in columns}, key=lambda limit: limit or 0):
        shown = [c for c in columns if c.limit == limit]
        title = f"## limit={limit}: parts of tasks, to be compared with nothing else" if limit else "## By this command"
        parts += [title, grid(_table(rows, shown))]
    parts += [_legend(rows)]
    if notes:
        parts += ["\n".join(f"- {note}" for note in notes)]
    asked = {c.task for c in columns}
    if asked & set(ORDER[2:]):
        parts += ["## Published by others", "Other harnesses, prompts and shots: for orientation, not for differences of a "
                  "point. Each as its source has it.", grid(_published(asked))]
    return "\n\n".join(parts) + "\n"


def sort_columns(columns) -> list[Column]:
    return sorted(columns, key=lambda c: (ORDER.index(c.task) if c.task in ORDER else len(ORDER), c.task, not is_accuracy(c),
                                          c.metric, c.limit or 0, c.shots or 0, c.docs_sha256, c.version))


def sort_rows(rows: list[Row]) -> list[Row]:
    """Ours by size, each pair with BF16 first and other ways of inference after the usual one; then public models."""
    return sorted(rows, key=lambda r: (r.is_public, r.params or 0, r.tokens or 0, r.pair_id or r.name, r.recipe != "bf16",
                                       r.name, r.step or math.inf, (r.dtype, r.fp8) != SETTINGS, r.dtype, r.fp8))


def base_of(row: Row, rows: list[Row]) -> Row | None:
    """What a row is compared with: FP8 inference with the same weights in BF16, an FP8 run with its BF16 partner."""
    rows = [r for r in rows if r.step == row.step]
    if row.fp8 != "off":
        return next((r for r in rows if (r.folder, r.dtype, r.fp8) == (row.folder, row.dtype, "off")), None)
    if row.pair_id is None or row.recipe in (None, "bf16"):
        return None
    return next((r for r in rows if (r.pair_id, r.recipe, r.dtype, r.fp8) == (row.pair_id, "bf16", row.dtype, "off")), None)


def levels(rows: list[Row], column: Column) -> tuple[float | None, float | None]:
    """Chance and majority level of a column, in the score's own unit."""
    scores = [row.scores[column] for row in rows if column in row.scores]
    chance = next((score.chance for score in scores if score.chance is not None), None)
    if not is_accuracy(column):
        return chance, None
    samples = next((found for score in scores if (found := read_samples(column, score))), [])
    return chance, majority(samples) if samples else None


def is_accuracy(column: Column) -> bool:
    return column.metric.startswith(("acc", "exact_match"))


def label(row: Row) -> str:
    """Name, then what is unusual about its weights and its inference."""
    return (row.name + f", step {row.step}" * (row.step is not None) + f", FP8 inference ({row.fp8})" * (row.fp8 != "off") +
            f", {row.dtype}" * (row.dtype != SETTINGS[0]))


def heading(column: Column, columns: list[Column]) -> list[str]:
    """Task; metric and unit; whatever else tells it from another column of the same task and metric."""
    twins = [c for c in columns if (c.task, c.metric) == (column.task, column.metric)]
    unit = " [%]" if is_accuracy(column) else " ↓" if column.metric in RATIOS else ""
    lines = [column.task, column.metric + unit]
    if column.shots:
        lines.append(f"{column.shots}-shot")
    if len({c.docs_sha256 for c in twins}) > 1:
        lines.append(f"documents {column.docs_sha256[:6]}")
    if len({c.version for c in twins}) > 1:
        lines.append(f"version {column.version}")
    return lines


# ----------------------------------------------------------------------------------------------------------------- tables

def _table(rows: list[Row], columns: list[Column]) -> list[list[str]]:
    rows = [row for row in sort_rows(rows) if any(c in row.scores for c in columns)]
    lines = [["model", "parameters", "tokens", "precision", *("<br>".join(map(_cell, heading(c, columns))) for c in columns)]]
    marks = [levels(rows, c) for c in columns]
    for name, i in (("chance", 0), ("most frequent answer", 1)):
        if any(mark[i] is not None for mark in marks):
            lines.append([f"*{name}*", "", "", "", *(_value(c, mark[i]) for c, mark in zip(columns, marks, strict=True))])
    for row in rows:
        precision = {None: "", "bf16": "BF16"}.get(row.recipe, f"FP8 {row.recipe}")
        lines.append([_cell(label(row)), _count(row.params), _count(row.tokens), _cell(precision),
                      *(_value(c, row.scores[c].value, row.scores[c].se) if c in row.scores else "" for c in columns)])
        base = base_of(row, rows)
        common = [c for c in columns if base and c in row.scores and c in base.scores]
        if common:
            found = {c: paired_difference(c, row.scores[c], base.scores[c]) for c in common}
            lines.append([f"*minus {_cell(label(base))}*", "", "", "",
                          *(_value(c, *found[c], signed=True) if c in found else "" for c in columns)])
    return lines


def _legend(rows: list[Row]) -> str:
    parts = ["± is one standard error over documents; of a difference, over the documents that both models answered."]
    if any(row.recipe not in (None, "bf16") for row in rows):
        parts.append("It holds nothing of what another seed would change. FP8 runs are scored with plain BF16 matmuls unless the "
                     "row says otherwise.")
    parts.append("Chance: guessing among the answers. Most frequent answer: always giving it, where every question has the same "
                 "answers.")
    if any(row.step is not None for row in rows):
        parts.append("Step: the weights of that step, not those at the end of the training.")
    if any(row.is_public for row in rows):
        parts.append("Rows without tokens: public models, scored by this command from their published weights.")
    return " ".join(parts)


def _published(tasks: set[str]) -> list[list[str]]:
    rows = published()
    names = sorted({name for row in rows for name in row.scores if name.split()[0] in tasks},
                   key=lambda name: (ORDER.index(name.split()[0]), name))
    lines = [["model", *names, "metric", "shots", "harness", "source"]]
    for row in rows:
        if any(name in row.scores for name in names):
            lines.append([row.model, *(f"{row.scores[name]:g}" if name in row.scores else "" for name in names), row.metric,
                          str(row.shots), row.harness, row.source])
    return lines


def _value(column: Column, value: float | None, error: float | None = None, signed: bool = False) -> str:
    if value is None:
        return ""
    factor, digits = (100, 1) if is_accuracy(column) else (1, 4 if column.metric == "bits_per_byte" else 2)
    form = ".3g" if abs(value) * factor >= 1e6 else f".{digits}f"
    text = f"{value * factor:{'+' if signed else ''}{form}}".replace("-", "−")
    return text + ("" if error is None else f" ± {error * factor:{form}}")


def _count(number: int | None) -> str:
    from scaling.pairs import human
    return "" if number is None or not 0 < number < 2**63 else human(number)


def _cell(text: str) -> str:
    """Text that cannot break out of its cell."""
    return "".join(c if c.isprintable() else " " for c in text).replace("|", "\\|").replace("<", "&lt;")


# ------------------------------------------------------------------------------------------------------------ entry point

def write(paths, out: str) -> str:
    """Write the files, return the page. Raises UserError as read_rows() does, OSError where the folder cannot be written."""
    from eval.table_figure import draw
    from runtime.rows import write_atomically as replace_file
    from scaling.figures import render

    rows, notes = read_rows(paths)
    page, figure = build(rows, notes), draw(rows)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "table.md", page.encode())
    for form in ("png", "svg"):
        if figure:
            replace_file(folder / f"scores.{form}", render(figure, form))
    return f"{page}\nwrote {out}/: table.md{', scores.png, scores.svg' if figure else ''}"


def main(paths, out: str = "out/table") -> int:
    """Write and print the table of the runs in `paths`; 0, 2 with a sentence for a mistake, 1 where `out` cannot be written."""
    try:
        page = write(paths, out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"the table could not be written: {error}", file=sys.stderr)
        return 1
    try:
        print(page, flush=True)
    except BrokenPipeError:     # whoever read has read enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # Python flushes once more at its end
        return 1
    return 0
