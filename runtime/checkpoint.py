"""Read tensors from a checkpoint without running what its pickled metadata names.

torch.distributed.checkpoint (DCP) unpickles `.metadata` without a look, and whatever that calls no tensor too: reading an
untrusted folder runs its code (pytorch#189308, #190877). This reader knows the dozen harmless classes that the metadata of
tensors is made of, refuses the rest, and reads no file but those that were verified.


checkpoint: Know what of a run is on disk: its checkpoints, held against their hashes before anything is read from them.

    out/<run>/checkpoints/step_00013500/    __<rank>_0.distcp, .metadata     torch.distributed.checkpoint (DCP)
                                            manifest.json                    JSON state, tensors, SHA-256 of each file
                                            DONE                             written last: the SHA-256 of manifest.json
    out/<run>/checkpoints/bad_step_00013500/    one that was found damaged, kept for inspection

DCP itself notices a truncated file but no flipped bit, drops what was not asked for and casts what has another dtype, so
all is compared with the manifest first. Tensors and JSON only: nothing that is read can run code (runtime/checkpoint.py).


saver: Save a run's checkpoints beside its training, such that no fault costs more than the save it falls into.

A save goes through these stages, all but the first beside the steps that follow, on every rank alike:

    copied       the tensors, to host memory that is kept for the next save; optimizer.step() waits for this one
    written      by DCP, under a temporary name, each file synced
    hashed       each rank its own files; rank 0 puts the hashes into the manifest, then writes DONE
    renamed      from here on it is a checkpoint
    pruned       what the keep policy no longer wants goes

After each stage the ranks hear of each other's failures. A save that fails is noted and leaves nothing behind; the run goes
on, and the next due save tries again.

The copies stay for the whole run and take as much host memory as the rank's own share of weights and moments, 12 bytes a
parameter. On CUDA they are pinned, and torch pins whole powers of two (ATen's CachingHostAllocator): always less than twice as
much, for configs/gpt* 1.3 to 1.5 times.


begin: Begin a run from a checkpoint of another: the rest of a schedule, or the weights of an imported model alone.

A branch goes on with all that its parent had (weights, moments, step); see runtime/optim.py for when it may. An imported
checkpoint (eval/from_hf.py) is at step 0 and holds weights alone: the run has a data order, moments and schedule of its own.

"""

import hashlib
import json
import math
import os
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from model import GPT
from runtime.cli import MachineError, UserError
from runtime.config import CheckpointConfig, Config, config_from_dict, read_config
from runtime.optim import check_branch

# --------------------------------------------------------------------------------------------------------------- reader

class TensorReader(dcp.FileSystemReader):
    """DCP's reader, except that its pickled metadata can name nothing but tensors in the files that were verified."""

    def __init__(self, path: Path, files: dict):
        super().__init__(path)
        self.files = files

    def read_metadata(self, *args, **kwargs) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        # What is no tensor would be unpickled by DCP without a look, whatever was asked for under its name.
        if not all(isinstance(item, TensorStorageMetadata) for item in metadata.state_dict_metadata.values()):
            raise ValueError("the checkpoint's .metadata holds something else than tensors, which loading could run as code")
        for place in metadata.storage_data.values():
            if place.relative_path not in self.files or getattr(place, "transform_descriptors", None):
                raise ValueError(f"the checkpoint's .metadata points at {place.relative_path!r}, which the manifest does not "
                                 f"list")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "_MEM_FORMAT_ENCODING"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "bfloat16", "float16", "int64", "strided"},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "PurePosixPath"},
    }

    def find_class(self, module: str, name: str):
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"the checkpoint's .metadata names {module}.{name}, which no checkpoint of ours contains: "
                          f"it is refused because loading it could run code")


# ----------------------------------------------------------------------------------------------------------- checkpoint

FORMAT_VERSION = 3      # 3: the state names runtime/run.py's Progress as it does; 2 is read too
HASHERS = 4             # files hashed at a time: SHA-256 runs at about 1.8 GB/s a core, a disk rarely faster than four


