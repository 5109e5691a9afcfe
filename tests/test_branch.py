"""Branches: a run from another run's checkpoint ends, bit for bit, where the whole run from scratch ends."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import train
from runtime import log as metrics
from runtime import optim
from runtime.checkpoint import checkpoints, seal
from runtime.cli import UserError
from runtime.config import FP8Config, apply_overrides
from runtime.run import lineage
from tests.conftest import ROOT, call_train, write_config
from tests.test_train import rows, same, weights

LONG, SHORT, FORK = 12, 8, 6        # steps of the trunk, of its branch, and where it leaves: (1 - 0.25) * 8


def trunk_of(tiny, **changes):
    """A warm-up of 2 steps; the trunk decays over its last 3 steps, the branch over its last 2."""
    return replace(tiny, run="trunk", steps=LONG, optim=replace(tiny.optim, schedule="wsd", decay_share=0.25,
                   warmup_share=2 / LONG), checkpoint=replace(tiny.checkpoint, every=4, keep=1, at=(FORK,)), **changes)


def whole_of(trunk):
    """The run of the branch's length, from scratch."""
    return replace(trunk, run="whole", steps=SHORT, optim=replace(trunk.optim, warmup_share=2 / SHORT))


def branch_of(trunk, step=FORK):
    return replace(whole_of(trunk), run="branch", start_from=f"{trunk.run_dir}/checkpoints/step_{step:08d}")


def summary(config):
    return json.loads((config.run_dir / "summary.json").read_text())


