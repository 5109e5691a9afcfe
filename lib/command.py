"""The frame of every command: words into a typed dataclass, exit codes, closed pipes."""

import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import get_args, get_type_hints

from lib.errors import MachineError, UserError, memory_error
from lib.help import field_lines, field_meanings, help_page
from lib.text import nearest
from lib.values import FilePath, _read, parse


def read_options(
    cls,
    arguments: list[str],
    positional: tuple[str, ...] = (),
    keys: set[str] | None = None,
    defaults: dict | None = None,
):
    """An instance of the dataclass `cls` from `key=value`, `--key=value`, `--key value`, `--flag`
    and bare words.

    A flag is a field of type bool: `--serve` stands for serve=true. Bare words (also files with "="
    in their names) fill the fields named `positional` in order; one of type tuple[str, ...] takes
    all that are left, commas and all. keys: the fields that may be given, none = all. defaults:
    those that differ from the class's own. Raises UserError."""
    hints, given, bare, rest = get_type_hints(cls, include_extras=True), {}, [], deque(arguments)
    names = [f.name for f in fields(cls) if keys is None or f.name in keys]
    while rest:
        argument = rest.popleft()
        name, equals, value = argument.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        is_named = argument.startswith("--") or (equals and key.isidentifier())
        if not is_named or (key not in names and os.path.exists(argument)):
            bare.append(argument)
            continue
        if key not in names:
            raise UserError(f"there is no key {name!r}{nearest(name, names)}")
        if key in given:
            raise UserError(f"{key} is given twice")
        if not equals and hints[key] is bool:
            value = rest.popleft() if rest and rest[0] in ("true", "false") else "true"
        elif not equals:
            value = rest.popleft() if rest else ""
        if not value or (not equals and value.startswith("--")):
            raise UserError(f"--{name} needs a value: write {key}=VALUE")
        given[key] = parse(key, value, hints[key])
    for key in [key for key in positional if key not in given]:
        if bare and hints[key] in (tuple[str, ...], tuple[FilePath, ...]):
            read_word = get_args(hints[key])[0]
            given[key], bare = tuple(_read(word, read_word) for word in bare), []
        elif bare:
            given[key] = parse(key, bare.pop(0), hints[key])
    if bare:
        raise UserError(
            f"{bare[0]!r} is one word too many: write key=value with one of {', '.join(names)}"
        )
    given = (defaults or {}) | given
    if missing := [f.name for f in fields(cls) if f.name not in given and f.default is MISSING]:
        raise UserError(
            f"{missing[0]} is missing: give {missing[0]}=VALUE {field_meanings(cls)[missing[0]]}".rstrip()
        )
    return cls(**given)


def command(doc: str, cls, *positional: str, is_shown: bool = True) -> Callable:
    """Decorator that makes work(options), which returns what to print or an exit code, a command's
    main(words) -> exit code: it prints help too, and ends with 2 and a sentence for the user's
    mistake, 1 for the machine's. cls: its options, a dataclass; positional: those that bare words
    fill. is_shown: whether this process speaks, one of several."""
    return lambda work: partial(_main, doc, cls, positional, work, is_shown)


def _main(
    doc: str, cls, positional: tuple[str, ...], work: Callable, is_shown: bool, arguments: list[str]
) -> int:
    is_help = {"-h", "--help"} & set(arguments)
    if is_help or (not arguments and not _takes_no_words(cls, positional)):
        print(help_page(doc, "\n".join(field_lines("", cls).values())))
        return 0 if is_help else 2
    try:
        said, code = work(read_options(cls, arguments, positional)), 0
    except (UserError, MachineError) as error:
        said, code = str(error), 2 if isinstance(error, UserError) else 1
    except (OSError, MemoryError, RuntimeError) as error:
        said, code = f"{type(error).__name__}: {error}", 1
        if memory_error(error):  # told in as many ways as there are allocators
            said = (
                f"the memory is full ({str(error).partition(chr(10))[0]:.200}): give a smaller"
                " micro_batch= or tokens=, dtype=bfloat16 (where it has them) or a device with"
                " more"
            )
        elif isinstance(error, RuntimeError | BrokenPipeError):
            # run_command() ends quietly on the second
            raise
    if isinstance(said, int):
        return said
    if said is not None and is_shown:
        print(said, file=sys.stderr if code else sys.stdout)
    return code


def _takes_no_words(cls, positional: tuple[str, ...]) -> bool:
    """Whether a command without a word on its line has something to do."""
    try:
        read_options(cls, [], positional)
    except UserError:
        return False
    return True


def run_command(main, *more) -> int:
    """The exit code of main(words of the command line, *more); 1 without a traceback where the
    output is closed early, as by `| head`; 130 where interrupted."""
    try:
        code = main(sys.argv[1:], *more)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output()
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def drop_output() -> None:
    """Let what is printed go nowhere from here on, where nobody reads it any more. Python would
    flush it at its end, fail, and exit with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
