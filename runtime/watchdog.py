"""Detect a stalled, stopped or dead rank, name it, and end the job with exit code 1.

The training loop tells its place, at("forward", step), several times a step. A thread of each rank publishes place and heartbeat
through a store client of its own. Where the place has not changed for `timeout` seconds, the thread names the rank to blame,
writes all stacks to stderr and to out/<run>/stacks/rank_<r>.txt and the last collectives to out/<run>/flight_recorder/, and ends
the process, so that torchrun or Slurm can restart the job.

Time is counted in heartbeats, not by a clock: a job that was suspended as a whole (SIGSTOP, a suspended machine) goes on.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

BEAT = 0.5          # seconds between two heartbeats
LISTEN = 6          # heartbeats in which a rank must be heard of, or it counts as stopped or dead
STORE_TIMEOUT = 5   # seconds that the store has for an answer: if its host is stopped there is none
STALLED = "watchdog"    # begins the cause of a rank that its own watchdog has ended, mostly for another's fault


class Watchdog(contextlib.AbstractContextManager):
    """Watches the ranks of `world`; writes nothing below `run_dir` unless the run stalls.

    timeout, start_timeout: seconds that one place may last, after and before first_step_done()."""

    def __init__(self, world, run_dir: Path, timeout: float, start_timeout: float):
        self.world, self.run_dir, self.timeout, self.patience = world, Path(run_dir), timeout, start_timeout
        self._place: tuple[int, str, float | None] = (0, "start", None)     # calls of at(), where the loop is, its patience
        self._beat = 0
        self._ended: str | None = None      # why this rank ended, for the others; "" if another rank is to blame
        self._closed = threading.Event()
        self._store = _client() if world.size > 1 else None
        self._publish()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, phase: str, step: int, patience: float | None = None) -> None:
        """The loop is now here, for `patience` seconds at most if given. All ranks must call it alike: the one with the
        fewest calls counts as behind."""
        self._place = (self._place[0] + 1, f"step {step}, {phase}", patience)

    def first_step_done(self) -> None:
        """Compilation and loading are over: from here on a place may last `timeout` seconds. May be called every step."""
        self.patience = self.timeout

    def __exit__(self, kind, error, traceback) -> None:
        """Stop watching and publish that this rank has ended by itself."""
        self._closed.set()
        self._thread.join(timeout=2 * STORE_TIMEOUT)
        if self._ended is None:
            self._ended = "left" if error is None else f"failed: {type(error).__name__}: {error}"[:300]
        self._publish()

    def explain(self, error: Exception) -> str | None:
        """A sentence on the rank whose end made a collective fail with `error` here, after LISTEN heartbeats; None where no
        rank is missing, so that the error is this rank's own."""
        culprit = self._culprit(is_stalled=False) if self.world.size > 1 else None
        if culprit is None:
            return None
        self._ended = ""
        return f"{culprit}; a collective failed without it ({type(error).__name__}: {str(error)[:200]})"

    def _watch(self) -> None:
        place, still = None, 0
        while not self._closed.wait(BEAT):
            still = still + 1 if self._place is place else 0
            place = self._place
            self._publish()
            patience = place[2] or self.patience
            if still * BEAT > patience:
                self._end(f"{STALLED}: rank {self.world.rank}: no progress for {patience:g} s at {place[1]}")

    def _publish(self) -> None:
        self._beat += 1
        if self._store is not None:
            calls, where, _ = self._place
            try:
                self._store.set(f"rank{self.world.rank}", json.dumps({
                    "host": socket.gethostname(), "pid": os.getpid(), "calls": calls, "where": where,
                    "beat": self._beat, "ended": self._ended}))
            except Exception:       # gone with its host, or at the job's end; training itself no longer needs it
                self._store = None

    def _end(self, message: str) -> None:
        """Report and exit; no store, file system or pipe that blocks may keep the process alive."""
        self._ended = message       # so that the others do not take a rank that reports for a dead one
        if self.world.size > 1:
            culprit = _within(60, lambda: self._culprit(is_stalled=True))
            message += f"; {culprit or 'all ranks are alive and equally far: a collective or the device hangs'}"
            self._ended = message
            self._publish()
        _within(60, lambda: self._report(message))
        os._exit(1)

    def _report(self, message: str) -> None:
        print(f"\n{message}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2, all_threads=True)
        if not (self.run_dir / "config.json").exists():     # which marks a run: before it, nothing may be written there
            return
        stacks, recorder = self.run_dir / "stacks", self.run_dir / "flight_recorder"
        stacks.mkdir(exist_ok=True)
        with open(stacks / f"rank_{self.world.rank}.txt", "w") as file:
            print(message, file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)
        for name, dump in (("", "_dump_nccl_trace_json"), ("_gloo", "_dump_fr_trace_json")):    # two recorders
            with contextlib.suppress(Exception):    # a build without NCCL, or no collective yet
                trace = getattr(torch._C._distributed_c10d, dump)()
                recorder.mkdir(exist_ok=True)
                (recorder / f"rank_{self.world.rank}{name}.json").write_bytes(trace)

    def _culprit(self, is_stalled: bool) -> str | None:
        """The rank to blame, in words: one without heartbeats, else one that ended by itself, else, in a stall, the one that is
        behind; without a stall also one that its watchdog has ended. None where there is none."""
        signs = []
        for wait in (0, LISTEN * BEAT):
            time.sleep(wait)
            self._publish()
            signs.append(_within(2 * STORE_TIMEOUT, self._signs))
            if signs[-1] is None:
                self._store = None      # the call that waits holds it
                return (f"the store on host {os.environ['MASTER_ADDR']} does not answer: torchrun there, or rank 0 if it holds "
                        f"the store, is gone or stopped")
        before, now = signs

        def name(rank: int, what: str) -> str:
            sign = now[rank]
            return f"rank {rank} of {self.world.size} (host {sign['host']}, pid {sign['pid']}) {what} {sign['where']}"

        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        for rank in others:
            if now[rank]["ended"] is None and now[rank]["beat"] == before[rank]["beat"]:
                return name(rank, f"has sent no heartbeat for {LISTEN * BEAT:g} s: dead or stopped, last seen at")
        ended = sorted((now[rank]["ended"].startswith(STALLED), rank) for rank in others if now[rank]["ended"])
        if ended and not (is_stalled and ended[0][0]):
            return f"{name(ended[0][1], 'ended first, at')} ({now[ended[0][1]]['ended']})"
        behind = min(range(self.world.size), key=lambda rank: now[rank]["calls"])
        if is_stalled and now[behind]["calls"] < max(sign["calls"] for sign in now):
            return name(behind, "is behind the others, at")
        return None

    def _signs(self) -> list[dict]:
        """What each rank published last, in one call for all: hundreds may ask at once. Each did so when its watchdog began."""
        assert self._store
        return [json.loads(text) for text in self._store.multi_get([f"rank{rank}" for rank in range(self.world.size)])]


def _within(seconds: float, action: Callable[[], object]):
    """What `action` returns, or None where it takes longer or fails: a store whose host is stopped may never answer."""
    result = []

    def call():
        with contextlib.suppress(Exception):
            result.append(action())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _client() -> dist.Store:
    """A connection of its own to the job's store, under this attempt's keys: a rank that hangs may be in a call that holds
    torch's connection."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
                          timeout=timedelta(seconds=60))      # many ranks connect at once
    store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
    return dist.PrefixStore(f"watchdog/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
