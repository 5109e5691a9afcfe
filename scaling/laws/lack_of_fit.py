"""Whether a law fits its points, and which points it would fit."""

from dataclasses import dataclass

import numpy as np

from scaling.laws.choices import RESAMPLES, fit_form
from scaling.laws.fits import Fit, Outlier, known
from scaling.laws.forms import CHINCHILLA, EXPONENTS
from scaling.laws.intervals import with_bootstrap
from scaling.laws.outliers import MANY, noise_of_neighbours
from scaling.laws.points import Points

# a law does not fit whose residuals are above this, in ln L, and above so many times the noise
MISSES = 0.01, 2.0
EDGE = 3  # standard errors from zero within which an exponent's estimate leans steep
REPEATS = 5  # degrees of freedom of equal N and D from which on they give the noise
# of the points, earliest first, that a law may have to do without
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class RunNoise:
    """Standard deviation of one run's ln L."""

    sd: float
    source: str  # "seeds", "repeats" (equal N and D) or "neighbours"


@dataclass(frozen=True)
class WithoutEarly:
    """The law that fits once the earliest points are left out."""

    below: float  # tokens per parameter below which points are left out
    left_out: tuple[int, ...]  # their indices
    fit: Fit  # of the others
    outliers: tuple[Outlier, ...]  # of that law, by their indices among all points


@dataclass(frozen=True)
class LackOfFit:
    """How L(N, D) misses its points."""

    residual_rms: float  # of ln L
    scatter: float  # the same without outliers
    noise: RunNoise
    mended: WithoutEarly | None  # None where no share of early points is to blame


def meets(fit: Fit, points: Points, seed_sd: float = 0.0) -> bool:
    """Whether an identified law fits its points, outliers aside, so that what groups of them share
    is no fault of the law."""
    if not fit.identified or known(fit.scatter) <= MISSES[0]:
        return fit.identified
    if len(points) >= MANY:  # their noise takes a second
        return False
    residual = np.log(points.loss / fit.predict(*points.axes(fit.form)))
    return known(fit.scatter) <= MISSES[1] * noise_of(points, residual, seed_sd).sd


def near_zero(fit: Fit) -> list[str]:
    """The exponents within EDGE standard errors of zero, where estimates lean steep: a flatter law
    would have been refused."""
    if not fit.se:
        return []
    return [name for name in EXPONENTS[fit.form] if fit.values[name] < EDGE * fit.se[name]]


def lack_of_fit(fit: Fit, points: Points, seed_sd: float = 0.0) -> LackOfFit | None:
    """How an identified L(N, D) misses its points, its outliers aside (their scatter is above
    MISSES), and the same law without the earliest, as points of few tokens per parameter lie above
    any such law; None where it fits."""
    scatter = known(fit.scatter)
    if scatter <= MISSES[0]:  # the noise of thousands of points takes a second
        return None
    residual = np.log(points.loss / fit.predict(points.N, points.D))
    noise = noise_of(points, residual, seed_sd)
    limit = max(MISSES[0], MISSES[1] * noise.sd)
    if scatter <= limit:
        return None
    mended = _without_early(points, limit, seed_sd)
    return LackOfFit(known(fit.residual_rms), scatter, noise, mended)


def _without_early(points: Points, limit: float, seed_sd: float) -> WithoutEarly | None:
    """The law without the fewest early points that lets the others fit."""
    ratio = points.D / points.N
    ascending = np.sort(ratio)
    for share in SHARES:
        below = ascending[round(share * len(ratio))]
        late = np.flatnonzero(ratio >= below * (1 - 1e-9))
        fit = fit_form(CHINCHILLA, points.take(late), seed_sd)
        if fit.identified and known(fit.scatter) <= limit:
            early = np.setdiff1d(np.arange(len(ratio)), late).tolist()
            outliers = [Outlier(int(late[index]), distance) for index, distance in fit.outliers]
            with_intervals = with_bootstrap(fit, points.take(late), RESAMPLES)
            return WithoutEarly(float(below), tuple(early), with_intervals, tuple(outliers))
    return None


def noise_of(points: Points, residual: np.ndarray, seed_sd: float) -> RunNoise:
    """The noise of one run: of the seeds where known, else of repeats (equal N and D), else by what
    the residuals (n,) of a point and of the nearest one of another trajectory differ."""
    if seed_sd > 0:
        return RunNoise(seed_sd, "seeds")
    x = np.log([points.N, points.D])
    _, member, counts = np.unique(np.round(x, 6), axis=1, return_inverse=True, return_counts=True)
    member = member.ravel()
    freedom = len(residual) - len(counts)
    if freedom < REPEATS:
        return RunNoise(noise_of_neighbours(x, residual, points.cluster), "neighbours")
    means = np.bincount(member, residual) / counts
    squares = np.sum((residual - means[member]) ** 2)
    return RunNoise(float(np.sqrt(squares / freedom)), "repeats")
