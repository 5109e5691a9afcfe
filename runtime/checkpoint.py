"""Keep a run's checkpoints: save in the background, verify before reading, load at any world size,
branch off another run.

    out/<run>/checkpoints/
        step_00013500/
            __<rank>_0.distcp, .metadata  of torch.distributed.checkpoint (DCP)
            manifest.json                 JSON state, tensors, SHA-256 of each file
            DONE                          written last: the SHA-256 of manifest.json
        bad_step_00013500/    one that was found damaged, kept for inspection
        .tmp_step_00013500/   one that is being written or deleted; the next save or start removes
                              leftovers
    out/<run>/saved.json      the step of the first checkpoint that was complete, or null before it:
                              whether a run without checkpoints has lost them

Save: each rank copies its tensors to host memory (12 bytes a parameter). Then, in the background,
DCP writes and syncs them under a temporary name, each rank hashes its own files, rank 0 writes
manifest and DONE, renames the folder and deletes what the keep policy no longer wants. A stage that
fails on one rank fails on all and leaves nothing behind; the next due save tries again.

Read: DCP notices no flipped bit, casts other dtypes, and unpickles whatever `.metadata` names, so
that an untrusted folder runs its code (pytorch#189308, #190877). Here every file, name, shape and
dtype is compared with the manifest first, and the unpickler knows only the classes that describe
tensors."""

import hashlib
import json
import math
import os
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from lib.errors import MachineError, UserError
from lib.files import file_sha256, sync_folder, write_atomically, write_json
from lib.machine import GIB
from lib.sharding import is_dtensor
from model import GPT
from runtime.config import CheckpointConfig, Config, config_from_dict, read_config
from runtime.optim import check_branch, local
from runtime.parallel import World
from runtime.remote import CheckpointCopies, fetch, is_url
from runtime.tokenizer import tokenizer_of

FORMAT_VERSION = 3  # 2, which names runtime/run.py's Progress otherwise, is read too
FORMAT_2_NAMES = {"moved_on": "data_offset", "train_s": "seconds", "probe_s": "probe_seconds"}
# files hashed at a time: SHA-256 runs at about 1.8 GB/s a core, a disk rarely faster than four
HASHERS = 4
# failed saves in a row after which going on only burns hours that no checkpoint will hold
ATTEMPTS = 3

T = TypeVar("T")


class DamagedError(UserError):
    """A checkpoint is not what was written, or cannot be read."""


