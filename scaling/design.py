"""Tell which run would narrow a prediction most, before any is run.

The Cramer-Rao bound: if the law is about right and each run's ln(loss) carries noise sigma, no unbiased fit to these
sizes and tokens has smaller standard errors. Points of one trajectory, a trunk with the branches that leave it, share
part of their noise. The bound knows nothing of a wrong form or of badly tuned sizes, so it ranks designs; forecast.py
says how wide an interval really is.
"""

import math
from dataclasses import dataclass

import numpy as np

# Correlation of the noise of two points of one trajectory: a trunk's luck is its branches' luck. Assumed, for no public
# study repeats trunks with their branches; the bound of a study of four trunks with three branches each grows from
# 0.30 % without any to 0.46 % at 0.5 and 0.53 % at 0.9, so that there be some matters more than how much.
RHO = 0.5
# Where too few runs are done to identify the law, a prior stands in, in (ln E, ln A/N^alpha, ln B/D^beta at the target,
# alpha, beta): nothing known of the terms, exponents scattered as the published ones are (alpha .24 to .50, beta .28 to .52).
PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.1, 0.1])
SINGULAR = 1e-10        # smallest over largest eigenvalue of the scaled information below which nothing is identified


@dataclass(frozen=True)
class Candidate:
    """What can be run next: points (N, each of D) of one trajectory, with the FLOPs that are still to be spent on them.

    cluster is the trajectory's label: runs that are done may have it already."""

    name: str
    N: float
    D: tuple[float, ...]
    flops: float
    cluster: str


@dataclass(frozen=True)
class Bound:
    """Least standard errors: of the prediction at the target (a share of the loss), of the exponents, of a = N*'s exponent."""

    prediction: float
    alpha: float
    beta: float
    a: float


def gradient(law, N, D, target) -> np.ndarray:
    """d ln L / d (ln E, ln of either term at target = (N, D), alpha, beta) at N, D of shape (n,); (n, 5).

    law has E, A, B, alpha, beta, such as published.Surface."""
    N, D = np.atleast_1d(np.asarray(N, dtype=float)), np.atleast_1d(np.asarray(D, dtype=float))
    size, data = law.A * N**-law.alpha, law.B * D**-law.beta
    loss = law.E + size + data
    return np.column_stack([law.E / loss, size / loss, data / loss, -np.log(N / target[0]) * size / loss,
                            -np.log(D / target[1]) * data / loss])


def bound(law, N, D, target, sigma: float = 1e-3, prior: bool = False, clusters=None, rho: float = RHO) -> Bound | None:
    """The bound for runs at N, D of shape (n,), each with noise sigma in ln(loss); None where they identify no law.

    clusters: labels of shape (n,); the noise of points that share one is correlated by rho. None: all independent."""
    information = _information(law, N, D, target, sigma, clusters, rho) + (np.diag(PRIOR_SD**-2) if prior else 0)
    scale = np.sqrt(np.diag(information))
    if not scale.all():
        return None
    scaled = information / np.outer(scale, scale)       # the parameters' units differ; a correlation's do not
    values = np.linalg.eigvalsh(scaled)
    if values[0] < SINGULAR * values[-1]:
        return None
    covariance = np.linalg.inv(scaled) / np.outer(scale, scale)
    total = law.alpha + law.beta
    rows = {"prediction": gradient(law, *target, target)[0], "alpha": np.eye(5)[3], "beta": np.eye(5)[4],
            "a": np.array([0, 0, 0, -law.beta, law.alpha]) / total**2}
    return Bound(**{name: math.sqrt(row @ covariance @ row) for name, row in rows.items()})


def rank(law, N, D, clusters, candidates, target,
         sigma: float = 1e-3) -> tuple[Bound, bool, list[tuple[Candidate, Bound]]]:
    """What one more candidate would do to runs at N, D of trajectories `clusters`: the bound now, whether it needs the
    prior, a bound per candidate, sorted by how much each narrows the prediction, most first."""
    prior = bound(law, N, D, target, sigma, clusters=clusters) is None
    now = bound(law, N, D, target, sigma, prior, clusters)
    after = [(one, with_all(law, N, D, clusters, [one], target, sigma, prior)) for one in candidates]
    return now, prior, sorted(after, key=lambda pair: pair[1].prediction)


def with_all(law, N, D, clusters, candidates, target, sigma: float = 1e-3, prior: bool = False) -> Bound | None:
    """The bound for runs at N, D of trajectories `clusters` together with all points of the candidates."""
    more = [(one.N, tokens, one.cluster) for one in candidates for tokens in one.D]
    N, D, clusters = ([*old, *new] for old, new in zip((N, D, clusters), zip(*more, strict=True), strict=True))
    return bound(law, N, D, target, sigma, prior, clusters)


def _information(law, N, D, target, sigma, clusters, rho) -> np.ndarray:
    """J' V^-1 J with V = sigma^2 ((1 - rho) 1 + rho) within a trajectory, 0 between two."""
    rows = gradient(law, N, D, target) / sigma
    if clusters is None:
        return rows.T @ rows
    labels, member = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    sums = np.zeros((len(labels), rows.shape[1]))
    np.add.at(sums, member, rows)
    points = np.bincount(member, minlength=len(labels))
    shared = rho / (1 + (points - 1) * rho)             # Sherman and Morrison
    return (rows.T @ rows - sums.T @ (sums * shared[:, None])) / (1 - rho)
