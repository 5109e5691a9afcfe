"""Read command lines into typed dataclasses, tell each mistake in one sentence with the nearest
name, show progress."""

import ast
import difflib
import inspect
import io
import math
import os
import re
import sys
import textwrap
import time
import tokenize
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

# The annotation of an option that names a file or folder, or may name one (hf:~/model, gpt2): ~ in
# it is expanded.
FilePath = Annotated[str, "path"]
WORDS: dict = {
    type(None): {"none": None},
    bool: {"true": True, "1": True, "false": False, "0": False},
}
# program, arguments
EXAMPLE = re.compile(r"^ {4}((?:torchrun|python|sbatch)(?: -m| --?\w+=\S+)* \S+)(.*)\n?", re.M)
HELP_WIDTH, HELP_COLUMN = 100, 44  # widest line; meanings begin at this column at the latest
LIVE_S, LOG_S = 0.5, 60.0  # seconds between two lines of progress, live and in a log


class UserError(ValueError):
    """The user's mistake, told in one sentence: what, where, what was expected, what to do.
    Commands exit with code 2."""


class MachineError(Exception):
    """The machine, or the run itself, cannot go on; the message says what and how to help it.
    Commands exit with code 1."""


# ----------------------------------------------------------------------------------- command lines


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


def nearest(word: str, choices: list[str]) -> str:
    """How an error sentence goes on: the likely meaning of `word`, or else all the choices.

    Among section.key the key decides, then the section: an equal section alone must not bring
    optim.xyz near to optim.eps."""
    has_sections = any("." in choice for choice in choices)
    names = {
        choice: (choice.rpartition(".")[2] if has_sections else choice).lower()
        for choice in (*choices, word)
    }
    near = difflib.get_close_matches(
        names[word], [names[choice] for choice in choices], 1, 0.65 if has_sections else 0.5
    )
    near = difflib.get_close_matches(
        word, [choice for choice in choices if names[choice] in near], 1, cutoff=0
    )
    every = (
        f"; there are: {', '.join(choices) or 'none'}"
        if len(choices) <= 20
        else "; --help lists all"
    )
    return f"; did you mean {near[0]!r}?" if near else every


def help_page(doc: str, options: str = "") -> str:
    """What --help prints of a command's docstring; its examples, indented lines that begin with a
    program, last."""
    what, _, rest = EXAMPLE.sub("", doc.strip()).partition("\n\n")
    examples = list(EXAMPLE.finditer(doc))
    program, words = next(example.groups() for example in examples if "python" in example[0])
    bare = [word for word in words.split("  ")[0].split() if "=" not in word]
    parts = [
        " ".join(["usage:", program, *bare, "[key=value ...]"]),
        what,
        options and f"options:\n{options}",
        rest.strip("\n"),
        "examples:\n" + "".join(example[0] for example in examples).rstrip(),
    ]
    return "\n\n".join(filter(None, parts))


def field_lines(prefix: str, cls: type) -> dict[str, str]:
    """What --help prints of each field of a dataclass: key, type, default and meaning.

    The meaning is the comment behind the field, or the lines of comment above it. A Literal is
    spelled out."""
    meanings = field_meanings(cls)
    hints = get_type_hints(cls, include_extras=True)
    own_fields = [f for f in fields(cls) if not is_dataclass(f.type)]
    heads = {f.name: _field_head(prefix, f, hints[f.name]) for f in own_fields}
    short_heads = [len(head) for head in heads.values() if len(head) <= HELP_COLUMN]
    column = max(short_heads, default=0) + 2
    return {name: _help_line(head, meanings.get(name, ""), column) for name, head in heads.items()}


def _field_head(prefix: str, field: Field, hint: object) -> str:
    """Such as "  optim.lr: float" or "  fp8.head: bool = False"."""
    head = f"  {prefix}{field.name}: {' | '.join(_option_type(part) for part in _parts(hint))}"
    return head if field.default is MISSING else f"{head} = {field.default!r}"


def _option_type(hint: object) -> str:
    """A type as it is written on a command line."""
    if hint is type(None):
        return "none"
    if get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is Annotated:
        return "path"
    if get_origin(hint) is tuple:
        return f"{_option_type(get_args(hint)[0])},..."
    return inspect.formatannotation(hint)


