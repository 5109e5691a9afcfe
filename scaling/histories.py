"""Read metrics.jsonl of a run, whole, going or cut short, as arrays."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import UserError
from lib.files import read_rows
from runtime.metrics_file import accuracies, metrics_rows

FIELDS = (
    "loss",
    "grad_norm",
    "lr",
    "tok_per_s",
    "gpu_util_pct",
    "gpu_mem_pct",
    "step_s",
    "since_start",
)
WINDOW = 40  # losses are smoothed over a fortieth of the steps
HUGE = 1e30  # what is as large as this was no finite number
NOTHING = (
    "{} does not exist, holds no row or has no step to draw yet: give a run's folder, for --fp8"
    " with probe.every=STEPS"
)

Columns = dict[str, np.ndarray]  # "step", "ok", FIELDS -> a value per step, in order of the steps


@dataclass
class History:
    """A run's rows as arrays; NaN is what was not finite, or not told."""

    train: Columns  # of each step that counts
    val: Columns  # of each validation, which has a loss alone
    undone: list[Columns]  # like train: each stretch that a rollback took back
    marks: dict[str, list[dict]]  # name -> rows: a verdict that is not OK, an event
    # task of eval.tasks -> steps and accuracies, in order of the steps
    tasks: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def read_history(run: Path) -> History:
    """What metrics.jsonl tells, the last of a repeated step. Raises UserError where there is no
    step."""
    rows = metrics_rows(read_rows(run / "metrics.jsonl"))
    train, val = _columns_of_kind(rows, "train"), _columns_of_kind(rows, "val")
    undone = _undone_stretches(rows)
    if not len(train["step"]) and not undone:
        raise UserError(NOTHING.format(run / "metrics.jsonl"))
    return History(train, val, undone, _marks(rows), _task_curves(rows))


def _task_curves(rows: Sequence[dict]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] != "tasks":
            continue
        for task, accuracy in accuracies(row.get("scores", {})).items():
            points.setdefault(task, {})[row["step"]] = to_number(accuracy)
    curves = {}
    for task, by_step in sorted(points.items()):
        steps = sorted(by_step)
        values = np.array([by_step[step] for step in steps])
        curves[task] = np.array(steps, dtype=float), values
    return curves


def _undone_stretches(rows: Sequence[dict]) -> list[Columns]:
    stretches = []
    for is_undone, stretch in itertools.groupby(rows, key=_is_undone):
        if not is_undone:
            continue
        steps = {row["step"]: row for row in stretch if row["kind"] == "undone"}
        if steps:
            stretches.append(_columns(steps))
    return stretches


def _is_undone(row: dict) -> bool:
    return row["kind"] in ("undone", "undone_val", "undone_tasks")


def _marks(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """Of a rollback both rows, the step judged and the event."""
    marks: dict[str, list[dict]] = {}
    for row in rows:
        if row["kind"] not in ("event", "train", "undone"):
            continue
        name = row.get("event" if row["kind"] == "event" else "verdict") or "OK"
        if name != "OK":
            name = "ROLLBACK" if name == "rollback" else name.replace("_", " ")[:14]
            marks.setdefault(name, []).append(row)
    return marks


def _columns_of_kind(rows: Sequence[dict], kind: str) -> Columns:
    return _columns({row["step"]: row for row in rows if row["kind"] == kind})


def _columns(rows: Mapping[int, dict]) -> Columns:
    """step -> row, as arrays in order of the steps."""
    steps = sorted(rows)
    is_ok = [rows[step].get("verdict", "OK") == "OK" for step in steps]
    columns = {"step": np.array(steps, dtype=float), "ok": np.array(is_ok, dtype=float)}
    for key in FIELDS:
        columns[key] = np.array([to_number(rows[step].get(key)) for step in steps], dtype=float)
    return columns


def to_number(value: Any) -> float:
    """NaN for what is no finite number."""
    return float(value) if isinstance(value, int | float) and abs(value) < HUGE else math.nan


def finite(columns: Columns, key: str, is_ok: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where the value is finite; is_ok: and the verdict on the step was OK."""
    counts = np.isfinite(columns[key])
    if is_ok:
        counts &= columns["ok"] > 0
    return columns["step"][counts], columns[key][counts]


def window_of(values: np.ndarray) -> int:
    """Over how many values these are smoothed."""
    return max(1, len(values) // WINDOW)


def running_mean(values: np.ndarray, times: int = 1) -> np.ndarray:
    """Running mean over so many times window_of values; the window is cut where it would leave the
    ends."""
    if not len(values):
        return values
    kernel = np.ones(min(times * window_of(values), len(values)))
    counts = np.convolve(np.ones(len(values)), kernel, "same")
    return np.convolve(values, kernel, "same") / counts
