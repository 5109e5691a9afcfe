"""FP8 Linears sharded among two gloo ranks: weights gathered as float8 or cast by our kernels. One start of torchrun."""

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
from torch.distributed.tensor.debug import CommDebugMode

import train
from eval.loss import evaluate
from model import GPT, GPTConfig
from runtime import fp8, optim, parallel
from runtime.checkpoint import Saver, latest, load_model, read_manifest
from runtime.cli import UserError
from runtime.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FP8Config,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    ProbeConfig,
    config_from_dict,
)
from runtime.data import open_data
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT, call_train, with_recipe

GATHERED = FP8Config(recipe="tensorwise", all_gather=True)


# ----------------------------------------------------------------------------------------- what each of two ranks does

def work(folder: Path) -> None:
    """The runs of folder/*.json, then experiments with a model; rank 0 writes what it saw."""
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
    seen = {recipe: gathered(whole, recipe, world) for recipe in ("tensorwise", "tensorwise_gw_hp")}
    seen |= {f"{label} steps": three_steps(whole, label, world) for label in ("tensorwise", "kernels", "kernels recomputed")}
    if world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen | {"saved": sorted(kinds)}))
    parallel.finish(world, 0)


def build(config, world, recomputed=False):
    with torch.device("meta"):
        model = GPT(config.model)
    fp8.convert(model, config.fp8)
    if recomputed:
        parallel.recompute(model)
    parallel.shard(model, world, torch.bfloat16)
    model.init_weights(0, parallel.materialise(model, world))
    fp8.refresh_fp8_weights(model)
    x, y = torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(world.rank))
    return model, x, y


def gathered(config, recipe: str, world) -> dict:
    """One model gathered as float8, its head too, and its plain twin with the same weights."""
    config = replace(config, model=replace(config.model, tied=False))
    model, x, y = build(replace(config, fp8=replace(GATHERED, recipe=recipe, head=True)), world)
    twin = build(replace(config, fp8=FP8Config()), world)[0]
    optimizer = optim.build_optimizer(model, config.optim)
    optim.fill_state(optimizer)

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
    optimizer.step()
    seen["states"] = sorted({type(t._local_tensor).__name__ for t in optim.state_tensors(optimizer, model).values()})
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


def three_steps(config, label: str, world) -> dict:
    """Summed losses of three steps by torchao or our kernels, BF16 gathered, and the loss in BF16 afterwards."""
    settings = FP8Config(recipe="tensorwise", head=True, kernels="kernels" in label)
    model, x, y = build(replace(config, fp8=settings), world, "recomputed" in label)
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = model(x, y).sum()
        (loss / 128).backward()
        losses.append(parallel.all_sum(loss.detach().clone(), world).item())
        optimizer.step()
        optimizer.zero_grad()
        fp8.refresh_fp8_weights(model)
    with fp8.in_bf16(model), torch.no_grad():
        return {"losses": losses, "bf16": parallel.all_sum(model(x, y).sum(), world).item()}


# ---------------------------------------------------------------------------------------------------------- the tests

@pytest.fixture(scope="module")
def ranks(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("all_gather")
    whole = Config(
        run="whole", steps=6, out=str(folder / "out"), fp8=GATHERED,
        model=GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=64, n_ctx=32, vocab_size=257),
        data=DataConfig(dir=str(data_dir), mixture={"web": 0.75, "code": 0.25}, tokenizer="byte", tokens_per_step=512,
                        micro_batch=4),
        optim=OptimConfig(lr=1e-2, warmup_share=0.2), parallel=ParallelConfig(compile=False),
        checkpoint=CheckpointConfig(every=3), eval=EvalConfig(every=None, tokens=320), log=LogConfig(every=1))
    halves = replace(whole, run="halves", probe=ProbeConfig(every=2, tokens=64))    # resumed after step 3
    for config in (whole, halves):
        (folder / f"{config.run}.json").write_text(json.dumps(config.to_dict()))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, folder],
                          capture_output=True, text=True, timeout=300, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(whole=whole, halves=halves, seen=json.loads((folder / "seen.json").read_text()))


def rows(config, kind="train", file="metrics.jsonl"):
    return [row for row in map(json.loads, open(config.run_dir / file)) if row["kind"] == kind]


