"""Know what of a run is on disk: its checkpoints, held against their hashes before anything is read from them.

    out/<run>/checkpoints/step_00013500/    __<rank>_0.distcp, .metadata     torch.distributed.checkpoint (DCP)
                                            manifest.json                    JSON state, tensors, SHA-256 of each file
                                            DONE                             written last: the SHA-256 of manifest.json
    out/<run>/checkpoints/bad_step_00013500/    one that was found damaged, kept for inspection

DCP itself notices a truncated file but no flipped bit, drops what was not asked for and casts what has another dtype, so
all is compared with the manifest first. Tensors and JSON only: nothing that is read can run code (runtime/reader.py).
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it

from model import GPT
from runtime.config import Config, ConfigError, config_from_dict, read_config
from runtime.reader import TensorReader

FORMAT_VERSION = 2      # 2: DONE holds the manifest's hash, the state tells how far a rollback moved the data on; 1 is read too
HASHERS = 4             # files hashed at a time: SHA-256 runs at about 1.8 GB/s a core, a disk rarely faster than four


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; the message says which, where and why."""


class DamagedError(ConfigError):
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
    """The checkpoint that config.start_from names. Raises ConfigError: it is the run's own, or not (all) there."""
    path = Path(config.start_from)
    run_dir = path.parent.parent
    if run_dir.resolve() == config.run_dir.resolve():
        raise ConfigError(f"start_from={path} is a checkpoint of this very run: leave start_from out to resume the run, or "
                          f"choose another run=")
    if path not in (there := checkpoints(run_dir)):
        raise ConfigError(f"start_from={path} is no finished checkpoint; {run_dir} has "
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
    while found := on_main(world, partial(_newest_good, run_dir, say, before, failed)):
        try:
            load(*found, tensors, world)
            return found
        except DamagedError as error:       # on every rank or on none, so all come round again
            failed = found[0], error
    return None


def newest_good(run_dir: Path, world, say: Callable[[str], None], before: int | None = None) -> tuple[Path, dict] | None:
    """The newest checkpoint (of a step below `before`, where given) whose files are what was written, and its manifest.

    Rank 0 looks, newest first, and every rank gets its choice. A damaged one is set aside, as bad_step_00000400 for one,
    and `say`, on rank 0 alone, gets a line about it. None where there is none. Raises CheckpointError where there are only
    damaged ones, now or set aside by an earlier start: a run never starts over silently; ConfigError for another format version.
    """
    return on_main(world, partial(_newest_good, run_dir, say, before))


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
        raise CheckpointError(f"{folder} holds no checkpoint that is whole; damaged are {', '.join(bad)}: put back a copy of one "
                              f"as step_{bad[-1].split('_')[2]}, or delete {run_dir} to start the run over")
    return None


def _set_aside(path: Path, error: DamagedError, say: Callable[[str], None]) -> None:
    bad, count = path.with_name(f"bad_{path.name}"), 1
    while bad.exists():     # an earlier one of that step: both stay
        bad, count = path.with_name(f"bad_{path.name}_{count + 1}"), count + 1
    try:
        os.rename(path, bad)
    except OSError as problem:      # to go on with an older one would write newer ones beside this
        raise CheckpointError(f"{path} is damaged ({error.reason}) and cannot be renamed ({problem.strerror}): correct the "
                              f"folder's rights, or move it away") from problem
    say(f"checkpoint {path.name} is damaged, set aside as {bad.name}: {error.reason}")


def discard_after(run_dir: Path, step: int, world) -> None:
    """Delete the checkpoints of later steps, which a rollback undoes, so that no resume takes them up; by all ranks."""
    on_main(world, lambda: [remove(path) for path in reversed(checkpoints(run_dir)) if step_of(path) > step])   # newest first


def remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, since half a deletion must not look like a checkpoint."""
    trash = path.with_name(f".tmp_{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(path, trash)
    shutil.rmtree(trash)


def on_main(world, work: Callable[[], object]) -> object:
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

    Raises DamagedError naming the file that is missing or changed, ConfigError for another format version.
    """
    try:
        return _verified(path)
    except PermissionError as error:    # no damage
        raise ConfigError(f"{error.filename} may not be read: correct its rights") from error
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
    if (done or version != 1) and done != hashlib.sha256(text).hexdigest().encode():
        raise DamagedError(f"{path}/manifest.json differs from what was written (DONE holds another SHA-256)", path)
    if version not in (1, FORMAT_VERSION):
        raise ConfigError(f"{path} has checkpoint format {version}, this version reads 1 to {FORMAT_VERSION}: "
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
    manifest["state"].setdefault("moved_on", 0)     # format 1 knew no rollback
    return manifest


def seal(folder: Path, manifest: dict) -> None:
    """Write manifest.json, then DONE with its SHA-256, both synced: a folder that has the two is a checkpoint."""
    text = json.dumps(manifest, indent=1)
    _write_synced(folder / "manifest.json", text)
    _write_synced(folder / "DONE", hashlib.sha256(text.encode()).hexdigest())
    sync_folder(folder)


def load(path: Path, manifest: dict, tensors: dict[str, torch.Tensor], world=None) -> None:
    """Fill `tensors`, sharded or not, in place from a checkpoint of any world size; by all ranks together.

    Raises ConfigError where the checkpoint lacks one of them or holds it in another shape or dtype; DamagedError, on
    all ranks, where reading failed on one of them; MemoryError in the same way.
    """
    for name, want in describe(tensors).items():
        have = manifest["tensors"].get(name)
        if have != want:
            raise ConfigError(f"{path} holds {name} as {have}, the model needs {want}: the configuration does not fit")
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

    Raises ConfigError where the folder is no run, has no finished checkpoint, or the checkpoint is damaged.
    """
    config, path = read_config(run_dir), latest(Path(run_dir))
    if path is None:
        raise ConfigError(f"{run_dir} has no finished checkpoint yet: train it first, python train.py configs/{config.run}.py")
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
