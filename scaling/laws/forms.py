"""The forms of the laws, and a form in the solver's terms.

Every law is a sum of power laws, so ln L is the log-sum-exp of terms that are linear in theta = (ln
factors at the centre of ln x, exponents): one value and one gradient for all forms. Uncentred, a
factor and its exponent are almost one parameter and solvers stall."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Power(NamedTuple):
    """One power law of a form: factor x axis^-exponent, by their names."""

    factor: str
    axis: str
    exponent: str


CHINCHILLA = "chinchilla"  # L(N, D) after Hoffmann et al. (2203.15556): its name in law.json
# form -> its parameters in the solver's order: ln factors first, then exponents
NAMES = {
    "ray": ("E", "K", "gamma"),
    "power_n": ("A", "alpha"),
    "power_d": ("B", "beta"),
    "power_c": ("K", "gamma"),
    CHINCHILLA: ("E", "A", "B", "alpha", "beta"),
    "isoflop": ("a", "b"),
}
# positive, so solved for and given intervals on the logarithm
FACTORS = {"E", "A", "B", "K", "k_n", "k_d"}
# The others must be above zero for the loss to fall, or for a budget to say how to spend it.
EXPONENTS = {form: [name for name in names if name not in FACTORS] for form, names in NAMES.items()}
OVER_N, OVER_D, OVER_C = Power("A", "N", "alpha"), Power("B", "D", "beta"), Power("K", "C", "gamma")
# form -> its power laws; with an "E" in NAMES the form also has an irreducible loss
POWERS = {
    "ray": (OVER_C,),
    "power_n": (OVER_N,),
    "power_d": (OVER_D,),
    "power_c": (OVER_C,),
    CHINCHILLA: (OVER_N, OVER_D),
}
# declared range of the compute exponent (published: .15 to .18)
GAMMAS = (0.10, 0.12, 0.14, 0.16, 0.18, 0.20, 0.22)
DELTA = 1e-3  # Huber's threshold on log-loss residuals


class Terms(NamedTuple):
    """A form at n points: ln L = logsumexp over terms of slopes @ theta + offsets."""

    slopes: np.ndarray  # (n, terms, p)
    offsets: np.ndarray  # (n, terms)


def centred(axes: Sequence[np.ndarray], centres: Sequence[float]) -> list[np.ndarray]:
    """ln x - centre of each axis."""
    return [
        np.log(np.asarray(x, dtype=float)) - centre for x, centre in zip(axes, centres, strict=True)
    ]


def terms(form: str, logs: Sequence[np.ndarray], gamma: float | None = None) -> Terms:
    """The form at points whose centred ln x of each axis are `logs`, each (n,); gamma: the ray
    law's exponent held fixed, then absent from theta."""
    has_floor = int("E" in NAMES[form])
    n_terms = has_floor + len(logs)
    # the layout decides how products round
    slopes = np.moveaxis(np.zeros((n_terms, len(NAMES[form]), len(logs[0]))), 2, 0)
    slopes[:, 0, 0] = 1  # ln E, where the form has it
    for i, log in enumerate(logs):
        term = has_floor + i
        slopes[:, term, term] = 1  # ln factor
        slopes[:, term, n_terms + i] = -log  # exponent
    if gamma is None:
        return Terms(slopes, np.zeros(slopes.shape[:2]))
    return Terms(slopes[..., :2], gamma * slopes[..., 2])


def log_law(
    slopes: np.ndarray, offsets: np.ndarray, theta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(ln L (n,), its gradient in theta (n, p)) of the parts of `terms`."""
    parts = slopes @ theta + offsets
    # scipy.special.logsumexp to the last bit, for a tenth of its time.
    top = parts.max(axis=1, keepdims=True)
    is_top = parts == top
    n_top = is_top.sum(axis=1)
    below_top = np.exp(np.where(is_top, -np.inf, parts) - top)
    total = np.log1p(below_top.sum(axis=1) / n_top) + np.log(n_top) + top[:, 0]
    shares = np.exp(parts - total[:, None])
    return total, np.einsum("nt,ntp->np", shares, slopes)


def natural(
    form: str, theta: np.ndarray, centres: Sequence[float], gamma: float | None = None
) -> dict[str, np.ndarray]:
    """name -> values of shape (...) from the solver's theta (..., p): the usual parameters, factors
    as logarithms; of chinchilla also the exponents a, b and gamma of its frontier."""
    values = dict(zip(NAMES[form], np.moveaxis(theta, -1, 0), strict=gamma is None))
    if gamma is not None:
        values["gamma"] = np.full(theta.shape[:-1], gamma)
    for power, centre in zip(POWERS[form], centres, strict=True):
        values[power.factor] = values[power.factor] + centre * values[power.exponent]
    if form == CHINCHILLA:
        alpha, beta = values["alpha"], values["beta"]
        values["a"] = beta / (alpha + beta)
        values["b"] = alpha / (alpha + beta)
        values["gamma"] = alpha * beta / (alpha + beta)
    return values


def back(name: str, values: np.ndarray | float) -> np.ndarray | float:
    """A factor from its logarithm (infinite where it overflows), an exponent as it is."""
    if name not in FACTORS:
        return values
    with np.errstate(over="ignore"):
        return np.exp(values)


def parameters_of(values: dict[str, np.ndarray]) -> dict[str, float]:
    """The usual parameters of one theta as plain numbers, factors from their logarithms."""
    return {name: float(back(name, value)) for name, value in values.items()}
