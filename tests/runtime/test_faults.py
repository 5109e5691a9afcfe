"""The real train.py against kill -9, signals, broken files, full disks, NaN, lost ranks: it ends in
the same bits. The watchdog: ranks that are stopped, stuck or failed are named; a job that was
merely suspended goes on.

Runs that end are compared with one that was left alone: weights, moments, each step's loss and
gradient norm, validation losses, bit for bit. tests/soak.py has the long versions: every moment of
a save, many kills, every recipe."""

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from runtime import watchdog
from runtime.checkpoint import checkpoints, load_model, read_manifest, seal
from runtime.config import Config, FP8Config
from runtime.data import Data
from runtime.parallel import LAUNCHER_CHECK_S
from runtime.tokenizer import load_tokenizer
from tests.conftest import ALONE, changed, tiny_config, write_shards, write_source
from tests.helpers import faults
from tests.helpers.faults import flip_bit, leftovers, record, rows, saved_steps, summary

STEPS, EVERY = 24, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, data_dir: Path):
    """24 steps of two micro-batches in FP8, a checkpoint every second one: a run is half a
    second."""
    yield changed(
        tiny_config(data_dir, tmp_path_factory.mktemp("faults") / "out"),
        f"run=base steps={STEPS} data.tokens_per_step=256 fp8.recipe=tensorwise parallel.timeout=20"
        f" checkpoint.every={EVERY} checkpoint.keep=2 eval.every=8",
    )
    for process in multiprocessing.active_children():  # of a test that failed
        process.kill()


@pytest.fixture(scope="module")
def whole(base) -> dict[int, dict]:
    """Of the run that nothing happened to, its record, by number of ranks: tensorwise scales depend
    on who holds which sequences, so the bits of two are others."""
    return {
        ranks: record(finish(replace(base, run=f"whole{ranks}"), ranks=ranks)) for ranks in (1, 2)
    }


def finish(config: Config, *overrides: object, **how: object) -> Config:
    run = faults.Run(config, *overrides, **how)
    assert set(run.wait()) == {0}, run.output
    assert (config.run_dir / "summary.json").exists(), run.output
    assert not leftovers(config)
    return config


def ended(codes: list[int], config: Config, *overrides: object, **how: object) -> faults.Run:
    """A start that ends with these exit codes."""
    run = faults.Run(config, *overrides, **how)
    assert run.wait() == codes, run.output
    return run


def refused(codes: list[int], config: Config, *overrides: object, **how: object) -> str:
    """The sentence with which a run ends, which is no traceback."""
    run = ended(codes, config, *overrides, **how)
    assert "Traceback" not in run.output and "a collective failed" not in run.output, run.output
    return next(line for line in run.output.splitlines() if line.startswith("train.py: "))


# ------------------------------------------------------------------------------- kills, full disks


def test_kill_9_anywhere_costs_steps_and_nothing_else(base, whole: dict[int, dict]):
    """Every third of the 25 changes that a save makes on disk, from its folder to the deletion of
    an older checkpoint, of which the last eight are; all of them: tests/soak.py."""
    config = replace(base, run="killed")
    for step, fault in [(2 * k + 4, f"kill_in_save:{2 * k + 4}:{3 * k + 1}") for k in range(8)] + [
        (22, "signal_in_step:21:0:9")
    ]:
        ended([-signal.SIGKILL], config, faults=[fault])
        assert step - 2 * EVERY <= saved_steps(config)[-1] <= step, (
            "no more is lost than the save under way and the steps since"
        )
        for path in checkpoints(config.run_dir):
            read_manifest(path)  # half a deletion is no checkpoint
    assert record(finish(config)) == whole[1]


@pytest.mark.parametrize(
    "words, what",
    [
        ("", ["kill_in_save:2:8"]),  # during its first save
        ("", ["fail_in_save:2:1:99", "fail_in_save:4:1:99", "signal_in_step:6:0:9"]),  # a full disk
        ("checkpoint.every=none", ["signal_in_step:6:0:9"]),
    ],  # and then a policy by which two were due
    ids=["killed", "full", "policy"],
)
def test_a_run_without_a_complete_checkpoint_begins_at_step_0_again(
    base, whole: dict[int, dict], request: pytest.FixtureRequest, words: str, what: list[str]
):
    config = replace(base, run=f"first_{request.node.callspec.id}")
    ended([-signal.SIGKILL], config, *words.split(), faults=what)
    assert not saved_steps(config) and len(rows(config)) >= 2
    output = ended([0], config).output
    assert (
        "starting at step 0; the " in output
        and "rows of an earlier start, which had not completed a checkpoint" in output
    )
    assert record(config) == whole[1]


