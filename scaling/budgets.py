"""What a budget of FLOPs buys: training tokens of each size, and the size that is best for it.

Speeds and losses of sizes between the repository's own are interpolated."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from scaling.paired.cost import Surface


@dataclass(frozen=True)
class SizeOnGPU:
    """One of the repository's sizes."""

    name: str
    N: int  # parameters
    flops_per_token: float
    mfu: float  # in BF16, of one GPU's BF16 peak
    speedup: float  # FP8's tokens per second over BF16's


def tokens(N: ArrayLike, sizes: Sequence[SizeOnGPU], flops: float, in_fp8: bool) -> np.ndarray:
    """Training tokens of an N-parameter model for `flops` at the BF16 peak; of N's shape. Between
    the sizes by interpolation in ln N, beyond them with attention's share of a token's FLOPs
    falling as N^-1/3, as it does when depth grows with width."""
    N = np.asarray(N, dtype=float)
    log_sizes = np.log([size.N for size in sizes])

    def interpolate(values: Sequence[float]) -> np.ndarray:
        return np.exp(np.interp(np.log(N), log_sizes, np.log(values)))

    beyond = N / np.clip(N, sizes[0].N, sizes[-1].N)
    flops_per_parameter = interpolate([size.flops_per_token / size.N for size in sizes])
    per_token = N * (6 + (flops_per_parameter - 6) * beyond ** (-1 / 3))
    speed = interpolate([size.speedup for size in sizes]) if in_fp8 else 1.0
    return flops * interpolate([size.mfu for size in sizes]) * speed / per_token


def optimum(
    surface: Surface, sizes: Sequence[SizeOnGPU], flops: float, in_fp8: bool
) -> tuple[float, float]:
    """(N*, D*): the size whose loss is lowest when it trains on as many tokens as the budget buys
    it."""

    def loss(log_n: np.ndarray) -> np.ndarray:
        return surface.loss(np.exp(log_n), tokens(np.exp(log_n), sizes, flops, in_fp8))

    # kinks of the interpolation could trap a local search
    log_n = np.linspace(math.log(1e5), math.log(1e14), 2000)
    centre, step = log_n[int(np.argmin(loss(log_n)))], log_n[1] - log_n[0]
    N = math.exp(_minimum(loss, centre - step, centre + step))
    return N, float(tokens(N, sizes, flops, in_fp8))


def _minimum(function: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    minimum = minimize_scalar(
        function, bounds=(low, high), method="bounded", options={"xatol": 1e-10}
    )
    return float(minimum.x)
