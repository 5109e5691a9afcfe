"""Files of this machine as a source."""

import hashlib
import json
import sys
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

from lib.errors import UserError
from prepare.formats import FORMATS, PAIR_FORMATS, check_format, format_of
from prepare.readers import read_file, read_records
from prepare.sources import MESSAGES, PAIR, BadFile, InputFile, Reading, Source

KIND_ROWS = 100  # rows at the beginning of a file that tell pairs from conversations


def local_source(
    name: str, words: list[str], columns: tuple[str, ...], license: str | None
) -> Source:
    """The files as a source, its text in one column, or in PAIR. Raises UserError: one is missing
    or of another kind."""
    if not words:
        raise UserError("no file is named: python prepare_data.py local FILE... name=mydata")
    paths = [Path(word) for word in words]
    if columns == PAIR and _holds_messages(paths[0]):
        columns = MESSAGES
    files = _input_files(paths, columns)
    stats = [(path.name, file.bytes, file.stamp) for path, file in zip(paths, files, strict=True)]
    file_names = ", ".join(path.name for path in paths)
    revision = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
    return Source(
        name=name,
        dataset=f"local: {file_names}; column {' and '.join(columns)}",
        revision=revision,
        license=license or "not stated",
        local_files=tuple(files),
        is_masked=columns in (PAIR, MESSAGES),
        is_chat=columns == MESSAGES,
    )


def _input_files(paths: list[Path], columns: tuple[str, ...]) -> list[InputFile]:
    formats = PAIR_FORMATS if columns in (PAIR, MESSAGES) else FORMATS
    count_of_name = Counter(path.name for path in paths)
    files = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is no file: name the files themselves, such as FOLDER/*.jsonl")
        check_format(path, formats, str(path))
        # Files of one name in several folders need their folders to be told apart.
        known_as = path.name if count_of_name[path.name] == 1 else str(path)
        stat, absolute = path.stat(), str(path.absolute())
        read = partial(read_file, partial(open, absolute, "rb"), absolute, columns, {}, True)
        files.append(InputFile(known_as, stat.st_size, stat.st_mtime_ns, read))
    return files


def _holds_messages(path: Path) -> bool:
    """Whether a file of instructions holds conversations, by the first row that is a conversation
    or a pair. Says so where that row is both. False where the file cannot be read: who reads it
    says so."""
    if not path.is_file() or format_of(path) not in PAIR_FORMATS:
        return False
    reading = Reading(skips_odd_rows=True)
    records = read_records(partial(open, path, "rb"), str(path), (), (*MESSAGES, *PAIR), reading)
    try:
        for record, _ in islice(records, KIND_ROWS):
            has_messages = record.values.get(MESSAGES[0]) is not None
            if all(record.values.get(column) is not None for column in PAIR):
                if has_messages:
                    print(
                        f"{path}: its rows have prompt and response as well as messages; the"
                        " responses are learned, and messages are not read: remove prompt and"
                        " response to learn from the messages",
                        file=sys.stderr,
                    )
                return False
            if has_messages:
                return True
    except (BadFile, UserError):
        return False
    return False
