"""Fit the law of the gap to the pairs of a study, freeze what it says of a run to come, score it
afterwards (scaling/precision.py predict=, at=, score).

A frozen prediction is a file with its own hash, older than the runs that it predicts. Runs that a
prediction or study.json holds out enter no law of the gap."""

import json
import math
import re
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from scipy import stats

from lib.errors import UserError
from lib.machine import ROOT, git
from lib.plots import write_files
from lib.text import listed, si
from scaling import pairs
from scaling.gap_law import (
    CannotFit,
    EffectiveParameters,
    Exponent,
    FormForecast,
    GapFit,
    GapForecast,
    GapLaw,
    GapPoints,
    NestedForm,
    Noise,
    fit_gap,
    misfit,
)
from scaling.pairs import Pair, Surface
from scaling.predict import begun, target_of
from scaling.predictions import digest, read_frozen
from scaling.records import read_study

SCHEMA_VERSION = 1
NEAR = 0.05  # relative difference of N, and of D/N, within which a pair is what at= named
UNIT = "100 ln(L_FP8 / L_BF16), per cent of the BF16 loss"


@dataclass(frozen=True)
class GapTarget:
    """Which pairs a prediction is of."""

    name: str  # a run of the study, or RECIPE_nN_rRATIO
    recipe: str
    N: float  # parameters, as the study counts them
    tokens: float
    tolerance: float  # relative difference of N, and of tokens per parameter, that still counts

    def is_of(self, recipe: str, N: float, tokens: float) -> bool:
        """Whether a run of this recipe, size and tokens is what was predicted."""
        distance = max(abs(N / self.N - 1), abs(tokens / N / (self.tokens / self.N) - 1))
        return recipe == self.recipe and distance <= self.tolerance + 1e-12


@dataclass(frozen=True)
class PairInput:
    """A pair that the law was fitted to."""

    bf16: str  # run_id
    fp8: str
    input_N: int
    input_D: int
    percent: float  # its gap
    bf16_sha256: str  # of its summary.json
    fp8_sha256: str


@dataclass(frozen=True)
class GapPrediction:
    """gap_prediction_NAME.json."""

    schema_version: int
    target: GapTarget
    date: str  # UTC, ISO
    git_commit: str | None
    loss: str  # "bf16" or "as_trained": how the runs are evaluated
    unit: str
    level: float  # of the intervals
    convention: str  # which parameters N counts
    forecast: GapForecast
    law: GapLaw
    bf16_law: Surface | None  # behind the effective parameters
    tokenizer_sha256: str
    val_sha256: str
    inputs: list[PairInput]
    sha256: str  # of the content without this field, as canonical JSON


@dataclass(frozen=True)
class GapScore:
    """gap_score_NAME.json: the runs that have come, against their prediction."""

    schema_version: int
    target: str
    prediction_sha256: str
    runs: list[str]  # the FP8 runs
    independent_pairs: int
    measured: float  # per cent, mean over independent pairs
    measured_low: float | None  # its own 95 % t-interval; None: one pair
    measured_high: float | None
    predicted: float
    predicted_low: float  # 95 % interval for the mean of so many pairs, seed noise included
    predicted_high: float
    is_inside: bool
    # measured minus predicted over the standard error that this interval has on that side
    z: float


KINDS = {
    frozenset(kind.__dataclass_fields__): kind
    for kind in (
        GapPrediction,
        GapTarget,
        PairInput,
        GapForecast,
        FormForecast,
        GapLaw,
        Exponent,
        Noise,
        NestedForm,
        EffectiveParameters,
    )
}


# ---------------------------------------------------------------------------------- laws of a study


def fit_gaps(
    study_pairs: list[Pair], bf16_law: Surface | None, no_law: str, arm: str
) -> dict[str, GapFit]:
    """Recipe -> GapFit of its pairs under the evaluation `arm`; recipes that convert no Linear have
    none. bf16_law: L(N, D) of the study, else no_law says why there is none."""
    fits: dict[str, GapFit] = {}
    for recipe, pairs_of_recipe in pairs.grouped(study_pairs, lambda pair: pair.fp8.recipe):
        if not pairs.is_idle(pairs_of_recipe):
            fits[recipe] = fit_gap(points_of(pairs_of_recipe, arm), bf16_law, no_law)
    return fits


def points_of(study_pairs: list[Pair], arm: str) -> GapPoints:
    trajectory = np.empty(len(study_pairs), dtype=int)
    for label, members in enumerate(pairs.trajectories(study_pairs)):
        trajectory[members] = label
    return GapPoints(
        np.array([float(pair.fp8.N) for pair in study_pairs]),
        np.array([float(pair.fp8.tokens) for pair in study_pairs]),
        np.array([pair.gap[arm].log_percent for pair in study_pairs]),
        trajectory,
    )


