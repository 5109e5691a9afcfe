"""Learning rates by hand, AdamW and Muon against their equations in fp64, gradients that add up;
Muon over shards and resumed."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8 import kernels, matmul
from fp8.copies import zero_gradients
from fp8.matmul import add_weight_grad
from fp8.recipes import E4M3, E5M2
from model import GPT, GPTConfig
from runtime import optim, parallel
from runtime.config import Config, OptimConfig
from tests.conftest import changed
from tests.helpers.faults import back_to, on_ranks, record, rows, summary
from tests.runtime.test_faults import finish
from tests.runtime.test_parallel import build

# --------------------------------------------------------------------------------- learning rates


def rates(steps: int, **changes: object) -> list[float]:
    """The learning rate of each step, as a share of the highest."""
    config = OptimConfig(lr=1.0, **changes)
    return [optim.learning_rate(step, steps, config) for step in range(steps)]


def test_cosine_warms_up_to_the_full_rate_and_ends_at_its_least():
    computed = rates(100, warmup_share=0.1, min_lr_ratio=0.1)
    assert computed[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(90)]
    assert computed[10:] == pytest.approx(cosine)


def test_wsd_stays_at_the_full_rate_and_decays_on_a_line():
    computed = rates(100, schedule="wsd", warmup_share=0.05, decay_share=0.2, min_lr_ratio=0.0)
    decay = [1 - (i + 1) / 20 for i in range(20)]
    assert computed == pytest.approx([0.2, 0.4, 0.6, 0.8, *[1.0] * 76, *decay])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_no_step_of_a_short_run_has_a_rate_of_zero(schedule: str, steps: int):
    assert all(0 < lr <= 1 for lr in rates(steps, schedule=schedule))


@pytest.mark.parametrize("schedule", get_args(get_type_hints(OptimConfig)["schedule"]))
def test_every_schedule_that_a_config_may_name_has_rates(schedule: str):
    assert len(rates(10, schedule=schedule)) == 10


def test_a_schedule_without_rates_is_not_trained_as_another():
    with pytest.raises(NotImplementedError, match="linear"):
        rates(10, schedule="linear")


# ----------------------------------------------------------------------- updates, against equations

MODEL = GPTConfig(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, n_ctx=8, vocab_size=100)
MUON = OptimConfig(
    lr=0.01, kind="muon", momentum=0.7, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6
)
# Q, K, V; out; gate, up; down
MUON_SHAPES = {(32, 32), (16, 32), (48, 32), (32, 48)}


@dataclass
class Expected:
    """A weight and its optimizer's moments, in fp64."""

    weight: torch.Tensor
    first: torch.Tensor  # AdamW's first moment, or Muon's momentum
    second: torch.Tensor

    def adamw(self, gradient: torch.Tensor, t: int, lr: float, decay: float) -> None:
        """One update by AdamW's equations (1711.05101)."""
        self.first = 0.8 * self.first + 0.2 * gradient
        self.second = 0.9 * self.second + 0.1 * gradient**2
        update = (self.first / (1 - 0.8**t)) / ((self.second / (1 - 0.9**t)).sqrt() + 1e-6)
        self.weight = self.weight * (1 - lr * decay) - lr * update

    def muon(self, gradient: torch.Tensor, part_rows: list[int], lr: float, decay: float) -> None:
        """One update by Muon's equations, part by part: momentum, Nesterov's step, five iterations
        of Newton and Schulz."""
        self.first = 0.7 * self.first + 0.3 * gradient
        nesterov = 0.3 * gradient + 0.7 * self.first
        updates = []
        for part in nesterov.split(part_rows):
            x = part / part.norm()
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
            updates.append(0.2 * max(part.shape) ** 0.5 * x)
        self.weight = self.weight * (1 - lr * decay) - lr * torch.cat(updates)


@dataclass
class Updated:
    """A model after three updates, and what the equations say of it."""

    model: GPT
    optimizer: torch.optim.Optimizer
    initial: dict[str, torch.Tensor]
    expected: dict[str, Expected]
    parts: dict[nn.Parameter, list[int]]  # rows of each matrix that Muon updates apart