class DamagedError(UserError):
    """A checkpoint is not what was written; `reason` is the message without its advice."""

    def __init__(self, reason: str, path: Path | None = None):
        super().__init__(f"{reason}: move {path} away to go on from the checkpoint before it" if path else reason)
        self.reason = reason


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


def branch_point(config: Config) -> Path:
    """The checkpoint that config.start_from names. Raises UserError: it is the run's own, or not (all) there."""
    path = Path(config.start_from)
    run_dir = path.parent.parent
    if run_dir.resolve() == config.run_dir.resolve():
        raise UserError(f"start_from={path} is a checkpoint of this very run: leave start_from out to resume the run, or "
                          f"choose another run=")
    if path not in (there := checkpoints(run_dir)):
        raise UserError(f"start_from={path} is no finished checkpoint; {run_dir} has "
                          f"{', '.join(p.name for p in there) or 'none'}: train that run past this step with "
                          f"checkpoint.at={config.parent[1]}, or leave start_from out: the whole run ends in the same weights")
    return path


# ----------------------------------------------------------------------------------------------------------- restoring

def restore(run_dir: Path, tensors: dict[str, torch.Tensor], world, say: Callable[[str], None],
            before: int | None = None) -> tuple[Path, dict] | None:
    """Fill `tensors` in place from the newest checkpoint that is whole; returns its folder and manifest, or None where
    there never was one. All ranks of `world` call it together and get the same; they are in no other collective.

    One that fails while it is loaded, on any rank, is set aside like one whose hashes fail (see newest_good).
    """
    failed = None
    while found := run_on_rank0(world, partial(_newest_good, run_dir, say, before, failed)):
        try:
            load(*found, tensors, world)
            return found
        except DamagedError as error:       # on every rank or on none, so all come round again
            failed = found[0], error
    return None


def newest_good(run_dir: Path, world, say: Callable[[str], None], before: int | None = None) -> tuple[Path, dict] | None:
    """The newest checkpoint (of a step below `before`, where given) whose files are what was written, and its manifest.

    Rank 0 looks, newest first, and every rank gets its choice. A damaged one is set aside, as bad_step_00000400 for one,
    and `say`, on rank 0 alone, gets a line about it. None where there is none. Raises MachineError where there are only
    damaged ones, now or set aside by an earlier start: a run never starts over silently; UserError for another format version.
    """
    return run_on_rank0(world, partial(_newest_good, run_dir, say, before))


def _newest_good(run_dir: Path, say: Callable[[str], None], before: int | None,
                 failed: tuple[Path, DamagedError] | None = None) -> tuple[Path, dict] | None:
    if failed:
        _set_aside(*failed, say)
    for path in reversed(there := [p for p in checkpoints(run_dir) if before is None or step_of(p) < before]):
        try:
            return path, read_manifest(path)
        except DamagedError as error:
            _set_aside(path, error, say)
    folder = Path(run_dir) / "checkpoints"
    bad = sorted(p.name for p in folder.glob("bad_step_*"))
    if there or failed or (bad and before is None):
        raise MachineError(f"{folder} holds no checkpoint that is whole; damaged are {', '.join(bad)}: put back a copy of one "
                              f"as step_{bad[-1].split('_')[2]}, or delete {run_dir} to start the run over")
    return None


def _set_aside(path: Path, error: DamagedError, say: Callable[[str], None]) -> None:
    bad, count = path.with_name(f"bad_{path.name}"), 1
    while bad.exists():     # an earlier one of that step: both stay
        bad, count = path.with_name(f"bad_{path.name}_{count + 1}"), count + 1
    try:
        os.rename(path, bad)
    except OSError as problem:      # to go on with an older one would write newer ones beside this
        raise MachineError(f"{path} is damaged ({error.reason}) and cannot be renamed ({problem.strerror}): correct the "
                              f"folder's rights, or move it away") from problem
    say(f"checkpoint {path.name} is damaged, set aside as {bad.name}: {error.reason}")


def discard_after(run_dir: Path, step: int, world) -> None:
    """Delete the checkpoints of later steps, which a rollback undoes, so that no resume takes them up; by all ranks."""
    newest_first = reversed(checkpoints(run_dir))
    run_on_rank0(world, lambda: [remove(path) for path in newest_first if step_of(path) > step])


def remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, since half a deletion must not look like a checkpoint."""
    trash = path.with_name(f".tmp_{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(path, trash)
    shutil.rmtree(trash)


def run_on_rank0(world, work: Callable[[], object]) -> object:
    """What work() returns on rank 0, on every rank; what it raises there is raised on every rank. None: one process."""
    result = error = None
    if world is None or world.is_main:
        try:
            result = work()
        except Exception as problem:
            error = problem
    if world is not None and world.size > 1:
        box = [(result, error)]
        dist.broadcast_object_list(box, src=0, group=world.checkpoint_group)
        result, error = box[0]
    if error is not None:
        raise error
    return result


def gather(value: object, world) -> list:
    """Every rank's `value`, by rank, on every rank."""
    if world is None or world.size == 1:
        return [value]
    values = [None] * world.size
    dist.all_gather_object(values, value, group=world.checkpoint_group)
    return values


# ------------------------------------------------------------------------------------------------- one checkpoint's files

def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint, every file it lists verified by size and hash.

    Raises DamagedError naming the file that is missing or changed, UserError for another format version.
    """
    try:
        return _verified(path)
    except PermissionError as error:    # no damage
        raise UserError(f"{error.filename} may not be read: correct its rights") from error
    except OSError as error:
        raise DamagedError(f"{error.filename or path} cannot be read ({error.strerror})", path) from error


def _verified(path: Path) -> dict:
    text, done = (path / "manifest.json").read_bytes(), (path / "DONE").read_bytes()
    try:
        manifest = json.loads(text)
        version, files = manifest["format_version"], {name: (f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
        for key in ("state", "config", "tensors"):
            manifest[key].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path}/manifest.json cannot be read ({type(error).__name__}: {error})", path) from error
    if done != hashlib.sha256(text).hexdigest().encode():
        raise DamagedError(f"{path}/manifest.json differs from what was written (DONE holds another SHA-256)", path)
    if version not in (2, FORMAT_VERSION):
        raise UserError(f"{path} has checkpoint format {version}, this version reads 2 and {FORMAT_VERSION}: "
                          f"use the version that wrote it, or start the run anew")
    for name, (size, _) in files.items():
        file = path / Path(name).name       # a name from a file never becomes a path
        if file.name != name or file.is_symlink():
            raise DamagedError(f"{path}/manifest.json lists {name!r}, which is no file of this folder's own", path)
        if not file.is_file() or file.stat().st_size != size:
            raise DamagedError(f"{file} is missing or not {size} bytes long", path)
    with ThreadPoolExecutor(HASHERS) as pool:
        for (name, (_, sha256)), found in zip(files.items(), pool.map(lambda name: sha256_of(path / name), files), strict=True):
            if found != sha256:
                raise DamagedError(f"{path / name} differs from what was written (the manifest holds another SHA-256)", path)
    if version == 2:
        names = {"moved_on": "data_offset", "train_s": "seconds", "probe_s": "probe_seconds"}
        manifest["state"] = {names.get(name, name): value for name, value in manifest["state"].items()}
    return manifest


def seal(folder: Path, manifest: dict) -> None:
    """Write manifest.json, then DONE with its SHA-256, both synced: a folder that has the two is a checkpoint."""
    text = json.dumps(manifest, indent=1)
    _write_synced(folder / "manifest.json", text)
    _write_synced(folder / "DONE", hashlib.sha256(text.encode()).hexdigest())
    sync_folder(folder)


def load(path: Path, manifest: dict, tensors: dict[str, torch.Tensor], world=None) -> None:
    """Fill `tensors`, sharded or not, in place from a checkpoint of any world size; by all ranks together.

    Raises UserError where the checkpoint lacks one of them or holds it in another shape or dtype; DamagedError, on
    all ranks, where reading failed on one of them; MemoryError in the same way.
    """
    for name, want in describe(tensors).items():
        have = manifest["tensors"].get(name)
        if have != want:
            raise UserError(f"{path} holds {name} as {have}, the model needs {want}: the configuration does not fit")
    single = world is None or world.size == 1
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")      # one process is no mistake
    failure = None
    try:
        dcp.load(tensors, storage_reader=TensorReader(path, manifest["files"]), no_dist=single,
                 process_group=None if single else world.checkpoint_group)
    except (Exception, CheckpointException) as error:
        failure = cause(error)
    if failures := list(filter(None, gather(failure, world))):
        if re.search("MemoryError|out of memory|allocate memory", failures[0]):     # the machine's fault, not the checkpoint's
            raise MemoryError(f"{path} could not be loaded: {failures[0]}")
        raise DamagedError(f"{path} could not be loaded ({failures[0]})", path)


def load_model(run_dir: str | Path, device: str | torch.device = "cpu",
               compute_dtype: torch.dtype = torch.bfloat16) -> tuple[GPT, Config]:
    """The newest checkpoint of a run as a plain model, whatever precision and world size trained it.

    Raises UserError where the folder is no run, has no finished checkpoint, or the checkpoint is damaged.
    """
    config, path = read_config(run_dir), latest(Path(run_dir))
    if path is None:
        raise UserError(f"{run_dir} has no finished checkpoint yet: train it first, python train.py configs/{config.run}.py")
    manifest = read_manifest(path)
    with torch.device("meta"):
        model = GPT(config_from_dict(manifest["config"]).model, compute_dtype)
    model.to_empty(device=device)
    model.tie()
    model.init_buffers()
    model.requires_grad_(False)
    load(path, manifest, {f"model.{name}": p for name, p in model.named_parameters()})
    return model, config


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: [list(t.shape), str(t.dtype)] for name, t in tensors.items()}


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cause(error: BaseException) -> str:
    """DCP wraps each rank's error in one of its own; the first rank's is the one to read."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    return f"{type(inner).__name__}: {inner}".splitlines()[0]


