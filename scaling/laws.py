"""Fit scaling laws to arrays of points, with a certificate that the optimum was found and intervals
from trajectories.

Every law is a sum of power laws, so ln L is the log-sum-exp of terms that are linear in theta = (ln
factors at the centre of ln x, exponents): one value and one gradient for all forms. The objective
is Huber's loss on log-loss residuals, summed (Hoffmann et al. 2022, appendix D.3). Uncentred, a
factor and its exponent are almost one parameter and solvers stall."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import product

import numpy as np
from scipy.optimize import least_squares
from scipy.special import erf, fdtrc, stdtrit

from lib.errors import UserError
from lib.text import si
from scaling.valleys import Minima, Valley, fit_valleys, lowest_part, without_spikes

# form -> its parameters in the solver's order: ln factors first, then exponents
NAMES = {
    "ray": ("E", "K", "gamma"),
    "power_n": ("A", "alpha"),
    "power_d": ("B", "beta"),
    "power_c": ("K", "gamma"),
    "chinchilla": ("E", "A", "B", "alpha", "beta"),
    "isoflop": ("a", "b"),
}
# positive, so solved for and given intervals on the logarithm
FACTORS = {"E", "A", "B", "K", "k_n", "k_d"}
# The others must be above zero for the loss to fall, or for a budget to say how to spend it.
EXPONENTS = {form: [name for name in names if name not in FACTORS] for form, names in NAMES.items()}
# forms that points can be said to lie off; of the others the form itself is rough
HAS_OUTLIERS = "chinchilla", "ray"
# form -> (factor, abscissa, exponent) of each power law in it
SURFACE = ("A", "N", "alpha"), ("B", "D", "beta")
POWERS = {
    "ray": (("K", "C", "gamma"),),
    "power_n": SURFACE[:1],
    "power_d": SURFACE[1:],
    "power_c": (("K", "C", "gamma"),),
    "chinchilla": SURFACE,
}

DELTA = 1e-3  # Huber's threshold on log-loss residuals
# declared range of the compute exponent (published: .15 to .18)
GAMMAS = (0.10, 0.12, 0.14, 0.16, 0.18, 0.20, 0.22)
CONVERGED = 1e-6  # gradient norm over its largest, n delta, below which a fit counts as converged
# smallest over largest singular value of the Jacobian, below which points do not separate
# parameters
SINGULAR = 1e-9
ONE_RAY = 1.05  # tokens-per-parameter ratios within 5 % count as one
RISING = 1e-9  # an exponent this small is 0: the loss does not fall
# E below this share of the smallest loss is E = 0: the points ask for a plain power law
COLLAPSED = 1e-3

# largest over smallest tokens per parameter for chinchilla: nearer, alpha and beta trade places
SPREAD = 2
LEVELS = 3  # distinct N, and D, for chinchilla
# distinct points that its five parameters need: with six, intervals hold beta 82 times in 100
FEWEST = 9
# The solver's starts: E as a share of the lowest loss; exponents
STARTS = {
    "ray": ((0.1, 0.5, 0.9), (0.03, 0.1, 0.2, 0.5, 1.0)),
    "chinchilla": ((0.3, 0.6, 0.9), (0.15, 0.35, 0.7)),
}

NEAR = 5  # steps by plain squares before the descent
STEPS = 300  # of one descent, before it counts as failed
FLAT = 1e-10  # relative fall of the objective that ends a descent
ROUNDING = 1e-20  # an objective over delta^2 this small is 0
# problems: the starts of a fit. More are multiplied at once, five times faster and rounded
# otherwise
FEW = 30
BLOCK = 24_000  # points times problems at once: what stays in the cache

# largest over smallest compute that counts as one budget: published points scatter by per cents
SAME_BUDGET = 1.1
SIZES = 5  # distinct sizes that a budget needs
BUDGETS = 3  # usable budgets that a slope with an interval needs
# isoflop fits sizes within this share of a budget's lowest loss; the first counts
WINDOWS = (0.1, 0.2)
# of how a differs over them: with all of it intervals of an offset grid hold 99 in 100
WINDOW_DOUBT = 0.5
ALLOCATION = ("a", "k_n", "b", "k_d")

CLUSTERS = 20  # trajectories from which on the bootstrap covers 95 % about as often as it says
FAILED = 0.05  # share of resamples without a fit above which the bootstrap is not believed
# a law does not fit whose residuals are above this, in ln L, and above so many times the noise
MISSES = 0.01, 2.0
# Points off the law, where the rest of them fits.
OFF_LAW = 0.01  # ln L: the least distance from the law of an outlier
OFF_BY_CHANCE = 0.01  # of a table without outliers, to name one all the same
NEIGHBOURS = 2  # scatter over the noise between neighbours, above which the form is at fault
MOST_OUTLIERS = 0.1  # share of the points: more are no outliers but another law
FARTHEST = 3  # scatters that an outlier counts for in a jackknife
ROUNDS = 10  # of leaving out and putting back
CANDIDATES = 10  # points at least that are left out in turn: those that may lie farthest off
# points: up to here each is left out in turn, as one in a corner draws the law to itself
ONE_BY_ONE = 100
SHARED = 0.005  # chance of finding a fault that sizes or runs share where they share none
SIZE_TERMS = 3  # E, A, alpha: what Chinchilla's law takes from the sizes
MOST_GROUPS = 100  # that are tested for a shared fault
FREEDOM = 4  # degrees of freedom within groups that an F-test needs
EDGE = 3  # standard errors from zero within which an exponent's estimate leans steep
# of the points, earliest first, that a law may have to do without
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
DROPS = (1, 3, 5, 10)
DELTAS = (1e-4, 1e-2, None)  # beside the declared 1e-3; None is plain squares of ln L
MOST_SIZES = 10  # more sizes than these are left out in as many groups of neighbours
RESAMPLES = 100  # of a variant: enough to tell whether an exponent's interval holds 0
MANY = 2000  # points: a quarter of the resamples must do


# ---------------------------------------------------------------------------- what a fitted law is


@dataclass(frozen=True, eq=False)
class Points:
    """n measured points: parameters N, tokens D, FLOPs C, loss in nats per token; points of one
    trajectory share a label."""

    N: np.ndarray
    D: np.ndarray
    C: np.ndarray
    loss: np.ndarray
    cluster: np.ndarray

    def axes(self, form: str) -> tuple[np.ndarray, ...]:
        """The abscissae that a form's predict takes: (N, D) for chinchilla, else one of C, N, D."""
        return tuple(getattr(self, axis) for _, axis, _ in POWERS[form])

    @property
    def ray(self) -> tuple[float, float]:
        """Smallest and largest tokens per parameter."""
        ratios = self.D / self.N
        return float(ratios.min()), float(ratios.max())

    def take(self, index) -> "Points":
        """The points at `index`, which numpy must accept as one."""
        return Points(*(getattr(self, one.name)[index] for one in fields(self)))


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


