"""Make the shards of a source out of the pieces that its tasks wrote, and tell what a folder holds.

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
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import shards
from runtime.cli import UserError
from runtime.rows import write_json
from runtime.shards import DTYPES, Index, damage, file_sha256, new_file, read_index, remove_shards

# A row per document of a piece: blake2b-64 of the text, tokens (end-of-text included), UTF-8 bytes, those of a prompt left
# out. A document that was left out has a row too, with no tokens: an empty one no bytes either, a contaminated one its bytes.
DOCUMENT = np.dtype([("hash", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
HASH_STEPS = 10_000             # the share of validation documents is kept in steps of 1 / this
SORTED_AT_ONCE = 8_000_000      # documents: memory stays below 0.5 GB and 4 bytes a document
BLOCK = 1 << 24                 # bytes of a piece in memory at once
FIRST, COPY = 0, 1              # fate of a document; COPY + 1 + i: the first copy is in the i-th of the earlier sources


@dataclass(frozen=True)
class Piece:
    """What the task of an input file wrote: <stem>.bin (ids as in the shards), .docs (DOCUMENT rows), .json (the rest), which is
    renamed last: a piece is there if and only if its .json is. One that `failed` has that alone."""
    stem: Path
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
    facts = _read_json(folder / f"{file:05d}.json")
    return facts and Piece(folder / f"{file:05d}", **facts)


def begun(folder: Path) -> dict | None:
    """What was begun in a source's folder: identity and [name, size, stamp] of the input files; None without any."""
    return _read_json(folder / "parts" / "begun.json")


def read_layout(folder: Path) -> dict | None:
    """What commit() made final in a source's folder; None if it did not come that far."""
    return _read_json(folder / "parts" / "layout.json")


def _read_json(path: Path) -> dict | None:
    return json.loads(path.read_bytes()) if path.exists() else None


@contextmanager
def writing(path: Path) -> Iterator:
    """new_file(); an error names the file, which a full disk does not say."""
    try:
        with new_file(path) as file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


# --------------------------------------------------------------------------------------------------------------- layout

def lay_out(name: str, pieces: list[Piece], earlier: dict[str, Path], val_per_10k: int,
            budget: int | None) -> tuple[dict, np.ndarray]:
    """What is kept of the pieces, which stand in the source's order: the layout, and a bool per document of the pieces in use.

    earlier: source -> its hashes.npy, whose documents must not come again. The layout, as JSON: documents, tokens, text_bytes
    {split: count}; duplicates {source of the first copy: documents}, its own name where they came before within the source;
    empty, contaminated; is_full, whether the budget was reached; in_use, of each piece [stem's name, documents, training
    tokens kept up to its end]."""
    fates = _find_fates(pieces, earlier)
    counts = {key: {"train": 0, "val": 0} for key in ("documents", "tokens", "text_bytes")}
    met = np.zeros(COPY + 1 + len(earlier), np.int64)       # documents by fate
    kept, in_use, empty, contaminated, is_full, start = [], [], 0, 0, False, 0
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
        in_use.append([piece.stem.name, len(table), counts["tokens"]["train"]])
        if is_full:
            break
    duplicates = {key: int(n) for key, n in zip([name, *earlier], met[COPY:], strict=True) if n}
    return {**counts, "duplicates": duplicates, "empty": empty, "contaminated": contaminated, "is_full": is_full,
            "in_use": in_use, "val_per_10k": val_per_10k, "budget": budget,
            "shard_tokens": shards.SHARD_TOKENS}, np.concatenate(kept) if kept else np.zeros(0, bool)


def _find_fates(pieces: list[Piece], earlier: dict[str, Path]) -> np.ndarray:
    """uint16 (documents,) over all pieces, in their order; FIRST also for those that were left out before."""
    fates = np.full(sum(piece.documents for piece in pieces), FIRST, np.uint16)
    for hashes, places in _sorted_hashes(pieces):       # of equal ones the first document stays first
        fates[places[1:][hashes[1:] == hashes[:-1]]] = COPY
        for i, path in reversed(list(enumerate(earlier.values()))):     # the first source has the last word
            there = np.load(path, mmap_mode="r")
            there = np.array(there[np.searchsorted(there, hashes[0]):np.searchsorted(there, hashes[-1], "right")])
            if len(there):
                fates[places[there[np.minimum(np.searchsorted(there, hashes), len(there) - 1)] == hashes]] = COPY + 1 + i
    return fates


