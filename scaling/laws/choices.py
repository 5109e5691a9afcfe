"""Any form by its name, and the same law under other choices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from scaling.laws.fits import Fit, unfitted, unidentified
from scaling.laws.forms import DELTA, POWERS
from scaling.laws.intervals import with_bootstrap
from scaling.laws.isoflop import fit_isoflop
from scaling.laws.law import fit_law
from scaling.laws.points import Points, on_one_ray, sizes_of
from scaling.laws.refusals import CannotFit, SeveralRatios

DROPS = (1, 3, 5, 10)
DELTAS = (1e-4, 1e-2, None)  # beside the declared 1e-3; None is plain squares of ln L
MOST_SIZES = 10  # more sizes than these are left out in as many groups of neighbours
RESAMPLES = 100  # of a variant: enough to tell whether an exponent's interval holds 0
MANY = 2000  # points: a quarter of the resamples must do


def fit_form(
    form: str,
    points: Points,
    seed_sd: float = 0.0,
    delta: float | None = DELTA,
    resamples: int = 0,
) -> Fit:
    """Any form fitted to the points, as fit_law and with_bootstrap do; where they cannot carry it,
    a Fit that says why."""
    try:
        if form == "isoflop":
            fit = fit_isoflop(points)
        else:
            fit = fit_law(form, *points.axes(form), points.loss, seed_sd=seed_sd, delta=delta)
    except CannotFit as error:
        return unfitted(form, len(points), error.refusal)
    if form == "ray" and not on_one_ray(points.ray):
        return unidentified(fit, SeveralRatios(*points.ray))
    return with_bootstrap(fit, points, resamples)


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to fit the law: which points, which delta."""

    kind: str  # "declared", "drop highest", "delta", "count" or "leave out"
    points: Points
    drop: int | None = None  # of the highest losses
    delta: float | None = DELTA  # None: plain squares
    axis: str | None = None  # "N" or "C": what is counted otherwise
    count: str | None = None  # the name of the other count
    left_out: Points | None = None  # a size, or neighbouring sizes


@dataclass(frozen=True, eq=False)
class Refit:
    """The law under one choice."""

    choice: Choice
    fit: Fit
    errors: np.ndarray | None  # (left out,) of predicting what is left out: predicted / loss - 1


def robustness(
    points: Points,
    form: str,
    counts: dict[str, dict[str, np.ndarray]],
    seed_sd: float = 0.0,
) -> list[Refit]:
    """The declared fit and its variants: the k highest losses left out, another delta, another way
    of counting, each size left out (with the error of predicting it). A variant that cannot be
    fitted has its reason. counts: "N", for laws in N, or "C" -> {another convention: values (n,)}.
    seed_sd: as of fit_form."""
    return [_refit(choice, form, seed_sd) for choice in _choices(points, form, counts)]


def _choices(
    points: Points, form: str, counts: dict[str, dict[str, np.ndarray]]
) -> Iterator[Choice]:
    yield Choice("declared", points)
    highest_first = np.argsort(-points.loss, kind="stable")
    for drop in DROPS:
        if drop <= len(points) // 2:  # fewer than half left is another experiment
            yield Choice("drop highest", points.take(np.sort(highest_first[drop:])), drop=drop)
    for delta in DELTAS:
        yield Choice("delta", points, delta=delta)
    axis = "C" if form in ("ray", "power_c") else "N"
    for name, values in counts.get(axis, {}).items():
        yield Choice("count", replace(points, **{axis: values}), axis=axis, count=name)
    size = sizes_of(points.N)
    sizes = int(size.max()) + 1
    if sizes == 1:
        return
    group = size * min(sizes, MOST_SIZES) // sizes
    for number in range(group.max() + 1):
        is_left_out = group == number
        yield Choice("leave out", points.take(~is_left_out), left_out=points.take(is_left_out))


def _refit(choice: Choice, form: str, seed_sd: float) -> Refit:
    points, left_out = choice.points, choice.left_out
    resamples = RESAMPLES if len(points) < MANY else RESAMPLES // 4
    fit = fit_form(form, points, seed_sd, choice.delta, resamples)
    if left_out is None or not fit.is_fitted or form not in POWERS:
        return Refit(choice, fit, None)
    return Refit(choice, fit, fit.predict(*left_out.axes(form)) / left_out.loss - 1)
