"""Set the scores of several models beside each other, as Markdown and as a figure.

    python -m eval.table out/* [out=DIR]            or python -m eval.harness --table out/*

Writes DIR/table.md, scores.png and scores.svg and prints the table: per task each model's score
with one standard error, an FP8 run below its BF16 partner with their difference over the same
documents, and chance. Public models stand in it where the same command has scored them (hf:NAME);
published numbers follow apart. A score is compared with another only where both answered the same
documents: a column is a task, a metric, a hash of the documents, the number of examples in the
prompt, the task's version and the limit, if any. Scores of a step before the end have their own
row."""

import gzip
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eval.harness import RATIOS, hash_of, influence, spread, stands_for
from eval.sample import read_json
from eval.tasks import DEMO, FULL
from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import RC, name_recipe, settle, sheet, write_with
from lib.text import grid, si
from lib.values import FilePath

PUBLISHED = Path(__file__).with_name("published.md")
USUAL = ("bfloat16", "off")  # the dtype and fp8 of a scoring
ORDER = (*DEMO, *FULL)  # of the columns; other tasks follow by name
BEYOND = 1e6  # scores of models that exploded have no place on an axis


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[FilePath, ...]  # runs, or folders of runs
    out: FilePath = "out/table"  # folder that gets the files


class Column(NamedTuple):
    task: str
    metric: str
    docs_sha256: str
    limit: int | None
    shots: int | None
    version: str


class Score(NamedTuple):
    value: float
    se: float | None  # one standard error; None = not known
    chance: float | None
    logs: list[Path]  # one per task, of a group one per sub-task


@dataclass
class Row:
    """One model as it was scored: a run at one step, or a public model, with its dtype and FP8
    recipe of inference."""

    folder: Path
    name: str
    dtype: str
    fp8: str
    step: int | None = None  # of the weights; None = those at the end of the training, or imported
    is_public: bool = False
    recipe: str | None = None  # of training; None = not known
    pair_id: str | None = None
    is_repeat: bool = False  # a null run, rounded otherwise: no partner of an FP8 run
    params: int | None = None
    tokens: int | None = None
    scores: dict[Column, Score] = field(default_factory=dict)


def read_rows(paths) -> list[Row]:
    """Rows of all scored models in `paths` (runs, or folders of runs, two levels deep). Raises
    UserError: a damaged file, nothing scored."""
    folders = {
        Path(folder).resolve(): Path(folder)
        for path in paths
        for folder in (path, *sorted(Path(path).glob("*")), *sorted(Path(path).glob("*/*")))
    }
    rows = [row for folder in folders.values() for row in _read_run(folder)]
    if not rows:
        raise UserError(
            f"no scores in {', '.join(map(str, paths))}: give runs that eval.harness has scored"
        )
    names = Counter(name for name, _ in {(row.name, row.folder) for row in rows})
    for row in rows:
        row.name = row.name if names[row.name] == 1 else str(row.folder)
    return rows


def _read_run(folder: Path) -> list[Row]:
    rows: dict[tuple, Row] = {}
    records, summary = {}, read_json(folder / "summary.json")
    last, paths = summary.get("steps"), sorted((folder / "eval").glob("*.json"))
    try:
        for path in (path for path in paths if path.name != "precision.json"):
            records[path] = json.loads(path.read_bytes())
        for path, record in sorted(records.items(), key=lambda pair: pair[1].get("time", "")):  # noqa: B007  the newest counts
            run, dtype, fp8, limit, tasks = (
                record[key] for key in ("run", "dtype", "fp8", "limit", "tasks")
            )
            # 0: imported weights
            step = None if record.get("step") in (last, 0) else record.get("step")
            name = (
                run.rstrip("/").rpartition("/")[2].removeprefix("hf:")
                if run.startswith("hf:")
                else folder.absolute().name
            )
            row = rows.setdefault(
                (dtype, fp8, step), Row(folder, name, dtype, fp8, step, run.startswith("hf:"))
            )
            leaves = {task: set(stands_for(scores)) for task, scores in tasks.items()}
            inner = set().union(*leaves.values()) | {  # and mmlu_stem, a group within mmlu
                task
                for task, mine in leaves.items()
                if mine and any(mine < others for others in leaves.values())
            }
            for task in tasks.keys() - inner:
                row.scores |= _scores(folder / "eval", task, tasks, limit)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}): score the run again, or"
            " remove it"
        ) from error
    for row in rows.values():
        # tensorwise>bf16: of a branch in another precision than its trunk
        precision = summary.get("precision", {})
        row.recipe = ">".join(filter(None, map(precision.get, ("switched_from", "recipe")))) or None
        row.pair_id, row.is_repeat = summary.get("pair_id"), bool(summary.get("repeat"))
        row.params, row.tokens = summary.get("params_total"), summary.get("tokens")
        if row.step is not None and row.tokens is not None:
            row.tokens = row.tokens * row.step // last if last else None
    return list(rows.values())