def _help_line(head: str, meaning: str, column: int) -> str:
    """The head of a field and its meaning from `column` on; both are wrapped at HELP_WIDTH."""
    lines = textwrap.wrap(
        head.strip(),
        HELP_WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * 6,
        break_long_words=False,
    )
    comment = textwrap.wrap(meaning, HELP_WIDTH - column - 2, break_long_words=False)
    if comment and len(lines[-1]) < column - 1:
        lines[-1] = f"{lines[-1]:{column}}# {comment.pop(0)}"
    return "\n".join([*lines, *(" " * column + f"# {line}" for line in comment)])


def field_meanings(cls: type) -> dict[str, str]:
    """Field -> its meaning: the comment behind it in the source, or else that on the lines above
    it."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        meanings |= _comments_of_fields(base)
    return meanings


def _comments_of_fields(cls: type) -> dict[str, str]:
    """field_meanings() of one class without its bases."""
    source = textwrap.dedent(inspect.getsource(cls))
    behind: dict[int, str] = {}  # line -> comment behind code
    alone: dict[int, str] = {}  # line -> comment that has the line for itself
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = not token.line[: token.start[1]].strip()
            (alone if is_alone else behind)[token.start[0]] = token.string.removeprefix("#").strip()
    comments = {}
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while line in alone:
            above.insert(0, alone[line])
            line -= 1
        last_line = node.end_lineno or node.lineno
        comments[node.target.id] = behind.get(last_line, " ".join(above))
    return comments


# ------------------------------------------------------------------------------------------ values


def parse(key: str, text: str, hint):
    """The value that `text` spells under the annotation `hint`. Raises UserError naming the
    form."""
    # "none" is a word, too
    for part in sorted(_parts(hint), key=lambda part: part is not type(None)):
        try:
            value = _read(text, part)
        except UserError as error:
            raise UserError(f"{key}={error}") from error
        except (ValueError, KeyError):
            continue
        if _fits(value, part):
            return value
    raise UserError(_mismatch(key, text, hint))


def _parts(hint) -> tuple:
    """The members of a union, such as int and None; of another hint, itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _read(text: str, hint):
    """What `text` says under a hint that is no union. Raises ValueError or KeyError where it says
    nothing."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return expand_home(text)
    if hint in WORDS:
        return WORDS[hint][text.lower()]
    if hint is int and text.lstrip("+-").isdigit():
        return int(text)
    if hint in (int, float):
        number = float(text)
        # 1e6 is a whole number
        return int(number) if hint is int and number.is_integer() else number
    if origin not in (tuple, dict):
        return text
    if origin is tuple and text.lower() == "none":
        return ()
    if text[:1] + text[-1:] in ("()", "[]", "{}"):
        text = text[1:-1]
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if origin is tuple:
        return tuple(_read(part, inner[0]) for part in parts)
    pairs = [part.rsplit(":", 1) for part in parts]  # fineweb_edu:0.8,python:0.1
    weights = {source.strip(): float(weight) for source, weight in pairs}
    return weights if len(weights) == len(pairs) else text  # a source named twice


def expand_home(path: str) -> str:
    """`path` with the home folder in the place of a leading ~ or ~user. Raises UserError for a user
    that does not exist: a folder by the name "~user" is hardly ever meant."""
    prefix = "hf:" if path.startswith("hf:~") else ""
    expanded = os.path.expanduser(path.removeprefix(prefix))
    if expanded.startswith("~") and not os.path.lexists(expanded.partition("/")[0]):
        raise UserError(
            f"{path!r}: there is no user {expanded[1:].partition('/')[0]!r} whose home folder it"
            f" could mean; write ./{expanded} for a folder of that name"
        )
    return prefix + expanded


def expand_paths(value) -> None:
    """Expand ~ in the fields of the dataclass `value`, frozen or not, that name a file or folder.
    Raises UserError as above."""
    for name, hint in get_type_hints(type(value), include_extras=True).items():
        path = getattr(value, name)
        if FilePath in _parts(hint) and isinstance(path, str) and path[:1] == "~":
            object.__setattr__(value, name, expand_home(path))


def type_problems(prefix: str, value) -> list[str]:
    """One sentence for each field of the dataclass `value` whose content does not fit its
    annotation."""
    hints = get_type_hints(type(value))
    return [
        _mismatch(prefix + f.name, getattr(value, f.name), hints[f.name])
        for f in fields(value)
        if not _fits(getattr(value, f.name), hints[f.name])
    ]


def _mismatch(key: str, value, hint) -> str:
    choices = [
        str(c)
        for part in (hint, *get_args(hint))
        if get_origin(part) is Literal
        for c in get_args(part)
    ]
    form = ", written source:weight,..." * (get_origin(hint) is dict)
    words = value if isinstance(value, tuple) else str(value).split(",")
    wrong = next((str(word) for word in words if word not in choices), "")
    meant = nearest(wrong, choices) if len(choices) > 1 else ""
    form += " (write true or false)" * (bool in _parts(hint))
    return f"{key}={value!r} is not {' or '.join(map(_type_name, _parts(hint)))}{form}{meant}"


def _type_name(hint) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is Annotated:
        return "a path"
    return "none" if hint is type(None) else inspect.formatannotation(hint).replace("typing.", "")


def _fits(value, hint) -> bool:
    """Whether `value` is of the annotated type; a whole number passes as a float, a bool, inf and
    NaN never as a number."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, inner[0])
    if len(parts := _parts(hint)) > 1:
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, inner[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items()
        )
    if hint in (int, float):
        return (
            isinstance(value, (int, hint))
            and not isinstance(value, bool)
            and -math.inf < value < math.inf
        )
    return isinstance(value, hint)


