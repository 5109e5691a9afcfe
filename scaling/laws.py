"""Fit a law's parameters to arrays of points, with a certificate that the optimum was found.

The objective is Huber's loss on log-loss residuals, summed (Hoffmann et al. 2022, appendix D.3), in logarithms of the
parameters with the abscissa's logarithm centred: uncentred, K and gamma are almost one parameter and solvers stall.
Many tiny fits run faster on one thread: OPENBLAS_NUM_THREADS=1 in the shell.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit
from scipy.stats import t as student

from scaling.records import RecordError

DELTA = 1e-3                # Huber's threshold on log-loss residuals
GAMMAS = (0.10, 0.12, 0.14, 0.16, 0.18, 0.20, 0.22)   # declared range of the compute exponent (published: .15 to .18)
CONVERGED = 1e-9            # gradient norm below which a fit counts as converged; away from an optimum it is ~DELTA
COLLAPSED = 1e-3            # E below this share of the smallest loss is E = 0: the points ask for a plain power law


@dataclass(frozen=True)
class Fit:
    """L = E + K x^-gamma, or A x^-exponent, with the certificate of its optimum; all None where not fitted."""

    form: str                               # "ray" or "power"
    parameters: dict[str, float | None]     # E, K, gamma; or A, exponent
    n: int
    identified: bool                        # the points determine the parameters; reason says what is lacking
    reason: str | None
    objective: float | None = None          # summed Huber of log-loss residuals
    starts: int | None = None
    starts_at_best: int | None = None       # starts that end at the best objective
    gradient_norm: float | None = None
    singular_values: tuple[float, ...] | None = None    # of the Jacobian in (ln E, ln K at the centre, gamma)
    residual_rms: float | None = None       # of log-loss, over n - parameters
    se: dict[str, float] | None = None
    ci95: dict[str, tuple[float, float]] | None = None

    def predict(self, x):
        """The law's loss (nats per token) at x, of x's shape."""
        p = self.parameters
        if self.form == "power":
            return p["A"] * np.asarray(x, dtype=float) ** -p["exponent"]
        return p["E"] + p["K"] * np.asarray(x, dtype=float) ** -p["gamma"]

    def formula(self, symbol: str) -> str:
        """The law in plain text, such as L = 1.69 + 412 C^-0.155."""
        p = self.parameters
        if self.form == "power":
            return f"L = {p['A']:.3g} {symbol}^{-p['exponent']:.3g}"
        return f"L = {p['E']:.3g} + {p['K']:.3g} {symbol}^{-p['gamma']:.3g}"


# ---------------------------------------------------------------------------------------------------------- the laws


def fit_ray(C, L, gamma: float | None = None, seed_sd: float = 0.0) -> Fit:
    """Fit L = E + K C^-gamma to C, L of shape (n,), all on one ray of tokens per parameter; `gamma` may be held fixed.

    seed_sd: standard deviation of ln L between seeds, a floor under the residuals when intervals are drawn.
    Raises RecordError for points that are not finite, not positive, or fewer than the parameters."""
    x, y, centre = _centred_logs(C, L, distinct=3 if gamma is None else 2)
    free = [True, True, gamma is None]

    def residual(theta):
        e, k, g = unpack(theta)
        return np.logaddexp(e, k - g * x) - y

    def jacobian(theta):
        e, k, g = unpack(theta)
        reducible = expit(k - g * x - e)        # share of the predicted loss above E
        return np.column_stack([1 - reducible, reducible, -x * reducible])[:, free]

    def unpack(theta):
        return theta if gamma is None else (*theta, gamma)

    starts = []
    for share in (0.1, 0.5, 0.9) if gamma is None else (0.1, 0.6):
        floor = share * np.exp(y.min())
        height = np.mean(np.log(np.exp(y) - floor))
        for g in (0.03, 0.1, 0.2, 0.5, 1.0) if gamma is None else (gamma,):
            starts.append(np.array([np.log(floor), height, g])[free])
    solution, certificate = _minimise(residual, jacobian, starts)
    e, k, g = unpack(solution)
    natural = {"E": (e, [1, 0, 0], np.exp), "K": (k + g * centre, [0, 1, centre], np.exp),
               "gamma": (g, [0, 0, 1], float)}
    lacking = None
    if e < y.min() + np.log(COLLAPSED):
        lacking = "E runs to zero: the points fall at least as fast as a pure power law"
    elif g <= 0:
        lacking = "gamma is not above zero: the loss does not fall with x"
    return _certified("ray", natural, free, jacobian(solution), certificate, seed_sd, lacking)


def fit_power(x, L, seed_sd: float = 0.0) -> Fit:
    """Fit L = A x^-exponent to x, L of shape (n,). Raises RecordError as fit_ray does."""
    x, y, centre = _centred_logs(x, L, distinct=2)
    slope, height = np.polyfit(x, y, 1)
    columns = np.column_stack([np.ones_like(x), -x])
    starts = [np.array([height + shift, -slope * tilt]) for shift in (-0.3, 0, 0.3) for tilt in (0, 1, 3)]
    solution, certificate = _minimise(lambda theta: columns @ theta - y, lambda theta: columns, starts)
    a, s = solution
    natural = {"A": (a + s * centre, [1, centre], np.exp), "exponent": (s, [0, 1], float)}
    return _certified("power", natural, [True, True], columns, certificate, seed_sd, None)


def fit_band(x, L, factor: float = 1.0) -> tuple[list[Fit], list[float]]:
    """The model-form envelope: the pure power law, then two-parameter ray laws with exponents factor * GAMMAS.

    Also gives the gammas left out because they would need E below zero. The spread of these forms beyond the points is
    the honest uncertainty of few points; residuals know nothing of it."""
    forms, left_out = [fit_power(x, L)], []
    for gamma in GAMMAS:
        fit = fit_ray(x, L, gamma=factor * gamma)
        if fit.parameters["E"] < COLLAPSED * np.min(L):
            left_out.append(gamma)
        else:
            forms.append(fit)
    return forms, left_out


def unfitted(form: str, n: int, reason: str) -> Fit:
    """A Fit that says why there is none."""
    return Fit(form, dict.fromkeys(("A", "exponent") if form == "power" else ("E", "K", "gamma")), n, False, reason)


# -------------------------------------------------------------------------------------------- one optimum, certified


def _centred_logs(x, L, distinct: int):
    x, L = np.asarray(x, dtype=float), np.asarray(L, dtype=float)
    if x.ndim != 1 or x.shape != L.shape:
        raise RecordError(f"a law needs as many losses as points; found shapes {x.shape} against {L.shape}")
    for name, values in (("point", x), ("loss", L)):
        for i in np.flatnonzero(~(np.isfinite(values) & (values > 0))):
            raise RecordError(f"{name} {i} is {values[i]}; a law needs finite values above zero")
    if len(np.unique(x)) < distinct:
        raise RecordError(f"{len(np.unique(x))} distinct point(s); this law needs at least {distinct}")
    x = np.log(x)
    return x - x.mean(), np.log(L), x.mean()


def _minimise(residual, jacobian, starts):
    """Best of many starts for the sum of Huber_DELTA(residual), which is least_squares' own robust cost, exactly.

    Each start descends by plain squares, then by Huber: far from the points Huber's gradient does not grow with the
    distance, which costs a hundred steps. The objective is about DELTA^2, so default tolerances would stop at once."""
    options = {"jac": jacobian, "x_scale": "jac", "max_nfev": 500}
    near = [least_squares(residual, start, **options) for start in starts]
    options |= {"loss": "huber", "f_scale": DELTA, "ftol": 1e-13, "xtol": 1e-13, "gtol": 1e-12}
    solutions = [least_squares(residual, solution.x, **options) for solution in near]
    best = min(solutions, key=lambda solution: solution.cost)
    # Two objectives are one optimum when they agree to a millionth, or when both are 0 next to rounding (r ~ 1e-7).
    at_best = sum(bool(solution.cost <= best.cost * (1 + 1e-6) + 1e-14) for solution in solutions)
    return best.x, {"objective": float(best.cost), "starts": len(starts), "starts_at_best": at_best,
                    "gradient_norm": float(np.linalg.norm(best.grad)), "residual": residual(best.x)}


def _certified(form, natural, free, jacobian, certificate, seed_sd, lacking) -> Fit:
    """The Fit of a solution: `natural` maps a name to (value in solver's terms, its gradient there, back-transform)."""
    residual = certificate.pop("residual")
    n, p = jacobian.shape
    singular = np.linalg.svd(jacobian, compute_uv=False)
    parameters = {name: float(back(value)) for name, (value, _, back) in natural.items()}
    rms = float(np.sqrt(residual @ residual / (n - p))) if n > p else None
    if certificate["gradient_norm"] > CONVERGED:
        lacking = f"the best of {certificate['starts']} starts did not converge"
    elif n <= p:
        lacking = f"{n} points for {p} parameters leave 0 degrees of freedom"
    elif lacking is None and singular[-1] < 1e-9 * singular[0]:
        lacking = "the points do not separate the parameters (singular Jacobian)"
    se = ci95 = None
    if lacking is None:
        covariance = max(rms, seed_sd) ** 2 * np.linalg.inv(jacobian.T @ jacobian)
        quantile = student.ppf(0.975, n - p)
        se, ci95 = {}, {}
        for name, (value, gradient, back) in natural.items():
            gradient = np.array(gradient, dtype=float)[free]
            if not gradient.any():              # held fixed
                continue
            width = float(np.sqrt(gradient @ covariance @ gradient))
            # E, K, A are positive, so their intervals are drawn on the logarithm; gamma's on itself.
            se[name] = width * parameters[name] if back is np.exp else width
            with np.errstate(over="ignore"):
                ci95[name] = tuple(float(back(value + sign * quantile * width)) for sign in (-1, 1))
        if "gamma" in ci95 and ci95["gamma"][0] <= 0:
            lacking = "the 95 % interval of gamma contains 0, so E is not determined"
    return Fit(form, parameters, n, lacking is None, lacking, singular_values=tuple(map(float, singular)),
               residual_rms=rms, se=se, ci95=ci95, **certificate)
