"""Learning rates by hand, AdamW and Muon against their equations in fp64, gradients that add up;
Muon over shards and resumed."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8 import kernels
from fp8.copies import zero_gradients
from fp8.matmul import add_weight_grad
from model import GPT, GPTConfig
from runtime import optim, parallel
from runtime.config import OptimConfig
from tests.conftest import changed
from tests.helpers.faults import back_to, record, rows, summary
from tests.runtime.test_faults import finish
from tests.runtime.test_parallel import build


def rates(steps, **changes):
    return [
        optim.learning_rate(step, steps, OptimConfig(lr=1.0, **changes)) for step in range(steps)
    ]


def test_schedules_by_hand():
    got = rates(100, warmup_share=0.1, min_lr_ratio=0.1)
    assert got[:11] == pytest.approx([*((i + 1) / 10 for i in range(10)), 1.0])
    assert got[10:] == pytest.approx(
        [0.1 + 0.9 * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(90)]
    )
    got = rates(100, schedule="wsd", warmup_share=0.05, decay_share=0.2, min_lr_ratio=0.0)
    assert got == pytest.approx(
        [0.2, 0.4, 0.6, 0.8] + [1.0] * 76 + [1 - (i + 1) / 20 for i in range(20)]
    )
    assert all(
        0 < lr <= 1
        for schedule in ("cosine", "wsd")
        for steps in (1, 2, 7)
        for lr in rates(steps, schedule=schedule)
    )


MODEL = GPTConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, n_ctx=8, vocab_size=100)
C = OptimConfig(
    lr=0.01, kind="muon", momentum=0.7, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6
)


@pytest.mark.parametrize("kind, filled", [("adamw", False), ("adamw", True), ("muon", True)])
def test_updates_against_the_equations_in_fp64_with_decay_of_matrices_only(kind, filled):
    """The first state is what AdamW makes at its first step. Muon part by part: momentum,
    Nesterov's step, five iterations."""
    model = GPT(MODEL)
    model.init_weights(0)
    optimizer = optim.build_optimizer(model, replace(C, kind=kind))
    if not filled:
        optimizer.state.clear()
    parts = optim.muon_parts(model) if kind == "muon" else {}
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    expected = {name: (w, torch.zeros_like(w), 0.0) for name, w in before.items()}
    for t in range(1, 4):
        lr = optim.set_learning_rate(optimizer, t, 10, C)
        torch.manual_seed(t)
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape)
            (w, m, v), g, step = expected[name], p.grad.double(), []
            if p in parts:
                m = 0.7 * m + 0.3 * g
                for x in (0.3 * g + 0.7 * m).split(list(parts[p])):
                    size, x = max(x.shape), x / x.norm()
                    for _ in range(5):
                        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
                    step.append(0.2 * size**0.5 * x)
            else:
                m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
                step.append((m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6))
            expected[name] = (
                w * (1 if "norm" in name else 1 - lr * 0.1) - lr * torch.cat(step),
                m,
                v,
            )
        versions = [p._version for p in model.parameters()]
        optimizer.step()
        assert all(p._version > old for p, old in zip(model.parameters(), versions, strict=True)), (
            "FP8 copies become stale"
        )
    moments = optim.state_tensors(optimizer, model)
    for name, p in model.named_parameters():
        due, *states = expected[name]
        if p in parts:
            assert 0 < (p - due).norm() < 0.05 * (due - before[name]).norm(), "BF16's roundings"
        else:
            assert torch.allclose(p.double(), due, atol=1e-7), name
        for key, state in zip(
            ["momentum"] if p in parts else ["exp_avg", "exp_avg_sq"], states, strict=False
        ):
            assert torch.allclose(moments.pop(f"{name}.{key}").double(), state, atol=1e-7), name
    assert not moments and len(parts) == 4 * (kind == "muon")
    assert {(n, p.shape[1]) for p, rows in parts.items() for n in rows} == {
        (32, 32),
        (16, 32),
        (48, 32),
        (32, 48),
    } or not parts
    optim.set_updates(optimizer, 7)
    assert {float(state["step"]) for state in optimizer.state.values() if "step" in state} == {7.0}


@pytest.mark.parametrize(
    "settings, compiled",
    [("", "off"), ("", "block"), ("fp8.recipe=tensorwise_gw_hp fp8.kernels=true", "off")],
)
def test_weight_gradients_of_micro_batches_add_up_within_their_matmuls(
    tiny, monkeypatch, settings, compiled
):
    """Bit by bit what autograd gives for each micro-batch, added in their order; twice, as the
    first sum must be gone then."""
    calls, add = [], add_weight_grad
    torch.library.opcheck(
        add,
        (torch.zeros(4, 8), *(torch.randn(16, n).bfloat16() for n in (4, 8))),
        test_utils=("test_schema", "test_faketensor"),
    )
    if compiled == "off":
        monkeypatch.setattr(
            kernels, "add_weight_grad", lambda *tensors: calls.append(tensors) or add(*tensors)
        )
    one = tiny.data.micro_batch * tiny.model.n_ctx  # tokens of a micro-batch
    model, alone = (
        build(tiny, f"{settings} data.tokens_per_step={n * one} parallel.compile={compiled}").model
        for n in (2, 1)
    )
    lasting = {
        name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None
    }
    assert len(lasting) == 4 * tiny.model.n_layer and all(
        p.grad is None for p in alone.parameters()
    )
    for step in range(2):
        torch.manual_seed(step)
        batches = torch.randint(
            tiny.model.vocab_size, (2, 2, tiny.data.micro_batch, tiny.model.n_ctx)
        )
        want = [
            torch.autograd.grad(alone(x, y).sum(), list(alone.parameters())) for x, y in batches
        ]
        for x, y in batches:
            model(x, y).sum().backward()
        for (name, p), first, second in zip(model.named_parameters(), *want, strict=True):
            assert torch.equal(p.grad, first + second), name
            assert p.grad.data_ptr() == lasting.get(name, p.grad.data_ptr()), (
                "a gradient that the matmul no longer adds to"
            )
        zero_gradients(model)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == lasting.keys()
    model.zero_grad()
    if compiled == "off":
        assert len(calls) == 2 * 2 * len(lasting), "a product that is added behind its matmul"
        with pytest.raises(AssertionError, match="zero_gradients"):
            model(*batches[0])