def test_three_failed_saves_in_a_row_end_a_run_that_room_resumes(base, whole: dict[int, dict]):
    """No space left, from every stage of a save in turn on to its end; then files that may not
    grow, as on a full disk."""
    config = replace(base, run="no_space")
    each_second = [f"fail_in_save:{step}:{n}:99" for step, n in ((4, 1), (8, 4), (12, 7), (16, 10))]
    ended([-signal.SIGKILL], config, faults=[*each_second, f"signal_in_step:{STEPS - 3}:0:9"])
    failed = [row for row in rows(config, "event") if row["event"] == "save_failed"]
    assert len(failed) >= 3 and all(
        "No space left" in row["reason"] and "GiB are free" in row["reason"] for row in failed
    )
    first = saved_steps(config)
    sentence = refused(
        [1], config, "checkpoint.every=1", faults=[f"limit:{resource.RLIMIT_FSIZE}:300_000"]
    )
    assert "3 saves in a row have failed" in sentence
    assert saved_steps(config) == first and not leftovers(config), (
        "the older checkpoints stay, and nothing else"
    )
    assert record(finish(config)) == whole[1]


def events(config: Config, name: str) -> list[dict]:
    return [row for row in rows(config, "event") if row["event"] == name]


@pytest.fixture(scope="module")
def full_disks(base) -> Config:
    """A run of two ranks that three failed saves in a row have ended: a full disk of rank 1 at
    step 4, then of rank 0."""
    config = replace(base, run="one_rank")
    full = ["fail_in_save:4:1:99:1", *(f"fail_in_save:{step}:12:99:0" for step in (8, 10, 12))]
    assert "3 saves in a row have failed" in refused([1, 1], config, ranks=2, faults=full)
    return config


def test_a_save_that_fails_on_one_rank_fails_on_all_once_and_by_its_name(full_disks: Config):
    failed = [row["reason"] for row in events(full_disks, "save_failed")]
    assert [reason.split()[1] for reason in failed] == [
        "step_00000004",
        "step_00000008",
        "step_00000010",
    ]
    assert "rank 1: " in failed[0]
    assert all("rank 0: " in reason and "No space left" in reason for reason in failed[1:])


def test_a_load_that_fails_on_one_rank_fails_on_all(full_disks: Config):
    assert "Errno 9" in refused([1, 1], full_disks, ranks=2, faults=["fail_load:1"])


def test_two_ranks_use_the_checkpoint_before_a_damaged_one(base, whole: dict[int, dict]):
    config = finish(replace(base, run="damaged"), ranks=2)
    (config.run_dir / "summary.json").unlink()
    flip_bit(faults.checkpoint_folder(config, STEPS) / "__1_0.distcp", 4321)
    run = ended([0, 0], config, ranks=2)
    assert f"resuming {faults.checkpoint_folder(config, STEPS - EVERY)}" in run.output
    assert len(events(config, "bad_checkpoint")) == 1
    # what is bad is kept for inspection
    assert (config.run_dir / f"checkpoints/bad_step_{STEPS:08d}").exists()
    assert record(config) == whole[2]


def test_two_ranks_go_on_after_saves_that_failed(full_disks: Config, whole: dict[int, dict]):
    assert record(finish(full_disks, ranks=2)) == whole[2]


# ------------------------------------------------------------------------------- signals and ranks


def test_a_rank_killed_in_mid_step_and_torchrun_told_to_stop(base, whole: dict[int, dict]):
    """The genuine torchrun: it restarts the ranks, which resume; SIGTERM then ends them with a
    save; the rest is bit-equal."""
    config = replace(base, run="torchrun")
    run = faults.Run(config, faults=["signal_in_step:5:1:9", "slow_steps:0.05"], restarts=1)
    run.wait_until(lambda: "resuming" in run.output)
    run.wait_until(len(rows(config)) + 3)
    launcher = run.processes[0].pid
    ranks = faults.children(launcher)
    os.kill(launcher, signal.SIGTERM)
    run.wait()  # its own exit code is no word on the ranks': any signal counts as a failure
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    assert "stopped on request at step" in run.output
    assert saved_steps(config)[-1] == len(rows(config)) < STEPS
    assert record(finish(config, ranks=2)) == whole[2]


def test_ranks_whose_torchrun_is_killed_save_and_leave(base, whole: dict[int, dict]):
    """As SIGUSR1 to it does, which it does not handle: no signal reaches the ranks. A step lasts
    longer than the ranks take to look for torchrun, or one of them could leave by the other's
    request before it has seen the end itself."""
    config = replace(base, run="launcher")
    run = faults.Run(config, faults=[f"slow_steps:{2 * LAUNCHER_CHECK_S}"], restarts=0)
    run.wait_until(4)
    launcher = run.processes[0].pid
    ranks = faults.children(launcher)
    assert len(ranks) == 2
    os.kill(launcher, signal.SIGKILL)
    faults.wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks))
    run.wait()
    assert f"train.py: the end of torchrun (process {launcher})" in run.output, "said at once"
    assert (
        "stopped on request at step" in run.output
        and "stopped by the end of torchrun" in run.output
    ), run.output
    assert saved_steps(config)[-1] == len(rows(config)) < STEPS
    assert record(finish(config, ranks=2)) == whole[2]


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_is_a_request_to_stop_but_not_under_nohup(
    base, whole: dict[int, dict], is_ignored: bool
):
    config = replace(base, run=f"terminal{is_ignored}")
    disposition = "ignore" if is_ignored else "default"
    fault = f"{disposition}:{signal.SIGHUP:d}"
    run = faults.Run(config, faults=[fault, f"signal_in_step:9:0:{signal.SIGHUP:d}"])
    assert run.wait() == [0]
    assert (
        "stopped on request at step" in run.output and "by SIGHUP" in run.output
    ) is not is_ignored, run.output
    assert saved_steps(config)[-1] in ([STEPS] if is_ignored else [9, 10])
    assert record(config if is_ignored else finish(config)) == whole[1]


