"""Keep a run's tensors on disk such that any kill, at any moment, leaves a whole checkpoint behind.

    out/<run>/checkpoints/step_00013500/    __<rank>_0.distcp, .metadata     torch.distributed.checkpoint
                                            manifest.json                    JSON state, tensors, SHA-256 of each file
                                            DONE                             written last

A save copies the tensors, returns, and goes on in the background: written under a temporary name, hashed, synced,
renamed. What is read back is first held against the manifest, because DCP itself notices a truncated file but no
flipped bit, drops what was not asked for and casts what has another dtype. Tensors and JSON only: DCP's `.metadata`
is a pickle, so it is read by an unpickler that knows a dozen harmless classes and refuses the rest.
"""

import hashlib
import json
import os
import pickle
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from model import GPT
from runtime.config import Config, ConfigError, config_from_dict, read_config

FORMAT_VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says which, where and why."""


class Checkpointer:
    """Saves one run's checkpoints, one at a time, from all ranks. `world` tells rank, size and process group.

    The newest `keep` stay on disk, and those of the steps `at`."""

    def __init__(self, run_dir: Path, keep: int, world, at: tuple[int, ...] = ()):
        self.dir, self.keep, self.world = run_dir / "checkpoints", keep, world
        self._stay = {_name(step) for step in at}
        self._pending: Future | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if world.is_main:
            self.dir.mkdir(parents=True, exist_ok=True)
            for leftover in self.dir.glob(".tmp_*"):    # of a run that was killed in mid-save
                shutil.rmtree(leftover)
        if world.size > 1:
            dist.barrier(group=world.checkpoint_group)

    def save(self, step: int, tensors: dict[str, torch.Tensor], state: dict, config: Config) -> None:
        """Copy `tensors` and return; the rest happens in the background. `state` is what JSON can hold.

        Waits for the save before it. Raises CheckpointError where that one failed.
        """
        self.finish()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")      # one process is no mistake
        name = _name(step)
        if (self.dir / name / "DONE").exists():
            return
        tmp = self.dir / f".tmp_{name}"
        manifest = {"format_version": FORMAT_VERSION, "step": step, "state": state, "config": config.to_dict(),
                    "torch": str(torch.__version__), "world_size": self.world.size, "tensors": _describe(tensors)}
        written = dcp.async_save(tensors, storage_writer=dcp.FileSystemWriter(tmp), process_group=self.world.checkpoint_group,
                                 no_dist=self.world.size == 1)
        self._pending = self._thread.submit(self._commit, written, tmp, self.dir / name, manifest)

    def finish(self) -> None:
        """Wait until the save under way, if any, is on disk. Raises CheckpointError where it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"a checkpoint under {self.dir} could not be written ({_cause(error)}): free some disk space "
                                  f"or correct the folder's rights, then run the same command to resume") from error

    def _commit(self, written: Future, tmp: Path, final: Path, manifest: dict) -> None:
        written.result()        # after it, every rank's file and the metadata are on disk
        if not self.world.is_main:
            return
        manifest["files"] = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(tmp.iterdir())}
        _write_synced(tmp / "manifest.json", json.dumps(manifest, indent=1))
        _write_synced(tmp / "DONE", "")
        _sync_folder(tmp)
        if final.exists():      # a folder without DONE: never a whole checkpoint
            shutil.rmtree(final)
        os.rename(tmp, final)
        _sync_folder(self.dir)
        for old in (path for path in checkpoints(self.dir.parent)[:-self.keep] if path.name not in self._stay):
            trash = old.with_name(f".tmp_{old.name}")   # renamed first: half a deletion must not look like a checkpoint
            os.rename(old, trash)
            shutil.rmtree(trash)


def checkpoints(run_dir: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted(p.parent for p in (Path(run_dir) / "checkpoints").glob("step_*/DONE"))


def latest(run_dir: Path) -> Path | None:
    return next(reversed(checkpoints(run_dir)), None)


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


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint, every file it lists verified by size and hash.

    Raises ConfigError naming the file that is missing, changed or of another version.
    """
    advice = f"move {path} away to go on from the checkpoint before it"
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        version, files = manifest["format_version"], {name: (f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
        for key in ("state", "config", "tensors"):
            manifest[key].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}/manifest.json cannot be read ({type(error).__name__}: {error}): {advice}") from error
    if version != FORMAT_VERSION:
        raise ConfigError(f"{path} has checkpoint format {version}, this version reads {FORMAT_VERSION}: "
                          f"use the version that wrote it, or start the run anew")
    for name, (size, sha256) in files.items():
        file = path / Path(name).name       # a name from a file never becomes a path
        if not file.is_file() or file.stat().st_size != size:
            raise ConfigError(f"{file} is missing or not {size} bytes long: {advice}")
        if _sha256(file) != sha256:
            raise ConfigError(f"{file} differs from what was written (its SHA-256 does not match the manifest): {advice}")
    return manifest


def load(path: Path, manifest: dict, tensors: dict[str, torch.Tensor], world=None) -> None:
    """Fill `tensors`, sharded or not, in place from a checkpoint of any world size.

    Raises ConfigError where the checkpoint lacks one of them or holds it in another shape or dtype.
    """
    for name, want in _describe(tensors).items():
        have = manifest["tensors"].get(name)
        if have != want:
            raise ConfigError(f"{path} holds {name} as {have}, the model needs {want}: the configuration does not fit")
    single = world is None or world.size == 1
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")      # one process is no mistake
    try:
        dcp.load(tensors, storage_reader=_TensorReader(path), no_dist=single,
                 process_group=None if single else world.checkpoint_group)
    except CheckpointException as error:
        raise ConfigError(f"{path} could not be loaded: {_cause(error)}") from error


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


class _TensorReader(dcp.FileSystemReader):
    """DCP's reader, except that its pickled metadata can name nothing but the classes that metadata is made of."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size", "float32", "bfloat16", "float16", "int64", "strided"},
        "torch.serialization": {"_get_layout"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "PurePosixPath"},
    }

    def find_class(self, module: str, name: str):
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise ConfigError(f"the checkpoint's .metadata names {module}.{name}, which no checkpoint of ours contains: "
                          f"it is refused because loading it could run code")


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _describe(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: [list(t.shape), str(t.dtype)] for name, t in tensors.items()}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: BaseException) -> str:
    """DCP wraps each rank's error in one of its own; the first rank's is the one to read."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    return f"{type(inner).__name__}: {inner}".splitlines()[0]
