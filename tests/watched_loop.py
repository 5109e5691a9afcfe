"""A training loop in miniature under the watchdog, as one rank of a job that tests/test_watchdog.py starts."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from runtime import watchdog
from runtime.watchdog import Watchdog


def begin(log: Path, env: dict[str, str], *arguments) -> None:
    """As a process of its own, just forked, whose output goes to `log`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(env)
    loop(*arguments)


def loop(folder: Path, fault: str, victim: int, steps: int) -> None:
    """In step 30, `fault` befalls the rank `victim`; after "deaf_", the others are then blocked outside of collectives for
    15 seconds, as they would be for ever in a read from a GPU that waits for NCCL, and no patience ends in the test."""
    is_deaf, fault = fault.startswith("deaf_"), fault.removeprefix("deaf_")
    watchdog.BEAT = 0.2 if is_deaf else watchdog.BEAT
    world = SimpleNamespace(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), device=torch.device("cpu"))
    (folder / "config.json").touch()
    dist.init_process_group("gloo")
    watch = Watchdog(world, folder, timeout=600 if is_deaf else 2, start_timeout=60)
    (folder / f"ready_{world.rank}").touch()
    with watch:
        try:
            for step in range(steps):
                watch.at("forward", step)
                time.sleep(0.05)
                if step == 30 and world.rank == victim:
                    if fault == "leave":
                        break
                    befall(fault)
                watch.at("reduce", step)
                if step == 30 and is_deaf:
                    time.sleep(15)
                    break
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
