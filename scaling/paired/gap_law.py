"""Fit the relative gap of a recipe to size and tokens: gap = k (N / N0)^-a (D/N / r0)^b, in per
cent of the loss.

Gaps of single pairs may be negative by noise alone, so the law is fitted to the signed gaps, never
to their logarithm. Pairs of one trajectory (a trunk with its branches, a run's loss curve) share
part of their noise: they are weighted by what they share, and every interval counts trajectories,
by a sandwich estimate (CR2, Bell and McCaffrey 2002) with the degrees of freedom that its design
has (Pustejovsky and Tipton 2018). Intervals are profiles of the weighted squares, because a and b
are not normal where k is small. An exponent is told only where the gap itself is told from zero.

The rival form is that of Kumar et al. 2024 (2411.04330): a precision leaves f N of the N
parameters effective, one f for each recipe, and the gap follows from the BF16 law L(N, D)."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from scipy import stats

from scaling.laws import LEVELS, ONE_RAY, sizes_of
from scaling.paired.cost import Surface
from scaling.paired.estimates import ALPHA, POWER

LIMIT = 2.0  # exponents are sought between -LIMIT and LIMIT; published ones lie within .6
AXES = {"a": "N", "b": "D/N"}  # exponent -> what it is the exponent of, in words
STARTS = (-0.5, 0.0, 0.5)  # of each exponent
SAME_OPTIMUM = 1e-6  # relative difference of the objective within which two starts ended alike
MIN_TRAJECTORIES = 6  # three sizes of two seeds
REFUTED = 0.01  # chance of refuting a true form, as for predictions of the loss
STEPS = 60  # of the solver
SETTLED = 1e-9  # relative change of the objective that ends it
GRID = 41  # values of each exponent at which a profile is evaluated
REFINED = 3  # times, each time over the range that the last left
MEANINGLESS = 100.0  # per cent of the loss: no interval that reaches so far is a prediction
MOST_SHARED = 0.95  # share of the noise that pairs of a trajectory may have in common


@dataclass(frozen=True, eq=False)
class GapPoints:
    """n pairs of one recipe; arrays have shape (n,)."""

    N: np.ndarray  # parameters, as the study counts them
    D: np.ndarray  # training tokens
    percent: np.ndarray  # 100 ln(L_FP8 / L_BF16), signed
    trajectory: np.ndarray  # label; pairs of one label share part of their noise


@dataclass(frozen=True)
class Noise:
    """What one pair's gap scatters by over seeds."""

    pair_sd: float  # per cent, pooled over sizes and budgets
    shared: float  # share of that variance that pairs of one trajectory have in common
    noise_dof: int  # degrees of freedom of pair_sd, counting trajectories


@dataclass(frozen=True)
class Exponent:
    """An exponent of the law with its 95 % interval; a: gap falls as N^-a, b: grows as (D/N)^b."""

    name: str  # "a" or "b"
    value: float
    low: float  # -LIMIT or LIMIT: the interval has no end within them
    high: float
    # of two tests that it is zero, by the scatter of trajectories and by the pooled noise, the larger
    p: float
    exponent_dof: float  # degrees of freedom of the first, and of the interval
    is_told: bool  # from zero, both exponents tested together at 5 % (Holm)
    # the smallest exponent that this design tells from zero with 80 %; None: no finite one
    could_show: float | None


@dataclass(frozen=True)
class NestedForm:
    """A form held against the means of all cells (a size at a budget)."""

    form: str  # zero, constant, a, b, both, effective
    parameter_count: int
    squares: float  # weighted squares beyond the scatter within cells
    # of so large squares if the form were true; None: no cell has a second pair, or none is spare
    p_of_fit: float | None


@dataclass(frozen=True)
class EffectiveParameters:
    """The gap as a loss of parameters: L(f N, D) under the BF16 law, which is taken as exact."""

    law: str  # which BF16 law
    f: float  # effective share of the parameters
    f_low: float | None  # 95 % interval; None: no number gives so large a gap
    f_high: float | None
    f_p_of_fit: float | None  # as in NestedForm


@dataclass(frozen=True)
class GapLaw:
    """What one recipe's pairs say of its gap over size and tokens; k to b are None where there is
    no fit."""

    N0: float  # reference size: k is the gap there
    ratio0: float  # reference tokens per parameter
    pair_count: int
    trajectory_count: int
    size_count: int
    ratio_count: int
    # names of the exponents that are told from zero; None: no trend can be told
    trend: list[str] | None
    reason: str | None  # why no trend can be told
    # the gap in per cent if it were the same everywhere, with its 95 % interval; None: no spread
    constant: float
    constant_low: float | None = None
    constant_high: float | None = None
    k: float | None = None  # per cent at N0 and ratio0
    k_low: float | None = None
    k_high: float | None = None
    a: Exponent | None = None  # None: the pairs have fewer than three sizes
    b: Exponent | None = None  # None: fewer than three ratios of tokens to parameters
    noise: Noise | None = None
    forms: list[NestedForm] | None = None
    starts: int | None = None  # of the solver
    starts_at_best: int | None = None  # that end at the best objective
    # largest over smallest singular value of the scaled Jacobian
    condition: float | None = None
    effective: EffectiveParameters | None = None
    no_effective: str | None = None  # why the effective form was not fitted
    # "power law", "effective parameters", or None: the pairs do not tell which fits better
    better_form: str | None = None


