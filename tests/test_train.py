"""The real train.py, as a process: runs, resumes, signals, refusals, two ranks."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import train
from model import GPT
from runtime.checkpoint import checkpoints, load, load_model, read_manifest
from runtime.config import ProbeConfig
from runtime.data import open_data
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT, call_train, run_train, with_recipe, write_config, write_index, write_source


def weights(run_dir):
    model, _ = load_model(run_dir, compute_dtype=torch.float32)
    return dict(model.named_parameters())


def rows(run_dir, kind="train"):
    return [row for row in map(json.loads, open(run_dir / "metrics.jsonl")) if row["kind"] == kind]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_three_steps_resumed_for_three_more_are_six(tiny, tmp_path):
    """Bit for bit: weights, losses and gradient norms, after both processes are gone and back. One process:
    tests/test_faults.py; every recipe: tests/soak.py."""
    whole = with_recipe(tiny, "tensorwise", run="whole")
    done = run_train(whole, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    halves = replace(whole, run="halves")
    shutil.copytree(whole.run_dir, halves.run_dir)     # as a kill between step 4 and 6 would leave it
    shutil.rmtree(halves.run_dir / "checkpoints/step_00000006")
    (halves.run_dir / "summary.json").unlink()
    (halves.run_dir / "checkpoints/.tmp_step_00000006").mkdir()
    with open(halves.run_dir / "metrics.jsonl") as file:
        text = file.read()
    (halves.run_dir / "metrics.jsonl").write_text(text[:-20])
    done = run_train(halves, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert f"resuming {halves.run_dir}/checkpoints/step_00000003" in done.stdout
    assert same(weights(whole.run_dir), weights(halves.run_dir))
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [r[key] for r in rows(whole.run_dir)] == [r[key] for r in rows(halves.run_dir)], key
    assert [r["step"] for r in rows(halves.run_dir)] == [1, 2, 3, 4, 5, 6]
    assert not list((halves.run_dir / "checkpoints").glob(".tmp_*"))
    a, b = (np.load(c.run_dir / "val_losses.npz") for c in (whole, halves))
    assert all(np.array_equal(a[k], b[k]) for k in a)


def test_two_ranks_train_what_one_does(tiny, tmp_path, capsys):
    """In BF16: the same tokens, weights equal to rounding; FP8 tensorwise scales depend on who holds which sequences."""
    one, two = replace(tiny, run="one"), replace(tiny, run="two")
    assert call_train(capsys, one, tmp_path).returncode == 0
    assert run_train(two, tmp_path, ranks=2).returncode == 0
    losses = [[r["loss"] for r in rows(c.run_dir)] for c in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5), "the first loss depends on initialisation and data alone"
    norms = [[r["grad_norm"] for r in rows(c.run_dir)] for c in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05), "a wrong gradient scale would be off by a factor of two"
    summaries = [json.loads((c.run_dir / "summary.json").read_text()) for c in (one, two)]
    assert summaries[0]["loss_bf16"] == pytest.approx(summaries[1]["loss_bf16"], rel=1e-3)
    assert summaries[0]["val_sha256"] == summaries[1]["val_sha256"]
    assert (summaries[1]["n_gpu"], summaries[1]["grad_accum"]) == (2, 2)
    # The checkpoint of two ranks goes on as one: the loss of the next step is the same to rounding.
    shutil.rmtree(two.run_dir / "checkpoints/step_00000006")
    (two.run_dir / "summary.json").unlink()
    assert call_train(capsys, two, tmp_path).returncode == 0
    assert rows(two.run_dir)[3]["loss"] == pytest.approx(losses[1][3], rel=1e-4)


def first_moments(config):
    """AdamW's first moments in a run's newest checkpoint: after one step, a tenth of the clipped gradient."""
    path = checkpoints(config.run_dir)[-1]
    manifest = read_manifest(path)
    wanted = {k: torch.zeros(shape) for k, (shape, _) in manifest["tensors"].items() if k.endswith("exp_avg")}
    load(path, manifest, wanted)
    return wanted


def test_gradients_are_summed_in_fp32_over_ranks_and_micro_batches(tiny, tmp_path, capsys):
    """Two ranks sum the very BF16 gradients of the micro-batches that one rank sums; a BF16 sum would be off by 1e-3."""
    one, two = replace(tiny, run="one", steps=1), replace(tiny, run="two", steps=1)
    assert call_train(capsys, one, tmp_path).returncode == 0
    assert run_train(two, tmp_path, ranks=2).returncode == 0
    a, b = first_moments(one), first_moments(two)
    for name in a:
        assert (a[name] - b[name]).norm() / a[name].norm() < 2e-5, name


def test_no_step_draws_random_numbers(tiny, tmp_path, capsys, monkeypatch):
    """So a checkpoint needs no generator's state to be resumed from exactly; a step that begins to draw must store it."""
    states, real = [], train.optim.set_learning_rate

    def spy(*arguments):
        states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))
        return real(*arguments)

    monkeypatch.setattr(train.optim, "set_learning_rate", spy)
    config = with_recipe(tiny, "tensorwise", probe=ProbeConfig(every=2), eval=replace(tiny.eval, every=2),
                         parallel=replace(tiny.parallel, recompute=True))
    assert call_train(capsys, config, tmp_path).returncode == 0
    assert len(states) == 6
    assert all(state == states[0] for state in states)


