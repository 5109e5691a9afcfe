"""Fit the valleys of loss over model size at equal compute, and say where each is lowest (IsoFLOP,
Hoffmann et al. 2022).

At one compute every law that adds a power of N and a power of D is e + u N^-alpha + v N^beta: e, u
and v belong to the budget, alpha and beta to the law. So each valley has its own three factors and
all share two exponents: steeper on one side than on the other as the law is, which a parabola is
not, and with fewer parameters than a cubic for each. Arrays in, arrays out."""

from dataclasses import dataclass

import numpy as np

LOWEST, STEEPEST = 0.05, 1.5  # exponents that are searched
GRID = 6  # of each exponent, where the search starts
STEPS = 40  # of one search
STEP = 1e-5  # of a difference, in the logarithm of an exponent
ROBUST = 2  # rounds of weighting, the last of which keeps the exponents
FAR = 4.685  # scatters from which on a point no longer counts (Tukey's bisquare)
LEAST_WEIGHT = 1e-3  # so that the factors of a valley of outliers stay determined


@dataclass(frozen=True)
class Valley:
    """One budget's sizes, ascending."""

    log_size: np.ndarray  # (n,) ln N
    loss: np.ndarray  # (n,) nats per token


@dataclass(frozen=True)
class Minima:
    """Where the valleys are lowest; NaN for a valley that is not lowest between its first and last
    size."""

    alpha: float
    beta: float
    log_size: np.ndarray  # (valleys,) ln N*
    loss: np.ndarray  # (valleys,) nats per token
    factors: np.ndarray  # (valleys, 3) e, u, v at (ln N - centre), of the loss
    centre: np.ndarray  # (valleys,)

    def loss_at(self, valley: int, log_size) -> np.ndarray:
        """The fitted valley's loss, for a figure."""
        offset = np.asarray(log_size) - self.centre[valley]
        e, u, v = self.factors[valley]
        return e + u * np.exp(-self.alpha * offset) + v * np.exp(self.beta * offset)


def without_spikes(loss) -> np.ndarray:
    """Running medians of three, ends by Tukey's rule: a single outlier is neither the lowest loss
    nor a ridge."""
    loss = np.asarray(loss, dtype=float)
    if len(loss) < 4:
        return loss
    smooth = loss.copy()
    smooth[1:-1] = np.sort([loss[:-2], loss[1:-1], loss[2:]], axis=0)[1]
    smooth[0] = sorted([loss[0], smooth[1], 3 * smooth[1] - 2 * smooth[2]])[1]
    smooth[-1] = sorted([loss[-1], smooth[-2], 3 * smooth[-2] - 2 * smooth[-3]])[1]
    return smooth


def lowest_part(valley: Valley, share: float, least: int) -> Valley:
    """The sizes from the first to the last whose loss is within a share of the lowest, `least`
    sizes at least."""
    loss = without_spikes(valley.loss)
    inside = loss <= loss.min() * (1 + share)
    if inside.sum() < least:
        inside = np.zeros(len(loss), bool)
        inside[np.argsort(loss, kind="stable")[:least]] = True
    where = np.flatnonzero(inside)
    part = slice(where[0], where[-1] + 1)
    return Valley(valley.log_size[part], valley.loss[part])


