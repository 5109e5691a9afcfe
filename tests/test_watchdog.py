"""The watchdog: ranks that are stopped, stuck or failed are named; a job that was merely suspended goes on.

A rank that is killed, in train.py itself: tests/test_faults.py."""

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from runtime import watchdog
from runtime.watchdog import Watchdog
from tests.faults import FORKS, free_port


def where_it_is_stuck():
    time.sleep(600)


STOP, FAIL = lambda: signal.raise_signal(signal.SIGSTOP), lambda: {}["a damaged shard"]     # noqa: E731
# name -> the victim (None: both ranks), what happens to it in step 10
JOBS = {"stop": (1, STOP), "stuck": (1, where_it_is_stuck), "fail": (1, FAIL), "fail_unseen": (1, FAIL), "stop_keeper": (0, STOP),
        "suspend": (None, lambda: [time.sleep(0.05) for _ in range(40)])}


def rank_of_job(name: str, folder: Path, env: dict[str, str]) -> None:
    """A training loop in miniature, as a process of its own."""
    os.environ.update(env)
    world = SimpleNamespace(rank=int(env["RANK"]), size=2, device=torch.device("cpu"))
    output = os.open(folder / f"{world.rank}.log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    dist.init_process_group("gloo")
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run/config.json").touch()
    with Watchdog(world, folder / "run", timeout=4 if name == "suspend" else 1.5, start_timeout=60) as watch:
        try:
            for step in range(40):
                watch.at("forward", step)
                time.sleep(0.05)
                if step == 10 and JOBS[name][0] in (world.rank, None):
                    (folder / f"ready_{world.rank}").touch()
                    JOBS[name][1]()
                watch.at("reduce", step)
                if step == 10 and name == "fail_unseen":
                    time.sleep(600)     # as in a read from a GPU that waits for NCCL
                dist.all_reduce(torch.ones(4))
                watch.first_step_done()
        except RuntimeError as error:
            print(f"explained: {watch.explain(error)}", flush=True)
            os._exit(1)
    os._exit(0)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs at once, since most of their time is spent waiting: name -> folder, pids, (exit code, output) by rank.

    This process holds the stores, as torchrun would; rank 0 does in "stop_keeper"."""
    root, ended, stores, processes = tmp_path_factory.mktemp("jobs"), {}, [], {}
    end = time.monotonic() + 90     # a watchdog that does nothing fails these tests rather than keeping them waiting
    try:
        for name in JOBS:
            (root / name).mkdir()
            env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "TORCH_FR_BUFFER_SIZE": "100"}
            if name != "stop_keeper":
                stores.append(dist.TCPStore("localhost", int(env["MASTER_PORT"]), is_master=True, wait_for_workers=False))
                env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            processes[name] = [FORKS.Process(target=rank_of_job, args=(name, root / name, {**env, "RANK": str(rank)}))
                               for rank in range(2)]
            for process in processes[name]:
                process.start()
        while not all((root / f"suspend/ready_{rank}").exists() for rank in range(2)) and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(1)       # into the pause, of which the watchdog knows by then
        for sign, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
            for process in processes["suspend"]:
                os.kill(process.pid, sign)
            time.sleep(seconds)
        for name, job in processes.items():
            for rank, process in enumerate(job):
                process.join(0 if name.startswith("stop") and rank == JOBS[name][0] else max(0, end - time.monotonic()))
            ended[name] = SimpleNamespace(folder=root / name / "run", pids=[process.pid for process in job], ranks=[
                (process.exitcode, (root / name / f"{rank}.log").read_text()) for rank, process in enumerate(job)])
    finally:
        for process in sum(processes.values(), []):
            process.kill()
    return ended


@pytest.mark.parametrize("name, ranks, told", [
    ("stop", [0], "no progress for 1.5 s at step 10, reduce; rank 1 .*no heartbeat for 3 s: dead or stopped, last seen at step"),
    ("stuck", [0, 1], "rank 1 .* is behind the others, at step 10, forward"),
    ("fail", [0], "^explained: rank 1 .* ended first, at step 10, forward .failed: KeyError"),
    ("fail_unseen", [0], "no progress for 1.5 s at step 10, reduce; rank 1 .* ended first, .* KeyError: 'a damaged shard'"),
    ("stop_keeper", [1], "the store on host localhost does not answer")])
def test_the_rank_to_blame_is_named_by_the_others_with_exit_code_1(jobs, name, ranks, told):
    for code, out in [jobs[name].ranks[rank] for rank in ranks]:
        assert code == 1
        assert re.search(told, out), out
        assert name == "stop_keeper" or f"pid {jobs[name].pids[1]})" in out


def test_stacks_and_the_last_collectives_are_written_and_a_job_that_was_suspended_as_a_whole_goes_on(jobs):
    folder = jobs["stuck"].folder
    assert "where_it_is_stuck" in (folder / "stacks/rank_1.txt").read_text()
    assert "all_reduce" in (folder / "stacks/rank_0.txt").read_text()
    assert "where_it_is_stuck" in jobs["stuck"].ranks[1][1], "on stderr too"
    entries = json.loads((folder / "flight_recorder/rank_0_gloo.json").read_text())["entries"]
    assert len(entries) >= 5 and all("reduce" in entry["profiling_name"] for entry in entries)
    assert jobs["suspend"].ranks == [(0, ""), (0, "")]
    assert [path.name for path in jobs["suspend"].folder.iterdir()] == ["config.json"], "that one leaves nothing"


@pytest.mark.parametrize("is_run", [True, False])
def test_one_process_a_place_may_last_as_long_as_it_asks_for_and_a_moving_loop_for_ever(tmp_path, monkeypatch, capfd, is_run):
    """In this process, with the exit replaced. A folder that is no run yet is left alone."""
    ended = []
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.append(code) or watch._closed.set())
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
