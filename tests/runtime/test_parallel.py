"""Recomputation, refusals and restarts in one process; sharding, weights gathered as float8, our
kernels and compilation on two gloo ranks, in one start of torchrun; slurm.sh against stubs of srun
and scontrol."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_args as torchrun_options
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import train
from fp8 import linears, selection
from fp8.copies import refresh_weight_copies, zero_gradients
from fp8.precision import Precision
from fp8.probe import Probe
from fp8.recipes import RECIPES
from fp8.sharded import max_over_ranks, reshard, unwrap
from lib.errors import MachineError, UserError
from lib.files import read_rows
from runtime import parallel
from runtime.checkpoint import gather, latest, load_model, read_manifest, run_on_rank0
from runtime.config import config_from_dict
from runtime.data import NO_TARGET, Data
from runtime.optim import local
from runtime.tokenizer import load_tokenizer
from runtime.validation import evaluate
from tests.conftest import ALONE, ROOT, changed, process, tiny_config, write_config
from tests.fp8.test_linears import tokens
from tests.helpers.faults import FORKS, back_to, record, rows, summary

WIDE_HEADS = "model.head_size=48 model.n_kv_head=1"  # 96 channels of attention in a width of 32
# what tiny models can have
SHARDED = ("off", *(name for name, recipe in RECIPES.items() if recipe.multiple <= 32))


def build(config, words="", world=ALONE):
    """An initialised model, built as for training, in BF16 unless the settings say otherwise."""
    built = parallel.build(changed(config, f"fp8.recipe=off fp8.all_gather=false {words}"), world)
    built.model.init_weights(0, built.assign)
    refresh_weight_copies(built.model)
    return built


def step(built, world=ALONE, micros=1, reshard=True, seed=0):
    """Loss of the last and gradients of all of a step's micro-batches, on this rank's own
    tokens."""
    for micro in range(micros):
        parallel.sync_gradients(built.trained, micro == micros - 1, reshard)
        loss = built.trained(*tokens(seed + 10 * world.rank + micro)).sum()
        loss.backward()
    return loss.item(), {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in built.model.named_parameters()
    }


def same(a, b) -> bool:
    return (
        a[0] == b[0]
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][name], b[1][name]) for name in a[1])
    )


def test_a_command_of_two_processes_that_had_no_need_to_join_ends_with_its_own_code(monkeypatch):
    """torchrun .. -m eval.harness --help, or --fetch."""
    monkeypatch.setattr(os, "_exit", (ended := mock.Mock()))
    parallel.finish(replace(ALONE, size=2), 0)
    ended.assert_called_once_with(0)


@pytest.mark.parametrize(
    "environment, share",
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "1"}, (0, 1)),
        ({"LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        # of another job, which has left its environment behind
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, (0, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_a_rank_does_the_whole_work_of_its_machine_unless_the_launcher_tells_its_place_there(
    monkeypatch, environment, share
):
    """Else ranks of a pod each, started with RANK and WORLD_SIZE alone, all hash the same half of
    the shards."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    local_rank = int(environment.get("LOCAL_RANK", 0))
    world = replace(
        ALONE, rank=1, local_rank=local_rank, size=4, local_size=parallel._local_size(4)
    )
    assert world.share_of_machine == share


