"""Say what finished runs predict for a new one (fit.py --predict); freeze that before the run
exists, then score it (--score).

Few points fit many laws, and how the laws part beyond the points is most of what is not known
there: on real ladders three sizes' laws differ by 6 % of the loss at the fourth, where seeds differ
by 0.02 to 0.2 %. A prediction's own hash shows a later edit by hand. Only a commit or a copy
elsewhere shows that nobody made it anew."""

import hashlib
import json
import math
import time
from collections import namedtuple
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy.special import fdtri, stdtrit

from lib.errors import UserError
from lib.machine import ROOT, git
from lib.plots import write_files
from lib.text import nearest
from scaling.gap_words import KIND
from scaling.laws import (
    COLLAPSED,
    DELTA,
    GAMMAS,
    LEVELS,
    MISSES,
    ONE_RAY,
    SIZE_TERMS,
    SPREAD,
    Fit,
    Points,
    fit_isoflop,
    fit_law,
    inefficiency,
    lack_of_fit,
    minima_of,
    rivals,
    with_bootstrap,
)
from scaling.records import read_json, read_study

FORMAT_VERSION = 1
# least noise of ln(loss) that an interval assumes: seeds measured elsewhere give .0002 to .002
FLOOR = 1e-3
FREE_RAY = 5  # points that the ray law with free gamma needs to enter the interval
# points for a rival surface, evenly over compute: its doubt is of the form, not of noise
ENOUGH = 400
# times more or fewer tokens per parameter than on the frontier, within which a target is near it
NEAR_FRONTIER = 2
REFUTED = 0.01  # chance of refuting a true form
RESAMPLES = 200  # for the covariance of Chinchilla's law where it is bootstrapped
# Speaks where the points cannot choose a form: between the power law, which is too low on laws with
# an irreducible loss, and the steepest rays, which are too high on laws that saturate late (OLMo's
# ladder has .10, Hoffmann's law .15, Epoch's .18).
HEADLINE = "ray gamma=0.12"
POINT = "recipe", "params_total", "tokens"  # what runs of one point share, whatever their seed
COUNTS = ("params_total", "params_nonembed", "params_matmul", "tokens", "flops_per_token")


# A frozen prediction of one run: the keys of its file as attributes (see `freeze`), but `target` is
# the run's name, beside its `recipe`; `path` and `content` are the file's. loss, low and high are
# nats per token, the interval at 95 %.
Prediction = SimpleNamespace
# A run that enters no fit; loss is None while it is not there, prediction where none was frozen.
Held = namedtuple("Held", "name N D C loss prediction")


def load(folder) -> list[Prediction]:
    return [read_prediction(path) for path in sorted(Path(folder).glob("prediction_*.json"))]


def read_frozen(path: Path) -> dict:
    """The content of a frozen file. Raises UserError where it is damaged or was edited since."""
    content = read_json(path)
    if digest(content) != content.get("sha256"):
        raise UserError(
            f"{path} was edited after it was frozen (its content does not match its sha256), or is"
            " of another version: restore the file as it was written, for nothing can be scored"
            " against this one"
        )
    return content


def read_prediction(path: Path) -> Prediction:
    """A frozen prediction. Raises UserError as read_frozen()."""
    content = read_frozen(path)
    goal = content["target"]
    return Prediction(
        **content
        | {"path": path, "content": content, "target": goal["name"], "recipe": goal["recipe"]}
    )


def held_out(records, predictions) -> list:
    """Those that enter no fit: a prediction of one is frozen (any seed of it counts), or the
    study.json beside it names it."""
    names = {
        name
        for root in {one.folder.parent for one in records}
        for name in read_study(root).get("held_out", [])
    }
    return [
        one
        for one in records
        if one.run_id in names or any(is_of(one, said) for said in predictions)
    ]


def held_of(recipe: str, records, predictions, loss_key: str, convention: str) -> tuple[Held, ...]:
    """The held-out `records` of one recipe with their predictions of loss_key, and the predictions
    whose runs are not there."""
    own = [one for one in predictions if (one.recipe, one.loss_key) == (recipe, loss_key)]
    held = [
        Held(
            record.run_id,
            record.N,
            record.tokens,
            record.flops_per_token * record.tokens,
            getattr(record, loss_key),
            next((one for one in own if is_of(record, one)), None),
        )
        for record in records
        if record.recipe == recipe
    ]
    for one in own:
        if not any(is_of(record, one) for record in records):
            goal = one.content["target"]
            held.append(
                Held(
                    one.target,
                    goal[f"params_{convention}"],
                    goal["tokens"],
                    goal["flops_per_token"] * goal["tokens"],
                    None,
                    one,
                )
            )
    return tuple(held)


