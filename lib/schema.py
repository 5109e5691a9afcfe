"""What a JSON file holds, as Markdown tables made from dataclasses and the comments at their
fields."""

import inspect
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import get_origin, get_type_hints

from lib.help import field_meanings
from lib.values import union_members

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema_section(cls: type, title: str) -> str:
    """A heading, what the dataclass says of itself, and the table of its fields."""
    words = " ".join((inspect.getdoc(cls) or "").split())
    return f"## {title}\n\n{words}\n\n{schema_table(cls)}\n"


def schema_table(cls: type) -> str:
    """The fields of a dataclass with type and meaning, a row each, in their order."""
    meanings = field_meanings(cls)
    hints = get_type_hints(cls)
    lines = ["| key | type | meaning |", "|---|---|---|"]
    for f in fields(cls):  # type: ignore[arg-type]
        lines.append(f"| `{f.name}` | {json_type(hints[f.name])} | {meanings[f.name]} |")
    return "\n".join(lines)


def json_type(hint: object) -> str:
    """A type as JSON has it, such as "number or null"."""
    names = [_json_name(member) for member in union_members(hint)]
    return " or ".join(dict.fromkeys(names))


def _json_name(hint: object) -> str:
    if is_dataclass(hint) or get_origin(hint) is dict or hint is dict:
        return "object"
    if get_origin(hint) in (list, tuple):
        return "array"
    assert isinstance(hint, type)
    return JSON_TYPES[hint]