@pytest.mark.parametrize(
    "words, environment, seconds",
    [
        ([], {}, 30),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120", "PET_SHUTDOWN_TIMEOUT": "90"}, 90),
        (["--shutdown-timeout=300"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 300),
        (["--shutdown_timeout", "45"], {}, 45),
    ],
)
def test_a_rank_knows_after_which_time_torchrun_kills_it(monkeypatch, words, environment, seconds):
    """As torchrun itself reads its options and variables."""
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    genuine = LaunchConfig(
        1, 1, 1, shutdown_timeout=torchrun_options([*words, "train.py"]).shutdown_timeout
    )
    with subprocess.Popen(
        [sys.executable, "-c", "input(print(flush=True))", *words], stdin=-1, stdout=-1
    ) as launcher:
        launcher.stdout.readline()  # it runs
        world = replace(ALONE, launcher=SimpleNamespace(pid=launcher.pid))
        assert parallel.shutdown_timeout(world) == genuine.shutdown_timeout == seconds
        launcher.communicate(b"\n")
    assert parallel.shutdown_timeout(ALONE) is None, "there is none"


def test_a_rank_whose_torchrun_ended_while_it_was_starting_does_not_train_on(tiny, monkeypatch):
    """It would count the process that has adopted it as its torchrun, which may be a container's
    first process too."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(parallel, "launcher_pid", lambda: 1)
    # would end this process after the test
    monkeypatch.setattr(parallel.Launcher, "_watch", lambda launcher: None)
    maps = {"/proc/1/comm": "python\n", "/proc/1/maps": "7f00 r-xp /lib/libtorch_cpu.so"}
    monkeypatch.setattr(Path, "read_text", lambda path, **_: maps[str(path)])
    assert parallel.start(tiny).launcher.pid == 1
    maps["/proc/1/maps"] = "7f00 r-xp /lib/libc.so.6"
    with pytest.raises(MachineError, match="torchrun, which started this process, has ended"):
        parallel.start(tiny)


# ------------------------------------------------------------------------------- one process alone


def test_recomputation_runs_a_block_twice_but_for_attention_and_changes_no_name_and_nothing_that_a_probe_sees(
    tiny, tmp_path
):
    """Of a block its input and attention's output alone are kept; a pass without gradients is not
    recomputed. The bits of every recipe: on two ranks, below."""
    seen, counts, kept = [], [], []
    for recompute in (False, True):
        built = build(tiny, f"fp8.recipe=tensorwise parallel.recompute={recompute}")
        model, ops, sizes = built.model, [], []

        class Spy(TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None, ops=ops):
                ops.append("attention" if op in parallel.ATTENTION else str(op))
                return op(*args, **(kwargs or {}))

        with (
            Spy(),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
            ),
        ):
            step(built)
            with torch.no_grad():
                model(torch.zeros(1, 32, dtype=torch.long))
        counts.append((ops.count("aten.silu.default"), ops.count("attention")))
        kept.append(sum(sizes))  # those of checkpointed regions aside
        zero_gradients(model)
        Probe(
            path := tmp_path / f"{recompute}.jsonl", model, selection.recipes(built.layers, 1.0), 64
        )(1, *tokens(0), 1.0)
        seen.append(([name for name, _ in model.named_modules()], path.read_text()))
    assert seen[0] == seen[1] and '"gradient"' in seen[0][1]
    assert counts == [(4, 4), (6, 4)] and kept[1] < kept[0] / 2  # two blocks, twice forward


@pytest.mark.parametrize("recipe", SHARDED)
def test_a_micro_batch_without_targets_has_a_loss_and_gradients_of_zero(tiny, recipe):
    """As one rank of several may have it: no 0 / 0, and no scale of a gradient that is zero."""
    model = build(tiny, f"fp8.recipe={recipe}").model
    x, y = tokens()
    losses = model(x, torch.full_like(y, NO_TARGET))
    losses.sum().backward()
    assert losses.tolist() == [0.0] * len(x)
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_compiled_whole_and_recomputed_it_differs_by_rounding_alone(tiny):
    """Inductor fuses operations between which eager rounds to BF16. Compiled by blocks: on two
    ranks, below."""
    built = build(tiny, "model.n_layer=1 parallel.recompute=true parallel.compile=model")
    assert [
        module._compiled_call_impl is not None for module in (built.model, *built.model.layers)
    ] == [True, False]
    (loss, eager), (compiled_loss, compiled) = step(build(tiny, "model.n_layer=1")), step(built)
    assert compiled_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in eager.items():
        assert torch.linalg.norm(compiled[name] - gradient) <= 0.02 * torch.linalg.norm(gradient), (
            name
        )


LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment, changes, told",
    [
        (LAUNCH, "parallel.shard=3", "parallel.shard=3 does not make 2 processes"),
        ({}, "fp8.all_gather=true", "fp8.all_gather=true needs several ranks"),
        (LAUNCH, "fp8.all_gather=true parallel.replicate=2", "each of 2 has them whole"),
        (LAUNCH, "fp8.all_gather=true fp8.head=true", "while the embedding shares its weight"),
        (
            LAUNCH
            | {
                "GROUP_WORLD_SIZE": "2",
                "TORCHELASTIC_MAX_RESTARTS": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            "",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
        ({"PATH": ""}, "parallel.compile=true", "install g\\+\\+"),
    ],
)
def test_what_does_not_fit_the_ranks_or_the_machine_is_refused(
    tiny, monkeypatch, environment, changes, told
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        parallel.start(changed(tiny, f"fp8.recipe=tensorwise {changes}"))
    three = SimpleNamespace(
        size=3,
        device=torch.device("cpu"),
        mesh={"shard": SimpleNamespace(size=lambda: 3)},
        has_whole_weights=False,
    )
    with pytest.raises(
        UserError, match=r"32 rows of layers.0.attn.out.weight do not divide among 3 ranks"
    ):
        # torchao would not pad them
        build(tiny, "fp8.recipe=tensorwise fp8.all_gather=true model.n_ffn=96", three)


# ------------------------------------------------------------------------------- what two ranks do


def work(folder: Path) -> None:
    """The runs of folder/*.json, then experiments with models; rank 0 writes what it saw."""
    whole, halves = (
        config_from_dict(json.loads((folder / f"{name}.json").read_text()))
        for name in ("whole", "halves")
    )
    world = parallel.start(whole)
    with mock.patch.object(Precision, "set_position", autospec=True) as placed:
        train.train(whole, world)
        if world.is_main:  # as a kill after step 3 would leave it
            shutil.copytree(whole.run_dir, halves.run_dir)
            back_to(halves, 3)
        run_on_rank0(world, lambda: None)
        train.train(halves, world)
    groups = (dist.group.WORLD, *world.mesh.get_all_groups(), world.checkpoint_group)
    replicas = replace(
        world, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    )
    seen = {
        "local_size": world.local_size,
        "positions": gather([call.args[1] for call in placed.call_args_list], world),
        "timeouts": [
            group._get_backend(world.device).options._timeout.total_seconds() for group in groups
        ],
        "gathered": [
            gathered(whole, world, *how)
            for how in (("tensorwise", True), ("tensorwise", False), ("tensorwise_gw_hp", True))
        ],
        "gathered_wide": gathered(changed(whole, WIDE_HEADS), world, "tensorwise", True),
        "kernels": [
            descent(
                whole, world, f"fp8.head=true fp8.kernels={kernels} parallel.recompute={recompute}"
            )
            for kernels, recompute in ((False, False), (True, False), (True, True))
        ],
        "unsharded": (
            [equals_unsharded(whole, *how) for how in ((world,), (world, False), (replicas,))]
            + [equals_unsharded(changed(whole, WIDE_HEADS), world)]
        ),
        "compiled": [
            descent(whole, world, f"model.n_layer=1 parallel.compile={compiled}")
            for compiled in (False, True)
        ],
        "graphs": counters["stats"]["unique_graphs"],
        "same": {},
    }
    for recipe in SHARDED:
        plain, *others = [
            step(build(whole, f"fp8.recipe={recipe} {way}", world), world)
            for way in (
                "",
                "parallel.recompute=true",
                "parallel.reshard=false",
                "parallel.recompute=true parallel.reshard=false",
            )
        ]
        seen["same"][recipe] = [same(plain, other) for other in others]
    if world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen))
    parallel.finish(world, 0)


def gathered(config, world, recipe: str, reshard: bool) -> dict:
    """Of weights gathered as float8, the head's too, then of plain ones: bytes that this rank gives
    to the all-gathers of a forward pass, the loss as trained, the loss in BF16 within a block that
    fails, the loss after it; all-reduces of a refresh."""
    # until torch 2.12
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    seen, gather, (x, y) = {"sent": [], "losses": []}, getattr(dist, name), tokens(world.rank)
    for words in f"fp8.recipe={recipe} fp8.all_gather=true fp8.head=true", "":
        model, sizes, losses = (
            build(config, f"{words} model.tied=false parallel.reshard={reshard}", world).model,
            [],
            [],
        )

        def counted(output, input, *args, sizes=sizes, **kwargs):
            sizes.append(input.numel() * input.itemsize)
            return gather(output, input, *args, **kwargs)

        with torch.no_grad(), mock.patch.object(dist, name, counted):
            losses.append(model(x, y).tolist())
            seen["sent"].append(sum(sizes))
            with pytest.raises(KeyError), Precision(model).in_bf16():
                losses.append(model(x, y).tolist())
                raise KeyError
            losses.append(model(x, y).tolist())
        seen["losses"].append(losses)
        Precision(model).reshard()  # as a backward pass does
        with CommDebugMode() as mode:
            refresh_weight_copies(model)
        seen.setdefault("all_reduces", mode.get_total_counts())
    return seen


def equals_unsharded(config, world, reshard=True) -> list[bool]:
    """Loss, gradients over two micro-batches and their norm, against models of one process,
    gradients summed in fp32."""
    built = build(config, f"parallel.reshard={reshard}", world)
    loss, gradients = step(built, world, micros=2, reshard=reshard)
    # rank 0's micro-batches, rank 1's
    alone = [step(build(config), seed=seed) for seed in (0, 1, 10, 11)]
    # FSDP averages over the ranks.
    wanted = {
        name: (
            ((alone[0][1][name] + alone[1][1][name]) + (alone[2][1][name] + alone[3][1][name])) / 2
        )
        for name in gradients
    }
    are_equal = [
        loss == alone[1 + 2 * world.rank][0],
        *(torch.equal(gradients[name], wanted[name]) for name in wanted),
    ]
    norm = (
        torch.stack([torch.linalg.vector_norm(gradient.double()) for gradient in wanted.values()])
        .norm()
        .item()
    )
    norms = [parallel.clip_gradients(built.model, 1.0).item() for _ in range(2)]
    return [*are_equal, abs(norms[0] / norm - 1) < 1e-6, abs(norms[1] - 1) < 1e-5]


def descent(config, world, words) -> list[tuple[float, float]]:
    """Loss of all ranks and norm of all gradients of three steps downhill, tensorwise, then the
    loss in BF16."""
    built, told = build(config, f"fp8.recipe=tensorwise {words}", world), []
    for _ in range(3):
        loss, gradients = step(built, world)
        norm = (
            torch.stack([torch.linalg.norm(gradient) for gradient in gradients.values()])
            .norm()
            .item()
        )
        told.append((parallel.all_sum(torch.tensor(loss), world).item(), norm))
        with torch.no_grad():
            for weight in built.model.parameters():
                weight -= 1e-3 * weight.grad
        zero_gradients(built.model)
        refresh_weight_copies(built.model)
    with built.precision.in_bf16(), torch.no_grad():
        return [
            *told,
            (parallel.all_sum(built.model(*tokens(10 * world.rank)).sum(), world).item(), 0.0),
        ]


# ---------------------------------------------------------- a NaN on one rank is seen by all ranks


def nan_on_one_rank(folder: Path, base, rank: int, size: int, port: int) -> None:
    """One of `size` ranks: a NaN on each rank in turn, in all that a MAX over the ranks decides;
    writes what this rank saw."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    # for two ranks and three
    words = f"data.tokens_per_step={size * 128} model.n_embd=48 model.n_ffn=96"
    config = changed(base, f"{words} parallel.shard={size}")
    world = parallel.start(config)
    delayed = build(config, "fp8.recipe=tensorwise fp8.kernels=true fp8.scaling=delayed", world)
    gathered_as_float8 = build(config, "fp8.recipe=tensorwise fp8.all_gather=true", world)
    name = "layers.0.attn.qkv"
    seen = []
    for bad in range(size):
        value = math.nan if rank == bad else float(rank)
        largest = max_over_ranks(
            torch.tensor([value, float(rank), -math.inf, math.inf if rank == 0 else 0.0])
        )
        linear = delayed.model.get_submodule(name)
        linear.x_amax.fill_(value)
        delayed.model.get_submodule("layers.1.attn.qkv").x_amax.fill_(1.0 + rank)
        delayed.precision.after_passes()
        history = delayed.precision.state()
        losses = {}
        for kind, built in ("kernels", delayed), ("all_gather", gathered_as_float8):
            shard = local(unwrap(built.model.get_submodule(name).weight.detach()))
            before = shard.clone()
            shard[0, 0] = value if rank == bad else shard[0, 0]
            refresh_weight_copies(built.model)
            if kind == "kernels":
                scale = linear.scale.item()
            with torch.no_grad():
                losses[kind] = built.model(*tokens(rank)).sum().item()
            reshard(built.model)
            shard.copy_(before)
            refresh_weight_copies(built.model)
        seen.append(
            {
                "largest": largest.tolist(),
                "history": history[f"{name}.x"][0],
                "scale": scale,
                "losses": losses,
                "history_beside_it": history["layers.1.attn.qkv.x"][0],
            }
        )
        delayed.precision.before_step(1.0)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    parallel.finish(world, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_a_nan_on_any_rank_is_seen_by_all_and_hides_no_maximum(tiny, tmp_path, size):
    """gloo's own MAX drops it or keeps it by its rank: [0, NaN, 2] becomes 0 on all three."""
    port = get_free_port()
    ranks = [
        FORKS.Process(target=nan_on_one_rank, args=(tmp_path, tiny, rank, size, port))
        for rank in range(size)
    ]
    for process_of_rank in ranks:
        process_of_rank.start()
    for process_of_rank in ranks:
        process_of_rank.join(240)
    assert [process_of_rank.exitcode for process_of_rank in ranks] == [0] * size
    for rank in range(size):
        for seen in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert str(seen["largest"]) == str([math.nan, size - 1.0, -math.inf, math.inf])
            assert (seen["history"], seen["history_beside_it"]) == (
                0.0,
                float(size),
            ), "delayed scales"
            assert math.isnan(seen["scale"]), "of a sharded weight"
            assert all(math.isnan(loss) for loss in seen["losses"].values()), (
                "which the verdict on the step sums"
            )


# ------------------------------------------------------------------------ what they must have seen


def in_fp32() -> bool:
    """In the place of has_bf16_units(): as torchao's emulation, which the ranks have, multiplies."""
    return False


@pytest.fixture(scope="module")
def ranks(data_dir, tmp_path_factory):
    shared = tmp_path_factory.mktemp("ranks")
    whole = changed(
        tiny_config(data_dir, shared / "out"),
        "run=whole fp8.recipe=tensorwise fp8.all_gather=true parallel.start_timeout=777",
    )
    halves = changed(whole, "run=halves probe.every=2 probe.tokens=64")  # resumed after step 3
    one = changed(whole, "run=one fp8.all_gather=false")  # by this process
    for config in (whole, halves):
        (shared / f"{config.run}.json").write_text(json.dumps(asdict(config)))
    done = process(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, shared
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with mock.patch.object(linears, "has_bf16_units", in_fp32):
        train.train(one, ALONE)
    return SimpleNamespace(
        whole=whole, halves=halves, one=one, **json.loads((shared / "seen.json").read_text())
    )


def test_sharded_replicated_recomputed_or_kept_gathered_it_is_the_same_bits_and_our_kernels_follow_torchao(
    ranks,
):
    assert (
        all(map(all, ranks.unsharded))
        and len(ranks.unsharded) == 4
        and all(len(equal) > 10 for equal in ranks.unsharded)
    )
    assert ranks.same == dict.fromkeys(SHARDED, [True, True, True])
    assert ranks.gathered[0] == ranks.gathered[1]
    torchao, ours, recomputed = map(torch.tensor, ranks.kernels)
    assert torch.equal(ours, recomputed) and ours[2, 0] < 0.99 * ours[0, 0]
    torch.testing.assert_close(ours[0, 0], torchao[0, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[:, 0], torchao[:, 0], rtol=3e-3, atol=0)


def test_two_compiled_fp8_ranks_agree_with_eager_ones_and_no_collective_times_out_before_the_watchdog(
    ranks,
):
    """The default of every GPU config: blocks, head and loss compiled apart, under FSDP2, none of
    them twice. A collective that timed out would end the run before the cause is printed."""
    assert set(ranks.timeouts) == {2 * 777.0} and ranks.local_size == 2
    eager, compiled = map(torch.tensor, ranks.compiled)
    torch.testing.assert_close(compiled[:, 0], eager[:, 0], rtol=2e-3, atol=0)
    torch.testing.assert_close(compiled[:, 1], eager[:, 1], rtol=2e-2, atol=0)
    assert (
        not torch.equal(compiled[:3], eager[:3]) and eager[2, 0] < eager[0, 0] and ranks.graphs == 2
    )


def test_resumed_and_probed_it_is_the_same_bits(ranks):
    """Scales not renewed after the load or an update would show here, and any trace of the probes,
    which one rank writes."""
    assert record(ranks.whole) == record(ranks.halves)
    first, second = ([*range(128 * rank, 6 * 512, 2 * 128)] for rank in (0, 1))
    assert ranks.positions == [
        first + first[6:],
        second + second[6:],
    ], "of stochastic rounding: each micro-batch has its own"
    weights = load_model(ranks.halves.run_dir)[0].state_dict()
    linears = [
        row for row in read_rows(ranks.halves.run_dir / "probe.jsonl") if row["kind"] == "linear"
    ]
    assert [row["step"] for row in linears] == 8 * [4] + 8 * [6] and len(
        {row["layer"] for row in linears}
    ) == 8
    for row in linears[8:]:  # of step 6, before the last save
        assert (
            row["weight"]["amax"] == weights[f"{row['layer']}.weight"].abs().max().item()
            and row["gradient"]["amax"] > 0
        )


def test_ranks_train_what_one_process_trains_and_its_checkpoints_are_plain(ranks):
    """One process rounds its weights from fp32 to float8 as well, so that the first loss agrees to
    the last bit; without the float8 all-gather, the ranks round to BF16 in between. One process and
    BF16 weights give the summary's very loss."""
    a, b = rows(ranks.one), rows(ranks.whole)
    assert a[0]["loss"] == b[0]["loss"]
    assert a[0]["grad_norm"] == pytest.approx(b[0]["grad_norm"], rel=1e-5)
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-3)
    assert a[-1]["loss"] < a[0]["loss"] - 0.5, "there was something to learn"
    manifests = [read_manifest(latest(c.run_dir)) for c in (ranks.one, ranks.whole)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"], (
        "names, shapes, dtypes of a checkpoint"
    )
    assert not any(
        b"torchao" in file.read_bytes() for file in latest(ranks.whole.run_dir).iterdir()
    )
    model, config = load_model(ranks.whole.run_dir)
    data = Data(config, load_tokenizer("byte").sha256)
    loss = evaluate(model, data.val, data.weights, config.data.micro_batch, torch.device("cpu"))
    told = summary(ranks.whole)
    assert loss.loss == told["loss_bf16"] != told["loss_as_trained"]


def test_a_recomputed_deterministic_run_is_the_same_run(ranks, run, monkeypatch):
    """From config key to weights; on a CPU neither changes a bit. What was switched on is switched
    off again."""

    def switches():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.deterministic,
            inductor.deterministic,
        )

    monkeypatch.setattr(linears, "has_bf16_units", in_fp32)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config = changed(ranks.one, "run=changed deterministic=true parallel.recompute=true")
    try:
        assert "torch: deterministic algorithms" in run(config)
        assert (
            switches() == (True, True, True) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        )
    finally:
        assert parallel.set_torch_flags(ranks.one, ALONE, []) == []
    assert switches() == (False, False, False)
    assert record(config) == record(ranks.one)


@pytest.mark.parametrize("at", [1, 2, "wide heads"])
def test_weights_gathered_as_float8_send_half_and_evaluate_in_bf16_as_plain_ones(ranks, at):
    seen, c = (
        (ranks.gathered_wide, changed(ranks.whole, WIDE_HEADS).model)
        if at == "wide heads"
        else (ranks.gathered[at], ranks.whole.model)
    )
    (trained, in_bf16, after), plain = seen["losses"]
    assert [in_bf16] * 3 == plain and trained == after != in_bf16, (
        "in_bf16 must end, even after an error"
    )
    # Each of the 2 ranks sends half: a byte less for each of the Linears' values, BF16 else, three
    # less for the head's, fp32.
    # heads of q, of k and v, of the output
    attention = (2 + 2 * 1 + 2) * 48 if at == "wide heads" else 4 * c.n_embd
    linears = c.n_layer * c.n_embd * (attention + 3 * c.n_ffn)
    assert 2 * (seen["sent"][1] - seen["sent"][0]) == linears + 3 * c.vocab_padded * c.n_embd
    assert seen["all_reduces"] == 1


# ---------------------------------------------------------------------------------------- slurm.sh

SRUN = """#!/bin/bash
# Starts the tasks as slurmstepd would; the step's exit code is the highest of theirs.
echo "srun $*" >> "$STUBS/calls"
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!)
done
if [ -n "${WARN:-}" ]; then        # that the time is nearly over, to each task
    until ls "$WARN"/checkpoints/step_* > "$STUBS/saved" 2>&1; do sleep 0.05; done
    kill -USR1 "${pids[@]}"
fi
code=0
for pid in "${pids[@]}"; do
    wait "$pid"; c=$?; ((c > code)) && code=$c
done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$STUBS/calls"
[ "$1" = show ] && printf 'localhost\\nnode2\\n'
[ -z "${NO_REQUEUE:-}" ] || [ "$1" != requeue ]
"""
# In place of train.py's interpreter: training is one line of shell, and so, unless asked, is what
# reads the settings.
PYTHON = f"""#!/bin/bash
[ "$1" = -c ] && [ -n "${{READ:-}}" ] && exec {sys.executable} "$@"
[ "$1" = -c ] && echo "$RUN" && exit 0
echo "task $RANK/$LOCAL_RANK/$LOCAL_WORLD_SIZE/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS $*" >> "$STUBS/calls"
eval "$TASK"
"""


@pytest.fixture
def slurm(tiny, tmp_path):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    config = replace(tiny, run="job", out=str(tmp_path / "a folder"))
    env = {
        **os.environ,
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "STUBS": str(stubs),
        "PYTHON": str(stubs / "python"),
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    return SimpleNamespace(
        stubs=stubs, config=config, file=write_config(config, tmp_path / "job.py"), env=env
    )


def submit(slurm, task="exit 0", *arguments, **env):
    """Runs the job script to its end; returns its exit code, what it says, what srun and scontrol
    were asked for."""
    calls = slurm.stubs / "calls"
    calls.write_text("")
    done = subprocess.run(
        ["bash", ROOT / "slurm.sh", *(arguments or (slurm.file,))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**slurm.env, "RUN": str(slurm.config.run_dir), "TASK": task, **env},
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def test_each_task_learns_its_rank_and_the_settings_arrive_whole(slurm):
    code, _, calls = submit(
        slurm,
        "exit 0",
        slurm.file,
        "optim.lr=3e-4",
        "run=job",
        SLURM_RESTART_COUNT="3",
        READ="1",
        SLURM_NTASKS="4",
        SLURM_NNODES="2",
    )
    assert code == 0 and sorted(call for call in calls if call.startswith("task")) == [
        f"task {i}/{i}/2/4 localhost:24714 1 train.py {slurm.file} optim.lr=3e-4 run=job"
        for i in range(4)
    ]


@pytest.mark.parametrize(
    "task, code, requeued, told, env",
    [
        ("exit 0", 0, True, "code 0): requeued", {}),  # warned, saved, left
        ('touch "$RUN/summary.json"', 0, False, "", {}),
        (
            'mkdir -p "$RUN/checkpoints/step_00000007"; exit 2',
            2,
            False,
            "mistake in the settings",
            {},
        ),
        ("exit 1", 1, False, "nothing new was saved", {}),
        ('mkdir -p "$RUN/checkpoints/step_00000007"; exit 1', 0, True, "code 1): requeued", {}),
        ("[ $RANK = 1 ] && kill -9 $$; exit 1", 137, False, "code 137, and nothing new", {}),
        ("kill -USR1 $$", 0, True, "code 138): requeued", {}),  # warned before it could listen
        ("exit 0", 1, True, "scontrol requeue failed", {"NO_REQUEUE": "1"}),
        # told before any task is started
        (None, 2, False, "there is no key 'optim.lrr'", {"READ": "1"}),
        (None, 2, False, "submit it from the repository's folder", {"SLURM_SUBMIT_DIR": "/"}),
    ],
)
def test_what_is_requeued_and_mistakes(slurm, task, code, requeued, told, env):
    (slurm.config.run_dir / "checkpoints/step_00000005").mkdir(parents=True)
    (slurm.config.run_dir / "checkpoints/bad_step_00000009").mkdir()
    have, errors, calls = submit(
        slurm, task or "exit 0", slurm.file, *["optim.lrr=1"] * ("READ" in env), **env
    )
    assert (have, "scontrol requeue 4711" in calls) == (code, requeued) and told in errors, errors
    assert bool(calls) == bool(task)


def test_warned_the_real_train_py_saves_and_is_requeued(slurm):
    """Two gloo ranks; SIGUSR1 to both, as Slurm sends it."""
    write_config(
        changed(slurm.config, "steps=10_000 checkpoint.every=4 data.max_epochs=1000"), slurm.file
    )
    job = str(os.getpid())  # the port follows from it
    code, out, calls = submit(
        slurm, PYTHON=sys.executable, SLURM_JOB_ID=job, WARN=str(slurm.config.run_dir)
    )
    assert code == 0 and "requeued" in out and f"scontrol requeue {job}" in calls, out
    stopped = int(re.search(r"stopped on request at step (\d+)", out)[1])
    assert (slurm.config.run_dir / f"checkpoints/step_{stopped:08}/DONE").exists()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
