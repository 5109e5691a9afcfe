"""Fit one law to arrays of points, with a certificate that the optimum was found."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from scaling.laws.fits import Fit, Solution, known
from scaling.laws.forms import (
    CHINCHILLA,
    DELTA,
    EXPONENTS,
    GAMMAS,
    NAMES,
    centred,
    natural,
    parameters_of,
    terms,
)
from scaling.laws.intervals import SINGULAR, with_covariance
from scaling.laws.outliers import (
    HAS_OUTLIERS,
    Trimmed,
    is_another_law,
    with_outliers,
    without_outliers,
)
from scaling.laws.points import ONE_RAY
from scaling.laws.refusals import (
    CannotFit,
    FewForSurface,
    FewLevels,
    FewPoints,
    Inseparable,
    NarrowRatios,
    NoFloor,
    NoFreedom,
    NotConverged,
    NotFalling,
    Refusal,
)
from scaling.laws.solver import Minimum, Problem, minimise

CONVERGED = 1e-6  # gradient norm over its largest, n delta, below which a fit counts as converged
RISING = 1e-9  # an exponent this small is 0: the loss does not fall
# E below this share of the smallest loss is E = 0: the points ask for a plain power law
COLLAPSED = 1e-3
# largest over smallest tokens per parameter for chinchilla: nearer, alpha and beta trade places
SPREAD = 2
ROUNDED_UP = 0.99  # of SPREAD: a budget is rounded up to whole steps
LEVELS = 3  # distinct N, and D, for chinchilla
# distinct points that its five parameters need: with six, intervals hold beta 82 times in 100
FEWEST = 9
# The solver's starts: E as a share of the lowest loss; exponents
STARTS = {
    "ray": ((0.1, 0.5, 0.9), (0.03, 0.1, 0.2, 0.5, 1.0)),
    CHINCHILLA: ((0.3, 0.6, 0.9), (0.15, 0.35, 0.7)),
}
SHARES_ON_A_RAY = (0.1, 0.6)  # the same shares where the exponent is held fixed
# A power law's starts: around its straight line, heights and factors of its slope.
SHIFTS, TILTS = (-0.3, 0.1, 0.3), (0, 0.8, 3)


def fit_law(
    form: str,
    *data: np.ndarray,
    seed_sd: float = 0.0,
    delta: float | None = DELTA,
    gamma: float | None = None,
) -> Fit:
    """Fit one of NAMES (see Fit) to data: the form's abscissae as Points.axes has them, then
    losses, each of shape (n,). seed_sd: of ln L between seeds, a floor under the residuals in
    intervals. delta: Huber's threshold on ln L, None for squares. gamma: the ray law's exponent,
    held fixed. Raises CannotFit for fewer points than parameters; others that cannot tell are
    fitted and say so."""
    *axes, loss = data
    p = len(NAMES[form]) - (gamma is not None)
    distinct = _distinct(axes)
    if distinct < p:
        raise CannotFit(FewPoints(distinct, p))
    centres = tuple(float(np.log(x).mean()) for x in axes)
    logs = centred(axes, centres)
    problem = Problem(terms(form, logs, gamma), np.log(loss))
    starts = np.array(_starts(form, logs, problem.y, gamma), dtype=float)
    minimum = minimise(problem, starts, delta)
    fit = _fit_at(form, minimum, axes, problem.y, centres, seed_sd, delta, gamma)
    if problem.n <= p or _is_singular(minimum):
        return fit
    if form in HAS_OUTLIERS and gamma is None and delta is not None:
        trimmed = _trimmed(problem, minimum, axes, delta, seed_sd)
        if trimmed is not None:
            return with_outliers(fit, trimmed, problem.y, seed_sd)
    best = fit.solution
    information = minimum.jacobian.T @ minimum.jacobian
    covariance = known(best.sigma) ** 2 * best.inefficiency * np.linalg.inv(information)
    return with_covariance(fit, covariance, best.dof, "t")


def fit_band(x: np.ndarray, loss: np.ndarray, axis: str = "c", factor: float = 1.0) -> list[Fit]:
    """The model-form envelope: the pure power law, then two-parameter rays with exponents factor *
    GAMMAS that need no E below zero. Their spread beyond the points is the honest uncertainty of
    few points; residuals know nothing of it."""
    power = fit_law(f"power_{axis}", x, loss)
    rays = [fit_law("ray", x, loss, gamma=factor * gamma) for gamma in GAMMAS]
    lowest = COLLAPSED * np.min(loss)
    return [power, *(fit for fit in rays if fit.parameters["E"] >= lowest)]


def _distinct(axes: Sequence[np.ndarray]) -> int:
    return np.unique(np.array(axes), axis=1).shape[1]


def _starts(
    form: str, logs: list[np.ndarray], y: np.ndarray, gamma: float | None
) -> list[list[float]]:
    """Where the solver starts: around a power law's straight line; else E at shares of the lowest
    loss, factors to match it."""
    if form not in STARTS:
        slope, height = np.polyfit(logs[0], y, 1)
        return [[height + shift, -slope * tilt] for shift, tilt in product(SHIFTS, TILTS)]
    shares: tuple[float, ...]
    shares, slopes = STARTS[form]
    exponents = list(product(slopes, repeat=len(EXPONENTS[form])))
    if gamma is not None:
        shares, exponents = SHARES_ON_A_RAY, [()]
    starts = []
    for share in shares:
        floor = share * np.exp(y.min())
        height = np.mean(np.log(np.exp(y) - floor)) - np.log(len(logs))
        heights = [height for _ in logs]
        starts += [[np.log(floor), *heights, *slopes_of_start] for slopes_of_start in exponents]
    return starts


def _fit_at(
    form: str,
    minimum: Minimum,
    axes: Sequence[np.ndarray],
    y: np.ndarray,
    centres: tuple[float, ...],
    seed_sd: float,
    delta: float | None,
    gamma: float | None,
) -> Fit:
    """The fit at the optimum, without intervals, and whether the points determine it."""
    n, p = minimum.jacobian.shape
    values = natural(form, minimum.theta, centres, gamma)
    reason = _lacking(form, axes, values, y, p)
    # a valley without a minimum is the cause, not the solver
    if reason is None and minimum.gradient_norm > CONVERGED * n * (delta or DELTA):
        reason = NotConverged(minimum.starts)
    if reason is None and _is_singular(minimum):
        reason = Inseparable()
    rms = sigma = None
    if n > p:
        rms = float(np.sqrt(minimum.residual @ minimum.residual / (n - p)))
        sigma = max(rms, seed_sd)
    return Fit(
        form,
        dict(parameters_of(values)),
        n,
        identified=reason is None,
        reason=reason,
        objective=minimum.objective,
        starts=minimum.starts,
        starts_at_best=minimum.starts_at_best,
        gradient_norm=minimum.gradient_norm,
        residual_rms=rms,
        scatter=rms,
        optimum=Solution(minimum.theta, centres, gamma, delta, None, n - p, sigma, float(y.min())),
    )


def _is_singular(minimum: Minimum) -> bool:
    singular_values = np.linalg.svd(minimum.jacobian, compute_uv=False)
    return bool(singular_values[-1] < SINGULAR * singular_values[0])


def _trimmed(
    problem: Problem,
    minimum: Minimum,
    axes: Sequence[np.ndarray],
    delta: float,
    seed_sd: float,
) -> Trimmed | None:
    """The law without its outliers; None where it has none, or is another law altogether."""
    trimmed = without_outliers(problem, minimum.theta, delta, seed_sd)
    if trimmed is None or is_another_law(trimmed, problem.y, np.log(axes)):
        return None
    return trimmed


# ------------------------------------------------------------------------- what points cannot tell


def _lacking(
    form: str,
    axes: Sequence[np.ndarray],
    values: dict[str, np.ndarray],
    y: np.ndarray,
    p: int,
) -> Refusal | None:
    """Why these points do not determine the law with these values, factors as logarithms."""
    if form == CHINCHILLA:
        reason = _design_lacking(*axes)
        if reason is not None:
            return reason
    if len(y) <= p:
        return NoFreedom(len(y), p)
    if "E" in values and values["E"] < y.min() + math.log(COLLAPSED):
        return NoFloor()
    for name in EXPONENTS[form]:
        if values[name] <= RISING:
            return NotFalling(name)
    return None


def _design_lacking(N: np.ndarray, D: np.ndarray) -> Refusal | None:
    """Why Chinchilla's law cannot be told from these sizes and tokens, whatever their losses."""
    ratio = np.divide(D, N)
    if ratio.max() < SPREAD * ratio.min() * ROUNDED_UP:
        return NarrowRatios(float(ratio.min()), float(ratio.max()), SPREAD)
    for axis, x in (("N", N), ("D", D)):
        levels = _levels(x)
        if levels < LEVELS:
            return FewLevels(axis, levels, LEVELS)
    points = _distinct((N, D))
    if points < FEWEST:
        return FewForSurface(points, FEWEST)
    return None


def _levels(x: np.ndarray) -> int:
    """How many different values there are, such within 5 % of the smallest being one."""
    levels = 0
    remaining = np.sort(x)
    while len(remaining):
        levels += 1
        remaining = remaining[remaining > ONE_RAY * remaining[0]]
    return levels
