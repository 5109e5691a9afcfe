"""Uncertainty of a fit from the scatter of whole trajectories: the CR2 sandwich estimate (Bell and
McCaffrey 2002) with the degrees of freedom that the design has (Pustejovsky and Tipton 2018)."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from scaling.paired.estimates import ALPHA
from scaling.paired.gap_cells import Cells


@dataclass(frozen=True, eq=False)
class Sandwich:
    """The CR2 estimate at a fit with p parameters and J trajectories."""

    bread: np.ndarray  # (p, p) covariance of the parameters if the noise is as assumed
    scores: np.ndarray  # (J, p) each trajectory's adjusted pull on them
    pulls: np.ndarray  # (J, p, p) X' A X
    squared_pulls: np.ndarray  # (J, p, p) X' A A X

    def of(self, contrast: np.ndarray) -> "SandwichVariance":
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
        return SandwichVariance(assumed, measured / assumed, max(dof, 1.0))


@dataclass(frozen=True)
class SandwichVariance:
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
