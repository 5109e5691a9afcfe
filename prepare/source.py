"""What prepare_data.py passes from room to room: sources, their files, batches of documents, pieces of tokens."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

# A row per document of a piece: blake2b-64 of the text, tokens (end-of-text included), UTF-8 bytes, those of a prompt left
# out. A document that was left out has a row too, with no tokens: an empty one no bytes either, a contaminated one its bytes.
DOCUMENT = np.dtype([("hash", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
BATCH_BYTES = 2_000_000     # enough that handing a batch over costs little beside its encoding, small beside memory


class BadFile(Exception):
    """An input file that cannot be read, whatever was tried; the message says why. It is skipped, counted and listed."""


@dataclass(frozen=True)
class Batch:
    """Documents of one input file in the order of its rows."""
    text: bytes             # UTF-8 of all of them, joined
    ends: np.ndarray        # int64 (n,): where each ends in `text`
    rows: int               # rows of the file up to the end of this batch, those that a filter dropped included
    read: float = 0.0       # share of the file that was read so far, 0 to 1, as well as it is known
    heads: np.ndarray | None = None     # int64 (n,): of prompts and responses, how many bytes of each document are its prompt


class InputFile(Protocol):
    """One file of a source. `read` gives the same rows in the same order at each call."""
    name: str               # unique within the source
    bytes: int | None       # as it lies on disk or on the server
    # and, where its content may change under its name: stamp, an int that changes with it

    def read(self, skip_rows: int) -> Iterator[Batch]:
        """The documents after the first `skip_rows` rows. Raises UserError (the user's mistake), BadFile."""


@dataclass(frozen=True)
class Source:
    """Where documents come from; everything after `files` is common to all sources."""
    name: str
    # The input files in the order they are taken in. May ask a server, hence the argument: names and sizes of an earlier
    # call, which the list is then made from; None at the first.
    files: Callable[[list[tuple[str, int | None]] | None], list[InputFile]]
    dataset: str
    revision: str
    license: str
    selection: dict = field(default_factory=dict)   # what is taken of each row, in JSON: column, filter
    tokens: float | None = None     # of the whole source, about, by GPT-2's tokenizer; None where nobody knows
    may_age: bool = False           # whether shards of an older revision serve as well
    is_masked: bool = False         # whether its documents are prompts and responses, the responses alone to be learned
    has_stamps: bool = False        # the revision sums up stamps of the files: of what is begun a changed file alone is made anew


@dataclass(frozen=True)
class Encoded:
    """A batch after the tokenizer."""
    ids: np.ndarray             # uint16 or uint32: every document that is not left out, its end-of-text token first
    documents: np.ndarray       # DOCUMENT, a row per document
    rows: int                   # of the batch
    read: float                 # of the batch


@dataclass(frozen=True)
class Piece:
    """A stretch of one input file's rows, tokenised: <stem>.bin (ids as in the shards), .npy (DOCUMENT), .json (the rest),
    which is renamed last: a piece is there if and only if its .json is."""
    stem: Path
    file: int               # number of the input file in the source's order
    rows: tuple[int, int]   # first row, and the row after the last
    documents: int          # rows of the table
    tokens: int
    is_last: bool           # whether the input file ends here


def batches(documents: Iterable[str], skip_rows: int = 0, share_read: Callable[[], float] = lambda: 0.0) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES out of texts that have a UTF-8 form, a row each."""
    for texts, rows, read in _groups(((text,) for text in documents), skip_rows, share_read):
        yield Batch(b"".join(texts), np.cumsum([len(text) for text in texts], dtype=np.int64), rows, read)


def pair_batches(pairs: Iterable[tuple[str, str]], skip_rows: int, share_read: Callable[[], float]) -> Iterator[Batch]:
    """The same of prompts and responses."""
    for texts, rows, read in _groups(pairs, skip_rows, share_read):
        sizes = np.array([len(text) for text in texts], np.int64).reshape(-1, 2)
        yield Batch(b"".join(texts), sizes.sum(1).cumsum(), rows, read, heads=sizes[:, 0].copy())


def _groups(documents: Iterable[tuple[str, ...]], skip_rows: int,
            share_read: Callable[[], float]) -> Iterator[tuple[list[bytes], int, float]]:
    """The documents' texts one after the other, rows so far, share read."""
    texts, size, rows = [], 0, 0
    for document in documents:
        rows += 1
        if rows <= skip_rows:
            continue
        texts += [text.encode() for text in document]
        size += sum(map(len, texts[-len(document):]))
        if size >= BATCH_BYTES:
            yield texts, rows, share_read()
            texts, size = [], 0
    if texts:
        yield texts, rows, 1.0
