"""Fit the valleys of loss over model size at equal compute, and say where each is lowest (IsoFLOP,
Hoffmann et al. 2022).

At one compute every law that adds a power of N and a power of D is e + u N^-alpha + v N^beta: e, u
and v belong to the budget, alpha and beta to the law. So each valley has its own three factors and
all share two exponents: steeper on one side than on the other as the law is, which a parabola is
not, and with fewer parameters than a cubic for each."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LOWEST, STEEPEST = 0.05, 1.5  # exponents that are searched
GRID = 6  # of each exponent, where the search starts
STEPS = 40  # of one search
STEP = 1e-5  # of a difference, in the logarithm of an exponent
LONGEST = 0.7  # of a step in the logarithm of an exponent
STIFFEST = 1e6  # damping above which a search has ended
ROBUST = 2  # rounds of weighting, the last of which keeps the exponents
FAR = 4.685  # scatters from which on a point no longer counts (Tukey's bisquare)
LEAST_WEIGHT = 1e-3  # so that the factors of a valley of outliers stay determined
NORMAL_MEDIAN = 0.6745  # of the distances from zero, in standard deviations


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

    def loss_at(self, valley: int, log_size: np.ndarray) -> np.ndarray:
        """The fitted valley's loss, for a figure."""
        offset = np.asarray(log_size) - self.centre[valley]
        e, u, v = self.factors[valley]
        falling = u * np.exp(-self.alpha * offset)
        rising = v * np.exp(self.beta * offset)
        return e + falling + rising


def without_spikes(loss: np.ndarray) -> np.ndarray:
    """Running medians of three, ends by Tukey's rule: a single outlier is neither the lowest loss
    nor a ridge."""
    loss = np.asarray(loss, dtype=float)
    if len(loss) < 4:
        return loss
    smooth = loss.copy()
    neighbours = [loss[:-2], loss[1:-1], loss[2:]]
    smooth[1:-1] = np.sort(neighbours, axis=0)[1]
    before_first = 3 * smooth[1] - 2 * smooth[2]
    behind_last = 3 * smooth[-2] - 2 * smooth[-3]
    smooth[0] = sorted([loss[0], smooth[1], before_first])[1]
    smooth[-1] = sorted([loss[-1], smooth[-2], behind_last])[1]
    return smooth


def lowest_part(valley: Valley, share: float, least: int) -> Valley:
    """The sizes from the first to the last whose loss is within a share of the lowest, `least`
    sizes at least."""
    loss = without_spikes(valley.loss)
    is_low = loss <= loss.min() * (1 + share)
    if is_low.sum() < least:
        is_low = np.zeros(len(loss), bool)
        lowest_first = np.argsort(loss, kind="stable")
        is_low[lowest_first[:least]] = True
    positions = np.flatnonzero(is_low)
    part = slice(positions[0], positions[-1] + 1)
    return Valley(valley.log_size[part], valley.loss[part])


def fit_valleys(valleys: list[Valley], start: Minima | None = None) -> Minima:
    """Least squares of the relative losses, points that lie far off weighing less. start: a fit of
    almost the same points, around whose exponents alone is searched."""
    padded = _padded(valleys)
    weight = padded.is_point.copy()
    exponents = None
    if start is not None:
        exponents = np.log([start.alpha, start.beta])
    for _ in range(ROBUST):
        exponents = _search(padded, weight, exponents)
        factors, residual = _solve_one(padded, weight, exponents)
        weight, is_exact = _bisquare(padded, residual)
        if is_exact:
            break
    else:
        factors, _ = _solve_one(padded, weight, exponents)
    assert exponents is not None
    return _minima(valleys, padded, exponents, factors)


# -------------------------------------------------------------------------------- valleys as arrays


class PaddedValleys(NamedTuple):
    """The valleys' points, n of the longest; what a shorter one lacks is 0."""

    offset: np.ndarray  # (valleys, n) ln N less the valley's centre
    loss: np.ndarray  # (valleys, n) over the valley's lowest
    is_point: np.ndarray  # (valleys, n) 1 where there is one
    centre: np.ndarray  # (valleys,) mean ln N
    scale: np.ndarray  # (valleys,) the lowest loss


def _padded(valleys: list[Valley]) -> PaddedValleys:
    shape = len(valleys), max(len(valley.loss) for valley in valleys)
    padded = PaddedValleys(
        offset=np.zeros(shape),
        loss=np.zeros(shape),
        is_point=np.zeros(shape),
        centre=np.array([valley.log_size.mean() for valley in valleys]),
        scale=np.array([valley.loss.min() for valley in valleys]),
    )
    for row, valley in enumerate(valleys):
        n = len(valley.loss)
        padded.offset[row, :n] = valley.log_size - padded.centre[row]
        padded.loss[row, :n] = valley.loss / padded.scale[row]
        padded.is_point[row, :n] = 1.0
    return padded


def _bisquare(padded: PaddedValleys, residual: np.ndarray) -> tuple[np.ndarray, bool]:
    """(weights that fall with the distance from the valley, whether the valleys hold their points
    exactly)."""
    points = padded.is_point.sum()
    freedom = max(1.0, points - 3 * len(residual) - 2)
    distance = np.abs(residual)
    median = np.median(distance[padded.is_point > 0])
    scatter = median / NORMAL_MEDIAN * np.sqrt(points / freedom)
    if scatter < 1e-12:
        return padded.is_point, True
    weight = 1 - np.square(distance / (FAR * scatter))
    return padded.is_point * np.maximum(weight, LEAST_WEIGHT), False