def is_of(record, prediction: Prediction) -> bool:
    return record.run_id == prediction.target or is_at(record, prediction.content["target"])


def is_at(record, goal: dict) -> bool:
    """Whether a run has a target's recipe, size and tokens, whatever its seed."""
    return all(getattr(record, key) == goal[key] for key in POINT)


def digest(content: dict) -> str:
    """SHA-256 over the content without its own hash, as canonical JSON."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(
        json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def forecast(points: Points, target, seed_sd: float = 0.0) -> dict:
    """What the points say of one new run at target = (N, D, C): loss, 95 % interval and its parts,
    strict JSON.

    The union of t-intervals over forms. On the points of the target's ratio: the power law, rays
    with gamma in GAMMAS, from FREE_RAY points the ray with free gamma. Where those cannot speak:
    the same laws through the lowest loss for each compute, if the target is near that frontier, and
    rival surfaces (laws.rivals). Beside either, Chinchilla's law where all points, by their
    trajectories, identify it and it fits them. On the ray that law refutes forms that miss the
    points while it meets them, by an F-test with the freedom of sizes, not of runs: seeds and
    branches of a badly tuned size agree wrongly. Noise is the largest of seed_sd, FLOOR and the
    residuals, on the ray those of the best form: one that misses the points does not make the runs
    noisier. Raises UserError where no form has an interval."""
    N, D, C = (float(value) for value in target)
    floor, ratio = max(seed_sd, FLOOR), points.D / points.N / (D / N)
    # within 5 % of D / N tokens per parameter
    ray = points.take((ratio <= ONE_RAY) & (ratio >= 1 / ONE_RAY))
    rows, left_out = _laws_of_compute(ray, C, floor)
    best = min((row["residual_rms"] for row in rows.values()), default=0.0)
    for row in rows.values():
        _with_sigma(row, max(floor, best))
    is_on_ray = bool(rows)
    if not is_on_ray:
        rows, left_out = _rivals(points, (N, D, C), floor)
    try:
        row = _row("chinchilla", _fit("chinchilla", None, points, floor), (N, D))
        rows["chinchilla"] = _with_sigma(row, row["sigma"])
    except UserError as error:
        left_out["chinchilla"] = str(error)
    if not rows:
        raise UserError(
            f"no law reaches N={N:.4g}, D={D:.4g}: {len(ray.loss)} of {len(points.loss)} points lie"
            " at its ratio (3 of different compute are needed); L(N, D) is out:"
            f" {left_out['chinchilla']}"
        )
    every, freedom = _union(rows, "low", "high"), len(np.unique(points.N)) - SIZE_TERMS
    for form, row in (
        list(rows.items()) if "chinchilla" in rows and freedom > 0 and is_on_ray else ()
    ):
        sigma = rows["chinchilla"]["sigma"]
        if form != "chinchilla" and (row["residual_rms"] / sigma) ** 2 > fdtri(
            row["dof"], freedom, 1 - REFUTED
        ):
            left_out[form] = (
                f"the points refute it: it misses them by {100 * row['residual_rms']:.2f} %,"
                f" Chinchilla's law by {100 * sigma:.2f} %"
            )
            del rows[form]
    preferred = (
        "chinchilla",
        "ray",
        HEADLINE,
        f"frontier {HEADLINE}",
        HEADLINE.replace("ray", "surface"),
    )
    headline = next(form for form in (*preferred, *rows) if form in rows)
    low, high = _union(rows, "low", "high")
    return {
        "loss": rows[headline]["loss"],
        "low": low,
        "high": high,
        "headline": headline,
        "forms": list(rows.values()),
        "forms_left_out": [{"form": form, "reason": reason} for form, reason in left_out.items()],
        "parts": {
            "model_form": _union(rows, "loss", "loss"),
            "all_forms": every,
            "seed_sd": seed_sd,
        },
        "points": {"all": len(points.loss), "at_this_ratio": len(ray.loss)},
        "extrapolation": C / float(points.C.max()),
    }


def _laws_of_compute(points: Points, C: float, floor: float, name: str = "") -> tuple[dict, dict]:
    """(form -> row, form -> why it may not speak) of the power law and the ray laws over compute;
    name: put before a form's."""
    rows, left_out = {}, {}
    for form, gamma in [
        ("power_c", None),
        *((f"ray gamma={gamma:.2f}", gamma) for gamma in GAMMAS),
        ("ray", None),
    ]:
        try:
            rows[name + form] = _row(name + form, _fit(form, gamma, points, floor), (C,))
        except UserError as error:
            left_out[name + form] = str(error)
    return rows, left_out