def fit_valleys(valleys: list[Valley], near: Minima | None = None) -> Minima:
    """Least squares of the relative losses, points that lie far off weighing less. near: a fit of
    almost the same points, around whose exponents alone is searched."""
    count, longest = len(valleys), max(len(valley.loss) for valley in valleys)
    offset, loss, is_there = (np.zeros((count, longest)) for _ in range(3))
    centre = np.array([valley.log_size.mean() for valley in valleys])
    scale = np.array([valley.loss.min() for valley in valleys])
    for row, valley in enumerate(valleys):
        n = len(valley.loss)
        offset[row, :n] = valley.log_size - centre[row]
        loss[row, :n] = valley.loss / scale[row]
        is_there[row, :n] = 1.0
    weight = is_there.copy()
    freedom = max(1.0, is_there.sum() - 3 * count - 2)
    exponents = None if near is None else np.log([near.alpha, near.beta])
    for round_ in range(1 + ROBUST):
        if round_ < ROBUST:
            exponents = _search(offset, loss, weight, exponents)
        factors, residual = _solve(offset, loss, weight, np.exp(exponents[None]))
        factors, residual = factors[0], residual[0]
        away = np.abs(residual)
        median = np.median(away[is_there > 0])
        scatter = median / 0.6745 * np.sqrt(is_there.sum() / freedom)
        if round_ == ROBUST or scatter < 1e-12:
            break
        weight = is_there * np.maximum(1 - np.square(away / (FAR * scatter)), LEAST_WEIGHT)
    alpha, beta = np.exp(exponents)
    lowest, least = _lowest(alpha, beta, factors)
    first, last = (
        np.array([valley.log_size[end] for valley in valleys]) - centre for end in (0, -1)
    )
    is_inside = (first < lowest) & (lowest < last)
    lowest, least = (np.where(is_inside, values, np.nan) for values in (lowest, least))
    return Minima(
        float(alpha), float(beta), centre + lowest, least * scale, factors * scale[:, None], centre
    )


def _search(offset, loss, weight, start) -> np.ndarray:
    """(2,) ln alpha, ln beta with the least squares, from `start` or the best point of a grid, by
    Levenberg and Marquardt's steps on the squares that the best factors leave (Golub and Pereyra
    1973)."""
    low, high = np.log(LOWEST), np.log(STEEPEST)
    best = start
    if start is None:
        axis = np.linspace(low, high, GRID)
        pairs = np.array(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1).T
        squares = np.sum(_left(offset, loss, weight, pairs) ** 2, axis=1)
        best = pairs[int(np.argmin(squares))]
    squares, slopes, curvature = _around(offset, loss, weight, best)
    damping = 1e-3
    for _ in range(STEPS):
        step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-300), slopes)
        trial = np.clip(best + np.clip(step, -0.7, 0.7), low, high)
        trial_squares, trial_slopes, trial_curvature = _around(offset, loss, weight, trial)
        is_lower = trial_squares <= squares
        is_flat = is_lower and squares - trial_squares <= 1e-6 * squares + 1e-20
        damping = damping / 5 if is_lower else damping * 10
        if is_lower:
            best, squares, slopes, curvature = trial, trial_squares, trial_slopes, trial_curvature
        if is_flat or damping > 1e6:
            break
    return best


def _around(offset, loss, weight, at):
    """(squares, slopes (2,), curvature (2, 2)) in ln alpha, ln beta, by differences."""
    pairs = at + STEP * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    left = _left(offset, loss, weight, pairs)
    jacobian = (left[1:] - left[0]) / STEP
    return float(left[0] @ left[0]), jacobian @ left[0], jacobian @ jacobian.T


def _left(offset, loss, weight, pairs) -> np.ndarray:
    """(pairs, valleys * n) weighted residuals that each pair (ln alpha, ln beta) leaves."""
    _, residual = _solve(offset, loss, weight, np.exp(pairs))
    return (residual * weight).reshape(len(pairs), -1)


def _solve(offset, loss, weight, exponents):
    """(factors (pairs, valleys, 3), residuals (pairs, valleys, n)) of weighted least squares for
    each pair (alpha, beta)."""
    alpha, beta = exponents[:, 0, None, None], exponents[:, 1, None, None]
    falling, rising = np.exp(-alpha * offset), np.exp(beta * offset)
    basis = np.stack([np.ones_like(falling), falling, rising], axis=-1)
    q, r = np.linalg.qr(basis * weight[None, :, :, None])
    target = np.einsum("pvnk,vn->pvk", q, weight * loss)
    factors = np.linalg.solve(r, target[..., None])[..., 0]
    return factors, loss - np.einsum("pvnk,pvk->pvn", basis, factors)


def _lowest(alpha: float, beta: float, factors):
    """(offset of the minimum, loss there) of each valley; NaN where it has none."""
    e, u, v = factors.T
    has_minimum = (u > 0) & (v > 0)
    ratio = np.where(has_minimum, alpha * u, 1.0) / np.where(has_minimum, beta * v, 1.0)
    lowest = np.where(has_minimum, np.log(ratio) / (alpha + beta), np.nan)
    return lowest, e + u * np.exp(-alpha * lowest) + v * np.exp(beta * lowest)
