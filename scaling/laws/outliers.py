"""Points that lie off a law which the other points follow."""

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from scaling.laws.fits import Fit, Outlier, inefficiency, known
from scaling.laws.forms import CHINCHILLA, natural, parameters_of
from scaling.laws.intervals import with_covariance
from scaling.laws.solver import Problem, descend

# forms that points can be said to lie off; of the others the form itself is rough
HAS_OUTLIERS = CHINCHILLA, "ray"
OFF_LAW = 0.01  # ln L: the least distance from the law of an outlier
OFF_BY_CHANCE = 0.01  # of a table without outliers, to name one all the same
NEIGHBOURS = 2  # scatter over the noise between neighbours, above which the form is at fault
MOST_OUTLIERS = 0.1  # share of the points: more are no outliers but another law
ROUNDS = 10  # of leaving out and putting back
CANDIDATES = 10  # points at least that are left out in turn: those that may lie farthest off
# points: up to here each is left out in turn, as one in a corner draws the law to itself
ONE_BY_ONE = 100
IN_VAIN = 2  # points left out for nothing: one outlier hides a second one, rarely a third
MANY = 2000  # points, whose noise takes a second
NORMAL_MEDIAN = 0.6745  # of the distances from zero, in standard deviations


@dataclass(frozen=True, eq=False)
class Trimmed:
    """A law fitted to the points without its outliers; arrays of all n points are about that
    law."""

    is_used: np.ndarray  # (n,) bool
    theta: np.ndarray  # (p,)
    log_loss: np.ndarray  # (n,) the law's
    jacobian: np.ndarray  # (n, p) of log_loss
    scatter: float  # rms of the used points' residuals over dof
    dof: int

    @property
    def left_out(self) -> np.ndarray:
        return np.flatnonzero(~self.is_used)

    @property
    def used_jacobian(self) -> np.ndarray:
        return self.jacobian[self.is_used]

    @property
    def leverage(self) -> np.ndarray:
        """(n,) variance of the law at each point per sigma^2 of a used point."""
        used = self.used_jacobian
        spread = np.linalg.pinv(used.T @ used)
        return np.einsum("ni,ij,nj->n", self.jacobian, spread, self.jacobian)


@dataclass(frozen=True, eq=False)
class Screening:
    """What stays the same while points are left out."""

    problem: Problem
    delta: float
    seed_sd: float  # of ln L between seeds, a floor under the scatter

    def trim(self, theta: np.ndarray, is_used: np.ndarray) -> Trimmed:
        """The law at theta with its scatter over the used points."""
        log_loss, jacobian = self.problem.law(theta)
        residual = (self.problem.y - log_loss)[is_used]
        dof = len(residual) - len(theta)
        scatter = math.sqrt(residual @ residual / dof)
        return Trimmed(is_used, theta, log_loss, jacobian, scatter, dof)

    def refit(self, start: np.ndarray, is_used: np.ndarray) -> Trimmed:
        """The law of the used points, sought from the optimum of almost the same points."""
        weights = is_used[None].astype(float)
        theta = descend(self.problem, start[None], self.delta, weights).theta[0]
        return self.trim(theta, is_used)

    def distance(self, law: Trimmed) -> np.ndarray:
        """(n,) of each point from the law, in ln L."""
        return np.abs(self.problem.y - law.log_loss)

    def unseen_distance(self, law: Trimmed) -> np.ndarray:
        """(n,) about how far each point would lie from the law of the others, by what it weighs in
        this one."""
        return self.distance(law) / np.maximum(1 - law.leverage, 0.05)

    def scores(self, law: Trimmed) -> np.ndarray:
        """(n,) distance of each point from the law over its standard error, as of a point that the
        law has not seen."""
        sigma = max(law.scatter, self.seed_sd, 1e-12)
        variance = 1 + inefficiency(self.delta, sigma) * law.leverage
        return self.distance(law) / (sigma * np.sqrt(variance))

    def is_off(self, law: Trimmed, among: int) -> np.ndarray:
        """(n,) whether each point lies OFF_LAW off the law and farther than the farthest of so many
        would by chance."""
        limit = stdtrit(law.dof, 1 - OFF_BY_CHANCE / (2 * among))
        return (self.distance(law) > OFF_LAW) & (self.scores(law) > limit)


def without_outliers(
    problem: Problem, theta: np.ndarray, delta: float, seed_sd: float = 0.0
) -> Trimmed | None:
    """The law without the points that lie off it; None where there is none, or more than
    MOST_OUTLIERS (another law then). theta (p,): the optimum of all points.

    A point in a corner may have drawn that optimum to itself. So each point is left out in turn,
    the one that costs most goes first, and so on; the longest such list counts whose last point is
    significant against the rest (Rosner 1983): a first outlier may hide behind a second."""
    n = problem.n
    most = min(math.ceil(MOST_OUTLIERS * n), n - problem.parameters - 2)
    screening = Screening(problem, delta, seed_sd)
    law = screening.trim(theta, np.ones(n, bool))
    may_be_off = screening.unseen_distance(law).max() > OFF_LAW / 2
    if most < 1 or not may_be_off:
        return None
    if n <= ONE_BY_ONE:
        trimmed = _leave_out_one_by_one(screening, law, most)
    else:
        trimmed = _leave_out_together(screening, law, most)
    if trimmed is None:
        return None
    return _put_back(screening, trimmed)


