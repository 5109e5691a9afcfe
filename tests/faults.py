"""Start, kill, resume and compare real runs of train.py: what the tests of faults are made of.

A run is a process, or one per rank, forked off one that has imported train.py already, in a process group of its own; kill()
takes the whole group, as the end of a machine would.
"""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from runtime.config import Config
from runtime.rows import read_rows
from tests import faulty_train
from tests.conftest import write_config

HANG_S = 300        # a run that is silent so long on a loaded machine hangs; its stacks are in its log
COUNT = itertools.count(1)
FORKS = multiprocessing.get_context("forkserver")       # imports what follows once: that takes longer than a test's runs do
FORKS.set_forkserver_preload(["tests.faulty_train", "runtime.watchdog", "torch._dynamo", "torch._inductor.codegen.triton",
                              "torchao.float8.float8_linear_utils"])


def start(config: Config, *overrides: str, faults: list[str] = (), ranks: int = 1, limit: tuple[int, int] | None = None,
          restarts: int | None = None) -> "Run":
    """train.py with `overrides`, as `ranks` processes; limit: a resource and how much of it. With `restarts` the one
    process is the genuine torchrun, and two ranks, which import everything themselves, are its own processes."""
    log = Path(config.out).with_name("logs") / f"{next(COUNT):03d}_{config.run}.log"
    log.parent.mkdir(exist_ok=True)
    argv = [*faults, str(write_config(config, log.with_suffix(".py"))), *overrides]
    launcher = [] if restarts is None else ["--standalone", "--nproc_per_node=2", f"--max-restarts={restarts}",
                                            "--monitor-interval=0.1", "-m", "tests.faulty_train"]
    processes = []
    env = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        processes.append(FORKS.Process(target=faulty_train.start_rank, args=(
            argv, own, log, processes[0].pid if rank else 0, limit, launcher)))
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


def digest(config: Config) -> str:
    """SHA-256 over every weight and moment of the newest checkpoint, and its step; read by DCP rather than by the code under
    test."""
    reader = dcp.FileSystemReader(max(p.parent for p in (config.run_dir / "checkpoints").glob("step_*/DONE")))
    tensors = {name: torch.zeros(of.size, dtype=of.properties.dtype)
               for name, of in reader.read_metadata().state_dict_metadata.items()}
    with warnings.catch_warnings(action="ignore"):      # one process is no mistake
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    hash = hashlib.sha256(str(saved_steps(config)[-1]).encode())
    for name, tensor in sorted(tensors.items()):
        hash.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return hash.hexdigest()


def trajectory(config: Config) -> list[tuple]:
    """What was trained, step by step: all that does not depend on the hour."""
    return [tuple(row[key] for key in ("step", "tokens", "loss", "grad_norm", "lr", "verdict")) for row in rows(config)]


def summary(config: Config) -> dict:
    return json.loads((config.run_dir / "summary.json").read_text())


def record(config: Config) -> dict:
    """Of a finished run: everything that must be equal, bit for bit, whatever happened on the way."""
    told = summary(config)
    losses = hashlib.sha256((config.run_dir / "val_losses.npz").read_bytes()).hexdigest()
    return {"weights": digest(config), "trajectory": trajectory(config), "validation": losses,
            **{key: told[key] for key in ("loss_as_trained", "loss_bf16", "skipped_steps", "tokens", "status")}}


def rows(config: Config, kind: str = "train") -> list[dict]:
    """Rows of metrics.jsonl; a line that is being written is left out."""
    return [row for row in read_rows(config.run_dir / "metrics.jsonl") if row["kind"] == kind]


def last_step(config: Config) -> int:
    return max((row["step"] for row in rows(config)), default=0)


def saved_steps(config: Config) -> list[int]:
    return sorted(int(p.parent.name[-8:]) for p in (config.run_dir / "checkpoints").glob("step_*/DONE"))


def back_to(config: Config, step: int) -> None:
    """Leave of a finished run what a kill right after the save of `step` leaves."""
    (config.run_dir / "summary.json").unlink()
    for path in (config.run_dir / "checkpoints").glob("step_*"):
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)


def leftovers(config: Config) -> list[str]:
    """What no finished run has in its checkpoints folder: temporary names of any kind."""
    return sorted(p.name for p in (config.run_dir / "checkpoints").glob("*") if not p.name.startswith(("step_", "bad_")))


def flip_bit(file: Path, at: int) -> None:
    """Another bit in each byte position, so that no test leans on one."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << at % 8
    file.write_bytes(data)


def wait_for(condition: Callable, seconds: float = 120):
    """What condition() returns as soon as it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return value


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
