"""Notice that a run stands still, say which rank is to blame and where it was, end the job.

The loop tells where it is, at("forward", step), several times a step; a thread looks at it once a beat and, with several
ranks, publishes it through a store client of its own. Where nothing has moved for `timeout` seconds, that thread names
the rank that is dead, silent or behind, writes every thread's stack to stderr and to out/<run>/stacks/rank_<r>.txt, dumps
the flight recorder to out/<run>/flight_recorder/ where torch keeps one, and ends the process with exit code 1, so that
torchrun or Slurm can start anew.

Time is counted in beats of this thread, not by a clock: a job that was stopped as a whole (SIGSTOP, a suspended machine)
or whose clock was set goes on as if nothing had been.
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

BEAT = 0.5          # seconds between two looks
LISTEN = 6          # beats without a sign from a rank before it counts as silent
STORE_PATIENCE = 5  # seconds that the store has for an answer: with its host stopped there is none
# Why a rank ended, as it told the others. One that failed is to blame; one that met an error in a collective, or whose
# watchdog ended it, may be the victim of another.
FAILED, MET, STOOD = "failed", "met", "its watchdog ended it"


class Watchdog:
    """Watches the ranks of `world`; writes nothing below `run_dir` unless the run stands still.

    timeout, start_timeout: seconds that one place may last, after and before first_step_done()."""

    def __init__(self, world, run_dir: Path, timeout: float, start_timeout: float):
        self.world, self.run_dir = world, Path(run_dir)
        self.timeout, self.patience, self._is_warm = timeout, start_timeout, False
        self._calls, self._place = 0, (0, "start", None, None)
        self._beat, self._why = 0, None
        self._closed = threading.Event()
        self._store = _client(timedelta(seconds=STORE_PATIENCE)) if world.size > 1 else None
        self._publish()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ called by the loop

    def at(self, phase: str, step: int | None = None, patience: float | None = None) -> None:
        """The loop is now here, which may last `patience` seconds if given. All ranks must call it alike: the one with
        the fewest calls counts as behind."""
        self._calls += 1
        self._place = (self._calls, phase, step, patience)

    def first_step_done(self) -> bool:
        """Compilation and loading are over: from here on a place may last `timeout` seconds. True at the first call."""
        if self._is_warm:
            return False
        self._is_warm, self.patience = True, self.timeout
        if self.world.size > 1 and self.world.device.type == "cuda":    # NCCL's own dump needs its folder beforehand
            (self.run_dir / "flight_recorder").mkdir(parents=True, exist_ok=True)
        return True

    def close(self, why: str = "left") -> None:
        """Stop watching and tell the other ranks that this one ended by itself; may be called again."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(timeout=2 * STORE_PATIENCE)
            self._why = self._why or why
            self._publish()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close("left" if error is None else _reason(error))

    def explain(self, error: Exception) -> str | None:
        """A sentence on the rank whose end made a collective fail with `error` here, after LISTEN beats at most; None
        where no rank is missing, so that the error is this rank's own. May be called after close()."""
        if self.world.size == 1:
            return None
        self._why = self._why or _reason(error)
        signs = self._listen()
        culprit = self._culprit(_by_rank(signs), missing_only=True) if signs else self._storeless()
        if culprit is None:
            self._why = f"{FAILED}: {type(error).__name__}: {error}"[:300]
            self._publish()
            return None
        kind = type(error).__name__ if signs else f"{type(error).__name__}: {error}"[:200]      # without signs it is a guess
        return f"{culprit}; a collective failed without it ({kind})"

    # ------------------------------------------------------------------------------------------------------- the thread

    def _watch(self) -> None:
        place, still = self._place, 0
        while not self._closed.wait(BEAT):
            still = still + 1 if self._place is place else 0
            place = self._place
            self._publish()
            patience = place[3] or self.patience
            if still * BEAT > patience:
                self._end(patience)

    def _publish(self) -> None:
        """Write where this rank is; a store that has gone, with its host or at the job's end, is not written to again."""
        self._beat += 1
        if self._store is not None:
            calls, phase, step, _ = self._place
            sign = {"host": socket.gethostname(), "pid": os.getpid(), "pids": _pids(), "calls": calls, "phase": phase,
                    "step": step, "beat": self._beat, "why": self._why}
            try:
                self._store.set(f"rank{self.world.rank}", json.dumps(sign))
            except Exception:       # of many types; training itself does not need the store any more
                self._store = None

    def _end(self, patience: float) -> None:
        """Say what is known, each part only if it can be said, and leave; nothing here may keep the process alive."""
        message, signs = _within(60, lambda: self._judge(patience)) or (f"watchdog: rank {self.world.rank}: no progress", {})
        stacks = _within(20, lambda: self._write(message, signs))
        _within(20, lambda: self._say(message + (f"; stacks in {stacks}" if stacks else "")))
        os._exit(1)

    def _judge(self, patience: float) -> tuple[str, dict[int, dict]]:
        """What to say, and the other ranks' last signs."""
        _, phase, step, _ = self._place
        line = f"no progress for {patience:g} s at {_where(phase, step)}"
        self._why = f"{STOOD}: {line}"      # first of all: the others must not blame a rank that merely tells
        signs = _by_rank(self._listen())
        if signs:
            culprit = self._culprit(signs) or "all ranks are alive and equally far: a collective or the device hangs"
        elif self.world.size > 1:
            culprit = self._storeless()
        else:
            culprit = None
        self._why = f"{STOOD}: {line}" + (f"; {culprit}" if culprit else "")
        self._publish()
        return f"watchdog: rank {self.world.rank}: {line}" + (f"; {culprit}" if culprit else ""), signs

    def _write(self, message: str, signs: dict[int, dict]) -> Path | None:
        """Returns the folder of the stacks; None where the run has none of its own yet, which is then left alone."""
        rank = self.world.rank
        if not (self.run_dir / "config.json").exists():
            return None
        (self.run_dir / "stacks").mkdir(parents=True, exist_ok=True)
        with open(self.run_dir / "stacks" / f"rank_{rank}.txt", "w") as file:
            file.write(f"{message}\n" + "".join(f"rank {r}: {json.dumps(sign)}\n" for r, sign in signs.items()))
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
        if trace := _flight_recorder():
            (self.run_dir / "flight_recorder").mkdir(exist_ok=True)
            (self.run_dir / "flight_recorder" / f"rank_{rank}.json").write_text(trace)
        return self.run_dir / "stacks"

    def _say(self, message: str) -> None:
        print(f"\n{message}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)

    # ----------------------------------------------------------------------------------------------------- who is it

    def _listen(self) -> list[list[dict]]:
        """What all ranks publish, read twice LISTEN beats apart: [first, second], one entry a rank; [] without a store."""
        signs = []
        for wait in (0, LISTEN * BEAT):
            time.sleep(wait)
            self._publish()
            read = _within(2 * STORE_PATIENCE, self._read)
            if read is None:
                self._store = None      # one call that waits for it holds all others
                return []
            signs.append(read)
            if any(_is_dead(sign) for sign in read):    # no need to listen for what can be seen
                return [read, read]
        return signs

    def _read(self) -> list[dict] | None:
        if self._store is None:
            return None
        never = {"host": "unknown", "pid": 0, "pids": "", "calls": 0, "phase": "its start", "step": None, "beat": 0, "why": None}
        keys = [f"rank{rank}" for rank in range(self.world.size)]
        try:
            return [json.loads(self._store.get(key)) if self._store.check([key]) else never for key in keys]
        except RuntimeError:    # torch's network errors among them
            return None

    def _storeless(self) -> str:
        """Who is to blame where the store that ranks tell their places by is gone."""
        host = os.environ.get("MASTER_ADDR", "unknown")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return f"torchrun on host {host} does not answer: it is gone or stopped"
        return f"rank 0 of {self.world.size} (host {host}), which keeps the others' signs, does not answer: gone or stopped"

    def _culprit(self, signs: dict[int, dict], missing_only: bool = False) -> str | None:
        """The rank to blame, in words: dead, silent, failed by itself, or behind, in this order of certainty."""
        others = {rank: sign for rank, sign in signs.items() if rank != self.world.rank}
        for rank, sign in others.items():
            if sign["why"] is None and (sign["dead"] or sign["silent"]):
                what = "is gone" if sign["dead"] else f"has given no sign for {LISTEN * BEAT:g} s"
                return f"{self._name(rank, sign)} {what}; last seen at {_where(sign['phase'], sign['step'])}"
        for rank, sign in others.items():
            if sign["why"] and not sign["why"].startswith((MET, STOOD)):
                return f"{self._name(rank, sign)} ended first, at {_where(sign['phase'], sign['step'])} ({sign['why']})"
        if missing_only:
            stood = {rank: sign for rank, sign in others.items() if (sign["why"] or "").startswith(STOOD)}
            return next((f"{self._name(rank, sign)}: {sign['why']}" for rank, sign in stood.items()), None)
        rank = min(signs, key=lambda rank: signs[rank]["calls"])
        if signs[rank]["calls"] == max(sign["calls"] for sign in signs.values()):
            return None
        return f"{self._name(rank, signs[rank])} is behind the others, at {_where(signs[rank]['phase'], signs[rank]['step'])}"

    def _name(self, rank: int, sign: dict) -> str:
        return f"rank {rank} of {self.world.size} (host {sign['host']}, pid {sign['pid']})"


def _by_rank(signs: list[list[dict]]) -> dict[int, dict]:
    """Each rank's second sign, with what the two together tell: whether the rank is dead, whether it is silent."""
    if not signs:
        return {}
    return {rank: {**after, "dead": _is_dead(after), "silent": before is not after and before["beat"] == after["beat"]}
            for rank, (before, after) in enumerate(zip(*signs, strict=True))}


def _is_dead(sign: dict) -> bool:
    """Whether a rank of this very machine has died without a word; elsewhere only silence tells."""
    if sign["why"] is not None or not sign["pids"] or (sign["host"], sign["pids"]) != (socket.gethostname(), _pids()):
        return False
    try:
        stat = Path(f"/proc/{sign['pid']}/stat").read_text()
    except OSError:
        return True
    return stat[stat.rindex(")") + 2] in "ZX"       # ended, and not yet collected by torchrun


def _pids() -> str:
    """Where pids mean what they mean here; "" on a system without /proc."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _reason(error: BaseException) -> str:
    """Why a rank ends with `error`; collectives raise RuntimeError and its kin where another rank is to blame."""
    return f"{MET if isinstance(error, RuntimeError) else FAILED}: {type(error).__name__}: {error}"[:300]


def _where(phase: str, step: int | None) -> str:
    return phase if step is None else f"step {step}, {phase}"


def _within(seconds: float, action: Callable[[], object]):
    """What `action` returns, or None where it takes longer or fails: a store whose host is stopped may never answer."""
    result = []

    def call():
        with contextlib.suppress(Exception):    # on the way out, and saying so may be what failed
            result.append(action())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _client(patience: timedelta) -> dist.Store | None:
    """A connection of its own to the store that torchrun's environment names, under this attempt's own keys: torch's
    own connection is held by one call at a time, and a rank that hangs may be in one."""
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              wait_for_workers=False, timeout=patience)
    except (KeyError, RuntimeError) as error:
        print(f"watchdog: no store to tell the ranks' places by ({error}); a stand-still is still noticed", file=sys.stderr)
        return None
    return dist.PrefixStore(f"watchdog/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _flight_recorder() -> str | None:
    """The last collectives of this process as JSON, where torch records them: NCCL's, under one name or the other."""
    core = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):      # the first since 2.13, the second where NCCL is built in
        if hasattr(core, name):
            trace = getattr(core, name)()
            return trace.decode() if isinstance(trace, bytes) else trace
    return None
