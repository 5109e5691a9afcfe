"""Scored models, read from the files that eval.harness wrote, and how they are set side by side."""

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eval.inference import read_json_or_empty
from eval.results import ScoreRecord, TaskScores, hash_of, read_scores
from eval.scores import RATIOS, influence, spread
from eval.tasks import DEMO, FULL
from fp8.trained_precision import TrainedPrecision, read_precision
from lib.errors import UserError
from runtime.metrics_file import ACCURACIES

USUAL_DTYPE, USUAL_FP8 = "bfloat16", "off"  # of a scoring
ORDER = (*DEMO, *FULL)  # of the columns; other tasks follow by name
BEYOND = 1e6  # scores of models that exploded have no place on an axis
# Of each of these kinds a task's first metric that is there has a column.
LIKELIHOODS = ("word_perplexity", "perplexity", "bits_per_byte")


class Column(NamedTuple):
    """What two models must share for their scores to be compared."""

    task: str
    metric: str
    docs_sha256: str | None
    limit: int | None
    shots: int | None
    version: str


class Score(NamedTuple):
    """A cell of a column."""

    value: float
    se: float | None  # one standard error; None = not known
    chance: float | None
    logs: list[Path]  # one per task, of a group one per sub-task


@dataclass
class ScoredModel:
    """One model as it was scored: a run at one step, or a public model, with its dtype and FP8
    recipe of inference."""

    folder: Path
    name: str
    dtype: str
    fp8: str
    step: int | None = None  # of the weights; None = those at the end of the training, or imported
    is_public: bool = False
    precision: TrainedPrecision | None = None  # None = not known
    pair_id: str | None = None
    is_repeat: bool = False  # a null run, rounded otherwise: no partner of an FP8 run
    params: int | None = None
    tokens: int | None = None
    scores: dict[Column, Score] = field(default_factory=dict)

    @property
    def is_trained_in_bf16(self) -> bool:
        """False where it is not known."""
        return self.precision is not None and self.precision.is_bf16

    @property
    def is_usual(self) -> bool:
        return (self.dtype, self.fp8) == (USUAL_DTYPE, USUAL_FP8)

    def has_any(self, columns: Iterable[Column]) -> bool:
        return any(column in self.scores for column in columns)


# ----------------------------------------------------------------------------------------- reading


def read_models(paths: Iterable[str | Path]) -> list[ScoredModel]:
    """All scored models in `paths` (runs, or folders of runs, two levels deep). Raises UserError: a
    damaged file, nothing scored."""
    paths = list(paths)
    models = [model for folder in _folders(paths) for model in _read_run(folder)]
    if not models:
        raise UserError(
            f"no scores in {', '.join(map(str, paths))}: give runs that eval.harness has scored"
        )
    folders_of_name = Counter(name for name, _ in {(m.name, m.folder) for m in models})
    for model in models:
        if folders_of_name[model.name] > 1:
            model.name = str(model.folder)
    return models


def _folders(paths: Iterable[str | Path]) -> list[Path]:
    """Each path with the folders below it, two levels deep, each folder once."""
    folders = {}
    for path in map(Path, paths):
        for folder in (path, *sorted(path.glob("*")), *sorted(path.glob("*/*"))):
            folders[folder.resolve()] = folder
    return list(folders.values())


def _read_run(folder: Path) -> list[ScoredModel]:
    """The model of a folder at each step, dtype and recipe at which it was scored; of two scorings
    the newest counts."""
    paths = [path for path in (folder / "eval").glob("*.json") if path.name != "precision.json"]
    records = [read_scores(path) for path in sorted(paths)]
    summary = read_json_or_empty(folder / "summary.json")
    models: dict[tuple, ScoredModel] = {}
    for record in sorted(records, key=lambda record: record.time):
        step = record.step
        if step in (summary.get("steps"), 0):  # 0: imported weights
            step = None
        key = (record.dtype, record.fp8, step)
        if key not in models:
            models[key] = _model(folder, record, step, summary)
        models[key].scores |= _scores(folder / "eval", record)
    return list(models.values())


