"""Know how far each run of a study is, from what its folder holds."""

import fcntl
import json
import math
import time
from dataclasses import replace
from pathlib import Path

from runtime.checkpoint import latest, step_of
from runtime.cli import UserError
from runtime.config import read_config
from runtime.rows import metrics_rows, read_rows
from scaling.study import Row, checkpoint_of

ENDED = "sweep.py: exit code "      # begins the last line of a log whose run has ended
USED = {"status": str, "loss_bf16": int | float, "tok_per_s_median": int | float, "n_gpu": int, "device": str}    # of a summary
MAY_LACK = {"wall_s": int | float, "parent_step": int, "data_sha256": str, "val_sha256": str,       # or hold null
            "pair_id": str}


def summary_of(row: Row, folder: Path) -> dict | None:
    """summary.json of a finished run of the study in `folder`, else None. Raises UserError for a damaged one."""
    path = folder / row.run / "summary.json"
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text())
        wrong = ([f"{key} is {summary.get(key)!r}" for key, kind in (USED | MAY_LACK).items()
                  if not _fits(summary.get(key), kind) and not (key in MAY_LACK and summary.get(key) is None)]
                 if isinstance(summary, dict) else [f"it holds a {type(summary).__name__}"])
    except (ValueError, RecursionError) as error:
        wrong = [error]
    if wrong:
        raise UserError(f"{path} is damaged ({wrong[0]}): delete it, and --run evaluates the last checkpoint again")
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
        return f"at step {step_of(checkpoint)}"
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


def placed(row: Row, folder: Path) -> Row:
    """The row as it is to be run, or was: a branch begins from scratch where its trunk is done but its checkpoint is gone.

    So it is with runs that were copied without their checkpoints, which are large. A branch that has begun goes on as it was
    begun."""
    if row.parent is None:
        return row
    if summary := summary_of(row, folder):
        is_branch = summary.get("parent_step") is not None
    elif latest(folder / row.run):
        try:
            is_branch = read_config(folder / row.run).start_from is not None
        except UserError:     # train.py has the sentence for it
            is_branch = True
    else:
        is_branch = (checkpoint_of(row, folder) / "DONE").exists() or not (folder / row.parent / "summary.json").exists()
    return row if is_branch else replace(row, parent=None, parent_step=None)


def tokens_left(row: Row, folder: Path) -> int:
    """Tokens that a run, placed() or not, has yet to train on: none of a finished one."""
    if summary_of(row, folder):
        return 0
    if checkpoint := latest(folder / row.run):
        return (row.steps - step_of(checkpoint)) * row.tokens_per_step
    return row.own_tokens


def has_unsaved(row: Row, folder: Path) -> bool:
    """Whether a run has done a step that no checkpoint of it holds: one that still compiles, or evaluates, has not."""
    saved = latest(folder / row.run)
    return _steps_done(row, folder) > (step_of(saved) if saved else 0)


def has_trained(row: Row, folder: Path) -> bool:
    """Whether a run has done all its steps, so that it has only to be saved and evaluated."""
    return _steps_done(row, folder) >= row.steps


def _steps_done(row: Row, folder: Path) -> int:
    rows = metrics_rows(read_rows(folder / row.run / "metrics.jsonl"))
    return max((line["step"] for line in rows if line["kind"] == "train"), default=0)
