"""The frame of every command: words into a typed dataclass, help, exit codes, closed pipes."""

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from lib.errors import MachineError, UserError, memory_error
from lib.help import field_lines, field_meanings, help_page
from lib.text import nearest
from lib.values import FilePath, parse, read_value

T = TypeVar("T")

# Types of a positional field that takes all bare words that are left.
LISTS = (tuple[str, ...], tuple[FilePath, ...])


# --------------------------------------------------------------------------------- words to options


def read_options(
    cls: type[T],
    arguments: list[str],
    positional: tuple[str, ...] = (),
    keys: set[str] | None = None,
    defaults: dict[str, Any] | None = None,
) -> T:
    """An instance of the dataclass `cls` from `key=value`, `--key=value`, `--key value`, `--flag`
    and bare words.

    A flag is a field of type bool: `--serve` stands for serve=true. Bare words (also files with "="
    in their names) fill the fields named `positional` in order; one of type tuple[str, ...] takes
    all that are left, commas and all. keys: the fields that may be given, none = all. defaults:
    those that differ from the class's own. Raises UserError."""
    hints = get_type_hints(cls, include_extras=True)
    all_fields = fields(cls)  # type: ignore[arg-type]
    names = [f.name for f in all_fields if keys is None or f.name in keys]
    values, bare = _read_named(arguments, {name: hints[name] for name in names})
    values |= _read_bare(bare, [key for key in positional if key not in values], hints, names)
    values = (defaults or {}) | values
    for f in all_fields:
        if f.name not in values and f.default is MISSING:
            meaning = field_meanings(cls)[f.name]
            raise UserError(f"{f.name} is missing: give {f.name}=VALUE {meaning}".rstrip())
    return cls(**values)


