"""Rounding to FP8 and FP4: the reference numerics.

An operand is multiplied by its scale and rounded to its format, saturating; the matmul's result is
divided by the scales. Every other implementation is held against what this file computes."""

import math
from typing import Any

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
    by one, but for the sign of zero: -0 and what underflows from below become +0. With `noise`,
    from 0 to 1 (exclusive), each value goes down or up: up where its noise is below its share of
    the way."""
    largest, lowest, eps = FORMATS[format]
    x.clamp_(-largest, largest)
    # of two, at or below |x|
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=lowest)
    if noise is not None:
        step = power.mul_(eps)
        x.div_(step)
        down = x.floor()
        # 1 where the noise is below the share of the way up, else 0, not -0. No comparison: a CPU
        # takes four times as long for one and for adding what it says.
        is_up = x.sub_(down).sub_(noise).ceil_().abs_()
        return down.add_(is_up).mul_(step)
    # fp32 keeps 23 bits behind the leading one: of the sum with 1.5 * 2^23 of the format's steps,
    # none below a step.
    steps = 1.5 * 2**23 * eps
    return x.add_(power, alpha=steps).sub_(power, alpha=steps)


def cast(x: torch.Tensor, scale: torch.Tensor, format: Any) -> torch.Tensor:
    """x * scale in `format`, one of torch's own, saturating, rounded to nearest even."""
    largest = FORMATS[format][0]  # torch before 2.12 does not saturate by itself
    return (x.float() * scale).clamp(-largest, largest).to(format)


# --------------------------------------------------------------------------------------- rotation

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
