"""Tests of runtime/parallel.py: recomputation, deterministic mode, restarts; sharding and compilation on two gloo ranks."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from model import GPTConfig, KVCache
from runtime import fp8, parallel
from runtime.cli import UserError
from runtime.config import Config, DataConfig, FP8Config, OptimConfig, ParallelConfig, config_from_dict
from runtime.probe import Probe
from runtime.quantize import RECIPES
from runtime.rows import read_rows
from tests.conftest import ROOT, call_train, with_recipe

ALONE = parallel.World(0, 0, 1, torch.device("cpu"))
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=64, n_ctx=32, vocab_size=257)
CONFIG = Config(run="ranks", steps=6, model=TINY, optim=OptimConfig(lr=1e-2), parallel=ParallelConfig(compile=False),
                data=DataConfig(dir="none", mixture={"web": 1}, tokenizer="byte", tokens_per_step=512, micro_batch=4))


def build(world=ALONE, recipe="off", all_gather=False, model=TINY, **changes):
    """An initialised model and the layers that were converted; changes: of config.parallel."""
    config = replace(CONFIG, model=model, fp8=FP8Config(recipe=recipe, all_gather=all_gather),
                     parallel=replace(CONFIG.parallel, **changes))
    built = parallel.build(config, world)
    built.model.init_weights(0, built.assign)
    fp8.refresh_fp8_weights(built.model)
    return built.model, built.layers


def tokens(seed):
    return torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(seed))


def step(model, world=ALONE, micros=1, reshard=True, seed=0):
    """Loss of the last and gradients of all of a step's micro-batches, on this rank's own tokens."""
    for micro in range(micros):
        parallel.sync_gradients(model, micro == micros - 1, reshard)
        loss = model(*tokens(seed + 10 * world.rank + micro)).sum()
        loss.backward()
    return loss.item(), {name: p.grad.full_tensor() if world.size > 1 else p.grad for name, p in model.named_parameters()}


def same(a, b) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


# ----------------------------------------------------------------------------------------------------- one process alone

@pytest.mark.parametrize("recipe", ["off", *RECIPES])
def test_recomputation_changes_no_bit_and_no_name(recipe):
    (plain, _), (again, _) = build(recipe=recipe), build(recipe=recipe, recompute=True)
    assert list(plain.state_dict()) == list(again.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in again.named_modules()]
    assert same(step(plain), step(again))


def test_a_recomputed_block_runs_twice_a_step_and_keeps_its_input_alone():
    def count(recompute):
        model, calls = build(model=replace(TINY, loss_chunk=16), recompute=recompute)[0], []
        for block in model.layers:
            block.attn.register_forward_hook(lambda *_: calls.append(1))
        with kept() as sizes:
            step(model)
        with torch.no_grad():
            model(torch.zeros(1, 32, dtype=torch.long))
        return len(calls), sum(sizes)

    (calls, plain), (again, less) = count(False), count(True)
    assert (calls, again) == (4, 6), "a pass without gradients is not recomputed"
    assert less < plain / 2


@contextmanager
def kept():
    """Elements that autograd keeps for the backward pass, the inner tensors of checkpointed regions aside."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        yield sizes


def test_a_recomputed_model_samples_with_its_cache():
    models, ids = [build(recompute=recompute)[0] for recompute in (False, True)], torch.arange(9)[None]
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            logits = []
            for model in models:
                cache = KVCache()
                model(ids[:, :8], cache=cache)
                logits.append(model(ids[:, 8:], cache=cache))
        assert torch.equal(*logits)


def test_a_probe_sees_the_same_through_recomputation(tmp_path):
    seen = []
    for recompute in (False, True):
        model, layers = build(recipe="tensorwise", recompute=recompute)
        path = tmp_path / f"{recompute}.jsonl"
        Probe(path, model, fp8.recipes(layers, 1.0), 64)(1, *tokens(0), 1.0)
        seen.append(path.read_text())
    assert seen[0] == seen[1] and '"gradient"' in seen[0]


def test_compiled_recomputation_rounds_like_compilation_itself():
    """Inductor fuses operations between which eager rounds to BF16, with recomputation and without."""
    one = replace(TINY, n_layer=1)
    loss, eager = step(build(model=one)[0])
    compiled_loss, compiled = step(build(model=one, recompute=True, compile=True)[0])
    assert compiled_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in eager.items():
        assert torch.linalg.norm(compiled[name] - gradient) < 0.05 * torch.linalg.norm(gradient), name


