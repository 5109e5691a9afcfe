"""Read and write a run's files so that a kill leaves all of a change or nothing of it.

Rows of metrics.jsonl, in the order in which things happened:

    {"kind": "train", "step", "loss", "verdict", ...}       a training step; "val": a validation after it
    {"kind": "undone", ...}, {"kind": "undone_val", ...}    the same, undone by a rollback
    {"kind": "event", "event": name, "step", ...}           anything else: a resume, a rollback, a failed save
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def read_bytes(path: str | Path) -> bytes:
    """The content of a file; b"" where there is none."""
    return Path(path).read_bytes() if os.path.exists(path) else b""


def read_rows(path: str | Path) -> list:
    """The values of a file of JSON lines, [] where there is none."""
    return parse(read_bytes(path))


def parse(content: bytes) -> list:
    """The values of JSON lines, without damaged lines such as one that a kill cut short."""
    values = []
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def metrics_rows(values: list) -> list[dict]:
    """Those values that are rows of a metrics.jsonl: objects with a kind and a step."""
    return [row for row in values if isinstance(row, dict) and type(row.get("step")) is int and "kind" in row]


def to_line(row: dict) -> bytes:
    """A row as a line of strict JSON; NaN and infinities, which JSON lacks, become null."""
    strict = json.loads(json.dumps(row), parse_constant=lambda name: None)
    return (json.dumps(strict) + "\n").encode()


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, piece by piece, which replaces `path` once all of it is on disk; after an error nothing is left,
    and the error names the file, which a full disk does not say."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())     # a rename can outlive a power cut that the file's content does not
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and not error.filename:      # one of words alone would lose them
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)       # it may have filled the disk
    sync_folder(path.parent)        # the caller may delete next what the file was made of


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file: afterwards it holds all of `content` or, after a kill, power cut or error, what it held before."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: dict) -> None:
    """Write strict JSON atomically. Raises ValueError for a NaN in it, which would be a bug of ours."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
