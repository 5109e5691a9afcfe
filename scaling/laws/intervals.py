"""Intervals of a fitted law: Student's t, the jackknife and the bootstrap over trajectories.

Points that branch off one run share its fate, so runs are drawn, not points. All resamples descend
together from the fit's optimum: a resample is a row of weights, and numpy does a thousand of them
in the time of a few solver calls. Few trajectories leave a bootstrap too few different draws; there
each is left out once (jackknife) instead."""

import math
from dataclasses import replace

import numpy as np
from scipy.special import stdtrit

from scaling.laws.fits import Fit, known, unidentified
from scaling.laws.forms import EXPONENTS, FACTORS, back, log_law, natural
from scaling.laws.points import Points
from scaling.laws.refusals import FlatExponent, SingleTrajectories
from scaling.laws.solver import Problem, descend

CLUSTERS = 20  # trajectories from which on the bootstrap covers 95 % about as often as it says
FAILED = 0.05  # share of resamples without a fit above which the bootstrap is not believed
FARTHEST = 3  # scatters that an outlier counts for in a jackknife
# smallest over largest singular value of the Jacobian, below which points do not separate
# parameters
SINGULAR = 1e-9
TINY = 1e-30  # a step along the imaginary axis
HELD_FIXED = 1e-12  # a gradient of a parameter this small is 0


def with_covariance(fit: Fit, covariance: np.ndarray, dof: int, interval: str) -> Fit:
    """The fit with se and ci95 from a covariance of theta (p, p), by the delta method and Student's
    t; none where unidentified."""
    best = replace(fit.solution, covariance=covariance, dof=dof)
    fit = replace(fit, optimum=best)
    if not fit.identified:
        return fit
    # A step along the imaginary axis gives the derivatives without a difference of neighbours.
    stepped = best.theta + 1j * TINY * np.eye(len(best.theta))
    widths = {}
    for name, values in natural(fit.form, stepped, best.centres, best.gamma).items():
        gradient = values.imag / TINY
        if np.abs(gradient).max() > HELD_FIXED:
            widths[name] = float(np.sqrt(gradient @ covariance @ gradient))
    logarithms = natural(fit.form, best.theta, best.centres, best.gamma)
    parameters = {name: float(value) for name, value in logarithms.items()}
    highest = {}
    if "E" in widths:
        highest["E"] = max(best.lowest, parameters["E"])
    return with_widths(fit, parameters, widths, dof, interval, highest)


def with_widths(
    fit: Fit,
    values: dict[str, float],
    widths: dict[str, float],
    dof: int,
    interval: str,
    highest: dict[str, float] | None = None,
) -> Fit:
    """The fit with se and ci95 from standard errors of its parameters, factors as logarithms;
    highest: what a parameter cannot be above."""
    se, ci95 = {}, {}
    t = stdtrit(dof, 0.975)
    for name, width in widths.items():
        value, top = values[name], (highest or {}).get(name, math.inf)
        low, high = min(value - t * width, top), min(value + t * width, top)
        ci95[name] = float(back(name, low)), float(back(name, high))
        se[name] = width * float(back(name, value)) if name in FACTORS else width
    return judged(replace(fit, se=se, ci95=ci95, interval=interval))


def judged(fit: Fit) -> Fit:
    """The fit, unidentified where an exponent's interval holds 0: its term is then a constant, as E
    is."""
    for name in EXPONENTS[fit.form]:
        if fit.ci95 and name in fit.ci95 and fit.ci95[name][0] <= 0:
            return replace(fit, identified=False, reason=FlatExponent(name))
    return fit


# ----------------------------------------------------------------------------------- trajectories


def with_bootstrap(fit: Fit, points: Points, resamples: int = 1000) -> Fit:
    """The fit with the intervals that its trajectories allow, which judge anew whether an
    exponent's holds 0; 0 resamples: as is. Every point its own trajectory and fewer than CLUSTERS:
    Student's t, as fitted. Shared trajectories, fewer than CLUSTERS: the jackknife over them. From
    CLUSTERS on: the bootstrap, unless seeds differ by more than the residuals, which it cannot
    know."""
    if fit.ci95 is None or fit.optimum is None or not resamples:
        return fit
    clusters = len(np.unique(points.cluster))
    as_fitted = replace(fit, clusters=clusters)
    fit = replace(as_fitted, identified=True, reason=None)
    if clusters >= CLUSTERS and known(fit.solution.sigma) <= known(fit.residual_rms):
        drawn = bootstrap(fit, points, resamples)
        if known(drawn.failed) <= FAILED * resamples:
            return judged(drawn)
        fit = replace(fit, resamples=resamples, failed=drawn.failed)
    elif clusters == len(points):
        return as_fitted
    covariance = jackknife(fit, points)
    if covariance is None:
        return unidentified(fit, SingleTrajectories(clusters))
    return with_covariance(fit, covariance, clusters - 1, "cluster")


