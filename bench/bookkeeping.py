"""Know which measurements a journal holds, of which machine, so that a call does only what is missing.

Rows count for the GPU and the torch that they were made with. A cell counts as done whether its row is valid or not: what is
invalid today is so tomorrow; `cells=` times it again. One that failed is tried again, after those that were never tried.
"""

import hashlib
import os
import secrets
import time
from pathlib import Path

import torch

from bench.clocks import describe_gpu
from bench.journal import Journal
from bench.suites import Cell
from runtime.log import environment, peak_flops

NEW, FAILED, DONE = "new", "failed", "done"


class Book:
    """A journal with the row of the call that writes to it."""

    def __init__(self, journal: Journal, run: dict):
        self.journal, self.run = journal, run
        same = {row.get("run") for row in journal.rows if row["kind"] == "run" and
                all(row.get(key) == run[key] for key in ("gpu", "torch", "suite"))}
        self.rows = [row for row in journal.rows if row.get("run") in same]     # of this machine
        self.peaks = peak_flops(run["gpu"]) if run["gpu"] else None
        self._add(run)

    def add(self, row: dict) -> None:
        """The row is on disk when this returns."""
        self._add({**row, "run": self.run["run"], "t": now()})

    def state(self, cell: Cell) -> str:
        """NEW, FAILED or DONE. A second try with half the micro-batch stands for the cell."""
        kinds = {row["kind"] for row in self.rows if row["kind"] in ("cell", "failed") and
                 (row.get("size"), row.get("label"), row.get("T"), row.get("planned_micro_batch")) == cell.key}
        return DONE if "cell" in kinds else FAILED if kinds else NEW

    def in_this_call(self, kind: str, **fields) -> dict | None:
        """The newest such row of this call."""
        return next((row for row in reversed(self.rows) if row.get("run") == self.run["run"] and row["kind"] == kind and
                     all(row.get(key) == value for key, value in fields.items())), None)

    def _add(self, row: dict) -> None:
        self.journal.add(row)
        self.rows.append(row)


def run_row(suite: str, device: str, command: str, commit: str | None, root: Path) -> dict:
    """What the rows of a call have in common; what this machine does not tell is None.

    `code` identifies the files that were measured where there is no git: SHA-256 over model.py, runtime/ and bench/."""
    env = environment(torch.device("cpu"), root)
    gpu = describe_gpu() if device == "cuda" else dict.fromkeys(("gpu", "driver", "power_limit_w", "memory_gib"))
    if device == "cuda":
        gpu["gpu"] = gpu["gpu"] or torch.cuda.get_device_name(0)
        gpu["memory_gib"] = gpu["memory_gib"] or round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2)
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    return {"kind": "run", "run": name, "t": now(), "suite": suite, "command": command,
            "commit": env["git_commit"] or commit, "dirty": env["git_dirty"] if env["git_commit"] else None,
            "code": _code(root), **gpu, "cpu": env["device"], "cores": os.cpu_count(),
            **{key: env[key] for key in ("python", "torch", "torchao", "triton", "cuda", "cudnn", "variables")}}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _code(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([root / "model.py", *root.glob("runtime/*.py"), *root.glob("bench/*.py")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
