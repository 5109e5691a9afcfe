"""Keep the tokens of one source in a folder of shards that an index describes.

The folder holds train_00000.bin ..., val_00000.bin ... (little-endian token ids of 16 bits, or of 32 where the tokenizer has
more; an end-of-text token before each document), hashes.npy (blake2b-64 of the documents, sorted: sources prepared later
drop copies of them) and index.json. The index is written last, so a folder without one is unfinished. It holds the SHA-256
of each of these files and of itself: a flipped bit or an edit is found.

A source of prompts and responses is masked: its tokens have 32 bits, and LOSS_MASK_BIT marks those that are context only and
never a target of the loss.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from runtime.cli import UserError

FORMAT_VERSION = 2
DTYPES = {"uint16": "<u2", "uint32": "<u4"}     # index.json's "dtype" -> NumPy's
LOSS_MASK_BIT = np.uint32(1 << 31)      # set beside the id of a masked source's context tokens
MIXTURE = ("fineweb_edu", "python", "c", "arxiv")       # sources that prepare_data.py makes by their name alone
SHARD_TOKENS = 100_000_000      # 200 or 400 MB: few files, yet a damaged one is soon replaced


# -------------------------------------------------------------------------------------------------------------- reading

@dataclass(frozen=True)
class Shard:
    path: Path
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    documents: int
    text_bytes: int         # UTF-8 bytes of the documents; of the responses only where the source is masked
    tokens: int             # the end-of-text tokens included
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """The content of one source's index.json; its keys are these fields, "format_version" and "sha256"."""
    source: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    dtype: str                      # of the shards: "<u2" or "<u4", NumPy's names ("uint16" or "uint32" in the file)
    dataset: str
    revision: str
    license: str
    split_rule: str
    duplicates: dict[str, int]      # documents dropped, by the source that holds the first copy
    empty: int                      # documents of white space only, dropped
    contaminated: int               # documents dropped for words they share with ...
    decontaminated_against: list[dict[str, str]]    # ... these: {file, sha256}
    skipped: list[dict[str, str]]   # input files that could not be read: {file, reason}
    files: list[str]                # input files read, in order
    selection: dict                 # what was taken of each row
    is_whole: bool                  # whether the source was read to its end, not cut by a budget
    budget: int | None              # training tokens asked for
    hashes_sha256: str              # of hashes.npy
    splits: dict[str, Split]        # "train" and "val"
    is_masked: bool = False         # whether LOSS_MASK_BIT marks context tokens; absent in the file where it is false


def read_index(folder: Path) -> Index:
    """The index of one source, checked against its own hash; every shard is there in full length.

    Raises UserError naming the file, what was expected and the command to run.
    """
    path = folder / "index.json"
    again = f"delete {folder} and run `python prepare_data.py` again"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(_how_to_make(folder)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}): {again}") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version not in (None, FORMAT_VERSION):
        raise UserError(f"{path} describes format_version={version!r:.40}, but this version reads "
                        f"format_version={FORMAT_VERSION}: {again}")
    if version is None or raw.get("sha256") != _index_sha256(raw):
        raise UserError(f"{path} is damaged (it is not what was written, its own sha256 says): {again}")
    try:
        values = {key: value for key, value in raw.items() if key not in ("format_version", "sha256")}
        splits = {name: _split(folder, values["splits"][name]) for name in ("train", "val")}
        index = Index(**values | {"dtype": DTYPES[values["dtype"]], "splits": splits})
    except (KeyError, TypeError) as error:      # of another program, which wrote other keys
        raise UserError(f"{path} is damaged ({error!r}): {again}") from error
    for shard in _shards(index):
        size = shard.path.stat().st_size if shard.path.is_file() else None
        if size != (promised := np.dtype(index.dtype).itemsize * shard.tokens):
            found = "is missing" if size is None else f"has {size} bytes"
            raise UserError(f"{shard.path} {found}, but {path} promises {promised} bytes: list all damage "
                            f"with `python prepare_data.py --verify {folder}`, then restore the file, or {again}")
    return index


def _split(folder: Path, raw: dict) -> Split:
    shards = (Shard(folder / Path(shard["file"]).name, shard["tokens"], shard["sha256"]) for shard in raw["shards"])
    return Split(raw["documents"], raw["text_bytes"], raw["tokens"], tuple(shards))


def _shards(index: Index) -> list[Shard]:
    return [shard for split in index.splits.values() for shard in split.shards]


def _how_to_make(folder: Path) -> str:
    out, known = folder.parent, sorted(path.parent.name for path in folder.parent.glob("*/index.json"))
    there = f"there is no {folder / 'index.json'}" + (f" ({out} holds {', '.join(known)})" if known else "")
    if (folder / "parts").is_dir():
        return f"{there}: {folder} is unfinished, the command that began it goes on with it"
    words = folder.name if folder.name in MIXTURE else f"local FILE... name={folder.name}"
    return (f"{there}: make it with `python prepare_data.py {words} out={out}`, or the demo's sources with "
            f"`python prepare_data.py demo out={out}`")


def damage(folder: Path) -> Iterator[str]:
    """A sentence for each file whose content is not what was written, or one for an index that cannot be read."""
    try:
        index = read_index(folder)
    except UserError as error:
        yield str(error)
        return
    yield from filter(None, map(shard_damage, _shards(index)))
    hashes = folder / "hashes.npy"
    if not hashes.is_file() or file_sha256(hashes) != index.hashes_sha256:
        yield (f"{hashes} is {'damaged' if hashes.exists() else 'missing'}: training does not need it, but copies in sources "
               f"prepared after this one are found by it; restore the file, or delete {folder} and run "
               f"`python prepare_data.py` again")


def shard_damage(shard: Shard) -> str | None:
    """A sentence where the file's SHA-256 is not the index's. Raises OSError where it cannot be read."""
    if file_sha256(shard.path) == shard.sha256:
        return None
    return (f"{shard.path} is damaged: its sha256 is not the one in index.json; restore the file, or delete "
            f"{shard.path.parent} and run `python prepare_data.py` again")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -------------------------------------------------------------------------------------------------------------- writing

@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which appears at `path` once all of it is on disk; after an error nothing is left.

    For content that is written piece by piece; runtime.rows.write_atomically takes it whole."""
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)       # it may have filled the disk
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)        # the caller may delete next what the file was made of
    finally:
        os.close(folder)


def write_index(folder: Path, index: dict) -> None:
    """Write index.json, the last file of a source. `index`: Index's fields; "dtype" may be left out for uint16."""
    index = {"format_version": FORMAT_VERSION, "dtype": "uint16", **index}
    with new_file(folder / "index.json") as file:
        file.write(json.dumps(index | {"sha256": _index_sha256(index)}, indent=1).encode())


def _index_sha256(index: dict) -> str:
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def remove_shards(folder: Path) -> None:
    """Remove shards, hashes and index, finished or not, from the folder of a source; other files stay."""
    for path in folder.iterdir():
        if re.fullmatch(r"((train|val)_\d{5}\.bin|hashes\.npy|index\.json)(\.tmp)?", path.name):
            path.unlink()
