"""train.py with faults built in: `python -m tests.faulty_train FAULT ... CONFIG.py section.key=value ...`.

A fault is a name and numbers, joined by colons. Steps count from 1 and are steps of the data: what is injected belongs to
the tokens, so a run that goes over the same tokens again meets it again.

    kill_in_save:STEP:N         SIGKILL to the process group before the N-th change that the save of STEP makes on disk
    fail_in_save:STEP:N:COUNT   "No space left on device" from that change and those after it, COUNT in all; on one rank: :RANK
    fail_load:RANK              one rank alone cannot read what a checkpoint holds
    trace_save:FILE             appends each change that the main rank makes under checkpoints/ to FILE
    trace_data:FILE             appends step and SHA-256 of each micro-batch that is trained on to FILE.<rank>
    scale_loss:FIRST:LAST:FACTOR    the loss, and with it its gradient, times FACTOR on the data of these steps; nan is a factor
    nan_gradient:STEP:RANK      one element of one gradient on one rank is NaN
    nan_weight:STEP:RANK        one element of one weight on one rank is NaN after the update of this step, once
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
from pathlib import Path

import torch
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

import train
from model import GPT
from runtime.checkpoint import TensorReader
from runtime.data import Data
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
    """Knows by their content which step's tokens are in the model; calls what is registered for the places of a step.

    `in_loss` are functions (step, losses, tokens) -> losses, of every forward pass that is trained on; `before_norm` and
    `after_update` are functions (step, parameters), once a step."""

    def __init__(self):
        self.rank, self.step, self.moved, steps = int(os.environ.get("RANK", 0)), 0, lambda step: step, {}
        self.in_loss, self.before_norm, self.after_update, self.omitted = [], [], [], set()
        batch, forward, clip, build = Data.batch, GPT.forward, train.parallel.clip_gradients, train.optim.build_optimizer

        def batch_noted(data, step, *rest):
            x, y = batch(data, self.moved(step), *rest)
            steps[_content(x)] = self.moved(step) + 1
            return x, y

        def forward_injected(model, x, y=None, *rest, **more):
            losses = forward(model, x, y, *rest, **more)
            if y is not None and torch.is_grad_enabled():
                self.step = steps[_content(x)]
                for call in self.in_loss:
                    losses = call(self.step, losses, x)
            return losses

        def clip_injected(model, *rest):
            for call in self.before_norm:
                call(self.step, list(model.parameters()))
            return clip(model, *rest)

        def build_injected(model, *rest):
            optimizer = build(model, *rest)
            update = optimizer.step

            def step_injected(*arguments):
                if self.step not in self.omitted:
                    update(*arguments)
                    for call in self.after_update:
                        call(self.step, list(model.parameters()))
            optimizer.step = step_injected
            return optimizer

        Data.batch, GPT.forward = batch_noted, forward_injected
        train.parallel.clip_gradients, train.optim.build_optimizer = clip_injected, build_injected

    def scale_loss(self, first: float, last: float, factor: float) -> None:
        self.in_loss.append(lambda step, losses, x: losses * factor if first <= step <= last else losses)

    def trace_data(self, file: str) -> None:
        def call(step, losses, x):
            with open(f"{file}.{self.rank}", "a") as out:
                print(step, hashlib.sha256(_content(x)).hexdigest(), file=out)
            return losses
        self.in_loss.append(call)

    def nan_gradient(self, at: float, on: float) -> None:
        def call(step, parameters):
            if (step, self.rank) == (at, on):
                _local(parameters[-1].grad).view(-1)[0] = math.nan
        self.before_norm.append(call)

    def nan_weight(self, at: float, on: float) -> None:
        def call(step, parameters):
            if (step, self.rank) == (at, on):
                self.after_update.remove(call)
                with torch.no_grad():
                    _local(parameters[-1].data).view(-1)[0] = math.nan
        self.after_update.append(call)

    def omit_update(self, at: float) -> None:
        self.omitted.add(at)

    def signal_in_step(self, at: float, on: float, number: float) -> None:
        def call(step, parameters):
            if (step, self.rank) == (at, on) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), int(number))
        self.before_norm.append(call)

    def slow_steps(self, seconds: float) -> None:
        self.before_norm.append(lambda step, parameters: time.sleep(seconds))

    def move_data(self, at: float, by: float) -> None:
        self.moved = lambda step: step + (int(by) if step + 1 >= at else 0)

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

    def trace_save(self, file: str) -> None:
        def call(count, change):
            if self.rank == 0:
                with open(file, "a") as out:
                    print(change, file=out)
        on_change(lambda path: "/checkpoints" in path, call)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor)       # of a weight that is gathered as float8


def _content(x: torch.Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


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
