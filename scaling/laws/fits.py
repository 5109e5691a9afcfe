"""What a fitted law is: its parameters, the certificate of its optimum, its predictions."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.special import erf, stdtrit

from scaling.laws.forms import NAMES, POWERS, Terms, centred, log_law, terms
from scaling.laws.refusals import Refusal
from scaling.laws.valleys import Minima


class Outlier(NamedTuple):
    """A point that lies off a law."""

    point: int  # its index
    distance: float  # its loss over the law without outliers, less 1


class Interval(NamedTuple):
    """A law's loss and its 95 % interval, nats per token, of the shape that was asked for."""

    loss: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class BudgetMinimum:
    """Where the loss of one compute budget is lowest."""

    C: float  # FLOPs, geometric mean of its points
    sizes: int  # distinct N
    N: float | None = None  # parameters at the minimum; None without one
    D: float | None = None  # tokens there
    loss: float | None = None  # nats per token there
    reason: Refusal | None = None  # why there is none


@dataclass(frozen=True)
class WindowExponent:
    """The exponent of N* from the sizes whose loss is near a budget's lowest."""

    window: float  # share of the lowest loss
    a: float | None  # none where too few budgets have a minimum


@dataclass(frozen=True, eq=False)
class Solution:
    """A solution in the solver's terms: theta = (ln factors at the centre, exponents), shape
    (p,)."""

    theta: np.ndarray
    centres: tuple[float, ...]  # mean of ln x per axis
    gamma: float | None  # held fixed, then absent from theta
    delta: float | None  # Huber's threshold; None for squares
    covariance: np.ndarray | None  # (p, p) of theta; None without a degree of freedom
    dof: int
    sigma: float | None  # of one run's ln loss; None without a degree of freedom
    lowest: float  # smallest ln loss of the points, which ln E lies below

    @property
    def inefficiency(self) -> float:
        return inefficiency(self.delta, self.sigma or 0.0)


