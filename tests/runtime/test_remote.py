"""runtime/remote.py: checkpoints copied to a store that drops connections, corrupts and stalls, and
read back by start_from=; over HTTP from a server that cuts its answers short."""

import hashlib
import http.server
import json
import math
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lib.errors import MachineError
from runtime import remote
from runtime.checkpoint import latest, read_manifest
from runtime.config import Config
from runtime.remote import CheckpointCopies, fetch
from runtime.validation import evaluate
from tests.conftest import changed
from tests.helpers.faults import Run, back_to, record, rows, saved_steps, wait_for


class FaultyStore(MemoryFileSystem):
    """In memory, under faulty://. `faults`: for each open of a file whose name ends so, in turn,
    what happens: "drop" after half of it, "flip" of a bit, or a threading.Event to wait for.
    `removal_faults`: "drop" or a threading.Event for each removal of a file, in turn."""

    protocol = "faulty"
    cachable = False
    faults: dict[str, list] = {}
    removal_faults: list = []

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def _open(self, path, mode: str = "rb", **options: object):
        file = super()._open(path, mode, **options)
        for ending, faults in self.faults.items():
            if path.endswith(ending) and faults:
                return Faulty(file, faults.pop(0))
        return file

    def rm_file(self, path):
        fault = self.removal_faults.pop(0) if self.removal_faults else None
        if isinstance(fault, threading.Event):
            assert fault.wait(60)
        if fault == "drop":
            raise ConnectionResetError("the store has closed the connection")
        super().rm_file(path)


class Faulty:
    """A file with a fault in its first piece."""

    def __init__(self, file, fault):
        self.file = file
        self.fault = fault

    def __enter__(self):
        return self

    def __exit__(self, *error: object):
        self.file.close()

    def _spoilt(self, piece: bytes) -> bytes:
        if isinstance(self.fault, threading.Event):
            assert self.fault.wait(60)
            return piece
        if self.fault == "drop":
            raise ConnectionResetError("the store has closed the connection")
        return bytes([piece[0] ^ 1]) + piece[1:]

    def write(self, piece):
        return self.file.write(self._spoilt(bytes(piece)))

    def read(self, n=-1):
        piece = self.file.read(n)
        return self._spoilt(piece) if piece else piece


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(FaultyStore, "faults", {})
    monkeypatch.setattr(FaultyStore, "removal_faults", [])
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    return FaultyStore()


URL = "faulty://bucket/runs"
COPIES = f"checkpoint.copy_to={URL} parallel.start_timeout=60"


def copied_steps(store: FaultyStore, run: str = "tiny") -> list[int]:
    """Steps of the whole copies in the store: DONE names the manifest, the manifest the files."""
    steps = []
    for name, step in remote.steps_in(store, f"/bucket/runs/{run}/checkpoints").items():
        files = f"/bucket/runs/{run}/checkpoints/{name}"
        if not store.exists(f"{files}/DONE"):
            continue
        manifest = store.cat_file(f"{files}/manifest.json")
        assert store.cat_file(f"{files}/DONE").decode() == hashlib.sha256(manifest).hexdigest()
        for file, entry in json.loads(manifest)["files"].items():
            content = store.cat_file(f"{files}/{file}")
            assert hashlib.sha256(content).hexdigest() == entry["sha256"], file
        steps.append(step)
    return steps


def contents(store: FaultyStore) -> dict[str, bytes]:
    """Each file of the store."""
    return {path: file.getvalue() for path, file in store.store.items()}


def events(config: Config) -> list[str]:
    return [row["event"] for row in rows(config, "event")]


@pytest.fixture
def trained(store: FaultyStore, tiny: Config, run: Callable[..., str]) -> Config:
    config = changed(tiny, COPIES)
    run(config)
    return config


def test_checkpoints_of_a_run_are_in_the_store_and_the_run_is_the_same(
    trained: Config, store: FaultyStore, tiny: Config, run: Callable[..., str]
):
    assert copied_steps(store)[-1] == 6
    assert events(trained).count("copied") == len(copied_steps(store))
    without = changed(tiny, "run=without")
    run(without)
    assert record(trained) == record(without)


