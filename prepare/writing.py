"""The shards of a source, written from its pieces."""

from collections.abc import Iterator
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from lib.files import new_file
from prepare.layout import HOMES
from prepare.pieces import VAL, Piece
from runtime import shards
from runtime.shards import file_sha256, remove_shards

BLOCK = 1 << 24  # bytes of a piece in memory at once


def write_shards(folder: Path, pieces: list[Piece], splits: dict, dtype: str) -> dict:
    """Write hashes.npy and the shards, in place of what was there; returns `splits` and
    `hashes_sha256` of index.json. splits: counts of each, by Layout.splits()."""
    remove_shards(folder)
    _write_hashes(folder / "hashes.npy", pieces)
    token_bytes = np.dtype(dtype).itemsize
    written = {}
    for split, counts in splits.items():
        written[split] = {**counts, "shards": _write_split(folder, split, pieces, token_bytes)}
    return {"hashes_sha256": file_sha256(folder / "hashes.npy"), "splits": written}


def _write_hashes(path: Path, pieces: list[Piece]) -> None:
    """The sorted hashes of the documents that go to a split."""
    hashes = np.concatenate(
        [
            piece.table()["hash"][: len(piece.known_homes)][piece.known_homes <= VAL]
            for piece in pieces
        ]
    )
    hashes.sort()
    # not by np.save, which on a full disk leaves a short file without a word
    header = np.lib.format.header_data_from_array_1_0(hashes)
    with new_file(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(hashes.data)


def _write_split(folder: Path, split: str, pieces: list[Piece], token_bytes: int) -> list[dict]:
    """The shards of one split; returns {file, tokens, sha256} of each."""
    written = []
    blocks = _blocks(pieces, HOMES[split], token_bytes * shards.SHARD_TOKENS, token_bytes)
    for number, blocks_of_shard in groupby(blocks, itemgetter(0)):
        path = folder / f"{split}_{number:05d}.bin"
        digest = sha256()
        with new_file(path) as file:
            for _, data in blocks_of_shard:
                file.write(data)
                digest.update(data)
            tokens = file.tell() // token_bytes
        written.append({"file": path.name, "tokens": tokens, "sha256": digest.hexdigest()})
    return written


def _blocks(
    pieces: list[Piece], home: int, shard_bytes: int, token_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Shard's number and tokens of the documents of that home, BLOCK bytes at most at a time."""
    done = 0  # bytes so far
    for piece in pieces:
        # of the documents in the piece, in bytes
        borders = np.append(0, np.cumsum(piece.table()["tokens"], dtype=np.int64)) * token_bytes
        runs = borders[contiguous_runs(piece.known_homes == home)]
        with open(f"{piece.stem}.bin", "rb") as file:
            for first, last in runs.tolist():
                file.seek(first)
                while file.tell() < last:
                    room = shard_bytes - done % shard_bytes
                    data = file.read(min(BLOCK, last - file.tell(), room))
                    if not data:
                        raise OSError(
                            f"{piece.stem}.bin is shorter than what was written: delete its folder"
                        )
                    yield done // shard_bytes, data
                    done += len(data)


def contiguous_runs(mask: np.ndarray) -> np.ndarray:
    """int (runs, 2): where each run of true values begins and ends; of bool (n,).

    [0, 1, 1, 0, 1] gives [[1, 3], [4, 5]]."""
    changes = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return changes.reshape(-1, 2)
