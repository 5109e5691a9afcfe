"""Say what finished runs predict for a new one (fit.py --predict); freeze that before the run
exists, then score it (--score)."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.machine import ROOT, git
from lib.plots import write_files
from lib.text import nearest
from scaling.gap_words import KIND
from scaling.groups import Group
from scaling.law_words import refusal_words
from scaling.laws import CannotFit, Forecast, FormForecast, forecast
from scaling.predictions import (
    POINT,
    SCHEMA_VERSION,
    FormLeftOut,
    FormScore,
    PredictedFrom,
    Prediction,
    PredictionFile,
    RunScore,
    ScoreFile,
    Target,
    is_at,
    load,
    read_prediction,
    sealed,
)
from scaling.records import Record, read_study

COUNTS = ("params_total", "params_nonembed", "params_matmul", "tokens", "flops_per_token")
BEGUN = ("metrics.jsonl", "checkpoints")  # what a run leaves as soon as it trains


# ------------------------------------------------------------------------------------ to predict


def freeze(
    target: str,
    groups: Sequence[Group],
    records: Sequence[Record],
    folder: str | Path,
    loss_key: str = "loss_bf16",
) -> Prediction:
    """Predict the run `target` of a study.json, else a config, from the group of its recipe; write
    prediction_<target>.json. records: all finished runs. Raises UserError where a prediction or the
    run is there already, or nothing can be said."""
    name = target.removesuffix(".py")
    path = Path(folder) / f"prediction_{name}.json"
    if path.exists():
        raise UserError(
            f"{path} is there already, and a frozen prediction is not made anew: score it, or move"
            " it away"
        )
    roots = sorted({record.folder.parent for record in records})
    studies = {root: read_study(root).get("runs", []) for root in roots}
    declared = {run["run"]: run for runs in studies.values() for run in runs}
    goal = target_of(name, declared)
    group = _group_of(name, goal, groups)
    _check_nobody_has_seen(name, goal, studies, records)
    _check_vocabulary(name, goal, group.records[0])
    content = _prediction(Target(**goal), group, loss_key)
    write_files(path.parent, {path.name: sealed(content)})
    return read_prediction(path)


def _group_of(name: str, goal: dict[str, Any], groups: Sequence[Group]) -> Group:
    """The group of the run's recipe."""
    for group in groups:
        if group.recipe == goal["recipe"]:
            return group
    raise UserError(
        f"{name} is a run in {goal['recipe']}, but the runs at hand are"
        f" {', '.join(group.recipe for group in groups)}: train smaller sizes in its recipe first"
    )


def _check_nobody_has_seen(
    name: str,
    goal: dict[str, Any],
    studies: dict[Path, list[dict]],
    records: Sequence[Record],
) -> None:
    """Raise UserError where the run, or another seed of it, has begun."""
    runs = [record.run_id for record in records if record.run_id == name or is_at(record, goal)]
    planned = {
        root: [{"run": name} | goal, *runs_of_study] for root, runs_of_study in studies.items()
    }
    runs += begun(planned, lambda run: all(run.get(key) == goal[key] for key in POINT))
    if runs:
        raise UserError(
            f"{runs[0]} has begun or is finished: only what nobody has seen can be predicted"
        )


def _check_vocabulary(name: str, goal: dict[str, Any], record: Record) -> None:
    if goal["vocab_size"] not in (None, record.vocab_size):
        raise UserError(
            f"{name} has a vocabulary of {goal['vocab_size']}, unlike {record.run_id}: predict it"
            " from such runs"
        )


