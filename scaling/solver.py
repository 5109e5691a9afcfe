"""Minimise the sum of Huber_delta(ln law - ln loss) from many starts at once, with a certificate.

Levenberg-Marquardt on whole batches (a batch is the starts of one fit, or the resamples of a bootstrap), because numpy
takes one step of a thousand tiny problems in the time of a few steps of one. scipy's least_squares then finishes the best
start to tight tolerances: its robust cost is exactly this sum.
"""

import math

import numpy as np
from scipy.optimize import least_squares
from scipy.special import erf, logsumexp

DELTA = 1e-3                # Huber's threshold on log-loss residuals
NEAR = 5                    # steps by plain squares before the descent
STEPS = 300                 # of one descent, before it counts as failed
FLAT = 1e-10                # relative fall of the objective that ends a descent
ROUNDING = 1e-20            # an objective over delta^2 this small is 0
BLOCK = 250                 # problems at once: 250 x 240 points x 5 parameters stay in the cache


def minimise(slopes, offsets, y, starts, delta: float | None, raw: bool = False):
    """(theta, Jacobian, residual, certificate) of the best of `starts` (B, p); terms as in forms.terms, y = ln loss (n,).

    delta None: plain squares; raw: squares of the loss instead of its logarithm. Below DELTA the starts descend with
    DELTA, and their best then follows delta down by halves: as delta goes to 0 the objective becomes the least absolute
    deviation, whose gradient jumps. raw descends in the logarithm, and its best finishes in the loss. Jacobian and residual
    are of ln loss (of loss over its geometric mean where raw)."""
    wide = max(delta, DELTA) if delta else None
    scale = np.exp(y.mean()) if raw else 1.0

    def residual(theta):
        log_loss = logsumexp(slopes @ theta + offsets, axis=1)
        return (np.exp(log_loss) - np.exp(y)) / scale if raw else log_loss - y

    def jacobian(theta):
        parts = slopes @ theta + offsets
        total = logsumexp(parts, axis=1, keepdims=True)
        relative = np.einsum("nt,ntp->np", np.exp(parts - total), slopes)
        return relative * np.exp(total) / scale if raw else relative

    def finish(start, delta):
        # In units of delta, because the solver also stops by absolute measures and the objective is about delta^2.
        unit = delta or 1.0
        with np.errstate(all="ignore"):      # in a valley without a minimum, where scipy may overflow
            return least_squares(lambda theta: residual(theta) / unit, start, jac=lambda theta: jacobian(theta) / unit,
                                 x_scale="jac", loss="huber" if delta else "linear", f_scale=1.0, ftol=1e-13, xtol=1e-13,
                                 gtol=1e-12, max_nfev=500)

    equal = np.ones((len(starts), len(y)))
    # Far from the points Huber's gradient does not grow with the distance: a few steps by plain squares come first, so
    # few that the starts stay apart.
    near, _, first, _ = descend(starts, slopes, offsets, y, None, equal, steps=NEAR)
    ends, costs, steps, _ = descend(near, slopes, offsets, y, wide, equal)
    best = finish(ends[np.argmin(costs)], wide)
    nfev = int(first.sum() + steps.sum()) + best.nfev
    # Two objectives are one optimum when they agree to a millionth, or when both are 0 next to rounding.
    lowest = min(costs) if raw else best.cost
    at_best = int((costs <= lowest * (1 + 1e-6) + 1e-14 / (wide or 1.0) ** 2).sum())
    while delta and wide > delta:
        wide = max(wide / 2, delta)
        best = finish(best.x, wide)
        nfev += best.nfev
    unit = wide or scale
    return best.x, jacobian(best.x), residual(best.x), {
        "objective": float(best.cost) * unit**2, "starts": len(starts), "starts_at_best": at_best, "nfev": nfev,
        "gradient_norm": float(np.linalg.norm(best.grad)) * unit**2,
        "stuck": bool(np.any(np.all(np.abs(best.x - starts) <= 1e-12 * np.abs(starts), axis=1)))}


