"""What a data folder holds, for people, and whether it is what was written."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.text import grid
from prepare.pieces import Piece, read_pieces
from prepare.text_reader import TXT_CHARS
from runtime.shards import PARTS, Index, damage, read_index

FEW_DOCUMENTS = 5  # a validation loss of fewer is that of single texts


def show(folder: Path) -> None:
    """Print a table of the sources' splits, then what else there is to say of each source, finished
    or not."""
    rows = [["source", "split", "documents", "tokens", "bytes/token", "GB on disk"]]
    notes = []
    for path in _sources(folder):
        name = path.resolve().name
        try:
            if (path / "index.json").exists():
                index = read_index(path)
                rows += _split_rows(name, index)
                lines = list(_story(index))
            else:
                lines = _unfinished(read_pieces(path / PARTS))
        except UserError as error:
            lines = [f"damaged: {error}"]
        notes += [f"{name}: {line}" for line in lines]
    print(grid(rows), *notes, sep="\n")


def _split_rows(name: str, index: Index) -> list[list[str]]:
    """A row of the table for each split of a source."""
    token_bytes = np.dtype(index.dtype).itemsize
    rows = []
    for split_name, split in index.splits.items():
        bytes_per_token = split.text_bytes / split.tokens
        gigabytes = split.tokens * token_bytes / 1e9
        counts = [f"{split.documents:,}", f"{split.tokens:,}"]
        rows.append([name, split_name, *counts, f"{bytes_per_token:.2f}", f"{gigabytes:.3f}"])
    return rows


def _unfinished(pieces: list[Piece]) -> list[str]:
    """What is said of a source without an index."""
    tokens = sum(piece.tokens for piece in pieces)
    n_read = sum(piece.end in ("whole", "enough") for piece in pieces)
    failures = [f"failed: {piece.input_name} ({piece.reason})" for piece in pieces if piece.reason]
    return [
        f"unfinished: {tokens:,} tokens so far; of {len(pieces):,} input files {n_read} are read;"
        " the same command goes on with it",
        *failures,
    ]


def verify(folders: list[Path]) -> None:
    """Hash every shard again and print a line per source. Raises UserError naming all that differ
    or are unfinished."""
    problems = []
    for source in [source for folder in folders for source in _sources(folder)]:
        if (source / "index.json").exists():
            problems_here = list(damage(source))
        else:
            problems_here = [f"{source} is unfinished: the same command goes on with it"]
        print(f"{'BAD' if problems_here else 'OK '} {source}", flush=True)
        problems += problems_here
    if problems:
        raise UserError("\n".join(problems))


def _sources(folder: Path) -> list[Path]:
    """The folders of the sources there, finished or not."""
    finished = {path.parent for path in _files_below(folder, "index.json")}
    unfinished = {path.parents[1] for path in _files_below(folder, f"{PARTS}/begun.json")}
    if not finished | unfinished:
        raise UserError(
            f"there is no prepared source in {folder}: `python prepare_data.py` says how to"
            " make one"
        )
    return sorted(finished | unfinished)


def _files_below(folder: Path, name: str) -> set[Path]:
    """rglob() enters no links, and a source may be a link to another disk: data/SOURCE, or
    data/demo/SOURCE."""
    return {*folder.rglob(name), *folder.glob(f"*/{name}"), *folder.glob(f"*/*/{name}")}


def _story(index: Index) -> Iterator[str]:
    """What the index tells beside its splits."""
    yield textwrap.shorten(
        f"from {index.dataset} @ {index.revision}, licence: {index.license}",
        300,
        placeholder=" ...",
    )
    yield (
        f"tokenizer {index.tokenizer} (sha256 {index.tokenizer_sha256[:9]}...,"
        f" {index.vocab_size:,} ids)"
    )
    yield from _targets(index)
    if "control_tokens" in index.selection:
        yield "control tokens that its text spells are text"
    yield _dropped(index)
    end = "to the end" if index.is_whole else f"for {index.budget:,} tokens"
    yield f"read: {len(index.files):,} input files {end}"
    for entry in index.skipped:
        yield f"skipped: {entry['file']} ({entry['reason']})"
    if index.cut:
        yield _cuts(index.cut)
    yield from _small_validation(index)
    yield from _remarks(index)


def _is_chat(index: Index) -> bool:
    return "messages" in index.selection.get("instruct", ())


def _targets(index: Index) -> Iterator[str]:
    """What is learned of instructions."""
    if not index.is_masked:
        return
    if _is_chat(index):
        yield (
            "targets are what the assistant wrote; all else is context, and bytes are those of"
            " the assistant"
        )
    else:
        yield (
            "targets are the responses and the ends of documents; prompts are context, and"
            " bytes are those of responses"
        )
    if "special_tokens" not in index.selection:
        yield (
            "special tokens that its rows spell are text, as they were before: prepare it anew"
            " for tokens"
        )


def _dropped(index: Index) -> str:
    return (
        f"dropped: {count_copies(index.duplicates)}, empty {index.empty:,},"
        f" contaminated {index.contaminated:,}"
    )


def count_copies(duplicates: dict[str, int]) -> str:
    """duplicates: as Index has them."""
    copies = f"copies {sum(duplicates.values()):,}"
    sources = ", ".join(f"{source} {count:,}" for source, count in duplicates.items())
    return f"{copies} (first met in {sources})" if sources else copies


def _small_validation(index: Index) -> Iterator[str]:
    validation = index.splits["val"].documents
    if validation >= FEW_DOCUMENTS:
        return
    documents = sum(split.documents for split in index.splits.values())
    yield (
        f"validation is {validation:,} of {documents:,} documents, so its loss is that of few"
        " texts: a larger val_share= with another out= keeps more"
    )


def _cuts(cut: dict) -> str:
    """cut: as Index has it."""
    how = "those of a document in one split"
    if cut["split_by"] == "piece":
        how = (
            "which are split one by one, as there is no other document: validation text lies"
            " between training text"
        )
    return (
        f"cut: {cut['documents']:,} documents of text files, longer than {TXT_CHARS:,} "
        f"characters, into {cut['pieces']:,} pieces, {how}"
    )


def _remarks(index: Index) -> Iterator[str]:
    """What was done to texts of single files, and rows that were left out."""
    for file, count in index.inner_borders.items():
        yield (
            f"not borders: {count:,} lines of {file} hold an end-of-text token beside other text,"
            " and it stays text; alone on its line it ends a document"
        )
    for file, count in index.replaced.items():
        yield (
            f"replaced: {count:,} characters of {file} are U+FFFD in place of bytes that are not"
            " UTF-8"
        )
    for file, count in index.unknown.items():
        yield (
            f"unknown: {count:,} tokens of {file} stand for text that the tokenizer cannot spell,"
            " such as <unk>: the text is lost, and bits per byte are too low by it"
        )
    for file, count in index.joined_lists.items():
        if _is_chat(index):
            yield (
                f"joined: {count:,} messages of {file} were lists of parts, which became one text"
                " each"
            )
        else:
            yield f"joined: {count:,} texts of {file} were lists of strings, which became lines"
    for entry in index.odd_rows:
        yield f"left out: {entry['rows']:,} rows of {entry['file']}, the first: {entry['first']}"