def _prediction(target: Target, group: Group, loss_key: str) -> PredictionFile:
    """What the group says of the target, not yet sealed."""
    N = getattr(target, f"params_{group.convention}")
    prediction = _forecast(group, (N, target.tokens, target.flops))
    record = group.records[0]
    forms_left_out = [
        FormLeftOut(form, str(refusal_words(reason)))
        for form, reason in prediction.left_out.items()
    ]
    return PredictionFile(
        schema_version=SCHEMA_VERSION,
        target=target,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        git_commit=git(ROOT, "rev-parse", "HEAD"),
        loss_key=loss_key,
        loss_unit="nats per token",
        level=0.95,
        convention=str(group.convention),
        loss=prediction.loss,
        low=prediction.low,
        high=prediction.high,
        headline=prediction.headline,
        forms=list(prediction.forms),
        forms_left_out=forms_left_out,
        parts=prediction.parts,
        points=prediction.points,
        extrapolation=prediction.extrapolation,
        tokenizer_sha256=record.tokenizer_sha256,
        val_sha256=record.val_sha256,
        inputs=[_predicted_from(run, loss_key) for run in group.records],
        sha256="",
    )


def _predicted_from(run: Record, loss_key: str) -> PredictedFrom:
    return PredictedFrom(
        run_id=run.run_id,
        summary_sha256=run.summary_sha256,
        N=run.N,
        D=run.tokens,
        loss=getattr(run, loss_key),
    )


def _forecast(group: Group, target: tuple[float, float, float]) -> Forecast:
    try:
        return forecast(group.points, target, group.seed_sd)
    except CannotFit as error:
        raise UserError(str(refusal_words(error.refusal))) from None


def begun(studies: dict[Path, list[dict]], is_wanted: Callable[[dict], bool]) -> list[str]:
    """The runs that `is_wanted` of each folder's planned runs, of which something is on disk."""
    names = []
    for root, runs in studies.items():
        for run in runs:
            folder = root / run["run"]
            if is_wanted(run) and any((folder / name).exists() for name in BEGUN):
                names.append(run["run"])
    return names


def target_of(name: str, declared: dict[str, dict]) -> dict[str, Any]:
    """The counts and recipe of a run that is not there yet, the fields of Target. torch loads only
    where a config must be counted."""
    configs = sorted((ROOT / "configs").glob("*.py"))
    names = [*declared, *(path.stem for path in configs)]
    if name not in names:
        raise UserError(
            f"there is no run {name!r} in a study.json and no"
            f" configs/{name}.py{nearest(name, names)}"
        )
    goal = declared.get(name) or _target_of_config(name)
    counts = {key: goal[key] for key in ("recipe", *COUNTS)}
    return {"name": name, **counts, "vocab_size": goal.get("vocab_size")}


def _target_of_config(name: str) -> dict[str, Any]:
    from model import GPT
    from runtime.config import load_config

    config = load_config(ROOT / "configs" / f"{name}.py")
    return GPT.on_meta(config.model).counts() | {
        "recipe": config.fp8.label,
        "tokens": config.total_tokens,
        "vocab_size": config.model.vocab_size,
    }


def describe(prediction: Prediction) -> list[str]:
    """The frozen prediction as lines for people: the loss, what it is of, each form, the file; its
    parts are in the file."""
    file, target = prediction.file, prediction.file.target
    parameters = getattr(target, f"params_{file.convention}")
    low_percent = 100 * (file.low / file.loss - 1)
    high_percent = 100 * (file.high / file.loss - 1)
    lines = [
        (
            f"{target.name}: predicted {file.loss_key} {file.loss:.4f} nats per token by"
            f" {file.headline}, 95 % interval {file.low:.4f} to {file.high:.4f}"
            f" ({low_percent:+.2f} to {high_percent:+.2f} %)"
        ),
        (
            f"    {parameters:,} {KIND[file.convention]}parameters, {target.tokens:,} tokens,"
            f" {target.flops:.3g} FLOPs: {file.extrapolation:.3g} times the largest of"
            f" {file.points.all} runs in {target.recipe}, {file.points.at_this_ratio} of them at"
            " this ratio"
        ),
    ]
    for row in file.forms:
        lines.append(
            f"    {row.form:16} {row.loss:8.4f} ({row.low:.4f} to {row.high:.4f}), {row.n} runs,"
            f" residuals {100 * row.residual_rms:.3f} %"
        )
    for left_out in file.forms_left_out:
        lines.append(f"    {left_out.form}: left out, {left_out.reason}")
    lines.append(
        f"wrote {prediction.path} (sha256 {file.sha256[:12]}); commit it: only that shows that it"
        " was not made anew"
    )
    return lines


