"""Run what of a study is not done, each run as a process of its own, within a limit of time."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from runtime.checkpoint import latest, step_of
from runtime.cli import UserError
from scaling.costs import costs_of, kind_of
from scaling.grid import ENDED, can_lock, has_trained, has_unsaved, placed, state_of, summary_of
from scaling.progress import StudyProgress
from scaling.study import ROOT, Row, checkpoint_of

POLL_S = 0.2
# Assumed of a run that is asked to leave: it ends its step, then writes and hashes 12 bytes a parameter.
LEAVE_S = 5.0
SAVE_BYTES_PER_S = 200e6
PATIENCE_S = 3.0        # until what has been asked to leave and has nothing to save is told again


def visible_gpus(options) -> list[str]:
    """Names of this machine's GPUs for CUDA_VISIBLE_DEVICES; none on a CPU. Raises UserError where they are too few."""
    there = torch.cuda.device_count()
    if there and options.gpus * options.jobs > there:
        raise UserError(f"gpus={options.gpus} for each of jobs={options.jobs} is more than the {there} GPUs of this machine")
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")[:there]


@dataclass
class Running:
    """A run that this sweep has started."""
    process: subprocess.Popen
    log: IO
    slot: int
    since: float                    # by time.monotonic()
    busy: float = 0.0               # when it was last seen with steps to save, or had just been asked to leave
    is_urged: bool = False          # told a second time
    spared_until: float = 0.0       # the limit is reached, but it has only to be evaluated

    def ask(self) -> None:
        """Have the run save and leave."""
        self.spared_until, self.busy = 0.0, time.monotonic()
        self.process.terminate()


def start(row: Row, folder: Path, options, slot: int, gpus: list[str]) -> Running | None:
    """The run as a process, or None where another sweep has it.

    The log is the lock: the run inherits it open, so it stays locked for as long as the run lives, though the sweep be
    killed."""
    log = open(folder / f"{row.run}.log", "a")      # noqa: SIM115 - open as long as the run
    if not can_lock(log, fcntl.LOCK_EX):
        log.close()
        return None
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.gpus}"] if options.gpus > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "train.py"), *row.arguments(folder)]
    env = dict(os.environ)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * options.gpus:(slot + 1) * options.gpus])
    elif (processes := options.gpus * options.jobs) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    # A session of its own: a terminal's Ctrl-C would reach torchrun and its workers beside our signal, and a second one ends
    # a run unsaved.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True)
    return Running(process, log, slot, time.monotonic())


def leave_s(row: Row) -> float:
    """Seconds that a run may take from being asked to leave until it has left."""
    return LEAVE_S + 12 * row.params_total / SAVE_BYTES_PER_S


