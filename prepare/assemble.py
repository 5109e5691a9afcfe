"""Make the shards of a source out of the pieces that its tasks wrote, and tell what a folder holds.

lay_out() decides from the pieces' tables alone: a document is left out if its text came before, in this source or in an
earlier one; its hash says to which split it belongs; the source ends with the document that fills the budget of training
tokens. So the result depends on the order of the documents and on nothing else. The pieces stay until index.json is there:
where write_shards() is killed, all of it is done again.

A document's name is the blake2b-64 of its text: among 30 million, some pair of different texts shares one with odds of
2e-5. One of the two would be dropped for a copy.
"""

import hashlib
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import shards
from runtime.cli import UserError, grid
from runtime.machine import new_file, read_bytes
from runtime.shards import DTYPES, Index, damage, file_sha256, read_index, remove_shards

# A row per document of a piece: blake2b-64 of the text, tokens (end-of-text included), UTF-8 bytes, those of a prompt left
# out. A document that was left out has a row too, with no tokens: an empty one no bytes either, a contaminated one its bytes.
DOCUMENT = np.dtype([("hash", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
HASH_STEPS = 10_000             # the share of validation documents is kept in steps of 1 / this
SORTED_AT_ONCE = 8_000_000      # documents: memory stays below 0.5 GB and 4 bytes a document
BLOCK = 1 << 24                 # bytes of a piece in memory at once
FIRST, COPY = 0, 1              # fate of a document; COPY + 1 + i: the first copy is in the i-th of the earlier sources
LEFT_OUT, TRAIN, VAL = 0, 1, 2  # where it goes


@dataclass(frozen=True)
class Piece:
    """What the task of an input file wrote: <stem>.bin (ids as in the shards), .docs (DOCUMENT rows), .json (the rest), which is
    renamed last: a piece is there if and only if its .json is. One that `failed` has that alone."""
    stem: Path
    input: list                 # name, bytes and stamp of the file (prepare.sources)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0              # of text
    is_whole: bool = False      # whether the input file was read to its end, or until there were tokens enough
    failed: str | None = None   # why it could not be read

    def serves(self, tokens: float) -> bool:
        """Whether the task of the file is done, where `tokens` are wanted of it."""
        return self.is_whole or bool(self.failed) or self.tokens >= tokens

    def table(self) -> np.ndarray:
        """DOCUMENT (documents,)"""
        return np.fromfile(f"{self.stem}.docs", DOCUMENT)


def read_piece(folder: Path, file: int) -> Piece | None:
    """Of input file number `file`; None where its task has not ended."""
    facts = json.loads(read_bytes(folder / f"{file:05d}.json") or "null")
    return facts and Piece(folder / f"{file:05d}", **facts)


def begun(folder: Path) -> dict | None:
    """What was begun in a source's folder: what its tokens depend on, and the number of input `files`; None where nothing was."""
    return json.loads(read_bytes(folder / "parts" / "begun.json") or "null")


# --------------------------------------------------------------------------------------------------------------- layout

def lay_out(name: str, pieces: list[Piece], earlier: dict[str, Path], val_per_10k: int,
            budget: int | None) -> tuple[dict, dict, list[np.ndarray]]:
    """What becomes of the documents of the pieces, which stand in the source's order.

    earlier: source -> its hashes.npy, whose documents must not come again. Returns the splits, {split: {documents,
    text_bytes, tokens}}; what else index.json says of them: duplicates {source of the first copy: documents}, its own name where
    they came before within the source, empty, contaminated, is_whole, False where the budget was reached; and for each piece in
    use uint8 (documents in use,): TRAIN, VAL or LEFT_OUT."""
    splits = {split: {"documents": 0, "text_bytes": 0, "tokens": 0} for split in ("train", "val")}
    met = np.zeros(COPY + 1 + len(earlier), np.int64)       # documents by fate
    homes, empty, contaminated, is_whole = [], 0, 0, True
    for piece, fate in zip(pieces, _find_fates(pieces, earlier), strict=True):
        table = piece.table()
        home = np.where(table["hash"] % np.uint64(HASH_STEPS) < val_per_10k, np.uint8(VAL), np.uint8(TRAIN))
        home[(fate != FIRST) | (table["tokens"] == 0)] = LEFT_OUT
        if budget is not None:
            train = np.cumsum(np.where(home == TRAIN, table["tokens"], 0), dtype=np.int64)
            end = int(np.searchsorted(train, budget - splits["train"]["tokens"])) + 1      # with the document that reaches it
            is_whole = end > len(table)
            table, fate, home = table[:end], fate[:end], home[:end]
        for number, split in enumerate(splits.values(), TRAIN):
            chosen = table[home == number]
            split["documents"] += len(chosen)
            split["text_bytes"] += int(chosen["bytes"].sum(dtype=np.int64))
            split["tokens"] += int(chosen["tokens"].sum(dtype=np.int64))
        is_text = table["tokens"] > 0
        met += np.bincount(fate[is_text], minlength=len(met))
        empty += int((~is_text & (table["bytes"] == 0)).sum())
        contaminated += int((~is_text & (table["bytes"] > 0)).sum())
        homes.append(home)
        if not is_whole:
            break
    duplicates = {key: int(n) for key, n in zip([name, *earlier], met[COPY:], strict=True) if n}
    return splits, {"duplicates": duplicates, "empty": empty, "contaminated": contaminated, "is_whole": is_whole}, homes


def _find_fates(pieces: list[Piece], earlier: dict[str, Path]) -> list[np.ndarray]:
    """uint16 (documents,) of each piece; FIRST also for those that were left out before. By ranges of hashes, of which each holds
    about SORTED_AT_ONCE."""
    sizes = [piece.documents for piece in pieces]
    fates, count = np.full(sum(sizes), FIRST, np.uint16), -(-sum(sizes) // SORTED_AT_ONCE)
    for i in range(count):
        low, high = np.uint64(2**64 * i // count), np.uint64(2**64 * (i + 1) // count - 1)
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
        for number, path in reversed(list(enumerate(earlier.values(), COPY + 1))):      # the first source has the last word
            there = np.load(path, mmap_mode="r")
            # Not by np.isin, which sorts both: 3 GB where an earlier source has 100M documents.
            there = np.array(there[np.searchsorted(there, low):np.searchsorted(there, high, "right")])
            if len(there):
                fates[places[there[np.minimum(np.searchsorted(there, hashes), len(there) - 1)] == hashes]] = number
    return np.split(fates, np.cumsum(sizes[:-1])) if sizes else []


# --------------------------------------------------------------------------------------------------------------- shards

def write_shards(folder: Path, pieces: list[Piece], homes: list[np.ndarray], splits: dict, dtype: str) -> dict:
    """Write hashes.npy and the shards of `dtype`, in place of what was there; returns `splits` and `hashes_sha256` of
    index.json."""
    remove_shards(folder)
    kept = [piece.table()["hash"][:len(home)][home != LEFT_OUT] for piece, home in zip(pieces, homes, strict=True)]
    hashes = np.concatenate(kept)
    hashes.sort()
    with new_file(folder / "hashes.npy") as file:    # not by np.save, which on a full disk leaves a short file without a word
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(hashes))
        file.write(hashes)
    size, made = np.dtype(DTYPES[dtype]).itemsize, {}
    for number, (split, counts) in enumerate(splits.items(), TRAIN):
        stream, rest, found = _bytes_of(pieces, homes, number, size), b"", []
        for begin in range(0, counts["tokens"], shards.SHARD_TOKENS):
            tokens = min(shards.SHARD_TOKENS, counts["tokens"] - begin)
            path, digest, lacking = folder / f"{split}_{len(found):05d}.bin", hashlib.sha256(), size * tokens
            with new_file(path) as file:
                while lacking:
                    rest = rest or next(stream)
                    data, rest = rest[:lacking], rest[lacking:]
                    lacking -= len(data)
                    file.write(data)
                    digest.update(data)
            found.append({"file": path.name, "tokens": tokens, "sha256": digest.hexdigest()})
        made[split] = {**counts, "shards": found}
    return {"hashes_sha256": file_sha256(folder / "hashes.npy"), "splits": made}


def _bytes_of(pieces: list[Piece], homes: list[np.ndarray], number: int, size: int) -> Iterator[bytes]:
    """The tokens, each of `size` bytes, of the documents whose home is `number`, BLOCK bytes at most at a time."""
    for piece, home in zip(pieces, homes, strict=True):
        borders = np.append(0, np.cumsum(piece.table()["tokens"], dtype=np.int64)) * size       # of the documents in the piece
        runs = borders[np.flatnonzero(np.diff(home == number, prepend=False, append=False))].reshape(-1, 2)     # neighbours
        with open(f"{piece.stem}.bin", "rb") as file:
            for first, last in runs.tolist():
                file.seek(first)
                while first < last:
                    if not (data := file.read(min(BLOCK, last - first))):
                        raise OSError(f"{piece.stem}.bin is shorter than what was written: delete its folder")
                    yield data
                    first += len(data)


# ----------------------------------------------------------------------------------------------------- what a folder holds

def show(folder: Path) -> Iterator[str]:
    """Lines to print: a table of the sources' splits, then of each source where it came from, what was dropped, what failed, what
    is unfinished."""
    finished, unfinished = _sources(folder)
    rows, told = [["source", "split", "documents", "tokens", "bytes/token", "GB on disk"]], []
    for path in sorted(finished | unfinished):
        name = path.resolve().name
        try:
            index = read_index(path) if path in finished else None
        except UserError as error:
            told.append(f"{name}: damaged: {error}")
            continue
        told += [f"{name}: {line}" for line in (_story(index) if index else _progress(path))]
        for split, s in index.splits.items() if index else ():
            disk = sum(shard.path.stat().st_size for shard in s.shards) / 1e9
            rows.append([name, split, f"{s.documents:,}", f"{s.tokens:,}", f"{s.text_bytes / s.tokens:.2f}", f"{disk:.3f}"])
    yield grid(rows)
    yield from told


def verify(folders: list[Path]) -> None:
    """Hashes every shard again and prints a line per source. Raises UserError naming all that differ or are unfinished."""
    bad = []
    for finished, unfinished in map(_sources, folders):
        for source in sorted(finished | unfinished):
            found = list(damage(source)) if source in finished else [f"{source} is unfinished: the same command goes on with it"]
            print(f"{'BAD' if found else 'OK '} {source}", flush=True)
            bad += found
    if bad:
        raise UserError("\n".join(bad))


def _sources(folder: Path) -> tuple[set[Path], set[Path]]:
    """The folders of the sources there, finished ones and unfinished ones."""
    finished = {path.parent for path in folder.rglob("index.json")}
    unfinished = {path.parent.parent for path in folder.rglob("parts/begun.json")} - finished
    if not finished | unfinished:
        raise UserError(f"there is no prepared source in {folder}: `python prepare_data.py` says how to make one")
    return finished, unfinished


def _story(index: Index) -> Iterator[str]:
    """What the index tells beside its splits."""
    yield textwrap.shorten(f"from {index.dataset} @ {index.revision}, {index.license}", 300, placeholder=" ...")
    yield f"tokenizer {index.tokenizer} (sha256 {index.tokenizer_sha256[:9]}..., {index.vocab_size:,} ids)"
    if index.is_masked:
        yield "targets are the responses and the ends of documents; prompts are context, and bytes are those of responses"
    sources = ", ".join(f"{source} {count:,}" for source, count in index.duplicates.items())
    yield (f"dropped: copies {sum(index.duplicates.values()):,}" + (f" (first met in {sources})" if sources else "") +
           f", empty {index.empty:,}, contaminated {index.contaminated:,}")
    yield f"read: {len(index.files):,} input files {'to the end' if index.is_whole else f'for {index.budget:,} tokens'}"
    yield from (f"skipped: {entry['file']} ({entry['reason']})" for entry in index.skipped)


def _progress(folder: Path) -> Iterator[str]:
    """What is known of a source while it is being made, or after it was cut off."""
    count = begun(folder)["files"]
    pieces = list(filter(None, (read_piece(folder / "parts", number) for number in range(count))))
    yield (f"unfinished: {sum(piece.tokens for piece in pieces):,} tokens so far; of {count:,} input files "
           f"{sum(not piece.failed for piece in pieces)} are read; the same command goes on with it")
    yield from (f"failed: {piece.input[0]} ({piece.failed})" for piece in pieces if piece.failed)