@dataclass(frozen=True)
class FormForecast:
    """One form's gap in per cent at a point, with its own 95 % interval."""

    form: str  # power law, constant, effective parameters
    gap: float
    gap_low: float
    gap_high: float
    refuted_because: str | None  # then it is not in the union


@dataclass(frozen=True)
class GapForecast:
    """The gap in per cent at a size and a number of tokens, the union of the forms that the pairs
    do not refute."""

    N: float
    D: float
    headline: str  # the form that gives `gap`
    gap: float
    low: float  # 95 % interval of the law: parameters and doubt in the form
    high: float
    one_pair_low: float  # the same for a single pair to come, whose seeds scatter
    one_pair_high: float
    pair_sd: float  # per cent: that scatter
    pair_sd_dof: int
    beyond_sizes: float  # N over the largest size; below the smallest: N over that; else 1
    beyond_ratios: float  # the same of tokens per parameter
    forecasts: list[FormForecast]


class CannotFit(ValueError):
    """Why these pairs carry no law."""


# ------------------------------------------------------------- the pairs, weighted by their noise


@dataclass(frozen=True, eq=False)
class Cells:
    """Pairs as whitened means of their cells: the squares of a law with gaps g (cells,) are
    within + |root @ g - height|^2."""

    N: np.ndarray  # (cells,)
    D: np.ndarray
    of_pair: np.ndarray  # (n,) the cell of each pair
    trajectory: np.ndarray  # (n,) numbered from 0
    percent: np.ndarray  # (n,)
    noise: Noise
    root: np.ndarray  # (cells, cells)
    height: np.ndarray  # (cells,)
    within_dof: int  # of the scatter within cells; 0: no cell has a second pair

    @cached_property
    def blocks(self) -> list[np.ndarray]:
        """Indices of each trajectory's pairs."""
        return [np.flatnonzero(self.trajectory == i) for i in range(self.trajectory.max() + 1)]

    def squares(self, gaps: np.ndarray) -> float:
        residual = self.root @ gaps - self.height
        return float(residual @ residual)

    def whiten(self, values: np.ndarray) -> np.ndarray:
        """values (n, ...) times the inverse root of the noise's covariance."""
        return whitened(values, self.blocks, self.noise)


def whitened(values: np.ndarray, blocks: list[np.ndarray], noise: Noise) -> np.ndarray:
    result = np.empty_like(values, dtype=float)
    for members in blocks:
        mean = values[members].mean(axis=0)
        deviation = (values[members] - mean) / math.sqrt(1 - noise.shared)
        common = mean / math.sqrt(1 - noise.shared + noise.shared * len(members))
        result[members] = (deviation + common) / noise.pair_sd
    return result


def cells_of(points: GapPoints) -> Cells:
    """Raises CannotFit where pairs do not scatter."""
    trajectory = np.unique(points.trajectory, return_inverse=True)[1].ravel()
    places = np.stack([points.N, points.D]).astype(float)
    distinct, of_pair = np.unique(places, axis=1, return_inverse=True)
    of_pair = of_pair.ravel()
    noise, within_dof = measure_noise(points.percent, of_pair, trajectory, distinct)
    blocks = [np.flatnonzero(trajectory == i) for i in range(trajectory.max() + 1)]
    membership = np.eye(distinct.shape[1])[of_pair]  # (n, cells)
    orthogonal, root = np.linalg.qr(whitened(membership, blocks, noise))
    height = orthogonal.T @ whitened(points.percent, blocks, noise)
    N, D = distinct
    return Cells(N, D, of_pair, trajectory, points.percent, noise, root, height, within_dof)


def measure_noise(percent, of_pair, trajectory, places) -> tuple[Noise, int]:
    """(noise, degrees of freedom within cells); percent, of_pair, trajectory: (n,), places: N and D
    of the cells, (2, cells).

    From the scatter within cells; where no cell has a second pair, around a plane over ln N and
    ln D."""
    counts = np.bincount(of_pair)
    means = np.bincount(of_pair, percent) / counts
    residual = percent - means[of_pair]
    pairs_dof = len(percent) - len(counts)
    trajectories = len(np.unique(trajectory))
    dof = trajectories - len(np.unique(sizes_of(places[0])))
    is_within = pairs_dof > 0 and dof > 0
    if not is_within:
        plane = np.column_stack([np.ones(len(percent)), np.log(places.T[of_pair])])
        solution, _, rank, _ = np.linalg.lstsq(plane, percent, rcond=None)
        residual = percent - plane @ solution
        pairs_dof = len(percent) - int(rank)
        dof = trajectories - int(rank)
    if pairs_dof < 1 or dof < 1:
        raise CannotFit("no degree of freedom is left for the noise of seeds")
    variance = float(residual @ residual) / pairs_dof
    if variance <= (1e-9 * float(abs(percent).max())) ** 2:
        raise CannotFit("equal gaps are copies, not a sample without noise")
    shared = _shared_part(residual, trajectory, of_pair, counts) / variance
    noise = Noise(math.sqrt(variance), float(np.clip(shared, 0.0, MOST_SHARED)), dof)
    return noise, pairs_dof if is_within else 0


