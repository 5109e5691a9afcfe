"""train.py, runtime/run.py, lib/machine.py: what a run leaves and refuses, its branch in another
precision, one read of the host a step, one writer per folder, too little memory.

Kills, signals, ranks, rollbacks: tests/runtime/test_faults.py."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import shutil
import threading
import time
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lib import machine
from lib.errors import MachineError
from runtime import memory, run_folder, shards
from runtime import run as room
from runtime.checkpoint import latest, load_model, read_manifest
from runtime.config import FP8Config
from runtime.data import Data
from runtime.log import pair_id
from runtime.tokenizer import keep_tokenizer, load_tokenizer, tokenizer_of
from runtime.validation import evaluate
from runtime.watchdog import Watchdog
from tests.conftest import ALONE, changed, write_source
from tests.helpers import faults
from tests.helpers.faults import summary
from tests.helpers.text_files import write_tokenizer
from tests.runtime.test_log import traced_steps


def test_a_pair_sees_the_same_tokens_and_the_summary_says_so(tiny, run):
    bf16, fp8 = changed(tiny, "run=a profile=2:3"), changed(tiny, "run=b fp8.recipe=tensorwise")
    kernels = changed(fp8, "run=c fp8.kernels=true")
    said = [run(config) for config in (bf16, kernels, fp8)]
    a, b, c = map(summary, (bf16, fp8, kernels))
    for key in (
        "pair_id",
        "data_sha256",
        "val_sha256",
        "params_total",
        "flops_per_token",
        "seed",
        "tokens",
    ):
        assert a[key] == b[key] == c[key], key
    assert [one["precision"]["recipe"] for one in (a, b, c)] == [
        "bf16",
        "tensorwise",
        "tensorwise+kernels",
    ]
    assert (
        c["precision"]["layers_kernels"] == b["precision"]["layers_converted"]
        and b["precision"]["layers_kernels"] == []
    )
    assert (
        a["params_fp8"],
        len(b["precision"]["layers_converted"]),
        list(b["precision"]["layers_skipped"]),
    ) == (0, 8, ["head"])
    assert a["loss_as_trained"] == a["loss_bf16"] != b["loss_bf16"] != b["loss_as_trained"]
    assert (
        abs(a["loss_bf16"] - b["loss_bf16"]) < 0.05 and abs(c["loss_bf16"] - b["loss_bf16"]) < 0.01
    )
    assert "fp8: 8 of 9 Linears" in said[2] and traced_steps(bf16.run_dir) == [2, 3]
    assert "fp8_scales" not in read_manifest(latest(kernels.run_dir))["state"], (
        "which delayed scaling alone keeps"
    )
    saved = np.load(fp8.run_dir / "val_losses.npz")
    nats, targets = (np.bincount(saved["source"], saved[key]) for key in ("bf16", "n_tokens"))
    weights = [b["sources"][source]["weight"] for source in sorted(b["sources"])]
    assert weights @ (nats / targets) == pytest.approx(b["loss_bf16"], rel=1e-12)


def test_a_finished_run_has_nothing_to_do_and_a_run_goes_on_only_as_it_began(
    tiny, data_dir, tmp_path, run
):
    """Else a summary would claim one learning rate, or one data set, for weights that saw two."""
    config = changed(tiny, f"data.dir={shutil.copytree(data_dir, tmp_path / 'data')}")
    run(config)
    before = {p: p.stat().st_mtime_ns for p in config.run_dir.rglob("*")}
    assert "nothing to do" in run(config)
    assert "data.mixture was {'web': 0.75, 'code': 0.25}" in run(
        config, "data.mixture=web:1", code=2
    )
    assert before == {p: p.stat().st_mtime_ns for p in config.run_dir.rglob("*")}
    faults.back_to(config, 3)
    assert "optim.lr was 0.01, now 0.001; steps was 6, now 8;" in run(
        config, "optim.lr=1e-3", "steps=8", code=2
    )
    # where it lies and how it is dealt out may change
    shutil.move(tmp_path / "data", tmp_path / "moved")
    moved = [
        "data.dir=" + str(tmp_path / "moved"),
        "data.micro_batch=8",
        "data.max_epochs=2",
        "checkpoint.keep=1",
    ]
    run(config, *moved)
    (config.run_dir / "summary.json").unlink()
    shutil.rmtree(tmp_path / "moved/code")
    write_source(tmp_path / "moved/code", seed=9)
    assert "begun with other training tokens" in run(config, *moved, code=2)


def test_a_stop_in_any_validation_saves_and_the_next_start_makes_up_for_it(tiny, run, monkeypatch):
    config, closed = changed(tiny, "run=whole eval.every=4 profile=4:6"), []
    monkeypatch.setattr(
        room.Log, "close", lambda log, close=room.Log.close: closed.append(log) or close(log)
    )
    run(config)
    whole, validated = (
        faults.record(config),
        [(row["step"], row["loss"]) for row in faults.rows(config, "val")],
    )
    for at, step in (1, 4), (2, 6), (3, 6):  # of the run's three validations; the last is in BF16
        config, calls = replace(config, run=f"stopped{at}"), count(1)
        with monkeypatch.context() as patch:
            patch.setattr(
                room,
                "evaluate",
                lambda *rest, at=at, calls=calls: None if next(calls) == at else evaluate(*rest),
            )
            assert f"stopped on request at step {step}; saved" in run(config)
        assert (
            faults.rows(config, "event")[-1]["event"] == "stopped"
            and faults.saved_steps(config)[-1] == step
        )
        assert traced_steps(config.run_dir) == [4, 5, 6][: step - 3], (
            "of a trace that was cut short, what there is"
        )
        run(config)
        assert [(row["step"], row["loss"]) for row in faults.rows(config, "val")] == validated
        assert faults.record(config) == whole
    assert len(closed) == 7, "the log, after each start"


def test_the_best_checkpoint_is_kept_and_a_resumed_run_still_knows_it_and_its_first_start(
    tiny, run
):
    """At such a learning rate it is the first one."""
    config = changed(tiny, "steps=8 optim.lr=1 eval.every=2 checkpoint.every=2 checkpoint.keep=1")
    run(config)
    assert faults.saved_steps(config) == [2, 6, 8]
    faults.back_to(config, 6)
    (env := config.run_dir / "env.json").write_text(
        '{"t_start": "2026-01-01T00:00:00Z", "torch": "1.0"}'
    )
    run(config)
    assert faults.saved_steps(config) == [2, 6, 8]
    assert (
        summary(config)["t_start"] == "2026-01-01T00:00:00Z"
        and json.loads(env.read_text())["torch"] == torch.__version__
    )


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tiny, run):
    """A purged scratch disk, a link to one that is not mounted: the rows of days must not be
    written over."""
    config = changed(tiny, "checkpoint.every=none checkpoint.rolling=2")
    run(config)
    assert faults.saved_steps(config) == [4, 6]
    before = (config.run_dir / "metrics.jsonl").read_bytes()
    (config.run_dir / "summary.json").unlink()
    for step in 4, 6:
        faults.flip_bit(config.run_dir / f"checkpoints/step_{step:08d}/.metadata", 9)
    assert "but damaged bad_step_00000004, bad_step_00000006: " in run(config, code=1)
    shutil.rmtree(config.run_dir / "checkpoints")
    assert "has come to step 6, yet no checkpoint" in run(config, code=2)
    assert (config.run_dir / "metrics.jsonl").read_bytes() == before
    (config.run_dir / "metrics.jsonl").write_bytes(b"")
    assert "yet no checkpoint" in run(config, code=2), "however far its rows say that it came"


def test_a_run_of_a_version_without_saved_json_is_judged_by_its_rows(tiny, run):
    config = changed(tiny, "checkpoint.every=none checkpoint.rolling=2")
    run(config)
    before = (config.run_dir / "metrics.jsonl").read_bytes()
    for name in "summary.json", "saved.json":
        (config.run_dir / name).unlink()
    shutil.rmtree(config.run_dir / "checkpoints")
    assert "has come to step 6, yet no checkpoint" in run(config, code=2)
    # The policy that trained it decides, not the one of today's command.
    assert "has come to step 6, yet no checkpoint" in run(config, "checkpoint.rolling=none", code=2)
    assert (config.run_dir / "metrics.jsonl").read_bytes() == before
    # Killed over its very first save a run has nothing to go back to, and begins anew; not where
    # that save was found damaged.
    (config.run_dir / "metrics.jsonl").write_bytes(b"".join(before.splitlines(keepends=True)[:3]))
    (config.run_dir / "checkpoints/bad_step_00000002").mkdir(parents=True)
    assert "but damaged bad_step_00000002: " in run(config, code=1)
    shutil.rmtree(config.run_dir / "checkpoints")
    assert "starting at step 0; the 3 rows of an earlier start" in run(config)


def test_a_resumed_run_of_a_version_without_saved_json_gets_one(tiny, run):
    run(tiny)
    faults.back_to(tiny, 3)
    (tiny.run_dir / "saved.json").unlink()
    run(tiny)
    assert json.loads((tiny.run_dir / "saved.json").read_text()) == {
        "schema_version": 1,
        "first_checkpoint": 3,
    }


def test_damaged_data_and_settings_that_cannot_be_get_a_sentence_and_a_folder_that_is_no_run_is_left_alone(
    tiny, data_dir, tmp_path, run, monkeypatch
):
    """Damage is looked for in the background; a checkpoint that is due before all is hashed waits
    for it."""
    is_due, look, verified = threading.Event(), shards.shard_damage, Data.verified
    monkeypatch.setattr(
        "runtime.data.shard_damage", lambda shard: look(shard) if is_due.wait(60) else None
    )
    monkeypatch.setattr(Data, "verified", lambda data: is_due.set() or verified(data))
    own_data = shutil.copytree(data_dir, tmp_path / "data")
    spoilt = changed(tiny, f"run=spoilt data.dir={own_data} checkpoint.every=1")
    faults.flip_bit(own_data / "code/val_00000.bin", 1552)  # the lowest bit of a token
    assert "code/val_00000.bin is damaged" in run(spoilt, "steps=2", code=2)
    assert not faults.saved_steps(spoilt) and not (spoilt.run_dir / "summary.json").exists()
    os.remove(own_data / "code/train_00000.bin")
    for setting, told in (
        ("out=/dev/null/x", "Not a directory"),
        ("steps=200", "data.max_epochs"),
        (f"data.dir={own_data}", "train_00000.bin is missing"),
    ):
        assert told in run(tiny, setting, code=2)
        assert not tiny.run_dir.exists()
    tiny.run_dir.mkdir(parents=True)
    (tiny.run_dir / ".config.json.tmp").write_text("{")  # as a kill before config.json leaves it
    assert not run_folder.is_finished(tiny)
    (tiny.run_dir / "thesis.tex").touch()
    assert "holds no run" in run(tiny, code=2)


@pytest.mark.parametrize(
    "before, after, label",
    [
        ("tensorwise", {}, "tensorwise"),
        ("off", {"recipe": "tensorwise"}, "bf16"),
        ("tensorwise", {"recipe": "tensorwise", "skip": ("attn.out",)}, "tensorwise"),
    ],
)
def test_a_branch_may_switch_its_precision_and_says_so(tiny, run, before, after, label):
    trunk = changed(
        tiny,
        "run=trunk steps=8 optim.schedule=wsd optim.decay_share=0.25 optim.warmup_share=0.25 "
        f"fp8.recipe={before} checkpoint.every=none checkpoint.at=4",
    )
    run(trunk)
    branch = changed(
        trunk,
        "run=branch steps=6"
        f" optim.decay_share={1 / 3} optim.warmup_share={1 / 3} checkpoint.every=1 checkpoint.at=()"
        f" start_from={trunk.run_dir}/checkpoints/step_00000004",
    )
    switched = replace(branch, fp8=FP8Config(**after))
    run(switched)
    losses = [row["loss"] for row in faults.rows(switched)]
    # at a slightly higher learning rate
    unswitched = [row["loss"] for row in faults.rows(trunk)][4:6]
    assert losses != unswitched and losses == pytest.approx(unswitched, rel=0.02)
    faults.back_to(switched, 5)  # the label outlives a resume
    run(switched)
    assert [summary(config)["precision"]["switched_from"] for config in (trunk, switched)] == [
        None,
        label,
    ]
    assert summary(switched)["pair_id"] == pair_id(branch), "a pair: all but the precision is equal"
    assert [row["loss"] for row in faults.rows(switched)] == losses


def test_a_run_trains_on_another_ones_weights_alone(tiny, run):
    """With other data, schedule, context and number of steps; the first loss is the parent's on the
    new run's first tokens."""
    parent = changed(tiny, "run=pretrained fp8.recipe=tensorwise")
    tuned = changed(
        tiny,
        f"run=tuned steps=5 start_from={parent.run_dir} model.n_ctx=16 data.mixture=code:1"
        " optim.lr=1e-3 optim.schedule=wsd optim.decay_share=0.2",
    )
    assert "pretrained has none: train that run first" in run(tuned, code=2)
    assert not tuned.run_dir.exists() and run(parent)
    faults.back_to(parent, 3)
    assert "step_00000003 as the last of its checkpoints" in run(tuned, code=2)
    run(parent)
    assert "alone; start_from=out/pretrained takes its weights" in run(
        tuned, f"start_from={parent.run_dir}/checkpoints/step_00000003", code=2
    )
    assert f"on from {parent.run_dir}/checkpoints/step_00000006" in run(tuned)
    losses, about = [row["loss"] for row in faults.rows(tuned)], summary(tuned)
    model, data = load_model(parent.run_dir)[0], Data(tuned, load_tokenizer("byte").sha256)
    batches = [data.batch(0, micro, 0, 1) for micro in range(tuned.accumulation(1))]
    assert losses[0] == pytest.approx(
        sum(float(model(x, y).sum()) for x, y in batches) / 512, rel=1e-6
    )
    assert (about["continued_from"], about["parent_run"], about["steps"]) == ("pretrained", None, 5)
    faults.back_to(tuned, 3)
    shutil.rmtree(parent.run_dir)  # it has its own now
    run(tuned)
    assert [row["loss"] for row in faults.rows(tuned)] == losses
    branch = changed(
        tuned,
        f"run=branch steps=4 start_from={tuned.run_dir}/checkpoints/step_00000003"
        " optim.warmup_share=0.25 optim.decay_share=0.25",
    )
    run(branch)
    assert [summary(branch)[key] for key in ("continued_from", "parent_run")] == [
        "pretrained",
        "tuned",
    ], "in no law"
    assert (
        summary(branch)["pair_id"]
        == pair_id(replace(branch, start_from=tuned.start_from))
        != pair_id(branch)
    )


