"""Recomputation, deterministic mode, refusals and restarts in one process; sharding, weights gathered as float8, our kernels
and compilation on two gloo ranks, in one start of torchrun."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import train
from eval.loss import evaluate
from model import KVCache
from runtime import fp8, optim, parallel
from runtime.checkpoint import Saver, latest, load_model, read_manifest
from runtime.cli import UserError
from runtime.config import FP8Config, ProbeConfig, config_from_dict
from runtime.data import open_data
from runtime.fp8 import RECIPES
from runtime.probe import Probe
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT, call_train, with_recipe

ALONE = parallel.World(0, 0, 1, torch.device("cpu"))
GATHERED = FP8Config(recipe="tensorwise", all_gather=True)
ONE_BLOCK = {"n_layer": 1}


def build(config, world=ALONE, recipe=None, model=None, **changes):
    """An initialised model, built as for training; recipe: a name or an FP8Config; changes: of config.parallel."""
    settings = recipe if isinstance(recipe, FP8Config) else FP8Config(recipe=recipe or "off")
    built = parallel.build(replace(config, fp8=settings, model=replace(config.model, **(model or {})),
                                   parallel=replace(config.parallel, **changes)), world)
    built.model.init_weights(0, built.assign)
    fp8.refresh_fp8_weights(built.model)
    return built


def tokens(seed):
    return torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(seed))


def step(built, world=ALONE, micros=1, reshard=True, seed=0):
    """Loss of the last and gradients of all of a step's micro-batches, on this rank's own tokens."""
    for micro in range(micros):
        parallel.sync_gradients(built.model, micro == micros - 1, reshard)
        loss = built.model(*tokens(seed + 10 * world.rank + micro)).sum()
        loss.backward()
    return loss.item(), {name: p.grad.full_tensor() if world.size > 1 else p.grad for name, p in built.model.named_parameters()}


def same(a, b) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def rows(config, kind="train", file="metrics.jsonl"):
    return [row for row in map(json.loads, open(config.run_dir / file)) if row["kind"] == kind]


# ----------------------------------------------------------------------------------------------------- one process alone

@pytest.mark.parametrize("recipe", ["off", *RECIPES])
def test_recomputation_changes_no_bit_and_no_name(tiny, recipe, tmp_path):
    """Nor what a probe sees."""
    plain, again = build(tiny, recipe=recipe), build(tiny, recipe=recipe, recompute=True)
    assert [name for name, _ in plain.model.named_modules()] == [name for name, _ in again.model.named_modules()]
    assert same(step(plain), step(again))
    seen = []
    for built in (plain, again):
        built.optimizer.zero_grad()
        Probe(path := tmp_path / f"{len(seen)}.jsonl", built.model, fp8.recipes(built.layers, 1.0), 64)(1, *tokens(0), 1.0)
        seen.append(path.read_text())
    assert seen[0] == seen[1] and ('"gradient"' in seen[0]) is (recipe != "off")


def test_a_recomputed_block_runs_twice_a_step_and_keeps_its_input_alone(tiny):
    """Nor is a pass without gradients recomputed, or one with a cache, which sampling makes."""
    seen, logits, ids = [], [], torch.arange(9)[None]
    for recompute in (False, True):
        built, calls, sizes = build(tiny, model={"loss_chunk": 16}, recompute=recompute), [], []
        for block in built.model.layers:
            block.attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            step(built)
        with torch.no_grad():
            built.model(torch.zeros(1, 32, dtype=torch.long))
        seen.append((len(calls), sum(sizes)))       # elements kept, the inner tensors of checkpointed regions aside
        cache = KVCache()
        built.model(ids[:, :8], cache=cache)
        logits.append(built.model(ids[:, 8:], cache=cache))
    (calls, plain), (again, less) = seen
    assert (calls, again) == (4, 6) and less < plain / 2 and torch.equal(*logits)


def test_attention_is_not_recomputed(tiny):
    calls = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            calls.append(op) if op in parallel.ATTENTION else None
            return op(*args, **(kwargs or {}))

    built = build(tiny, recompute=True)
    with Spy():
        step(built)
    assert len(calls) == tiny.model.n_layer


def test_compiled_recomputation_rounds_like_compilation_itself(tiny):
    """Inductor fuses operations between which eager rounds to BF16, with recomputation and without."""
    loss, eager = step(build(tiny, model=ONE_BLOCK))
    compiled_loss, compiled = step(build(tiny, model=ONE_BLOCK, recompute=True, compile=True))
    assert compiled_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in eager.items():
        assert torch.linalg.norm(compiled[name] - gradient) < 0.05 * torch.linalg.norm(gradient), name


def test_a_recomputed_deterministic_run_is_the_same_run(tiny, tmp_path, capsys, monkeypatch):
    """From config key to weights; on a CPU neither changes a bit. What was switched on is switched off again."""
    import torch._inductor.config as inductor

    def switches():
        return (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, inductor.deterministic)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    plain = with_recipe(tiny, "tensorwise")
    changed = replace(plain, run="changed", deterministic=True, parallel=replace(tiny.parallel, recompute=True))
    try:
        runs = [call_train(capsys, config, tmp_path) for config in (plain, changed)]
        assert switches() == (True, True, True) and not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        assert parallel.set_torch_flags(tiny, ALONE, []) == []
    assert switches() == (False, False, False) and [run.returncode for run in runs] == [0, 0], runs
    assert "torch: deterministic algorithms" in runs[1].stdout and "deterministic" not in runs[0].stdout
    first, second = ([(row["loss"], row["grad_norm"]) for row in rows(config)] for config in (plain, changed))
    assert first == second and len(first) == 6


@pytest.mark.parametrize("environment, changes, told", [
    ({"WORLD_SIZE": "2"}, {"parallel": {"shard": 3}}, "parallel.replicate=1 x parallel.shard=3 does not make 2 processes"),
    ({}, {"fp8": {"all_gather": True}}, "fp8.all_gather=true needs several ranks that share the weights, but each of 1"),
    ({"WORLD_SIZE": "2"}, {"fp8": {"all_gather": True}, "parallel": {"replicate": 2}}, "each of 2 has them whole"),
    ({"WORLD_SIZE": "2"}, {"fp8": {"all_gather": True, "head": True}}, "while the embedding shares its weight"),
    ({"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, {},
     "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ({"PATH": ""}, {"parallel": {"compile": True}}, "needs a C\\+\\+ compiler on a CPU: install g\\+\\+"),
])
def test_what_does_not_fit_the_ranks_or_the_machine_is_refused(tiny, monkeypatch, environment, changes, told):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = with_recipe(tiny, "tensorwise")
    config = replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in changes.items()})
    with pytest.raises(UserError, match=told):
        parallel.start(config)


@pytest.mark.parametrize("shared, nodes, restarts", [("True", "1", "1"), ("True", "2", "0"), ("False", "2", "1")])
def test_a_store_that_outlives_its_workers_gets_keys_of_the_attempt(tiny, monkeypatch, shared, nodes, restarts):
    """Not another, since nodes may disagree on the count of restarts (pytorch#135712). These starts are not refused."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "GROUP_WORLD_SIZE": nodes, "TORCHELASTIC_MAX_RESTARTS": restarts,
                        "TORCHELASTIC_USE_AGENT_STORE": shared, "TORCHELASTIC_RESTART_COUNT": "3"}.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    parallel.own_keys(store).set("address", "x")
    assert store.check(["attempt3/address" if shared == "True" else "address"])
    monkeypatch.delenv("MASTER_ADDR", raising=False)    # what comes after the check fails, and differently
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        parallel.start(tiny)