def test_the_work_of_muon_is_dealt_evenly():  # FLOPs by hand: runtime/test_plan.py
    parts = optim.muon_parts(GPT.on_meta(GPTConfig(n_layer=28, n_head=16, n_embd=2048, n_ffn=5632)))
    wide = optim.muon_parts(
        GPT.on_meta(GPTConfig(n_layer=1, n_head=2, n_kv_head=1, n_embd=64, n_ffn=96, head_size=48))
    )
    assert list(wide.values()) == [
        (96, 48, 48),
        (64,),
        (96, 96),
        (64,),
    ], "q, k and v of heads wider than their share"
    costs = [optim.newton_schulz_flops(p.shape[1], rows) for p, rows in parts.items()]
    for ranks, most in ((1, 1), (3, 1.01), (8, 1.03), (64, 1.5)):
        sums = torch.zeros(ranks).index_add_(
            0, torch.tensor(optim.deal(costs, ranks)), torch.tensor(costs) / sum(costs)
        )
        assert sums.sum().item() == pytest.approx(1) and sums.max() <= most / ranks, ranks


def test_a_resumed_run_ends_in_the_same_bits_and_two_ranks_train_what_one_process_trains(tiny, run):
    config = changed(tiny, "optim.kind=muon")
    run(config)
    whole = record(config)
    back_to(config, 3)
    run(config)
    assert record(config) == whole and whole["trajectory"][-1][2] < whole["trajectory"][0][2]
    assert "optim.kind was muon" in run(config, "optim.kind=adamw", code=2)
    assert summary(config)["optimizer"] == "Muon"
    two = finish(replace(config, run="two"), ranks=2)
    for one, other in zip(rows(config), rows(two), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2)


LAYOUTS = (1, 2), (1, 3), (2, 2), (4, 1)  # replicas x shards: three shards of 32 rows are not equal


def test_a_matrix_has_one_owner_and_the_bits_of_one_process(tmp_path):
    mp.spawn(ranks_of_muon, (str(tmp_path),), nprocs=4)
    for replicas, shards in LAYOUTS:
        seen = torch.load(tmp_path / f"{replicas}x{shards}.pt")
        assert sum(seen["parts"]) == 7 and len(seen["parts"]) == replicas * shards
        assert seen["parts"] == [0, 0, 7, 0] if replicas == 4 else max(seen["parts"]) < 5
        assert seen["found"].keys() == seen["due"].keys()
        # AdamW's last values of a shard are rounded by other instructions
        for name, due in seen["due"].items():
            is_muons = name.startswith("layers") and "norm" not in name
            torch.testing.assert_close(
                seen["found"][name], due, rtol=0 if is_muons else 1e-6, atol=0 if is_muons else 1e-7
            )


def ranks_of_muon(rank, folder):
    """Two updates of a sharded model and of a whole one by the same gradients; rank 0 keeps both
    and how many each rank did."""
    torch.set_num_threads(1)
    calls, compute = [], optim.orthogonalised
    optim.orthogonalised = lambda matrix: calls.append(1) or compute(matrix)
    for replicas, shards in LAYOUTS:
        if rank >= (size := replicas * shards):
            continue
        path = f"{folder}/{replicas}x{shards}"
        dist.init_process_group(
            "gloo", store=dist.FileStore(path, size), rank=rank, world_size=size
        )
        mesh, seen = (
            init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard")),
            {},
        )
        world = parallel.World(rank, rank, size, torch.device("cpu"), mesh)
        if replicas == 4:
            # three ranks have nothing to do
            optim.deal = lambda costs, ranks: [2 % ranks] * len(costs)
        for kind in "found", "due":
            model = GPT(MODEL)
            model.init_weights(0)
            if kind == "found":
                parallel.shard(model, world)
            are_replicas = kind == "found" and shards == 1
            optimizer = optim.build_optimizer(model, C, replicas if are_replicas else 1)
            torch.manual_seed(1)
            for _ in range(2):
                calls.clear()
                for p in model.parameters():
                    p.grad = torch.randn(p.shape)
                    if isinstance(p, DTensor):
                        p.grad = distribute_tensor(
                            p.grad, p.device_mesh, p.placements, src_data_rank=None
                        )
                optimizer.step()
            if kind == "found":
                seen["parts"] = [
                    int(n) for n in parallel.all_concatenate(torch.tensor(float(len(calls))), world)
                ]
            tensors = {
                name: p.detach() for name, p in model.named_parameters()
            } | optim.state_tensors(optimizer, model)
            seen[kind] = {
                name: t.full_tensor() if isinstance(t, DTensor) else t
                for name, t in tensors.items()
            }
        if world.is_main:
            torch.save(seen, f"{path}.pt")
        dist.destroy_process_group()
