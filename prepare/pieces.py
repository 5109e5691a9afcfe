"""What a task makes of an input file: its piece, ids as in the shards and a table of the
documents."""

import json
import re
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from lib.files import new_file, read_bytes, write_json
from prepare.encoding import Encoder, borders_of, cached_tokenizer
from prepare.job import HASH_STEPS
from prepare.records import ENCODING_REMEDY
from prepare.sources import BadFile, InputFile, Reading, SourceRow
from runtime.shards import PARTS

TELL_S = 1.0  # between two words of a task about its progress
# A row per document of a piece: blake2b-64 of the text, tokens (end-of-text included), UTF-8 bytes,
# those of a prompt left out. A document that was left out has a row too, with no tokens: an empty
# one no bytes either, a contaminated one its bytes.
DOCUMENT = np.dtype([("hash", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
# Where a document goes, or why it is left out. COPY + 1 + i: the first is in the i-th of the
# earlier sources.
TRAIN, VAL, EMPTY, CONTAMINATED, COPY = range(5)
# pieces of text files by an earlier one know no borders, and split each piece by itself
READER = 2
# share of a file's characters that may stand for bytes that are not UTF-8
REPLACED_MOST = 0.01


@dataclass
class Piece:
    """What the task of an input file wrote: <stem>.bin (ids as in the shards), .docs (DOCUMENT
    rows), .cuts where documents were cut (int64: the rows that go on with the document of the
    row before) and .json (the rest), which tells of the progress and, once the others are there,
    of the end."""

    stem: Path
    input: list | None = None  # name, bytes and stamp of the file (prepare.sources)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of text
    share: float = 0.0  # of the input file that was read
    # "whole": read to its end; "enough": until there were tokens enough; "failed"; "": not yet
    end: str = ""
    reason: str = ""  # why it failed
    reader: int = 1  # READER of the code that wrote it
    inner_borders: int = 0  # lines of a .txt that hold an end-of-text token within other text
    replaced: int = 0  # characters, U+FFFD in place of bytes that are not UTF-8
    unknown: int = 0  # tokens that stand for text that the tokenizer cannot spell
    joined_lists: int = 0  # texts that were lists of strings
    odd_rows: int = 0  # left out by skip_bad=true
    first_odd_row: str = ""  # where it is and why
    # uint16 (documents in use,): where each goes; None before lay_out()
    homes: np.ndarray | None = None

    @property
    def known_homes(self) -> np.ndarray:
        assert self.homes is not None, "lay_out() has not seen this piece"
        return self.homes

    @property
    def input_name(self) -> str:
        assert self.input is not None
        return self.input[0]

    def save(self) -> None:
        write_json(self.stem.with_suffix(".json"), {**vars(self), "stem": self.stem.name})

    def serves(self, tokens: float) -> bool:
        """Whether the task of the file is done, where `tokens` are wanted of it."""
        return self.end in ("whole", "failed") or (self.end == "enough" and self.tokens >= tokens)

    def table(self) -> np.ndarray:
        """DOCUMENT (documents,)"""
        return np.fromfile(f"{self.stem}.docs", DOCUMENT)

    @property
    def has_cuts(self) -> bool:
        return self.stem.with_suffix(".cuts").exists()

    def document_of_rows(self) -> np.ndarray:
        """int64 (documents,): for each row of the table the first row of its document, which is
        itself where it was not cut."""
        first = np.arange(self.documents)
        if self.has_cuts:
            first[np.fromfile(self.stem.with_suffix(".cuts"), np.int64)] = 0
        return np.maximum.accumulate(first)

    def split_residues(self, is_by_document: bool) -> np.ndarray:
        """uint64: what val_share is compared with, of each document that goes to a split, or of
        each of its pieces."""
        table, rows = self.table(), np.flatnonzero(self.known_homes <= VAL)
        if is_by_document:
            rows = np.unique(self.document_of_rows()[rows])
        return table["hash"][rows] % np.uint64(HASH_STEPS)


def named_reason(piece: Piece) -> str:
    """Why a file could not be read, with its name once."""
    name = piece.input_name
    is_named = name in re.split(r"[ :,]", piece.reason, maxsplit=1)[0]
    return piece.reason if is_named else f"{name}: {piece.reason}"


def read_piece(stem: Path) -> Piece:
    return Piece(**json.loads(read_bytes(stem.with_suffix(".json")) or "{}") | {"stem": stem})


def read_pieces(parts: Path) -> list[Piece]:
    """Of each input file, by its number; none where nothing was begun."""
    return [
        read_piece(parts / f"{number:05d}") for number in range(begun(parts.parent).get("files", 0))
    ]


def begun(folder: Path) -> dict:
    """What was begun in a source's folder: what its tokens depend on, and the number of input
    `files`; {} where nothing was."""
    return json.loads(read_bytes(folder / PARTS / "begun.json") or "{}")


def make_piece(
    file: InputFile,
    stem: Path,
    tokenizer_name: str,
    most: float,
    tick: Callable[[], object] = int,
    *,
    skip_bad: bool = False,
    control_tokens: str = "ids",
) -> None:
    """An input file to its piece, with `most` tokens or, if it ends before, fewer. `tick` is
    called about once a second. Raises UserError: a column or a row that cannot be used."""
    if read_piece(stem).serves(most):
        return
    piece = Piece(stem, [file.name, file.bytes, file.stamp], reader=READER)
    tokenizer = cached_tokenizer(tokenizer_name, control_tokens)
    reading = Reading(borders=borders_of(tokenizer), skips_odd_rows=skip_bad)
    encoder = Encoder(tokenizer, _cached_grams(stem.parent), reading)
    # a kill must not leave the old end beside new documents
    stem.with_suffix(".json").unlink(missing_ok=True)
    if piece.has_cuts:  # those of an earlier reading
        stem.with_suffix(".cuts").unlink()
    try:
        _write_documents(piece, file.read(reading), encoder, most, tick)
        _check_encoding(file.name, reading)
        piece.inner_borders = reading.inner_borders
        piece.replaced = reading.replaced
        piece.joined_lists = reading.joined_lists
        piece.odd_rows = reading.odd_rows
        piece.first_odd_row = reading.first_odd_row
        piece.share = 1.0
        piece.end = "whole" if piece.tokens < most else "enough"
    except BadFile as error:
        piece = Piece(stem, piece.input, share=1.0, end="failed", reason=str(error))
    piece.save()


def _write_documents(
    piece: Piece,
    rows: Iterator[SourceRow],
    encoder: "Encoder",
    most: float,
    tick: Callable[[], object],
) -> None:
    """Write the piece's ids, table and cuts, until it has `most` tokens; counts them in `piece`."""
    cuts = array("q")  # rows that continue a document
    has_begun = False  # whether the document of the row before has a row with text
    last_tick = time.monotonic()
    with (
        new_file(piece.stem.with_suffix(".bin")) as ids,
        new_file(piece.stem.with_suffix(".docs")) as table,
    ):
        for row in rows:
            piece.share = row.share
            document = encoder.encode(row)
            if document is None:
                continue
            for part in document.ids:
                ids.write(part.data)
                piece.unknown += encoder.count_unknown(part)
            tokens = sum(map(len, document.ids))
            table.write(np.array((document.hash, tokens, document.bytes), DOCUMENT).tobytes())
            is_continuation = row.is_continued and has_begun
            if is_continuation:
                cuts.append(piece.documents)
            has_begun = is_continuation or document.bytes > 0
            piece.documents += 1
            piece.tokens += tokens
            piece.bytes += document.bytes
            if piece.tokens >= most:
                break
            if time.monotonic() - last_tick > TELL_S:
                last_tick = time.monotonic()
                piece.save()
                tick()
    if cuts:
        with new_file(piece.stem.with_suffix(".cuts")) as file:
            file.write(cuts.tobytes())


def _check_encoding(name: str, reading: Reading) -> None:
    """Raises BadFile where the texts that were read are not UTF-8."""
    if reading.replaced > REPLACED_MOST * reading.characters:
        raise BadFile(
            f"{name} is not UTF-8: {reading.replaced:,} of the {reading.characters:,} characters "
            "that were read "
            f"stand for bytes of another encoding: {ENCODING_REMEDY}"
        )


_cached_grams = cache(lambda parts: np.load(parts / "grams.npy"))
