"""runtime/training_step.py: the z-loss, beside the loss and never in it, and the gradient norms of
layers, the same on any number of ranks. Tested elsewhere: the z-loss in one kernel with the head's
matmul (tests/fp8/test_head_loss.py), and how the guard judges the norms
(tests/runtime/test_guard.py)."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from model import NO_TARGET
from runtime import parallel
from runtime.checkpoint import latest, read_manifest
from runtime.config import Config
from runtime.data import Data
from runtime.tokenizer import load_tokenizer
from runtime.training_step import LayerGradients, forward_backward
from tests.conftest import ALONE, changed
from tests.helpers.faults import Run, back_to, record, rows, summary
from tests.helpers.fp8_models import build, tokens

WEIGHT = 0.01


def masked_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch of which every third token has no target."""
    x, y = tokens()
    y = y.clone()
    y.view(-1)[::3] = NO_TARGET
    return x, y


@pytest.mark.parametrize("chunk", [None, 16])
def test_gradients_are_those_of_the_sum_of_both_in_fp64(chunk: int | None):
    """By autograd of the definition, from the logits of the same model without the option."""
    model, reference = (build(dtype=torch.float64, loss_chunk=n)[0].double() for n in (chunk, None))
    x, y = masked_tokens()
    sums = forward_backward(model, x, y, 0.5, WEIGHT)
    logits = reference(x).view(-1, reference.config.vocab_padded)
    cross_entropy = F.cross_entropy(logits, y.view(-1), reduction="sum")
    has_target = y.view(-1) != NO_TARGET
    z_loss = WEIGHT * logits[has_target].exp().sum(-1).log().pow(2).sum()
    ((cross_entropy + z_loss) * 0.5).backward()
    expected = torch.stack((cross_entropy, z_loss)).detach()
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5 * q.grad.abs().max())


def test_without_a_weight_the_loss_is_summed_alone():
    model = build()[0]
    x, y = masked_tokens()
    with torch.no_grad():
        expected = model(x, y).sum()
    assert torch.equal(forward_backward(model, x, y, 1.0), expected[None])


# ---------------------------------------------------------------------------------- in a whole run


@pytest.fixture
def trained(tiny: Config, run: Callable[..., str]) -> Config:
    config = changed(tiny, f"optim.z_loss={WEIGHT}")
    run(config)
    return config


def test_the_loss_of_a_row_is_without_the_z_loss_beside_it(
    trained: Config, tiny: Config, run: Callable[..., str]
):
    """At the first step, whose weights no z-loss has moved yet: the definition, over its tokens."""
    run(replace(tiny, run="without"))
    first, first_without = rows(trained)[0], rows(replace(tiny, run="without"))[0]
    assert first["loss"] == first_without["loss"] and "z_loss" not in first_without
    assert first["grad_norm"] != first_without["grad_norm"]
    model = build(**{k: getattr(tiny.model, k) for k in ("n_embd", "n_ffn")}, seed=tiny.seed)[0]
    data = Data(tiny, *load_tokenizer("byte").hashes)
    batches = [data.batch(0, micro, 0, 1) for micro in range(4)]
    with torch.no_grad():
        logits = torch.cat([model(x) for x, _ in batches]).double()
    expected = WEIGHT * logits.exp().sum(-1).log().square().mean().item()
    assert first["z_loss"] == pytest.approx(expected, rel=1e-3)


def test_the_z_loss_shrinks_and_the_validation_loss_is_without_it(trained: Config):
    z_losses = [row["z_loss"] for row in rows(trained)]
    assert z_losses[-1] < 0.9 * z_losses[0]
    validation_loss = summary(trained)["loss_as_trained"]
    last = rows(trained)[-1]
    assert validation_loss == pytest.approx(last["loss"], abs=0.1)
    assert last["z_loss"] > 0.2, "it would show"


def test_killed_and_resumed_a_run_ends_in_the_same_bits(trained: Config, run: Callable[..., str]):
    whole = record(trained)
    back_to(trained, 3)
    run(trained)
    assert record(trained) == whole


