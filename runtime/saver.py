"""Save a run's checkpoints beside its training, such that no fault costs more than the save it falls into.

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
"""

import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it
from torch.distributed.tensor import DTensor

from runtime.checkpoint import (
    FORMAT_VERSION,
    CheckpointError,
    cause,
    checkpoints,
    describe,
    discard_after,
    gather,
    name_of,
    on_main,
    remove,
    seal,
    sha256_of,
    step_of,
    sync_folder,
)
from runtime.config import CheckpointConfig, Config

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
        on_main(world, self._sweep)

    def prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        """Begin to make the host buffers, so that the first save need not: 1.4 GiB of fresh pages are seconds."""
        self._thread.submit(self._make_buffers, tensors)        # what fails here fails there again, and is told

    def save(self, step: int, tensors: dict[str, torch.Tensor], state: dict, config: Config) -> None:
        """Begin to save and return; staged() must come before anything that changes `tensors`. `state` is plain JSON.

        Waits for the save before it. Raises CheckpointError after ATTEMPTS failed ones in a row.
        """
        self.wait()
        if self._in_a_row >= ATTEMPTS:
            raise CheckpointError(f"{ATTEMPTS} saves in a row have failed, the last: {self._problem}")
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
        """Wait until no save is under way. Raises CheckpointError where the last one failed."""
        self.wait()
        if self._problem:
            raise CheckpointError(self._problem)

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