@dataclass(frozen=True)
class Fit:
    """A law, its parameters by their usual names, and the certificate of its optimum; all None
    where not fitted.

    ray: L = E + K C^-gamma. power_n, _d, _c: A N^-alpha, B D^-beta, K C^-gamma. chinchilla: E +
    A/N^alpha + B/D^beta, with N* ~ C^a, D* ~ C^b, L* - E ~ C^-gamma along its frontier. isoflop: N*
    ~ C^a, D* ~ C^b."""

    form: str
    parameters: dict[str, float | None]
    n: int
    identified: bool  # the points determine the parameters; reason says what is lacking
    reason: Refusal | None
    # summed Huber of log-loss residuals; isoflop: half the squares of ln N*'s
    objective: float | None = None
    starts: int | None = None
    starts_at_best: int | None = None  # starts that end at the best objective
    gradient_norm: float | None = None
    residual_rms: float | None = None  # of log-loss, over n - parameters; isoflop: of ln N*
    # residual_rms of the law without its outliers, over the points that are left
    scatter: float | None = None
    outliers: tuple[Outlier, ...] = ()  # farthest first
    # parameters of that law; None where there are none
    without_outliers: dict[str, float] | None = None
    se: dict[str, float] | None = None
    ci95: dict[str, tuple[float, float]] | None = None
    interval: str | None = None  # how se and ci95 were made: "t", "bootstrap" or "cluster"
    # independent trajectories, where intervals count them; not isoflop's budgets
    clusters: int | None = None
    resamples: int | None = None  # bootstrap: drawn, and failed among them
    failed: int | None = None
    budgets: tuple[BudgetMinimum, ...] | None = None  # of isoflop
    windows: tuple[WindowExponent, ...] | None = None  # of isoflop; the first one is used
    optimum: Solution | None = field(default=None, repr=False, compare=False)
    # isoflop: the curves of budgets without a reason
    valleys: Minima | None = field(default=None, repr=False, compare=False)

    @property
    def is_fitted(self) -> bool:
        return self.objective is not None

    @property
    def values(self) -> dict[str, float]:
        """The parameters of a law that was fitted."""
        return {name: known(value) for name, value in self.parameters.items()}

    @property
    def solution(self) -> Solution:
        """The optimum of a law that was fitted."""
        assert self.optimum is not None
        return self.optimum

    def predict(self, *x: np.ndarray | float) -> np.ndarray:
        """The law's loss (nats per token) at x, of x's shape; x is N, D for chinchilla, else the
        form's one abscissa."""
        return loss_of(self.form, self.values, *x)

    def interval_at(self, *x: np.ndarray | float, new_run: bool = False) -> Interval | None:
        """The law at x, of x's shape, with the 95 % interval of the law, of one run there with
        new_run; None without a covariance. It holds the points' noise alone, not the doubt in the
        form (fit_band)."""
        best = self.optimum
        if best is None or best.covariance is None or best.sigma is None:
            return None
        log_loss, gradient = log_law(*self.terms(*map(np.ravel, x)), best.theta)
        variance = np.einsum("ni,ij,nj->n", gradient, best.covariance, gradient)
        if new_run:
            variance = variance + best.sigma**2
        width = stdtrit(best.dof, 0.975) * np.sqrt(variance)
        ends = [np.exp(log_loss + side * width).reshape(np.shape(x[0])) for side in (0, -1, 1)]
        return Interval(*ends)

    def terms(self, *x: np.ndarray) -> Terms:
        """The form at x in the terms of this fit's optimum."""
        return terms(self.form, centred(x, self.solution.centres), self.solution.gamma)

    def formula(self, parameters: dict[str, float] | None = None) -> str:
        """The law in plain text, such as L = 1.69 + 412 C^-0.155; "" where it is not fitted.
        parameters: of another fit."""
        if not self.is_fitted:
            return ""
        values = parameters or self.values
        digits = {name: _short(value) for name, value in values.items()}
        if self.form == "isoflop":
            return f"N* = {digits['k_n']} C^{digits['a']}, D* = {digits['k_d']} C^{digits['b']}"
        summands = [digits["E"]] if "E" in digits else []
        for power in POWERS[self.form]:
            summands.append(f"{digits[power.factor]} {power.axis}^-{digits[power.exponent]}")
        return f"L = {' + '.join(summands)}".replace("^--", "^")


def loss_of(form: str, parameters: dict[str, float], *x: np.ndarray | float) -> np.ndarray:
    """A form's loss (nats per token) at x, of x's shape; x as Fit.predict takes it."""
    loss = np.asarray(parameters.get("E", 0.0))
    for power, values in zip(POWERS[form], x, strict=True):
        factor, exponent = parameters[power.factor], parameters[power.exponent]
        loss = loss + factor * np.asarray(values, dtype=float) ** -exponent
    return loss


def known(value: float | None) -> float:
    """A number of a law that was fitted with degrees of freedom."""
    assert value is not None
    return value


def _short(value: float) -> str:
    """Three digits: 412, 0.155; not 2.14e+03."""
    return f"{float(f'{value:.3g}'):g}"


def inefficiency(delta: float | None, sigma: float) -> float:
    """Variance of Huber's estimate over that of least squares under normal noise: 1 for delta >>
    sigma, pi/2 for <<."""
    if delta is None or sigma == 0:
        return 1.0
    k = delta / sigma
    inside = erf(k / math.sqrt(2))
    at_threshold = k * math.sqrt(2 / math.pi) * math.exp(-k * k / 2)
    squares = inside - at_threshold + k * k * (1 - inside)  # E[psi^2] / sigma^2
    return float(squares / inside**2)


def unfitted(form: str, n: int, reason: Refusal) -> Fit:
    """The place of a law that n points cannot carry."""
    return Fit(form, dict.fromkeys(NAMES[form]), n, False, reason)


def unidentified(fit: Fit, reason: Refusal) -> Fit:
    """The fit without its standard errors and intervals, which say nothing where the points do not
    determine the law."""
    return replace(fit, identified=False, se=None, ci95=None, interval=None, reason=reason)
