"""Parquet, a few rows in memory at a time."""

import io
import json
from collections.abc import Iterator
from typing import Any

from lib.errors import UserError
from prepare.records import Record, brief, no_column
from prepare.sources import MESSAGES, MESSAGES_MORE, PAIR, BadFile, Reading

ROWS = 64  # of parquet in memory at once: documents of a megabyte must not fill the memory


def parquet_rows(
    file: io.BufferedIOBase,
    path: str,
    columns: tuple[str, ...],
    keep_columns: tuple[str, ...],
    reading: Reading,
) -> Iterator[Record]:
    """The rows of the file called `path`. Raises UserError or, where odd rows are skipped, BadFile:
    a column is missing or of a type that is no text."""
    import pyarrow.parquet

    # By themselves pyarrow and `datasets` read a row group, which may be the whole file, into
    # memory at once.
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    _check_schema(table.schema_arrow, path, columns, reading)
    needed = _needed_columns(table.schema_arrow, columns, keep_columns)
    number = 0
    for batch in table.iter_batches(ROWS, columns=needed):
        arrays = [_values(_array_of(batch, name), name, path) for name in needed]
        for row in zip(*arrays, strict=True):
            number += 1
            yield _record(number, dict(zip(needed, row, strict=True)), columns)


def _check_schema(schema: Any, path: str, columns: tuple[str, ...], reading: Reading) -> None:
    problem = _schema_problem(schema, columns)
    if problem is None:
        return
    if reading.skips_odd_rows:
        raise BadFile(path + problem[0])
    raise UserError(f"{path}{': '.join(problem)}, or add skip_bad=true to leave out such files")


def _needed_columns(
    schema: Any, columns: tuple[str, ...], keep_columns: tuple[str, ...]
) -> list[str]:
    """The columns to read. What lies within a value of type JSON is looked up in each row, once
    the value is decoded: then it is the value's column."""
    template_columns = MESSAGES_MORE if columns == MESSAGES else ()
    needed = []
    for name in [*columns, *keep_columns, *template_columns]:
        if _type_of(schema, name) is not None:
            needed.append(name.partition(".")[0] if _is_within_json(schema, name) else name)
    return list(dict.fromkeys(needed))


def _record(number: int, values: dict[str, Any], columns: tuple[str, ...]) -> Record:
    for name, value in values.items():
        if isinstance(value, BrokenJson):
            problem = f": column {name!r} is of type JSON, but what it holds is not valid JSON"
            return Record(number, {}, ", row ", problem)
    if columns == MESSAGES:
        values = _without_nulls(values)
    return Record(number, values, label=", row ")


def _without_nulls(value: Any) -> Any:
    """The value without keys of objects that are null: parquet gives each object the keys of
    all."""
    if isinstance(value, list):
        return [_without_nulls(element) for element in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}


def _schema_problem(schema: Any, columns: tuple[str, ...]) -> tuple[str, str] | None:
    """What keeps a file of parquet from being used, and the remedy."""
    for column in columns:
        kind = _type_of(schema, column)
        if kind is None:
            return no_column(column, _schema_names(schema))
        if columns == MESSAGES:
            continue  # the chat template judges them
        if not _holds_text(kind, is_list_allowed=column not in PAIR):
            return (
                f": column {column!r} holds {_type_name(kind)}, not text",
                "set column= to another one",
            )
    return None


def _type_of(schema: Any, column: str):
    """The type of a column, nested by dots unless that is its own name; None where there is
    none."""
    import pyarrow

    if column in schema.names:
        return schema.field(column).type
    first, *inner = column.split(".")
    kind = schema.field(first).type if first in schema.names else None
    for name in inner:
        if isinstance(kind, pyarrow.JsonType):
            return kind  # each value tells what it holds
        if kind is None or not pyarrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _is_within_json(schema: Any, column: str) -> bool:
    """Whether a column that _type_of() knows lies in values of type JSON."""
    import pyarrow

    if column in schema.names:
        return False
    first, *inner = column.split(".")
    kind = schema.field(first).type
    for name in inner:
        if isinstance(kind, pyarrow.JsonType):
            return True
        kind = kind.field(name).type
    return False