def test_shards_that_torchao_would_not_pad_are_refused(tiny):
    world = SimpleNamespace(size=3, device=torch.device("cpu"), mesh={"shard": SimpleNamespace(size=lambda: 3)})
    with pytest.raises(UserError, match=r"the 32 rows of layers.0.attn.out.weight do not divide among 3 ranks: choose"):
        build(tiny, world, GATHERED, {"n_ffn": 96})


# ------------------------------------------------------------------------------------------------- what two ranks do

def work(folder: Path) -> None:
    """The runs of folder/*.json, then experiments with models; rank 0 writes what it saw."""
    whole, halves = (config_from_dict(json.loads((folder / f"{name}.json").read_text())) for name in ("whole", "halves"))
    world, kinds, save = parallel.start(whole), set(), Saver.save

    def watched(self, step, tensors, *rest):    # DCP would pickle a wrapper, or lose it
        kinds.update(type(t._local_tensor).__name__ for t in tensors.values())
        save(self, step, tensors, *rest)

    Saver.save = watched
    train.train(whole, world)
    if world.is_main:       # as a kill after step 3 would leave it
        shutil.copytree(whole.run_dir, halves.run_dir)
        shutil.rmtree(halves.run_dir / "checkpoints/step_00000006")
        (halves.run_dir / "summary.json").unlink()
    parallel.barrier(world)
    train.train(halves, world)
    seen = {"saved": sorted(kinds), "same": {}, "local_size": world.local_size, "timeouts": timeouts(world)}
    seen |= {recipe: gathered(whole, recipe, world) for recipe in ("tensorwise", "tensorwise_gw_hp")}
    seen["torchao"], *seen["kernels"] = (three_steps(whole, world, *how) for how in ((False,), (True,), (True, True)))

    replicas = replace(world, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    seen["unsharded"] = [equals_unsharded(whole, world), equals_unsharded(whole, world, reshard=False),
                         equals_unsharded(whole, replicas)]
    ways = ({}, {"recompute": True}, {"reshard": False}, {"recompute": True, "reshard": False})
    for recipe in ("off", *RECIPES):
        plain, *others = [step(build(whole, world, recipe, **way), world) for way in ways]
        seen["same"][recipe] = [same(plain, other) for other in others]
    seen["evaluated"] = [evaluations(whole, world, reshard) for reshard in (True, False)]
    seen["eager"], seen["compiled"] = (descent(whole, world, compiled) for compiled in (False, True))
    seen["graphs"] = counters["stats"]["unique_graphs"]
    own = torch.tensor([float(world.rank + 1)])
    seen["collected"] = parallel.all_concatenate(own, world).tolist(), parallel.all_sum(own, world).tolist()
    seen["recorded"] = len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", []))
    if world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen))
    parallel.finish(world, 0)


