"""What a fitted law is: its form, its parameters, its certificate, its loss with an interval at a point.

Every law here is a sum of power laws, so ln L is the log-sum-exp of terms that are linear in theta = (ln factors at the
centre of ln x, exponents): one value, one gradient for all forms. laws.py, chinchilla.py and isoflop.py make Fits.
"""

import math
from dataclasses import dataclass, field, fields

import numpy as np
from scipy.special import logsumexp
from scipy.stats import t as student

# form -> its parameters in the solver's order: ln factors first, then exponents
NAMES = {"ray": ("E", "K", "gamma"), "power_n": ("A", "alpha"), "power_d": ("B", "beta"), "power_c": ("K", "gamma"),
         "chinchilla": ("E", "A", "B", "alpha", "beta"), "chinchilla_tied": ("E", "A", "B", "alpha")}
SCALE = {"power_n": "N_c", "power_d": "D_c", "power_c": "C_c"}      # Kaplan's L = (N_c/N)^alpha
FACTORS = {"E", "A", "B", "K", *SCALE.values()}     # positive, so solved for and given intervals on the logarithm


@dataclass(frozen=True, eq=False)
class Optimum:
    """A solution in the solver's terms: theta = (ln factors at the centre, exponents), shape (p,)."""

    theta: np.ndarray
    centres: tuple[float, ...]          # mean of ln x per axis
    gamma: float | None                 # held fixed, then absent from theta
    delta: float | None                 # Huber's threshold; None for squares
    covariance: np.ndarray | None       # (p, p) of theta; None without a degree of freedom
    dof: int
    sigma: float | None                 # of one run's ln loss


@dataclass(frozen=True)
class Fit:
    """A law, its parameters by their usual names, and the certificate of its optimum; all None where not fitted.

    ray: L = E + K C^-gamma. power_n, _d, _c: A N^-alpha, B D^-beta, K C^-gamma. chinchilla: E + A/N^alpha + B/D^beta, with
    N* ~ C^a, D* ~ C^b, L* - E ~ C^-gamma along its frontier. isoflop: N* ~ C^a, D* ~ C^b."""

    form: str
    parameters: dict[str, float | None]
    n: int
    identified: bool                        # the points determine the parameters; reason says what is lacking
    reason: str | None
    objective: float | None = None          # summed Huber of log-loss residuals; isoflop: half the squares of ln N*'s
    starts: int | None = None
    starts_at_best: int | None = None       # starts that end at the best objective
    nfev: int | None = None                 # evaluations of all starts together
    gradient_norm: float | None = None
    singular_values: tuple[float, ...] | None = None    # of the Jacobian in the solver's terms (Optimum.theta)
    residual_rms: float | None = None       # of log-loss, over n - parameters; isoflop: of ln N*
    se: dict[str, float] | None = None
    ci95: dict[str, tuple[float, float]] | None = None
    interval: str | None = None             # how se and ci95 were made: "t", "bootstrap" or "cluster"
    clusters: int | None = None             # independent trajectories, where intervals count them; not isoflop's budgets
    resamples: int | None = None            # bootstrap: drawn, and failed among them
    failed: int | None = None
    budgets: tuple[dict, ...] | None = None     # isoflop: C, sizes, N, D, loss or reason, per budget
    optimum: Optimum | None = field(default=None, repr=False, compare=False)

    def predict(self, *x):
        """The law's loss (nats per token) at x, of x's shape; x is N, D for chinchilla, else the form's one abscissa."""
        assert self.form in NAMES, self.form
        p, x = self.parameters, [np.asarray(values, dtype=float) for values in x]
        if self.form.startswith("chinchilla"):
            return p["E"] + p["A"] * x[0] ** -p["alpha"] + p["B"] * x[1] ** -p["beta"]
        factor, exponent = NAMES[self.form][-2:]
        return p.get("E", 0.0) + p[factor] * x[0] ** -p[exponent]

    def interval_at(self, *x, new_run: bool = False):
        """(loss, low, high) of x's shape: 95 % interval of the law at x, of one run there with new_run; None without
        a covariance. It holds the points' noise alone, not the doubt in the form (fit_band)."""
        best = self.optimum
        if best is None or best.covariance is None:
            return None
        shape = np.shape(x[0])
        logs = [np.log(np.asarray(values, dtype=float)).ravel() - centre
                for values, centre in zip(x, best.centres, strict=True)]
        log_loss, gradient = log_law(self.form, best.theta, logs, best.gamma)
        variance = np.einsum("ni,ij,nj->n", gradient, best.covariance, gradient) + new_run * best.sigma**2
        width = student.ppf(0.975, best.dof) * np.sqrt(variance)
        return tuple(np.exp(log_loss + side * width).reshape(shape) for side in (0, -1, 1))

    def formula(self, symbol: str = "C") -> str:
        """The law in plain text, such as L = 1.69 + 412 C^-0.155."""
        p = self.parameters
        if self.form == "isoflop":
            return f"N* ~ C^{p['a']:.3g}, D* ~ C^{p['b']:.3g}"
        floor = f"{p['E']:.3g} + " if "E" in p else ""
        if self.form.startswith("chinchilla"):
            return f"L = {floor}{p['A']:.3g} N^{-p['alpha']:.3g} + {p['B']:.3g} D^{-p['beta']:.3g}"
        factor, exponent = NAMES[self.form][-2:]
        return f"L = {floor}{p[factor]:.3g} {symbol}^{-p[exponent]:.3g}"

    def plain(self) -> dict:
        """The fit as strict JSON for law.json: the parameters beside the other fields, None for what is not finite."""
        content = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("optimum", "parameters")}
        return _strict(content | self.parameters)