def watched_steps(monkeypatch):
    """[number of the step that train.py is in, from its first micro-batch to its log line, else
    None]."""
    at, beat = [None], Watchdog.at

    def noted(self, what, step, *args, **kwargs):
        at[0] = step if what.startswith("reading") else None if what == "after the step" else at[0]
        return beat(self, what, step, *args, **kwargs)

    monkeypatch.setattr(Watchdog, "at", noted)
    return at


READS = {
    "tolist",
    "item",
    "numpy",
    "cpu",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__contains__",
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
}


def test_a_step_reads_the_host_once_and_the_collector_is_frozen_once(tiny, run, monkeypatch):
    """Reads by Python's calls, and by what torch calls beneath its functions."""
    seen, frozen, at = [], [], watched_steps(monkeypatch)

    def called(self, func, types, args=(), kwargs=None):
        name = func._schema.name if hasattr(func, "_schema") else getattr(func, "__name__", "")
        if name in READS and at[0] is not None:
            seen.append((at[0], name))
        return func(*args, **(kwargs or {}))

    Functions = type("Functions", (TorchFunctionMode,), {"__torch_function__": called})
    Operators = type("Operators", (TorchDispatchMode,), {"__torch_dispatch__": called})
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(seen)))
    with Functions(), Operators():
        run(tiny)
    assert seen == [(step, "tolist") for step in range(1, 7)]
    assert frozen == [1], "after the first step, when all is compiled"


