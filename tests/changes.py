"""Tell of each change that this process makes on disk, before it is made: what faults on disk are built from."""

import os
import sys
import threading
from collections.abc import Callable

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def on_change(is_counted: Callable[[str], bool], call: Callable[[int, str], None]) -> None:
    """call(count, "what path") before each change on disk whose path is_counted. Python announces them all, whoever makes
    them, except fsync. What `call` raises, the change raises."""
    count, lock, fsync = [0], threading.RLock(), os.fsync

    def note(what: str, path: str) -> None:
        with lock:
            if is_counted(path):
                count[0] += 1
                call(count[0], f"{what} {path}")

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            if not isinstance(path, int) and (set(mode or "") & set("wax+") or mode is None and flags & WRITING):
                note("open", path_of(path))
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            note(event[3:], path_of(arguments[0], arguments[-1]))     # the last one is the folder it is relative to
        elif event == "os.rename":
            note("rename", f"{path_of(arguments[0])} -> {path_of(arguments[1])}")

    def fsync_noted(descriptor):
        note("fsync", path_of(descriptor if isinstance(descriptor, int) else descriptor.fileno()))
        return fsync(descriptor)

    sys.addaudithook(hook)
    os.fsync = fsync_noted


def path_of(path, folder: int = -1) -> str:
    """As text; of a descriptor, and relative to the folder of one, what it is open on."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}") if path >= 0 else ""
    return os.path.join(path_of(folder), os.fsdecode(path))
