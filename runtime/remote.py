"""Checkpoints in an object store, or any other place that fsspec has a URL for: copied there while
the run goes on, read back where a run starts from one.

    URL/<run>/checkpoints/step_00013500/   the files of the checkpoint, DONE written last

A store has no rename: DONE says that a copy is whole, as it does on disk. Each file is read back
and its SHA-256 compared with the manifest's, so a copy costs twice its size in traffic. What fails
is tried again, then reported; the run goes on.

A rollback of the run removes the DONE of later steps, before it deletes its own checkpoints. Until
the store has none of them, out/<run>/copies_undone.json says so, and nothing else is copied."""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lib.errors import MachineError, UserError
from lib.files import digest, write_json

ATTEMPTS = 5  # of a transfer
FIRST_PAUSE_S = 1.0  # after its first failure; each one is followed by twice the pause
PIECE = 8 * 2**20  # bytes read at a time
REMOVAL_PATIENCE_S = 30.0  # that a rollback waits for the store

T = TypeVar("T")


def is_url(path: str) -> bool:
    return "://" in path


def open_store(key: str, url: str) -> tuple[Any, str]:
    """The filesystem of a URL and the path in it. Raises UserError, which begins with the config's
    `key`, where fsspec has none for it or lacks a package."""
    from fsspec.core import url_to_fs

    try:
        store, path = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(
            f"{key}={url} cannot be opened ({error}): give a URL of a protocol that fsspec knows,"
            " such as s3://bucket/folder, and install its package"
        ) from error
    return store, path.rstrip("/")


def attempted(transfer: Callable[[], T]) -> T:
    """What transfer() returns, tried ATTEMPTS times; raises what the last one raised. What is not
    there is not tried again."""
    for attempt in range(ATTEMPTS):
        try:
            return transfer()
        except FileNotFoundError:
            raise
        except Exception:  # whatever the store's package raises
            if attempt == ATTEMPTS - 1:
                raise
        time.sleep(FIRST_PAUSE_S * 2**attempt)
    raise AssertionError("unreachable")


def sha256_in_store(store: Any, path: str) -> str:
    hashed = hashlib.sha256()
    with store.open(path, "rb") as file:
        while piece := file.read(PIECE):
            hashed.update(piece)
    return hashed.hexdigest()


def read_in_store(store: Any, path: str) -> bytes:
    """A small file, whole; b"" where there is none."""
    try:
        with store.open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


# ------------------------------------------------------------------------------------------- there


UNDONE = "copies_undone.json"


@dataclass(frozen=True)
class Undone:
    """copies_undone.json, in the run's folder: copies that a rollback has undone and that `url` may
    still hold. Removed when it holds none."""

    url: str
    after_step: int  # every copy of a later step is to go
    schema_version: int = 1


def read_undone(run_dir: Path) -> Undone | None:
    """None where there is none, or its file is damaged."""
    with suppress(OSError, ValueError, TypeError):
        return Undone(**json.loads((run_dir / UNDONE).read_text()))
    return None


