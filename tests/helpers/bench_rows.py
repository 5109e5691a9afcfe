"""Rows of bench.throughput whose numbers are invented."""

from typing import Any

from bench.cells import Cell
from bench.judging import judge_cell
from bench.rows import Measurement, Provenance, TimedRow

TOKENS = 512  # of an optimizer step of the cells here


def provenance(**changes: Any) -> Provenance:
    """That of a call on a CPU, but for `changes`."""
    versions = {"torchao": "0.18", "triton": None, "cuda": None, "cudnn": None, "python": "3.11"}
    values = {
        "run": "2026-12-01T00:00:00Z",
        "command": "c",
        "gpu": None,
        "driver": "580",
        "power_limit_w": None,
        "torch": "2.11",
        **versions,
        "commit": "0123456789abc",
        "dirty": True,
    }
    return Provenance(**{**values, **changes})


def answer(tok_per_s: float = 1000.0, **changes: Any) -> Measurement:
    """What a cell's process answers that trains so many tokens per second, but for `changes`."""
    step_s = TOKENS / tok_per_s
    values = {
        "flops_per_token": 10,
        "params_total": 3,
        "params_matmul": 2,
        "compile_s": 2.0,
        "steps_s": [step_s * 0.9, step_s * 1.1],
        "losses": [5.0 - i / 10 for i in range(20)],
        "gradient_norms": {"a": 1.0, "b": 0.0},
        "graph_breaks": 0,
        "recompiles": 0,
    }
    return Measurement(**{**values, **changes})


def judged(
    cell: Cell, measured: Measurement, bf16: TimedRow | None = None, gpu: str | None = None
) -> TimedRow:
    """The row of a cell that took 20 s."""
    return judge_cell(cell, measured, bf16, provenance(gpu=gpu), wall_s=20.0)