# -------------------------------------------------------------------------------------- to score


def score(folder: str | Path, records: Sequence[Record]) -> list[str]:
    """Hold every prediction in `folder` against its run among `records`, each seed apart; lines to
    print, score_<target>.json written. Raises UserError where nothing was predicted, a file was
    edited, or a run is not what was predicted."""
    predictions = load(folder)
    if not predictions:
        raise UserError(
            f"{folder} holds no prediction_*.json: freeze one with --predict NAME, or name its"
            " folder (out=DIR)"
        )
    lines = []
    for prediction in predictions:
        lines += _score_one(prediction, Path(folder), records)
    return lines


def _score_one(prediction: Prediction, folder: Path, records: Iterable[Record]) -> list[str]:
    """The lines of one prediction, whose score is written where its run is there."""
    name = prediction.target
    runs = [record for record in records if prediction.is_of(record)]
    runs.sort(key=lambda record: (record.run_id != name, record.run_id))
    if not runs:
        return [
            f"{name}: not there yet; predicted on {prediction.date}: {prediction.loss:.4f}"
            f" ({prediction.low:.4f} to {prediction.high:.4f})"
        ]
    scores = [_score(prediction, record) for record in runs]
    path = folder / f"score_{name}.json"
    write_files(
        folder, {path.name: asdict(ScoreFile(SCHEMA_VERSION, name, prediction.sha256, scores))}
    )
    lines = []
    for run_score in scores:
        lines += _score_lines(prediction, run_score)
    return [*lines, f"wrote {path}"]


def _score_lines(prediction: Prediction, run: RunScore) -> list[str]:
    forms_inside = [row.form for row in run.forms if row.inside]
    verdict = "inside" if run.inside else "OUTSIDE"
    predicted = f"predicted {prediction.loss:.4f} by {prediction.headline}"
    interval = f"the interval {prediction.low:.4f} to {prediction.high:.4f}"
    return [
        f"{run.run_id}: {prediction.file.loss_key} {run.loss:.4f}, {predicted}: error"
        f" {run.error_nats:+.4f} nats ({run.error_percent:+.2f} %), {verdict} {interval}",
        f"    inside the interval of {len(forms_inside)} of {len(run.forms)} forms:"
        f" {', '.join(forms_inside)}",
    ]


def _score(prediction: Prediction, record: Record) -> RunScore:
    """One run against its prediction. Raises UserError where it is another run, or is older."""
    _check_same(prediction, record)
    file, loss = prediction.file, getattr(record, prediction.file.loss_key)
    return RunScore(
        run_id=record.run_id,
        summary_sha256=record.summary_sha256,
        t_start=str(record.t_start),
        loss=loss,
        error_nats=file.loss - loss,
        error_percent=100 * (file.loss / loss - 1),
        inside=file.low <= loss <= file.high,
        forms=[_form_score(form, loss) for form in file.forms],
    )


def _form_score(form: FormForecast, loss: float) -> FormScore:
    """loss: measured, nats per token."""
    return FormScore(
        form=form.form,
        loss=form.loss,
        error_nats=form.loss - loss,
        error_percent=100 * (form.loss / loss - 1),
        inside=form.low <= loss <= form.high,
    )


def _check_same(prediction: Prediction, record: Record) -> None:
    file, path = prediction.file, prediction.path
    is_same = {
        "tokenizer": file.tokenizer_sha256 == record.tokenizer_sha256,
        "validation set": file.val_sha256 == record.val_sha256,
        "recipe, size or number of tokens": is_at(record, file.target.point),
    }
    differences = [what for what, same in is_same.items() if not same]
    if differences:
        raise UserError(
            f"{record.run_id} has another {' and another '.join(differences)} than {path} predicts"
        )
    started = record.t_start
    if started is None or datetime.fromisoformat(file.date) > datetime.fromisoformat(started):
        raise UserError(
            f"{path} is not older than its run, of {started}: move {path} away to use the run in"
            " fits"
        )
