"""train.py with faults built in: `python tests/faulty_train.py FAULT ... CONFIG.py section.key=value ...`.

A fault is a name and numbers, joined by colons. Steps count from 1 and are steps of the data: what is injected belongs to
the tokens, so a run that goes over the same tokens again meets it again. Nothing in train.py knows of any of this.

    kill_in_save:STEP:N         SIGKILL to the process group before the N-th change that the save of STEP makes on disk
    fail_in_save:STEP:N:COUNT   "No space left on device" from that change and those after it, COUNT in all
    slow_steps:SECONDS          each step takes so much longer
    trace_save:FILE             appends each change that the main rank makes under checkpoints/ to FILE
    trace_data:FILE             appends step and SHA-256 of each micro-batch that is trained on to FILE.<rank>
    scale_loss:FIRST:LAST:FACTOR    the loss, and with it its gradient, times FACTOR on the data of these steps; nan is a factor
    nan_gradient:STEP:RANK      one element of one gradient on one rank is NaN
    nan_weight:STEP:RANK        one element of one weight on one rank is NaN after the update of this step, once
    omit_update:STEP            the optimizer is not called at this step: what a skipped step should amount to
    kill_in_step:STEP:RANK      SIGKILL to one rank between its backward pass and the gradient norm; not after a restart
    stop_in_step:STEP:RANK      SIGSTOP at the same place; not after a restart
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


def main(argv: list[str]) -> int:
    split = next(i for i, argument in enumerate(argv) if argument.endswith(".py"))
    sys.path.insert(0, str(ROOT))
    import train
    inject(argv[:split], train)
    sys.argv = ["train.py", *argv[split:]]
    return train.main(sys.argv[1:])


def inject(faults: list[str], train) -> None:
    """Build the faults into this process. Raises ValueError for one that there is not."""
    known = {call.__name__: call for call in (
        kill_in_save, fail_in_save, trace_save, trace_data, scale_loss, nan_gradient, nan_weight, omit_update, kill_in_step,
        stop_in_step, slow_steps, move_data)}
    data = Trained(train) if faults else None
    for fault in faults:
        name, *arguments = fault.split(":")
        if name not in known:
            raise ValueError(f"there is no fault {name}; there are {', '.join(known)}")
        known[name](data, *arguments)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def is_first_start() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


# ------------------------------------------------------------------------------------------------------- in the training

class Trained:
    """Knows by their content which step's tokens are in the model; calls what is hung up at the places of a step.

    `in_loss` are functions (step, losses) -> losses, of every forward pass that is trained on; `before_norm` and
    `after_update` are functions (step, parameters), once a step."""

    def __init__(self, train):
        self.step, self.moved = 0, lambda step: step
        self.in_loss, self.before_norm, self.after_update, self.in_batch, self.omitted = [], [], [], [], set()
        self._steps: dict[bytes, int] = {}
        self._wrap(train)

    def _wrap(self, train) -> None:
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
            if y is None or not torch.is_grad_enabled():
                return losses
            self.step = self._steps[_content(x)]
            for call in self.in_batch:
                call(self.step, x)
            for call in self.in_loss:
                losses = call(self.step, losses)
            return losses

        def clip_injected(model, *rest):
            for call in self.before_norm:
                call(self.step, list(model.parameters()))
            return clip(model, *rest)

        def build_injected(model, *rest):
            optimizer = build(model, *rest)
            update = optimizer.step

            def step_injected(*arguments):
                if self.step in self.omitted:
                    return
                update(*arguments)
                for call in self.after_update:
                    call(self.step, list(model.parameters()))
            optimizer.step = step_injected
            return optimizer

        Data.batch, GPT.forward = batch_noted, forward_injected
        train.parallel.clip_gradients, train.optim.build_optimizer = clip_injected, build_injected


def scale_loss(data: Trained, first: str, last: str, factor: str) -> None:
    data.in_loss.append(lambda step, losses: losses * float(factor) if int(first) <= step <= int(last) else losses)


def nan_gradient(data: Trained, at: str, on: str) -> None:
    def call(step, parameters):
        if (step, rank()) == (int(at), int(on)):
            _local(parameters[-1].grad).view(-1)[0] = math.nan
    data.before_norm.append(call)


def nan_weight(data: Trained, at: str, on: str) -> None:
    done = []

    def call(step, parameters):
        if (step, rank()) == (int(at), int(on)) and not done:
            done.append(step)
            with torch.no_grad():
                _local(parameters[-1].data).view(-1)[0] = math.nan
    data.after_update.append(call)


def omit_update(data: Trained, at: str) -> None:
    data.omitted.add(int(at))


def kill_in_step(data: Trained, at: str, on: str) -> None:
    _signal_in_step(data, int(at), int(on), signal.SIGKILL)


def stop_in_step(data: Trained, at: str, on: str) -> None:
    _signal_in_step(data, int(at), int(on), signal.SIGSTOP)


def _signal_in_step(data: Trained, at: int, on: int, number: int) -> None:
    def call(step, parameters):
        if (step, rank()) == (at, on) and is_first_start():
            os.kill(os.getpid(), number)
    data.before_norm.append(call)


def slow_steps(data: Trained, seconds: str) -> None:
    data.before_norm.append(lambda step, parameters: time.sleep(float(seconds)))


def trace_data(data: Trained, file: str) -> None:
    def call(step, x):
        with open(f"{file}.{rank()}", "a") as out:
            print(step, hashlib.sha256(_content(x)).hexdigest(), file=out)
    data.in_batch.append(call)


def move_data(data: Trained, at: str, by: str) -> None:
    before = data.moved
    data.moved = lambda step: before(step) + (int(by) if step + 1 >= int(at) else 0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor)       # of a weight that is gathered as float8


def _content(x: torch.Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


# --------------------------------------------------------------------------------------------------------------- on disk

def kill_in_save(data: Trained, step: str, n: str) -> None:
    _on_change(_of_save(int(step)), _kill_at(int(n)))


def fail_in_save(data: Trained, step: str, n: str, many: str) -> None:
    def call(count, change):
        if int(n) <= count < int(n) + int(many) and not change.startswith(("remove", "rmdir")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), change.split(" ", 1)[1])
    _on_change(_of_save(int(step)), call)


def trace_save(data: Trained, file: str) -> None:
    _on_change(lambda path: "/checkpoints" in path, _append_to(file))


def _kill_at(n: int):
    def call(count, change):
        if count == n:
            os.killpg(os.getpgid(0), signal.SIGKILL)
            time.sleep(60)      # the signal is on its way
    return call


def _append_to(file: str):
    def call(count, change):
        if rank():
            return
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{change}\n".encode())
        os.close(descriptor)
    return call


def _of_save(step: int):
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
