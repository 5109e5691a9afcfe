"""Intervals of a law when points share trajectories, whether it fits at all, and how much of it is choice.

Points that branch off one run share its fate, so runs are drawn, not points. All resamples descend together from the
fit's optimum: a resample is a row of weights, and numpy does a thousand of them in the time of a few solver calls. Few
trajectories leave a bootstrap too few different draws; there each is left out once (jackknife) instead.
"""

from dataclasses import replace

import numpy as np

from runtime.cli import si as human
from scaling.laws import DELTA, SINGULAR, Fit, Points, back, descend, fit_form, judged, log_law, natural, with_covariance

CLUSTERS = 20               # trajectories from which on the bootstrap covers 95 % about as often as it says
FAILED = 0.05               # share of resamples without a fit above which the bootstrap is not believed
MISSES = 0.01, 2.0          # a law does not fit whose residuals are above this, in ln L, and above so many times the noise
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)        # of the points, earliest first, that a law may have to do without

DROPS = (1, 3, 5, 10)
DELTAS = (1e-4, 1e-2, None)         # beside the declared 1e-3; None is plain squares of ln L
MOST_SIZES = 10                     # more sizes than these are left out in as many groups of neighbours
RESAMPLES = 100                     # of a variant: enough to tell whether an exponent's interval holds 0
MANY = 2000                         # points: a quarter of the resamples must do


def with_bootstrap(fit: Fit, points: Points, resamples: int = 1000, seed: int = 42) -> Fit:
    """The fit with the intervals that its trajectories allow, which judge anew whether an exponent's holds 0; as it is without
    resamples.
    Every point its own trajectory and fewer than CLUSTERS: Student's t, as fitted. Shared trajectories, fewer than CLUSTERS: the
    jackknife over them. From CLUSTERS on: the bootstrap, unless seeds differ by more than the residuals, which it cannot know."""
    if fit.ci95 is None or fit.optimum is None or not resamples:
        return fit
    clusters = len(np.unique(points.cluster))
    before, fit = replace(fit, clusters=clusters), replace(fit, clusters=clusters, identified=True, reason=None)
    if clusters >= CLUSTERS and fit.optimum.sigma <= fit.residual_rms:
        drawn = bootstrap(fit, points, resamples, seed)
        if drawn.failed <= FAILED * resamples:
            return judged(drawn)
        fit = replace(fit, resamples=resamples, failed=drawn.failed)
    elif clusters == len(points.loss):
        return before
    covariance = jackknife(fit, points)
    if covariance is None:
        return replace(fit, identified=False, se=None, ci95=None, interval=None, reason=(
            f"the law rests on single trajectories: without one of the {clusters} the points do not determine it"))
    return with_covariance(fit, covariance, clusters - 1, "cluster")


def jackknife(fit: Fit, points: Points):
    """(p, p) covariance of theta from leaving out each trajectory once, linearised at the optimum (CR3, Bell and
    McCaffrey 2002); None where the points without one of them do not determine the law."""
    best = fit.optimum
    log_loss, jacobian = log_law(*fit.terms(*points.axes(fit.form)), best.theta)
    residual = np.log(points.loss) - log_loss
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
    floor = max(1.0, best.sigma / fit.residual_rms) if fit.residual_rms else 1.0       # seed_sd above the residuals
    return total * (len(labels) - 1) / len(labels) * floor**2 * best.inefficiency


def bootstrap(fit: Fit, points: Points, resamples: int = 1000, seed: int = 42) -> Fit:
    """The fit with standard errors, covariance and 95 % percentile intervals over `resamples` draws of as many trajectories as
    there are, with replacement; `failed` counts those without a converged fit. With every point its own trajectory the draws
    are Besiroglu et al. 2024's: np.random.seed(seed); np.random.choice(n, n)."""
    labels, member = np.unique(points.cluster, return_inverse=True)
    rng, best = np.random.RandomState(seed), fit.optimum
    counts = np.array([np.bincount(rng.choice(len(labels), len(labels)), minlength=len(labels)) for _ in range(resamples)], float)
    thetas, _, converged = descend(np.tile(best.theta, (resamples, 1)), *fit.terms(*points.axes(fit.form)), np.log(points.loss),
                                   best.delta, counts[:, member])
    moved, se, ci95 = thetas[converged], {}, {}
    with np.errstate(invalid="ignore"):         # a factor may overflow; law.json then has null
        for name, values in natural(fit.form, moved, best.centres, best.gamma).items():
            values = back(name, values)
            se[name], ci95[name] = float(np.std(values, ddof=1)), tuple(np.percentile(values, [2.5, 97.5]).tolist())
    if "E" in fit.parameters:       # linear in E, as the loss is: where it runs to 0 its logarithm would be all of the spread
        moved[:, 0] = best.theta[0] + np.expm1(moved[:, 0] - best.theta[0])
    optimum = replace(best, covariance=np.cov(moved.T), dof=len(labels) - 1)
    return replace(fit, se=se, ci95=ci95, interval="bootstrap", clusters=len(labels), resamples=resamples,
                   failed=int((~converged).sum()), optimum=optimum)