def _read_named(arguments: list[str], hints: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of the keys that are named, and the bare words, in their order. hints: key -> its
    annotation."""
    names = list(hints)
    values: dict[str, Any] = {}
    bare: list[str] = []
    words = deque(arguments)
    while words:
        word = words.popleft()
        name, equals, text = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        is_named = word.startswith("--") or (equals and key.isidentifier())
        if not is_named or (key not in names and os.path.exists(word)):
            bare.append(word)
            continue
        if key not in names:
            raise UserError(f"there is no key {name!r}{nearest(name, names)}")
        if key in values:
            raise UserError(f"{key} is given twice")
        if not equals:
            text = _value_behind(words, hints[key] is bool)
        if not text:
            raise UserError(f"--{name} needs a value: write {key}=VALUE")
        values[key] = parse(key, text, hints[key])
    return values, bare


def _value_behind(words: deque[str], is_flag: bool) -> str:
    """The value of `--key`, which is taken from the words that follow; "" where there is none, or
    another --key follows. That of a flag may be left out."""
    if is_flag and (not words or words[0] not in ("true", "false")):
        return "true"
    if not words or words[0].startswith("--"):
        return ""
    return words.popleft()


def _read_bare(
    bare: list[str], positional: Iterable[str], hints: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """The values of the fields `positional`, from bare words in their order."""
    values: dict[str, Any] = {}
    words = deque(bare)
    for key in positional:
        if not words:
            break
        if hints[key] in LISTS:
            member = get_args(hints[key])[0]
            values[key] = tuple(read_value(word, member) for word in words)
            words.clear()
        else:
            values[key] = parse(key, words.popleft(), hints[key])
    if words:
        raise UserError(
            f"{words[0]!r} is one word too many: write key=value with one of {', '.join(names)}"
        )
    return values


# -------------------------------------------------------------------------------------------- frame


@dataclass(frozen=True)
class Failure:
    """How a command ends that could not do its work."""

    sentence: str
    exit_code: int  # 2 the user's mistake, 1 the machine's, 130 interrupted


# How the loader of shared libraries calls an empty file. torch.compile's cache for a CPU keeps one
# where a compilation was killed while the linker wrote (findings/inductor_keeps_empty_library.sh).
EMPTY_LIBRARY = re.compile(r"(\S+\.so): file too short")


def explain_known(error: BaseException) -> Failure | None:
    """What a command says of an error that is no bug of ours. None for all others, which keep their
    traceback, and for a closed pipe, on which run_command() ends quietly."""
    library = EMPTY_LIBRARY.search(str(error))
    if library is not None:
        sentence = f"{library[1]} is empty, as a compilation leaves it that is killed: remove it"
        return Failure(f"{sentence} and run the same command again", 1)
    if isinstance(error, UserError):
        return Failure(str(error), 2)
    if isinstance(error, MachineError):
        return Failure(str(error), 1)
    if isinstance(error, BrokenPipeError) or not isinstance(error, OSError):
        return None
    if error.filename is None:
        return Failure(f"{type(error).__name__}: {error}", 1)
    problem = error.strerror or error
    return Failure(f"{error.filename}: {problem}; correct it and run the same command again", 1)


def explain(error: BaseException) -> Failure | None:
    """As explain_known(), and for memory that is full, which is told in as many ways as there are
    allocators."""
    if isinstance(error, OSError | MemoryError | RuntimeError) and memory_error(error):
        first_line = str(error).partition("\n")[0]
        return Failure(
            f"the memory is full ({first_line:.200}): give a smaller"
            " micro_batch= or tokens=, dtype=bfloat16 (where it has them) or a device with"
            " more",
            1,
        )
    return explain_known(error)


@dataclass(frozen=True)
class Frame(Generic[T]):
    """What every command does around its work: help, options, a sentence and an exit code for each
    failure."""

    page: Callable[[], str]  # what --help prints
    read: Callable[[list[str]], T]  # the words of the command line -> its options
    needs_words: Callable[[], bool] = lambda: True  # whether no words at all ask for help
    explain: Callable[[BaseException], Failure | None] = explain
    prefix: str = ""  # what a sentence about a failure begins with
    is_shown: bool = True  # whether this process speaks, one of several

    def run(self, words: list[str], work: Callable[[T], object]) -> int:
        """The exit code of work(options), which returns what to print, or an exit code."""
        is_help = bool({"-h", "--help"} & set(words))
        if is_help or (not words and self.needs_words()):
            failure = print_output(self.page())
            if failure is not None:
                return self.tell(failure)
            return 0 if is_help else 2
        try:
            result = work(self.read(words))
        except BaseException as error:
            failure = self.explain(error)
            if failure is None:
                raise
            return self.tell(failure)
        if isinstance(result, int):
            return result
        if result is not None and self.is_shown:
            failure = print_output(str(result))
            if failure is not None:
                return self.tell(failure)
        return 0

    def tell(self, failure: Failure) -> int:
        """Print its sentence on stderr; its exit code."""
        if self.is_shown:
            print(f"{self.prefix}{failure.sentence}", file=sys.stderr, flush=True)
        return failure.exit_code


def command(doc: str, cls: type, *positional: str, is_shown: bool = True) -> Callable:
    """Decorator that makes work(options), which returns what to print or an exit code, a command's
    main(words) -> exit code: it prints help too, and ends with 2 and a sentence for the user's
    mistake, 1 for the machine's. cls: its options, a dataclass; positional: those that bare words
    fill. is_shown: whether this process speaks, one of several."""
    frame: Frame[Any] = Frame(
        page=lambda: help_page(doc, "\n".join(field_lines("", cls).values())),
        read=lambda words: read_options(cls, words, positional),
        needs_words=lambda: not _takes_no_words(cls, positional),
        is_shown=is_shown,
    )

    def decorate(work: Callable[[Any], object]) -> Callable[[list[str]], int]:
        return partial(_run, frame, work)

    return decorate


def _run(frame: Frame, work: Callable[[Any], object], words: list[str]) -> int:
    return frame.run(words, work)


def _takes_no_words(cls: type, positional: tuple[str, ...]) -> bool:
    """Whether a command without a word on its line has something to do."""
    try:
        read_options(cls, [], positional)
    except UserError:
        return False
    return True


# ------------------------------------------------------------------------------------------- output


def run_command(main: Callable[..., int], *more: object) -> int:
    """The exit code of main(words of the command line, *more); 1 without a traceback where the
    output is closed early, as by `| head`; 130 where interrupted."""
    try:
        code = main(sys.argv[1:], *more)
        failure = print_output(None)
    except BrokenPipeError:
        drop_output()
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    if failure is None:
        return code
    print(failure.sentence, file=sys.stderr)
    return failure.exit_code


def print_output(text: str | None) -> Failure | None:
    """Print `text`, where given, and all that was printed before it; what to say where the output
    cannot take it, as on a full disk. Raises BrokenPipeError where its reader has gone."""
    if sys.stdout is None:  # closed by whoever started this process
        return None
    try:
        if text is not None:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        return Failure(f"the output could not be written: {error.strerror or error}", 1)
    return None


def drop_output() -> None:
    """Let what is printed go nowhere from here on, where nobody reads it any more or it does not
    fit. Python would flush it at its end, fail, and exit with code 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
