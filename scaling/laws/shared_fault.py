"""Whether points of one size, or of one run, lie off a law together: then they are not
independent."""

from dataclasses import dataclass, field

import numpy as np
from scipy.special import fdtrc

from scaling.laws.fits import Fit
from scaling.laws.intervals import residuals
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

    @property
    def groups(self) -> int:
        return len(np.unique(self.labels))


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
    for name, labels in candidates.items():
        group = np.unique(labels, return_inverse=True)[1]
        chance = _chance_of_groups(fit, points, group)
        if chance < SHARED / len(candidates):
            return SharedFault(name, chance, labels)
    return None


def _chance_of_groups(fit: Fit, points: Points, group: np.ndarray) -> float:
    """F-test of a constant for each group beside the law, linear around its optimum; 1 where it
    cannot be made. group (n,): its number."""
    residual, jacobian = residuals(fit, points)
    trajectory = np.unique(points.cluster, return_inverse=True)[1]
    if trajectory.max() + 1 < len(residual):
        return _chance_of_trajectories(residual, trajectory, group, SIZE_TERMS)
    if group.max() >= MOST_GROUPS:
        return 1.0  # sizes that scatter over a range are no groups
    law, _ = np.linalg.qr(jacobian)
    members = np.eye(group.max() + 1)[group]  # (n, groups)
    beyond_law = members - law @ (law.T @ members)
    directions, sizes, _ = np.linalg.svd(beyond_law, full_matrices=False)
    directions = directions[:, sizes > 1e-6 * sizes[0]]
    free = directions.shape[1]
    freedom = len(residual) - law.shape[1] - free
    residual = residual - law @ (law.T @ residual)
    explained = float(np.sum((directions.T @ residual) ** 2))
    unexplained = float(residual @ residual) - explained
    return _chance_of_ratio(explained, free, unexplained, freedom)


def _chance_of_trajectories(
    residual: np.ndarray, trajectory: np.ndarray, group: np.ndarray, absorbed: int
) -> float:
    """F-test between groups of trajectories, by their means; the law has absorbed so many of the
    groups' freedoms."""
    count = np.bincount(trajectory)
    mean = np.bincount(trajectory, residual) / count
    group_of = np.zeros(len(count), int)
    group_of[trajectory] = group  # a trajectory has one size
    size = np.bincount(group_of, minlength=group.max() + 1)
    group_mean = np.bincount(group_of, mean, len(size)) / np.maximum(size, 1)
    groups = int((size > 0).sum())
    between = float(size @ (group_mean - mean.mean()) ** 2)
    within = float(np.sum((mean - group_mean[group_of]) ** 2))
    return _chance_of_ratio(between, groups - absorbed, within, len(count) - groups)


def _chance_of_ratio(between: float, free: int, within: float, freedom: int) -> float:
    """The chance of so large a ratio of mean squares; 1 where the freedom is too small to tell."""
    if freedom < FREEDOM or free < 1:
        return 1.0
    return float(fdtrc(free, freedom, between / free / (within / freedom)))