def three_updates(kind: str, is_filled: bool = True) -> Updated:
    """Random gradients; the first state is what AdamW makes at its first step, unless it is
    filled."""
    model = GPT(MODEL)
    model.init_weights(0)
    optimizer = optim.build_optimizer(model, replace(MUON, kind=kind))
    if not is_filled:
        optimizer.state.clear()
    parts = {}
    if kind == "muon":
        parts = {weight: list(sizes) for weight, sizes in optim.muon_parts(model).items()}
    initial = {name: weight.detach().double() for name, weight in model.named_parameters()}
    zeros = {name: torch.zeros_like(weight) for name, weight in initial.items()}
    expected = {name: Expected(initial[name], zeros[name], zeros[name]) for name in initial}
    for t in range(1, 4):
        lr = optim.set_learning_rate(optimizer, t, 10, MUON)
        torch.manual_seed(t)
        for name, weight in model.named_parameters():
            weight.grad = torch.randn(weight.shape)
            decay = 0.0 if "norm" in name else 0.1  # matrices alone decay
            if weight in parts:
                expected[name].muon(weight.grad.double(), parts[weight], lr, decay)
            else:
                expected[name].adamw(weight.grad.double(), t, lr, decay)
        optimizer.step()
    return Updated(model, optimizer, initial, expected, parts)


@pytest.mark.parametrize("is_filled", [False, True])
def test_adamws_weights_and_moments_are_those_of_its_equations(is_filled: bool):
    updated = three_updates("adamw", is_filled)
    moments = optim.state_tensors(updated.optimizer, updated.model)
    assert len(moments) == 2 * len(updated.expected)
    for name, weight in updated.model.named_parameters():
        due = updated.expected[name]
        first, second = moments[f"{name}.exp_avg"], moments[f"{name}.exp_avg_sq"]
        torch.testing.assert_close(weight.double(), due.weight, rtol=1e-5, atol=1e-7, msg=name)
        torch.testing.assert_close(first.double(), due.first, rtol=1e-5, atol=1e-7, msg=name)
        torch.testing.assert_close(second.double(), due.second, rtol=1e-5, atol=1e-7, msg=name)


def test_muons_matrices_and_momenta_are_those_of_its_equations():
    updated = three_updates("muon")
    moments = optim.state_tensors(updated.optimizer, updated.model)
    shapes = {(n, weight.shape[1]) for weight, sizes in updated.parts.items() for n in sizes}
    assert shapes == MUON_SHAPES and len(updated.parts) == 4
    for name, weight in updated.model.named_parameters():
        due, momentum = updated.expected[name], moments.get(f"{name}.momentum")
        if weight not in updated.parts:
            torch.testing.assert_close(weight.double(), due.weight, rtol=1e-5, atol=1e-7, msg=name)
            continue
        error = (weight - due.weight).norm()
        moved = (due.weight - updated.initial[name]).norm()
        assert 0 < error < 0.05 * moved, f"{name}: BF16's roundings alone"
        torch.testing.assert_close(momentum.double(), due.first, rtol=1e-5, atol=1e-7, msg=name)