@pytest.mark.parametrize("workspace, is_allowed", [
    (None, True), (":4096:8", True), (":16:8", True), (":8:16", False), ("", False)])
def test_deterministic_is_switched_on_and_off_again(monkeypatch, workspace, is_allowed):
    import torch._inductor.config as inductor
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace or "")
    if workspace is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    config = replace(CONFIG, deterministic=True)
    try:
        if is_allowed:
            assert f"CUBLAS_WORKSPACE_CONFIG={workspace or ':4096:8'}," in parallel.set_torch_flags(config, ALONE, [])[0]
            assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
            assert inductor.deterministic and os.environ["CUBLAS_WORKSPACE_CONFIG"] == (workspace or ":4096:8")
            assert not torch.utils.deterministic.fill_uninitialized_memory
        else:
            with pytest.raises(UserError, match=f"to be :4096:8 or :16:8, not '{workspace}': set it to one"):
                parallel.set_torch_flags(config, ALONE, [])
    finally:
        lines = parallel.set_torch_flags(CONFIG, ALONE, [])
    assert lines == [] and not inductor.deterministic
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


def test_a_recomputed_deterministic_run_is_the_same_run(tiny, tmp_path, capsys, monkeypatch):
    """From config key to weights; on a CPU neither changes a bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    changed = with_recipe(tiny, "tensorwise", run="changed", deterministic=True, parallel=replace(tiny.parallel, recompute=True))
    try:
        runs = [call_train(capsys, config, tmp_path) for config in (with_recipe(tiny, "tensorwise"), changed)]
    finally:
        parallel.set_torch_flags(tiny, ALONE, [])
    assert [run.returncode for run in runs] == [0, 0], runs
    assert "torch: deterministic algorithms" in runs[1].stdout and "deterministic" not in runs[0].stdout
    first, second = ([(row["loss"], row["grad_norm"]) for row in read_rows(config.run_dir / "metrics.jsonl")
                      if row["kind"] == "train"] for config in (tiny, changed))
    assert first == second and len(first) == 6


# ----------------------------------------------------------------------------------------------------- stores and restarts

@pytest.mark.parametrize("shared, key", [("True", "attempt3/address"), ("False", "address")])
def test_a_store_that_outlives_its_workers_gets_keys_of_the_attempt(monkeypatch, shared, key):
    """Not another, since nodes may disagree on the count of restarts (pytorch#135712)."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    store = dist.HashStore()
    parallel.own_keys(store).set("address", "x")
    assert store.get(key) == b"x"


@pytest.mark.parametrize("nodes, restarts, shared, refused", [
    ("2", "1", "True", True), ("1", "1", "True", False), ("2", "0", "True", False), ("2", "1", "False", False)])
def test_several_nodes_restart_with_a_fresh_store_only(monkeypatch, nodes, restarts, shared, refused):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_MAX_RESTARTS": restarts,
                        "TORCHELASTIC_USE_AGENT_STORE": shared}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)    # what comes after the check fails, and differently
    with pytest.raises(UserError if refused else ValueError, match="export TORCH_DISABLE" if refused else "MASTER_ADDR"):
        parallel.start(CONFIG)


def test_shards_that_do_not_make_the_processes_there_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="parallel.replicate=1 x parallel.shard=3 does not make 2 processes"):
        parallel.start(replace(CONFIG, parallel=replace(CONFIG.parallel, shard=3)))


# ------------------------------------------------------------------------------------------------------------- two ranks

def work(folder: Path) -> None:
    config = config_from_dict(json.loads((folder / "config.json").read_text()))
    world = parallel.start(config)
    replicas = replace(world, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    seen = {"same": {}, "timeouts": timeouts(world), "local_size": world.local_size}
    seen["unsharded"] = {"shards": equals_unsharded(world), "kept": equals_unsharded(world, reshard=False),
                         "replicas": equals_unsharded(replicas)}
    ways = ({}, {"recompute": True}, {"reshard": False}, {"recompute": True, "reshard": False})
    for recipe in ("off", *RECIPES):
        plain, *others = [step(build(world, recipe, **way)[0], world) for way in ways]
        seen["same"][recipe] = [same(plain, other) for other in others]
    seen["gathered"] = [evaluations(world, reshard) for reshard in (True, False)]
    seen["eager"], seen["compiled"] = (descent(world, compiled) for compiled in (False, True))
    seen["graphs"] = counters["stats"]["unique_graphs"]
    seen["names"] = sorted(build(world, "tensorwise", recompute=True)[0].state_dict())
    own = torch.tensor([float(world.rank + 1)])
    seen["collected"] = parallel.all_concatenate(own, world).tolist(), parallel.all_sum(own, world).tolist()
    seen["recorded"] = len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", []))
    if world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen))
    parallel.finish(world, 0)


