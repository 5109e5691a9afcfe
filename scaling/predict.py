"""Freeze a prediction of a run before it exists, then hold it against the run:

    python scaling/fit.py out/ --predict gpt1p5b_fp8        # before the run: writes prediction_gpt1p5b_fp8.json
    python scaling/fit.py out/ --score                      # after it: error, inside the interval or not, by which form

The file's own hash shows a later edit by hand. Only a commit or a copy elsewhere shows that nobody made the file anew.
"""

import difflib
import json
import math
import re
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.machine import git
from scaling.captions import KIND
from scaling.files import write
from scaling.forecast import forecast, headline_at
from scaling.frozen import (
    UTC,
    Held,
    Prediction,
    digest,
    held_of,
    is_at,
    is_held,
    is_of,
    load,
    named_held_out,
    read_prediction,
    read_study,
)
from scaling.records import read_json

__all__ = ["Held", "Prediction", "describe", "freeze", "held_of", "is_held", "load", "named_held_out", "score"]
ROOT = Path(__file__).resolve().parents[1]
FORMAT_VERSION = 1
VACUOUS = 0.1               # of the loss: an interval that reaches farther holds every plausible outcome


def freeze(target: str, groups, folder, loss_key: str = "loss_bf16", roots=(), configs=ROOT / "configs",
           commit: str | None = None) -> Prediction:
    """Predict the run `target` from the group of its recipe and write folder/prediction_<target>.json.

    target: a run of a study.json (in `roots` or beside the groups' runs), else a config in the folder `configs`.
    commit: of this code, where git cannot tell it.
    An FP8 run is predicted from FP8 runs of its recipe alone: BF16 runs know nothing of FP8's gap at the target's size.
    Raises UserError where a prediction or the run is there already, where the runs were counted or tokenised in
    another way than the target, and where no law reaches it."""
    target = Path(target).stem if target.endswith(".py") else target
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", target):
        raise UserError(f"{target!r} is no name of a run: give one such as gpt1p5b_fp8")
    path = Path(folder) / f"prediction_{target}.json"
    if path.exists():
        raise UserError(f"{path} is there already, and a frozen prediction is not made anew: score it, or move it away")
    roots = sorted({Path(root) for root in roots} | {record.folder.parent for group in groups for record in group.records})
    goal = _target(target, roots, Path(configs))
    group = next((group for group in groups if group.recipe == goal["recipe"] and group.records), None)
    if group is None:
        raise UserError(f"{target} is a run in {goal['recipe']}, but the runs at hand are "
                          f"{', '.join(group.recipe for group in groups if group.records) or 'no runs, only a table'}: a "
                          "prediction needs runs of the same recipe, so train the smaller sizes in it first")
    _check_absent(target, goal, groups, roots)
    _check_counts(goal, group.records)
    count = f"params_{group.convention}"
    N, D = goal[count], goal["tokens"]
    said = forecast(group.points, (N, D, goal["flops_per_token"] * D), group.seed_sd or 0.0)
    said["parts"]["conventions"] = _by_convention(said["headline"], group, goal)
    content = {
        "format_version": FORMAT_VERSION, "target": goal, "date": time.strftime(UTC, time.gmtime()),
        "git_commit": _commit() or commit, "loss_key": loss_key, "loss_unit": "nats per token", "level": 0.95,
        "convention": group.convention, **said,
        "tokenizer_sha256": group.records[0].tokenizer_sha256, "val_sha256": group.records[0].val_sha256,
        "inputs": [{"run_id": record.run_id, "summary_sha256": record.summary_sha256, "N": record.N,
                    "D": record.tokens, "loss": getattr(record, loss_key)} for record in group.records],
    }
    content["sha256"] = digest(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another folder") from None
    return read_prediction(path)


def _target(name: str, roots, configs: Path) -> dict:
    """The counts and recipe of a run that is not there yet. torch loads only where a config must be counted."""
    declared = {run["run"]: run for root in roots for run in read_study(root).get("runs", [])}
    if name in declared:
        goal = declared[name]
    elif (configs / f"{name}.py").is_file():
        goal = _counted(configs / f"{name}.py")
    else:
        there = [*declared, *(one.stem for one in sorted(configs.glob("*.py")))]
        near = difflib.get_close_matches(name, there, n=1)
        raise UserError(f"there is no run {name!r} in a study.json and no {configs / name}.py"
                          + (f"; did you mean {near[0]}?" if near else ""))
    keys = ("recipe", "params_total", "params_nonembed", "params_matmul", "tokens", "flops_per_token")
    kinds = dict.fromkeys(keys, int | float) | {"recipe": str}
    if missing := [key for key in keys if not isinstance(goal.get(key), kinds[key]) or not goal[key]]:
        raise UserError(f"study.json says nothing usable of {', '.join(missing)} for {name}; write it anew: scaling/sweep.py")
    return {"name": name, **{key: goal[key] for key in keys}, "vocab_size": goal.get("vocab_size")}


def _counted(path: Path) -> dict:
    """A config's recipe and exact counts, as an entry of study.json has them."""
    from scaling.study import GPT, UserError, load_config, torch  # here, because it loads torch
    try:
        config = load_config(path)
    except UserError as error:
        raise UserError(str(error)) from None
    with torch.device("meta"):
        counts = GPT(config.model).counts()
    return counts | {"recipe": config.fp8.label, "tokens": config.total_tokens,
                     "vocab_size": config.model.vocab_size}


def _check_absent(target: str, goal: dict, groups, roots) -> None:
    same = [record for group in groups for record in group.records if record.run_id == target or is_at(record, goal)]
    held = [held for group in groups for held in group.held_out if held.loss is not None and (held.name == target or (
        group.recipe == goal["recipe"] and (goal[f"params_{group.convention}"], goal["tokens"]) == (held.N, held.D)))]
    for name in [record.run_id for record in same] + [held.name for held in held]:
        raise UserError(f"{name} is finished, and it is the run to be predicted ({goal['recipe']}, {goal['params_total']} "
                          f"parameters, {goal['tokens']} tokens): only what nobody has seen can be predicted")
    for root in roots:
        if any((root / target / name).exists() for name in ("summary.json", "metrics.jsonl", "checkpoints")):
            raise UserError(f"{root / target} has begun already: a prediction must be older than its run")


def _check_counts(goal: dict, records) -> None:
    """Runs and target counted by one convention, over one vocabulary."""
    for record in records:
        if not math.isclose(record.flops_per_token_6n_total, 6 * record.params_total, rel_tol=1e-9) or not math.isclose(
                record.flops_per_token_causal, _count(vars(record), "flops_per_token_causal"), rel_tol=1e-9):
            raise UserError(f"{record.folder}/summary.json counts FLOPs in another way than model.py does now: a prediction "
                              "cannot mix conventions; leave that run out")
        if goal["vocab_size"] not in (None, record.vocab_size):
            raise UserError(f"{goal['name']} has a vocabulary of {goal['vocab_size']} and {record.run_id} one of "
                              f"{record.vocab_size}: their losses are not comparable; predict from runs of one tokenizer")


def _by_convention(headline: str, group, goal: dict) -> dict:
    """The headline form's loss for the target when parameters (Chinchilla's law) or FLOPs are counted in each way."""
    said, points, in_N = {}, group.points, headline == "chinchilla"
    names = ("params_total", "params_nonembed", "params_matmul") if in_N else (
        "flops_per_token", "flops_per_token_causal", *(f"flops_per_token_6n_{one}" for one in ("total", "nonembed", "matmul")))
    for name in names:
        count = np.array([_count(vars(record), name) for record in group.records], dtype=float)
        mine, N, D = float(_count(goal, name)), goal[f"params_{group.convention}"], float(goal["tokens"])
        # The ray is a ray by the fitted count of N, whatever C is; Chinchilla's law takes every point.
        said[name] = (headline_at(headline, replace(points, N=count), (mine, D, mine * D)) if in_N else
                      headline_at(headline, replace(points, C=count * points.D), (N, D, mine * D)))
    return said


def _count(counts: dict, convention: str) -> float:
    """Parameters or FLOPs per token of a run under one convention, from its four counts."""
    if convention == "flops_per_token_causal":      # half of the attention, which is what lies above 6 params_matmul
        return counts["flops_per_token"] / 2 + 3 * counts["params_matmul"]
    if convention.startswith("flops_per_token_6n"):
        return 6 * counts[convention.replace("flops_per_token_6n", "params")]
    return counts[convention]


def _commit() -> str | None:
    return git(ROOT, "rev-parse", "HEAD")


def describe(prediction: Prediction) -> list[str]:
    """The frozen prediction as lines for people, its parts apart."""
    p, parts = prediction, prediction.content["parts"]

    def around(ends):
        return f"{ends[0]:.4f} to {ends[1]:.4f} ({100 * (ends[0] / p.loss - 1):+.2f} to {100 * (ends[1] / p.loss - 1):+.2f} %)"

    conventions = parts["conventions"]
    lines = [
        f"{p.target}: predicted {p.loss_key} {p.loss:.4f} nats per token by {p.headline}, 95 % interval "
        f"{around((p.low, p.high))}",
        f"    {p.N:,} {KIND[p.convention]}parameters, {p.D:,} tokens, {p.C:.3g} FLOPs: {p.content['extrapolation']:.3g} times "
        f"the largest of {p.content['points']['all']} runs in {p.recipe}, {p.content['points']['at_this_ratio']} of them at this "
        "ratio",
        *(f"    {what:40} {around(ends)}" for what, ends in (
            (f"{p.headline} alone", parts["headline_interval"]),
            ("model form, without noise", parts["model_form"]),
            ("counting convention, of that form", (min(conventions.values()), max(conventions.values()))),
            ("with each form's own residuals as noise", parts["own_residuals"]),
            ("with the forms that the points refute", parts["all_forms"]))),
        f"    one run's noise: +-{parts['run_noise_percent']:.2f} %, of seeds ({100 * parts['seed_sd']:.3f} %), the floor "
        f"({100 * parts['floor']:.2f} %) or residuals",
        "    form               loss     low      high     n  residuals"]
    for row in p.forms:
        lines.append(f"    {row['form']:16} {row['loss']:8.4f} {row['low']:8.4f} {row['high']:8.4f} {row['n']:4d}  "
                     f"{100 * row['residual_rms']:.3f} %")
    lines += [f"    {one['form']}: left out, {one['reason']}" for one in p.content["forms_left_out"]]
    return [*lines, f"wrote {p.path} (sha256 {p.sha256[:12]}); commit it: only that shows that it was not made anew"]


# -------------------------------------------------------------------------------------------------------------- scoring


def score(folder, records) -> list[str]:
    """Hold every prediction in `folder` against its run among `records`; lines to print, folder/score_<target>.json written.

    Several seeds of the target are scored apart. Raises UserError where nothing was predicted, where a file was edited,
    where the run began before its prediction or was judged by other tokens, and where it was among the prediction's inputs."""
    predictions = load(folder)
    if not predictions:
        raise UserError(f"{folder} holds no prediction_*.json: freeze one with --predict NAME before the run, or name its "
                          "folder with out=DIR")
    lines = []
    for prediction in predictions:
        runs = [record for record in records if is_of(record, prediction)]
        if not runs:
            lines.append(f"{prediction.target}: not there yet; predicted on {prediction.date}: {prediction.loss:.4f} "
                         f"({prediction.low:.4f} to {prediction.high:.4f})")
            continue
        runs = sorted(runs, key=lambda one: (one.run_id != prediction.target, one.run_id))
        scored = [_score(prediction, record) for record in runs]
        content = {"format_version": FORMAT_VERSION, "target": prediction.target, "prediction_sha256": prediction.sha256,
                   "predicted_on": prediction.date, "convention": prediction.convention, "loss_key": prediction.loss_key,
                   "predicted": prediction.loss, "low": prediction.low, "high": prediction.high,
                   "headline": prediction.headline, "runs": scored}
        path = Path(folder) / f"score_{prediction.target}.json"
        try:
            write(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): choose another folder") from None
        reach = max(prediction.loss - prediction.low, prediction.high - prediction.loss) / prediction.loss
        for one in scored:
            inside = [row["form"] for row in one["forms"] if row["inside"]]
            lines += [f"{one['run_id']}: {prediction.loss_key} {one['loss']:.4f}, predicted {prediction.loss:.4f} by "
                      f"{prediction.headline}: error {one['error_nats']:+.4f} nats ({one['error_percent']:+.2f} %), "
                      f"{'inside' if one['inside'] else 'OUTSIDE'} the interval {prediction.low:.4f} to {prediction.high:.4f}"
                      + (f", which reaches {reach:.0%} from the predicted loss: so wide that it tests nothing"
                         if one["inside"] and reach > VACUOUS else ""),
                      f"    inside the interval of {len(inside)} of {len(one['forms'])} forms"
                      + (f": {', '.join(inside)}" if inside else "")]
        lines.append(f"wrote {path}")
    return lines


def _score(prediction: Prediction, record) -> dict:
    """One run against its prediction; errors are predicted minus measured, in per cent of the measured loss."""
    content = prediction.content
    for key, what in (("tokenizer_sha256", "tokenizer"), ("val_sha256", "validation set")):
        if content.get(key) != getattr(record, key):
            raise UserError(f"{record.run_id} has another {what} than the runs behind {prediction.path} "
                              f"({getattr(record, key)} against {content.get(key)}): the two losses are not comparable")
    if not is_at(record, content["target"]):
        raise UserError(f"{record.run_id} is not the run that {prediction.path} predicts: {record.recipe}, "
                          f"{record.params_total} parameters, {record.tokens} tokens against {prediction.recipe}, "
                          f"{prediction.N}, {prediction.D}")
    if record.summary_sha256 in [one["summary_sha256"] for one in content["inputs"]]:
        raise UserError(f"{record.run_id} is one of the inputs of {prediction.path}: that is no prediction")
    if record.t_start is None:
        raise UserError(f"{record.folder}/summary.json has no t_start, so nothing shows that the run is younger than its "
                          "prediction: it cannot be scored")
    if datetime.fromisoformat(prediction.date) > datetime.fromisoformat(record.t_start):
        raise UserError(f"{prediction.path} of {prediction.date} is younger than its run, which began at {record.t_start}: "
                          f"that is no prediction, and it is not scored; move {prediction.path} away to use the run in fits")
    ended = read_json(record.folder / "summary.json").get("t_end")
    if isinstance(ended, str) and ended < record.t_start:
        raise UserError(f"{record.folder}/summary.json says that the run began at {record.t_start} and ended at {ended}: the "
                          "file was edited, and its age cannot be judged; restore it as train.py wrote it")
    loss = getattr(record, prediction.loss_key)

    def errors(low, value, high):
        return {"error_nats": value - loss, "error_percent": 100 * (value / loss - 1), "inside": low <= loss <= high}

    return {"run_id": record.run_id, "summary_sha256": record.summary_sha256, "t_start": record.t_start, "loss": loss,
            **errors(prediction.low, prediction.loss, prediction.high),
            "forms": [{"form": row["form"], "loss": row["loss"], **errors(row["low"], row["loss"], row["high"])}
                      for row in prediction.forms]}