class CheckpointCopies:
    """Copies one run's checkpoints to `url`, one at a time, in a thread of rank 0. Where the store
    is slower than the run, the newest one waits and those between are left out.

    The thread is a daemon: a run that is stopped does not wait, its next start copies again, and
    removes first what an earlier start could not.

    `refuse_owner` gets the manifest of the newest copy that the store has under this name, and
    raises UserError where it is of a run whose copies this one must not replace."""

    def __init__(
        self,
        url: str,
        run: str,
        run_dir: Path,
        refuse_owner: Callable[[dict], None] = lambda manifest: None,
    ):
        self.url = url
        self.run = run
        self.run_dir = run_dir
        self._refuse_owner = refuse_owner
        self._is_owner_known = False
        self._store, root = open_store("checkpoint.copy_to", url)
        self._folder = f"{root}/{run}/checkpoints"
        self._state = threading.Condition()
        self._waiting: Path | None = None
        self._busy: Path | None = None
        undone = read_undone(run_dir)
        # the store may hold undone copies of later steps; None: it does not
        self._undone_after: int | None = None
        if undone is not None and undone.url == url:
            self._undone_after = undone.after_step
        self._is_removal_due = self._undone_after is not None
        self._reports: list[tuple[str, str]] = []
        threading.Thread(target=self._work, name="copies", daemon=True).start()

    def check_owner(self) -> None:
        """Raises UserError as `refuse_owner` does. A store that cannot be read is reported, and
        looked at again before anything is written to it."""
        try:
            self._check_owner()
        except UserError:
            raise
        except Exception as error:  # whatever the store's package raises
            self._reports.append(self._failure("looking for copies of another run", error))

    def _check_owner(self) -> None:
        if self._is_owner_known:
            return
        manifest = newest_manifest(self._store, self._folder)
        if manifest is not None:
            self._refuse_owner(manifest)
        self._is_owner_known = True

    def copy(self, checkpoint: Path) -> None:
        """Begin, or wait for the copy under way, and return."""
        with self._state:
            if self._waiting is not None:
                self._reports.append(
                    ("copy_skipped", f"{self._waiting.name} was not copied: {self.url} is slow")
                )
            self._waiting = checkpoint
            self._state.notify_all()

    def roll_back(self, step: int) -> None:
        """Let the store hold no checkpoint of a later step. Returns when that is so, or when it has
        failed or lasted for REMOVAL_PATIENCE_S: then the next copy, or start, tries again.

        Call it before the run's own checkpoints are deleted, or a kill between the two would leave
        undone ones in the store alone."""
        with self._state:
            self._waiting = None
            if self._undone_after is not None:  # what was to be removed before is there still
                step = min(step, self._undone_after)
            # On a full disk the store is asked without: a kill alone would forget what it refuses.
            with suppress(OSError):
                write_json(self.run_dir / UNDONE, asdict(Undone(self.url, step)))
            self._undone_after = step
            self._is_removal_due = True
            self._state.notify_all()
            self._state.wait_for(lambda: not self._is_removal_due, REMOVAL_PATIENCE_S)

    def under_way(self) -> list[Path]:
        """Checkpoints that must stay on disk for now."""
        with self._state:
            return [path for path in (self._busy, self._waiting) if path is not None]

    def reports(self) -> list[tuple[str, str]]:
        """What has happened since the last call: (event, sentence) of each."""
        with self._state:
            reports = self._reports
            self._reports = []
            return reports

    def finish(self, timeout_s: float) -> None:
        """Wait until all is copied, or for so long; then a report says what is not."""
        with self._state:
            if self._state.wait_for(self._is_idle, timeout_s):
                return
            names = [path.name for path in (self._busy, self._waiting) if path is not None]
            sentences = [f"{name} is not yet in {self.url}" for name in names]
            if self._undone_after is not None:
                sentences.append(
                    f"checkpoints after step {self._undone_after} are not yet removed from"
                    f" {self.url}/{self.run}"
                )
            remedy = "run the same command again, which copies the last one"
            self._reports.append(("copy_failed", f"{'; '.join(sentences)}: {remedy}"))

    def _is_idle(self) -> bool:
        return self._busy is None and self._waiting is None and not self._is_removal_due

    def _work(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: not self._is_idle())
                undone_after = self._undone_after
            if undone_after is not None:
                self._remove_undone(undone_after)
            else:
                self._copy_waiting()

    def _remove_undone(self, after_step: int) -> None:
        what = f"removing copies of undone steps, after {after_step},"
        report = self._try(what, partial(self._remove, after_step))
        with self._state:
            if self._undone_after != after_step:  # another rollback, meanwhile
                return
            if report is None:
                report = self._try(what, self._remove_note)
            if report is None:
                self._undone_after = None
            else:
                self._reports.append(report)
                self._leave_out_waiting()
            self._is_removal_due = False
            self._state.notify_all()

    def _remove_note(self) -> None:
        (self.run_dir / UNDONE).unlink(missing_ok=True)

    def _leave_out_waiting(self) -> None:
        """A removal that is made later would take its copy for one that was undone."""
        if self._waiting is None:
            return
        self._reports.append(
            (
                "copy_failed",
                f"{self._waiting.name} was not copied: {self.url}/{self.run} still holds steps"
                " that a rollback has undone",
            )
        )
        self._waiting = None

    def _copy_waiting(self) -> None:
        with self._state:
            checkpoint = self._waiting
            if checkpoint is None or self._undone_after is not None:  # a rollback, meanwhile
                return
            self._busy = checkpoint
            self._waiting = None
        report = self._try(f"copying {checkpoint.name}", partial(self._copy, checkpoint))
        with self._state:
            if report is not None:
                self._reports.append(report)
            self._busy = None
            self._state.notify_all()

    def _try(self, what: str, work: Callable[[], str | None]) -> tuple[str, str] | None:
        """The report of work(), whose sentence it returns, or of its failure."""
        try:
            self._check_owner()
            sentence = work()
        except Exception as error:  # whatever the store's package raises
            return self._failure(what, error)
        return None if sentence is None else ("copied", sentence)

    def _failure(self, what: str, error: Exception) -> tuple[str, str]:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        return "copy_failed", f"{what} failed at {self.url} ({cause}); training goes on"

    def _copy(self, checkpoint: Path) -> str | None:
        """None where it is there already, as after a resume, or undone by a rollback meanwhile."""
        started_s = time.perf_counter()
        target = f"{self._folder}/{checkpoint.name}"
        done = (checkpoint / "DONE").read_bytes()
        if attempted(lambda: read_in_store(self._store, f"{target}/DONE")) == done:
            return None
        self._forget(target)
        manifest = (checkpoint / "manifest.json").read_bytes()
        hashes = {name: entry["sha256"] for name, entry in json.loads(manifest)["files"].items()}
        hashes["manifest.json"] = done.decode()
        hashes["DONE"] = hashlib.sha256(done).hexdigest()  # last: it says that all are there
        attempted(lambda: self._store.makedirs(target, exist_ok=True))
        for name, sha256 in hashes.items():
            if self._is_undone(checkpoint):
                return None
            self._put(checkpoint / name, f"{target}/{name}", sha256)
        seconds = time.perf_counter() - started_s
        return f"{checkpoint.name} copied to {self.url}/{self.run} in {seconds:.1f} s"

    def _is_undone(self, checkpoint: Path) -> bool:
        with self._state:
            after_step = self._undone_after
        return after_step is not None and step_in(checkpoint.name) > after_step

    def _put(self, file: Path, target: str, sha256: str) -> None:
        """Write a file and read it back. A file that is gone from the disk is not tried again."""

        def transfer() -> None:
            with open(file, "rb") as source, self._store.open(target, "wb") as copy:
                shutil.copyfileobj(source, copy, PIECE)
            self._store.invalidate_cache()
            if sha256_in_store(self._store, target) != sha256:
                raise OSError(f"{target} is not what was written")

        attempted(transfer)

    def _forget(self, target: str) -> None:
        """Let a copy count as none: what is written anew would have an old DONE."""

        def remove() -> None:
            self._store.invalidate_cache()
            if self._store.exists(f"{target}/DONE"):
                self._store.rm_file(f"{target}/DONE")

        attempted(remove)

    def _remove(self, after_step: int) -> None:
        """Of each later step DONE first, so that half a deletion is no checkpoint; newest first, as
        a kill in between leaves the fewest of those that are to go."""
        steps = attempted(lambda: steps_in(self._store, self._folder))
        for name in reversed(steps):
            if steps[name] > after_step:
                self._forget(f"{self._folder}/{name}")