# ---------------------------------------------------------------------------------------------------------------- saver

ATTEMPTS = 3            # failed saves in a row after which going on only burns hours that no checkpoint will hold
OVERHEAD = 4096         # bytes per tensor and file that a save takes beyond the values, about


class Saver:
    """Saves one run's checkpoints, one at a time, from all ranks, which call each method together.

    `losses` are the validation losses known so far, by step. `failures` grows by a sentence for each save that failed.
    """

    def __init__(self, run_dir: Path, policy: CheckpointConfig, world, losses: dict[int, float]):
        self.dir, self.policy, self.world = Path(run_dir) / "checkpoints", policy, world
        self.failures: list[str] = []
        self._losses = dict(losses)
        self._in_a_row, self._problem = 0, None     # saves failed since the last good one; what the last one said, advice too
        self._pending: Future | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._staging: threading.Event | None = None
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        run_on_rank0(world, self._sweep)

    def prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        """Begin to make the host buffers, so that the first save need not: 1.4 GiB of fresh pages are seconds."""
        self._thread.submit(self._make_buffers, tensors)        # what fails here fails there again, and is told

    def save(self, step: int, tensors: dict[str, torch.Tensor], state: dict, config: Config) -> None:
        """Begin to save and return; staged() must come before anything that changes `tensors`. `state` is plain JSON.

        Waits for the save before it. Raises MachineError after ATTEMPTS failed ones in a row.
        """
        self.wait()
        if self._in_a_row >= ATTEMPTS:
            raise MachineError(f"{ATTEMPTS} saves in a row have failed, the last: {self._problem}")
        manifest = {"format_version": FORMAT_VERSION, "step": step, "state": json.loads(json.dumps(state)),
                    "config": config.to_dict(), "torch": str(torch.__version__), "world_size": self.world.size,
                    "tensors": describe(tensors)}
        ready = torch.cuda.current_stream(self.world.device).record_event() if self._stream else None
        self._staging = threading.Event()
        self._pending = self._thread.submit(self._write, tensors, ready, self._staging, manifest)

    def staged(self) -> None:
        """Wait until the tensors may change again. On CUDA the device waits; the host, for the copies to be queued alone."""
        if self._staging:
            self._staging.wait()
            if self._copied:
                torch.cuda.current_stream(self.world.device).wait_event(self._copied)
            self._staging = None

    def validated(self, step: int, loss: float) -> None:
        """Tell the validation loss after `step`: the best checkpoint among those that have one stays."""
        self._losses[step] = loss

    def roll_back(self, step: int) -> None:
        """Delete the checkpoints of later steps and forget their losses."""
        self.wait()
        self._losses = {s: loss for s, loss in self._losses.items() if s <= step}
        discard_after(self.dir.parent, step, self.world)

    def wait(self) -> None:
        """Wait until no save is under way, however it ended; raises nothing, so that what ended the run may call it too."""
        pending, self._pending, self._staging = self._pending, None, None      # all is copied too, or no use any more
        if pending:
            self._problem = pending.result()
            self._in_a_row = self._in_a_row + 1 if self._problem else 0

    def finish(self) -> None:
        """Wait until no save is under way. Raises MachineError where the last one failed."""
        self.wait()
        if self._problem:
            raise MachineError(self._problem)

    # -------------------------------------------------------------------------------------- in the background

    def _write(self, tensors: dict, ready, staging: threading.Event, manifest: dict) -> str | None:
        """All of a save; returns what went wrong and what to do, in the same words on every rank."""
        final = self.dir / name_of(manifest["step"])
        tmp = final.with_name(f".tmp_{final.name}")
        try:
            self._together(lambda: self._stage(tensors, ready, staging))
            if self._together(lambda: self.world.is_main and self._prepare(tmp, final, manifest))[0]:
                return None
            self._together(lambda: self._dump(tmp, list(tensors)))
            files = self._together(lambda: self._hash(tmp))
            self._together(lambda: self.world.is_main and self._commit(tmp, final, manifest, files))
        except (Exception, CheckpointException) as error:   # another kind than _together's: a rank is gone
            gone = self.world.rank, cause(error), "run the same command to resume"
            rank, words, remedy = error.args if isinstance(error, _StageFailed) else gone
            who = f"rank {rank}: " if self.world.size > 1 else ""
            problem = f"checkpoint {final.name} could not be written under {self.dir} ({who}{words})"
            if self.world.is_main:
                shutil.rmtree(tmp, ignore_errors=True)
            self.failures.append(problem)
            return f"{problem}: {remedy}"
        # In a row of skips these weights may be what is wrong: the next good save prunes, or a rollback deletes this one.
        if self.world.is_main and not manifest["state"].get("guard", {}).get("consecutive"):
            self._prune()
        return None

    def _together(self, stage: Callable[[], object]) -> list:
        """What the stage returned on each rank. Raises _StageFailed on every rank where it failed on one."""
        result = problem = None
        try:
            result = stage()
        except _StageFailed as error:
            problem = error.args
        except (Exception, CheckpointException) as error:
            problem = self.world.rank, cause(error), REMEDY
        said = gather((result, problem), self.world)
        if problems := [problem for _, problem in said if problem]:
            raise _StageFailed(*problems[0])
        return [result for result, _ in said]

    @torch.no_grad()
    def _stage(self, tensors: dict, ready, staging: threading.Event) -> None:
        """Copy this rank's shards to host buffers, which the next save uses again."""
        try:
            self._make_buffers(tensors)
            with torch.cuda.stream(self._stream):               # nothing without one
                if ready:
                    self._stream.wait_event(ready)
                for name, live in tensors.items():
                    _local(self._copies[name]).copy_(_local(live), non_blocking=True)
                self._copied = self._stream.record_event() if self._stream else None
        finally:
            staging.set()
        if self._copied:
            self._copied.synchronize()

    def _make_buffers(self, tensors: dict) -> None:
        if self._stream:
            torch.cuda.set_device(self.world.device)            # each thread has a current device of its own
        try:
            for name, live in tensors.items():
                self._copies[name] = self._copies[name] if name in self._copies else _host_buffer(live)
        except (RuntimeError, MemoryError) as error:
            kind = "pinned host memory" if self._stream else "host memory"
            need = _gib(_host_need(tensors, bool(self._stream)))
            raise _StageFailed(self.world.rank, f"its copies need {need} of {kind} on this rank, and there is not enough: "
                               f"{cause(error)}", MEMORY_REMEDY) from error

    def _prepare(self, tmp: Path, final: Path, manifest: dict) -> bool:
        """Make room; returns whether the checkpoint is there already, as after a resume."""
        if (final / "DONE").exists():
            return True
        self._sweep()
        need = sum(math.prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize + OVERHEAD
                   for shape, dtype in manifest["tensors"].values()) + OVERHEAD * (self.world.size + 3)
        free = shutil.disk_usage(self.dir).free
        if free < need:
            raise OSError(f"it needs {_gib(need)}, and {_gib(free)} are free")
        tmp.mkdir()
        return False

    def _dump(self, tmp: Path, names: list[str]) -> None:
        single = self.world.size == 1
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")      # one process is no mistake
        try:
            # Where there is a GPU, copying ahead waits for the stream that trains each 10 MB, though all is on the host already.
            writer = dcp.FileSystemWriter(tmp, per_thread_copy_ahead=0)
            dcp.save({name: self._copies[name] for name in names}, storage_writer=writer, no_dist=single,
                     process_group=None if single else self.world.checkpoint_group)
        except CheckpointException as error:    # where the disk is full, torch's own words do not say so
            words = f"{cause(error)}; {_gib(shutil.disk_usage(self.dir).free)} are free"
            raise _StageFailed(next(iter(error.failures), self.world.rank), words, REMEDY) from error

    def _hash(self, tmp: Path) -> dict[str, dict]:
        """Size and SHA-256 of the files that this rank wrote, while they are still in its own page cache."""
        mine = [*tmp.glob(f"__{self.world.rank}_*"), *([tmp / ".metadata"] if self.world.is_main else [])]
        return {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in mine}

    def _commit(self, tmp: Path, final: Path, manifest: dict, files: list[dict]) -> None:
        manifest["files"] = {name: entry for each in files for name, entry in sorted(each.items())}
        for name, entry in manifest["files"].items():
            if not (tmp / name).is_file() or (tmp / name).stat().st_size != entry["bytes"]:
                raise OSError(f"{name}, which another rank wrote, is not there on rank 0: all machines must share this folder")
        seal(tmp, manifest)
        if final.exists():      # a folder without DONE: never a whole checkpoint
            shutil.rmtree(final)
        os.rename(tmp, final)
        sync_folder(self.dir)

    def _prune(self) -> None:
        try:
            there = {step_of(path): path for path in checkpoints(self.dir.parent)}
            for step in there.keys() - kept(list(there), self.policy, dict(self._losses)):
                remove(there[step])
        except OSError as error:    # the save itself is good
            self.failures.append(f"an old checkpoint could not be removed: {error}")

    def _sweep(self) -> None:
        """Remove what a killed or failed save left."""
        self.dir.mkdir(parents=True, exist_ok=True)
        for leftover in self.dir.glob(".tmp_*"):
            shutil.rmtree(leftover)