def checkpoints(run_dir: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    done = [p.parent for p in (Path(run_dir) / "checkpoints").glob("step_*/DONE")]
    return sorted((p for p in done if re.fullmatch(r"step_\d{8,}", p.name)), key=step_of)


def latest(run_dir: Path) -> Path | None:
    return next(reversed(checkpoints(run_dir)), None)


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


# ---------------------------------------------------------------- has a run ever had a checkpoint?

SAVED = "saved.json"


@dataclass(frozen=True)
class Saved:
    """saved.json: outside of checkpoints/, so that it outlives that folder."""

    schema_version: int = 1
    # step of the first checkpoint that was complete; None before it
    first_checkpoint: int | None = None


def read_saved(run_dir: Path) -> Saved | None:
    """None where there is none: the run was begun by a version that wrote none, or its file is
    damaged."""
    with suppress(OSError, ValueError, TypeError):
        return Saved(**json.loads((Path(run_dir) / SAVED).read_text()))
    return None


def note_saved(run_dir: Path, step: int | None, is_anew: bool = False) -> None:
    """Note that the run has a complete checkpoint of `step`, or (None) that it begins without one.
    What was noted first stays, unless the run begins anew."""
    saved = read_saved(run_dir)
    if not is_anew and saved is not None and (step is None or saved.first_checkpoint is not None):
        return
    write_json(Path(run_dir) / SAVED, asdict(Saved(first_checkpoint=step)))


# -------------------------------------------------------------------------------------------- save


class Saver:
    """Saves one run's checkpoints, one at a time, from all ranks, which call each method together.
    `losses` tells rank 0 the validation losses so far, by step: the best checkpoint among those
    that have one is kept. `copies`, on rank 0, are told of each."""

    def __init__(
        self,
        run_dir: Path,
        policy: CheckpointConfig,
        world: World,
        losses: Callable[[], dict[int, float]],
        copies: CheckpointCopies | None = None,
    ):
        self.dir = Path(run_dir) / "checkpoints"
        self.policy = policy
        self.world = world
        self.losses = losses
        self.copies = copies
        self.failures: list[str] = []  # a sentence on each save that failed since the last good one
        # that the last good save took, from its call to its end; None before the first
        self.seconds: float | None = None
        self._pending: tuple[str, Future | None] = "", None  # the checkpoint being saved
        self._copies: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        run_on_rank0(world, self._sweep)

    @torch.no_grad()
    def save(
        self, step: int, tensors: dict[str, torch.Tensor], state: dict, config: Config
    ) -> None:
        """Wait for the save before this one, begin and return; staged() must come before anything
        that changes `tensors`. `state` is plain JSON. Raises MachineError after ATTEMPTS failed
        saves in a row."""
        self.wait()
        asked_s = time.perf_counter()
        if len(self.failures) >= ATTEMPTS:
            raise MachineError(
                f"{ATTEMPTS} saves in a row have failed, the last: {self.failures[-1]}"
            )
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "state": json.loads(json.dumps(state)),
            "config": asdict(config),
            "torch": str(torch.__version__),
            "world_size": self.world.size,
            "tensors": describe(tensors),
        }
        self._copy(tensors)
        self._pending = name_of(step), self._thread.submit(self._write, manifest, asked_s)

    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        """Begin to copy this rank's shards to host memory."""
        if self._stream:  # copies run on a stream of their own, behind what is queued now
            self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._stream):  # does nothing where there is none
            for name, live in tensors.items():
                if name not in self._copies:
                    self._copies[name] = _host_buffer(live)
                local(self._copies[name]).copy_(local(live), non_blocking=True)
            self._copied = self._stream.record_event() if self._stream else None

    def staged(self) -> None:
        """Wait until the tensors may change again. On CUDA the device waits, the host goes on."""
        if self._copied:
            torch.cuda.current_stream(self.world.device).wait_event(self._copied)

    def roll_back(self, step: int) -> None:
        """Delete the checkpoints of later steps, so that no resume continues from one."""
        self.wait()
        run_on_rank0(self.world, lambda: self._remove_after(step))

    def _remove_after(self, step: int) -> None:
        paths = checkpoints(self.dir.parent)
        # a branch goes back to its trunk, and on without any of its own
        has_none_left = all(step_of(path) > step for path in paths)
        is_noted = not has_none_left or self._try_to_note_none()
        if self.copies is not None:
            self.copies.roll_back(step)
        # Newest first: a kill in between leaves the fewest of those that are to go.
        for path in reversed(paths):
            if step_of(path) > step:
                _remove(path)
        if not is_noted:
            self._try_to_note_none()  # what was removed may have made room

    def _try_to_note_none(self) -> bool:
        """Note that the run has no complete checkpoint; whether there was room for it. Where there
        was none, a kill before the next checkpoint has the next start ask for those that are
        gone."""
        with suppress(OSError):
            note_saved(self.dir.parent, None, is_anew=True)
            return True
        return False

    def wait(self) -> None:
        """Wait for the save under way, if any. Raises nothing, however it ended: error paths call
        it too."""
        name, pending = self._pending
        self._pending = "", None
        if pending is None:
            return
        if error := pending.exception():
            self.failures.append(
                f"checkpoint {name} could not be written under {self.dir} ({error})"
            )
        else:
            self.failures = []

    def finish(self) -> None:
        """Wait for the save under way. Raises MachineError where the last one failed."""
        self.wait()
        if self.failures:
            raise MachineError(
                f"{self.failures[-1]}: correct that, then run the same command to resume"
            )

    def _write(self, manifest: dict, asked_s: float) -> None:
        """All of a save but the copies, in a background thread of each rank. Where it fails, it
        raises the same error on all. `asked_s`: when it was asked for, in seconds of
        time.perf_counter()."""
        is_main = self.world.is_main
        final = self.dir / name_of(manifest["step"])
        tmp = final.with_name(f".tmp_{final.name}")
        try:
            if self._together(lambda: self._begin(tmp, final))[0]:
                return
            files = self._together(lambda: dump(tmp, self._copies, self.world))
            self._together(lambda: is_main and self._commit(tmp, final, manifest, files))
        finally:
            if is_main:
                shutil.rmtree(tmp, ignore_errors=True)  # renamed by now, unless a stage failed
        self.seconds = time.perf_counter() - asked_s
        if is_main:
            with suppress(OSError):  # the save itself is good; the next one tries again
                note_saved(self.dir.parent, manifest["step"])
        if not is_main:
            return
        if self.copies is not None:
            self.copies.copy(final)  # a rollback undoes it in the store too
        # In a row of skips these weights may be what is wrong: the next good save prunes, or a
        # rollback deletes this one.
        if not manifest["state"].get("guard", {}).get("consecutive"):
            self._prune()

    def _prune(self) -> None:
        """Delete the checkpoints that the policy does not keep."""
        paths = {step_of(path): path for path in checkpoints(self.dir.parent)}
        keep = steps_to_keep(list(paths), self.policy, dict(self.losses()))
        if self.copies is not None:
            keep |= {step_of(path) for path in self.copies.under_way()}
        for step in paths.keys() - keep:
            with suppress(OSError):  # the save itself is good; the next one tries again
                _remove(paths[step])

    def _together(self, stage: Callable[[], T]) -> list[T]:
        """The stage's result on each rank. Raises RuntimeError on every rank where it failed on
        one."""

        def attempt() -> T:
            try:
                return stage()
            except checkpoint_errors() as error:
                rank = next(iter(getattr(error, "failures", ())), self.world.rank)
                # where the disk is full, torch's own words do not say so
                free = shutil.disk_usage(self.dir).free / GIB
                raise RuntimeError(
                    f"rank {rank}: {cause(error)}; {free:.3g} GiB are free on its disk"
                ) from error

        return together(attempt, self.world)

    def _begin(self, tmp: Path, final: Path) -> bool:
        """Wait for the copies; rank 0 makes the folder. Returns whether the checkpoint exists
        already, as after a resume."""
        if self._copied:
            torch.cuda.set_device(self.world.device)  # each thread has a current device of its own
            self._copied.synchronize()
        is_complete = (final / "DONE").exists()
        if self.world.is_main and not is_complete:
            self._sweep()
            tmp.mkdir()
        return is_complete

    def _commit(self, tmp: Path, final: Path, manifest: dict, files: list[dict]) -> None:
        entries: dict[str, dict] = {}
        for entries_of_rank in files:
            entries |= entries_of_rank
        manifest["files"] = entries
        absent = [name for name in entries if not (tmp / name).is_file()]
        if absent:
            raise OSError(
                f"{absent[0]}, which another rank wrote, is not there on rank 0: all machines must"
                " share this folder"
            )
        seal(tmp, manifest)
        shutil.rmtree(final, ignore_errors=True)  # a folder without DONE: never a whole checkpoint
        os.rename(tmp, final)
        sync_folder(self.dir)

    def _sweep(self) -> None:
        """Remove what a killed or failed save left."""
        self.dir.mkdir(parents=True, exist_ok=True)
        for leftover in self.dir.glob(".tmp_*"):
            # on NFS a reader's open file may keep it; the next sweep tries again
            shutil.rmtree(leftover, ignore_errors=True)


