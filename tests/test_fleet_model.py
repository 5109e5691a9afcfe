"""The model of many GPUs: its bytes against what FSDP2 sends, with two gloo ranks and with worlds whose collectives are faked."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from bench import fleet_model, step_model
from bench.fleet_model import Network, collectives, fleet_step
from bench.step_model import GPUS, Shape, shape_of
from model import GPTConfig
from runtime import fp8, parallel
from runtime.config import Config, DataConfig, FP8Config, OptimConfig, ParallelConfig
from runtime.parallel import build
from tests.conftest import ROOT

H100 = GPUS["h100"]
BIG = Shape(28, 2048, 5632, 16, 1024, 50304)
TINY = GPTConfig(n_layer=3, n_head=2, n_embd=32, n_ffn=48, n_ctx=32, vocab_size=257)


# ------------------------------------------------------------------------------------------ what ranks send: real ones

class Count(TorchDispatchMode):
    """Bytes of whole tensors by kind of collective, and between how many ranks, scalars (norms, losses, scales) left out; what
    FSDP2's kernels around them read and write is "copied"."""

    def __init__(self):
        super().__init__()
        self.sent = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if "_allgather_base_" in name:
            self.sent[f"all_gather {args[0].numel() // args[1].numel()}"] += args[0].nbytes
        elif "_reduce_scatter_base_" in name:
            self.sent[f"reduce_scatter {args[1].numel() // args[0].numel()}"] += args[1].nbytes
        elif "allreduce_" in name and args[0][0].numel() > 99:
            self.sent["all_reduce"] += sum(t.nbytes for t in args[0])
        elif "all_gather_copy_in" in name:
            self.sent["copied"] += 2 * sum(t.nbytes for t in args[0])
        elif "fsdp::split_with_sizes_copy" in name:
            self.sent["copied"] += args[0].nbytes + sum(t.nbytes for t in kwargs["out"])
        elif "fsdp::chunk_cat" in name:
            self.sent["copied"] += sum(t.nbytes for t in args[0]) + kwargs["out"].nbytes
        return function(*args, **(kwargs or {}))


def one_step(config: Config, world) -> Counter:
    """What an optimizer step of `config` sends, after one that set everything up."""
    built = build(config, world)
    built.model.init_weights(0, built.assign)
    tokens = torch.zeros(config.data.micro_batch, config.model.n_ctx, dtype=torch.long)
    for _ in range(2):
        with Count() as count:
            for micro in range(accumulation := config.accumulation(world.size)):
                parallel.sync_gradients(built.model, micro == accumulation - 1, config.parallel.reshard)
                built.model(tokens, tokens).sum().backward()
            parallel.clip_gradients(built.model, 1.0)
            built.optimizer.step()
            built.optimizer.zero_grad()
    return count.sent


def losses_of(config: Config, world) -> list:
    """Three steps as train.py does them, on tokens that differ by rank; between them evaluations, at last a way back."""
    built = build(config, world)
    model, generator = built.model, torch.Generator().manual_seed(world.rank)
    model.init_weights(0, built.assign)
    fp8.refresh_fp8_weights(model)
    held_out, seen, before = torch.randint(257, (2, config.model.n_ctx), generator=generator), [], None

    @torch.no_grad()
    def evaluated() -> list:
        own = model(held_out, held_out).tolist()
        with fp8.in_bf16(model):
            return [own, model(held_out, held_out).tolist()]

    for update in range(3):
        for micro in range(accumulation := config.accumulation(world.size)):
            tokens = torch.randint(257, (2, config.model.n_ctx), generator=generator)
            parallel.sync_gradients(model, micro == accumulation - 1, config.parallel.reshard)
            loss = model(tokens, tokens).sum()
            (loss * built.loss_scale).backward()
            seen.append(loss.item())
        seen.append(parallel.clip_gradients(model, 1.0).item())
        if update == 2:
            before = [fp8.unwrap(p.detach()).to_local().clone() for p in model.parameters()], evaluated()
            fp8.reshard(model)       # whoever changes weights after an evaluation does so: a rollback
        built.optimizer.step()
        built.optimizer.zero_grad()
        fp8.refresh_fp8_weights(model)
        seen.append(evaluated())
    weights, known = before
    fp8.reshard(model)
    with torch.no_grad():
        for p, old in zip(model.parameters(), weights, strict=True):
            fp8.unwrap(p.detach()).to_local().copy_(old)
    fp8.refresh_fp8_weights(model)
    return [*seen, {"back": evaluated() == known}]


