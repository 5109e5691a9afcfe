"""Round matrices to float8 on a CPU where scales are powers of two: the values of
rounding.fake_quantise(), bit for bit, in less time.

With such a scale the float8 grid at a value x is a grid of x itself: its step is `eps` times the
power of two at or below |x|, or `eps` times the format's least normal value over the scale where
|x| is below that. So nothing is multiplied by a scale, divided by it or clamped, and BF16 values
stay in BF16: of the sum of x and 1.5 * 2^7 steps (2^23 in fp32) no bit is below a step. Magnitudes,
powers of two and least normal values are read from the bits as integers, which a CPU compares four
times as fast as BF16 values. Both layouts come from one pass: between two matmuls, whatever is not
in a CPU's cache costs more than the arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8.recipes import E2M1, E4M3, E5M2, Format, Operand
from fp8.rounding import EPS, FORMATS, scale_for

# Values of a block, found by trials: more leave the cache (a megabyte of BF16 here), fewer cost
# calls, 29 of torch's for two layouts of each. lib.machine.keep_freed_memory() keeps blocks of this
# size from page faults.
BLOCK = 2**19
BIAS = 127  # added to the exponents of BF16 and fp32
# Exponents of the largest magnitudes that are rounded here, apart from 0. Within, scale_for()
# clamps none of them, no step is subnormal and no sum overflows; outside are NaN, infinity and what
# no training has.
LEAST, GREATEST = math.ceil(math.log2(EPS)), 64
# LEAST of "block" scaling, which does not use scale_for(): E5M2's step there is 2^-126. Training
# needs it: a context's first query has one key, so its gradient is a rounding error, 2^-44 to 2^-40
# in a step of 4,096 tokens.
LEAST_OF_BLOCK = -95


@dataclass(frozen=True)
class Bits:
    """How the bits of a number with 8 bits of exponent are read as an integer."""

    ints: torch.dtype
    mantissa: int  # stored bits

    @property
    def exponent_mask(self) -> int:
        return 0xFF << self.mantissa

    def power(self, exponent: int) -> int:
        """Those of 2^exponent."""
        return (BIAS + exponent) << self.mantissa


BITS = {torch.bfloat16: Bits(torch.int16, 7), torch.float32: Bits(torch.int32, 23)}


class Constants:
    """What rounding to a float8 format needs of numbers that have these bits.

    Integers are tensors (): a Python number would be converted in every call, which takes 4 us, a
    fifth of what an operation takes on a block."""

    def __init__(self, format: Format, bits: Bits):
        self.bits = bits
        self.largest, self.lowest, eps = FORMATS[format]
        self.steps = 1.5 * 2**bits.mantissa * eps  # of the format, times a value's power of two
        self.exponent_mask = _number(bits.exponent_mask, bits)
        # The scale is the largest power of two by which nothing exceeds `largest`: the quotient of
        # both rounded down to powers of two, half of that where the magnitude has the larger
        # mantissa.
        half_mantissa, exponent = math.frexp(self.largest)
        leading_bit = 1 << bits.mantissa
        # added to a magnitude, goes to the next power of two where its mantissa is the larger one
        self.carry = _number(2 * leading_bit - 1 - int(2 * half_mantissa * leading_bit), bits)
        # from that power of two down to the least normal value over the scale
        octaves = exponent - 1 - int(math.log2(self.lowest))
        self.to_least_normal = _number(octaves << bits.mantissa, bits)


def _number(value: int, bits: Bits) -> torch.Tensor:
    return torch.tensor(value, dtype=bits.ints, device="cpu")


CONSTANTS: dict[tuple[Format | None, torch.dtype], Constants] = {
    (format, dtype): Constants(format, bits)
    for format in (E4M3, E5M2)
    for dtype, bits in BITS.items()
}


def can_round(x: torch.Tensor, operand: Operand) -> bool:
    """Whether round_by_bits() may round x: a matrix on a CPU, not empty, with scales that are
    powers of two and found from largest magnitudes."""
    if x.device.type != "cpu" or not x.numel():
        return False
    if x.dtype not in BITS or x.ndim != 2 or operand.format in (None, E2M1) or operand.saturates:
        return False
    return operand.scaling == "block" or (operand.power_of_2 and operand.tile == (1, 1))


def round_by_bits(x: torch.Tensor, operand: Operand, *dims: int) -> list[torch.Tensor] | None:
    """fake_quantise(x, operand, dim) in x's dtype for each of `dims`, of x (M, N) for which
    can_round(). None unless the largest magnitudes are_ordinary()."""
    bits = BITS[x.dtype]
    rows_of_tile = operand.tile[1]
    height = max(1, BLOCK // x.shape[1] // rows_of_tile) * rows_of_tile
    blocks = _blocks(x, height)
    results = [torch.empty(x.shape, dtype=x.dtype) for _ in dims]
    constants = CONSTANTS[operand.format, x.dtype]
    layouts = [
        _Layout(operand, dim % 2, constants, _blocks(result, height))
        for dim, result in zip(dims, results, strict=True)
    ]
    within_rows = [layout for layout in layouts if layout.is_scaled_within_rows]
    mask = constants.exponent_mask
    for i, block in enumerate(blocks):
        magnitude = block.abs()
        for layout in layouts:
            layout.amaxes.append(layout.amax(magnitude))
        if not within_rows:
            continue
        power_bits = magnitude.view(bits.ints).bitwise_and_(mask)
        for layout in within_rows:
            is_last = layout is within_rows[-1]
            layout.round(i, block, power_bits, layout.amaxes[i], overwrites=is_last)
    for layout in layouts:
        if not layout.is_scaled_within_rows:
            layout.amaxes = [torch.stack(layout.amaxes).amax(0)]
            for i, block in enumerate(blocks):
                power_bits = torch.bitwise_and(block.view(bits.ints), mask)
                layout.round(i, block, power_bits, layout.amaxes[0], overwrites=True)
    if not all(are_ordinary(layout.all_amaxes(), operand, bits) for layout in layouts):
        return None
    return results


def _blocks(x: torch.Tensor, height: int) -> Sequence[torch.Tensor]:
    """Of so many rows, the last with fewer; views."""
    return [x] if len(x) <= height else x.split(height)  # no call where there is one block


class _Layout:
    """A matrix rounded for a matmul that sums over its dimension `dim`."""

    def __init__(
        self,
        operand: Operand,
        dim: int,
        constants: Constants,
        results: Sequence[torch.Tensor],
    ):
        self.operand = operand
        self.dim = dim
        self.bits = constants.bits
        self.constants = constants
        self.results = results  # blocks of rows, still empty
        self.amaxes: list[torch.Tensor] = []  # of the blocks, as bits
        # Whether a block of rows has all that its scales depend on.
        self.is_scaled_within_rows = operand.scaling == "block" or (
            operand.scaling == "row" and dim == 1
        )

    def tiles(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """A view of rows, and its dimensions along which values share a scale."""
        if self.operand.scaling == "tensor":
            return x, (0, 1)
        if self.operand.scaling == "row":
            return x, (self.dim,)
        return x.unflatten(self.dim, (-1, self.operand.tile[1])), (self.dim + 1,)

    def amax(self, magnitude: torch.Tensor) -> torch.Tensor:
        """The bits of the largest of magnitudes that share a scale, along dimensions of size 1."""
        tiles, shared = self.tiles(magnitude)
        if shared != (2,):
            return tiles.view(self.bits.ints).amax(shared, keepdim=True)
        # along a few neighbours torch reduces fp32 four times as fast
        amax = tiles.float().amax(shared, keepdim=True)
        return amax.to(magnitude.dtype).view(self.bits.ints)

    def all_amaxes(self) -> torch.Tensor:
        """Of all blocks, as bits."""
        return torch.cat(self.amaxes) if len(self.amaxes) > 1 else self.amaxes[0]

    def round(
        self,
        i: int,
        x: torch.Tensor,
        power_bits: torch.Tensor,
        amax: torch.Tensor,
        overwrites: bool,
    ) -> None:
        """Round block i, x, to nearest, ties to even. power_bits: of the powers of two at or below
        its magnitudes; `overwrites` them where nobody reads them again, since that memory is in a
        cache. Nothing saturates, by the scale."""
        least = least_normal(self.operand, self.constants, amax)
        tiles, _ = self.tiles(power_bits)
        powers = torch.maximum(tiles, least, out=tiles if overwrites else None)
        power = powers.view(x.dtype).view(x.shape)
        torch.add(x, power, alpha=self.constants.steps, out=self.results[i])
        self.results[i].sub_(power, alpha=self.constants.steps)


def are_ordinary(amax: torch.Tensor, operand: Operand, bits: Bits) -> bool:
    """Whether all largest magnitudes (any shape), as bits, are 0 or from 2^LEAST, of blocks
    2^LEAST_OF_BLOCK, to 2^GREATEST; no NaN is, of either sign."""
    bound = bits.power(LEAST_OF_BLOCK if operand.scaling == "block" else LEAST)
    least, greatest = map(int, amax.aminmax())
    if least == 0:
        least = int(amax.masked_fill(amax == 0, bound).amin())
    return bound <= least and greatest < bits.power(GREATEST)


def least_normal(operand: Operand, constants: Constants, amax: torch.Tensor) -> torch.Tensor:
    """The format's least normal value over the scale, from the largest magnitude (any shape); both
    as bits. Where all values are 0, which every step leaves as they are, it may be any number."""
    if operand.scaling != "block" and amax.dtype == torch.int32:
        # its logarithm in fp32 rounds a magnitude just above a power of two's multiple down
        scale = scale_for(amax.view(torch.float32), constants.largest, power_of_2=True)
        return scale.reciprocal_().mul_(constants.lowest).view(torch.int32)
    power = (amax + constants.carry).bitwise_and_(constants.exponent_mask)
    return power.sub_(constants.to_least_normal)
