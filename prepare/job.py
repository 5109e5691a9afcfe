"""The options that all sources of a command share."""

import os
from dataclasses import dataclass
from typing import Literal

from lib.values import FilePath


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
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        return self.processes or (cores if self.on == "local" else 100)
