"""Read frozen predictions, and tell which runs are held out of every fit.

A prediction's own hash shows a later edit by hand. Only a commit or a copy elsewhere shows that nobody made it anew.
"""

import calendar
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from runtime.cli import UserError
from scaling.files import read_study
from scaling.records import CONVENTIONS, read_json

UTC = "%Y-%m-%dT%H:%M:%SZ"
CLOCK_SLACK_S = 600         # between the clocks of two machines


@dataclass(frozen=True, eq=False)
class Prediction:
    """A frozen prediction of one run; loss, low and high in nats per token, the interval at 95 %."""

    target: str
    recipe: str
    N: int                              # parameters as the convention counts them
    D: int                              # tokens
    C: float                            # flops_per_token * tokens
    loss_key: str                       # "loss_bf16" or "loss_as_trained"
    loss: float
    low: float
    high: float
    headline: str                       # name of the form that gives `loss`
    forms: tuple                        # of dict: form, loss, low, high, ...
    date: str                           # UTC, as 2026-11-21T15:44:05Z
    sha256: str                         # of the rest of the file's content
    path: Path
    convention: str                     # which parameters N and its laws count, "total" or "nonembed"
    content: dict = field(repr=False)   # the whole file


@dataclass(frozen=True)
class Held:
    """A run that enters no fit; loss is None while it is not there, prediction where none was frozen."""

    name: str
    N: int
    D: int
    C: float
    loss: float | None
    prediction: Prediction | None


def load(folder) -> list[Prediction]:
    """Every prediction_*.json of a folder, by name; [] where there is none. Raises UserError as read_prediction does."""
    return [read_prediction(path) for path in sorted(Path(folder).glob("prediction_*.json"))]


def read_prediction(path: Path) -> Prediction:
    """A frozen prediction. Raises UserError where it is damaged, was edited since, or is dated in the future."""
    content = read_json(path)
    try:
        if digest(content) != content["sha256"]:
            raise UserError(f"{path} was edited after it was frozen (its content does not match its sha256): restore the "
                              "file as it was written, for nothing can be scored against this one")
        goal, date = content["target"], content["date"]
        convention = content.get("convention", CONVENTIONS[0])      # older files say nothing and mean all
        written = calendar.timegm(time.strptime(date, UTC))
        prediction = Prediction(
            goal["name"], goal["recipe"], goal[f"params_{convention}"], goal["tokens"],
            goal["flops_per_token"] * goal["tokens"], content["loss_key"], content["loss"], content["low"], content["high"],
            content["headline"], tuple(content["forms"]), date, content["sha256"], path, convention, content)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no prediction of this version ({type(error).__name__}: {error}); restore it") from None
    if written > time.time() + CLOCK_SLACK_S:
        raise UserError(f"{path} is dated {date}, which is yet to come: a clock was wrong, and its age cannot be judged")
    return prediction


def named_held_out(roots) -> set[str]:
    """Names of runs that a study.json, in one of these folders of runs, declares held out."""
    return {name for root in sorted({Path(root) for root in roots}) for name in read_study(root).get("held_out", [])}


def is_held(record, predictions, names=()) -> bool:
    """Whether a run enters no fit: a prediction of it is frozen (any seed of it counts), or a study holds it out."""
    return record.run_id in names or any(is_of(record, one) for one in predictions)


def held_of(recipe: str, records, predictions, names=(), loss_key: str = "loss_bf16") -> tuple[Held, ...]:
    """The held-out runs of one recipe among `records`, plus a Held without loss for each prediction whose run is not there.

    Their N is counted as the records count it, whatever the prediction's own convention is."""
    held, met, count = [], set(), f"params_{records[0].convention if records else CONVENTIONS[0]}"
    for record in records:
        if record.recipe == recipe and is_held(record, predictions, names):
            prediction = next((one for one in predictions if is_of(record, one)), None)
            met.add(prediction)
            held.append(Held(record.run_id, record.N, record.tokens, record.flops_per_token * record.tokens,
                             getattr(record, loss_key), prediction))
    held += [Held(one.target, one.content["target"][count], one.D, one.C, None, one) for one in predictions
             if one.recipe == recipe and one not in met]
    return tuple(held)


def is_of(record, prediction: Prediction) -> bool:
    return record.run_id == prediction.target or is_at(record, prediction.content["target"])


def is_at(record, goal: dict) -> bool:
    """Whether a run has a target's recipe, size and tokens, whatever its seed."""
    return all(getattr(record, key) == goal[key] for key in ("recipe", "params_total", "tokens"))


# ---------------------------------------------------------------------------------------------------------------- files


def digest(content: dict) -> str:
    """SHA-256 over the content without its own hash, as canonical JSON."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()
