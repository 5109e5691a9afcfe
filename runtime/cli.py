"""Check and parse values by their type annotations, and say what was expected in words.
"""

import difflib
import inspect
import math
import re
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Literal, Union, get_args, get_origin, get_type_hints

# Python's own reading also takes 1_0, Arabic digits and blanks around them: a slip of the finger must not pass for a number.
WHOLE = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf|nan)")


class UserError(ValueError):
    """The user's mistake, told in one sentence: what, where, what was expected, what to do. Commands exit with code 2."""


class MachineError(Exception):
    """The machine, or the run itself, cannot go on; the message says what and how to help it. Commands exit with code 1."""


def parse(key: str, text: str, hint):
    """The value that `text` spells under the annotation `hint`. Raises ValueError with a sentence naming the form."""
    options = [t for t in (get_args(hint) if _is_union(hint) else (hint,)) if t is not type(None)]
    if _is_union(hint) and text.lower() == "none":
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
    raise ValueError(f"{key}={text!r} is not {wanted}{form}")


def _number(text: str) -> float:
    if not NUMBER.fullmatch(text):
        raise ValueError
    return float(text)


def _parts(text: str, *brackets: str) -> list[str]:
    """What commas separate, brackets around the whole dropped, those within a word (a pattern's) left.

    Raises ValueError for a bracket without its partner."""
    text = text.strip()
    for opening, closing in brackets:
        inner = text[1:-1]
        if text[:1] == opening and text[-1:] == closing and _is_paired(inner, opening, closing):
            text = inner
            break
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_paired(part, opening, closing) for part in parts for opening, closing in brackets):
        raise ValueError
    return [part for part in parts if part]


def _is_paired(text: str, opening: str, closing: str) -> bool:
    open_ones = 0
    for character in text:
        open_ones += (character == opening) - (character == closing)
        if open_ones < 0:
            return False
    return open_ones == 0


def fits(value, hint) -> bool:
    """Whether `value` is of the annotated type; a whole number passes as a float, a bool never as a number."""
    if _is_union(hint):
        return any(fits(value, option) for option in get_args(hint))
    origin = get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, get_args(hint)[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, str) and fits(v, float) for k, v in value.items())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def type_problems(prefix: str, value) -> list[str]:
    """One sentence for each field of the dataclass `value` whose content does not fit its annotation."""
    out, hints = [], get_type_hints(type(value))
    for f in fields(value):
        hint, got = hints[f.name], getattr(value, f.name)
        if is_dataclass(hint) or fits(got, hint):
            continue
        choices = [str(c) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]
        wrong = next((v for v in got if v not in choices), "") if isinstance(got, tuple) else got
        key = f"{prefix}.{f.name}" if prefix else f.name
        out.append(f"{key}={show(got)} is not {type_name(hint)}" + (nearest(str(wrong), choices) if len(choices) > 1 else ""))
    return out


def field_lines(prefix: str, cls) -> list[str]:
    """A line for each field of a dataclass: key, type, default, and the meaning that stands beside it as a comment."""
    meanings = dict(re.findall(r"^ {4}(\w+): [^#\n]*#\s*(.+)$", inspect.getsource(cls), re.M))
    lines = []
    for f in fields(cls):
        hint = get_type_hints(cls)[f.name]
        if is_dataclass(hint):
            continue
        key = f"{prefix}.{f.name}" if prefix else f.name
        default = "required" if f.default is MISSING else show(f.default)
        lines.append(f"  {key:24} {type_name(hint):28} {default:9}  {meanings[f.name]}")
    return lines


def type_name(hint) -> str:
    """The annotation in words: "a whole number or none"."""
    if _is_union(hint):
        return " or ".join("none" if t is type(None) else type_name(t) for t in get_args(hint))
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " * (len(get_args(hint)) > 1) + ", ".join(get_args(hint))
    if origin is tuple:
        inner = get_args(hint)[0]
        return f"a list of {type_name(inner).removeprefix('a ')}{'' if get_origin(inner) is Literal else 's'}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(
        hint, "a table of source:weight" if origin is dict else getattr(hint, "__name__", str(hint)))


def nearest(word: str, choices: list[str]) -> str:
    """How an error sentence goes on: the likely meaning of `word`, or else all the choices."""
    near = [c for c in choices if c.rpartition(".")[2] == word.rpartition(".")[2]]      # right name, wrong section
    near = near or difflib.get_close_matches(word, choices, 1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(choices)}"


def keyword_sentence(error: TypeError, classes) -> str:
    """A dataclass's own complaint about its keywords, in our words, to follow the name of the file it was met in."""
    unknown = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if unknown and (cls := {c.__name__: c for c in classes}.get(unknown[1])):
        return f": {unknown[1]} has no field {unknown[2]!r}{nearest(unknown[2], [f.name for f in fields(cls)])}"
    missing = re.match(r"(\w+)\.__init__\(\) missing \d+ required keyword-only arguments?: (.+)", str(error))
    if missing:
        return f": {missing[1]} needs {missing[2]}: give a value"
    return f" could not be run: TypeError: {error}"


def show(value) -> str:
    return "none" if value is None else repr(value) if isinstance(value, (str, dict, tuple)) else str(value)


def _is_union(hint) -> bool:
    return get_origin(hint) in (Union, types.UnionType)
