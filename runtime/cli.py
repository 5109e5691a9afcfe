"""Read command lines into typed dataclasses, and tell each mistake in one sentence with the nearest name."""

import difflib
import inspect
import os
import re
import types
from dataclasses import MISSING, fields, is_dataclass
from itertools import accumulate
from typing import Literal, Union, get_args, get_origin, get_type_hints

# Python's own int() and float() also take 1_0, Arabic digits and blanks around them: a typing error must not pass for a number.
WHOLE = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf|nan)")
UNION = (Union, types.UnionType)      # Optional[int], int | None


class UserError(ValueError):
    """The user's mistake, told in one sentence: what, where, what was expected, what to do. Commands exit with code 2."""


class MachineError(Exception):
    """The machine, or the run itself, cannot go on; the message says what and how to help it. Commands exit with code 1."""


# -------------------------------------------------------------------------------------------------------- command lines

def read_options(cls, arguments: list[str], keys: set[str] | None = None, defaults: dict | None = None):
    """An instance of the dataclass `cls` from `key=value`, `--key=value`, `--key value`, `--flag` and bare words.

    A flag is a field of type bool: `--serve` stands for serve=true. Bare words (also files with "=" in their names) fill the
    fields of cls.POSITIONAL in order; one of type tuple[str, ...] takes all that are left as they are, commas and all.
    keys: the fields that may be given, none = all. defaults: those that differ from the class's own. Raises UserError."""
    hints, texts, bare, rest = get_type_hints(cls), {}, [], iter(arguments)
    names = [f.name for f in fields(cls) if keys is None or f.name in keys]
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        is_named = argument.startswith("--") or (equals and key.isidentifier())
        if not is_named or (key not in names and os.path.exists(argument)):
            bare.append(argument)
            continue
        if key not in names:
            raise UserError(f"there is no key {name!r}{nearest(key, names)}")
        if not equals:
            value = "true" if hints[key] is bool else next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"--{name} needs a value: write {key}=VALUE")
        if not value:
            raise UserError(f"{key}= is empty: give it a value, or leave it out")
        if key in texts:
            raise UserError(f"{key} is given twice: {texts[key]!r} and {value!r}")
        texts[key] = value
    given = {key: parse(key, text, hints[key]) for key, text in texts.items()}
    for key in [key for key in cls.POSITIONAL if key not in given]:
        if bare and hints[key] == tuple[str, ...]:
            given[key], bare = tuple(bare), []
        elif bare:
            given[key] = parse(key, bare.pop(0), hints[key])
    if bare:
        raise UserError(f"{bare[0]!r} is one word too many: write key=value with one of {', '.join(names)}")
    if problems := [p for key, value in given.items() if (p := _type_problem(key, value, hints[key]))]:
        raise UserError("\n".join(problems))
    given = (defaults or {}) | given
    if missing := [f.name for f in fields(cls) if f.name not in given and f.default is MISSING]:
        meaning = _meanings(cls).get(missing[0], "")
        raise UserError(f"{missing[0]} is missing: give {missing[0]}=VALUE{', ' * bool(meaning)}{meaning}")
    return cls(**given)


def nearest(word: str, choices: list[str]) -> str:
    """How an error sentence goes on: the likely meaning of `word`, or else all the choices.

    Among section.key the key decides, then the section: an equal section alone must not bring optim.xyz near to optim.eps."""
    has_sections = any("." in choice for choice in choices)
    names = {choice: (choice.rpartition(".")[2] if has_sections else choice).lower() for choice in (*choices, word)}
    near = difflib.get_close_matches(names[word], [names[choice] for choice in choices], 1, 0.65 if has_sections else 0.5)
    near = difflib.get_close_matches(word, [choice for choice in choices if names[choice] in near], 1, cutoff=0)
    every = f"; there are: {', '.join(choices) or 'none'}" if len(choices) <= 20 else "; --help lists all"
    return f"; did you mean {near[0]!r}?" if near else every


def field_lines(prefix: str, cls) -> list[str]:
    """A line for each field of a dataclass: key, type, default, and the meaning that stands beside it as a comment."""
    meanings, hints = _meanings(cls), get_type_hints(cls)
    return [f"  {prefix + f.name:24} {type_name(hints[f.name]):28} {'required' if f.default is MISSING else show(f.default):9}  "
            f"{meanings.get(f.name, '')}" for f in fields(cls) if not is_dataclass(hints[f.name])]


