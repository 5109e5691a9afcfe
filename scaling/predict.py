"""Say what finished runs predict for a new one; freeze that before the run exists, then hold it against the run:

    python scaling/fit.py out/ --predict gpt1p5b_fp8        # before the run: writes prediction_gpt1p5b_fp8.json
    python scaling/fit.py out/ --score                      # after it: error, inside the interval or not, by which form

Few points fit many laws, and how the laws part beyond the points is most of what is not known there: on real ladders
three sizes' laws differ by 6 % of the loss at the fourth, where seeds differ by 0.02 to 0.2 %. A prediction's own hash shows
a later edit by hand. Only a commit or a copy elsewhere shows that nobody made it anew.
"""

import hashlib
import json
import math
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from scipy.special import fdtri, stdtrit

from runtime.cli import UserError, nearest
from runtime.machine import git, write_json
from scaling.intervals import with_bootstrap
from scaling.laws import COLLAPSED, GAMMAS, ONE_RAY, Points, fit_chinchilla, fit_power, fit_ray
from scaling.records import CONVENTIONS, read_json, read_study

ROOT = Path(__file__).resolve().parents[1]
UTC = "%Y-%m-%dT%H:%M:%SZ"
FORMAT_VERSION = 1
FLOOR = 1e-3                # least noise of ln(loss) that an interval assumes: seeds measured elsewhere give .0002 to .002
FREE_RAY = 5                # points that the ray law with free gamma needs to enter the interval
REFUTED = 0.01              # chance of refuting a true form
SIZE_TERMS = 3              # E, A, alpha: what Chinchilla's law takes from the sizes
RESAMPLES = 200             # for the covariance of Chinchilla's law where it is bootstrapped
GAMMA = 0.16                # middle of GAMMAS: the ray law that speaks where the points cannot choose one
VACUOUS = 0.1               # of the loss: an interval that reaches farther holds every plausible outcome
POINT = "recipe", "params_total", "tokens"      # what runs of one point share, whatever their seed
COUNTS = ("params_total", "params_nonembed", "params_matmul", "tokens", "flops_per_token")


# ----------------------------------------------------------------------------------- frozen predictions, held-out runs

@dataclass(frozen=True, eq=False)
class Prediction:
    """A frozen prediction of one run; loss, low and high in nats per token, the interval at 95 %."""

    path: Path
    content: dict                       # the whole file
    convention: str                     # which parameters N and its laws count, "total" or "nonembed"
    N: int                              # parameters as the convention counts them
    C: float                            # flops_per_token * tokens
    D: int                              # tokens
    target: str
    recipe: str
    date: str                           # UTC, as 2026-11-21T15:44:05Z
    sha256: str                         # of the rest of the file's content
    loss_key: str                       # "loss_bf16" or "loss_as_trained"
    loss: float
    low: float
    high: float
    headline: str                       # name of the form that gives `loss`
    forms: list                         # of dict: form, loss, low, high, ...


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
    """A frozen prediction. Raises UserError where it is damaged or was edited since."""
    content = read_json(path)
    try:
        goal, convention = content["target"], content.get("convention", CONVENTIONS[0])     # older files say nothing and mean all
        prediction = Prediction(
            path, content, convention, goal[f"params_{convention}"], goal["flops_per_token"] * goal["tokens"], goal["tokens"],
            goal["name"], goal["recipe"],
            *(content[key] for key in ("date", "sha256", "loss_key", "loss", "low", "high", "headline", "forms")))
        if digest(content) == prediction.sha256:
            return prediction
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is no prediction of this version ({type(error).__name__}: {error}); restore it") from None
    raise UserError(f"{path} was edited after it was frozen (its content does not match its sha256): restore the file as it was "
                    "written, for nothing can be scored against this one")


def named_held_out(roots) -> set[str]:
    """Names of runs that a study.json, in one of these folders of runs, declares held out."""
    return {name for root in sorted({Path(root) for root in roots}) for name in read_study(root).get("held_out", [])}


