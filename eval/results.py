"""What eval.harness and eval.precision leave in a run's eval/: types, one writer and one reader.

docs/schemas.md is made of the comments here."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.files import to_line, write_atomically, write_json
from lib.schema import schema_table

SCHEMA_VERSION = 1  # of both files; files without one are older and have the same keys


@dataclass(frozen=True)
class Metric:
    """A number that a task has."""

    value: float
    se: float | None  # one standard error over documents; None = not known


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The scores of a task, or of a group over its tasks' documents. In the file each metric is two
    keys, its name and its name with _se behind it."""

    metrics: dict[str, Metric] = field(default_factory=dict)  # by lm-eval's name of each
    version: str | float | None = None  # lm-eval's, of the task
    not_scored: list[str] = field(default_factory=list)  # metrics asked for that have no number
    n: int | None = None  # documents
    # examples in the prompt; null where the tasks of a group have several numbers
    num_fewshot: int | None = None
    # accuracy of guessing, where one of several answers is right
    chance: float | None = None
    docs_sha256: str | None = (
        None  # hash of the documents' hashes, in order; of a group, its tasks'
    )
    subtasks: list[str] = field(default_factory=list)  # of a group, the tasks at its leaves
    # in the row of core22: CORE's tasks that have no number here
    missing: list[str] = field(default_factory=list)
    samples: str | None = None  # file of lm-eval's log of each document, beside this one

    @property
    def covers(self) -> list[str]:
        """The tasks that a group's row tells of; none where the group, as openllm, has no score of
        its own."""
        return self.subtasks if self.metrics else []


@dataclass(frozen=True, kw_only=True)
class ScoreRecord:
    """What eval/TASKS.json holds."""

    schema_version: int = SCHEMA_VERSION  # of this list of keys
    run: str  # folder of the run, or hf:NAME of a public model
    step: int | None = None  # of the checkpoint; null for a public model
    average: int = 1  # checkpoints whose weights were averaged, that one the last of them
    time: str = ""  # when it was scored, UTC, ISO 8601
    tasks: dict[str, TaskScores]  # task or group -> its scores
    limit: int | None  # documents per task at most; null = all
    dtype: str  # of the weights that are not in FP8: "bfloat16" or "float32"
    fp8: str  # recipe of the inference, or "off"
    layers_fp8: list[str] = field(default_factory=list)  # names of the Linears in FP8
    micro_batch: int | None = None  # sequences of a full context per forward pass
    device: str = ""  # torch's name of it
    lm_eval: str = ""  # its version
    # requests that were longer than the context and lost their beginning
    truncated_requests: int | None = None
    # answers that the context's end cut before the length that their task asks for
    shortened_answers: int | None = None
    wall_s: float | None = None  # seconds of the whole scoring


def hash_of(hashes: Iterable[str]) -> str:
    """Of the documents scored, in order: equal for two runs whose scores may be compared."""
    return sha256("".join(hashes).encode()).hexdigest()


def write_scores(path: Path, record: ScoreRecord) -> None:
    content = {f.name: getattr(record, f.name) for f in fields(record)}
    content["tasks"] = {task: _flat(scores) for task, scores in record.tasks.items()}
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def _flat(scores: TaskScores) -> dict[str, Any]:
    """A task's scores as the file has them; what is empty is left out, but for n and what follows,
    which tell that nothing is known."""
    row: dict[str, Any] = {}
    for name, metric in scores.metrics.items():
        row[name] = metric.value
        row[f"{name}_se"] = metric.se
    row["version"] = scores.version
    if scores.not_scored:
        row["not_scored"] = scores.not_scored
    if scores.docs_sha256 is not None:
        for name in ("n", "num_fewshot", "chance", "docs_sha256"):
            row[name] = getattr(scores, name)
    if scores.subtasks:
        row["subtasks"] = scores.subtasks
    if scores.missing:
        row["missing"] = scores.missing
    if scores.samples is not None:
        row["samples"] = scores.samples
    return row


