"""Start, kill, resume and compare real runs of train.py: what the tests of faults are made of; and the faults that are built in.

A run is a process, or one per rank, forked off one that has imported train.py already, in a process group of its own; kill()
takes the whole group, as the end of a machine would. `python -m tests.faults FAULT ... CONFIG.py section.key=value ...` is one
rank of it. A fault is a name and numbers, joined by colons. Steps count from 1 and are steps of the data: what is injected
belongs to the tokens, so a run that goes over the same tokens again meets it again.

    kill_in_save:STEP:N         SIGKILL to the process group before the N-th change that the save of STEP makes on disk
    fail_in_save:STEP:N:COUNT   "No space left on device" from that change and those after it, COUNT in all; on one rank: :RANK
    fail_load:RANK              one rank alone cannot read what a checkpoint holds
    trace_data:FILE             appends step and SHA-256 of each micro-batch that is trained on to FILE.<rank>
    scale_loss:FIRST:LAST:FACTOR    the loss, and with it its gradient, times FACTOR on the data of these steps; nan is a factor
    nan_gradient:STEP:RANK      one element of one gradient on one rank is NaN
    nan_weight:STEP:RANK        one element of one weight on one rank is NaN from the update of this step on
    omit_update:STEP            the optimizer is not called at this step: what a skipped step should amount to
    signal_in_step:STEP:RANK:NUMBER     this signal to one rank between backward pass and gradient norm, when earlier steps'
                                saves are on disk; not after a restart
    slow_steps:SECONDS          each step takes so much longer
    hang_in_data:STEP:RANK      one rank alone reads the data of this step for ever
    fail_in_data:STEP:RANK      ... or fails there
    move_data:STEP:BY           from this training step on, the data of BY steps later: what a rollback should amount to
    limit:RESOURCE:N            of a resource of this process, by its number, no more than N
"""

import contextlib
import errno
import faulthandler
import gc
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

import train
from runtime.checkpoint import TensorReader
from runtime.config import Config
from runtime.data import Data
from runtime.machine import read_rows
from runtime.run import Run as TrainingRun
from tests.changes import on_change
from tests.conftest import ROOT, write_config

HANG_S = 300        # a run that is silent so long on a loaded machine hangs; its stacks are in its log
COUNT = itertools.count(1)
FORKS = multiprocessing.get_context("forkserver")       # imports what follows once: that takes longer than a test's runs do
FORKS.set_forkserver_preload(["tests.faults", "runtime.watchdog", "torch._dynamo", "torch._inductor.codegen.triton",
                              "torchao.float8.float8_linear_utils"])


