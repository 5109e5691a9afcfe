"""Weights gathered as float8 under FSDP2: two gloo ranks, train.py's own loop, one start of torchrun for all tests."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from eval.loss import evaluate
from model import GPT, GPTConfig
from runtime import fp8, optim, parallel
from runtime import fp8 as gather
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
    config_from_dict,
)
from runtime.data import open_data
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT, call_train, with_recipe

GATHERED = FP8Config(recipe="tensorwise", all_gather=True)


# ----------------------------------------------------------------------------------------- what each of two ranks does

def work(folder: Path) -> None:
    """The runs `whole` and `halves` of folder/config.json, then experiments with a model; rank 0 writes what it saw."""
    whole = config_from_dict(json.loads((folder / "config.json").read_text()))
    world = parallel.start(whole)
    with saving() as kinds:
        train.train(whole, world)
    halves = replace(whole, run="halves")
    if world.is_main:       # as a kill after step 3 would leave it
        shutil.copytree(whole.run_dir, halves.run_dir)
        shutil.rmtree(halves.run_dir / "checkpoints/step_00000006")
        (halves.run_dir / "summary.json").unlink()
    parallel.barrier(world)
    train.train(halves, world)
    seen = {recipe: experiment(whole, recipe, world) for recipe in ("tensorwise", "tensorwise_gw_hp")}
    seen["saved"] = sorted(kinds)
    if world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen))
    parallel.finish(world, 0)


@contextmanager
def saving():
    """Collect the kinds of tensor that are given to the checkpointer: DCP's save() would pickle the wrapper, while its
    async_save() happens to lose it."""
    real, kinds = Saver.save, set()

    def watched(self, step, tensors, *rest):
        kinds.update(type(t._local_tensor).__name__ for t in tensors.values())
        real(self, step, tensors, *rest)

    Saver.save = watched
    try:
        yield kinds
    finally:
        Saver.save = real


def build(config, world):
    with torch.device("meta"):
        model = GPT(config.model)
    fp8.convert(model, config.fp8)
    parallel.shard(model, world, torch.bfloat16)
    model.init_weights(0, parallel.materialise(model, world))
    gather.precompute_scales(model)
    return model


def experiment(config, recipe: str, world) -> dict:
    """One model gathered as float8, its head too, and its plain twin with the same weights."""
    config = replace(config, model=replace(config.model, tied=False))
    model = build(replace(config, fp8=replace(GATHERED, recipe=recipe, head=True)), world)
    twin = build(replace(config, fp8=FP8Config()), world)
    optimizer = optim.build_optimizer(model, config.optim)
    optim.fill_state(optimizer)
    x, y = torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(world.rank))

    @torch.no_grad()
    def loss(of):
        return of(x, y).tolist()

    seen = {"sent": sent_by(lambda: loss(model)), "sent_plain": sent_by(lambda: loss(twin)), "float8": [loss(model)]}
    with fp8.in_bf16(model):
        seen["in_bf16"] = loss(model)
    seen["float8"].append(loss(model))
    try:
        with fp8.in_bf16(model):
            raise KeyError
    except KeyError:
        seen["float8"].append(loss(model))
    seen["left_behind"] = [name for name, module in model.named_modules() if hasattr(module, "shard")]
    seen["plain"] = loss(twin)

    model(x, y).sum().backward()
    seen["norms"] = [parallel.clip_gradients(model, 1e-2).item() for _ in range(2)]
    optimizer.step()
    seen["states"] = sorted({type(t._local_tensor).__name__ for t in optim.state_tensors(optimizer, model).values()})
    seen["all_reduces"] = count_all_reduces(lambda: gather.precompute_scales(model))
    seen["scales"] = {}
    for name, p in model.named_parameters():
        if gather.is_wrapped(p):
            whole = gather.unwrap(p.detach()).full_tensor()
            seen["scales"][name] = (p._local_tensor._precomputed_scale.item(), (448 / whole.abs().max().double()).float().item())
    with fp8.in_bf16(model):
        seen["in_bf16_later"] = loss(model)
    for each in (model, twin):
        each.reshard()      # what a forward pass leaves gathered
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(gather.unwrap(parameters[name].detach()))
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


def count_all_reduces(call) -> int:
    from torch.distributed.tensor.debug import CommDebugMode
    with CommDebugMode() as mode:
        call()
    return mode.get_total_counts()


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
    (folder / "config.json").write_text(json.dumps(whole.to_dict()))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, folder],
                          capture_output=True, text=True, timeout=200, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(whole=whole, halves=replace(whole, run="halves"), seen=json.loads((folder / "seen.json").read_text()))


def rows(config):
    return [row for row in map(json.loads, open(config.run_dir / "metrics.jsonl")) if row["kind"] == "train"]


def test_resumed_it_is_the_same_bits(ranks):
    """Stale scales after the load, or scales that were never renewed, would show here."""
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [r[key] for r in rows(ranks.whole)] == [r[key] for r in rows(ranks.halves)], key
    a, b = (dict(load_model(c.run_dir)[0].named_parameters()) for c in (ranks.whole, ranks.halves))
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (np.load(c.run_dir / "val_losses.npz") for c in (ranks.whole, ranks.halves))
    assert all(np.array_equal(a[key], b[key]) for key in a)


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
    path = latest(ranks.whole.run_dir)
    for file in path.iterdir():
        assert b"torchao" not in file.read_bytes(), file
    model, config = load_model(ranks.whole.run_dir)
    data = open_data(config, load_tokenizer("byte").sha256)
    loss = evaluate(model, {s: data.val(s) for s in data.sources}, data.weights, config.data.micro_batch, torch.device("cpu"))
    summary = json.loads((ranks.whole.run_dir / "summary.json").read_text())
    assert loss.loss == summary["loss_bf16"]
    assert loss.loss != summary["loss_as_trained"]


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_gw_hp"])
class TestOneModel:
    def test_in_bf16_is_the_plain_twin(self, ranks, recipe):
        seen = ranks.seen[recipe]
        assert seen["in_bf16"] == seen["plain"]
        assert seen["in_bf16_later"] == seen["plain_later"] != seen["plain"]
        assert seen["float8"][0] != seen["plain"]
        assert seen["float8"] == [seen["float8"][0]] * 3, "the context leaves nothing behind, not even after an error"
        assert not seen["left_behind"]

    def test_half_the_bytes_are_sent(self, ranks, recipe):
        seen, c = ranks.seen[recipe], ranks.whole.model
        linears = c.n_layer * (4 * c.n_embd**2 + 3 * c.n_embd * c.n_ffn)
        norms, table = c.n_layer * 2 * c.n_embd, c.vocab_padded * c.n_embd      # a block's norms in BF16, last one in fp32
        assert seen["sent"] * 2 == linears + 2 * norms + 4 * c.n_embd + (4 + 1) * table
        assert seen["sent_plain"] * 2 == 2 * linears + 2 * norms + 4 * c.n_embd + (4 + 4) * table

    def test_one_all_reduce_finds_all_scales(self, ranks, recipe):
        seen = ranks.seen[recipe]
        assert seen["all_reduces"] == 1
        assert len(seen["scales"]) == 9
        for name, (have, want) in seen["scales"].items():
            assert have == want, name

    def test_gradients_are_clipped_and_moments_are_plain(self, ranks, recipe):
        seen = ranks.seen[recipe]
        assert seen["norms"][0] > 1
        assert seen["norms"][1] == pytest.approx(1e-2, rel=1e-3)
        assert seen["states"] == ["Tensor"]


def test_alone_it_is_refused(tiny, tmp_path, capsys):
    done = call_train(capsys, replace(tiny, fp8=GATHERED), tmp_path)
    assert done.returncode == 2
    assert "fp8.all_gather=true needs several ranks that share the weights, but each of 1 has them whole" in done.stderr
    assert not tiny.run_dir.exists()


@pytest.mark.parametrize("changes, told", [
    ({"parallel": {"replicate": 2}}, "each of 2 has them whole"),
    ({"fp8": {"head": True}}, "while the embedding shares its weight")])
def test_two_ranks_are_refused_what_cannot_be_gathered(tiny, monkeypatch, changes, told):
    monkeypatch.setenv("WORLD_SIZE", "2")
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
