"""Freeze what the law of the gap says of runs to come, score it afterwards (scaling/precision.py
predict=, at=, score).

A frozen prediction is a file with its own hash, older than the runs that it predicts. Runs that a
prediction or study.json holds out enter no law of the gap. A table's rows have no dates: there only
a commit shows that the prediction is older."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from scipy import stats

from fp8.recipes import file_word
from lib.errors import UserError
from lib.machine import ROOT, git
from lib.plots import write_files
from lib.text import listed
from scaling.declaration import read_declaration
from scaling.gap_prediction_words import (
    format_gap,
    format_interval,
    format_prediction,
    format_score,
)
from scaling.paired.cost import Surface
from scaling.paired.estimates import ALPHA
from scaling.paired.gap_cells import CannotFitGap
from scaling.paired.gap_law import GapFit, GapForecast, GapLaw
from scaling.paired.gaps import FinishedRun, Pair, mean_gap
from scaling.predict import begun, target_of
from scaling.predictions import prediction_hash, read_frozen
from scaling.reason_words import sentence_of, worded
from scaling.records import Record
from scaling.typed_json import from_json

SCHEMA_VERSION = 1
NEAR = 0.05  # relative difference of N, and of D/N, within which a pair is what at= named
UNIT = "100 ln(L_FP8 / L_BF16), per cent of the BF16 loss"


@dataclass(frozen=True)
class GapTarget:
    """Which pairs a prediction is of."""

    name: str  # a run of the study, or RECIPE_nN_rRATIO
    recipe: str  # its arm
    N: float  # parameters, as the study counts them
    tokens: float  # trained on
    tolerance: float  # relative difference of N, and of tokens per parameter, that still counts

    def is_of(self, recipe: str, N: float, tokens: float) -> bool:
        """Whether a run of this recipe, size and tokens is what was predicted."""
        distance = max(abs(N / self.N - 1), abs(tokens / N / (self.tokens / self.N) - 1))
        return recipe == self.recipe and distance <= self.tolerance + 1e-12


@dataclass(frozen=True)
class PairInput:
    """A pair that the law was fitted to."""

    bf16: str  # run_id
    fp8: str  # run_id
    input_N: int  # parameters
    input_D: int  # training tokens
    percent: float  # its gap
    bf16_sha256: str  # of its summary.json, or of the table
    fp8_sha256: str  # likewise


@dataclass(frozen=True)
class GapPrediction:
    """What gap_prediction_NAME.json holds."""

    schema_version: int  # of this list of keys
    target: GapTarget  # which pairs it is of
    date: str  # UTC, ISO
    git_commit: str | None  # of the code
    loss: str  # "bf16" or "as_trained": how the runs are evaluated
    unit: str  # of the gaps
    level: float  # of the intervals
    convention: str  # which parameters N counts
    forecast: GapForecast  # the gap there
    law: GapLaw  # of the recipe's gap, behind the forecast
    bf16_law: Surface | None  # behind the effective parameters
    tokenizer_sha256: str  # "" for a table, as the next
    val_sha256: str  # of the validation tokens
    inputs: list[PairInput]  # the pairs that the law was fitted to
    sha256: str  # of the content without this field, as canonical JSON


@dataclass(frozen=True)
class GapScore:
    """What gap_score_NAME.json holds: the runs that have come, against their prediction."""

    schema_version: int  # of this list of keys
    target: str  # name of the prediction's target
    prediction_sha256: str  # of the prediction's file
    runs: list[str]  # the FP8 runs
    independent_pairs: int  # that have come
    measured: float  # per cent, mean over independent pairs
    measured_low: float | None  # its own 95 % t-interval; null: one pair
    measured_high: float | None  # upper end
    predicted: float  # per cent
    predicted_low: float  # 95 % interval for the mean of so many pairs, seed noise included
    predicted_high: float  # upper end
    is_inside: bool  # whether the measured gap lies within that interval
    # measured minus predicted over the standard error that this interval has on that side
    z: float


def without_held_out(
    pairs: Sequence[Pair], predictions: Sequence[GapPrediction]
) -> tuple[list[Pair], list[Pair]]:
    """(pairs that may enter a law of the gap, pairs that are held out by study.json or a frozen
    prediction)."""
    names = _held_out_names(pairs)
    allowed, held_out = [], []
    for pair in pairs:
        run = pair.fp8
        is_predicted = any(
            prediction.target.is_of(run.recipe, run.N, run.tokens) for prediction in predictions
        )
        if is_predicted or run.run_id in names:
            held_out.append(pair)
        else:
            allowed.append(pair)
    return allowed, held_out


def _held_out_names(pairs: Sequence[Pair]) -> set[str]:
    names: set[str] = set()
    for folder in _folders([pair.fp8 for pair in pairs]):
        declaration = read_declaration(folder)
        if declaration is not None:
            names |= set(declaration.held_out)
    return names


def _folders(runs: Sequence[FinishedRun]) -> list[Path]:
    """Folders of runs; rows of a table have none."""
    return sorted({run.folder.parent for run in runs if isinstance(run, Record)})


# --------------------------------------------------------------------------------------- freezing


def parse_place(text: str) -> tuple[float, float]:
    """(N, tokens per parameter) of N:RATIO. Raises UserError."""
    size, _, ratio = text.partition(":")
    try:
        N, tokens_per_param = float(size), float(ratio)
    except ValueError:
        N, tokens_per_param = 0.0, 0.0
    numbers = (N, tokens_per_param, N * tokens_per_param)
    if not all(0 < number < math.inf for number in numbers):
        raise UserError(
            f"at={text!r} must be parameters and tokens per parameter, two numbers above zero with"
            " a colon between, such as at=1.5e9:20"
        )
    return N, tokens_per_param


def targets_at(place: str, recipes: Sequence[str]) -> list[GapTarget]:
    """A target of each recipe at N:RATIO. Raises UserError."""
    N, ratio = parse_place(place)
    return [
        GapTarget(f"{file_word(recipe)}_n{N:g}_r{ratio:g}", recipe, N, ratio * N, NEAR)
        for recipe in recipes
    ]


def target_of_run(name: str, records: Sequence[Record]) -> GapTarget:
    """The target that a run of a study.json, or of configs/, stands for. Raises UserError."""
    name = name.removesuffix(".py")
    declared = [run for runs in _declared_runs(records).values() for run in runs]
    goal = target_of(name, {run["run"]: run for run in declared})
    if goal["recipe"] in {record.recipe for record in records if record.is_baseline}:
        raise UserError(f"{name} is a BF16 run, which has no gap: name its FP8 partner")
    N = goal[f"params_{records[0].convention}"]
    return GapTarget(name, goal["recipe"], N, goal["tokens"], 0.0)


def freeze(
    targets: Sequence[GapTarget],
    fits: Mapping[str, GapFit],
    pairs: Sequence[Pair],
    records: Sequence[FinishedRun],
    folder: Path,
    evaluation: str,
    bf16_law: Surface | None,
) -> list[str]:
    """Write gap_prediction_NAME.json of each target; lines to print. pairs: those behind `fits`,
    records: all finished runs.

    Raises UserError where a prediction or a run is there already, or where nothing can be said of
    any target."""
    for target in targets:
        _check_new(target, records, folder)
    lines, predictions = [], []
    for target in targets:
        if target.recipe not in fits:
            raise UserError(
                f"{target.name} is in {target.recipe}, but the pairs at hand are in"
                f" {listed(list(fits)) or 'no recipe'}: train smaller sizes in its recipe first"
            )
        fit = fits[target.recipe]
        try:
            forecast = fit.forecast(target.N, target.tokens)
        except CannotFitGap as error:
            reason = sentence_of(error.reason)
            lines.append(f"{target.name}: the gap cannot be predicted: {reason}")
            continue
        predictions.append(_prediction(target, forecast, fit.law, pairs, evaluation, bf16_law))
    if not predictions:
        raise UserError("\n".join(lines))
    for prediction in predictions:
        path = path_of(prediction.target, folder)
        write_files(folder, {path.name: worded(prediction)})
        lines += format_prediction(
            prediction.target.name, prediction.target.recipe, prediction.forecast
        )
        lines.append(
            f"wrote {path} (sha256 {prediction.sha256[:12]}); commit it: only that shows that it"
            " was not made anew"
        )
    return lines


def path_of(target: GapTarget, folder: Path) -> Path:
    return folder / f"gap_prediction_{target.name}.json"


def _prediction(
    target: GapTarget,
    forecast: GapForecast,
    law: GapLaw,
    pairs: Sequence[Pair],
    evaluation: str,
    bf16_law: Surface | None,
) -> GapPrediction:
    inputs = [pair for pair in pairs if pair.fp8.recipe == target.recipe]
    first = inputs[0].fp8
    if bf16_law is not None:
        bf16_law = replace(bf16_law, covariance=None, size_covariance=None)
    prediction = GapPrediction(
        schema_version=SCHEMA_VERSION,
        target=target,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        git_commit=git(ROOT, "rev-parse", "HEAD"),
        loss=evaluation,
        unit=UNIT,
        level=1 - ALPHA,
        convention=first.convention,
        forecast=forecast,
        law=law,
        bf16_law=bf16_law,
        tokenizer_sha256=first.tokenizer_sha256,
        val_sha256=first.val_sha256,
        inputs=[_input(pair, evaluation) for pair in inputs],
        sha256="",
    )
    return replace(prediction, sha256=prediction_hash(worded(prediction)))


def _input(pair: Pair, evaluation: str) -> PairInput:
    bf16, fp8 = pair.bf16, pair.fp8
    return PairInput(
        bf16.run_id,
        fp8.run_id,
        fp8.N,
        fp8.tokens,
        pair.gap[evaluation].log_percent,
        bf16.summary_sha256,
        fp8.summary_sha256,
    )


def _check_new(target: GapTarget, records: Sequence[FinishedRun], folder: Path) -> None:
    """Raise UserError where the target is predicted already, or one of its runs has begun."""
    path = path_of(target, folder)
    not_anew = "and a frozen prediction is not made anew: score it, or move it away"
    if path.exists():
        raise UserError(f"{path} is there already, {not_anew}")
    for frozen in load(folder):
        if frozen.target.is_of(target.recipe, target.N, target.tokens):
            raise UserError(
                f"{path_of(frozen.target, folder)} predicts the same pairs as {target.name} (size"
                f" and tokens per parameter within {100 * frozen.target.tolerance:g} %), {not_anew}"
            )
    runs = _finished(target, records) + _begun(target, records)
    if runs:
        raise UserError(
            f"{runs[0]} has begun or is finished: only what nobody has seen can be predicted"
        )


def _finished(target: GapTarget, records: Sequence[FinishedRun]) -> list[str]:
    return [
        record.run_id for record in records if target.is_of(record.recipe, record.N, record.tokens)
    ]


def _begun(target: GapTarget, records: Sequence[FinishedRun]) -> list[str]:
    """Runs of the target's kind, of the study or by its own name, that have left something."""
    key = f"params_{records[0].convention}"
    run = {"run": target.name, "recipe": target.recipe, key: target.N, "tokens": target.tokens}
    studies = {folder: [run, *declared] for folder, declared in _declared_runs(records).items()}
    return begun(studies, lambda run: target.is_of(run["recipe"], run[key], run["tokens"]))


