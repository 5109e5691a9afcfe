"""Run the runs of a study as processes: a branch as soon as its trunk has passed its step, so many
side by side, until all is done, someone asks to leave, or time is over.

A run's log is its lock: the run inherits it open and locked, so that it stays locked for as long as
the run lives, though the sweep be killed."""

import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Protocol

from lib.files import read_rows
from lib.machine import ROOT
from lib.text import duration, listed, si
from runtime.checkpoint import latest, step_of
from runtime.metrics_file import metrics_rows
from scaling.run_states import (
    ENDED,
    TimeOptions,
    can_lock,
    has_branch_point,
    not_done,
    run_time_of,
    state_of,
    summary_of,
    tokens_left,
)
from scaling.study import Row

POLL_S = 0.2
# Assumed of a run that is asked to leave: it ends its step, then writes and hashes 12 bytes a
# parameter.
LEAVE_S, SAVE_BYTES_PER_S = 5.0, 200e6
LOG_S = 60.0  # between two lines about the runs under way
RECENT_STEPS = 20  # the speed of a run under way is the median over so many


class RunOptions(TimeOptions, Protocol):
    """What the scheduler needs of a command's options."""

    @property
    def jobs(self) -> int: ...  # runs at a time
    @property
    def limit(self) -> float | None: ...  # seconds from the command's start


@dataclass(frozen=True)
class Running:
    """A run under way."""

    process: subprocess.Popen
    log: IO  # open and locked
    gpus: list[str]  # its slot: names of GPUs; none on a CPU


def run(
    rows: Sequence[Row],
    selected: Sequence[Row],
    folder: Path,
    options: RunOptions,
    slots: list[list[str]],
    deadline: float,
) -> int:
    """Run what of `selected` is not done; returns the exit code. `rows`: all of the study, whose
    finished runs tell how long a start takes; slots: the GPUs of each job; `deadline`: the
    time.monotonic() of limit=."""
    scheduler = Scheduler(rows, selected, folder, options, list(slots), deadline)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: scheduler.requests.append(number))
    return scheduler.run()


@dataclass
class Scheduler:
    rows: Sequence[Row]
    selected: Sequence[Row]
    folder: Path
    options: RunOptions
    free_slots: list[list[str]]
    deadline: float
    requests: list[int] = field(default_factory=list)  # to leave: signals, and 0 for the limit
    requests_passed_on: int = 0
    waiting: list[Row] = field(default_factory=list)
    running: dict[Row, Running] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    too_late: list[str] = field(default_factory=list)  # runs that no time is left for, and why

    def run(self) -> int:
        self.waiting = not_done(self.selected, self.folder)
        # what may fail again comes last
        self.waiting.sort(key=lambda row: state_of(row, self.folder).startswith("failed"))
        self._say_what_is_to_do()
        last_progress = time.monotonic()
        while self.running or (self.waiting and not self.requests):
            self._start_ready()
            if not self.running:
                break
            if time.monotonic() > last_progress + LOG_S:
                last_progress = time.monotonic()
                say(progress(self.selected, list(self.running), self.folder))
            time.sleep(POLL_S)
            self._check_time()
            self._pass_requests_on()
            self._reap()
        return self._end()

    def _say_what_is_to_do(self) -> None:
        text = f"{len(self.waiting)} of {len(self.selected)} runs to do in {self.folder}"
        if self.options.limit:
            remaining_s = self.deadline - time.monotonic()
            text += f"; {remaining_s:.1f} s are left of limit={self.options.limit:g}"
        say(text)

    def _start_ready(self) -> None:
        """Start every run that can begin and has a slot and time."""
        while not self.requests and self.free_slots:
            row = self._next_ready()
            if row is None:
                return
            self.waiting.remove(row)
            start_s = run_time_of(row, self.rows, self.folder, self.options).start_s
            if time.monotonic() + start_s + leave_s(row) > self.deadline:
                self.too_late.append(f"{row.run}, which takes {start_s:.0f} s to start and end")
                continue
            started = start(row, self.folder, self.options, self.free_slots[0])
            if started is not None:
                self.free_slots.pop(0)
                self.running[row] = started

    def _next_ready(self) -> Row | None:
        for row in self.waiting:
            if is_ready(row, self.folder):
                return row
        return None

    def _check_time(self) -> None:
        """Ask the runs to leave where the time that they need for it begins."""
        if not self.requests and time.monotonic() > self.deadline - max(map(leave_s, self.running)):
            self.requests.append(0)

    def _pass_requests_on(self) -> None:
        if len(self.requests) > self.requests_passed_on:
            self.requests_passed_on = len(self.requests)
            say("asking the runs to save and leave")
            for running in self.running.values():
                running.process.terminate()

    def _reap(self) -> None:
        """Take the runs that have ended out of those under way."""
        for row, running in list(self.running.items()):
            if running.process.poll() is None:
                continue
            # asked to leave is no failure
            code = 0 if self.requests else running.process.returncode
            print(f"{ENDED}{code}", file=running.log, flush=True)
            running.log.close()
            del self.running[row]
            self.free_slots.append(running.gpus)
            self._say_how_it_ended(row)

    def _say_how_it_ended(self, row: Row) -> None:
        state = state_of(row, self.folder)
        summary = summary_of(row, self.folder)
        if state.startswith("failed"):
            self.failed.append(row.run)
        loss = f", validation loss {summary['loss_bf16']:.4f}" if summary else ""
        say(f"{row.run} {state}{loss}")

    def _end(self) -> int:
        """Say what is not done; the exit code."""
        unfinished = [row.run for row in not_done(self.selected, self.folder)]
        for what, runs in (
            ("no time is left to begin", self.too_late),
            ("failed", self.failed),
            ("not done, the same command goes on", unfinished),
        ):
            if runs:
                say(f"{what}: {listed(runs)}")
        if self.failed:
            return 1
        return 3 if unfinished else 0


