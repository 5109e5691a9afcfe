"""The watchdog: ranks that are stopped, killed, stuck or failed are named; a job that was merely suspended goes on."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from runtime import watchdog
from runtime.watchdog import Watchdog
from tests.conftest import ROOT, write_config

FORKS = multiprocessing.get_context("forkserver")      # imports torch once, not in each of fifteen ranks
FORKS.set_forkserver_preload(["tests.conftest"])



def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("a damaged shard")


def where_it_is_stuck():
    time.sleep(600)


def pause():
    for _ in range(40):
        time.sleep(0.05)


# name -> ranks, the victim (None: all), what happens to it in step 30
JOBS = {"stop": (2, 1, stop), "kill": (3, 1, kill), "stuck": (2, 1, where_it_is_stuck), "fail": (2, 1, fail),
        "fail_unseen": (2, 1, fail), "stop_keeper": (2, 0, stop), "suspend": (2, None, pause)}


def rank_of_job(name: str, folder: Path, env: dict[str, str]) -> None:
    """A training loop in miniature, as a process of its own."""
    os.environ.update(env)
    _, victim, fault = JOBS[name]
    world = SimpleNamespace(rank=int(env["RANK"]), size=int(env["WORLD_SIZE"]), device=torch.device("cpu"))
    output = os.open(folder / f"{world.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    dist.init_process_group("gloo")
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run/config.json").touch()
    with Watchdog(world, folder / "run", timeout=4 if name == "suspend" else 2, start_timeout=60) as watch:
        try:
            for step in range(80):
                watch.at("forward", step)
                time.sleep(0.05)
                if step == 30 and victim in (world.rank, None):
                    (folder / f"ready_{world.rank}").touch()
                    fault()
                watch.at("reduce", step)
                if step == 30 and name == "fail_unseen":
                    time.sleep(600)     # as in a read from a GPU that waits for NCCL
                dist.all_reduce(torch.ones(4))
                watch.first_step_done()
        except RuntimeError as error:
            print(f"explained: {watch.explain(error)}", flush=True)
            os._exit(1)
    os._exit(0)


@contextmanager
def started(name: str, folder: Path):
    """The processes of a job, one a rank. This process holds the store, as torchrun would; rank 0 does in "stop_keeper"."""
    folder.mkdir()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(JOBS[name][0]), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
           "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_FR_BUFFER_SIZE": "100"}
    if name == "stop_keeper":
        del store, env["TORCHELASTIC_USE_AGENT_STORE"]
    job = [FORKS.Process(target=rank_of_job, args=(name, folder, {**env, "RANK": str(rank)})) for rank in range(JOBS[name][0])]
    try:
        for process in job:
            process.start()
        yield job
    finally:
        for process in job:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs at once, since most of their time is spent waiting: name -> folder, pids, (exit code, output) by rank."""
    root, ended = tmp_path_factory.mktemp("jobs"), {}
    with ExitStack() as running:
        processes = {name: running.enter_context(started(name, root / name)) for name in JOBS}
        while not all((root / f"suspend/ready_{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        time.sleep(1)       # into the pause, of which the watchdog knows by then
        for sign, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
            for process in processes["suspend"]:
                os.kill(process.pid, sign)
            time.sleep(seconds)
        for name, job in processes.items():
            for rank, process in enumerate(job):
                process.join(0 if name.startswith("stop") and rank == JOBS[name][1] else 240)
            ended[name] = SimpleNamespace(folder=root / name / "run", pids=[process.pid for process in job], ranks=[
                (process.exitcode, (root / name / f"{rank}.log").read_text()) for rank, process in enumerate(job)])
    return ended


@pytest.mark.parametrize("name, ranks, told", [
    ("stop", [0], r"watchdog: rank 0: no progress for 2 s at step 30, reduce; rank 1 of 2 \(host \S+, pid {pid}\) has sent no "
                  r"heartbeat for 3 s: dead or stopped, last seen at step \d+, (forward|reduce)\n"),
    ("kill", [0, 2], r"^explained: rank 1 of 3 \(host \S+, pid {pid}\) has sent no heartbeat for 3 s: dead or stopped, last seen "
                     r"at step \d+, (forward|reduce); a collective failed without it \(RuntimeError: "),
    ("stuck", [0, 1], r"rank 1 of 2 \(host \S+, pid {pid}\) is behind the others, at step 30, forward"),
    ("fail", [0], r"^explained: rank 1 of 2 \(host \S+, pid {pid}\) ended first, at step 30, forward \(failed: ValueError"),
    ("fail_unseen", [0], r"watchdog: rank 0: no progress for 2 s at step 30, reduce; rank 1 of 2 \(host \S+, pid {pid}\) ended "
                         r"first, at step 30, forward \(failed: ValueError: a damaged shard"),
    ("stop_keeper", [1], r"watchdog: rank 1: .*; the store on host localhost does not answer: .* rank 0 .* is gone or stopped"),
])
def test_the_rank_to_blame_is_named_by_the_others_with_exit_code_1(jobs, name, ranks, told):
    for code, out in [jobs[name].ranks[rank] for rank in ranks]:
        assert code == 1
        assert re.search(told.format(pid=jobs[name].pids[JOBS[name][1]]), out), out


def test_stacks_and_the_last_collectives_are_written(jobs):
    folder = jobs["stuck"].folder
    assert "where_it_is_stuck" in (folder / "stacks/rank_1.txt").read_text()
    assert "all_reduce" in (folder / "stacks/rank_0.txt").read_text()
    assert "where_it_is_stuck" in jobs["stuck"].ranks[1][1], "on stderr too"
    entries = json.loads((folder / "flight_recorder/rank_0_gloo.json").read_text())["entries"]
    assert len(entries) >= 5 and all("reduce" in entry["profiling_name"] for entry in entries)


def test_a_job_that_was_suspended_as_a_whole_goes_on_and_leaves_nothing(jobs):
    assert jobs["suspend"].ranks == [(0, ""), (0, "")]
    assert [path.name for path in jobs["suspend"].folder.iterdir()] == ["config.json"]


class TestOneProcess:
    """In this process, with the exit replaced."""

    @pytest.fixture
    def watched(self, tmp_path, monkeypatch):
        ended = []
        monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.append(code) or watch._closed.set())
        monkeypatch.setattr(watchdog, "BEAT", 0.02)
        (tmp_path / "config.json").touch()
        with Watchdog(SimpleNamespace(rank=0, size=1, device=torch.device("cpu")), tmp_path, 0.2, 0.6) as watch:
            yield SimpleNamespace(watch=watch, ended=ended, run_dir=tmp_path)

    def wait(self, watched, seconds=20):
        end = time.monotonic() + seconds
        while not watched.ended and time.monotonic() < end:
            time.sleep(0.01)
        return watched.ended

    def test_a_place_may_last_as_long_as_it_asks_for_and_a_moving_loop_for_ever(self, watched, capfd):
        watched.watch.first_step_done()
        watched.watch.at("validating", 3, patience=10**6)
        time.sleep(0.6)
        for step in range(40):
            watched.watch.at("forward", step)
            time.sleep(0.02)
        assert not watched.ended and not (watched.run_dir / "stacks").exists()
        watched.watch.at("forward and backward", 12)
        assert self.wait(watched) == [1]
        assert "watchdog: rank 0: no progress for 0.2 s at step 12, forward and backward\n" in capfd.readouterr().err

    def test_the_first_step_has_more_patience(self, watched, capfd):
        assert self.wait(watched) == [1] and "no progress for 0.6 s at start" in capfd.readouterr().err

    def test_a_folder_that_is_no_run_yet_is_left_alone(self, watched):
        (watched.run_dir / "config.json").unlink()
        assert self.wait(watched) == [1] and not list(watched.run_dir.iterdir())

    def test_a_finished_run_is_not_watched_and_an_error_of_its_own_not_explained(self, watched):
        assert watched.watch.explain(RuntimeError("out of memory")) is None
        watched.watch.__exit__(None, None, None)
        time.sleep(1)
        assert not watched.ended


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
                     r"sent no heartbeat for 3 s: dead or stopped, last seen at step \d+, ", out), out
    assert "train.py" in (config.run_dir / "stacks/rank_0.txt").read_text()
    assert json.loads((config.run_dir / "flight_recorder/rank_0_gloo.json").read_text())["entries"]
