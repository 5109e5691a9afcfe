"""Plain text: documents between borders, long ones in pieces."""

import io
import re
from collections.abc import Iterator

from prepare.records import Record, unescaped
from prepare.sources import Reading

TXT_CHARS = 16_384  # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576  # or in mid-paragraph after this many: memory stays bounded
NOTHING = r"(?!)"  # a pattern that matches nowhere


def text_stretches(stream: io.BufferedIOBase, column: str, reading: Reading) -> Iterator[Record]:
    """The documents of a text file, long ones in pieces. Without borders the file is one
    document."""
    # Line ends of any system become \n; bytes that are not UTF-8 are kept, to be counted later.
    lines, text = (
        io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape"),
        io.StringIO(),
    )
    find_border = re.compile("|".join(map(re.escape, reading.borders)) or NOTHING).search
    number, is_continued, has_borders, is_behind_border = 1, False, False, False

    def record(content: str) -> Record:
        return Record(number, {column: unescaped(content)}, ", piece ", is_continued=is_continued)

    while line := lines.readline(TXT_CHARS_MOST):
        if find_border(line):
            if line.strip() in reading.borders:
                content = text.getvalue().rstrip("\n")
                if content and not content.isspace():
                    yield record(content if is_continued else content.lstrip("\n"))
                    number += 1
                text, is_continued, has_borders, is_behind_border = io.StringIO(), False, True, True
                continue
            reading.inner_borders += 1
        if is_behind_border and line.isspace():
            continue
        is_behind_border = False
        text.write(line)
        size = text.tell()
        if size >= TXT_CHARS_MOST or (size >= TXT_CHARS and line.isspace()):
            yield record(text.getvalue())
            text, number, is_continued = io.StringIO(), number + 1, True
    last = text.getvalue()
    if not has_borders:
        yield record(last)
    elif last and not last.isspace():
        yield record(last.rstrip("\n"))
