"""Fit every law to one set of points, decide which law may be headlined, and say why.

A group is the runs of one precision recipe, or the points of one table. Its headline is Chinchilla's L(N, D) where the
points identify it, else the ray law where they lie on one ray and identify that, else a power law.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from runtime.cli import UserError
from scaling.bootstrap import with_bootstrap
from scaling.chinchilla import fit_chinchilla
from scaling.forecast import forecast
from scaling.forms import Fit
from scaling.isoflop import fit_isoflop
from scaling.laws import DELTA, ONE_RAY, Points, fit_band, fit_power, fit_ray, unfitted
from scaling.records import read_curve

RESAMPLED = 2_000_000       # points drawn by one bootstrap at most, in 200 resamples or more: a table of thousands need not wait
FORMS = ("chinchilla", "ray", "power_n", "power_d", "power_c", "isoflop")
# Ways to count. N is fitted as the records' convention says, C as the first says; the others are in the tables of conventions.
COUNTS = {
    "N": ("params_total", "params_nonembed", "params_matmul"),
    "C": ("flops_per_token", "flops_per_token_causal", "flops_per_token_6n_total", "flops_per_token_6n_nonembed",
          "flops_per_token_6n_matmul"),
}


@dataclass(frozen=True)
class Group:
    """One recipe's runs, smallest compute first, or one table's points, with their laws; arrays have shape (n,)."""

    recipe: str                         # a table's file name where there are no runs
    records: tuple                      # of Record; () for a table
    names: tuple[str, ...]              # of the runs; () for a table
    points: Points
    x: dict[str, np.ndarray]            # "C" training FLOPs, "N" parameters, "D" tokens; a table may give N alone
    loss: np.ndarray                    # nats per token
    laws: dict[str, Fit]                # one of each of FORMS
    headline: str                       # the form that answers for this group
    headline_reason: str
    lines: dict[str, Fit]               # axis -> the law to draw over it
    bands: dict[str, list[Fit]]         # axis -> forms whose spread is the model-form band
    gammas_left_out: list[float]        # members of the band that would need E below zero
    counts: dict[str, np.ndarray]       # convention -> N or training FLOPs so counted; {} for a table
    slopes: dict[str, float | None]     # convention -> -d ln L / d ln x of the power law
    by_convention: dict[str, Fit]       # convention of N, the fitted one first -> Chinchilla's law
    curves: list                        # (tokens, loss) of each run's training
    flops_per_token: np.ndarray | None  # None for a table
    seed_sd: float                      # of ln loss, the floor under the residuals in intervals
    held_out: tuple = ()                # of predict.Held: in no fit
    form_doubt: dict | None = None      # beside Chinchilla's law: what other forms say far out

    @property
    def convention(self) -> str | None:
        """Which parameters N counts, "total" or "nonembed"; None for a table, which does not say."""
        return self.records[0].convention if self.records else None


def fit_group(records, loss_key: str = "loss_bf16", seed_sd: float | None = None, held=(), resamples: int = 1000) -> Group:
    """Fit every law to the runs of one recipe; a law that the runs cannot carry is there with the reason.

    seed_sd: standard deviation of ln(loss) between seeds; None estimates it from runs that differ in the seed alone.
    held: held-out runs (predict.Held), carried along for the figure. resamples: of the bootstrap over trunks, where
    there are enough of them; 0 leaves t-intervals that take every run for an independent one."""
    records = sorted(records, key=lambda record: record.flops_per_token * record.tokens)
    if seed_sd is None:
        seed_sd = seed_noise(records, loss_key)[0] or 0.0
    points = Points(N=_axis(records, "N"), D=_axis(records, "tokens"), C=_axis(records, "flops_per_token"),
                    loss=np.array([getattr(record, loss_key) for record in records]),
                    cluster=np.array([record.trunk for record in records]))
    group = fit_points(points, records[0].recipe, "NDC", seed_sd, resamples)
    counts = {name: _axis(records, name) for name in COUNTS["N"] + COUNTS["C"]}
    slopes = {name: fit_form("power_c", replace(points, C=values)).parameters["gamma"] for name, values in counts.items()}
    own = f"params_{records[0].convention}"
    by_convention = {own: group.laws["chinchilla"]}
    by_convention |= {name: _fitted("chinchilla", replace(points, N=counts[name]), seed_sd, resamples)
                      for name in COUNTS["N"] if name != own}
    return replace(group, records=tuple(records), names=tuple(record.run_id for record in records), counts=counts, slopes=slopes,
                   by_convention=by_convention, curves=[read_curve(record) for record in records],
                   flops_per_token=np.array([record.flops_per_token for record in records]), held_out=tuple(held))


def fit_points(points: Points, name: str, axes: str = "NDC", seed_sd: float = 0.0, resamples: int = 1000) -> Group:
    """Fit every law to points of any origin. axes="N" where tokens and compute are unknown: only the power law in N is
    fitted then, and D and C of the points are not looked at."""
    x = {axis: getattr(points, axis) for axis in axes}
    laws = {form: _fitted(form, points, seed_sd, resamples) if form == "power_n" or len(axes) > 1 else unfitted(
        form, len(points.loss), "the table gives neither tokens (--d) nor compute (--c)") for form in FORMS}
    ray = ray_of(points) if "D" in x else None
    headline, reason = _headline(laws, ray)
    lines, bands, left_out = _lines(laws, headline, x, points, seed_sd, ray)
    return Group(name, (), (), points, x, points.loss, laws, headline, reason, lines, bands, left_out, {}, {}, {}, [], None,
                 seed_sd, form_doubt=_form_doubt(points, seed_sd) if headline == "chinchilla" else None)


def _fitted(form: str, points: Points, seed_sd: float, resamples: int) -> Fit:
    """The form with the intervals that the points' trajectories allow."""
    fit = fit_form(form, points, seed_sd)
    return with_bootstrap(fit, points, min(resamples, max(200, RESAMPLED // len(points.loss)))) if resamples else fit


def _form_doubt(points: Points, seed_sd: float) -> dict | None:
    """What the forms that the points do not refute say at ten times the largest compute, at the tokens per parameter that
    most points have: {N, D, C, low, high, forms}; None where no other form reaches there."""
    ratios = points.D / points.N
    near = [int(np.sum((ratios <= ratio * ONE_RAY) & (ratios >= ratio / ONE_RAY))) for ratio in ratios]
    at = max(range(len(ratios)), key=lambda i: (near[i], points.C[i]))
    grow = math.sqrt(10 * points.C.max() / points.C[at])
    target = (points.N[at] * grow, points.D[at] * grow, 10 * points.C.max())
    try:
        said = forecast(points, target, seed_sd)
    except UserError:
        return None
    low, high = said["parts"]["model_form"]
    return {**dict(zip("NDC", map(float, target), strict=True)), "low": low, "high": high,
            "forms": [one["form"] for one in said["forms"]]} if len(said["forms"]) > 1 else None


def fit_form(form: str, points: Points, seed_sd: float = 0.0, delta: float | None = DELTA) -> Fit:
    """One form of FORMS fitted to the points; where they cannot carry it, a Fit that says why.

    delta: Huber's threshold, None for plain squares; isoflop has none."""
    try:
        if form == "chinchilla":
            return fit_chinchilla(points.N, points.D, points.loss, seed_sd=seed_sd, delta=delta)
        if form == "isoflop":
            return fit_isoflop(points)
        if form != "ray":
            return fit_power(*points.axes(form), points.loss, form[-1], seed_sd=seed_sd, delta=delta)
        fit, (low, high) = fit_ray(points.C, points.loss, seed_sd=seed_sd, delta=delta), ray_of(points)
        if on_one_ray((low, high)):
            return fit
        return replace(fit, identified=False, se=None, ci95=None, interval=None, reason=(
            f"the points lie at {low:.3g} to {high:.3g} tokens per parameter; the ray law needs one ratio"))
    except UserError as error:
        return unfitted(form, len(points.loss), str(error))


def allocation(group: Group) -> dict[str, float]:
    """Convention of C -> the exponent a of N* ~ C^a so counted; {} without runs or an identified L(N, D).

    FLOPs per token grow as N^k with k below 1, attention and head being less than proportional: minimising L(N, D) at constant
    N^k D gives a = beta / (alpha + k beta); k = 1 is C = 6 N D."""
    law = group.laws["chinchilla"]
    if not group.counts or not law.identified:
        return {}
    p, log_n = law.parameters, np.log(group.points.N)
    powers = {name: float(np.polyfit(log_n, np.log(group.counts[name] / group.points.D), 1)[0]) for name in COUNTS["C"]}
    return {name: p["beta"] / (p["alpha"] + k * p["beta"]) for name, k in powers.items()}


def seed_noise(records, loss_key: str = "loss_bf16") -> tuple[float | None, int]:
    """Pooled standard deviation of ln(loss) among runs that differ in the seed alone, with its degrees of freedom.

    Recipes and branches of one size and seed share their data and most of their training: they add no freedom."""
    alike, seeds = {}, {}
    for record in records:
        key = (record.recipe, record.params_total, record.params_matmul, record.tokens, record.decays_from)
        alike.setdefault(key, []).append(math.log(getattr(record, loss_key)))
        seeds.setdefault(record.params_total, set()).add(record.seed)
    squares = sum(float(np.sum((np.array(some) - np.mean(some)) ** 2)) for some in alike.values())
    differences = sum(len(some) - 1 for some in alike.values())
    freedom = min(differences, sum(len(some) - 1 for some in seeds.values()))
    return (math.sqrt(squares / differences) if differences else None), freedom


def ray_of(points: Points) -> tuple[float, float]:
    """Smallest and largest tokens per parameter."""
    ratios = points.D / points.N
    return float(ratios.min()), float(ratios.max())


def on_one_ray(ray: tuple[float, float] | None) -> bool:
    """Whether these smallest and largest tokens per parameter count as one ratio."""
    return ray is not None and ray[1] / ray[0] <= ONE_RAY


def _axis(records, name: str) -> np.ndarray:
    """(runs,) the named count; FLOPs per token times tokens where it is one of FLOPs."""
    return np.array([getattr(r, name) * (r.tokens if name in COUNTS["C"] else 1) for r in records], dtype=float)


def _headline(laws, ray) -> tuple[str, str]:
    if ray is None:
        return "power_n", "the table gives N alone, so only the power law in N can be fitted"
    if laws["chinchilla"].identified:
        return "chinchilla", "the points identify L(N, D)"
    why = "one tokens-per-parameter ray does not determine alpha and beta" if on_one_ray(ray) else laws["chinchilla"].reason
    reason = f"L(N, D) is not identified ({why})"
    if laws["ray"].identified:
        return "ray", f"{reason}: ray law instead"
    if on_one_ray(ray):
        return "power_c", f"{reason}, nor is the ray law ({laws['ray'].reason}): power law in C instead"
    return "power_c", f"{reason}: power law in C instead, which mixes the effects of size and of data"


def _lines(laws, headline, x, points, seed_sd, ray):
    """What the figure draws: a law per axis, the forms of its band, the gammas that the band had to leave out.

    Nothing where L(N, D) is headlined: over one axis alone it is no curve."""
    lines, bands, left_out = {}, {}, []
    for axis in x if headline != "chinchilla" else ():
        power = laws[f"power_{axis.lower()}"]
        if power.objective is None:
            continue
        lines[axis] = power
        if axis == "C" or on_one_ray(ray):
            if laws["ray"].identified:
                lines[axis] = laws["ray"] if axis == "C" else fit_ray(x[axis], points.loss, seed_sd=seed_sd)
            # On a ray C is a power of N or D (about 2; attention bends it), so exponents there are as much larger.
            factor = float(np.polyfit(np.log(x[axis]), np.log(x["C"]), 1)[0])
            bands[axis], left_out = fit_band(x[axis], points.loss, axis.lower(), factor)
    return lines, bands, left_out