def _meanings(cls) -> dict[str, str]:
    return {name: text for base in reversed(cls.__mro__[:-1])
            for name, text in re.findall(r"^ {4}(\w+): [^#\n]*#\s*(.+)$", inspect.getsource(base), re.M)}


# --------------------------------------------------------------------------------------------------------------- values

def parse(key: str, text: str, hint):
    """The value that `text` spells under the annotation `hint`. Raises UserError naming the form."""
    options = [t for t in (get_args(hint) if get_origin(hint) in UNION else (hint,)) if t is not type(None)]
    if get_origin(hint) in UNION and text.lower() == "none":
        return None
    if any(text in get_args(option) for option in options if get_origin(option) is Literal):     # a word beside a number
        return text
    wanted, hint = " or ".join(map(type_name, options)), options[0]
    try:
        if hint is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if hint is int:
            value = int(text) if WHOLE.fullmatch(text) else _number(text)
            if value != int(value):
                raise ValueError
            return int(value)
        if hint is float:
            return _number(text)
        if get_origin(hint) is Literal or hint is str:
            return text
        if get_origin(hint) is tuple:
            return tuple(parse(key, part, get_args(hint)[0]) for part in _parts(text, "()", "[]"))
        if get_origin(hint) is dict:    # fineweb_edu:0.8,python:0.1
            pairs = [part.rsplit(":", 1) for part in _parts(text, "{}")]
            if len({k.strip() for k, _ in pairs}) == len(pairs):
                return {k.strip(): _number(v.strip()) for k, v in pairs}
    except (ValueError, KeyError, OverflowError):
        pass
    form = ", written source:weight,source:weight" if get_origin(hint) is dict else ""
    raise UserError(f"{key}={text!r} is not {wanted}{form}")


def _number(text: str) -> float:
    if not NUMBER.fullmatch(text):
        raise ValueError
    return float(text)


def _parts(text: str, *brackets: str) -> list[str]:
    """What commas separate; brackets around the whole are dropped, those within a word (a pattern's) stay.

    Raises ValueError for a bracket without its partner."""
    text = text.strip()
    if any(text[:1] + text[-1:] == pair and _is_paired(text[1:-1], pair) for pair in brackets):
        text = text[1:-1]
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_paired(part, pair) for part in parts for pair in brackets):
        raise ValueError
    return [part for part in parts if part]


def _is_paired(text: str, pair: str) -> bool:
    depths = [*accumulate(((c == pair[0]) - (c == pair[1]) for c in text), initial=0)]
    return min(depths) == 0 == depths[-1]


def type_problems(prefix: str, value) -> list[str]:
    """One sentence for each field of the dataclass `value` whose content does not fit its annotation."""
    hints = get_type_hints(type(value))
    return [p for f in fields(value) if (p := _type_problem(prefix + f.name, getattr(value, f.name), hints[f.name]))]


def _type_problem(key: str, value, hint) -> str | None:
    if is_dataclass(hint) or fits(value, hint):
        return None
    choices = [str(c) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]
    wrong = next((v for v in value if v not in choices), "") if isinstance(value, tuple) else value
    return f"{key}={show(value)} is not {type_name(hint)}" + (nearest(str(wrong), choices) if len(choices) > 1 else "")


def fits(value, hint) -> bool:
    """Whether `value` is of the annotated type; a whole number passes as a float, a bool never as a number."""
    if get_origin(hint) in UNION:
        return any(fits(value, option) for option in get_args(hint))
    origin = get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, get_args(hint)[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, str) and fits(v, float) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool) and value == value     # not NaN
    return isinstance(value, hint)


def type_name(hint) -> str:
    """The annotation in words: "a whole number or none"."""
    if get_origin(hint) in UNION:
        return " or ".join("none" if t is type(None) else type_name(t) for t in get_args(hint))
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " * (len(get_args(hint)) > 1) + ", ".join(get_args(hint))
    if origin is tuple:
        inner = get_args(hint)[0]
        return f"a list of {type_name(inner).removeprefix('a ')}{'' if get_origin(inner) is Literal else 's'}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(
        hint, "a table of source:weight" if origin is dict else getattr(hint, "__name__", str(hint)))


def show(value) -> str:
    return "none" if value is None else repr(value) if isinstance(value, (str, dict, tuple)) else str(value)


def grid(lines: list[list[str]]) -> str:
    """Cells as a Markdown table whose columns are aligned, so that it reads in a terminal too; empty columns go."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:]) or len(lines) == 1]
    widths = [max(map(len, column)) for column in columns]
    rows = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in zip(*columns, strict=True)]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])