def test_a_second_signal_of_its_kind_ends_a_rank_in_a_collective(base):
    run = faults.Run(replace(base, run="second"), ranks=2, faults=[STOP.format(1)])
    run.wait_until(4)
    rank = run.processes[0]
    for number, seconds in (signal.SIGUSR1, 0.1), (signal.SIGUSR1, 1.5), (signal.SIGTERM, 0.5):
        os.kill(rank.pid, number)  # within a second it is the same request, passed on twice;
        # Slurm's warning was SIGUSR1: its SIGTERM minutes later is no second one
        rank.join(seconds)
    assert rank.exitcode is None
    os.kill(rank.pid, signal.SIGUSR1)
    rank.join(20)
    run.kill()
    assert rank.exitcode == 128 + signal.SIGUSR1 and "SIGUSR1" in run.output


@pytest.mark.parametrize("words", ["", "parallel.shard=1"], ids=["shards", "replicas"])
def test_two_ranks_then_one_then_two_see_the_same_tokens_and_losses(base, words: str):
    """Killed twice, in BF16, to rounding, which so small a learning rate keeps small: one other
    sequence in a step is 1e-3 of its loss."""
    config, calm = (
        replace(base, run=name + words[-1:], fp8=FP8Config(), optim=replace(base.optim, lr=1e-4))
        for name in ("elastic", "calm")
    )
    config = changed(config, words)
    for ranks, step in (2, 9), (1, 17):
        assert (
            -signal.SIGKILL
            in faults.Run(config, ranks=ranks, faults=[f"signal_in_step:{step}:0:9"]).wait()
        )
    a, b = (rows(run_config) for run_config in (finish(config, ranks=2), finish(calm)))
    for key, rounding in ("loss", 1e-5), ("grad_norm", 1e-4):
        assert [row[key] for row in a] == pytest.approx(
            [row[key] for row in b], rel=rounding
        ) and len(a) == STEPS
    assert [summary(run_config)["n_gpu"] for run_config in (config, calm)] == [2, 1]


def test_a_mistake_is_told_once_on_several_ranks(base):
    config = replace(base, run="uneven")
    assert "cannot be shared by 2 ranks" in refused([2, 2], config, "data.micro_batch=8", ranks=2)


@pytest.mark.parametrize("words", ["optim.lr=0.5", "checkpoint.every=3", "parallel.shard=1"])
def test_ranks_that_were_given_other_settings_are_refused(base, words: str):
    """Of shards another learning rate trained on without a word; of replicas a GPU was blamed."""
    config = replace(base, run="unequal")
    sentence = refused([2, 2], config, ranks=2, of_last_rank=[words])
    # no "here": each machine prints it
    assert "than rank 0 (host " in sentence and f"): {words} on rank 1, " in sentence
    assert not config.run_dir.exists()


def test_ranks_that_hold_other_data_are_refused(base, tmp_path: Path):
    """The run ended as if nothing were wrong."""
    for seed, name in enumerate(("web", "code"), 7):
        write_source(tmp_path / name, seed)
    config = replace(base, run="unequal_data")
    sentence = refused([2, 2], config, ranks=2, of_last_rank=[f"data.dir={tmp_path}"])
    assert "rank 1 " in sentence and "training tokens" in sentence
    assert not config.run_dir.exists()


def test_a_machine_without_the_data_is_told(base, tmp_path: Path):
    config = replace(base, run="absent_data")
    sentence = refused([2, 2], config, ranks=2, of_last_rank=[f"data.dir={tmp_path}"])
    assert "on another machine: " in sentence and f"there is no {tmp_path}" in sentence


def test_machines_may_have_the_same_data_in_folders_of_their_own(
    base, data_dir: Path, tmp_path: Path, whole: dict[int, dict]
):
    copy = shutil.copytree(data_dir, tmp_path / "copy")
    config = replace(base, run="own_data")
    ended([0, 0], config, ranks=2, of_last_rank=[f"data.dir={copy}"])
    assert record(config) == whole[2]


def test_rank_0_decides_whether_a_run_is_finished(base, whole: dict[int, dict], tmp_path: Path):
    """As where a network file system shows another machine an older folder."""
    run = ended([0, 0], replace(base, run="whole2"), ranks=2, of_last_rank=[f"out={tmp_path}"])
    assert "finished, all" in run.output
    assert not list(tmp_path.iterdir())