def is_ready(row: Row, folder: Path) -> bool:
    """Whether a run can begin or go on: a branch once its trunk has passed its step (or is done:
    train.py says what is gone)."""
    if row.parent is None or latest(folder / row.run) is not None:
        return True
    return has_branch_point(row, folder) or (folder / row.parent / "summary.json").exists()


def leave_s(row: Row) -> float:
    """Seconds that a run may take from being asked to leave until it has left."""
    return LEAVE_S + 12 * row.params_total / SAVE_BYTES_PER_S


def start(row: Row, folder: Path, options: RunOptions, gpus: list[str]) -> Running | None:
    """The run as a process with its log, or None where another sweep has it."""
    log = open(folder / f"{row.run}.log", "a")  # noqa: SIM115 - open as long as the run
    if not can_lock(log, fcntl.LOCK_EX):
        log.close()
        say(f"{row.run} is being run by another sweep: left to it")
        return None
    torchrun = []
    if options.gpus > 1:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={options.gpus}",
        ]
    say(f"{row.run} {_starting_point(row, folder)}")
    # A session of its own: a terminal's Ctrl-C would reach it beside our signal, and a second one
    # ends a run unsaved.
    process = subprocess.Popen(
        [sys.executable, *torchrun, str(ROOT / "train.py"), *row.arguments(folder)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=_environment(row, options, gpus),
        start_new_session=True,
    )
    return Running(process, log, gpus)


def _environment(row: Row, options: RunOptions, gpus: list[str]) -> dict[str, str]:
    """The variables of a run's process."""
    environment = dict(os.environ)
    # Else torchrun kills its workers 30 s after it was told to stop.
    seconds = str(max(30, math.ceil(leave_s(row))))
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds)
    processes = options.gpus * options.jobs
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    elif processes > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // processes)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def _starting_point(row: Row, folder: Path) -> str:
    """How the line goes on that says that a run begins."""
    checkpoint = latest(folder / row.run)
    if checkpoint:
        return f"goes on from step {step_of(checkpoint)}"
    if row.parent:
        return f"starts from step {row.parent_step} of {row.parent}"
    return "starts from scratch"


def progress(selected: Sequence[Row], running: Sequence[Row], folder: Path) -> str:
    """How far the runs under way are, and how long all take if the others go on at as many FLOPs a
    second."""
    unfinished = not_done(selected, folder)
    flops = sum(row.flops_per_token * tokens_left(row, folder) for row in unfinished)
    flops_per_s = 0.0
    texts = []
    for row in running:
        train_rows = _train_rows(folder / row.run / "metrics.jsonl")
        if not train_rows:
            texts.append(f"{row.run} is starting")
            continue
        tok_per_s = median(line["tok_per_s"] for line in train_rows[-RECENT_STEPS:])
        flops_per_s += tok_per_s * row.flops_per_token
        step, loss = train_rows[-1]["step"], train_rows[-1]["loss"] or math.nan
        texts.append(
            f"{row.run} {step:,} / {row.steps:,}, loss {loss:.3f}, {si(tok_per_s)} tokens/s"
        )
    finished = len(selected) - len(unfinished)
    remaining = f", about {duration(flops / flops_per_s)} left" if flops_per_s else ""
    return "; ".join([f"{finished} of {len(selected)} runs done{remaining}", *texts])


def _train_rows(path: Path) -> list[dict]:
    return [line for line in metrics_rows(read_rows(path)) if line["kind"] == "train"]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