# ---------------------------------------------------------------------------------------- the laws


def fit_form(
    form: str, points: Points, seed_sd: float = 0.0, delta: float | None = DELTA, resamples: int = 0
) -> Fit:
    """Any form fitted to the points, as fit_law and with_bootstrap do; where they cannot carry it,
    a Fit that says why."""
    try:
        fit = (
            fit_isoflop(points)
            if form == "isoflop"
            else fit_law(form, *points.axes(form), points.loss, seed_sd=seed_sd, delta=delta)
        )
    except UserError as error:
        return unfitted(form, len(points.loss), str(error))
    if form == "ray" and not on_one_ray(points.ray):
        return unidentified(
            fit,
            (
                "the points lie at {:.3g} to {:.3g} tokens per parameter; the ray law needs one"
                " ratio".format(*points.ray)
            ),
        )
    return with_bootstrap(fit, points, resamples)


def fit_law(
    form: str, *data, seed_sd: float = 0.0, delta: float | None = DELTA, gamma: float | None = None
) -> Fit:
    """Fit one of NAMES (see Fit) to data: the form's abscissae as Points.axes has them, then
    losses, each of shape (n,). seed_sd: of ln L between seeds, a floor under the residuals in
    intervals. delta: Huber's threshold on ln L, None for squares. gamma: the ray law's exponent,
    held fixed. Raises UserError for fewer points than parameters; others that cannot tell are
    fitted and say so."""
    *axes, loss = data
    p = len(NAMES[form]) - (gamma is not None)
    if (found := len(np.unique(np.array(axes), axis=1).T)) < p:
        raise UserError(f"{found} distinct point(s); this law needs at least {p}")
    centres, y, n = tuple(float(np.log(x).mean()) for x in axes), np.log(loss), len(loss)
    logs = centred(axes, centres)
    starts = np.array(_starts(form, logs, y, gamma), dtype=float)
    theta, left, jac, certificate = minimise(*terms(form, logs, gamma), y, starts, delta)
    singular, values = np.linalg.svd(jac, compute_uv=False), natural(form, theta, centres, gamma)
    is_singular = singular[-1] < SINGULAR * singular[0]
    # a valley without a minimum is the cause, not the solver
    why = _lacking(form, axes, values, y, p)
    if why is None and certificate["gradient_norm"] > CONVERGED * n * (delta or DELTA):
        why = f"the best of {len(starts)} starts did not converge"
    if why is None and is_singular:
        why = "the points do not separate the parameters (singular Jacobian)"
    rms = float(np.sqrt(left @ left / (n - p))) if n > p else None
    best = Optimum(
        theta,
        centres,
        gamma,
        delta,
        None,
        n - p,
        None if rms is None else max(rms, seed_sd),
        float(y.min()),
    )
    fit = Fit(
        form,
        {name: float(back(name, value)) for name, value in values.items()},
        n,
        why is None,
        why,
        residual_rms=rms,
        scatter=rms,
        optimum=best,
        **certificate,
    )
    if n <= p or is_singular:
        return fit
    rest = None
    if form in HAS_OUTLIERS and gamma is None and delta is not None:
        rest = without_outliers(*terms(form, logs), y, theta, delta, seed_sd)
    if rest is not None and not _is_another_law(rest, y, np.log(axes)):
        return _with_outliers(fit, rest, y, seed_sd)
    return with_covariance(
        fit, best.sigma**2 * best.inefficiency * np.linalg.inv(jac.T @ jac), n - p, "t"
    )


def _is_another_law(rest: "Rest", y, log_axes) -> bool:
    """Whether the rest lies off the law too, neighbours alike: then the form is at fault, not its
    points."""
    if rest.scatter <= OFF_LAW / 2 or len(y) >= MANY:  # the noise of thousands takes a second
        return False
    residual = (y - rest.log_loss)[rest.kept]
    return rest.scatter > NEIGHBOURS * _noise_of_neighbours(
        log_axes[:, rest.kept], residual, np.arange(len(residual))
    )


def _with_outliers(fit: Fit, rest: "Rest", y, seed_sd: float) -> Fit:
    """The fit with its outliers named and t-intervals of the other points' scatter, widened by what
    the outliers move."""
    best = fit.optimum
    distances = np.expm1(y - rest.log_loss)
    farthest_first = sorted(rest.left_out, key=lambda index: -abs(distances[index]))
    outliers = tuple((int(index), float(distances[index])) for index in farthest_first)
    best = replace(best, sigma=max(rest.scatter, seed_sd))
    values = natural(fit.form, rest.theta, best.centres)
    without = {name: float(back(name, value)) for name, value in values.items()}
    fit = replace(
        fit, outliers=outliers, without_outliers=without, scatter=rest.scatter, optimum=best
    )
    kept = rest.jacobian[rest.kept]
    moved = best.theta - rest.theta
    covariance = best.sigma**2 * best.inefficiency * np.linalg.inv(kept.T @ kept) + np.outer(
        moved, moved
    )
    return with_covariance(fit, covariance, rest.dof, "t")


def fit_band(x, L, axis: str = "c", factor: float = 1.0) -> list[Fit]:
    """The model-form envelope: the pure power law, then two-parameter rays with exponents factor *
    GAMMAS that need no E below zero. Their spread beyond the points is the honest uncertainty of
    few points; residuals know nothing of it."""
    rays = [fit_law("ray", x, L, gamma=factor * gamma) for gamma in GAMMAS]
    return [
        fit_law(f"power_{axis}", x, L),
        *(fit for fit in rays if fit.parameters["E"] >= COLLAPSED * np.min(L)),
    ]


def _starts(form: str, logs, y, gamma: float | None) -> list[list[float]]:
    """Where the solver starts: around a power law's straight line; else E at shares of the lowest
    loss, factors to match it."""
    if form not in STARTS:
        slope, height = np.polyfit(logs[0], y, 1)
        return [
            [height + shift, -slope * tilt] for shift in (-0.3, 0.1, 0.3) for tilt in (0, 0.8, 3)
        ]
    shares, slopes = STARTS[form] if gamma is None else ((0.1, 0.6), (gamma,))
    starts, free = [], 0 if gamma is not None else len(EXPONENTS[form])
    for share in shares:
        floor = share * np.exp(y.min())
        height = np.mean(np.log(np.exp(y) - floor)) - np.log(len(logs))
        starts += [
            [np.log(floor), *[height] * len(logs), *some] for some in product(slopes, repeat=free)
        ]
    return starts


def on_one_ray(ray: tuple[float, float] | None) -> bool:
    """Whether these smallest and largest tokens per parameter count as one ratio."""
    return ray is not None and ray[1] / ray[0] <= ONE_RAY


