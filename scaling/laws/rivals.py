"""Surfaces L(N, D) that rival Chinchilla's where no points lie on a target's ray: what they say
there is the doubt in the form.

The ray laws' family on every ray at once: exponents held fixed, alpha = beta = 2 gamma, so that at
any ratio L falls as C^-gamma; and the same without an irreducible loss, its exponents free."""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import nnls

from scaling.laws.forms import CHINCHILLA, DELTA, Terms, centred, log_law, terms
from scaling.laws.points import Points
from scaling.laws.solver import Problem, descend

SLOPES = (0.05, 0.1, 0.2)  # where the surface without E starts


@dataclass(frozen=True)
class Rival:
    """What one surface says of the law (not of one run) at a target."""

    form: str
    loss: float  # nats per token
    variance: float  # of ln loss at the target per sigma^2 of a point's
    residual_rms: float  # of ln loss, over dof
    dof: int
    n: int
    parameters: dict[str, float]


def surface_with(gamma: float, points: Points, target: tuple[float, float]) -> Rival | None:
    """E + A / N^(2 gamma) + B / D^(2 gamma) by least squares of relative losses; None where it
    needs a term below zero. target: (N, D)."""
    exponent = 2 * gamma
    design = _columns(points.N, points.D, exponent) / points.loss[:, None]
    factors, _ = nnls(design, np.ones(len(points)))
    dof = len(points) - 3
    if (factors <= 0).any() or dof < 1:
        return None
    residual = -np.log(design @ factors)
    at_target = _columns(np.array([target[0]]), np.array([target[1]]), exponent)[0]
    loss = float(at_target @ factors)
    E, A, B = factors.tolist()
    return Rival(
        form=f"surface gamma={gamma:.2f}",
        loss=loss,
        variance=_variance(design, at_target / loss),
        residual_rms=math.sqrt(residual @ residual / dof),
        dof=dof,
        n=len(points),
        parameters={"E": E, "A": A, "B": B, "alpha": exponent, "beta": exponent},
    )


def power_surface(points: Points, target: tuple[float, float]) -> Rival | None:
    """A / N^alpha + B / D^beta, no irreducible loss, by Huber's loss from several starts; None
    where they leave no freedom. target: (N, D)."""
    dof = len(points) - 4
    if dof < 1:
        return None
    centres = float(np.log(points.N).mean()), float(np.log(points.D).mean())
    problem = Problem(_without_floor(points.N, points.D, centres), np.log(points.loss))
    theta = _best(problem)  # ln A and ln B at the centres, alpha, beta
    log_loss, jacobian = problem.law(theta)
    residual = problem.y - log_loss
    at_target = _without_floor(np.array([target[0]]), np.array([target[1]]), centres)
    log_target, gradient = log_law(*at_target, theta)
    alpha, beta = float(theta[2]), float(theta[3])
    parameters = {
        "A": math.exp(theta[0] + centres[0] * alpha),
        "B": math.exp(theta[1] + centres[1] * beta),
        "alpha": alpha,
        "beta": beta,
    }
    return Rival(
        form="power surface",
        loss=float(np.exp(log_target[0])),
        variance=_variance(jacobian, gradient[0]),
        residual_rms=math.sqrt(residual @ residual / dof),
        dof=dof,
        n=len(points),
        parameters=parameters,
    )


def _best(problem: Problem) -> np.ndarray:
    """(4,) the optimum of the surface without E."""
    half = problem.y.mean() - math.log(2)
    starts = np.array([[half, half, *slopes] for slopes in product(SLOPES, repeat=2)])
    equal = np.ones((len(starts), problem.n))
    # Huber's descent is slow from far away
    close = descend(problem, starts, None, equal).theta
    ends = descend(problem, close, DELTA, equal)
    return ends.theta[int(np.argmin(ends.cost))]


def _variance(jacobian: np.ndarray, gradient: np.ndarray) -> float:
    """Of what has this gradient in the parameters (p,), per sigma^2 of a point; jacobian (n, p)."""
    return float(gradient @ np.linalg.pinv(jacobian.T @ jacobian) @ gradient)


def _columns(N: np.ndarray, D: np.ndarray, exponent: float) -> np.ndarray:
    return np.stack([np.ones(len(N)), N**-exponent, D**-exponent], axis=1)


def _without_floor(N: np.ndarray, D: np.ndarray, centres: tuple[float, float]) -> Terms:
    """`terms` of Chinchilla's law without its first term and parameter, E."""
    slopes, offsets = terms(CHINCHILLA, centred((N, D), centres))
    return Terms(np.ascontiguousarray(slopes[:, 1:, 1:]), offsets[:, 1:])