def _leave_out_one_by_one(screening: Screening, law: Trimmed, most: int) -> Trimmed | None:
    """The law after the last point whose loss is significant against the others."""
    best, in_vain = None, 0
    for _ in range(most):
        law, point = _leave_out_dearest(screening, law)
        if screening.is_off(law, int(law.is_used.sum()) + 1)[point]:
            best, in_vain = law, 0
        else:
            in_vain += 1
        if in_vain == IN_VAIN:
            break
    return best


def _leave_out_dearest(screening: Screening, law: Trimmed) -> tuple[Trimmed, int]:
    """(the law without one more point, the index of that point): the one that costs most."""
    unseen = np.where(law.is_used, screening.unseen_distance(law), -1.0)
    tried = min(int(law.is_used.sum()), max(CANDIDATES, screening.problem.n // 4))
    candidates = np.argsort(-unseen, kind="stable")[:tried]
    weights = np.tile(law.is_used.astype(float), (tried, 1))
    weights[np.arange(tried), candidates] = 0.0
    starts = np.tile(law.theta, (tried, 1))
    ends = descend(screening.problem, starts, screening.delta, weights)
    dearest = int(np.argmin(ends.cost))
    return screening.trim(ends.theta[dearest], weights[dearest] > 0), int(candidates[dearest])


def _leave_out_together(screening: Screening, law: Trimmed, most: int) -> Trimmed | None:
    """Of many points: all that lie off the law at once, then those off the law of the rest, until
    none is new."""
    everything = law
    for _ in range(ROUNDS):
        # The median does not count how far the outliers are, as a scatter over all points would.
        median = float(np.median(screening.distance(law)[law.is_used]))
        is_off = screening.is_off(replace(law, scatter=median / NORMAL_MEDIAN), len(law.is_used))
        if is_off.sum() > most:
            return None
        if (is_off == ~law.is_used).all():
            break
        law = screening.refit(law.theta, ~is_off)
    if law is everything or law.is_used.all():
        return None
    return law


def _put_back(screening: Screening, law: Trimmed) -> Trimmed | None:
    """Without those that the law of the rest does not find off it: they had gone before a worse
    one."""
    for _ in range(ROUNDS):
        is_off = screening.is_off(law, len(law.is_used)) & ~law.is_used
        if (is_off == ~law.is_used).all():
            return law
        if not is_off.any():
            return None
        law = screening.refit(law.theta, ~is_off)
    return law


def is_another_law(law: Trimmed, y: np.ndarray, log_axes: np.ndarray) -> bool:
    """Whether the rest lies off the law too, neighbours alike: then the form is at fault, not its
    points. y: ln loss (n,); log_axes: ln of the form's abscissae (axes, n)."""
    if law.scatter <= OFF_LAW / 2 or len(y) >= MANY:
        return False
    residual = (y - law.log_loss)[law.is_used]
    each_its_own = np.arange(len(residual))
    noise = noise_of_neighbours(log_axes[:, law.is_used], residual, each_its_own)
    return law.scatter > NEIGHBOURS * noise


def with_outliers(fit: Fit, law: Trimmed, y: np.ndarray, seed_sd: float) -> Fit:
    """The fit with its outliers named and t-intervals of the other points' scatter, widened by what
    the outliers move."""
    distances = np.expm1(y - law.log_loss)
    farthest_first = sorted(law.left_out, key=lambda index: -abs(distances[index]))
    best = replace(fit.solution, sigma=max(law.scatter, seed_sd))
    used = law.used_jacobian
    moved = best.theta - law.theta
    noise = known(best.sigma) ** 2 * best.inefficiency * np.linalg.inv(used.T @ used)
    fit = replace(
        fit,
        outliers=tuple(Outlier(int(index), float(distances[index])) for index in farthest_first),
        without_outliers=parameters_of(natural(fit.form, law.theta, best.centres)),
        scatter=law.scatter,
        optimum=best,
    )
    return with_covariance(fit, noise + np.outer(moved, moved), law.dof, "t")


def noise_of_neighbours(log_axes: np.ndarray, residual: np.ndarray, cluster: np.ndarray) -> float:
    """By what the residuals (n,) of a point and of the nearest one of another trajectory differ;
    log_axes (axes, n): where the points lie."""
    nearest = []
    for i in range(len(residual)):
        distance = np.sqrt(np.sum((log_axes - log_axes[:, i : i + 1]) ** 2, axis=0))
        is_own = cluster == cluster[i]
        nearest.append(np.where(is_own, np.inf, distance).argmin())
    differences = np.abs(residual - residual[nearest])
    # the median: outliers are no noise
    return float(np.median(differences) / NORMAL_MEDIAN / np.sqrt(2))
