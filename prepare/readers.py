"""Read the rows of a file, whatever its format: the texts of the columns wanted."""

import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from prepare.formats import format_of, is_text_file
from prepare.json_reader import json_array, json_lines
from prepare.packed import unpacked
from prepare.parquet_reader import parquet_rows
from prepare.records import BLANK, REPLACEMENT, Record, brief, column_names, look_up, no_column
from prepare.sources import MESSAGES, MESSAGES_MORE, PAIR, BadFile, Reading, SourceRow
from prepare.text_reader import text_stretches

# How a file that is one array begins. A line of .jsonl may be a list by mistake, of objects hardly.
ARRAY = {".json": re.compile(rb"\["), ".jsonl": re.compile(rb"\[\s*\{")}
HEAD_LOOKED_AT = 4096  # bytes at the begin of a file whose NULs tell UTF-16 and -32


def read_file(
    opened: Callable,
    path: str,
    columns: tuple[str, ...],
    keep: dict,
    is_strict: bool,
    reading: Reading,
) -> Iterator[SourceRow]:
    """InputFile.read of the file `path`, whose name says its format: the texts of the columns of
    each row, a null as an empty one. keep: column, nested by dots -> values of the rows wanted.
    is_strict: each row must have the columns, not the first one alone."""
    is_first = True
    for record, share in read_records(opened, path, columns, tuple(keep), reading):
        is_wanted = all(value_of(record.values, name) in values for name, values in keep.items())
        if not record.problem and not is_wanted:
            is_first = False
            continue
        problem, remedy = _problem(record, columns, is_strict or is_first)
        place = f"{path}{record.label}{record.number}"
        if problem:
            reading.skip_or_refuse(place, problem, remedy)
            continue
        is_first = False
        reading.rows += 1
        if columns == MESSAGES:
            yield SourceRow((), share, conversation=_conversation(record, reading), place=place)
            continue
        yield SourceRow(
            tuple(_text(record, column, reading) for column in columns), share, record.is_continued
        )
    reading.refuse_if_useless()


def _problem(record: Record, columns: tuple[str, ...], is_strict: bool) -> tuple[str, str]:
    """What keeps a row from being used, "" where nothing does, and the remedy for a wrong
    column."""
    if record.problem:
        return record.problem, ""
    for column in columns:
        is_there, value = look_up(record.values, column)
        if not is_there and is_strict:
            return no_column(column, column_names(record.values))
        if columns == MESSAGES:
            continue  # the chat template judges them
        is_text = value is None or isinstance(value, str | bytes)
        is_list_of_texts = (
            column not in PAIR
            and isinstance(value, list)
            and all(isinstance(v, str | bytes) for v in value)
        )
        if not is_text and not is_list_of_texts:
            return f": column {column!r} holds {_kind(value)}, not text", "set column="
    return "", ""


def _kind(value: Any) -> str:
    """What a value is, as messages say it."""
    if isinstance(value, list) and any(isinstance(element, str | bytes) for element in value):
        kinds = {type(element).__name__ for element in value}
        other_kinds = sorted(kinds - {"str", "bytes"})
        return " and ".join(["a list with text", *other_kinds]) if other_kinds else "list"
    return type(value).__name__


def _text(record: Record, column: str, reading: Reading) -> str:
    """The text of a column, "" for null. Counts its characters and those that stand for bytes
    that are not UTF-8."""
    value = look_up(record.values, column)[1]
    parts = value if isinstance(value, list) else [value]
    reading.joined_lists += isinstance(value, list)
    text, replaced = _joined(parts)
    if record.undamaged is not None:
        value = look_up(record.undamaged, column)[1]
        undamaged = "\n".join(value) if isinstance(value, list) else value or ""
        replaced = text.count(REPLACEMENT) - undamaged.count(REPLACEMENT)
    reading.characters += len(text)
    reading.replaced += replaced
    return text


