"""Say whose a run's folder is: which run's it holds, which process may write to it.

The lock is POSIX's (fcntl.lockf): the kernel drops it with the process, however that dies, and no child inherits it,
as it would with flock, where a forgotten worker keeps the folder of a dead run locked. Its trap: a process loses it by
closing ANY descriptor of the file, so nothing in a run may open LOCK again.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from runtime.config import Config, ConfigError, read_config
from runtime.rows import metrics_rows, read_rows
from runtime.tokenizer import FOLDER_FILES, VOCAB_SIZE

LOCK = ".lock"
OURS = {LOCK, ".config.json.tmp"}      # what a run that is killed before it has a config.json may leave
PATIENCE_S = 3.0        # a run that was told to stop and one that is started right after it may overlap for a moment
# What the path itself is to blame for; any other error (no space, input/output) is the machine's and goes up as it is.
USERS_MISTAKES = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR,
                  errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class Claim:
    """A run's folder, held by this process until release() or its death. `line` is what people should hear, or None."""

    def __init__(self, run_dir: Path, descriptor: int, line: str | None):
        self.line = line
        self._run_dir, self._descriptor = run_dir, descriptor

    def release(self) -> None:
        """Let the folder go; one that holds nothing but the lock goes too. A second call does nothing."""
        if self._descriptor is None:
            return
        try:
            if os.listdir(self._run_dir) == [LOCK]:     # the run was refused before it began
                os.unlink(self._run_dir / LOCK)
                os.rmdir(self._run_dir)
        except OSError:     # gone already, or somebody was quicker: it is theirs
            pass
        os.close(self._descriptor)
        self._descriptor = None


def is_finished(config: Config) -> bool:
    """Whether this very run is already done. Raises ConfigError where its folder belongs to another run."""
    run_dir = config.run_dir
    try:
        names = {path.name for path in run_dir.iterdir()} - OURS
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(run_dir, error) from error
    if not names:
        return False
    if "config.json" not in names:
        raise ConfigError(f"{run_dir} is not empty and holds no run (no config.json): choose another run= or out=")
    before, now = read_config(run_dir).identity(), config.identity()
    if changes := [f"{key} was {before[key]}, now {now[key]}" for key in now if before[key] != now[key]]:
        raise ConfigError(f"{run_dir} holds another run: {'; '.join(changes)}; choose another run=, or give the same settings")
    return "summary.json" in names


def hold(run_dir: Path, ending: ExitStack) -> None:
    """claim() until `ending` ends, its line told."""
    claimed = claim(run_dir)
    ending.callback(claimed.release)
    if claimed.line:
        print(claimed.line)


def claim(run_dir: Path) -> Claim:
    """Make the folder where there is none, see that it can be written to, lock it. For the main process alone.

    Raises ConfigError: no folder can be made or written there, or another process has it. Raises OSError where the
    machine is to blame, a full disk for instance.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for folder in (run_dir, run_dir / "checkpoints"):
            if folder == run_dir or folder.exists():
                with tempfile.TemporaryFile(dir=folder):    # a right to write is only known by writing
                    pass
        descriptor, line = _lock(run_dir)
    except OSError as error:
        raise _unusable(run_dir, error) from error
    held = Claim(run_dir, descriptor, line)
    try:
        note = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)
    except OSError:
        held.release()
        raise
    return held


def tokenizer_of(run_dir: Path, name: str) -> str:
    """What to load as the tokenizer `name` of a run: the run's own copy, where its tokenizer is a folder and it has one."""
    own = Path(run_dir) / "tokenizer"
    return str(own) if name not in VOCAB_SIZE and (own / FOLDER_FILES[0]).is_file() else name


def keep_tokenizer(run_dir: Path, name: str) -> None:
    """Copy a tokenizer that is a folder into the run's own, so that the run can be read wherever it is moved."""
    own = Path(run_dir) / "tokenizer"
    if name in VOCAB_SIZE or own.exists():
        return
    part = own.with_name(".tokenizer.tmp")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for file in FOLDER_FILES:
        if (Path(name) / file).is_file():
            shutil.copyfile(Path(name) / file, part / file)
    os.rename(part, own)


def refuse_to_start_over(config: Config) -> None:
    """Raises ConfigError where the run has come so far that it must have saved, yet no checkpoint is there any more.

    The first save that was due may have been cut short; the second one has waited for it."""
    policy, begun = config.checkpoint, config.parent[1] if config.parent else 0
    steps = [row["step"] for row in metrics_rows(read_rows(config.run_dir / "metrics.jsonl")) if row["kind"] == "train"]
    reached = max(steps, default=0)
    due = [step for step in range(begun + 1, reached + 1) if step in policy.at or any(
        every and step % every == 0 for every in (policy.every, policy.rolling))]
    if len(due) > 1:
        raise ConfigError(f"{config.run_dir} has come to step {reached}, yet no checkpoint of it is left: put its checkpoints/ "
                          f"back, or delete the folder to start the run anew")


def _lock(run_dir: Path) -> tuple[int, str | None]:
    """An open, locked descriptor of the lock file; with a line instead of the lock where the file system has none."""
    path, end = run_dir / LOCK, time.monotonic() + PATIENCE_S
    while True:
        run_dir.mkdir(exist_ok=True)    # a run that was refused may have taken it away just now
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS_HERE:
                return descriptor, (f"{run_dir}: this file system has no locks ({os.strerror(error.errno)}), so nothing keeps a "
                                    f"second run from writing here: start none")
            holder = _holder(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > end:
                raise ConfigError(f"{run_dir} is being written by {holder}: wait for that run, stop it, or choose another "
                                  f"run=") from error
            time.sleep(0.1)
            continue
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor, None
        os.close(descriptor)    # locked what was removed between open and lock: once more


def _holder(descriptor: int) -> str:
    """Who holds the lock, in words, as it noted it down itself; the note may be missing or not ours."""
    try:
        note = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(note['pid'])} on host {str(note['host'])[:80]!r}, started {str(note['started'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _unusable(run_dir: Path, error: OSError) -> Exception:
    """The sentence for a folder that cannot be used, or the error itself where the user cannot help it."""
    if error.errno not in USERS_MISTAKES:
        error.filename = error.filename or str(run_dir)
        return error
    return ConfigError(f"{error.filename or run_dir}: {os.strerror(error.errno)}; a run needs a folder {run_dir} that it can "
                       f"make and write to: choose another out= or run=, or correct the rights")
