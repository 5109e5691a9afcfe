"""Make the shards of a source out of the pieces that its tasks wrote.

lay_out() decides from the pieces' tables alone: a document is left out if its text came before, in this source or in an
earlier one; its hash says to which split it belongs; the source ends with the document that fills the budget of training
tokens. So the result depends on the order of the documents and on nothing else. commit() writes the decision to parts/
(layout.npy, then layout.json), and from then on the shards are a function of these files and of the pieces: write_shards()
may be killed at any moment and goes on with the first shard that is not there.

A document's name is the blake2b-64 of its text: among 30 million, some pair of different texts shares one with odds of
2e-5. One of the two would be dropped for a copy.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import shards
from runtime.shards import DTYPES, file_sha256, new_file, remove_shards

# A row per document of a piece: blake2b-64 of the text, tokens (end-of-text included), UTF-8 bytes, those of a prompt left
# out. A document that was left out has a row too, with no tokens: an empty one no bytes either, a contaminated one its bytes.
DOCUMENT = np.dtype([("hash", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
HASH_STEPS = 10_000             # the share of validation documents is kept in steps of 1 / this
SORTED_AT_ONCE = 8_000_000      # documents: memory stays below 0.5 GB and 3 bytes a document
FIRST, COPY = 0, 1              # fate of a document; COPY + 1 + i: the first copy is in the i-th of the earlier sources


@dataclass(frozen=True)
class Piece:
    """A stretch of one input file's documents: <stem>.bin (ids as in the shards), .docs (DOCUMENT rows), .json (the rest), which
    is renamed last: a piece is there if and only if its .json is."""
    stem: Path
    file: int           # number of the task
    rows: int           # of the input file, up to the end of this piece
    documents: int
    tokens: int
    bytes: int          # of text
    is_last: bool       # whether the input file ends here

    def table(self) -> np.ndarray:
        """DOCUMENT (documents,). Raises OSError where it is not what was written."""
        table = np.fromfile(f"{self.stem}.docs", DOCUMENT)
        if len(table) != self.documents or int(table["tokens"].sum(dtype=np.int64)) != self.tokens:
            raise _not_written(f"{self.stem}.docs", self.stem.parent)
        return table


# --------------------------------------------------------------------------------------------------------------- layout

def lay_out(name: str, pieces: list[Piece], earlier: dict[str, Path], val_per_10k: int,
            budget: int | None) -> tuple[dict, np.ndarray]:
    """What is kept of the pieces, which stand in the source's order: the layout, and a bool per document of the pieces in use.

    earlier: source -> its hashes.npy, whose documents must not come again. The layout, as JSON: documents, tokens, text_bytes
    {split: count}; duplicates {source of the first copy: documents}, its own name where they came before within the source;
    empty, contaminated; is_full, whether the budget was reached; last_file, in which the source ends, -1 without any; in_use,
    of each piece [stem's name, documents, train and val tokens kept up to its end]."""
    fates = _find_fates(pieces, earlier)
    counts = {key: {"train": 0, "val": 0} for key in ("documents", "tokens", "text_bytes")}
    met = np.zeros(COPY + 1 + len(earlier), np.int64)       # documents by fate
    kept, in_use, empty, contaminated, is_full, last_file, start = [], [], 0, 0, False, -1, 0
    for piece in pieces:
        table = piece.table()
        fate, start = fates[start:start + len(table)], start + len(table)
        if budget is not None:
            train = np.where((fate == FIRST) & ~_is_val(table, val_per_10k), table["tokens"], 0)
            end = int(np.searchsorted(counts["tokens"]["train"] + np.cumsum(train, dtype=np.int64), budget)) + 1
            is_full = end <= len(table)         # with the document that reaches it
            table, fate = table[:end], fate[:end]
        is_text, is_val = table["tokens"] > 0, _is_val(table, val_per_10k)
        is_kept = is_text & (fate == FIRST)
        for split, chosen in ("train", table[is_kept & ~is_val]), ("val", table[is_kept & is_val]):
            counts["documents"][split] += len(chosen)
            counts["tokens"][split] += int(chosen["tokens"].sum(dtype=np.int64))
            counts["text_bytes"][split] += int(chosen["bytes"].sum(dtype=np.int64))
        met += np.bincount(fate[is_text], minlength=len(met))
        empty += int((~is_text & (table["bytes"] == 0)).sum())
        contaminated += int((~is_text & (table["bytes"] > 0)).sum())
        kept.append(is_kept)
        in_use.append([piece.stem.name, len(table), counts["tokens"]["train"], counts["tokens"]["val"]])
        last_file = piece.file
        if is_full:
            break
    duplicates = {key: int(n) for key, n in zip([name, *earlier], met[COPY:], strict=True) if n}
    return {**counts, "duplicates": duplicates, "empty": empty, "contaminated": contaminated, "is_full": is_full,
            "last_file": last_file, "in_use": in_use, "val_per_10k": val_per_10k, "budget": budget,
            "shard_tokens": shards.SHARD_TOKENS}, np.concatenate(kept) if kept else np.zeros(0, bool)


def _find_fates(pieces: list[Piece], earlier: dict[str, Path]) -> np.ndarray:
    """uint16 (documents,) over all pieces, in their order; FIRST also for those that were left out before."""
    total = sum(piece.documents for piece in pieces)
    fates = np.full(total, FIRST, np.uint16)
    for low, high in _hash_ranges(total):
        hashes, places, start = [], [], 0
        for piece in pieces:
            table = piece.table()
            rows = np.flatnonzero((table["tokens"] > 0) & (table["hash"] >= low) & (table["hash"] <= high))
            hashes.append(table["hash"][rows])
            places.append(start + rows)
            start += len(table)
        hashes, places = np.concatenate(hashes), np.concatenate(places)
        order = np.argsort(hashes, kind="stable")       # of equal ones the first document stays first
        hashes, places = hashes[order], places[order]
        fates[places[1:][hashes[1:] == hashes[:-1]]] = COPY
        for i, path in reversed(list(enumerate(earlier.values()))):     # the first source has the last word
            there = np.load(path, mmap_mode="r")
            there = np.array(there[np.searchsorted(there, low):np.searchsorted(there, high, "right")])
            if len(there):
                fates[places[there[np.minimum(np.searchsorted(there, hashes), len(there) - 1)] == hashes]] = COPY + 1 + i
    return fates


def _hash_ranges(documents: int) -> Iterator[tuple[np.uint64, np.uint64]]:
    """First and last hash of ranges that hold about SORTED_AT_ONCE each of so many documents with hashes of their own."""
    count = -(-documents // SORTED_AT_ONCE)
    for i in range(count):
        yield np.uint64(2**64 * i // count), np.uint64(2**64 * (i + 1) // count - 1)


def _is_val(table: np.ndarray, val_per_10k: int) -> np.ndarray:
    return table["hash"] % np.uint64(HASH_STEPS) < val_per_10k


# --------------------------------------------------------------------------------------------------------------- commit

def commit(folder: Path, pieces: list[Piece], layout: dict, kept: np.ndarray, facts: dict) -> dict:
    """Makes the layout final and returns it; facts: index.json without its splits, to which hashes_sha256 is added. Removes
    shards of whatever was in the folder before."""
    remove_shards(folder)
    count, hashes = int(kept.sum()), folder / "hashes.npy"
    _write_array(hashes, "<u8", count, (_kept_hashes(pieces, layout, kept, *ends) for ends in _hash_ranges(count)))
    layout["facts"] = {**facts, "hashes_sha256": file_sha256(hashes)}
    _write_array(folder / "parts" / "layout.npy", "|b1", len(kept), [kept])
    write_bytes(folder / "parts" / "layout.json", json.dumps(layout).encode())
    return layout


def _kept_hashes(pieces: list[Piece], layout: dict, kept: np.ndarray, low: np.uint64, high: np.uint64) -> np.ndarray:
    found, start = [], 0
    for piece, (_, documents, *_) in zip(pieces, layout["in_use"], strict=False):
        hashes = piece.table()["hash"][:documents][kept[start:start + documents]]
        found.append(hashes[(hashes >= low) & (hashes <= high)])
        start += documents
    return np.sort(np.concatenate(found))


def _write_array(path: Path, dtype: str, length: int, chunks: Iterable[np.ndarray]) -> None:
    """A .npy file. Not by np.save, which on a full disk leaves a short file without a word."""
    with blamed(path), new_file(path) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (length,)})
        for chunk in chunks:
            file.write(chunk.tobytes())


def read_layout(folder: Path) -> dict | None:
    """What commit() made final in this folder; None if it did not come that far."""
    path = folder / "parts" / "layout.json"
    return json.loads(path.read_bytes()) if path.exists() else None


# --------------------------------------------------------------------------------------------------------------- shards

def write_shards(folder: Path, layout: dict) -> dict:
    """Write the shards that are not there; returns `splits` of index.json. Memory: a piece. Pieces are deleted behind the
    training shards, so that pieces and shards together take hardly more room than either."""
    splits = {}
    for split in "val", "train":        # validation first: its few shards need every piece
        splits[split] = {"documents": layout["documents"][split], "text_bytes": layout["text_bytes"][split],
                         "tokens": layout["tokens"][split], "shards": list(_write_split(folder, layout, split))}
    return {split: splits[split] for split in ("train", "val")}


def _write_split(folder: Path, layout: dict, split: str) -> Iterator[dict]:
    full, total, dtype = layout["shard_tokens"], layout["tokens"][split], DTYPES[layout["facts"]["dtype"]]
    sizes = {f"{split}_{number:05d}.bin": min(full, total - number * full) for number in range(-(-total // full))}
    stream, rest, end = None, np.zeros(0, dtype), 0
    for name, size in sizes.items():
        path, begin, end = folder / name, end, end + size
        if stream is None and path.exists():    # of a write that was killed: whole, for it came by rename
            yield {"file": name, "tokens": size, "sha256": file_sha256(path)}
            continue
        stream = stream or _kept_tokens(folder, layout, split, dtype, begin)
        digest, lacking = hashlib.sha256(), size
        with blamed(path), new_file(path) as file:
            while lacking:
                rest = rest if len(rest) else next(stream)
                data, rest = rest[:lacking], rest[lacking:]
                lacking -= len(data)
                file.write(data.data)
                digest.update(data.data)
        for stem, _, train, _ in layout["in_use"] if split == "train" else ():
            if train <= end:
                (folder / "parts" / f"{stem}.bin").unlink(missing_ok=True)
        yield {"file": name, "tokens": size, "sha256": digest.hexdigest()}


def _kept_tokens(folder: Path, layout: dict, split: str, dtype: str, begin: int) -> Iterator[np.ndarray]:
    """The tokens of a split from number `begin` on, a piece at a time."""
    kept, column = np.load(folder / "parts" / "layout.npy", mmap_mode="r"), 2 if split == "train" else 3
    first, start = 0, 0
    for piece in layout["in_use"]:
        stem, documents, before, first, start = piece[0], piece[1], first, piece[column], start + piece[1]
        if first <= begin or first == before:
            continue
        try:
            table = np.fromfile(folder / "parts" / f"{stem}.docs", DOCUMENT)
            ids = np.fromfile(folder / "parts" / f"{stem}.bin", dtype)
        except FileNotFoundError as error:
            raise _not_written(error.filename, folder) from error
        if len(ids) != table["tokens"].sum(dtype=np.int64):
            raise _not_written(f"{folder / 'parts' / stem}.bin", folder)
        table = table[:documents]
        chosen = kept[start - documents:start] & (_is_val(table, layout["val_per_10k"]) == (split == "val"))
        chosen = np.repeat(chosen, table["tokens"])
        yield ids[:len(chosen)][chosen][max(0, begin - before):]


def write_bytes(path: Path, data: bytes) -> None:
    """Make `path` by rename, so that it is there whole or not at all."""
    with blamed(path), new_file(path) as file:
        file.write(data)


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """A disk that is full does not say for which file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _not_written(path: str, folder: Path) -> OSError:
    return OSError(f"{path} is not what was written: delete {folder} and run the same command again")
