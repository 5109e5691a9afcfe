"""Start, kill, resume and compare real runs of train.py: what the tests of faults are made of; and
the faults that are built in.

A run is a process, or one per rank, forked off one that has imported train.py already, in a process
group of its own; kill() takes the whole group, as the end of a machine would. `python -m
tests.helpers.faults FAULT ... CONFIG.py section.key=value ...` is one rank of it. A fault is one of FAULTS
and its arguments, joined by colons. Steps count from 1 and are steps of the data: what is injected
belongs to the tokens, so a run that goes over the same tokens again meets it again."""

import errno
import faulthandler
import gc
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.run import main as torchrun

import train
from lib.files import read_rows
from model import GPT
from runtime.config import Config
from runtime.data import Data
from runtime.optim import local
from tests.conftest import ROOT, write_config
from tests.helpers.changes import on_change

HANG_S = 300  # a run that is silent so long on a loaded machine hangs; its stacks are in its log
# imports what follows once: that takes longer than a test's runs do
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.helpers.faults",
        "runtime.watchdog",
        "torch._dynamo",
        "torch._inductor.codegen.triton",
        "torchao.float8.float8_linear_utils",
    ]
)


class Run:
    """A start of train.py with `overrides`, as `ranks` processes, of which the first leads their
    process group. With `restarts` the one process is the genuine torchrun, and two ranks, which
    import everything themselves, are its own processes. Ranks share the weights, where the config
    leaves it open."""

    def __init__(
        self,
        config: Config,
        *overrides: str,
        faults: list[str] = (),
        ranks: int = 1,
        restarts: int | None = None,
    ):
        n_ranks = ranks if restarts is None else 2
        if n_ranks > 1 and (config.parallel.replicate, config.parallel.shard) == (1, None):
            config = replace(config, parallel=replace(config.parallel, shard=n_ranks))
        logs = Path(config.out).with_name("logs")
        logs.mkdir(exist_ok=True)
        self.config, self.log, self.processes = (
            config,
            logs / f"{len(os.listdir(logs)):03d}_{config.run}.log",
            [],
        )
        command, argv = (
            main,
            [
                *faults,
                str(write_config(config, self.log.with_suffix(".py"))),
                *overrides,
            ],
        )
        if restarts is not None:
            command, argv = (
                torchrun,
                [
                    f"--max-restarts={restarts}",
                    "--standalone",
                    "--nproc_per_node=2",
                    "--monitor-interval=0.1",
                    "-m",
                    "tests.helpers.faults",
                    *argv,
                ],
            )
        env = {
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": get_free_port(),
        }
        for rank in range(ranks):
            place = env | {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            leader = self.processes[0].pid if rank else 0
            self.processes.append(
                FORKS.Process(target=start_rank, args=(command, argv, place, self.log, leader))
            )
            self.processes[-1].start()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, timeout: float = HANG_S) -> list[int]:
        """The exit codes of all ranks. A run that hangs leaves its stacks in the log and fails the
        test."""
        with suppress(AssertionError):
            wait_for(lambda: not self.is_running(), timeout)
        if self.is_running():
            self.signal(signal.SIGABRT)  # faulthandler tells where each thread was
            time.sleep(1)
            self.kill()
            raise AssertionError(f"hangs after {timeout:.0f} s: {self.output[-4000:]}")
        return [process.exitcode for process in self.processes]

    def wait_until(self, condition, timeout: float = HANG_S) -> None:
        """Return as soon as condition() holds; fails where the run ends before. Of a number: as
        soon as that step is done."""
        holds = condition if callable(condition) else lambda: len(rows(self.config)) >= condition
        wait_for(lambda: holds() or not self.is_running(), timeout)
        assert holds(), f"ended before: {self.output[-4000:]}"

    def is_running(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def signal(self, number: int) -> None:
        """To all ranks, unless they are gone; those of torchrun lead groups of their own."""
        for group in (self.processes[0].pid, *children(self.processes[0].pid)):
            with suppress(ProcessLookupError):
                os.killpg(group, number)

    def kill(self) -> None:
        """kill -9, all ranks at once; returns when they are gone."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.kill()  # where it was not yet in the group
            process.join(60)


def start_rank(command: Callable, argv: list[str], env: dict, log: Path, leader: int) -> None:
    """Become one rank, or torchrun, in a process just forked, in the process group of `leader` (0:
    its own)."""
    gc.freeze()  # what was imported stays shared with the other runs
    os.setpgid(0, 0)
    with suppress(OSError):  # the leader may have told of a mistake already and ended
        wait_for(lambda: not leader or os.getpgid(leader) == leader)
        os.setpgid(0, leader)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.chdir(ROOT)
    os.environ.update({key: str(value) for key, value in env.items()})
    torch.set_num_threads(1)
    faulthandler.enable(2)
    sys.exit(command(argv))


def children(pid: int) -> list[int]:
    return sorted(
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    )


def wait_for(condition: Callable, seconds: float = 120):
    """What condition() returns as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


# ----------------------------------------------------------------------------- what a run has left


def record(config: Config) -> dict:
    """Of a finished run: everything that must be equal, bit for bit, whatever happened on the
    way."""
    told = summary(config)
    return {
        "weights": digest(config),
        "trajectory": trajectory(config),
        "validation": (config.run_dir / "val_losses.npz").read_bytes(),
        **{
            key: told[key]
            for key in ("loss_as_trained", "loss_bf16", "skipped_steps", "tokens", "status")
        },
    }


def digest(config: Config) -> str:
    """SHA-256 over every weight and moment of the newest checkpoint, in the bytes of its files,
    which repeat; and its step."""
    path = config.run_dir / f"checkpoints/step_{saved_steps(config)[-1]:08d}"
    return hashlib.sha256(
        b"".join([path.name.encode(), *(p.read_bytes() for p in sorted(path.glob("__*")))])
    ).hexdigest()


def trajectory(config: Config) -> list[tuple]:
    """What was trained, step by step: all that does not depend on the hour."""
    return [
        tuple(row[key] for key in ("step", "tokens", "loss", "grad_norm", "lr", "verdict"))
        for row in rows(config)
    ]


def summary(config: Config) -> dict:
    return json.loads((config.run_dir / "summary.json").read_text())


def rows(config: Config, kind: str = "train") -> list[dict]:
    """Rows of metrics.jsonl; a line that is being written is left out."""
    return [row for row in read_rows(config.run_dir / "metrics.jsonl") if row["kind"] == kind]


def saved_steps(config: Config) -> list[int]:
    return sorted(
        int(p.parent.name.removeprefix("step_"))
        for p in (config.run_dir / "checkpoints").glob("step_*/DONE")
    )


def leftovers(config: Config) -> list[str]:
    """What no finished run has in its checkpoints folder: temporary names of any kind."""
    return sorted(
        p.name
        for p in (config.run_dir / "checkpoints").glob("*")
        if not p.name.startswith(("step_", "bad_"))
    )


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


# ------------------------------------------------------------ the faults, in the run's own process

NOW = SimpleNamespace(run=None, rank=0)  # of train.py in this process


def main(argv: list[str]) -> int:
    at = next(i for i, argument in enumerate(argv) if argument.endswith(".py"))
    NOW.rank = int(os.environ.get("RANK", 0))
    wrap(train.Run, "next_step", lambda next_step, run: setattr(NOW, "run", run) or next_step(run))
    for name, *words in (fault.split(":") for fault in argv[:at]):
        FAULTS[name](*map(float, words))
    sys.argv = ["train.py", *argv[at:]]
    return train.main(sys.argv[1:])


def wrap(owner: object, name: str, around: Callable) -> None:
    """Let owner.name be around(what it was, its arguments)."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: around(original, *arguments))


def now() -> tuple[int, int]:
    return NOW.run.progress.step + NOW.run.progress.data_offset + 1, NOW.rank


def before_norm(call: Callable, *at: float) -> None:
    """call() between backward pass and gradient norm; of one step, on one rank, where they are
    named."""

    def clip_after(clip, *arguments):
        if now()[: len(at)] == at:
            call()
        return clip(*arguments)

    wrap(train.parallel, "clip_gradients", clip_after)


def in_data(change: Callable) -> None:
    """change(step, rank) -> the step whose data is read for it."""
    wrap(
        Data,
        "batch",
        lambda batch, data, step, *rest: batch(data, int(change(step + 1, NOW.rank)) - 1, *rest),
    )


def spoil(kind: str) -> None:
    """One element on this rank of a weight ("data") or its gradient ("grad") becomes NaN."""
    tensor = local(getattr(list(NOW.run.model.parameters())[-1], kind))
    # _tensor: of a weight that is gathered as float8
    getattr(tensor, "_tensor", tensor).view(-1)[0] = float("nan")


def in_save(step: float, call: Callable) -> None:
    """call(count, change) before each change on disk from the first that names the step to the last
    before a later one's."""
    seen = [0]  # steps that were named
    on_change(
        lambda path: (
            "/checkpoints" in path
            and (
                seen.extend(map(int, re.findall(r"/checkpoints.*step_(\d{8})", path)))
                or max(seen) == step
            )
        ),
        call,
    )


def fill_disk(change: str) -> None:
    if not change.startswith(("remove", "rmdir")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), change.split(" ", 1)[1])


