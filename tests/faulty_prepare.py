"""prepare_data.py with small pieces and shards, and with faults built in: FAULTY_PREPARE=JSON python -m tests.faulty_prepare ...

    sizes       {"SHARD_TOKENS": 500, ...}: constants of the rooms of prepare/ and runtime/, set wherever a room has one of
                that name; one that no room has is an error, or a storm would go through a single piece
    folder      changes on disk below it are counted, from 1; those of the pool's children are not
    at, fault   "kill": SIGKILL to the process group before change `at`; "full": that change and each later one that needs
                room says "No space left on device"; "SIGINT", "SIGTERM": sent to this process before change `at`; "wait":
                nothing goes on from there until the file `until` is there
    trace       appends each change to this file
    largest_file    bytes; the system refuses to let a file grow beyond
    patience    seconds that any pause lasts at most, the Hub's client's own too: as often asked again, only sooner
    --serve     instead of a command line: runs each command line that comes on stdin in a process forked off this one, which
                has imported everything, the packages too, and tells its pid and then its exit code on stdout

Nothing in prepare_data.py knows of any of this.
"""

import atexit
import errno
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from tests.changes import on_change

ROOT = Path(__file__).parent.parent
ROOMS = ("prepare", "runtime")


def install(faults: dict) -> None:
    set_sizes(faults.get("sizes", {}))
    if "folder" in faults:
        on_change(lambda path: faults["folder"] in path, lambda count, change: _meet(faults, count, change))
    if "patience" in faults:
        pause = time.sleep
        time.sleep = lambda seconds: pause(min(seconds, faults["patience"]))
    if "largest_file" in faults:
        resource.setrlimit(resource.RLIMIT_FSIZE, (faults["largest_file"], resource.RLIM_INFINITY))


def set_sizes(sizes: dict) -> None:
    for name, value in sizes.items():
        found = [path for room in ROOMS for path in (ROOT / room).glob("*.py") if f"\n{name} = " in path.read_text()]
        assert found, f"no room of {ROOMS} has a constant {name}"
        for path in found:
            importlib.import_module(f"{path.parent.name}.{path.stem}")
        for module in list(sys.modules.values()):
            if module.__name__.startswith(tuple(f"{room}." for room in ROOMS)) and hasattr(module, name):
                setattr(module, name, value)


def _meet(faults: dict, count: int, change: str) -> None:
    if "trace" in faults:
        descriptor = os.open(faults["trace"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{change}\n".encode())
        os.close(descriptor)
    what = faults.get("fault")
    if what == "full" and count >= faults["at"] and not change.startswith(("remove", "rmdir", "truncate")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), change.split(" ")[1])
    if what == "kill" and count == faults["at"]:
        os.killpg(os.getpgid(0), signal.SIGKILL)
        time.sleep(60)      # the signal is on its way
    while what == "wait" and count == faults["at"] and not os.path.exists(faults["until"]):
        time.sleep(0.01)
    if what in ("SIGINT", "SIGTERM") and count == faults["at"]:
        os.kill(os.getpid(), getattr(signal, what))


def serve(packages: list[str]) -> None:
    for name in "prepare_data", *packages:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _become(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(ask: dict) -> None:
    """Go on as if the command had been typed, in the process just forked; never returns."""
    os.setpgid(0, 0)
    log = os.open(ask["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        install(ask["faults"])
        code = _main(ask["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main(arguments: list[str]) -> int:
    import prepare_data
    return prepare_data.main(arguments)


if __name__ == "__main__":
    if "--serve" in sys.argv[1:2]:
        serve(sys.argv[2:])
    else:
        install(json.loads(os.environ.get("FAULTY_PREPARE", "{}")))
        sys.exit(_main(sys.argv[1:]))
