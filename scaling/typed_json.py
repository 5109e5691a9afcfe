"""Read JSON into the dataclass that describes it."""

import types
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from lib.errors import UserError
from scaling.records import read_json

Typed = TypeVar("Typed")


def from_json(cls: type[Typed], content: dict[str, Any]) -> Typed:
    """The dataclass `cls` of a JSON object; keys with a default may be absent. Raises TypeError or
    KeyError where the object is another."""
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    strange = sorted(content.keys() - set(names))
    if strange:
        raise TypeError(f"{cls.__name__} has no {strange[0]!r}")
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name in content:
            values[field.name] = _typed(hints[field.name], content[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(field.name)
    return cls(**values)


def read_typed(
    cls: type[Typed], path: Path, schema_version: int, command: str, **defaults: Any
) -> Typed:
    """The dataclass `cls` of a file that a command of scaling/ left; `defaults`: of keys that files
    of older code lack, which had format_version in place of schema_version. Raises UserError naming
    the file where it is damaged or of another version."""
    content = read_json(path)
    version = content.get("schema_version", content.get("format_version"))
    if version != schema_version:
        raise UserError(
            f"{path} has schema_version {version}, and this code reads {schema_version}: make it"
            f" again by scaling/{command}.py"
        )
    content.pop("format_version", None)
    try:
        return from_json(cls, {**defaults, **content, "schema_version": version})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged or of another version ({type(error).__name__}: {error}): make it"
            f" again by scaling/{command}.py"
        ) from None


def _typed(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _typed(_member_for(inner, value), value)
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise TypeError(f"{hint.__name__} is no {type(value).__name__}")
        return from_json(hint, value)
    if origin is dict:
        return {key: _typed(inner[1], item) for key, item in value.items()}
    if origin in (list, tuple):
        return origin(_typed(inner[0], item) for item in value)
    return np.array(value) if hint is np.ndarray else value


def _member_for(members: Sequence[Any], value: Any) -> Any:
    """The member of a union that a JSON value belongs to: a dataclass for an object alone."""
    for member in members:
        is_object = is_dataclass(member) or get_origin(member) is dict
        if member is not type(None) and is_object == isinstance(value, dict):
            return member
    raise TypeError(f"no form for a {type(value).__name__}")
