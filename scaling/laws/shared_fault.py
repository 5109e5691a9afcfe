"""Whether sizes or runs lie off a law together."""

from dataclasses import dataclass, field

import numpy as np
from scipy.special import fdtrc

from scaling.laws.fits import Fit
from scaling.laws.intervals import _residuals
from scaling.laws.points import Points, sizes_of

SHARED = 0.005  # chance of finding a fault that sizes or runs share where they share none
SIZE_TERMS = 3  # E, A, alpha: what Chinchilla's law takes from the sizes
MOST_GROUPS = 100  # that are tested for a shared fault
FREEDOM = 4  # degrees of freedom within groups that an F-test needs


@dataclass(frozen=True)
class SharedFault:
    """Points of a group lie off the law together, farther than independent runs would by chance."""

    by: str  # what the group shares: "size", or the column of a table
    chance: float  # of so large a difference between groups if every run were independent
    labels: np.ndarray = field(repr=False, compare=False)  # (n,) the group of each point


def shared_fault(
    fit: Fit, points: Points, columns: dict[str, np.ndarray] | None = None
) -> SharedFault | None:
    """What the points of a size share, such as a learning rate that suits other sizes better; else
    what those of a run do.

    fit: a law with an optimum. columns: name -> label of each point (n,), of what may name runs.
    Chances are those of an F-test at SHARED for all groupings together; None where nothing is
    shared, or where trajectories are no finer than sizes."""
    if fit.optimum is None or fit.scatter is None:
        return None
    candidates = {"size": sizes_of(points.N)} | (columns or {})
    for by, labels in candidates.items():
        chance = _chance_of_groups(fit, points, np.unique(labels, return_inverse=True)[1])
        if chance < SHARED / len(candidates):
            return SharedFault(by, chance, labels)
    return None


def _chance_of_groups(fit: Fit, points: Points, group) -> float:
    """F-test of a constant for each group beside the law, linear around its optimum; 1 where it
    cannot be made."""
    residual, jacobian = _residuals(fit, points)
    trajectory = np.unique(points.cluster, return_inverse=True)[1]
    if trajectory.max() + 1 < len(residual):
        return _chance_of_trajectories(residual, trajectory, group, SIZE_TERMS)
    law, _ = np.linalg.qr(jacobian)
    if group.max() >= MOST_GROUPS:
        return 1.0  # sizes that scatter over a range are no groups
    members = np.eye(group.max() + 1)[group]  # (n, groups)
    beyond = members - law @ (law.T @ members)  # what the law cannot do
    directions, sizes, _ = np.linalg.svd(beyond, full_matrices=False)
    directions = directions[:, sizes > 1e-6 * sizes[0]]
    free = directions.shape[1]
    left = len(residual) - law.shape[1] - free
    if left < FREEDOM or free < 1:
        return 1.0
    residual = residual - law @ (law.T @ residual)
    explained = float(np.sum((directions.T @ residual) ** 2))
    rest = float(residual @ residual) - explained
    return float(fdtrc(free, left, explained / free / (rest / left)))


def _chance_of_trajectories(residual, trajectory, group, absorbed: int) -> float:
    """F-test between groups of trajectories, by their means; the law has absorbed so many of the
    groups' freedoms."""
    count = np.bincount(trajectory)
    mean = np.bincount(trajectory, residual) / count
    of = np.zeros(len(count), int)
    of[trajectory] = group  # a trajectory has one size
    size = np.bincount(of, minlength=group.max() + 1)
    of_group = np.bincount(of, mean, len(size)) / np.maximum(size, 1)
    free, left = int((size > 0).sum()) - absorbed, len(count) - int((size > 0).sum())
    if left < FREEDOM or free < 1:
        return 1.0
    between = float(size @ (of_group - mean.mean()) ** 2) / free
    within = float(np.sum((mean - of_group[of]) ** 2)) / left
    return float(fdtrc(free, left, between / within))