def test_a_pair_sees_the_same_tokens_and_the_summary_says_so(tiny, tmp_path, capsys):
    bf16, fp8 = replace(tiny, run="a"), with_recipe(tiny, "tensorwise", run="b")
    kernels = replace(fp8, run="c", fp8=replace(fp8.fp8, kernels=True))
    for config in (bf16, kernels, fp8):
        done = call_train(capsys, config, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    a, b = (json.loads((c.run_dir / "summary.json").read_text()) for c in (bf16, fp8))
    for key in ("pair_id", "data_sha256", "val_sha256", "params_total", "flops_per_token", "seed", "tokens"):
        assert a[key] == b[key], key
    c = json.loads((kernels.run_dir / "summary.json").read_text())
    assert [one["precision"]["recipe"] for one in (a, b, c)] == ["bf16", "tensorwise", "tensorwise+kernels"]
    assert c["pair_id"] == a["pair_id"] and c["precision"]["layers_kernels"] == b["precision"]["layers_converted"]
    assert b["precision"]["layers_kernels"] == [] and abs(c["loss_bf16"] - b["loss_bf16"]) < 0.01
    assert a["params_fp8"] == 0
    assert len(b["precision"]["layers_converted"]) == 8
    assert list(b["precision"]["layers_skipped"]) == ["head"]
    assert a["loss_as_trained"] == a["loss_bf16"]
    assert b["loss_as_trained"] != b["loss_bf16"]
    assert a["loss_bf16"] != b["loss_bf16"]
    assert abs(a["loss_bf16"] - b["loss_bf16"]) < 0.05
    assert "fp8: 8 of 9 Linears" in done.stdout
    saved = np.load(fp8.run_dir / "val_losses.npz")
    model, config = load_model(fp8.run_dir)
    assert isinstance(model, GPT)
    mean = 0.0
    for i, source in enumerate(sorted(b["sources"])):
        mine = saved["source"] == i
        mean += b["sources"][source]["weight"] * saved["bf16"][mine].sum() / saved["n_tokens"][mine].sum()
    assert mean == pytest.approx(b["loss_bf16"], rel=1e-12)


def test_a_finished_run_has_nothing_to_do_and_another_run_may_not_use_its_folder(tiny, tmp_path, capsys):
    assert call_train(capsys, tiny, tmp_path).returncode == 0
    before = {p: p.stat().st_mtime_ns for p in tiny.run_dir.rglob("*")}
    again = call_train(capsys, tiny, tmp_path)
    assert again.returncode == 0
    assert again.stdout.startswith("tiny: finished, all 6 steps; nothing to do")
    for change, told in (("model.n_layer=3", "model.n_layer was 2, now 3"), ("steps=7", "steps was 6, now 7"),
                         ("fp8.recipe=rowwise", "fp8.recipe was off, now rowwise"),
                         ("data.mixture=web:1", "data.mixture was {'web': 0.75, 'code': 0.25}")):
        refused = call_train(capsys, tiny, tmp_path, change)
        assert refused.returncode == 2
        assert f"holds another run: {told}" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert before == {p: p.stat().st_mtime_ns for p in tiny.run_dir.rglob("*")}


def test_a_signal_saves_and_the_run_goes_on_bit_exactly(tiny, tmp_path):
    """Ctrl-C; SIGTERM to torchrun and its ranks: tests/test_faults.py."""
    config = replace(tiny, run="stopped", steps=2000, checkpoint=replace(tiny.checkpoint, every=None),
                     data=replace(tiny.data, max_epochs=100))
    process = start_train(config, tmp_path)
    wait_for(lambda: (config.run_dir / "metrics.jsonl").exists() and len(rows(config.run_dir)) >= 3)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert "stopped on request at step" in output
    step = read_manifest(checkpoints(config.run_dir)[-1])["step"]
    assert step == rows(config.run_dir)[-1]["step"] < 2000
    assert not (config.run_dir / "summary.json").exists()
    short = replace(config, run="unbroken")
    shutil.copytree(config.run_dir, short.run_dir, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    stopped, unbroken = (first_losses(c, tmp_path, step + 3) for c in (config, short))
    assert stopped == unbroken


def start_train(config, tmp_path):
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), str(write_config(config, tmp_path / f"{config.run}.py"))],
                            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def first_losses(config, tmp_path, n):
    """Losses of the first n steps of a run, which is then stopped."""
    process = start_train(config, tmp_path)
    try:
        wait_for(lambda: (config.run_dir / "metrics.jsonl").exists() and len(complete_rows(config.run_dir)) >= n)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    return [row["loss"] for row in complete_rows(config.run_dir)[:n]]


