"""The real train.py against kill -9, signals, broken files, full disks, NaN, wrong clocks: it ends in the same bits.

Every run here is compared with one that was left alone: weights, moments, each step's loss and gradient norm, validation
losses, bit for bit. tests/soak.py has the long versions.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch

import prepare_data
from model import GPTConfig
from runtime.checkpoint import load_model
from runtime.config import CheckpointConfig, Config, DataConfig, EvalConfig, FP8Config, LogConfig, OptimConfig, ParallelConfig
from runtime.data import open_data
from runtime.tokenizer import load_tokenizer
from tests import faults
from tests.faults import Nursery, flip_bit, leftovers, record, rows, saved_steps, torchrun

STEPS, EVERY = 24, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def nursery(folder):
    nursery = Nursery(folder / "logs")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def base(folder, data_dir) -> Config:
    """24 steps of two micro-batches in FP8, a checkpoint every second one: a run is half a second."""
    return Config(
        run="base", steps=STEPS, out=str(folder / "out"),
        model=GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=64, n_ctx=32, vocab_size=257),
        data=DataConfig(dir=str(data_dir), mixture={"web": 0.75, "code": 0.25}, tokenizer="byte", tokens_per_step=256,
                        micro_batch=4),
        optim=OptimConfig(lr=1e-2, warmup_share=0.2), parallel=ParallelConfig(compile=False, timeout=20.0),
        checkpoint=CheckpointConfig(every=EVERY, keep=2), eval=EvalConfig(every=8, tokens=320), log=LogConfig(every=1),
        fp8=FP8Config(recipe="tensorwise"))


@pytest.fixture(scope="module")
def whole(nursery, base) -> Config:
    """The run that nothing happened to, of one process."""
    return finish(nursery, replace(base, run="whole"))


@pytest.fixture(scope="module")
def long(nursery, base) -> Config:
    """The same of one process, four times as long: for what needs many saves."""
    return finish(nursery, replace(base, run="long", steps=4 * STEPS, checkpoint=replace(base.checkpoint, every=4 * STEPS)))


@pytest.fixture(scope="module")
def whole2(nursery, base) -> Config:
    """The same of two ranks: tensorwise scales depend on who holds which sequences, so its bits are others."""
    return finish(nursery, replace(base, run="whole2"), ranks=2)


def finish(nursery: Nursery, config: Config, *overrides, **how) -> Config:
    run = nursery.start(config, *overrides, **how)
    assert set(run.wait()) == {0}, run.output
    assert faults.is_finished(config), run.output
    assert not leftovers(config)
    return config


def undone(config: Config, name: str) -> Config:
    """A copy of a finished run as a kill after the last save would leave it."""
    copy = faults.copy_run(config, replace(config, run=name))
    (copy.run_dir / "summary.json").unlink()
    return copy


def one_sentence(run: faults.Run) -> str:
    """What a run that failed has said, which is no traceback."""
    assert "Traceback" not in run.output, run.output
    return next(line for line in run.output.splitlines() if line.startswith("train.py: "))


# ------------------------------------------------------------------------------------------------------------------- kills

def storm(nursery: Nursery, config: Config, kills: int, seed: int, ranks: int = 1, longest: float = 0.6) -> list[dict]:
    """Run to the end through `kills` times kill -9: every second one in the middle of a save, the others at any moment of
    the first `longest` seconds. Returns for each the step it hit, the steps that were to be done again, and the seconds
    until they were: None where the next kill came before."""
    rng, told = random.Random(seed), []

    def tick(run: faults.Run) -> bool:
        """Whether the run has ended; notes when it is where the one before was killed."""
        if told and told[-1]["s"] is None and run.has_begun() and faults.last_step(config) >= told[-1]["step"]:
            told[-1]["s"] = time.monotonic() - told[-1]["at"]
        return not run.is_running()

    while True:
        before, saves, seconds, seen = saved_steps(config), rng.randrange(1, 4), rng.uniform(0, longest), set()
        run = nursery.start(config, ranks=ranks)
        end = time.monotonic() + seconds

        def is_now(run=run, end=end, saves=saves, seen=seen) -> bool:
            seen.update(leftovers(config))
            return tick(run) or len(told) < kills and (len(seen) >= saves if len(told) % 2 else time.monotonic() > end)
        run.wait_until(is_now)
        if len(told) < kills:
            time.sleep(rng.uniform(0, 0.03) if len(told) % 2 else 0.0)
            run.kill()
            assert not before or saved_steps(config)[-1] >= before[-1], "a checkpoint was lost"
            hit, saved = faults.last_step(config), (saved_steps(config) or [0])[-1]
            told.append({"step": hit, "lost": max(0, hit - saved), "at": time.monotonic(), "s": None})
        else:
            assert set(run.wait()) == {0}, run.output
        if faults.is_finished(config):
            assert not leftovers(config)
            return told


@pytest.mark.parametrize("ranks, kills", [(1, 4), (2, 2)])
def test_kill_9_at_random_moments_costs_steps_and_nothing_else(nursery, base, long, whole2, ranks, kills):
    config = replace(base, run=f"storm{ranks}", steps=long.steps if ranks == 1 else STEPS)
    told = storm(nursery, config, kills, seed=ranks, ranks=ranks)
    assert record(config) == record(long if ranks == 1 else whole2)
    assert told, "on a machine so fast that a run is done before its first kill, make the runs longer"
    assert max(kill["lost"] for kill in told) <= 2 * EVERY, "the save under way and the steps since"


def changes_of_a_save(nursery: Nursery, config: Config, step: int, ranks: int = 1) -> list[str]:
    """Everything that the save of `step` does on disk, pruning of older checkpoints included; of the main rank."""
    file = config.run_dir.parent / f"{config.run}.trace"
    finish(nursery, config, faults=[f"trace_save:{file}"], ranks=ranks)
    all_of = file.read_text().splitlines()
    first = next(i for i, change in enumerate(all_of) if f"step_{step:08d}" in change)
    after = next(i for i, change in enumerate(all_of) if f"step_{step + EVERY:08d}" in change)
    return all_of[first:after]


def kill_in_every_change(nursery: Nursery, config: Config, ranks: int, skip: str | None = None) -> int:
    """One run that is killed before every change that a save makes but `skip`, then finished; returns how often."""
    changes = changes_of_a_save(nursery, replace(config, run=f"{config.run}_traced"), 10, ranks)
    assert any("DONE" in change for change in changes)
    assert any(change.startswith(("rmdir", "rmtree")) for change in changes), "pruning is part of it"
    numbers = [n for n, change in enumerate(changes, 1) if change.split()[0] != skip]
    for n in numbers:
        saved = (saved_steps(config) or [0])[-1]
        at = max(saved, 2 * EVERY) + EVERY
        run = nursery.start(config, faults=[f"kill_in_save:{at}:{n}"], ranks=ranks)
        codes = run.wait()
        assert -signal.SIGKILL in codes, f"{changes[n - 1]}: {run.output}"
        now = saved_steps(config)
        assert now[-1] in (at - EVERY, at), (n, changes[n - 1], now)
        assert len(now) >= 2, (n, changes[n - 1], now)
    finish(nursery, config, ranks=ranks)
    return len(numbers)


def test_kill_9_before_every_change_that_a_save_makes_on_disk(nursery, base, long):
    """Opened, renamed, removed: found by watching a save, so that a new stage of it is not forgotten here. A kill before an
    fsync leaves what one before the next change leaves: the page cache outlives a process."""
    config = replace(base, run="stages", steps=long.steps)
    assert kill_in_every_change(nursery, config, 1, skip="fsync") >= 12
    assert record(config) == record(long)


def test_a_save_that_copies_slowly_has_the_weights_of_its_own_step(nursery, base, whole):
    config = replace(base, run="slow", checkpoint=replace(base.checkpoint, every=8))
    finish(nursery, config, faults=["slow_copies:0.005"])
    assert record(config) == record(whole)
    (config.run_dir / "summary.json").unlink()
    shutil.rmtree(config.run_dir / f"checkpoints/step_{STEPS:08d}")
    finish(nursery, config)     # from the one before
    assert record(config) == record(whole)


def test_kill_9_before_every_other_change_in_a_run_s_folder(nursery, base):
    """From the lock to summary.json: what a run that was killed has left is no reason to refuse the next one."""
    config = replace(base, run="changes", steps=2)
    file = config.run_dir.parent / "changes.trace"
    finish(nursery, config, faults=[f"trace_changes:/{config.run}/:{file}"])
    changes = file.read_text().splitlines()
    for name in (".lock", "config.json", "metrics.jsonl", "summary.json", "val_losses.npz"):
        assert any(name in change for change in changes), name
    for n, change in enumerate(changes, 1):
        if change.startswith(("fsync", "remove")):      # the same on disk as before the next change
            continue
        killed = replace(config, run=f"change{n}")
        run = nursery.start(killed, faults=[f"kill_at_change:/{killed.run}/:{n}"])
        assert run.wait() == [-signal.SIGKILL], (change, run.output)
        run = nursery.start(killed)
        assert run.wait() == [0], (change, run.output)
        assert record(killed) == record(config), change


# ------------------------------------------------------------------------------------------------------- broken checkpoints

def damage(file, how: str, rng: random.Random) -> None:
    if how == "flip":
        flip_bit(file, rng.randrange(file.stat().st_size))
    elif how == "cut":
        os.truncate(file, rng.randrange(file.stat().st_size))
    else:
        file.unlink()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json", "DONE"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(nursery, whole, name):
    for how in ("flip", "cut", "remove"):
        config = undone(whole, f"damaged_{name.strip('._')}_{how}")
        newest = config.run_dir / f"checkpoints/step_{STEPS:08d}"
        damage(newest / name, how, random.Random(f"{name}{how}"))
        run = nursery.start(config)
        assert run.wait() == [0], run.output
        assert record(config) == record(whole)
        if (name, how) == ("DONE", "remove"):
            continue    # never finished: nothing to tell
        assert f"resuming {config.run_dir}/checkpoints/step_{STEPS - EVERY:08d}" in run.output, (how, run.output)
        assert any(f"step_{STEPS:08d}" in line and name in line for line in run.output.splitlines()), "the bad file is named"
        assert any(row["event"] == "bad_checkpoint" for row in rows(config, "event"))
        assert (config.run_dir / f"checkpoints/bad_step_{STEPS:08d}").exists(), "what is bad is kept for inspection"


def test_two_ranks_agree_to_fall_back(nursery, whole2):
    config = undone(whole2, "damaged2")
    damage(config.run_dir / f"checkpoints/step_{STEPS:08d}/__1_0.distcp", "flip", random.Random(0))
    run = nursery.start(config, ranks=2)
    assert run.wait() == [0, 0], run.output
    assert f"resuming {config.run_dir}/checkpoints/step_{STEPS - EVERY:08d}" in run.output
    assert record(config) == record(whole2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_all_checkpoints_are_bad_nothing_starts_over(nursery, whole, whole2, ranks):
    config = undone(whole if ranks == 1 else whole2, f"all_bad{ranks}")
    for path in (config.run_dir / "checkpoints").glob("step_*"):
        damage(path / "__0_0.distcp", "flip", random.Random(path.name))
    before = rows(config)
    for _ in range(2):      # nor the second time, when they have been put aside
        run = nursery.start(config, ranks=ranks)
        assert run.wait() == [1] * ranks, run.output
        assert "checkpoint" in one_sentence(run)
        assert "starting at step 0" not in run.output
        assert rows(config) == before
    assert not faults.is_finished(config)


# --------------------------------------------------------------------------------------------------------------- full disks

def test_a_save_that_fails_costs_nothing_and_the_next_one_is_tried(nursery, base, long):
    """No space left, from every stage of a save in turn on to its end, in one run."""
    config = replace(base, run="no_space", steps=long.steps)
    steps = range(4, config.steps, 4)      # each second save: three failures in a row end a run
    run = nursery.start(config, faults=[f"fail_in_save:{step}:{n}:99" for n, step in enumerate(steps, 1)])
    assert run.wait() == [0], run.output
    assert record(config) == record(long)
    assert not leftovers(config)
    failed = [row for row in rows(config, "event") if row["event"] == "save_failed"]
    assert len(failed) >= 10, "one for each stage before the rename; what fails after it costs nothing"
    assert all("No space left" in row["reason"] for row in failed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_three_saves_that_fail_in_a_row_end_the_run_and_room_resumes_it(nursery, base, whole, whole2, ranks):
    config = replace(base, run=f"small_files{ranks}")
    run = nursery.start(config, "checkpoint.every=8", ranks=ranks)
    run.wait_until(lambda: saved_steps(config))
    run.kill()
    first = saved_steps(config)
    run = nursery.start(config, ranks=ranks, largest_file=60_000)
    codes = run.wait()
    assert codes == [1] * ranks, run.output
    assert "checkpoint" in one_sentence(run)
    assert saved_steps(config) == first, "the older checkpoints stay"
    finish(nursery, config, ranks=ranks)
    assert record(config) == record(whole if ranks == 1 else whole2)


def test_a_disk_that_is_full_and_then_not(nursery, base, whole, folder):
    """A tmpfs of its own; where nobody has the right to mount one, files that may not grow stand in for the full disk."""
    small = folder / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        config = replace(base, run="full", out=str(small / "out"))
        run = nursery.start(config, "checkpoint.every=8")
        run.wait_until(lambda: saved_steps(config))
        run.kill()
        if is_mounted:
            free = shutil.disk_usage(small).free
            (small / "ballast").write_bytes(bytes(free - 150_000))      # room for rows, none for a checkpoint
        run = nursery.start(config, largest_file=None if is_mounted else 60_000)
        codes = run.wait()
        assert codes == [1], run.output
        told = one_sentence(run)
        assert "GiB" in told or "space" in told, told
        (small / "ballast").unlink(missing_ok=True)
        finish(nursery, config)
        assert record(config) == record(whole)
    finally:
        if is_mounted:
            subprocess.run(["umount", str(small)], check=True)


# -------------------------------------------------------------------------------------------------------- signals and ranks

def test_a_rank_killed_in_mid_step_and_torchrun_told_to_stop(nursery, base, whole2):
    """The genuine torchrun: it restarts the ranks, which resume; SIGTERM then ends them with a save; the rest is bit-equal."""
    config = replace(base, run="torchrun")
    run = torchrun(nursery, config, faults=["kill_in_step:5:1"], restarts=1)
    run.wait_until(lambda: "resuming" in run.output)
    at = faults.last_step(config)
    run.wait_for_step(at + 3)
    ranks = run.children()
    os.kill(run.pids[0], signal.SIGTERM)
    run.wait()      # its own exit code is no word on the ranks': any signal counts as a failure
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    assert "stopped on request at step" in run.output
    assert saved_steps(config)[-1] == faults.last_step(config) < STEPS
    finish(nursery, config, ranks=2)
    assert record(config) == record(whole2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_at_one_step(nursery, base, whole2, number):
    config = replace(base, run=f"signal{number}")
    run = nursery.start(config, ranks=2)
    run.wait_for_step(3)
    os.kill(run.pids[1], number)
    assert run.wait() == [0, 0], run.output
    assert "stopped on request at step" in run.output
    assert saved_steps(config)[-1] == faults.last_step(config) < STEPS
    finish(nursery, config, ranks=2)
    assert record(config) == record(whole2)


def test_a_dead_rank_ends_the_others_with_a_line_that_names_it(nursery, base, whole2):
    config = replace(base, run="dead")
    run = nursery.start(config, ranks=2, faults=["kill_in_step:5:1"])
    codes = run.wait(60)
    assert codes == [1, -signal.SIGKILL], run.output
    assert "rank 1" in one_sentence(run)
    finish(nursery, config, ranks=2)
    assert record(config) == record(whole2)


def test_two_ranks_then_one_then_two_see_the_same_tokens(nursery, base):
    config, calm = (replace(base, run=name, fp8=FP8Config()) for name in ("elastic", "calm"))
    files = [config.run_dir.parent / f"{each.run}.tokens" for each in (config, calm)]
    for ranks, until in (2, 8), (1, 16):
        run = nursery.start(config, ranks=ranks, faults=[f"trace_data:{files[0]}"])
        run.wait_for_step(until)
        run.kill()
    finish(nursery, config, ranks=2, faults=[f"trace_data:{files[0]}"])
    finish(nursery, calm, faults=[f"trace_data:{files[1]}"])
    seen = [{line for rank in range(2) if (part := file.with_name(f"{file.name}.{rank}")).exists()
             for line in part.read_text().splitlines()} for file in files]
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2 * STEPS, "two micro-batches a step, each known by its content"
    a, b = ([row["loss"] for row in rows(each)] for each in (config, calm))
    assert a == pytest.approx(b, rel=2e-2)
    assert a[:4] == pytest.approx(b[:4], rel=1e-4)


# ------------------------------------------------------------------------------------------------------- numbers that spoil

def skipped(config: Config) -> list[int]:
    return [row["step"] for row in rows(config) if row["verdict"] == "SKIP"]


@pytest.mark.parametrize("ranks, spoilt", [(1, ["scale_loss:5:5:nan", "scale_loss:5:5:inf", "nan_gradient:5:0"]),
                                           (2, ["nan_gradient:5:1"])])
def test_a_step_that_is_not_finite_leaves_no_trace_in_the_weights(nursery, base, ranks, spoilt):
    without = replace(base, run=f"without{ranks}", steps=8)
    finish(nursery, without, faults=["omit_update:5"], ranks=ranks)
    for i, fault in enumerate(spoilt):
        config = replace(without, run=f"spoilt{ranks}_{i}")
        finish(nursery, config, faults=[fault], ranks=ranks)
        assert skipped(config) == [5]
        assert faults.digest(config) == faults.digest(without)
        assert faults.trajectory(config)[5:] == faults.trajectory(without)[5:]


def rolled_back(nursery: Nursery, config: Config, fault: str, bad: int, to: int, killed_at: int | None = None,
                then: list[str] = (), ranks: int = 1) -> None:
    """A run under `fault` goes from step `bad` back to step `to`, and ends as one that, from there on, was given the data
    from behind that step in the first place. With killed_at it is killed over that step's data and goes on under `then`."""
    run = nursery.start(config, faults=[fault, *([f"kill_in_step:{killed_at}:0"] if killed_at else [])], ranks=ranks)
    if killed_at:
        assert run.wait() == [-signal.SIGKILL], run.output
        run = nursery.start(config, faults=then)
    assert set(run.wait()) == {0}, run.output
    events = [row for row in rows(config, "event") if row["event"] == "rollback"]
    assert [(row["step"], row["to"]) for row in events] == [(bad, to)], run.output
    told = replace(config, run=f"{config.run}_told")
    finish(nursery, told, faults=[f"move_data:{to + 1}:{bad - to}"], ranks=ranks)
    assert not skipped(told)
    assert faults.digest(config) == faults.digest(told), run.output
    assert faults.trajectory(config) == faults.trajectory(told)


