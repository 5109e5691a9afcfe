"""Report each change that this process makes on disk, before it is made: what the faults on disk
are built from."""

import itertools
import os
import sys
import threading
from collections.abc import Callable

WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC  # flags of open(): reading alone has none of them
IN_FOLDER = ("os.mkdir", "os.remove", "os.rmdir")  # their path may be relative to an open folder


def on_change(is_counted: Callable[[str], bool], call: Callable[[int, str], object]) -> None:
    """call(count, "what path") before each change on disk whose path is_counted. Python announces
    them all, whoever makes them, except fsync. What `call` raises, the change raises."""
    count = itertools.count(1)
    lock = threading.RLock()
    fsync = os.fsync

    def note(what: str, path: str) -> None:
        with lock:
            if is_counted(path):
                call(next(count), f"{what} {path}")

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and is_write(arguments):
            note("open", os.fsdecode(arguments[0]))
        elif event in IN_FOLDER:
            note(event.removeprefix("os."), path_in_folder(arguments[0], arguments[-1]))
        elif event == "os.rename":
            note("rename", f"{arguments[0]} -> {arguments[1]}")

    def noted_fsync(number: int) -> None:
        note("fsync", os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    sys.addaudithook(hook)
    # who calls it passes a number, never a file
    os.fsync = noted_fsync  # type: ignore[assignment]


def is_write(arguments: tuple) -> bool:
    """Whether the arguments of the event "open" (path, mode, flags) name a file that may change."""
    path, _, flags = arguments
    return not isinstance(path, int) and bool(flags & WRITING)


def path_in_folder(path: str | bytes, folder_number: int) -> str:
    """The path that an event names, below the open folder of that number; -1: the current one."""
    folder = os.readlink(f"/proc/self/fd/{folder_number}") if folder_number >= 0 else ""
    return os.path.join(folder, os.fsdecode(path))