def _declared_runs(records: Sequence[FinishedRun]) -> dict[Path, list[dict[str, Any]]]:
    """Folder of runs -> the runs that its study.json plans."""
    runs = {}
    for folder in _folders(records):
        declaration = read_declaration(folder)
        runs[folder] = [] if declaration is None else declaration.runs
    return runs


# ---------------------------------------------------------------------------------------- scoring


def load(folder: Path) -> list[GapPrediction]:
    return [read_prediction(path) for path in sorted(folder.glob("gap_prediction_*.json"))]


def read_prediction(path: Path) -> GapPrediction:
    """Raises UserError where the file is damaged, of another version or was edited since it was
    frozen."""
    content = read_frozen(path)
    try:
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {content['schema_version']}, not {SCHEMA_VERSION}")
        return from_json(GapPrediction, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is of another version ({type(error).__name__}: {error}): use the code that"
            " froze it"
        ) from None


def score(folder: Path, pairs: Sequence[Pair]) -> list[str]:
    """Hold every prediction in `folder` against its pairs among `pairs`; lines to print,
    gap_score_NAME.json written. Raises UserError where nothing was predicted, a file was edited,
    or a run is not what was predicted."""
    predictions = load(folder)
    if not predictions:
        raise UserError(
            f"{folder} holds no gap_prediction_*.json: freeze one with predict=RUN or at=N:RATIO,"
            " or name its folder (out=DIR)"
        )
    lines = []
    for prediction in predictions:
        lines += _score(prediction, pairs, folder)
    return lines


