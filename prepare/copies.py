"""Find the documents whose text came before, in the same source or in an earlier one.

A document's name is the blake2b-64 of its text: among 30 million, some pair of different texts shares one with odds of
2e-5. One of the two would be dropped for a copy.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prepare.source import DOCUMENT, Piece

SORTED_AT_ONCE = 8_000_000      # documents
FIRST, COPY = 0, 1              # fate of a document; COPY + 1 + i: the first copy is in the i-th of the earlier sources


def find_fates(pieces: list[Piece], earlier: dict[str, Path]) -> np.ndarray:
    """uint16 (documents,) over all pieces, in their order; FIRST also for those that were left out before.

    `earlier`: source -> its hashes.npy (uint64, sorted). Memory: 2 bytes a document and some 0.5 GB, whatever their
    number: the documents are sorted a range of hashes at a time. Raises OSError for a file that is not what was written."""
    total = sum(piece.documents for piece in pieces)
    fates = np.full(total, FIRST, np.uint16)
    for low, high in hash_ranges(total):
        found, places = _firsts_of_pieces(pieces, low, high)
        fates[places[1:][found[1:] == found[:-1]]] = COPY
        for i, path in reversed(list(enumerate(earlier.values()))):     # the first source has the last word
            fates[places[_is_in(found, path, low, high)]] = COPY + 1 + i
    start = 0
    for piece in pieces:
        table, fate = read_table(piece), fates[start:start + piece.documents]
        start += piece.documents
        rows = np.flatnonzero(table["tokens"])
        _, first, back = np.unique(table["hash"][rows], return_index=True, return_inverse=True)
        of_first = fate[rows[first]]
        fate[rows] = np.maximum(of_first[back], COPY)
        fate[rows[first]] = of_first
    return fates


def _firsts_of_pieces(pieces: list[Piece], low: np.uint64, high: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """Hashes from low to high, sorted, and the number of the document of each, the lower first where they are equal.

    Of a text that comes again within a piece only the first is there: memory depends on how many different ones there are."""
    found, places, start = [], [], 0
    for piece in pieces:
        table = read_table(piece)
        rows = np.flatnonzero((table["tokens"] > 0) & (table["hash"] >= low) & (table["hash"] <= high))
        hashes, first = np.unique(table["hash"][rows], return_index=True)
        found.append(hashes)
        places.append(start + rows[first])
        start += len(table)
    found, places = np.concatenate(found), np.concatenate(places)
    order = np.argsort(found, kind="stable")
    return found[order], places[order]


def _is_in(hashes: np.ndarray, path: Path, low: np.uint64, high: np.uint64) -> np.ndarray:
    """Which of `hashes`, that lie from low to high, are in the sorted file."""
    try:
        there = np.load(path, mmap_mode="r")
        there = np.array(there[np.searchsorted(there, low):np.searchsorted(there, high, "right")], np.uint64)
    except (ValueError, EOFError) as error:
        raise OSError(f"{path} cannot be read ({error}): `python prepare_data.py --verify {path.parent}` says more") from error
    if not len(there):
        return np.zeros(len(hashes), bool)
    return there[np.minimum(np.searchsorted(there, hashes), len(there) - 1)] == hashes


def hash_ranges(documents: int) -> Iterator[tuple[np.uint64, np.uint64]]:
    """First and last hash of ranges that hold about SORTED_AT_ONCE each of so many documents with hashes of their own."""
    count = -(-documents // SORTED_AT_ONCE)
    for i in range(count):
        yield np.uint64(2**64 * i // count), np.uint64(2**64 * (i + 1) // count - 1)


def read_table(piece: Piece) -> np.ndarray:
    """DOCUMENT (documents,). Raises OSError where it is not what was written."""
    table = load(Path(f"{piece.stem}.npy"))
    if table.dtype != DOCUMENT or table.shape != (piece.documents,) or \
            int(table["tokens"].sum(dtype=np.int64)) != piece.tokens:
        raise OSError(_not_written(Path(f"{piece.stem}.npy")))
    return table


def load(path: Path, mmap_mode: str | None = None) -> np.ndarray:
    """np.load of a file in parts/. Raises OSError where it is gone or no array."""
    try:
        return np.load(path, mmap_mode=mmap_mode)
    except (ValueError, EOFError, FileNotFoundError) as error:
        raise OSError(_not_written(path)) from error


def _not_written(path: Path) -> str:
    return f"{path} is not what was written: delete {path.parent} and run the same command again"
