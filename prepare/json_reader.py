"""JSON lines, and arrays that need not fit into memory."""

import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from prepare.formats import format_of
from prepare.records import BLANK, ENCODING_REMEDY, REPLACEMENT, Record, unescaped
from prepare.sources import BadFile, Reading

# Of an array that are read at once; of one element.
JSON_CHARS, JSON_CHARS_MOST = 1 << 18, 1 << 26
# More characters than any literal or escape has, one of which may be cut.
JSON_WORD = 16
JSON_BLANK = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder(strict=False)


def json_lines(lines: Iterable[bytes], path: str, reading: Reading) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip(BLANK):
            continue
        try:
            value, undamaged = _parsed(line)
        except (ValueError, RecursionError) as error:
            text = line.decode(errors="replace")
            reason = str(error)
            # its own line numbers begin anew in each line
            if isinstance(error, json.JSONDecodeError):
                place = min(error.pos, len(text.rstrip())) + 1
                reason = f"{error.msg}, character {place} of the line"
            is_utf8 = REPLACEMENT not in text
            hint = "" if is_utf8 else f"; it is not UTF-8: {ENCODING_REMEDY}"
            if number == 1 and format_of(PurePath(path)) == ".json":
                hint += "; a .json holds an object a line, or one array of objects"
            if reading.skips_odd_rows and reading.skips_broken_lines:
                yield Record(number, {}, problem=f" is no line of JSON ({reason}){hint}")
                continue
            raise BadFile(f"{path}:{number} is no line of JSON ({reason}){hint}") from error
        if isinstance(value, dict):
            yield Record(number, value, undamaged=undamaged)
        else:
            yield Record(number, {}, problem=f" is no object but {type(value).__name__}")


def json_array(stream: io.BufferedReader, path: str) -> Iterator[Record]:
    """The elements of a file that is one array, of which JSON_CHARS and an element are in memory
    at a time; a string is a row whose column is "text". Raises BadFile: an element that is no
    JSON, behind which nothing can be read, or is too long."""
    array, number = _JsonText(stream), 0
    try:
        array.take("[")
        is_end = array.next() == "]"
        while not is_end:
            number += 1
            value, undamaged = array.take_value()
            if isinstance(value, str):
                value = {"text": value}
                undamaged = None if undamaged is None else {"text": undamaged}
            if isinstance(value, dict):
                yield Record(number, value, ", element ", undamaged=undamaged)
            else:
                yield Record(number, {}, ", element ", f" is no object but {type(value).__name__}")
            is_end = array.next() == "]"
            if not is_end:
                array.take(",")
        array.take("]")
        if array.next():
            raise ValueError("text follows the end of the array")
    except (ValueError, RecursionError) as error:
        raise BadFile(
            f"{path}, element {number} of its array: it cannot be read as JSON ({error})"
        ) from error


class _JsonText:
    """JSON that is read from its beginning to its end, a part in memory at a time."""

    def __init__(self, stream: io.BufferedReader):
        # Bytes that are not UTF-8 are kept, to be counted later.
        self._rest = io.TextIOWrapper(
            stream, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        self._part, self._place = "", 0

    def next(self) -> str:
        """The next character that is no white space, which stays the next; "" at the end."""
        while True:
            blank = JSON_BLANK.match(self._part, self._place)
            self._place = blank.end() if blank else self._place
            if self._place < len(self._part):
                return self._part[self._place]
            if not self._read_on():
                return ""

    def take(self, letter: str) -> None:
        """Raises EOFError and ValueError: something else is there."""
        if not self.next():
            raise EOFError("its array has no end")
        if self.next() != letter:
            raise ValueError(f"{letter!r} is expected, {self.next()!r} is there")
        self._place += 1

    def take_value(self) -> tuple[Any, Any]:
        """As _parsed() returns it. Raises EOFError: the file ends within the value; ValueError
        and RecursionError."""
        self.next()
        while True:
            is_mendable = True  # whether text that follows can complete the value
            try:
                value, end = DECODER.raw_decode(self._part, self._place)
                if end < len(self._part):  # else a number may go on
                    break
            except json.JSONDecodeError as error:
                is_mendable = self._is_mendable(error)
                problem = error.msg
            if len(self._part) - self._place > JSON_CHARS_MOST:
                raise ValueError(f"it is longer than {JSON_CHARS_MOST:,} characters")
            if self._read_on():
                continue
            if not is_mendable:
                raise ValueError(problem)
            raise EOFError("it ends within an element of its array")
        raw = unescaped(self._part[self._place : end])
        self._place = end
        return _parsed(raw) if isinstance(raw, bytes) else (value, None)

    def _is_mendable(self, error: json.JSONDecodeError) -> bool:
        """Whether the error may be that of a value that is cut. Raises ValueError where so much
        text stands behind it that no literal or escape can be cut."""
        if error.msg.startswith("Unterminated string"):
            return True
        letters_behind = len(self._part) - error.pos
        if letters_behind >= JSON_WORD:
            raise ValueError(error.msg)
        return letters_behind <= 0

    def _read_on(self) -> bool:
        """Read as much again as is unused, so that a long value is not tried too often; whether
        there was any."""
        unused = self._part[self._place :]
        added = self._rest.read(max(JSON_CHARS, len(unused)))
        self._part, self._place = unused + added, 0
        return bool(added)


def _parsed(raw: bytes) -> tuple[Any, Any]:
    """The value that JSON spells, bytes that are not UTF-8 as U+FFFD, and the same without those
    bytes, None where there are none. Raises ValueError and RecursionError."""
    try:
        return DECODER.decode(raw.decode("utf-8-sig")), None
    except UnicodeDecodeError:
        value = DECODER.decode(raw.decode("utf-8-sig", errors="replace"))
        undamaged = DECODER.decode(raw.decode("utf-8-sig", errors="ignore"))
        return value, undamaged
