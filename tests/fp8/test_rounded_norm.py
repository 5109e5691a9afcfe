"""fp8/rounded_norm.py: norms whose weights are rounded with the Linears behind them."""

import math

import pytest
import torch

from fp8.convert import convert
from fp8.precision import in_bf16
from fp8.recipes import RECIPES, FP8Config
from fp8.rounded_norm import RoundedNorm
from model import GPT, GPTConfig, RMSNorm

SIZE = GPTConfig(n_layer=2, n_head=2, n_embd=64, n_ffn=96, n_ctx=32, vocab_size=257)
OPERAND = RECIPES["mxfp8_norms"].norm


def ocp_mxfp8(block: list[float]) -> list[float]:
    """A block of 32 by OCP's Microscaling specification 1.0, section 6.3, in Python's numbers: the
    scale is 2 to the exponent of the largest magnitude less E4M3's largest exponent; to nearest,
    ties to even; what lies beyond 448 becomes 448."""
    scale = 2.0 ** (math.frexp(max(map(abs, block)))[1] - 1 - 8)
    rounded = []
    for value in block:
        exponent = max(math.frexp(value / scale)[1] - 1, -6)
        step = 2.0 ** (exponent - 3)
        magnitude = min(abs(round(value / scale / step) * step), 448.0)  # round(): ties to even
        rounded.append(math.copysign(magnitude * scale, value))
    return rounded


def rounded_norm(weight: torch.Tensor) -> RoundedNorm:
    norm = RMSNorm(len(weight), 1e-5)
    norm.weight.data.copy_(weight)
    assert OPERAND
    return RoundedNorm(norm, OPERAND)


def normalised(x: torch.Tensor) -> torch.Tensor:
    """Rows x (M, n) by RMSNorm with a weight of 1."""
    norm = RMSNorm(x.shape[-1], 1e-5)
    norm.weight.data.fill_(1.0)
    return norm(x)


@pytest.mark.parametrize("center", [1.0, 0.93, 1.9, 3e-3])
def test_a_weight_is_ocps_mxfp8(center: float) -> None:
    spread = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 0.05 + 1
    weight = center * spread
    blocks = [ocp_mxfp8(block) for block in weight.view(2, 32).tolist()]
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    expected = torch.tensor(blocks).view(64) * normalised(x)
    assert torch.equal(rounded_norm(weight)(x), expected)


def test_weights_just_below_a_power_of_two_become_one_value() -> None:
    """The published fault: none of a block below 1 is above 0.875, the largest magnitude too."""
    weight = torch.linspace(0.9, 0.999, 32)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rounded_norm(weight)(x), 0.875 * normalised(x))


def test_a_weight_of_zeros_stays() -> None:
    assert rounded_norm(torch.zeros(32))(torch.ones(2, 32)).tolist() == [[0.0] * 32] * 2


def test_the_weights_gradient_is_that_of_the_rounded_one() -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    norm = rounded_norm(torch.full((32,), 0.93))
    g = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    norm(x).backward(g)
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad, (g * normalised(x)).sum(0))


def build(recipe: str) -> GPT:
    model = GPT(SIZE)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # as after some steps
            torch.nn.init.normal_(parameter, 1.0, 0.05, generator=generator)
    convert(model, FP8Config(recipe=recipe))
    return model


def test_the_norms_before_converted_linears_are_rounded() -> None:
    modules = build("mxfp8_norms").named_modules()
    rounded = [name for name, module in modules if isinstance(module, RoundedNorm)]
    assert rounded == ["layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2"]


def test_a_skipped_linears_norm_is_not() -> None:
    model = GPT(SIZE)
    convert(model, FP8Config(recipe="mxfp8_norms", skip=("mlp.gate_up",)))
    assert isinstance(model.layers[0].norm1, RoundedNorm)
    assert type(model.layers[0].norm2) is RMSNorm


def test_weights_keep_their_names() -> None:
    assert list(build("mxfp8_norms").state_dict()) == list(GPT(SIZE).state_dict())


def test_it_is_mxfp8_but_for_the_norms() -> None:
    models = {recipe: build(recipe) for recipe in ("mxfp8", "mxfp8_norms")}
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    before = {recipe: model(tokens) for recipe, model in models.items()}
    assert not torch.equal(before["mxfp8"], before["mxfp8_norms"])
    for model in models.values():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0)  # which MXFP8 holds
    assert torch.equal(models["mxfp8"](tokens), models["mxfp8_norms"](tokens))


def test_in_bf16_no_weight_is_rounded_and_then_they_are_again() -> None:
    plain, model = build("off"), build("mxfp8_norms")
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    before = model(tokens)
    with in_bf16(model), in_bf16(plain):
        assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(model(tokens), before)


def test_in_bf16_within_in_bf16_ends_with_the_outer_one() -> None:
    model = build("mxfp8_norms")
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    with in_bf16(model):
        before = model(tokens)
        with in_bf16(model):
            pass
        assert torch.equal(model(tokens), before)