def _host_buffer(live: torch.Tensor) -> torch.Tensor:
    """Host memory for this rank's shard of `live`, described as `live` is."""
    shard = local(live)
    # pinned for a GPU, or the copy would not be asynchronous
    buffer = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.device.type == "cuda")
    if not is_dtensor(live):
        return buffer
    from torch.distributed.tensor import DTensor

    # from_local() would move it to the mesh's device. FSDP2 makes its CPU-offloaded parameters in
    # this way.
    return DTensor(buffer, live._spec, requires_grad=False)


def is_due(step: int, *periods: int | None) -> bool:
    """Whether `step` is a multiple of one of the periods, in steps; None is no period."""
    return any(step % every == 0 for every in periods if every)


def steps_to_keep(steps: list[int], policy: CheckpointConfig, losses: dict[int, float]) -> set[int]:
    """Which of the checkpoints of `steps`, in ascending order, stay on disk. losses: the validation
    losses so far, by step.

    The two newest always do: the last update before the newest may have ruined its weights, which
    shows only in the step after it. Those of checkpoint.at stay for good. One that is due to
    rolling alone, or to nothing (saved on a signal, or late because of skipped steps), is a rolling
    one; without checkpoint.rolling it is a regular one."""
    pinned = {s for s in steps if s in policy.at or is_due(s, policy.forever)}
    regular = [s for s in steps if is_due(s, policy.every)]
    rolling = [s for s in steps if s not in regular and s not in policy.at]
    if not policy.rolling:
        regular = sorted(regular + rolling)
        rolling = []
    newest = {*steps[-2:], *regular[-policy.keep :], *rolling[-1:]}
    if policy.average is not None:
        newest.update(steps_to_average(steps, policy.every, policy.average))
    return newest | pinned | _best_steps(steps, policy, losses)