def test_what_rank_0_looks_for_alone_is_told(base):
    orphan = replace(base, run="orphan", start_from=f"{base.out}/none/checkpoints/step_00000004")
    assert "is no finished checkpoint" in refused([2, 2], orphan, ranks=2)


def test_an_error_of_one_rank_is_told_by_it(base, data_dir: Path, tmp_path: Path):
    """A token beyond the vocabulary, read by the second of two ranks alone."""
    own_data = shutil.copytree(data_dir, tmp_path / "data")
    config = changed(base, f"run=spoilt_data data.dir={own_data} data.mixture=web:1")
    data = Data(config, load_tokenizer("byte").sha256)
    row = data.batch(0, 0, 1, 2)[0][0].numpy().astype("<u2").tobytes()
    shard = own_data / "web/train_00000.bin"
    shard.write_bytes(shard.read_bytes().replace(row, b"\xff\xff" + row[2:]))
    run = faults.Run(config, ranks=2)
    assert 0 not in run.wait()
    assert "holds the id 65535" in run.output and "train.py: rank 1: " in run.output


# ------------------------------------------------------------------------------ numbers that spoil


def skipped(config: Config) -> list[int]:
    return [row["step"] for row in rows(config) if row["verdict"] == "SKIP"]


def rollbacks(config: Config) -> list[tuple[int, int]]:
    return [(row["step"], row["to"]) for row in rows(config, "event") if row["event"] == "rollback"]


@pytest.mark.parametrize(
    "fault, due, back, killed_at, ranks, changes",
    [
        ("scale_loss:5:5:inf", "omit_update:5", [], None, 1, "steps=8"),
        ("nan_gradient:5:1", "omit_update:5", [], None, 2, "steps=8"),
        ("nan_gradient:5:1", "omit_update:5", [], None, 2, "steps=8 parallel.shard=1"),
        # The NaN comes right before a save, and a kill soon after it: the rollback goes to the
        # checkpoint before.
        ("nan_weight:8:0", "move_data:5:7", [(11, 4)], 11, 1, "guard.skips=3 eval.every=6"),
        # The same where steps 4 to 11 are quarters: 1.75 full steps, so two are left out.
        (
            "nan_weight:8:0",
            "move_data:5:2",
            [(11, 4)],
            11,
            1,
            "guard.skips=3 eval.every=6 data.ramp=0.4:0.25 data.micro_batch=2",
        ),
        # Validated after step 8, where it was saved too. On two ranks the validation has left
        # weights gathered: those of the checkpoint must be gathered anew.
        ("nan_weight:8:0", "move_data:5:4", [(8, 4)], None, 2, "parallel.reshard=false"),
        ("nan_weight:8:0", "move_data:5:4", [(8, 4)], None, 2, "parallel.shard=1"),
        # A tenfold loss that lasts. Killed after the rollback, before a save has noted that the
        # data moved on.
        (
            "scale_loss:22:24:10",
            "move_data:21:4",
            [(24, 20)],
            26,
            1,
            "steps=28 guard.window=16 guard.skips=3 eval.every=none",
        ),
    ],
    ids=[
        "loss",
        "gradient",
        "replicas_gradient",
        "poisoned_checkpoint",
        "poisoned_in_a_ramp",
        "nan_validation",
        "replicas_nan_validation",
        "spike",
    ],
)
def test_a_skip_or_a_rollback_ends_as_a_run_that_did_at_once_what_is_due(
    request: pytest.FixtureRequest,
    base,
    fault: str,
    due: str,
    back: list[tuple[int, int]],
    killed_at: int | None,
    ranks: int,
    changes: str,
):
    """A run under `fault` ends in the bits of one that at once does what is due: without the update
    of step 5, or, where it goes `back` from a step to another, with the data from behind the first.
    With killed_at it is killed over that data and goes on."""
    config = changed(base, f"run={request.node.callspec.id} checkpoint.every=4 {changes}")
    if killed_at:
        ended([-signal.SIGKILL], config, faults=[fault, f"signal_in_step:{killed_at}:0:9"])
    lasts = not killed_at or fault.startswith("scale_loss")
    finish(config, faults=[fault] * lasts, ranks=ranks)
    expected = finish(replace(config, run=f"{config.run}_told"), faults=[due], ranks=ranks)
    assert (rollbacks(config), skipped(config), skipped(expected)) == (
        back,
        [] if back else [5],
        [],
    )
    assert faults.digest(config) == faults.digest(expected)
    assert (
        faults.trajectory(config)[0 if back else 5 :]
        == faults.trajectory(expected)[0 if back else 5 :]
    )