def _row(form: str, fit: Fit, at) -> dict:
    loss, low, high = map(float, fit.interval_at(*at, new_run=True))
    return {
        "form": form,
        "loss": loss,
        "own_low": low,
        "own_high": high,
        "n": fit.n,
        "dof": fit.optimum.dof,
        "residual_rms": fit.residual_rms,
        "sigma": fit.optimum.sigma,
        "parameters": fit.parameters,
    }


def _with_sigma(row: dict, sigma: float) -> dict:
    """The row with `low` and `high` for another noise, to which its own interval is
    proportional."""
    width = math.log(row["own_high"] / row["loss"]) * sigma / row["sigma"]
    row |= {
        "low": row["loss"] * math.exp(-width),
        "high": row["loss"] * math.exp(width),
        "sigma": sigma,
    }
    return row


def _rivals(points: Points, target: tuple[float, float, float], floor: float) -> tuple[dict, dict]:
    """(form -> row, form -> why it may not speak) of laws through the lowest loss for each compute,
    near which the target must lie, and of rival surfaces. None speaks that would not count as
    fitting: see laws.MISSES."""
    N, D, C = target
    rows, left_out = {}, {}
    lowest = frontier_of(points)
    ratios = lowest.D / lowest.N
    if ratios.min() / NEAR_FRONTIER <= D / N <= ratios.max() * NEAR_FRONTIER:
        rows, left_out = _laws_of_compute(lowest, C, floor, "frontier ")
    by_compute = np.argsort(points.C, kind="stable")
    thinned = np.linspace(0, len(by_compute) - 1, min(len(by_compute), ENOUGH)).round().astype(int)
    for rival in _surfaces(points.take(by_compute[thinned]), (N, D)):
        sigma = max(floor, rival.residual_rms)
        width = (
            stdtrit(rival.dof, 0.975)
            * sigma
            * math.sqrt(1 + inefficiency(DELTA, sigma) * rival.variance)
        )
        rows[rival.form] = {
            "form": rival.form,
            "loss": rival.loss,
            "own_low": rival.loss * math.exp(-width),
            "own_high": rival.loss * math.exp(width),
            "n": rival.n,
            "dof": rival.dof,
            "residual_rms": rival.residual_rms,
            "sigma": sigma,
            "parameters": rival.parameters,
        }
    limit = max(
        MISSES[0], MISSES[1] * min((row["residual_rms"] for row in rows.values()), default=0.0)
    )
    for form, row in list(rows.items()):
        if row["residual_rms"] <= limit:
            _with_sigma(row, row["sigma"])
        else:
            left_out[form] = f"it misses the points by {100 * row['residual_rms']:.2g} %"
            del rows[form]
    return rows, left_out


def _surfaces(points: Points, at: tuple[float, float]) -> list[rivals.Rival]:
    """Rival surfaces where sizes and ratios are enough to tell N from D."""
    low, high = points.ray
    sizes, tokens = (len(np.unique(np.round(np.log(x), 2))) for x in (points.N, points.D))
    if high < SPREAD * low * 0.99 or min(sizes, tokens) < LEVELS:
        return []
    surfaces = [
        rivals.power_surface(points, at),
        *(rivals.surface_with(gamma, points, at) for gamma in GAMMAS),
    ]
    return [surface for surface in surfaces if surface is not None]


def frontier_of(points: Points) -> Points:
    """The lowest loss for each compute: the minima of identified IsoFLOP budgets, else the points
    below all of less compute."""
    isoflop = fit_isoflop(points)
    if isoflop.identified:
        C, N, D, loss = minima_of(isoflop)
        return Points(N, D, C, loss, np.arange(len(C)))
    order = np.argsort(points.C, kind="stable")
    loss = points.loss[order]
    is_lowest = loss <= np.minimum.accumulate(loss)
    return points.take(order[is_lowest])


def _union(rows, low: str, high: str) -> list[float]:
    return [min(row[low] for row in rows.values()), max(row[high] for row in rows.values())]