def timeouts(world) -> list[float]:
    groups = (dist.group.WORLD, *world.mesh.get_all_groups(), world.checkpoint_group)
    return [group._get_backend(world.device).options._timeout.total_seconds() for group in groups]


def gathered(config, recipe: str, world) -> dict:
    """One model gathered as float8, its head too, and its plain twin with the same weights."""
    built, (x, y) = build(config, world, replace(GATHERED, recipe=recipe, head=True), {"tied": False}), tokens(world.rank)
    model, twin = built.model, build(config, world, model={"tied": False}).model

    @torch.no_grad()
    def loss(of):
        return of(x, y).tolist()

    seen = {"sent": sent_by(lambda: loss(model)), "sent_plain": sent_by(lambda: loss(twin)), "float8": [loss(model)]}
    try:
        with fp8.in_bf16(model):
            seen["in_bf16"] = loss(model)
            raise KeyError
    except KeyError:
        seen["float8"].append(loss(model))
    seen["plain"] = loss(twin)

    model(x, y).sum().backward()
    seen["norms"] = [parallel.clip_gradients(model, 1e-2).item() for _ in range(2)]
    built.optimizer.step()
    seen["states"] = sorted({type(t._local_tensor).__name__ for t in optim.state_tensors(built.optimizer, model).values()})
    with CommDebugMode() as mode:
        fp8.refresh_fp8_weights(model)
    seen["all_reduces"], seen["scales"] = mode.get_total_counts(), {}
    for name, p in model.named_parameters():
        if fp8.is_wrapped(p):
            amax = fp8.unwrap(p.detach()).full_tensor().abs().max().double()
            seen["scales"][name] = (p._local_tensor._precomputed_scale.item(), (448 / amax).float().item())
    with fp8.in_bf16(model):
        seen["in_bf16_later"] = loss(model)
    fp8.reshard(model)
    fp8.reshard(twin)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(fp8.unwrap(q.detach()))
    seen["plain_later"] = loss(twin)
    return seen


def sent_by(call) -> int:
    """Bytes that this rank gives to FSDP2's all-gathers during `call`."""
    real, sizes = dist.all_gather_single, []

    def counted(output, input, *args, **kwargs):
        sizes.append(input.numel() * input.itemsize)
        return real(output, input, *args, **kwargs)

    dist.all_gather_single = counted
    try:
        call()
    finally:
        dist.all_gather_single = real
    return sum(sizes)