FAULTS = {
    "dropped in a write": {".distcp": ["drop", "drop"]},
    "dropped while it is read back": {"manifest.json": [None, "drop"]},
    "a bit flipped": {".distcp": ["flip"], "DONE": ["flip"]},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_copy_is_tried_again_until_it_is_what_was_written(
    store: FaultyStore, tiny: Config, run: Callable[..., str], name: str
):
    faults = {ending: list(faults) for ending, faults in FAULTS[name].items()}
    store.faults.update(faults)
    config = changed(tiny, f"{COPIES} checkpoint.every=none")
    run(config)
    assert copied_steps(store) == [6] and events(config) == ["copied"]
    assert not any(store.faults.values()), "each fault was met"


def test_a_store_that_stays_away_is_reported_and_costs_no_step(
    store: FaultyStore, tiny: Config, run: Callable[..., str]
):
    store.faults[".distcp"] = ["drop"] * 99
    config = changed(tiny, COPIES)
    out = run(config)
    assert "copying step_00000006 failed at faulty://bucket/runs (ConnectionResetError" in out
    assert "copied" not in events(config) and "copy_failed" in events(config)
    assert copied_steps(store) == [] and saved_steps(config) == [3, 6]
    assert (config.run_dir / "summary.json").exists()


def make_checkpoint(folder: Path, step: int, weights: str = "weights") -> Path:
    """A checkpoint of one small file."""
    checkpoint = folder / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    content = f"{weights} of step {step}".encode()
    (checkpoint / "__0_0.distcp").write_bytes(content)
    entry = {"sha256": hashlib.sha256(content).hexdigest()}
    manifest = json.dumps({"files": {"__0_0.distcp": entry}}).encode()
    (checkpoint / "manifest.json").write_bytes(manifest)
    (checkpoint / "DONE").write_text(hashlib.sha256(manifest).hexdigest())
    return checkpoint


def test_where_the_store_is_slow_the_newest_checkpoint_waits(store: FaultyStore, tmp_path: Path):
    """And what is under way stays on disk."""
    gate = threading.Event()
    store.faults["step_00000001/__0_0.distcp"] = [gate]
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    paths = [make_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    copies.copy(paths[0])
    wait_for(lambda: not any(store.faults.values()))
    copies.copy(paths[1])
    copies.copy(paths[2])
    assert copies.under_way() == [paths[0], paths[2]]
    gate.set()
    copies.finish(60)
    assert copied_steps(store) == [1, 3]
    names = [event for event, _ in copies.reports()]
    assert names == ["copy_skipped", "copied", "copied"] and copies.under_way() == []


def test_a_copy_that_is_not_finished_in_time_is_reported(store: FaultyStore, tmp_path: Path):
    gate = threading.Event()
    store.faults[".distcp"] = [gate]
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copies.copy(make_checkpoint(tmp_path, 1))
    copies.finish(0.05)
    ((event, sentence),) = copies.reports()
    assert event == "copy_failed"
    assert sentence.startswith(f"step_00000001 is not yet in {URL}: run the same command again")
    gate.set()


def test_a_removal_that_is_not_finished_in_time_is_reported(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copies.copy(make_checkpoint(tmp_path, 2))
    copies.finish(60)
    gate = threading.Event()
    store.faults["DONE"] = [gate]
    later = CheckpointCopies(URL, "tiny", tmp_path)  # which looks first whose copies there are
    monkeypatch.setattr(remote, "REMOVAL_PATIENCE_S", 0.05)
    later.roll_back(1)
    later.finish(0.05)
    ((_, sentence),) = later.reports()
    assert sentence.startswith(f"checkpoints after step 1 are not yet removed from {URL}/tiny:")
    gate.set()


def test_a_finished_run_is_copied_by_the_same_command(
    tiny: Config, store: FaultyStore, run: Callable[..., str]
):
    """Where its end did not wait long enough for the store."""
    store.faults[".distcp"] = ["drop"] * 99
    config = changed(tiny, COPIES)
    run(config)
    assert copied_steps(store) == []
    store.faults.clear()
    out = run(config)
    assert "nothing to do" in out and f"step_00000006 copied to {URL}/tiny" in out
    assert copied_steps(store) == [6]
    assert "copied to" not in run(config)


def test_the_last_checkpoint_is_copied_in_a_row_of_skips(tiny: Config, tmp_path: Path):
    config = changed(tiny, f"checkpoint.copy_to=file://{tmp_path}/store guard.window=8 steps=12")
    assert Run(config, faults=["nan_gradient:12"]).wait() == [0]
    assert rows(config)[-1]["verdict"] == "SKIP"
    assert (tmp_path / "store/tiny/checkpoints/step_00000012/DONE").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_right_behind_a_rollback_leaves_no_undone_step_in_the_store(
    tiny: Config, tmp_path: Path, ranks: int
):
    """Step 23 is saved, and copied, in a row of steps that are skipped."""
    words = "steps=28 guard.window=16 guard.skips=3 checkpoint.every=4 checkpoint.at=23"
    config = changed(tiny, f"{words} data.micro_batch=2 checkpoint.copy_to=file://{tmp_path}/store")
    kill = f"signal_in_step:25:0:{signal.SIGKILL}"
    Run(config, faults=["scale_loss:22:24:10", "slow_steps:0.2", kill], ranks=ranks).wait()
    assert [row["to"] for row in rows(config, "event") if row["event"] == "rollback"] == [20]
    copies = tmp_path / "store/tiny/checkpoints"
    assert (copies / "step_00000023").exists()
    assert max(mark.parent.name for mark in copies.glob("step_*/DONE")) == "step_00000020"


def test_after_a_rollback_no_later_step_is_in_the_store(store: FaultyStore, tmp_path: Path):
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    for step in (1, 2, 3):
        copies.copy(make_checkpoint(tmp_path, step))
        copies.finish(60)
    copies.roll_back(1)
    copies.finish(60)
    assert copied_steps(store) == [1]
    shutil.rmtree(tmp_path / "step_00000003")
    copies.copy(make_checkpoint(tmp_path, 3))
    copies.finish(60)
    assert copied_steps(store) == [1, 3]


def copy_steps(copies: CheckpointCopies, folder: Path, *steps: int) -> None:
    for step in steps:
        copies.copy(make_checkpoint(folder, step))
        copies.finish(60)


def test_a_rollback_returns_when_the_store_holds_no_later_step(store: FaultyStore, tmp_path: Path):
    """The run's own checkpoints are deleted after it: a kill leaves none in the store alone."""
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path, 1, 2, 3)
    gate = threading.Event()
    store.removal_faults += [gate]
    threading.Timer(0.3, gate.set).start()
    copies.roll_back(1)
    assert copied_steps(store) == [1]


@pytest.mark.parametrize("first, second", [(1, 2), (2, 1)])
def test_a_second_rollback_removes_what_the_first_could_not(
    store: FaultyStore, tmp_path: Path, first: int, second: int
):
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path, 1, 2, 3)
    store.removal_faults += ["drop"] * remote.ATTEMPTS
    copies.roll_back(first)
    assert copied_steps(store) == [1, 2, 3]
    copies.roll_back(second)
    assert copied_steps(store) == [1]


def test_a_rollback_during_a_removal_is_waited_for_itself(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The store is slow with the first, to step 2, while the run goes back to step 1."""
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path, 1, 2, 3)
    gate = threading.Event()
    store.removal_faults += [gate]
    monkeypatch.setattr(remote, "REMOVAL_PATIENCE_S", 0.1)
    copies.roll_back(2)
    assert copied_steps(store) == [1, 2, 3]
    monkeypatch.setattr(remote, "REMOVAL_PATIENCE_S", 60.0)
    threading.Timer(0.3, gate.set).start()
    copies.roll_back(1)
    assert copied_steps(store) == [1]
    assert not (tmp_path / remote.UNDONE).exists()


def test_the_newest_copies_are_removed_first(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A kill in between leaves the fewest of those that are to go."""
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path, 1, 2, 3, 4)
    removed: list[str] = []
    monkeypatch.setattr(FaultyStore, "rm_file", lambda _, path: removed.append(path))
    copies.roll_back(1)
    folder = "/bucket/runs/tiny/checkpoints"
    assert removed == [f"{folder}/step_0000000{step}/DONE" for step in (4, 3, 2)]


def test_the_copy_of_the_step_that_a_run_goes_back_to_is_finished(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = threading.Event()
    monkeypatch.setitem(store.faults, ".distcp", [gate])
    monkeypatch.setattr(remote, "REMOVAL_PATIENCE_S", 0.1)
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copies.copy(make_checkpoint(tmp_path, 2))
    wait_for(lambda: not store.faults[".distcp"])
    copies.roll_back(2)
    gate.set()
    copies.finish(60)
    assert copied_steps(store) == [2]


def test_a_checkpoint_that_waits_is_not_copied_after_it_was_undone(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = threading.Event()
    monkeypatch.setitem(store.faults, ".distcp", [gate])
    monkeypatch.setattr(remote, "REMOVAL_PATIENCE_S", 0.1)
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copies.copy(make_checkpoint(tmp_path, 1))
    wait_for(lambda: not store.faults[".distcp"])
    copies.copy(make_checkpoint(tmp_path, 2))
    copies.roll_back(1)
    gate.set()
    copies.finish(60)
    assert copied_steps(store) == [1]


class UnsortedStore:
    """A store that lists a folder in any order."""

    def invalidate_cache(self) -> None:
        pass

    def ls(self, folder: str, detail: bool) -> list[str]:
        steps = ["100000000", "00000009", "00000010"]
        return [f"{folder}/step_{step}" for step in steps]


def test_copies_are_counted_in_the_order_of_their_steps():
    assert list(remote.steps_in(UnsortedStore(), "runs").values()) == [9, 10, 10**8]


def test_a_damaged_copy_is_nobodys_newest(store: FaultyStore, tmp_path: Path):
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path, 1, 2)
    folder = "/bucket/runs/tiny/checkpoints"
    first = json.loads(store.cat_file(f"{folder}/step_00000001/manifest.json"))
    store.pipe_file(f"{folder}/step_00000002/DONE", b"0" * 64)
    assert remote.newest_manifest(store, folder) == first


def test_runs_of_one_name_in_two_stores_are_two(store: FaultyStore, tmp_path: Path):
    for bucket in "ab":
        copies = CheckpointCopies(f"faulty://{bucket}/runs", "tiny", tmp_path / bucket)
        copies.copy(make_checkpoint(tmp_path / bucket, 1, f"weights of {bucket}"))
        copies.finish(60)
    folders = [fetch(f"faulty://{bucket}/runs/tiny", tmp_path) for bucket in "ab"]
    contents_of_both = [(folder / "__0_0.distcp").read_text() for folder in folders]
    assert contents_of_both == [f"weights of {bucket} of step 1" for bucket in "ab"]


class Killed(BaseException):
    """In the place of kill -9: nothing of the run catches it."""


def test_a_rollback_empties_the_store_before_the_folder(
    store: FaultyStore, tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """Step 6 is saved and copied, then its validation is not finite. The store is slow."""

    def fail(*arguments):
        val = evaluate(*arguments)
        wait_for(lambda: 6 in copied_steps(store))
        threading.Timer(0.3, gate.set).start()
        return replace(val, sequences={s: losses * math.nan for s, losses in val.sequences.items()})

    def kill(path):
        raise Killed

    gate = threading.Event()
    store.removal_faults += [gate]
    monkeypatch.setattr("runtime.run.evaluate", fail)
    monkeypatch.setattr("runtime.checkpoint._remove", kill)
    config = changed(tiny, f"{COPIES} steps=9 eval.every=6")
    with pytest.raises(Killed):
        run(config)
    assert saved_steps(config) == [3, 6]
    assert copied_steps(store) == [3]


def test_a_removal_that_the_store_refused_is_made_at_the_next_start(
    store: FaultyStore, tmp_path: Path
):
    """Before its copies of the steps that were trained anew, which stay."""
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path / "undone", 1, 2, 3)
    store.removal_faults += ["drop"] * remote.ATTEMPTS
    copies.roll_back(1)
    assert copied_steps(store) == [1, 2, 3]
    ((_, sentence),) = [r for r in copies.reports() if r[0] == "copy_failed"]
    assert "removing copies of undone steps, after 1, failed" in sentence
    resumed = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(resumed, tmp_path / "anew", 2)
    assert copied_steps(store) == [1, 2]
    copy_steps(CheckpointCopies(URL, "tiny", tmp_path), tmp_path / "anew", 3)
    assert copied_steps(store) == [1, 2, 3]


def test_nothing_is_copied_while_undone_steps_cannot_be_removed(store: FaultyStore, tmp_path: Path):
    """A later removal would take it for one of them."""
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path / "undone", 1, 2)
    store.removal_faults += ["drop"] * 2 * remote.ATTEMPTS
    copies.roll_back(1)
    copy_steps(copies, tmp_path / "anew", 3)
    assert copied_steps(store) == [1, 2]
    assert copies.reports()[-1] == (
        "copy_failed",
        f"step_00000003 was not copied: {URL}/tiny still holds steps that a rollback has undone",
    )
    copy_steps(copies, tmp_path / "anew", 4)
    assert copied_steps(store) == [1, 4]


def test_a_removal_is_noted_for_the_store_that_it_is_of(store: FaultyStore, tmp_path: Path):
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copy_steps(copies, tmp_path / "undone", 1, 2)
    store.removal_faults += ["drop"] * remote.ATTEMPTS
    copies.roll_back(1)
    elsewhere = CheckpointCopies("faulty://bucket/elsewhere", "tiny", tmp_path)
    copy_steps(elsewhere, tmp_path / "anew", 2)
    assert store.exists("/bucket/elsewhere/tiny/checkpoints/step_00000002/DONE")
    CheckpointCopies(URL, "tiny", tmp_path).finish(60)
    assert copied_steps(store) == [1]


def test_a_copy_of_an_undone_step_is_given_up(store: FaultyStore, tmp_path: Path):
    gate = threading.Event()
    store.faults["step_00000002/__0_0.distcp"] = [gate]
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copies.copy(make_checkpoint(tmp_path, 2))
    wait_for(lambda: not store.faults["step_00000002/__0_0.distcp"])
    threading.Timer(0.3, gate.set).start()
    copies.roll_back(1)
    assert not store.exists("/bucket/runs/tiny/checkpoints/step_00000002/manifest.json")
    assert copies.reports() == []


def test_what_is_there_already_is_not_copied_again(store: FaultyStore, tmp_path: Path):
    checkpoint = make_checkpoint(tmp_path, 1)
    for _ in range(2):
        copies = CheckpointCopies(URL, "tiny", tmp_path)
        copies.copy(checkpoint)
        copies.finish(60)
        written = store.modified("/bucket/runs/tiny/checkpoints/step_00000001/DONE")
    assert copies.reports() == []
    assert store.modified("/bucket/runs/tiny/checkpoints/step_00000001/DONE") == written


def test_a_copy_is_none_while_it_is_written_anew(store: FaultyStore, tmp_path: Path):
    """As after a rollback whose removal the store has refused."""
    copies = CheckpointCopies(URL, "tiny", tmp_path)
    copies.copy(make_checkpoint(tmp_path / "undone", 1))
    copies.finish(60)
    store.faults[".distcp"] = ["drop"] * 99
    copies.copy(make_checkpoint(tmp_path / "anew", 1, "other weights"))
    copies.finish(60)
    assert copied_steps(store) == []


def test_a_killed_run_copies_its_checkpoint_when_it_is_resumed(
    trained: Config, store: FaultyStore, run: Callable[..., str]
):
    whole = record(trained)
    back_to(trained, 3)
    store.rm("/bucket", recursive=True)
    run(trained)
    assert 3 in copied_steps(store) and copied_steps(store)[-1] == 6
    assert record(trained) == whole


def test_copies_of_another_run_are_not_replaced(
    trained: Config, store: FaultyStore, run: Callable[..., str]
):
    """Its own folder is gone: they are all that is left of it."""
    before = contents(store)
    shutil.rmtree(trained.run_dir)
    error = run(trained, "seed=7", code=2)
    assert f"checkpoint.copy_to={URL} holds checkpoints of another run tiny (seed was 1337" in error
    assert contents(store) == before
    assert not trained.run_dir.exists(), "nothing half-written"


def test_a_run_that_was_lost_does_not_begin_anew_over_its_copies(
    trained: Config, store: FaultyStore, run: Callable[..., str]
):
    store.rm("/bucket/runs/tiny/checkpoints/step_00000006", recursive=True)
    before = contents(store)
    shutil.rmtree(trained.run_dir)
    error = run(trained, code=2)
    assert f"start_from={URL}/tiny/checkpoints/step_00000003" in error and "up to step 3" in error
    assert contents(store) == before


def test_a_finished_run_that_was_lost_is_told_of_starts_that_are_accepted(
    trained: Config, store: FaultyStore, run: Callable[..., str]
):
    """None is from its last step."""
    shutil.rmtree(trained.run_dir)
    error = run(trained, code=2)
    assert f"up to step 6, its last, but {trained.run_dir} has none" in error
    assert "step_00000006" not in error
    assert f"the weights alone in another run= by start_from={URL}/tiny," in error
    run(trained, f"start_from={URL}/tiny", "run=other", "checkpoint.copy_to=none")
    run(trained, f"start_from={URL}/tiny/checkpoints/step_00000003")
    assert copied_steps(store) == [3, 6]


def test_a_branch_that_was_lost_does_not_begin_anew_over_its_copies(
    store: FaultyStore, tiny: Config, run: Callable[..., str]
):
    wsd = "optim.schedule=wsd optim.warmup_share=0 optim.decay_share=0.5"
    trunk = changed(tiny, f"run=trunk {wsd}")
    run(trunk)
    start = f"{trunk.run_dir}/checkpoints/step_00000003"
    branch = changed(tiny, f"{wsd} {COPIES} start_from={start}")
    run(branch)
    shutil.rmtree(branch.run_dir)
    assert "holds checkpoints of this run up to step 6" in run(branch, code=2)


def test_a_lost_run_goes_on_from_its_copies_and_is_copied_on(
    trained: Config, store: FaultyStore, run: Callable[..., str]
):
    """Also after a stop, which finds copies from before and after the loss."""
    whole = record(trained)
    shutil.rmtree(trained.run_dir)
    words = f"start_from={URL}/tiny/checkpoints/step_00000003"
    store.rm("/bucket/runs/tiny/checkpoints/step_00000006", recursive=True)
    run(trained, words)
    assert copied_steps(store) == [3, 6]
    assert record(trained)["weights"] == whole["weights"]
    back_to(trained, 6)
    run(trained, words)
    assert copied_steps(store) == [3, 6] and "copy_failed" not in events(trained)


def test_a_store_that_cannot_be_read_at_the_start_is_asked_again(
    trained: Config, store: FaultyStore, run: Callable[..., str], tmp_path: Path
):
    """Before anything is written there: it holds another run's."""
    before = contents(store)
    other = changed(trained, f"seed=7 out={tmp_path}/other")
    store.faults["DONE"] = ["drop"] * remote.ATTEMPTS
    out = run(other)
    assert "looking for copies of another run failed" in out
    assert "copying step_00000006 failed at faulty://bucket/runs (UserError: " in out
    assert contents(store) == before


def test_two_ranks_copy_what_both_have_written(tiny: Config, tmp_path: Path):
    """To a folder, since ranks are processes."""
    config = changed(tiny, f"checkpoint.copy_to=file://{tmp_path}/store")
    assert Run(config, ranks=2).wait() == [0, 0]
    copy = tmp_path / "store/tiny/checkpoints/step_00000006"
    assert read_manifest(copy)["world_size"] == 2  # which verifies each file
    assert len(list(copy.glob("*.distcp"))) == 2


# -------------------------------------------------------------------------------------------- back


def test_a_branch_starts_from_a_url(store: FaultyStore, tiny: Config, run: Callable[..., str]):
    """To the bits of a branch off the same checkpoint on disk."""
    wsd = "optim.schedule=wsd optim.warmup_share=0 optim.decay_share=0.5"
    trunk = changed(tiny, f"run=trunk {wsd} {COPIES}")
    run(trunk)
    branches = {
        "near": f"{trunk.run_dir}/checkpoints/step_00000003",
        "far": f"{URL}/trunk/checkpoints/step_00000003",
    }
    store.faults["manifest.json"] = ["drop", "flip"]
    for name, start in branches.items():
        run(changed(tiny, f"run={name} {wsd} start_from={start}"))
    near, far = (record(changed(tiny, f"run={name}")) for name in branches)
    assert near == far


def test_the_weights_of_a_run_are_taken_from_a_url(
    trained: Config, tiny: Config, run: Callable[..., str]
):
    """Those of its newest checkpoint; a second start fetches nothing."""
    for name in ("first", "second"):
        out = run(changed(tiny, f"run={name} start_from={URL}/tiny"))
        assert "/.fetched/" in out and "step_00000006" in out
    near = changed(tiny, f"run=near start_from={trained.run_dir}")
    run(near)
    first, expected = (record(changed(tiny, f"run={name}")) for name in ("first", "near"))
    assert first == expected


def put(store: FaultyStore, checkpoint: Path) -> None:
    """Into the store as the run tiny's, in the place of what is there."""
    target = f"/bucket/runs/tiny/checkpoints/{checkpoint.name}"
    if store.exists(target):
        store.rm(target, recursive=True)
    store.put(str(checkpoint), target, recursive=True)


def test_what_was_fetched_is_fetched_anew_where_the_store_has_another(
    store: FaultyStore, tmp_path: Path
):
    """As after a rollback of the run that was copied."""
    step = f"{URL}/tiny/checkpoints/step_00000001"
    put(store, make_checkpoint(tmp_path / "undone", 1, "undone weights"))
    fetch(step, tmp_path)
    put(store, make_checkpoint(tmp_path / "anew", 1, "other weights"))
    for url in (step, f"{URL}/tiny"):
        fetched = fetch(url, tmp_path)
        assert (fetched / "__0_0.distcp").read_bytes() == b"other weights of step 1"


def test_the_newest_checkpoint_is_that_of_the_store(store: FaultyStore, tmp_path: Path):
    """Not the newest one that was ever fetched."""
    for step in (1, 2):
        put(store, make_checkpoint(tmp_path / "run", step))
    assert fetch(f"{URL}/tiny", tmp_path).name == "step_00000002"
    store.rm("/bucket/runs/tiny/checkpoints/step_00000002", recursive=True)
    assert fetch(f"{URL}/tiny", tmp_path).name == "step_00000001"


def test_weights_of_a_run_that_the_store_has_rolled_back_are_not_taken(
    trained: Config, store: FaultyStore, tiny: Config, run: Callable[..., str]
):
    """Fetched while they were there; the sentence names the URL."""
    fetch(f"{URL}/tiny", Path(tiny.out))
    store.rm("/bucket/runs/tiny/checkpoints/step_00000006", recursive=True)
    error = run(changed(tiny, f"run=later start_from={URL}/tiny"), code=2)
    assert f"start_from={URL}/tiny has step_00000003 as the last of its checkpoints" in error


@pytest.mark.parametrize("ending", ["", "/checkpoints/step_00000004"])
def test_what_is_not_in_the_store_is_the_users_mistake(
    store: FaultyStore, tiny: Config, run: Callable[..., str], ending: str
):
    config = changed(tiny, f"start_from={URL}/nothing{ending}")
    assert f"start_from={URL}/nothing{ending} holds no finished checkpoint" in run(config, code=2)


def test_a_store_that_gives_other_bytes_is_the_machines_fault(
    trained: Config, store: FaultyStore, tmp_path: Path
):
    store.faults[".distcp"] = ["flip"] * 99
    with pytest.raises(MachineError, match="could not be read .*is not what was written"):
        fetch(f"{URL}/tiny", tmp_path / "far")
    assert not list((tmp_path / "far").rglob("*.distcp")), "nothing half-written"


def test_a_manifest_that_names_files_elsewhere_is_refused(store: FaultyStore, tmp_path: Path):
    checkpoint = make_checkpoint(tmp_path / "bad", 1)
    manifest = json.dumps({"files": {"../evil": {"sha256": "0"}}}).encode()
    (checkpoint / "manifest.json").write_bytes(manifest)
    (checkpoint / "DONE").write_text(hashlib.sha256(manifest).hexdigest())
    store.put(str(checkpoint), "/bucket/runs/tiny/checkpoints/step_00000001", recursive=True)
    with pytest.raises(MachineError, match=r"names ../evil, which is no file of its folder"):
        fetch(f"{URL}/tiny", tmp_path)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("checkpoint.copy_to=nowhere://a", "checkpoint.copy_to=nowhere://a cannot be opened"),
        ("start_from=nowhere://a/run", "start_from=nowhere://a/run cannot be opened"),
        ("checkpoint.copy_to=/a/folder", "checkpoint.copy_to='/a/folder' is no URL: write it"),
    ],
)
def test_a_url_that_nothing_opens_is_refused_before_the_first_step(
    tiny: Config, run: Callable[..., str], words: str, sentence: str
):
    assert sentence in run(tiny, *words.split(), code=2)
    assert not (tiny.run_dir / "checkpoints").exists()