def _sorted_hashes(pieces: list[Piece], kept: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(hashes, their documents' places among all) in order of hash, then place; a range of hashes at a time, of which each holds
    about SORTED_AT_ONCE. kept: bool of each of the first documents, None: those that have tokens."""
    count = -(-sum(piece.documents for piece in pieces) // SORTED_AT_ONCE)
    for i in range(count):
        low, high = np.uint64(2**64 * i // count), np.uint64(2**64 * (i + 1) // count - 1)
        hashes, places, start = [], [], 0
        for piece in pieces:
            table = piece.table() if kept is None else piece.table()[:max(0, len(kept) - start)]
            chosen = table["tokens"] > 0 if kept is None else kept[start:start + len(table)]
            rows = np.flatnonzero(chosen & (table["hash"] >= low) & (table["hash"] <= high))
            hashes.append(table["hash"][rows])
            places.append(start + rows)
            start += len(table)
        hashes, places = np.concatenate(hashes), np.concatenate(places)
        order = np.argsort(hashes, kind="stable")
        if len(order):
            yield hashes[order], places[order]


def _is_val(table: np.ndarray, val_per_10k: int) -> np.ndarray:
    return table["hash"] % np.uint64(HASH_STEPS) < val_per_10k


# --------------------------------------------------------------------------------------------------------------- shards

def commit(folder: Path, pieces: list[Piece], layout: dict, kept: np.ndarray, facts: dict) -> dict:
    """Makes the layout final and returns it; facts: index.json without its splits, to which hashes_sha256 is added. Removes
    shards of whatever was in the folder before."""
    remove_shards(folder)
    arrays = ((folder / "hashes.npy", "<u8", int(kept.sum()), (hashes for hashes, _ in _sorted_hashes(pieces, kept))),
              (folder / "parts" / "layout.npy", "|b1", len(kept), [kept]))
    for path, dtype, length, chunks in arrays:      # not by np.save, which on a full disk leaves a short file without a word
        with writing(path) as file:
            np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (length,)})
            for chunk in chunks:
                file.write(chunk.tobytes())
    layout["facts"] = {**facts, "hashes_sha256": file_sha256(folder / "hashes.npy")}
    write_json(folder / "parts" / "layout.json", layout)
    return layout


def write_shards(folder: Path, layout: dict) -> dict:
    """Write the shards that are not there; returns `splits` of index.json. Pieces are deleted behind the training shards, so that
    pieces and shards together take hardly more room than either."""
    splits = {}
    for split in "val", "train":        # validation first: its few shards need every piece
        splits[split] = {"documents": layout["documents"][split], "text_bytes": layout["text_bytes"][split],
                         "tokens": layout["tokens"][split], "shards": list(_write_split(folder, layout, split))}
    return {split: splits[split] for split in ("train", "val")}


def _write_split(folder: Path, layout: dict, split: str) -> Iterator[dict]:
    full, total, size = layout["shard_tokens"], layout["tokens"][split], np.dtype(DTYPES[layout["facts"]["dtype"]]).itemsize
    stream, rest, end = None, b"", 0
    for number in range(-(-total // full)):
        path, begin, end = folder / f"{split}_{number:05d}.bin", end, min(total, end + full)
        shard = {"file": path.name, "tokens": end - begin}
        if stream is None and path.exists():    # of a write that was killed: whole, for it came by rename
            yield {**shard, "sha256": file_sha256(path)}
            continue
        stream = stream or _kept_bytes(folder, layout, split, size, begin)
        digest, lacking = hashlib.sha256(), size * (end - begin)
        with writing(path) as file:
            while lacking:
                rest = rest or next(stream)
                data, rest = rest[:lacking], rest[lacking:]
                lacking -= len(data)
                file.write(data)
                digest.update(data)
        for stem, _, train in layout["in_use"] if split == "train" else ():
            if train <= end:
                (folder / "parts" / f"{stem}.bin").unlink(missing_ok=True)
        yield {**shard, "sha256": digest.hexdigest()}


def _kept_bytes(folder: Path, layout: dict, split: str, size: int, begin: int) -> Iterator[bytes]:
    """The tokens of a split, each of `size` bytes, from number `begin` on, BLOCK bytes at most at a time."""
    kept, start, skip = np.load(folder / "parts" / "layout.npy", mmap_mode="r"), 0, begin * size
    for stem, documents, _ in layout["in_use"]:
        path, table = folder / "parts" / f"{stem}.bin", np.fromfile(folder / "parts" / f"{stem}.docs", DOCUMENT, documents)
        chosen = kept[start:start + documents] & (_is_val(table, layout["val_per_10k"]) == (split == "val"))
        borders = np.append(0, np.cumsum(table["tokens"], dtype=np.int64)) * size       # of the documents in the piece
        runs = borders[np.flatnonzero(np.diff(chosen, prepend=False, append=False))].reshape(-1, 2)     # of chosen documents
        start, count = start + documents, int((runs[:, 1] - runs[:, 0]).sum())
        if count <= skip:       # the piece may be gone
            skip -= count
            continue
        with open(path, "rb") as file:
            for first, last in runs.tolist():
                first, skip = min(last, first + skip), max(0, skip - (last - first))
                file.seek(first)
                while first < last:
                    if not (data := file.read(min(BLOCK, last - first))):
                        raise OSError(f"{path} is not what was written: delete {folder} and run the same command again")
                    yield data
                    first += len(data)


# ----------------------------------------------------------------------------------------------------- what a folder holds

def show(folder: Path) -> Iterator[str]:
    """Lines to print, which begin with their source's name: a table of the sources' splits; where each came from, what was
    dropped, what failed, what is unfinished."""
    finished, unfinished = _sources(folder)
    yield f"{'source':16}  {'split':10}  {'documents':>12}  {'tokens':>16}  {'bytes/token':>11}  {'GB on disk':>10}"
    told = []
    for path in sorted(finished | unfinished):
        name, index = path.resolve().name, None
        try:
            index = read_index(path) if path in finished else None
            told += [(name, *row) for row in (_story(index) if index else _progress(path))]
        except UserError as error:
            told.append((name, "damaged", str(error)))
        for split, s in index.splits.items() if index else ():
            disk = sum(shard.path.stat().st_size for shard in s.shards) / 1e9
            yield f"{name:16}  {split:10}  {s.documents:12,}  {s.tokens:16,}  {s.text_bytes / s.tokens:11.2f}  {disk:10.3f}"
    for name, word, text in told:
        start = f"{name:16}  {word:10}  "
        yield from (start + line for line in textwrap.wrap(text, 130 - len(start), break_on_hyphens=False))


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


def _story(index: Index) -> Iterator[tuple[str, str]]:
    """What the index tells beside its splits: a word and a text each."""
    yield "from", textwrap.shorten(f"{index.dataset} @ {index.revision}, {index.license}", 300, placeholder=" ...")
    yield "tokenizer", f"{index.tokenizer} (sha256 {index.tokenizer_sha256[:9]}..., {index.vocab_size:,} ids)"
    if index.is_masked:
        yield "targets", "the responses and the ends of documents; prompts are context, and bytes are those of responses"
    sources = ", ".join(f"{source} {count:,}" for source, count in index.duplicates.items())
    against = ", ".join(entry["file"] for entry in index.decontaminated_against)
    yield "dropped", (f"copies {sum(index.duplicates.values()):,}" + (f" (first met in {sources})" if sources else "") +
                      f", empty {index.empty:,}" + (f", contaminated {index.contaminated:,} (by {against})" if against else ""))
    yield "read", f"{len(index.files):,} input files {'to the end' if index.is_whole else f'for {index.budget:,} tokens'}"
    for entry in index.skipped:
        yield "skipped", f"{entry['file']} ({entry['reason']})"


def _progress(folder: Path) -> Iterator[tuple[str, str]]:
    """What is known of a source while it is being made, or after it was cut off."""
    files = [name for name, *_ in begun(folder)["files"]]
    pieces = {name: piece for number, name in enumerate(files) if (piece := read_piece(folder / "parts", number))}
    yield "unfinished", (f"{sum(piece.tokens for piece in pieces.values()):,} tokens so far; of {len(files):,} input files "
                         f"{sum(not piece.failed for piece in pieces.values())} are read; " +
                         ("the shards are being made; " if read_layout(folder) else "") + "the same command goes on with it")
    for name, piece in pieces.items():
        if piece.failed:
            yield "failed", f"{name} ({piece.failed})"
