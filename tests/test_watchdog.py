"""The watchdog: ranks that are stopped, stuck or failed are named; a job that was merely suspended goes on.

A rank that is killed: tests/test_faults.py; one that is stopped under torchrun, which restarts the job: tests/soak.py."""

import json
import re
import signal
import sys
import time
from dataclasses import replace

import pytest

from runtime import watchdog
from runtime.watchdog import Watchdog
from tests import faults
from tests.conftest import ALONE, tiny_config

STOP, KILLED = f"signal_in_step:5:{{}}:{signal.SIGSTOP:d}", -signal.SIGKILL
JOBS = {        # name -> what happens in step 5 of two ranks, of which rank 0 holds the store; timeout, exit codes, message
    "stop": ([STOP.format(1)], 2, [1, KILLED], "rank 0: no progress .*; rank 1 .*no heartbeat for 3 s: dead or stopped"),
    "stuck": (["hang_in_data:5:1"], 2, [1, 1], "for 2 s at step 5, forward.*; rank 1 .*is behind the others, at step 5, read"),
    "fail": (["fail_in_data:5:1"], 20, [1, 1],      # a collective that fails is explained first
             "train.py: rank 1 .*ended first, at step 5, reading a micro-batch .failed: KeyError: 'a damaged shard'"),
    "fail_unseen": (["fail_in_data:5:1", "hang_in_data:5:0"], 2, [1, 1], "rank 0: .*; rank 1 .*ended first, .*damaged"),
    "stop_keeper": ([STOP.format(0)], 2, [KILLED, 1], "rank 1: no progress .*; the store on host 127.0.0.1 does not answer"),
    "suspend": (["slow_steps:0.1"], 4, [0, 0], "done. validation loss")}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, data_dir):
    """Two ranks of train.py for each, all at once, since most of their time is spent waiting."""
    tiny = tiny_config(data_dir, tmp_path_factory.mktemp("jobs") / "out")
    runs = {name: faults.Run(replace(tiny, run=name, steps=12), f"parallel.timeout={timeout}", "data.micro_batch=2", ranks=2,
                             faults=what) for name, (what, timeout, _, _) in JOBS.items()}
    try:
        runs["suspend"].wait_until(2)
        for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
            runs["suspend"].signal(number)
            time.sleep(seconds)
        faults.wait_for(lambda: all(sum(process.exitcode is None for process in run.processes) == name.startswith("stop")
                                    for name, run in runs.items()))
    finally:
        for run in runs.values():
            run.kill()
    return runs


@pytest.mark.parametrize("name", JOBS)
def test_the_rank_to_blame_is_named_with_exit_code_1_and_a_job_suspended_as_a_whole_goes_on(jobs, name):
    run, (_, _, codes, told) = jobs[name], JOBS[name]
    assert run.wait() == codes and re.search(told, run.output), run.output
    assert f"pid {run.pids[1]})" in run.output or name in ("stop_keeper", "suspend")
    assert (run.config.run_dir / "stacks").exists() is (name not in ("fail", "suspend"))


def test_stacks_and_the_last_collectives_are_written(jobs):
    run = jobs["stuck"]
    for rank, where in enumerate(("train.py", "sleep_for_ever")):
        assert where in (run.config.run_dir / f"stacks/rank_{rank}.txt").read_text() and where in run.output, "on stderr too"
    entries = json.loads((run.config.run_dir / "flight_recorder/rank_0_gloo.json").read_text())["entries"]
    assert len(entries) >= 5 and any("reduce" in entry["profiling_name"] for entry in entries)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")     # of the exit, in its thread
def test_one_process_a_place_may_last_as_long_as_it_asks_for_and_a_moving_loop_for_ever(tmp_path, monkeypatch, capfd):
    """In this process, with the exit replaced. A folder that is no run yet is left alone."""
    ended = []
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.append(code) or sys.exit())
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, exit: None)
    monkeypatch.setattr(watchdog, "BEAT", 0.02)
    with Watchdog(ALONE, tmp_path, 0.2, 0.6):
        faults.wait_for(lambda: ended, 20)
    assert ended == [1] and not list(tmp_path.iterdir())
    assert "no progress for 0.6 s at start\n" in capfd.readouterr().err, "the first step has more patience"
    (tmp_path / "config.json").touch()
    with Watchdog(ALONE, tmp_path, 0.2, 0.6) as watch:
        assert watch.explain(RuntimeError("out of memory")) is None, "an error of its own"
        watch.first_step_done()
        watch.at("validating", 3, patience=10**6)
        time.sleep(0.6)
        for step in range(40):
            watch.at("forward", step)
            time.sleep(0.02)
        assert ended == [1] and not (tmp_path / "stacks").exists()
        faults.wait_for(lambda: len(ended) > 1, 20)
    assert ended == [1, 1] and "no progress for 0.2 s at step 39, forward\n" in capfd.readouterr().err
    assert (tmp_path / "stacks/rank_0.txt").exists()
