"""Fit the power law gap = k (N / N0)^-a (D/N / r0)^b to cells of pairs.

Intervals are profiles of the weighted squares, because a and b are not normal where k is small."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

from scaling.paired.gap_cells import Cells
from scaling.paired.sandwich import Sandwich, sandwich

LIMIT = 2.0  # exponents are sought between -LIMIT and LIMIT; published ones lie within .6
STARTS = (-0.5, 0.0, 0.5)  # of each exponent
SAME_OPTIMUM = 1e-6  # relative difference of the objective within which two starts ended alike
STEPS = 60  # of the solver
SETTLED = 1e-9  # relative change of the objective that ends it
GRID = 41  # values of each exponent at which a profile is evaluated
REFINED = 3  # times, each time over the range that the last left


@dataclass(frozen=True, eq=False)
class PowerFit:
    """k (N / N0)^-a (D/N / r0)^b at its optimum; an exponent that is not free is 0."""

    cells: Cells
    N0: float
    ratio0: float
    free: tuple[str, ...]  # of "a", "b"
    k: float
    exponents: np.ndarray  # (2,) a, b
    squares: float
    starts: int
    starts_at_best: int

    @cached_property
    def axes(self) -> np.ndarray:
        """(2, cells): what a and b multiply in ln |gap / k|."""
        return power_axes(self.cells.N, self.cells.D, self.N0, self.ratio0)

    def derivatives(self, axes: np.ndarray) -> np.ndarray:
        """(..., 1 + free) of the gap by k and the free exponents; axes: (2, ...)."""
        shape = np.exp(np.tensordot(self.exponents, axes, 1))
        of_exponents = {"a": axes[0], "b": axes[1]}
        columns = [shape]
        for name in self.free:
            columns.append(self.k * shape * of_exponents[name])
        return np.stack(columns, axis=-1)

    @cached_property
    def sandwich(self) -> Sandwich:
        gaps = self.k * np.exp(self.exponents @ self.axes)
        return sandwich(self.cells, self.derivatives(self.axes), gaps)

    def gap_at(self, axes: np.ndarray) -> float:
        return self.k * math.exp(float(self.exponents @ axes))

    def interval_at(self, axes: np.ndarray) -> tuple[float, float]:
        """95 % profile interval of the gap where ln |gap / k| has these axes, shape (2,)."""
        spread = self.sandwich.of(self.derivatives(axes))
        profile = self.profile(spread.threshold)
        limit = self.squares + spread.threshold
        return profile.gap_interval(axes, limit)

    def profile(self, rise: float) -> "Profile":
        """The squares over a grid of exponents, refined to where they rise by at most this."""
        ranges = [(0.0, 0.0), (0.0, 0.0)]
        for name in self.free:
            ranges["ab".index(name)] = (-LIMIT, LIMIT)
        for _ in range(REFINED):
            exponents = np.vstack([_grid(ranges), self.exponents])
            profile = profile_of(self.cells, self.axes, exponents)
            # the optimum is its last row: its squares stay the least whatever was rounded
            profile.squares[-1] = min(profile.squares[-1], self.squares)
            is_inside = profile.squares <= self.squares + rise
            inside = profile.exponents[is_inside]
            for axis, (low, high) in enumerate(ranges):
                ranges[axis] = _widened(inside[:, axis], high - low)
        return profile


@dataclass(frozen=True, eq=False)
class Profile:
    """Best k and squares at each of g pairs of exponents."""

    exponents: np.ndarray  # (g, 2)
    k: np.ndarray  # (g,)
    information: np.ndarray  # (g,) inverse variance of k at these exponents
    squares: np.ndarray  # (g,)

    def gap_interval(self, axes: np.ndarray, limit: float) -> tuple[float, float]:
        """Smallest and largest gap at these axes (2,) whose squares are at most the limit."""
        allowed = self.squares <= limit
        scale = np.exp(self.exponents[allowed] @ axes)
        room = limit - self.squares[allowed]
        half = np.sqrt(room / self.information[allowed])
        k = self.k[allowed]
        low = scale * (k - half)
        high = scale * (k + half)
        return float(low.min()), float(high.max())

    def exponent_interval(self, index: int, limit: float) -> tuple[float, float]:
        """Where the least squares over the other exponent reach the limit, interpolated."""
        values, of_value = np.unique(self.exponents[:, index], return_inverse=True)
        lowest = np.full(len(values), np.inf)
        np.minimum.at(lowest, of_value.ravel(), self.squares)
        low = _crossing(values, lowest, limit)
        high = _crossing(values[::-1], lowest[::-1], limit)
        return low, high


def _crossing(values: np.ndarray, squares: np.ndarray, limit: float) -> float:
    """The first value whose squares are at most the limit, interpolated to where they reach it."""
    first = int(np.argmax(squares <= limit))
    if first == 0:
        return float(values[0])
    outside, inside = squares[first - 1], squares[first]
    share = (outside - limit) / (outside - inside)
    step = values[first] - values[first - 1]
    return float(values[first - 1] + share * step)


def power_axes(N: ArrayLike, D: ArrayLike, N0: float, ratio0: float) -> np.ndarray:
    """(2, ...) what a and b multiply in ln |gap / k|; N, D: numbers or arrays of one shape."""
    N, D = np.asarray(N, float), np.asarray(D, float)
    return np.array([-np.log(N / N0), np.log(D / N / ratio0)])


def profile_of(cells: Cells, axes: np.ndarray, exponents: np.ndarray) -> Profile:
    """axes: (2, cells), exponents: (g, 2)."""
    shapes = np.exp(exponents @ axes) @ cells.root.T  # (g, cells)
    information = np.sum(shapes**2, axis=1)
    k = shapes @ cells.height / information
    without_law = float(cells.height @ cells.height)
    squares = without_law - k**2 * information
    return Profile(exponents, k, information, squares)


def fit_power(cells: Cells, N0: float, ratio0: float, free: tuple[str, ...]) -> PowerFit:
    """The law with these free exponents, from several starts; k is linear and solved for."""
    axes = power_axes(cells.N, cells.D, N0, ratio0)
    indices = ["ab".index(name) for name in free]
    starts = np.zeros((len(STARTS) ** len(free), 2))
    starts[:, indices] = list(product(STARTS, repeat=len(free)))
    ends = descend(cells, axes, starts, indices) if free else starts
    profile = profile_of(cells, axes, ends)
    best = int(profile.squares.argmin())
    squares = float(profile.squares[best])
    limit = squares * (1 + SAME_OPTIMUM) + SAME_OPTIMUM
    return PowerFit(
        cells=cells,
        N0=N0,
        ratio0=ratio0,
        free=free,
        k=float(profile.k[best]),
        exponents=ends[best],
        squares=squares,
        starts=len(ends),
        starts_at_best=int(np.sum(profile.squares <= limit)),
    )


def descend(cells: Cells, axes: np.ndarray, starts: np.ndarray, indices: list[int]) -> np.ndarray:
    """Where Levenberg and Marquardt's steps of the exponents lead from each of `starts`, shape
    (starts, 2); indices: those that move. k is solved for at every step (variable projection)."""
    exponents = starts.copy()
    damping = np.full(len(starts), 1e-3)
    squares = profile_of(cells, axes, exponents).squares
    for _ in range(STEPS):
        slope, residual = _linearised(cells, axes, exponents, indices)
        moved = exponents.copy()
        moved[:, indices] += _damped_step(slope, residual, damping)
        moved = np.clip(moved, -LIMIT, LIMIT)
        reached = profile_of(cells, axes, moved).squares
        is_lower = reached <= squares
        change = np.abs(squares - reached)
        exponents = np.where(is_lower[:, None], moved, exponents)
        squares = np.where(is_lower, reached, squares)
        factor = np.where(is_lower, 0.2, 10.0)
        damping = np.clip(damping * factor, 1e-9, 1e9)
        if np.all(change <= SETTLED * (1 + squares)):
            break
    return exponents


def _linearised(
    cells: Cells, axes: np.ndarray, exponents: np.ndarray, indices: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """At each of `exponents` (starts, 2) with k solved for: derivatives of the law by the exponents
    that move, (starts, free, cells), without what a change of k makes up; residuals,
    (starts, cells)."""
    gaps = np.exp(exponents @ axes)  # over k
    slope = (gaps[:, None] * axes[indices]) @ cells.root.T
    shape = gaps @ cells.root.T
    power = np.sum(shape**2, axis=1)
    k = shape @ cells.height / power
    residual = cells.height - k[:, None] * shape
    along = np.einsum("sfc,sc->sf", slope, shape) / power[:, None]
    across = slope - along[..., None] * shape[:, None]
    return k[:, None, None] * across, residual


def _damped_step(slope: np.ndarray, residual: np.ndarray, damping: np.ndarray) -> np.ndarray:
    """(starts, free) by Levenberg and Marquardt; damping: (starts,)."""
    curvature = slope @ slope.transpose(0, 2, 1)
    diagonal = np.einsum("sff->sf", curvature)
    added = diagonal * damping[:, None] + 1e-12
    damped = curvature + added[:, :, None] * np.eye(slope.shape[1])
    pull = np.einsum("sfc,sc->sf", slope, residual)
    return np.linalg.solve(damped, pull[..., None])[..., 0]


def _grid(ranges: Sequence[tuple[float, float]]) -> np.ndarray:
    """Pairs of exponents, shape (g, 2)."""
    values = []
    for low, high in ranges:
        count = GRID if high > low else 1
        values.append(np.linspace(low, high, count))
    return np.array(np.meshgrid(*values)).reshape(2, -1).T


def _widened(values: np.ndarray, width: float) -> tuple[float, float]:
    """The values' range with a step of the grid on either side, within the limits."""
    step = width / (GRID - 1)
    low, high = values.min() - step, values.max() + step
    return max(-LIMIT, low), min(LIMIT, high)
