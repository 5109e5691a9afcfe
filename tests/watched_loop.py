"""A training loop in miniature under the watchdog, as one rank of a job that tests/test_watchdog.py starts."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from runtime.watchdog import Watchdog


def loop(folder: Path, fault: str, victim: int, steps: int) -> None:
    """In step 30, `fault` befalls the rank `victim`."""
    world = SimpleNamespace(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), device=torch.device("cpu"))
    (folder / "config.json").touch()
    dist.init_process_group("gloo")
    watch = Watchdog(world, folder, timeout=2, start_timeout=60)
    (folder / f"ready_{world.rank}").touch()
    try:
        with watch:
            for step in range(steps):
                watch.at("forward", step)
                time.sleep(0.05)
                if step == 30 and world.rank == victim:
                    befall(fault)
                watch.at("reduce", step)
                dist.all_reduce(torch.ones(4))
                watch.first_step_done()
    except RuntimeError as error:
        print(f"explained: {watch.explain(error)}", flush=True)
        os._exit(1)
    os._exit(0)


def befall(fault: str) -> None:
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "error":
        raise ValueError("a damaged shard")
    elif fault == "stuck":
        where_it_is_stuck()


def where_it_is_stuck():
    time.sleep(600)


if __name__ == "__main__":
    loop(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