REMEDY = "free some disk space or correct the folder's rights, then run the same command to resume"
MEMORY_REMEDY = ("end other programs on that machine, raise its memory limit or train with fewer ranks on each machine, then run "
                 "the same command to resume")


class _StageFailed(Exception):
    """A stage of a save failed; args are the rank that it failed on, the reason and the remedy."""


def kept(steps: list[int], policy: CheckpointConfig, losses: dict[int, float]) -> set[int]:
    """Which of the checkpoints of `steps`, in ascending order, stay on disk.

    The two newest always do: the last update before the newest may have ruined its weights, which shows only in the step
    after it. A step that is due to checkpoint.at alone stays for good. One that is due to rolling alone, or to nothing (saved
    on a signal, or late because of skipped steps), is a rolling one; without checkpoint.rolling it is a regular one.
    """
    due = [s for s in steps if policy.every and s % policy.every == 0]
    others = [s for s in steps if s not in due and s not in policy.at]
    regular, rolling = (due, others) if policy.rolling else (sorted(due + others), [])
    stay = {*steps[-2:], *regular[-policy.keep:], *rolling[-1:]}
    stay |= {s for s in steps if s in policy.at or (policy.forever and s % policy.forever == 0)}
    judged = [s for s in steps if math.isfinite(losses.get(s, math.nan))]
    if policy.best and judged:
        stay.add(min(judged, key=lambda s: (losses[s], -s)))
    return stay


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_buffer(live: torch.Tensor) -> torch.Tensor:
    """Host memory for `live`, or for this rank's shard of it; pinned for a GPU, or the copy would not be asynchronous."""
    local = _local(live)
    buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")
    buffer.zero_()      # or the first copy would have to wait for its pages
    if not isinstance(live, DTensor):
        return buffer
    # from_local() would move the buffer to the mesh's device. FSDP2 makes its CPU-offloaded parameters in this way, from
    # torch 2.11 to 2.13 alike.
    return DTensor(buffer, live._spec, requires_grad=False)


