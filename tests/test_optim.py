import math

import pytest
import torch

from model import GPT, GPTConfig
from runtime import optim
from runtime.config import OptimConfig

SIZE = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_ffn": 16, "n_ctx": 8, "vocab_size": 100}


def rates(steps, **changes):
    config = OptimConfig(lr=1.0, **changes)
    return [optim.learning_rate(step, steps, config) for step in range(steps)]


def test_cosine_by_hand():
    got = rates(100, warmup_share=0.1, min_lr_ratio=0.1)
    assert got[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert got[10] == 1.0
    assert got[55] == pytest.approx(0.55)       # half way down from 1 to 0.1
    assert got[99] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 89 / 90)) / 2)
    assert all(a >= b for a, b in zip(got[9:], got[10:], strict=False))


def test_warmup_stable_decay_by_hand():
    got = rates(100, schedule="wsd", warmup_share=0.05, decay_share=0.2, min_lr_ratio=0.0)
    assert got[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert got[5:80] == [1.0] * 75
    assert got[80:] == pytest.approx([1 - (i + 1) / 20 for i in range(20)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_short_runs_have_a_rate_at_every_step(schedule, steps):
    assert all(0 < lr <= 1 for lr in rates(steps, schedule=schedule))


def model():
    model = GPT(GPTConfig(**SIZE))
    model.init_weights(0)
    return model


def test_only_matrices_decay():
    gpt = model()
    optimizer = optim.build_optimizer(gpt, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in gpt.named_parameters():
        assert torch.allclose(p, before[name] * (1.0 if "norm" in name else 1 - 0.1 * 0.5)), name
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(before)


def test_adamw_against_the_equations():
    gpt, c = model(), OptimConfig(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = optim.build_optimizer(gpt, c)
    optim.fill_state(optimizer)
    weight = gpt.layers[0].mlp.down.weight
    w, m, v = weight.detach().double(), 0.0, 0.0
    for t in range(1, 4):
        g = torch.randn(weight.shape, generator=torch.Generator().manual_seed(t))
        for p in gpt.parameters():
            p.grad = torch.zeros_like(p)
        weight.grad = g
        optimizer.step()
        w, m, v = w * (1 - c.lr * 0.1), 0.8 * m + 0.2 * g.double(), 0.9 * v + 0.1 * g.double() ** 2
        w = w - c.lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
    assert torch.allclose(weight.double(), w, atol=1e-7)


def test_filled_state_is_what_adamw_would_make_and_updates_can_be_set():
    a, b = model(), model()
    lazily, filled = (optim.build_optimizer(m, OptimConfig(lr=0.1)) for m in (a, b))
    optim.fill_state(filled)
    for _ in range(2):
        for m, o in ((a, lazily), (b, filled)):
            for p in m.parameters():
                p.grad = torch.ones_like(p)
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert {k.rpartition(".")[0] for k in optim.state_tensors(filled, b)} == {n for n, _ in b.named_parameters()}
    optim.set_updates(filled, 7)
    assert {float(s["step"]) for s in filled.state.values()} == {7.0}
