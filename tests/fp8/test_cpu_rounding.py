"""fp8/cpu_rounding.py: to the same bits as fake_quantise(), whose formula it goes around."""

import pytest
import torch

from fp8 import cpu_rounding, linears
from fp8.cpu_rounding import can_round, round_by_bits
from fp8.linears import EmulatedLinear
from fp8.recipes import RECIPES, Operand
from fp8.rounding import fake_quantise
from model import Linear
from tests.helpers.rounding import (
    BLOCK_OPERANDS,
    ROUNDED_BY_BITS,
    assert_same_bits,
    matrices,
    with_tiny_rows,
)

ROUNDED = [name for name, recipe in RECIPES.items() if recipe.input in ROUNDED_BY_BITS.values()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
@pytest.mark.parametrize("block", [2**11, 3000, 2**18])
def test_each_layout_has_the_bits_of_fake_quantise(
    operand: Operand, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rounding, "BLOCK", block)
    for x in matrices(dtype):
        layouts = round_by_bits(x, operand, -1, 0)
        assert layouts is not None
        for dim, computed in zip((-1, 0), layouts, strict=True):
            assert_same_bits(computed, fake_quantise(x, operand, dim, dtype=dtype))


@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2.0**70])
def test_what_it_cannot_round_is_left_to_fake_quantise(operand: Operand, value: float) -> None:
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    x[3, 3] = value
    for dim in (-1, 0):
        assert round_by_bits(x, operand, dim) is None


@pytest.mark.parametrize("n_blocks", [2, 3])
def test_nan_in_the_last_block_is_left_to_fake_quantise(
    n_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rounding, "BLOCK", 32 * 64)
    x = torch.ones(32 * n_blocks, 64, dtype=torch.bfloat16)
    x[-1, 3] = torch.nan
    assert round_by_bits(x, RECIPES["mxfp8"].input, -1) is None


def test_blocks_too_small_for_a_normal_scale_are_left_to_fake_quantise() -> None:
    x = torch.full((32, 32), 2.0**-120, dtype=torch.bfloat16)
    assert round_by_bits(x, RECIPES["mxfp8"].input, -1) is None


@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
@pytest.mark.parametrize(
    "value, is_rounded",
    [
        (2.0**64, False),
        (2.0**64 - 2.0**56, True),  # BF16's next below
    ],
)
def test_largest_magnitudes_below_2_to_the_64_are_rounded(
    operand: Operand, value: float, is_rounded: bool
) -> None:
    x = torch.full((32, 32), value, dtype=torch.bfloat16)
    assert (round_by_bits(x, operand, -1, 0) is not None) == is_rounded


@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
def test_largest_magnitudes_are_rounded_down_to_the_bound_of_their_scaling(
    operand: Operand,
) -> None:
    bound = 2.0**-95 if operand.scaling == "block" else 2.0**-39
    x = torch.full((32, 32), bound, dtype=torch.bfloat16)
    assert round_by_bits(x, operand, -1, 0) is not None
    just_below = x * (1 - 2.0**-8)
    assert round_by_bits(just_below, operand, -1, 0) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operand", BLOCK_OPERANDS.values(), ids=BLOCK_OPERANDS)
def test_blocks_of_tiny_values_have_the_bits_of_fake_quantise(
    operand: Operand, dtype: torch.dtype
) -> None:
    x = with_tiny_rows(dtype)
    layouts = round_by_bits(x, operand, -1, 0)
    assert layouts is not None
    for dim, computed in zip((-1, 0), layouts, strict=True):
        assert_same_bits(computed, fake_quantise(x, operand, dim, dtype=dtype))


def test_zeros_do_not_hide_a_block_too_small_for_a_normal_scale() -> None:
    x = torch.zeros(32, 96, dtype=torch.bfloat16)
    x[:, 32:64] = 2.0**-120
    x[:, 64:] = 1.0
    assert round_by_bits(x, RECIPES["mxfp8"].input, -1) is None


@pytest.mark.parametrize("operand", ROUNDED_BY_BITS.values(), ids=ROUNDED_BY_BITS)
def test_a_matrix_of_zeros_is_rounded(operand: Operand) -> None:
    layouts = round_by_bits(torch.zeros(64, 64, dtype=torch.bfloat16), operand, -1, 0)
    assert layouts is not None
    for computed in layouts:
        assert_same_bits(computed, torch.zeros(64, 64, dtype=torch.bfloat16))


def test_a_transposed_matrix_is_rounded_as_its_copy() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16().t()
    for operand in ROUNDED_BY_BITS.values():
        layouts = round_by_bits(x, operand, -1)
        assert layouts is not None
        assert_same_bits(layouts[0], fake_quantise(x, operand, dtype=x.dtype))


def gradients(name: str, has_units: bool) -> list[torch.Tensor]:
    """Output, input gradient and weight gradient of an emulated Linear."""
    generator = torch.Generator().manual_seed(0)
    linear = EmulatedLinear(Linear(128, 256), RECIPES[name])
    linear.has_units = has_units
    linear.weight.data.copy_(torch.randn(256, 128, generator=generator) / 16)
    x = torch.randn(384, 128, generator=generator).bfloat16().requires_grad_()
    y = linear(x)
    y.backward(torch.randn(384, 256, generator=generator).bfloat16())
    assert x.grad is not None and linear.weight.grad is not None
    return [y.detach(), x.grad, linear.weight.grad]


@pytest.mark.parametrize("has_units", [True, False], ids=["units", "fp32"])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_linear_computes_what_it_does_without_this_file(
    name: str, has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = gradients(name, has_units)
    monkeypatch.setattr(linears, "can_round", lambda x, operand: False)
    for one_pass, by_formula in zip(computed, gradients(name, has_units), strict=True):
        assert torch.equal(one_pass, by_formula)


def test_the_forward_pass_rounds_for_the_backward_pass_only_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounded_dims = []

    def recorded(x: torch.Tensor, operand: Operand, *dims: int) -> list[torch.Tensor] | None:
        rounded_dims.append(dims)
        return round_by_bits(x, operand, *dims)

    monkeypatch.setattr(linears, "round_by_bits", recorded)
    linear = EmulatedLinear(Linear(64, 64), RECIPES["mxfp8"])
    linear.weight.data.fill_(1.0)
    x = torch.ones(32, 64, dtype=torch.bfloat16)
    linear(x)
    with torch.no_grad():
        linear(x)
    assert rounded_dims == [(-1, 0), (-1, 0), (-1,), (-1,)]


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_an_empty_matrix_is_left_to_fake_quantise(shape: tuple[int, int]) -> None:
    assert not can_round(torch.zeros(shape), RECIPES["mxfp8"].input)


def test_a_scale_by_ocps_rule_is_left_to_the_formula() -> None:
    operand = RECIPES["mxfp8_norms"].norm
    assert operand is not None
    assert not can_round(torch.ones(32, 32), operand)
