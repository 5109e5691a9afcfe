"""Any form by its name, and the same law under other choices."""

from dataclasses import replace

import numpy as np

from lib.errors import UserError
from lib.text import si
from scaling.laws.fits import Fit, unfitted, unidentified
from scaling.laws.forms import DELTA, POWERS
from scaling.laws.intervals import with_bootstrap
from scaling.laws.isoflop import fit_isoflop
from scaling.laws.law import fit_law
from scaling.laws.outliers import MANY
from scaling.laws.points import Points, on_one_ray, sizes_of

DROPS = (1, 3, 5, 10)
DELTAS = (1e-4, 1e-2, None)  # beside the declared 1e-3; None is plain squares of ln L
MOST_SIZES = 10  # more sizes than these are left out in as many groups of neighbours
RESAMPLES = 100  # of a variant: enough to tell whether an exponent's interval holds 0


def fit_form(
    form: str, points: Points, seed_sd: float = 0.0, delta: float | None = DELTA, resamples: int = 0
) -> Fit:
    """Any form fitted to the points, as fit_law and with_bootstrap do; where they cannot carry it,
    a Fit that says why."""
    try:
        fit = (
            fit_isoflop(points)
            if form == "isoflop"
            else fit_law(form, *points.axes(form), points.loss, seed_sd=seed_sd, delta=delta)
        )
    except UserError as error:
        return unfitted(form, len(points.loss), str(error))
    if form == "ray" and not on_one_ray(points.ray):
        return unidentified(
            fit,
            (
                "the points lie at {:.3g} to {:.3g} tokens per parameter; the ray law needs one"
                " ratio".format(*points.ray)
            ),
        )
    return with_bootstrap(fit, points, resamples)


def robustness(points: Points, form: str, counts: dict, seed_sd: float = 0.0) -> list[dict]:
    """The declared fit and its variants: the k highest losses left out, another delta, another way
    of counting, each size left out (with the error of predicting it). A variant that cannot be
    fitted has its reason. counts: "N", for laws in N, or "C" -> {another convention: values (n,)}.
    seed_sd: as of fit_form."""
    order, axis = (
        np.argsort(-points.loss, kind="stable"),
        ("C" if form in ("ray", "power_c") else "N"),
    )
    variants = [("declared", "", points, DELTA, None)]
    variants += [
        ("drop highest", str(k), points.take(np.sort(order[k:])), DELTA, None)
        for k in DROPS
        if k <= len(order) // 2
    ]  # fewer than half left is another experiment
    variants += [
        ("delta", "MSE" if delta is None else f"{delta:g}", points, delta, None) for delta in DELTAS
    ]
    variants += [
        (f"count {axis} as", name, replace(points, **{axis: values}), DELTA, None)
        for name, values in counts.get(axis, {}).items()
    ]
    size, found = sizes_of(points.N), []
    sizes = int(size.max()) + 1
    group = size * min(sizes, MOST_SIZES) // sizes
    for left_out in [group == i for i in range(group.max() + 1)] if sizes > 1 else ():
        low, high = (si(end(points.N[left_out])) for end in (np.min, np.max))
        variants.append(
            (
                "leave out N",
                low if low == high else f"{low} to {high}",
                points.take(~left_out),
                DELTA,
                points.take(left_out),
            )
        )
    for variant, value, some, delta, rest in variants:
        fit = fit_form(
            form, some, seed_sd, delta, RESAMPLES if len(some.loss) < MANY else RESAMPLES // 4
        )
        found.append(
            {"variant": variant, "value": value, "n": len(some.loss), **fit.parameters}
            | {
                key: getattr(fit, key)
                for key in ("objective", "starts", "starts_at_best", "identified", "reason")
            }
        )
        if rest is not None and fit.objective is not None and form in POWERS:
            errors = 100 * (fit.predict(*rest.axes(form)) / rest.loss - 1)
            found[-1] |= {
                "error_percent": float(errors.mean()),
                "largest_error_percent": float(max(errors, key=abs)),
            }
    return found