# -------------------------------------------------------------------------- one optimum, certified


def centred(axes, centres) -> list[np.ndarray]:
    return [
        np.log(np.asarray(x, dtype=float)) - centre for x, centre in zip(axes, centres, strict=True)
    ]


def with_covariance(fit: Fit, covariance, dof: int, interval: str) -> Fit:
    """The fit with se and ci95 from a covariance of theta, by the delta method and Student's t;
    none where unidentified."""
    fit = replace(fit, optimum=(best := replace(fit.optimum, covariance=covariance, dof=dof)))
    if not fit.identified:
        return fit
    where, small, widths = (best.centres, best.gamma), 1e-30, {}
    # A step along the imaginary axis gives the derivatives without a difference of neighbours.
    for name, values in natural(
        fit.form, best.theta + 1j * small * np.eye(len(best.theta)), *where
    ).items():
        gradient = values.imag / small
        if np.abs(gradient).max() > 1e-12:  # else held fixed
            widths[name] = float(np.sqrt(gradient @ covariance @ gradient))
    return _with_widths(fit, natural(fit.form, best.theta, *where), widths, dof, interval)


def _with_widths(fit: Fit, values, widths, dof: int, interval: str) -> Fit:
    """The fit with se and ci95 from standard errors of its parameters, factors as logarithms."""
    se = {
        name: width * float(back(name, values[name])) if name in FACTORS else width
        for name, width in widths.items()
    }
    top = {"E": max(fit.optimum.lowest, values["E"])} if "E" in widths else {}
    ci95 = {
        name: tuple(
            float(
                back(
                    name,
                    min(values[name] + side * stdtrit(dof, 0.975) * width, top.get(name, math.inf)),
                )
            )
            for side in (-1, 1)
        )
        for name, width in widths.items()
    }
    return judged(replace(fit, se=se, ci95=ci95, interval=interval))


def judged(fit: Fit) -> Fit:
    """The fit, unidentified where an exponent's interval holds 0: its term is then a constant, as E
    is."""
    flat = next(
        (name for name in EXPONENTS[fit.form] if name in fit.ci95 and fit.ci95[name][0] <= 0), None
    )
    return (
        fit
        if flat is None
        else replace(
            fit,
            identified=False,
            reason=f"the 95 % interval of {flat} contains 0, so the points do not determine it",
        )
    )


def _lacking(form, axes, values, y, p) -> str | None:
    if form == "chinchilla":
        ratio = np.divide(axes[1], axes[0])
        if ratio.max() < SPREAD * ratio.min() * 0.99:  # 0.99: a budget is rounded up to whole steps
            return (
                f"the points lie at {ratio.min():.3g} to {ratio.max():.3g} tokens per parameter:"
                f" alpha and beta need ratios at least {SPREAD}x apart"
            )
        for name, x in zip("ND", axes, strict=True):
            found, left = 0, np.sort(x)
            while len(left):
                found, left = found + 1, left[left > ONE_RAY * left[0]]
            if found < LEVELS:
                return (
                    f"the points hold {found} distinct {name}: its term needs {LEVELS} to be told"
                    " from E"
                )
        if (points := len(np.unique(axes, axis=1).T)) < FEWEST:
            return f"{points} distinct points are too few for five parameters: {FEWEST} at least"
    if len(y) <= p:
        return f"{len(y)} points for {p} parameters leave 0 degrees of freedom"
    if "E" in values and values["E"] < y.min() + math.log(COLLAPSED):
        return "E runs to zero: the points fall at least as fast as a pure power law"
    flat = next((name for name in EXPONENTS[form] if values[name] <= RISING), None)
    return flat and f"{flat} is not above zero: the loss does not fall"


# -------------------------------------------------------------------------- a law in its own terms


def terms(form: str, logs, gamma: float | None = None):
    """(slopes (n, terms, p), offsets (n, terms)) with ln L = logsumexp over terms of slopes @ theta
    + offsets."""
    p, floor = len(NAMES[form]), int("E" in NAMES[form])
    # the layout decides how products round
    slopes = np.moveaxis(np.zeros((floor + len(logs), p, len(logs[0]))), 2, 0)
    slopes[:, 0, 0] = 1  # ln E, where the form has it
    for i, log in enumerate(logs):
        slopes[:, floor + i, floor + i] = 1  # ln factor
        slopes[:, floor + i, floor + len(logs) + i] = -log  # exponent
    return (
        (slopes, np.zeros(slopes.shape[:2]))
        if gamma is None
        else (slopes[..., :2], gamma * slopes[..., 2])
    )


def log_law(slopes, offsets, theta):
    """(ln L (n,), its gradient in theta (n, p)) of what `terms` gives."""
    parts = slopes @ theta + offsets
    # scipy.special.logsumexp to the last bit, for a tenth of its time.
    top = parts.max(axis=1, keepdims=True)
    is_top = parts == top
    n_top = is_top.sum(axis=1)
    total = (
        np.log1p(np.exp(np.where(is_top, -np.inf, parts) - top).sum(axis=1) / n_top)
        + np.log(n_top)
        + top[:, 0]
    )
    return total, np.einsum("nt,ntp->np", np.exp(parts - total[:, None]), slopes)


def natural(form: str, theta, centres, gamma: float | None = None) -> dict:
    """name -> values of shape (...) from the solver's theta (..., p): the usual parameters, factors
    as logarithms."""
    values = dict(zip(NAMES[form], np.moveaxis(theta, -1, 0), strict=gamma is None))
    if gamma is not None:
        values["gamma"] = np.full(theta.shape[:-1], gamma)
    for (factor, _, exponent), centre in zip(POWERS[form], centres, strict=True):
        values[factor] = values[factor] + centre * values[exponent]
    if form == "chinchilla":
        alpha, beta = values["alpha"], values["beta"]
        values |= {
            "a": beta / (alpha + beta),
            "b": alpha / (alpha + beta),
            "gamma": alpha * beta / (alpha + beta),
        }
    return values


def back(name: str, values):
    """A factor from its logarithm (infinite where it overflows), an exponent as it is."""
    with np.errstate(over="ignore"):
        return np.exp(values) if name in FACTORS else values


# ------------------------------------------------------------------------------ points off the law


