"""scaling/budgets.py: what a budget buys, against closed forms and brute force."""

import numpy as np
import pytest

from scaling.budgets import SizeOnGPU, optimum, tokens
from scaling.paired.cost import EPOCH

# 6 N a token, one speed for all sizes
PLAIN = [SizeOnGPU(str(N), int(N), 6 * N, 0.5, 1.25) for N in (1e8, 1e9, 1e10)]
# a token costs what its size counts
TWO = [SizeOnGPU("a", 10**8, 8.5e8, 0.3, 1.1), SizeOnGPU("b", 10**9, 7e9, 0.5, 1.3)]


@pytest.mark.parametrize("flops", [1e19, 1e23])
def test_the_optimum_is_chinchillas_where_a_token_costs_6n(flops: float) -> None:
    """Hoffmann et al. 2022, section 3.3."""
    law, (N, D) = EPOCH, optimum(EPOCH, PLAIN, flops, in_fp8=False)
    a = law.beta / (law.alpha + law.beta)
    G = (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta))
    assert pytest.approx(G * (0.5 * flops / 6) ** a, rel=1e-4) == N
    assert pytest.approx(0.5 * flops / (6 * N), rel=1e-6) == D


@pytest.mark.parametrize("in_fp8", [False, True])
def test_the_optimum_is_the_best_of_a_fine_grid(in_fp8: bool) -> None:
    N, _ = optimum(EPOCH, TWO, 1e21, in_fp8)
    grid = np.exp(np.linspace(np.log(1e7), np.log(2e10), 20_001))
    losses = EPOCH.loss(grid, tokens(grid, TWO, 1e21, in_fp8))
    assert pytest.approx(grid[losses.argmin()], rel=1e-3) == N


@pytest.mark.parametrize(
    "N, in_fp8, expected",
    [
        (1e8, False, 1e20 * 0.3 / 8.5e8),
        (1e9, True, 1e20 * 0.5 * 1.3 / 7e9),
        # attention 1 -> 1 / 8^(1/3)
        (8e9, False, 1e20 * 0.5 / (8e9 * 6.5)),
    ],
)
def test_a_token_costs_what_its_size_counts(N: float, in_fp8: bool, expected: float) -> None:
    assert tokens(N, TWO, 1e20, in_fp8) == pytest.approx(expected)
