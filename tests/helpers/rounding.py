"""What a CPU rounds to float8 otherwise than by the formula, and matrices to try it on."""

from collections.abc import Iterator

import torch

from fp8.cpu_rounding import BITS, can_round
from fp8.recipes import RECIPES

ROUNDED_BY_BITS = {
    f"{recipe.name}-{operand.format}": operand
    for recipe in RECIPES.values()
    for operand in recipe.operands
    if can_round(torch.zeros(32, 32), operand)
}
BLOCK_OPERANDS = {
    name: operand for name, operand in ROUNDED_BY_BITS.items() if operand.scaling == "block"
}


def matrices(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """(96, 64) of all sizes, with zeros of both signs, ties, and largest magnitudes at the
    mantissa at which a scale changes."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(96, 64, generator=generator)
    normal[:32, :32] = 0.0
    normal[5] = -0.0
    yield normal.to(dtype)
    yield (normal * torch.logspace(-4, 4, 96)[:, None]).to(dtype)
    yield (normal * torch.logspace(-10, -7, 64)).to(dtype)
    yield (torch.randint(-512, 512, (96, 64), generator=generator) / 16).to(dtype)
    step = torch.finfo(dtype).eps
    for scale in (1.0, 2.0**20, 2.0**40):
        edge = normal.clamp(-1, 1)
        edge[:, 32:] = 2.0 ** -torch.linspace(9, 35, 32)  # some of them below a normal value
        edge[::2, 3] = 1.75
        edge[1::2, 3] = 1.75 * (1 + step)
        yield (edge * scale).to(dtype)


def with_tiny_rows(dtype: torch.dtype) -> torch.Tensor:
    """(96, 64), whose rows have largest magnitudes from 1 down to 2^-95; gradients of a context's
    first query are that small."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 64, generator=generator).clamp(-1, 1)
    x[:, ::32] = 1.0
    return (x * 2.0 ** -torch.arange(96.0)[:, None]).to(dtype)


def assert_same_bits(computed: torch.Tensor, expected: torch.Tensor) -> None:
    ints = BITS[expected.dtype].ints
    assert torch.equal(computed.view(ints), expected.view(ints))
