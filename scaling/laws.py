"""Fit a law's parameters to arrays of points, with a certificate that the optimum was found.

The objective is Huber's loss on log-loss residuals, summed (Hoffmann et al. 2022, appendix D.3), in logarithms of the
factors with each abscissa's logarithm centred: uncentred, a factor and its exponent are almost one parameter and
solvers stall. Many tiny fits run faster on one thread: OPENBLAS_NUM_THREADS=1 in the shell.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.stats import t as student

from runtime.cli import UserError
from scaling.forms import FACTORS, NAMES, Fit, Optimum, back, exponents, natural, terms
from scaling.solver import DELTA, inefficiency, minimise

GAMMAS = (0.10, 0.12, 0.14, 0.16, 0.18, 0.20, 0.22)   # declared range of the compute exponent (published: .15 to .18)
CONVERGED = 1e-6            # gradient norm over its largest, n delta, below which a fit counts as converged
SINGULAR = 1e-9             # smallest over largest singular value of the Jacobian, below which points do not separate parameters
ONE_RAY = 1.05              # tokens-per-parameter ratios within 5 % count as one
FLAT = 1e-9                 # an exponent this small is 0: the loss does not fall
COLLAPSED = 1e-3            # E below this share of the smallest loss is E = 0: the points ask for a plain power law
AXIS = {"power_n": "N", "power_d": "D", "power_c": "C", "ray": "C"}     # the abscissa; chinchilla's are N and D


@dataclass(frozen=True, eq=False)
class Points:
    """n measured points: parameters N, tokens D, FLOPs C, loss in nats per token; points of one trajectory share a label.

    Raises UserError where shapes differ or a value is not finite or not above zero."""

    N: np.ndarray
    D: np.ndarray
    C: np.ndarray
    loss: np.ndarray
    cluster: np.ndarray

    def __post_init__(self):
        for name in ("N", "D", "C", "loss"):
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        object.__setattr__(self, "cluster", np.asarray(self.cluster))
        for name in ("N", "D", "C", "cluster"):
            if getattr(self, name).shape != self.loss.shape:
                raise UserError(f"{name} has {getattr(self, name).size} values for {self.loss.size} losses; a point "
                                  "needs one of each")

    def axes(self, form: str) -> tuple[np.ndarray, ...]:
        """The abscissae that a form's predict takes: (N, D) for chinchilla, else one of C, N, D."""
        return (getattr(self, AXIS[form]),) if form in AXIS else (self.N, self.D)

    def take(self, index) -> "Points":
        """The points at `index`, which numpy must accept as one."""
        return Points(*(getattr(self, one.name)[index] for one in fields(self)))


# ---------------------------------------------------------------------------------------------------------- the laws


def fit_ray(C, L, gamma: float | None = None, seed_sd: float = 0.0, delta: float | None = DELTA) -> Fit:
    """Fit L = E + K C^-gamma to C, L of shape (n,), all on one ray of tokens per parameter; `gamma` may be held fixed.

    seed_sd: standard deviation of ln L between seeds, a floor under the residuals when intervals are drawn.
    delta: Huber's threshold on ln L; None for plain squares.
    Raises UserError for points that are not finite, not positive, or fewer than the parameters."""
    logs, y, centres = centred_logs((C,), L, distinct=3 if gamma is None else 2)
    starts = []
    for share in (0.1, 0.5, 0.9) if gamma is None else (0.1, 0.6):
        floor = share * np.exp(y.min())
        height = np.mean(np.log(np.exp(y) - floor))
        for g in (0.03, 0.1, 0.2, 0.5, 1.0) if gamma is None else (gamma,):
            starts.append([np.log(floor), height, g][:3 if gamma is None else 2])
    return solve("ray", logs, y, centres, starts, seed_sd, delta, gamma)


def fit_power(x, L, axis: str = "c", seed_sd: float = 0.0, delta: float | None = DELTA) -> Fit:
    """Fit A N^-alpha (axis "n"), B D^-beta ("d") or K C^-gamma ("c") to x, L of shape (n,), Kaplan et al. 2020's laws.

    The parameters also hold their scale, such as N_c in (N_c/N)^alpha. Raises UserError as fit_ray does."""
    logs, y, centres = centred_logs((x,), L, distinct=2)
    slope, height = np.polyfit(logs[0], y, 1)
    starts = [[height + shift, -slope * tilt] for shift in (-0.3, 0.1, 0.3) for tilt in (0, 0.8, 3)]
    return solve(f"power_{axis}", logs, y, centres, starts, seed_sd, delta)


def fit_band(x, L, axis: str = "c", factor: float = 1.0) -> tuple[list[Fit], list[float]]:
    """The model-form envelope: the pure power law, then two-parameter ray laws with exponents factor * GAMMAS.

    Also gives the gammas left out because they would need E below zero. The spread of these forms beyond the points is
    the honest uncertainty of few points; residuals know nothing of it."""
    forms, left_out = [fit_power(x, L, axis)], []
    for gamma in GAMMAS:
        fit = fit_ray(x, L, gamma=factor * gamma)
        if fit.parameters["E"] < COLLAPSED * np.min(L):
            left_out.append(gamma)
        else:
            forms.append(fit)
    return forms, left_out


def unfitted(form: str, n: int, reason: str) -> Fit:
    """A Fit that says why there is none."""
    names = ("a", "b") if form == "isoflop" else NAMES[form]
    return Fit(form, dict.fromkeys(names), n, False, reason)


