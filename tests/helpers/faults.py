"""Start, kill, resume and compare real runs of train.py: what the tests of faults are made of; and
the faults that are built in.

A run is a process, or one per rank, forked off one that has imported train.py already, in a process
group of its own; kill() takes the whole group, as the end of a machine would. `python -m
tests.helpers.faults FAULT ... CONFIG.py section.key=value ...` is one rank of it. A fault is one of
FAULTS and its arguments, joined by colons. Steps count from 1 and are steps of the data: what is
injected belongs to the tokens, so a run that goes over the same tokens again meets it again."""

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.run import main as torchrun

import train
from lib.files import read_bytes, read_rows
from model import GPT
from runtime import parallel
from runtime.config import Config
from runtime.data import Data
from runtime.optim import local
from tests.conftest import ROOT, write_config
from tests.helpers.changes import on_change

Value = TypeVar("Value")

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
    leaves it open. `of_last_rank`: overrides of that rank alone, as if a machine of its own had
    been given another command."""

    def __init__(
        self,
        config: Config,
        *overrides: str,
        faults: Sequence[str] = (),
        ranks: int = 1,
        restarts: int | None = None,
        of_last_rank: Sequence[str] = (),
    ):
        n_ranks = ranks if restarts is None else 2
        if n_ranks > 1 and (config.parallel.replicate, config.parallel.shard) == (1, None):
            config = replace(config, parallel=replace(config.parallel, shard=n_ranks))
        logs = Path(config.out).with_name("logs")
        logs.mkdir(exist_ok=True)
        self.config = config
        self.log = logs / f"{len(os.listdir(logs)):03d}_{config.run}.log"
        self.processes: list[ForkServerProcess] = []
        file = write_config(config, self.log.with_suffix(".py"))
        argv = [*faults, str(file), *overrides]
        command: Callable = main
        if restarts is not None:
            command = torchrun
            argv = [
                f"--max-restarts={restarts}",
                "--standalone",
                "--nproc_per_node=2",
                "--monitor-interval=0.1",
                "-m",
                "tests.helpers.faults",
                *argv,
            ]
        port = get_free_port()
        for rank in range(ranks):
            place = launch_environment(rank, ranks, port) if ranks > 1 else {}
            leader = self.pid if rank else 0
            words = [*argv, *of_last_rank] if rank == ranks - 1 else argv
            self.processes.append(
                FORKS.Process(target=start_rank, args=(command, words, place, self.log, leader))
            )
            self.processes[-1].start()

    @property
    def output(self) -> str:
        """What all ranks have printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def pid(self) -> int:
        """The process of the first rank, which leads their group, or of torchrun."""
        pid = self.processes[0].pid
        assert pid is not None, "it is started"
        return pid

    def wait(self, timeout: float = HANG_S) -> list[int | None]:
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

    def wait_until(self, condition: Callable[[], object] | int, timeout: float = HANG_S) -> None:
        """Return as soon as condition() holds; fails where the run ends before. Of a number: as
        soon as that step is done."""
        holds: Callable[[], object]
        if isinstance(condition, int):
            step = condition
            holds = lambda: len(rows(self.config)) >= step  # noqa: E731
        else:
            holds = condition
        wait_for(lambda: holds() or not self.is_running(), timeout)
        assert holds(), f"ended before: {self.output[-4000:]}"

    def is_running(self) -> bool:
        """Whether any of its ranks, or torchrun, is alive."""
        return any(process.exitcode is None for process in self.processes)

    def signal(self, number: int) -> None:
        """To all ranks, unless they are gone; those of torchrun lead groups of their own."""
        for group in (self.pid, *children(self.pid)):
            with suppress(ProcessLookupError):
                os.killpg(group, number)

    def kill(self) -> None:
        """kill -9, all ranks at once; returns when they are gone."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.kill()  # where it was not yet in the group
            process.join(60)


def start_rank(
    command: Callable, argument: object, env: dict[str, object], log: Path, leader: int
) -> None:
    """Become one rank, or torchrun, in a process just forked, in the process group of `leader` (0:
    its own): command(argument), whose result is the exit code."""
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
    sys.exit(command(argument))


def on_ranks(size: int, work: Callable, argument: object, log: Path) -> None:
    """work(argument) in `size` processes, each with a rank's environment, forked off one that has
    imported train.py. AssertionError with what they printed, which is in `log`, where one fails."""
    port = get_free_port()
    ranks = []
    for rank in range(size):
        place = launch_environment(rank, size, port)
        process = FORKS.Process(target=start_rank, args=(work, argument, place, log, 0))
        process.start()
        ranks.append(process)
    for process in ranks:
        process.join(HANG_S)
        process.kill()  # one that hangs
    exit_codes = [process.exitcode for process in ranks]
    assert exit_codes == [0] * size, log.read_text(errors="replace")[-4000:]


def train_on_ranks(size: int, *configs: Config) -> None:
    """Runs of `size` processes, one after another on the ranks of one start: of configs that share
    the weights alike."""
    log = Path(configs[0].out).with_name(f"ranks_{configs[0].run}.log")
    on_ranks(size, train_as_rank, configs, log)


def train_as_rank(configs: Sequence[Config]) -> None:
    """What one of them does."""
    world = parallel.start(configs[0])
    for config in configs:
        train.train(config, world)
    parallel.finish(world, 0)


def launch_environment(rank: int, ranks: int, port: int) -> dict[str, object]:
    """The variables by which a launcher tells one of `ranks` processes of this machine its
    place."""
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that are alive or not yet waited for."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended
            pids += map(int, file.read_text().split())
    return sorted(pids)


def command_line(pid: int) -> bytes:
    """The words of a process; b"" where it has ended, waited for or not, or ends between the
    opening of its file and the reading, which is an error of its own."""
    with suppress(ProcessLookupError):
        return read_bytes(f"/proc/{pid}/cmdline")
    return b""


def wait_for(condition: Callable[[], Value], seconds: float = 120) -> Value:
    """What condition() returns as soon as it is true; AssertionError where that takes longer."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


