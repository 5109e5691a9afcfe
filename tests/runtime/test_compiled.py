"""torch.compile in one process, by Inductor: the whole model with recomputed blocks and gradients
that are added up within their matmuls. On two ranks, by blocks: runtime/test_two_ranks.py; the FP8
Linears: fp8/test_compiled.py."""

from pathlib import Path

import pytest
import torch

from fp8.copies import zero_gradients
from model import GPT
from runtime.config import Config
from tests.conftest import changed, tiny_config
from tests.helpers.fp8_models import tokens
from tests.runtime.test_parallel import build

MICRO_BATCHES = 2
Gradients = dict[str, torch.Tensor]


def one_block(config: Config, words: str) -> Config:
    """A model with one block, whose step has two micro-batches."""
    per_step = MICRO_BATCHES * config.data.micro_batch * config.model.n_ctx
    return changed(config, f"model.n_layer=1 data.tokens_per_step={per_step} {words}")


def gradients_of(model: GPT, *seeds: int) -> Gradients:
    """Gradients of the micro-batches of these seeds, added up from none."""
    zero_gradients(model)
    for seed in seeds:
        model(*tokens(seed)).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.fixture(scope="module")
def config(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(data_dir, tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def compiled(config: Config) -> GPT:
    """What every test here looks at, since Inductor's code takes most of their time."""
    return build(one_block(config, "parallel.recompute=true parallel.compile=model")).model


@pytest.mark.parametrize("how, is_whole", [("model", True), ("block", False)])
def test_the_whole_model_or_each_block_is_one_compiled_piece(
    config: Config, how: str, is_whole: bool
):
    model = build(changed(config, f"parallel.compile={how}")).model
    compiled = [module._compiled_call_impl is not None for module in (model, *model.layers)]
    assert compiled == [is_whole, not is_whole, not is_whole]


def test_compiled_it_differs_from_eager_by_rounding_alone(config: Config, compiled: GPT):
    """Inductor fuses operations between which eager rounds to BF16."""
    eager = build(one_block(config, "")).model
    loss, expected = eager(*tokens()).sum(), gradients_of(eager, 0)
    assert compiled(*tokens()).sum().item() == pytest.approx(loss.item(), rel=1e-3)
    for name, gradient in gradients_of(compiled, 0).items():
        error = torch.linalg.norm(gradient - expected[name])
        assert error <= 0.02 * torch.linalg.norm(expected[name]), name


def test_compiled_gradients_of_micro_batches_add_up_in_place(compiled: GPT):
    """To the bits of their sum in fp32. Eager, against autograd: runtime/test_optim.py."""
    first, second = gradients_of(compiled, 0), gradients_of(compiled, 1)
    zero_gradients(compiled)
    lasting = {
        name: weight.grad.data_ptr()
        for name, weight in compiled.named_parameters()
        if weight.grad is not None
    }
    assert len(lasting) == 4, "the Linears of the block"
    for name, gradient in gradients_of(compiled, 0, 1).items():
        assert torch.equal(gradient, first[name] + second[name]), name
    for name, address in lasting.items():
        gradient = compiled.get_parameter(name).grad
        assert gradient.data_ptr() == address, f"{name}: its matmul no longer adds to it"
