"""The options of prepare_data.py: which there are, which command takes which, their bounds. --help tells what they mean."""

from dataclasses import dataclass
from typing import ClassVar

from prepare.job import HASH_STEPS
from runtime.cli import UserError


@dataclass(frozen=True, kw_only=True)
class Options:
    words: tuple[str, ...] = ()         # files, folders or sources, as the command takes them
    out: str = "data"
    tokenizer: str = "gpt2"
    val_share: float = 0.005
    tokens: float | None = None
    processes: int | None = None
    worker: str | None = None
    decontaminate: tuple[str, ...] = ()
    skip_bad: bool = False
    name: str | None = None
    column: str = "text"
    instruct: bool = False
    license: str | None = None
    revision: str | None = None
    files: str | None = None

    POSITIONAL: ClassVar = ("words",)

    def __post_init__(self):
        if not 1 / HASH_STEPS <= self.val_share <= 0.5:
            raise UserError(f"val_share={self.val_share} must be a number from {1 / HASH_STEPS} to 0.5")
        if self.instruct and self.column != "text":
            raise UserError(f"column={self.column} names one text a row, instruct=true reads prompt and response: leave one of "
                            f"them out")
        if self.tokens is not None and not 1 <= self.tokens < 2**53:
            raise UserError(f"tokens={self.tokens} must be a count, such as tokens=31e9")
        if self.processes is not None and not 1 <= self.processes <= 1024:
            raise UserError(f"processes={self.processes} must be a number from 1 to 1024")


COMMON = {"out", "tokenizer", "val_share", "processes"}
STREAMED = COMMON | {"tokens", "worker", "decontaminate", "skip_bad"}
KEYS = {"demo": COMMON, "installed": COMMON | {"tokens", "decontaminate"},
        "local": STREAMED | {"name", "column", "license", "instruct"}, "named": STREAMED | {"name"},
        "hf": STREAMED | {"name", "column", "license", "revision", "files"},
        "check-sources": set(), "show": set(), "verify": set(), "twins": set()}
DEFAULTS = {"demo": {"out": "data/demo", "tokenizer": "byte", "val_share": 0.04, "processes": 1}}   # small: a larger share
