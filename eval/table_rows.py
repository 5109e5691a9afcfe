"""Scored models, read from the files that eval.harness wrote, and how they are set side by side."""

import gzip
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eval.inference import read_json
from eval.scores import RATIOS, hash_of, influence, spread, stands_for
from eval.tasks import DEMO, FULL
from lib.errors import UserError

USUAL = ("bfloat16", "off")  # the dtype and fp8 of a scoring
ORDER = (*DEMO, *FULL)  # of the columns; other tasks follow by name
BEYOND = 1e6  # scores of models that exploded have no place on an axis


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
