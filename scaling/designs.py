"""Which extra run would narrow a prediction of the loss most: the Cramer-Rao bound of designs.

The bound knows nothing of a wrong form or of badly tuned sizes, so it ranks designs; fit.py
--predict says how wide an interval really is."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from scaling.paired.cost import Surface

SIGMA = 1e-3  # noise of ln(loss) of one run, assumed when designs are compared
# correlation of the noise of two points of one trajectory, assumed: no public study repeats trunks
# with branches
RHO = 0.5
# Where too few runs are done to identify the law, a prior stands in, in (ln E, ln A/N^alpha, ln
# B/D^beta at the target, alpha, beta): nothing known of the terms, exponents scattered as the
# published ones are (alpha .24 to .50, beta .28 to .52).
PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.1, 0.1])
# smallest over largest eigenvalue of the scaled information below which nothing is identified
SINGULAR = 1e-10
Number = TypeVar("Number", float, np.ndarray)


class Point(NamedTuple):
    """A run in the plane of size and tokens."""

    N: float  # parameters
    D: float  # training tokens
    trajectory: str  # runs of one share part of their noise


def bound(
    law: Surface,
    points: Sequence[Point | tuple[float, float, str]],
    target: tuple[float, float],
    prior: bool = False,
    rho: float = RHO,
) -> float | None:
    """The least standard error of ln L at target = (N, D) from runs at `points`; None if they
    identify no law. For noise SIGMA of each run's ln(loss), correlated by rho within a trajectory;
    prior: whether PRIOR_SD counts too."""
    N = np.array([point[0] for point in points], dtype=float)
    D = np.array([point[1] for point in points], dtype=float)
    trajectories = np.array([point[2] for point in points])
    is_same = np.equal.outer(trajectories, trajectories)
    covariance = SIGMA**2 * np.where(np.eye(len(points)), 1.0, rho * is_same)
    rows = gradient(law, N, D, target)
    information = rows.T @ np.linalg.solve(covariance, rows)
    if prior:
        information = information + np.diag(PRIOR_SD**-2)
    scale = np.sqrt(np.maximum(np.diag(information), SINGULAR))
    # the parameters' units differ; a correlation's do not
    scaled = information / np.outer(scale, scale)
    if np.linalg.matrix_rank(scaled, rtol=SINGULAR, hermitian=True) < len(scaled):
        return None
    at_target = gradient(law, *target, target) / scale
    return math.sqrt(at_target @ np.linalg.solve(scaled, at_target))


def gradient(
    law: Surface,
    N: Number,
    D: Number,
    target: tuple[float, float],
) -> np.ndarray:
    """d ln L / d (ln E, ln of either term at target = (N, D), alpha, beta) at N, D of shape (n,) or
    numbers; (n, 5) or (5,)."""
    values = np.array([law.E + 0 * N, law.A * N**-law.alpha, law.B * D**-law.beta])
    terms: np.ndarray = values / law.loss(N, D)
    of_alpha = -terms[1] * np.log(N / target[0])
    of_beta = -terms[2] * np.log(D / target[1])
    return np.array([*terms, of_alpha, of_beta]).T
