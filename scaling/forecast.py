"""Say what finished runs predict for a new one, form by form.

Few points fit many laws, and how the laws part beyond the points is most of what is not known there: on real ladders
three sizes' laws differ by 6 % of the loss at the fourth, where seeds differ by 0.02 to 0.2 %.
"""

import math

import numpy as np
from scipy.stats import f as fisher
from scipy.stats import t as student

from runtime.cli import UserError
from scaling.bootstrap import with_bootstrap
from scaling.chinchilla import fit_chinchilla
from scaling.laws import COLLAPSED, GAMMAS, ONE_RAY, Points, fit_power, fit_ray

FLOOR = 1e-3                # least noise of ln(loss) that an interval assumes: seeds measured elsewhere give .0002 to .002
FREE_RAY = 5                # points that the ray law with free gamma needs to enter the interval
REFUTED = 0.01              # chance of refuting a true form
SIZE_TERMS = 3              # E, A, alpha: what Chinchilla's law takes from the sizes
RESAMPLES = 200             # for the covariance of Chinchilla's law where it is bootstrapped
GAMMA = 0.16                # middle of GAMMAS: the ray law that speaks where the points cannot choose one


def forecast(points: Points, target, seed_sd: float = 0.0) -> dict:
    """What the points say of one new run at target = (N, D, C): loss, 95 % interval and its parts, strict JSON.

    The interval is the union of t-intervals over forms: power law and rays with gamma in GAMMAS, on the points of the
    target's tokens per parameter; the ray with free gamma from FREE_RAY such points; Chinchilla's law where all points, by
    their trajectories, identify it. That law also refutes forms that miss the points while it meets them, by an F-test whose
    freedom is that of sizes, not of runs: seeds and branches of a badly tuned size all agree, and agree wrongly.
    Noise is the largest of seed_sd, FLOOR and residuals; on the ray the residuals of the form that fits best, for all: a
    form that misses the points is wrong by its point, it does not make the runs noisier (with its own residuals it would:
    `own_residuals`). Raises UserError where no form has an interval."""
    N, D, C = (float(value) for value in target)
    floor, rows, left_out = max(seed_sd, FLOOR), [], []
    ray = _on_ray(points, N, D)
    for form, fit_of in _forms(ray, points, floor).items():
        try:
            fit = fit_of()
            reason = _unfit(form, fit, ray.loss)
        except UserError as error:
            reason = str(error)
        if not reason:
            with np.errstate(over="ignore"):
                loss, low, high = (float(value) for value in fit.interval_at(*_at(form, N, D, C), new_run=True))
            reason = None if low > 0 and math.isfinite(high) else "its interval is beyond all numbers"
        if reason:
            left_out.append({"form": form, "reason": reason})
            continue
        rows.append({"form": form, "loss": loss, "own_low": low, "own_high": high, "n": fit.n, "dof": fit.optimum.dof,
                     "residual_rms": fit.residual_rms, "sigma": fit.optimum.sigma, "parameters": fit.parameters})
    if not rows:
        raise UserError(
            f"no law reaches N={N:.4g}, D={D:.4g}: {len(ray.loss)} of {len(points.loss)} points lie at its {D / N:.3g} tokens "
            "per parameter, where 3 of different compute are needed, and Chinchilla's law is out ("
            f"{next(one['reason'] for one in left_out if one['form'] == 'chinchilla')}); add runs")
    _share_noise(rows, floor)
    judge = next((row for row in rows if row["form"] == "chinchilla"), None)
    freedom = len(np.unique(points.N)) - SIZE_TERMS
    kept = []
    for row in rows:
        if why := judge and freedom > 0 and _refuted(row, judge, freedom):
            left_out.append({"form": row["form"], "reason": why})
        else:
            kept.append(row)
    by_form = {row["form"]: row for row in kept}
    headline = by_form[next(form for form in ("chinchilla", "ray", ray_name(GAMMA), *by_form) if form in by_form)]
    low, high = _union(kept, "low", "high")
    return {
        "loss": headline["loss"], "low": low, "high": high, "headline": headline["form"], "forms": kept,
        "forms_left_out": left_out,
        "parts": {
            "headline_interval": [headline["low"], headline["high"]], "model_form": _union(kept, "loss", "loss"),
            "own_residuals": _union(kept, "own_low", "own_high"), "all_forms": _union(rows, "low", "high"),
            "run_noise_percent": 100 * float(student.ppf(0.975, headline["dof"])) * headline["sigma"],     # the law known
            "seed_sd": seed_sd, "floor": FLOOR,
        },
        "points": {"all": len(points.loss), "at_this_ratio": len(ray.loss)},
        "extrapolation": C / float(points.C.max()),
    }