def _conversation(record: Record, reading: Reading) -> dict:
    """The columns of a conversation. Counts characters as _text() does."""
    names = (*MESSAGES, *MESSAGES_MORE)
    conversation = {name: record.values.get(name) for name in names}
    text = json.dumps(conversation, ensure_ascii=False)
    reading.characters += len(text)
    if record.undamaged is not None:
        undamaged = json.dumps(
            {name: record.undamaged.get(name) for name in names}, ensure_ascii=False
        )
        reading.replaced += text.count(REPLACEMENT) - undamaged.count(REPLACEMENT)
    return conversation


def _joined(parts: list[str | bytes | None]) -> tuple[str, int]:
    """The parts as one text, a line each, and how often U+FFFD stands in it for bytes that are
    not UTF-8."""
    texts, replaced = [], 0
    for part in parts:
        text, count = _decoded(part) if isinstance(part, bytes) else (part or "", 0)
        texts.append(text)
        replaced += count
    return "\n".join(texts), replaced


def _decoded(raw: bytes) -> tuple[str, int]:
    """The text that UTF-8 bytes are, and how often U+FFFD stands in it for bytes that are not
    UTF-8."""
    try:
        return raw.decode(), 0
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        had_already = raw.count(REPLACEMENT.encode())
        return text, text.count(REPLACEMENT) - had_already


def value_of(values: dict, column: str) -> Any:
    return look_up(values, column)[1]


def read_records(
    opened: Callable,
    path: str,
    columns: tuple[str, ...],
    keep_columns: tuple[str, ...],
    reading: Reading,
) -> Iterator[tuple[Record, float]]:
    """The rows of a file, each with the share of the file that was read. keep_columns: those that
    are looked at as well. Raises BadFile and UserError."""
    import pyarrow
    import zstandard

    try:
        with opened() as file:
            size = max(1, file.seek(0, os.SEEK_END))
            file.seek(0)
            for record in _records(file, path, columns, keep_columns, reading):
                yield record, file.tell() / size
    except (
        OSError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        zstandard.ZstdError,
        pyarrow.ArrowException,
    ) as error:
        raise BadFile(_why_unreadable(path, error)) from error


def _records(
    file: io.BufferedIOBase,
    path: str,
    columns: tuple[str, ...],
    keep_columns: tuple[str, ...],
    reading: Reading,
) -> Iterator[Record]:
    """By the reader of the format that the path names."""
    packing = PurePath(path).suffix
    if packing == ".parquet":
        return parquet_rows(file, path, columns, keep_columns, reading)
    stream = unpacked(file, packing)
    head = stream.peek(HEAD_LOOKED_AT)
    _refuse_wide_characters(head[:HEAD_LOOKED_AT], path)
    if is_text_file(path):
        return text_stretches(stream, columns[0], reading)
    if ARRAY[format_of(PurePath(path))].match(stream.peek(HEAD_LOOKED_AT).lstrip(BLANK)):
        return json_array(stream, path)
    return json_lines(stream, path, reading)


def _why_unreadable(path: str, error: Exception) -> str:
    """What is said of a file that could not be read to its end."""
    if isinstance(error, ConnectionError):
        return f"{path} cannot be read: {brief(error)}"
    # pyarrow and gzip have OSErrors for content, without a number.
    is_of_content = type(error) in (OSError, gzip.BadGzipFile)
    if isinstance(error, OSError) and (error.errno is not None or not is_of_content):
        # of the disk or the network
        return f"{path} cannot be read ({brief(error)}): check its permissions and the disk"
    return f"{path} is damaged or was cut short ({brief(error)}): fetch it again"


def _refuse_wide_characters(head: bytes, path: str) -> None:
    """Raises BadFile where the first bytes of a file are those of UTF-16 or UTF-32."""
    nuls = head.count(0)
    # three of four bytes of Latin text are zero in UTF-32, one of two in UTF-16
    if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") or nuls > 0.6 * len(head):
        encoding = "UTF-32"
    elif head[:2] in (b"\xff\xfe", b"\xfe\xff") or nuls > 0.2 * len(head):
        encoding = "UTF-16"
    else:
        return
    raise BadFile(
        f"{path} is {encoding}: save it as UTF-8, such as by `iconv -f {encoding} -t UTF-8 FILE`"
    )
