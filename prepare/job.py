"""The options that all sources of a command share."""

import os
from dataclasses import dataclass
from typing import Literal

from lib.values import FilePath

HASH_STEPS = 10_000  # the share of validation documents is kept in steps of 1 / this


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options that all sources of a command share; prepare_data.py says what they mean."""

    out: FilePath = "data"
    tokenizer: FilePath = "gpt2"
    val_share: float = 0.005
    processes: int | None = None
    on: Literal["local", "slurm", "ray"] = "local"
    partition: str | None = None
    time: str = "20:00:00"
    dry_run: bool = False
    decontaminate: tuple[FilePath, ...] = ()
    skip_bad: bool = False
    control_tokens: Literal["ids", "text"] = "ids"  # what plain text becomes where it spells one

    @property
    def workers(self) -> int:
        """Tasks at the same time."""
        if self.processes:
            return self.processes
        if self.on != "local":
            return 100
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @property
    def val_per_10k(self) -> int:
        return round(self.val_share * HASH_STEPS)