def _share_noise(rows: list[dict], floor: float) -> None:
    """Give every form its low and high; on the ray with the residuals of the form that fits best."""
    best = min((row["residual_rms"] for row in rows if row["form"] != "chinchilla"), default=0.0)
    for row in rows:
        sigma = row["sigma"] if row["form"] == "chinchilla" else max(floor, best)
        width = math.log(row["own_high"] / row["loss"]) * sigma / row["sigma"]      # proportional to sigma
        row |= {"low": row["loss"] * math.exp(-width), "high": row["loss"] * math.exp(width), "sigma": sigma}


def _refuted(row: dict, judge: dict, freedom: int) -> str | None:
    """Why the points refute a form: `judge`, Chinchilla's law with so many sizes to spare, meets them far better."""
    share = (row["residual_rms"] / judge["sigma"]) ** 2
    if row is judge or share <= fisher.ppf(1 - REFUTED, row["dof"], freedom):
        return None
    return (f"the points refute it: it misses them by {100 * row['residual_rms']:.2f} %, Chinchilla's law by "
            f"{100 * judge['sigma']:.2f} %")


def _union(rows, low: str, high: str) -> list[float]:
    return [min(row[low] for row in rows), max(row[high] for row in rows)]


def headline_at(form: str, points: Points, target) -> float:
    """One form's loss at target = (N, D, C), fitted to the points: what another way of counting would have said."""
    N, D, C = target
    return float(_forms(_on_ray(points, N, D), points, FLOOR)[form]().predict(*_at(form, N, D, C)))


def _on_ray(points: Points, N: float, D: float) -> Points:
    """The points within 5 % of D / N tokens per parameter."""
    ratio = points.D / points.N / (D / N)
    return points.take((ratio <= ONE_RAY) & (ratio >= 1 / ONE_RAY))


def _forms(ray: Points, points: Points, floor: float) -> dict:
    """form -> a call that fits it; the names are those in the file."""
    forms = {"power_c": lambda: fit_power(ray.C, ray.loss, "c", seed_sd=floor)}
    for gamma in GAMMAS:
        forms[ray_name(gamma)] = lambda gamma=gamma: fit_ray(ray.C, ray.loss, gamma=gamma, seed_sd=floor)
    forms["ray"] = lambda: fit_ray(ray.C, ray.loss, seed_sd=floor)
    forms["chinchilla"] = lambda: with_bootstrap(fit_chinchilla(points.N, points.D, points.loss, seed_sd=floor), points,
                                                 RESAMPLES)
    return forms


def ray_name(gamma: float) -> str:
    return f"ray gamma={gamma:.2f}"


def _at(form: str, N, D, C) -> tuple:
    return (N, D) if form == "chinchilla" else (C,)


def _unfit(form: str, fit, loss) -> str | None:
    """Why a fitted form may not speak, or None."""
    needed = {"ray": FREE_RAY}.get(form, 3)
    if fit.n < needed:
        return f"{fit.n} points; it needs {needed}"
    if form in ("ray", "chinchilla") and not fit.identified:
        return fit.reason
    if form.startswith("ray") and fit.parameters["E"] < COLLAPSED * loss.min():
        return "it would need E below 0"
    return None if fit.optimum.covariance is not None else fit.reason or "no degree of freedom"