def _model(
    folder: Path, record: ScoreRecord, step: int | None, summary: dict[str, Any]
) -> ScoredModel:
    """Without scores. step: None for the end of the training."""
    is_public = record.run.startswith("hf:")
    name = folder.absolute().name
    if is_public:
        name = record.run.rstrip("/").rpartition("/")[2].removeprefix("hf:")
    return ScoredModel(
        folder,
        name,
        record.dtype,
        record.fp8,
        step,
        is_public,
        precision=_precision(folder, summary),
        pair_id=summary.get("pair_id"),
        is_repeat=bool(summary.get("repeat")),
        params=summary.get("params_total"),
        tokens=_tokens(summary, step),
    )


def _precision(folder: Path, summary: dict[str, Any]) -> TrainedPrecision | None:
    """None where there is no summary of a run. Raises UserError where it is damaged."""
    if not summary.get("precision"):
        return None
    try:
        return read_precision(summary)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder / 'summary.json'}: precision is damaged or of another version"
            f" ({type(error).__name__}: {error}): restore the file"
        ) from None


def _tokens(summary: dict[str, Any], step: int | None) -> int | None:
    """Tokens of the training up to `step`."""
    tokens, steps = summary.get("tokens"), summary.get("steps")
    if step is None or tokens is None:
        return tokens
    return tokens * step // steps if steps else None


def _scores(folder: Path, record: ScoreRecord) -> dict[Column, Score]:
    """Of the tasks that no group's row tells of. Raises UserError where one has no hash."""
    inner = _inner_tasks(record.tasks)
    scores: dict[Column, Score] = {}
    for task, task_scores in record.tasks.items():
        if task not in inner:
            logs = _logs(folder, task, record.tasks)
            scores |= _scores_of_task(task, task_scores, record.limit, logs)
    return scores


def _inner_tasks(tasks: dict[str, TaskScores]) -> set[str]:
    """Those within a group that has a row: its leaves, and groups within it, as mmlu_stem is within
    mmlu."""
    leaves_of = {task: set(scores.covers) for task, scores in tasks.items()}
    inner: set[str] = set().union(*leaves_of.values())
    for task, leaves in leaves_of.items():
        if leaves and any(leaves < larger for larger in leaves_of.values()):
            inner.add(task)
    return inner


def _logs(folder: Path, task: str, tasks: dict[str, TaskScores]) -> list[Path]:
    """The logs of the task, or of a group's leaves; none where one is not there."""
    names = [tasks[leaf].samples for leaf in tasks[task].subtasks or [task]]
    paths = [folder / name for name in names if name]
    return paths if len(paths) == len(names) else []


def _scores_of_task(
    task: str, scores: TaskScores, limit: int | None, logs: list[Path]
) -> dict[Column, Score]:
    """At most one accuracy and one likelihood, or else the first metric."""
    by_kind = [_first(kind, scores.metrics) for kind in (ACCURACIES, LIKELIHOODS)]
    names = [name for name in by_kind if name] or list(scores.metrics)[:1]
    columns = {}
    for name in names:
        column = Column(
            task, name, scores.docs_sha256, limit, scores.num_fewshot, str(scores.version or "")
        )
        metric = scores.metrics[name]
        chance = scores.chance if name.startswith("acc") else None
        columns[column] = Score(metric.value, metric.se, chance, logs)
    return columns


def _first(names: Iterable[str], choices: Iterable[str]) -> str | None:
    for name in names:
        if name in choices:
            return name
    return None


# --------------------------------------------------------------------------------- by document


def read_samples(column: Column, score: Score) -> list[dict]:
    """The logged samples behind a score, in the order of the documents; [] where they are not there
    or are others'."""
    samples: list[dict] = []
    hashes = []
    for path in score.logs:
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                rows = [row for row in map(json.loads, file) if row.get("filter", "none") == "none"]
            hashes.append(hash_of(row["doc_hash"] for row in rows))
        except (OSError, EOFError, ValueError, KeyError):
            return []
        samples += rows
    is_of_column = column.docs_sha256 in (hash_of(hashes), *hashes[:1])
    return samples if is_of_column else []


