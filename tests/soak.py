# ruff: noqa: F401, F811 - fixtures of other files
"""The long tier of fault injection: kills at any moment, restarts under torchrun, every recipe,
compiled runs, hangs.

`make soak` takes five to fifteen minutes on two cores. Everything is compared, bit for bit, with a
run that was left alone. Flipped bits, full disks, SIGTERM, two runs of one folder, other numbers of
ranks: tests/runtime/test_faults.py, which is quick."""

import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lib.machine import ROOT
from runtime.config import Config
from tests.conftest import changed, process
from tests.helpers import faults
from tests.helpers.faults import leftovers, record, rows, saved_steps
from tests.prepare import test_pipeline as test_prepare
from tests.prepare.test_pipeline import big
from tests.runtime.test_faults import EVERY, base, finish


def is_as_calm(config: Config, ranks: int) -> None:
    """What a run ends in, once it is finished, is what one that was left alone ends in."""
    assert record(finish(config, ranks=ranks)) == record(
        finish(replace(config, run=f"{config.run}_calm"), ranks=ranks)
    )


@pytest.mark.parametrize(
    "recipe, ranks, kills, changes",
    [
        ("tensorwise", 1, 10, ""),
        ("tensorwise", 2, 10, ""),
        ("tensorwise", 4, 4, "parallel.replicate=2 parallel.shard=2"),
        ("off", 1, 3, "parallel.recompute=true"),
        ("tensorwise_gw_hp", 1, 3, ""),
        ("rowwise", 1, 3, ""),
        ("amax", 1, 3, ""),
        ("rowwise_with_gw_hp", 1, 3, "parallel.recompute=true"),
        ("cscale", 1, 3, ""),
        ("mxfp8", 1, 3, ""),
        ("nvfp4", 1, 3, ""),
        ("off", 2, 3, ""),
        ("tensorwise_gw_hp", 2, 3, "parallel.recompute=true"),
        ("rowwise", 2, 3, ""),
        ("tensorwise", 2, 3, "run=gathered fp8.all_gather=true"),
    ],
)
def test_kills_at_any_moment(base, recipe, ranks, kills, changes):
    """Every second one in the middle of a save, the others wherever the run is."""
    config = changed(
        base,
        f"run={recipe}{ranks} fp8.recipe={recipe} steps={180 if kills == 10 else 48} "
        f"data.tokens_per_step={128 * max(2, ranks)} {changes}",
    )
    rng = random.Random(kills + ranks)
    for killed in range(kills):
        before, saves, seen = saved_steps(config), rng.randrange(1, 4), set()
        run = faults.Run(config, ranks=ranks)
        end = time.monotonic() + rng.uniform(0, 1.0 * ranks)
        while run.is_running() and (len(seen) < saves if killed % 2 else time.monotonic() < end):
            seen.update(leftovers(config))
            time.sleep(0.001)
        assert run.is_running() or killed > kills / 2, (
            "where a run is done so soon, make the runs longer"
        )
        run.kill()
        assert not before or saved_steps(config)[-1] >= before[-1], "a checkpoint was lost"
        assert len(rows(config)) - (saved_steps(config) or [0])[-1] <= 2 * EVERY, (
            "the save under way and since"
        )
    is_as_calm(config, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_before_every_change_that_a_save_makes(base, ranks):
    """Opened, renamed, removed: as many as there are, so that a new stage of a save is not
    forgotten here. Older checkpoints are there from the first kill on, and their removal is part of
    it."""
    config, n, codes = replace(base, run=f"every_change{ranks}", steps=120), 0, {-signal.SIGKILL}
    assert (
        -signal.SIGKILL in faults.Run(config, faults=["signal_in_step:6:0:9"], ranks=ranks).wait()
    )
    while -signal.SIGKILL in codes:
        n, at = n + 1, max(saved_steps(config)[-1], 2 * EVERY) + EVERY
        run = faults.Run(config, faults=[f"kill_in_save:{at}:{n}"], ranks=ranks)
        codes, now = set(run.wait()), saved_steps(config)
        assert now[-1] in (at - EVERY, at) or codes == {0}, (n, now, run.output)
        assert len(now) >= 2, (n, now)
    assert codes == {0} and n > 20, run.output
    is_as_calm(config, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_run_resumes_bit_for_bit(base, ranks):
    config = changed(
        base,
        f"run=compiled{ranks} steps=8 model.n_layer=1 parallel.compile=true parallel.timeout=120",
    )
    run = faults.Run(config, ranks=ranks)
    run.wait_until(lambda: bool(saved_steps(config)), 600)
    run.kill()
    is_as_calm(config, ranks)


def test_kills_under_one_torchrun(base):
    """Each restart must come up: stock torchrun reads the addresses of dead ranks in two of
    five."""
    config = changed(base, "run=restarts steps=160 data.max_epochs=20 checkpoint.every=5")
    rng, run = random.Random(0), faults.Run(config, restarts=6)
    for kill in range(6):
        run.wait_until(
            lambda kill=kill: (
                run.output.count("resuming ") + run.output.count("starting at ") > kill
            )
        )
        run.wait_until(len(rows(config)) + rng.randrange(1, 12))
        os.kill(rng.choice(faults.children(run.processes[0].pid)), signal.SIGKILL)
        run.wait_until(lambda kill=kill: run.output.count("resuming ") > kill)
    assert run.wait(600) == [0], run.output
    is_as_calm(config, 2)


def test_a_rank_that_stands_still_ends_the_job_which_resumes(base):
    config = changed(base, "run=still parallel.timeout=10")
    run = faults.Run(config, faults=[f"signal_in_step:5:1:{signal.SIGSTOP:d}"], restarts=1)
    assert run.wait(300) == [0], run.output
    assert "rank 1" in run.output
    assert list((config.run_dir / "stacks").glob("rank_*.txt"))
    is_as_calm(config, 2)


def test_finished_jobs_exit_cleanly(base):
    for i in range(20):
        finish(replace(base, steps=2, run=f"clean{i}"), ranks=2)


def test_forty_kills_of_prepare_data(big, tmp_path: Path):
    test_prepare.storm(big, tmp_path, 40, 2)


def test_ray_makes_the_same_shards(big, tmp_path: Path):
    """All of the pieces: where one is left for the process that waits for Ray, that one fails."""
    pytest.importorskip("ray")
    test_prepare.finish(big.command(tmp_path, 2, "on=ray"), ELSEWHERE="1")
    assert test_prepare.content(tmp_path) == big.calm


@pytest.mark.parametrize(
    "row, settings",
    [
        ("125M, BF16", ["configs/gpt125m_bf16.py"]),
        ("producers write FP8 (bounded)", ["configs/gpt125m_fp8.py", "fp8.scaling=bounded"]),
    ],
)
def test_the_compilers_plan_of_an_h100_is_what_docs_speed_says(row, settings):
    """Matmuls, attention, other kernels, what is kept, in kB a token: bench/compiler_plan.py
    reaches into torch's private parts."""
    pytest.importorskip("triton")
    plan = process(
        "-m",
        "bench.compiler_plan",
        *settings,
        "data.micro_batch=64",
        "model.n_ctx=1024",
    )
    kinds = re.findall(r"  (?:\w+, )?([a-z]+).* ([\d.]+) kB per token", plan.stdout)
    columns = "matmul", "attention", "written called", "kept"
    found = [sum(float(kb) for kind, kb in kinds if kind in column.split()) for column in columns]
    page = (ROOT / "docs/speed.md").read_text()  # 125M's rows come first
    cells = re.search(rf"\| {re.escape(row)} \| (.*) \| \d+ \|", page)[1]
    rounded = [f"{int(value + 0.5):,}" for value in found]
    assert rounded == cells.split(" | "), plan.stdout + plan.stderr
