"""The noise of stochastic rounding: a function of seed, layer and place alone, so that a resumed
run and any number of ranks draw the same."""

import numpy as np
import torch

# SplitMix64 (Steele et al. 2014), as signed 64-bit numbers. Its last step, z ^ (z >> 31), is left
# out: it changes none of the upper 24 bits, which alone are used.
GOLDEN_GAMMA = -0x61C8864680B583EB
FIRST_FACTOR = -0x40A7B892E31B1A47
SECOND_FACTOR = -0x6B2FB644ECCEEE15
NOISE_BLOCK = 2**15  # numbers, 256 KB: within a CPU's cache from one operation to the next


def noise_at(shape: torch.Size, position: torch.Tensor, salt: torch.Tensor | int) -> torch.Tensor:
    """Uniform values from 0 to 1 (exclusive), fp32 (M, N): a function of salt, column and position
    + row alone.

    position: () int64. By SplitMix64's finaliser on the value's number, in wrapping int64."""
    if position.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.from_numpy(noise_in_blocks(shape[0], shape[1], int(position), int(salt)))
    rows = position + torch.arange(shape[0], device=position.device)
    columns = torch.arange(shape[1], device=position.device)
    z = (rows[:, None] * shape[1] + columns) * GOLDEN_GAMMA + salt
    z = (z ^ _shifted(z, 30)) * FIRST_FACTOR
    z = (z ^ _shifted(z, 27)) * SECOND_FACTOR
    return ((z >> 40) & 0xFFFFFF).float() * 2.0**-24


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 z shifted to the right, zeros coming in from the left; torch's >> keeps the sign."""
    lower_bits = (1 << (64 - bits)) - 1
    return (z >> bits) & lower_bits


def noise_in_blocks(n_rows: int, n_columns: int, position: int, salt: int) -> np.ndarray:
    """noise_at() (n_rows, n_columns) on a CPU, block by block: numpy shifts unsigned numbers, and a
    block stays in the cache."""
    gamma = _unsigned(GOLDEN_GAMMA)
    factors = _unsigned(FIRST_FACTOR), _unsigned(SECOND_FACTOR)
    # a value's state is its number times gamma, plus the salt: of its row and of its column, added
    rows = np.arange(n_rows, dtype=np.uint64) + _unsigned(position)
    of_rows = rows[:, None] * np.uint64(n_columns) * gamma + _unsigned(salt)
    of_columns = np.arange(n_columns, dtype=np.uint64) * gamma
    noise = np.empty((n_rows, n_columns), dtype=np.float32)
    height = max(1, NOISE_BLOCK // max(1, n_columns))
    z_block, shifted_block = np.empty((2, min(height, n_rows), n_columns), dtype=np.uint64)
    for start in range(0, n_rows, height):
        block = noise[start : start + height]
        z, shifted = z_block[: len(block)], shifted_block[: len(block)]
        np.add(of_rows[start : start + height], of_columns, out=z)
        for bits, factor in zip((30, 27), factors, strict=True):
            z ^= np.right_shift(z, np.uint64(bits), out=shifted)
            z *= factor
        z >>= np.uint64(40)
        # signed: a CPU converts those to floating point in one instruction
        np.copyto(block, z.view(np.int64), casting="unsafe")
        block *= np.float32(2.0**-24)
    return noise


def _unsigned(number: int) -> np.uint64:
    return np.uint64(number % 2**64)
