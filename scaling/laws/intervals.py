"""Intervals of a fitted law: Student's t, the jackknife and the bootstrap over trajectories.

Points that branch off one run share its fate, so runs are drawn, not points. All resamples
descend together from the fit's optimum: a resample is a row of weights, and numpy does a thousand
of them in the time of a few solver calls. Few trajectories leave a bootstrap too few different
draws; there each is left out once (jackknife) instead."""

import math
from dataclasses import replace

import numpy as np
from scipy.special import stdtrit

from scaling.laws.fits import Fit, unidentified
from scaling.laws.forms import EXPONENTS, FACTORS, back, log_law, natural
from scaling.laws.points import Points
from scaling.laws.solver import SINGULAR, descend

CLUSTERS = 20  # trajectories from which on the bootstrap covers 95 % about as often as it says
FAILED = 0.05  # share of resamples without a fit above which the bootstrap is not believed
FARTHEST = 3  # scatters that an outlier counts for in a jackknife


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


def _residuals(fit: Fit, points: Points):
    """(ln loss less the law's (n,), its Jacobian (n, p)); an outlier counts for FARTHEST scatters,
    as Huber's loss does not mind how far it lies."""
    log_loss, jacobian = log_law(*fit.terms(*points.axes(fit.form)), fit.optimum.theta)
    residual = np.log(points.loss) - log_loss
    off = [index for index, _ in fit.outliers]
    residual[off] = np.clip(residual[off], -FARTHEST * fit.scatter, FARTHEST * fit.scatter)
    return residual, jacobian
