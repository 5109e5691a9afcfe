"""Append an input file's tokens to pieces that appear whole or not at all.

A piece (prepare.source.Piece) is <input file>_<count>.bin, .npy, .json; the .json is renamed last, when the rest is on
disk. So a kill loses the piece at hand alone, and never leaves half of one.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from prepare.source import DOCUMENT, Encoded, Piece
from runtime.cli import UserError
from runtime.shards import new_file

PIECE_TOKENS = 20_000_000       # 40 MB or 80, seconds to minutes of work: that much a kill loses
PIECE = r"[0-9]{5,}_([0-9]{4,})\.(?:bin|npy|json)"


class PieceWriter:
    """Appends to one input file; `rows` of it lie in finished pieces, `tokens` were written, those pieces included.

    add() and close() may raise OSError naming the file; abandon() then."""

    def __init__(self, folder: Path, file: int, pieces: list[Piece]):
        self.rows = pieces[-1].rows[1] if pieces else 0
        self.tokens = sum(piece.tokens for piece in pieces)
        self._folder, self._number = folder, file
        self._count = len(pieces)
        self._data = None
        for path in folder.glob(f"{file:05d}_*"):       # of a run that was killed
            match = re.fullmatch(PIECE, path.name.removesuffix(".tmp"))
            if match and int(match[1]) >= len(pieces):
                path.unlink()
        self._begin()

    def add(self, encoded: Encoded) -> None:
        """Appends a batch that follows on the rows so far."""
        assert encoded.rows >= self._end and encoded.documents["tokens"].sum(dtype=np.int64) == len(encoded.ids)
        data = memoryview(np.ascontiguousarray(encoded.ids, f"<u{encoded.ids.itemsize}")).cast("B")
        with blamed(self._path("bin")):
            if self._data is None:
                # Without a buffer, whose rest would be written once more when a full disk is left behind.
                self._data = open(self._path("bin"), "wb", buffering=0)     # noqa: SIM115  outlives us
            while data:
                data = data[self._data.write(data):]
        self._documents.append(encoded.documents.astype(DOCUMENT, copy=False))
        self._end = encoded.rows
        self._tokens += len(encoded.ids)
        self.tokens += len(encoded.ids)
        if self._tokens >= PIECE_TOKENS:
            self._commit(is_last=False)

    def close(self, is_last: bool) -> None:
        """Finish the piece at hand; `is_last` says that the input file ends here."""
        if is_last or self._end > self.rows:
            self._commit(is_last)

    def abandon(self) -> None:
        """Drop the piece at hand; finished ones stay. After close() it does nothing."""
        if self._data is not None:
            self._data.close()
            self._data = None
        for suffix in ("bin", "npy", "json"):
            self._path(suffix).unlink(missing_ok=True)

    def _begin(self) -> None:
        self._data, self._documents, self._end, self._tokens = None, [np.zeros(0, DOCUMENT)], self.rows, 0

    def _commit(self, is_last: bool) -> None:
        documents = np.concatenate(self._documents)     # at worst 10M of two tokens each: 160 MB, twice
        with blamed(self._path("bin")), self._data or open(self._path("bin"), "wb") as file:
            os.fsync(file.fileno())
        with blamed(self._path("npy")), open(self._path("npy"), "wb") as file:
            # np.save to a file says nothing of a disk that is full: NumPy writes through a copy of the descriptor.
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(documents))
            file.write(documents.view(np.uint8))
            file.flush()
            os.fsync(file.fileno())
        for suffix in ("bin", "npy"):
            os.replace(self._path(suffix), self._path(suffix).with_suffix(""))
        path = self._path("json").with_suffix("")
        piece = Piece(path.with_suffix(""), self._number, (self.rows, self._end), len(documents), self._tokens, is_last)
        write_json(path, {key: value for key, value in asdict(piece).items() if key != "stem"})
        self.rows, self._count = self._end, self._count + 1
        self._begin()

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._number:05d}_{self._count:04d}.{suffix}.tmp"


def read_piece(path: Path) -> Piece:
    """The finished piece whose .json is `path`. Raises UserError where that is not what was written."""
    text = path.read_text(errors="replace")
    try:
        raw = json.loads(text)
        return Piece(**raw | {"stem": path.with_suffix(""), "rows": tuple(raw["rows"])})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: delete {path.parent} and run the same command again") from error


def write_json(path: Path, content: dict) -> None:
    """Make `path` by rename, so that it is there whole or not at all; a power cut undoes no rename in its folder so far."""
    with blamed(path), new_file(path) as file:
        file.write(json.dumps(content).encode())


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """A disk that is full does not say for which file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
