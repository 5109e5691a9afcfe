"""Run the commands of a slice of a study, each printed before it runs, within what is left of its time."""

import ctypes
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from scaling.study import ROOT, Row

END_S = 20.0        # of the limit, for copying what has finished
POLL_S = 0.1
KILL_S = 5.0        # after a command was told to leave for lack of time
PR_SET_PDEATHSIG = 1        # linux/prctl.h


class Ended(Exception):
    """The slice ends here with this exit code."""

    def __init__(self, code: int):
        self.code = code


@dataclass
class Slice:
    """One call of the command: what is asked for, the time that is left, how often it was asked to leave."""
    study: str
    rows: list[Row]
    folder: Path                # of the study's runs
    results: Path
    limit: float = math.inf
    more: list[str] = field(default_factory=list)       # options that sweep.py gets as they are
    skipped: list[str] = field(default_factory=list)    # runs of the study that are given up
    predicted: list[str] = field(default_factory=list)  # runs whose predictions this slice has frozen
    commit: str | None = None
    began: float = field(default_factory=time.monotonic)
    asked: int = 0

    def left(self) -> float:
        """Seconds until the end has to begin."""
        return self.limit - END_S - (time.monotonic() - self.began)

    def finished(self) -> list[str]:
        return [row.run for row in self.rows if is_finished(self.folder, row.run)]


def is_finished(folder: Path, run: str) -> bool:
    return (folder / run / "summary.json").exists()


def do(this: Slice, *words) -> None:
    """A command of this repository. Raises Ended where it does not end with exit code 0."""
    if code := call(this, *words):
        raise Ended(code)


def call(this: Slice, *words, stdout=None, is_last: bool = False) -> int:
    """Exit code of a command; 3 where it was told to leave, or not begun, for a signal to this process or for lack of time.

    is_last: it belongs to the end, which no signal and no limit may cut."""
    if not is_last and (this.asked or this.left() <= 0):
        return 3
    print(f"$ {shown(words)}", flush=True)
    is_module = words[0] == "-m"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    # A session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on once.
    process = subprocess.Popen([sys.executable, *([] if is_module else [ROOT / words[0]]), *map(str, words[not is_module:])],
                               stdout=stdout, start_new_session=True, env=env if is_module else None,
                               preexec_fn=None if is_last else _end_with_parent)
    passed_on, is_late = 0, False
    while process.poll() is None:
        time.sleep(POLL_S)
        if is_last:
            continue
        if not is_late and this.left() < -END_S / 2:    # sweep.py has a limit of its own and leaves before
            is_late = True
            process.terminate()
        elif is_late and this.left() < -END_S / 2 - KILL_S:
            process.kill()
        for _ in range(passed_on, passed_on := this.asked):
            process.terminate()
    code = process.returncode if process.returncode in (0, 1, 2, 3) else 1
    is_cut = not is_last and (this.asked or is_late)
    return 3 if is_cut and process.returncode not in (1, 2) else code


def _end_with_parent() -> None:
    """In a new process: SIGTERM once this one is gone, even killed, so that no run goes on in a GPU that is taken for free."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def shown(words) -> str:
    return shlex.join(["python", *map(str, words)])