@dataclass(frozen=True, eq=False)
class Rest:
    """A law fitted to the points without its outliers; arrays of all n points are about that
    law."""

    kept: np.ndarray  # (n,) bool
    theta: np.ndarray  # (p,)
    log_loss: np.ndarray  # (n,) the law's
    jacobian: np.ndarray  # (n, p) of log_loss
    scatter: float  # rms of the kept points' residuals over dof
    dof: int

    @property
    def left_out(self) -> np.ndarray:
        return np.flatnonzero(~self.kept)

    def scores(self, y, delta: float, seed_sd: float) -> np.ndarray:
        """(n,) distance of each point from the law over its standard error, as of a point that the
        law has not seen."""
        sigma = max(self.scatter, seed_sd, 1e-12)
        own = self.jacobian[self.kept]
        spread = np.linalg.pinv(own.T @ own)
        leverage = np.einsum("ni,ij,nj->n", self.jacobian, spread, self.jacobian)
        return np.abs(y - self.log_loss) / (
            sigma * np.sqrt(1 + inefficiency(delta, sigma) * leverage)
        )


def without_outliers(slopes, offsets, y, theta, delta: float, seed_sd: float = 0.0) -> Rest | None:
    """The law without the points that lie off it; None where there is none, or more than
    MOST_OUTLIERS (another law then).

    slopes, offsets of `terms`, y = ln loss (n,), theta (p,) the optimum of all points, which a
    point in a corner may have drawn to itself. So each point is left out in turn, the one that
    costs most goes first, and so on; the longest such list counts whose last point is significant
    against the rest (Rosner 1983): a first outlier may hide behind a second."""
    n, p = slopes.shape[0], slopes.shape[2]
    most = min(math.ceil(MOST_OUTLIERS * n), n - p - 2)
    rest = _rest(slopes, offsets, y, theta, np.ones(n, bool))
    if most < 1 or not _may_be_off(rest, y):
        return None
    leave_out = _leave_out_one_by_one if n <= ONE_BY_ONE else _leave_out_together
    found = leave_out(rest, slopes, offsets, y, delta, seed_sd, most)
    if found is None:
        return None
    return _put_back(found, slopes, offsets, y, delta, seed_sd)


def _may_be_off(rest: Rest, y) -> bool:
    return bool(_unseen(rest, y).max() > OFF_LAW / 2)


def _unseen(rest: Rest, y) -> np.ndarray:
    """(n,) about how far each point would lie from the law of the others, by what it weighs in this
    one."""
    own = rest.jacobian[rest.kept]
    leverage = np.einsum("ni,ij,nj->n", rest.jacobian, np.linalg.pinv(own.T @ own), rest.jacobian)
    return np.abs(y - rest.log_loss) / np.maximum(1 - leverage, 0.05)


def _rest(slopes, offsets, y, theta, kept) -> Rest:
    log_loss, jacobian = log_law(slopes, offsets, theta)
    residual = (y - log_loss)[kept]
    dof = len(residual) - len(theta)
    return Rest(kept, theta, log_loss, jacobian, math.sqrt(residual @ residual / dof), dof)


def _is_off(rest: Rest, y, delta: float, seed_sd: float, among: int) -> np.ndarray:
    """(n,) whether each point lies OFF_LAW off the law and farther than the farthest of so many
    would by chance."""
    limit = stdtrit(rest.dof, 1 - OFF_BY_CHANCE / (2 * among))
    return (np.abs(y - rest.log_loss) > OFF_LAW) & (rest.scores(y, delta, seed_sd) > limit)


