"""Minimise Huber's loss on log-loss residuals, summed (Hoffmann et al. 2022, appendix D.3), from
many starts, or for many weights of the points, at once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from scaling.laws.forms import DELTA, Terms, log_law

NEAR = 5  # steps by plain squares before the descent
STEPS = 300  # of one descent, before it counts as failed
FLAT = 1e-10  # relative fall of the objective that ends a descent
ROUNDING = 1e-20  # an objective over delta^2 this small is 0
LONGEST = 5.0  # of a step in any coordinate of theta
# problems: the starts of a fit. More are multiplied at once, five times faster and rounded
# otherwise
FEW = 30
BLOCK = 24_000  # points times problems at once: what stays in the cache


class Problem(NamedTuple):
    """A form and n points to fit it to."""

    terms: Terms
    y: np.ndarray  # (n,) ln loss

    @property
    def n(self) -> int:
        return len(self.y)

    @property
    def parameters(self) -> int:
        return self.terms.slopes.shape[2]

    def law(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ln L (n,), its gradient (n, p))."""
        return log_law(*self.terms, theta)


@dataclass(frozen=True, eq=False)
class Minimum:
    """The best end of the starts, with what certifies it."""

    theta: np.ndarray  # (p,)
    residual: np.ndarray  # (n,) ln L of the law less that of the point
    jacobian: np.ndarray  # (n, p) of ln L
    objective: float
    starts: int
    starts_at_best: int
    gradient_norm: float


class Ends(NamedTuple):
    """Where descents from B starts end."""

    theta: np.ndarray  # (B, p)
    cost: np.ndarray  # (B,) objective over delta^2
    converged: np.ndarray  # (B,) bool


def minimise(problem: Problem, starts: np.ndarray, delta: float | None) -> Minimum:
    """The best optimum that `starts` (B, p) lead to. delta None: plain squares. Below DELTA the
    best of the starts follows delta down by halves: with it the objective nears absolute
    deviations, whose gradient jumps."""
    wide = max(delta, DELTA) if delta else None
    equal = np.ones((len(starts), problem.n))
    # Far from the points Huber's gradient does not grow with the distance: a few steps by plain
    # squares come first, so few that the starts stay apart.
    close = descend(problem, starts, None, equal, steps=NEAR).theta
    ends = descend(problem, close, wide, equal)
    finish = _finisher(problem, delta is not None)
    best = finish(ends.theta[np.argmin(ends.cost)], wide or 1.0)
    # Two objectives are one optimum when they agree to a millionth, or when both are 0 next to
    # rounding.
    is_best = ends.cost <= best.cost * (1 + 1e-6) + 1e-14 / (wide or 1.0) ** 2
    while delta and wide and wide > delta:
        wide = max(wide / 2, delta)
        best = finish(best.x, wide)
    unit = wide or 1.0
    log_loss, jacobian = problem.law(best.x)
    return Minimum(
        theta=best.x,
        residual=log_loss - problem.y,
        jacobian=jacobian,
        objective=float(best.cost) * unit**2,
        starts=len(starts),
        starts_at_best=int(is_best.sum()),
        gradient_norm=float(np.linalg.norm(best.grad)) * unit**2,
    )


def _finisher(problem: Problem, is_robust: bool) -> Callable[[np.ndarray, float], OptimizeResult]:
    """finish(start, unit): scipy's optimum near a start, in units of Huber's threshold, because the
    solver also stops by absolute measures and the objective is about the threshold squared."""

    @lru_cache(maxsize=1)  # the solver asks for the residual, then for the Jacobian where it steps
    def law_at(theta: bytes) -> tuple[np.ndarray, np.ndarray]:
        return problem.law(np.frombuffer(theta))

    def finish(start: np.ndarray, unit: float) -> OptimizeResult:
        with np.errstate(all="ignore"):  # in a valley without a minimum, where scipy may overflow
            return least_squares(
                lambda theta: (law_at(theta.tobytes())[0] - problem.y) / unit,
                start,
                jac=lambda theta: law_at(theta.tobytes())[1] / unit,
                x_scale="jac",
                loss="huber" if is_robust else "linear",
                ftol=1e-13,
                xtol=1e-13,
                gtol=1e-12,
                max_nfev=500,
            )

    return finish


# ------------------------------------------------------------------------- many at the same time