# ----------------------------------------------------------------------------- what a run has left


def record(config: Config) -> dict:
    """Of a finished run: everything that must be equal, bit for bit, whatever happened on the
    way."""
    result = {
        "weights": digest(config),
        "trajectory": trajectory(config),
        "validation": (config.run_dir / "val_losses.npz").read_bytes(),
    }
    summary_of_run = summary(config)
    for key in "loss_as_trained", "loss_bf16", "skipped_steps", "tokens", "status":
        result[key] = summary_of_run[key]
    return result


def digest(config: Config) -> str:
    """SHA-256 over every weight and moment of the newest checkpoint, in the bytes of its files,
    which repeat; and its step."""
    newest = checkpoint_folder(config, saved_steps(config)[-1])
    hashed = hashlib.sha256(newest.name.encode())
    for file in sorted(newest.glob("__*")):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()


def checkpoint_folder(config: Config, step: int) -> Path:
    """Where the run keeps the checkpoint of that step."""
    return config.run_dir / f"checkpoints/step_{step:08d}"


def trajectory(config: Config) -> list[tuple]:
    """What was trained, step by step: all that does not depend on the hour."""
    return [
        tuple(row[key] for key in ("step", "tokens", "loss", "grad_norm", "lr", "verdict"))
        for row in rows(config)
    ]


def summary(config: Config) -> dict:
    """The summary.json of a finished run."""
    return json.loads((config.run_dir / "summary.json").read_text())


def rows(config: Config, kind: str = "train") -> list[dict]:
    """Rows of metrics.jsonl; a line that is being written is left out."""
    return [row for row in read_rows(config.run_dir / "metrics.jsonl") if row["kind"] == kind]