FAULTS = {
    # kill -9 to the process group before the n-th change that the save of a step makes on disk
    "kill_in_save": lambda step, n: in_save(
        step, lambda count, _: count == n and os.killpg(0, signal.SIGKILL)
    ),
    # "No space left on device" from that change on, `many` times in all; where a rank is named,
    # there alone
    "fail_in_save": lambda step, n, many, *rank: in_save(
        step,
        lambda count, change: (
            n <= count < n + many and NOW.rank in (rank or [NOW.rank]) and fill_disk(change)
        ),
    ),
    # one rank alone cannot read what a checkpoint holds: EBADF
    "fail_load": (
        lambda rank: (
            rank == NOW.rank and setattr(FileSystemReader, "read_data", lambda *_: os.read(-1, 1))
        )
    ),
    # the loss, and with it its gradient, on the data of these steps; nan is a factor
    "scale_loss": lambda first, last, factor: wrap(
        GPT,
        "forward",
        lambda forward, *arguments: (
            forward(*arguments)
            * (factor if torch.is_grad_enabled() and first <= now()[0] <= last else 1)
        ),
    ),
    # one element of one gradient, or of one weight from this update on, on one rank is NaN
    "nan_gradient": lambda *at: before_norm(lambda: spoil("grad"), *at),
    "nan_weight": lambda *at: before_norm(lambda: spoil("data"), *at),
    # the optimizer is not called, once: what a skipped step should amount to
    "omit_update": lambda step: before_norm(
        lambda: setattr(NOW.run.optimizer, "step", lambda: delattr(NOW.run.optimizer, "step")), step
    ),
    # this signal to one rank in mid-step, when earlier steps' saves are on disk; not after a
    # restart
    "signal_in_step": lambda step, rank, number: (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        and before_norm(
            lambda: NOW.run.saver.wait() or os.kill(os.getpid(), int(number)), step, rank
        )
    ),
    "lose_trunk": lambda step: before_norm(
        lambda: shutil.rmtree(NOW.run.config.start_from), step, 0
    ),
    "slow_steps": lambda seconds: before_norm(lambda: time.sleep(seconds)),
    # one rank reads the data of a step for ever, or fails there
    "hang_in_data": lambda *at: in_data(lambda *now: time.sleep(600) if now == at else now[0]),
    "fail_in_data": lambda *at: in_data(
        lambda *now: {}["a damaged shard"] if now == at else now[0]
    ),
    # from this step on the data of `by` steps later: what a rollback should amount to
    "move_data": lambda first, by: in_data(lambda step, _: step + by if step >= first else step),
    # as `nohup` leaves SIGHUP to what it starts
    "ignore": lambda number: signal.signal(int(number), signal.SIG_IGN),
    # as a terminal leaves it, also where these tests run under nohup
    "default": lambda number: signal.signal(int(number), signal.SIG_DFL),
    # of a resource of this process, by its number, no more than so much
    "limit": lambda what, most: resource.setrlimit(int(what), (int(most), resource.RLIM_INFINITY)),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
