"""IsoFLOP: the best size, the tokens and the lowest loss over compute (Hoffmann et al. 2022,
approaches 1 and 2)."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scaling.laws.fits import BudgetMinimum, Fit, WindowExponent, known, unfitted
from scaling.laws.forms import NAMES, parameters_of
from scaling.laws.intervals import with_widths
from scaling.laws.law import fit_law
from scaling.laws.points import Points
from scaling.laws.refusals import (
    FewMinima,
    FewSizes,
    NoInteriorMinimum,
    NoValley,
    Refusal,
    SharedMinima,
)
from scaling.laws.valleys import Minima, Valley, fit_valleys, lowest_part, without_spikes

# largest over smallest compute that counts as one budget: published points scatter by per cents
SAME_BUDGET = 1.1
SIZES = 5  # distinct sizes that a budget needs
BUDGETS = 3  # usable budgets that a slope with an interval needs
# isoflop fits sizes within this share of a budget's lowest loss; the first counts
WINDOWS = (0.1, 0.2)
# of how a differs over them: with all of it intervals of an offset grid hold 99 in 100
WINDOW_DOUBT = 0.5
ALLOCATION = ("a", "k_n", "b", "k_d")


class Frontier(NamedTuple):
    """The minima of the budgets that have one, each of shape (budgets,)."""

    C: np.ndarray  # FLOPs
    N: np.ndarray  # parameters
    D: np.ndarray  # tokens
    loss: np.ndarray  # nats per token


@dataclass(frozen=True, eq=False)
class Budget:
    """The points of about one compute, a size once: seeds of a size are averaged, so are D and C,
    which scatter with the counting."""

    C: float  # FLOPs, geometric mean
    log_d: np.ndarray  # (sizes,) mean ln D
    valley: Valley
    reason: Refusal | None  # why it can have no minimum


@dataclass(frozen=True, eq=False)
class Lines:
    """Straight lines of ln N* and ln D* over ln C."""

    values: np.ndarray  # (4,) as ALLOCATION has them, factors as logarithms
    widths: np.ndarray  # (4,) standard errors over the budgets
    dof: int
    squares: float  # of ln N* around its line


@dataclass(frozen=True, eq=False)
class Allocation:
    """The budgets' minima over one window."""

    window: float  # share of the lowest loss
    rows: tuple[BudgetMinimum, ...]
    minima: Minima | None
    lines: Lines | None  # None where too few budgets have a minimum

    @property
    def a(self) -> float | None:
        return None if self.lines is None else float(self.lines.values[0])


def fit_isoflop(points: Points) -> Fit:
    """N* = k_n C^a and D* = k_d C^b over budgets of equal compute, by least squares on logarithms
    of the budgets' minima.

    The minima are those of valleys.py: each budget's valley has factors of its own, all share their
    exponents. A window holds the sizes whose loss is within a share of the budget's lowest, SIZES
    at least: sizes that are hopeless at a budget say little of its minimum, and which these are the
    loss knows, not the size. How a differs over WINDOWS widens its interval: Student's t over
    budgets, or over trajectories (each left out once) where one serves several. D* is the points'
    own D at N*: C may follow any convention."""
    budgets = _budgets(points)
    by_window = [_allocation(budgets, window) for window in WINDOWS]
    best = by_window[0]
    windows = tuple(WindowExponent(allocation.window, allocation.a) for allocation in by_window)
    if best.lines is None:
        reason = FewMinima(len(_with_minimum(best.rows)), len(best.rows), BUDGETS, SIZES)
        unusable = unfitted("isoflop", len(points), reason)
        return replace(unusable, budgets=best.rows, windows=windows)
    lines = best.lines
    values = dict(zip(ALLOCATION, lines.values.tolist(), strict=True))
    fit = Fit(
        "isoflop",
        dict(parameters_of(values)),
        len(points),
        identified=True,
        reason=None,
        starts=1,
        starts_at_best=1,
        objective=lines.squares / 2,
        residual_rms=math.sqrt(lines.squares / lines.dof),
        valleys=best.minima,
        budgets=best.rows,
        windows=windows,
    )
    widths, dof, interval = lines.widths, lines.dof, "t"
    labels = np.unique(points.cluster)
    if len(labels) < len(points):
        fit, dof, interval = replace(fit, clusters=len(labels)), len(labels) - 1, "cluster"
        jackknifed = _widths_over_trajectories(points, labels, best.minima)
        if jackknifed is None:
            return replace(fit, identified=False, reason=SharedMinima(BUDGETS))
        widths = jackknifed
    widths = np.hypot(widths, _doubt_of_windows(by_window, lines.values))
    named_widths = dict(zip(ALLOCATION, widths.tolist(), strict=True))
    return with_widths(fit, values, named_widths, dof, interval)


def minima_of(fit: Fit) -> Frontier:
    """The budgets of an isoflop fit that have a minimum."""
    rows = _with_minimum(fit.budgets or ())
    return Frontier(
        *(np.array([getattr(row, name) for row in rows], dtype=float) for name in Frontier._fields)
    )


