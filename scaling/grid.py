"""Tell what each run of a study costs, how far it is, what branches save: the table that scaling/sweep.py prints."""

import fcntl
import json
import math
import statistics
import time
from pathlib import Path

from runtime import metrics
from runtime.checkpoint import latest
from runtime.config import ConfigError
from runtime.plan import ASSUMED_MFU
from scaling.study import Row

ENDED = "sweep.py: exit code "      # begins the last line of a log whose run has ended
USED = {"status": str, "loss_bf16": int | float, "tok_per_s_median": int | float, "n_gpu": int, "device": str}    # of a summary


def summary_of(row: Row, folder: Path) -> dict | None:
    """summary.json of a finished run of the study in `folder`, else None. Raises ConfigError for a damaged one."""
    path = folder / row.run / "summary.json"
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text())
        wrong = ([f"{key} is {summary.get(key)!r}" for key, kind in USED.items() if not _fits(summary.get(key), kind)]
                 if isinstance(summary, dict) else [f"it holds a {type(summary).__name__}"])
    except (ValueError, RecursionError) as error:
        wrong = [error]
    if wrong:
        raise ConfigError(f"{path} is damaged ({wrong[0]}): delete it, and --run evaluates the last checkpoint again")
    return summary


def _fits(value, kind) -> bool:
    return isinstance(value, kind) and (kind is str or not isinstance(value, bool) and 0 < value < math.inf)


def state_of(row: Row, folder: Path) -> str:
    """How far a run is: done, diverged, running, failed and why, at step 400, held out or missing."""
    if summary := summary_of(row, folder):
        return "done" if summary["status"] == "ok" else summary["status"]
    if (log := folder / f"{row.run}.log").exists():
        with open(log, errors="replace") as file:
            if not can_lock(file, fcntl.LOCK_SH):
                return "running"
            *attempts, code = file.read().split(ENDED)
        if attempts and code.strip() != "0" and code.strip().lstrip("-").isdigit():
            told = [line for line in attempts[-1].splitlines() if line.strip()] or ["nothing was printed"]
            sentence = next((line for line in told if line.startswith("train.py: ")), told[-1])
            return f"failed, exit code {code.strip()}: {sentence} ({log})"
    if checkpoint := latest(folder / row.run):
        return f"at step {int(checkpoint.name.removeprefix('step_'))}"
    return "held out" if row.held_out else "missing"


def can_lock(file, kind: int) -> bool:
    """Lock an open log, shared or exclusively; False where the other has it: a run that lives holds its log exclusively."""
    for _ in range(5):      # another's look at the table is over at once
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def speeds_of(rows: list[Row], folder: Path) -> dict[tuple[str, str], tuple[float, str]]:
    """(size, recipe) -> tokens a second and device, the median over its finished runs; and the device's name."""
    found = {}
    for row in rows:
        if summary := summary_of(row, folder):
            speed = summary["tok_per_s_median"] / summary["n_gpu"]
            found.setdefault((row.size, row.recipe), []).append((speed, summary["device"]))
    return {key: (statistics.median(speed for speed, _ in each), each[-1][1]) for key, each in found.items()}


def table(rows: list[Row], folder: Path, gpu: str) -> list[str]:
    """A line per run: size, budget, where it branches off, FLOPs and device-hours of its own steps, state; then the sums.

    Hours follow from the speed of finished runs of that size and recipe, else from an assumed share of the peak of `gpu`.
    """
    speeds, peak = speeds_of(rows, folder), metrics.peak_flops(gpu)[0]

    def hours(some: list[Row]) -> float:
        speed = [speeds.get((row.size, row.recipe), (peak * ASSUMED_MFU / row.flops_per_token,))[0] for row in some]
        return sum(row.own_tokens / each for row, each in zip(some, speed, strict=True)) / 3600

    width = max(len(row.run) for row in rows)
    lines = [f"{'run':{width}}  {'N':>7} {'tok/N':>5} {'tokens':>7} {'from step':>9} {'FLOPs':>8} {'hours':>9}  state"]
    for row in rows:
        spent = ("" if (row.size, row.recipe) in speeds else "~") + _hours(hours([row]))
        lines.append(f"{row.run:{width}}  {_si(row.params_total):>7} {row.tokens_per_param:>5g} {_si(row.tokens):>7} "
                     f"{row.parent_step or '-':>9} {row.own_flops:>8.2e} {spent:>9}  {state_of(row, folder)}")
    left = [row for row in rows if not summary_of(row, folder)]
    own, apart = sum(row.own_flops for row in rows), sum(row.flops for row in rows)
    lines += ["", f"{len(rows)} runs: {own:.3g} FLOPs, {_hours(hours(rows))} device-hours; left: {len(left)} runs, "
                  f"{sum(row.own_flops for row in left):.3g} FLOPs, {_hours(hours(left))} device-hours at most",
              f"as {len(rows)} separate runs {apart:.3g} FLOPs: branches save {1 - own / apart:.0%}",
              "A branch's FLOPs and hours are those of its own steps; FLOPs are 6 per matmul parameter plus attention."]
    if any((row.size, row.recipe) not in speeds for row in rows):
        lines.append(f"~ assumed: {ASSUMED_MFU:.0%} of the {peak / 1e12:.0f} BF16 TFLOP/s of one {gpu}; FP8 no faster")
    return lines + [f"measured: {size} {recipe} {_si(speed)} tokens/s on each {device}"
                    for (size, recipe), (speed, device) in speeds.items()]


def _hours(value: float) -> str:
    return "<0.001" if 0 < value < 1e-3 else f"{value:.3g}"


def _si(value: float) -> str:
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{value / scale:.3g}{unit}" for scale, unit in units if value >= scale), f"{value:.3g}")
