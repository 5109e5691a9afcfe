"""Cells in turns, each in a process of its own, within a budget of seconds."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bench.cells import Cell
from bench.judging import compare_with_bf16, judge_cell
from bench.measuring import to_number
from bench.rows import (
    CellFailure,
    CellRow,
    FailedRow,
    Measurement,
    Provenance,
    TimedRow,
    answer_from,
    row_line,
    rows_of,
)
from lib.errors import UserError
from lib.files import append_line
from lib.machine import ROOT, killed_with_parent, nvidia_smi
from runtime.environment import environment

# of matmuls before the first cell: a cold GPU's clocks are higher than those of all that follow
WARM_S = 10.0
CELL_LIMIT_S = 420  # a cell that has not ended by then never will
TURN = 4  # FP8 cells, at most, between two of BF16
GUESS_S = 60  # of a cell, until one of its size was timed here


class Timer:
    """Times groups of cells on this machine within `budget` seconds; every row is in `out` as soon
    as it is there."""

    def __init__(
        self,
        out: Path,
        device: str,
        budget: float,
        command: str,
        commit: str | None = None,
        again: Sequence[str] = (),
    ):
        """again: names of cells whose rows do not count as there. Raises UserError where there is
        no GPU."""
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "this needs a CUDA GPU, and torch sees none here: --suite toy rehearses on the CPU"
            )
        self.out, self.budget, self.end = out, budget, time.monotonic() + budget
        self.provenance = _provenance(device, command, commit)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
        self.here = [
            row
            for row in rows_of(out)
            if row.cell.name not in again and _is_of_same_setup(row.provenance, self.provenance)
        ]

    def run(self, groups: list[list[Cell]]) -> None:
        """Time what is due, in this order, as long as there is time."""
        print(f"rows go to {self.out}", flush=True)
        if self.provenance.gpu:
            _warm_gpu()
        for group in groups:
            self.time_group(group)
        print(self._remainder(groups))

    def _remainder(self, groups: list[list[Cell]]) -> str:
        """What is said at the end: how many cells have no row, and whether a budget as this one
        is enough for any of them."""
        n_due = sum(len(self.due(group)) for group in groups)
        if not n_due:
            return "\nall is timed"
        needed = []
        for group in groups:
            due = self.due(group)
            if due:
                needed.append(self.estimate(group[0], group[0], due[0]))
        least = math.ceil(min(needed) + WARM_S + 1)  # with what precedes
        if least <= self.budget:
            return f"\n{n_due} cells are left, the same command goes on with them"
        return f"\n{n_due} cells are left, none fits: give budget={least} or more"

    def due(self, group: list[Cell]) -> list[Cell]:
        """The cells of a group, but for its BF16, that have no row here."""
        done = {row.cell.name for row in self.here if row.is_final}
        return [cell for cell in group[1:] if cell.name not in done]

    def estimate(self, *cells: Cell) -> float:
        """Seconds that these cells may take in all."""
        return sum(expected_s(cell.size, self.here) for cell in cells)

    def has_time_for(self, *cells: Cell) -> bool:
        return time.monotonic() + self.estimate(*cells) <= self.end

    def time_group(self, group: list[Cell]) -> None:
        """Time what is due of a BF16 cell's group and fits into the budget, TURN of them at most
        between two of BF16."""
        earlier: CellRow | None = None  # BF16's
        while due := self.due(group):
            baseline = group[0]
            if earlier is None:
                if not self.has_time_for(baseline, due[0], baseline):
                    return
                earlier = self.time(baseline)
            if isinstance(earlier, FailedRow):
                if not earlier.failure.oom or baseline.micro_batch == 1:
                    return
                group = [replace(cell, micro_batch=cell.micro_batch // 2) for cell in group]
                earlier = None
                continue
            later = self._turn(baseline, due[:TURN], earlier)
            if later is None:
                return
            earlier = later

    def _turn(self, baseline: Cell, cells: list[Cell], earlier: TimedRow) -> TimedRow | None:
        """Time the cells that fit into the budget, then BF16 again, and add the ratios. Returns
        BF16's row that the next turn begins with; None where the group has to end."""
        rows = []
        for cell in cells:  # each asked when its turn comes
            if self.has_time_for(cell, baseline):
                rows.append(self.time(cell, earlier, self.estimate(baseline)))
        if not rows:
            return None
        timed_rows = [row for row in rows if isinstance(row, TimedRow)]
        if not timed_rows:
            return earlier
        later = self.time(baseline)
        if isinstance(later, FailedRow):
            return None
        for row in timed_rows:
            self._add(compare_with_bf16(row, earlier, later))
        return later

    def time(self, cell: Cell, bf16: TimedRow | None = None, reserve_s: float = 0.0) -> CellRow:
        """The row of one cell, timed in a process of its own, with so many seconds left after it;
        not kept where the budget cut it. bf16: the row that it is judged by."""
        start = time.monotonic()
        print(f"[{self.end - start:5.0f} s left] {cell.name}", end=" ", flush=True)
        limit_s = min(CELL_LIMIT_S, self.end - start - reserve_s)
        answer = run_cell(cell, self.out.with_suffix(".log"), limit_s)
        wall_s = time.monotonic() - start
        if isinstance(answer, Measurement):
            row: CellRow = judge_cell(cell, answer, bf16, self.provenance, wall_s)
            self._add(row)
            return row
        row = FailedRow(cell=cell, provenance=self.provenance, wall_s=wall_s, failure=answer)
        was_cut = wall_s >= limit_s and limit_s != CELL_LIMIT_S
        if not was_cut:
            self._add(row)
        return row

    def _add(self, row: CellRow) -> None:
        append_line(self.out, row_line(row))
        self.here.append(row)
        print(_in_words(row), flush=True)


