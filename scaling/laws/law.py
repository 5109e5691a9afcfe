"""Fit one law to arrays of points, with a certificate that the optimum was found."""

import math
from itertools import product

import numpy as np

from lib.errors import UserError
from scaling.laws.fits import Fit, Optimum
from scaling.laws.forms import DELTA, EXPONENTS, GAMMAS, NAMES, back, centred, natural, terms
from scaling.laws.intervals import with_covariance
from scaling.laws.outliers import HAS_OUTLIERS, _is_another_law, _with_outliers, without_outliers
from scaling.laws.points import ONE_RAY
from scaling.laws.solver import CONVERGED, SINGULAR, minimise

RISING = 1e-9  # an exponent this small is 0: the loss does not fall
# E below this share of the smallest loss is E = 0: the points ask for a plain power law
COLLAPSED = 1e-3
# largest over smallest tokens per parameter for chinchilla: nearer, alpha and beta trade places
SPREAD = 2
LEVELS = 3  # distinct N, and D, for chinchilla
# distinct points that its five parameters need: with six, intervals hold beta 82 times in 100
FEWEST = 9
# The solver's starts: E as a share of the lowest loss; exponents
STARTS = {
    "ray": ((0.1, 0.5, 0.9), (0.03, 0.1, 0.2, 0.5, 1.0)),
    "chinchilla": ((0.3, 0.6, 0.9), (0.15, 0.35, 0.7)),
}


def fit_law(
    form: str, *data, seed_sd: float = 0.0, delta: float | None = DELTA, gamma: float | None = None
) -> Fit:
    """Fit one of NAMES (see Fit) to data: the form's abscissae as Points.axes has them, then
    losses, each of shape (n,). seed_sd: of ln L between seeds, a floor under the residuals in
    intervals. delta: Huber's threshold on ln L, None for squares. gamma: the ray law's exponent,
    held fixed. Raises UserError for fewer points than parameters; others that cannot tell are
    fitted and say so."""
    *axes, loss = data
    p = len(NAMES[form]) - (gamma is not None)
    if (found := len(np.unique(np.array(axes), axis=1).T)) < p:
        raise UserError(f"{found} distinct point(s); this law needs at least {p}")
    centres, y, n = tuple(float(np.log(x).mean()) for x in axes), np.log(loss), len(loss)
    logs = centred(axes, centres)
    starts = np.array(_starts(form, logs, y, gamma), dtype=float)
    theta, left, jac, certificate = minimise(*terms(form, logs, gamma), y, starts, delta)
    singular, values = np.linalg.svd(jac, compute_uv=False), natural(form, theta, centres, gamma)
    is_singular = singular[-1] < SINGULAR * singular[0]
    # a valley without a minimum is the cause, not the solver
    why = _lacking(form, axes, values, y, p)
    if why is None and certificate["gradient_norm"] > CONVERGED * n * (delta or DELTA):
        why = f"the best of {len(starts)} starts did not converge"
    if why is None and is_singular:
        why = "the points do not separate the parameters (singular Jacobian)"
    rms = float(np.sqrt(left @ left / (n - p))) if n > p else None
    best = Optimum(
        theta,
        centres,
        gamma,
        delta,
        None,
        n - p,
        None if rms is None else max(rms, seed_sd),
        float(y.min()),
    )
    fit = Fit(
        form,
        {name: float(back(name, value)) for name, value in values.items()},
        n,
        why is None,
        why,
        residual_rms=rms,
        scatter=rms,
        optimum=best,
        **certificate,
    )
    if n <= p or is_singular:
        return fit
    rest = None
    if form in HAS_OUTLIERS and gamma is None and delta is not None:
        rest = without_outliers(*terms(form, logs), y, theta, delta, seed_sd)
    if rest is not None and not _is_another_law(rest, y, np.log(axes)):
        return _with_outliers(fit, rest, y, seed_sd)
    return with_covariance(
        fit, best.sigma**2 * best.inefficiency * np.linalg.inv(jac.T @ jac), n - p, "t"
    )


def fit_band(x, L, axis: str = "c", factor: float = 1.0) -> list[Fit]:
    """The model-form envelope: the pure power law, then two-parameter rays with exponents factor *
    GAMMAS that need no E below zero. Their spread beyond the points is the honest uncertainty of
    few points; residuals know nothing of it."""
    rays = [fit_law("ray", x, L, gamma=factor * gamma) for gamma in GAMMAS]
    return [
        fit_law(f"power_{axis}", x, L),
        *(fit for fit in rays if fit.parameters["E"] >= COLLAPSED * np.min(L)),
    ]


def _starts(form: str, logs, y, gamma: float | None) -> list[list[float]]:
    """Where the solver starts: around a power law's straight line; else E at shares of the lowest
    loss, factors to match it."""
    if form not in STARTS:
        slope, height = np.polyfit(logs[0], y, 1)
        return [
            [height + shift, -slope * tilt] for shift in (-0.3, 0.1, 0.3) for tilt in (0, 0.8, 3)
        ]
    shares, slopes = STARTS[form] if gamma is None else ((0.1, 0.6), (gamma,))
    starts, free = [], 0 if gamma is not None else len(EXPONENTS[form])
    for share in shares:
        floor = share * np.exp(y.min())
        height = np.mean(np.log(np.exp(y) - floor)) - np.log(len(logs))
        starts += [
            [np.log(floor), *[height] * len(logs), *some] for some in product(slopes, repeat=free)
        ]
    return starts


def _lacking(form, axes, values, y, p) -> str | None:
    if form == "chinchilla":
        ratio = np.divide(axes[1], axes[0])
        if ratio.max() < SPREAD * ratio.min() * 0.99:  # 0.99: a budget is rounded up to whole steps
            return (
                f"the points lie at {ratio.min():.3g} to {ratio.max():.3g} tokens per parameter:"
                f" alpha and beta need ratios at least {SPREAD}x apart"
            )
        for name, x in zip("ND", axes, strict=True):
            found, left = 0, np.sort(x)
            while len(left):
                found, left = found + 1, left[left > ONE_RAY * left[0]]
            if found < LEVELS:
                return (
                    f"the points hold {found} distinct {name}: its term needs {LEVELS} to be told"
                    " from E"
                )
        if (points := len(np.unique(axes, axis=1).T)) < FEWEST:
            return f"{points} distinct points are too few for five parameters: {FEWEST} at least"
    if len(y) <= p:
        return f"{len(y)} points for {p} parameters leave 0 degrees of freedom"
    if "E" in values and values["E"] < y.min() + math.log(COLLAPSED):
        return "E runs to zero: the points fall at least as fast as a pure power law"
    flat = next((name for name in EXPONENTS[form] if values[name] <= RISING), None)
    return flat and f"{flat} is not above zero: the loss does not fall"
