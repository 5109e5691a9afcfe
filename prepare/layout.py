"""Where each document goes: copies, splits, the end of the budget.

Nothing is written here. The pieces' tables and the hashes of the finished sources beside them
decide alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.errors import UserError
from prepare.job import HASH_STEPS
from prepare.pieces import CONTAMINATED, COPY, EMPTY, TRAIN, VAL, Piece
from runtime.shards import file_sha256, read_index
from runtime.tokenizer import Tokenizer

SORTED_AT_ONCE = 8_000_000  # documents: memory stays below 0.5 GB and 16 bytes a document
HOMES = {"train": TRAIN, "val": VAL}


@dataclass(frozen=True)
class Rules:
    """What decides of a document, besides its table."""

    name: str  # of the source
    budget: int | None  # training tokens after which the source ends
    val_per_10k: int  # share of the documents that is kept for validation
    # finished sources of the same folder: sorted hashes of the documents that each keeps
    earlier: Mapping[str, np.ndarray]


@dataclass
class Layout:
    """Where the documents of a source go: rows of their counts, by home."""

    documents: np.ndarray  # int64 (homes,): rows of the tables; a document that was cut has several
    text_bytes: np.ndarray  # int64 (homes,)
    tokens: np.ndarray  # int64 (homes,)
    copied_from: list[str]  # sources whose copies were dropped: COPY, COPY + 1, ..
    is_whole: bool = True  # whether the budget was not reached
    whole_documents: int = 0  # that go to a split, a document that was cut as one
    cut_documents: int = 0  # of them, those of more than one piece
    cut_pieces: int = 0  # of these
    split_by: str = "piece"  # of documents that were cut: "document", or "piece" of an only one

    def splits(self) -> dict[str, dict[str, int]]:
        """Counts of each split, as index.json has them."""
        return {split: self._counts(home) for split, home in HOMES.items()}

    def _counts(self, home: int) -> dict[str, int]:
        return {
            "documents": int(self.documents[home]),
            "text_bytes": int(self.text_bytes[home]),
            "tokens": int(self.tokens[home]),
        }

    def dropped(self) -> dict:
        """What else index.json says of the documents."""
        copies = dict(zip(self.copied_from, map(int, self.documents[COPY:]), strict=True))
        values = {
            "duplicates": {source: count for source, count in copies.items() if count},
            "empty": int(self.documents[EMPTY]),
            "contaminated": int(self.documents[CONTAMINATED]),
            "is_whole": self.is_whole,
        }
        if self.cut_documents:
            values["cut"] = {
                "documents": self.cut_documents,
                "pieces": self.cut_pieces,
                "split_by": self.split_by,
            }
        return values

    def add(self, piece: Piece, table: np.ndarray, homes: np.ndarray) -> None:
        """Count the first rows of a piece, DOCUMENT (rows,), of homes uint16 (rows,)."""
        size = len(self.documents)
        self.documents += np.bincount(homes, minlength=size)
        # exact: sums below 2^53
        self.text_bytes += np.bincount(homes, table["bytes"], size).astype(np.int64)
        self.tokens += np.bincount(homes, table["tokens"], size).astype(np.int64)
        if not piece.has_cuts:
            self.whole_documents += int((homes <= VAL).sum())
            return
        first_rows = piece.document_of_rows()[: len(homes)]
        rows_of_each = np.unique(first_rows[homes <= VAL], return_counts=True)[1]
        self.whole_documents += len(rows_of_each)
        self.cut_documents += int((rows_of_each > 1).sum())
        self.cut_pieces += int(rows_of_each[rows_of_each > 1].sum())


def earlier_hashes(folder: Path, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Sorted hashes of the finished sources in a data folder, by name: no document comes twice, so
    none in both splits. Raises UserError where one has lost them."""
    earlier = {}
    for source in sorted(path.parent for path in folder.glob("*/index.json")):
        index = read_index(source)
        # the same text by another tokenizer is no copy
        if not tokenizer.goes_by(index.tokenizer_sha256):
            continue
        hashes = source / "hashes.npy"
        if not hashes.exists() or file_sha256(hashes) != index.hashes_sha256:
            raise UserError(f"{hashes} is not what was written: restore it, or delete {source}")
        earlier[source.name] = np.load(hashes, mmap_mode="r")
    return earlier


