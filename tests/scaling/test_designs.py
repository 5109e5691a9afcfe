"""scaling/designs.py: the bound of designs against numbers computed elsewhere and simulated least
squares."""

from collections.abc import Sequence

import numpy as np
import pytest

from scaling.designs import PRIOR_SD, RHO, Point, bound, gradient
from scaling.paired.cost import EPOCH

THREE = (125e6, 250e6, 350e6)
TARGET = (1.5e9, 30e9)


def ladder(
    sizes: Sequence[float], ratios: Sequence[float] = (5, 10, 20, 40)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N, D, trajectory) of sizes x tokens per parameter; the ratios of one size are branches of
    one run."""
    count = len(ratios)
    N = np.repeat(sizes, count).astype(float)
    D = N * np.tile(ratios, len(sizes))
    trajectories = np.repeat(np.arange(len(sizes)), count)
    return N, D, trajectories


def points(sizes: Sequence[float], ratios: Sequence[float] = (5, 10, 20, 40)) -> list[Point]:
    """Runs of sizes x ratios, each a trajectory of its own."""
    N, D, _ = ladder(sizes, ratios)
    runs = zip(N, D, strict=True)
    return [Point(n, d, f"{i}") for i, (n, d) in enumerate(runs)]


@pytest.mark.parametrize("rho", [RHO, 0.9])  # each run a trajectory of its own: it plays no part
@pytest.mark.parametrize(
    "sizes, ratios, percent",
    [
        (THREE, (10, 20), 1.24),
        (THREE, (5, 10, 20), 1.04),
        (THREE, (5, 10, 20, 40), 0.88),
        ((60e6, *THREE), (5, 10, 20, 40), 0.33),
        ((*THREE, 1.5e9), (5, 10, 20), 0.08),
    ],
)
def test_bounds_are_those_computed_elsewhere(
    sizes: tuple[float, ...], ratios: tuple[float, ...], percent: float, rho: float
) -> None:
    error = bound(EPOCH, points(sizes, ratios), TARGET, rho=rho)
    assert error is not None and 100 * error == pytest.approx(percent, abs=6e-3)


UNIDENTIFIED = {
    "no run": [],
    "one size": points((350e6,)),
    "one ray": points((60e6, *THREE, 1e9), (20,)),
}


@pytest.mark.parametrize("runs", UNIDENTIFIED.values(), ids=list(UNIDENTIFIED))
def test_runs_that_identify_no_law_have_no_bound(runs: list[Point]) -> None:
    assert bound(EPOCH, runs, TARGET) is None


@pytest.mark.parametrize("runs", UNIDENTIFIED.values(), ids=list(UNIDENTIFIED))
def test_with_the_prior_they_have_one(runs: list[Point]) -> None:
    N = np.array([point.N for point in runs])
    D = np.array([point.D for point in runs])
    rows = gradient(EPOCH, N, D, TARGET)
    information = rows.T @ rows / 1e-3**2 + np.diag(PRIOR_SD**-2)
    of_size = EPOCH.A * TARGET[0] ** -EPOCH.alpha
    of_tokens = EPOCH.B * TARGET[1] ** -EPOCH.beta
    at_target = np.array([EPOCH.E, of_size, of_tokens, 0, 0]) / EPOCH.loss(*TARGET)
    variance = at_target @ np.linalg.inv(information) @ at_target
    exact = np.sqrt(variance)
    assert bound(EPOCH, runs, TARGET, prior=True) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("rho", [RHO, 0.9])
def test_generalised_least_squares_scatters_as_the_bound_says(rho: float) -> None:
    """Ladders whose trunks have luck of their own: what GLS of ln L on the law's gradient finds,
    4,000 times."""
    N, D, trunks = ladder((50e6, 125e6, 350e6, 1e9), (5, 20, 80))
    target, rng = (3e9, 6e10), np.random.default_rng(0)
    luck = rng.normal(size=(4000, 4))
    of_trunk = np.sqrt(rho) * luck[:, trunks]
    own = np.sqrt(1 - rho) * rng.normal(size=(4000, 12))
    noise = 1e-3 * (of_trunk + own)
    jacobian = gradient(EPOCH, N, D, target)
    is_same = np.equal.outer(trunks, trunks)
    V = np.where(is_same, rho, 0) + (1 - rho) * np.eye(12)
    curvature = jacobian.T @ np.linalg.solve(V, jacobian)
    pull = jacobian.T @ np.linalg.inv(V)
    weights = np.linalg.solve(curvature, pull)
    found = noise @ weights.T
    places = zip(N, D, trunks, strict=True)
    runs = [Point(n, d, f"{trunk}") for n, d, trunk in places]
    spread = np.std(found @ gradient(EPOCH, *target, target))
    assert bound(EPOCH, runs, target, rho=rho) == pytest.approx(spread, rel=0.04)
