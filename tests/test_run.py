"""runtime/run.py around the steps: one writer per folder, unusable folders, foreign folders, requests to stop."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from runtime import run as room
from runtime.cli import UserError
from runtime.run import LOCK, RunLock, is_finished
from runtime.tokenizer import keep_tokenizer, tokenizer_of
from tests.conftest import ROOT

HOLD = ("import os, sys, time\nfrom pathlib import Path\nfrom runtime.run import RunLock\n"
        "held = RunLock(Path(sys.argv[1]))\n{more}\nprint('held', os.getpid(), flush=True)\ntime.sleep(600)")


@pytest.fixture
def holder(tmp_path):
    """Starts a process that locks tmp_path/run; it dies with the test."""
    started = []

    def hold(more=""):
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


def refusal(run_dir):
    with pytest.raises(UserError) as caught:
        RunLock(run_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- one writer

def test_a_second_run_is_told_who_has_the_folder_until_that_process_is_killed(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(room, "LOCK_TIMEOUT_S", 0.2)
    first, run_dir = holder(), tmp_path / "run"
    said = refusal(run_dir)
    assert f"{run_dir} is being written by process {first.pid} on host {socket.gethostname()!r}, started 2" in said
    assert "wait for that run, stop it, or choose another run=" in said
    (tmp_path / "other_name").symlink_to(run_dir)
    assert f"process {first.pid}" in refusal(tmp_path / "other_name")
    (run_dir / LOCK).write_text("[1")       # a note that cannot be read
    assert "is being written by another process: wait" in refusal(run_dir)
    first.kill()
    first.wait()
    held = RunLock(run_dir)
    assert held.warning is None and json.loads((run_dir / LOCK).read_text())["pid"] == os.getpid()
    held.release()


@pytest.mark.parametrize("more", [
    "child = os.fork()\nif child == 0:\n    time.sleep(600)",                               # a compile worker or data loader
    "import threading; threading.Timer(1.0, lambda: os._exit(0)).start()"], ids=["a child that outlives its run", "about to end"])
def test_a_folder_is_free_once_its_run_has_ended(tmp_path, holder, more):
    first = holder(more)
    if "fork" in more:
        first.kill()
        first.wait()
    RunLock(tmp_path / "run").release()


def test_a_refused_run_leaves_no_folder_and_a_begun_one_stays(tmp_path):
    run_dir = tmp_path / "out/run"
    RunLock(run_dir).release()
    assert not run_dir.exists()
    held = RunLock(run_dir)
    (run_dir / "config.json").touch()
    held.release()
    assert sorted(os.listdir(run_dir)) == [LOCK, "config.json"]


def test_a_lock_on_a_file_that_was_removed_in_the_meantime_is_no_lock(tmp_path, monkeypatch):
    """Between its open and its lock another run leaves and takes the empty folder along."""
    run_dir, locked, calls = tmp_path / "run", fcntl.lockf, []

    def lockf(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            (run_dir / LOCK).unlink()
            run_dir.rmdir()
        return locked(*arguments)
    monkeypatch.setattr(room.fcntl, "lockf", lockf)
    held = RunLock(run_dir)
    assert len(calls) == 2 and (run_dir / LOCK).exists()
    held.release()


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    def lockf(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(room.fcntl, "lockf", lockf)
    held = RunLock(tmp_path / "run")
    assert "this file system has no locks (No locks available), so nothing keeps a second run from writing here" in held.warning
    held.release()
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------- folders

def test_paths_that_can_hold_no_run_get_a_sentence(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / LOCK).symlink_to(tmp_path / "file")      # nothing is written through it
    for path, why in (("file", "File exists"), ("file/run", "Not a directory"), ("x" * 300, "File name too long"),
                      ("linked", "symbolic links"), ("/proc/run", "No such file")):
        said = refusal(tmp_path / path)
        assert why in said and "choose another out= or run=" in said, path
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("number, kind", [(errno.EACCES, UserError), (errno.EROFS, UserError), (errno.ENOSPC, OSError)])
def test_rights_are_the_users_to_correct_and_the_disk_is_the_machines(tmp_path, monkeypatch, number, kind):
    def fail(dir):
        raise OSError(number, os.strerror(number), str(dir))
    monkeypatch.setattr(room.tempfile, "TemporaryFile", fail)
    with pytest.raises(kind, match=os.strerror(number)):
        RunLock(tmp_path / "run")


def test_a_folder_that_is_no_run_is_left_alone(tiny):
    assert not is_finished(tiny)
    held = RunLock(tiny.run_dir)
    (tiny.run_dir / ".config.json.tmp").write_text("{")     # as a kill before config.json leaves it
    assert not is_finished(tiny)
    held.release()
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


# ---------------------------------------------------------------------------------------------------- requests to stop

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


@pytest.mark.parametrize("where, number", [("loop", signal.SIGINT), ("stuck", signal.SIGTERM), ("loop", signal.SIGUSR1)])
def test_the_first_signal_is_noted_and_the_second_of_its_kind_ends_the_process(where, number):
    process = subprocess.Popen([sys.executable, "-c", WAITING, where], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        if where == "loop":
            assert process.stdout.readline() == "requested\n"
        process.send_signal(number)         # within a second it is the same request, passed on twice
        time.sleep(1.2)
        if number == signal.SIGUSR1:        # Slurm's warning; its SIGTERM minutes later is no second one
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert f"a second {number.name}: left at once" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