def is_held(record, predictions, names=()) -> bool:
    """Whether a run enters no fit: a prediction of it is frozen (any seed of it counts), or a study holds it out."""
    return record.run_id in names or any(is_of(record, one) for one in predictions)


def held_of(recipe: str, records, predictions, names=(), loss_key: str = "loss_bf16") -> tuple[Held, ...]:
    """The held-out runs of one recipe among `records`, plus a Held without loss for each prediction whose run is not there; N as
    the records count it. Only predictions of loss_key come along."""
    held, met, count = [], set(), f"params_{records[0].convention if records else CONVENTIONS[0]}"
    for record in records:
        if record.recipe == recipe and is_held(record, predictions, names):
            prediction = next((one for one in predictions if is_of(record, one)), None)
            met.add(prediction)
            held.append(Held(record.run_id, record.N, record.tokens, record.flops_per_token * record.tokens,
                             getattr(record, loss_key), prediction if prediction and prediction.loss_key == loss_key else None))
    held += [Held(one.target, one.content["target"][count], one.D, one.C, None, one) for one in predictions
             if one.recipe == recipe and one not in met and one.loss_key == loss_key]
    return tuple(held)


def is_of(record, prediction: Prediction) -> bool:
    return record.run_id == prediction.target or is_at(record, prediction.content["target"])


def is_at(record, goal: dict) -> bool:
    """Whether a run has a target's recipe, size and tokens, whatever its seed."""
    return all(getattr(record, key) == goal[key] for key in POINT)