def _shared_part(residual, trajectory, of_pair, counts) -> float:
    """Covariance of two pairs of one trajectory, from residuals of cells with so many pairs."""
    products, expected = 0.0, 0.0
    remaining = 1 - 1 / counts if counts.max() > 1 else np.ones(len(counts))
    for label in range(trajectory.max() + 1):
        members = np.flatnonzero(trajectory == label)
        products += _products(residual[members])
        expected += _products(np.sqrt(remaining[of_pair[members]]))
    return products / expected if expected > 0 else 0.0


def _products(values: np.ndarray) -> float:
    """Sum over all ordered pairs of two different values."""
    return float(values.sum() ** 2 - values @ values)


# ------------------------------------------------------------------ uncertainty from trajectories


@dataclass(frozen=True, eq=False)
class Sandwich:
    """The CR2 estimate at a fit with p parameters and J trajectories."""

    bread: np.ndarray  # (p, p) covariance of the parameters if the noise is as assumed
    scores: np.ndarray  # (J, p) each trajectory's adjusted pull on them
    pulls: np.ndarray  # (J, p, p) X' A X
    squared_pulls: np.ndarray  # (J, p, p) X' A A X

    def of(self, contrast: np.ndarray) -> "Spread":
        """The spread of contrast @ parameters; contrast: (p,)."""
        direction = self.bread @ contrast
        assumed = float(contrast @ direction)
        measured = float(np.sum((self.scores @ direction) ** 2))
        reach = self.pulls @ direction  # (J, p)
        products = -reach @ self.bread @ reach.T
        products[np.diag_indices_from(products)] += np.einsum(
            "i,jik,k->j", direction, self.squared_pulls, direction
        )
        dof = float(np.trace(products) ** 2 / np.sum(products**2))
        return Spread(assumed, measured / assumed, max(dof, 1.0))


@dataclass(frozen=True)
class Spread:
    """Of one number: its variance if the noise is as assumed, the measured variance over that."""

    assumed: float
    ratio: float
    dof: float

    @property
    def se(self) -> float:
        return math.sqrt(self.assumed * self.ratio)

    @property
    def t(self) -> float:
        return float(stats.t.ppf(1 - ALPHA / 2, self.dof))

    @property
    def threshold(self) -> float:
        """Rise of the weighted squares at the ends of the 95 % interval."""
        return self.t**2 * self.ratio

    def p_of_rise(self, rise: float) -> float:
        return float(2 * stats.t.sf(math.sqrt(max(rise, 0.0) / self.ratio), self.dof))


def sandwich(cells: Cells, jacobian: np.ndarray, gaps: np.ndarray) -> Sandwich:
    """At a law's gaps (cells,) with their derivatives (cells, p)."""
    slopes = cells.whiten(jacobian[cells.of_pair])
    residual = cells.whiten(cells.percent - gaps[cells.of_pair])
    bread = np.linalg.pinv(slopes.T @ slopes)
    scores, pulls, squared_pulls = [], [], []
    for members in cells.blocks:
        block = slopes[members]
        values, vectors = np.linalg.eigh(np.eye(len(members)) - block @ bread @ block.T)
        factors = np.where(values > 1e-9, np.maximum(values, 1e-9) ** -0.5, 0.0)
        adjusted = (vectors * factors) @ (vectors.T @ block)  # A X
        scores.append(adjusted.T @ residual[members])
        pulls.append(block.T @ adjusted)
        squared_pulls.append(adjusted.T @ adjusted)
    return Sandwich(bread, np.array(scores), np.array(pulls), np.array(squared_pulls))


# --------------------------------------------------------------------------------- the power law