def test_a_weight_that_turns_nan_is_rolled_back_and_the_data_moves_on(nursery, base):
    config = replace(base, run="nan_weight", guard=replace(base.guard, skips=3), checkpoint=replace(base.checkpoint, every=4))
    rolled_back(nursery, config, "nan_weight:9:0", bad=12, to=8)


def test_the_mean_over_responses_is_of_the_data_that_a_rollback_has_moved_on_to(nursery, base, tmp_path):
    """At a learning rate of nothing each step's loss can be told from its data alone, of which each has other targets."""
    (tmp_path / "chat.jsonl").write_text("".join(
        json.dumps({"prompt": "p" * (7 * i % 40), "response": chr(97 + i % 26) * (1 + 11 * i % 60)}) + "\n" for i in range(300)))
    assert prepare_data.main(["local", str(tmp_path / "chat.jsonl"), "name=chat", "instruct=true", "tokenizer=byte",
                              "val_share=0.1", f"out={tmp_path / 'data'}", "processes=1"]) == 0
    config = replace(base, run="masked", steps=14, fp8=FP8Config(), optim=OptimConfig(lr=1e-12),
                     guard=replace(base.guard, skips=3), checkpoint=replace(base.checkpoint, every=4),
                     data=replace(base.data, dir=str(tmp_path / "data"), mixture={"chat": 1}, max_epochs=9))
    finish(nursery, config, faults=["nan_weight:9:0"], ranks=2)
    assert [(row["step"], row["to"]) for row in rows(config, "event") if row["event"] == "rollback"] == [(12, 8)]
    data = open_data(config, load_tokenizer("byte").sha256)
    model, _ = load_model(config.run_dir)
    due, targets = [], []
    for step in [*range(8), *range(12, 18)]:
        x, y = (torch.cat(t) for t in zip(*(data.batch(step, micro, 0, 1) for micro in range(2)), strict=True))
        targets.append(int((y >= 0).sum()))
        due.append(float(model(x, y).sum()) / targets[-1])
    assert len(set(targets[8:])) > 3 and targets[8:] != [data.targets(step) for step in range(8, 14)]
    assert [row["loss"] for row in rows(config)] == pytest.approx(due, rel=1e-3)


