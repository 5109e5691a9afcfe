"""Tell of each change that this process makes on disk, before it is made: what faults on disk are
built from."""

import itertools
import os
import sys
import threading
from collections.abc import Callable


def on_change(is_counted: Callable[[str], bool], call: Callable[[int, str], None]) -> None:
    """call(count, "what path") before each change on disk whose path is_counted. Python announces
    them all, whoever makes them, except fsync. What `call` raises, the change raises."""
    count, lock, fsync = itertools.count(1), threading.RLock(), os.fsync

    def note(what: str, path: str) -> None:
        with lock:
            if is_counted(path):
                call(next(count), f"{what} {path}")

    def hook(event: str, arguments: tuple) -> None:
        if (
            event == "open"
            and not isinstance(arguments[0], int)
            and arguments[2] & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC)
        ):
            note("open", os.fsdecode(arguments[0]))
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            # the path is relative to it
            folder = os.readlink(f"/proc/self/fd/{arguments[-1]}") if arguments[-1] >= 0 else ""
            note(event[3:], os.path.join(folder, os.fsdecode(arguments[0])))
        elif event == "os.rename":
            note("rename", f"{arguments[0]} -> {arguments[1]}")

    sys.addaudithook(hook)
    os.fsync = lambda number: note("fsync", os.readlink(f"/proc/self/fd/{number}")) or fsync(number)