# -------------------------------------------------------------------------------------------- one optimum, certified


def checked(name: str, values) -> np.ndarray:
    """`values` as floats of shape (n,). Raises UserError where one is not finite or not above zero."""
    try:
        values = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be numbers; a law needs finite values above zero") from None
    if values.ndim != 1:
        raise UserError(f"{name} must be a list of numbers; found shape {values.shape}")
    for i in np.flatnonzero(~(np.isfinite(values) & (values > 0))):
        raise UserError(f"{name} {i} is {values[i]}; a law needs finite values above zero")
    return values


def centred_logs(axes, L, distinct: int):
    """([ln x - centre per axis], ln L, centres). Raises UserError as `checked`, and for too few distinct points."""
    axes, L = [checked("point", x) for x in axes], checked("loss", L)
    for x in axes:
        if x.shape != L.shape:
            raise UserError(f"a law needs as many losses as points; found shapes {x.shape} against {L.shape}")
    if (found := len(np.unique(np.array(axes), axis=1).T)) < distinct:
        raise UserError(f"{found} distinct point(s); this law needs at least {distinct}")
    logs = [np.log(x) for x in axes]
    centres = tuple(float(x.mean()) for x in logs)
    return [x - centre for x, centre in zip(logs, centres, strict=True)], np.log(L), centres


def solve(form, logs, y, centres, starts, seed_sd=0.0, delta=DELTA, gamma=None, lacking=None, raw=False) -> Fit:
    """The best of many starts for the sum of Huber_delta(ln law - y), or for squares of law - exp(y) where `raw`, as a
    certified Fit. `lacking`: a sentence that is known beforehand to make the parameters unidentified."""
    slopes, offsets = terms(form, logs, gamma)
    theta, jac, left, certificate = minimise(slopes, offsets, y, np.array(starts, dtype=float), delta, raw)
    n, p = jac.shape
    singular = np.linalg.svd(jac, compute_uv=False)
    values = natural(form, theta, centres, gamma)
    rms = float(np.sqrt(left @ left / (n - p))) if n > p else None
    stuck = _stuck(certificate, n * (delta or DELTA))
    why = lacking or _lacking(form, values, y, n, p) or stuck       # a valley without a minimum is the cause, not the solver
    if why is None and singular[-1] < SINGULAR * singular[0]:
        why = "the points do not separate the parameters (singular Jacobian)"
    optimum = Optimum(theta, centres, gamma, delta, None, n - p, rms)
    fit = Fit(form, {name: back(name, value) for name, (value, _) in values.items()}, n, why is None, why,
              singular_values=tuple(map(float, singular)), residual_rms=rms, optimum=optimum, **certificate)
    if n <= p or singular[-1] < SINGULAR * singular[0]:
        return fit
    sigma = max(rms, seed_sd)
    covariance = sigma**2 * inefficiency(sigma, delta) * np.linalg.inv(jac.T @ jac)
    return with_covariance(replace(fit, optimum=replace(optimum, sigma=sigma)), covariance, n - p, "t")


def with_covariance(fit: Fit, covariance, dof: int, interval: str) -> Fit:
    """The fit with se and ci95 from a covariance of theta, by the delta method and Student's t of dof degrees.

    An unidentified fit keeps none; one whose exponents' intervals hold 0 becomes unidentified."""
    best = replace(fit.optimum, covariance=covariance, dof=dof)
    fit = replace(fit, optimum=best)
    if not fit.identified:
        return fit
    quantile, se, ci95 = student.ppf(0.975, dof), {}, {}
    for name, (value, gradient) in natural(fit.form, best.theta, best.centres, best.gamma).items():
        if not gradient.any():              # held fixed
            continue
        width = float(np.sqrt(gradient @ covariance @ gradient))
        se[name] = width * fit.parameters[name] if name in FACTORS else width
        ci95[name] = tuple(back(name, value + side * quantile * width) for side in (-1, 1))
    fit = replace(fit, se=se, ci95=ci95, interval=interval)
    return judged(fit)


def judged(fit: Fit) -> Fit:
    """The fit, unidentified where an exponent's interval holds 0: its term is then a constant, as E is."""
    for name in exponents(fit.form):
        if name in fit.ci95 and fit.ci95[name][0] <= 0:
            so = "so E is not determined" if "E" in fit.parameters else "so the points do not show that the loss falls"
            return replace(fit, identified=False, reason=f"the 95 % interval of {name} contains 0, {so}")
    return fit


def _stuck(certificate, largest) -> str | None:
    """Why the solver's answer is no optimum, or None."""
    if certificate.pop("stuck"):
        return f"the best of {certificate['starts']} starts is a start itself: the solver did not move"
    if certificate["gradient_norm"] > CONVERGED * largest:
        return f"the best of {certificate['starts']} starts did not converge"
    return None


def _lacking(form, values, y, n, p) -> str | None:
    """What the points lack to determine the parameters, or None."""
    if n <= p:
        return f"{n} points for {p} parameters leave 0 degrees of freedom"
    if "E" in values and values["E"][0] < y.min() + math.log(COLLAPSED):
        return "E runs to zero: the points fall at least as fast as a pure power law"
    for name in exponents(form):
        if name in values and values[name][0] <= FLAT:
            axis = {"gamma": "C", "alpha": "N", "beta": "D"}[name]
            return f"{name} is not above zero: the loss does not fall with {axis}"
    return None
