"""What a data folder holds, for people, and whether it is what was written."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.text import grid
from prepare.pieces import read_pieces
from prepare.text_reader import TXT_CHARS
from runtime.shards import Index, damage, read_index


def show(folder: Path) -> None:
    """Print a table of the sources' splits, then what else there is to say of each source, finished
    or not."""
    rows, told = [["source", "split", "documents", "tokens", "bytes/token", "GB on disk"]], []
    for path in _sources(folder):
        name = path.resolve().name
        try:
            if (path / "index.json").exists():
                index = read_index(path)
                rows += [
                    [
                        name,
                        split,
                        f"{s.documents:,}",
                        f"{s.tokens:,}",
                        f"{s.text_bytes / s.tokens:.2f}",
                        f"{s.tokens * np.dtype(index.dtype).itemsize / 1e9:.3f}",
                    ]
                    for split, s in index.splits.items()
                ]
                lines = [*_story(index)]
            else:
                pieces = read_pieces(path / "parts")
                count = sum(piece.end in ("whole", "enough") for piece in pieces)
                lines = [
                    (
                        f"unfinished: {sum(piece.tokens for piece in pieces):,} tokens so far; of"
                        f" {len(pieces):,} input files {count} are read; the same command goes on"
                        " with it"
                    ),
                    *(
                        f"failed: {piece.input[0]} ({piece.reason})"
                        for piece in pieces
                        if piece.reason
                    ),
                ]
        except UserError as error:
            lines = [f"damaged: {error}"]
        told += [f"{name}: {line}" for line in lines]
    print(grid(rows), *told, sep="\n")


def verify(folders: list[Path]) -> None:
    """Hashes every shard again and prints a line per source. Raises UserError naming all that
    differ or are unfinished."""
    bad = []
    for source in [source for folder in folders for source in _sources(folder)]:
        is_finished = (source / "index.json").exists()
        found = (
            list(damage(source))
            if is_finished
            else [f"{source} is unfinished: the same command goes on with it"]
        )
        print(f"{'BAD' if found else 'OK '} {source}", flush=True)
        bad += found
    if bad:
        raise UserError("\n".join(bad))


def _sources(folder: Path) -> list[Path]:
    """The folders of the sources there, finished or not."""
    finished, unfinished = folder.rglob("index.json"), folder.rglob("parts/begun.json")
    if not (found := {path.parent for path in finished} | {path.parents[1] for path in unfinished}):
        raise UserError(
            f"there is no prepared source in {folder}: `python prepare_data.py` says how to"
            " make one"
        )
    return sorted(found)


def _story(index: Index) -> Iterator[str]:
    """What the index tells beside its splits."""
    yield textwrap.shorten(
        f"from {index.dataset} @ {index.revision}, {index.license}", 300, placeholder=" ..."
    )
    yield (
        f"tokenizer {index.tokenizer} (sha256 {index.tokenizer_sha256[:9]}...,"
        f" {index.vocab_size:,} ids)"
    )
    if index.is_masked:
        if "messages" in index.selection.get("instruct", ()):
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
    if "control_tokens" in index.selection:
        yield "control tokens that its text spells are text"
    sources = ", ".join(f"{source} {count:,}" for source, count in index.duplicates.items())
    yield (
        f"dropped: copies {sum(index.duplicates.values()):,}"
        + (f" (first met in {sources})" if sources else "")
        + f", empty {index.empty:,}, contaminated {index.contaminated:,}"
    )
    yield (
        f"read: {len(index.files):,} input files"
        f" {'to the end' if index.is_whole else f'for {index.budget:,} tokens'}"
    )
    yield from (f"skipped: {entry['file']} ({entry['reason']})" for entry in index.skipped)
    if index.cut:
        how = "those of a document in one split"
        if index.cut["split_by"] == "piece":
            how = (
                "which are split one by one, as there is no other document: validation text lies"
                " between training text"
            )
        yield (
            f"cut: {index.cut['documents']:,} documents of text files, longer than {TXT_CHARS:,} "
            f"characters, into {index.cut['pieces']:,} pieces, {how}"
        )
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
    is_chat = "messages" in index.selection.get("instruct", ())
    for file, count in index.joined_lists.items():
        if is_chat:
            yield (
                f"joined: {count:,} messages of {file} were lists of parts, which became one text"
                " each"
            )
        else:
            yield f"joined: {count:,} texts of {file} were lists of strings, which became lines"
    for entry in index.odd_rows:
        yield f"left out: {entry['rows']:,} rows of {entry['file']}, the first: {entry['first']}"
