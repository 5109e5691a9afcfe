"""Learning rates by hand, AdamW against its equations in fp64, gradients that add up over micro-batches."""

import math
from dataclasses import replace

import pytest
import torch

from model import GPT, GPTConfig
from runtime import fp8, optim
from runtime.config import FP8Config, OptimConfig
from runtime.parallel import World, build


def rates(steps, **changes):
    return [optim.learning_rate(step, steps, OptimConfig(lr=1.0, **changes)) for step in range(steps)]


def test_schedules_by_hand():
    got = rates(100, warmup_share=0.1, min_lr_ratio=0.1)
    assert got[:11] == pytest.approx([*((i + 1) / 10 for i in range(10)), 1.0])
    assert got[10:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(90)])
    got = rates(100, schedule="wsd", warmup_share=0.05, decay_share=0.2, min_lr_ratio=0.0)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 76 + [1 - (i + 1) / 20 for i in range(20)])
    assert all(0 < lr <= 1 for schedule in ("cosine", "wsd") for steps in (1, 2, 7) for lr in rates(steps, schedule=schedule))


@pytest.mark.parametrize("filled", [False, True])       # fill_state() makes what AdamW makes at its first step
def test_adamw_against_the_equations_with_decay_of_matrices_only(filled):
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=8, vocab_size=100))
    model.init_weights(0)
    c = OptimConfig(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = optim.build_optimizer(model, c)
    if filled:
        optim.fill_state(optimizer)
    expected = {name: (p.detach().double(), 0.0, 0.0) for name, p in model.named_parameters()}
    for t in range(1, 4):
        lr = optim.set_learning_rate(optimizer, t, 10, c)
        torch.manual_seed(t)
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape)
            w, m, v = expected[name]
            g = p.grad.double()
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            w = w * (1.0 if "norm" in name else 1 - lr * 0.1) - lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
            expected[name] = w, m, v
        versions = [p._version for p in model.parameters()]
        optimizer.step()
        assert all(p._version > old for p, old in zip(model.parameters(), versions, strict=True)), "FP8 copies become stale"
    moments = optim.state_tensors(optimizer, model)
    assert moments.keys() == {f"{name}.{key}" for name in expected for key in ("exp_avg", "exp_avg_sq")}
    for name, p in model.named_parameters():
        for got, want in zip((p, moments[f"{name}.exp_avg"], moments[f"{name}.exp_avg_sq"]), expected[name], strict=True):
            assert torch.allclose(got.double(), want, atol=1e-7), name
    optim.set_updates(optimizer, 7)
    assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}


@pytest.mark.parametrize("settings, compiled", [
    ({}, "off"), ({}, "block"), ({"recipe": "tensorwise_gw_hp", "kernels": True}, "off")])
def test_weight_gradients_of_micro_batches_add_up_within_their_matmuls(tiny, monkeypatch, settings, compiled):
    """Bit by bit what autograd gives for each micro-batch, added in their order; twice, as the first sum must be gone then."""
    calls, add = [], fp8.add_weight_grad
    torch.library.opcheck(add, (torch.zeros(4, 8), *(torch.randn(16, n).bfloat16() for n in (4, 8))),
                          test_utils=("test_schema", "test_faketensor"))
    if compiled == "off":
        monkeypatch.setattr(fp8, "add_weight_grad", lambda *tensors: calls.append(tensors) or add(*tensors))
    world, two = World(0, 0, 1, torch.device("cpu")), 2 * tiny.data.micro_batch * tiny.model.n_ctx
    config = replace(tiny, fp8=FP8Config(**settings), data=replace(tiny.data, tokens_per_step=two),
                     parallel=replace(tiny.parallel, compile=compiled))
    plain = replace(config, data=replace(config.data, tokens_per_step=two // 2))
    (model, alone) = models = [build(one, world).model for one in (config, plain)]
    for one in models:
        one.init_weights(0)
        fp8.refresh_weight_copies(one)
    lasting = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}
    assert len(lasting) == 4 * tiny.model.n_layer and all(p.grad is None for p in alone.parameters())
    for step in range(2):
        torch.manual_seed(step)
        batches = torch.randint(tiny.model.vocab_size, (2, 2, tiny.data.micro_batch, tiny.model.n_ctx))
        want = [torch.autograd.grad(alone(x, y).sum(), list(alone.parameters())) for x, y in batches]
        for x, y in batches:
            model(x, y).sum().backward()
        for (name, p), first, second in zip(model.named_parameters(), *want, strict=True):
            assert torch.equal(p.grad, first + second), name
            assert p.grad.data_ptr() == lasting.get(name, p.grad.data_ptr()), "a gradient that the matmul no longer adds to"
        fp8.zero_gradients(model)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == lasting.keys()
    model.zero_grad()
    if compiled == "off":
        assert len(calls) == 2 * 2 * len(lasting), "a product that is added behind its matmul"
        with pytest.raises(AssertionError, match="zero_gradients"):
            model(*batches[0])