def steps_to_average(steps: list[int], every: int | None, count: int) -> list[int]:
    """Of the checkpoints of `steps`, in ascending order, the last `count` among those that
    checkpoint.every saves and the newest: whatever a stop has saved between them, the same."""
    return [step for step in steps if is_due(step, every) or step == steps[-1]][-count:]


def _best_steps(steps: list[int], policy: CheckpointConfig, losses: dict[int, float]) -> set[int]:
    """The step of lowest finite validation loss, the last of equals; none unless
    checkpoint.best."""
    judged = [s for s in steps if math.isfinite(losses.get(s, math.nan))]
    if not policy.best or not judged:
        return set()
    return {min(judged, key=lambda s: (losses[s], -s))}


def dump(
    folder: Path, tensors: dict[str, torch.Tensor], world: World | None = None
) -> dict[str, dict]:
    """Write this rank's files; returns size and SHA-256 of each, by name, hashed while they are in
    its own page cache."""
    import torch.distributed.checkpoint as dcp

    # Where there is a GPU, copying ahead waits for the stream that trains each 10 MB, though all is
    # on the host already.
    dcp.save(
        tensors,
        storage_writer=dcp.FileSystemWriter(folder, per_thread_copy_ahead=0),
        **_process_group(world),
    )
    rank = world.rank if world else 0
    written = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        written.insert(0, folder / ".metadata")
    return {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in written}