def test_a_poisoned_checkpoint_is_not_the_end(nursery, base):
    """The NaN comes right before a save, and a kill soon after it: the rollback goes to the checkpoint before."""
    config = replace(base, run="poisoned", guard=replace(base.guard, skips=3), checkpoint=replace(base.checkpoint, every=4),
                     eval=replace(base.eval, every=6))
    rolled_back(nursery, config, "nan_weight:8:0", bad=11, to=4, killed_at=11)


@pytest.mark.parametrize("ranks, reshard", [(1, True), (2, True), (2, False)])
def test_a_validation_that_is_not_finite_is_rolled_back_too(nursery, base, ranks, reshard):
    """On two ranks the validation has left weights gathered: those of the checkpoint must be gathered anew."""
    config = replace(base, run=f"nan_validation{ranks}{reshard}", checkpoint=replace(base.checkpoint, every=4),
                     parallel=replace(base.parallel, reshard=reshard))
    # validated after step 8, where it was saved too
    rolled_back(nursery, config, "nan_weight:8:0", bad=8, to=4, ranks=ranks)


def test_a_tenfold_loss_is_skipped_and_one_that_lasts_is_rolled_back(nursery, base):
    config = replace(base, run="spike1", steps=28, guard=replace(base.guard, window=16, skips=3),
                     checkpoint=replace(base.checkpoint, every=4), eval=replace(base.eval, every=None))
    finish(nursery, config, faults=["scale_loss:23:23:10"])
    without = finish(nursery, replace(config, run="spike1_without"), faults=["omit_update:23"])
    assert skipped(config) == [23]
    assert faults.digest(config) == faults.digest(without)
    lasting = "scale_loss:22:24:10"     # killed after the rollback, before a save has noted that the data moved on
    rolled_back(nursery, replace(config, run="spike3"), lasting, bad=24, to=20, killed_at=26, then=[lasting])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_cannot_be_saved_from_itself_stops_and_says_why(nursery, base, ranks):
    config = replace(base, run=f"hopeless{ranks}", guard=replace(base.guard, skips=2, rollbacks=1))
    run = nursery.start(config, faults=["scale_loss:7:999:nan"], ranks=ranks)
    assert set(run.wait()) == {1}, run.output
    assert "all guard.rollbacks=1 are used up" in one_sentence(run)
    assert "diagnosis.json" in run.output
    assert "ended first" not in run.output, "no rank is to blame"


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_fail_their_validation_are_diagnosed_where_no_rollback_is_left(nursery, base, ranks):
    config = replace(base, run=f"undiagnosed{ranks}", guard=replace(base.guard, rollbacks=0),
                     checkpoint=replace(base.checkpoint, every=4))
    run = nursery.start(config, faults=["nan_weight:8:0"], ranks=ranks)
    assert set(run.wait()) == {1}, run.output
    assert "step 8: validation loss nan, and all guard.rollbacks=0 are used up" in one_sentence(run)
    found = json.loads((config.run_dir / "diagnosis.json").read_text())
    assert sum(weight["not_finite"] for weight in found["weights"].values()) == 1
    assert saved_steps(config)
    assert saved_steps(config)
    assert (config.run_dir / "diagnosis.json").exists()


# --------------------------------------------------------------------------------------------------------- people and clocks

def test_two_runs_of_one_folder_are_one_too_many(nursery, base, whole):
    config = replace(base, run="twice")
    first = nursery.start(config)
    first.wait_for_step(1)
    first.signal(signal.SIGSTOP)    # or it may be done before the second one looks
    second = nursery.start(config)
    code = second.wait()
    first.signal(signal.SIGCONT)
    assert code == [2], second.output
    assert f"process {first.pids[0]} on host" in one_sentence(second)
    assert first.wait() == [0], first.output
    assert record(config) == record(whole)


def test_a_clock_that_goes_backwards_changes_nothing(nursery, base, whole):
    config = replace(base, run="clock")
    finish(nursery, config, "checkpoint.every=4", faults=["clock:5:1e6"])
    assert record(config) == record(whole)
    assert all(row["step_s"] > 0 for row in rows(config))
