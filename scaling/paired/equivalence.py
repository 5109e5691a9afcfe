"""Test that a recipe's gap lies within a margin at every size, not merely on average over sizes and
budgets.

An intersection-union test (Berger 1982): the recipe is equivalent if each part passes its own two
one-sided t-tests at 5 %. A part is one size's largest budget, or the trend over sizes at the
largest run. The probability of a false "equivalent" is then at most 5 %, whichever part lies beyond
the margin; no correction for the number of parts is needed. The mean over all sizes and budgets is
no part: a small gap at short budgets would hide a large one at the longest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, stdtr, stdtrit

from scaling.paired.estimates import (
    ALPHA,
    EQUAL,
    POWER,
    WEIGHTS,
    Estimate,
    chi2_quantiles,
    estimate,
    grouped,
)
from scaling.paired.gaps import Pair, independent_gaps

MIN_SIZES = 3  # of a trend
MIN_TRAJECTORIES = 4


@dataclass(frozen=True)
class SizeGaps:
    """Independent gaps of one size in per cent of the loss."""

    N: int  # parameters, as the study counts them
    tokens: int  # its largest budget
    gaps: np.ndarray  # at that budget, shape (pairs,)
    richest: np.ndarray  # at the budget with the most pairs, which says how far pairs scatter


@dataclass(frozen=True)
class Part:
    """One gap in per cent of the loss that must lie within the margin; se to p are None where no
    spread is known."""

    # "size": the largest budget of one size; "trend": the line over sizes, at the largest run
    kind: str
    N: int  # parameters, as the study counts them
    tokens: int  # trained on
    independent_pairs: int  # behind the gap
    mean: float  # the gap, per cent
    se: float | None = None  # its standard error; null: no spread is known
    dof: int | None = None  # degrees of freedom of se
    is_borrowed: bool = False  # one pair alone: its spread is that of the other sizes
    p: float | None = None  # of the two one-sided tests against the margin, the larger


@dataclass(frozen=True)
class Equivalence:
    """The intersection-union test of one recipe."""

    parts: list[Part]  # each of which must lie within the margin
    # the largest of the parts'; null without a margin, or where a part cannot be tested
    p: float | None
    # the narrowest margin [%] that this design passes with 80 % where the gap is 0; null: none
    could_show: float | None


@dataclass(frozen=True)
class SizeTrend:
    """Least-squares line of gaps over log10 N, at the largest N."""

    at_largest: float
    se_at_largest: float
    residual_sd: float
    dof: int


def judge_equivalence(
    pairs: Sequence[Pair], evaluation: str, margin_percent: float | None
) -> Equivalence:
    """The test of one recipe's pairs under one evaluation; margin_percent: None if no margin was
    declared."""
    sizes = []
    for N, pairs_of_size in grouped(pairs, lambda pair: pair.fp8.N):
        budgets = {
            tokens: independent_gaps(pairs_of_budget, evaluation, "percent")
            for tokens, pairs_of_budget in grouped(pairs_of_size, lambda pair: pair.fp8.tokens)
        }
        largest = max(budgets)
        # of equally many pairs the largest budget
        richest = max(budgets, key=lambda tokens: (len(budgets[tokens]), tokens))
        sizes.append(SizeGaps(N, largest, budgets[largest], budgets[richest]))
    parts = parts_of(sizes, margin_percent)
    p_values = [part.p for part in parts if part.p is not None]
    p = max(p_values) if len(p_values) == len(parts) else None
    return Equivalence(parts, p, narrowest_margin(parts))


def parts_of(sizes: Sequence[SizeGaps], margin_percent: float | None) -> list[Part]:
    """The parts of the test: one for each of `sizes`, smallest first, then the trend where there is
    one."""
    line = fit_line(np.array([float(size.N) for size in sizes]), [size.gaps for size in sizes])
    shared_sd, shared_dof = _shared_spread(sizes, line)
    parts = []
    for size in sizes:
        gap = estimate(size.gaps)
        is_single = gap.n == 1
        se = shared_sd if is_single else gap.se
        dof = shared_dof if is_single else gap.n - 1
        is_borrowed = is_single and shared_sd is not None
        parts.append(_part("size", size, gap, se, dof, is_borrowed, margin_percent))
    if line is not None:
        fitted = Estimate(sum(len(size.gaps) for size in sizes), line.at_largest)
        parts.append(
            _part("trend", sizes[-1], fitted, line.se_at_largest, line.dof, False, margin_percent)
        )
    return parts


def fit_line(sizes: np.ndarray, gaps: list[np.ndarray]) -> SizeTrend | None:
    """The line through all gaps [%]: a group of independent ones for each of `sizes`, shape
    (sizes,), ascending.

    None below three sizes or four gaps, or where the line meets every gap."""
    counts = [len(values) for values in gaps]
    if len(sizes) < MIN_SIZES or sum(counts) < MIN_TRAJECTORIES:
        return None
    x, y = np.repeat(np.log10(sizes), counts), np.concatenate(gaps)
    spread_of_x = float(np.sum((x - x.mean()) ** 2))
    slope = float((x - x.mean()) @ (y - y.mean())) / spread_of_x
    residuals = y - y.mean() - slope * (x - x.mean())
    dof = len(y) - 2
    residual_sd = math.sqrt(float(residuals @ residuals) / dof)
    if residual_sd <= EQUAL * float(abs(y).max()):
        return None
    distance = float(x[-1] - x.mean())
    se = residual_sd * math.sqrt(1 / len(y) + distance**2 / spread_of_x)
    return SizeTrend(float(y.mean()) + slope * distance, se, residual_sd, dof)


def tost_power(margin: float, se: float, dof: int) -> float:
    """Probability that the two one-sided t-tests at 5 % pass where the gap is 0.

    se: the true standard error, itself estimated with `dof` degrees of freedom; by quadrature over
    that estimate."""
    room = margin / se - _critical_errors(dof)
    passes = np.where(room > 0, 2 * ndtr(room) - 1, 0.0)
    return 0.5 * float(WEIGHTS @ passes)


def narrowest_margin(parts: list[Part]) -> float | None:
    """The margin [%] that all `parts` pass with a probability of 80 % where each gap is 0, as if
    they were independent.

    None where a part has no spread."""
    spreads = [
        (part.se, part.dof) for part in parts if part.se is not None and part.dof is not None
    ]
    if not spreads or len(spreads) < len(parts):
        return None
    widest = max(se for se, _ in spreads)

    def power_missing(margin: float) -> float:
        return math.prod(tost_power(margin, se, dof) for se, dof in spreads) - POWER

    high = 10 * widest
    while power_missing(high) < 0 and high < 1e4 * widest:
        high *= 2
    return None if power_missing(high) < 0 else float(brentq(power_missing, 0, high))


@cache
def _critical_errors(dof: int) -> np.ndarray:
    """The 5 % quantile of t times (estimated over true standard error), at even quantiles: shape
    (200,)."""
    spreads = np.sqrt(chi2_quantiles(dof) / dof)
    return float(stdtrit(dof, 1 - ALPHA)) * spreads


def _part(
    kind: str,
    size: SizeGaps,
    gap: Estimate,
    se: float | None,
    dof: int | None,
    is_borrowed: bool,
    margin: float | None,
) -> Part:
    if se is None:
        return Part(kind, size.N, size.tokens, gap.n, gap.mean)
    p = None if margin is None else float(stdtr(dof, -(margin - abs(gap.mean)) / se))
    return Part(kind, size.N, size.tokens, gap.n, gap.mean, se, dof, is_borrowed, p)


def _shared_spread(
    sizes: Sequence[SizeGaps], line: SizeTrend | None
) -> tuple[float | None, int | None]:
    """(SD of one pair's gap [%], its degrees of freedom), pooled over the richest budget of each
    size.

    Where no size has a second pair: what scatters around the line over sizes; (None, None) without
    either."""
    squares = sum(float(np.sum((size.richest - size.richest.mean()) ** 2)) for size in sizes)
    dof = sum(len(size.richest) - 1 for size in sizes)
    if squares > 0:
        return math.sqrt(squares / dof), dof
    if line is not None:
        return line.residual_sd, line.dof
    return None, None