@pytest.fixture(autouse=True)
def one_thread():
    """On models this small a second one only waits for the first: ten times longer where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[("off", 1), ("tensorwise", 1), ("tensorwise", 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def arm(request, tiny, tmp_path, capsys):
    """Trunk, whole run and branch of one recipe, all finished, trained by one rank or by two."""
    recipe, ranks = request.param
    trunk = trunk_of(tiny, fp8=FP8Config(recipe=recipe))
    configs = trunk, whole_of(trunk), branch_of(trunk)
    if ranks == 1:
        for config in configs:
            done = call_train(capsys, config, tmp_path)
            assert (done.returncode, done.stderr) == (0, "")
        return configs
    # The three in one start of torchrun, whose imports take longer than the runs.
    files = [str(write_config(config, tmp_path / f"{config.run}.py")) for config in configs]
    (tmp_path / "three.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\nfrom runtime import parallel\n"
        f"configs = [train.load_config(file) for file in {files}]\nworld = parallel.start(configs[0])\n"
        "for config in configs:\n    train.train(config, world)\nparallel.finish(world, 0)\n")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                           str(tmp_path / "three.py")], capture_output=True, text=True, timeout=300, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return configs


def test_a_branch_ends_bit_for_bit_where_the_run_from_scratch_ends(arm):
    trunk, whole, branch = arm
    assert same(weights(whole.run_dir), weights(branch.run_dir))
    assert not same(weights(trunk.run_dir), weights(branch.run_dir))
    for key in ("step", "tokens", "loss", "grad_norm", "lr", "verdict"):
        assert [r[key] for r in rows(branch.run_dir)] == [r[key] for r in rows(whole.run_dir)][FORK:], key
        assert [r[key] for r in rows(trunk.run_dir)][:FORK] == [r[key] for r in rows(whole.run_dir)][:FORK], key
    assert [r["step"] for r in rows(branch.run_dir)] == [7, 8]
    assert [r["since_start"] for r in rows(branch.run_dir)] == [1, 2]
    a, b = (np.load(c.run_dir / "val_losses.npz") for c in (whole, branch))
    assert all(np.array_equal(a[k], b[k]) for k in a)
    a, b = summary(whole), summary(branch)
    assert (b["parent_run"], b["parent_step"]) == ("trunk", FORK)
    assert (a["parent_run"], a["parent_step"]) == (None, None)
    timing = ("tok_per_s_median", "tok_per_s_p10", "tok_per_s_p90", "step_s_median", "compile_s", "tflops_median", "wall_s",
              "eval_s", "probe_share", "t_start", "t_end")
    for key in a.keys() - set(timing) - {"parent_run", "parent_step", "run_id", "cmd", "config_sha256"}:
        assert a[key] == b[key], key
    assert b["is_annealed"]
    assert b["pair_id"] == a["pair_id"] != summary(trunk)["pair_id"]


def test_a_branch_counts_its_own_seconds_and_goes_on_from_its_own_checkpoint(tiny, tmp_path, capsys):
    trunk = trunk_of(tiny, probe=replace(tiny.probe, every=1, tokens=128))
    assert call_train(capsys, trunk, tmp_path).returncode == 0
    fork = trunk.run_dir / f"checkpoints/step_{FORK:08d}"
    manifest = json.loads((fork / "manifest.json").read_text())
    manifest["state"] |= {"train_s": 1e6, "probe_s": 1e5}
    seal(fork, manifest)
    branch = replace(branch_of(trunk), checkpoint=replace(tiny.checkpoint, every=1, keep=9))
    done = call_train(capsys, branch, tmp_path)
    assert f"branching off {fork}" in done.stdout
    first = summary(branch)
    assert first["wall_s"] < 1e3
    assert first["probe_s"] < first["wall_s"]
    # As a kill during the last step leaves it; the parent is gone by now.
    (branch.run_dir / "summary.json").unlink()
    shutil.rmtree(branch.run_dir / "checkpoints/step_00000008")
    shutil.rmtree(trunk.run_dir)
    before = weights(branch.run_dir)
    done = call_train(capsys, branch, tmp_path)
    assert f"resuming {branch.run_dir}/checkpoints/step_00000007" in done.stdout
    again = summary(branch)
    for key in ("loss_as_trained", "loss_bf16", "parent_run", "parent_step", "t_start", "train_loss_last", "pair_id"):
        assert again[key] == first[key], key
    assert not same(before, weights(branch.run_dir))
    assert [r["step"] for r in rows(branch.run_dir)] == [7, 8]
    assert call_train(capsys, branch, tmp_path).stdout.startswith("branch: finished")
    refused = call_train(capsys, replace(branch, start_from=None), tmp_path)
    assert (refused.returncode, f"start_from was trunk at step {FORK}, now None" in refused.stderr) == (2, True)


def test_steps_to_keep_outlive_the_keep_policy(tiny, tmp_path, capsys):
    trunk = trunk_of(tiny)
    assert call_train(capsys, trunk, tmp_path).returncode == 0
    assert [p.name for p in checkpoints(trunk.run_dir)] == [f"step_{s:08d}" for s in (6, 8, 12)]    # 4 is gone
    with pytest.raises(UserError, match="checkpoint.at names step 0: steps are counted from 1"):
        apply_overrides(trunk, ["checkpoint.at=0,4"])
    with pytest.raises(UserError, match="checkpoint.at='4,x' is not a list of whole numbers"):
        apply_overrides(trunk, ["checkpoint.at=4,x"])
    with pytest.raises(UserError, match="checkpoint.at names step 1000, but this run ends at step 12"):
        apply_overrides(trunk, ["checkpoint.at=4,1e3"])


def test_what_is_no_branch_is_refused_before_anything_is_written(tiny, tmp_path, capsys):
    trunk = trunk_of(tiny, data=replace(tiny.data, max_epochs=9))
    assert call_train(capsys, trunk, tmp_path).returncode == 0
    branch, fork = branch_of(trunk), f"{trunk.run_dir}/checkpoints"
    other = tmp_path / "out/renamed/checkpoints/step_00000005"
    shutil.copytree(f"{fork}/step_00000006", other)
    open_ended = tmp_path / "out/killed/checkpoints/step_00000006"
    shutil.copytree(f"{fork}/step_00000006", open_ended)
    (open_ended / "DONE").unlink()
    for overrides, told in [
        (["seed=1"], "is of another run: seed was 1337, now 1; a branch differs from its parent in run, out, budget and decay"),
        (["model.n_layer=1"], "model.n_layer was 2, now 1"), (["data.mixture=web:1"], "data.mixture was"),
        (["optim.beta2=0.99"], "optim.beta2 was 0.95, now 0.99"), (["optim.lr=1e-3"], "optim.lr was 0.01, now 0.001"),
        (["fp8.recipe=tensorwise"], "fp8.recipe was off, now tensorwise"), (["eval.tokens=64"], "holds other tokens than"),
        (["optim.warmup_share=0.5"], "step 1 of trunk had the learning rate 0.005, in this run it would have 0.0025: give it the "
         "same 2 steps of warm-up, optim.warmup_share=0.25"),
        (["optim.schedule=cosine"], "branches need optim.schedule=wsd in both runs"),
        (["optim.decay_share=0.5"], "the decay has begun there; take a checkpoint of step 4 or before"),
        (["steps=24", f"optim.warmup_share={2 / 24}", f"start_from={fork}/step_00000012"],
         "step 10 of trunk had the learning rate 0.007, in this run it would have 0.01: the decay has begun there; take a "
         "checkpoint of step 9 or before"),
        ([f"start_from={fork}/step_00000012"], "lies at step 12, but this run ends at step 8: take an earlier checkpoint"),
        (["steps=6"], "lies at step 6, but this run ends at step 6"),
        ([f"start_from={fork}/step_00000005"], "is no finished checkpoint; "),
        ([f"start_from={open_ended}"], f"{open_ended.parent.parent} has none: train that run past this step"),
        ([f"start_from={other}"], "holds step 6: give the folder the name it was written under"),
        ([f"start_from={trunk.run_dir}"], "is no checkpoint's folder: write it like out/<run>/checkpoints/step_00000400"),
        (["run=trunk2", f"start_from={tmp_path}/out/trunk2/checkpoints/step_00000002"], "is a checkpoint of this very run"),
    ]:
        refused = call_train(capsys, branch, tmp_path, *overrides)
        assert (refused.returncode, told in refused.stderr) == (2, True), (overrides, refused.stderr)
        assert refused.stderr.startswith("train.py: ") and refused.stderr.count("\n") == 1
        assert not branch.run_dir.exists()
    damaged = tmp_path / f"{fork}/step_00000006/__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    refused = call_train(capsys, branch, tmp_path)
    assert (refused.returncode, "is missing or not" in refused.stderr) == (2, True)


def test_pairs_of_branches_match_whatever_trunk_they_left(tiny):
    bf16 = branch_of(trunk_of(tiny))
    fp8 = replace(bf16, run="fp8", fp8=FP8Config(recipe="tensorwise"),
                  start_from=bf16.start_from.replace("trunk", "trunk_fp8"))
    assert metrics.pair_id(bf16) == metrics.pair_id(fp8) == metrics.pair_id(replace(bf16, start_from=None))
    assert metrics.pair_id(bf16) != metrics.pair_id(replace(bf16, steps=9))
    imported = replace(bf16, start_from=bf16.start_from.replace("trunk", "llama")[:-8] + "00000000")
    assert metrics.pair_id(imported) == metrics.pair_id(replace(imported, fp8=fp8.fp8))
    assert metrics.pair_id(imported) not in (metrics.pair_id(bf16), metrics.pair_id(
        replace(imported, start_from=imported.start_from.replace("llama", "qwen")))), "weights that came from elsewhere count"
    assert [lineage(config) for config in (bf16, imported, replace(bf16, start_from=None))] == [
        {"parent_run": "trunk", "parent_step": 6, "continued_from": None},
        {"parent_run": None, "parent_step": None, "continued_from": "llama"},
        {"parent_run": None, "parent_step": None, "continued_from": None}]
    moved = replace(bf16, start_from="/x/trunk/checkpoints/step_00000006/")
    assert moved.identity() == bf16.identity()


def test_an_error_begins_on_a_line_of_its_own(tiny, tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device", "x")
    monkeypatch.setattr(train, "evaluate", fail)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    failed = call_train(capsys, tiny, tmp_path)
    assert failed.returncode == 1 and failed.stderr.startswith("train.py: x: No space left on device")
    assert failed.stdout.endswith(" left\n")        # a line of progress was open


def test_env_json_keeps_the_first_start(tiny, tmp_path, capsys, monkeypatch):
    times = iter([f"2026-01-01T00:00:0{i}Z" for i in range(9)])
    monkeypatch.setattr(metrics.time, "strftime", lambda *a: next(times))
    assert call_train(capsys, tiny, tmp_path).returncode == 0
    first = summary(tiny)
    (tiny.run_dir / "summary.json").unlink()
    assert call_train(capsys, tiny, tmp_path).returncode == 0
    assert first["t_start"] == summary(tiny)["t_start"] < first["t_end"] < summary(tiny)["t_end"]
    (tiny.run_dir / "summary.json").unlink()
    (tiny.run_dir / "env.json").write_text("{}")
    refused = call_train(capsys, tiny, tmp_path)
    assert refused.returncode == 2
    assert "env.json is damaged (KeyError: 't_start'), so it no longer tells when the run was begun" in refused.stderr


@pytest.mark.parametrize("steps, fork", [(1012, 810), (100, 80), (7, 6)])
def test_rates_agree_up_to_the_branch_point_for_any_length(steps, fork):
    long, short = (optim.OptimConfig(lr=1e-3, schedule="wsd", warmup_share=5 / n, decay_share=0.2) for n in (4 * steps, steps))
    assert steps - short.decay_steps(steps) == fork
    assert all(optim.learning_rate(k, 4 * steps, long) == optim.learning_rate(k, steps, short) for k in range(fork))
    assert optim.learning_rate(fork, 4 * steps, long) > optim.learning_rate(fork, steps, short)
