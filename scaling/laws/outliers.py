"""Points that lie off a law that the others follow."""

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from scaling.laws.fits import Fit, inefficiency
from scaling.laws.forms import back, log_law, natural
from scaling.laws.intervals import with_covariance
from scaling.laws.solver import descend

# forms that points can be said to lie off; of the others the form itself is rough
HAS_OUTLIERS = "chinchilla", "ray"
# Points off the law, where the rest of them fits.
OFF_LAW = 0.01  # ln L: the least distance from the law of an outlier
OFF_BY_CHANCE = 0.01  # of a table without outliers, to name one all the same
NEIGHBOURS = 2  # scatter over the noise between neighbours, above which the form is at fault
MOST_OUTLIERS = 0.1  # share of the points: more are no outliers but another law
ROUNDS = 10  # of leaving out and putting back
CANDIDATES = 10  # points at least that are left out in turn: those that may lie farthest off
# points: up to here each is left out in turn, as one in a corner draws the law to itself
ONE_BY_ONE = 100
MANY = 2000  # points: a quarter of the resamples must do


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
