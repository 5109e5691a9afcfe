"""Intervals of a law when points share trajectories.

Points that branch off one run share its fate, so runs are drawn, not points. All resamples descend together from the
fit's optimum: a resample is a row of weights, and numpy does a thousand of them in the time of a few solver calls. Few
trajectories leave a bootstrap too few different draws; there each is left out once (jackknife) instead.
"""

from dataclasses import dataclass, replace

import numpy as np

from scaling.laws import (
    SINGULAR,
    Fit,
    Points,
    back,
    descend,
    fit_form,
    inefficiency,
    judged,
    log_law,
    natural,
    terms,
    with_covariance,
)

CLUSTERS = 20               # trajectories from which on the bootstrap covers 95 % about as often as it says
FAILED = 0.05               # share of resamples without a fit above which the bootstrap is not believed


@dataclass(frozen=True)
class Bootstrap:
    """Standard errors and 95 % percentile intervals of the parameters over resamples."""

    se: dict[str, float]
    ci95: dict[str, tuple[float, float]]
    covariance: np.ndarray      # (p, p) of theta
    resamples: int
    failed: int                 # resamples without a converged fit, left out
    clusters: int


def with_bootstrap(fit: Fit, points: Points, resamples: int = 1000, seed: int = 42) -> Fit:
    """The fit with the intervals that its trajectories allow, which also judge anew whether an exponent's holds 0; a fit
    that its design does not identify as it is.

    Every point a trajectory of its own and fewer than CLUSTERS of them: Student's t, as fitted. Trajectories that share
    points, fewer than CLUSTERS: the jackknife over them, t of one less than their number. From CLUSTERS on: the bootstrap,
    unless seeds differ by more than the residuals, of which a bootstrap knows nothing."""
    if fit.ci95 is None or fit.optimum is None:
        return fit
    clusters = len(np.unique(points.cluster))
    before, fit = replace(fit, clusters=clusters), replace(fit, clusters=clusters, identified=True, reason=None)
    if clusters >= CLUSTERS and fit.optimum.sigma <= fit.residual_rms:
        drawn = bootstrap(fit, points, resamples, seed)
        fit = replace(fit, resamples=resamples, failed=drawn.failed)
        if drawn.failed <= FAILED * resamples:
            best = replace(fit.optimum, covariance=drawn.covariance, dof=clusters - 1)
            return judged(replace(fit, se=drawn.se, ci95=drawn.ci95, interval="bootstrap", optimum=best))
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
    logs = [np.log(x) - centre for x, centre in zip(points.axes(fit.form), best.centres, strict=True)]
    log_loss, jacobian = log_law(fit.form, best.theta, logs, best.gamma)
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
    return total * (len(labels) - 1) / len(labels) * floor**2 * inefficiency(best.sigma, best.delta)


def bootstrap(fit: Fit, points: Points, resamples: int = 1000, seed: int = 42) -> Bootstrap:
    """Draw as many clusters as there are, with replacement, `resamples` times, and fit each.

    With every point its own cluster the draws are those of np.random.seed(seed); np.random.choice(n, n), which is how
    Besiroglu et al. 2024 made theirs."""
    labels, member = np.unique(points.cluster, return_inverse=True)
    rng = np.random.RandomState(seed)
    drawn = np.array([rng.choice(len(labels), len(labels)) for _ in range(resamples)])
    counts = np.zeros((resamples, len(labels)))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1)
    best = fit.optimum
    logs = [np.log(x) - centre for x, centre in zip(points.axes(fit.form), best.centres, strict=True)]
    thetas, _, _, converged = descend(np.tile(best.theta, (resamples, 1)), *terms(fit.form, logs, best.gamma),
                                      np.log(points.loss), best.delta, counts[:, member])
    samples = {name: [] for name in fit.parameters}
    for theta in thetas[converged]:
        for name, (value, _) in natural(fit.form, theta, best.centres, best.gamma).items():
            if name in samples:         # a rising resample has no Kaplan scale
                samples[name].append(back(name, value))
    with np.errstate(invalid="ignore", over="ignore"):          # a scale may overflow; law.json then has null
        se = {name: float(np.std(values, ddof=1)) for name, values in samples.items()}
    ci95 = {name: tuple(map(float, np.percentile(values, [2.5, 97.5]))) for name, values in samples.items()}
    return Bootstrap(se, ci95, np.cov(thetas[converged].T), resamples, int((~converged).sum()), len(labels))

# ----------------------------------------------------------------------------------------------------------- robustness


DROPS = (1, 3, 5, 10)
DELTAS = (1e-4, 1e-2, None)         # beside the declared 1e-3; None is plain squares of ln L
MOST_SIZES = 10                          # more sizes than these are left out in as many groups of neighbours
VARIANT_RESAMPLES = 100                     # enough to tell whether an exponent's interval holds 0
MANY = 2000                         # points: a quarter of the resamples must do


def robustness(points: Points, form: str, counts: dict[str, np.ndarray] | None = None, say="{:.3g}".format) -> list[dict]:
    """The declared fit and every variant of it; strict JSON, a variant that cannot be fitted has its reason.

    counts: convention -> N of shape (n,), for laws in N; or C for laws in C."""
    found = [_row("declared", "", points, fit_form(form, points))]
    order = np.argsort(-points.loss, kind="stable")
    for k in DROPS:
        if k <= len(order) // 2:            # fewer than half left is another experiment
            some = points.take(np.sort(order[k:]))
            found.append(_row("drop highest", str(k), some, fit_form(form, some)))
    for delta in DELTAS:
        found.append(_row("delta", "MSE" if delta is None else f"{delta:g}", points, fit_form(form, points, delta=delta)))
    axis = "C" if form in ("ray", "power_c") else "N"
    for name, values in (counts or {}).items():
        some = replace(points, **{axis: values})
        found.append(_row(f"count {axis} as", name, some, fit_form(form, some)))
    for label, left_out in sizes(points.N, say):
        some, rest = points.take(~left_out), points.take(left_out)
        fit = fit_form(form, some)
        row = _row("leave out N", label, some, fit)
        if fit.objective is not None:
            errors = 100 * (fit.predict(*rest.axes(form)) / rest.loss - 1)
            row |= {"error_percent": float(errors.mean()), "largest_error_percent": float(errors[np.abs(errors).argmax()])}
        found.append(row)
    return found


def sizes(N, say="{:.3g}".format) -> list[tuple[str, np.ndarray]]:
    """(label, mask of shape (n,)) of each size, or of MOST_SIZES groups of neighbours where there are more; none of one size.

    Sizes within 1 % count as one: counts read off a figure are not exact."""
    order = np.argsort(N, kind="stable")
    steps = np.r_[False, np.diff(np.log(N[order])) > 0.01]
    index = np.empty(len(N), dtype=int)
    index[order] = np.cumsum(steps)
    found = int(index.max()) + 1
    if found < 2:
        return []
    if found > MOST_SIZES:
        index = index * MOST_SIZES // found
    return [(_label(N[index == i], say), index == i) for i in range(index.max() + 1)]


def _row(variant: str, value: str, points: Points, fit: Fit) -> dict:
    plain = with_bootstrap(fit, points, VARIANT_RESAMPLES if len(points.loss) < MANY else VARIANT_RESAMPLES // 4).plain()
    kept = {key: plain[key] for key in (*fit.parameters, "objective", "starts", "starts_at_best", "identified", "reason")}
    return {"variant": variant, "value": value, "n": len(points.loss)} | kept


def _label(N, say) -> str:
    low, high = float(N.min()), float(N.max())
    return say(low) if high / low < 1.01 else f"{say(low)} to {say(high)}"