def paired_difference(column: Column, score: Score, base: Score) -> tuple[float, float | None]:
    """(score - base, its standard error over the documents that both answered); None where the logs
    do not tell."""
    difference = score.value - base.value
    influences = []
    for part in (score, base):
        values = [sample.get(column.metric) for sample in read_samples(column, part)]
        value, influences_of_part = influence(column.metric, values)
        if value is None or not math.isclose(value, part.value, rel_tol=1e-5, abs_tol=1e-9):
            return difference, None
        influences.append(influences_of_part)
    return difference, spread(influences[0] - influences[1])


# ------------------------------------------------------------------------------- columns and order


def chance_of(models: Sequence[ScoredModel], column: Column) -> float | None:
    """Accuracy of guessing, where it is known."""
    for model in models:
        score = model.scores.get(column)
        if score is not None and score.chance is not None:
            return score.chance
    return None


def is_accuracy(column: Column) -> bool:
    return column.metric.startswith(("acc", "exact_match"))


def sort_columns(models: Iterable[ScoredModel]) -> list[Column]:
    """Every column of the models: tasks in ORDER, of a task accuracies first."""

    def key(column: Column) -> tuple:
        place = ORDER.index(column.task) if column.task in ORDER else len(ORDER)
        return (
            place,
            column.task,
            not is_accuracy(column),
            column.metric,
            column.shots or 0,
            column.docs_sha256,
            column.version,
        )

    return sorted({column for model in models for column in model.scores}, key=key)


def sort_models(models: Iterable[ScoredModel]) -> list[ScoredModel]:
    """Ours by size, each pair with BF16 first and other ways of inference after the usual one; then
    public models."""

    def key(model: ScoredModel) -> tuple:
        return (
            model.is_public,
            model.params or 0,
            model.tokens or 0,
            model.pair_id or model.name,
            not model.is_trained_in_bf16,
            model.name,
            model.step or math.inf,
            not model.is_usual,
            model.dtype,
            model.fp8,
        )

    return sorted(models, key=key)


def base_of(model: ScoredModel, models: Iterable[ScoredModel]) -> ScoredModel | None:
    """What a model is compared with: FP8 inference with the same weights in BF16, an FP8 run with
    its BF16 partner."""
    for candidate in models:
        if (candidate.step, candidate.dtype, candidate.fp8) != (model.step, model.dtype, "off"):
            continue
        if model.fp8 != "off":
            if candidate.folder == model.folder:
                return candidate
        elif _is_partner(candidate, model):
            return candidate
    return None


def _is_partner(candidate: ScoredModel, model: ScoredModel) -> bool:
    """Whether `candidate` is the BF16 run of the pair that the FP8 run `model` belongs to."""
    if model.pair_id is None or model.precision is None or model.is_trained_in_bf16:
        return False
    return (
        candidate.pair_id == model.pair_id
        and candidate.is_trained_in_bf16
        and not candidate.is_repeat
    )


def label(model: ScoredModel) -> str:
    """Name, then what is unusual about its weights and its inference."""
    parts = [model.name]
    if model.step is not None:
        parts.append(f"step {model.step}")
    if model.fp8 != "off":
        parts.append(f"FP8 inference ({model.fp8})")
    if model.dtype != USUAL_DTYPE:
        parts.append(model.dtype)
    return ", ".join(parts)


def heading(column: Column, columns: Iterable[Column]) -> list[str]:
    """Task; metric and unit; whatever else tells it from another column of the same task and
    metric."""
    lines = [column.task, column.metric + _unit(column)]
    if column.shots:
        lines.append(f"{column.shots}-shot")
    alike = [c for c in columns if (c.task, c.metric) == (column.task, column.metric)]
    if len({c.docs_sha256 for c in alike}) > 1:
        lines.append(f"documents {(column.docs_sha256 or '')[:6]}")
    if len({c.version for c in alike}) > 1:
        lines.append(f"version {column.version}")
    return lines


def _unit(column: Column) -> str:
    if is_accuracy(column):
        return " [%]"
    return " ↓" if column.metric in RATIOS else ""