def own_law(laws: dict[int, list[Surface]]) -> Surface | None:
    """Chinchilla's law of the study's BF16 runs among those that pairs.surfaces gives."""
    for surface in next(iter(laws.values()), []):
        if surface.name == "own":
            return surface
    return None


def without_held_out(
    study_pairs: list[Pair], predictions: list[GapPrediction]
) -> tuple[list[Pair], list[Pair]]:
    """(pairs that may enter a law of the gap, pairs that are held out by study.json or a frozen
    prediction)."""
    names: set[str] = set()
    for folder in {pair.fp8.folder.parent for pair in study_pairs}:
        names |= set(read_study(folder).get("held_out", []))
    allowed, held = [], []
    for pair in study_pairs:
        run = pair.fp8
        is_predicted = any(
            prediction.target.is_of(run.recipe, run.N, run.tokens) for prediction in predictions
        )
        (held if is_predicted or run.run_id in names else allowed).append(pair)
    return allowed, held


# --------------------------------------------------------------------------------------- freezing


def parse_place(text: str) -> tuple[float, float]:
    """(N, tokens per parameter) of N:RATIO. Raises UserError."""
    size, _, ratio = text.partition(":")
    try:
        N, tokens_per_param = float(size), float(ratio)
    except ValueError:
        N, tokens_per_param = 0.0, 0.0
    if not (
        0 < N < math.inf and 0 < tokens_per_param < math.inf and N * tokens_per_param < math.inf
    ):
        raise UserError(
            f"at={text!r} must be parameters and tokens per parameter, two numbers above zero with"
            " a colon between, such as at=1.5e9:20"
        )
    return N, tokens_per_param


def targets_at(place: str, recipes: list[str]) -> list[GapTarget]:
    """A target of each recipe at N:RATIO. Raises UserError."""
    N, ratio = parse_place(place)
    return [
        GapTarget(f"{_file_word(recipe)}_n{N:g}_r{ratio:g}", recipe, N, ratio * N, NEAR)
        for recipe in recipes
    ]


def target_of_run(name: str, records) -> GapTarget:
    """The target that a run of a study.json, or of configs/, stands for. Raises UserError."""
    name = name.removesuffix(".py")
    goal = target_of(name, _declared(records))
    if goal["recipe"] == "bf16":
        raise UserError(f"{name} is a BF16 run, which has no gap: name its FP8 partner")
    N = goal[f"params_{records[0].convention}"]
    return GapTarget(name, goal["recipe"], N, goal["tokens"], 0.0)