def jackknife(fit: Fit, points: Points) -> np.ndarray | None:
    """(p, p) covariance of theta from leaving out each trajectory once, linearised at the optimum
    (CR3, Bell and McCaffrey 2002); None where the points without one of them do not determine the
    law."""
    best = fit.solution
    residual, jacobian = residuals(fit, points)
    bread = np.linalg.inv(jacobian.T @ jacobian)
    labels = np.unique(points.cluster)
    total = np.zeros_like(bread)
    for label in labels:
        rows = points.cluster == label
        block = jacobian[rows]
        shrunk = np.eye(rows.sum()) - block @ bread @ block.T
        if np.linalg.eigvalsh(shrunk)[0] < SINGULAR:
            return None
        moved = bread @ block.T @ np.linalg.solve(shrunk, residual[rows])
        total = total + np.outer(moved, moved)
    # seed_sd above the residuals
    floor = max(1.0, known(best.sigma) / fit.residual_rms) if fit.residual_rms else 1.0
    return total * (len(labels) - 1) / len(labels) * floor**2 * best.inefficiency


def bootstrap(fit: Fit, points: Points, resamples: int = 1000, seed: int = 42) -> Fit:
    """The fit with standard errors, covariance and 95 % percentile intervals over `resamples` draws
    of its trajectories, with replacement; `failed` of them did not converge. With every point its
    own trajectory the draws are Besiroglu et al. 2024's."""
    labels, member = np.unique(points.cluster, return_inverse=True)
    best = fit.solution
    counts = _draws(len(labels), resamples, seed)
    problem = Problem(fit.terms(*points.axes(fit.form)), np.log(points.loss))
    starts = np.tile(best.theta, (resamples, 1))
    ends = descend(problem, starts, best.delta, counts[:, member])
    thetas = ends.theta[ends.converged]
    se, ci95 = {}, {}
    with np.errstate(invalid="ignore"):  # a factor may overflow; law.json then has null
        for name, logarithms in natural(fit.form, thetas, best.centres, best.gamma).items():
            values = back(name, logarithms)
            low, high = np.percentile(values, [2.5, 97.5]).tolist()
            se[name] = float(np.std(values, ddof=1))
            ci95[name] = low, high
    # linear in E, as the loss is: where it runs to 0 its logarithm would be all of the spread
    if "E" in fit.parameters:
        thetas[:, 0] = best.theta[0] + np.expm1(thetas[:, 0] - best.theta[0])
    return replace(
        fit,
        se=se,
        ci95=ci95,
        interval="bootstrap",
        clusters=len(labels),
        resamples=resamples,
        failed=int((~ends.converged).sum()),
        optimum=replace(best, covariance=np.cov(thetas.T), dof=len(labels) - 1),
    )


def _draws(clusters: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples, clusters) how often each trajectory is drawn."""
    rng = np.random.RandomState(seed)
    draws = [rng.choice(clusters, clusters) for _ in range(resamples)]
    return np.array([np.bincount(draw, minlength=clusters) for draw in draws], float)


def residuals(fit: Fit, points: Points) -> tuple[np.ndarray, np.ndarray]:
    """(ln loss less the law's (n,), its Jacobian (n, p)); an outlier counts for FARTHEST scatters,
    as Huber's loss does not mind how far it lies."""
    log_loss, jacobian = log_law(*fit.terms(*points.axes(fit.form)), fit.solution.theta)
    residual = np.log(points.loss) - log_loss
    if fit.outliers:
        off_law = [outlier.point for outlier in fit.outliers]
        limit = FARTHEST * known(fit.scatter)
        residual[off_law] = np.clip(residual[off_law], -limit, limit)
    return residual, jacobian