def three_steps(config, world, kernels, recompute=False) -> list[float]:
    """Summed losses of three steps by torchao or our kernels, BF16 gathered, then the loss in BF16."""
    built, (x, y) = build(config, world, FP8Config(recipe="tensorwise", head=True, kernels=kernels), recompute=recompute), tokens(
        world.rank)
    losses, optimizer = [], torch.optim.AdamW(built.model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = built.model(x, y).sum()
        (loss / 128).backward()
        losses.append(parallel.all_sum(loss.detach().clone(), world).item())
        optimizer.step()
        optimizer.zero_grad()
        fp8.refresh_fp8_weights(built.model)
    with fp8.in_bf16(built.model), torch.no_grad():
        return [*losses, parallel.all_sum(built.model(x, y).sum(), world).item()]


def equals_unsharded(config, world, **changes) -> list[bool]:
    """Loss, gradients over two micro-batches and their norm, against models of one process, gradients summed in fp32."""
    built = build(config, world, **changes)
    loss, gradients = step(built, world, micros=2, **changes)
    alone = [step(build(config), seed=seed) for seed in (0, 1, 10, 11)]     # rank 0's micro-batches, rank 1's
    # FSDP averages over the ranks.
    wanted = {name: ((alone[0][1][name] + alone[1][1][name]) + (alone[2][1][name] + alone[3][1][name])) / 2 for name in gradients}
    are_equal = [loss == alone[1 + 2 * world.rank][0], *(torch.equal(gradients[name], wanted[name]) for name in wanted)]
    norm = torch.stack([torch.linalg.vector_norm(gradient.double()) for gradient in wanted.values()]).norm().item()
    norms = [parallel.clip_gradients(built.model, 1.0).item() for _ in range(2)]
    return [*are_equal, abs(norms[0] / norm - 1) < 1e-6, abs(norms[1] - 1) < 1e-5]


def descent(config, world, compiled: bool) -> list[tuple[float, float]]:
    """Loss and norm of all gradients of three steps downhill, of one FP8 block."""
    built, told = build(config, world, "tensorwise", ONE_BLOCK, compile=compiled), []
    for _ in range(3):
        loss, gradients = step(built, world)
        told.append((loss, torch.stack([torch.linalg.norm(gradient) for gradient in gradients.values()]).norm().item()))
        with torch.no_grad():
            for weight in built.model.parameters():
                weight -= 1e-3 * weight.grad
        built.model.zero_grad()
    return told


def evaluations(config, world, reshard: bool) -> list:
    """Losses as trained, in BF16, as trained, in BF16, with weights gathered as float8 that stay gathered or do not."""
    model, losses = build(config, world, GATHERED, reshard=reshard).model, []
    with torch.no_grad():
        for _ in range(2):
            losses.append(model(*tokens(world.rank)).tolist())
            with fp8.in_bf16(model):
                losses.append(model(*tokens(world.rank)).tolist())
    return losses


# ------------------------------------------------------------------------------------------------- what they must have seen

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def ranks(tiny, shared):
    whole = replace(tiny, run="whole", out=str(shared / "out"), fp8=GATHERED,
                    parallel=replace(tiny.parallel, start_timeout=777))
    halves = replace(whole, run="halves", probe=ProbeConfig(every=2, tokens=64))    # resumed after step 3
    if not (shared / "seen.json").exists():
        for config in (whole, halves):
            (shared / f"{config.run}.json").write_text(json.dumps(config.to_dict()))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        done = subprocess.run([*torchrun, __file__, shared], capture_output=True, text=True, timeout=600, cwd=ROOT,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(whole=whole, halves=halves, **json.loads((shared / "seen.json").read_text()))


def test_sharded_it_is_the_same_bits_as_unsharded(ranks):
    """Also with weights that stay gathered, and in replicas."""
    assert all(map(all, ranks.unsharded)) and all(len(equal) > 10 for equal in ranks.unsharded)


def test_sharded_recomputation_and_weights_kept_gathered_change_no_bit(ranks):
    assert ranks.same == dict.fromkeys(("off", *RECIPES), [True, True, True])
    resharded, stays = ranks.evaluated
    assert resharded == stays and resharded[0] == resharded[2] != resharded[1] == resharded[3]


def test_two_compiled_fp8_ranks_agree_with_eager_ones(ranks):
    """The default of every GPU config: blocks, head and loss compiled apart, under FSDP2, none of them twice."""
    eager, compiled = torch.tensor(ranks.eager), torch.tensor(ranks.compiled)
    torch.testing.assert_close(compiled[:, 0], eager[:, 0], rtol=2e-3, atol=0)
    torch.testing.assert_close(compiled[:, 1], eager[:, 1], rtol=2e-2, atol=0)
    assert not torch.equal(compiled, eager) and eager[2, 0] < eager[0, 0] and ranks.graphs == 2


def test_collectives_and_their_timeouts(ranks):
    """A collective that timed out before the watchdog would end the run before the cause is printed."""
    assert ranks.collected == [[[1.0], [2.0]], [3.0]] and ranks.local_size == 2
    assert set(ranks.timeouts) == {2 * 777.0} and ranks.recorded > 10


def test_resumed_and_probed_it_is_the_same_bits(ranks):
    """Scales not renewed after the load or an update would show here, and any trace of the probes, which one rank writes."""
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [r[key] for r in rows(ranks.whole)] == [r[key] for r in rows(ranks.halves)], key
    a, b = (load_model(c.run_dir, compute_dtype=torch.float32)[0].state_dict() for c in (ranks.whole, ranks.halves))
    assert all(torch.equal(a[name], b[name]) for name in a)
    vals = [np.load(c.run_dir / "val_losses.npz") for c in (ranks.whole, ranks.halves)]
    assert all(np.array_equal(vals[0][key], vals[1][key]) for key in vals[0])
    linears = rows(ranks.halves, "linear", "probe.jsonl")
    names = [f"layers.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")]
    assert [(row["step"], row["layer"]) for row in linears] == [(step, name) for step in (4, 6) for name in names]
    for row in linears[8:]:      # of step 6, before the last save
        assert row["weight"]["amax"] == b[f"{row['layer']}.weight"].abs().max().item() and row["gradient"]["amax"] > 0


def test_it_trains_what_one_process_trains_and_its_checkpoints_are_plain(ranks, tiny, tmp_path, capsys):
    """One process rounds its weights from fp32 to float8 as well, so that the first loss agrees to the last bit; without
    the float8 all-gather, the ranks round to BF16 in between. One process and BF16 weights give the summary's very loss."""
    one = with_recipe(tiny, "tensorwise", run="one")
    assert call_train(capsys, one, tmp_path).returncode == 0
    a, b = rows(one), rows(ranks.whole)
    assert a[0]["loss"] == b[0]["loss"]
    assert a[0]["grad_norm"] == pytest.approx(b[0]["grad_norm"], rel=1e-5)
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-3)
    assert a[-1]["loss"] < a[0]["loss"] - 0.5, "there was something to learn"
    manifests = [read_manifest(latest(c.run_dir)) for c in (one, ranks.whole)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"], "names, shapes, dtypes of a checkpoint"
    assert ranks.saved == ["Tensor"]
    assert not any(b"torchao" in file.read_bytes() for file in latest(ranks.whole.run_dir).iterdir())
    model, config = load_model(ranks.whole.run_dir)
    data = open_data(config, load_tokenizer("byte").sha256)
    loss = evaluate(model, {s: data.val(s) for s in data.sources}, data.weights, config.data.micro_batch, torch.device("cpu"))
    summary = json.loads((ranks.whole.run_dir / "summary.json").read_text())
    assert loss.loss == summary["loss_bf16"] != summary["loss_as_trained"]


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_gw_hp"])
def test_one_model_against_its_plain_twin(ranks, recipe):
    seen, c = vars(ranks)[recipe], ranks.whole.model
    assert seen["in_bf16"] == seen["plain"]
    assert seen["in_bf16_later"] == seen["plain_later"] != seen["plain"]
    assert seen["float8"] == [seen["float8"][0]] * 2 != [seen["plain"]] * 2, "in_bf16 must end, even after an error"
    # Bytes sent: half for Linears; a block's norms in BF16, the last one and the table in fp32.
    linears, norms = c.n_layer * (4 * c.n_embd**2 + 3 * c.n_embd * c.n_ffn), c.n_layer * 2 * c.n_embd
    head = c.vocab_padded * c.n_embd
    assert seen["sent"] * 2 == linears + 2 * norms + 4 * c.n_embd + (4 + 1) * head
    assert seen["sent_plain"] * 2 == 2 * linears + 2 * norms + 4 * c.n_embd + (4 + 4) * head
    assert seen["all_reduces"] == 1 and len(seen["scales"]) == 9
    assert all(have == want for have, want in seen["scales"].values())
    assert seen["norms"][0] > 1 and seen["norms"][1] == pytest.approx(1e-2, rel=1e-3)
    assert seen["states"] == ["Tensor"], "an optimizer's moments are plain"


def test_our_kernels_quantise_gathered_weights_and_follow_torchao(ranks):
    ours, recomputed = ranks.kernels
    assert ours == recomputed and ours[2] < 0.99 * ours[0]
    assert ours[0] == pytest.approx(ranks.torchao[0], rel=1e-6)
    assert ours[1:3] == pytest.approx(ranks.torchao[1:3], rel=3e-3) and ours[3] == pytest.approx(ranks.torchao[3], rel=1e-2)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
