"""Surfaces L(N, D) that rival Chinchilla's where no points lie on a target's ray: what they say
there is the doubt in the form.

The ray laws' family on every ray at once: exponents held fixed, alpha = beta = 2 gamma, so that at
any ratio L falls as C^-gamma; and the same without an irreducible loss, its exponents free. Arrays
in, dataclasses out."""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import nnls

from scaling.laws.forms import DELTA, centred, log_law, terms
from scaling.laws.points import Points
from scaling.laws.solver import descend

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
    needs a term below zero."""
    exponent = 2 * gamma
    design = _columns(points.N, points.D, exponent) / points.loss[:, None]
    factors, _ = nnls(design, np.ones(len(points.loss)))
    if (factors <= 0).any():
        return None
    residual = -np.log(design @ factors)
    dof = len(residual) - 3
    if dof < 1:
        return None
    at = _columns(np.array([target[0]]), np.array([target[1]]), exponent)[0]
    loss = float(at @ factors)
    gradient = at / loss
    variance = float(gradient @ np.linalg.pinv(design.T @ design) @ gradient)
    parameters = dict(zip(("E", "A", "B"), factors.tolist(), strict=True)) | {
        "alpha": exponent,
        "beta": exponent,
    }
    rms = math.sqrt(residual @ residual / dof)
    return Rival(f"surface gamma={gamma:.2f}", loss, variance, rms, dof, len(residual), parameters)


def power_surface(points: Points, target: tuple[float, float]) -> Rival | None:
    """A / N^alpha + B / D^beta, no irreducible loss, by Huber's loss from several starts; None
    where they leave no freedom."""
    dof = len(points.loss) - 4
    if dof < 1:
        return None
    centres = float(np.log(points.N).mean()), float(np.log(points.D).mean())
    slopes, offsets = _without_floor(points.N, points.D, centres)
    y = np.log(points.loss)
    half = y.mean() - math.log(2)
    starts = np.array([[half, half, alpha, beta] for alpha, beta in product(SLOPES, repeat=2)])
    equal = np.ones((len(starts), len(y)))
    # Huber's descent is slow from far away
    near, _, _ = descend(starts, slopes, offsets, y, None, equal)
    thetas, costs, _ = descend(near, slopes, offsets, y, DELTA, equal)
    theta = thetas[int(np.argmin(costs))]
    log_loss, jacobian = log_law(slopes, offsets, theta)
    residual = y - log_loss
    log_target, gradient = log_law(
        *_without_floor(np.array([target[0]]), np.array([target[1]]), centres), theta
    )
    variance = float(gradient[0] @ np.linalg.pinv(jacobian.T @ jacobian) @ gradient[0])
    alpha, beta = float(theta[2]), float(theta[3])
    parameters = {
        "A": math.exp(theta[0] + centres[0] * alpha),
        "B": math.exp(theta[1] + centres[1] * beta),
        "alpha": alpha,
        "beta": beta,
    }
    return Rival(
        "power surface",
        float(np.exp(log_target[0])),
        variance,
        math.sqrt(residual @ residual / dof),
        dof,
        len(y),
        parameters,
    )


def _columns(N, D, exponent: float) -> np.ndarray:
    return np.stack([np.ones(len(N)), N**-exponent, D**-exponent], axis=1)


def _without_floor(N, D, centres):
    """`terms` of Chinchilla's law without its first term and parameter, E."""
    slopes, offsets = terms("chinchilla", centred((N, D), centres), None)
    return np.ascontiguousarray(slopes[:, 1:, 1:]), offsets[:, 1:]