def run(rows: list[Row], chosen: list[Row], folder: Path, options, gpus: list[str], began: float) -> int:
    """Run what of `chosen` is not done, a branch as soon as its trunk has passed its step; returns the exit code.

    `rows` are all of the study, whose finished runs tell how long a start takes; `began` is when the limit began to count, by
    time.monotonic()."""
    asked: list[float] = []         # when each signal came
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(time.monotonic()))
    waiting, running, failed, late, passed_on = [row for row in chosen if not summary_of(row, folder)], {}, [], [], 0
    waiting.sort(key=lambda row: state_of(row, folder).startswith("failed"))    # what may fail again comes last
    say(f"{len(waiting)} of {len(chosen)} runs to do in {folder}" + (
        f"; {began + options.limit - time.monotonic():.1f} s are left of limit={options.limit:g}" if options.limit else ""))

    with StudyProgress(rows, chosen, folder, options) as progress:
        while running or (waiting and not asked):
            while not asked and len(running) < options.jobs and (row := next((r for r in waiting if is_ready(r, folder)), None)):
                waiting.remove(row)
                if options.limit and (reason := lacks_time(row, rows, folder, options, began)):
                    late.append(row.run)
                    if len(late) == 1:
                        say(reason)
                    continue
                slot = min(set(range(options.jobs)) - {one.slot for one in running.values()})
                now = placed(row, folder)
                if started := start(now, folder, options, slot, gpus):
                    running[row] = started
                    say(f"{row.run} {_beginning(row, now, folder)}")
                else:
                    say(f"{row.run} is being run by another sweep: left to it")
            if not running:
                break
            progress.show(list(running))
            time.sleep(POLL_S)
            if options.limit and not asked and time.monotonic() > began + options.limit - max(map(leave_s, running)):
                asked.append(time.monotonic())
                passed_on = 1
                spare(running, rows, folder, options)
                if leaving := [one for one in running.values() if not one.spared_until]:
                    say("asking the runs to save and leave")
                for one in leaving:
                    one.ask()
            for _ in range(passed_on, passed_on := len(asked)):
                say("asking the runs to save and leave")
                for one in running.values():
                    one.ask()
            for one in running.values():
                if 0 < one.spared_until < time.monotonic():
                    say("asking the runs to save and leave")
                    one.ask()
            if asked and options.gpus == 1:     # torchrun has a patience of its own; told twice, it leaves its workers behind
                urge(running, folder)
            for row, one in list(running.items()):
                if one.process.poll() is not None:
                    # One asked to leave before it could save has not failed.
                    code = 0 if asked and not one.spared_until else one.process.returncode
                    print(f"{ENDED}{code}", file=one.log, flush=True)
                    one.log.close()
                    del running[row]
                    progress.run_ended()
                    state = state_of(row, folder)
                    failed += [row.run] if state.startswith("failed") else []
                    loss = f", validation loss {summary['loss_bf16']:.4f}" if (summary := summary_of(row, folder)) else ""
                    say(f"{row.run} {state}{loss} after {time.monotonic() - one.since:.0f} s")
    if late[1:]:
        say(f"nor are begun, for the same reason: {', '.join(late[1:])}")
    todo = [row.run for row in chosen if not summary_of(row, folder)]
    if failed:
        say(f"failed: {', '.join(failed)}; correct the cause and run the same command again")
    if todo:
        say(f"{len(todo)} of {len(chosen)} runs are not done, {todo[0]} the first; the same command goes on")
    return 1 if failed else 3 if todo else 0


def spare(running: dict[Row, Running], rows: list[Row], folder: Path, options) -> None:
    """Leave the runs that have done their steps the time to be evaluated: on a machine that is lent, all of a run is lost that
    is cut there. A start, which the evaluation is a part of, takes longer."""
    costs = costs_of(rows, folder, options)
    for row, one in running.items():
        if has_trained(row, folder):
            seconds = costs[kind_of(row)].start_s
            one.spared_until = time.monotonic() + seconds
            say(f"{row.run} has done its steps and has up to {seconds:.0f} s to be evaluated")


def urge(running: dict[Row, Running], folder: Path) -> None:
    """Tell those a second time to leave, which ends them, who were asked and have nothing to save.

    A run that compiles hears of the first request after its first step, which may be minutes away; nothing of it is lost."""
    for row, one in running.items():
        if one.spared_until:
            continue
        if has_unsaved(row, folder):
            one.busy = time.monotonic()
        elif not one.is_urged and one.process.poll() is None and time.monotonic() > one.busy + PATIENCE_S:
            one.is_urged = True
            say(f"{row.run} has nothing to save and is told to leave at once")
            one.process.terminate()


def is_ready(row: Row, folder: Path) -> bool:
    """Whether a run can begin or go on: a branch once its trunk has passed its step."""
    return (row.parent is None or latest(folder / row.run) is not None or (folder / row.parent / "summary.json").exists()
            or (checkpoint_of(row, folder) / "DONE").exists())


def lacks_time(row: Row, rows: list[Row], folder: Path, options, began: float) -> str | None:
    """The sentence where what is left of the limit would go into the run's start alone, else None."""
    cost, left = costs_of(rows, folder, options)[kind_of(row)], began + options.limit - time.monotonic()
    if left >= cost.start_s + leave_s(row):
        return None
    return (f"{row.run} is not begun: of limit={options.limit:g} {max(0.0, left):.0f} s are left, and to start and end it takes "
            f"{cost.start_s:.0f} s ({'measured' if cost.is_start_measured else 'assumed, start='}), to save and leave up to "
            f"{leave_s(row):.0f} s")


def _beginning(row: Row, now: Row, folder: Path) -> str:
    if own := latest(folder / row.run):
        return f"goes on from step {step_of(own)}"
    if now.parent:
        return f"starts from step {now.parent_step} of {now.parent}"
    return "starts" + (f" from scratch: step {row.parent_step} of {row.parent}, which is done, is gone" if row.parent else "")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