def run_of(size: int, accumulation: int, fp8: FP8Config, tied: bool = True, **changes) -> Config:
    model = replace(TINY, tied=tied)
    return Config(run="r", steps=1, model=model, fp8=fp8, optim=OptimConfig(lr=1e-3),
                  parallel=ParallelConfig(compile=False, **changes),
                  data=DataConfig(dir="none", mixture={"a": 1.0}, tokenizer="byte", micro_batch=2,
                                  tokens_per_step=size * accumulation * 2 * model.n_ctx))


GATHERED = FP8Config(recipe="tensorwise", all_gather=True)
# name -> (replicate, shard, micro-batches, reshard, float8 all-gather, tied); shards of 3 and 5 pad rows
REAL = {"bf16": (1, 2, 2, True, False, True), "kept": (1, 2, 2, False, False, True), "float8": (1, 2, 1, True, True, True),
        "untied": (1, 2, 1, True, False, False), "replicas": (2, 1, 1, True, False, True)}
SIMULATED = {"hsdp": (2, 4, 2, True, False, True), "padded": (2, 3, 1, True, False, True),
             "alone": (1, 5, 1, False, False, False)}


def config_of(case) -> Config:
    replicate, shard, accumulation, reshard, is_fp8, tied = case
    return run_of(replicate * shard, accumulation, GATHERED if is_fp8 else FP8Config(), tied, replicate=replicate, shard=shard,
                  reshard=reshard)