def _minima(
    valleys: list[Valley], padded: PaddedValleys, exponents: np.ndarray, factors: np.ndarray
) -> Minima:
    alpha, beta = np.exp(exponents)
    lowest, loss = _lowest(alpha, beta, factors)
    first = np.array([valley.log_size[0] for valley in valleys]) - padded.centre
    last = np.array([valley.log_size[-1] for valley in valleys]) - padded.centre
    is_inside = (first < lowest) & (lowest < last)
    lowest = np.where(is_inside, lowest, np.nan)
    loss = np.where(is_inside, loss, np.nan)
    return Minima(
        alpha=float(alpha),
        beta=float(beta),
        log_size=padded.centre + lowest,
        loss=loss * padded.scale,
        factors=factors * padded.scale[:, None],
        centre=padded.centre,
    )


def _lowest(alpha: float, beta: float, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offset of the minimum, loss there) of each valley; NaN where it has none."""
    e, u, v = factors.T
    has_minimum = (u > 0) & (v > 0)
    pull_down = np.where(has_minimum, alpha * u, 1.0)
    pull_up = np.where(has_minimum, beta * v, 1.0)
    balance = np.log(pull_down / pull_up) / (alpha + beta)
    lowest = np.where(has_minimum, balance, np.nan)
    falling = u * np.exp(-alpha * lowest)
    rising = v * np.exp(beta * lowest)
    return lowest, e + falling + rising


# ------------------------------------------------------------------------------ the two exponents


class Surroundings(NamedTuple):
    """The sum of squares around a pair (ln alpha, ln beta), by differences."""

    squares: float
    slopes: np.ndarray  # (2,)
    curvature: np.ndarray  # (2, 2)


def _search(padded: PaddedValleys, weight: np.ndarray, start: np.ndarray | None) -> np.ndarray:
    """(2,) ln alpha, ln beta with the least squares, from `start` or the best point of a grid, by
    Levenberg and Marquardt's steps on the squares that the best factors leave (Golub and Pereyra
    1973)."""
    low, high = np.log(LOWEST), np.log(STEEPEST)
    best = _best_of_grid(padded, weight, low, high) if start is None else start
    state = _around(padded, weight, best)
    damping = 1e-3
    for _ in range(STEPS):
        stiff = state.curvature + damping * np.diag(np.diag(state.curvature) + 1e-300)
        step = np.clip(-np.linalg.solve(stiff, state.slopes), -LONGEST, LONGEST)
        pair = np.clip(best + step, low, high)
        trial = _around(padded, weight, pair)
        fall = state.squares - trial.squares
        is_flat = 0 <= fall <= 1e-6 * state.squares + 1e-20
        if trial.squares <= state.squares:
            best, state = pair, trial
            damping = damping / 5
        else:
            damping = damping * 10
        if is_flat or damping > STIFFEST:
            break
    return best


def _best_of_grid(padded: PaddedValleys, weight: np.ndarray, low: float, high: float) -> np.ndarray:
    axis = np.linspace(low, high, GRID)
    pairs = np.array(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1).T
    squares = np.sum(_residuals(padded, weight, pairs) ** 2, axis=1)
    return pairs[int(np.argmin(squares))]


def _around(padded: PaddedValleys, weight: np.ndarray, pair: np.ndarray) -> Surroundings:
    steps = STEP * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    residuals = _residuals(padded, weight, pair + steps)
    jacobian = (residuals[1:] - residuals[0]) / STEP
    squares = float(residuals[0] @ residuals[0])
    return Surroundings(squares, jacobian @ residuals[0], jacobian @ jacobian.T)


def _residuals(padded: PaddedValleys, weight: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """(pairs, valleys * n) weighted residuals that each pair (ln alpha, ln beta) leaves."""
    _, residual = _solve(padded, weight, np.exp(pairs))
    return (residual * weight).reshape(len(pairs), -1)


def _solve_one(
    padded: PaddedValleys, weight: np.ndarray, pair: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(factors (valleys, 3), residuals (valleys, n)) of one pair (ln alpha, ln beta)."""
    assert pair is not None
    factors, residual = _solve(padded, weight, np.exp(pair[None]))
    return factors[0], residual[0]


def _solve(
    padded: PaddedValleys, weight: np.ndarray, exponents: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(factors (pairs, valleys, 3), residuals (pairs, valleys, n)) of weighted least squares for
    each pair (alpha, beta)."""
    alpha, beta = exponents[:, 0, None, None], exponents[:, 1, None, None]
    falling = np.exp(-alpha * padded.offset)
    rising = np.exp(beta * padded.offset)
    basis = np.stack([np.ones_like(falling), falling, rising], axis=-1)
    q, r = np.linalg.qr(basis * weight[None, :, :, None])
    target = np.einsum("pvnk,vn->pvk", q, weight * padded.loss)
    factors = np.linalg.solve(r, target[..., None])[..., 0]
    fitted = np.einsum("pvnk,pvk->pvn", basis, factors)
    return factors, padded.loss - fitted