def saved_steps(config: Config) -> list[int]:
    """The steps of the run's complete checkpoints, ascending."""
    complete = (config.run_dir / "checkpoints").glob("step_*/DONE")
    return sorted(int(mark.parent.name.removeprefix("step_")) for mark in complete)


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
        shutil.rmtree(checkpoint_folder(config, later))


def flip_bit(file: Path, position: int) -> None:
    """Change one bit of the byte at `position`; another bit for each byte, so that no test leans on
    one."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << position % 8
    file.write_bytes(data)


# ------------------------------------------------------------ the faults, in the run's own process


@dataclass
class Now:
    """What this process is doing."""

    run: Any = None  # the train.Run under way
    rank: int = 0


NOW = Now()


def main(argv: list[str]) -> int:
    """The exit code of train.py, after FAULT ... CONFIG.py section.key=value ..."""
    first_word = next(i for i, word in enumerate(argv) if word.endswith(".py"))
    NOW.rank = int(os.environ.get("RANK", 0))

    def next_step(original: Callable, run: train.Run) -> int | None:
        NOW.run = run
        return original(run)

    wrap(train.Run, "next_step", next_step)
    for fault in argv[:first_word]:
        name, *numbers = fault.split(":")
        FAULTS[name](*map(float, numbers))
    sys.argv = ["train.py", *argv[first_word:]]
    return train.main(sys.argv[1:])


def wrap(owner: object, name: str, around: Callable) -> None:
    """Let owner.name be around(what it was, its arguments)."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: around(original, *arguments))


def now() -> tuple[int, int]:
    """The step of the data that is being trained, and this process's rank."""
    progress = NOW.run.progress
    return progress.step + progress.data_offset + 1, NOW.rank


def before_norm(call: Callable[[], object], *place: float) -> None:
    """call() between backward pass and gradient norm; at one step, on one rank, where `place` names
    them."""

    def clip_after(clip: Callable, *arguments: object) -> object:
        if now()[: len(place)] == place:
            call()
        return clip(*arguments)

    wrap(train.parallel, "clip_gradients", clip_after)


def in_data(change: Callable[[int, int], float]) -> None:
    """change(step, rank) -> the step whose data is read for it."""

    def batch(
        original: Callable, data: Data, step: int, micro: int, rank: int, size: int, offset: int = 0
    ) -> object:
        moved_by = int(change(step + offset + 1, NOW.rank)) - 1 - step - offset
        return original(data, step, micro, rank, size, offset + moved_by)

    wrap(Data, "batch", batch)


def spoil(kind: str) -> None:
    """One element on this rank of a weight ("data") or its gradient ("grad") becomes NaN."""
    tensor = local(getattr(list(NOW.run.model.parameters())[-1], kind))
    # _tensor: of a weight that is gathered as float8
    getattr(tensor, "_tensor", tensor).view(-1)[0] = float("nan")


def in_save(step: float, call: Callable[[int, str], object]) -> None:
    """call(count, change) before each change on disk from the first that names the step to the last
    before a later one's."""
    named_steps = [0]

    def is_of_save(path: str) -> bool:
        if "/checkpoints" not in path:
            return False
        named_steps.extend(map(int, re.findall(r"/checkpoints.*step_(\d{8})", path)))
        return max(named_steps) == step

    on_change(is_of_save, call)


def fill_disk(change: str) -> None:
    """Fail as a full disk does, on which only a removal succeeds."""
    if not change.startswith(("remove", "rmdir")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), change.split(" ", 1)[1])


def kill_in_save(step: float, n: float) -> None:
    """kill -9 to the process group before the n-th change that the save of a step makes on disk."""
    in_save(step, lambda count, _: count == n and os.killpg(0, signal.SIGKILL))


def fail_in_save(step: float, n: float, many: float, rank: float | None = None) -> None:
    """ "No space left on device" from the n-th change of a save on, `many` times in all; where a
    rank is named, there alone."""

    def fail(count: int, change: str) -> None:
        if n <= count < n + many and rank in (None, NOW.rank):
            fill_disk(change)

    in_save(step, fail)