def _leave_out_one_by_one(rest: Rest, slopes, offsets, y, delta, seed_sd, most: int) -> Rest | None:
    found, in_vain = None, 0
    for _ in range(most):
        unseen = np.where(rest.kept, _unseen(rest, y), -1.0)
        tried = min(int(rest.kept.sum()), max(CANDIDATES, len(y) // 4))
        candidates = np.argsort(-unseen, kind="stable")[:tried]
        weights = np.tile(rest.kept.astype(float), (tried, 1))
        weights[np.arange(tried), candidates] = 0.0
        starts = np.tile(rest.theta, (tried, 1))
        thetas, costs, _ = descend(starts, slopes, offsets, y, delta, weights)
        dearest = int(np.argmin(costs))
        rest = _rest(slopes, offsets, y, thetas[dearest], weights[dearest] > 0)
        is_off = _is_off(rest, y, delta, seed_sd, int(rest.kept.sum()) + 1)[candidates[dearest]]
        found, in_vain = (rest, 0) if is_off else (found, in_vain + 1)
        if in_vain == 2:  # one outlier hides a second one, rarely a third
            break
    return found


def _leave_out_together(rest: Rest, slopes, offsets, y, delta, seed_sd, most: int) -> Rest | None:
    """Of many points: all that lie off the law at once, then those off the law of the rest, until
    none is new."""
    everything = rest
    for _ in range(ROUNDS):
        # The median does not count how far the outliers are, as a scatter over all points would.
        scatter = float(np.median(np.abs(y - rest.log_loss)[rest.kept])) / 0.6745
        off = _is_off(replace(rest, scatter=scatter), y, delta, seed_sd, len(y))
        if off.sum() > most:
            return None
        if (off == ~rest.kept).all():
            break
        theta, _, _ = descend(
            rest.theta[None], slopes, offsets, y, delta, (~off)[None].astype(float)
        )
        rest = _rest(slopes, offsets, y, theta[0], ~off)
    return None if rest is everything or rest.kept.all() else rest


def _put_back(rest: Rest, slopes, offsets, y, delta, seed_sd) -> Rest | None:
    """Without those that the law of the rest does not find off it: they had gone before a worse
    one."""
    for _ in range(ROUNDS):
        off = _is_off(rest, y, delta, seed_sd, len(y)) & ~rest.kept
        if (off == ~rest.kept).all():
            return rest
        if not off.any():
            return None
        theta, _, _ = descend(
            rest.theta[None], slopes, offsets, y, delta, (~off)[None].astype(float)
        )
        rest = _rest(slopes, offsets, y, theta[0], ~off)
    return rest


# ----------------------------------------------------------------------------- many starts at once


def minimise(slopes, offsets, y, starts, delta: float | None):
    """(theta, residual, Jacobian, certificate) of the best of `starts` (B, p); slopes, offsets of
    `terms`, y = ln loss (n,). delta None: plain squares. Below DELTA the best of the starts follows
    delta down by halves: with it the objective nears absolute deviations, whose gradient jumps."""
    wide = max(delta, DELTA) if delta else None

    @lru_cache(maxsize=1)  # the solver asks for the residual, then for the Jacobian where it steps
    def at(theta: bytes):
        log_loss, relative = log_law(slopes, offsets, np.frombuffer(theta))
        return log_loss - y, relative

    def finish(start, unit):
        # In units of delta, because the solver also stops by absolute measures and the objective is
        # about delta^2.
        with np.errstate(all="ignore"):  # in a valley without a minimum, where scipy may overflow
            return least_squares(
                lambda x: at(x.tobytes())[0] / unit,
                start,
                jac=lambda x: at(x.tobytes())[1] / unit,
                x_scale="jac",
                loss="huber" if delta else "linear",
                ftol=1e-13,
                xtol=1e-13,
                gtol=1e-12,
                max_nfev=500,
            )

    equal = np.ones((len(starts), len(y)))
    # Far from the points Huber's gradient does not grow with the distance: a few steps by plain
    # squares come first, so few that the starts stay apart.
    near, _, _ = descend(starts, slopes, offsets, y, None, equal, steps=NEAR)
    ends, costs, _ = descend(near, slopes, offsets, y, wide, equal)
    best = finish(ends[np.argmin(costs)], wide or 1.0)
    # Two objectives are one optimum when they agree to a millionth, or when both are 0 next to
    # rounding.
    at_best = int((costs <= best.cost * (1 + 1e-6) + 1e-14 / (wide or 1.0) ** 2).sum())
    while delta and wide > delta:
        wide = max(wide / 2, delta)
        best = finish(best.x, wide)
    unit = wide or 1.0
    return (
        best.x,
        *at(best.x.tobytes()),
        {
            "objective": float(best.cost) * unit**2,
            "starts": len(starts),
            "starts_at_best": at_best,
            "gradient_norm": float(np.linalg.norm(best.grad)) * unit**2,
        },
    )


def descend(starts, slopes, offsets, y, delta: float | None, weights, steps: int = STEPS):
    """(theta (B, p), objective over delta^2 (B,), converged (B,)) of Huber sums with weights (B,
    n)."""
    block, are_few = max(8, BLOCK // len(y)), len(starts) <= FEW
    done = [
        _descend(
            starts[i : i + block], slopes, offsets, y, delta, weights[i : i + block], steps, are_few
        )
        for i in range(0, len(starts), block)
    ]
    return tuple(np.concatenate(parts) for parts in zip(*done, strict=True))


def _descend(starts, slopes, offsets, y, delta, weights, limit, are_few):
    """Levenberg and Marquardt's steps for all starts at once; each ends where its objective no
    longer falls."""
    B, p = starts.shape
    thetas, costs, converged = starts.copy(), np.full(B, np.inf), np.zeros(B, bool)
    # of those that go on, as theta and what follows it
    alive, damping, unit = np.arange(B), np.full(B, 1e-3), np.eye(p)
    theta, cost, gradient, curvature, size = (
        starts,
        *_quadratic(starts, slopes, offsets, y, delta, weights, are_few),
    )
    weights = np.ascontiguousarray(weights)  # the layout decides how products round
    for _ in range(limit):
        damped = curvature + ((damping[:, None] * size)[:, :, None] + 1e-300) * unit
        step = -np.linalg.solve(damped, gradient[..., None])[..., 0]
        trial = theta + np.minimum(np.maximum(step, -5), 5)  # np.clip is slow for so few
        new = trial, *_quadratic(trial, slopes, offsets, y, delta, weights, are_few)
        worse = ~(new[1] <= cost * (1 + 1e-12) + ROUNDING)
        end = ~worse & (np.abs(cost - new[1]) <= FLAT * cost + ROUNDING) & (damping <= 1e-2)
        if worse.any():
            for one, old in zip(new, (theta, cost, gradient, curvature, size), strict=True):
                one[worse] = old[worse]
        damping = np.maximum(np.where(worse, damping * 4, damping / 5), 1e-9)
        thetas[alive], costs[alive], converged[alive[end]] = *new[:2], True
        keep = ~end & (damping < 1e10)
        if not keep.all():
            alive, damping, weights, *new = (one[keep] for one in (alive, damping, weights, *new))
        if not len(alive):
            break
        theta, cost, gradient, curvature, size = new
    return thetas, costs, converged


def _quadratic(theta, slopes, offsets, y, delta, weights, are_few):
    """(cost (B,), gradient (B, p), Gauss-Newton curvature (B, p, p), size (B, p)) of sum w Huber(r
    / delta), which has no curvature where it is linear; size is the diagonal of plain squares, the
    measure of a step."""
    n, terms, p = slopes.shape
    unit = delta or 1.0
    share = offsets + (
        np.matmul(slopes[None], theta[:, None, :, None])[..., 0]
        if are_few
        # (B, n, terms)
        else (theta @ slopes.reshape(n * terms, p).T).reshape(len(theta), n, terms)
    )
    # four times faster than max over the last axis
    top = np.maximum.reduce([share[..., i] for i in range(terms)])
    np.exp(share - top[..., None], out=share)
    total = sum(share[..., i] for i in range(terms))
    share /= total[..., None]
    r = (np.log(total) + top - y) / unit
    jacobian = (
        np.matmul(share[:, :, None, :], slopes[None])[:, :, 0]
        if are_few
        else np.matmul(share.transpose(1, 0, 2), slopes).transpose(1, 0, 2)
    ) / unit  # (B, n, p)
    away = np.abs(r)
    inside = away <= 1 if delta else np.ones_like(r, bool)
    cost = (weights * np.where(inside, r * r / 2, away - 0.5)).sum(axis=1)
    pull = weights * (np.clip(r, -1, 1) if delta else r)
    gradient = np.matmul(pull[:, None, :], jacobian)[:, 0]
    curvature = np.matmul((jacobian * (weights * inside)[..., None]).transpose(0, 2, 1), jacobian)
    return cost, gradient, curvature, np.matmul(weights[:, None, :], jacobian**2)[:, 0]


# ------------------------------------------------------ IsoFLOP (Hoffmann et al., approaches 1, 2)


def fit_isoflop(points: Points) -> Fit:
    """N* = k_n C^a and D* = k_d C^b over budgets of equal compute, by least squares on logarithms
    of the budgets' minima.

    The minima are those of scaling.valleys: each budget's valley has factors of its own, all share
    their exponents. A window holds the sizes whose loss is within a share of the budget's lowest,
    SIZES at least: sizes that are hopeless at a budget say little of its minimum, and which these
    are the loss knows, not the size. How a differs over WINDOWS widens its interval: Student's t
    over budgets, or over trajectories (each left out once) where one serves several. D* is the
    points' own D at N*: C may follow any convention."""
    n, labels = len(points.loss), np.unique(points.cluster)
    budgets = _budgets(points)
    found = [_allocation(points, budgets, window) for window in WINDOWS]
    best = found[0]
    about = {
        "budgets": best.rows,
        "windows": tuple(
            {"window": one.window, "a": None if one.line is None else float(one.line[0])}
            for one in found
        ),
    }
    if best.line is None:
        good = sum(row["reason"] is None for row in best.rows)
        return replace(
            unfitted(
                "isoflop",
                n,
                f"{good} of {len(best.rows)} compute budgets have an interior minimum over "
                f"at least {SIZES} sizes; the exponents need {BUDGETS}",
            ),
            **about,
        )
    values, width, dof, interval = best.line, best.width, best.dof, "t"
    named = dict(zip(ALLOCATION, values.tolist(), strict=True))
    fit = Fit(
        "isoflop",
        {name: float(back(name, value)) for name, value in named.items()},
        n,
        True,
        None,
        starts=1,
        starts_at_best=1,
        objective=best.squares / 2,
        residual_rms=math.sqrt(best.squares / best.dof),
        valleys=best.minima,
        **about,
    )
    if len(labels) < n:
        without = []
        for label in labels:
            rest = points.take(np.flatnonzero(points.cluster != label))
            without.append(_allocation(rest, _budgets(rest), WINDOWS[0], best.minima).line)
        fit, dof, interval = replace(fit, clusters=len(labels)), len(labels) - 1, "cluster"
        if any(line is None for line in without):
            return replace(
                fit,
                identified=False,
                reason=(
                    "the minima rest on single trajectories: without one of them fewer than"
                    f" {BUDGETS} budgets have one"
                ),
            )
        width = np.sqrt(
            dof / len(labels) * np.sum((np.array(without) - np.mean(without, axis=0)) ** 2, axis=0)
        )
    others = np.array([one.line for one in found if one.line is not None])
    width = np.hypot(width, WINDOW_DOUBT * np.sqrt(np.mean((others - values) ** 2, axis=0)))
    return _with_widths(
        fit, named, dict(zip(ALLOCATION, width.tolist(), strict=True)), dof, interval
    )


def minima_of(fit: Fit) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(C, N*, D*, L*) of an isoflop fit's budgets that have a minimum, each of shape (budgets,)."""
    good = [row for row in fit.budgets or () if row["reason"] is None]
    C, N, D, loss = (
        np.array([row[key] for row in good], dtype=float) for key in ("C", "N", "D", "loss")
    )
    return C, N, D, loss


def fit_frontier(fit: Fit, seed_sd: float = 0.0) -> Fit:
    """L*(C), the lowest loss for a compute, through the minima of an identified isoflop fit: the
    ray law where they identify it, else the power law. A law through all sizes lies above it."""
    C, _, _, loss = minima_of(fit)
    power = fit_law("power_c", C, loss, seed_sd=seed_sd)
    if len(C) < len(NAMES["ray"]):
        return power
    ray = fit_law("ray", C, loss, seed_sd=seed_sd)
    return ray if ray.identified else power


@dataclass(frozen=True, eq=False)
class Budget:
    """The points of about one compute, a size once: seeds of a size are averaged, so are D and C,
    which scatter with the counting."""

    C: float  # FLOPs, geometric mean
    log_d: np.ndarray  # (sizes,) mean ln D
    valley: Valley
    reason: str | None  # why it can have no minimum


@dataclass(frozen=True, eq=False)
class Allocation:
    """Straight lines through the budgets' minima over one window; line, width: of (a, ln k_n, b, ln
    k_d), None where too few budgets have a minimum."""

    window: float  # share of the lowest loss
    rows: tuple[dict, ...]  # C, sizes, N, D, loss or reason, per budget
    minima: Minima | None
    line: np.ndarray | None = None
    width: np.ndarray | None = None
    dof: int = 0
    squares: float = 0.0  # of ln N* around its line


def _budgets(points: Points) -> list[Budget]:
    """Budgets in order of compute; one ends where C exceeds its smallest by SAME_BUDGET."""
    budgets, order = [], np.argsort(points.C, kind="stable")
    while len(order):
        end = int(np.searchsorted(points.C[order], SAME_BUDGET * points.C[order[0]], side="right"))
        budgets.append(_budget(points.take(order[:end])))
        order = order[end:]
    return budgets


def _budget(points: Points) -> Budget:
    N, member = np.unique(points.N, return_inverse=True)
    count = np.bincount(member)
    loss, log_d = (
        np.bincount(member, values) / count for values in (points.loss, np.log(points.D))
    )
    reason = None
    if len(N) < SIZES:
        reason = f"{len(N)} sizes; a minimum needs {SIZES}"
    elif {loss.argmin(), without_spikes(loss).argmin()} <= {0, len(N) - 1}:
        reason = "the smallest or the largest size has the lowest loss: no interior minimum"
    return Budget(float(np.exp(np.log(points.C).mean())), log_d, Valley(np.log(N), loss), reason)


def _allocation(
    points: Points, budgets: list[Budget], window: float, near: Minima | None = None
) -> Allocation:
    usable = [budget for budget in budgets if budget.reason is None]
    minima = None
    if usable:
        minima = fit_valleys([lowest_part(budget.valley, window, SIZES) for budget in usable], near)
    rows, at = [], 0
    for budget in budgets:
        row = {
            "C": budget.C,
            "sizes": len(budget.valley.loss),
            "N": None,
            "D": None,
            "loss": None,
            "reason": budget.reason,
        }
        if budget.reason is None:
            log_size, loss = minima.log_size[at], minima.loss[at]
            at += 1
            if np.isfinite(log_size):
                tokens = np.exp(np.interp(log_size, budget.valley.log_size, budget.log_d))
                row |= {"N": float(np.exp(log_size)), "D": float(tokens), "loss": float(loss)}
            else:
                row["reason"] = "the valley through the losses has no minimum between its sizes"
        rows.append(row)
    good = [row for row in rows if row["reason"] is None]
    if len(good) < BUDGETS:
        return Allocation(window, tuple(rows), minima)
    x, y = np.log([row["C"] for row in good]), np.log([[row["N"], row["D"]] for row in good])
    line, covariance = np.polyfit(x, y, 1, cov=True)  # (slope and height, of N and D)
    return Allocation(
        window,
        tuple(rows),
        minima,
        line.T.ravel(),
        np.sqrt(np.einsum("iik->ki", covariance)).ravel(),
        len(x) - 2,
        float(np.sum((y[:, 0] - np.polyval(line[:, 0], x)) ** 2)),
    )


# ------------------------------- intervals from trajectories, lack of fit, what is choice in a law
# Points that branch off one run share its fate, so runs are drawn, not points. All resamples
# descend together from the fit's optimum: a resample is a row of weights, and numpy does a thousand
# of them in the time of a few solver calls. Few trajectories leave a bootstrap too few different
# draws; there each is left out once (jackknife) instead.


def with_bootstrap(fit: Fit, points: Points, resamples: int = 1000) -> Fit:
    """The fit with the intervals that its trajectories allow, which judge anew whether an
    exponent's holds 0; 0 resamples: as is. Every point its own trajectory and fewer than CLUSTERS:
    Student's t, as fitted. Shared trajectories, fewer than CLUSTERS: the jackknife over them. From
    CLUSTERS on: the bootstrap, unless seeds differ by more than the residuals, which it cannot
    know."""
    if fit.ci95 is None or fit.optimum is None or not resamples:
        return fit
    clusters = len(np.unique(points.cluster))
    before, fit = (
        replace(fit, clusters=clusters),
        replace(fit, clusters=clusters, identified=True, reason=None),
    )
    if clusters >= CLUSTERS and fit.optimum.sigma <= fit.residual_rms:
        drawn = bootstrap(fit, points, resamples)
        if drawn.failed <= FAILED * resamples:
            return judged(drawn)
        fit = replace(fit, resamples=resamples, failed=drawn.failed)
    elif clusters == len(points.loss):
        return before
    covariance = jackknife(fit, points)
    if covariance is None:
        return unidentified(
            fit,
            (
                f"the law rests on single trajectories: without one of the {clusters} the points do"
                " not determine it"
            ),
        )
    return with_covariance(fit, covariance, clusters - 1, "cluster")


def jackknife(fit: Fit, points: Points):
    """(p, p) covariance of theta from leaving out each trajectory once, linearised at the optimum
    (CR3, Bell and McCaffrey 2002); None where the points without one of them do not determine the
    law."""
    best = fit.optimum
    residual, jacobian = _residuals(fit, points)
    bread = np.linalg.inv(jacobian.T @ jacobian)
    labels, total = np.unique(points.cluster), 0.0
    for label in labels:
        rows = points.cluster == label
        own = jacobian[rows]
        rest = np.eye(rows.sum()) - own @ bread @ own.T
        if np.linalg.eigvalsh(rest)[0] < SINGULAR:
            return None
        moved = bread @ own.T @ np.linalg.solve(rest, residual[rows])
        total = total + np.outer(moved, moved)
    # seed_sd above the residuals
    floor = max(1.0, best.sigma / fit.residual_rms) if fit.residual_rms else 1.0
    return total * (len(labels) - 1) / len(labels) * floor**2 * best.inefficiency


def bootstrap(fit: Fit, points: Points, resamples: int = 1000, seed: int = 42) -> Fit:
    """The fit with standard errors, covariance and 95 % percentile intervals over `resamples` draws
    of its trajectories, with replacement; `failed` of them did not converge. With every point its
    own trajectory the draws are Besiroglu et al. 2024's."""
    labels, member = np.unique(points.cluster, return_inverse=True)
    rng, best = np.random.RandomState(seed), fit.optimum
    counts = np.array(
        [
            np.bincount(rng.choice(len(labels), len(labels)), minlength=len(labels))
            for _ in range(resamples)
        ],
        float,
    )
    thetas, _, converged = descend(
        np.tile(best.theta, (resamples, 1)),
        *fit.terms(*points.axes(fit.form)),
        np.log(points.loss),
        best.delta,
        counts[:, member],
    )
    moved, se, ci95 = thetas[converged], {}, {}
    with np.errstate(invalid="ignore"):  # a factor may overflow; law.json then has null
        for name, values in natural(fit.form, moved, best.centres, best.gamma).items():
            values = back(name, values)
            se[name], ci95[name] = (
                float(np.std(values, ddof=1)),
                tuple(np.percentile(values, [2.5, 97.5]).tolist()),
            )
    # linear in E, as the loss is: where it runs to 0 its logarithm would be all of the spread
    if "E" in fit.parameters:
        moved[:, 0] = best.theta[0] + np.expm1(moved[:, 0] - best.theta[0])
    optimum = replace(best, covariance=np.cov(moved.T), dof=len(labels) - 1)
    return replace(
        fit,
        se=se,
        ci95=ci95,
        interval="bootstrap",
        clusters=len(labels),
        resamples=resamples,
        failed=int((~converged).sum()),
        optimum=optimum,
    )


@dataclass(frozen=True)
class SharedFault:
    """Points of a group lie off the law together, farther than independent runs would by chance."""

    by: str  # what the group shares: "size", or the column of a table
    chance: float  # of so large a difference between groups if every run were independent
    labels: np.ndarray = field(repr=False, compare=False)  # (n,) the group of each point


def shared_fault(
    fit: Fit, points: Points, columns: dict[str, np.ndarray] | None = None
) -> SharedFault | None:
    """What the points of a size share, such as a learning rate that suits other sizes better; else
    what those of a run do.

    fit: a law with an optimum. columns: name -> label of each point (n,), of what may name runs.
    Chances are those of an F-test at SHARED for all groupings together; None where nothing is
    shared, or where trajectories are no finer than sizes."""
    if fit.optimum is None or fit.scatter is None:
        return None
    candidates = {"size": sizes_of(points.N)} | (columns or {})
    for by, labels in candidates.items():
        chance = _chance_of_groups(fit, points, np.unique(labels, return_inverse=True)[1])
        if chance < SHARED / len(candidates):
            return SharedFault(by, chance, labels)
    return None


def sizes_of(N) -> np.ndarray:
    """(n,) which size each N is, 0 the smallest; within 1 % they are one, as counts read off a
    figure vary."""
    ascending = np.sort(N)
    smallest = ascending[np.r_[True, np.diff(np.log(ascending)) > 0.01]]
    return np.searchsorted(smallest, N, "right") - 1


def _chance_of_groups(fit: Fit, points: Points, group) -> float:
    """F-test of a constant for each group beside the law, linear around its optimum; 1 where it
    cannot be made."""
    residual, jacobian = _residuals(fit, points)
    trajectory = np.unique(points.cluster, return_inverse=True)[1]
    if trajectory.max() + 1 < len(residual):
        return _chance_of_trajectories(residual, trajectory, group, SIZE_TERMS)
    law, _ = np.linalg.qr(jacobian)
    if group.max() >= MOST_GROUPS:
        return 1.0  # sizes that scatter over a range are no groups
    members = np.eye(group.max() + 1)[group]  # (n, groups)
    beyond = members - law @ (law.T @ members)  # what the law cannot do
    directions, sizes, _ = np.linalg.svd(beyond, full_matrices=False)
    directions = directions[:, sizes > 1e-6 * sizes[0]]
    free = directions.shape[1]
    left = len(residual) - law.shape[1] - free
    if left < FREEDOM or free < 1:
        return 1.0
    residual = residual - law @ (law.T @ residual)
    explained = float(np.sum((directions.T @ residual) ** 2))
    rest = float(residual @ residual) - explained
    return float(fdtrc(free, left, explained / free / (rest / left)))


def _chance_of_trajectories(residual, trajectory, group, absorbed: int) -> float:
    """F-test between groups of trajectories, by their means; the law has absorbed so many of the
    groups' freedoms."""
    count = np.bincount(trajectory)
    mean = np.bincount(trajectory, residual) / count
    of = np.zeros(len(count), int)
    of[trajectory] = group  # a trajectory has one size
    size = np.bincount(of, minlength=group.max() + 1)
    of_group = np.bincount(of, mean, len(size)) / np.maximum(size, 1)
    free, left = int((size > 0).sum()) - absorbed, len(count) - int((size > 0).sum())
    if left < FREEDOM or free < 1:
        return 1.0
    between = float(size @ (of_group - mean.mean()) ** 2) / free
    within = float(np.sum((mean - of_group[of]) ** 2)) / left
    return float(fdtrc(free, left, between / within))


def _residuals(fit: Fit, points: Points):
    """(ln loss less the law's (n,), its Jacobian (n, p)); an outlier counts for FARTHEST scatters,
    as Huber's loss does not mind how far it lies."""
    log_loss, jacobian = log_law(*fit.terms(*points.axes(fit.form)), fit.optimum.theta)
    residual = np.log(points.loss) - log_loss
    off = [index for index, _ in fit.outliers]
    residual[off] = np.clip(residual[off], -FARTHEST * fit.scatter, FARTHEST * fit.scatter)
    return residual, jacobian


def meets(fit: Fit, points: Points, seed_sd: float = 0.0) -> bool:
    """Whether an identified law fits its points, outliers aside, so that what groups of them share
    is no fault of the law."""
    if not fit.identified or fit.scatter <= MISSES[0]:
        return fit.identified
    if len(points.loss) >= MANY:  # their noise takes a second
        return False
    noise, _ = _noise(points, np.log(points.loss / fit.predict(*points.axes(fit.form))), seed_sd)
    return fit.scatter <= MISSES[1] * noise


def near_zero(fit: Fit) -> list[str]:
    """The exponents within EDGE standard errors of zero, where estimates lean steep: a flatter law
    would have been refused."""
    return [
        name
        for name in EXPONENTS[fit.form]
        if fit.se and fit.parameters[name] < EDGE * fit.se[name]
    ]


def lack_of_fit(fit: Fit, points: Points, seed_sd: float = 0.0) -> dict | None:
    """How an identified L(N, D) misses its points, its outliers aside (their scatter is above
    MISSES), and the same law without the earliest, as points of few tokens per parameter lie above
    any such law; None where it fits. left_out: indices of the fewest that let the rest fit, with
    that law's own outliers."""
    if fit.scatter <= MISSES[0]:  # the noise of thousands of points takes a second
        return None
    noise, noise_of = _noise(points, np.log(points.loss / fit.predict(points.N, points.D)), seed_sd)
    limit, ratio = max(MISSES[0], MISSES[1] * noise), points.D / points.N
    if fit.scatter <= limit:
        return None
    found = {
        "residual_rms": fit.residual_rms,
        "scatter": fit.scatter,
        "noise": noise,
        "noise_of": noise_of,
        "below": None,
        "left_out": [],
        "outliers": [],
        "without": None,
    }
    for share in SHARES:
        below = np.sort(ratio)[round(share * len(ratio))]
        some = np.flatnonzero(ratio >= below * (1 - 1e-9))
        less = fit_form("chinchilla", points.take(some), seed_sd)
        if less.identified and less.scatter <= limit:
            return found | {
                "below": float(below),
                "left_out": np.setdiff1d(np.arange(len(ratio)), some).tolist(),
                "outliers": [(int(some[index]), distance) for index, distance in less.outliers],
                "without": with_bootstrap(less, points.take(some), RESAMPLES),
            }
    return found


def _noise(points: Points, residual, seed_sd: float) -> tuple[float, str]:
    """Standard deviation of one run's ln L, and what it was taken from: the seeds where known, else
    repeats (equal N and D), else neighbours, by what the residuals of a point and of the nearest
    one of another trajectory differ."""
    if seed_sd > 0:
        return seed_sd, "seeds"
    x = np.log([points.N, points.D])
    _, same, counts = np.unique(np.round(x, 6), axis=1, return_inverse=True, return_counts=True)
    if (freedom := len(residual) - len(counts)) >= 5:
        means = np.bincount(same.ravel(), residual) / counts
        return float(np.sqrt(np.sum((residual - means[same.ravel()]) ** 2) / freedom)), "repeats"
    return _noise_of_neighbours(x, residual, points.cluster), "neighbours"


def _noise_of_neighbours(x, residual, cluster) -> float:
    """By what the residuals of a point and of the nearest one of another trajectory differ; x
    (axes, n)."""
    nearest = [
        np.where(
            cluster == cluster[i], np.inf, np.sqrt(np.sum((x - x[:, i : i + 1]) ** 2, axis=0))
        ).argmin()
        for i in range(len(residual))
    ]
    differences = np.abs(residual - residual[nearest])
    return float(np.median(differences) / 0.6745 / np.sqrt(2))  # the median: outliers are no noise


def robustness(points: Points, form: str, counts: dict, seed_sd: float = 0.0) -> list[dict]:
    """The declared fit and its variants: the k highest losses left out, another delta, another way
    of counting, each size left out (with the error of predicting it). A variant that cannot be
    fitted has its reason. counts: "N", for laws in N, or "C" -> {another convention: values (n,)}.
    seed_sd: as of fit_form."""
    order, axis = (
        np.argsort(-points.loss, kind="stable"),
        ("C" if form in ("ray", "power_c") else "N"),
    )
    variants = [("declared", "", points, DELTA, None)]
    variants += [
        ("drop highest", str(k), points.take(np.sort(order[k:])), DELTA, None)
        for k in DROPS
        if k <= len(order) // 2
    ]  # fewer than half left is another experiment
    variants += [
        ("delta", "MSE" if delta is None else f"{delta:g}", points, delta, None) for delta in DELTAS
    ]
    variants += [
        (f"count {axis} as", name, replace(points, **{axis: values}), DELTA, None)
        for name, values in counts.get(axis, {}).items()
    ]
    size, found = sizes_of(points.N), []
    sizes = int(size.max()) + 1
    group = size * min(sizes, MOST_SIZES) // sizes
    for left_out in [group == i for i in range(group.max() + 1)] if sizes > 1 else ():
        low, high = (si(end(points.N[left_out])) for end in (np.min, np.max))
        variants.append(
            (
                "leave out N",
                low if low == high else f"{low} to {high}",
                points.take(~left_out),
                DELTA,
                points.take(left_out),
            )
        )
    for variant, value, some, delta, rest in variants:
        fit = fit_form(
            form, some, seed_sd, delta, RESAMPLES if len(some.loss) < MANY else RESAMPLES // 4
        )
        found.append(
            {"variant": variant, "value": value, "n": len(some.loss), **fit.parameters}
            | {
                key: getattr(fit, key)
                for key in ("objective", "starts", "starts_at_best", "identified", "reason")
            }
        )
        if rest is not None and fit.objective is not None and form in POWERS:
            errors = 100 * (fit.predict(*rest.axes(form)) / rest.loss - 1)
            found[-1] |= {
                "error_percent": float(errors.mean()),
                "largest_error_percent": float(max(errors, key=abs)),
            }
    return found
