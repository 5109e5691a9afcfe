"""Precision, the one object between FP8 and a training loop: an order that is broken is told of,
and an evaluation in BF16 leaves the model as it was."""

import pytest
import torch
from torch._dynamo.utils import counters

from fp8.kernels import KernelLinear
from fp8.precision import Precision
from runtime.config import Config
from runtime.parallel import build
from runtime.training_step import end_unjudged_step, forward_backward
from tests.conftest import ALONE, changed
from tests.helpers.fp8_models import tokens

LABELS = ["off", "fp8.recipe=tensorwise", "fp8.recipe=tensorwise fp8.kernels=true fp8.head=true"]


def built_model(tiny: Config, words):
    """A run's model, initialised, with its precision."""
    built = build(changed(tiny, words if "=" in words else f"fp8.recipe={words}"), ALONE)
    built.model.init_weights(0, built.assign)
    built.precision.after_update()
    built.precision.before_step(built.loss_scale)
    return built


@pytest.mark.parametrize("words", ["off", "fp8.recipe=tensorwise fp8.kernels=true"])
def test_a_step_after_weights_that_were_not_announced_is_an_error(tiny: Config, words: str):
    built = built_model(tiny, words)
    with torch.no_grad():
        built.model.layers[0].attn.qkv.weight.mul_(2)
    with pytest.raises(AssertionError, match="after_update"):
        built.precision.before_step(built.loss_scale)
    built.precision.after_update()
    built.precision.before_step(built.loss_scale)


def test_a_step_after_gradients_that_the_optimizer_freed_is_an_error(tiny: Config):
    built = built_model(tiny, "off")
    built.optimizer.zero_grad()
    with pytest.raises(AssertionError, match="zero_gradients"):
        built.precision.before_step(built.loss_scale)


@pytest.mark.parametrize("words", LABELS)
def test_in_bf16_leaves_names_modules_and_weights_as_they_were(tiny: Config, words: str):
    built = built_model(tiny, words)
    modules = dict(built.model.named_modules())
    parameters = {name: p.data_ptr() for name, p in built.model.named_parameters()}
    with built.precision.in_bf16(), torch.no_grad():
        assert set(dict(built.model.named_modules())) == set(modules)
        built.model(*tokens())
    assert dict(built.model.named_modules()) == modules
    assert {name: p.data_ptr() for name, p in built.model.named_parameters()} == parameters


def test_in_bf16_does_not_compile_the_step_again(tiny: Config):
    torch._dynamo.reset()
    counters.clear()
    built = built_model(tiny, LABELS[2])
    built.model.compile(dynamic=False, fullgraph=True, backend="eager")
    x, y = tokens()
    with torch._dynamo.config.patch(error_on_recompile=True):
        first_loss = forward_backward(built.model, x, y, built.loss_scale)
        with built.precision.in_bf16(), torch.no_grad():
            in_bf16 = built.model(x, y).sum()
        built.precision.zero_gradients()
        later_loss = forward_backward(built.model, x, y, built.loss_scale)
    assert torch.equal(first_loss, later_loss) and not torch.equal(first_loss, in_bf16)


def test_after_an_unjudged_step_copies_are_of_the_new_weights(tiny: Config):
    built = built_model(tiny, "fp8.recipe=tensorwise_gw_hp fp8.kernels=true")
    weight = built.model.layers[0].attn.qkv.weight.detach().clone()
    forward_backward(built.model, *tokens(), built.loss_scale)
    end_unjudged_step(built.model, built.optimizer, built.precision, 1.0)
    linears = [m for m in built.model.modules() if isinstance(m, KernelLinear)]
    assert not torch.equal(built.model.layers[0].attn.qkv.weight, weight)
    assert all(linear.version == linear.weight._version for linear in linears)
    assert all(p.grad is None or not p.grad.any() for p in built.model.parameters())


def test_of_a_model_in_bf16_nothing_is_stored():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    precision = Precision(model)
    assert precision.state() == {} and precision.saturated() == []
    assert precision.after_passes() == 0