def test_resumed_and_probed_it_is_the_same_bits(ranks):
    """Scales not renewed after the load or an update would show here, and any trace of the probes."""
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [r[key] for r in rows(ranks.whole)] == [r[key] for r in rows(ranks.halves)], key
    a, b = (dict(load_model(c.run_dir)[0].named_parameters()) for c in (ranks.whole, ranks.halves))
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (np.load(c.run_dir / "val_losses.npz") for c in (ranks.whole, ranks.halves))
    assert all(np.array_equal(a[key], b[key]) for key in a)


def test_one_rank_writes_what_the_probe_sees_of_whole_weights(ranks):
    places = [(row["step"], row["layer"]) for row in rows(ranks.halves, "linear", "probe.jsonl")]
    names = [f"layers.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")]
    assert places == [(step, name) for step in (4, 6) for name in names]
    weights = load_model(ranks.halves.run_dir, compute_dtype=torch.float32)[0].state_dict()
    for row in rows(ranks.halves, "linear", "probe.jsonl")[8:]:      # of step 6, before the last save
        assert row["weight"]["amax"] == weights[f"{row['layer']}.weight"].abs().max().item() and row["gradient"]["amax"] > 0


def test_it_trains_what_one_process_trains(ranks, tiny, tmp_path, capsys):
    """One process rounds its weights from fp32 to float8 as well, so that the first loss agrees to the last bit; without
    the float8 all-gather, the ranks round to BF16 in between."""
    one = with_recipe(tiny, "tensorwise", run="one")
    assert call_train(capsys, one, tmp_path).returncode == 0
    a, b = rows(one), rows(ranks.whole)
    assert a[0]["loss"] == b[0]["loss"]
    assert a[0]["grad_norm"] == pytest.approx(b[0]["grad_norm"], rel=1e-5)
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-3)
    assert a[-1]["loss"] < a[0]["loss"] - 0.5, "there was something to learn"
    manifests = [read_manifest(latest(c.run_dir)) for c in (one, ranks.whole)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"], "names, shapes, dtypes of a checkpoint"


def test_its_checkpoints_are_plain_and_evaluate_to_the_summary(ranks):
    """No trace of torchao in the files; one process and BF16 weights give the very losses that the ranks reported."""
    assert ranks.seen["saved"] == ["Tensor"]
    for file in latest(ranks.whole.run_dir).iterdir():
        assert b"torchao" not in file.read_bytes(), file
    model, config = load_model(ranks.whole.run_dir)
    data = open_data(config, load_tokenizer("byte").sha256)
    loss = evaluate(model, {s: data.val(s) for s in data.sources}, data.weights, config.data.micro_batch, torch.device("cpu"))
    summary = json.loads((ranks.whole.run_dir / "summary.json").read_text())
    assert loss.loss == summary["loss_bf16"] != summary["loss_as_trained"]


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_gw_hp"])
def test_one_model_against_its_plain_twin(ranks, recipe):
    seen, c = ranks.seen[recipe], ranks.whole.model
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
    theirs, ours = ranks.seen["tensorwise steps"], ranks.seen["kernels steps"]
    assert ours == ranks.seen["kernels recomputed steps"]
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-6)
    assert ours["losses"][1:] == pytest.approx(theirs["losses"][1:], rel=3e-3) and ours["losses"][2] < 0.99 * ours["losses"][0]
    assert ours["bf16"] == pytest.approx(theirs["bf16"], rel=1e-2)


@pytest.mark.parametrize("world_size, changes, told", [
    (1, {}, "fp8.all_gather=true needs several ranks that share the weights, but each of 1 has them whole"),
    (2, {"parallel": {"replicate": 2}}, "each of 2 has them whole"),
    (2, {"fp8": {"head": True}}, "while the embedding shares its weight")])
def test_it_is_refused_where_weights_are_not_shared_or_cannot_be_gathered(tiny, monkeypatch, world_size, changes, told):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = replace(tiny, fp8=GATHERED)
    config = replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in changes.items()})
    with pytest.raises(UserError, match=told):
        parallel.start(config)


def test_shards_that_torchao_would_not_pad_are_refused():
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, n_ffn=96, n_ctx=32, vocab_size=257))
    fp8.convert(model, GATHERED)
    world = SimpleNamespace(size=3, mesh={"shard": SimpleNamespace(size=lambda: 3)})
    with pytest.raises(UserError, match=r"the 32 rows of layers.0.attn.out.weight do not divide among 3 ranks: choose"):
        parallel.shard(model, world, torch.bfloat16)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
