"""The real train.py in this process: what a run leaves, what it refuses. Processes, kills and ranks: tests/test_faults.py."""

import json
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import train
from model import GPT
from runtime.checkpoint import load_model
from runtime.config import ProbeConfig
from tests.conftest import call_train, with_recipe, write_source


def summary(config):
    return json.loads((config.run_dir / "summary.json").read_text())


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
        assert (done.returncode, done.stderr) == (0, "")
    a, b, c = map(summary, (bf16, fp8, kernels))
    for key in ("pair_id", "data_sha256", "val_sha256", "params_total", "flops_per_token", "seed", "tokens"):
        assert a[key] == b[key] == c[key], key
    assert [one["precision"]["recipe"] for one in (a, b, c)] == ["bf16", "tensorwise", "tensorwise+kernels"]
    assert c["precision"]["layers_kernels"] == b["precision"]["layers_converted"] and b["precision"]["layers_kernels"] == []
    assert (a["params_fp8"], len(b["precision"]["layers_converted"]), list(b["precision"]["layers_skipped"])) == (0, 8, ["head"])
    assert a["loss_as_trained"] == a["loss_bf16"] != b["loss_bf16"] != b["loss_as_trained"]
    assert abs(a["loss_bf16"] - b["loss_bf16"]) < 0.05 and abs(c["loss_bf16"] - b["loss_bf16"]) < 0.01
    assert "fp8: 8 of 9 Linears" in done.stdout
    saved = np.load(fp8.run_dir / "val_losses.npz")
    mean = 0.0
    for i, source in enumerate(sorted(b["sources"])):
        mine = saved["source"] == i
        mean += b["sources"][source]["weight"] * saved["bf16"][mine].sum() / saved["n_tokens"][mine].sum()
    assert mean == pytest.approx(b["loss_bf16"], rel=1e-12)
    models = [load_model(fp8.run_dir, compute_dtype=dtype)[0] for dtype in (torch.bfloat16, torch.float32)]
    x = torch.arange(32)[None]
    logits = [model(x) for model in models]
    assert all(type(model) is GPT for model in models) and not torch.equal(*logits)
    assert torch.allclose(*map(torch.Tensor.float, logits), atol=0.1)


def test_a_finished_run_has_nothing_to_do_and_another_run_may_not_use_its_folder(tiny, tmp_path, capsys):
    assert call_train(capsys, tiny, tmp_path).returncode == 0
    before = {p: p.stat().st_mtime_ns for p in tiny.run_dir.rglob("*")}
    again = call_train(capsys, tiny, tmp_path)
    assert (again.returncode, again.stdout[:58]) == (0, "tiny: finished, all 6 steps; nothing to do (" + str(tiny.run_dir)[:14])
    for change, told in (("model.n_layer=3", "model.n_layer was 2, now 3"), ("steps=7", "steps was 6, now 7"),
                         ("fp8.recipe=rowwise", "fp8.recipe was off, now rowwise"),
                         ("data.mixture=web:1", "data.mixture was {'web': 0.75, 'code': 0.25}")):
        refused = call_train(capsys, tiny, tmp_path, change)
        assert refused.returncode == 2 and f"holds another run: {told}" in refused.stderr
    assert before == {p: p.stat().st_mtime_ns for p in tiny.run_dir.rglob("*")}


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
    assert (refused.returncode, "holds other tokens than" in refused.stderr) == (2, True)


@pytest.mark.parametrize("arguments, told", [
    (["out=/proc/nowhere"], "choose another out="), (["out=/dev/null/x"], "Not a directory"), (["steps=200"], "data.max_epochs"),
    (["data.dir={data}"], "train_00000.bin is missing"),
    (["fp8.recipe=tensorwise", "model.n_ctx=20", "data.micro_batch=1", "data.tokens_per_step=20"], "multiple of 16")])
def test_settings_that_cannot_be_get_a_sentence_and_nothing_is_written(tiny, tmp_path, arguments, told, capsys):
    for seed, source in enumerate(("web", "code")):
        write_source(tmp_path / "data" / source, seed)
    os.remove(tmp_path / "data/code/train_00000.bin")
    done = call_train(capsys, tiny, tmp_path, *(argument.format(data=tmp_path / "data") for argument in arguments))
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