def _array_of(batch: Any, column: str):
    """The values of a column that _type_of() knows."""
    import pyarrow.compute

    if column in batch.schema.names:
        return batch.column(column)
    first, *inner = column.split(".")
    return pyarrow.compute.struct_field(batch.column(first), inner)  # null where an outer one is


def _schema_names(fields: Any, prefix: str = "") -> list[str]:
    """The columns of a schema or of a struct, those within structs by dots."""
    import pyarrow

    names: list[str] = []
    for field_ in fields:
        name = prefix + field_.name
        is_struct = pyarrow.types.is_struct(field_.type)
        names += _schema_names(field_.type, f"{name}.") if is_struct else [name]
    return names


def is_list_type(kind: Any) -> bool:
    """Whether values of an Arrow type are lists, in any of its layouts."""
    from pyarrow import types

    layouts = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    return any(is_layout(kind) for is_layout in layouts)


def _holds_text(kind: Any, is_list_allowed: bool) -> bool:
    """Whether values of an Arrow type are texts, or nulls; of type JSON the values decide."""
    from pyarrow import JsonType, types

    if types.is_dictionary(kind):
        return _holds_text(kind.value_type, is_list_allowed)
    if is_list_type(kind):
        return is_list_allowed and _holds_text(kind.value_type, is_list_allowed=False)
    texts = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_null,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
        types.is_fixed_size_binary,
    )
    return any(is_text(kind) for is_text in texts) or isinstance(kind, JsonType)


def _type_name(kind: Any) -> str:
    """An Arrow type as messages name it: numbers by Python's names, as those of other formats."""
    from pyarrow import types

    if types.is_integer(kind):
        return "int"
    if types.is_floating(kind):
        return "float"
    return str(kind)


def _values(array: Any, column: str, path: str) -> list:
    """Of a column of parquet: texts that are not UTF-8, and binary ones, as bytes; what JSON
    spells decoded. Raises BadFile."""
    import pyarrow

    if isinstance(array.type, pyarrow.JsonType):
        texts = _values(array.storage, column, path)
        return [_decoded_json(text, array.type) for text in texts]
    try:
        values = array.to_pylist()
        if _holds_json(array.type):
            return [_decoded_json(value, array.type) for value in values]
        return values
    except UnicodeDecodeError:
        return array.cast(_as_binary(array.type)).to_pylist()
    except (
        ArithmeticError,
        LookupError,
        ValueError,
    ) as error:  # dates beyond Python's years, time zones it does not know
        raise BadFile(
            f"{path}: column {column!r} holds {array.type} that cannot be read ({brief(error)})"
        ) from error


def _as_binary(kind: Any):
    """The type of the same values as bytes, of an Arrow type of texts or of lists of them."""
    import pyarrow

    if _holds_text(kind, is_list_allowed=False):
        return pyarrow.large_binary()
    return pyarrow.list_(pyarrow.large_binary())


class BrokenJson:
    """In place of a value that is not the JSON which the type of its column promises."""


def _holds_json(kind: Any) -> bool:
    """Whether an Arrow type has the type JSON within it."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return True
    if isinstance(kind, pyarrow.DataType) and kind.num_fields:
        return any(_holds_json(kind.field(number).type) for number in range(kind.num_fields))
    return False


def _decoded_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, that which has the type JSON decoded; BrokenJson where it cannot
    be."""
    try:
        return _with_json(value, kind)
    except (ValueError, RecursionError):
        return BrokenJson()


def _with_json(value: Any, kind: Any) -> Any:
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if isinstance(value, dict) and pyarrow.types.is_struct(kind):
        return {key: _with_json(inner, kind.field(key).type) for key, inner in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_with_json(element, kind.value_type) for element in value]
    return value