def _scores(folder: Path, task: str, tasks: dict, limit: int | None) -> dict[Column, Score]:
    """At most one accuracy, normalised by length where the task does that, and one likelihood."""
    scores, kinds = (
        tasks[task],
        (
            ("acc_norm", "acc", "exact_match"),
            ("word_perplexity", "perplexity", "bits_per_byte"),
        ),
    )
    shown = [next((m for m in kind if m in scores), None) for kind in kinds]
    logs = [tasks[leaf].get("samples") for leaf in scores.get("subtasks") or [task]]
    found = {}
    for metric in [m for m in shown if m] or [m for m in scores if f"{m}_se" in scores][:1]:
        column = Column(
            task,
            metric,
            scores["docs_sha256"],
            limit,
            scores.get("num_fewshot"),
            str(scores.get("version") or ""),
        )
        found[column] = Score(
            float(scores[metric]),
            scores.get(f"{metric}_se"),
            scores.get("chance") if metric.startswith("acc") else None,
            [folder / log for log in logs] if all(logs) else [],
        )
    return found


def read_samples(column: Column, score: Score) -> list[dict]:
    """The logged samples behind a score, in the order of the documents; [] where they are not there
    or are others'."""
    found, hashes = [], []
    for path in score.logs:
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                samples = [s for s in map(json.loads, file) if s.get("filter", "none") == "none"]
            hashes.append(hash_of(s["doc_hash"] for s in samples))
        except (OSError, EOFError, ValueError, KeyError):
            return []
        found += samples
    return found if column.docs_sha256 in (hash_of(hashes), *hashes[:1]) else []


def paired_difference(column: Column, mine: Score, base: Score) -> tuple[float, float | None]:
    """(mine - base, its standard error over the documents that both answered); None where the logs
    do not tell."""
    parts = []
    for score in (mine, base):
        samples = read_samples(column, score)
        value, influences = influence(column.metric, [s.get(column.metric) for s in samples])
        if value is None or not math.isclose(value, score.value, rel_tol=1e-5, abs_tol=1e-9):
            return mine.value - base.value, None
        parts.append(influences)
    return mine.value - base.value, spread(parts[0] - parts[1])


def chance(rows: list[Row], column: Column) -> float | None:
    """Accuracy of guessing, where it is known."""
    scores = [row.scores[column] for row in rows if column in row.scores]
    return next((score.chance for score in scores if score.chance is not None), None)


def is_accuracy(column: Column) -> bool:
    return column.metric.startswith(("acc", "exact_match"))


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


def sort_columns(rows: list[Row]) -> list[Column]:
    return sorted(
        {column for row in rows for column in row.scores},
        key=lambda c: (
            ORDER.index(c.task) if c.task in ORDER else len(ORDER),
            c.task,
            not is_accuracy(c),
            c.metric,
            c.shots or 0,
            c.docs_sha256,
            c.version,
        ),
    )


def sort_rows(rows: list[Row]) -> list[Row]:
    """Ours by size, each pair with BF16 first and other ways of inference after the usual one; then
    public models."""
    return sorted(
        rows,
        key=lambda r: (
            r.is_public,
            r.params or 0,
            r.tokens or 0,
            r.pair_id or r.name,
            r.recipe != "bf16",
            r.name,
            r.step or math.inf,
            (r.dtype, r.fp8) != USUAL,
            r.dtype,
            r.fp8,
        ),
    )


def base_of(row: Row, rows: list[Row]) -> Row | None:
    """What a row is compared with: FP8 inference with the same weights in BF16, an FP8 run with its
    BF16 partner."""
    rows = [r for r in rows if (r.step, r.dtype, r.fp8) == (row.step, row.dtype, "off")]
    if row.fp8 != "off":
        return next((r for r in rows if r.folder == row.folder), None)
    if row.pair_id is None or row.recipe in (None, "bf16"):
        return None
    return next(
        (r for r in rows if (r.pair_id, r.recipe, r.is_repeat) == (row.pair_id, "bf16", False)),
        None,
    )


def label(row: Row) -> str:
    """Name, then what is unusual about its weights and its inference."""
    return (
        row.name
        + f", step {row.step}" * (row.step is not None)
        + f", FP8 inference ({row.fp8})" * (row.fp8 != "off")
        + f", {row.dtype}" * (row.dtype != USUAL[0])
    )


def heading(column: Column, columns: list[Column]) -> list[str]:
    """Task; metric and unit; whatever else tells it from another column of the same task and
    metric."""
    twins = [c for c in columns if (c.task, c.metric) == (column.task, column.metric)]
    unit = " [%]" if is_accuracy(column) else " ↓" if column.metric in RATIOS else ""
    marks = {
        f"documents {column.docs_sha256[:6]}": {c.docs_sha256 for c in twins},
        f"version {column.version}": {c.version for c in twins},
    }
    return [
        column.task,
        column.metric + unit,
        *[f"{column.shots}-shot"] * bool(column.shots),
        *(mark for mark, found in marks.items() if len(found) > 1),
    ]


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


@command(__doc__, Options, "paths")
def main(options: Options) -> str:
    """Write the files, return the page."""
    rows = read_rows(options.paths)
    page = build(rows)
    return f"{page}\n{write_with(Path(options.out), 'scores', draw(rows), {'table.md': page})}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
