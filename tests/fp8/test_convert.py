"""Whole models converted to a recipe: they train near BF16, in BF16 they are the plain model, and
their checkpoints are plain."""

import pytest
import torch

from fp8.precision import in_bf16
from tests.helpers.fp8_models import KERNELS, NATIVE, build, tokens

LABELS = NATIVE + KERNELS
WIDE = {"head_size": 64, "n_kv_head": 1}  # 128 channels of attention in a width of 64


@pytest.fixture(autouse=True)
def no_float8_matmul(monkeypatch: pytest.MonkeyPatch):
    """On a CPU recipes are emulated, always."""

    def fail(*_: object, **__: object):
        pytest.fail("torch._scaled_mm was called on a CPU")

    monkeypatch.setattr(torch, "_scaled_mm", fail)


@pytest.mark.parametrize("label", LABELS)
def test_names_dtypes_and_weights_are_those_of_the_plain_model(label: str):
    (plain, _), (model, _) = build(), build(label, head=True)
    expected, state = plain.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name
    assert model.head.weight is model.wte.weight, "tied"
    assert model.counts() == plain.counts()


@pytest.mark.parametrize("label", LABELS)
def test_every_linear_gets_the_recipe(label: str):
    _, layers = build(label, head=True)
    expected = (label.removesuffix("+kernels"), label in KERNELS)
    assert [(layer.recipe, layer.kernels) for layer in layers] == 9 * [expected]


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["", "wide heads"])
@pytest.mark.parametrize("label", LABELS)
def test_the_loss_is_near_that_of_bf16_and_not_equal(label: str, sizes: dict[str, int]):
    """Equal would be training in BF16 under an FP8 name."""
    (plain, _), (model, _) = build(**sizes), build(label, head=not sizes, **sizes)
    bf16, loss = plain(*tokens()).sum(), model(*tokens()).sum()
    assert 0 < abs(bf16 - loss) / bf16 < 2.5e-3


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["", "wide heads"])
@pytest.mark.parametrize("label", LABELS)
def test_every_weight_has_a_finite_gradient_in_fp32(label: str, sizes: dict[str, int]):
    model, _ = build(label, head=not sizes, **sizes)
    model(*tokens()).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad.dtype == torch.float32, name
        assert weight.grad.isfinite().all() and weight.grad.any(), name


def test_heads_wider_than_their_share_are_converted_whole():
    _, layers = build("tensorwise", **WIDE)
    shapes = [layer.shape for layer in layers if "attn" in layer.name]
    assert shapes == 2 * [(64, 256), (128, 64)]
    assert [layer.name for layer in layers if not layer.recipe] == ["head"]


@pytest.mark.parametrize("label", LABELS)
def test_in_bf16_it_is_the_plain_model_even_after_an_error(label: str):
    (plain, _), (model, _), (x, y) = build(), build(label, head=True), tokens()
    losses = model(x, y)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="inside"), in_bf16(model):
            assert torch.equal(model(x, y), plain(x, y))
            raise RuntimeError("inside")
        # with gradients our kernels compute the loss in one piece
        assert torch.allclose(model(x, y), losses, rtol=1e-5)