def freeze(
    targets: list[GapTarget],
    fits: dict[str, GapFit],
    study_pairs: list[Pair],
    records,
    folder: Path,
    arm: str,
    bf16_law: Surface | None,
) -> list[str]:
    """Write gap_prediction_NAME.json of each target; lines to print. study_pairs: the pairs behind
    `fits`, records: all finished runs.

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
        try:
            forecast = fits[target.recipe].forecast(target.N, target.tokens)
        except CannotFit as error:
            lines.append(f"{target.name}: the gap cannot be predicted: {error}")
            continue
        law = fits[target.recipe].law
        predictions.append(_prediction(target, forecast, law, study_pairs, arm, bf16_law))
    if not predictions:
        raise UserError("\n".join(lines))
    for prediction in predictions:
        path = path_of(prediction.target, folder)
        write_files(folder, {path.name: asdict(prediction)})
        lines += describe(prediction, path)
    return lines


def path_of(target: GapTarget, folder: Path) -> Path:
    return folder / f"gap_prediction_{target.name}.json"


def describe(prediction: GapPrediction, path: Path) -> list[str]:
    """A frozen prediction as lines for people."""
    target, forecast = prediction.target, prediction.forecast
    lines = [
        (
            f"{target.name}: predicted gap of {target.recipe} {forecast.gap:+.3g} % by the"
            f" {forecast.headline}, 95 % interval {forecast.low:+.3g} to {forecast.high:+.3g} %; of"
            f" a single pair {forecast.one_pair_low:+.3g} to {forecast.one_pair_high:+.3g} %;"
            f" {distance_words(forecast)}"
        )
    ]
    for form in forecast.forecasts:
        interval = f"{form.gap:+.3g} % ({form.gap_low:+.3g} to {form.gap_high:+.3g})"
        reason = f", left out: {form.refuted_because}" if form.refuted_because else ""
        lines.append(f"    {form.form:20} {interval}{reason}")
    lines.append(
        f"wrote {path} (sha256 {prediction.sha256[:12]}); commit it: only that shows that it was"
        " not made anew"
    )
    return lines


def distance_words(forecast: GapForecast) -> str:
    """How far the point lies from the pairs."""
    beyond = []
    if forecast.beyond_sizes > 1:
        beyond.append(f"{forecast.beyond_sizes:.3g}-fold beyond the sizes")
    if forecast.beyond_ratios > 1:
        beyond.append(f"{forecast.beyond_ratios:.3g}-fold beyond the tokens per parameter")
    place = f"at {si(forecast.N)} parameters and {forecast.D / forecast.N:.3g} tokens for each"
    if not beyond:
        return f"{place}, within the pairs"
    return f"{place}, extrapolated {' and '.join(beyond)} of the pairs"


def _prediction(
    target: GapTarget,
    forecast: GapForecast,
    law: GapLaw,
    study_pairs: list[Pair],
    arm: str,
    bf16_law: Surface | None,
) -> GapPrediction:
    own_pairs = [pair for pair in study_pairs if pair.fp8.recipe == target.recipe]
    first = own_pairs[0].fp8
    plain_law = None if bf16_law is None else replace(bf16_law, covariance=None)
    prediction = GapPrediction(
        schema_version=SCHEMA_VERSION,
        target=target,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        git_commit=git(ROOT, "rev-parse", "HEAD"),
        loss=arm,
        unit=UNIT,
        level=1 - pairs.ALPHA,
        convention=first.convention,
        forecast=forecast,
        law=law,
        bf16_law=plain_law,
        tokenizer_sha256=first.tokenizer_sha256,
        val_sha256=first.val_sha256,
        inputs=[_input(pair, arm) for pair in own_pairs],
        sha256="",
    )
    return replace(prediction, sha256=digest(asdict(prediction)))


def _input(pair: Pair, arm: str) -> PairInput:
    return PairInput(
        pair.bf16.run_id,
        pair.fp8.run_id,
        pair.fp8.N,
        pair.fp8.tokens,
        pair.gap[arm].log_percent,
        pair.bf16.summary_sha256,
        pair.fp8.summary_sha256,
    )


def _check_new(target: GapTarget, records, folder: Path) -> None:
    path = path_of(target, folder)
    if path.exists():
        raise UserError(
            f"{path} is there already, and a frozen prediction is not made anew: score it, or move"
            " it away"
        )
    for frozen in load(folder):
        if frozen.target.is_of(target.recipe, target.N, target.tokens):
            raise UserError(
                f"{path_of(frozen.target, folder)} predicts the same pairs as {target.name} (size and"
                f" tokens per parameter within {100 * frozen.target.tolerance:g} %), and a frozen"
                " prediction is not made anew: score it, or move it away"
            )
    key = f"params_{records[0].convention}"
    studies = {
        root: [
            {"run": target.name, "recipe": target.recipe, key: target.N, "tokens": target.tokens}
        ]
        + planned
        for root, planned in _declared_by_folder(records).items()
    }

    finished = [
        record.run_id for record in records if target.is_of(record.recipe, record.N, record.tokens)
    ]
    runs = finished + begun(
        studies, lambda run: target.is_of(run["recipe"], run[key], run["tokens"])
    )
    if runs:
        raise UserError(
            f"{runs[0]} has begun or is finished: only what nobody has seen can be predicted"
        )


def _declared_by_folder(records) -> dict[Path, list[dict]]:
    """Folder of runs -> the runs that its study.json plans."""
    folders = sorted({record.folder.parent for record in records})
    return {folder: read_study(folder).get("runs", []) for folder in folders}


def _declared(records) -> dict[str, dict]:
    return {run["run"]: run for runs in _declared_by_folder(records).values() for run in runs}


def _file_word(recipe: str) -> str:
    return re.sub(r"[^\w.]+", "-", recipe)


# ---------------------------------------------------------------------------------------- scoring


def load(folder: Path) -> list[GapPrediction]:
    return [read_prediction(path) for path in sorted(folder.glob("gap_prediction_*.json"))]


def read_prediction(path: Path) -> GapPrediction:
    """Raises UserError where the file is damaged or was edited since it was frozen."""
    content = read_frozen(path)
    surface = content.pop("bf16_law")
    typed = json.loads(
        json.dumps(content | {"bf16_law": None}),
        object_hook=lambda fields: KINDS.get(frozenset(fields), dict)(**fields),
    )
    return replace(typed, bf16_law=None if surface is None else Surface(**surface))


def score(folder: Path, study_pairs: list[Pair]) -> list[str]:
    """Hold every prediction in `folder` against its pairs among `study_pairs`; lines to print,
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
        target, forecast = prediction.target, prediction.forecast
        arrived = [
            pair
            for pair in study_pairs
            if target.is_of(pair.fp8.recipe, pair.fp8.N, pair.fp8.tokens)
        ]
        if not arrived:
            lines.append(
                f"{target.name}: not there yet; predicted on {prediction.date}:"
                f" {forecast.gap:+.3g} % ({forecast.low:+.3g} to {forecast.high:+.3g})"
            )
            continue
        path = path_of(target, folder)
        for pair in arrived:
            _check_scorable(prediction, pair, path)
        gap_score = score_of(prediction, arrived)
        name = f"gap_score_{target.name}.json"
        write_files(folder, {name: asdict(gap_score)})
        lines += [*score_words(gap_score, forecast), f"wrote {folder / name}"]
    return lines


