"""Start, kill, resume and compare real runs of train.py: what the tests of faults are made of.

A run is a process, or one per rank, forked off one that has imported train.py already (tests/nursery.py), in a process
group of its own; kill() takes the whole group, as the end of a machine would. torchrun() starts the genuine launcher.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from runtime.config import Config
from runtime.rows import read_rows
from tests.conftest import ROOT, write_config
from tests.nursery import children

HANG_S = 300        # a run that is silent so long on a loaded machine hangs; its stacks are in its log


class Nursery:
    """The process that forks runs. start() them; close() ends what is still running, as does the end of this process."""

    def __init__(self, folder: Path):
        self.folder, self.count, self._codes = folder, 0, {}
        folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=open(folder / "nursery.log", "w"), text=True, bufsize=1,      # noqa: SIM115 - the process's from here on
            env={**os.environ, "OMP_NUM_THREADS": "1"})

    def start(self, config: Config, *overrides: str, faults: list[str] = (), ranks: int = 1, largest_file: int | None = None,
              launcher: list[str] | None = None) -> "Run":
        """train.py with `overrides`, as `ranks` processes; no file may grow beyond largest_file bytes. With `launcher`
        the one process is torchrun with these arguments, and the ranks are its own processes."""
        self.count += 1
        name = f"{self.count:03d}_{config.run}"
        arguments = [str(write_config(config, self.folder / f"{name}.py")), *overrides]
        ask = {"arguments": arguments, "faults": list(faults), "ranks": ranks, "log": str(self.folder / f"{name}.log"),
               "largest_file": largest_file, "launcher": launcher, "port": free_port()}
        self._process.stdin.write(json.dumps(ask) + "\n")
        return Run(self, self._read("started"), self.folder / f"{name}.log", config)

    def code(self, pid: int, timeout: float) -> int | None:
        """The exit code of a process, as subprocess gives it; None where it is still running after `timeout` seconds."""
        end = time.monotonic() + timeout
        while pid not in self._codes:
            if self._read("ended", max(0.0, end - time.monotonic())) is None:
                return None
        return self._codes[pid]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _read(self, want: str, timeout: float = 60):
        """The next message of the kind that is wanted; on the way, who has ended is noted."""
        while True:
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                return None
            text = b""
            while not text.endswith(b"\n"):     # byte by byte: what Python read ahead, select would not see
                byte = os.read(self._process.stdout.fileno(), 1)
                assert byte, f"the nursery is gone: {(self.folder / 'nursery.log').read_text()[-2000:]}"
                text += byte
            line = json.loads(text)
            if "ended" in line:
                self._codes[line["ended"]] = line["code"]
            if want in line:
                return line[want]


class Run:
    """One start of train.py. pids are its ranks, or the launcher's alone; the first leads their process group."""

    def __init__(self, nursery: Nursery, pids: list[int], log: Path, config: Config):
        self.nursery, self.pids, self.log, self.config = nursery, pids, log, config

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, timeout: float = HANG_S) -> list[int]:
        """The exit codes of all ranks. A run that hangs leaves its stacks in the log and fails the test."""
        end = time.monotonic() + timeout
        codes = [self.nursery.code(pid, max(0.0, end - time.monotonic())) for pid in self.pids]
        if None in codes:
            self.signal(signal.SIGABRT)     # faulthandler tells where each thread was
            time.sleep(1)
            self.kill()
            raise AssertionError(f"hangs after {timeout:.0f} s: {self.output[-4000:]}")
        return codes

    def wait_until(self, condition, timeout: float = HANG_S) -> None:
        """Return as soon as condition() holds. Fails where the run ends before."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"nothing after {timeout:.0f} s: {self.output[-4000:]}"
            assert self.is_running() or condition(), f"ended before: {self.output[-4000:]}"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: last_step(self.config) >= step)

    def is_running(self) -> bool:
        return any(self.nursery.code(pid, 0.0) is None for pid in self.pids)

    def signal(self, number: int) -> None:
        """To all ranks, unless they are gone; those of torchrun lead groups of their own."""
        for group in (self.pids[0], *self.children()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    def children(self) -> list[int]:
        """The ranks that torchrun has started, in the order of their ranks."""
        return children(self.pids[0])

    def kill(self) -> None:
        """kill -9, all ranks at once; returns when they are gone."""
        self.signal(signal.SIGKILL)
        for pid in self.pids:
            assert self.nursery.code(pid, 60.0) is not None


def torchrun(nursery: Nursery, config: Config, faults: list[str] = (), restarts: int = 0) -> Run:
    """The genuine torchrun with two ranks that import everything themselves."""
    return nursery.start(config, faults=faults, launcher=[
        "--standalone", "--nproc_per_node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1",
        str(ROOT / "tests/faulty_train.py"), *faults])


# ----------------------------------------------------------------------------------------------------- what a run has left

def newest_tensors(config: Config) -> dict[str, torch.Tensor]:
    """Every weight and moment of the newest checkpoint, read by DCP itself rather than by the code under test."""
    reader = dcp.FileSystemReader(max(p.parent for p in (config.run_dir / "checkpoints").glob("step_*/DONE")))
    tensors = {name: torch.zeros(of.size, dtype=of.properties.dtype)
               for name, of in reader.read_metadata().state_dict_metadata.items()}
    with warnings.catch_warnings(action="ignore"):      # one process is no mistake
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def digest(config: Config) -> str:
    """SHA-256 over every weight and moment of the newest checkpoint, and its step."""
    hash = hashlib.sha256(str(saved_steps(config)[-1]).encode())
    for name, tensor in sorted(newest_tensors(config).items()):
        hash.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return hash.hexdigest()


def trajectory(config: Config) -> list[tuple]:
    """What was trained, step by step: all that does not depend on the hour."""
    return [tuple(row[key] for key in ("step", "tokens", "loss", "grad_norm", "lr", "verdict")) for row in rows(config)]


def record(config: Config) -> dict:
    """Of a finished run: everything that must be equal, bit for bit, whatever happened on the way."""
    summary = json.loads((config.run_dir / "summary.json").read_text())
    losses = hashlib.sha256((config.run_dir / "val_losses.npz").read_bytes()).hexdigest()
    return {"weights": digest(config), "trajectory": trajectory(config), "validation": losses,
            **{key: summary[key] for key in ("loss_as_trained", "loss_bf16", "skipped_steps", "tokens", "status")}}


def rows(config: Config, kind: str = "train") -> list[dict]:
    """Rows of metrics.jsonl; a line that is being written is left out."""
    return [row for row in read_rows(config.run_dir / "metrics.jsonl") if row["kind"] == kind]


def last_step(config: Config) -> int:
    return max((row["step"] for row in rows(config)), default=0)


def saved_steps(config: Config) -> list[int]:
    return sorted(int(p.parent.name[-8:]) for p in (config.run_dir / "checkpoints").glob("step_*/DONE"))


def is_finished(config: Config) -> bool:
    return (config.run_dir / "summary.json").exists()


def leftovers(config: Config) -> list[str]:
    """What no finished run has in its checkpoints folder: temporary names of any kind."""
    return sorted(p.name for p in (config.run_dir / "checkpoints").glob("*") if not p.name.startswith(("step_", "bad_")))


def flip_bit(file: Path, at: int) -> None:
    """Another bit in each byte position, so that no test leans on one."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << at % 8
    file.write_bytes(data)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
