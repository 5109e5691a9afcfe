"""Pairs of one recipe as means of their cells (a size at a budget), weighted by their noise.

Pairs of one trajectory (a trunk with its branches, a run's loss curve) share part of their noise:
they are weighted by what they share."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scaling.laws import sizes_of
from scaling.paired.reasons import Reason, reason

MOST_SHARED = 0.95  # share of the noise that pairs of a trajectory may have in common


class CannotFitGap(ValueError):
    """Why these pairs carry no law."""

    def __init__(self, why: Reason | str) -> None:
        super().__init__(why)
        self.reason = why


@dataclass(frozen=True, eq=False)
class GapPoints:
    """n pairs of one recipe; arrays have shape (n,)."""

    N: np.ndarray  # parameters, as the study counts them
    D: np.ndarray  # training tokens
    percent: np.ndarray  # 100 ln(L_FP8 / L_BF16), signed
    trajectory: np.ndarray  # label; pairs of one label share part of their noise


@dataclass(frozen=True)
class PairNoise:
    """What one pair's gap scatters by over seeds."""

    pair_sd: float  # per cent, pooled over sizes and budgets
    shared: float  # share of that variance that pairs of one trajectory have in common
    noise_dof: int  # degrees of freedom of pair_sd, counting trajectories


@dataclass(frozen=True, eq=False)
class Cells:
    """Pairs as whitened means of their cells: the squares of a law with gaps g (cells,) are
    within + |root @ g - height|^2."""

    N: np.ndarray  # (cells,)
    D: np.ndarray
    of_pair: np.ndarray  # (n,) the cell of each pair
    trajectory: np.ndarray  # (n,) numbered from 0
    percent: np.ndarray  # (n,)
    noise: PairNoise
    root: np.ndarray  # (cells, cells)
    height: np.ndarray  # (cells,)
    within_dof: int  # of the scatter within cells; 0: no cell has a second pair

    @cached_property
    def blocks(self) -> list[np.ndarray]:
        """Indices of each trajectory's pairs."""
        return [np.flatnonzero(self.trajectory == i) for i in range(self.trajectory.max() + 1)]

    def squares(self, gaps: np.ndarray) -> float:
        residual = self.root @ gaps - self.height
        return float(residual @ residual)

    def whiten(self, values: np.ndarray) -> np.ndarray:
        """values (n, ...) times the inverse root of the noise's covariance."""
        return whitened(values, self.blocks, self.noise)


def whitened(values: np.ndarray, blocks: list[np.ndarray], noise: PairNoise) -> np.ndarray:
    """values (n, ...) times the inverse root of the noise's covariance; blocks: indices of each
    trajectory's pairs."""
    result = np.empty_like(values, dtype=float)
    for members in blocks:
        mean = values[members].mean(axis=0)
        deviation = (values[members] - mean) / math.sqrt(1 - noise.shared)
        common = mean / math.sqrt(1 - noise.shared + noise.shared * len(members))
        result[members] = (deviation + common) / noise.pair_sd
    return result


def cells_of(points: GapPoints) -> Cells:
    """Raises CannotFitGap where pairs do not scatter."""
    trajectory = np.unique(points.trajectory, return_inverse=True)[1].ravel()
    places = np.stack([points.N, points.D]).astype(float)
    distinct, of_pair = np.unique(places, axis=1, return_inverse=True)
    of_pair = of_pair.ravel()
    noise, within_dof = measure_noise(points.percent, of_pair, trajectory, distinct)
    blocks = [np.flatnonzero(trajectory == i) for i in range(trajectory.max() + 1)]
    membership = np.eye(distinct.shape[1])[of_pair]  # (n, cells)
    orthogonal, root = np.linalg.qr(whitened(membership, blocks, noise))
    height = orthogonal.T @ whitened(points.percent, blocks, noise)
    N, D = distinct
    return Cells(N, D, of_pair, trajectory, points.percent, noise, root, height, within_dof)


def measure_noise(
    percent: np.ndarray, of_pair: np.ndarray, trajectory: np.ndarray, places: np.ndarray
) -> tuple[PairNoise, int]:
    """(noise, degrees of freedom within cells); percent, of_pair, trajectory: (n,), places: N and D
    of the cells, (2, cells).

    From the scatter within cells; where no cell has a second pair, around a plane over ln N and
    ln D."""
    counts = np.bincount(of_pair)
    means = np.bincount(of_pair, percent) / counts
    residual = percent - means[of_pair]
    pairs_dof = len(percent) - len(counts)
    trajectories = len(np.unique(trajectory))
    dof = trajectories - len(np.unique(sizes_of(places[0])))
    is_within = pairs_dof > 0 and dof > 0
    if not is_within:
        plane = np.column_stack([np.ones(len(percent)), np.log(places.T[of_pair])])
        solution, _, rank, _ = np.linalg.lstsq(plane, percent, rcond=None)
        residual = percent - plane @ solution
        pairs_dof = len(percent) - int(rank)
        dof = trajectories - int(rank)
    if pairs_dof < 1 or dof < 1:
        raise CannotFitGap(reason("no_freedom_for_noise"))
    variance = float(residual @ residual) / pairs_dof
    if variance <= (1e-9 * float(abs(percent).max())) ** 2:
        raise CannotFitGap(reason("equal_gaps"))
    shared = _shared_part(residual, trajectory, of_pair, counts) / variance
    noise = PairNoise(math.sqrt(variance), float(np.clip(shared, 0.0, MOST_SHARED)), dof)
    return noise, pairs_dof if is_within else 0


def _shared_part(
    residual: np.ndarray, trajectory: np.ndarray, of_pair: np.ndarray, counts: np.ndarray
) -> float:
    """Covariance of two pairs of one trajectory, from residuals of cells with so many pairs."""
    products, expected = 0.0, 0.0
    remaining = np.ones(len(counts))
    if counts.max() > 1:
        remaining = 1 - 1 / counts
    for label in range(trajectory.max() + 1):
        members = np.flatnonzero(trajectory == label)
        products += _products(residual[members])
        expected += _products(np.sqrt(remaining[of_pair[members]]))
    return products / expected if expected > 0 else 0.0


def _products(values: np.ndarray) -> float:
    """Sum over all ordered pairs of two different values."""
    return float(values.sum() ** 2 - values @ values)