def read_scores(path: Path) -> ScoreRecord:
    """Raises UserError for a damaged file, and for one of another schema_version."""
    try:
        content = json.loads(path.read_bytes())
        check_version(path, content)
        tasks = {task: _task_scores(row) for task, row in content["tasks"].items()}
        names = {f.name for f in fields(ScoreRecord)}
        values = {key: value for key, value in content.items() if key in names}
        return ScoreRecord(**values | {"tasks": tasks})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}): score the run again, or"
            " remove it"
        ) from error


def _task_scores(row: dict[str, Any]) -> TaskScores:
    other_names = {f.name for f in fields(TaskScores)}
    metrics = {}
    for name, value in row.items():
        if name not in other_names and not name.endswith("_se"):
            metrics[name] = Metric(float(value), row.get(f"{name}_se"))
    values = {name: value for name, value in row.items() if name in other_names}
    if metrics and "docs_sha256" not in values:
        raise KeyError("docs_sha256")  # without it no other model's scores may stand beside these
    return TaskScores(metrics=metrics, **values)


def check_version(path: Path, content: dict[str, Any]) -> None:
    """Raises UserError where the file is of a schema_version that this code does not know."""
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} is of schema_version={version!r}, and this code reads {SCHEMA_VERSION}: read"
            " it with the code that wrote it, or score the run again"
        )


# --------------------------------------------------------------------------------- precision.json


@dataclass(frozen=True, kw_only=True)
class EvaluatedPrecision:
    """A model in one precision, or its distance from BF16."""

    loss: float  # validation loss, nats per token, weighted by the mixture
    loss_se: float | None  # standard error over the validation sequences
    sources: dict[str, float]  # source -> its loss
    step: int  # of the checkpoint
    layers: dict[str, str]  # Linear in FP8 -> its recipe
    # of a recipe alone: its loss minus that of BF16 on the same sequences
    difference: float | None = None
    difference_se: float | None = None  # standard error of the difference, paired by sequence
    difference_percent: float | None = None  # the difference over the loss of BF16


@dataclass(frozen=True, kw_only=True)
class PrecisionRecord:
    """What eval/precision.json holds. Infinite losses and NaN are null in it."""

    schema_version: int = SCHEMA_VERSION  # of this list of keys
    run: str  # folder of the run
    step: int  # of the checkpoint
    device: str  # torch's name of it
    micro_batch: int  # sequences per forward pass
    n_ctx: int  # context length, in tokens
    sequences: dict[str, int]  # source -> its validation sequences
    weights: dict[str, float]  # source -> its share of the loss; they sum to 1
    val_sha256: str  # hash of the validation tokens and of the windows chosen from them
    bf16: EvaluatedPrecision  # all Linears in BF16
    fp8: dict[str, EvaluatedPrecision]  # recipe -> the model by it


def write_precision(path: Path, record: PrecisionRecord) -> None:
    content = asdict(record)
    for key in ("difference", "difference_se", "difference_percent"):
        del content["bf16"][key]
    # a loss that overflowed is written as null
    write_json(path, json.loads(to_line(content)))


# ------------------------------------------------------------------------------------------ schema

SECTIONS: dict[str, type] = {
    "eval/TASKS.json": ScoreRecord,
    "eval/TASKS.json: `tasks`, each": TaskScores,
    "eval/precision.json": PrecisionRecord,
    "eval/precision.json: `bf16`, and `fp8`, each": EvaluatedPrecision,
}


def schema_section() -> str:
    """The part of docs/schemas.md on what eval/ writes."""
    parts = [
        "# What the commands of eval/ leave in a run's eval/\n\nMade of the comments in"
        " `eval/results.py`; a test compares the two.\n"
    ]
    for title, cls in SECTIONS.items():
        parts.append(f"## {title}\n\n{schema_table(cls)}\n")
    return "\n".join(parts)