def fail_load(rank: float) -> None:
    """One rank alone cannot read what a checkpoint holds: EBADF."""
    if rank == NOW.rank:
        setattr(FileSystemReader, "read_data", lambda *_: os.read(-1, 1))  # noqa: B010


def scale_loss(first: float, last: float, factor: float) -> None:
    """Multiply the loss, and with it its gradient, on the data of these steps; nan is a factor."""

    def forward(original: Callable, *arguments: object) -> torch.Tensor:
        losses = original(*arguments)
        is_hit = torch.is_grad_enabled() and first <= now()[0] <= last
        return losses * factor if is_hit else losses

    wrap(GPT, "forward", forward)


def nan_gradient(*place: float) -> None:
    """One element of one gradient is NaN, at a step and, where it is named, on one rank."""
    before_norm(lambda: spoil("grad"), *place)


def nan_weight(*place: float) -> None:
    """One element of one weight is NaN from this update on."""
    before_norm(lambda: spoil("data"), *place)


def omit_update(step: float) -> None:
    """Do not call the optimizer, once: what a skipped step should amount to."""

    def omit() -> None:
        optimizer = NOW.run.optimizer
        optimizer.step = lambda: delattr(optimizer, "step")

    before_norm(omit, step)


def signal_in_step(step: float, rank: float, number: float) -> None:
    """This signal to one rank in mid-step, when earlier steps' saves are on disk; not after a
    restart."""

    def send() -> None:
        NOW.run.saver.wait()
        os.kill(os.getpid(), int(number))
        NOW.run.stop.wait(1.0)  # the thread that hears it may wait for a core

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        before_norm(send, step, rank)


def lose_trunk(step: float) -> None:
    """Delete the checkpoint that a branch started from."""
    before_norm(lambda: shutil.rmtree(NOW.run.config.start_from), step, 0)


def slow_steps(seconds: float) -> None:
    """Let each step last so much longer."""
    before_norm(lambda: time.sleep(seconds))


def hang_in_data(*place: float) -> None:
    """One rank reads the data of a step for ever."""

    def hang(*current: int) -> int:
        if current == place:
            time.sleep(600)
        return current[0]

    in_data(hang)


def fail_in_data(*place: float) -> None:
    """One rank fails as it reads the data of a step."""

    def fail(*current: int) -> int:
        if current == place:
            raise KeyError("a damaged shard")
        return current[0]

    in_data(fail)


def move_data(first: float, by: float) -> None:
    """From this step on the data of `by` steps later: what a rollback should amount to."""
    in_data(lambda step, _: step + by if step >= first else step)


def ignore(number: float) -> None:
    """Ignore a signal, as `nohup` leaves SIGHUP to what it starts."""
    signal.signal(int(number), signal.SIG_IGN)


def default(number: float) -> None:
    """Die of a signal, as a terminal leaves SIGHUP, also where these tests run under nohup."""
    signal.signal(int(number), signal.SIG_DFL)


def limit(resource_number: float, most: float) -> None:
    """This process may have no more than so much of a resource."""
    resource.setrlimit(int(resource_number), (int(most), resource.RLIM_INFINITY))


def no_room_to_roll_back() -> None:
    """While the run goes back to a checkpoint no file grows, as on a full disk."""

    def roll_back(original: Callable, *arguments: object) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        original(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    wrap(train.Run, "_roll_back", roll_back)


FAULTS: dict[str, Callable[..., None]] = {
    fault.__name__: fault
    for fault in (
        kill_in_save,
        fail_in_save,
        fail_load,
        scale_loss,
        nan_gradient,
        nan_weight,
        omit_update,
        signal_in_step,
        lose_trunk,
        slow_steps,
        hang_in_data,
        fail_in_data,
        move_data,
        ignore,
        default,
        limit,
        no_room_to_roll_back,
    )
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