@pytest.mark.parametrize("parallel", ["parallel.shard=2", "parallel.shard=1"])
def test_two_ranks_train_what_one_process_trains(trained: Config, parallel: str):
    together = changed(trained, f"run=together {parallel}")
    assert Run(together, ranks=2).wait() == [0, 0]
    for key in ("loss", "z_loss", "grad_norm"):
        alone = [row[key] for row in rows(trained)]
        assert [row[key] for row in rows(together)] == pytest.approx(alone, rel=2e-3), key


def test_a_run_goes_on_only_with_the_weight_that_it_began_with(
    trained: Config, run: Callable[..., str]
):
    back_to(trained, 3)
    assert "optim.z_loss was 0.01, now 0.0" in run(trained, "optim.z_loss=0", code=2)


def test_a_fused_head_trains_on_it_too(trained: Config, run: Callable[..., str]):
    words = "run=fused fp8.recipe=tensorwise fp8.kernels=true fp8.head=true"
    fused = changed(trained, words)
    run(fused)
    alone = [row["z_loss"] for row in rows(trained)]
    assert [row["z_loss"] for row in rows(fused)] == pytest.approx(alone, rel=0.02)
    assert "head" in json.dumps(summary(fused)["precision"]["layers_kernels"])


# ------------------------------------------------------------------- gradient norms of each layer


@pytest.mark.parametrize("words", ["", "model.tied=false parallel.recompute=true"])
def test_norms_of_layers_are_those_of_their_gradients(tiny: Config, words: str):
    built = parallel.build(changed(tiny, words), ALONE)
    built.model.init_weights(0, built.assign)
    built.precision.after_update()
    forward_backward(built.model, *tokens(), built.loss_scale)
    gradients = LayerGradients(built.model, ALONE, is_on=True)
    norms = gradients.named(gradients.squares().sqrt().tolist())
    names = ["wte", "layers.0", "layers.1", "norm"] + ["head"] * ("tied=false" in words)
    assert list(norms) == names
    for name, norm in norms.items():
        module = built.model.get_submodule(name)
        parts = [p.grad.double().flatten() for p in module.parameters()]
        assert norm == pytest.approx(torch.cat(parts).norm().item(), rel=1e-6)


def norms_of_layers(config: Config) -> list[list[float]]:
    """Those that the guard keeps of the run's steps, (steps, layers)."""
    accepted = read_manifest(latest(config.run_dir))["state"]["guard"]["accepted"]
    return [row[2:] for row in accepted]


@pytest.fixture
def judged(tiny: Config, run: Callable[..., str]) -> Config:
    config = changed(tiny, "guard.layers=true")
    run(config)
    return config


def test_norms_of_layers_add_up_to_the_global_one_and_change_nothing(
    judged: Config, tiny: Config, run: Callable[..., str]
):
    run(replace(tiny, run="without"))
    assert record(judged)["trajectory"] == record(replace(tiny, run="without"))["trajectory"]
    norms = torch.tensor(norms_of_layers(judged), dtype=torch.float64)
    assert norms.shape == (6, 4)
    expected = [row["grad_norm"] for row in rows(judged)]
    assert norms.norm(dim=1).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ranks, words", [(2, "shard=2"), (2, "shard=1"), (4, "replicate=2")])
def test_ranks_have_the_norms_of_layers_of_one_process(judged: Config, ranks: int, words: str):
    together = changed(judged, f"run=together data.micro_batch=2 parallel.{words}")
    assert Run(together, ranks=ranks).wait() == [0] * ranks
    for norms, alone in zip(norms_of_layers(together), norms_of_layers(judged), strict=True):
        assert norms == pytest.approx(alone, rel=5e-3)


def test_a_run_judged_by_layers_resumes_to_the_same_bits(judged: Config, run: Callable[..., str]):
    whole = record(judged)
    back_to(judged, 3)
    run(judged)
    assert record(judged) == whole