def lay_out(pieces: list[Piece], rules: Rules) -> Layout:
    """Set the `homes` of the pieces, which stand in the source's order, up to the one that reaches
    the budget.

    A document's pieces go where its first one does, but those of an only document must fill both
    splits."""
    copies = find_copies(pieces, list(rules.earlier.values()))
    layout = _place(pieces, copies, rules, by_piece=True)
    if layout.whole_documents > 1 and any(piece.has_cuts for piece in pieces):
        layout = _place(pieces, copies, rules, by_piece=False)
        layout.split_by = "document"
    return layout


def _place(pieces: list[Piece], copies: list[np.ndarray], rules: Rules, by_piece: bool) -> Layout:
    """lay_out() where `copies` are known, by find_copies(). by_piece: whether the pieces of a
    document that was cut are split each by itself."""
    size = COPY + 1 + len(rules.earlier)
    layout = Layout(
        documents=np.zeros(size, np.int64),
        text_bytes=np.zeros(size, np.int64),
        tokens=np.zeros(size, np.int64),
        copied_from=[rules.name, *rules.earlier],
    )
    for piece in pieces:
        piece.homes = None
    for piece, copied in zip(pieces, copies, strict=True):
        table = piece.table()
        homes = _homes(piece, table, copied, rules.val_per_10k, by_piece)
        if rules.budget is not None:
            train = np.cumsum(np.where(homes == TRAIN, table["tokens"], 0), dtype=np.int64)
            missing = rules.budget - layout.tokens[TRAIN]
            end = int(np.searchsorted(train, missing)) + 1  # with the one that reaches it
            layout.is_whole = end > len(table)
            table, homes = table[:end], homes[:end]
        layout.add(piece, table, homes)
        piece.homes = homes
        if not layout.is_whole:
            break
    return layout


def _homes(
    piece: Piece, table: np.ndarray, copied: np.ndarray, val_per_10k: int, by_piece: bool
) -> np.ndarray:
    """uint16 (documents,) of a piece without a budget."""
    homes = copied.copy()
    key = table["hash"]
    if piece.has_cuts and not by_piece:
        key = key[piece.document_of_rows()]
    is_val = key % np.uint64(HASH_STEPS) < val_per_10k
    homes[(homes == TRAIN) & is_val] = VAL
    has_no_tokens = table["tokens"] == 0
    homes[has_no_tokens] = CONTAMINATED
    homes[has_no_tokens & (table["bytes"] == 0)] = EMPTY
    return homes


def find_copies(pieces: list[Piece], earlier: list[np.ndarray]) -> list[np.ndarray]:
    """uint16 (documents,) of each piece: TRAIN for a first document, COPY or more for others. By
    ranges of hashes, of which each holds about SORTED_AT_ONCE."""
    tables = [piece.table()["hash"].copy() for piece in pieces]
    hashes = np.concatenate([np.empty(0, np.uint64), *tables])
    homes = np.full(len(hashes), TRAIN, np.uint16)
    n_ranges = -(-len(hashes) // SORTED_AT_ONCE)
    for i in range(n_ranges):
        low = np.uint64(2**64 * i // n_ranges)
        high = np.uint64(2**64 * (i + 1) // n_ranges - 1)
        places = np.flatnonzero((hashes >= low) & (hashes <= high))
        # of equal ones the first document stays first
        places = places[np.argsort(hashes[places], kind="stable")]
        in_order = hashes[places]
        is_repeated = in_order[1:] == in_order[:-1]
        homes[places[1:][is_repeated]] = COPY
        for number, source_hashes in enumerate(earlier, COPY + 1):
            is_known = _contains(source_hashes, low, high, in_order)
            homes[places[is_known]] = number  # no two sources share a document
    ends = np.cumsum([piece.documents for piece in pieces])
    return np.split(homes, ends)[:-1]


def _contains(
    source_hashes: np.ndarray, low: np.uint64, high: np.uint64, hashes: np.ndarray
) -> np.ndarray:
    """bool (n,): whether each of `hashes`, (n,) from low to high, is one of a source's.

    Not by np.isin, which sorts both: 3 GB where an earlier source has 100M documents."""
    first = np.searchsorted(source_hashes, low)
    last = np.searchsorted(source_hashes, high, "right")
    in_range = np.array(source_hashes[first:last])
    if not len(in_range):
        return np.zeros(len(hashes), bool)
    nearest = np.minimum(np.searchsorted(in_range, hashes), len(in_range) - 1)
    return in_range[nearest] == hashes
