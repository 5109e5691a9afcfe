"""Fork runs of train.py off one process that has imported it: the imports take longer than a test's runs do.

    python -m tests.nursery     a line of JSON on stdin starts a run, lines on stdout tell who has started and ended
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import sys
import threading
import traceback
from pathlib import Path


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return []


def serve() -> None:
    """Fork a run for each line of stdin, report each end on stdout; at the end of stdin, kill what is left."""
    import torch._dynamo  # noqa: F401 - what train.py imports only once it converts a model
    import torch._inductor.codegen.triton  # noqa: F401
    import torchao.float8.float8_linear_utils  # noqa: F401

    import train  # noqa: F401
    from tests import faulty_train  # noqa: F401
    faulthandler.enable()
    gc.freeze()     # what is there stays shared with the runs
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living, read, waiting = set(), True, b""
    while read:
        ready = select.select([0, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            for pid in list(living):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    living.discard(pid)
                    print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
        if 0 in ready:
            read = os.read(0, 65536)
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                pids = _fork(json.loads(line))
                living |= set(pids)
                print(json.dumps({"started": pids}), flush=True)
    for pid in [one for alive in living for one in (alive, *children(alive))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _fork(ask: dict) -> list[int]:
    pids = []
    for rank in range(ask["ranks"]):
        pid = os.fork()
        if not pid:
            _become(ask, rank, pids[0] if pids else 0)
        os.setpgid(pid, pids[0] if pids else pid)   # here and in the child: whoever comes first
        pids.append(pid)
    return pids


def _become(ask: dict, rank: int, leader: int) -> None:
    """Go on as if `python train.py` had been typed, in the process just forked; never returns. Threads are waited for and
    exit functions called as at any exit, but the thousand modules are not taken apart: that takes longer than a run."""
    os.setpgid(0, leader)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(ask["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 64)
    if ask["largest_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ask["largest_file"], resource.RLIM_INFINITY))
    code = 1
    try:
        code = _run(ask, rank)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(ask: dict, rank: int) -> int:
    if ask["launcher"]:
        from torch.distributed.run import main
        main([*ask["launcher"], *ask["arguments"]])
        return 0
    if ask["ranks"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ask["ranks"]), MASTER_ADDR="127.0.0.1",
                          LOCAL_WORLD_SIZE=str(ask["ranks"]), MASTER_PORT=str(ask["port"]))
    from tests import faulty_train
    return faulty_train.main([*ask["faults"], *ask["arguments"]])


if __name__ == "__main__":
    serve()
