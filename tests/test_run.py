"""runtime/run.py around the steps: one writer per folder, unusable folders, foreign folders, requests to stop."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from runtime import run as room
from runtime.cli import UserError
from runtime.run import LOCK, is_finished, lock_folder
from runtime.tokenizer import keep_tokenizer, tokenizer_of
from tests.conftest import ROOT

HOLD = ("import os, sys, time\nfrom pathlib import Path\nfrom runtime.run import lock_folder\n"
        "held = lock_folder(Path(sys.argv[1]))\n{more}\nprint('held', os.getpid(), flush=True)\ntime.sleep(600)")


@pytest.fixture
def holder(tmp_path):
    """Starts a process that locks tmp_path/run; it dies with the test."""
    started = []

    def hold(more):
        process = subprocess.Popen([sys.executable, "-c", HOLD.format(more=more), str(tmp_path / "run")], cwd=ROOT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        started.append(process)
        assert process.stdout.readline().startswith("held")
        return process
    yield hold
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_second_run_is_told_who_has_the_folder_until_that_process_is_killed(tmp_path, holder, monkeypatch):
    """Not until its children end: a compile worker or data loader may outlive it."""
    first, run_dir = holder("child = os.fork()\nif child == 0:\n    time.sleep(600)"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(room, "LOCK_TIMEOUT_S", 0.2)
        with pytest.raises(UserError) as told:
            lock_folder(run_dir)
    assert f"{run_dir} is being written by process {first.pid} on host {socket.gethostname()!r}, started 2" in str(told.value)
    first.kill()        # a run that is about to end is waited for
    with lock_folder(run_dir):
        assert (run_dir / LOCK).read_text().startswith(f"process {os.getpid()} on host")


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def lockf(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock_folder(tmp_path / "run").close()
    assert "this file system has no locks (No locks available), so nothing keeps a second run from" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_left_alone(tiny):
    assert not is_finished(tiny)
    lock_folder(tiny.run_dir).close()
    (tiny.run_dir / ".config.json.tmp").write_text("{")     # as a kill before config.json leaves it
    assert not is_finished(tiny)
    (tiny.run_dir / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no run"):
        is_finished(tiny)


def test_a_run_keeps_a_copy_of_a_tokenizer_that_is_a_folder(tmp_path):
    theirs, run_dir = tmp_path / "llama/tokenizer", tmp_path / "run"
    theirs.mkdir(parents=True)
    run_dir.mkdir()
    (theirs / "tokenizer.json").write_text("rules")
    (theirs / "weights.safetensors").write_text("not the tokenizer's")
    (run_dir / ".tokenizer.tmp").mkdir()        # a kill in the middle of it
    for name, read in (("gpt2", "gpt2"), (str(theirs), str(run_dir / "tokenizer"))):
        assert tokenizer_of(run_dir, name) == name, "none yet"
        keep_tokenizer(run_dir, name)
        assert tokenizer_of(run_dir, name) == read
    (theirs / "tokenizer.json").write_text("other rules")
    keep_tokenizer(run_dir, str(theirs))
    assert (run_dir / "tokenizer/tokenizer.json").read_text() == "rules", "those that the run was begun with"
    assert os.listdir(run_dir) == ["tokenizer"] and os.listdir(run_dir / "tokenizer") == ["tokenizer.json"]


WAITING = """
import ctypes, sys, time
from runtime.run import StopRequest
stop = StopRequest()
print("ready", flush=True)
if sys.argv[1] == "stuck":              # in a C call that no signal ends, as a rank in a collective
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
while not stop.requested:
    time.sleep(0.01)
print("requested", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("where", ["loop", "stuck"])
def test_the_first_signal_is_noted_and_the_second_of_its_kind_ends_the_process(where):
    process = subprocess.Popen([sys.executable, "-c", WAITING, where], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert where == "stuck" or process.stdout.readline() == "requested\n"
        process.send_signal(signal.SIGUSR1)     # within a second it is the same request, passed on twice
        time.sleep(1.2)
        process.send_signal(signal.SIGTERM)     # Slurm's warning was SIGUSR1; its SIGTERM minutes later is no second one
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=20) == 128 + signal.SIGUSR1
        assert "a second SIGUSR1: left at once" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
