"""Read and check one value of a command line or config by its annotation."""

import inspect
import math
import os
import types
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lib.errors import UserError
from lib.text import nearest

# The annotation of an option that names a file or folder, or may name one (hf:~/model, gpt2): ~ in
# it is expanded.
FilePath = Annotated[str, "path"]


WORDS: dict = {
    type(None): {"none": None},
    bool: {"true": True, "1": True, "false": False, "0": False},
}


def parse(key: str, text: str, hint: Any) -> Any:
    """The value that `text` spells under the annotation `hint`. Raises UserError naming the
    form."""
    # "none" is a word, too
    for part in sorted(union_members(hint), key=lambda part: part is not type(None)):
        try:
            value = read_value(text, part)
        except UserError as error:
            raise UserError(f"{key}={error}") from error
        except (ValueError, KeyError):
            continue
        if _fits(value, part):
            return value
    raise UserError(_mismatch(key, text, hint))


def union_members(hint: Any) -> tuple:
    """The members of a union, such as int and None; of another hint, itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def read_value(text: str, hint: Any) -> Any:
    """What `text` says under a hint that is no union. Raises ValueError or KeyError where it says
    nothing."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return expand_home(text)
    if hint in WORDS:
        return WORDS[hint][text.lower()]
    if hint in (int, float):
        return _read_number(text, hint)
    if origin is tuple:
        if text.lower() == "none":
            return ()
        return tuple(read_value(part, inner[0]) for part in _parts(text))
    if origin is dict:
        return _read_weights(text)
    return text


def _read_number(text: str, hint: type) -> int | float:
    if hint is int and text.lstrip("+-").isdigit():
        return int(text)
    number = float(text)
    is_whole = hint is int and number.is_integer()  # such as 1e6
    return int(number) if is_whole else number


def _parts(text: str) -> list[str]:
    """What commas separate, without the brackets around all of it."""
    if text[:1] + text[-1:] in ("()", "[]", "{}"):
        text = text[1:-1]
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_weights(text: str) -> dict[str, float] | str:
    """Such as fineweb_edu:0.8,python:0.1; `text` itself where a source is named twice."""
    pairs = [part.rsplit(":", 1) for part in _parts(text)]
    weights = {source.strip(): float(weight) for source, weight in pairs}
    return weights if len(weights) == len(pairs) else text


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


def expand_paths(value: Any) -> None:
    """Expand ~ in the fields of the dataclass `value`, frozen or not, that name a file or folder.
    Raises UserError as above."""
    for name, hint in _type_hints(type(value), include_extras=True).items():
        path = getattr(value, name)
        if FilePath in union_members(hint) and isinstance(path, str) and path[:1] == "~":
            object.__setattr__(value, name, expand_home(path))


def _type_hints(cls: Any, include_extras: bool = False) -> dict[str, Any]:
    """typing.get_type_hints, which compiles each annotation anew: a third of the time that the
    configs of a study's grid take."""
    if (cls, include_extras) not in _HINTS:
        _HINTS[cls, include_extras] = get_type_hints(cls, include_extras=include_extras)
    return _HINTS[cls, include_extras]


_HINTS: dict[tuple[Any, bool], dict[str, Any]] = {}


def type_problems(prefix: str, value: Any) -> list[str]:
    """One sentence for each field of the dataclass `value` whose content does not fit its
    annotation."""
    hints = _type_hints(type(value))
    return [
        _mismatch(prefix + f.name, getattr(value, f.name), hints[f.name])
        for f in fields(value)
        if not _fits(getattr(value, f.name), hints[f.name])
    ]


def _mismatch(key: str, value: Any, hint: Any) -> str:
    members = union_members(hint)
    form = ""
    if get_origin(hint) is dict:
        form = ", written source:weight,..."
    if bool in members:
        form = " (write true or false)"
    names = " or ".join(_type_name(member) for member in members)
    return f"{key}={value!r} is not {names}{form}{_nearest_choice(value, hint)}"


def _nearest_choice(value: Any, hint: Any) -> str:
    """How the sentence goes on for a word that is none of the choices of a Literal in `hint`; ""
    where there is no choice."""
    choices: list[str] = []
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            choices += map(str, get_args(part))
    if len(choices) < 2:
        return ""
    words = value if isinstance(value, tuple) else str(value).split(",")
    wrong_words = [str(word) for word in words if word not in choices]
    return nearest(wrong_words[0] if wrong_words else "", choices)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is Annotated:
        return "a path"
    return "none" if hint is type(None) else inspect.formatannotation(hint).replace("typing.", "")


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value` is of the annotated type; a whole number passes as a float, a bool, inf and
    NaN never as a number."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, inner[0])
    members = union_members(hint)
    if len(members) > 1:
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, inner[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and _fit_all(value.items(), inner)
    if hint in (int, float):
        return _is_number(value, hint)
    return isinstance(value, hint)


def _fit_all(items: Iterable[tuple[Any, Any]], hints: tuple[Any, ...]) -> bool:
    return all(_fits(key, hints[0]) and _fits(value, hints[1]) for key, value in items)


def _is_number(value: Any, hint: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, hint)):
        return False
    return math.isfinite(value)