def digest(content: dict) -> str:
    """SHA-256 over the content without its own hash, as canonical JSON."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()

# ---------------------------------------------------------------------------------------------- what points say

def forecast(points: Points, target, seed_sd: float = 0.0) -> dict:
    """What the points say of one new run at target = (N, D, C): loss, 95 % interval and its parts, strict JSON.
    The union of t-intervals over forms: power law and rays with gamma in GAMMAS, on the points of the target's ratio; the ray
    with free gamma from FREE_RAY such points; Chinchilla's law where all points, by their trajectories, identify it. That law
    refutes forms that miss the points while it meets them, by an F-test whose freedom is that of sizes, not of runs: seeds and
    branches of a badly tuned size all agree, and agree wrongly. Noise is the largest of seed_sd, FLOOR and the residuals, on
    the ray those of the form that fits best: a form that misses the points is wrong, it does not make the runs noisier. Raises
    UserError where no form has an interval."""
    N, D, C = (float(value) for value in target)
    floor, rows, left_out, ratio = max(seed_sd, FLOOR), [], {}, points.D / points.N / (D / N)
    ray = points.take((ratio <= ONE_RAY) & (ratio >= 1 / ONE_RAY))      # within 5 % of D / N tokens per parameter
    for form, fit_of in _forms(ray, points, floor).items():
        try:
            fit = fit_of()
            reason = _unfit(form, fit, ray)
        except UserError as error:
            reason = str(error)
        if not reason:
            with np.errstate(over="ignore"):
                where = (N, D) if form == "chinchilla" else (C,)
                loss, low, high = (float(value) for value in fit.interval_at(*where, new_run=True))
            reason = None if low > 0 and math.isfinite(high) else "its interval is beyond all numbers"
        if reason:
            left_out[form] = reason
        else:
            rows.append({"form": form, "loss": loss, "own_low": low, "own_high": high, "n": fit.n, "dof": fit.optimum.dof,
                         "residual_rms": fit.residual_rms, "sigma": fit.optimum.sigma, "parameters": fit.parameters})
    if not rows:
        raise UserError(
            f"no law reaches N={N:.4g}, D={D:.4g}: {len(ray.loss)} of {len(points.loss)} points lie at its {D / N:.3g} tokens "
            f"per parameter, where 3 of different compute are needed, and Chinchilla's law is out ({left_out['chinchilla']}); "
            "add runs")
    best = min((row["residual_rms"] for row in rows if row["form"] != "chinchilla"), default=0.0)
    for row in rows:
        sigma = row["sigma"] if row["form"] == "chinchilla" else max(floor, best)
        width = math.log(row["own_high"] / row["loss"]) * sigma / row["sigma"]      # proportional to sigma
        row |= {"low": row["loss"] * math.exp(-width), "high": row["loss"] * math.exp(width), "sigma": sigma}
    by_form = {row["form"]: row for row in rows}
    judge, freedom = by_form.get("chinchilla"), len(np.unique(points.N)) - SIZE_TERMS
    for form, row in list(by_form.items()) if judge and freedom > 0 else ():
        if form != "chinchilla" and (row["residual_rms"] / judge["sigma"]) ** 2 > fdtri(row["dof"], freedom, 1 - REFUTED):
            left_out[form] = (f"the points refute it: it misses them by {100 * row['residual_rms']:.2f} %, Chinchilla's law by "
                              f"{100 * judge['sigma']:.2f} %")
            del by_form[form]
    kept = list(by_form.values())
    headline = by_form[next(form for form in ("chinchilla", "ray", f"ray gamma={GAMMA:.2f}", *by_form) if form in by_form)]
    low, high = _union(kept, "low", "high")
    return {
        "loss": headline["loss"], "low": low, "high": high, "headline": headline["form"], "forms": kept,
        "forms_left_out": [{"form": form, "reason": reason} for form, reason in left_out.items()],
        "parts": {
            "headline_interval": [headline["low"], headline["high"]], "model_form": _union(kept, "loss", "loss"),
            "own_residuals": _union(kept, "own_low", "own_high"), "all_forms": _union(rows, "low", "high"),
            "run_noise_percent": 100 * float(stdtrit(headline["dof"], 0.975)) * headline["sigma"],     # the law known
            "seed_sd": seed_sd, "floor": FLOOR,
        },
        "points": {"all": len(points.loss), "at_this_ratio": len(ray.loss)},
        "extrapolation": C / float(points.C.max()),
    }


def _union(rows, low: str, high: str) -> list[float]:
    return [min(row[low] for row in rows), max(row[high] for row in rows)]


def _forms(ray: Points, points: Points, floor: float) -> dict:
    """form -> a call that fits it; the names are those in the file."""
    return {"power_c": lambda: fit_power(ray.C, ray.loss, "c", seed_sd=floor),
            **{f"ray gamma={gamma:.2f}": lambda gamma=gamma: fit_ray(ray.C, ray.loss, gamma=gamma, seed_sd=floor)
               for gamma in GAMMAS},
            "ray": lambda: fit_ray(ray.C, ray.loss, seed_sd=floor),
            "chinchilla": lambda: with_bootstrap(fit_chinchilla(points.N, points.D, points.loss, seed_sd=floor), points,
                                                 RESAMPLES)}


def _unfit(form: str, fit, ray: Points) -> str | None:
    """Why a fitted form may not speak, or None."""
    if form != "chinchilla" and (computes := len(np.unique(ray.C))) < 3:
        return f"{computes} different computes; it needs 3"       # seeds add none
    if form == "ray" and fit.n < FREE_RAY:
        return f"{fit.n} points; it needs {FREE_RAY}"
    if form in ("ray", "chinchilla") and not fit.identified:
        return fit.reason
    if form.startswith("ray") and fit.parameters["E"] < COLLAPSED * ray.loss.min():
        return "it would need E below 0"
    return None if fit.optimum.covariance is not None else fit.reason or "no degree of freedom"


# ------------------------------------------------------------------------------------------------------------ freezing

def freeze(target: str, groups, folder, loss_key: str = "loss_bf16", roots=(), configs=ROOT / "configs",
           commit: str | None = None) -> Prediction:
    """Predict the run `target` of a study.json, else a config, from the group of its recipe; write prediction_<target>.json.
    commit: of this code, where git cannot tell it. BF16 runs know nothing of FP8's gap at the target's size, so they predict
    none. Raises UserError where a prediction or the run is there already, for another tokenizer, and where no law reaches it."""
    target = target.removesuffix(".py")
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
    if goal["vocab_size"] not in (None, group.records[0].vocab_size):
        raise UserError(f"{target} has a vocabulary of {goal['vocab_size']} and {group.records[0].run_id} one of "
                        f"{group.records[0].vocab_size}: their losses are not comparable; predict from runs of one tokenizer")
    N, D = goal[f"params_{group.convention}"], goal["tokens"]
    said = forecast(group.points, (N, D, goal["flops_per_token"] * D), group.seed_sd or 0.0)
    content = {
        "format_version": FORMAT_VERSION, "target": goal, "date": time.strftime(UTC, time.gmtime()),
        "git_commit": git(ROOT, "rev-parse", "HEAD") or commit, "loss_key": loss_key, "loss_unit": "nats per token",
        "level": 0.95, "convention": group.convention, **said,
        "tokenizer_sha256": group.records[0].tokenizer_sha256, "val_sha256": group.records[0].val_sha256,
        "inputs": [{"run_id": record.run_id, "summary_sha256": record.summary_sha256, "N": record.N,
                    "D": record.tokens, "loss": getattr(record, loss_key)} for record in group.records],
    }
    _write(path, content | {"sha256": digest(content)})
    return read_prediction(path)


def _write(path: Path, content: dict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another folder") from None


def _target(name: str, roots, configs: Path) -> dict:
    """The counts and recipe of a run that is not there yet. torch loads only where a config must be counted."""
    declared = {run["run"]: run for root in roots for run in read_study(root).get("runs", [])}
    there = [*declared, *(one.stem for one in sorted(configs.glob("*.py")))]
    if name not in there:
        raise UserError(f"there is no run {name!r} in a study.json and no {configs / name}.py{nearest(name, there)}")
    goal = declared.get(name)
    if not goal:
        import torch

        from model import GPT
        from runtime.config import load_config
        config = load_config(configs / f"{name}.py")
        with torch.device("meta"):
            goal = GPT(config.model).counts()
        goal |= {"recipe": config.fp8.label, "tokens": config.total_tokens, "vocab_size": config.model.vocab_size}
    if missing := {"recipe", *COUNTS} - goal.keys():
        raise UserError(f"study.json lacks {', '.join(sorted(missing))} of {name}; write it anew: scaling/sweep.py")
    return {"name": name, **{key: goal[key] for key in ("recipe", *COUNTS)}, "vocab_size": goal.get("vocab_size")}


def _check_absent(target: str, goal: dict, groups, roots) -> None:
    """Raise UserError where a run of its recipe, size and tokens has begun, by its own name or one of a study, or is finished."""
    there = [record.run_id for group in groups for record in group.records if record.run_id == target or is_at(record, goal)]
    there += [held.name for group in groups for held in group.held_out if held.loss is not None and (held.name == target or (
        group.recipe == goal["recipe"] and (goal[f"params_{group.convention}"], goal["tokens"]) == (held.N, held.D)))]
    there += [run["run"] for root in roots for run in [{"run": target} | goal, *read_study(root).get("runs", [])]
              if all(run.get(key) == goal[key] for key in POINT)
              and any((root / run["run"] / name).exists() for name in ("summary.json", "metrics.jsonl", "checkpoints"))]
    if there:
        raise UserError(f"{there[0]} has begun or is finished, and it is the run to be predicted: only what nobody has seen can "
                        "be predicted")


def describe(prediction: Prediction) -> list[str]:
    """The frozen prediction as lines for people: the loss, what it is of, each form, the file; its parts are in the file."""
    p, said = prediction, prediction.content
    return [
        f"{p.target}: predicted {p.loss_key} {p.loss:.4f} nats per token by {p.headline}, 95 % interval {p.low:.4f} to "
        f"{p.high:.4f} ({100 * (p.low / p.loss - 1):+.2f} to {100 * (p.high / p.loss - 1):+.2f} %)",
        f"    {p.N:,} {'non-embedding ' * (p.convention == 'nonembed')}parameters, {p.D:,} tokens, {p.C:.3g} FLOPs: "
        f"{said['extrapolation']:.3g} times the largest of {said['points']['all']} runs in {p.recipe}, "
        f"{said['points']['at_this_ratio']} of them at this ratio",
        *(f"    {row['form']:16} {row['loss']:8.4f} ({row['low']:.4f} to {row['high']:.4f}), {row['n']} runs, residuals "
          f"{100 * row['residual_rms']:.3f} %" for row in p.forms),
        *(f"    {one['form']}: left out, {one['reason']}" for one in said["forms_left_out"]),
        f"wrote {p.path} (sha256 {p.sha256[:12]}); commit it: only that shows that it was not made anew"]


# -------------------------------------------------------------------------------------------------------------- scoring

def score(folder, records) -> list[str]:
    """Hold every prediction in `folder` against its run among `records`, each seed apart; lines to print, score_<target>.json
    written. Raises UserError where nothing was predicted, a file was edited, the run began before its prediction, was judged by
    other tokens or was among the prediction's inputs."""
    predictions, lines = load(folder), []
    if not predictions:
        raise UserError(f"{folder} holds no prediction_*.json: freeze one with --predict NAME before the run, or name its "
                        "folder with out=DIR")
    for p in predictions:
        runs = sorted((one for one in records if is_of(one, p)), key=lambda one: (one.run_id != p.target, one.run_id))
        if not runs:
            lines.append(f"{p.target}: not there yet; predicted on {p.date}: {p.loss:.4f} ({p.low:.4f} to {p.high:.4f})")
            continue
        scored = [_score(p, record) for record in runs]
        path = Path(folder) / f"score_{p.target}.json"
        _write(path, {"format_version": FORMAT_VERSION, "target": p.target, "prediction_sha256": p.sha256,
                      "predicted_on": p.date, "convention": p.convention, "loss_key": p.loss_key, "predicted": p.loss,
                      "low": p.low, "high": p.high, "headline": p.headline, "runs": scored})
        reach = max(p.loss - p.low, p.high - p.loss) / p.loss
        wide = f", which reaches {reach:.0%} from the predicted loss: so wide that it tests nothing" * (reach > VACUOUS)
        for one in scored:
            inside = [row["form"] for row in one["forms"] if row["inside"]]
            lines += [f"{one['run_id']}: {p.loss_key} {one['loss']:.4f}, predicted {p.loss:.4f} by {p.headline}: error "
                      f"{one['error_nats']:+.4f} nats ({one['error_percent']:+.2f} %), "
                      f"{'inside' if one['inside'] else 'OUTSIDE'} the interval {p.low:.4f} to {p.high:.4f}{wide}",
                      f"    inside the interval of {len(inside)} of {len(one['forms'])} forms: {', '.join(inside)}"]
        lines.append(f"wrote {path}")
    return lines