@pytest.mark.parametrize("timeout_s, is_told", [(None, False), (0.0, True), (600.0, False)])
def test_a_step_and_a_save_that_torchrun_would_cut_short_are_told_once(
    tiny, run, monkeypatch, timeout_s, is_told
):
    monkeypatch.setattr(room.parallel, "shutdown_timeout", lambda world: timeout_s)
    monkeypatch.setattr(room, "WARM_UP_STEPS", 0)
    monkeypatch.setattr(
        room.Run,
        "next_step",
        lambda run, next_step=room.Run.next_step: run.saver.wait() or next_step(run),
    )
    told = run(changed(tiny, "checkpoint.every=1"))
    assert told.count("but torchrun kills its workers 0 s after it was told to stop") == is_told


def hold(run_dir, is_held):
    with run_folder.lock_folder(run_dir):
        if os.fork():
            is_held.set()
        time.sleep(60)


def test_a_second_run_is_told_who_has_the_folder_until_that_process_is_killed(
    tiny, run, monkeypatch, capsys
):
    """Not until its children end: a compile worker or data loader may outlive it. The first has
    waited for the folder while a start that was refused removed it."""
    is_held = faults.FORKS.Event()
    first = faults.FORKS.Process(target=hold, args=(tiny.run_dir, is_held))
    with run_folder.lock_folder(tiny.run_dir):
        first.start()
        time.sleep(0.5)
    assert is_held.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "LOCK_TIMEOUT_S", 0.2)
        assert f"process {first.pid} on host" in run(tiny, code=2)
    assert not list(tiny.run_dir.glob("*.json*")), "it has written nothing"
    first.kill()  # a run that is about to end is waited for
    with run_folder.lock_folder(tiny.run_dir):
        pass
    assert not tiny.run_dir.exists(), "nothing was written in it"
    monkeypatch.setattr(
        fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    )
    with run_folder.lock_folder(tiny.run_dir):
        assert "No locks available" in capsys.readouterr().out, "said, and the run goes on"