def step_in(name: str) -> int:
    """The step of a checkpoint called step_<digits>."""
    return int(name.removeprefix("step_"))


def steps_in(store: Any, folder: str) -> dict[str, int]:
    """Name and step of the checkpoints in a folder of a store, whole or not, ascending."""
    store.invalidate_cache()
    try:
        paths = store.ls(folder, detail=False)
    except FileNotFoundError:
        return {}
    names = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
    steps = {name: step_in(name) for name in names if re.fullmatch(r"step_\d+", name)}
    return dict(sorted(steps.items(), key=lambda pair: pair[1]))


def newest_manifest(store: Any, folder: str) -> dict | None:
    """The manifest of the newest whole checkpoint in a folder of a store; None where there is
    none."""
    for name in reversed(attempted(lambda: steps_in(store, folder))):
        done = attempted(partial(read_in_store, store, f"{folder}/{name}/DONE"))
        manifest = attempted(partial(read_in_store, store, f"{folder}/{name}/manifest.json"))
        if done and done.decode() == hashlib.sha256(manifest).hexdigest():
            return json.loads(manifest)
    return None


# -------------------------------------------------------------------------------------------- back


def fetch(url: str, out: Path) -> Path:
    """The local copy, under `out`/.fetched, of the checkpoint that start_from=`url` names: of a run
    its newest whole one. Fetched before, it is not fetched again, unless the store holds another
    one of that step by now.

    Raises UserError where there is none, MachineError where it cannot be read."""
    store, path = open_store("start_from", url)
    names_a_step = path.rpartition("/")[2].startswith("step_")
    run_path = path.rpartition("/checkpoints/")[0] if names_a_step else path
    # stores may have runs of one name
    run_dir = out / ".fetched" / digest(run_path)[:8] / run_path.rpartition("/")[2]
    try:
        store.invalidate_cache()
        checkpoint = path if names_a_step else _newest(store, path)
        local = run_dir / "checkpoints" / checkpoint.rpartition("/")[2]
        read_done = partial(read_in_store, store, f"{checkpoint}/DONE")
        if not _is_fetched(local, attempted(read_done)):
            _fetch_checkpoint(store, checkpoint, local)
    except FileNotFoundError as error:
        raise UserError(
            f"start_from={url} holds no finished checkpoint ({error} is not there): name one that"
            " checkpoint.copy_to has copied, such as URL/RUN/checkpoints/step_00000400"
        ) from error
    except Exception as error:  # whatever the store's package raises
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise MachineError(
            f"start_from={url} could not be read ({cause}): run the same command again"
        ) from error
    return local


