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
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import train
from fp8.trained_precision import read_precision
from lib import machine
from lib.errors import MachineError
from runtime import memory, run_folder, shards
from runtime import run as room
from runtime.checkpoint import latest, load_model, read_manifest
from runtime.config import Config, FP8Config
from runtime.data import Data
from runtime.log import pair_id
from runtime.tokenizer import keep_tokenizer, load_tokenizer, tokenizer_of
from runtime.validation import evaluate
from runtime.watchdog import Watchdog
from tests.conftest import ALONE, changed, tiny_config, write_config, write_source
from tests.helpers import faults
from tests.helpers.faults import summary
from tests.helpers.text_files import write_tokenizer
from tests.runtime.test_log import traced_steps

PAIR = {"bf16": "profile=2:3", "fp8": "fp8.recipe=tensorwise"}
PAIR["kernels"] = PAIR["fp8"] + " fp8.kernels=true"


@pytest.fixture(scope="module")
def pair(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """A run in BF16 and two in FP8, finished."""
    folder = tmp_path_factory.mktemp("pair")
    configs = {}
    for name, words in PAIR.items():
        config = changed(tiny_config(data_dir, folder / "out"), f"run={name} {words}")
        log = folder / f"{name}.log"
        with log.open("w") as file, contextlib.redirect_stdout(file):
            assert train.main([str(write_config(config, folder / f"{name}.py"))]) == 0
        configs[name] = config
    return configs


def log_of(config: Config) -> str:
    return Path(config.out).with_name(f"{config.run}.log").read_text()


@pytest.mark.parametrize(
    "key",
    ["pair_id", "data_sha256", "val_sha256", "params_total", "flops_per_token", "seed", "tokens"],
)
def test_the_runs_of_a_pair_have_this_in_common(pair: dict[str, Config], key: str):
    values = [summary(config)[key] for config in pair.values()]
    assert values == values[:1] * 3


def test_a_summary_says_which_linears_are_in_fp8(pair: dict[str, Config]):
    bf16, fp8, kernels = (summary(config)["precision"] for config in pair.values())
    recipes = [precision["recipe"] for precision in (bf16, fp8, kernels)]
    assert recipes == ["bf16", "tensorwise", "tensorwise+kernels"]
    assert len(fp8["layers_converted"]) == 8 and list(fp8["layers_skipped"]) == ["head"]
    assert (fp8["layers_kernels"], kernels["layers_kernels"]) == ([], fp8["layers_converted"])
    assert summary(pair["bf16"])["params_fp8"] == 0
    assert "fp8: 8 of 9 Linears" in log_of(pair["fp8"])


def test_a_summary_holds_the_settings_of_its_precision(pair: dict[str, Config]):
    """As JSON has them; no settings in BF16."""
    for config in pair.values():
        stored = json.loads(json.dumps(asdict(config.fp8))) if config.fp8.is_on else None
        precision = read_precision(summary(config))
        assert (precision.settings, precision.bits) == ((stored,), config.fp8.bits)


def test_losses_of_a_pair_are_near_and_not_equal(pair: dict[str, Config]):
    bf16, fp8, kernels = (summary(config) for config in pair.values())
    assert bf16["loss_as_trained"] == bf16["loss_bf16"]
    assert 0 < abs(fp8["loss_bf16"] - bf16["loss_bf16"]) < 0.05
    assert fp8["loss_bf16"] != fp8["loss_as_trained"]
    assert abs(kernels["loss_bf16"] - fp8["loss_bf16"]) < 0.01


def test_the_steps_of_profile_are_traced(pair: dict[str, Config]):
    assert traced_steps(pair["bf16"].run_dir) == [2, 3]


def test_only_delayed_scaling_keeps_scales_in_a_checkpoint(pair: dict[str, Config]):
    assert "fp8_scales" not in read_manifest(latest(pair["kernels"].run_dir))["state"]


def test_the_loss_is_the_mixtures_mean_of_the_losses_of_its_sources(pair: dict[str, Config]):
    """Of val_losses.npz, nats a sequence."""
    saved, about = np.load(pair["fp8"].run_dir / "val_losses.npz"), summary(pair["fp8"])
    nats, targets = (np.bincount(saved["source"], saved[key]) for key in ("bf16", "n_tokens"))
    sources = about["sources"]
    weights = np.array([sources[name]["weight"] for name in sorted(sources)])
    assert weights @ (nats / targets) == pytest.approx(about["loss_bf16"], rel=1e-12)


def files_of(config: Config) -> dict[Path, int]:
    """Every file of a run, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in config.run_dir.rglob("*")}


def test_a_finished_run_has_nothing_to_do(tiny: Config, run: Callable[..., str]):
    run(tiny)
    files = files_of(tiny)
    assert "nothing to do" in run(tiny)
    assert files_of(tiny) == files


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_goes_on_only_as_it_began(tiny: Config, run: Callable[..., str], is_finished: bool):
    """Else a summary would claim one learning rate, or one data set, for weights that saw two."""
    run(tiny)
    if not is_finished:
        faults.back_to(tiny, 3)
    files = files_of(tiny)
    sentence = run(tiny, "optim.lr=1e-3", "steps=8", "data.mixture=web:1", code=2)
    assert "optim.lr was 0.01, now 0.001; steps was 6, now 8;" in sentence
    assert "data.mixture was {'web': 0.75, 'code': 0.25}" in sentence
    assert files_of(tiny) == files


@pytest.fixture
def moved(
    tiny: Config, data_dir: Path, tmp_path: Path, run: Callable[..., str]
) -> tuple[Config, list[str]]:
    """A run that a kill after step 3 ended, and what another machine's command says of it: where
    the data lies and how it is dealt out may change."""
    folder = tmp_path / "moved"
    config = changed(tiny, f"data.dir={shutil.copytree(data_dir, tmp_path / 'data')}")
    run(config)
    faults.back_to(config, 3)
    shutil.move(tmp_path / "data", folder)
    words = [f"data.dir={folder}", "data.micro_batch=8", "data.max_epochs=2", "checkpoint.keep=1"]
    return config, words


def test_data_and_micro_batch_may_change_in_a_run(
    moved: tuple[Config, list[str]], run: Callable[..., str]
):
    config, words = moved
    run(config, *words)
    assert summary(config)["steps"] == 6


def test_other_tokens_in_the_folder_are_refused(
    moved: tuple[Config, list[str]], tmp_path: Path, run: Callable[..., str]
):
    config, words = moved
    shutil.rmtree(tmp_path / "moved/code")
    write_source(tmp_path / "moved/code", seed=9)
    assert "begun with other training tokens" in run(config, *words, code=2)


VALIDATIONS = [(1, 4), (2, 6), (3, 6)]  # number, step; the last is in BF16


@pytest.fixture
def validated(tiny: Config, run: Callable[..., str]) -> Config:
    """A finished run with these validations, whose last steps were traced."""
    config = changed(tiny, "run=whole eval.every=4 profile=4:6")
    run(config)
    return config


def val_losses(config: Config) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in faults.rows(config, "val")]


@pytest.fixture
def stop_in(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    """stop_in(config, number): what train.main() prints where that validation is interrupted."""

    def stop(config: Config, number: int) -> str:
        calls = count(1)
        with monkeypatch.context() as patch:
            patch.setattr(
                room, "evaluate", lambda *a: None if next(calls) == number else evaluate(*a)
            )
            return run(config)

    return stop


@pytest.mark.parametrize("number, step", VALIDATIONS)
def test_a_stop_in_any_validation_saves_and_the_next_start_makes_up_for_it(
    validated: Config, run: Callable[..., str], stop_in, number: int, step: int
):
    config = replace(validated, run=f"stopped{number}")
    assert f"stopped on request at step {step}; saved" in stop_in(config, number)
    assert faults.rows(config, "event")[-1]["event"] == "stopped"
    assert faults.saved_steps(config)[-1] == step
    run(config)
    assert val_losses(config) == val_losses(validated)
    assert faults.record(config) == faults.record(validated)


@pytest.mark.parametrize("number, traced", [(1, [4]), (2, [4, 5, 6])])
def test_a_stop_writes_what_was_traced_so_far(
    tiny: Config, stop_in, number: int, traced: list[int]
):
    stop_in(changed(tiny, "eval.every=4 profile=4:6"), number)
    assert traced_steps(tiny.run_dir) == traced


def test_a_stopped_run_closes_its_log(tiny: Config, stop_in, monkeypatch: pytest.MonkeyPatch):
    closed, close = [], room.Log.close
    monkeypatch.setattr(room.Log, "close", lambda log: closed.append(log) or close(log))
    stop_in(tiny, 1)
    assert len(closed) == 1


FIRST_START = {"t_start": "2026-01-01T00:00:00Z", "torch": "1.0"}


@pytest.fixture
def resumed(tiny: Config, run: Callable[..., str]) -> Config:
    """A run whose first validation is its best, at such a learning rate; resumed after step 6 by
    another version of torch."""
    config = changed(tiny, "steps=8 optim.lr=1 eval.every=2 checkpoint.every=2 checkpoint.keep=1")
    run(config)
    assert faults.saved_steps(config) == [2, 6, 8]
    faults.back_to(config, 6)
    (config.run_dir / "env.json").write_text(json.dumps(FIRST_START))
    run(config)
    return config


def test_a_resumed_run_still_keeps_the_best_checkpoint(resumed: Config):
    assert faults.saved_steps(resumed) == [2, 6, 8]


def test_a_resumed_run_still_knows_its_first_start(resumed: Config):
    assert summary(resumed)["t_start"] == FIRST_START["t_start"]
    environment = json.loads((resumed.run_dir / "env.json").read_text())
    assert environment["torch"] == torch.__version__


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(
    tiny: Config, run: Callable[..., str]
):
    """A purged scratch disk, a link to one that is not mounted: the rows of days must not be
    written over."""
    config = changed(tiny, "checkpoint.every=none checkpoint.rolling=2")
    run(config)
    assert faults.saved_steps(config) == [4, 6]
    rows_before = (config.run_dir / "metrics.jsonl").read_bytes()
    (config.run_dir / "summary.json").unlink()
    for step in 4, 6:
        faults.flip_bit(config.run_dir / f"checkpoints/step_{step:08d}/.metadata", 9)
    assert "but damaged bad_step_00000004, bad_step_00000006: " in run(config, code=1)
    shutil.rmtree(config.run_dir / "checkpoints")
    assert "has come to step 6, yet no checkpoint" in run(config, code=2)
    assert (config.run_dir / "metrics.jsonl").read_bytes() == rows_before
    (config.run_dir / "metrics.jsonl").write_bytes(b"")
    assert "yet no checkpoint" in run(config, code=2), "however far its rows say that it came"


def test_a_run_of_a_version_without_saved_json_is_judged_by_its_rows(
    tiny: Config, run: Callable[..., str]
):
    config = changed(tiny, "checkpoint.every=none checkpoint.rolling=2")
    run(config)
    rows_before = (config.run_dir / "metrics.jsonl").read_bytes()
    for name in "summary.json", "saved.json":
        (config.run_dir / name).unlink()
    shutil.rmtree(config.run_dir / "checkpoints")
    assert "has come to step 6, yet no checkpoint" in run(config, code=2)
    # The policy that trained it decides, not the one of today's command.
    assert "has come to step 6, yet no checkpoint" in run(config, "checkpoint.rolling=none", code=2)
    assert (config.run_dir / "metrics.jsonl").read_bytes() == rows_before
    # Killed over its very first save a run has nothing to go back to, and begins anew; not where
    # that save was found damaged.
    (config.run_dir / "metrics.jsonl").write_bytes(
        b"".join(rows_before.splitlines(keepends=True)[:3])
    )
    (config.run_dir / "checkpoints/bad_step_00000002").mkdir(parents=True)
    assert "but damaged bad_step_00000002: " in run(config, code=1)
    shutil.rmtree(config.run_dir / "checkpoints")
    assert "starting at step 0; the 3 rows of an earlier start" in run(config)


def test_a_resumed_run_of_a_version_without_saved_json_gets_one(
    tiny: Config, run: Callable[..., str]
):
    run(tiny)
    faults.back_to(tiny, 3)
    (tiny.run_dir / "saved.json").unlink()
    run(tiny)
    assert json.loads((tiny.run_dir / "saved.json").read_text()) == {
        "schema_version": 1,
        "first_checkpoint": 3,
    }


def test_rows_that_are_lost_are_told(tiny: Config, run: Callable[..., str]):
    run(tiny)
    faults.back_to(tiny, 3)
    metrics = tiny.run_dir / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0])
    assert f"{metrics} lacks the rows of 2 of the 3 steps that" in run(tiny)


def test_no_rows_are_missed_of_a_branch(tiny: Config, run: Callable[..., str]):
    trunk = changed(tiny, "optim.schedule=wsd optim.decay_share=0.5")
    run(trunk)
    branch = changed(
        trunk, f"run=branch checkpoint.every=1 start_from={trunk.run_dir}/checkpoints/step_00000003"
    )
    run(branch)
    faults.back_to(branch, 5)
    assert "lacks the rows" not in run(branch)


def test_a_run_at_its_end_without_any_row_is_refused(tiny: Config, run: Callable[..., str]):
    """Its speed cannot be told: the summary ended in a traceback, at every start."""
    run(tiny)
    for name in "summary.json", "metrics.jsonl":
        (tiny.run_dir / name).unlink()
    newest = tiny.run_dir / "checkpoints/step_00000006"
    sentence = run(tiny, code=2)
    assert f"{tiny.run_dir}/metrics.jsonl has no row of a training step" in sentence
    assert f"move {newest} away" in sentence
    shutil.move(newest, tiny.run_dir.parent / "aside")
    run(tiny)
    assert summary(tiny)["tok_per_s_median"] > 0


def test_a_run_without_any_row_or_another_checkpoint_is_to_begin_anew(
    tiny: Config, run: Callable[..., str]
):
    """Without its only checkpoint the next start would be refused, too."""
    one_checkpoint = changed(tiny, "checkpoint.every=none")
    run(one_checkpoint)
    for name in "summary.json", "metrics.jsonl":
        (tiny.run_dir / name).unlink()
    sentence = run(one_checkpoint, code=2)
    assert sentence.rstrip().endswith(
        "put the file back, or delete the folder to start the run anew"
    )


def test_a_run_without_rows_or_checkpoints_has_come_to_its_first_checkpoint(
    tiny: Config, run: Callable[..., str]
):
    """It was said to have come to step 0."""
    run(tiny)
    for name in "summary.json", "metrics.jsonl":
        (tiny.run_dir / name).unlink()
    shutil.rmtree(tiny.run_dir / "checkpoints")
    first = json.loads((tiny.run_dir / "saved.json").read_text())["first_checkpoint"]
    assert first > 0 and f"has come to step {first}, yet no checkpoint" in run(tiny, code=2)


def test_damaged_data_ends_a_run_before_its_first_checkpoint(
    tiny: Config,
    data_dir: Path,
    tmp_path: Path,
    run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Damage is looked for in the background; a checkpoint that is due before all is hashed waits
    for it."""
    is_due, hash_shard, verified = threading.Event(), shards.shard_damage, Data.verified
    monkeypatch.setattr(
        "runtime.data.shard_damage", lambda shard: hash_shard(shard) if is_due.wait(60) else None
    )
    monkeypatch.setattr(Data, "verified", lambda data: is_due.set() or verified(data))
    own_data = shutil.copytree(data_dir, tmp_path / "data")
    config = changed(tiny, f"data.dir={own_data} checkpoint.every=1 steps=2")
    faults.flip_bit(own_data / "code/val_00000.bin", 1552)  # the lowest bit of a token
    assert "code/val_00000.bin is damaged" in run(config, code=2)
    assert not faults.saved_steps(config)
    assert not (config.run_dir / "summary.json").exists()


@pytest.mark.parametrize(
    "setting, sentence",
    [("out=/dev/null/x", "Not a directory"), ("steps=200", "data.max_epochs")],
)
def test_a_setting_that_cannot_be_writes_nothing(
    tiny: Config, run: Callable[..., str], setting: str, sentence: str
):
    assert sentence in run(tiny, setting, code=2)
    assert not tiny.run_dir.exists()


def test_a_missing_shard_is_told_before_anything_is_written(
    tiny: Config, data_dir: Path, tmp_path: Path, run: Callable[..., str]
):
    own_data = shutil.copytree(data_dir, tmp_path / "data")
    os.remove(own_data / "code/train_00000.bin")
    assert "train_00000.bin is missing" in run(tiny, f"data.dir={own_data}", code=2)
    assert not tiny.run_dir.exists()


def test_a_folder_that_is_no_run_is_left_alone(tiny: Config, run: Callable[..., str]):
    tiny.run_dir.mkdir(parents=True)
    (tiny.run_dir / ".config.json.tmp").write_text("{")  # as a kill before config.json leaves it
    assert not run_folder.is_finished(tiny)
    (tiny.run_dir / "thesis.tex").touch()
    assert "holds no run" in run(tiny, code=2)


@pytest.mark.parametrize(
    "recipe_before, fp8_after, label",
    [
        ("tensorwise", {}, "tensorwise"),
        ("off", {"recipe": "tensorwise"}, "bf16"),
        ("tensorwise", {"recipe": "tensorwise", "skip": ("attn.out",)}, "tensorwise"),
    ],
)
def test_a_branch_may_switch_its_precision_and_says_so(
    tiny: Config, run: Callable[..., str], recipe_before: str, fp8_after: dict[str, Any], label: str
):
    trunk = changed(
        tiny,
        "run=trunk steps=8 optim.schedule=wsd optim.decay_share=0.25 optim.warmup_share=0.25 "
        f"fp8.recipe={recipe_before} checkpoint.every=none checkpoint.at=4",
    )
    run(trunk)
    branch = changed(
        trunk,
        "run=branch steps=6"
        f" optim.decay_share={1 / 3} optim.warmup_share={1 / 3} checkpoint.every=1 checkpoint.at=()"
        f" start_from={trunk.run_dir}/checkpoints/step_00000004",
    )
    switched = replace(branch, fp8=FP8Config(**fp8_after))
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
    settings = read_precision(summary(switched)).settings
    assert [part is not None for part in settings] == [trunk.fp8.is_on, switched.fp8.is_on]
    assert summary(switched)["pair_id"] == pair_id(branch), "a pair: all but the precision is equal"
    assert [row["loss"] for row in faults.rows(switched)] == losses


@pytest.fixture
def pretrained(tiny: Config, run: Callable[..., str]) -> Config:
    """A finished run."""
    config = changed(tiny, "run=pretrained fp8.recipe=tensorwise")
    run(config)
    return config


@pytest.fixture
def tuned(tiny: Config, pretrained: Config) -> Config:
    """A run on its weights alone, with other data, schedule, context and number of steps."""
    return changed(
        tiny,
        f"run=tuned steps=5 start_from={pretrained.run_dir} model.n_ctx=16 data.mixture=code:1"
        " optim.lr=1e-3 optim.schedule=wsd optim.decay_share=0.2",
    )


def losses_of(config: Config) -> list[float]:
    return [row["loss"] for row in faults.rows(config)]


def test_the_first_loss_on_anothers_weights_is_theirs(
    tuned: Config, pretrained: Config, run: Callable[..., str]
):
    """On the new run's first tokens."""
    assert f"on from {pretrained.run_dir}/checkpoints/step_00000006" in run(tuned)
    model, data = load_model(pretrained.run_dir)[0], Data(tuned, load_tokenizer("byte").sha256)
    batches = [data.batch(0, micro, 0, 1) for micro in range(tuned.accumulation(1))]
    loss = sum(float(model(x, y).sum()) for x, y in batches) / 512
    assert losses_of(tuned)[0] == pytest.approx(loss, rel=1e-6)


def test_a_summary_names_the_run_whose_weights_it_began_with(
    tuned: Config, run: Callable[..., str]
):
    run(tuned)
    about = summary(tuned)
    assert (about["continued_from"], about["parent_run"]) == ("pretrained", None)
    assert about["steps"] == 5


def test_a_run_on_anothers_weights_resumes_without_them(
    tuned: Config, pretrained: Config, run: Callable[..., str]
):
    run(tuned)
    losses = losses_of(tuned)
    faults.back_to(tuned, 3)
    shutil.rmtree(pretrained.run_dir)
    run(tuned)
    assert losses_of(tuned) == losses


def test_the_weights_of_an_unfinished_run_are_refused(
    tuned: Config, pretrained: Config, run: Callable[..., str]
):
    faults.back_to(pretrained, 3)
    assert "step_00000003 as the last of its checkpoints" in run(tuned, code=2)
    shutil.rmtree(pretrained.run_dir)
    assert "pretrained has none: train that run first" in run(tuned, code=2)
    assert not tuned.run_dir.exists()


def test_a_checkpoint_of_another_model_is_no_branch_point(
    tuned: Config, pretrained: Config, run: Callable[..., str]
):
    branch_point = f"start_from={pretrained.run_dir}/checkpoints/step_00000003"
    sentence = run(tuned, branch_point, code=2)
    assert "alone; start_from=out/pretrained takes its weights" in sentence


def test_a_branch_of_a_run_on_anothers_weights_names_both(tuned: Config, run: Callable[..., str]):
    """And pairs with a run on the same weights alone: it is in no law."""
    run(tuned)
    branch = changed(
        tuned,
        f"run=branch steps=4 start_from={tuned.run_dir}/checkpoints/step_00000003"
        " optim.warmup_share=0.25 optim.decay_share=0.25",
    )
    run(branch)
    about = summary(branch)
    assert (about["continued_from"], about["parent_run"]) == ("pretrained", "tuned")
    from_scratch = replace(branch, start_from=tuned.start_from)
    assert about["pair_id"] == pair_id(from_scratch) != pair_id(branch)


def watched_steps(monkeypatch: pytest.MonkeyPatch):
    """[number of the step that train.py is in, from its first micro-batch to its log line, else
    None]."""
    current_step, beat = [None], Watchdog.at

    def noted(self, what, step, *args: object, **kwargs: object):
        current_step[0] = (
            step
            if what.startswith("reading")
            else None
            if what == "after the step"
            else current_step[0]
        )
        return beat(self, what, step, *args, **kwargs)

    monkeypatch.setattr(Watchdog, "at", noted)
    return current_step


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


def test_a_step_reads_the_host_once_and_the_collector_is_frozen_once(
    tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """Reads by Python's calls, and by what torch calls beneath its functions."""
    seen, frozen, current_step = [], [], watched_steps(monkeypatch)

    def called(self, func, types, args=(), kwargs=None):
        name = func._schema.name if hasattr(func, "_schema") else getattr(func, "__name__", "")
        if name in READS and current_step[0] is not None:
            seen.append((current_step[0], name))
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
    tiny: Config,
    run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float | None,
    is_told: bool,
):
    monkeypatch.setattr(room.parallel, "shutdown_timeout", lambda world: timeout_s)
    monkeypatch.setattr(room, "WARM_UP_STEPS", 0)
    monkeypatch.setattr(
        room.Run,
        "next_step",
        lambda run, next_step=room.Run.next_step: run.saver.wait() or next_step(run),
    )
    sentence = run(changed(tiny, "checkpoint.every=1"))
    assert sentence.count("but torchrun kills its workers 0 s after it was told to stop") == is_told


def hold(run_dir, is_held):
    with run_folder.lock_folder(run_dir):
        if os.fork():
            is_held.set()
        time.sleep(60)


def test_a_second_run_is_told_who_has_the_folder(
    tiny: Config,
    run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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


def test_a_run_keeps_a_copy_of_a_tokenizer_that_is_a_folder(tmp_path: Path):
    tokenizer_folder, run_dir = tmp_path / "llama", tmp_path / "run"
    (run_dir / ".tokenizer.tmp").mkdir(parents=True)  # a kill in the middle of it
    write_tokenizer(tokenizer_folder)
    rules = (tokenizer_folder / "tokenizer.json").read_text()
    keep_tokenizer(run_dir, str(tokenizer_folder))
    write_tokenizer(tokenizer_folder, spare=1)
    keep_tokenizer(run_dir, str(tokenizer_folder))
    assert (tokenizer_of(run_dir, "gpt2"), tokenizer_of(run_dir, str(tokenizer_folder))) == (
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
def test_a_gpu_that_torch_cannot_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, is_usable: bool, visible: str, is_refused: bool
):
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
def test_errors_that_mean_memory_get_a_sentence_of_settings(tiny: Config, is_memory: bool, call):
    with pytest.raises(ValueError) as caught:
        try:
            call()
        except Exception as error:
            raise ValueError("backend='inductor' raised:") from error
    sentence = memory.out_of_memory(caught.value, tiny, ALONE)
    assert (sentence is not None) == is_memory
    assert sentence is None or all(
        part in sentence
        for part in ("rank 0 (cpu)", "data.micro_batch (now 4", "parallel.recompute", "GPUs")
    )


def test_a_run_limited_in_memory_says_so_before_it_writes_anything(tiny: Config):
    """RLIMIT_AS, as a batch system sets it, and a model that outgrows it."""
    size = "model.n_layer=8", "model.n_embd=8192", "model.n_ffn=32768"
    run = faults.Run(tiny, *size, faults=[f"limit:{resource.RLIMIT_AS}:{20 * 2**30}"])
    assert run.wait() == [1] and not tiny.run_dir.exists(), run.output
    assert "Traceback" not in run.output and "train.py: out of memory on rank 0 (cpu)" in run.output
