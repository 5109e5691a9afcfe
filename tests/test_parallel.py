"""Recomputation, resharding, deterministic mode, time-outs, restarts' keys: one process, then two gloo ranks of one start."""

import json
import os
import re
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

from model import GPT, GPTConfig, KVCache
from runtime import fp8, parallel
from runtime import fp8 as gather
from runtime.cli import UserError
from runtime.config import Config, DataConfig, FP8Config, OptimConfig, ParallelConfig, config_from_dict, load_config
from runtime.parallel import COMPUTE_DTYPE
from runtime.probe import Probe
from runtime.quantize import RECIPES
from tests.conftest import ROOT, call_train, with_recipe
from train import main

ALONE = parallel.World(0, 0, 1, torch.device("cpu"))
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=64, n_ctx=32, vocab_size=257)


def build(world=ALONE, recipe="off", recompute=False, reshard=True, compiled=False, model=TINY, all_gather=False):
    with torch.device("meta"):
        model = GPT(model, COMPUTE_DTYPE)
    layers = fp8.convert(model, FP8Config(recipe=recipe, all_gather=all_gather))
    if recompute:
        parallel.recompute(model)
    parallel.shard(model, world, COMPUTE_DTYPE, reshard)
    if compiled:
        parallel.compile_model(model, world)
    model.init_weights(0, parallel.materialise(model, world))
    gather.precompute_scales(model)
    return model, layers


def step(model, world=ALONE):
    """Loss and gradients of one step on this rank's own tokens."""
    x, y = torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(world.rank))
    loss = model(x, y).sum()
    loss.backward()
    whole = {name: p.grad.full_tensor() if world.size > 1 else p.grad for name, p in model.named_parameters()}
    return loss.item(), whole


def same(a, b) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


# ----------------------------------------------------------------------------------------------------- one process alone

@pytest.mark.parametrize("recipe", ["off", *RECIPES])
def test_recomputed_it_is_the_same_bits_and_the_same_names(recipe):
    (plain, _), (again, _) = build(recipe=recipe), build(recipe=recipe, recompute=True)
    assert list(plain.state_dict()) == list(again.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in again.named_modules()]
    assert same(step(plain), step(again))


def test_a_block_runs_twice_a_step_and_keeps_its_input_alone():
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
    tokens = torch.arange(9)[None]
    a, b = (build(recompute=recompute)[0] for recompute in (False, True))
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            logits = []
            for model in (a, b):
                cache = KVCache()
                model(tokens[:, :8], cache=cache)
                logits.append(model(tokens[:, 8:], cache=cache))
        assert torch.equal(*logits)


def test_a_probe_sees_the_same_through_recomputation(tmp_path):
    x, y = torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(0))
    seen = []
    for recompute in (False, True):
        model, layers = build(recipe="tensorwise", recompute=recompute)
        path = tmp_path / f"{recompute}.jsonl"
        Probe(path, model, fp8.recipes(layers, 1.0), 64)(1, x, y, 1.0)
        seen.append(path.read_text())
    assert seen[0] == seen[1] and '"gradient"' in seen[0]


def test_compiled_recomputation_rounds_like_compilation_itself():
    """Inductor fuses across what eager rounds to BF16, with and without; LOG.md has the distances."""
    one = replace(TINY, n_layer=1)
    loss, eager = step(build(model=one)[0])
    compiled_loss, compiled = step(build(model=one, recompute=True, compiled=True)[0])
    assert compiled_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in eager.items():
        assert torch.linalg.norm(compiled[name] - gradient) < 0.05 * torch.linalg.norm(gradient), name