def _score(prediction: GapPrediction, pairs: Sequence[Pair], folder: Path) -> list[str]:
    target, forecast = prediction.target, prediction.forecast
    arrived = [pair for pair in pairs if target.is_of(pair.fp8.recipe, pair.fp8.N, pair.fp8.tokens)]
    if not arrived:
        return [
            f"{target.name}: not there yet; predicted on {prediction.date}:"
            f" {format_gap(forecast.gap)} % ({format_interval(forecast.low, forecast.high)})"
        ]
    path = path_of(target, folder)
    for pair in arrived:
        _check_scorable(prediction, pair.fp8, path)
    gap_score = score_of(prediction, arrived)
    name = f"gap_score_{target.name}.json"
    write_files(folder, {name: asdict(gap_score)})
    return [_format_score(gap_score, forecast), f"wrote {folder / name}"]


def _format_score(gap_score: GapScore, forecast: GapForecast) -> str:
    return format_score(
        target=gap_score.target,
        measured=gap_score.measured,
        independent_pairs=gap_score.independent_pairs,
        predicted=gap_score.predicted,
        headline=forecast.headline,
        is_inside=gap_score.is_inside,
        interval=(gap_score.predicted_low, gap_score.predicted_high),
        z=gap_score.z,
    )


def score_of(prediction: GapPrediction, arrived: Sequence[Pair]) -> GapScore:
    """The pairs that have come against their prediction."""
    forecast = prediction.forecast
    measured = mean_gap(arrived, prediction.loss, "log_percent")
    scatter = float(stats.t.ppf(0.975, forecast.pair_sd_dof)) * forecast.pair_sd
    scatter /= math.sqrt(measured.n)
    low = forecast.gap - math.hypot(forecast.gap - forecast.low, scatter)
    high = forecast.gap + math.hypot(forecast.high - forecast.gap, scatter)
    distance = measured.mean - forecast.gap
    half = high - forecast.gap if distance > 0 else forecast.gap - low
    z = distance / half * float(stats.norm.ppf(0.975))
    return GapScore(
        schema_version=SCHEMA_VERSION,
        target=prediction.target.name,
        prediction_sha256=prediction.sha256,
        runs=[pair.fp8.run_id for pair in arrived],
        independent_pairs=measured.n,
        measured=measured.mean,
        measured_low=measured.low,
        measured_high=measured.high,
        predicted=forecast.gap,
        predicted_low=low,
        predicted_high=high,
        is_inside=low <= measured.mean <= high,
        z=z,
    )


def _check_scorable(prediction: GapPrediction, run: FinishedRun, path: Path) -> None:
    """Raise UserError where a run is not what was predicted, or began before it was."""
    differing = []
    if prediction.tokenizer_sha256 != run.tokenizer_sha256:
        differing.append("tokenizer")
    if prediction.val_sha256 != run.val_sha256:
        differing.append("validation set")
    if prediction.convention != run.convention:
        differing.append("way of counting N")
    if differing:
        raise UserError(
            f"{run.run_id} has another {' and another '.join(differing)} than {path} predicts"
        )
    if not isinstance(run, Record):  # the rows of a table have no dates
        return
    frozen = datetime.fromisoformat(prediction.date)
    if run.t_start is None or frozen > datetime.fromisoformat(run.t_start):
        raise UserError(
            f"{path} is not older than its run {run.run_id}, of {run.t_start}: move {path} away to"
            " use the run in the law of the gap"
        )
