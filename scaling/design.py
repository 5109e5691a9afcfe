"""Tell which run would narrow a prediction most, before any is run.

The Cramer-Rao bound: if the law is about right and each run's ln(loss) carries independent noise sigma, no unbiased fit
to these sizes and tokens has smaller standard errors. It knows nothing of a wrong form or of badly tuned sizes, so it
ranks designs; forecast.py says how wide an interval really is.
"""

import math
from dataclasses import dataclass

import numpy as np

# Where too few runs are done to identify the law, a prior stands in, in (ln E, ln A/N^alpha, ln B/D^beta at the target,
# alpha, beta): nothing known of the terms, exponents scattered as the published ones are (alpha .24 to .50, beta .28 to .52).
PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.1, 0.1])
SINGULAR = 1e-10        # smallest over largest eigenvalue of the scaled information below which nothing is identified


@dataclass(frozen=True)
class Candidate:
    """A run not yet done; flops are those of its own, a branch's without its trunk's."""

    name: str
    N: float
    D: float
    flops: float


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


def bound(law, N, D, target, sigma: float = 1e-3, prior: bool = False) -> Bound | None:
    """The bound for runs at N, D of shape (n,), each with noise sigma in ln(loss); None where they identify no law."""
    return _bound(law, _information(law, N, D, target, sigma, prior), target)


def rank(law, N, D, candidates, target, sigma: float = 1e-3) -> tuple[Bound, bool, list[tuple[Candidate, Bound]]]:
    """What one more run would do to runs at N, D: the bound now, whether it needs the prior, a bound per candidate.

    Sorted by how much each narrows the prediction, most first."""
    prior = bound(law, N, D, target, sigma) is None
    now = _information(law, N, D, target, sigma, prior)
    after = [(one, _bound(law, now + _information(law, [one.N], [one.D], target, sigma), target)) for one in candidates]
    return _bound(law, now, target), prior, sorted(after, key=lambda pair: pair[1].prediction)


def _information(law, N, D, target, sigma, prior=False) -> np.ndarray:
    rows = gradient(law, N, D, target) / sigma
    return rows.T @ rows + (np.diag(PRIOR_SD**-2) if prior else 0)


def _bound(law, information, target) -> Bound | None:
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