def equals_unsharded(world, **changes) -> list[bool]:
    """Loss, gradients over two micro-batches and their norm, against models of one process, gradients summed in fp32."""
    model = build(world, **changes)[0]
    loss, gradients = step(model, world, micros=2, **changes)
    alone = [step(build()[0], seed=seed) for seed in (0, 1, 10, 11)]       # rank 0's micro-batches, rank 1's
    # FSDP averages over the ranks.
    wanted = {name: ((alone[0][1][name] + alone[1][1][name]) + (alone[2][1][name] + alone[3][1][name])) / 2 for name in gradients}
    are_equal = [loss == alone[1 + 2 * world.rank][0], *(torch.equal(gradients[name], wanted[name]) for name in wanted)]
    norm = torch.stack([torch.linalg.vector_norm(gradient.double()) for gradient in wanted.values()]).norm().item()
    norms = [parallel.clip_gradients(model, 1.0).item() for _ in range(2)]
    return [*are_equal, abs(norms[0] / norm - 1) < 1e-6, abs(norms[1] - 1) < 1e-5]


def timeouts(world) -> list[float]:
    groups = (dist.group.WORLD, *world.mesh.get_all_groups(), world.checkpoint_group)
    return [group._get_backend(world.device).options._timeout.total_seconds() for group in groups]


def descent(world, compiled: bool) -> list[tuple[float, float]]:
    """Loss and norm of all gradients of three steps downhill, of one FP8 block."""
    model = build(world, "tensorwise", model=replace(TINY, n_layer=1), compile=compiled)[0]
    told = []
    for _ in range(3):
        loss, gradients = step(model, world)
        told.append((loss, torch.stack([torch.linalg.norm(gradient) for gradient in gradients.values()]).norm().item()))
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 1e-3 * weight.grad
        model.zero_grad()
    return told


def evaluations(world, reshard: bool) -> list:
    """Losses as trained, in BF16, as trained, in BF16, with weights gathered as float8 that stay gathered or do not."""
    model, losses = build(world, "tensorwise", all_gather=True, reshard=reshard)[0], []
    with torch.no_grad():
        for _ in range(2):
            losses.append(model(*tokens(world.rank)).tolist())
            with fp8.in_bf16(model):
                losses.append(model(*tokens(world.rank)).tolist())
    return losses


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    config = replace(CONFIG, out=str(folder / "out"), parallel=replace(CONFIG.parallel, start_timeout=777))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, folder],
                          capture_output=True, text=True, timeout=600, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(**json.loads((folder / "seen.json").read_text()))


@pytest.mark.parametrize("mesh", ["shards", "kept", "replicas"])
def test_sharded_it_is_the_same_bits_as_unsharded(ranks, mesh):
    assert all(ranks.unsharded[mesh]) and len(ranks.unsharded[mesh]) > 10


@pytest.mark.parametrize("recipe", ["off", *RECIPES])
def test_sharded_recomputation_and_weights_kept_gathered_change_no_bit(ranks, recipe):
    assert ranks.same[recipe] == [True, True, True]


def test_two_compiled_fp8_ranks_agree_with_eager_ones(ranks):
    """The default of every GPU config: blocks, head and loss compiled apart, under FSDP2, none of them twice."""
    eager, compiled = torch.tensor(ranks.eager), torch.tensor(ranks.compiled)
    torch.testing.assert_close(compiled[:, 0], eager[:, 0], rtol=2e-3, atol=0)
    torch.testing.assert_close(compiled[:, 1], eager[:, 1], rtol=2e-2, atol=0)
    assert not torch.equal(compiled, eager) and eager[2, 0] < eager[0, 0] and ranks.graphs == 2


def test_weights_that_stay_gathered_are_evaluated_right(ranks):
    resharded, stays = ranks.gathered
    assert resharded == stays and resharded[0] == resharded[2] != resharded[1] == resharded[3]


def test_names_collectives_and_their_timeouts(ranks):
    """A collective that timed out before the watchdog would end the run before the cause is printed."""
    assert ranks.names == sorted(build()[0].state_dict())
    assert ranks.collected == [[[1.0], [2.0]], [3.0]] and ranks.local_size == 2
    assert set(ranks.timeouts) == {2 * 777.0} and ranks.recorded > 10


if __name__ == "__main__":
    work(Path(sys.argv[1]))
