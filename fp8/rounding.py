"""Rounding to FP8 and FP4: the reference numerics.

An operand is multiplied by its scale and rounded to its format, saturating; the matmul's result is
divided by the scales. Every other implementation is held against what this file computes."""

import math
from typing import Any

import numpy as np
import torch

from fp8.recipes import E2M1, E4M3, E5M2, Format, Operand

# Largest value, smallest normal one, distance from 1 to the next.
FORMATS: dict[Format | None, tuple[float, float, float]] = {
    E4M3: (448.0, 2.0**-6, 0.125),
    E5M2: (57344.0, 2.0**-14, 0.25),
    E2M1: (6.0, 1.0, 0.5),
}
EPS = 1e-12  # least amax, so that an all-zero tensor has a scale (torchao's value)
LEAST_E4M3 = 2.0**-9  # E4M3's least positive value


# ------------------------------------------------------------------------------------------ scales


def scale_of(x: torch.Tensor, operand: Operand, dim: int = -1) -> torch.Tensor:
    """The fp32 scale of `x` (any shape), which broadcasts to it; `dim` is the dimension that the
    matmul sums over."""
    if operand.scaling == "constant":
        return torch.full((), 2.0**operand.exponent, device=x.device)
    x = x.detach()
    if operand.tile != (1, 1):
        tiles = _in_tiles(x.abs().float(), operand, dim)
        return _tile_scale(tiles, operand).expand_as(tiles).reshape(x.shape)
    if operand.scaling == "tensor":
        amax = _largest_magnitude(x)
    else:
        amax = x.abs().amax(dim, keepdim=True)
    return scale_for(amax, FORMATS[operand.format][0], operand.power_of_2)


def _largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """() of x (any shape)."""
    if x.is_cuda or torch.compiler.is_compiling():
        # In two stages: Inductor can fuse the first, row by row, with the kernel that produces x (a
        # norm).
        return x.abs().amax(-1).amax()
    lowest, highest = x.aminmax()  # in one pass, without a copy
    return torch.maximum(lowest.abs(), highest.abs())


def scale_for(amax: torch.Tensor, largest: Any, power_of_2: bool = False) -> torch.Tensor:
    """The fp32 scales by which the largest magnitudes `amax` become a format's `largest` value, a
    number or one for each."""
    scale = (amax.double().clamp(min=EPS).reciprocal() * largest).float()
    if power_of_2:
        return torch.exp2(torch.floor(torch.log2(scale)))
    return scale


def _in_tiles(x: torch.Tensor, operand: Operand, dim: int) -> torch.Tensor:
    """x (any shape) as (tiles, rows of a tile, tiles, columns of a tile)."""
    is_last = dim % x.ndim == x.ndim - 1
    rows, columns = operand.tile if is_last else operand.tile[::-1]
    return x.reshape(-1, x.shape[-1]).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _tile_scale(magnitude: torch.Tensor, operand: Operand) -> torch.Tensor:
    """The scale of each tile of _in_tiles(); of E2M1 as NVFP4 has it: an E4M3 number times one of
    the tensor."""
    amax = magnitude.amax((1, 3), keepdim=True)
    largest = FORMATS[operand.format][0]
    if operand.scaling == "block":
        # E8M0 holds 2^-127 .. 2^127
        if operand.saturates:  # OCP Microscaling specification 1.0, section 6.3
            exponent = torch.floor(torch.log2(amax.double())) - math.floor(math.log2(largest))
        else:  # rounded so that nothing saturates (torchao's RCEIL mode)
            exponent = torch.ceil(torch.log2(amax.double() / largest))
        return torch.exp2(-torch.where(amax > 0, exponent, -127).clamp(-127, 127)).float()
    if operand.format == E2M1:
        whole = scale_for(amax.amax() / largest, FORMATS[E4M3][0])
        tile = _round(amax / largest * whole, E4M3).clamp_(min=LEAST_E4M3)  # no scale is 0
        return whole / tile
    return scale_for(amax, largest)


# ---------------------------------------------------------------------------------------- rounding


