"""The watchdog: ranks that are stopped, stuck or failed are named; a job that was merely suspended goes on.

A rank that is killed: tests/test_faults.py; one that is stopped under torchrun, which restarts the job: tests/soak.py."""

import json
import re
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from runtime import watchdog
from runtime.watchdog import Watchdog
from tests import faults
from tests.conftest import tiny_config

STOP = f"signal_in_step:5:{{}}:{signal.SIGSTOP:d}"
JOBS = {        # name -> what happens in step 5 of two ranks, of which rank 0 holds the store
    "stop": [STOP.format(1)], "stuck": ["hang_in_data:5:1"], "fail": ["fail_in_data:5:1"],
    "fail_unseen": ["fail_in_data:5:1", "hang_in_data:5:0"], "stop_keeper": [STOP.format(0)], "suspend": ["slow_steps:0.1"]}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, data_dir):
    """Two ranks of train.py for each, all at once, since most of their time is spent waiting: name -> exit codes, run."""
    tiny = tiny_config(data_dir, tmp_path_factory.mktemp("jobs") / "out")
    timeouts = dict.fromkeys(JOBS, 2) | {"suspend": 4, "fail": 20}      # seconds; a collective that fails is explained first
    runs = {name: faults.Run(replace(tiny, run=name, steps=12), f"parallel.timeout={timeouts[name]}", "data.micro_batch=2",
                               ranks=2, faults=what) for name, what in JOBS.items()}
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
    return {name: ([process.exitcode for process in run.processes], run) for name, run in runs.items()}


@pytest.mark.parametrize("name, codes, told", [
    ("stop", [1, -signal.SIGKILL], "rank 0: no progress for 2 s at step 5, .*; rank 1 .*no heartbeat for 3 s: dead or stopped"),
    ("stuck", [1, 1], "rank 0: no progress for 2 s at step 5, forward.*; rank 1 .*is behind the others, at step 5, read"),
    ("fail", [1, 1], "train.py: rank 1 .*ended first, at step 5, reading a micro-batch .failed: KeyError: 'a damaged shard'"),
    ("fail_unseen", [1, 1], "rank 0: no progress for 2 s at step 5, .*; rank 1 .*ended first, .* KeyError: 'a damaged shard'"),
    ("stop_keeper", [-signal.SIGKILL, 1], "rank 1: no progress .*; the store on host 127.0.0.1 does not answer"),
    ("suspend", [0, 0], "done. validation loss")])
def test_the_rank_to_blame_is_named_with_exit_code_1_and_a_job_suspended_as_a_whole_goes_on(jobs, name, codes, told):
    have, run = jobs[name]
    assert have == codes and re.search(told, run.output), run.output
    assert f"pid {run.pids[1]})" in run.output or name in ("stop_keeper", "suspend")
    assert (run.config.run_dir / "stacks").exists() is (name not in ("fail", "suspend"))


def test_stacks_and_the_last_collectives_are_written(jobs):
    run = jobs["stuck"][1]
    for rank, where in enumerate(("train.py", "sleep_for_ever")):
        assert where in (run.config.run_dir / f"stacks/rank_{rank}.txt").read_text() and where in run.output, "on stderr too"
    entries = json.loads((run.config.run_dir / "flight_recorder/rank_0_gloo.json").read_text())["entries"]
    assert len(entries) >= 5 and any("reduce" in entry["profiling_name"] for entry in entries)


@pytest.mark.parametrize("is_run", [True, False])
def test_one_process_a_place_may_last_as_long_as_it_asks_for_and_a_moving_loop_for_ever(tmp_path, monkeypatch, capfd, is_run):
    """In this process, with the exit replaced. A folder that is no run yet is left alone."""
    ended = []
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.append(code) or watch._closed.set())
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, exit: None)
    monkeypatch.setattr(watchdog, "BEAT", 0.02)
    if is_run:
        (tmp_path / "config.json").touch()
    with Watchdog(SimpleNamespace(rank=0, size=1, device=torch.device("cpu")), tmp_path, 0.2, 0.6) as watch:
        assert watch.explain(RuntimeError("out of memory")) is None, "an error of its own"
        if is_run:
            watch.first_step_done()
            watch.at("validating", 3, patience=10**6)
            time.sleep(0.6)
            for step in range(40):
                watch.at("forward", step)
                time.sleep(0.02)
            assert not ended and not (tmp_path / "stacks").exists()
        watch._thread.join(20)
    where = "0.2 s at step 39, forward" if is_run else "0.6 s at start"     # the first step has more patience
    assert ended == [1] and f"no progress for {where}\n" in capfd.readouterr().err
    assert (tmp_path / "stacks/rank_0.txt").exists() if is_run else not list(tmp_path.iterdir())