def test_a_run_keeps_a_copy_of_a_tokenizer_that_is_a_folder(tmp_path):
    theirs, run_dir = tmp_path / "llama", tmp_path / "run"
    (run_dir / ".tokenizer.tmp").mkdir(parents=True)  # a kill in the middle of it
    write_tokenizer(theirs)
    rules = (theirs / "tokenizer.json").read_text()
    keep_tokenizer(run_dir, str(theirs))
    write_tokenizer(theirs, spare=1)
    keep_tokenizer(run_dir, str(theirs))
    assert (tokenizer_of(run_dir, "gpt2"), tokenizer_of(run_dir, str(theirs))) == (
        "gpt2",
        f"{run_dir}/tokenizer",
    )
    assert (run_dir / "tokenizer/tokenizer.json").read_text() == rules, (
        "those that the run was begun with"
    )
    assert os.listdir(run_dir) == ["tokenizer"]


@pytest.mark.parametrize(
    "gpus, is_usable, visible, is_refused",
    [(0, False, "0", False), (2, True, "0", False), (2, False, "", False), (1, False, "0", True)],
)
def test_a_gpu_that_torch_cannot_use_is_refused(monkeypatch, gpus, is_usable, visible, is_refused):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_usable)
    with (
        pytest.raises(MachineError, match="shows 1 NVIDIA GPU.*fits the driver")
        if is_refused
        else contextlib.nullcontext()
    ):
        machine.check_device()


