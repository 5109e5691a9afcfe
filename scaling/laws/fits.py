"""What a fitted law is: parameters, the certificate of its optimum, predictions."""

import math
from dataclasses import dataclass, field, fields, replace

import numpy as np
from scipy.special import erf, stdtrit

from scaling.laws.forms import NAMES, POWERS, centred, log_law, terms
from scaling.laws.valleys import Minima


@dataclass(frozen=True, eq=False)
class Optimum:
    """A solution in the solver's terms: theta = (ln factors at the centre, exponents), shape
    (p,)."""

    theta: np.ndarray
    centres: tuple[float, ...]  # mean of ln x per axis
    gamma: float | None  # held fixed, then absent from theta
    delta: float | None  # Huber's threshold; None for squares
    covariance: np.ndarray | None  # (p, p) of theta; None without a degree of freedom
    dof: int
    sigma: float | None  # of one run's ln loss
    lowest: float  # smallest ln loss of the points, which ln E lies below

    @property
    def inefficiency(self) -> float:
        return inefficiency(self.delta, self.sigma)


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
    reason: str | None
    # summed Huber of log-loss residuals; isoflop: half the squares of ln N*'s
    objective: float | None = None
    starts: int | None = None
    starts_at_best: int | None = None  # starts that end at the best objective
    gradient_norm: float | None = None
    residual_rms: float | None = None  # of log-loss, over n - parameters; isoflop: of ln N*
    # residual_rms of the law without its outliers, over the points that are left
    scatter: float | None = None
    # (index, loss over the law without outliers, less 1), farthest first
    outliers: tuple[tuple[int, float], ...] = ()
    # parameters of that law; None where there are none
    without_outliers: dict[str, float] | None = None
    se: dict[str, float] | None = None
    ci95: dict[str, tuple[float, float]] | None = None
    interval: str | None = None  # how se and ci95 were made: "t", "bootstrap" or "cluster"
    # independent trajectories, where intervals count them; not isoflop's budgets
    clusters: int | None = None
    resamples: int | None = None  # bootstrap: drawn, and failed among them
    failed: int | None = None
    budgets: tuple[dict, ...] | None = None  # isoflop: C, sizes, N, D, loss or reason, per budget
    # isoflop: window, a of each of WINDOWS; the first one is used
    windows: tuple[dict, ...] | None = None
    optimum: Optimum | None = field(default=None, repr=False, compare=False)
    # isoflop: the curves of budgets without a reason
    valleys: Minima | None = field(default=None, repr=False, compare=False)

    def predict(self, *x):
        """The law's loss (nats per token) at x, of x's shape; x is N, D for chinchilla, else the
        form's one abscissa."""
        p = self.parameters
        return sum(
            (
                p[factor] * np.asarray(values, dtype=float) ** -p[exponent]
                for (factor, _, exponent), values in zip(POWERS[self.form], x, strict=True)
            ),
            p.get("E", 0.0),
        )

    def interval_at(self, *x, new_run: bool = False):
        """(loss, low, high) of x's shape: 95 % interval of the law at x, of one run there with
        new_run; None without a covariance. It holds the points' noise alone, not the doubt in the
        form (fit_band)."""
        best = self.optimum
        if best is None or best.covariance is None:
            return None
        log_loss, gradient = log_law(*self.terms(*map(np.ravel, x)), best.theta)
        variance = (
            np.einsum("ni,ij,nj->n", gradient, best.covariance, gradient) + new_run * best.sigma**2
        )
        width = stdtrit(best.dof, 0.975) * np.sqrt(variance)
        return tuple(np.exp(log_loss + side * width).reshape(np.shape(x[0])) for side in (0, -1, 1))

    def terms(self, *x):
        return terms(self.form, centred(x, self.optimum.centres), self.optimum.gamma)

    def formula(self, parameters: dict[str, float] | None = None) -> str:
        """The law in plain text, such as L = 1.69 + 412 C^-0.155; "" where it is not fitted.
        parameters: of another fit."""
        if self.objective is None:
            return ""
        # not 2.14e+03
        p = {
            name: f"{float(f'{value:.3g}'):g}"
            for name, value in (parameters or self.parameters).items()
        }
        if self.form == "isoflop":
            return f"N* = {p['k_n']} C^{p['a']}, D* = {p['k_d']} C^{p['b']}"
        powers = [
            f"{p[factor]} {axis}^-{p[exponent]}" for factor, axis, exponent in POWERS[self.form]
        ]
        return f"L = {' + '.join(([p['E']] if 'E' in p else []) + powers)}".replace("^--", "^")

    def plain(self) -> dict:
        # A group names its outliers (fit.Group.plain): the laws know their indices alone.
        elsewhere = "optimum", "parameters", "outliers", "valleys"
        content = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in elsewhere
        }
        return content | self.parameters | {"formula": self.formula()}


def inefficiency(delta: float | None, sigma: float) -> float:
    """Variance of Huber's estimate over that of least squares under normal noise: 1 for delta >>
    sigma, pi/2 for <<."""
    if delta is None or sigma == 0:
        return 1.0
    k = delta / sigma
    inside = erf(k / math.sqrt(2))
    # E[psi^2] / sigma^2
    squares = inside - k * math.sqrt(2 / math.pi) * math.exp(-k * k / 2) + k * k * (1 - inside)
    return float(squares / inside**2)


def unfitted(form: str, n: int, reason: str) -> Fit:
    return Fit(form, dict.fromkeys(NAMES[form]), n, False, reason)


def unidentified(fit: Fit, reason: str) -> Fit:
    """The fit without its standard errors and intervals, which say nothing where the points do not
    determine the law."""
    return replace(fit, identified=False, se=None, ci95=None, interval=None, reason=reason)
