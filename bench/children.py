"""Start, question and end processes that answer in JSON lines.

A child gets one JSON object as its argument, reads an order a line from its stdin and writes an answer a line to its stdout:
{"ok": true, ...} or {"ok": false, "error": "one line", "oom": bool}. Other output of it is no answer; it goes to the log,
each line behind the child's name. Whatever a child does (hang, die, print nonsense), ask() comes back in time.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

TAIL = 15       # last lines of a child's log that its error carries
GRACE_S = 3     # for a child to end by itself once its stdin is closed


class ChildError(RuntimeError):
    """A child that failed; `oom`: out of memory; `tail`: the last lines that it logged."""

    def __init__(self, message: str, oom: bool = False, tail: tuple[str, ...] = ()):
        super().__init__(message)
        self.oom, self.tail = oom, list(tail)


class Child:
    """One running process. It and all it started end with kill() or close(), at the latest when this process ends:
    a child whose stdin is closed ends itself."""

    def __init__(self, name: str, command: list[str], log: Path, cwd: Path, env: dict[str, str]):
        self.name, self.error = name, None
        self._answers: queue.Queue = queue.Queue()
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._log = open(log, "a", encoding="utf-8", buffering=1)      # noqa: SIM115 - kill() ends it
        self._write(f"==== {' '.join(command)[:2000]}")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd,
                                         env=os.environ | env, start_new_session=True)      # a group that can be killed whole
        for read in (self._read_answers, self._read_log):
            threading.Thread(target=read, name=f"{read.__name__} of {name}", daemon=True).start()

    def ask(self, order: dict, timeout: float) -> dict:
        """The answer to `order`. Raises ChildError; the child is dead then."""
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):       # it is dead: read() tells how
            pass
        return self.read(timeout)

    def read(self, timeout: float) -> dict:
        """The next answer. Raises ChildError after `timeout` seconds, and where the child failed or ended; it is dead then."""
        try:
            answer = self._answers.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise self._failed(f"no answer within {timeout:.0f} seconds") from None
        if answer is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            code = self._process.returncode
            died = f"killed by {_signal_name(-code)}" if code is not None and code < 0 else f"exit code {code}"
            time.sleep(0.05)        # the log's last lines are on their way
            raise self._failed(f"ended without an answer ({died})" + (f": {self._tail[-1]}" if self._tail else ""))
        if answer["ok"] is not True:
            raise self._failed(str(answer.get("error") or "it failed and did not say why"), bool(answer.get("oom")))
        return answer

    def close(self) -> None:
        """A polite end: order, a moment, then force."""
        if self.error is None:
            with suppress(ChildError):
                self.ask({"do": "close"}, GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Ends the child with all that it started, whatever it is doing; more than once does no harm."""
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _failed(self, message: str, oom: bool = False) -> ChildError:
        self.error = ChildError(message.strip().splitlines()[0][:500] if message.strip() else "failed", oom, tuple(self._tail))
        self.kill()
        return self.error

    def _read_answers(self) -> None:
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            if isinstance(answer, dict) and "ok" in answer:
                self._answers.put(answer)
            else:
                self._note(line)
        self._answers.put(None)

    def _read_log(self) -> None:
        for line in self._process.stderr:
            self._note(line)

    def _note(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._tail.append(text[:500])
            self._write(text)

    def _write(self, text: str) -> None:
        with suppress(ValueError, OSError):     # closed after a kill, or a full disk: a log must not cost a measurement
            self._log.write(f"[{self.name}] {text}\n")


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