def grid(lines: list[list[str]]) -> str:
    """Cells as a Markdown table whose columns are aligned, so that it reads in a terminal too;
    empty columns go."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:]) or len(lines) == 1]
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in zip(*columns, strict=True)
    ]
    return "\n".join(
        [rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]]
    )


@contextmanager
def progress_line(
    name: str, unit: str, state: Callable[[], tuple], is_shown: bool = True
) -> Iterator[Callable[[], None]]:
    """A function that tells, when a line is due, the progress of `name` in `unit`, such as
    "tokens", on stderr. Work that takes less than an interval shows nothing. state(): units so far,
    share of the work that is done, 0 to 1, and words to add."""
    is_live, began, (at_start, share_at_start, *_) = sys.stderr.isatty(), time.monotonic(), state()
    clear, interval = ("\r\x1b[2K", LIVE_S) if is_live else ("", LOG_S)
    due = began + interval if is_shown else math.inf

    def show() -> None:
        nonlocal due
        if (now := time.monotonic()) < due:
            return
        due = now + interval
        units, share, *words = state()
        # what was there at the start says nothing of the speed
        seconds, gained = now - began, share - share_at_start
        told = [f"{si(units)} {unit}", f"{si((units - at_start) / seconds)}/s", *words]
        told += [f"{duration(seconds * (1 - share) / gained)} left"] if gained > 0 else []
        print(
            f"{clear}{name}: {share:.0%}, {', '.join(told)}",
            end="" if is_live else "\n",
            file=sys.stderr,
            flush=True,
        )

    try:
        yield show
    finally:
        print(end=clear * is_shown, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """ "45 s", "3 min 20 s", "5 h 07 min"."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {s:02d} s"
        if minutes
        else f"{s} s"
    )


def si(value: float) -> str:
    """Three digits and k, M, B or T: "51.2k"."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:  # 999.7k is 1M in three digits
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


# What torch, cuBLAS, NCCL, C++ and the kernel (ENOMEM) say when memory is short; the classes of the
# errors tell less.
OUT_OF_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator|can't allocate memory|Cannot allocate"
    r" memory|std::bad_alloc|ALLOC_FAILED",
    re.I,
)


def memory_error(error: BaseException | None) -> BaseException | None:
    """The error that means too little memory on GPU or CPU, among `error` and those it was raised
    from; else None."""
    for _ in range(20):  # compiler and checkpoints wrap what they meet, causes may form a circle
        if (
            error is None
            or isinstance(error, MemoryError)
            or (isinstance(error, RuntimeError | OSError) and OUT_OF_MEMORY.search(str(error)))
        ):
            return error
        error = error.__cause__ or error.__context__
    return None
