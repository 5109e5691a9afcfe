"""Learning rates by hand; AdamW against its equations in fp64, Muon against torch's by parts, over ranks, after a resume."""

import math
from dataclasses import replace

import pytest
import torch

from model import GPT, GPTConfig
from runtime import optim
from runtime.config import OptimConfig
from tests import faults
from tests.conftest import call_train


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


def test_each_matrix_is_torchs_muon_by_parts_and_the_rest_is_adamw():
    torch.manual_seed(1)
    c = OptimConfig(lr=0.02, kind="muon", momentum=0.9, weight_decay=0.1)
    model = GPT(GPTConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, n_ctx=8, vocab_size=100))
    model.init_weights(0)
    optimizer = optim.build_optimizer(model, c)
    optim.fill_state(optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parts = {"qkv": (32, 16, 16), "out": (32,), "gate_up": (48, 48), "down": (32,)}
    theirs = {}
    for name, p in model.named_parameters():
        rows = parts.get(name.split(".")[-2]) if name.startswith("layers") else None
        theirs[name] = [torch.nn.Parameter(part.clone()) for part in (p.detach().split(rows) if rows else [p.detach()])]
    matrices = [name for name in theirs if name.startswith("layers") and "norm" not in name]
    muon = torch.optim.Muon([part for name in matrices for part in theirs[name]], lr=c.lr, momentum=0.9, weight_decay=0.1,
                            adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": theirs["wte.weight"]}, {"params": [p[0] for n, p in theirs.items() if "norm" in n], "weight_decay": 0.0}],
        lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=0.1)
    for _ in range(3):
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape)
            for part, grad in zip(theirs[name], p.grad.split([len(part) for part in theirs[name]]), strict=True):
                part.grad = grad
        versions = [p._version for p in model.parameters()]
        for one in (optimizer, muon, adamw):
            one.step()
        assert all(p._version > old for p, old in zip(model.parameters(), versions, strict=True)), "stale copies"
    for name, p in model.named_parameters():
        moved = (p - before[name]).norm()
        assert (p - torch.cat(list(theirs[name]))).norm() < (0.05 if name in matrices else 1e-5) * moved, name
    assert {name.rpartition(".")[2] for name in optim.state_tensors(optimizer, model)} == {"momentum", "exp_avg", "exp_avg_sq"}


def test_a_resumed_run_ends_in_the_same_bits_and_two_ranks_train_what_one_process_trains(tiny, tmp_path, capsys):
    whole, parts, two = (replace(tiny, run=run, optim=replace(tiny.optim, kind="muon")) for run in ("whole", "parts", "two"))
    for config in (whole, parts):
        assert call_train(capsys, config, tmp_path).returncode == 0
    faults.back_to(parts, 3)
    assert call_train(capsys, parts, tmp_path).returncode == 0
    assert faults.record(parts) == faults.record(whole)
    run = faults.start(two, ranks=2)
    assert run.wait() == [0, 0], run.output
    rows, ranks = faults.rows(whole), faults.rows(two)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["loss"] for row in ranks] == pytest.approx([row["loss"] for row in rows], rel=2e-3)
    assert [row["grad_norm"] for row in ranks] == pytest.approx([row["grad_norm"] for row in rows], rel=2e-2)
    refused = call_train(capsys, replace(whole, optim=replace(whole.optim, kind="adamw")), tmp_path)
    assert (refused.returncode, "optim.kind was muon" in refused.stderr) == (2, True)
    assert faults.summary(whole)["optimizer"] == "Muon"
