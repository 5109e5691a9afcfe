"""Published laws of what low precision costs.

They disagree by a factor of 10 to 85 at 125M to 1.5B parameters, and in whether the gap falls or
rises with size: they are drawn beside measured points, never used in place of them. N is the total
parameter count."""

import math
from typing import TypeVar

import numpy as np

Number = TypeVar("Number", float, np.ndarray)


def kumar_gap(N: Number, offsets: bool = True) -> Number:
    """Nats that integer weights and activations of 8 bits cost at N parameters, whatever the
    tokens; of N's shape. Kumar et al. 2024, arXiv:2411.04330, Table 2: A N_eff^-alpha - A N^-alpha,
    N_eff / N the product of 1 - e^-(P / gamma + n). 465 runs of 30M to 220M parameters, integer
    fake quantisation in the forward pass alone. The main text's formula has no n, their fit has:
    both are given. The authors: the constants are unlikely to be useful elsewhere."""
    # N_eff / N: a factor of the weights, one of the activations
    share = 1.0
    for gamma, n in ((2.6745, 0.3037), (2.2102, 1.4072)):
        exponent = 8 / gamma + (n if offsets else 0.0)
        share *= 1 - math.exp(-exponent)
    return 4.299e3 * N**-0.4965 * (share**-0.4965 - 1)


def sun_gap(
    N: Number, D: Number, exponent_bits: int = 4, mantissa_bits: int = 3, block: int = 128
) -> Number:
    """Nats that floats of so many bits cost, one scale for `block` values; of the shape of N and D.
    Sun et al. 2025, arXiv:2501.02423: D^beta / N^alpha * log2(block) / (gamma (E + .5)^delta (M +
    .5)^nu); 366 runs of 41M to 679M parameters."""
    bits = 11334.5197 * (exponent_bits + 0.5) ** 3.1926 * (mantissa_bits + 0.5) ** 2.9543
    return D**0.5162 / N**0.2368 * math.log2(block) / bits