def start(config: Config, *overrides: str, faults: list[str] = (), ranks: int = 1, restarts: int | None = None) -> "Run":
    """train.py with `overrides`, as `ranks` processes. With `restarts` the one process is the genuine torchrun, and two ranks,
    which import everything themselves, are its own processes."""
    log = Path(config.out).with_name("logs") / f"{next(COUNT):03d}_{config.run}.log"
    log.parent.mkdir(exist_ok=True)
    argv = [*faults, str(write_config(config, log.with_suffix(".py"))), *overrides]
    launcher = [] if restarts is None else ["--standalone", "--nproc_per_node=2", f"--max-restarts={restarts}",
                                            "--monitor-interval=0.1", "-m", "tests.faults"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": s.getsockname()[1]}
    processes = []
    for rank in range(ranks):
        env = place | {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        processes.append(FORKS.Process(target=start_rank, args=(argv, env, log, processes and processes[0].pid or 0, launcher)))
        processes[-1].start()
    return Run(processes, log, config)


class Run:
    """One start of train.py. pids are its ranks, or the launcher's alone; the first leads their process group."""

    def __init__(self, processes: list, log: Path, config: Config):
        self.processes, self.log, self.config = processes, log, config
        self.pids = [process.pid for process in processes]

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, timeout: float = HANG_S) -> list[int]:
        """The exit codes of all ranks. A run that hangs leaves its stacks in the log and fails the test."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        if self.is_running():
            self.signal(signal.SIGABRT)     # faulthandler tells where each thread was
            time.sleep(1)
            self.kill()
            raise AssertionError(f"hangs after {timeout:.0f} s: {self.output[-4000:]}")
        return [process.exitcode for process in self.processes]

    def wait_until(self, condition, timeout: float = HANG_S) -> None:
        """Return as soon as condition() holds; fails where the run ends before. Of a number: as soon as that step is done."""
        holds = condition if callable(condition) else lambda: last_step(self.config) >= condition
        wait_for(lambda: holds() or not self.is_running(), timeout)
        assert holds(), f"ended before: {self.output[-4000:]}"

    def is_running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def signal(self, number: int) -> None:
        """To all ranks, unless they are gone; those of torchrun lead groups of their own."""
        for group in (self.pids[0], *children(self.pids[0])):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    def kill(self) -> None:
        """kill -9, all ranks at once; returns when they are gone."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join(60)


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return []


def wait_for(condition: Callable, seconds: float = 120):
    """What condition() returns as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


# ----------------------------------------------------------------------------------------------------- what a run has left

def digest(config: Config) -> str:
    """SHA-256 over every weight and moment of the newest checkpoint, in the bytes of its files, which repeat; and its step."""
    path = config.run_dir / f"checkpoints/step_{saved_steps(config)[-1]:08d}"
    return hashlib.sha256(b"".join([path.name.encode(), *(p.read_bytes() for p in sorted(path.glob("__*")))])).hexdigest()


def trajectory(config: Config) -> list[tuple]:
    """What was trained, step by step: all that does not depend on the hour."""
    return [tuple(row[key] for key in ("step", "tokens", "loss", "grad_norm", "lr", "verdict")) for row in rows(config)]


def summary(config: Config) -> dict:
    return json.loads((config.run_dir / "summary.json").read_text())


def record(config: Config) -> dict:
    """Of a finished run: everything that must be equal, bit for bit, whatever happened on the way."""
    told = summary(config)
    losses = (config.run_dir / "val_losses.npz").read_bytes()
    return {"weights": digest(config), "trajectory": trajectory(config), "validation": losses,
            **{key: told[key] for key in ("loss_as_trained", "loss_bf16", "skipped_steps", "tokens", "status")}}


def rows(config: Config, kind: str = "train") -> list[dict]:
    """Rows of metrics.jsonl; a line that is being written is left out."""
    return [row for row in read_rows(config.run_dir / "metrics.jsonl") if row["kind"] == kind]


def last_step(config: Config) -> int:
    return max((row["step"] for row in rows(config)), default=0)


def saved_steps(config: Config) -> list[int]:
    return sorted(int(p.parent.name.removeprefix("step_")) for p in (config.run_dir / "checkpoints").glob("step_*/DONE"))


def leftovers(config: Config) -> list[str]:
    """What no finished run has in its checkpoints folder: temporary names of any kind."""
    return sorted(p.name for p in (config.run_dir / "checkpoints").glob("*") if not p.name.startswith(("step_", "bad_")))


def back_to(config: Config, step: int) -> None:
    """Leave of a finished run what a kill right after the save of `step` leaves."""
    (config.run_dir / "summary.json").unlink()
    for later in filter(step.__lt__, saved_steps(config)):
        shutil.rmtree(config.run_dir / f"checkpoints/step_{later:08d}")


def flip_bit(file: Path, at: int) -> None:
    """Another bit in each byte position, so that no test leans on one."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << at % 8
    file.write_bytes(data)


# ------------------------------------------------------------------------------------------------- in the run's own process

def start_rank(argv: list[str], env: dict, log: Path, leader: int, launcher: list[str]) -> None:
    """Become one rank in a process just forked, in the process group of `leader` (0: its own); or torchrun, by `launcher`."""
    gc.freeze()     # what was imported stays shared with the other runs
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):      # the leader may have told of a mistake already and ended
        if leader:
            wait_for(lambda: os.getpgid(leader) == leader)
            os.setpgid(0, leader)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ.update({key: str(value) for key, value in env.items()})
    torch.set_num_threads(1)
    faulthandler.enable(2)
    sys.exit(torchrun([*launcher, *argv]) if launcher else main(argv))