@dataclass(frozen=True, eq=False)
class PowerFit:
    """k (N / N0)^-a (D/N / r0)^b at its optimum; an exponent that is not free is 0."""

    cells: Cells
    N0: float
    ratio0: float
    free: tuple[str, ...]  # of "a", "b"
    k: float
    exponents: np.ndarray  # (2,) a, b
    squares: float
    starts: int
    starts_at_best: int

    @cached_property
    def axes(self) -> np.ndarray:
        """(2, cells): what a and b multiply in ln |gap / k|."""
        return power_axes(self.cells.N, self.cells.D, self.N0, self.ratio0)

    def derivatives(self, axes: np.ndarray) -> np.ndarray:
        """(..., 1 + free) of the gap by k and the free exponents; axes: (2, ...)."""
        shape = np.exp(np.tensordot(self.exponents, axes, 1))
        columns = [shape]
        columns += [self.k * shape * axes["ab".index(name)] for name in self.free]
        return np.stack(columns, axis=-1)

    @cached_property
    def sandwich(self) -> Sandwich:
        gaps = self.k * np.exp(self.exponents @ self.axes)
        return sandwich(self.cells, self.derivatives(self.axes), gaps)

    def gap_at(self, axes: np.ndarray) -> float:
        return self.k * math.exp(float(self.exponents @ axes))

    def interval_at(self, axes: np.ndarray) -> tuple[float, float]:
        """95 % profile interval of the gap where ln |gap / k| has these axes, shape (2,)."""
        spread = self.sandwich.of(self.derivatives(axes))
        return self.profile(spread.threshold).gap_interval(axes, self.squares + spread.threshold)

    def profile(self, rise: float) -> "Profile":
        """The squares over a grid of exponents, refined to where they rise by at most this."""
        ranges = [(-LIMIT, LIMIT) if name in self.free else (0.0, 0.0) for name in "ab"]
        for _ in range(REFINED):
            grid = _grid(ranges)
            profile = profile_of(self.cells, self.axes, np.vstack([grid, self.exponents]))
            inside = profile.exponents[profile.squares <= self.squares + rise]
            ranges = [_widened(inside[:, i], high - low) for i, (low, high) in enumerate(ranges)]
        return profile


@dataclass(frozen=True, eq=False)
class Profile:
    """Best k and squares at each of g pairs of exponents."""

    exponents: np.ndarray  # (g, 2)
    k: np.ndarray  # (g,)
    information: np.ndarray  # (g,) inverse variance of k at these exponents
    squares: np.ndarray  # (g,)

    def gap_interval(self, axes: np.ndarray, limit: float) -> tuple[float, float]:
        """Smallest and largest gap at these axes (2,) whose squares are at most the limit."""
        allowed = self.squares <= limit
        scale = np.exp(self.exponents[allowed] @ axes)
        half = np.sqrt((limit - self.squares[allowed]) / self.information[allowed])
        low, high = scale * (self.k[allowed] - half), scale * (self.k[allowed] + half)
        return float(low.min()), float(high.max())

    def exponent_interval(self, index: int, limit: float) -> tuple[float, float]:
        """Where the least squares over the other exponent reach the limit, interpolated."""
        values, of_value = np.unique(self.exponents[:, index], return_inverse=True)
        lowest = np.full(len(values), np.inf)
        np.minimum.at(lowest, of_value.ravel(), self.squares)
        return _crossing(values, lowest, limit), _crossing(values[::-1], lowest[::-1], limit)


def _crossing(values: np.ndarray, squares: np.ndarray, limit: float) -> float:
    """The first value whose squares are at most the limit, interpolated to where they reach it."""
    first = int(np.argmax(squares <= limit))
    if first == 0:
        return float(values[0])
    outside, inside = squares[first - 1], squares[first]
    share = (outside - limit) / (outside - inside)
    return float(values[first - 1] + share * (values[first] - values[first - 1]))


def power_axes(N, D, N0: float, ratio0: float) -> np.ndarray:
    """(2, ...) what a and b multiply in ln |gap / k|; N, D: numbers or arrays of one shape."""
    return np.array([-np.log(N / N0), np.log(D / N / ratio0)])


def profile_of(cells: Cells, axes: np.ndarray, exponents: np.ndarray) -> Profile:
    """axes: (2, cells), exponents: (g, 2)."""
    shapes = np.exp(exponents @ axes) @ cells.root.T  # (g, cells)
    information = np.sum(shapes**2, axis=1)
    k = shapes @ cells.height / information
    squares = float(cells.height @ cells.height) - k**2 * information
    return Profile(exponents, k, information, squares)


def fit_power(cells: Cells, N0: float, ratio0: float, free: tuple[str, ...]) -> PowerFit:
    """The law with these free exponents, from several starts; k is linear and solved for."""
    axes = power_axes(cells.N, cells.D, N0, ratio0)
    indices = ["ab".index(name) for name in free]
    starts = np.zeros((len(STARTS) ** len(free), 2))
    starts[:, indices] = list(product(STARTS, repeat=len(free)))
    ends = descend(cells, axes, starts, indices) if free else starts
    profile = profile_of(cells, axes, ends)
    best = int(profile.squares.argmin())
    squares = float(profile.squares[best])
    at_best = int(np.sum(profile.squares <= squares * (1 + SAME_OPTIMUM) + SAME_OPTIMUM))
    k = float(profile.k[best])
    return PowerFit(cells, N0, ratio0, free, k, ends[best], squares, len(ends), at_best)


