"""Files that a kill leaves whole: atomic writes, hashes, JSON lines, folder locks."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lib.errors import UserError


def read_bytes(path: str | Path) -> bytes:
    """The content of a file; b"" where there is none."""
    with suppress(FileNotFoundError):
        return Path(path).read_bytes()
    return b""


def read_rows(path: str | Path, unwritten: bytes = b"") -> list:
    """The values of a file of JSON lines, [] where there is none, without damaged lines such as one
    that a kill cut short."""
    values = []
    for line in (read_bytes(path) + unwritten).splitlines():
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def to_line(row: dict) -> bytes:
    """A row as a line of strict JSON; NaN and infinities, which JSON lacks, become null."""
    strict = json.loads(json.dumps(row), parse_constant=lambda name: None)
    return (json.dumps(strict) + "\n").encode()


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file of JSON lines. Where a kill or a full disk has cut the last one short,
    a line's end goes before it: glued to the rest, the new line would be damaged too."""
    with open(path, "ab+") as file:
        is_cut = file.seek(0, os.SEEK_END) > 0 and not _ends_in_newline(file)
        file.write((b"\n" if is_cut else b"") + line)


def _ends_in_newline(file: BinaryIO) -> bool:
    """Of a file that is not empty."""
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, piece by piece, which replaces `path` once all of it is on disk; after an
    error nothing is left, and the error names the file, which that of a full disk does not."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            # a rename can outlive a power cut that the file's content does not
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and not error.filename:  # one of words alone would lose them
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)  # it may have filled the disk
    sync_folder(path.parent)  # the caller may delete next what the file was made of


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: object) -> str:
    """SHA-256 of `value` as JSON with sorted keys, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file: afterwards it holds all of `content` or, after a kill, power cut or error,
    what it held before."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: dict) -> None:
    """Write strict JSON atomically. Raises ValueError for a NaN in it, which would be a bug of
    ours."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextmanager
def alone(folder: Path, words: str | None = None) -> Iterator[None]:
    """Holds a lock on `folder`, after whoever has it, or raises UserError(words). Where there are
    no locks it goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if words else 0))
            except BlockingIOError as error:
                raise UserError(words) from error
        yield
    finally:
        os.close(descriptor)
