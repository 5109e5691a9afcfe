"""Tests of runtime/run.py: one writer at a time, whatever the other one died of; folders that cannot be used."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from runtime import log as metrics
from runtime import run as folder
from runtime.cli import UserError
from runtime.run import LOCK, RunLock, is_finished
from runtime.tokenizer import keep_tokenizer, tokenizer_of
from tests.conftest import ROOT

HOLD = ("import os, sys, time\nfrom pathlib import Path\nfrom runtime.run import claim\n"
        "held = RunLock(Path(sys.argv[1]))\n{more}\nprint('held', os.getpid(), flush=True)\ntime.sleep(600)")


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE_S", 0.2)


@pytest.fixture
def holder(tmp_path):
    """Starts a process of its own that claims tmp_path/run; all of them die with the test."""
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


def free(run_dir):
    RunLock(run_dir).release()


def test_a_second_run_hears_who_has_the_folder_until_that_one_is_killed(tmp_path, holder, hurry):
    first, run_dir = holder(), tmp_path / "run"
    said = refusal(run_dir)
    assert f"{run_dir} is being written by process {first.pid} on host {socket.gethostname()!r}, started 2" in said
    assert "wait for that run, stop it, or choose another run=" in said
    (tmp_path / "other_name").symlink_to(run_dir)
    assert f"process {first.pid}" in refusal(tmp_path / "other_name")
    assert str(first.pid) in refusal(run_dir), "a refused claim has not taken the first one's note or lock away"
    first.kill()
    first.wait()
    (run_dir / "config.json").touch()
    held = RunLock(run_dir)
    assert held.line is None and json.loads((run_dir / LOCK).read_text())["pid"] == os.getpid()
    held.release()


def test_a_child_that_outlives_its_run_does_not_keep_the_folder(tmp_path, holder):
    """Compile workers and data loaders are forked; flock would pass the lock on to them."""
    first = holder(more="child = os.fork()\nif child == 0:\n    time.sleep(600)")
    first.kill()
    first.wait()
    free(tmp_path / "run")


def test_a_run_that_begins_while_another_is_ending_waits_for_it(tmp_path, holder):
    holder(more="import threading; threading.Timer(1.0, lambda: os._exit(0)).start()")
    free(tmp_path / "run")


def test_a_run_keeps_a_copy_of_a_tokenizer_that_is_a_folder(tmp_path):
    theirs, run_dir = tmp_path / "llama/tokenizer", tmp_path / "run"
    theirs.mkdir(parents=True)
    run_dir.mkdir()
    (theirs / "tokenizer.json").write_text("rules")
    (theirs / "tokenizer_config.json").write_text("roles")
    (theirs / "weights.safetensors").write_text("not the tokenizer's")
    (run_dir / ".tokenizer.tmp").mkdir()        # a kill in the middle of it
    for name, read in (("gpt2", "gpt2"), (str(theirs), str(run_dir / "tokenizer"))):
        assert tokenizer_of(run_dir, name) == name, "none yet"
        keep_tokenizer(run_dir, name)
        assert tokenizer_of(run_dir, name) == read
    assert sorted(os.listdir(run_dir / "tokenizer")) == ["tokenizer.json", "tokenizer_config.json"]
    (theirs / "tokenizer.json").write_text("other rules")
    keep_tokenizer(run_dir, str(theirs))
    assert (run_dir / "tokenizer/tokenizer.json").read_text() == "rules", "those that the run was begun with"
    assert os.listdir(run_dir) == ["tokenizer"]


def test_a_refused_run_leaves_no_folder_and_a_begun_one_stays(tmp_path):
    free(tmp_path / "out/run")
    assert not (tmp_path / "out/run").exists()
    held = RunLock(tmp_path / "out/run")
    (tmp_path / "out/run/config.json").touch()
    held.release()
    held.release()
    assert sorted(os.listdir(tmp_path / "out/run")) == [LOCK, "config.json"]


def test_a_lock_on_a_file_that_was_removed_in_the_meantime_is_no_lock(tmp_path, monkeypatch):
    """Between its open and its lock another run leaves and takes the empty folder along."""
    run_dir, locked, calls = tmp_path / "run", fcntl.lockf, []

    def lockf(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            (run_dir / LOCK).unlink()
            run_dir.rmdir()
        return locked(*arguments)
    monkeypatch.setattr(folder.fcntl, "lockf", lockf)
    held = RunLock(run_dir)
    assert len(calls) == 2 and (run_dir / LOCK).exists()
    held.release()


def test_a_note_that_cannot_be_read_is_no_traceback(tmp_path, holder, hurry):
    holder()
    for note in "", "{", "[]", '{"pid": "x"}', "\x00" * 50, '{"pid": 1, "host": "h"}', "[" * 900:
        (tmp_path / "run" / LOCK).write_text(note)
        assert "is being written by another process: wait" in refusal(tmp_path / "run")


def test_a_file_system_without_locks_is_told_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def lockf(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(folder.fcntl, "lockf", lockf)
    with contextlib.ExitStack() as ending:
        hold(tmp_path / "run", ending)
        assert (tmp_path / "run" / LOCK).exists()
    assert ("this file system has no locks (No locks available), so nothing keeps a second run from writing here" in
            capsys.readouterr().out)
    assert not (tmp_path / "run").exists(), "released"


# ------------------------------------------------------------------------------------------------------ unusable folders

def test_paths_that_can_hold_no_run_get_a_sentence(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / LOCK).symlink_to(tmp_path / "file")      # a claim writes nothing through it
    for path, why in (("file", "File exists"), ("file/run", "Not a directory"), ("loop/run", "symbolic links"),
                      ("x" * 300, "File name too long"), ("linked", "symbolic links"), ("/proc/run", "No such file")):
        said = refusal(tmp_path / path)
        assert why in said and "choose another out= or run=" in said, path
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("number, kind", [(errno.EACCES, UserError), (errno.EROFS, UserError), (errno.ENOSPC, OSError),
                                          (errno.EIO, OSError)])
def test_rights_are_the_users_to_correct_and_the_disk_is_the_machines(tmp_path, monkeypatch, number, kind):
    def fail(dir):
        raise OSError(number, os.strerror(number), str(dir))
    monkeypatch.setattr(folder.tempfile, "TemporaryFile", fail)
    with pytest.raises(kind, match=os.strerror(number)):
        RunLock(tmp_path / "run")


def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    """As root nothing is unwritable, so the attempt is made by a process that has given such rights up."""
    for readable in tmp_path.parents[:2]:       # pytest's own folders, which only their owner may enter
        readable.chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "open/checkpoints").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    for closed in (tmp_path / "run", tmp_path / "open/checkpoints", tmp_path):
        closed.chmod(0o555)
    code = ("import os, sys\nfrom pathlib import Path\nfrom runtime.run import claim\nfrom runtime.config import UserError\n"
            "if os.geteuid() == 0:\n    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "for path in sys.argv[1:]:\n    try:\n        RunLock(Path(path))\n"
            "    except UserError as error:\n        print(error)")
    paths = [str(tmp_path / name) for name in ("run", "new", "open")]
    done = subprocess.run([sys.executable, "-c", code, *paths], cwd=ROOT, capture_output=True, text=True)
    tmp_path.chmod(0o755)       # or nobody but root could clear it away
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    for line, path in zip(said, paths, strict=True):
        assert f"{path}" in line.partition(": Permission denied; a run needs a folder ")[0]
    assert not os.listdir(tmp_path / "run")


# ------------------------------------------------------------------------------------------------------ whose folder it is

def test_a_lock_alone_makes_no_foreign_folder(tiny, monkeypatch):
    """A kill between the claim and config.json leaves it, and perhaps the half of that."""
    assert not is_finished(tiny)
    held = RunLock(tiny.run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda tmp, path: (tiny.run_dir / "copy").write_text(str(tmp)))
        metrics.write_json(tiny.run_dir / "config.json", {})
    (tiny.run_dir / "copy").rename((tiny.run_dir / "copy").read_text())
    assert len(os.listdir(tiny.run_dir)) == 2
    assert not is_finished(tiny)
    held.release()
    (tiny.run_dir / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no run"):
        is_finished(tiny)


def test_a_run_dir_that_is_a_file_is_no_run(tiny):
    tiny.run_dir.parent.mkdir()
    tiny.run_dir.write_text("x")
    with pytest.raises(UserError, match="Not a directory; a run needs a folder"):
        is_finished(tiny)