def descend(starts, slopes, offsets, y, delta: float | None, weights, steps: int = STEPS):
    """(theta (B, p), objective over delta^2 (B,), steps (B,), converged (B,)) of Huber sums with weights (B, n)."""
    done = [_descend(starts[i:i + BLOCK], slopes, offsets, y, delta, weights[i:i + BLOCK], steps)
            for i in range(0, len(starts), BLOCK)]
    return tuple(np.concatenate(parts) for parts in zip(*done, strict=True))


def _descend(starts, slopes, offsets, y, delta, weights, limit):
    B, p = starts.shape
    theta, end_cost, steps = starts.copy(), np.full(B, np.inf), np.zeros(B, int)
    converged, alive, damping = np.zeros(B, bool), np.arange(B), np.full(B, 1e-3)
    state = _quadratic(theta, slopes, offsets, y, delta, weights)
    for _ in range(limit):
        steps[alive] += 1
        cost, gradient, curvature, size = state
        damped = curvature + ((damping[:, None] * size)[:, :, None] + 1e-300) * np.eye(p)
        step = -np.linalg.solve(damped, gradient[..., None])[..., 0]
        trial = theta[alive] + np.clip(step, -5, 5)
        new = _quadratic(trial, slopes, offsets, y, delta, weights[alive])
        better = new[0] <= cost * (1 + 1e-12) + ROUNDING
        end = better & (np.abs(cost - new[0]) <= FLAT * cost + ROUNDING) & (damping <= 1e-2)
        theta[alive[better]] = trial[better]
        for old, one in zip(state, new, strict=True):
            old[better] = one[better]
        end_cost[alive] = cost
        damping = np.maximum(np.where(better, damping / 5, damping * 4), 1e-9)
        converged[alive[end]] = True
        keep = ~end & (damping < 1e10)
        alive, damping = alive[keep], damping[keep]
        state = tuple(one[keep] for one in state)
        if not len(alive):
            break
    return theta, end_cost, steps, converged


def _quadratic(theta, slopes, offsets, y, delta, weights):
    """(cost (B,), gradient (B, p), Gauss-Newton curvature (B, p, p), size (B, p)) of sum w Huber(r / delta).

    Where Huber is linear it has no curvature; size is the diagonal of plain squares, the measure of a step."""
    unit = delta or 1.0
    parts = np.matmul(slopes[None], theta[:, None, :, None])[..., 0] + offsets      # (B, n, terms)
    top = parts.max(axis=2, keepdims=True)
    share = np.exp(parts - top)
    total = share.sum(axis=2, keepdims=True)
    share /= total
    r = ((np.log(total) + top)[..., 0] - y) / unit
    jacobian = np.matmul(share[:, :, None, :], slopes[None])[:, :, 0] / unit        # (B, n, p)
    inside = np.abs(r) <= 1 if delta else np.ones_like(r, bool)
    cost = (weights * np.where(inside, r * r / 2, np.abs(r) - 0.5)).sum(axis=1)
    pull = weights * np.where(inside, r, np.sign(r))
    gradient = np.matmul(pull[:, None, :], jacobian)[:, 0]
    curvature = np.matmul((jacobian * (weights * inside)[..., None]).transpose(0, 2, 1), jacobian)
    return cost, gradient, curvature, np.matmul(weights[:, None, :], jacobian**2)[:, 0]


def inefficiency(sigma: float, delta: float | None) -> float:
    """Variance of Huber's estimate over that of least squares under normal noise: 1 for delta >> sigma, pi/2 for <<."""
    if delta is None or sigma == 0:
        return 1.0
    k = delta / sigma
    inside = erf(k / math.sqrt(2))
    squares = inside - k * math.sqrt(2 / math.pi) * math.exp(-k * k / 2) + k * k * (1 - inside)     # E[psi^2] / sigma^2
    return float(squares / inside**2)
