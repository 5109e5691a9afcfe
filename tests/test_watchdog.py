"""The watchdog: ranks that are stopped, killed, behind or in error, a store that is gone, a job that was merely suspended."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from runtime import watchdog
from runtime.watchdog import Watchdog
from tests import watched_loop
from tests.conftest import ROOT, write_config

# --------------------------------------------------------------------------------------------------------------- harness

FORKS = multiprocessing.get_context("forkserver")      # torch is imported once, not by each of eighteen ranks
FORKS.set_forkserver_preload(["tests.watched_loop"])


@contextmanager
def started(folder: Path, fault: str, victim: int = 1, ranks: int = 2, steps: int = 60, hosted: bool = False):
    """Processes of one job, one a rank; hosted: rank 0 keeps the store, else this process does, as torchrun would."""
    folder.mkdir()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
           "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_FR_BUFFER_SIZE": "100"}
    if hosted:
        del store
        env.pop("TORCHELASTIC_USE_AGENT_STORE")
    processes = []
    try:
        for rank in range(ranks):
            processes.append(FORKS.Process(target=watched_loop.begin, args=(
                folder.with_name(f"{folder.name}_{rank}.log"), {**env, "RANK": str(rank)}, folder, fault, victim, steps)))
            processes[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def end_of(process, folder: Path, rank: int) -> tuple[int | None, str]:
    """Exit code, None where it lives on, and output."""
    process.join(240)
    return process.exitcode, folder.with_name(f"{folder.name}_{rank}.log").read_text()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs at once, since most of a job's time is spent waiting: name -> (folder, exit codes and outputs by rank)."""
    root, seen = tmp_path_factory.mktemp("jobs"), {}
    kinds = {"stop": {}, "kill": {}, "stuck": {}, "error": {}, "hosted": {"hosted": True, "victim": 0},
             "deaf_kill": {}, "deaf_error": {}, "deaf_leave": {}}
    running = {name: started(root / name, "stop" if name == "hosted" else name, **how) for name, how in kinds.items()}
    processes = {name: job.__enter__() for name, job in running.items()}
    try:
        for name, job in processes.items():
            seen[name] = SimpleNamespace(folder=root / name, pids=[process.pid for process in job], ended={
                rank: end_of(process, root / name, rank) for rank, process in enumerate(job)
                if not (name in ("stop", "hosted") and rank == kinds[name].get("victim", 1))})
    finally:
        for job in running.values():
            job.__exit__(None, None, None)
    return seen


# ----------------------------------------------------------------------------------------------------------------- tests

def test_a_stopped_rank_is_named_by_the_others(jobs):
    code, out = jobs["stop"].ended[0]
    assert code == 1
    pid = jobs["stop"].pids[1]
    assert re.search(rf"watchdog: rank 0: no progress for 2 s at step 30, reduce; rank 1 of 2 \(host \S+, pid {pid}\) has given "
                     r"no sign for 3 s; last seen at step \d+, (forward|reduce); stacks in ", out), out
    assert not (jobs["stop"].folder / "stacks/rank_1.txt").exists()


def test_stacks_and_the_flight_recorder_are_left_behind(jobs):
    folder = jobs["stuck"].folder
    assert "where_it_is_stuck" in (folder / "stacks/rank_1.txt").read_text()
    first = (folder / "stacks/rank_0.txt").read_text()
    assert "all_reduce" in first and '"phase": "forward"' in first, "its own stack, and where the others were"
    entries = json.loads((folder / "flight_recorder/rank_0_gloo.json").read_text())["entries"]
    assert len(entries) >= 5 and all("reduce" in entry["profiling_name"] for entry in entries)
    assert "where_it_is_stuck" in jobs["stuck"].ended[1][1], "on stderr too"


def test_a_rank_that_lives_but_is_behind_is_named_by_all(jobs):
    for code, out in jobs["stuck"].ended.values():
        assert code == 1
        assert re.search(r"rank 1 of 2 \(.*\) is behind the others, at step 30, forward;", out), out


def test_a_killed_rank_is_named_at_once(jobs):
    code, out = jobs["kill"].ended[0]
    assert code == 1
    assert re.search(rf"explained: rank 1 of 2 \(host \S+, pid {jobs['kill'].pids[1]}\) is gone; last seen at step \d+, "
                     r"(forward|reduce); a collective failed without it \(RuntimeError\)", out), out
    assert "watchdog" not in out, "nothing stood still"


def test_a_rank_that_failed_by_itself_is_named_with_its_error(jobs):
    code, out = jobs["error"].ended[0]
    assert code == 1
    assert re.search(r"rank 1 of 2 \(.*\) ended first, at step 30, forward \(failed: ValueError: a damaged shard\)", out), out


@pytest.mark.parametrize("fault, told", [
    ("deaf_kill", r"pid {pid}\) is gone; last seen at step \d+, \w+; stacks in "),
    ("deaf_error", r"pid {pid}\) ended first, at step 30, forward \(failed: ValueError: a damaged shard\); stacks in "),
])
def test_ranks_that_no_collective_wakes_learn_of_one_that_is_lost(jobs, fault, told):
    """With NCCL they would wait in a device's read for a rank that never comes, until torchrun kills them."""
    code, out = jobs[fault].ended[0]
    assert code == 1
    assert re.search(r"watchdog: rank 0: no progress for \d+ s at step 30, reduce; rank 1 of 2 \(host \S+, "
                     + told.format(pid=jobs[fault].pids[1]), out), out
    assert json.loads((jobs[fault].folder / "flight_recorder/rank_0_gloo.json").read_text())["entries"]


