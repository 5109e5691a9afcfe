"""Where each document goes: copies, splits, the end of the budget."""

from dataclasses import dataclass

import numpy as np

from prepare.pieces import COPY, TRAIN, VAL, Piece

SORTED_AT_ONCE = 8_000_000  # documents: memory stays below 0.5 GB and 16 bytes a document
HOMES = {"train": TRAIN, "val": VAL}
COUNTS = ("documents", "text_bytes", "tokens")  # of a split


@dataclass
class Layout:
    """Where the documents of a source go."""

    totals: np.ndarray  # (3, homes): COUNTS by home
    is_whole: bool = True  # whether the budget was not reached
    documents: int = 0  # that go to a split, a document that was cut as one
    cut_documents: int = 0  # of them, those of more than one piece
    cut_pieces: int = 0  # of these

    def count_documents(self, piece: Piece, home: np.ndarray) -> None:
        """home: uint16, for the first rows of the piece, where each goes."""
        if not piece.has_cuts:
            self.documents += int((home <= VAL).sum())
            return
        first_rows = piece.document_of_rows()[: len(home)]
        rows_of_each = np.unique(first_rows[home <= VAL], return_counts=True)[1]
        self.documents += len(rows_of_each)
        self.cut_documents += int((rows_of_each > 1).sum())
        self.cut_pieces += int(rows_of_each[rows_of_each > 1].sum())


def find_copies(pieces: list[Piece], earlier: list[np.ndarray]) -> list[np.ndarray]:
    """uint16 (documents,) of each piece: TRAIN for a first document, COPY or more for others. By
    ranges of hashes, of which each holds about SORTED_AT_ONCE."""
    hashes = np.concatenate(
        [np.empty(0, np.uint64), *(piece.table()["hash"].copy() for piece in pieces)]
    )
    homes, count = np.full(len(hashes), TRAIN, np.uint16), -(-len(hashes) // SORTED_AT_ONCE)
    for i in range(count):
        low, high = np.uint64(2**64 * i // count), np.uint64(2**64 * (i + 1) // count - 1)
        places = np.flatnonzero((hashes >= low) & (hashes <= high))
        # of equal ones the first document stays first
        places = places[np.argsort(hashes[places], kind="stable")]
        some = hashes[places]
        homes[places[1:][some[1:] == some[:-1]]] = COPY
        for number, those in enumerate(earlier, COPY + 1):  # no two of them share a document
            # Not by np.isin, which sorts both: 3 GB where an earlier source has 100M documents.
            there = np.array(
                those[np.searchsorted(those, low) : np.searchsorted(those, high, "right")]
            )
            if len(there):
                homes[
                    places[there[np.minimum(np.searchsorted(there, some), len(there) - 1)] == some]
                ] = number
    return np.split(homes, np.cumsum([piece.documents for piece in pieces]))[:-1]
