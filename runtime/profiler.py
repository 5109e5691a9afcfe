"""Trace a few training steps of every rank for Perfetto and TensorBoard.

`profile=10:15` writes, for each rank r of the run, to out/<run>/profile/:

    trace_rank<r>.pt.trace.json.gz      of ui.perfetto.dev; of `tensorboard --logdir out/<run>/profile` with torch-tb-profiler
    memory_rank<r>.pickle               GPU only: every allocation, of pytorch.org/memory_viz

Tracing changes no number that training computes; the traced steps are slower, the first of them most.
"""

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MEMORY_EVENTS = 100_000     # of the allocator that a snapshot holds at most: about 100 MB


class Profiler:
    """Traces steps first to last (counted from 1, as rows are), once; every rank its own. None of its faults ends a run.

    A run resumed in between traces the rest; one that ends in between writes what there is by close()."""

    def __init__(self, steps: tuple[int, int] | None, run_dir: Path, world, say: Callable[[str], None] = print):
        self.first, self.last = steps or (0, -1)
        self.folder, self.rank, self.is_main, self.say = run_dir / "profile", world.rank, world.is_main, say
        self.on_gpu = world.device.type == "cuda"
        self._trace = self._range = None
        self._begun = self._step = 0        # the first step that was traced, and the latest

    def begin(self, step: int) -> None:
        """Before the step."""
        if self._trace is None and not self._begun and self.first <= step <= self.last:
            self._begun = step
            self._guarded(self._start)
        if self._trace is not None:
            self._step = step
            self._range = record_function(f"ProfilerStep#{step}")       # the name by which TensorBoard tells steps apart
            self._range.__enter__()

    def end(self, step: int) -> None:
        """After the step; after the last one the files are written, which takes seconds for a large model."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._trace is not None and step >= self.last:
            self._guarded(self._write, step)

    def close(self) -> None:
        """Write what there is of a trace that the run's end cuts short."""
        self.last = min(self.last, self._step)
        self.end(self._step)

    def _start(self) -> None:
        if self.on_gpu and hasattr(torch.cuda.memory, "_record_memory_history"):    # private, yet the documented way
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        trace = profile(activities=activities, record_shapes=True)
        trace.start()
        self._trace = trace

    def _write(self, step: int) -> None:
        trace, self._trace = self._trace, None
        trace.stop()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.on_gpu and hasattr(torch.cuda.memory, "_dump_snapshot"):
                torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_rank{self.rank}.pickle"))
        finally:
            if self.on_gpu and hasattr(torch.cuda.memory, "_record_memory_history"):
                torch.cuda.memory._record_memory_history(enabled=None)
        path = self.folder / f"trace_rank{self.rank}.pt.trace.json.gz"      # the end by which TensorBoard finds it
        plain, packed = (self.folder / f".trace_rank{self.rank}.{end}" for end in ("json", "gz"))
        try:
            trace.export_chrome_trace(str(plain))
            with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
            os.replace(packed, path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        if self.is_main:
            self.say(f"profile: steps {self._begun} to {step} -> {self.folder}/ (open in ui.perfetto.dev)")

    def _guarded(self, act: Callable, *arguments) -> None:
        try:
            act(*arguments)
        except Exception as error:      # a full disk, a second profiler, a driver without CUPTI: no reason to end a run
            self._trace = None
            self.say(f"profile: rank {self.rank} wrote no trace: {type(error).__name__}: {error}")