def descend(cells: Cells, axes: np.ndarray, starts: np.ndarray, indices: list[int]) -> np.ndarray:
    """Where Levenberg and Marquardt's steps of the exponents lead from each of `starts`, shape
    (starts, 2); indices: those that move. k is solved for at every step (variable projection)."""
    exponents, damping = starts.copy(), np.full(len(starts), 1e-3)
    squares = profile_of(cells, axes, exponents).squares
    for _ in range(STEPS):
        shape = np.exp(exponents @ axes)
        slope = (shape[:, None] * axes[indices]) @ cells.root.T  # (starts, free, cells)
        shape = shape @ cells.root.T
        power = np.sum(shape**2, axis=1)
        k = shape @ cells.height / power
        residual = cells.height - k[:, None] * shape
        along = np.einsum("sfc,sc->sf", slope, shape) / power[:, None]
        slope = k[:, None, None] * (slope - along[..., None] * shape[:, None])
        curvature = slope @ slope.transpose(0, 2, 1)
        diagonal = np.einsum("sff->sf", curvature) * damping[:, None] + 1e-12
        damped = curvature + diagonal[:, :, None] * np.eye(len(indices))
        pull = np.einsum("sfc,sc->sf", slope, residual)
        moved = exponents.copy()
        moved[:, indices] += np.linalg.solve(damped, pull[..., None])[..., 0]
        moved = np.clip(moved, -LIMIT, LIMIT)
        reached = profile_of(cells, axes, moved).squares
        is_lower = reached <= squares
        change = np.abs(squares - reached)
        exponents = np.where(is_lower[:, None], moved, exponents)
        squares = np.where(is_lower, reached, squares)
        damping = np.clip(damping * np.where(is_lower, 0.2, 10.0), 1e-9, 1e9)
        if np.all(change <= SETTLED * (1 + squares)):
            break
    return exponents


def _grid(ranges) -> np.ndarray:
    values = [np.linspace(low, high, GRID if high > low else 1) for low, high in ranges]
    return np.array(np.meshgrid(*values)).reshape(2, -1).T


def _widened(values: np.ndarray, width: float) -> tuple[float, float]:
    """The values' range with a step of the grid on either side, within the limits."""
    step = width / (GRID - 1)
    return max(-LIMIT, values.min() - step), min(LIMIT, values.max() + step)


# ------------------------------------------------------------------------ the effective parameters


@dataclass(frozen=True, eq=False)
class EffectiveFit:
    """gap = 100 ln(1 + phi A N^-alpha / L(N, D)) with phi = f^-alpha - 1."""

    cells: Cells
    surface: Surface
    phi: float
    squares: float
    spread: Spread

    @property
    def phi_interval(self) -> tuple[float, float]:
        half = self.spread.t * self.spread.se
        return self.phi - half, self.phi + half

    def share(self, phi: float) -> float | None:
        """f; None where so negative a gap is more than any size gains."""
        if phi <= -1:
            return None
        return float((1 + phi) ** (-1 / self.surface.alpha))

    def gap_at(self, N: float, D: float, phi: float) -> float:
        return float(100 * np.log1p(np.maximum(phi * self.leverage(N, D), -0.99)))

    def leverage(self, N, D) -> np.ndarray:
        return leverage_of(self.surface, N, D)


def leverage_of(surface: Surface, N, D) -> np.ndarray:
    """A N^-alpha over the loss: what the size costs of the loss at N, D."""
    return surface.A * np.asarray(N, float) ** -surface.alpha / surface.loss(N, D)


def fit_effective(cells: Cells, surface: Surface) -> EffectiveFit:
    """By Gauss and Newton's steps: the gap is nearly linear in phi."""
    leverage = leverage_of(surface, cells.N, cells.D)
    phi = 0.0
    for _ in range(STEPS):
        inside = np.maximum(1 + phi * leverage, 0.01)
        gaps, slope = 100 * np.log(inside), 100 * leverage / inside
        direction = cells.root @ slope
        step = direction @ (cells.height - cells.root @ gaps) / (direction @ direction)
        phi += float(step)
        if abs(step) <= SAME_OPTIMUM * (abs(phi) + SAME_OPTIMUM):
            break
    inside = np.maximum(1 + phi * leverage, 0.01)
    gaps, slope = 100 * np.log(inside), 100 * leverage / inside
    spread = sandwich(cells, slope[:, None], gaps).of(np.ones(1))
    return EffectiveFit(cells, surface, phi, cells.squares(gaps), spread)


# ------------------------------------------------------------------------- the law of a recipe


