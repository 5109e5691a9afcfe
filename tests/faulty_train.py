"""train.py with faults built in: `python tests/faulty_train.py FAULT ... CONFIG.py section.key=value ...`.

A fault is a name and numbers, joined by colons. Steps count from 1 and are steps of the data: what is injected belongs to
the tokens, so a run that goes over the same tokens again meets it again. Nothing in train.py knows of any of this.

    kill_in_save:STEP:N         SIGKILL to the process group before the N-th change that the save of STEP makes on disk
    fail_in_save:STEP:N:COUNT   "No space left on device" from that change and those after it, COUNT in all; on one rank: :RANK
    fail_load:RANK              one rank alone cannot read what a checkpoint holds
    trace_save:FILE             appends each change that the main rank makes under checkpoints/ to FILE
    trace_data:FILE             appends step and SHA-256 of each micro-batch that is trained on to FILE.<rank>
    scale_loss:FIRST:LAST:FACTOR    the loss, and with it its gradient, times FACTOR on the data of these steps; nan is a factor
    nan_gradient:STEP:RANK      one element of one gradient on one rank is NaN
    nan_weight:STEP:RANK        one element of one weight on one rank is NaN after the update of this step, once
    omit_update:STEP            the optimizer is not called at this step: what a skipped step should amount to
    kill_in_step:STEP:RANK      SIGKILL to one rank between its backward pass and the gradient norm; not after a restart
    stop_in_step:STEP:RANK      SIGSTOP at the same place; not after a restart
    slow_steps:SECONDS          each step takes so much longer
    move_data:STEP:BY           from this training step on, the data of BY steps later: what a rollback should amount to
"""

import errno
import hashlib
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[1]
RANK = 0        # set by main(): tests/nursery.py forks ranks off a process that has none


def main(argv: list[str]) -> int:
    global RANK
    RANK = int(os.environ.get("RANK", 0))
    split = next(i for i, argument in enumerate(argv) if argument.endswith(".py"))
    sys.path.insert(0, str(ROOT))
    import train
    data = Trained(train) if split else None
    for fault in argv[:split]:
        name, *arguments = fault.split(":")
        FAULTS[name](data, *map(_number, arguments))
    sys.argv = ["train.py", *argv[split:]]
    return train.main(sys.argv[1:])


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------------------- in the training

class Trained:
    """Knows by their content which step's tokens are in the model; calls what is hung up at the places of a step.

    `in_loss` are functions (step, losses, tokens) -> losses, of every forward pass that is trained on; `before_norm` and
    `after_update` are functions (step, parameters), once a step."""

    def __init__(self, train):
        self.step, self.moved, self._steps = 0, lambda step: step, {}
        self.in_loss, self.before_norm, self.after_update, self.omitted = [], [], [], set()
        from model import GPT
        from runtime.data import Data
        batch, forward, clip = Data.batch, GPT.forward, train.parallel.clip_gradients
        build = train.optim.build_optimizer

        def batch_noted(data, step, *rest):
            x, y = batch(data, self.moved(step), *rest)
            self._steps[_content(x)] = self.moved(step) + 1
            return x, y

        def forward_injected(model, x, y=None, *rest, **more):
            losses = forward(model, x, y, *rest, **more)
            if y is not None and torch.is_grad_enabled():
                self.step = self._steps[_content(x)]
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


def scale_loss(data: Trained, first: float, last: float, factor: float) -> None:
    data.in_loss.append(lambda step, losses, x: losses * factor if first <= step <= last else losses)


def trace_data(data: Trained, file: str) -> None:
    def call(step, losses, x):
        with open(f"{file}.{RANK}", "a") as out:
            print(step, hashlib.sha256(_content(x)).hexdigest(), file=out)
        return losses
    data.in_loss.append(call)


def nan_gradient(data: Trained, at: float, on: float) -> None:
    def call(step, parameters):
        if (step, RANK) == (at, on):
            _local(parameters[-1].grad).view(-1)[0] = math.nan
    data.before_norm.append(call)


def nan_weight(data: Trained, at: float, on: float) -> None:
    done = []

    def call(step, parameters):
        if (step, RANK) == (at, on) and not done:
            done.append(step)
            with torch.no_grad():
                _local(parameters[-1].data).view(-1)[0] = math.nan
    data.after_update.append(call)


def omit_update(data: Trained, at: float) -> None:
    data.omitted.add(at)


def kill_in_step(data: Trained, at: float, on: float, number: int = signal.SIGKILL) -> None:
    def call(step, parameters):
        if (step, RANK) == (at, on) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), number)
    data.before_norm.append(call)


def stop_in_step(data: Trained, at: float, on: float) -> None:
    kill_in_step(data, at, on, signal.SIGSTOP)


def slow_steps(data: Trained, seconds: float) -> None:
    data.before_norm.append(lambda step, parameters: time.sleep(seconds))


def move_data(data: Trained, at: float, by: float) -> None:
    data.moved = lambda step: step + (int(by) if step + 1 >= at else 0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor)       # of a weight that is gathered as float8


def _content(x: torch.Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


# --------------------------------------------------------------------------------------------------------------- on disk

def kill_in_save(data: Trained, step: float, n: float) -> None:
    def call(count, change):
        if count == n:
            os.killpg(os.getpgid(0), signal.SIGKILL)
            time.sleep(60)      # the signal is on its way
    _on_change(_of_save(step), call)


def fail_in_save(data: Trained, step: float, n: float, many: float, on: float | None = None) -> None:
    def call(count, change):
        if on in (None, RANK) and n <= count < n + many and not change.startswith(("remove", "rmdir")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), change.split(" ", 1)[1])
    _on_change(_of_save(step), call)


def fail_load(data: Trained, on: float) -> None:
    def read_data(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    from runtime.checkpoint import TensorReader
    if on == RANK:
        TensorReader.read_data = read_data


def trace_save(data: Trained, file: str) -> None:
    def call(count, change):
        if RANK == 0:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, f"{change}\n".encode())
            os.close(descriptor)
    _on_change(lambda path: "/checkpoints" in path, call)


def _of_save(step: float):
    """Whether a change is the save of `step`'s: from the first that names the step to the last before a later one's."""
    at = [0]

    def is_counted(path: str) -> bool:
        if "/checkpoints" not in path:
            return False
        at[0] = max(at[0], *map(int, re.findall(r"step_(\d{8})", path)), 0)
        return at[0] == step
    return is_counted


def _on_change(is_counted, call) -> None:
    from tests.changes import on_change  # main() has put it on the path
    on_change(is_counted, call)


FAULTS = {call.__name__: call for call in (
    kill_in_save, fail_in_save, fail_load, trace_save, trace_data, scale_loss, nan_gradient, nan_weight, omit_update,
    kill_in_step, stop_in_step, slow_steps, move_data)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