def _fit(form: str, gamma: float | None, points: Points, floor: float) -> Fit:
    """A form fitted to the points that it may use. Raises UserError with the reason why it may not
    speak."""
    fit = fit_law(
        form.split()[0], *points.axes(form.split()[0]), points.loss, seed_sd=floor, gamma=gamma
    )
    if form == "chinchilla":
        fit = with_bootstrap(fit, points, RESAMPLES)
    elif (computes := len(np.unique(points.C))) < 3:
        raise UserError(f"{computes} different computes; it needs 3")  # seeds add none
    if form == "ray" and fit.n < FREE_RAY:
        raise UserError(f"{fit.n} points; it needs {FREE_RAY}")
    if form in ("ray", "chinchilla") and not fit.identified:
        raise UserError(fit.reason)
    if form.startswith("ray") and fit.parameters["E"] < COLLAPSED * points.loss.min():
        raise UserError("it would need E below 0")
    if (
        form == "chinchilla"
        and lack_of_fit(fit, points, floor if floor > FLOOR else 0.0) is not None
    ):
        raise UserError(f"it does not fit the points: residuals of {100 * fit.scatter:.2g} %")
    if fit.optimum.covariance is None:
        raise UserError(fit.reason or "no degree of freedom")
    return fit


def freeze(target: str, groups, records, folder, loss_key: str = "loss_bf16") -> Prediction:
    """Predict the run `target` of a study.json, else a config, from the group of its recipe; write
    prediction_<target>.json. records: all finished runs. Raises UserError where a prediction or the
    run is there already, or nothing can be said."""
    target = target.removesuffix(".py")
    path = Path(folder) / f"prediction_{target}.json"
    if path.exists():
        raise UserError(
            f"{path} is there already, and a frozen prediction is not made anew: score it, or move"
            " it away"
        )
    studies = {
        root: read_study(root).get("runs", [])
        for root in sorted({record.folder.parent for record in records})
    }
    goal = target_of(target, {run["run"]: run for runs in studies.values() for run in runs})
    group = next((group for group in groups if group.recipe == goal["recipe"]), None)
    if group is None:
        raise UserError(
            f"{target} is a run in {goal['recipe']}, but the runs at hand are"
            f" {', '.join(group.recipe for group in groups)}: train smaller sizes in its recipe"
            " first"
        )
    there = [record.run_id for record in records if record.run_id == target or is_at(record, goal)]
    there += begun(
        {root: [{"run": target} | goal, *runs] for root, runs in studies.items()},
        lambda run: all(run.get(key) == goal[key] for key in POINT),
    )
    if there:
        raise UserError(
            f"{there[0]} has begun or is finished: only what nobody has seen can be predicted"
        )
    first, N, D = group.records[0], goal[f"params_{group.convention}"], goal["tokens"]
    if goal["vocab_size"] not in (None, first.vocab_size):
        raise UserError(
            f"{target} has a vocabulary of {goal['vocab_size']}, unlike {first.run_id}: predict it"
            " from such runs"
        )
    content = {
        "format_version": FORMAT_VERSION,
        "target": goal,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git_commit": git(ROOT, "rev-parse", "HEAD"),
        "loss_key": loss_key,
        "loss_unit": "nats per token",
        "level": 0.95,
        "convention": group.convention,
        **forecast(group.points, (N, D, goal["flops_per_token"] * D), group.seed_sd),
        "tokenizer_sha256": first.tokenizer_sha256,
        "val_sha256": first.val_sha256,
        "inputs": [
            {
                "run_id": record.run_id,
                "summary_sha256": record.summary_sha256,
                "N": record.N,
                "D": record.tokens,
                "loss": getattr(record, loss_key),
            }
            for record in group.records
        ],
    }
    write_files(path.parent, {path.name: content | {"sha256": digest(content)}})
    return read_prediction(path)


def begun(studies: dict[Path, list[dict]], is_wanted) -> list[str]:
    """The runs that `is_wanted` of each folder's planned runs, of which something is on disk."""
    names = ("metrics.jsonl", "checkpoints")
    return [
        run["run"]
        for root, runs in studies.items()
        for run in runs
        if is_wanted(run) and any((root / run["run"] / name).exists() for name in names)
    ]


def target_of(name: str, declared: dict[str, dict]) -> dict:
    """The counts and recipe of a run that is not there yet. torch loads only where a config must be
    counted."""
    there = [*declared, *(one.stem for one in sorted((ROOT / "configs").glob("*.py")))]
    if name not in there:
        raise UserError(
            f"there is no run {name!r} in a study.json and no"
            f" configs/{name}.py{nearest(name, there)}"
        )
    goal = declared.get(name)
    if not goal:
        from model import GPT
        from runtime.config import load_config

        config = load_config(ROOT / "configs" / f"{name}.py")
        goal = GPT.on_meta(config.model).counts() | {
            "recipe": config.fp8.label,
            "tokens": config.total_tokens,
            "vocab_size": config.model.vocab_size,
        }
    return {
        "name": name,
        **{key: goal[key] for key in ("recipe", *COUNTS)},
        "vocab_size": goal.get("vocab_size"),
    }