@pytest.mark.parametrize(
    "is_memory, call",
    [
        (True, lambda: torch.empty(2**50)),
        (True, lambda: np.empty(2**46)),
        (True, lambda: bytearray(2**60)),
        (
            True,
            Mock(
                side_effect=torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB."
                )
            ),
        ),
        (True, Mock(side_effect=OSError(12, "Cannot allocate memory"))),
        *[
            (True, Mock(side_effect=RuntimeError(text)))
            for text in (
                "std::bad_alloc",
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
                "CPU: can't allocate memory",
            )
        ],
        (False, lambda: torch.empty(2, 3) @ torch.empty(2, 3)),
        (False, lambda: {}["memory"]),
    ],
)
def test_errors_that_mean_memory_get_a_sentence_of_settings(tiny, is_memory, call):
    with pytest.raises(ValueError) as caught:
        try:
            call()
        except Exception as error:
            raise ValueError("backend='inductor' raised:") from error
    said = memory.out_of_memory(caught.value, tiny, ALONE)
    assert (said is not None) == is_memory
    assert said is None or all(
        part in said
        for part in ("rank 0 (cpu)", "data.micro_batch (now 4", "parallel.recompute", "GPUs")
    )


def test_a_run_limited_in_memory_says_so_before_it_writes_anything(tiny):
    """RLIMIT_AS, as a batch system sets it, and a model that outgrows it."""
    size = "model.n_layer=8", "model.n_embd=8192", "model.n_ffn=32768"
    run = faults.Run(tiny, *size, faults=[f"limit:{resource.RLIMIT_AS}:{20 * 2**30}"])
    assert run.wait() == [1] and not tiny.run_dir.exists(), run.output
    assert "Traceback" not in run.output and "train.py: out of memory on rank 0 (cpu)" in run.output