def complete_rows(run_dir):
    text = (run_dir / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text[:text.rfind("\n") + 1].splitlines()) if row["kind"] == "train"]


def wait_for(condition, timeout=60):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def test_two_ranks_that_do_not_divide_a_step_are_refused(tiny, tmp_path):
    refused = run_train(tiny, tmp_path, "data.micro_batch=16", ranks=2)
    assert refused.returncode != 0
    assert ("train.py: data.tokens_per_step=512 cannot be shared by 2 ranks in micro-batches of 16 x 32 tokens: it must be a "
            "multiple of 1024; change data.micro_batch or the number of ranks") in refused.stderr
    assert not tiny.run_dir.exists()


def test_replicas_of_shards_train(tiny, tmp_path, capsys):
    config = replace(tiny, run="hsdp", parallel=replace(tiny.parallel, replicate=2, shard=1))
    done = run_train(config, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    plain = replace(tiny, run="plain")
    assert call_train(capsys, plain, tmp_path).returncode == 0
    assert [r["loss"] for r in rows(config.run_dir)] == pytest.approx([r["loss"] for r in rows(plain.run_dir)], rel=1e-3)


@pytest.mark.parametrize("damage, sentence", [
    (lambda d: (d / "web/train_00000.bin").unlink(), "train_00000.bin is missing"),
    (lambda d: os.truncate(d / "web/train_00000.bin", 79_999), "train_00000.bin has 79999 bytes"),
    (lambda d: shutil.rmtree(d / "code"), "there is no"),
    (lambda d: (d / "web/index.json").write_text("{"), "index.json cannot be read"),
    (lambda d: write_index(d / "web", tokenizer="gpt2"),
     "was made with tokenizer=gpt2, but data.tokenizer=byte"),
])
def test_damaged_data_is_told_before_anything_is_written(tiny, tmp_path, damage, sentence, capsys):
    for seed, source in enumerate(("web", "code")):
        write_source(tmp_path / "data" / source, seed)
    damage(tmp_path / "data")
    refused = call_train(capsys, tiny, tmp_path, f"data.dir={tmp_path}/data")
    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not tiny.run_dir.exists()


def test_an_unfinished_run_goes_on_only_as_it_began(tiny, tmp_path, capsys):
    """Else a summary would claim one learning rate, or one data set, for weights that saw two."""
    for seed, source in enumerate(("web", "code")):
        write_source(tmp_path / "data" / source, seed)
    config = replace(tiny, data=replace(tiny.data, dir=str(tmp_path / "data")))
    assert call_train(capsys, config, tmp_path).returncode == 0
    (config.run_dir / "summary.json").unlink()
    shutil.rmtree(config.run_dir / "checkpoints/step_00000006")
    refused = call_train(capsys, config, tmp_path, "optim.lr=1e-3", "steps=8")
    assert refused.returncode == 2
    assert "holds another run: optim.lr was 0.01, now 0.001; steps was 6, now 8;" in refused.stderr
    shutil.move(tmp_path / "data", tmp_path / "moved")      # where it lies and how it is dealt out may change
    moved = ["data.dir=" + str(tmp_path / "moved"), "data.micro_batch=8", "data.max_epochs=2", "checkpoint.keep=1"]
    assert call_train(capsys, config, tmp_path, *moved).returncode == 0
    (config.run_dir / "summary.json").unlink()
    shutil.rmtree(tmp_path / "moved/code")
    write_source(tmp_path / "moved/code", seed=9)
    refused = call_train(capsys, config, tmp_path, *moved)
    assert refused.returncode == 2
    assert "holds other tokens than" in refused.stderr


def test_a_rank_alone_with_an_error_tells_it(tiny, tmp_path):
    for seed, source in enumerate(("web", "code")):
        write_source(tmp_path / "data" / source, seed)
    config = replace(tiny, data=replace(tiny.data, dir=str(tmp_path / "data"), mixture={"web": 1.0}))
    data = open_data(config, load_tokenizer("byte").sha256)
    row = data.batch(0, 0, 1, 2)[0][0].numpy().astype("<u2").tobytes()     # read by the second of two ranks alone
    shard = tmp_path / "data/web/train_00000.bin"
    content = shard.read_bytes()
    assert content.count(row) == 1
    shard.write_bytes(content.replace(row, b"\xff\xff" + row[2:]))
    done = run_train(config, tmp_path, ranks=2)
    assert done.returncode != 0
    assert "train.py: rank 1: " in done.stderr
    assert "holds the id 65535" in done.stderr


@pytest.mark.parametrize("arguments, told", [
    (["out=/proc/nowhere"], "choose another out="), (["out=/dev/null/x"], "Not a directory"), (["steps=200"], "data.max_epochs"),
    (["fp8.recipe=tensorwise", "model.n_ctx=20", "data.micro_batch=1", "data.tokens_per_step=20"], "multiple of 16")])
def test_settings_that_cannot_be_get_a_sentence_and_nothing_is_written(tiny, tmp_path, arguments, told, capsys):
    done = call_train(capsys, tiny, tmp_path, *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert told in done.stderr and not tiny.run_dir.exists()


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tiny, tmp_path, capsys):
    """A purged scratch disk, a link to one that is not mounted: the rows of days must not be written over."""
    config = replace(tiny, checkpoint=replace(tiny.checkpoint, every=2))
    assert call_train(capsys, config, tmp_path).returncode == 0
    before = (config.run_dir / "metrics.jsonl").read_bytes()
    (config.run_dir / "summary.json").unlink()
    shutil.rmtree(config.run_dir / "checkpoints")
    refused = call_train(capsys, config, tmp_path)
    assert refused.returncode == 2
    assert "has come to step 6, yet no checkpoint of it is left: put its checkpoints/ back" in refused.stderr
    assert (config.run_dir / "metrics.jsonl").read_bytes() == before
    # Killed over its very first save a run has nothing to go back to, and begins anew.
    (config.run_dir / "metrics.jsonl").write_bytes(b"".join(before.splitlines(keepends=True)[:3]))
    assert call_train(capsys, config, tmp_path).returncode == 0