def lack_of_fit(fit: Fit, points: Points, seed_sd: float = 0.0) -> dict | None:
    """How an identified L(N, D) misses its points (residuals above MISSES), and the same law without the earliest, as points of
    few tokens per parameter lie above any such law; None where it fits. left_out: indices of the fewest that let the rest fit."""
    if fit.residual_rms <= MISSES[0]:       # the noise of thousands of points takes a second
        return None
    noise, noise_of = _noise(points, np.log(points.loss / fit.predict(points.N, points.D)), seed_sd)
    limit, ratio = max(MISSES[0], MISSES[1] * noise), points.D / points.N
    if fit.residual_rms <= limit:
        return None
    found = {"residual_rms": fit.residual_rms, "noise": noise, "noise_of": noise_of, "below": None, "left_out": [],
             "without": None}
    for share in SHARES:
        below = np.sort(ratio)[round(share * len(ratio))]
        some = np.flatnonzero(ratio >= below * (1 - 1e-9))
        less = fit_form("chinchilla", points.take(some), seed_sd)
        if less.identified and less.residual_rms <= limit:
            return found | {"below": float(below), "left_out": np.setdiff1d(np.arange(len(ratio)), some).tolist(),
                            "without": with_bootstrap(less, points.take(some), RESAMPLES)}
    return found


def _noise(points: Points, residual, seed_sd: float) -> tuple[float, str]:
    """Standard deviation of one run's ln L, and what it was taken from: the seeds where known, else repeats (equal N and D), else
    neighbours, by what the residuals of a point and of the nearest one of another trajectory differ."""
    if seed_sd > 0:
        return seed_sd, "seeds"
    x = np.log([points.N, points.D])
    _, same, counts = np.unique(np.round(x, 6), axis=1, return_inverse=True, return_counts=True)
    if (freedom := len(residual) - len(counts)) >= 5:
        means = np.bincount(same.ravel(), residual) / counts
        return float(np.sqrt(np.sum((residual - means[same.ravel()]) ** 2) / freedom)), "repeats"
    nearest = [np.where(points.cluster == points.cluster[i], np.inf, np.hypot(*(x - x[:, i:i + 1]))).argmin()
               for i in range(len(residual))]
    differences = np.abs(residual - residual[nearest])
    return float(np.median(differences) / 0.6745 / np.sqrt(2)), "neighbours"        # the median: outliers are no noise


def robustness(points: Points, form: str, counts: dict[str, np.ndarray], seed_sd: float = 0.0) -> list[dict]:
    """The declared fit and its variants: the k highest losses left out, another delta, another way of counting, each size left
    out (with the error of predicting it). A variant that cannot be fitted has its reason.
    counts: convention -> N (n,) for laws in N, or C for laws in C. seed_sd: as of fit_form."""
    found = []

    def add(variant: str, value: str, points: Points, delta: float | None = DELTA, rest: Points | None = None) -> None:
        resamples = RESAMPLES if len(points.loss) < MANY else RESAMPLES // 4
        fit = with_bootstrap(fit_form(form, points, seed_sd, delta), points, resamples)
        found.append({"variant": variant, "value": value, "n": len(points.loss), **fit.parameters} | {
            key: getattr(fit, key) for key in ("objective", "starts", "starts_at_best", "identified", "reason")})
        if rest is not None and fit.objective is not None:
            errors = 100 * (fit.predict(*rest.axes(form)) / rest.loss - 1)
            found[-1] |= {"error_percent": float(errors.mean()), "largest_error_percent": float(max(errors, key=abs))}

    order, axis = np.argsort(-points.loss, kind="stable"), "C" if form in ("ray", "power_c") else "N"
    add("declared", "", points)
    for k in DROPS:
        if k <= len(order) // 2:            # fewer than half left is another experiment
            add("drop highest", str(k), points.take(np.sort(order[k:])))
    for delta in DELTAS:
        add("delta", "MSE" if delta is None else f"{delta:g}", points, delta)
    for name, values in counts.items():
        add(f"count {axis} as", name, replace(points, **{axis: values}))
    for left_out in sizes(points.N):
        low, high = (human(end(points.N[left_out])) for end in (np.min, np.max))
        add("leave out N", low if low == high else f"{low} to {high}", points.take(~left_out), rest=points.take(left_out))
    return found


def sizes(N) -> list[np.ndarray]:
    """A mask of shape (n,) for each size (within 1 %: counts read off a figure are not exact), or each of MOST_SIZES groups."""
    order = np.argsort(N, kind="stable")
    index = np.empty(len(N), dtype=int)
    index[order] = np.cumsum(np.r_[False, np.diff(np.log(N[order])) > 0.01])
    found = index.max() + 1
    index = index * min(found, MOST_SIZES) // found
    return [index == i for i in range(index.max() + 1)] if found > 1 else []