def _is_fetched(local: Path, done: bytes) -> bool:
    """Whether `local` holds the checkpoint whose DONE, in the store, is `done`."""
    return (local / "DONE").exists() and (local / "DONE").read_bytes() == done


def _newest(store: Any, run_path: str) -> str:
    """The newest whole checkpoint of a run in a store."""
    folder = f"{run_path}/checkpoints"
    for name in reversed(attempted(lambda: steps_in(store, folder))):
        if attempted(partial(read_in_store, store, f"{folder}/{name}/DONE")):
            return f"{folder}/{name}"
    raise FileNotFoundError(f"{folder}/step_*/DONE")


def _fetch_checkpoint(store: Any, source: str, target: Path) -> None:
    """Write `source` to the folder `target`, each file held against its hash; renamed when
    whole, in the place of what was fetched when the store held another one."""
    part = target.with_name(f".tmp_{target.name}_{os.getpid()}")
    part.mkdir(parents=True, exist_ok=True)
    try:
        sha256_of_manifest = _get(store, f"{source}/DONE", part / "DONE", None).decode()
        manifest = _get(
            store, f"{source}/manifest.json", part / "manifest.json", sha256_of_manifest
        )
        for name, entry in json.loads(manifest)["files"].items():
            if Path(name).name != name:
                raise OSError(
                    f"{source}/manifest.json names {name}, which is no file of its folder"
                )
            _get(store, f"{source}/{name}", part / name, entry["sha256"])
        if _is_fetched(target, (part / "DONE").read_bytes()):  # by another run meanwhile
            return
        shutil.rmtree(target, ignore_errors=True)
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _get(store: Any, source: str, target: Path, sha256: str | None) -> bytes:
    """Fetch a file; what it holds, where that is small. sha256 None: not known."""

    def transfer() -> None:
        hashed = hashlib.sha256()
        with store.open(source, "rb") as file, open(target, "wb") as copy:
            while piece := file.read(PIECE):
                hashed.update(piece)
                copy.write(piece)
        if sha256 is not None and hashed.hexdigest() != sha256:
            raise OSError(f"{source} is not what was written")

    attempted(transfer)
    return target.read_bytes() if target.suffix in ("", ".json") else b""
