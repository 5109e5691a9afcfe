"""A row as it lies in a file, its columns, nested by dots."""

from typing import Any, NamedTuple

from prepare.sources import MESSAGES, PAIR

BLANK = b" \t\n\r\f\v\xef\xbb\xbf"  # a line of these alone (also a byte order mark) is no row
REPLACEMENT = "\ufffd"
ENCODING_REMEDY = (
    "convert it, such as by `iconv -f WINDOWS-1251 -t UTF-8 FILE`, with the encoding that it has"
)
NAMES_MOST = 20  # columns that a message lists


class Record(NamedTuple):
    """A row as it lies in a file."""

    number: int  # from 1: the line, element or row
    values: dict[str, Any]  # by column; texts that are not UTF-8 as bytes
    label: str = ":"  # before the number, in messages
    problem: str = ""  # why the row has no values
    is_continued: bool = False  # as SourceRow has it
    # The values without the bytes that are not UTF-8, where a line of JSON has such bytes.
    undamaged: dict[str, Any] | None = None


def no_column(column: str, names: list[str]) -> tuple[str, str]:
    """What there is to say of a row or a file without a column, and the remedy. names: the
    columns that it has."""
    listed = ", ".join(names[:NAMES_MOST]) + (", ..." if len(names) > NAMES_MOST else "")
    remedy = "set column= to one of them"
    if column in (*PAIR, *MESSAGES):
        remedy = f"instruct=true needs {' and '.join(PAIR)}, or messages, in each row alike"
        if {"role", "content"} <= set(names):  # nanochat's: a line is a list of messages
            remedy += ': write a conversation as {"messages": [...]}'
    return f" has no column {column!r}, only {listed or '(none)'}", remedy


def look_up(values: dict, column: str) -> tuple[bool, Any]:
    """Whether a row has a column, nested by dots unless that is its own name, and the value:
    None below a null."""
    if column in values:
        return True, values[column]
    inner: Any = values
    for name in column.split("."):
        if inner is None:
            return True, None
        if not isinstance(inner, dict) or name not in inner:
            return False, None
        inner = inner[name]
    return True, inner


def column_names(values: dict, prefix: str = "") -> list[str]:
    """The columns of a row, those of objects within it by dots."""
    names = []
    for name, value in values.items():
        is_object = isinstance(value, dict) and value
        names += column_names(value, f"{prefix}{name}.") if is_object else [f"{prefix}{name}"]
    return names


def unescaped(text: str) -> str | bytes:
    """A text that was read with surrogateescape: the bytes that were read, where some of them
    are not UTF-8."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


def brief(error: Exception) -> str:
    """An error in a few words on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