# ---------------------------------------------------------------------------- over a real protocol


class CuttingHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files; the first answers with a checkpoint's file end in the middle."""

    cuts: list[str] = []

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if path.suffix != ".distcp" or not self.cuts:
            super().do_GET()
            return
        self.cuts.pop()
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def log_message(self, *_: object):
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The URL of an HTTP server of tmp_path / "store"."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    (tmp_path / "store").mkdir()
    handler = partial(CuttingHandler, directory=str(tmp_path / "store"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_a_run_starts_from_an_http_server_that_cuts_answers_short(
    tiny: Config, run: Callable[..., str], server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trunk = changed(tiny, f"run=trunk checkpoint.copy_to=file://{tmp_path}/store")
    run(trunk)
    cuts = ["cut", "cut"]
    monkeypatch.setattr(CuttingHandler, "cuts", cuts)
    start = f"start_from={server}/trunk/checkpoints/step_00000006"
    fetched = fetch(start.removeprefix("start_from="), tmp_path / "out")
    assert cuts == []
    assert read_manifest(fetched) == read_manifest(latest(trunk.run_dir))
    taken = changed(tiny, f"run=taken start_from={server}/trunk")
    run(taken)
    assert rows(taken)[0]["loss"] < rows(trunk)[0]["loss"] - 0.5


# ------------------------------------------------------------------------------- tried how often?


@pytest.mark.parametrize("n_failures", [remote.ATTEMPTS - 1, remote.ATTEMPTS])
def test_a_transfer_is_tried_five_times_with_twice_the_pause_each_time(
    monkeypatch: pytest.MonkeyPatch, n_failures: int
):
    pauses: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    failures = [OSError(f"number {i}") for i in range(n_failures)]
    calls = iter(failures)

    def transfer() -> str:
        for failure in calls:
            raise failure
        return "transferred"

    if n_failures < 5:
        assert remote.attempted(transfer) == "transferred"
    else:
        with pytest.raises(OSError, match="number 4"):
            remote.attempted(transfer)
    assert pauses == [1.0, 2.0, 4.0, 8.0]
