"""Make shards of the pieces of a source.

layout() decides from the pieces' tables alone: a document is left out if its text came before, in this source or in an
earlier one; its hash says to which split it belongs; the source ends with the document that fills the budget of training
tokens. So the result depends on the order of the documents and on nothing else. commit() makes the decision final, on disk
in parts/, and from then on each shard is a function of these files and of the pieces:

    layout.json         everything that is not a row per document; renamed last
    layout.npy          bool, for each document of the pieces in use whether it is kept
    train_00000.json    says that this shard is on disk: its sha256, its modification time

A killed write() goes on with the first shard that is not there.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from prepare.copies import COPY, FIRST, find_fates, hash_ranges, load, read_table
from prepare.source import Piece
from runtime import shards
from runtime.shards import file_sha256, new_file, remove_shards

READ_BYTES = 8 << 20
HASH_STEPS = np.uint64(10_000)  # the validation share is kept in steps of 1 / this
COUNTS = ("documents", "tokens", "text_bytes")
SAVED = (*COUNTS, "duplicates", "empty", "contaminated", "is_full", "last_file", "budget", "val_per_10k", "shard_tokens",
         "in_use", "facts")     # attributes that make up layout.json


class Assembly:
    """The shards of one source: layout(), commit(facts), write() in this order; or resume() and write().

    Attributes after layout() or resume(): documents, tokens, text_bytes {split: count}; duplicates {source of the first
    copy: documents}, its own name where they came before within the source; empty, contaminated; is_full, whether the
    budget was reached; last_file, number of the input file in which the source ends, -1 without any; in_use, for each piece
    of which something may be kept [name, documents, train and val tokens kept up to its end]; facts, index.json without
    its splits.
    """

    def __init__(self, folder: Path, pieces: list[Piece], earlier: dict[str, Path], val_per_10k: int, budget: int | None):
        """`pieces` in the source's order; `earlier`: hashes.npy of each source whose documents must not come again."""
        self.folder, self.val_per_10k, self.budget = folder, val_per_10k, budget
        self.shard_tokens, self.facts = shards.SHARD_TOKENS, {}
        self._pieces, self._earlier = pieces, earlier

    @classmethod
    def resume(cls, folder: Path) -> "Assembly | None":
        """What commit() made final in this folder, if it came that far. Raises OSError where it cannot be read."""
        try:
            saved = _read_layout(folder)
        except FileNotFoundError:
            return None
        assembly = cls(folder, [], {}, 0, None)
        for key in SAVED:
            setattr(assembly, key, saved[key])
        return assembly

    @property
    def train_tokens(self) -> int:
        return self.tokens["train"]

    @property
    def val_tokens(self) -> int:
        return self.tokens["val"]

    def layout(self) -> None:
        """Decides what is kept; writes nothing. Raises OSError for a piece that is not what was written."""
        fates = find_fates(self._pieces, self._earlier)
        for key in COUNTS:
            setattr(self, key, {"train": 0, "val": 0})
        met = np.zeros(COPY + 1 + len(self._earlier), np.int64)     # documents by fate
        kept, self.in_use, self.empty, self.contaminated = [], [], 0, 0
        self.is_full, self.last_file, start = False, -1, 0
        for piece in self._pieces:
            table = read_table(piece)
            fate, start = fates[start:start + len(table)], start + len(table)
            if self.budget is not None:
                train = np.where((fate == FIRST) & ~_is_val(table, self.val_per_10k), table["tokens"], 0)
                filled = self.tokens["train"] + np.cumsum(train, dtype=np.int64)
                end = int(np.searchsorted(filled, self.budget)) + 1     # with the document that reaches it
                self.is_full = end <= len(table)
                table, fate = table[:end], fate[:end]
            is_text, is_val = table["tokens"] > 0, _is_val(table, self.val_per_10k)
            is_kept = is_text & (fate == FIRST)
            for split, chosen in ("train", table[is_kept & ~is_val]), ("val", table[is_kept & is_val]):
                self.documents[split] += len(chosen)
                self.tokens[split] += int(chosen["tokens"].sum(dtype=np.int64))
                self.text_bytes[split] += int(chosen["bytes"].sum(dtype=np.int64))
            met += np.bincount(fate[is_text], minlength=len(met))
            self.empty += int((~is_text & (table["bytes"] == 0)).sum())
            self.contaminated += int((~is_text & (table["bytes"] > 0)).sum())
            kept.append(is_kept)
            self.in_use.append([piece.stem.name, len(table), self.tokens["train"], self.tokens["val"]])
            self.last_file = piece.file
            if self.is_full:
                break
        self._kept = np.concatenate(kept) if kept else np.zeros(0, bool)
        names = [self.folder.name, *self._earlier]
        self.duplicates = {name: int(n) for name, n in zip(names, met[COPY:], strict=True) if n}

    def commit(self, facts: dict) -> None:
        """Makes the layout final; `facts`: index.json without its splits and without hashes_sha256, which is added here.

        Removes shards of whatever was in the folder before."""
        parts = self.folder / "parts"
        remove_shards(self.folder)
        for path in [*parts.glob("train_*.json"), *parts.glob("val_*.json")]:
            path.unlink()
        count = int(self._kept.sum())
        _write_array(self.folder / "hashes.npy", "<u8", count, (self._kept_hashes(low, high) for low, high in hash_ranges(count)))
        self.facts = {**facts, "hashes_sha256": file_sha256(self.folder / "hashes.npy")}
        _write_array(parts / "layout.npy", "|b1", len(self._kept), [self._kept])
        with new_file(parts / "layout.json") as file:
            file.write(json.dumps({key: getattr(self, key) for key in SAVED}).encode())

    def _kept_hashes(self, low: np.uint64, high: np.uint64) -> np.ndarray:
        found, start = [], 0
        for piece, (_, documents, *_) in zip(self._pieces, self.in_use, strict=False):
            hashes = read_table(piece)["hash"][:documents][self._kept[start:start + documents]]
            found.append(hashes[(hashes >= low) & (hashes <= high)])
            start += documents
        return np.sort(np.concatenate(found))

    def write(self, run: Callable[[Callable, Iterable], Iterable] = map) -> dict:
        """`splits` of index.json, all shards on disk. run(function, arguments) like map: in order, as they come.

        Memory: a few MB a shard. Raises OSError; the same call again goes on."""
        splits = {split: {"documents": self.documents[split], "text_bytes": self.text_bytes[split],
                          "tokens": self.tokens[split], "shards": []} for split in ("train", "val")}
        # Validation comes first: its few shards need every piece, and training shards delete pieces behind them.
        places = [(self.folder, split, number) for split in ("val", "train")
                  for number in range(-(-self.tokens[split] // self.shard_tokens))]
        gone = 0
        for (_, split, number), shard in zip(places, run(write_shard, places), strict=True):
            splits[split]["shards"].append(shard)
            while split == "train" and gone < len(self.in_use) and self.in_use[gone][2] <= (number + 1) * self.shard_tokens:
                (self.folder / "parts" / f"{self.in_use[gone][0]}.bin").unlink(missing_ok=True)
                gone += 1
        return splits


# --------------------------------------------------------------------------------------------------------------- tables

def _write_array(path: Path, dtype: str, length: int, chunks: Iterable[np.ndarray]) -> None:
    """A .npy file. Not by np.save, which on a full disk leaves a short file without a word."""
    with new_file(path) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (length,)})
        for chunk in chunks:
            file.write(chunk.tobytes())


def _is_val(table: np.ndarray, val_per_10k: int) -> np.ndarray:
    return table["hash"] % HASH_STEPS < val_per_10k


# --------------------------------------------------------------------------------------------------------------- shards

def write_shard(place: tuple[Path, str, int]) -> dict:
    """Makes one shard out of what commit() left, unless it is there: folder, split, number -> its entry in index.json."""
    folder, split, number = place
    layout, path = _read_layout(folder), folder / f"{split}_{number:05d}.bin"
    begin = number * layout["shard_tokens"]
    tokens = min(layout["shard_tokens"], layout["tokens"][split] - begin)
    record = folder / "parts" / f"{path.stem}.json"
    sha256 = _recorded_sha256(record, path, _token_bytes(layout) * tokens)
    if sha256 is None:
        digest = hashlib.sha256()
        with new_file(path) as file:
            for data in _read_tokens(folder, layout, split, begin, begin + tokens):
                digest.update(data)
                file.write(data)
        sha256 = digest.hexdigest()
        with new_file(record) as file:
            file.write(json.dumps({"sha256": sha256, "mtime_ns": path.stat().st_mtime_ns}).encode())
    return {"file": path.name, "tokens": tokens, "sha256": sha256}


def _token_bytes(layout: dict) -> int:
    return np.dtype(shards.DTYPES[layout["facts"].get("dtype", "uint16")]).itemsize


def _recorded_sha256(record: Path, path: Path, size: int) -> str | None:
    """The sha256 of a shard that is on disk as it was written; None if it is not."""
    try:
        raw, stat = json.loads(record.read_bytes()), path.stat()
    except (FileNotFoundError, ValueError):
        return None
    if stat.st_size != size or (stat.st_mtime_ns != raw["mtime_ns"] and file_sha256(path) != raw["sha256"]):
        return None
    return raw["sha256"]


def _read_tokens(folder: Path, layout: dict, split: str, begin: int, end: int) -> Iterator[bytes]:
    """Tokens begin to end (exclusive) of a split, out of the pieces."""
    kept = load(folder / "parts" / "layout.npy", mmap_mode="r")
    column, start, before = (2 if split == "train" else 3), 0, 0
    for piece in layout["in_use"]:
        name, documents, first_token = piece[0], piece[1], before
        before, start = piece[column], start + documents
        if before <= begin or first_token >= end:
            continue
        table = load(folder / "parts" / f"{name}.npy")[:documents]
        chosen = kept[start - documents:start] & (_is_val(table, layout["val_per_10k"]) == (split == "val"))
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)     # runs of documents
        ends = np.cumsum(table["tokens"], dtype=np.int64)
        offsets = np.concatenate([[0], ends])[edges]                # (runs, 2): from token, to token of the piece
        lengths = offsets[:, 1] - offsets[:, 0]
        places = first_token + np.cumsum(lengths) - lengths         # where each run begins in the split
        size = _token_bytes(layout)
        yield from _read_runs(folder / "parts" / f"{name}.bin",
                              size * (offsets[:, 0] + np.maximum(0, begin - places)),
                              size * (offsets[:, 1] - np.maximum(0, places + lengths - end)))


def _read_runs(path: Path, starts: np.ndarray, stops: np.ndarray) -> Iterator[bytes]:
    """The bytes from each start to its stop (exclusive)."""
    try:
        with open(path, "rb") as file:
            for start, stop in zip(starts, stops, strict=True):
                file.seek(start)
                while start < stop:
                    data = file.read(min(READ_BYTES, stop - start))
                    if not data:
                        raise OSError(f"{path} ends early: delete {path.parent.parent} and run the same command again")
                    yield data
                    start += len(data)
    except FileNotFoundError as error:
        raise OSError(f"{path} is gone, and a shard that was made of it is missing or was changed: delete "
                      f"{path.parent.parent} and run the same command again") from error


def _read_layout(folder: Path) -> dict:
    path = folder / "parts" / "layout.json"
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise OSError(f"{path} cannot be read ({error}): delete {folder} and run the same command again") from error