def test_muon_keeps_one_momentum_of_matrices_and_adamws_two_of_others():
    updated = three_updates("muon")
    moments_of = {}
    for key in optim.state_tensors(updated.optimizer, updated.model):
        name, _, moment = key.rpartition(".")
        moments_of.setdefault(name, []).append(moment)
    for name, moments in moments_of.items():
        assert moments == (["momentum"] if is_of_muon(name) else ["exp_avg", "exp_avg_sq"]), name
    assert len(moments_of) == len(updated.expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_update_marks_every_weight_as_changed(kind: str):
    """By which FP8 copies of weights are known to be stale."""
    updated = three_updates(kind)
    versions = {name: weight._version for name, weight in updated.model.named_parameters()}
    updated.optimizer.step()
    for name, weight in updated.model.named_parameters():
        assert weight._version > versions[name], name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_number_of_updates_can_be_set(kind: str):
    optimizer = three_updates(kind).optimizer
    optim.set_updates(optimizer, 7)
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    assert set(counts) == {7.0}


def test_every_kind_that_a_config_may_name_has_a_name_for_the_summary():
    """Without one a run fails after its last step, as it writes its summary."""
    assert set(optim.NAMES) == set(get_args(get_type_hints(OptimConfig)["kind"]))


def test_a_kind_without_a_name_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(optim.NAMES, "muon")
    with pytest.raises(NotImplementedError, match="optim.kind=muon has no entry in NAMES"):
        optim.build_optimizer(GPT(MODEL), OptimConfig(lr=1e-3, kind="muon"))


def test_a_kind_without_an_optimizer_is_not_trained_by_another():
    with pytest.raises(NotImplementedError, match="lion"):
        optim.build_optimizer(GPT(MODEL), OptimConfig(lr=1e-3, kind="lion"))


# -------------------------------------------------------------------------- gradients that add up


@dataclass
class Accumulating:
    """A model whose Linears add up the gradients of two micro-batches, and one that does not."""

    model: GPT
    plain: GPT
    lasting: dict[str, int]  # addresses of the gradients that stay, by the weight's name
    calls: list[tuple]  # of the matmuls that add, so far


ADDING = {
    "bf16": "",
    "gw_hp": "fp8.recipe=tensorwise_gw_hp fp8.kernels=true",
    "tensorwise": "fp8.recipe=tensorwise fp8.kernels=true",
}


@pytest.fixture(params=ADDING.values(), ids=ADDING)
def accumulating(
    request: pytest.FixtureRequest, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> Accumulating:
    calls: list[tuple] = []

    def noted(*tensors: torch.Tensor) -> None:
        calls.append(tensors)
        add_weight_grad(*tensors)

    def scaled_addmm_(total, a, b, a_inverse, a_kind, b_inverse, b_kind, *, use_fast_accum):
        """In the place of torch's from 2.15 on."""
        assert a_kind == b_kind == F.ScalingType.TensorWise and total.is_contiguous()
        assert a.is_contiguous() and b.t().is_contiguous()
        calls.append((total, use_fast_accum))
        total += matmul.scaled_mm(a, a_inverse, b, b_inverse, total.dtype)

    monkeypatch.setattr(kernels, "add_weight_grad", noted)
    if request.param == ADDING["tensorwise"]:
        monkeypatch.setattr(F, "scaled_addmm_", scaled_addmm_, raising=False)
        for module in (matmul, kernels):
            monkeypatch.setattr(module, "adds_scaled_products", lambda device: True)
    tokens = tiny.data.micro_batch * tiny.model.n_ctx  # of a micro-batch
    model = build(tiny, f"{request.param} data.tokens_per_step={2 * tokens}").model
    plain = build(tiny, f"{request.param} data.tokens_per_step={tokens}").model
    assert all(weight.grad is None for weight in plain.parameters())
    lasting = lasting_gradients(model)
    assert len(lasting) == 4 * tiny.model.n_layer
    return Accumulating(model, plain, lasting, calls)


def lasting_gradients(model: GPT) -> dict[str, int]:
    """Addresses of the gradients that exist, by the weight's name."""
    named = model.named_parameters()
    return {name: weight.grad.data_ptr() for name, weight in named if weight.grad is not None}


def micro_batches(model: GPT, seed: int) -> torch.Tensor:
    """Inputs and targets of two micro-batches of four sequences, (2, 2, 4, T)."""
    torch.manual_seed(seed)
    return torch.randint(model.config.vocab_size, (2, 2, 4, model.config.n_ctx))


def test_gradients_of_micro_batches_add_up_to_autograds_bits(accumulating: Accumulating):
    """In their order; twice, as the first sum must be gone then. Compiled: test_compiled.py."""
    model, plain = accumulating.model, accumulating.plain
    for seed in range(2):
        autograds = []
        for x, y in micro_batches(model, seed):
            autograds.append(torch.autograd.grad(plain(x, y).sum(), list(plain.parameters())))
            model(x, y).sum().backward()
        for (name, weight), first, second in zip(model.named_parameters(), *autograds, strict=True):
            assert torch.equal(weight.grad, first + second), name
        zero_gradients(model)


def test_gradients_of_linears_are_added_within_their_matmul(accumulating: Accumulating):
    model = accumulating.model
    for x, y in micro_batches(model, 0):
        model(x, y).sum().backward()
    assert len(accumulating.calls) == 2 * len(accumulating.lasting)
    assert lasting_gradients(model).items() >= accumulating.lasting.items()
    zero_gradients(model)
    assert lasting_gradients(model) == accumulating.lasting


def test_gradients_that_the_optimizer_freed_are_an_error(accumulating: Accumulating):
    model = accumulating.model
    model.zero_grad()
    with pytest.raises(AssertionError, match="zero_gradients"):
        model(*micro_batches(model, 0)[0])


@pytest.mark.parametrize(
    "device, has_function, can_add",
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_float8_products_are_added_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, device: str, has_function: bool, can_add: bool
):
    monkeypatch.delattr(F, "scaled_addmm_", raising=False)
    if has_function:
        monkeypatch.setattr(F, "scaled_addmm_", lambda *_: None, raising=False)
    assert matmul.adds_scaled_products(torch.device(device)) == can_add


def test_the_operator_that_adds_float8_products_keeps_torchs_rules():
    torch.manual_seed(0)
    g, x = torch.randn(4, 16).to(E5M2), torch.randn(8, 16).to(E4M3).t()
    g_inverse, x_inverse = torch.tensor(0.5), torch.tensor(3.0)
    total = torch.randn(4, 8)
    arguments = (total.clone(), g, g_inverse, x, x_inverse, False)
    # its test of the schema has no float8
    torch.library.opcheck(matmul.add_scaled_weight_grad, arguments, test_utils=("test_faketensor",))
    expected = total.double() + 1.5 * g.double() @ x.double()
    matmul.add_scaled_weight_grad(total, *arguments[1:])
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-5)


def test_the_operator_that_adds_keeps_torchs_rules():
    operands = torch.randn(16, 4).bfloat16(), torch.randn(16, 8).bfloat16()
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(add_weight_grad, (torch.zeros(4, 8), *operands), test_utils=tests)


# ------------------------------------------------------------------------------------ Muon's shares


def test_muon_updates_q_k_and_v_of_heads_wider_than_their_share_apart():
    wide = GPTConfig(n_layer=1, n_head=2, n_kv_head=1, n_embd=64, n_ffn=96, head_size=48)
    parts = optim.muon_parts(GPT.on_meta(wide))
    assert list(parts.values()) == [(96, 48, 48), (64,), (96, 96), (64,)]


# FLOPs by hand: runtime/test_plan.py
@pytest.mark.parametrize("ranks, most", [(1, 1), (3, 1.01), (8, 1.03), (64, 1.5)])
def test_the_work_of_muon_is_dealt_evenly(ranks: int, most: float):
    parts = optim.muon_parts(GPT.on_meta(GPTConfig(n_layer=28, n_head=16, n_embd=2048, n_ffn=5632)))
    costs = [optim.newton_schulz_flops(weight.shape[1], sizes) for weight, sizes in parts.items()]
    shares = [0.0] * ranks
    for cost, rank in zip(costs, optim.deal(costs, ranks), strict=True):
        shares[rank] += cost / sum(costs)
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= most / ranks * (1 + 1e-6)


# --------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def muon(tiny: Config, run: Callable[..., str]):
    """A finished run with Muon."""
    config = changed(tiny, "optim.kind=muon")
    run(config)
    return config


def test_a_run_with_muon_learns_and_its_summary_says_so(muon):
    losses = [row["loss"] for row in rows(muon)]
    assert losses[-1] < losses[0] and summary(muon)["optimizer"] == "Muon"


def test_a_resumed_run_with_muon_ends_in_the_same_bits(muon, run: Callable[..., str]):
    whole = record(muon)
    back_to(muon, 3)
    run(muon)
    assert record(muon) == whole


def test_a_run_with_muon_does_not_go_on_with_adamw(muon, run: Callable[..., str]):
    back_to(muon, 3)
    assert "optim.kind was muon" in run(muon, "optim.kind=adamw", code=2)


def test_two_ranks_with_muon_train_what_one_process_trains(muon):
    two = finish(replace(muon, run="two"), ranks=2)
    for key, rounding in ("loss", 2e-3), ("grad_norm", 2e-2):
        alone, together = ([row[key] for row in rows(config)] for config in (muon, two))
        assert together == pytest.approx(alone, rel=rounding)


# ------------------------------------------------------------------------------- Muon over shards

LAYOUTS = (1, 2), (1, 3), (2, 2), (4, 1)  # replicas x shards: three shards of 32 rows are not equal


def is_of_muon(name: str) -> bool:
    """Whether a weight or moment is of a matrix in a block."""
    return name.startswith("layers") and "norm" not in name


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int]], dict]:
    """What ranks_of_muon() saw with each layout."""
    folder = tmp_path_factory.mktemp("muon")
    on_ranks(4, ranks_of_muon, folder, folder / "log")
    return lambda layout: torch.load(folder / "{}x{}.pt".format(*layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_muon_has_the_bits_of_one_process(
    layouts: Callable[[tuple[int, int]], dict], layout: tuple[int, int]
):
    seen = layouts(layout)
    assert seen["sharded"].keys() == seen["whole"].keys()
    for name, due in seen["whole"].items():
        # AdamW's last values of a shard are rounded by other instructions
        rtol, atol = (0, 0) if is_of_muon(name) else (1e-6, 1e-7)
        torch.testing.assert_close(seen["sharded"][name], due, rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize(
    "layout, most", [((1, 2), 4), ((1, 3), 4), ((2, 2), 4), ((4, 1), 7)], ids=str
)
def test_each_part_of_muon_is_computed_by_one_rank(
    layouts: Callable[[tuple[int, int]], dict], layout: tuple[int, int], most: int
):
    parts = layouts(layout)["parts"]
    assert len(parts) == math.prod(layout)
    assert sum(parts) == 7 and max(parts) <= most


def test_ranks_without_a_part_of_muon_get_the_others(layouts: Callable[[tuple[int, int]], dict]):
    assert layouts((4, 1))["parts"] == [0, 0, 7, 0]


def ranks_of_muon(folder: Path) -> None:
    """One rank of four: two updates of a sharded model and of a whole one by the same gradients;
    rank 0 writes both and how many parts each rank computed."""
    rank = int(os.environ["RANK"])
    for replicas, shards in LAYOUTS:
        size = replicas * shards
        if rank >= size:
            continue
        path = folder / f"{replicas}x{shards}"
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(path), size), rank=rank, world_size=size
        )
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        world = parallel.World(rank, rank, size, torch.device("cpu"), mesh)
        if replicas == 4:  # three ranks have nothing to do
            optim.deal = lambda costs, ranks: [2 % ranks] * len(costs)
        sharded, count = two_updates(world)
        parts = parallel.all_concatenate(torch.tensor(float(count)), world)
        whole, _ = two_updates(None)
        if world.is_main:
            seen = {"sharded": sharded, "whole": whole, "parts": [int(n) for n in parts]}
            torch.save(seen, f"{path}.pt")
        dist.destroy_process_group()


def two_updates(world: parallel.World | None) -> tuple[dict[str, torch.Tensor], int]:
    """Weights and moments after two updates, of a model that is sharded over `world`; how many
    parts this rank has computed in the second."""
    model = GPT(MODEL)
    model.init_weights(0)
    if world is not None:
        parallel.shard(model, world)
    n_replicas = 1
    if world is not None and world.has_whole_weights:
        n_replicas = world.size
    optimizer = optim.build_optimizer(model, MUON, n_replicas)
    calls, compute = [], optim.orthogonalised
    optim.orthogonalised = lambda matrix: calls.append(1) or compute(matrix)
    torch.manual_seed(1)
    for _ in range(2):
        calls.clear()
        for weight in model.parameters():
            gradient = torch.randn(weight.shape)
            if isinstance(weight, DTensor):
                gradient = distribute_tensor(
                    gradient, weight.device_mesh, weight.placements, src_data_rank=None
                )
            weight.grad = gradient
        optimizer.step()
    optim.orthogonalised = compute
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    tensors |= optim.state_tensors(optimizer, model)
    return {name: full(tensor) for name, tensor in tensors.items()}, len(calls)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
