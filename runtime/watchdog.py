"""Notice that a run stands still, say which rank is to blame and where it was, end the job.

The loop tells where it is, at("forward", step), several times a step; a thread looks at it once a beat and, with several
ranks, publishes it through a store client of its own. Where nothing has moved for `timeout` seconds, or for some and a
rank is dead or has failed (with NCCL its peers wait for it, deaf to SIGTERM), that thread names the rank to blame, writes
all stacks to stderr and to out/<run>/stacks/rank_<r>.txt, dumps the flight recorders to out/<run>/flight_recorder/ where
torch keeps any, and ends the process with exit code 1, so that torchrun or Slurm can start anew.

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
LOOK = 10           # beats between two looks at the other ranks, while one place lasts; with many ranks more, for the store's
RANKS_A_LOOK = 64   # sake: all of them look, each at all
LOOKS = 3           # of them in a row must find a rank lost: this one may be about to end by itself for the same reason
LISTEN = 6          # beats without a sign from a rank before it counts as silent
STORE_PATIENCE = 5  # seconds that the store has for an answer: with its host stopped there is none
# Why a rank ended, as it told the others: the first is to blame; one that met an error in a collective, or whose watchdog
# ended it, may be the victim of another.
FAILED, MET, STOOD = "failed", "met", "its watchdog ended it"
NEVER = {"host": "unknown", "pid": 0, "pids": "", "calls": 0, "phase": "its start", "step": None, "beat": 0, "why": None}


class Watchdog(contextlib.AbstractContextManager):
    """Watches the ranks of `world`; writes nothing below `run_dir` unless the run stands still.

    timeout, start_timeout: seconds that one place may last, after and before first_step_done()."""

    def __init__(self, world, run_dir: Path, timeout: float, start_timeout: float):
        self.world, self.run_dir = world, Path(run_dir)
        self.timeout, self.patience, self._is_warm = timeout, start_timeout, False
        self._calls, self._place = 0, (0, "start", None, None)
        self._beat, self._why = 0, None
        self._closed = threading.Event()
        self._store = _client() if world.size > 1 else None
        self._publish()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ called by the loop

    def at(self, phase: str, step: int | None = None, patience: float | None = None) -> None:
        """The loop is now here, which may last `patience` seconds if given. All ranks must call it alike: the one with
        the fewest calls counts as behind."""
        self._calls += 1
        self._place = (self._calls, phase, step, patience)

    def first_step_done(self) -> None:
        """Compilation and loading are over: from here on a place may last `timeout` seconds. May be called every step."""
        is_first, self._is_warm, self.patience = not self._is_warm, True, self.timeout
        if is_first and self.world.size > 1 and self.world.device.type == "cuda":   # NCCL's own dump needs its folder
            (self.run_dir / "flight_recorder").mkdir(parents=True, exist_ok=True)

    def close(self, why: str = "left") -> None:
        """Stop watching and tell the other ranks that this one ended by itself; may be called again."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(timeout=2 * STORE_PATIENCE)
            self._why = self._why or why
            self._publish()

    def __exit__(self, kind, error, traceback) -> None:
        self.close("left" if error is None else _why(FAILED, error))    # what others may be to blame for, explain() knows

    def explain(self, error: Exception) -> str | None:
        """A sentence on the rank whose end made a collective fail with `error` here, after LISTEN beats at most; None
        where no rank is missing, so that the error is this rank's own."""
        if self.world.size == 1:
            return None
        self._why = self._why or _why(MET, error)
        signs = self._listen()
        culprit = self._culprit(_by_rank(signs), missing_only=True) if signs else self._storeless()
        if culprit is None:
            self._why = _why(FAILED, error)
            self._publish()
            return None
        kind = type(error).__name__ if signs else f"{type(error).__name__}: {error}"[:200]      # without signs it is a guess
        return f"{culprit}; a collective failed without it ({kind})"

    def _watch(self) -> None:
        place, still, seen = self._place, 0, 0
        while not self._closed.wait(BEAT):
            if self._place is not place:
                place, still, seen = self._place, 0, 0
            self._publish()
            patience = place[3] or self.patience
            if still * BEAT > patience:
                self._end(patience)
            if still and still % (LOOK * -(-self.world.size // RANKS_A_LOOK)) == 0 and self._why is None:
                seen = seen + 1 if self._has_lost() else 0
                if seen >= LOOKS and self._place is place and self._why is None and not self._closed.is_set():
                    self._end(still * BEAT, is_lost=True)
            still += 1

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

    def _has_lost(self) -> bool:
        """Whether another rank is dead or has ended with an error; one that left, is silent or behind is not lost."""
        signs = _within(2 * STORE_PATIENCE, self._read) if self._store is not None else []
        if signs is None:       # the call that waits holds this connection
            self._store = _within(2 * STORE_PATIENCE, _client)
        return any(_is_dead(sign) or (sign["why"] or "").startswith((FAILED, STOOD)) for sign in signs or [])

    def _end(self, patience: float, is_lost: bool = False) -> None:
        """Say what is known, each part only if it can be said, and leave; nothing here may keep the process alive."""
        message, signs = _within(60, lambda: self._judge(patience, is_lost)) or (f"watchdog: rank {self.world.rank} is stuck", {})
        stacks = _within(20, lambda: self._write(message, signs))
        _within(20, lambda: self._say(message + (f"; stacks in {stacks}" if stacks else "")))
        os._exit(1)

    def _judge(self, patience: float, is_lost: bool) -> tuple[str, dict[int, dict]]:
        """What to say, and the other ranks' last signs."""
        _, phase, step, _ = self._place
        line = f"no progress for {patience:g} s at {_where(phase, step)}"
        self._why = f"{STOOD}: {line}"      # first of all: the others must not blame a rank that merely tells
        signs = _by_rank(self._listen())
        if signs:
            culprit = self._culprit(signs, missing_only=is_lost)
            line += f"; {culprit or 'all ranks are alive and equally far: a collective or the device hangs'}"
        elif self.world.size > 1:
            line += f"; {self._storeless()}"
        self._why = f"{STOOD}: {line}"
        self._publish()
        return f"watchdog: rank {self.world.rank}: {line}", signs

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
        for name, trace in _flight_recorders().items():
            (self.run_dir / "flight_recorder").mkdir(exist_ok=True)
            (self.run_dir / f"flight_recorder/rank_{rank}{name}.json").write_text(trace)
        return self.run_dir / "stacks"

    def _say(self, message: str) -> None:
        print(f"\n{message}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)

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
        try:
            texts = _texts(self._store, [f"rank{rank}" for rank in range(self.world.size)])
        except (RuntimeError, AttributeError):      # torch's network errors among them; no store any more
            return None
        return [json.loads(text) if text else NEVER for text in texts]

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


def _texts(store: dist.Store, keys: list[str]) -> list[bytes | None]:
    """Their values, None for a key that is not there. Two calls where all are: hundreds of ranks may ask at once, and in
    one call per key the store would keep them waiting for longer than they do."""
    if store.check(keys):
        return store.multi_get(keys)
    half = len(keys) // 2
    return _texts(store, keys[:half]) + _texts(store, keys[half:]) if half else [None]


def _by_rank(signs: list[list[dict]]) -> dict[int, dict]:
    """Each rank's second sign, with what the two together tell: whether the rank is dead, whether it is silent."""
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
    """Where pids mean what they mean here (hosts' names and namespaces' numbers recur elsewhere); "" without /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _why(how: str, error: BaseException) -> str:
    return f"{how}: {type(error).__name__}: {error}"[:300]


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


def _client() -> dist.Store | None:
    """A connection of its own to the store that torchrun's environment names, under this attempt's own keys: torch's
    own connection is held by one call at a time, and a rank that hangs may be in one."""
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              wait_for_workers=False, timeout=timedelta(seconds=60))   # many ranks connect at once
    except (KeyError, RuntimeError) as error:
        print(f"watchdog: no store to tell the ranks' places by ({error}); a stand-still is still noticed", file=sys.stderr)
        return None
    store.set_timeout(timedelta(seconds=STORE_PATIENCE))
    return dist.PrefixStore(f"watchdog/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _flight_recorders() -> dict[str, str]:
    """The last collectives of this process as JSON, where torch records them, by what is added to the file's name: NCCL
    has a recorder of its own, in builds with NCCL; what gloo (and with it a CPU) did is in another."""
    core, traces = getattr(torch._C, "_distributed_c10d", None), {}
    for suffix, name in (("", "_dump_nccl_trace_json"), ("_gloo", "_dump_fr_trace_json")):
        with contextlib.suppress(Exception):    # a recorder that is not there, or fails, must not cost the other
            trace = getattr(core, name)()
            traces[suffix] = trace.decode() if isinstance(trace, bytes) else trace
    return traces