def descend(
    problem: Problem,
    starts: np.ndarray,
    delta: float | None,
    weights: np.ndarray,
    steps: int = STEPS,
) -> Ends:
    """Minimise Huber sums from each of `starts` (B, p) with its row of weights (B, n)."""
    block = max(8, BLOCK // problem.n)
    huber = Huber(problem, delta, len(starts) <= FEW)
    ends = []
    for first in range(0, len(starts), block):
        part = slice(first, first + block)
        ends.append(_descend(huber, starts[part], weights[part], steps))
    return Ends(*(np.concatenate(parts) for parts in zip(*ends, strict=True)))


class State(NamedTuple):
    """B searches, each at a theta: the objective there and its quadratic."""

    theta: np.ndarray  # (B, p)
    cost: np.ndarray  # (B,)
    gradient: np.ndarray  # (B, p)
    curvature: np.ndarray  # (B, p, p) Gauss-Newton's
    size: np.ndarray  # (B, p) diagonal of the curvature of plain squares: the measure of a step


def _descend(huber: "Huber", starts: np.ndarray, weights: np.ndarray, limit: int) -> Ends:
    """Levenberg and Marquardt's steps for all starts at once; each ends where its objective no
    longer falls."""
    n_starts = len(starts)
    ends = Ends(starts.copy(), np.full(n_starts, np.inf), np.zeros(n_starts, bool))
    alive = np.arange(n_starts)  # the searches that go on, as state and damping have them
    damping = np.full(n_starts, 1e-3)
    state = huber.at(starts, weights)
    weights = np.ascontiguousarray(weights)  # the layout decides how products round
    for _ in range(limit):
        trial = huber.at(state.theta + _step(state, damping), weights)
        is_worse = ~(trial.cost <= state.cost * (1 + 1e-12) + ROUNDING)
        is_flat = np.abs(state.cost - trial.cost) <= FLAT * state.cost + ROUNDING
        is_end = ~is_worse & is_flat & (damping <= 1e-2)
        if is_worse.any():
            for new, old in zip(trial, state, strict=True):
                new[is_worse] = old[is_worse]
        damping = np.maximum(np.where(is_worse, damping * 4, damping / 5), 1e-9)
        ends.theta[alive] = trial.theta
        ends.cost[alive] = trial.cost
        ends.converged[alive[is_end]] = True
        goes_on = ~is_end & (damping < 1e10)
        if not goes_on.all():
            alive, damping, weights = alive[goes_on], damping[goes_on], weights[goes_on]
            trial = State(*(values[goes_on] for values in trial))
        if not len(alive):
            break
        state = trial
    return ends


def _step(state: State, damping: np.ndarray) -> np.ndarray:
    """(B, p) the damped step of each search, of LONGEST at most."""
    diagonal = (damping[:, None] * state.size)[:, :, None] + 1e-300
    damped = state.curvature + diagonal * np.eye(state.theta.shape[1])
    step = -np.linalg.solve(damped, state.gradient[..., None])[..., 0]
    return np.minimum(np.maximum(step, -LONGEST), LONGEST)  # np.clip is slow for so few


@dataclass(frozen=True, eq=False)
class Huber:
    """The objective: sum of w Huber(r / delta), r the residual of ln L."""

    problem: Problem
    delta: float | None  # None: plain squares
    are_few: bool  # searches, which are multiplied one by one

    def at(self, theta: np.ndarray, weights: np.ndarray) -> State:
        """The objective and its quadratic at theta (B, p) with weights (B, n). Huber's loss has no
        curvature where it is linear."""
        unit = self.delta or 1.0
        log_loss, share = self._law(theta)
        residual = (log_loss - self.problem.y) / unit
        jacobian = self._jacobian(share) / unit
        distance = np.abs(residual)
        is_inside = distance <= 1 if self.delta else np.ones_like(residual, bool)
        loss = np.where(is_inside, residual * residual / 2, distance - 0.5)
        pull = weights * (np.clip(residual, -1, 1) if self.delta else residual)
        bent = (jacobian * (weights * is_inside)[..., None]).transpose(0, 2, 1)
        return State(
            theta=theta,
            cost=(weights * loss).sum(axis=1),
            gradient=np.matmul(pull[:, None, :], jacobian)[:, 0],
            curvature=np.matmul(bent, jacobian),
            size=np.matmul(weights[:, None, :], jacobian**2)[:, 0],
        )

    def _law(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ln L (B, n), share of each term in L (B, n, terms))."""
        slopes, offsets = self.problem.terms
        n, n_terms, p = slopes.shape
        if self.are_few:
            parts = np.matmul(slopes[None], theta[:, None, :, None])[..., 0]
        else:
            flat = theta @ slopes.reshape(n * n_terms, p).T
            parts = flat.reshape(len(theta), n, n_terms)
        share = offsets + parts
        # four times faster than max over the last axis
        top = np.maximum.reduce([share[..., i] for i in range(n_terms)])
        np.exp(share - top[..., None], out=share)
        total = sum(share[..., i] for i in range(n_terms))
        share /= total[..., None]
        return np.log(total) + top, share

    def _jacobian(self, share: np.ndarray) -> np.ndarray:
        """(B, n, p) of ln L."""
        slopes = self.problem.terms.slopes
        if self.are_few:
            return np.matmul(share[:, :, None, :], slopes[None])[:, :, 0]
        return np.matmul(share.transpose(1, 0, 2), slopes).transpose(1, 0, 2)
