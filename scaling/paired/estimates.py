"""Estimate means of independent values, say which values are independent, and what a design can
see."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.sparse.csgraph import connected_components
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit

ALPHA = 0.05
POWER = 0.8
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)  # of an integral over -1 to 1


@dataclass(frozen=True)
class Estimate:
    """Mean of n independent values with its 95 % t-interval; sd to high are None where the values
    carry no spread."""

    n: int
    mean: float
    sd: float | None = None
    se: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        return None if self.se is None else self.high - self.mean

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


def estimate(values) -> Estimate:
    """The Estimate of independent values, shape (n,); equal ones are copies, not a sample without
    noise: no interval."""
    values = np.asarray(values, dtype=float)
    n, mean = len(values), float(values.mean())
    sd = float(values.std(ddof=1)) if n > 1 else 0.0
    if sd <= 1e-12 * abs(values).max():
        return Estimate(n, mean)
    se = sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 1 - ALPHA / 2)) * se
    return Estimate(n, mean, sd, se, mean - half, mean + half)


def clusters(labels) -> list[np.ndarray]:
    """Indices of `labels`, the set of trajectories that each value rests on, in groups that share
    one, also through a third."""
    count, group = connected_components(
        np.array([[bool(mine & its) for its in labels] for mine in labels]), directed=False
    )
    return [np.flatnonzero(group == i) for i in range(count)]


def grouped(items, key) -> list[tuple]:
    """(key, the items that have it), in order of the keys."""
    return [(one, list(some)) for one, some in itertools.groupby(sorted(items, key=key), key)]


def tost(found: Estimate, margin: float) -> float | None:
    """p of the two one-sided t-tests that the mean lies within +-margin (Schuirmann 1987), the
    larger; None: no interval."""
    return (
        None
        if found.se is None
        else float(stdtr(found.n - 1, -(margin - abs(found.mean)) / found.se))
    )


def chi2_quantiles(dof: int) -> np.ndarray:
    """Quantiles of chi squared at even probabilities, NODES mapped to 0 to 1: shape (200,)."""
    return 2 * gammaincinv(dof / 2, (1 + NODES) / 2)


def power(n: int, gap: float) -> float:
    """Probability that n values of standard deviation 1 around `gap` give a t-interval without 0:
    the noncentral t's tails, by quadrature over the sample's sd, because scipy.stats.nct gives nan
    where n is 2 or the shift large."""
    # of the sample's sd over the true one: even quantiles
    spreads = np.sqrt(chi2_quantiles(n - 1) / (n - 1))
    spread, shift = float(stdtrit(n - 1, 1 - ALPHA / 2)) * spreads, abs(gap) * math.sqrt(n)
    return 0.5 * float(WEIGHTS @ (ndtr(shift - spread) + ndtr(-(spread + shift))))


def smallest_seen(sd: float, n: int) -> float:
    """The smallest gap that n values (at least 2) of standard deviation sd see with a probability
    of 80 %."""
    return sd * brentq(lambda gap: power(n, gap) - POWER, 0, 20)
