"""Detect a stalled, stopped or dead rank, name it, and end the job with exit code 1.

The training loop tells its place, at("forward", step), several times a step. A thread of each rank
publishes place and heartbeat through a store client of its own. Where the place has not changed for
`timeout` seconds, the thread names the rank to blame, writes all stacks to stderr and to
out/<run>/stacks/rank_<r>.txt and the last collectives to out/<run>/flight_recorder/, and ends the
process, so that torchrun or Slurm can restart the job.

Time is counted in heartbeats, not by a clock: a job that was suspended as a whole (SIGSTOP, a
suspended machine) goes on."""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.parallel import World

BEAT = 0.5  # seconds between two heartbeats
LISTEN = 6  # heartbeats in which a rank must be heard of, or it counts as stopped or dead
STORE_TIMEOUT = 10  # seconds that the store has for an answer: if its host is stopped there is none
REPORT_S = 60  # after which the process ends, even if a file system or a pipe blocks its report
# begins the cause of a rank that its own watchdog has ended, mostly for another's fault
STALLED = "watchdog"


class Watchdog(contextlib.AbstractContextManager):
    """Watches the ranks of `world`. One place may last `patience` seconds, which the loop lowers
    after its first step."""

    def __init__(self, world: World, run_dir: Path, patience: float):
        self.world, self.run_dir, self.patience = world, Path(run_dir), patience
        self._name = (
            f"rank {world.rank} of {world.size} (host {socket.gethostname()}, pid {os.getpid()})"
        )
        # calls of at(), where the loop is, its patience
        self._place: tuple[int, str, float | None] = (0, "start", None)
        self._beat = 0
        # why this rank ended, for the others; "" if another rank is to blame
        self._ended: str | None = None
        self._closed = threading.Event()
        self._store: dist.Store | None = None
        # a connection of its own: a rank that hangs may be in a call that holds torch's
        if world.size > 1:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                # many ranks connect at once
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
            self._store = dist.PrefixStore(
                f"watchdog/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
            )
        self._publish()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, phase: str, step: int, patience: float | None = None) -> None:
        """The loop is now here, for `patience` seconds at most if given. All ranks call it alike:
        fewer calls are behind."""
        self._place = (self._place[0] + 1, f"step {step}, {phase}", patience)

    def __exit__(self, kind, error, traceback) -> None:
        """Stop watching and publish that this rank has ended by itself."""
        self._closed.set()
        self._thread.join(timeout=10)
        if self._ended is None:
            self._ended = (
                "left" if error is None else f"failed: {type(error).__name__}: {error}"[:300]
            )
        self._publish()

    def explain(self, error: Exception) -> str | None:
        """A sentence on the rank whose end made a collective fail with `error` here, after LISTEN
        heartbeats; None where no rank is missing, so that the error is this rank's own."""
        if self.world.size == 1 or (culprit := self._culprit(is_stalled=False)) is None:
            return None
        self._ended = ""
        return (
            f"{culprit}; a collective failed without it ({type(error).__name__}:"
            f" {str(error)[:200]})"
        )

    def _watch(self) -> None:
        place: tuple | None = None
        beats_in_place = 0
        while not self._closed.wait(BEAT):
            beats_in_place = beats_in_place + 1 if self._place is place else 0
            place = self._place
            self._publish()
            _, activity, own_patience = place
            patience = own_patience or self.patience
            if beats_in_place * BEAT > patience:
                self._end(
                    f"{STALLED}: rank {self.world.rank}: no progress for {patience:g} s at"
                    f" {activity}"
                )

    def _publish(self) -> None:
        self._beat += 1
        calls, activity, _ = self._place
        with contextlib.suppress(Exception):  # the store is gone with its host, or at the job's end
            if self._store is not None:
                self._store.set(
                    f"rank{self.world.rank}",
                    json.dumps(
                        {
                            "name": self._name,
                            "calls": calls,
                            "where": activity,
                            "beat": self._beat,
                            "ended": self._ended,
                        }
                    ),
                )

    def _end(self, message: str) -> None:
        """Report and exit."""
        faulthandler.dump_traceback_later(REPORT_S, exit=True)
        self._ended = message  # so that the others do not take a rank that reports for a dead one
        if self.world.size > 1:
            culprit = (
                self._culprit(is_stalled=True)
                or "all ranks are alive and equally far: a collective or the device hangs"
            )
            self._ended = message = f"{message}; {culprit}"
            self._publish()
        print(f"\n{message}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2)
        # which marks a run: before it, nothing may be written there
        if (self.run_dir / "config.json").exists():
            with contextlib.suppress(Exception):  # a full disk; a build without NCCL
                self._write_report(message)
        os._exit(1)

    def _write_report(self, message: str) -> None:
        """The stacks of all threads, then torch's record of collectives, into the run's folder."""
        rank = self.world.rank
        stacks = self.run_dir / "stacks"
        stacks.mkdir(exist_ok=True)
        with open(stacks / f"rank_{rank}.txt", "w") as file:
            print(message, file=file, flush=True)
            faulthandler.dump_traceback(file=file)
        c10d: Any = torch._C._distributed_c10d
        recorder = self.run_dir / "flight_recorder"
        recorder.mkdir(exist_ok=True)
        (recorder / f"rank_{rank}_gloo.json").write_bytes(c10d._dump_fr_trace_json())
        (recorder / f"rank_{rank}.json").write_bytes(c10d._dump_nccl_trace_json())

    def _culprit(self, is_stalled: bool) -> str | None:
        """The rank to blame, in words: one without heartbeats, else one that ended by itself, else,
        in a stall, the one that is behind; without a stall also one that its watchdog has ended."""
        try:
            earlier_signs = self._signs()
            time.sleep(LISTEN * BEAT)
            signs = self._signs()
        except Exception:
            self._store = None  # a call that waits for ever holds it
            return (
                f"the store on host {os.environ['MASTER_ADDR']} does not answer: torchrun or rank 0"
                " there is gone or stopped"
            )
        # this rank's own heartbeat goes up with each look
        for sign, earlier in zip(signs, earlier_signs, strict=True):
            if sign["ended"] is None and sign["beat"] == earlier["beat"]:
                return (
                    f"{sign['name']} has sent no heartbeat for {LISTEN * BEAT:g} s: dead or"
                    f" stopped, last at {sign['where']}"
                )
        ended = self._ended_first(signs, is_stalled)
        if ended is not None:
            return f"{ended['name']} ended first, at {ended['where']} ({ended['ended']})"
        slowest = min(signs, key=lambda sign: sign["calls"])
        if is_stalled and slowest["calls"] < max(sign["calls"] for sign in signs):
            return f"{slowest['name']} is behind the others, at {slowest['where']}"
        return None

    def _ended_first(self, signs: list[dict], is_stalled: bool) -> dict | None:
        """The sign of another rank that ended by itself; without a stall of this one, also of one
        that its watchdog has ended."""
        by_watchdog = None
        for rank, sign in enumerate(signs):
            if rank == self.world.rank or not sign["ended"]:
                continue
            if not sign["ended"].startswith(STALLED):
                return sign
            by_watchdog = by_watchdog or sign
        return None if is_stalled else by_watchdog

    def _signs(self) -> list[dict]:
        """What each rank published last, in one call for all: hundreds may ask at once. By a
        thread, as a store whose host is stopped never answers."""
        self._publish()
        assert self._store
        asked = ThreadPoolExecutor(1).submit(
            self._store.multi_get, [f"rank{rank}" for rank in range(self.world.size)]
        )
        return [json.loads(text) for text in asked.result(STORE_TIMEOUT)]