def main(argv: list[str]) -> int:
    split = next(i for i, argument in enumerate(argv) if argument.endswith(".py"))
    faults = Faults() if split else None
    for fault in argv[:split]:
        name, *arguments = fault.split(":")
        getattr(faults, name)(*(argument if "/" in argument else float(argument) for argument in arguments))
    sys.argv = ["train.py", *argv[split:]]
    return train.main(sys.argv[1:])


class Faults:
    """Calls what is registered for the places of a step: `in_loss`, functions (step, losses, tokens) -> losses of every forward
    pass that is trained on; `before_norm`, functions (step), once a step; `in_data`, functions (step) before data is read."""

    def __init__(self):
        self.rank, self.run, self.in_loss, self.before_norm, self.in_data = int(os.environ.get("RANK", 0)), None, [], [], []
        open_run, clip, batch = TrainingRun.__init__, train.parallel.clip_gradients, Data.batch

        def opened(run, *rest):
            open_run(run, *rest)
            self.run, self.weight = run, list(run.model.parameters())[-1]
            run.model.register_forward_hook(forwarded)

        def forwarded(model, inputs, losses):
            for call in self.in_loss if torch.is_grad_enabled() else ():
                losses = call(self.step(), losses, inputs[0])
            return losses

        def clip_injected(*arguments):
            for call in self.before_norm:
                call(self.step())
            return clip(*arguments)

        def read(data, step, *rest):
            return batch(data, step + sum(call(step + 1) or 0 for call in self.in_data), *rest)

        TrainingRun.__init__, train.parallel.clip_gradients, Data.batch = opened, clip_injected, read

    def step(self) -> int:
        return self.run.progress.step + self.run.progress.data_offset + 1

    def at(self, place: list, step: float, rank: float, call: Callable) -> None:
        place.append(lambda now: call() if (now, self.rank) == (step, rank) else None)

    def scale_loss(self, first: float, last: float, factor: float) -> None:
        self.in_loss.append(lambda step, losses, x: losses * factor if first <= step <= last else losses)

    def trace_data(self, file: str) -> None:
        def call(step, losses, x):
            with open(f"{file}.{self.rank}", "a") as out:
                print(step, hashlib.sha256(x.numpy().tobytes()).hexdigest(), file=out)
            return losses
        self.in_loss.append(call)

    def nan_gradient(self, *at: float) -> None:
        self.at(self.before_norm, *at, lambda: _spoil(self.weight.grad))

    def nan_weight(self, *at: float) -> None:
        self.at(self.before_norm, *at, lambda: _spoil(self.weight.data))     # an update leaves NaN

    def omit_update(self, at: float) -> None:
        def omit():
            self.run.optimizer.step = lambda: delattr(self.run.optimizer, "step")       # once, the instance's own
        self.at(self.before_norm, at, self.rank, omit)

    def signal_in_step(self, at: float, on: float, number: float) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            self.at(self.before_norm, at, on, lambda: self.run.saver.wait() or os.kill(os.getpid(), int(number)))

    def lose_trunk(self, at: float) -> None:
        self.at(self.before_norm, at, 0, lambda: shutil.rmtree(self.run.config.start_from))

    def slow_steps(self, seconds: float) -> None:
        self.before_norm.append(lambda step: time.sleep(seconds))

    def hang_in_data(self, *at: float) -> None:
        def sleep_for_ever():
            time.sleep(600)
        self.at(self.in_data, *at, sleep_for_ever)

    def fail_in_data(self, *at: float) -> None:
        self.at(self.in_data, *at, lambda: {}["a damaged shard"])

    def move_data(self, at: float, by: float) -> None:
        self.in_data.append(lambda step: int(by) if step >= at else 0)

    def limit(self, what: float, most: float) -> None:
        resource.setrlimit(int(what), (int(most), resource.RLIM_INFINITY))

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
        if on == self.rank:
            TensorReader.read_data = lambda *_: os.read(-1, 1)      # EBADF


def _spoil(tensor: torch.Tensor) -> None:
    """The first element on this rank becomes NaN."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    getattr(tensor, "_tensor", tensor).view(-1)[0] = math.nan       # _tensor: of a weight that is gathered as float8


def _of_save(step: float) -> Callable[[str], bool]:
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