@dataclass(frozen=True, eq=False)
class GapFit:
    """What a prediction needs, beside the law that is written to disk."""

    law: GapLaw
    points: GapPoints
    power: PowerFit | None = None
    constant: PowerFit | None = None
    effective: EffectiveFit | None = None

    def forecast(self, N: float, D: float) -> GapForecast:
        """The gap at N parameters and D tokens. Raises CannotFit where the pairs carry no law,
        where the point differs from them along an axis that they do not vary, where every form is
        refuted, and where the interval is too wide to say anything."""
        if self.power is None or self.constant is None:
            raise CannotFit(self.law.reason or "no law was fitted")
        _check_axes(self, N, D)
        forecasts = [self._power_forecast(N, D), self._constant_forecast()]
        if self.effective is not None:
            forecasts.append(self._effective_forecast(N, D))
        allowed = [form for form in forecasts if form.refuted_because is None]
        if not allowed:
            raise CannotFit(f"every form is refuted: {forecasts[0].refuted_because}")
        headline = _headline(self.law, allowed)
        low = min(form.gap_low for form in allowed)
        high = max(form.gap_high for form in allowed)
        if max(abs(low), abs(high)) > MEANINGLESS:
            raise CannotFit(
                f"its 95 % interval there, {low:.3g} to {high:.3g} %, says nothing: train more"
                " seeds, or sizes nearer to it"
            )
        noise = self.power.cells.noise
        scatter = float(stats.t.ppf(1 - ALPHA / 2, noise.noise_dof)) * noise.pair_sd
        return GapForecast(
            N=N,
            D=D,
            headline=headline.form,
            gap=headline.gap,
            low=low,
            high=high,
            one_pair_low=headline.gap - math.hypot(headline.gap - low, scatter),
            one_pair_high=headline.gap + math.hypot(high - headline.gap, scatter),
            pair_sd=noise.pair_sd,
            pair_sd_dof=noise.noise_dof,
            beyond_sizes=_beyond(self.points.N, N),
            beyond_ratios=_beyond(self.points.D / self.points.N, D / N),
            forecasts=forecasts,
        )

    def _power_forecast(self, N: float, D: float) -> FormForecast:
        assert self.power is not None
        axes = power_axes(N, D, self.power.N0, self.power.ratio0)
        low, high = self.power.interval_at(axes)
        gap = self.power.gap_at(axes)
        full_form = " and ".join(self.power.free)
        return FormForecast("power law", gap, low, high, misfit(self.law, full_form))

    def _constant_forecast(self) -> FormForecast:
        law = self.law
        assert law.constant_low is not None and law.constant_high is not None
        exponents = _exponents(law)
        refuted = misfit(law, "constant")
        if min(exponent.p for exponent in exponents) * len(exponents) < REFUTED and law.trend:
            refuted = f"the trend in {' and '.join(law.trend)} refutes it"
        return FormForecast("constant", law.constant, law.constant_low, law.constant_high, refuted)

    def _effective_forecast(self, N: float, D: float) -> FormForecast:
        fit = self.effective
        assert fit is not None
        gap, low, high = (fit.gap_at(N, D, phi) for phi in (fit.phi, *fit.phi_interval))
        refuted = misfit(self.law, "effective")
        if self.law.better_form == "power law":
            refuted = refuted or "the power law fits better by a likelihood of 100 to 1"
        return FormForecast("effective parameters", gap, low, high, refuted)


def fit_gap(points: GapPoints, surface: Surface | None, no_surface: str = "") -> GapFit:
    """The law of one recipe's pairs; surface: the BF16 law L(N, D), else no_surface says why there
    is none. Never raises: where no law or no trend can be told, the law says why."""
    ratios = points.D / points.N
    counts = _Counts(
        N0=_reference(points.N),
        ratio0=_reference(ratios),
        pair_count=len(points.percent),
        trajectory_count=len(np.unique(points.trajectory)),
        size_count=_levels(points.N),
        ratio_count=_levels(ratios),
    )
    try:
        cells = cells_of(points)
    except CannotFit as error:
        mean = float(points.percent.mean())
        law = GapLaw(
            **vars(counts), trend=None, reason=str(error), constant=mean, no_effective=str(error)
        )
        return GapFit(law, points)
    constant = fit_power(cells, counts.N0, counts.ratio0, ())
    low, high = constant.interval_at(np.zeros(2))
    law = GapLaw(
        **vars(counts),
        trend=None,
        reason=_too_few(counts),
        constant=constant.k,
        constant_low=low,
        constant_high=high,
        noise=cells.noise,
    )
    if law.reason is not None:
        return GapFit(replace(law, no_effective=law.reason), points)
    effective = None if surface is None else fit_effective(cells, surface)
    fit = GapFit(law, points, None, constant, effective)
    return _fitted(fit, cells, counts.free, no_surface)


@dataclass(frozen=True)
class _Counts:
    """The first fields of GapLaw."""

    N0: float
    ratio0: float
    pair_count: int
    trajectory_count: int
    size_count: int
    ratio_count: int

    @property
    def free(self) -> tuple[str, ...]:
        levels = {"a": self.size_count, "b": self.ratio_count}
        return tuple(name for name, count in levels.items() if count >= LEVELS)