def test_a_rollback_on_a_full_disk_is_as_any(base, tmp_path: Path):
    """The run ended, and its next start met the same data again."""
    config = changed(
        base,
        "run=full_rollback checkpoint.every=4 guard.skips=3 eval.every=6"
        f" checkpoint.copy_to=file://{tmp_path}",
    )
    fault = "nan_weight:8:0"
    finish(config, faults=[fault, "no_room_to_roll_back"])
    twin = finish(replace(config, run="roomy_rollback"), faults=[fault])
    assert rollbacks(config) == rollbacks(twin) == [(11, 4)]
    assert faults.digest(config) == faults.digest(twin)
    assert faults.trajectory(config) == faults.trajectory(twin)
    assert [row["step"] for row in rows(config, "undone")] == list(range(5, 12))


def test_after_a_rollback_losses_are_means_over_the_later_data(base, tmp_path: Path):
    """At a learning rate of nothing each step's loss can be told from its data alone, of which each
    has other targets."""
    rng = np.random.default_rng(0)
    masked = {
        split: [rng.integers(97, 123, tokens, "<u4") | (rng.random(tokens) < 0.5) << np.uint32(31)]
        for split, tokens in (("train", 9000), ("val", 900))
    }
    write_shards(tmp_path / "chat", masked, is_masked=True)
    config = changed(
        base,
        "run=masked steps=14 fp8.recipe=off optim.lr=1e-12 guard.skips=3 checkpoint.every=4 "
        f"data.dir={tmp_path} data.mixture=chat:1",
    )
    finish(config, faults=["nan_weight:9:0"], ranks=2)
    assert rollbacks(config) == [(12, 8)]
    # a whole step at once
    data = Data(changed(config, "data.micro_batch=8"), load_tokenizer("byte").sha256)
    model, batches = (
        load_model(config.run_dir)[0],
        [data.batch(step, 0, 0, 1) for step in [*range(8), *range(12, 18)]],
    )
    targets = [int((y >= 0).sum()) for _, y in batches]
    due = [float(model(x, y).sum()) / n for (x, y), n in zip(batches, targets, strict=True)]
    assert len(set(targets[8:])) > 3 and targets[8:] != [
        data.targets(step) for step in range(8, 14)
    ]
    assert [row["loss"] for row in rows(config)] == pytest.approx(due, rel=1e-3)


@pytest.fixture(scope="module")
def long_prompts(base, tmp_path_factory: pytest.TempPathFactory):
    """Prompts of 90 tokens, responses of 10, two sequences of 32 tokens a step: of 24 steps many
    have no target."""
    folder, rng = tmp_path_factory.mktemp("long_prompts"), np.random.default_rng(0)
    is_prompt = np.arange(100) < 90
    splits = {
        split: [np.tile(rng.integers(97, 123, 100, "<u4") | is_prompt << np.uint32(31), rows)]
        for split, rows in (("train", 90), ("val", 9))
    }
    write_shards(folder / "chat", splits, is_masked=True)
    return changed(
        base,
        f"fp8.recipe=off data.dir={folder} data.mixture=chat:1 data.tokens_per_step=64"
        " data.micro_batch=1 checkpoint.every=1 checkpoint.keep=99 optim.weight_decay=0.1"
        " eval.every=none",
    )


def weights_and_moments(config: Config, step: int) -> list[bytes]:
    return [
        path.read_bytes()
        for path in sorted((config.run_dir / f"checkpoints/step_{step:08d}").glob("__*"))
    ]


@dataclass
class WithoutTargets:
    """A finished run of long prompts, what it printed, and the targets of each of its steps."""

    config: Config
    output: str
    targets: list[int]


@pytest.fixture(scope="module", params=[1, 2])
def without_targets(request: pytest.FixtureRequest, long_prompts) -> WithoutTargets:
    ranks = request.param
    config = replace(long_prompts, run=f"long_prompts{ranks}")
    output = ended([0] * ranks, config, ranks=ranks).output
    data = Data(config, load_tokenizer("byte").sha256)
    targets = [data.targets(step) for step in range(STEPS)]
    assert 4 < targets.count(0) < STEPS - 4
    return WithoutTargets(config, output, targets)


def test_steps_without_targets_are_marked_and_no_others_skipped(without_targets: WithoutTargets):
    """Their loss of 0 filled the guard's window, by which the others were skipped as spikes."""
    verdicts = [row["verdict"] for row in rows(without_targets.config)]
    expected = ["OK" if count else "NO_TARGET" for count in without_targets.targets]
    assert verdicts == expected


def test_steps_without_targets_have_no_loss(without_targets: WithoutTargets):
    losses = [row["loss"] for row in rows(without_targets.config)]
    has_loss = [loss is not None for loss in losses]
    assert has_loss == [count > 0 for count in without_targets.targets]


def test_steps_without_targets_change_no_weight_and_no_moment(without_targets: WithoutTargets):
    saved = [weights_and_moments(without_targets.config, step) for step in range(1, STEPS + 1)]
    is_unchanged = [earlier == later for earlier, later in pairwise(saved)]
    assert is_unchanged == [count == 0 for count in without_targets.targets[1:]]


