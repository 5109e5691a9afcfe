"""What only a GPU can show; run with `pytest -m gpu` on an H100-class machine."""

import gzip
import json
import math
import pickle
import shutil
import time
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from model import GPT, GPTConfig
from runtime import fp8
from runtime.checkpoint import Saver, checkpoints, load, load_model, read_manifest, step_of
from runtime.config import CheckpointConfig, FP8Config
from runtime.guard import diagnose
from runtime.log import Meter
from tests.conftest import call_train, run_train, with_recipe
from tests.faults import record

pytestmark = pytest.mark.gpu
RECIPES = ["tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "amax", "cscale", "mxfp8"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_recipe_is_near_bf16_and_not_equal(recipe):
    def losses(config):
        with torch.device("meta"):
            model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=256, n_ffn=512, n_ctx=128))
        fp8.convert(model, config)
        model.compile(dynamic=False, fullgraph=True)
        model.to_empty(device="cuda")
        model.init_weights(0)
        ids = torch.randint(50257, (4, 129), generator=torch.Generator().manual_seed(0)).cuda()
        loss = model(ids[:, :-1], ids[:, 1:]).sum() / (4 * 128)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        return loss.item()

    bf16, quantised = losses(FP8Config()), losses(FP8Config(recipe=recipe))
    assert bf16 != quantised
    assert abs(quantised - bf16) / bf16 < 2.5e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_on_a_gpu_resumes_and_its_checkpoint_loads_on_a_cpu(tiny, tmp_path, recipe):
    config = with_recipe(tiny, recipe, parallel=replace(tiny.parallel, compile=True))
    assert run_train(config, tmp_path, "steps=3").returncode == 0
    (config.run_dir / "summary.json").unlink()
    done = run_train(config, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["mem_peak_gib"] > 0
    model, _ = load_model(config.run_dir, device="cpu")
    assert all(p.isfinite().all() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------- runs that survive

def test_a_save_beside_training_holds_the_weights_of_its_step(tiny):
    """The update of a step is queued behind work that keeps the GPU busy when save() is called, the next one right behind
    staged(): a copy that begins too early or ends too late is torn."""
    device = torch.device("cuda", 0)
    world = SimpleNamespace(rank=0, size=1, is_main=True, checkpoint_group=None, device=device)
    live = {f"model.{i}": torch.zeros(2**24, device=device) for i in range(8)}     # 512 MiB: some 10 ms of copying
    work = torch.randn(4096, 4096, device=device)
    saver = Saver(tiny.run_dir, CheckpointConfig(every=1, keep=9), world, {})
    for step in range(1, 4):
        for _ in range(50):
            work = torch.tanh(work @ work)
        for t in live.values():
            t.fill_(step)
        saver.save(step, live, {}, tiny)
        saver.staged()
        for t in live.values():
            t.fill_(-step)
    saver.finish()
    assert saver.failures == []
    assert [step_of(path) for path in checkpoints(tiny.run_dir)] == [1, 2, 3]
    for path in checkpoints(tiny.run_dir):
        read = {name: torch.zeros(2**24) for name in live}
        load(path, read_manifest(path), read)
        assert all(bool((t == step_of(path)).all()) for t in read.values()), path


@pytest.mark.parametrize("recipe", ["off", "tensorwise", "rowwise"])
def test_with_deterministic_two_runs_and_a_resumed_one_have_the_same_bits(tiny, tmp_path, recipe):
    first, second = (with_recipe(tiny, recipe, run=name, deterministic=True, parallel=replace(tiny.parallel, compile=True))
                     for name in ("first", "second"))
    for config in (first, second):
        done = run_train(config, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "deterministic algorithms" in done.stdout
    wanted = record(first)
    assert record(second) == wanted
    assert wanted["skipped_steps"] == 0

    shutil.rmtree(second.run_dir / "checkpoints" / "step_00000006")     # as if killed after step 3
    (second.run_dir / "summary.json").unlink()
    done = run_train(second, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout and "step_00000003" in done.stdout
    assert record(second) == wanted


def test_too_large_a_micro_batch_ends_with_what_to_try(tiny, tmp_path, capsys):
    config = replace(tiny, steps=1, data=replace(tiny.data, micro_batch=1024, tokens_per_step=32 * 1024))
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 2**27      # the logits and their gradients alone are more
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        done = call_train(capsys, config, tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert done.returncode == 1, done.stderr
    assert "out of memory on rank 0 (cuda:0, " in done.stderr and " GiB of tensors at the peak, " in done.stderr
    assert "data.micro_batch=512 (now 1024; " in done.stderr and "parallel.recompute=true" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (config.run_dir / "summary.json").exists()


def test_a_profiled_run_leaves_a_trace_with_kernels_and_a_memory_snapshot(tiny, tmp_path):
    done = run_train(tiny, tmp_path, "profile=2:3")
    assert done.returncode == 0, done.stderr
    assert "profile: steps 2 to 3 -> " in done.stdout, done.stdout
    folder = tiny.run_dir / "profile"
    assert sorted(p.name for p in folder.iterdir()) == ["memory_rank0.pickle", "trace_rank0.pt.trace.json.gz"]
    events = json.loads(gzip.decompress((folder / "trace_rank0.pt.trace.json.gz").read_bytes()))["traceEvents"]
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= {event.get("name") for event in events}
    assert any(event.get("cat") == "kernel" for event in events)
    snapshot = pickle.loads((folder / "memory_rank0.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])


def test_the_meter_reads_this_gpu():
    """Its memory at least where nvidia-ml-py is installed; without that package nothing, and no error."""
    meter = Meter(torch.device("cuda", 0), period=0.1)
    if find_spec("pynvml") is None:
        assert meter.read() == {}
        return
    held = torch.ones(2**28, device="cuda")     # 1 GiB
    try:
        until = time.monotonic() + 60
        while not (read := meter.read()) and time.monotonic() < until:
            time.sleep(0.1)
        assert set(read) <= {"gpu_mem_pct", "gpu_util_pct", "gpu_power_w"} and read
        if "gpu_mem_pct" in read:
            time.sleep(1)       # a sample from after the GiB was taken
            least = 100 * held.nbytes / torch.cuda.get_device_properties(0).total_memory
            assert 0.95 * least < meter.read()["gpu_mem_pct"] <= 100
        assert 0 <= read.get("gpu_util_pct", 0) <= 100
        assert 0 < read.get("gpu_power_w", 1) < 3000
    finally:
        meter.close()


def test_a_compiled_models_diagnosis_names_the_weight_and_the_output(tmp_path):
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=256, n_ffn=512, n_ctx=128))
    fp8.convert(model, FP8Config(recipe="rowwise"))
    model.compile(dynamic=False, fullgraph=True)
    model.to_empty(device="cuda")
    model.init_weights(0)
    ids = torch.randint(50257, (4, 129), generator=torch.Generator().manual_seed(0)).cuda()
    x, y = ids[:, :-1], ids[:, 1:]
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    model(x, y).sum().backward()
    sound = diagnose(model, weights, x, y, 6, "spike", tmp_path, True, 1 / 512)
    assert "weights, moments and gradients are finite" in sound and "computed anew, is finite" in sound
    assert json.loads((tmp_path / "diagnosis.json").read_text())["problems"] == []
    weights["model.layers.1.mlp.down.weight"][0, 0] = math.nan
    text = diagnose(model, weights, x, y, 7, "loss nan", tmp_path, True, 1 / 512)
    assert "layers.1.mlp.down.weight: 1 of 131,072 values" in text
    assert "the first output that is not finite is that of layers.1.mlp.down (" in text
    assert json.loads((tmp_path / "diagnosis.json").read_text())["problems"] == []
