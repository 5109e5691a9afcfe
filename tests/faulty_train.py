"""train.py with faults built in: `python -m tests.faulty_train FAULT ... CONFIG.py section.key=value ...`.

A fault is a name and numbers, joined by colons. Steps count from 1 and are steps of the data: what is injected belongs to
the tokens, so a run that goes over the same tokens again meets it again.

    kill_in_save:STEP:N         SIGKILL to the process group before the N-th change that the save of STEP makes on disk
    fail_in_save:STEP:N:COUNT   "No space left on device" from that change and those after it, COUNT in all; on one rank: :RANK
    fail_load:RANK              one rank alone cannot read what a checkpoint holds
    trace_data:FILE             appends step and SHA-256 of each micro-batch that is trained on to FILE.<rank>
    scale_loss:FIRST:LAST:FACTOR    the loss, and with it its gradient, times FACTOR on the data of these steps; nan is a factor
    nan_gradient:STEP:RANK      one element of one gradient on one rank is NaN
    nan_weight:STEP:RANK        one element of one weight on one rank is NaN from the update of this step on
    omit_update:STEP            the optimizer is not called at this step: what a skipped step should amount to
    signal_in_step:STEP:RANK:NUMBER     this signal to one rank between backward pass and gradient norm; not after a restart
    slow_steps:SECONDS          each step takes so much longer
    move_data:STEP:BY           from this training step on, the data of BY steps later: what a rollback should amount to
"""

import errno
import faulthandler
import gc
import hashlib
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

import train
from runtime.checkpoint import TensorReader
from runtime.data import Data
from runtime.run import Run
from tests.changes import on_change


def main(argv: list[str]) -> int:
    split = next(i for i, argument in enumerate(argv) if argument.endswith(".py"))
    faults = Faults() if split else None
    for fault in argv[:split]:
        name, *arguments = fault.split(":")
        getattr(faults, name)(*(argument if "/" in argument else float(argument) for argument in arguments))
    sys.argv = ["train.py", *argv[split:]]
    return train.main(sys.argv[1:])


def start_rank(argv: list[str], env: dict[str, str], log: Path, leader: int, limit: tuple[int, int] | None, launcher: list[str]):
    """Become one rank in a process just forked, in the process group of `leader` (0: its own); or torchrun, by `launcher`."""
    gc.freeze()     # what was imported stays shared with the other runs
    while os.getpgrp() != (leader or os.getpid()):
        try:
            os.setpgid(0, leader)
        except OSError:             # the leader has no group yet, or has already told of a mistake and ended
            if not os.path.exists(f"/proc/{leader}"):
                os.setpgid(0, 0)
                break
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(Path(__file__).resolve().parents[1])
    os.environ.update(env)
    torch.set_num_threads(1)
    faulthandler.enable(2)
    if limit:
        resource.setrlimit(limit[0], (limit[1], resource.RLIM_INFINITY))
    sys.exit(torchrun([*launcher, *argv]) if launcher else main(argv))


class Faults:
    """Calls what is registered for the places of a step: `in_loss`, functions (step, losses, tokens) -> losses of every forward
    pass that is trained on; `before_norm`, functions (step, run), once a step."""

    def __init__(self):
        self.rank, self.run, self.in_loss, self.before_norm = int(os.environ.get("RANK", 0)), None, [], []
        open_run, clip = Run.__init__, train.parallel.clip_gradients

        def opened(run, *rest):
            open_run(run, *rest)
            self.run = run
            run.model.register_forward_hook(forwarded)

        def forwarded(model, inputs, losses):
            for call in self.in_loss if torch.is_grad_enabled() else ():
                losses = call(self.step(), losses, inputs[0])
            return losses

        def clip_injected(*arguments):
            for call in self.before_norm:
                call(self.step(), self.run)
            return clip(*arguments)

        Run.__init__, train.parallel.clip_gradients = opened, clip_injected

    def step(self) -> int:
        return self.run.progress.step + self.run.progress.data_offset + 1

    def at_step(self, step: float, rank: float, call: Callable) -> None:
        self.before_norm.append(lambda now, run: call(run) if (now, self.rank) == (step, rank) else None)

    def scale_loss(self, first: float, last: float, factor: float) -> None:
        self.in_loss.append(lambda step, losses, x: losses * factor if first <= step <= last else losses)

    def trace_data(self, file: str) -> None:
        def call(step, losses, x):
            with open(f"{file}.{self.rank}", "a") as out:
                print(step, hashlib.sha256(x.numpy().tobytes()).hexdigest(), file=out)
            return losses
        self.in_loss.append(call)

    def nan_gradient(self, at: float, on: float) -> None:
        self.at_step(at, on, lambda run: _spoil(list(run.model.parameters())[-1].grad))

    def nan_weight(self, at: float, on: float) -> None:
        self.at_step(at, on, lambda run: _spoil(list(run.model.parameters())[-1].data))     # an update leaves NaN

    def omit_update(self, at: float) -> None:
        self.at_step(at, self.rank, lambda run: setattr(run.optimizer, "step", lambda: delattr(run.optimizer, "step")))

    def signal_in_step(self, at: float, on: float, number: float) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            self.at_step(at, on, lambda run: os.kill(os.getpid(), int(number)))

    def slow_steps(self, seconds: float) -> None:
        self.before_norm.append(lambda step, run: time.sleep(seconds))

    def move_data(self, at: float, by: float) -> None:
        batch = Data.batch
        Data.batch = lambda data, step, *rest: batch(data, step + (int(by) if step + 1 >= at else 0), *rest)

    def kill_in_save(self, step: float, n: float) -> None:
        def call(count, change):
            if count == n:
                os.killpg(0, signal.SIGKILL)
                time.sleep(60)      # the signal is on its way
        on_change(_of_save(step), call)

    def fail_in_save(self, step: float, n: float, many: float, on: float | None = None) -> None:
        def call(count, change):
            if on in (None, self.rank) and n <= count < n + many and not change.startswith(("remove", "rmdir")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), change.split(" ", 1)[1])
        on_change(_of_save(step), call)

    def fail_load(self, on: float) -> None:
        def read_data(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if on == self.rank:
            TensorReader.read_data = read_data


def _spoil(tensor: torch.Tensor) -> None:
    """The first element on this rank becomes NaN."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    getattr(tensor, "_tensor", tensor).view(-1)[0] = math.nan       # _tensor: of a weight that is gathered as float8


def _of_save(step: float):
    """Whether a change is the save of `step`'s: from the first that names the step to the last before a later one's."""
    at = [0]

    def is_counted(path: str) -> bool:
        if "/checkpoints" not in path:
            return False
        at[0] = max(at[0], *map(int, re.findall(r"step_(\d{8})", path)), 0)
        return at[0] == step
    return is_counted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