def test_steps_without_targets_are_counted_and_said(without_targets: WithoutTargets):
    about, number = summary(without_targets.config), without_targets.targets.count(0)
    assert (about["steps_without_targets"], about["skipped_steps"]) == (number, 0)
    output = without_targets.output
    assert f"{number} of the first {STEPS} steps have no target" in output
    assert f"{number} had no target ->" in output


def test_the_share_of_tokens_that_are_targets_is_said(without_targets: WithoutTargets):
    tokens = np.fromfile(f"{without_targets.config.data.dir}/chat/train_00000.bin", "<u4")
    # a window's first token is no target
    share = (tokens[1 : (len(tokens) - 1) // 32 * 32 + 1] < 1 << 31).mean()
    assert f"{share:.2%} of its tokens are targets" in without_targets.output


def test_a_resume_among_steps_without_targets_ends_in_the_same_bits(long_prompts):
    whole = finish(replace(long_prompts, run="prompts_whole"))
    config = replace(long_prompts, run="prompts_killed")
    for step in 9, 17:
        ended([-signal.SIGKILL], config, faults=[f"signal_in_step:{step}:0:9"])
    assert record(finish(config)) == record(whole)
    assert summary(config)["steps_without_targets"] == summary(whole)["steps_without_targets"]


@pytest.mark.parametrize(
    "spoilt, rollbacks, replicas, sentence, saved",
    [
        (["scale_loss:7:999:nan"], 1, 1, "guard.rollbacks=1", 4),
        (["nan_weight:8:1"], 0, 1, "step 8: validation loss nan", 8),
        (["nan_weight:8:0", "nan_weight:8:1"], 0, 2, "step 8: validation loss nan", 8),
        (
            ["scale_loss:1:999:nan"],
            2,
            1,
            "step 3: loss nan, gradient norm nan; 3 skipped in a row, and there is no checkpoint",
            0,
        ),
    ],
)
def test_a_run_that_rollbacks_do_not_cure_stops_and_says_why(
    base, spoilt: list[str], rollbacks: int, replicas: int, sentence: str, saved: int
):
    config = changed(
        base,
        f"run=hopeless{rollbacks}{replicas} guard.skips=3"
        f" guard.rollbacks={rollbacks} parallel.replicate={replicas}",
    )
    assert sentence in refused([1, 1], config, faults=spoilt, ranks=2)
    diagnosis = json.loads((config.run_dir / "diagnosis.json").read_text())
    weights = diagnosis["weights"].values()
    assert sum(weight["not_finite"] for weight in weights) == ("nan_weight" in spoilt[0]), (
        "each value counted once"
    )
    assert sum(weight["values"] for weight in weights) == config.model.params_total
    assert [bool(diagnosis["gradients"]), diagnosis["problem"]] == ["scale_loss" in spoilt[0], ""]
    assert (saved_steps(config) or [0])[-1] == saved, (
        "what is due in a row of skips waits for its end"
    )


# ---------------------------------------------------------------------------------------- branches

# steps of the trunk, of its branch, and where it leaves: (1 - 0.25) * 8
LONG, SHORT, FORK = 12, 8, 6


@pytest.fixture(scope="module", params=[1, 2])
def arm(request: pytest.FixtureRequest, base):
    """Trunk, the run of the branch's length from scratch, branch. The trunk decays over its last 3
    steps, the others over 2."""
    ranks = request.param
    trunk = changed(
        base,
        f"run=trunk{ranks} steps={LONG} optim.schedule=wsd optim.decay_share=0.25 eval.every=none"
        f" probe.every=1 probe.tokens=128 optim.warmup_share={2 / LONG} checkpoint.every=4"
        f" checkpoint.at={FORK}",
    )
    scratch = changed(trunk, f"run=scratch{ranks} steps={SHORT} optim.warmup_share={2 / SHORT}")
    branch = changed(
        scratch,
        f"run=branch{ranks} start_from={trunk.run_dir}/checkpoints/step_{FORK:08d}"
        " checkpoint.every=1 checkpoint.at=()",
    )
    for config in (trunk, scratch):
        finish(config, ranks=ranks)
    manifest = read_manifest(Path(branch.start_from))
    seal(
        Path(branch.start_from),
        manifest | {"state": manifest["state"] | {"seconds": 1e6, "probe_seconds": 1e5}},
    )
    run = faults.Run(branch, faults=[f"signal_in_step:{SHORT}:0:9"], ranks=ranks)
    assert -signal.SIGKILL in run.wait() and f"branching off {branch.start_from}" in run.output, (
        run.output
    )
    aside = trunk.run_dir.rename(trunk.run_dir.with_name(f"aside{ranks}"))
    run = faults.Run(branch, ranks=ranks)  # its own checkpoint wins; the parent may be gone by now
    assert (
        set(run.wait()) == {0}
        and f"resuming {branch.run_dir}/checkpoints/step_00000007" in run.output
    ), run.output
    aside.rename(trunk.run_dir)
    return trunk, scratch, branch


def test_a_branch_ends_bit_for_bit_where_the_run_from_scratch_ends(arm: int):
    trunk, scratch, branch = arm
    assert saved_steps(trunk) == [6, 8, 12]  # checkpoint.at outlives the keep policy
    of_branch, of_scratch = record(branch), record(scratch)
    assert (
        of_branch.pop("trajectory") == of_scratch.pop("trajectory")[FORK:]
        and of_branch == of_scratch
    )
    assert faults.trajectory(trunk)[:FORK] == faults.trajectory(scratch)[:FORK]
    a, b = summary(scratch), summary(branch)
    assert (b["parent_run"], b["parent_step"], a["parent_run"], a["parent_step"]) == (
        trunk.run,
        FORK,
        None,
        None,
    )
    own_keys = {
        "tok_per_s_median",
        "step_s_median",
        "compile_s",
        "tflops_median",
        "wall_s",
        "probe_s",
        "probe_share",
        "t_start",
        "parent_run",
        "parent_step",
        "run_id",
        "git_commit",
    }
    for key in a.keys() - own_keys:
        assert a[key] == b[key], key
    assert b["probe_s"] < b["wall_s"] < 1e3, "the parent's hours are its own"
    assert b["is_annealed"] and b["pair_id"] == a["pair_id"] != summary(trunk)["pair_id"]


def test_a_branch_without_a_checkpoint_goes_back_to_its_branch_point(arm: int, tmp_path: Path):
    ranks, branch = int(arm[2].run[-1]), arm[2]
    config = changed(branch, f"run={branch.run}_back guard.skips=1 checkpoint.every=none")
    finish(config, faults=[f"nan_weight:{FORK + 1}:0"], ranks=ranks)
    assert rollbacks(config) == [(FORK + 2, FORK)]
    expected = finish(
        replace(config, run=f"{branch.run}_told"), faults=[f"move_data:{FORK + 1}:2"], ranks=ranks
    )
    assert faults.digest(config) == faults.digest(expected) and faults.trajectory(
        config
    ) == faults.trajectory(expected)
    # its own checkpoint undone
    killed = changed(config, f"run={branch.run}_killed checkpoint.every={FORK + 1}")
    undone = [f"nan_weight:{FORK + 1}:0", f"signal_in_step:{FORK + 3}:0:9"]
    assert KILLED in faults.Run(killed, faults=undone, ranks=ranks).wait()
    assert rollbacks(killed) == [(FORK + 2, FORK)] and not saved_steps(killed)
    assert f"branching off {branch.start_from}" in ended([0] * ranks, killed, ranks=ranks).output
    trunk = shutil.copytree(
        branch.start_from, tmp_path / "copy/checkpoints" / Path(branch.start_from).name
    )
    lost = replace(config, run=f"{branch.run}_lost", start_from=str(trunk))
    sentence = refused(
        [1] * ranks,
        lost,
        faults=[f"nan_weight:{FORK + 1}:0", f"lose_trunk:{FORK + 2}"],
        ranks=ranks,
    )
    assert (
        "no checkpoint from before step 7 to go back to" in sentence
        and (lost.run_dir / "diagnosis.json").exists()
    )


@pytest.mark.parametrize("arm", [1], indirect=True)
def test_what_is_no_branch_is_refused_before_anything_is_written(
    tmp_path: Path, run: Callable[..., str], arm: int
):
    trunk, _, branch = arm
    own_config, branch = replace(branch, start_from=None), replace(branch, run="refused")
    unfinished, damaged, renamed = (
        shutil.copytree(branch.start_from, tmp_path / f"{i}/checkpoints/step_{step:08d}")
        for i, step in enumerate((6, 6, 5))
    )
    (unfinished / "DONE").unlink()
    flip_bit(damaged / "__0_0.distcp", 4321)
    for config, override, sentence in [
        (own_config, "seed=1337", f"start_from was {trunk.run}"),
        (branch, "seed=1", "seed was 1337, now 1"),
        (branch, "eval.tokens=64", "other validation windows"),
        (branch, "optim.warmup_share=0.5", "optim.warmup_share=0.25"),
        (branch, "optim.schedule=cosine", "optim.schedule=wsd"),
        (branch, "optim.decay_share=0.5", "before the decay"),
        (branch, f"start_from={unfinished}", "has none"),
        (branch, f"start_from={renamed}", "holds step 6"),
        (branch, f"start_from={damaged}", "__0_0.distcp"),
    ]:
        output = run(config, override, code=2)
        assert sentence in output and output.startswith("train.py: ") and output.count("\n") == 1, (
            override,
            output,
        )
        assert not branch.run_dir.exists()


# ------------------------------------------------------------------------------------ the watchdog

STOP, KILLED = f"signal_in_step:5:{{}}:{signal.SIGSTOP:d}", -signal.SIGKILL
# name -> what happens in step 5 of two ranks, of which rank 0 holds the store; timeout, exit codes,
# message
JOBS = {
    "stop": (
        [STOP.format(1)],
        2,
        [1, KILLED],
        "rank 0: no progress .*; rank 1 .*no heartbeat for 3 s: dead or stopped",
    ),
    "stuck": (
        ["hang_in_data:5:1"],
        2,
        [1, 1],
        "for 2 s at step 5, forward.*; rank 1 .*is behind the others, at step 5, read",
    ),
    "fail": (
        ["fail_in_data:5:1"],
        20,
        [1, 1],  # a collective that fails is explained first
        (
            "train.py: rank 1 .*ended first, at step 5, reading a micro-batch .failed: KeyError: 'a"
            " damaged shard'"
        ),
    ),
    "fail_unseen": (
        ["fail_in_data:5:1", "hang_in_data:5:0"],
        2,
        [1, 1],
        "rank 0: .*; rank 1 .*ended first, .*damaged",
    ),
    "stop_keeper": (
        [STOP.format(0)],
        2,
        [KILLED, 1],
        "rank 1: no progress .*; the store on host 127.0.0.1 does not answer",
    ),
    "kill": (
        ["signal_in_step:5:1:9"],
        20,
        [1, KILLED],
        "train.py: rank 1 .*no heartbeat for 3 s: dead or stopped",
    ),
    "request": (
        [f"signal_in_step:5:1:{signal.SIGUSR1:d}"],
        20,
        [0, 0],
        r"stopped on request at step \d; saved",
    ),
    "suspend": (["slow_steps:0.1"], 4, [0, 0], "done. validation loss"),
}


@pytest.fixture(scope="module")
def jobs(base):
    """Two ranks of train.py for each, all at once, since most of their time is spent waiting."""
    runs = {
        name: faults.Run(
            replace(base, run=name, steps=12), f"parallel.timeout={timeout}", ranks=2, faults=what
        )
        for name, (what, timeout, _, _) in JOBS.items()
    }
    runs["suspend"].wait_until(2)
    for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
        runs["suspend"].signal(number)
        time.sleep(seconds)
    faults.wait_for(
        lambda: all(
            sum(process.exitcode is None for process in run.processes) == name.startswith("stop")
            for name, run in runs.items()
        )
    )
    for run in runs.values():
        run.kill()
    return runs


@pytest.mark.parametrize("name", JOBS)
def test_a_watched_job_ends_with_its_codes_and_names_the_rank_to_blame(jobs, name: str):
    """One that was suspended as a whole goes on."""
    run, (_, _, codes, sentence) = jobs[name], JOBS[name]
    assert run.wait() == codes and re.search(sentence, run.output), run.output
    if name not in ("stop_keeper", "request", "suspend"):
        assert f"pid {run.processes[1].pid})" in run.output, run.output


@pytest.mark.parametrize("name", JOBS)
def test_stacks_are_written_where_a_job_hangs(jobs, name: str):
    is_hanging = name not in ("fail", "kill", "request", "suspend")
    assert (jobs[name].config.run_dir / "stacks").exists() is is_hanging


@pytest.mark.parametrize("rank, place", [(0, "train.py"), (1, "in next_batch")])
def test_stacks_say_where_each_rank_hangs_on_stderr_too(jobs, rank: int, place: str):
    run = jobs["stuck"]
    assert place in (run.config.run_dir / f"stacks/rank_{rank}.txt").read_text()
    assert place in run.output


def test_the_flight_recorder_of_a_stuck_job_has_its_collectives(jobs):
    path = jobs["stuck"].config.run_dir / "flight_recorder/rank_0_gloo.json"
    entries = json.loads(path.read_text())["entries"]
    assert len(entries) >= 5 and any("reduce" in entry["profiling_name"] for entry in entries)


# of the exit, in its thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_place_may_last_as_long_as_it_asks_and_a_moving_loop_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    """In this process, with the exit replaced. A folder that is no run yet is left alone."""
    ended = []
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.append(code) or sys.exit())
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, exit: None)
    monkeypatch.setattr(watchdog, "BEAT", 0.02)
    with watchdog.Watchdog(ALONE, tmp_path, 0.6):
        faults.wait_for(lambda: ended, 20)
    assert ended == [1] and not list(tmp_path.iterdir())
    assert "no progress for 0.6 s at start\n" in capfd.readouterr().err, (
        "the first step has more patience"
    )
    (tmp_path / "config.json").touch()
    with watchdog.Watchdog(ALONE, tmp_path, 0.6) as watch:
        assert watch.explain(RuntimeError("out of memory")) is None, "an error of its own"
        watch.patience = 0.2
        watch.at("validating", 3, patience=10**6)
        time.sleep(0.6)
        for step in range(40):
            watch.at("forward", step)
            time.sleep(0.02)
        assert ended == [1] and not (tmp_path / "stacks").exists()
        faults.wait_for(lambda: len(ended) > 1, 20)
    assert (
        ended == [1, 1] and "no progress for 0.2 s at step 39, forward\n" in capfd.readouterr().err
    )
    assert (tmp_path / "stacks/rank_0.txt").exists()