def _host_need(tensors: dict[str, torch.Tensor], pinned: bool) -> int:
    """Bytes of host memory that the copies of this rank's shards take; torch pins a power of two for each."""
    sizes = [_local(t).nbytes for t in tensors.values()]
    return sum(1 << (size - 1).bit_length() if pinned and size else size for size in sizes)


# ---------------------------------------------------------------------------------------------------------------- begin

FREE = {"n_ctx", "loss_chunk"}      # of the model section: no weight depends on them


def branch(config: Config, tokenizer_sha256: str, tensors: dict[str, torch.Tensor], world) -> tuple[Path, dict]:
    """Fill `tensors` ("model." and "optim." names), in place, from the checkpoint config.start_from; its path and manifest.

    Of a checkpoint that is_weights_only() the weights alone are filled. By all ranks of `world` together. Raises UserError
    where there is no such checkpoint, it is damaged, or it does not fit this run.
    """
    path = Path(config.start_from)
    if config.parent[1] == 0 and not path.is_dir():     # training writes none of step 0
        raise UserError(f"start_from={path} is not there: import the model first, python -m eval.export --from-hf DIR "
                          f"{path.parent.parent}")
    checkpoint = branch_point(config)
    manifest = read_manifest(checkpoint)
    if is_weights_only(manifest):
        check(config, manifest, tokenizer_sha256)
        tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
    else:
        check_branch(config, config_from_dict(manifest["config"]), manifest["step"])
    load(checkpoint, manifest, tensors, world)
    return checkpoint, manifest


