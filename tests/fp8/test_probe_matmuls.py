"""The signal-to-noise ratio of each matmul that the probe reports, against fp64 products of
operands rounded by numpy's own arithmetic."""

import math

import numpy as np
import pytest
import torch

from fp8.linears import EmulatedMatmul
from fp8.probe import gradient_sqnrs, kurtosis, output_sqnr
from fp8.recipes import RECIPES

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(values: np.ndarray, operand) -> np.ndarray:
    """fp64 values after float8 with one scale of the whole tensor, by torch's own cast."""
    scale = LARGEST[operand.format] / np.abs(values).max()
    scaled = torch.from_numpy(values * scale).float().to(operand.format).double().numpy()
    return scaled / scale


def decibels(exact: np.ndarray, noisy: np.ndarray) -> float:
    return 20 * math.log10(np.linalg.norm(exact) / np.linalg.norm(noisy - exact))


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (64, 48) with one large column, w (32, 48), g (64, 32)."""
    generator = torch.Generator().manual_seed(3)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((64, 48), (32, 48), (64, 32)))
    x[:, 5] *= 40
    return x, w, g


def in_numpy(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [tensor.double().numpy() for tensor in tensors]


def test_the_output_is_held_against_the_exact_product(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
):
    x, w, _ = operands
    recipe = RECIPES["tensorwise"]
    nx, nw = in_numpy(x, w)
    expected = decibels(nx @ nw.T, rounded(nx, recipe.input) @ rounded(nw, recipe.weight).T)
    assert output_sqnr(x, w, recipe).item() == pytest.approx(expected, abs=0.01)


def test_each_gradient_is_held_against_its_exact_product(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
):
    x, w, g = operands
    recipe = RECIPES["tensorwise"]
    nx, nw, ng = in_numpy(x, w, g)
    qx, qw, qg = rounded(nx, recipe.input), rounded(nw, recipe.weight), rounded(ng, recipe.grad)
    sqnr_of_input_grad, sqnr_of_weight_grad = gradient_sqnrs(x, w, g, recipe, torch.nn.Module())
    assert sqnr_of_input_grad.item() == pytest.approx(decibels(ng @ nw, qg @ qw), abs=0.01)
    assert sqnr_of_weight_grad.item() == pytest.approx(decibels(ng.T @ nx, qg.T @ qx), abs=0.01)


@pytest.mark.parametrize("name, matmul", [("tensorwise_gi_hp", 0), ("tensorwise_gw_hp", 1)])
def test_a_matmul_left_in_bf16_loses_far_less_than_in_fp8(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], name: str, matmul: int
):
    """24 dB are a factor of 16: BF16 keeps 8 bits, E4M3 4 and E5M2 3."""
    fp8 = gradient_sqnrs(*operands, RECIPES["tensorwise"], torch.nn.Module())
    in_bf16 = gradient_sqnrs(*(t.bfloat16() for t in operands), RECIPES[name], torch.nn.Module())
    assert in_bf16[matmul] > fp8[matmul] + 24
    assert in_bf16[1 - matmul] == pytest.approx(fp8[1 - matmul].item(), abs=1)


def test_an_output_left_in_bf16_loses_far_less_than_in_fp8(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
):
    x, w, g = (t.bfloat16() for t in operands)
    fp8, in_bf16 = RECIPES["tensorwise"], RECIPES["tensorwise_o_hp"]
    assert output_sqnr(x, w, in_bf16) > output_sqnr(x, w, fp8) + 24
    module = torch.nn.Module()
    gradients = [gradient_sqnrs(x, w, g, recipe, module) for recipe in (fp8, in_bf16)]
    assert [t.item() for t in gradients[0]] == [t.item() for t in gradients[1]]


def test_one_outlier_row_costs_the_others_more_with_one_scale_a_tensor():
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    w = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    x[0] *= 1e6  # beside it the other rows fall below E4M3's smallest values
    exact = (x @ w.t())[1:]
    ratios = {}
    for name in "tensorwise", "rowwise":
        product = EmulatedMatmul.apply(x, w, None, None, RECIPES[name], False)
        ratios[name] = decibels(*in_numpy(exact, product[1:]))
    assert ratios["rowwise"] > ratios["tensorwise"] + 10


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, -1.0, 1.0, -1.0], 1.0),
        ([0.0, 0.0, 0.0, 8.0], 4.0),
        ([0.0, 0.0, 0.0, 0.0], 0.0),
        ([1e-30, -1e-30], 1.0),  # whose fourth powers vanish in fp32
    ],
)
def test_kurtosis_of_magnitudes(values: list[float], expected: float):
    assert kurtosis(torch.tensor(values)).item() == pytest.approx(expected)


def test_kurtosis_of_a_normal_distribution_is_three():
    x = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    assert kurtosis(x).item() == pytest.approx(3, abs=0.02)