def _too_few(counts: _Counts) -> str | None:
    if not counts.free:
        return (
            f"{counts.size_count} sizes and {counts.ratio_count} ratios of tokens to parameters;"
            f" an exponent needs {LEVELS}"
        )
    if counts.trajectory_count < MIN_TRAJECTORIES:
        return (
            f"{counts.trajectory_count} independent pairs; a law needs {MIN_TRAJECTORIES}, such as"
            " two seeds at three sizes"
        )
    return None


def _fitted(fit: GapFit, cells: Cells, free: tuple[str, ...], no_surface: str) -> GapFit:
    """The fit with its power law, the exponents that are told, the forms beside it."""
    law, constant = fit.law, fit.constant
    assert constant is not None
    nested = {name: fit_power(cells, law.N0, law.ratio0, (name,)) for name in free}
    power = nested[free[0]]
    if len(free) > 1:
        power = fit_power(cells, law.N0, law.ratio0, free)
    forms = _nested_forms(constant, nested, power, fit.effective)
    exponents = _judged_exponents(constant, nested, power, _is_gap_told(law))
    by_name = {exponent.name: exponent for exponent in exponents}
    k_low, k_high = power.interval_at(np.zeros(2))
    law = replace(
        law,
        k=power.k,
        k_low=k_low,
        k_high=k_high,
        a=by_name.get("a"),
        b=by_name.get("b"),
        forms=forms,
        starts=power.starts,
        starts_at_best=power.starts_at_best,
        condition=_condition(power),
        better_form=_better_form(power, fit.effective),
    )
    law = _with_trend(law, " and ".join(free))
    if fit.effective is None:
        law = replace(law, no_effective=no_surface or None)
    else:
        law = replace(law, effective=_effective(fit.effective, forms[-1]))
    return replace(fit, law=law, power=power)


def _with_trend(law: GapLaw, full_form: str) -> GapLaw:
    reason = _no_trend(law, full_form)
    if reason is not None:
        return replace(law, reason=reason)
    return replace(law, trend=[exponent.name for exponent in _exponents(law) if exponent.is_told])


def _nested_forms(
    constant: PowerFit,
    nested: dict[str, PowerFit],
    power: PowerFit,
    effective: EffectiveFit | None,
) -> list[NestedForm]:
    """From the simplest on; the effective parameters last."""
    cells = power.cells
    forms = [
        _nested_form(cells, "zero", 0, float(cells.height @ cells.height)),
        _nested_form(cells, "constant", 1, constant.squares),
    ]
    forms += [_nested_form(cells, name, 2, fit.squares) for name, fit in nested.items()]
    if len(power.free) > 1:
        forms.append(_nested_form(cells, " and ".join(power.free), 3, power.squares))
    if effective is not None:
        forms.append(_nested_form(cells, "effective", 1, effective.squares))
    return forms


def _judged_exponents(
    constant: PowerFit, nested: dict[str, PowerFit], power: PowerFit, is_gap_told: bool
) -> list[Exponent]:
    """Each free exponent; at most 5 % of studies without a trend tell one."""
    without = dict.fromkeys(power.free, constant)
    if len(power.free) > 1:
        without = {"a": nested["b"], "b": nested["a"]}
    exponents = [_exponent(power, name, without[name].squares, is_gap_told) for name in power.free]
    is_told = told_together([exponent.p for exponent in exponents])
    return [
        replace(exponent, is_told=told) for exponent, told in zip(exponents, is_told, strict=True)
    ]


def told_together(p_values: list[float]) -> list[bool]:
    """Which of several tests reject by Holm's procedure at 5 % for all of them together."""
    is_told = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values)):
        if p_values[index] >= ALPHA / (len(p_values) - rank):
            break
        is_told[index] = True
    return is_told


def _exponent(power: PowerFit, name: str, squares_without: float, is_gap_told: bool) -> Exponent:
    """One exponent before both are judged together; squares_without: of the law where it is 0."""
    index = 1 + power.free.index(name)
    spread = power.sandwich.of(np.eye(1 + len(power.free))[index])
    axis = "ab".index(name)
    profile = power.profile(spread.threshold)
    low, high = profile.exponent_interval(axis, power.squares + spread.threshold)
    # with few trajectories the sandwich alone tells a trend too often, with unequal noise the
    # pooled noise alone does: both must tell it
    pooled = Spread(spread.assumed, 1.0, power.cells.noise.noise_dof)
    rise = squares_without - power.squares
    smallest = max(_smallest_told(test, len(power.free)) for test in (spread, pooled))
    could_show = smallest if is_gap_told and smallest < LIMIT else None
    return Exponent(
        name=name,
        value=float(power.exponents[axis]),
        low=low,
        high=high,
        p=max(spread.p_of_rise(rise), pooled.p_of_rise(rise)),
        exponent_dof=spread.dof,
        is_told=False,
        could_show=could_show,
    )


def _smallest_told(test: Spread, exponent_count: int) -> float:
    """The exponent that this test tells from zero with 80 %, as the first of so many."""
    critical = stats.t.ppf(1 - ALPHA / exponent_count / 2, test.dof)
    return float(critical + stats.t.ppf(POWER, test.dof)) * test.se


