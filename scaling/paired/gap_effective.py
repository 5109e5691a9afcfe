"""Fit the gap as a loss of parameters, the form of Kumar et al. 2024 (2411.04330): a precision
leaves f N of the N parameters effective, one f for each recipe, and the gap follows from the BF16
law L(N, D)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scaling.paired.cost import Surface
from scaling.paired.gap_cells import Cells
from scaling.paired.sandwich import SandwichVariance, sandwich

STEPS = 60  # of Gauss and Newton
SETTLED = 1e-6  # relative step that ends them
LOWEST = 0.01  # of the loss ratio: below it the logarithm has no meaning here


@dataclass(frozen=True, eq=False)
class EffectiveFit:
    """gap = 100 ln(1 + phi A N^-alpha / L(N, D)) with phi = f^-alpha - 1."""

    cells: Cells
    surface: Surface
    phi: float
    squares: float  # weighted, at phi
    spread: SandwichVariance

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
        """Per cent."""
        leverage = leverage_of(self.surface, N, D)
        return float(100 * np.log1p(np.maximum(phi * leverage, LOWEST - 1)))


def leverage_of(surface: Surface, N: ArrayLike, D: ArrayLike) -> np.ndarray:
    """A N^-alpha over the loss: what the size costs of the loss at N, D."""
    N, D = np.asarray(N, float), np.asarray(D, float)
    return surface.A * N**-surface.alpha / surface.loss(N, D)


def fit_effective(cells: Cells, surface: Surface) -> EffectiveFit:
    """By Gauss and Newton's steps: the gap is nearly linear in phi."""
    leverage = leverage_of(surface, cells.N, cells.D)
    phi = 0.0
    for _ in range(STEPS):
        gaps, slope = _gaps_and_slopes(phi, leverage)
        direction = cells.root @ slope
        step = direction @ (cells.height - cells.root @ gaps) / (direction @ direction)
        phi += float(step)
        if abs(step) <= SETTLED * (abs(phi) + SETTLED):
            break
    gaps, slope = _gaps_and_slopes(phi, leverage)
    spread = sandwich(cells, slope[:, None], gaps).of(np.ones(1))
    return EffectiveFit(cells, surface, phi, cells.squares(gaps), spread)


def _gaps_and_slopes(phi: float, leverage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(gaps [%], their derivatives by phi), each of shape (cells,)."""
    ratio = np.maximum(1 + phi * leverage, LOWEST)
    return 100 * np.log(ratio), 100 * leverage / ratio
