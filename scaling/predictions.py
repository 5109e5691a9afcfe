"""Predictions and their scores on disk, and which runs they hold out of every fit.

A prediction's own hash shows a later edit by hand. Only a commit or a copy elsewhere shows that
nobody made it anew."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lib.errors import UserError
from lib.schema import schema_section
from scaling.laws.forecast import Counts, FormForecast, Parts
from scaling.records import Record, read_json, read_study

SCHEMA_VERSION = 2  # 1 was called format_version
POINT = "recipe", "params_total", "tokens"  # what runs of one point share, whatever their seed


@dataclass(frozen=True)
class Target:
    """The run that is predicted."""

    name: str  # of the run
    recipe: str  # its precision
    params_total: int  # all parameters
    params_nonembed: int  # without embedding and head
    params_matmul: int  # of every Linear, the head once
    tokens: int  # that it will be trained on
    flops_per_token: float  # of training
    vocab_size: int | None  # tokens of its tokenizer; null where the study does not say

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens

    @property
    def point(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in POINT}


@dataclass(frozen=True)
class FormLeftOut:
    """A form that may not speak."""

    form: str  # its name
    reason: str  # why not


@dataclass(frozen=True)
class PredictedFrom:
    """One run that the prediction rests on."""

    run_id: str  # its name
    summary_sha256: str  # of its summary.json
    N: int  # parameters as the convention counts them
    D: int  # training tokens
    loss: float  # nats per token


@dataclass(frozen=True)
class PredictionFile:
    """What prediction_RUN.json holds."""

    schema_version: int  # of this list of keys
    target: Target  # the run that is predicted
    date: str  # when it was frozen, UTC, ISO 8601
    git_commit: str | None  # of the code that made it
    loss_key: str  # which loss: "loss_bf16" or "loss_as_trained"
    loss_unit: str  # "nats per token"
    level: float  # of the interval: 0.95
    convention: str  # what N counts: "total" or "nonembed"
    loss: float  # predicted, by the headlined form
    low: float  # end of the interval: the union over forms, with the noise of one run
    high: float  # the other end
    headline: str  # the form that gives the loss
    forms: list[FormForecast]  # each form that speaks
    forms_left_out: list[FormLeftOut]  # each that does not
    parts: Parts  # what the interval consists of
    points: Counts  # how many runs there were
    extrapolation: float  # compute of the target over the largest of the runs
    tokenizer_sha256: str  # of the runs
    val_sha256: str  # of their validation set
    inputs: list[PredictedFrom]  # the runs
    sha256: str  # of all other keys, as canonical JSON


@dataclass(frozen=True)
class Prediction:
    """A frozen prediction of one run."""

    path: Path  # of its file
    file: PredictionFile
    content: dict[str, Any]  # of the file, as it stands there

    @property
    def target(self) -> str:
        """The name of the run."""
        return self.file.target.name

    @property
    def recipe(self) -> str:
        return self.file.target.recipe

    @property
    def date(self) -> str:
        return self.file.date

    @property
    def headline(self) -> str:
        return self.file.headline

    @property
    def loss(self) -> float:
        return self.file.loss

    @property
    def low(self) -> float:
        return self.file.low

    @property
    def high(self) -> float:
        return self.file.high

    @property
    def sha256(self) -> str:
        return self.file.sha256

    def is_of(self, record: Record) -> bool:
        """Whether the record is of the run, or of another seed of it."""
        return record.run_id == self.target or is_at(record, self.file.target.point)


@dataclass(frozen=True)
class FormScore:
    """One form against the measured loss."""

    form: str  # its name
    loss: float  # predicted, nats per token
    error_nats: float  # predicted less measured
    error_percent: float  # the same in per cent of the measured loss
    inside: bool  # whether the measured loss is inside the form's interval


@dataclass(frozen=True)
class RunScore:
    """One run against its prediction."""

    run_id: str  # its name
    summary_sha256: str  # of its summary.json
    t_start: str  # when it was started, UTC, ISO 8601
    loss: float  # measured, nats per token
    error_nats: float  # predicted less measured
    error_percent: float  # the same in per cent of the measured loss
    inside: bool  # whether the measured loss is inside the interval
    forms: list[FormScore]  # each form of the prediction


@dataclass(frozen=True)
class ScoreFile:
    """What score_RUN.json holds."""

    schema_version: int  # of this list of keys
    target: str  # name of the run that was predicted
    prediction_sha256: str  # the sha256 of the prediction
    runs: list[RunScore]  # the run and other seeds of it


class Held(NamedTuple):
    """A run that enters no fit."""

    name: str
    N: float
    D: float
    C: float
    loss: float | None  # nats per token; None while it is not there
    prediction: Prediction | None  # None where none was frozen


# ------------------------------------------------------------------------------------------- files


def prediction_hash(content: dict[str, Any]) -> str:
    """SHA-256 over the content without its own hash, as canonical JSON."""
    signed = {key: value for key, value in content.items() if key != "sha256"}
    canonical = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_frozen(path: Path) -> dict[str, Any]:
    """The content of a frozen file. Raises UserError where it is damaged or was edited since."""
    content = read_json(path)
    if prediction_hash(content) != content.get("sha256"):
        raise UserError(
            f"{path} was edited after it was frozen (its content does not match its sha256), or is"
            " of another version: restore the file as it was written, for nothing can be scored"
            " against this one"
        )
    return content


def load(folder: str | Path) -> list[Prediction]:
    """The predictions in a folder. Raises UserError as read_prediction()."""
    return [read_prediction(path) for path in sorted(Path(folder).glob("prediction_*.json"))]


def read_prediction(path: Path) -> Prediction:
    """A frozen prediction, also of older code, which wrote format_version 1. Raises UserError as
    read_frozen(), and for a version that is not known."""
    content = read_frozen(path)
    try:
        return Prediction(path, _prediction_file(content), content)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is of another version ({type(error).__name__}: {error}): move it away"
        ) from None


def _prediction_file(content: dict[str, Any]) -> PredictionFile:
    """The content as dataclasses. Raises KeyError, TypeError or ValueError for another version."""
    values = dict(content)
    version = values.pop("schema_version", values.pop("format_version", None))
    if version not in (1, SCHEMA_VERSION):
        raise ValueError(f"schema_version {version}, not {SCHEMA_VERSION}")
    parts = content["parts"]
    model_form, all_forms = tuple(parts["model_form"]), tuple(parts["all_forms"])
    values["schema_version"] = version
    values["target"] = Target(**content["target"])
    values["parts"] = Parts(model_form, all_forms, parts["seed_sd"])
    values["points"] = Counts(**content["points"])
    for key, row_class in ROWS.items():
        values[key] = [row_class(**row) for row in content[key]]
    return PredictionFile(**values)


# key of a prediction's file -> what its list holds
ROWS: dict[str, type] = {
    "forms": FormForecast,
    "forms_left_out": FormLeftOut,
    "inputs": PredictedFrom,
}


def sealed(prediction: PredictionFile) -> dict[str, Any]:
    """The prediction as its file holds it, with its hash."""
    content = json.loads(json.dumps(asdict(prediction)))
    return content | {"sha256": prediction_hash(content)}


# ------------------------------------------------------------------------------- what is held out


def held_out(records: Sequence[Record], predictions: Sequence[Prediction]) -> list[Record]:
    """Those that enter no fit: a prediction of one is frozen (any seed of it counts), or the
    study.json beside it names it."""
    names: set[str] = set()
    for root in {record.folder.parent for record in records}:
        names |= set(read_study(root).get("held_out", []))
    return [
        record
        for record in records
        if record.run_id in names or _prediction_of(record, predictions) is not None
    ]


def held_of(
    recipe: str,
    records: Sequence[Record],
    predictions: Sequence[Prediction],
    loss_key: str,
    convention: str,
) -> tuple[Held, ...]:
    """The held-out `records` of one recipe with their predictions of loss_key, and the predictions
    whose runs are not there."""
    predictions = [
        prediction
        for prediction in predictions
        if (prediction.recipe, prediction.file.loss_key) == (recipe, loss_key)
    ]
    held = []
    for record in records:
        if record.recipe != recipe:
            continue
        prediction = _prediction_of(record, predictions)
        C = record.flops_per_token * record.tokens
        loss = getattr(record, loss_key)
        held.append(Held(record.run_id, record.N, record.tokens, C, loss, prediction))
    for prediction in predictions:
        if any(prediction.is_of(record) for record in records):
            continue
        target = prediction.file.target
        N = getattr(target, f"params_{convention}")
        held.append(Held(target.name, N, target.tokens, target.flops, None, prediction))
    return tuple(held)


def _prediction_of(record: Record, predictions: Iterable[Prediction]) -> Prediction | None:
    return next((prediction for prediction in predictions if prediction.is_of(record)), None)


def is_at(run: object, goal: dict[str, Any]) -> bool:
    """Whether a run has a target's recipe, size and tokens, whatever its seed."""
    return all(getattr(run, key) == goal[key] for key in POINT)


def schema_page() -> str:
    """docs/schemas.md: the keys of predictions and scores."""
    parts = [
        "# What scaling/fit.py --predict and --score leave\n\nMade of the comments in"
        " `scaling/predictions.py` and `scaling/laws/forecast.py`; a test compares the two.\n"
    ]
    for cls, title in (
        (PredictionFile, "prediction_RUN.json"),
        (Target, "`target`"),
        (FormForecast, "`forms`, each"),
        (FormLeftOut, "`forms_left_out`, each"),
        (Parts, "`parts`"),
        (Counts, "`points`"),
        (PredictedFrom, "`inputs`, each"),
        (ScoreFile, "score_RUN.json"),
        (RunScore, "`runs`, each"),
        (FormScore, "`runs.forms`, each"),
    ):
        parts.append(schema_section(cls, title))
    return "\n".join(parts)