def expected_s(size: str, rows: Sequence[CellRow]) -> float:
    """Seconds that a cell may take: as long as the longest of its size in `rows`, and a tenth."""
    seconds = [row.wall_s for row in rows if row.cell.size == size]
    return 1.1 * max(seconds, default=GUESS_S)


def _provenance(device: str, command: str, commit: str | None) -> Provenance:
    """commit: of these files, where git does not tell it."""
    env = environment(torch.device(device), ROOT)
    driver, power_limit = nvidia_smi("driver_version", "power.limit")
    return Provenance(
        run=env.t_start,
        command=command,
        gpu=env.device if device == "cuda" else None,
        driver=driver,
        power_limit_w=to_number(power_limit),
        torch=env.torch,
        torchao=env.torchao,
        triton=env.triton,
        cuda=env.cuda,
        cudnn=env.cudnn,
        python=env.python,
        commit=commit or env.git_commit,
        dirty=None if commit else env.git_dirty,
    )


def _is_of_same_setup(a: Provenance, b: Provenance) -> bool:
    """Whether times by the two may be compared: the same GPU and the same version of torch."""
    return (a.gpu, a.torch) == (b.gpu, b.torch)


def _in_words(row: CellRow) -> str:
    if isinstance(row, FailedRow):
        return row.failure.failure
    if row.ratio is None:
        text = f"{row.tok_per_s:,.0f} tokens/s, compiled in {row.measured.compile_s:.0f} s"
    else:
        text = f"{row.cell.name}: {row.ratio:.3f} x {row.baseline}, drift {row.drift:+.1%}"
    if row.invalid_because:
        text += f"; INVALID: {row.invalid_because}"
    return text


def _warm_gpu() -> None:
    """Matmuls for WARM_S: a cold GPU's clocks are higher than those of all that follow."""
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    end = time.monotonic() + WARM_S
    while time.monotonic() < end:
        (a @ a)[0, 0].item()  # waits for it


def run_cell(cell: Cell, log: Path, limit_s: float) -> Measurement | CellFailure:
    """What the process of a cell answers, or why it does not; nothing of it is left running."""
    with open(log, "a") as words, tempfile.TemporaryDirectory() as scratch:
        print(f"\n==== {cell}", file=words, flush=True)
        answer = Path(scratch) / "row.json"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.throughput",
                "--cell",
                json.dumps(asdict(cell)),
                str(answer),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
            preexec_fn=killed_with_parent(),
        )
        try:
            process.wait(limit_s)
            return answer_from(json.loads(answer.read_bytes()))
        except subprocess.TimeoutExpired:
            return CellFailure(failure=f"not done after {limit_s:.0f} s")
        except OSError:
            reason = f"exit code {process.returncode} without an answer; its words are in {log}"
            return CellFailure(failure=reason)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the compiler's workers too
            process.wait()