def _strict(value):
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------- a law in its own terms


def terms(form: str, logs, gamma: float | None = None):
    """(slopes (n, terms, p), offsets (n, terms)) with ln L = logsumexp over terms of slopes @ theta + offsets."""
    one, zero = np.ones_like(logs[0]), np.zeros_like(logs[0])
    if form.startswith("power"):
        rows = [[one, -logs[0]]]
    elif form == "ray":
        rows = [[one, zero, zero], [zero, one, -logs[0]]]
    else:
        rows = [[one, zero, zero, zero, zero], [zero, one, zero, -logs[0], zero], [zero, zero, one, zero, -logs[1]]]
    slopes = np.moveaxis(np.array(rows), 2, 0)
    offsets = np.zeros(slopes.shape[:2])
    if form == "chinchilla_tied":
        slopes = np.concatenate([slopes[..., :3], slopes[..., 3:].sum(axis=2, keepdims=True)], axis=2)
    if gamma is not None:
        offsets, slopes = gamma * slopes[..., 2], slopes[..., :2]
    return slopes, offsets


def log_law(form: str, theta, logs, gamma: float | None = None):
    """(ln L (n,), its gradient in theta (n, p)) at centred logarithms of the abscissae."""
    slopes, offsets = terms(form, logs, gamma)
    parts = slopes @ theta + offsets
    total = logsumexp(parts, axis=1)
    return total, np.einsum("nt,ntp->np", np.exp(parts - total[:, None]), slopes)


def natural(form: str, theta, centres, gamma: float | None = None):
    """name -> (value, gradient of it in theta): usual names from the solver's terms, factors as logarithms."""
    p, unit = len(theta), np.eye(len(theta))
    values = {name: (theta[i], unit[i]) for i, name in enumerate(NAMES[form][:p])}
    if gamma is not None:
        values["gamma"] = (gamma, np.zeros(p))
    if form == "chinchilla_tied":
        values["beta"] = values["alpha"]
    slopes = [name for name in ("gamma", "alpha", "beta") if name in values]
    heights = [name for name in ("K", "A", "B") if name in values]
    for factor, exponent, centre in zip(heights, slopes, centres, strict=True):
        values[factor] = tuple(one + centre * other for one, other in zip(values[factor], values[exponent], strict=True))
    if form.startswith("chinchilla"):
        (alpha, da), (beta, db) = values["alpha"], values["beta"]
        total = alpha + beta
        slope = (alpha * db - beta * da) / total**2
        values |= {"a": (beta / total, slope), "b": (alpha / total, -slope),
                   "gamma": (alpha * beta / total, (beta**2 * da + alpha**2 * db) / total**2)}
    elif form in SCALE and values[slopes[0]][0] > 0:
        (height, dh), (slope, ds) = values[heights[0]], values[slopes[0]]
        values[SCALE[form]] = (height / slope, dh / slope - height * ds / slope**2)
    return values


def exponents(form: str) -> list[str]:
    """The exponents of a form, which must be above zero for the loss to fall."""
    return [name for name in NAMES[form] if name not in FACTORS]


def back(name: str, value: float) -> float:
    """A factor from its logarithm (infinite where it overflows), an exponent as it is."""
    if name not in FACTORS:
        return float(value)
    return math.exp(value) if value < 709 else math.inf
