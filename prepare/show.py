"""Tell what a data folder holds, finished or not. Every line begins with the name of its source, so that it can be searched."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prepare.assemble import read_layout
from prepare.pipeline import begun, read_pieces
from runtime.cli import UserError
from runtime.shards import Index, damage, read_index

WIDTH, NAMED = 130, 5       # characters a line; files named before "and 12 more"


def show(folder: Path) -> Iterator[str]:
    """Lines to print: a table of the sources' splits, and of each source where it came from and what was left out.

    What is damaged or unfinished gets a sentence, the rest is shown all the same. Raises UserError: no such folder, or one
    that holds nothing prepared."""
    finished, unfinished = _sources(folder)
    names = {path: path.relative_to(folder).as_posix() if path != folder else path.resolve().name
             for path in sorted(finished | unfinished)}
    indexes, problems = {}, {}
    for path in sorted(finished):
        try:
            indexes[path] = read_index(path)
        except ValueError as error:
            problems[path] = str(error)
    width = max(map(len, names.values()))
    yield f"{folder}:"
    if indexes:
        yield from _table({names[path]: index for path, index in indexes.items()}, width)
    for path, name in names.items():
        for word, text in ([("damaged", problems[path])] if path in problems else
                           _story(indexes[path]) if path in indexes else _progress(path)):
            start = f"{name:{width}}  {word:10}  "
            yield from (start + line for line in textwrap.wrap(" ".join(text.split()), max(40, WIDTH - len(start)),
                                                               break_on_hyphens=False))


def verify(folders: list[Path]) -> None:
    """Hashes every shard again and prints a line per source. Raises UserError naming all that differ or are unfinished."""
    bad = []
    for folder in folders:
        finished, unfinished = _sources(folder)
        for source in sorted(finished | unfinished):
            found = list(damage(source)) if source in finished else [f"{source} is unfinished: the same command goes on with it"]
            print(f"{'unfinished' if source in unfinished else 'BAD' if found else 'OK '} {source}", flush=True)
            bad += found
    if bad:
        raise UserError("\n".join(bad))


def _sources(folder: Path) -> tuple[set[Path], set[Path]]:
    """The folders of the sources there, finished ones and unfinished ones."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name one that holds prepared sources, such as data")
    finished = {path.parent for path in folder.rglob("index.json")}
    unfinished = {path.parent.parent for path in folder.rglob("parts/begun.json")} - finished
    if not finished | unfinished:
        raise UserError(f"{folder} holds nothing prepared: `python prepare_data.py` says how to make it")
    return finished, unfinished


def _table(indexes: dict[str, Index], width: int) -> Iterator[str]:
    yield f"{'source':{width}}  {'split':10}  {'documents':>12}  {'tokens':>16}  {'bytes/token':>11}  {'GB on disk':>10}"
    for split in "train", "val":
        rows = {name: [index] for name, index in indexes.items()}
        if len(rows) > 1 and len({index.tokenizer_sha256 for index in indexes.values()}) == 1:  # tokens of two kinds have no sum
            rows["all"] = list(indexes.values())
        for name, chosen in rows.items():
            disk = sum(np.dtype(index.dtype).itemsize * index.splits[split].tokens for index in chosen)
            documents, tokens, size = (sum(getattr(index.splits[split], key) for index in chosen)
                                       for key in ("documents", "tokens", "text_bytes"))
            yield f"{name:{width}}  {split:10}  {documents:12,}  {tokens:16,}  {size / max(1, tokens):11.2f}  {disk / 1e9:10.3f}"


def _story(index: Index) -> Iterator[tuple[str, str]]:
    """What the index tells beside its splits: a word and a text each."""
    yield "from", textwrap.shorten(f"{index.dataset} @ {index.revision}", 300, placeholder=" ... (index.json has all of it)")
    yield "license", index.license
    its = f" (sha256 {index.tokenizer_sha256[:9]}..., {index.vocab_size:,} ids)" if index.tokenizer == "folder" else ""
    yield "tokenizer", index.tokenizer + its
    if index.is_masked:
        yield "targets", "the responses and the ends of documents; prompts are context, and bytes are those of responses"
    sources = ", ".join(f"{source} {count:,}" for source, count in index.duplicates.items() if count)
    dropped = f"copies {sum(index.duplicates.values()):,}" + (f" (first met in {sources})" if sources else "")
    dropped += f", empty {index.empty:,}"
    if index.decontaminated_against:
        files = ", ".join(entry["file"] for entry in index.decontaminated_against)
        dropped += f", contaminated {index.contaminated:,} (by {files})"
    yield "dropped", dropped
    if index.files:
        end = (f"until there were {index.budget:,} training tokens" if not index.is_whole else "to the end" if not index.budget
               else f"to the end ({index.budget:,} training tokens were asked for)")
        yield "read", f"{_files(len(index.files))} {end}: {', '.join(index.files[:NAMED])}{_more(len(index.files))}"
    if index.skipped:
        yield "skipped", _reasons([(entry["file"], entry["reason"]) for entry in index.skipped])


def _progress(folder: Path) -> Iterator[tuple[str, str]]:
    """What is known of a source while it is being made, or after it was cut off."""
    parts = folder / "parts"
    files = begun(parts)["files"]
    pieces = [read_pieces(parts, number) for number in range(len(files))]
    done = sum(bool(own) and own[-1].is_last for own in pieces)
    yield "unfinished", (f"{sum(piece.tokens for own in pieces for piece in own):,} tokens in finished pieces; of "
                         f"{_files(len(files))} {done} read to the end" +
                         ("; the shards are to be made of them" if read_layout(folder) else "") +
                         "; the command that began it goes on where it was cut off")
    if failed := sorted(parts.glob("*.failed")):
        yield "failed", _reasons([(files[int(path.stem)][0], path.read_text()) for path in failed])


def _files(count: int) -> str:
    return f"{count:,} input file{'s' * (count != 1)}"


def _reasons(files: list[tuple[str, str]]) -> str:
    return f"{_files(len(files))}: " + "; ".join(f"{name} ({reason})" for name, reason in files[:NAMED]) + _more(len(files))


def _more(count: int) -> str:
    return f" and {count - NAMED:,} more" if count > NAMED else ""