def test_deterministic_is_switched_on_and_off_again(tiny, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    import torch._inductor.config as inductor
    lines = parallel.set_torch_flags(replace(tiny, deterministic=True), ALONE, [])
    try:
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert inductor.deterministic and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert "deterministic algorithms" in lines[0] and ":4096:8" in lines[0]
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        lines = parallel.set_torch_flags(tiny, ALONE, [])
    assert lines == [] and not inductor.deterministic
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


@pytest.mark.parametrize("workspace, is_allowed", [(":4096:8", True), (":16:8", True), (":8:16", False), ("", False)])
def test_deterministic_refuses_a_workspace_that_is_not(tiny, monkeypatch, workspace, is_allowed):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    config = replace(tiny, deterministic=True)
    try:
        if is_allowed:
            assert f"CUBLAS_WORKSPACE_CONFIG={workspace}," in parallel.set_torch_flags(config, ALONE, [])[0]
        else:
            with pytest.raises(UserError, match=f"to be :4096:8 or :16:8, not '{workspace}': set it to one"):
                parallel.set_torch_flags(config, ALONE, [])
    finally:
        parallel.set_torch_flags(tiny, ALONE, [])


def test_recomputed_and_deterministic_a_run_is_the_same_run(tiny, tmp_path, capsys):
    """From config key to weights; on a CPU neither changes a bit."""
    changed = with_recipe(tiny, "tensorwise", run="changed", deterministic=True, parallel=replace(tiny.parallel, recompute=True))
    try:
        runs = [call_train(capsys, config, tmp_path) for config in (with_recipe(tiny, "tensorwise"), changed)]
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        parallel.set_torch_flags(tiny, ALONE, [])
    assert [run.returncode for run in runs] == [0, 0], runs
    assert "torch: deterministic algorithms" in runs[1].stdout and "deterministic" not in runs[0].stdout
    assert train_rows(tiny) == train_rows(changed)


def train_rows(config):
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if row["kind"] == "train"]


# ----------------------------------------------------------------------------------------------------- stores and restarts

class TestRestarts:
    def test_a_store_that_outlives_its_workers_gets_keys_of_the_attempt(self, monkeypatch):
        store = dist.HashStore()
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        for attempt in ("0", "1"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
            parallel.own_keys(store).set("address", attempt)
        assert (store.get("attempt0/address"), store.get("attempt1/address")) == (b"0", b"1")

    def test_a_store_as_young_as_the_attempt_gets_none(self, monkeypatch):
        """Nodes may disagree on the count of restarts (pytorch#135712): no key of theirs may hold it."""
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
        store = dist.HashStore()
        parallel.own_keys(store).set("address", "x")
        assert store.get("address") == b"x"

    @pytest.mark.parametrize("nodes, restarts, shared, refused", [
        ("2", "1", "True", True), ("1", "1", "True", False), ("2", "0", "True", False), ("2", "1", "False", False)])
    def test_several_nodes_restart_with_a_fresh_store_only(self, monkeypatch, tiny, nodes, restarts, shared, refused):
        for name, value in {"WORLD_SIZE": "2", "RANK": "0", "GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_MAX_RESTARTS": restarts,
                            "TORCHELASTIC_USE_AGENT_STORE": shared}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MASTER_ADDR", raising=False)    # what comes after the check fails, and differently
        with pytest.raises(UserError if refused else ValueError, match="export TORCH_DISABLE" if refused else "MASTER_ADDR"):
            parallel.start(tiny)


def test_shards_that_do_not_make_the_processes_there_are_refused(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="parallel.replicate=1 x parallel.shard=3 does not make 2 processes"):
        parallel.start(replace(tiny, parallel=replace(tiny.parallel, shard=3)))


# ----------------------------------------------------------------------------------------------------------------- plans

def test_the_plan_knows_recomputation_and_what_is_gathered(capsys):
    def gib(*overrides):
        assert main([str(ROOT / "configs/gpt350m_fp8.py"), *overrides, "--plan"]) == 0
        return {name: float(value) for name, value in re.findall(r"^  (\w+) +([\d.]+) GiB", capsys.readouterr().out, re.M)}

    plain, less = gib(), gib("parallel.recompute=true", "parallel.shard=8", "parallel.reshard=false")
    config = load_config(ROOT / "configs/gpt350m_fp8.py")
    m, tokens = config.model, config.data.micro_batch * config.model.n_ctx
    whole = plain["activations"] / m.n_layer
    assert less["activations"] == pytest.approx(whole + tokens * m.n_layer * 2 * m.n_embd / 2**30, abs=0.011)
    embedding = m.vocab_padded * m.n_embd * (1 if m.tied else 2)
    assert "gathered" not in plain
    assert less["gathered"] == pytest.approx((2 * (m.params_total - embedding) + 4 * embedding) / 2**30, abs=0.006)


# ------------------------------------------------------------------------------------------------------------- two ranks

def work(folder: Path) -> None:
    config = config_from_dict(json.loads((folder / "config.json").read_text()))
    world = parallel.start(config)
    seen = {"same": {}, "timeouts": timeouts(world), "local_size": world.local_size}
    ways = ((False,), (True,), (False, False), (True, False))      # recompute, reshard
    for recipe in ("off", *RECIPES):
        plain, *others = [step(build(world, recipe, *way)[0], world) for way in ways]
        seen["same"][recipe] = [same(plain, other) for other in others]
    seen["gathered"] = [evaluations(world, reshard) for reshard in (True, False)]
    seen["eager"], seen["compiled"] = (descent(world, compiled) for compiled in (False, True))
    seen["graphs"] = counters["stats"]["unique_graphs"]
    model = build(world, "tensorwise", True)[0]
    seen["names"] = sorted(model.state_dict())
    seen["recorded"] = len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", []))
    if world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen))
    parallel.finish(world, 0)