def is_weights_only(manifest: dict) -> bool:
    """Whether a checkpoint is an imported model: no moments, no place in a data order."""
    return "imported" in manifest["state"]


def origin_of(manifest: dict) -> dict | None:
    """What was imported (see eval/from_hf.py) that a checkpoint's weights go back to; None where they began from nothing."""
    return manifest["state"].get("imported") or manifest["state"].get("origin")


def check(config: Config, manifest: dict, tokenizer_sha256: str) -> None:
    """That the imported weights mean in `config` what they meant where they come from. Raises UserError with what differs."""
    parent = config_from_dict(manifest["config"])
    theirs, ours = (asdict(replace(c.model, n_kv_head=c.model.kv_heads)) for c in (parent, config))
    where = f"start_from={config.start_from}"
    if changes := [f"model.{key} is {theirs[key]} there, {ours[key]} here" for key in ours
                   if key not in FREE and ours[key] != theirs[key]]:
        raise UserError(f"{where} is another model: {'; '.join(changes)}; give the model section of its config.json, of which "
                          f"n_ctx and loss_chunk alone are free")
    if tokenizer_sha256 != manifest["state"]["imported"]["tokenizer_sha256"]:
        raise UserError(f"{where} was imported with another tokenizer than data.tokenizer={config.data.tokenizer}, so its ids "
                          f"mean other text: give data.tokenizer={Path(config.start_from).parent.parent / 'tokenizer'}, and "
                          f"shards that were prepared with it")
