"""Tell what a data folder holds, finished or not.

Every line begins with the name of its source, so that the output can be searched as well as read.
"""

import fcntl
import json
import os
import struct
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.shards import Index, damage, read_index

WIDTH = 130
NAMED = 5               # files named before "and 12 more"


def show(folders: list[Path]) -> Iterator[str]:
    """Lines to print: a table of the sources' splits, and of each source where it came from and what was left out.

    What is damaged or unfinished gets a sentence, the rest is shown all the same. Raises UserError: no such folder, or one
    that holds nothing prepared.
    """
    for folder in folders:
        yield from _show(folder)


def print_rows(index: Index) -> None:
    """A line for each split of one source."""
    for name, s in index.splits.items():
        print(f"  {index.source:12} {name:5} {s.documents:>9,} documents {s.text_bytes / 1e6:>9,.2f} MB "
              f"{s.tokens:>14,} tokens  {index.license}")


def verify(folders: list[Path]) -> None:
    """Hashes every shard again and prints a line per source. Raises UserError naming all that differ or are unfinished."""
    bad = []
    for folder in folders:
        finished, begun = _sources(folder)
        for source in sorted(finished | begun):
            found = list(damage(source)) if source in finished else [f"{source} is unfinished: the same command goes on with it"]
            print(f"{'unfinished' if source in begun else 'BAD' if found else 'OK '} {source}", flush=True)
            bad += found
    if bad:
        raise UserError("\n".join(bad))


def _sources(folder: Path) -> tuple[set[Path], set[Path]]:
    """The folders of the sources there, finished ones and unfinished ones. Raises UserError where there is none."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name one that holds prepared sources, such as data")
    finished = {path.parent for path in folder.rglob("index.json")}
    begun = {path.parent.parent for path in folder.rglob("parts/plan.json")} - finished
    if not finished | begun:
        raise UserError(f"{folder} holds nothing prepared: `python prepare_data.py` says how to make it")
    return finished, begun


# ------------------------------------------------------------------------------------------------------------- finished

def _show(folder: Path) -> Iterator[str]:
    finished, begun = _sources(folder)
    names = {path: path.relative_to(folder).as_posix() if path != folder else path.resolve().name for path in finished | begun}
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
    for path in sorted(names):
        if path in problems:
            lines = [("damaged", problems[path])]
        else:
            lines = _story(indexes[path]) if path in indexes else _progress(path / "parts")
        for word, text in lines:
            yield from _wrapped(f"{names[path]:{width}}  {word:10}  ", text)


def _table(indexes: dict[str, Index], width: int) -> Iterator[str]:
    yield f"{'source':{width}}  {'split':10}  {'documents':>12}  {'tokens':>16}  {'bytes/token':>11}  {'GB on disk':>10}"
    for split in "train", "val":
        rows = {name: [index] for name, index in indexes.items()}
        tokenizers = {(index.tokenizer, index.tokenizer_sha256) for index in indexes.values()}
        if len(rows) > 1 and len(tokenizers) == 1:      # tokens of two kinds have no sum
            rows["all"] = list(indexes.values())
        for name, chosen in rows.items():
            disk = sum(np.dtype(index.dtype).itemsize * index.splits[split].tokens for index in chosen)
            chosen = [index.splits[split] for index in chosen]
            documents, tokens = sum(s.documents for s in chosen), sum(s.tokens for s in chosen)
            text_bytes = sum(s.text_bytes for s in chosen)
            yield (f"{name:{width}}  {split:10}  {documents:12,}  {tokens:16,}  {text_bytes / max(1, tokens):11.2f}  "
                   f"{disk / 1e9:10.3f}")


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
        there = index.splits["train"].tokens
        end = (f"until there were {index.budget:,} training tokens" if not index.is_whole else "to the end" if not index.budget
               else f"to the end (budget {index.budget:,} training tokens, {there:,} are all there are)")
        yield "read", f"{_some(len(index.files), 'file')} {end}: {', '.join(index.files[:NAMED])}" + _more(index.files)
    if index.skipped:
        yield "skipped", _some(len(index.skipped), "file") + ": " + _reasons({e["file"]: e["reason"] for e in index.skipped})


# ------------------------------------------------------------------------------------------------------------ unfinished

def _progress(parts: Path) -> Iterator[tuple[str, str]]:
    """What a source's parts (prepare/parts.py) tell while it is being made, or after it was cut off."""
    names = [file["name"] for file in _json(parts / "plan.json").get("files", [])]
    pieces = [_json(path) for path in parts.glob("[0-9]*_[0-9]*.json")]
    tokens, done = (sum(piece.get(key, 0) for piece in pieces) for key in ("tokens", "is_last"))
    held = sum(_is_held(path) for path in parts.glob("[0-9]*.lock"))
    yield "unfinished", (f"{tokens:,} tokens in finished pieces; of {_some(len(names), 'input file')} {done} read to the end, "
                         f"{held} being read now" +
                         ("; the shards are to be made of them" if (parts / "layout.json").exists() else ""))
    workers = [path.stem.removeprefix("worker_").rsplit("_", 1) for path in sorted(parts.glob("worker_*.lock")) if _is_held(path)]
    yield "workers", (", ".join(f"process {pid} on host {host!r}" for host, pid in workers) or
                      "none; the command that began it goes on where it was cut off")
    numbers = [int(path.stem) for path in sorted(parts.glob("[0-9]*.failed"))]
    failed = {names[n]: _json(parts / f"{n:05d}.failed").get("reason", "?") for n in numbers if n < len(names)}
    if failed:
        yield "failed", _some(len(failed), "input file") + ": " + _reasons(failed)


def _is_held(lock: Path) -> bool:
    """Whether another process holds the lock, without taking it even for a moment: a worker that asks must not be refused."""
    if not sys.platform.startswith("linux"):    # struct flock differs from system to system
        return False
    with suppress(OSError), open(lock, "rb") as file:       # it may be gone meanwhile
        found = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK
    return False


def _json(path: Path) -> dict:
    """The object in the file; nothing where it went away meanwhile or is not to be read."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


# ------------------------------------------------------------------------------------------------------------- printing

def _some(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def _reasons(files: dict[str, str]) -> str:
    return "; ".join(f"{name} ({reason})" for name, reason in list(files.items())[:NAMED]) + _more(files)


def _more(files: list | dict) -> str:
    return f" and {len(files) - NAMED:,} more" if len(files) > NAMED else ""


def _wrapped(start: str, text: str) -> list[str]:
    """Lines of at most WIDTH characters where words allow it, each with the same start."""
    room = max(40, WIDTH - len(start))
    return [start + line for line in textwrap.wrap(" ".join(text.split()), room, break_on_hyphens=False)] or [start.rstrip()]