def work(file: str) -> None:
    """Two gloo ranks by a fork, then worlds whose collectives nobody answers: their sizes are right, their values are not."""
    import torch._dynamo, torchao.float8  # noqa: E401, F401, I001 -- what both ranks will need, read once, before the fork
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    child = os.fork()
    os.environ |= {"RANK": "1" if child == 0 else "0", "LOCAL_RANK": "1" if child == 0 else "0"}
    world, seen = parallel.start(config_of(REAL["bf16"])), {}
    for name, case in REAL.items():
        mesh = init_device_mesh("cpu", case[:2], mesh_dim_names=("replicate", "shard"))
        seen[name] = one_step(config_of(case), replace(world, mesh=mesh))
    for recipe in ("off", "tensorwise"):
        for reshard in (True, False):
            config = run_of(2, 3, GATHERED if recipe != "off" else FP8Config(), reshard=reshard)
            seen[f"losses {recipe} {reshard}"] = losses_of(config, world)
    parallel.barrier(world)
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore
    for name, case in SIMULATED.items():
        size = case[0] * case[1]
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        mesh = init_device_mesh("cpu", case[:2], mesh_dim_names=("replicate", "shard"))
        seen[name] = one_step(config_of(case), parallel.World(0, 0, size, torch.device("cpu"), mesh))
        dist.destroy_process_group()
    Path(file).write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    file = tmp_path_factory.mktemp("roofline") / "seen.json"
    done = subprocess.run([sys.executable, __file__, file], capture_output=True, text=True, timeout=300, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", [*REAL, *SIMULATED])
def test_bytes_are_those_that_fsdp_sends(seen, name):
    replicate, shard, accumulation, reshard, is_fp8, tied = {**REAL, **SIMULATED}[name]
    want = Counter()
    for s in collectives(shape_of(replace(TINY, tied=tied)), shard, replicate, accumulation, reshard, is_fp8):
        want[s.kind if s.kind == "all_reduce" else f"{s.kind} {s.ranks}"] += s.size * s.times
    got = {kind: size for kind, size in seen[name].items() if not kind.endswith((" 1", "copied"))}     # one rank sends nothing
    assert got == dict(want)
    assert want


@pytest.mark.parametrize("name", [n for n, (_, shard, *_) in (REAL | SIMULATED).items() if shard > 1])
def test_bytes_are_those_that_fsdp_copies(seen, name):
    """Rows that are padded to whole shards are summed up without them: 3 % of the narrowest tensor."""
    replicate, shard, accumulation, reshard, is_fp8, tied = {**REAL, **SIMULATED}[name]
    sent = collectives(shape_of(replace(TINY, tied=tied)), shard, replicate, accumulation, reshard, is_fp8)
    is_padded = name in ("padded", "alone")
    assert seen[name]["copied"] == pytest.approx(fleet_model.copied_bytes(sent, accumulation), rel=0.03 if is_padded else 0)


@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_weights_that_stay_gathered_over_a_step_train_the_same(seen, recipe):
    """Losses of each micro-batch, gradient norms, evaluations in between, as trained and in BF16: to the last bit."""
    often, once = (seen[f"losses {recipe} {reshard}"] for reshard in (True, False))
    assert often == once
    assert often[-1] == {"back": True}
    assert len({json.dumps(entry) for entry in often}) == len(often), "weights changed with each step"


# ------------------------------------------------------------------------------------- the fleet's seconds: what must hold

def test_exposed_is_part_of_what_is_sent_and_little_where_much_is_computed():
    for gpus in (8, 64, 512):
        for tokens in (2**20, 65_536 * gpus):
            s = fleet_step(H100, Network(), BIG, "bf16", gpus, 8, 16, tokens)
            assert 0 < s.exposed_s <= s.sending_s
            assert s.tokens == tokens
            assert s.tok_per_s_gpu >= s.without_overlap
    assert s.exposed_s / s.compute_s < 0.05, "weak scaling, 16 sequences of 1,024 tokens each time"


def test_copies_and_casts_of_fsdp_are_part_of_what_is_computed():
    """1.5B in BF16 on 64 GPUs, HSDP, one micro-batch: by hand, beside the same step without them."""
    s = fleet_step(H100, Network(), BIG, "bf16", 64, 8, 16, 2**20)
    blocks, table = 28 * (4 * 2048**2 + 3 * 2048 * 5632), 50304 * 2048
    moved = 2 * 2 * 2 * blocks * 9 / 8 + 2 * 4 * table * 9 / 8          # two gathers, BF16; one in fp32
    moved += 6 * blocks + 8 * table + 2 * 6 * blocks / 8                # gradients into the buffer; each gather's cast of a part
    less = 6 * blocks + 6 * blocks                                      # no cast of all weights, none of their gradients
    alone = step_model.step(H100, BIG, "bf16", 16, 2**14, shard=8).seconds
    assert s.compute_s - alone == pytest.approx((moved - less * (1 + step_model.IDLE)) / H100.bandwidth, rel=0.01)


def test_float8_all_gather_sends_less_and_strong_scaling_ends():
    half, whole = (fleet_step(H100, Network(), BIG, "tensorwise", 64, 64, 16, 2**20, is_fp8) for is_fp8 in (True, False))
    assert 0.5 < half.sent_bytes / whole.sent_bytes < 1
    few, many = (fleet_step(H100, Network(), BIG, "tensorwise", gpus, 8, 16, 2**20) for gpus in (64, 512))
    assert many.tok_per_s_gpu < 0.6 * few.tok_per_s_gpu


def test_a_slower_network_is_never_quicker():
    slow = Network(nvlink=35e9, adapter=4e9)
    for gpus, shard in ((8, 8), (64, 8), (64, 64)):
        a, b = (fleet_step(H100, n, BIG, "bf16", gpus, shard, 16, 2**20) for n in (Network(), slow))
        assert b.sending_s > 5 * a.sending_s
        assert b.tok_per_s_gpu < a.tok_per_s_gpu


def test_collectives_take_what_rings_take():
    """By hand: 8 GPUs of one machine; 16 of two, where the adapters of a machine bring in half of it."""
    network = Network(hop_s=0, far_hop_s=0)
    gather = fleet_model.Sent("all_gather", "block", 10**9, 8, 1)
    assert fleet_model.seconds(network, gather, 8) == pytest.approx(1e9 * 7 / 8 / 350e9)
    assert fleet_model.seconds(network, gather._replace(ranks=16), 16) == pytest.approx(1e9 * 15 / 16 / 350e9)
    assert fleet_model.seconds(replace(network, adapter=10e9), gather._replace(ranks=16), 16) == pytest.approx(0.5e9 / 80e9)
    summed = gather._replace(kind="all_reduce", ranks=2)
    assert fleet_model.seconds(network, summed, 8) == pytest.approx(1e9 / 42e9)
    assert fleet_model.seconds(network, summed, 4) == pytest.approx(1e9 / 350e9)


if __name__ == "__main__":
    work(sys.argv[1])