def test_a_rank_that_left_in_order_is_not_lost(jobs):
    assert jobs["deaf_leave"].ended == {0: (0, ""), 1: (0, "")}


def test_a_stopped_keeper_of_the_store_is_named(jobs):
    """Without torchrun, or with a store for each attempt, rank 0 keeps it."""
    code, out = jobs["hosted"].ended[1]
    assert code == 1
    assert "; rank 0 of 2 (host localhost), which keeps the others' signs, does not answer: gone or stopped" in out


def test_a_job_that_was_suspended_as_a_whole_goes_on_and_leaves_nothing(tmp_path):
    with started(tmp_path / "job", "none", steps=80) as job:
        while not (tmp_path / "job/ready_1").exists():
            assert job[1].is_alive()
            time.sleep(0.1)
        time.sleep(1)
        for process in job:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(5)
        for process in job:
            os.kill(process.pid, signal.SIGCONT)
        ends = [end_of(process, tmp_path / "job", rank) for rank, process in enumerate(job)]
    assert ends == [(0, ""), (0, "")]
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["config.json", "ready_0", "ready_1"]


class TestOneProcess:
    """With the exit replaced, in this very process."""

    @pytest.fixture
    def watched(self, tmp_path, monkeypatch):
        ended = []

        def end(code):
            ended.append(code)
            watch._closed.set()

        monkeypatch.setattr(watchdog.os, "_exit", end)
        monkeypatch.setattr(watchdog, "BEAT", 0.02)
        (tmp_path / "config.json").touch()
        with Watchdog(SimpleNamespace(rank=0, size=1, device=torch.device("cpu")), tmp_path, 0.2, 0.6) as watch:
            yield SimpleNamespace(watch=watch, ended=ended, run_dir=tmp_path)

    def wait(self, watched, seconds):
        end = time.monotonic() + seconds
        while not watched.ended and time.monotonic() < end:
            time.sleep(0.01)
        return watched.ended

    def test_a_stand_still_ends_it_with_stacks(self, watched, capfd):
        watched.watch.first_step_done()
        watched.watch.at("forward and backward", 12)
        assert self.wait(watched, 20) == [1]
        told = capfd.readouterr().err
        assert f"watchdog: rank 0: no progress for 0.2 s at step 12, forward and backward; stacks in {watched.run_dir}" in told
        assert "test_a_stand_still_ends_it_with_stacks" in told
        assert "test_a_stand_still_ends_it_with_stacks" in (watched.run_dir / "stacks/rank_0.txt").read_text()

    def test_the_first_step_has_more_patience(self, watched):
        beats = watched.watch._beat
        self.wait(watched, 20)
        assert watched.ended and watched.watch._beat - beats >= 0.6 / 0.02 - 1

    def test_so_has_a_phase_that_asks_for_it(self, watched):
        watched.watch.first_step_done()
        watched.watch.at("validating", 3, patience=10**6)
        time.sleep(0.6)
        watched.watch.at("forward", 4, patience=None)
        assert not watched.ended
        assert self.wait(watched, 20) == [1]

    def test_progress_and_the_end_of_the_run_are_no_stand_still(self, watched):
        watched.watch.first_step_done()
        for step in range(40):
            watched.watch.at("forward", step)
            time.sleep(0.02)
        watched.watch.close()
        watched.watch.close()
        time.sleep(0.5)
        assert not watched.ended and not (watched.run_dir / "stacks").exists()

    def test_a_folder_that_is_no_run_yet_is_left_alone(self, watched, capfd):
        (watched.run_dir / "config.json").unlink()
        assert self.wait(watched, 20) == [1]
        assert not list(watched.run_dir.iterdir()) and "no progress" in capfd.readouterr().err

    def test_an_error_of_its_own_has_no_other_explanation(self, watched):
        assert watched.watch.explain(RuntimeError("out of memory")) is None


# ----------------------------------------------------------------------------------------------------- the real train.py

def test_train_py_names_a_stopped_rank(tiny, tmp_path):
    config = replace(tiny, run="stopped", steps=10_000, checkpoint=replace(tiny.checkpoint, every=5),
                     data=replace(tiny.data, max_epochs=1000), parallel=replace(tiny.parallel, timeout=3))
    file = write_config(config, tmp_path / "stopped.py")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
           "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job = [subprocess.Popen([sys.executable, "train.py", str(file)], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    try:
        while not (config.run_dir / "checkpoints/step_00000010").exists():
            assert job[0].poll() is None, job[0].stdout.read()
            time.sleep(0.05)
        job[1].send_signal(signal.SIGSTOP)
        out = job[0].communicate(timeout=240)[0]
    finally:
        for process in job:
            process.kill()
            process.wait()
    assert job[0].returncode == 1
    assert re.search(rf"watchdog: rank 0: no progress for 3 s at step \d+, .*; rank 1 of 2 \(host \S+, pid {job[1].pid}\) has "
                     r"given no sign for 3 s; last seen at step \d+, ", out), out
    assert "train.py" in (config.run_dir / "stacks/rank_0.txt").read_text()
    assert json.loads((config.run_dir / "flight_recorder/rank_0_gloo.json").read_text())["entries"]