def _no_trend(law: GapLaw, full_form: str) -> str | None:
    """Why no exponent is told; None where one is."""
    # first: a gap that changes its sign over the sizes may be 0 on average, and is no noise
    why_refuted = misfit(law, full_form)
    if why_refuted is not None:
        return f"no power law fits: {why_refuted}"
    if not _is_gap_told(law):
        return "the gap itself is not told from zero"
    exponents = _exponents(law)
    at_limit = [exponent for exponent in exponents if abs(exponent.value) > 0.999 * LIMIT]
    if at_limit:
        axis = AXES[at_limit[0].name]
        return f"the exponent of {axis} runs to {LIMIT:g}, the largest that is sought"
    if not any(exponent.is_told for exponent in exponents):
        if len(exponents) == 2:
            return "neither exponent is told from zero"
        return f"the exponent of {AXES[exponents[0].name]} is not told from zero"
    return None


def _is_gap_told(law: GapLaw) -> bool:
    if law.constant_low is None or law.constant_high is None:
        return False
    return law.constant_low > 0 or law.constant_high < 0


def _exponents(law: GapLaw) -> list[Exponent]:
    return [exponent for exponent in (law.a, law.b) if exponent is not None]


def _nested_form(cells: Cells, form: str, parameter_count: int, squares: float) -> NestedForm:
    spare = len(cells.N) - parameter_count
    p_of_fit = None
    if spare > 0 and cells.within_dof > 0:
        p_of_fit = float(stats.f.sf(squares / spare, spare, cells.noise.noise_dof))
    return NestedForm(form, parameter_count, squares, p_of_fit)


def misfit(law: GapLaw, form: str) -> str | None:
    """Why the pairs refute a form; None where they do not."""
    for nested in law.forms or []:
        if nested.form == form and nested.p_of_fit is not None and nested.p_of_fit < REFUTED:
            return f"it misses the cells' means (p={nested.p_of_fit:.2g})"
    return None


def _effective(fit: EffectiveFit, form: NestedForm) -> EffectiveParameters | None:
    f = fit.share(fit.phi)
    if f is None:
        return None
    low, high = fit.phi_interval
    return EffectiveParameters(fit.surface.name, f, fit.share(high), fit.share(low), form.p_of_fit)


def _better_form(power: PowerFit, effective: EffectiveFit | None) -> str | None:
    """By Akaike's criterion where it says so at 100 to 1."""
    if effective is None:
        return None
    of_power = power.squares + 2 * (1 + len(power.free))
    of_effective = effective.squares + 2
    if abs(of_power - of_effective) <= 2 * math.log(1 / REFUTED):
        return None
    return "power law" if of_power < of_effective else "effective parameters"


def _headline(law: GapLaw, allowed: list[FormForecast]) -> FormForecast:
    """The form that gives the gap: the better one, else the simplest that the pairs do not
    refute."""
    preferred = ["constant", "power law", "effective parameters"]
    if law.trend is not None:
        preferred = ["power law", "effective parameters", "constant"]
    if law.better_form == "effective parameters":
        preferred = ["effective parameters", *preferred]
    by_name = {form.form: form for form in allowed}
    return by_name[min(by_name, key=preferred.index)]


def _condition(power: PowerFit) -> float:
    """Largest over smallest singular value of the Jacobian in units of the noise, its columns of
    length 1."""
    jacobian = power.cells.root @ power.derivatives(power.axes)
    scaled = jacobian / np.maximum(np.linalg.norm(jacobian, axis=0), 1e-12)
    singular = np.linalg.svd(scaled, compute_uv=False)
    return float(singular[0] / max(singular[-1], 1e-12))


def _check_axes(fit: GapFit, N: float, D: float) -> None:
    assert fit.power is not None
    for name, values, value, words in (
        ("a", fit.points.N, N, "size"),
        ("b", fit.points.D / fit.points.N, D / N, "ratio of tokens to parameters"),
    ):
        is_within = values.min() / ONE_RAY <= value <= values.max() * ONE_RAY
        if name not in fit.power.free and not is_within:
            raise CannotFit(f"the pairs have fewer than {LEVELS} {words}s, and none such as this")


def _reference(values: np.ndarray) -> float:
    """The value nearest to the geometric mean, at two significant digits."""
    logs = np.log(values)
    nearest = float(values[np.abs(logs - logs.mean()).argmin()])
    return float(f"{nearest:.1e}")


def _levels(values: np.ndarray) -> int:
    """Distinct values; within 5 % they are one, as a budget is rounded up to whole steps."""
    count, remaining = 0, np.sort(values)
    while len(remaining):
        count, remaining = count + 1, remaining[remaining > ONE_RAY * remaining[0]]
    return count


def _beyond(values: np.ndarray, value: float) -> float:
    """How many times above the largest or below the smallest of the values; 1 within them."""
    return float(max(value / values.max(), values.min() / value, 1.0))
