"""Whether a law fits its points."""

import numpy as np

from scaling.laws.choices import RESAMPLES, fit_form
from scaling.laws.fits import Fit
from scaling.laws.forms import EXPONENTS
from scaling.laws.intervals import with_bootstrap
from scaling.laws.outliers import MANY, _noise_of_neighbours
from scaling.laws.points import Points

# a law does not fit whose residuals are above this, in ln L, and above so many times the noise
MISSES = 0.01, 2.0
EDGE = 3  # standard errors from zero within which an exponent's estimate leans steep
# of the points, earliest first, that a law may have to do without
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def meets(fit: Fit, points: Points, seed_sd: float = 0.0) -> bool:
    """Whether an identified law fits its points, outliers aside, so that what groups of them share
    is no fault of the law."""
    if not fit.identified or fit.scatter <= MISSES[0]:
        return fit.identified
    if len(points.loss) >= MANY:  # their noise takes a second
        return False
    noise, _ = _noise(points, np.log(points.loss / fit.predict(*points.axes(fit.form))), seed_sd)
    return fit.scatter <= MISSES[1] * noise


def near_zero(fit: Fit) -> list[str]:
    """The exponents within EDGE standard errors of zero, where estimates lean steep: a flatter law
    would have been refused."""
    return [
        name
        for name in EXPONENTS[fit.form]
        if fit.se and fit.parameters[name] < EDGE * fit.se[name]
    ]


def lack_of_fit(fit: Fit, points: Points, seed_sd: float = 0.0) -> dict | None:
    """How an identified L(N, D) misses its points, its outliers aside (their scatter is above
    MISSES), and the same law without the earliest, as points of few tokens per parameter lie above
    any such law; None where it fits. left_out: indices of the fewest that let the rest fit, with
    that law's own outliers."""
    if fit.scatter <= MISSES[0]:  # the noise of thousands of points takes a second
        return None
    noise, noise_of = _noise(points, np.log(points.loss / fit.predict(points.N, points.D)), seed_sd)
    limit, ratio = max(MISSES[0], MISSES[1] * noise), points.D / points.N
    if fit.scatter <= limit:
        return None
    found = {
        "residual_rms": fit.residual_rms,
        "scatter": fit.scatter,
        "noise": noise,
        "noise_of": noise_of,
        "below": None,
        "left_out": [],
        "outliers": [],
        "without": None,
    }
    for share in SHARES:
        below = np.sort(ratio)[round(share * len(ratio))]
        some = np.flatnonzero(ratio >= below * (1 - 1e-9))
        less = fit_form("chinchilla", points.take(some), seed_sd)
        if less.identified and less.scatter <= limit:
            return found | {
                "below": float(below),
                "left_out": np.setdiff1d(np.arange(len(ratio)), some).tolist(),
                "outliers": [(int(some[index]), distance) for index, distance in less.outliers],
                "without": with_bootstrap(less, points.take(some), RESAMPLES),
            }
    return found


def _noise(points: Points, residual, seed_sd: float) -> tuple[float, str]:
    """Standard deviation of one run's ln L, and what it was taken from: the seeds where known, else
    repeats (equal N and D), else neighbours, by what the residuals of a point and of the nearest
    one of another trajectory differ."""
    if seed_sd > 0:
        return seed_sd, "seeds"
    x = np.log([points.N, points.D])
    _, same, counts = np.unique(np.round(x, 6), axis=1, return_inverse=True, return_counts=True)
    if (freedom := len(residual) - len(counts)) >= 5:
        means = np.bincount(same.ravel(), residual) / counts
        return float(np.sqrt(np.sum((residual - means[same.ravel()]) ** 2) / freedom)), "repeats"
    return _noise_of_neighbours(x, residual, points.cluster), "neighbours"