def _remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, since half a deletion must not look like a checkpoint."""
    trash = path.with_name(f".tmp_{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)  # else the next save's sweep removes it


# --------------------------------------------------------------------------------- verify and load


def seal(folder: Path, manifest: dict) -> None:
    """Write manifest.json, then DONE with its SHA-256, both synced: a folder that has the two is a
    checkpoint."""
    text = json.dumps(manifest, indent=1)
    write_atomically(folder / "manifest.json", text)
    write_atomically(folder / "DONE", hashlib.sha256(text.encode()).hexdigest())


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint, every file it lists verified by its hash; a format 2 state
    under today's names.

    Raises DamagedError naming the file that is missing or changed, UserError for another format
    version."""

    try:
        text = (path / "manifest.json").read_bytes()
        if (path / "DONE").read_bytes() != hashlib.sha256(text).hexdigest().encode():
            raise _damaged(path / "manifest.json")
        manifest = json.loads(text)
        version = manifest["format_version"]
        if version not in (2, FORMAT_VERSION):
            raise UserError(
                f"{path} has checkpoint format {version}, this version reads 2 and"
                f" {FORMAT_VERSION}: use the version that wrote it, or start the run anew"
            )
        _verify_files(path, manifest["files"])
    except FileNotFoundError as error:  # any other OSError is the machine's
        raise _damaged(path / Path(error.filename).name) from error
    if version == 2:
        manifest["state"] = {
            FORMAT_2_NAMES.get(name, name): value for name, value in manifest["state"].items()
        }
    return manifest


def _verify_files(path: Path, entries: dict[str, dict]) -> None:
    """Raises DamagedError for the first file that differs from its entry in the manifest."""
    with ThreadPoolExecutor(HASHERS) as pool:
        hashes = pool.map(lambda name: file_sha256(path / name), entries)
        for name, sha256 in list(zip(entries, hashes, strict=True)):
            if sha256 != entries[name]["sha256"]:
                raise _damaged(path / name)


def _damaged(file: Path) -> DamagedError:
    return DamagedError(
        f"{file} differs from what was written or is missing: move {file.parent} away for an"
        " older one"
    )


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    """Shape and dtype of each, as the manifest has them."""
    return {name: [list(t.shape), str(t.dtype)] for name, t in tensors.items()}


@dataclass(frozen=True)
class Restored:
    """A checkpoint that tensors were filled from."""

    path: Path
    manifest: dict

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def state(self) -> dict:
        """What the run that wrote it knew besides the tensors: progress, guard, data."""
        return self.manifest["state"]


def restore(
    run_dir: Path,
    tensors: dict[str, torch.Tensor],
    world: World | None,
    say: Callable[[str], None],
    below_step: int | None = None,
) -> Restored | None:
    """Fill `tensors` in place from the newest whole checkpoint (of a step below `below_step`, where
    given), by all ranks together; None where there is none. No save may be under way, whose
    collectives would mix with these. A damaged one is renamed to bad_step_00000400, and `say`, on
    rank 0 alone, gets a line about it. Raises UserError where the newest does not fit."""
    newest = run_on_rank0(world, lambda: _newest_whole(run_dir, say, below_step))
    if newest is not None:
        load(newest.path, newest.manifest, tensors, world)
    return newest


def _newest_whole(
    run_dir: Path, say: Callable[[str], None], below_step: int | None
) -> Restored | None:
    """The newest checkpoint of a step below `below_step` whose files are what was written; damaged
    ones are set aside."""
    for path in reversed(checkpoints(run_dir)):
        if below_step is not None and step_of(path) >= below_step:
            continue
        try:
            return Restored(path, read_manifest(path))
        except DamagedError as error:
            say(_set_aside(path, error))
    return None


def _set_aside(path: Path, damage: DamagedError) -> str:
    """Rename a damaged checkpoint, so that nothing reads it again; a line about it."""
    aside = path.with_name(f"bad_{path.name}")
    while aside.exists():  # an earlier one of that step stays too
        aside = aside.with_name(f"{aside.name}_again")
    os.rename(path, aside)
    problem = str(damage).partition(": move ")[0]
    return f"checkpoint {path.name} is damaged, set aside as {aside.name}: {problem}"


