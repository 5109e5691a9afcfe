"""Tables of points from known laws, for the tests of scaling/."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from scaling.laws import Fit, Points, fit_form
from scaling.table_points import read_points
from tests.conftest import ROOT

Law = dict[str, float]  # E, A, B, alpha, beta

# Besiroglu et al. 2024's fit to Hoffmann et al.'s data, then what Hoffmann et al. published
EPOCH = {"E": 1.817218, "A": 477.826, "B": 2143.417, "alpha": 0.34731, "beta": 0.367172}
HOFFMANN = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
UNEQUAL = {"E": 2.1, "A": 60.0, "B": 8e4, "alpha": 0.22, "beta": 0.55}
ROUND = {"E": 1.8, "A": 400, "B": 1500, "alpha": 0.34, "beta": 0.36}
SIZES = (50e6, 125e6, 250e6, 350e6)
RATIOS = (5, 10, 20, 40)  # tokens per parameter

FOLDER = ROOT.parent / "shared" / "reference"
published = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"published points are not at {FOLDER}")


def chinchilla_points(drop_highest: int = 0) -> Points:
    """Besiroglu et al. 2024's points, read off Hoffmann et al.'s figure 4."""
    path = FOLDER / "chinchilla_points.csv"
    selection = read_points(
        path, "Model Size", "loss", c="Training FLOP", drop_highest=drop_highest
    )
    return selection.points


def law(N: np.ndarray | float, D: np.ndarray | float, truth: Law = EPOCH) -> np.ndarray:
    """Nats per token of L(N, D)."""
    of_size = truth["A"] * N ** -truth["alpha"]
    return truth["E"] + of_size + truth["B"] * D ** -truth["beta"]


def noisy(N: np.ndarray, D: np.ndarray, sd: float, seed: int = 0, truth: Law = EPOCH) -> np.ndarray:
    return law(N, D, truth) * np.exp(np.random.default_rng(seed).normal(0, sd, len(N)))


def ladder(
    sizes: Sequence[float] = SIZES, ratios: Sequence[float] = RATIOS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N, D, trajectory) of sizes x tokens per parameter; the ratios of one size are branches of
    one run."""
    N = np.repeat(sizes, len(ratios)).astype(float)
    return N, N * np.tile(ratios, len(sizes)), np.repeat(np.arange(len(sizes)), len(ratios))


def points_at(
    N: np.ndarray, D: np.ndarray, loss: np.ndarray, cluster: np.ndarray | None = None
) -> Points:
    """Points of C = 6 N D, each a trajectory of its own unless said otherwise."""
    return Points(N, D, 6 * N * D, loss, np.arange(len(N)) if cluster is None else cluster)


def made(
    sizes: Sequence[float] = (3e7, 1e8, 3e8, 1e9),
    ratios: Sequence[float] = (5, 20, 80, 320),
    noise: float = 0.0,
    seed: int = 0,
) -> Points:
    """A grid of independent points of the law ROUND."""
    N, D, _ = ladder(sizes, ratios)
    return points_at(N, D, noisy(N, D, noise, seed, ROUND))


def measured(seeds: int, common: float, individual: float, seed: int) -> Points:
    """Points of a WSD ladder: one trunk per size and seed, whose deviation all its branches
    share."""
    N, D, trunk = ladder(np.repeat(SIZES, seeds))
    rng = np.random.default_rng(seed)
    of_trunk = rng.normal(0, common, trunk.max() + 1)
    noise = of_trunk[trunk] + rng.normal(0, individual, len(N))
    return points_at(N, D, law(N, D) * np.exp(noise), trunk)


def early(extra: float, sd: float = 3e-3, seed: int = 0) -> Points:
    """Points at .02 to 350 tokens per parameter, the earliest of them above the law by the share
    `extra`."""
    points = made(np.geomspace(5e6, 9e8, 12), np.geomspace(0.02, 350, 10), sd, seed)
    is_early = points.D / points.N < 0.5
    return replace(points, loss=points.loss * (1 + extra * is_early))


def joined(*tables: Points) -> Points:
    names = ("N", "D", "C", "loss", "cluster")
    return Points(*(np.concatenate([getattr(table, name) for table in tables]) for name in names))


def fitted(points: Points) -> Fit:
    """Chinchilla's law of the points."""
    return fit_form("chinchilla", points)
