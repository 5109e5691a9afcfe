"""Plain text: documents between borders, long ones in pieces."""

import io
import re
from collections.abc import Iterator
from typing import NamedTuple

from prepare.records import Record, unescaped
from prepare.sources import Reading

TXT_CHARS = 16_384  # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576  # or in mid-paragraph after this many: memory stays bounded
NOTHING = r"(?!)"  # a pattern that matches nowhere


def text_stretches(stream: io.BufferedReader, column: str, reading: Reading) -> Iterator[Record]:
    """The documents of a text file, long ones in pieces. Without borders the file is one
    document."""
    # Line ends of any system become \n; bytes that are not UTF-8 are kept, to be counted later.
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape")
    for number, piece in enumerate(_pieces(lines, reading), 1):
        values = {column: unescaped(piece.text)}
        yield Record(number, values, ", piece ", is_continued=piece.is_continued)


class _TextPiece(NamedTuple):
    """A document of a text file, or a part of one."""

    text: str
    is_continued: bool  # whether it goes on with the piece before


def _pieces(lines: io.TextIOWrapper, reading: Reading) -> Iterator[_TextPiece]:
    find_border = re.compile("|".join(map(re.escape, reading.borders)) or NOTHING).search
    text = io.StringIO()
    is_continued = has_borders = is_behind_border = False
    while line := lines.readline(TXT_CHARS_MOST):
        has_border = find_border(line) is not None
        if has_border and line.strip() in reading.borders:
            content = text.getvalue().rstrip("\n")
            if not is_blank(content):
                yield _TextPiece(content if is_continued else content.lstrip("\n"), is_continued)
            text = io.StringIO()
            is_continued = False
            has_borders = is_behind_border = True
            continue
        reading.inner_borders += has_border
        if is_behind_border and line.isspace():
            continue
        is_behind_border = False
        text.write(line)
        if _is_full(text.tell(), line):
            yield _TextPiece(text.getvalue(), is_continued)
            text = io.StringIO()
            is_continued = True
    last = text.getvalue()
    if not has_borders:
        yield _TextPiece(last, is_continued)
    elif not is_blank(last):
        yield _TextPiece(last.rstrip("\n"), is_continued)


def _is_full(size: int, line: str) -> bool:
    """Whether a piece of `size` characters that ends with `line` is to be cut there."""
    return size >= TXT_CHARS_MOST or (size >= TXT_CHARS and line.isspace())


def is_blank(text: str) -> bool:
    return not text or text.isspace()