def _score(prediction: Prediction, record) -> dict:
    """One run against its prediction; errors are predicted minus measured, in per cent of the measured loss."""
    content, path, loss = prediction.content, prediction.path, getattr(record, prediction.loss_key)
    wrong = [what for key, what in (("tokenizer_sha256", "another tokenizer"), ("val_sha256", "another validation set"))
             if content.get(key) != getattr(record, key)]
    wrong += ["another recipe, size or number of tokens"] * (not is_at(record, content["target"]))
    if wrong:
        raise UserError(f"{record.run_id} has {' and '.join(wrong)} than {path} predicts: the two losses are not comparable")
    if record.summary_sha256 in [one["summary_sha256"] for one in content["inputs"]]:
        raise UserError(f"{record.run_id} is one of the inputs of {path}: that is no prediction")
    if record.t_start is None or datetime.fromisoformat(prediction.date) > datetime.fromisoformat(record.t_start):
        raise UserError(f"{path} of {prediction.date} is not older than its run, which began at {record.t_start}: that is no "
                        f"prediction, and it is not scored; move {path} away to use the run in fits")

    def errors(low, value, high):
        return {"error_nats": value - loss, "error_percent": 100 * (value / loss - 1), "inside": low <= loss <= high}

    return {"run_id": record.run_id, "summary_sha256": record.summary_sha256, "t_start": record.t_start, "loss": loss,
            **errors(prediction.low, prediction.loss, prediction.high),
            "forms": [{"form": row["form"], "loss": row["loss"], **errors(row["low"], row["loss"], row["high"])}
                      for row in prediction.forms]}
