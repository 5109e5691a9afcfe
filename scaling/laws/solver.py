"""Minimise Huber's loss on log-loss residuals, summed (Hoffmann et al. 2022, appendix D.3), from many
starts at once."""

from functools import lru_cache

import numpy as np
from scipy.optimize import least_squares

from scaling.laws.forms import DELTA, log_law

CONVERGED = 1e-6  # gradient norm over its largest, n delta, below which a fit counts as converged
# smallest over largest singular value of the Jacobian, below which points do not separate
# parameters
SINGULAR = 1e-9
NEAR = 5  # steps by plain squares before the descent
STEPS = 300  # of one descent, before it counts as failed
FLAT = 1e-10  # relative fall of the objective that ends a descent
ROUNDING = 1e-20  # an objective over delta^2 this small is 0
# problems: the starts of a fit. More are multiplied at once, five times faster and rounded
# otherwise
FEW = 30
BLOCK = 24_000  # points times problems at once: what stays in the cache


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
