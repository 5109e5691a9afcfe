"""How far each run of a study is, what is left of it and what it costs, from the files of its
folder.

A run that lives holds the lock of its log: that tells a running run from one that was killed."""

import fcntl
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, Protocol

from lib.machine import ROOT
from lib.text import duration, grid, si
from runtime.checkpoint import latest, step_of
from runtime.config import load_config, read_config
from runtime.log import peak_flops
from runtime.roofline import modelled_ratio
from scaling.records import read_json
from scaling.study import Row

# assumed, for no summary tells: imports and the GPU's context before a run's clock begins, and its
# end
UNSEEN_S = 5.0
ENDED = "sweep.py: exit code "  # begins the last line of a log whose run has ended


class TimeOptions(Protocol):
    """What estimates of time need of a command's options."""

    @property
    def gpus(self) -> int: ...  # per run
    @property
    def gpu(self) -> str: ...  # its name
    @property
    def mfu(self) -> float: ...  # assumed share of its BF16 peak
    @property
    def start(self) -> float: ...  # seconds assumed to start and end a run


@dataclass(frozen=True)
class RunTime:
    """What a run takes, as measured on finished runs of its kind or as assumed."""

    tok_per_s: float  # of one GPU, in steady steps
    start_s: float  # before these (imports, compilation) and after (evaluation, saving)
    device: str | None  # on which it was measured; None: assumed


def summary_of(row: Row, folder: Path) -> dict | None:
    """summary.json of a finished run of the study in `folder`, else None."""
    path = folder / row.run / "summary.json"
    return read_json(path) if path.exists() else None


def is_done(row: Row, folder: Path) -> bool:
    return summary_of(row, folder) is not None


def not_done(rows: Sequence[Row], folder: Path) -> list[Row]:
    return [row for row in rows if not is_done(row, folder)]


def state_of(row: Row, folder: Path) -> str:
    """How far a run is: done, diverged, running, failed and why, at step 400, held out or
    missing."""
    summary = summary_of(row, folder)
    if summary:
        return "done" if summary["status"] == "ok" else summary["status"]
    log = folder / f"{row.run}.log"
    if log.exists():
        state = _state_in_log(log)
        if state is not None:
            return state
    checkpoint = latest(folder / row.run)
    if checkpoint:
        return f"at step {step_of(checkpoint)}"
    return "held out" if row.held_out else "missing"


def _state_in_log(log: Path) -> str | None:
    """Running, or failed and why; None where the log of a run that ended tells neither."""
    with open(log, errors="replace") as file:
        if not can_lock(file, fcntl.LOCK_SH):
            return "running"
        text = file.read()
    failure = re.search(rf"{ENDED}(-?[1-9]\d*)\n\Z", text)
    if failure is None:
        return None
    last_attempt = text[: failure.start()].rpartition(ENDED)[2]
    lines = last_attempt.strip().splitlines() or [""]
    sentences = [line for line in lines if line.startswith("train.py: ")]
    reason = sentences[0] if sentences else lines[-1]
    return f"failed, exit code {failure[1]}: {reason} ({log})"


def can_lock(file: IO, kind: int) -> bool:
    """Lock an open log, shared or exclusively; False where the run has it: a run that lives holds
    its log exclusively."""
    for _ in range(5):  # another's look at the table is over at once
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def placed(row: Row, folder: Path) -> Row:
    """The row as it is to be run, or was begun: a branch from scratch where its trunk is done but
    its checkpoint is gone."""
    # a switched decay has no run from scratch
    if row.parent is None or row.switched_from is not None:
        return row
    return row if _is_branch(row, folder) else from_scratch(row)


def _is_branch(row: Row, folder: Path) -> bool:
    """Whether a branch of the study goes on from its trunk, or would."""
    assert row.parent is not None
    summary = summary_of(row, folder)
    if summary:
        return summary.get("parent_step") is not None
    if latest(folder / row.run):
        return read_config(folder / row.run).start_from is not None
    trunk_is_done = (folder / row.parent / "summary.json").exists()
    return has_branch_point(row, folder) or not trunk_is_done


def from_scratch(row: Row) -> Row:
    """The row without its trunk: it ends in the same weights."""
    return replace(row, parent=None, parent_step=None)


def has_branch_point(row: Row, folder: Path) -> bool:
    """Whether the checkpoint that a branch starts from is there, whole."""
    return (row.branch_point(folder) / "DONE").exists()


def tokens_left(row: Row, folder: Path) -> int:
    """Tokens that a run that is not done has still to be trained on."""
    checkpoint = latest(folder / row.run)
    if not checkpoint:
        return row.own_tokens
    return (row.steps - step_of(checkpoint)) * row.tokens_per_step


# ------------------------------------------------------------------------------------------- costs