def fit_frontier(fit: Fit, seed_sd: float = 0.0) -> Fit:
    """L*(C), the lowest loss for a compute, through the minima of an identified isoflop fit: the
    ray law where they identify it, else the power law. A law through all sizes lies above it."""
    frontier = minima_of(fit)
    power = fit_law("power_c", frontier.C, frontier.loss, seed_sd=seed_sd)
    if len(frontier.C) < len(NAMES["ray"]):
        return power
    ray = fit_law("ray", frontier.C, frontier.loss, seed_sd=seed_sd)
    return ray if ray.identified else power


def frontier_of(points: Points) -> Points:
    """The lowest loss for each compute: the minima of identified IsoFLOP budgets, else the points
    below all of less compute."""
    isoflop = fit_isoflop(points)
    if isoflop.identified:
        C, N, D, loss = minima_of(isoflop)
        return Points(N, D, C, loss, np.arange(len(C)))
    order = np.argsort(points.C, kind="stable")
    loss = points.loss[order]
    is_lowest = loss <= np.minimum.accumulate(loss)
    return points.take(order[is_lowest])


# ----------------------------------------------------------------------------------------- budgets


def _budgets(points: Points) -> list[Budget]:
    """Budgets in order of compute; one ends where C exceeds its smallest by SAME_BUDGET."""
    budgets = []
    order = np.argsort(points.C, kind="stable")
    while len(order):
        highest = SAME_BUDGET * points.C[order[0]]
        end = int(np.searchsorted(points.C[order], highest, side="right"))
        budgets.append(_budget(points.take(order[:end])))
        order = order[end:]
    return budgets


def _budget(points: Points) -> Budget:
    N, member = np.unique(points.N, return_inverse=True)
    count = np.bincount(member)
    loss = np.bincount(member, points.loss) / count
    log_d = np.bincount(member, np.log(points.D)) / count
    compute = float(np.exp(np.log(points.C).mean()))
    return Budget(compute, log_d, Valley(np.log(N), loss), _no_minimum(loss))


def _no_minimum(loss: np.ndarray) -> Refusal | None:
    """Why these losses, by size, can have no minimum between them."""
    if len(loss) < SIZES:
        return FewSizes(len(loss), SIZES)
    ends = {0, len(loss) - 1}
    if {loss.argmin(), without_spikes(loss).argmin()} <= ends:
        return NoInteriorMinimum()
    return None


def _with_minimum(rows: tuple[BudgetMinimum, ...]) -> list[BudgetMinimum]:
    return [row for row in rows if row.reason is None]


def _allocation(budgets: list[Budget], window: float, start: Minima | None = None) -> Allocation:
    """The minima over a window and the lines through them; start: the minima of almost the same
    points."""
    usable = [budget for budget in budgets if budget.reason is None]
    minima = None
    if usable:
        parts = [lowest_part(budget.valley, window, SIZES) for budget in usable]
        minima = fit_valleys(parts, start)
    rows = []
    valley = 0
    for budget in budgets:
        if budget.reason is not None or minima is None:
            row = BudgetMinimum(budget.C, len(budget.log_d), reason=budget.reason)
        else:
            row = _minimum(budget, minima.log_size[valley], minima.loss[valley])
            valley += 1
        rows.append(row)
    return Allocation(window, tuple(rows), minima, _lines(_with_minimum(tuple(rows))))


def _minimum(budget: Budget, log_size: float, loss: float) -> BudgetMinimum:
    """The budget's minimum at a size, with the tokens that its points have there."""
    sizes = len(budget.log_d)
    if not np.isfinite(log_size):
        return BudgetMinimum(budget.C, sizes, reason=NoValley())
    log_tokens = np.interp(log_size, budget.valley.log_size, budget.log_d)
    return BudgetMinimum(
        budget.C, sizes, float(np.exp(log_size)), float(np.exp(log_tokens)), float(loss)
    )


def _lines(rows: list[BudgetMinimum]) -> Lines | None:
    """Least squares over ln C; None for fewer than BUDGETS minima."""
    if len(rows) < BUDGETS:
        return None
    x = np.log([row.C for row in rows])
    y = np.log([[known(row.N), known(row.D)] for row in rows])
    line, covariance = np.polyfit(x, y, 1, cov=True)  # (slope and height, of N and D)
    distance = y[:, 0] - np.polyval(line[:, 0], x)
    variances = np.einsum("iik->ki", covariance)
    return Lines(
        values=line.T.ravel(),
        widths=np.sqrt(variances).ravel(),
        dof=len(x) - 2,
        squares=float(np.sum(distance**2)),
    )


def _widths_over_trajectories(
    points: Points, labels: np.ndarray, start: Minima | None
) -> np.ndarray | None:
    """(4,) standard errors from leaving out each trajectory once; None where too few budgets have a
    minimum without one of them."""
    values = []
    for label in labels:
        others_alone = points.take(np.flatnonzero(points.cluster != label))
        lines = _allocation(_budgets(others_alone), WINDOWS[0], start).lines
        if lines is None:
            return None
        values.append(lines.values)
    deviations = np.array(values) - np.mean(values, axis=0)
    n = len(labels)
    return np.sqrt((n - 1) / n * np.sum(deviations**2, axis=0))


def _doubt_of_windows(allocations: list[Allocation], values: np.ndarray) -> np.ndarray:
    """(4,) standard errors for the choice of the window."""
    by_window = np.array(
        [allocation.lines.values for allocation in allocations if allocation.lines is not None]
    )
    return WINDOW_DOUBT * np.sqrt(np.mean((by_window - values) ** 2, axis=0))
