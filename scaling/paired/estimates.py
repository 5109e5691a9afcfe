"""Estimate means of independent values, say which values are independent, and what a design can
see."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.sparse.csgraph import connected_components
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit

ALPHA = 0.05
POWER = 0.8
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)  # of an integral over -1 to 1
EQUAL = 1e-12  # relative scatter below which values are copies of one another

Item = TypeVar("Item")


@dataclass(frozen=True)
class Estimate:
    """Mean of n independent values with its 95 % t-interval; sd to high are None where the values
    carry no spread."""

    n: int  # independent values
    mean: float  # of the values
    sd: float | None = None  # standard deviation of a value
    se: float | None = None  # standard error of the mean
    low: float | None = None  # lower end of the interval
    high: float | None = None  # upper end of the interval

    @property
    def half(self) -> float | None:
        """Half the length of the interval."""
        return None if self.high is None else self.high - self.mean


def estimate(values: ArrayLike) -> Estimate:
    """The Estimate of independent values, shape (n,); equal ones are copies, not a sample without
    noise: no interval."""
    values = np.asarray(values, dtype=float)
    n, mean = len(values), float(values.mean())
    sd = float(values.std(ddof=1)) if n > 1 else 0.0
    if sd <= EQUAL * abs(values).max():
        return Estimate(n, mean)
    se = sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 1 - ALPHA / 2)) * se
    return Estimate(n, mean, sd, se, mean - half, mean + half)


def clusters(labels: Sequence[set]) -> list[np.ndarray]:
    """Indices of `labels`, the set of trajectories that each value rests on, in groups that share
    one, also through a third."""
    shares_label = [[bool(first & second) for second in labels] for first in labels]
    count, group = connected_components(np.array(shares_label), directed=False)
    return [np.flatnonzero(group == index) for index in range(count)]


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> list[tuple[Any, list[Item]]]:
    """(key, the items that have it), in order of the keys."""
    groups = itertools.groupby(sorted(items, key=key), key)
    return [(value, list(members)) for value, members in groups]


def tost(gap: Estimate, margin: float) -> float | None:
    """p of the two one-sided t-tests that the mean lies within +-margin (Schuirmann 1987), the
    larger; None: no interval."""
    if gap.se is None:
        return None
    return float(stdtr(gap.n - 1, -(margin - abs(gap.mean)) / gap.se))


def p_of_zero(value: Estimate) -> float | None:
    """p of the two-sided t-test that the mean is 0; None: no interval."""
    if value.se is None:
        return None
    return float(2 * stdtr(value.n - 1, -abs(value.mean) / value.se))


def told_together(p_values: Sequence[float]) -> list[bool]:
    """Which of several tests reject by Holm's procedure at 5 % for all of them together."""
    is_told = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values)):
        if p_values[index] >= ALPHA / (len(p_values) - rank):
            break
        is_told[index] = True
    return is_told


def chi2_quantiles(dof: int) -> np.ndarray:
    """Quantiles of chi squared at even probabilities, NODES mapped to 0 to 1: shape (200,)."""
    return 2 * gammaincinv(dof / 2, (1 + NODES) / 2)


def power(n: int, gap: float) -> float:
    """Probability that n values of standard deviation 1 around `gap` give a t-interval without 0:
    the noncentral t's tails, by quadrature over the sample's sd, because scipy.stats.nct gives nan
    where n is 2 or the shift large."""
    # of the sample's sd over the true one: even quantiles
    spreads = np.sqrt(chi2_quantiles(n - 1) / (n - 1))
    half = float(stdtrit(n - 1, 1 - ALPHA / 2)) * spreads
    shift = abs(gap) * math.sqrt(n)
    return 0.5 * float(WEIGHTS @ (ndtr(shift - half) + ndtr(-(half + shift))))


def smallest_seen(sd: float, n: int) -> float:
    """The smallest gap that n values (at least 2) of standard deviation sd see with a probability
    of 80 %."""
    return sd * brentq(lambda gap: power(n, gap) - POWER, 0, 20)
