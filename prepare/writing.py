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
    `hashes_sha256` of index.json."""
    remove_shards(folder)
    hashes = np.concatenate(
        [piece.table()["hash"][: len(piece.homes)][piece.homes <= VAL] for piece in pieces]
    )
    hashes.sort()
    # not by np.save, which on a full disk leaves a short file without a word
    with new_file(folder / "hashes.npy") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(hashes))
        file.write(hashes)
    size, made = np.dtype(dtype).itemsize, {}
    for split, counts in splits.items():
        found = []
        for number, blocks in groupby(
            _blocks(pieces, HOMES[split], size * shards.SHARD_TOKENS, size), itemgetter(0)
        ):
            path, digest = folder / f"{split}_{number:05d}.bin", sha256()
            with new_file(path) as file:
                for _, data in blocks:
                    file.write(data)
                    digest.update(data)
                found.append(
                    {"file": path.name, "tokens": file.tell() // size, "sha256": digest.hexdigest()}
                )
        made[split] = {**counts, "shards": found}
    return {"hashes_sha256": file_sha256(folder / "hashes.npy"), "splits": made}


def _blocks(
    pieces: list[Piece], home: int, shard_bytes: int, size: int
) -> Iterator[tuple[int, bytes]]:
    """Shard's number and tokens, each of `size` bytes, of the documents of that home, BLOCK bytes
    at most at a time."""
    at = 0  # bytes so far
    for piece in pieces:
        # of the documents in the piece
        borders = np.append(0, np.cumsum(piece.table()["tokens"], dtype=np.int64)) * size
        # neighbours
        runs = borders[
            np.flatnonzero(np.diff(piece.homes == home, prepend=False, append=False))
        ].reshape(-1, 2)
        with open(f"{piece.stem}.bin", "rb") as file:
            for first, last in runs.tolist():
                file.seek(first)
                while left := last - file.tell():
                    if not (data := file.read(min(BLOCK, left, shard_bytes - at % shard_bytes))):
                        raise OSError(
                            f"{piece.stem}.bin is shorter than what was written: delete its folder"
                        )
                    yield at // shard_bytes, data
                    at += len(data)