def score_of(prediction: GapPrediction, arrived: list[Pair]) -> GapScore:
    forecast = prediction.forecast
    measured = pairs.over(arrived, "log_percent")[prediction.loss]
    scatter = float(stats.t.ppf(0.975, forecast.pair_sd_dof)) * forecast.pair_sd
    scatter /= math.sqrt(measured.n)
    low = forecast.gap - math.hypot(forecast.gap - forecast.low, scatter)
    high = forecast.gap + math.hypot(forecast.high - forecast.gap, scatter)
    distance = measured.mean - forecast.gap
    half = high - forecast.gap if distance > 0 else forecast.gap - low
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
        z=distance / half * float(stats.norm.ppf(0.975)),
    )


def score_words(gap_score: GapScore, forecast: GapForecast) -> list[str]:
    pair_words = "pair" if gap_score.independent_pairs == 1 else "pairs"
    inside = "inside" if gap_score.is_inside else "OUTSIDE"
    return [
        (
            f"{gap_score.target}: measured gap {gap_score.measured:+.3g} % of"
            f" {gap_score.independent_pairs} independent {pair_words}, predicted"
            f" {gap_score.predicted:+.3g} % by the {forecast.headline}: {inside} the interval"
            f" {gap_score.predicted_low:+.3g} to {gap_score.predicted_high:+.3g} % of so many"
            f" pairs, z = {gap_score.z:+.2f}"
        )
    ]


def _check_scorable(prediction: GapPrediction, pair: Pair, path: Path) -> None:
    run = pair.fp8
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
    frozen = datetime.fromisoformat(prediction.date)
    if run.t_start is None or frozen > datetime.fromisoformat(run.t_start):
        raise UserError(
            f"{path} is not older than its run {run.run_id}, of {run.t_start}: move {path} away to"
            " use the run in the law of the gap"
        )


# ------------------------------------------------------------------------------------------ words


def law_words(recipe: str, law: GapLaw) -> str:
    """What one recipe's law says, in a line."""
    words = f"{recipe}: {_trend_words(law) if law.trend else _no_trend_words(law)}"
    if law.effective is None or law.effective.f_low is None or law.effective.f_high is None:
        return f"{words}."
    effective = law.effective
    fits = "which of the two forms fits better cannot be told"
    if law.better_form is not None:
        fits = f"the {law.better_form} form fits better"
    return (
        f"{words}. As effective parameters f = {effective.f:.4f} ({effective.f_low:.4f} to"
        f" {effective.f_high:.4f}); {fits}."
    )


def _trend_words(law: GapLaw) -> str:
    words = f"gap = {law.k:.2g} % [{law.k_low:.2g} to {law.k_high:.2g}] x"
    untold = []
    if law.a is not None:
        interval = f"[{-law.a.high:+.2f} to {-law.a.low:+.2f}]"
        words += f" (N / {si(law.N0)})^{-law.a.value:.2f} {interval}"
    if law.b is not None:
        interval = f"[{law.b.low:+.2f} to {law.b.high:+.2f}]"
        words += f" (D/N / {law.ratio0:g})^{law.b.value:.2f} {interval}"
    for exponent, axis in ((law.a, "N"), (law.b, "D/N")):
        if exponent is not None and not exponent.is_told:
            untold.append(f"; the exponent of {axis} is not told from 0")
    return f"{words}, 95 % intervals in brackets{''.join(untold)}"


def _no_trend_words(law: GapLaw) -> str:
    interval = ""
    if law.constant_low is not None:
        interval = f" ({law.constant_low:+.2g} to {law.constant_high:+.2g})"
    could_show = [
        f"{exponent.could_show:.2g} of {axis}"
        for exponent, axis in ((law.a, "N"), (law.b, "D/N"))
        if exponent is not None and exponent.could_show is not None
    ]
    power = ""
    if could_show:
        power = f"; the design could have shown an exponent of {' or '.join(could_show)}"
    refuted = ", which the pairs refute" if misfit(law, "constant") else ""
    return (
        f"no trend of the gap can be told: {law.reason}; as a constant {law.constant:+.2g} %"
        f"{interval}{refuted}{power}"
    )
