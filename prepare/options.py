"""Read the key=value options of prepare_data.py."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from prepare.job import HASH_STEPS
from runtime.cli import UserError, nearest, parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """What key=value may set; which command takes which key is in KEYS."""
    out: str = "data"
    tokenizer: str = "gpt2"
    val_share: float = 0.005
    tokens: float | None = None
    processes: int | None = None
    worker: str | None = None
    tokenizer_backend: str = "tiktoken"
    decontaminate: tuple[str, ...] = ()
    skip_bad: bool = False
    name: str | None = None
    column: str = "text"
    instruct: bool = False
    license: str | None = None
    revision: str | None = None
    files: str | None = None


COMMON = {"out", "tokenizer", "val_share", "processes"}
STREAMED = COMMON | {"tokens", "worker", "tokenizer_backend", "decontaminate", "skip_bad"}
KEYS = {"demo": COMMON, "installed": COMMON | {"tokens", "tokenizer_backend", "decontaminate"},
        "local": STREAMED | {"name", "column", "license", "instruct"}, "named": STREAMED | {"name"},
        "hf": STREAMED | {"name", "column", "license", "revision", "files"},
        "check-sources": set(), "show": set(), "verify": set(), "twins": set()}
DEFAULTS = {"demo": Options(out="data/demo", tokenizer="byte", val_share=0.04, processes=1)}   # small: a larger share


def read_options(kind: str, arguments: list[str]) -> tuple[Options, list[str]]:
    """Options and plain words. Raises UserError for a key that does not exist, or a value that cannot be."""
    hints, keys = get_type_hints(Options), KEYS[kind]
    values, words = {}, []
    for argument in arguments:
        key, equals, value = argument.removeprefix("--").partition("=")
        if equals and key in keys:
            if not value:
                raise UserError(f"{key}= is empty: give it a value, or leave it out")
            try:
                values[key] = parse(key, value, hints[key])
            except ValueError as error:
                raise UserError(str(error)) from error
        elif argument.startswith("--") or (equals and not Path(argument).exists()):
            known = nearest(key, [f"{name}=..." for name in sorted(keys)]) if keys else f"; {kind} takes names alone"
            raise UserError(f"there is no option {argument!r}{known}")
        else:
            words.append(argument)
    options = replace(DEFAULTS.get(kind, Options()), **values)
    if not 1 / HASH_STEPS <= options.val_share <= 0.5:
        raise UserError(f"val_share={options.val_share} must be a number from {1 / HASH_STEPS} to 0.5")
    if options.instruct and "column" in values:
        raise UserError(f"column={options.column} names one text a row, instruct=true reads prompt and response: leave one of "
                          f"them out")
    if options.tokens is not None and not 1 <= options.tokens < 2**53:
        raise UserError(f"tokens={options.tokens} must be a count, such as tokens=31e9")
    if options.processes is not None and not 1 <= options.processes <= 1024:
        raise UserError(f"processes={options.processes} must be a number from 1 to 1024")
    return options, words
