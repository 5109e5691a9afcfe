"""Append rows to a file of JSON lines that survives a cut at any byte.

A row is on disk when add() returns. A last line that a kill tore is dropped at the next opening; the lines before it are
never touched. One writer at a time: a lock that ends with its process.
"""

import fcntl
import os
from pathlib import Path

from runtime.cli import UserError
from runtime.rows import parse, to_line


class Journal:
    """The rows of `path`, which is made where there is none. Raises UserError where it cannot be a journal of ours."""

    def __init__(self, path: Path):
        if path.suffix != ".jsonl":
            raise UserError(f"out={path} must end in .jsonl: it gets one JSON object a line")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)     # noqa: SIM115 - close() ends it
        except OSError as error:
            raise UserError(f"out={path} cannot be written: {error.strerror}; give another file") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UserError(f"out={path} is being written by another call: wait for its end, or give another file") from error
        self.path = path
        self._file.seek(0)
        content = self._file.readall()
        whole = content[:content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        self.rows = rows_of(whole)

    def add(self, row: dict) -> None:
        """NaN and infinities become null. Raises OSError where the disk is full."""
        line = to_line(row)
        while line:
            line = line[self._file.write(line):]
        os.fsync(self._file.fileno())
        self.rows.append(row)

    def close(self) -> None:
        self._file.close()


def rows_of(content: bytes) -> list[dict]:
    """The rows among the lines of a journal; a line that is none, as after a kill, is left out."""
    return [row for row in parse(content) if isinstance(row, dict) and isinstance(row.get("kind"), str)]