def run_time_of(row: Row, rows: Sequence[Row], folder: Path, options: TimeOptions) -> RunTime:
    """Medians over the finished ones of `rows` of its size and precision, null runs apart; else as
    assumed."""
    kind = (row.size, row.recipe, row.repeat)
    alike = [run for run in rows if (run.size, run.recipe, run.repeat) == kind]
    summaries = {run: summary_of(run, folder) for run in alike}
    finished = {run: summary for run, summary in summaries.items() if summary}
    if not finished:
        return _assumed_time(row, options)
    apart = [_seconds_outside_steps(run, summary) for run, summary in finished.items()]
    speeds = [summary["tok_per_s_median"] / summary["n_gpu"] for summary in finished.values()]
    newest = list(finished.values())[-1]
    return RunTime(median(speeds), UNSEEN_S + median(apart), newest["device"])


def _seconds_outside_steps(row: Row, summary: dict) -> float:
    return max(0.0, summary["wall_s"] - row.own_tokens / summary["tok_per_s_median"])


def _assumed_time(row: Row, options: TimeOptions) -> RunTime:
    ratio = None
    if not row.is_baseline:
        config = load_config(ROOT / row.config, row.overrides)
        ratio = modelled_ratio(config, options.gpu, options.gpus)
    peak = _bf16_peak(options.gpu)
    bf16_speed = peak * options.mfu / row.flops_per_token
    return RunTime(bf16_speed * (ratio or 1.0), options.start, None)


def _bf16_peak(gpu: str) -> float:
    """FLOP/s of a GPU whose name the options have checked."""
    peaks = peak_flops(gpu)
    assert peaks is not None
    return peaks[0]


# ------------------------------------------------------------------------------------- the table


def format_grid(rows: Sequence[Row], folder: Path, options: TimeOptions) -> str:
    """A line per run: size, budget, where it branches off, FLOPs of its own steps, time of a
    processor with its start, state; then sums."""
    run_times = {row: run_time_of(row, rows, folder, options) for row in rows}
    processor = _processor(run_times.values())
    whole = {row: row.own_tokens for row in rows}
    remaining = {row: tokens_left(row, folder) for row in not_done(rows, folder)}
    heads = ["run", "N", "tokens/N", "tokens", "from step", "FLOPs", f"{processor} time", "state"]
    cells = [_cells_of(row, folder, run_times[row], options) for row in rows]
    lines = [
        f"{_format_sum(whole, run_times, options)} of a {processor}",
        f"left: {_format_sum(remaining, run_times, options)} of a {processor}",
    ]
    if any(run_time.device is None for run_time in run_times.values()):
        lines.append(
            f"~ assumed: {100 * options.mfu:.3g}% of the"
            f" {_bf16_peak(options.gpu) / 1e12:.0f} BF16 TFLOP/s of one {options.gpu} (mfu=),"
            f" FP8 as runtime.roofline models it, {options.start:g} s to start and end (start=)"
        )
    lines += _format_measured(run_times)
    return "\n".join([grid([heads, *cells]), "", *lines])


def _processor(run_times: Iterable[RunTime]) -> str:
    """What the times are of: a run without a measured one is assumed to train on a GPU."""
    devices = [run_time.device or "" for run_time in run_times]
    on_cpu = [device.startswith("cpu") for device in devices]
    if on_cpu and all(on_cpu):
        return "CPU"
    return "CPU or GPU" if any(on_cpu) else "GPU"


def _cells_of(row: Row, folder: Path, run_time: RunTime, options: TimeOptions) -> list[str]:
    assumed = "~" if run_time.device is None else ""
    return [
        row.run,
        si(row.params_total),
        f"{row.tokens_per_param:g}",
        si(row.tokens),
        str(row.parent_step or "-"),
        f"{row.flops_per_token * row.own_tokens:.2e}",
        assumed + duration(_gpu_seconds(run_time, row.own_tokens, options)),
        state_of(row, folder),
    ]


def _gpu_seconds(run_time: RunTime, tokens: int, options: TimeOptions) -> float:
    """Seconds of one GPU, or of one process on a CPU, of which a run holds so many for as long as
    it starts and ends."""
    return run_time.start_s * options.gpus + tokens / run_time.tok_per_s


def _format_sum(tokens: dict[Row, int], run_times: dict[Row, RunTime], options: TimeOptions) -> str:
    flops = sum(count * row.flops_per_token for row, count in tokens.items())
    seconds = sum(_gpu_seconds(run_times[row], count, options) for row, count in tokens.items())
    return f"{len(tokens)} runs: {flops:.3g} FLOPs, {duration(seconds)}"


def _format_measured(run_times: dict[Row, RunTime]) -> list[str]:
    """A line for each size and precision of which a run is done."""
    measured = {label_of(row): run_time for row, run_time in run_times.items() if run_time.device}
    return [
        f"measured: {kind} {si(run_time.tok_per_s)} tokens/s on each {run_time.device},"
        f" {run_time.start_s:.3g} s to start and end"
        for kind, run_time in measured.items()
    ]


def label_of(row: Row) -> str:
    """Size and arm of a run, for people."""
    return f"{row.size} {arm_label(row)}"


def arm_label(row: Row) -> str:
    """A run's precision, for people; null runs apart."""
    return f"{row.recipe} null" if row.repeat else row.recipe