def describe(p: Prediction) -> list[str]:
    """The frozen prediction as lines for people: the loss, what it is of, each form, the file; its
    parts are in the file."""
    goal = p.content["target"]
    return [
        (
            f"{p.target}: predicted {p.loss_key} {p.loss:.4f} nats per token by {p.headline}, 95 %"
            f" interval {p.low:.4f} to {p.high:.4f} ({100 * (p.low / p.loss - 1):+.2f} to"
            f" {100 * (p.high / p.loss - 1):+.2f} %)"
        ),
        (
            f"    {goal[f'params_{p.convention}']:,} {KIND[p.convention]}parameters,"
            f" {goal['tokens']:,} tokens, {goal['flops_per_token'] * goal['tokens']:.3g} FLOPs:"
            f" {p.extrapolation:.3g} times the largest of {p.points['all']} runs in {p.recipe},"
            f" {p.points['at_this_ratio']} of them at this ratio"
        ),
        *(
            f"    {row['form']:16} {row['loss']:8.4f} ({row['low']:.4f} to {row['high']:.4f}),"
            f" {row['n']} runs, residuals {100 * row['residual_rms']:.3f} %"
            for row in p.forms
        ),
        *(f"    {one['form']}: left out, {one['reason']}" for one in p.forms_left_out),
        (
            f"wrote {p.path} (sha256 {p.sha256[:12]}); commit it: only that shows that it was not"
            " made anew"
        ),
    ]


def score(folder, records) -> list[str]:
    """Hold every prediction in `folder` against its run among `records`, each seed apart; lines to
    print, score_<target>.json written. Raises UserError where nothing was predicted, a file was
    edited, or a run is not what was predicted."""
    predictions, lines = load(folder), []
    if not predictions:
        raise UserError(
            f"{folder} holds no prediction_*.json: freeze one with --predict NAME, or name its"
            " folder (out=DIR)"
        )
    for p in predictions:
        runs = sorted(
            (one for one in records if is_of(one, p)),
            key=lambda one: (one.run_id != p.target, one.run_id),
        )
        if not runs:
            lines.append(
                f"{p.target}: not there yet; predicted on {p.date}: {p.loss:.4f} ({p.low:.4f} to"
                f" {p.high:.4f})"
            )
            continue
        scored, name = [_score(p, record) for record in runs], f"score_{p.target}.json"
        write_files(
            Path(folder),
            {
                name: {
                    "format_version": FORMAT_VERSION,
                    "target": p.target,
                    "prediction_sha256": p.sha256,
                    "runs": scored,
                }
            },
        )
        for one in scored:
            inside = [row["form"] for row in one["forms"] if row["inside"]]
            lines += [
                (
                    f"{one['run_id']}: {p.loss_key} {one['loss']:.4f}, predicted {p.loss:.4f} by"
                    f" {p.headline}: error {one['error_nats']:+.4f} nats"
                    f" ({one['error_percent']:+.2f} %),"
                    f" {'inside' if one['inside'] else 'OUTSIDE'} the interval {p.low:.4f} to"
                    f" {p.high:.4f}"
                ),
                (
                    f"    inside the interval of {len(inside)} of {len(one['forms'])} forms:"
                    f" {', '.join(inside)}"
                ),
            ]
        lines.append(f"wrote {Path(folder) / name}")
    return lines


def _score(prediction: Prediction, record) -> dict:
    """One run against its prediction; errors are predicted minus measured, in per cent of the
    measured loss."""
    content, path, loss = prediction.content, prediction.path, getattr(record, prediction.loss_key)
    if wrong := [
        what
        for what, is_same in (
            ("tokenizer", content["tokenizer_sha256"] == record.tokenizer_sha256),
            ("validation set", content["val_sha256"] == record.val_sha256),
            ("recipe, size or number of tokens", is_at(record, content["target"])),
        )
        if not is_same
    ]:
        raise UserError(
            f"{record.run_id} has another {' and another '.join(wrong)} than {path} predicts"
        )
    if record.t_start is None or datetime.fromisoformat(prediction.date) > datetime.fromisoformat(
        record.t_start
    ):
        raise UserError(
            f"{path} is not older than its run, of {record.t_start}: move {path} away to use the"
            " run in fits"
        )

    def against(said) -> dict:
        return {
            "error_nats": said["loss"] - loss,
            "error_percent": 100 * (said["loss"] / loss - 1),
            "inside": said["low"] <= loss <= said["high"],
        }

    return {
        "run_id": record.run_id,
        "summary_sha256": record.summary_sha256,
        "t_start": record.t_start,
        "loss": loss,
        **against(content),
        "forms": [
            {"form": row["form"], "loss": row["loss"], **against(row)} for row in prediction.forms
        ],
    }