def fake_quantise(
    x: torch.Tensor,
    operand: Operand,
    dim: int = -1,
    noise: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x (any shape) quantised and dequantised, in `dtype`: the values that the matmul multiplies;
    `dim` as in scale_of().

    noise: for stochastic rounding, values from 0 to 1 (exclusive) of x's shape; without it x is
    rounded to nearest."""
    if operand.format is None:
        return x.to(dtype)
    if noise is None and _pays_in_blocks(x, operand):
        return _in_blocks(x, operand, dim, dtype, is_dequantised=True)
    values, scale = _rounded(x, operand, dim, noise)
    return values.mul_(scale.reciprocal()).reshape(x.shape).to(dtype)


def quantise_whole(x: torch.Tensor, operand: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """x (any shape), which has one scale: its values in the operand's format, held in BF16, and the
    inverse () of the scale. Their product in fp32 is fake_quantise(x, operand)."""
    scale = scale_of(x, operand)
    if _pays_in_blocks(x, operand):
        values = _in_blocks(x, operand, -1, torch.bfloat16, is_dequantised=False, scale=scale)
    else:
        values = _rounded(x, operand, scale=scale)[0].bfloat16()
    return values, scale.reciprocal()


def _rounded(
    x: torch.Tensor,
    operand: Operand,
    dim: int = -1,
    noise: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of x in the operand's format, held in fp32, and their scale, which broadcasts to
    them; tiles as _in_tiles() lays them."""
    assert operand.format is not None
    is_copy = x.dtype != torch.float32  # which may be overwritten
    x32 = x.float()
    # one scale a tile: of each value torch 2.11 does not compile on a CPU
    if operand.tile != (1, 1):
        x32 = _in_tiles(x32, operand, dim)
        noise = None if noise is None else _in_tiles(noise, operand, dim)
        scale = _tile_scale(x32.detach().abs(), operand)
    elif scale is None:
        scale = scale_of(x, operand, dim)
    scaled = x32.mul_(scale) if is_copy else x32 * scale
    return _round(scaled, operand.format, noise), scale


# Values of a block, whose fp32 copies stay in a CPU's cache from one operation to the next.
BLOCK = 2**18


def _pays_in_blocks(x: torch.Tensor, operand: Operand) -> bool:
    """Whether x is rounded faster block by block: a matrix on a CPU, larger than one block, not
    compiled into one loop. Not with a scale of its tiles' scales (E2M1)."""
    if torch.compiler.is_compiling() or x.is_cuda or x.ndim != 2 or operand.format == E2M1:
        return False
    return x.numel() > BLOCK


def _in_blocks(
    x: torch.Tensor,
    operand: Operand,
    dim: int,
    dtype: torch.dtype,
    is_dequantised: bool,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """_rounded() of x (M, N) by blocks of whole rows, in `dtype`, dequantised or not; the same
    bits."""
    height = max(128, BLOCK // x.shape[1] // 128 * 128)  # 128 rows: those of the largest tile
    has_scale_in_block = operand.tile != (1, 1) or (operand.scaling == "row" and dim % 2 == 1)
    if scale is None and not has_scale_in_block:
        scale = scale_of(x, operand, dim)
    result = x.new_empty(x.shape, dtype=dtype)
    for block, rows in zip(result.split(height), x.split(height), strict=True):
        values, scale_here = _rounded(rows, operand, dim, scale=scale)
        if is_dequantised:
            values.mul_(scale_here.reciprocal())
        block.copy_(values.view(block.shape))
    return result


def _round(x: torch.Tensor, format: Format, noise: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 x, overwritten: saturated, rounded to the nearest value of `format`, ties to even; NaN
    stays.

    Equal in every value to x.clamp(-largest, largest).to(format).float(), which a CPU computes one
    by one, but for the sign of zero: -0 and what underflows from below become +0. With `noise` each
    value goes down or up: up where its noise is below its share of the way."""
    largest, lowest, eps = FORMATS[format]
    x.clamp_(-largest, largest)
    # of two, at or below |x|
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=lowest)
    if noise is not None:
        step = power.mul_(eps)
        x.div_(step)
        down = x.floor()
        return down.add_(noise < x - down).mul_(step)
    # fp32 keeps 23 bits behind the leading one: of the sum with 1.5 * 2^23 of the format's steps,
    # none below a step.
    steps = 1.5 * 2**23 * eps
    return x.add_(power, alpha=steps).sub_(power, alpha=steps)


def cast(x: torch.Tensor, scale: torch.Tensor, format: Any) -> torch.Tensor:
    """x * scale in `format`, one of torch's own, saturating, rounded to nearest even."""
    largest = FORMATS[format][0]  # torch before 2.12 does not saturate by itself
    return (x.float() * scale).clamp(-largest, largest).to(format)


# ------------------------------------------------------------------------------ noise and rotation

# SplitMix64 (Steele et al. 2014), as signed 64-bit numbers.
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
    z = z ^ _shifted(z, 31)
    return ((z >> 40) & 0xFFFFFF).float() * 2.0**-24


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 z shifted to the right, zeros coming in from the left; torch's >> keeps the sign."""
    lower_bits = (1 << (64 - bits)) - 1
    return (z >> bits) & lower_bits


def noise_in_blocks(n_rows: int, n_columns: int, position: int, salt: int) -> np.ndarray:
    """noise_at() (n_rows, n_columns) on a CPU, block by block: numpy shifts unsigned numbers, and a
    block stays in the cache."""
    gamma, factors = _unsigned(GOLDEN_GAMMA), (_unsigned(FIRST_FACTOR), _unsigned(SECOND_FACTOR))
    numbers_of_rows = (np.arange(n_rows, dtype=np.uint64) + _unsigned(position)) * np.uint64(
        n_columns
    )
    of_rows = (numbers_of_rows * gamma + _unsigned(salt))[:, None]
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
        z ^= np.right_shift(z, np.uint64(31), out=shifted)
        z >>= np.uint64(40)
        # signed: a CPU converts those to floating point in one instruction
        np.multiply(z.view(np.int64), np.float32(2.0**-24), out=block, casting="unsafe")
    return noise


def _unsigned(number: int) -> np.uint64:
    return np.uint64(number % 2**64)


ROTATED_ROWS = 16
SIGNS = 0x5A39  # fixed random signs, a bit each


def _hadamard_value(row: int, column: int) -> float:
    """Of Hadamard's matrix (Sylvester's construction), orthogonal, with random signs."""
    sign_bit = (SIGNS >> column) & 1
    return (-1) ** ((row & column).bit_count() + sign_bit) / math.sqrt(ROTATED_ROWS)


HADAMARD = [
    [_hadamard_value(row, column) for column in range(ROTATED_ROWS)] for row in range(ROTATED_ROWS)
]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x (M, N), every 16 rows multiplied by HADAMARD, which leaves products and spreads outliers;
    fp32."""
    blocks = x.float().unflatten(0, (-1, ROTATED_ROWS))
    return (torch.tensor(HADAMARD, device=x.device) @ blocks).flatten(0, 1)