def timeouts(world) -> list[float]:
    groups = (dist.group.WORLD, *world.mesh.get_all_groups(), world.checkpoint_group)
    return [group._get_backend(world.device).options._timeout.total_seconds() for group in groups]


def descent(world, compiled: bool) -> list[tuple[float, float]]:
    """Loss and norm of all gradients of three steps downhill, of one FP8 block."""
    model = build(world, "tensorwise", compiled=compiled, model=replace(TINY, n_layer=1))[0]
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
    model = build(world, "tensorwise", reshard=reshard, all_gather=True)[0]
    x, y = torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(world.rank))
    losses = []
    with torch.no_grad():
        for _ in range(2):
            losses.append(model(x, y).tolist())
            with fp8.in_bf16(model):
                losses.append(model(x, y).tolist())
    return losses


@pytest.fixture(scope="module")
def ranks(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    config = Config(run="ranks", steps=6, out=str(folder / "out"), model=TINY, optim=OptimConfig(lr=1e-2),
                    data=DataConfig(dir=str(data_dir), mixture={"web": 1}, tokenizer="byte", tokens_per_step=512, micro_batch=4),
                    parallel=ParallelConfig(compile=False, start_timeout=777))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, folder],
                          capture_output=True, text=True, timeout=600, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(**json.loads((folder / "seen.json").read_text()))


@pytest.mark.parametrize("recipe", ["off", *RECIPES])
def test_sharded_too_it_is_the_same_bits(ranks, recipe):
    """Recomputed; gathered once a step; both."""
    assert ranks.same[recipe] == [True, True, True]


def test_two_compiled_fp8_ranks_agree_with_eager_ones(ranks):
    """The default of every GPU config: blocks, head and loss compiled apart, under FSDP2, none of them twice."""
    eager, compiled = torch.tensor(ranks.eager), torch.tensor(ranks.compiled)
    torch.testing.assert_close(compiled[:, 0], eager[:, 0], rtol=2e-3, atol=0)
    torch.testing.assert_close(compiled[:, 1], eager[:, 1], rtol=2e-2, atol=0)
    assert not torch.equal(compiled, eager)
    assert eager[2, 0] < eager[0, 0]
    assert ranks.graphs == 2


def test_what_stays_gathered_is_evaluated_right(ranks):
    resharded, stays = ranks.gathered
    assert resharded == stays
    assert resharded[0] == resharded[2] != resharded[1] == resharded[3]


def test_names_are_those_of_one_process(ranks):
    assert ranks.names == sorted(build()[0].state_dict())


def test_groups_wait_longer_than_the_watchdog(ranks):
    """Else a collective's own time-out might end the run before the watchdog says why."""
    assert set(ranks.timeouts) == {2 * 777.0}


def test_a_rank_knows_how_many_are_on_its_machine(ranks):
    assert ranks.local_size == 2


def test_collectives_are_recorded(ranks):
    assert ranks.recorded > 10


if __name__ == "__main__":
    work(Path(sys.argv[1]))
