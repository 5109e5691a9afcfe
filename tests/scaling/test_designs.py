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
    N = np.repeat(sizes, len(ratios)).astype(float)
    return N, N * np.tile(ratios, len(sizes)), np.repeat(np.arange(len(sizes)), len(ratios))


def points(sizes: Sequence[float], ratios: Sequence[float] = (5, 10, 20, 40)) -> list[Point]:
    """Runs of sizes x ratios, each a trajectory of its own."""
    N, D, _ = ladder(sizes, ratios)
    return [Point(n, d, str(i)) for i, (n, d) in enumerate(zip(N, D, strict=True))]


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
    N, D = np.reshape([point[:2] for point in runs], (-1, 2)).T
    rows = gradient(EPOCH, N, D, TARGET)
    information = rows.T @ rows / 1e-3**2 + np.diag(PRIOR_SD**-2)
    terms = [EPOCH.E, EPOCH.A * TARGET[0] ** -EPOCH.alpha, EPOCH.B * TARGET[1] ** -EPOCH.beta, 0, 0]
    at_target = np.array(terms) / EPOCH.loss(*TARGET)
    exact = np.sqrt(at_target @ np.linalg.inv(information) @ at_target)
    assert bound(EPOCH, runs, TARGET, prior=True) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("rho", [RHO, 0.9])
def test_generalised_least_squares_scatters_as_the_bound_says(rho: float) -> None:
    """Ladders whose trunks have luck of their own: what GLS of ln L on the law's gradient finds,
    4,000 times."""
    N, D, trunks = ladder((50e6, 125e6, 350e6, 1e9), (5, 20, 80))
    target, rng = (3e9, 6e10), np.random.default_rng(0)
    of_trunk = np.sqrt(rho) * rng.normal(size=(4000, 4))[:, trunks]
    own = np.sqrt(1 - rho) * rng.normal(size=(4000, 12))
    jacobian = gradient(EPOCH, N, D, target)
    V = np.where(np.equal.outer(trunks, trunks), rho, 0) + (1 - rho) * np.eye(12)
    curvature = jacobian.T @ np.linalg.solve(V, jacobian)
    weights = np.linalg.solve(curvature, jacobian.T @ np.linalg.inv(V))
    found = 1e-3 * (of_trunk + own) @ weights.T
    runs = [Point(n, d, str(trunk)) for n, d, trunk in zip(N, D, trunks, strict=True)]
    spread = np.std(found @ gradient(EPOCH, *target, target))
    assert bound(EPOCH, runs, target, rho=rho) == pytest.approx(spread, rel=0.04)
