"""What a JSON file holds, as Markdown tables made from dataclasses and the comments at their
fields."""

import inspect
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_origin, get_type_hints

import numpy as np

from lib.help import field_meanings
from lib.values import union_members

JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    NoneType: "null",
    Any: "any value",
}


def schema_section(cls: type, title: str) -> str:
    """A heading, what the dataclass says of itself, and the table of its fields."""
    words = " ".join((inspect.getdoc(cls) or "").split())
    return f"## {title}\n\n{words}\n\n{schema_table(cls)}\n"


def schema_table(cls: type, without: Collection[str] = ()) -> str:
    """The fields of a dataclass but for `without`, with type and meaning, a row each, in their
    order."""
    meanings = field_meanings(cls)
    hints = get_type_hints(cls)
    lines = ["| key | type | meaning |", "|---|---|---|"]
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in without:
            continue
        lines.append(f"| `{f.name}` | {json_type(hints[f.name])} | {meanings[f.name]} |")
    return "\n".join(lines)


def json_type(hint: Any) -> str:
    """A type as JSON has it, such as "number or null"."""
    members = union_members(hint)
    # an object that becomes its sentence in a file is named beside it
    if str in members:
        members = tuple(member for member in members if not is_dataclass(member))
    return " or ".join(dict.fromkeys(map(_json_name, members)))


def _json_name(hint: Any) -> str:
    if is_dataclass(hint) or get_origin(hint) is dict or hint is dict:
        return "object"
    if get_origin(hint) in (list, tuple) or hint is np.ndarray:
        return "array"
    if get_origin(hint) is Literal:
        return "string"
    return JSON_TYPES[hint]