def load(
    path: Path, manifest: dict, tensors: dict[str, torch.Tensor], world: World | None = None
) -> None:
    """Fill `tensors`, sharded or not, in place from a checkpoint of any world size; by all ranks
    together.

    Raises UserError where the checkpoint lacks one of them or holds it in another shape or dtype;
    MachineError, on all ranks, where reading failed on one of them."""
    for name, needed in describe(tensors).items():
        stored = manifest["tensors"].get(name)
        if stored != needed:
            raise UserError(
                f"{path} holds {name} as {stored}, the model needs {needed}: the configuration does"
                " not fit"
            )

    import torch.distributed.checkpoint as dcp

    def read() -> None:
        reader = dcp.FileSystemReader(path)
        # here, as DCP of torch 2.11 goes on without what it cannot read
        with open(path / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        reader.read_metadata = lambda *args, **kwargs: metadata  # type: ignore[method-assign]
        dcp.load(tensors, storage_reader=reader, **_process_group(world))

    try:
        together(read, world)
    except checkpoint_errors() as error:
        raise MachineError(
            f"{path} could not be loaded ({cause(error)}): run the same command again, or move it"
            " away to use the one before it"
        ) from error


def load_mean(
    points: Sequence[Restored], tensors: dict[str, torch.Tensor], world: World | None = None
) -> None:
    """Fill `tensors`, sharded or not, in place with their mean over checkpoints, summed in fp64; by
    all ranks together. Raises as load()."""
    sums = {name: torch.zeros_like(local(t), dtype=torch.float64) for name, t in tensors.items()}
    for point in points:
        load(point.path, point.manifest, tensors, world)
        for name, t in tensors.items():
            sums[name] += local(t)
    for name, t in tensors.items():
        local(t).copy_(sums.pop(name) / len(points))


def points_to_average(
    run_dir: str | Path, every: int | None, count: int, last_step: int
) -> list[Restored]:
    """The last `count` checkpoints that steps_to_average() names, or fewer, up to `last_step`, each
    verified. Raises UserError where one is damaged."""
    paths = [path for path in checkpoints(Path(run_dir)) if step_of(path) <= last_step]
    last_paths = _paths_to_average(paths, every, count)
    return [Restored(path, read_manifest(path)) for path in last_paths]


def whole_points_to_average(
    run_dir: Path, every: int | None, count: int, say: Callable[[str], None]
) -> list[Restored]:
    """The same up to the run's end, of a run that is ending: damaged ones are left out and set
    aside, and `say` gets a line about each. Raises UserError where the newest is damaged: the next
    start of the run trains its steps again."""
    points = []
    for path in _paths_to_average(checkpoints(run_dir), every, count):
        try:
            points.append(Restored(path, read_manifest(path)))
        except DamagedError as error:
            if path == latest(run_dir):
                raise
            say(_set_aside(path, error))
    return points


def _paths_to_average(paths: list[Path], every: int | None, count: int) -> list[Path]:
    steps = steps_to_average([step_of(path) for path in paths], every, count)
    return [path for path in paths if step_of(path) in steps]


def load_model(
    run_dir: str | Path,
    device: str | torch.device = "cpu",
    compute_dtype: torch.dtype = torch.bfloat16,
    step: int | None = None,
    average: int = 1,
) -> tuple[GPT, Config]:
    """The newest checkpoint of a run, or that of `step`, as a plain model, whatever precision and
    world size trained it. average: the mean of so many checkpoints that end with it.

    Raises UserError where the folder is no run, has no such finished checkpoint, or the checkpoint
    is damaged; where there are fewer to average."""
    config = read_config(run_dir)
    paths = {step_of(path): path for path in checkpoints(Path(run_dir))}
    if not paths:
        raise UserError(
            f"{run_dir} has no finished checkpoint yet: train it first, by the command in"
            f" {Path(run_dir) / 'env.json'}"
        )
    path = paths.get(max(paths) if step is None else step)
    if path is None:
        raise UserError(
            f"step={step}: {run_dir} has no such checkpoint, but those of steps"
            f" {', '.join(map(str, paths))}"
        )
    if average < 1:
        raise UserError(f"average={average} must be 1, for one checkpoint, or more")
    points = points_to_average(run_dir, config.checkpoint.every, average, step_of(path))
    if len(points) < average:
        raise UserError(
            f"average={average}: of the checkpoints of every {config.checkpoint.every} steps"
            f" {run_dir} has {len(points)} up to {path.name}: average fewer, or keep more"
            " (checkpoint.keep, checkpoint.average)"
        )
    model = GPT.on_meta(config_from_dict(points[-1].manifest["config"]).model, compute_dtype)
    model.to_empty(device=device)
    model.tie()
    model.init_buffers()
    model.requires_grad_(False)
    weights: dict[str, torch.Tensor] = {f"model.{n}": p for n, p in model.named_parameters()}
    if average == 1:
        load(points[-1].path, points[-1].manifest, weights)
    else:
        load_mean(points, weights)
    return model, config


class _Unpickler(pickle.Unpickler):
    """For DCP's metadata, which can name nothing but tensors."""

    # without BytesStorageMetadata: DCP unpickles what it describes, even under the name of a tensor
    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "bfloat16", "float16", "int64", "strided"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # Python 3.13's name of it
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(
            f"its .metadata names {module}.{name}, which no checkpoint of ours contains: it is"
            " refused because loading it could run code"
        )


# ------------------------------------------------------------------------------------------ branch


@dataclass(frozen=True)
class BranchPoint(Restored):
    """The checkpoint that a run starts from, of another run or of an imported model.

    origin: None where the run goes on with its whole state. Where it takes the weights alone,
    without moments and order of data: the model that they are of, as {"folder", "step",
    "tokenizer_sha256", "run"}."""

    origin: dict | None = None


# Sizes on which no weight depends.
FREE_SIZES = ("n_ctx", "loss_chunk")


def branch(
    config: Config,
    tokenizer_hashes: tuple[str, ...],
    tensors: dict[str, torch.Tensor],
    world: World | None,
) -> BranchPoint:
    """Fill `tensors` in place from the checkpoint config.start_from, by all ranks together; the
    weights alone where it is a model by eval/export.py, or a finished run. Raises UserError where
    there is none, it is damaged, or it does not fit this run."""
    point = run_on_rank0(world, lambda: _find_branch_point(config, tokenizer_hashes))
    if point.origin is not None:
        tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
    load(point.path, point.manifest, tensors, world)
    return point


def _checkpoint_to_start_from(config: Config) -> Path:
    """The checkpoint that config.start_from names, of a run its newest, or what was fetched from
    its URL; a folder without any as it is."""
    assert config.start_from is not None
    if is_url(config.start_from):
        return fetch(config.start_from, Path(config.out))
    path = Path(config.start_from)
    return path if path.name.startswith("step_") else latest(path) or path


def _find_branch_point(config: Config, tokenizer_hashes: tuple[str, ...]) -> BranchPoint:
    assert config.start_from is not None
    # else a run: its last checkpoint's weights
    names_a_step = Path(config.start_from).name.startswith("step_")
    path = _checkpoint_to_start_from(config)
    run_dir = path.parent.parent if path.name.startswith("step_") else path
    finished = checkpoints(run_dir)
    if path not in finished:
        names = ", ".join(checkpoint.name for checkpoint in finished) or "none"
        raise UserError(
            f"start_from={config.start_from} is no finished checkpoint; {run_dir} has {names}:"
            " train that run first (checkpoint.at=STEP keeps a step), or import one, python -m"
            f" eval.export --from-hf DIR {run_dir}"
        )
    manifest = read_manifest(path)
    parent = config_from_dict(manifest["config"])
    imported = manifest["state"].get("imported")
    if imported is None and names_a_step:
        check_branch(config, parent, manifest["step"])
        return BranchPoint(path, manifest)
    if imported is None:
        imported = _origin_of_a_run(config, path, parent, manifest)
    _refuse_another_model(config, parent, run_dir, imported, tokenizer_hashes)
    # the run's folder too, which an import's own name is not
    return BranchPoint(path, manifest, {**imported, "run": run_dir.name})


def _origin_of_a_run(config: Config, path: Path, parent: Config, manifest: dict) -> dict:
    """What the run `parent`, whose weights are taken alone, is called as their origin. Raises
    UserError where `path` is not the checkpoint of its last step."""
    run_dir = path.parent.parent
    if step_of(path) != parent.total_steps:
        raise UserError(
            f"start_from={config.start_from} has {path.name} as the last of its checkpoints, not"
            f" that of its last step, {parent.total_steps}: finish that run, or put that checkpoint"
            " back"
        )
    return {
        "folder": run_dir.name,
        "step": step_of(path),
        "tokenizer_sha256": manifest["state"]["tokenizer_sha256"],
    }


def _refuse_another_model(
    config: Config,
    parent: Config,
    run_dir: Path,
    origin: dict,
    tokenizer_hashes: tuple[str, ...],
) -> None:
    """Raises UserError where the weights of `parent` do not fit the model or tokenizer of
    `config`."""
    parent_sizes = _sizes(parent)
    sizes = _sizes(config)
    changes = [
        f"model.{key} is {parent_sizes[key]} there, {sizes[key]} here"
        for key in sizes
        if parent_sizes[key] != sizes[key]
    ]
    if origin["tokenizer_sha256"] not in tokenizer_hashes:
        changes.append(
            f"data.tokenizer is {tokenizer_of(run_dir, parent.data.tokenizer)} there,"
            f" {config.data.tokenizer} here"
        )
    if changes:
        raise UserError(
            f"start_from={config.start_from} is another model: {'; '.join(changes)}; give the model"
            " section of its config.json, of which n_ctx and loss_chunk alone are free, and shards"
            " of its tokenizer"
        )


def _sizes(config: Config) -> dict[str, object]:
    """The model section without FREE_SIZES, with what is left to its default spelled out."""
    m = config.model
    sizes = asdict(replace(m, n_kv_head=m.kv_heads, head_size=m.head_dim))
    return {key: value for key, value in sizes.items() if key not in FREE_SIZES}


# ------------------------------------------------------------------------------------------- ranks


def run_on_rank0(world: World | None, work: Callable[[], T]) -> T:
    """What work() returns on rank 0, on every rank; what it raises there is raised on every rank.
    None: one process."""
    return together(lambda: work() if world is None or world.is_main else cast(T, None), world)[0]


def together(work: Callable[[], T], world: World | None) -> list[T]:
    """What work() returns on each rank, by rank, on every rank; what it raises on one is raised on
    all."""
    result: T | None = None
    problem: BaseException | None = None
    try:
        result = work()
    except checkpoint_errors() as error:
        problem = error
    outcomes = gather((result, problem), world)
    problems = [problem_of_rank for _, problem_of_rank in outcomes if problem_of_rank is not None]
    if problems:
        # this rank's own, where it has one: that knows where it was raised
        raise problem or problems[0]
    return [result_of_rank for result_of_rank, _ in outcomes]


def gather(value: object, world: World | None) -> list:
    """Every rank's `value`, by rank, on every rank."""
    if world is None or world.size == 1:
        return [value]
    values = [value] * world.size
    dist.all_gather_object(values, value, group=world.checkpoint_group)
    return values


def checkpoint_errors() -> tuple[type[BaseException], ...]:
    """What saving and loading may raise. DCP's own error is a BaseException, which `except
    Exception` misses."""
    from torch.distributed.checkpoint.api import CheckpointException

    return Exception, CheckpointException


def cause(error: BaseException) -> str:
    """DCP wraps each rank's error in one of its own; the first rank's is the one to read."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    return f"{type(inner).__name__}: {inner}".splitlines()[0]


def _process_group(world: World | None) -> dict[str, Any]:
    """Arguments of dcp.save() and dcp.load()."""
    group = world and world.checkpoint_group
    # one process is no mistake
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    return {"process_group": group, "no_dist": group is None}
