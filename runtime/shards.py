"""Keep the tokens of one source in a folder of shards that an index describes.

The folder holds train_00000.bin ..., val_00000.bin ... (little-endian token ids of 16 bits, or of
32 where the tokenizer has more; an end-of-text token before each document), hashes.npy (blake2b-64
of the documents, sorted: sources prepared later drop copies of them) and index.json. The index is
written last, so a folder without one is unfinished. It holds the SHA-256 of each of these files and
of itself: a flipped bit or an edit is found."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib.errors import UserError
from lib.files import digest, file_sha256, write_atomically

FORMAT_VERSION = 2
DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # index.json's "dtype" -> NumPy's
# of a masked source (prompts and responses, 32 bits): beside ids that are context only
LOSS_MASK_BIT = np.uint32(1 << 31)
PARTS = "parts"  # folder of a source that is being prepared
SHARD_TOKENS = 100_000_000  # 200 or 400 MB: few files, yet a damaged one is soon replaced


class Shard(NamedTuple):
    path: Path
    tokens: int
    sha256: str


class Split(NamedTuple):
    documents: int
    # UTF-8 bytes of the documents; of the responses only where the source is masked
    text_bytes: int
    tokens: int  # the end-of-text tokens included
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """The content of one source's index.json; its keys are these fields, "format_version" and
    "sha256"."""

    source: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    dtype: str  # of the shards: "<u2" or "<u4", NumPy's names ("uint16" or "uint32" in the file)
    dataset: str
    revision: str
    license: str
    split_rule: str
    duplicates: dict[str, int]  # documents dropped, by the source that holds the first copy
    empty: int  # documents of white space only, dropped
    contaminated: int  # documents dropped for words they share with ...
    decontaminated_against: list[dict[str, str]]  # ... these: {file, sha256}
    skipped: list[dict[str, str]]  # input files that could not be read: {file, reason}
    files: list[str]  # input files read, in order
    selection: dict  # what was taken of each row
    is_whole: bool  # whether the source was read to its end, not cut by a budget
    budget: int | None  # training tokens asked for
    hashes_sha256: str  # of hashes.npy
    splits: dict[str, Split]  # "train" and "val"
    # whether LOSS_MASK_BIT marks context tokens; absent in the file where it is false
    is_masked: bool = False
    # Of the input files that were read; each is absent in the file where there are none.
    # Long documents of text files: {documents, pieces, split_by}, the last "document", or "piece"
    # where it is the only one.
    cut: dict = field(default_factory=dict)
    # lines with an end-of-text token beside other text
    inner_borders: dict[str, int] = field(default_factory=dict)
    # characters, U+FFFD in place of bytes that are not UTF-8
    replaced: dict[str, int] = field(default_factory=dict)
    # tokens that stand for text that the tokenizer cannot spell, <unk>
    unknown: dict[str, int] = field(default_factory=dict)
    # texts that were lists of strings, joined by line ends
    joined_lists: dict[str, int] = field(default_factory=dict)
    # rows that skip_bad=true left out: {file, rows, first}
    odd_rows: list[dict] = field(default_factory=list)

    def border(self, eot: int) -> np.uint32:
        """What begins a document in the shards: the end-of-text token `eot`, of conversations with
        LOSS_MASK_BIT, since nothing is learned of their border. The same token without it is then a
        part of an answer."""
        is_chat = "messages" in self.selection.get("instruct", ())
        return LOSS_MASK_BIT | np.uint32(eot) if is_chat else np.uint32(eot)

    @property
    def shards(self) -> list[Shard]:
        return [shard for split in self.splits.values() for shard in split.shards]


def read_index(folder: Path) -> Index:
    """The index of one source, checked against its own hash; every shard is there in full length.
    Raises UserError."""
    path = folder / "index.json"
    if not path.exists():
        raise UserError(missing_source([folder]))
    try:
        raw = json.loads(path.read_bytes())
        if raw.pop("sha256") != digest(raw) or raw.pop("format_version") != FORMAT_VERSION:
            raise ValueError(f"it is not what was written as format_version={FORMAT_VERSION}")
        for split in raw["splits"].values():
            split["shards"] = tuple(
                Shard(folder / Path(shard.pop("file")).name, **shard) for shard in split["shards"]
            )
        splits = {name: Split(**split) for name, split in raw["splits"].items()}
        index = Index(**raw | {"dtype": DTYPES[raw["dtype"]], "splits": splits})
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged and cannot be read ({error!r}): {_restore(folder)}"
        ) from error
    for shard in index.shards:
        size, promised = (
            shard.path.stat().st_size if shard.path.is_file() else 0,
            np.dtype(index.dtype).itemsize * shard.tokens,
        )
        if size != promised:
            raise UserError(
                f"{shard.path} {f'has {size} bytes' if size else 'is missing'}, but {path} promises"
                f" {promised} bytes: {_restore(folder)}"
            )
    return index


def missing_source(folders: list[Path]) -> str:
    """The sentence for sources that are not there, folders of one data folder that hold no
    index.json; one a line where some were begun."""
    sentences = [
        f"{folder} is not finished: wait for the `python prepare_data.py` that makes it, or give"
        f" that command again; `python prepare_data.py --show {folder}` says how far it is"
        for folder in folders
        if (folder / PARTS).is_dir()
    ]
    absent = [folder for folder in folders if not (folder / PARTS).is_dir()]
    if absent:
        sentences.append(_absent_source(absent))
    return "\n".join(sentences)


def _absent_source(folders: list[Path]) -> str:
    """The sentence for folders without anything of a source."""
    out, names = folders[0].parent, [folder.name for folder in folders]
    sources = ", ".join(sorted(path.parent.name for path in out.glob("*/index.json")))
    if not sources:
        sources = "no source"
    paths = " or ".join(str(folder / "index.json") for folder in folders)
    them, name = ("each", "NAME") if len(names) > 1 else ("it", names[0])
    words = f"local FILE... name={name}"
    return (
        f"there is no {paths} ({out} holds {sources}): make {them} of your own text by `python"
        f" prepare_data.py {words} out={out}`, or, in place of `{words}`, give `demo` for the"
        " demo's sources or the name of one of configs/sources.py, or set data.mixture= and"
        " data.dir= to what there is"
    )


def _restore(folder: Path) -> str:
    return f"restore it, or delete {folder} and run `python prepare_data.py` again"


def damage(folder: Path) -> Iterator[str]:
    """A sentence for each file whose content is not what was written, or one for an index that
    cannot be read."""
    try:
        index = read_index(folder)
        # sources prepared later find copies by it
        hashes = Shard(folder / "hashes.npy", 0, index.hashes_sha256)
        yield from filter(None, map(shard_damage, [*index.shards, hashes]))
    except UserError as error:
        yield str(error)


def shard_damage(shard: Shard) -> str | None:
    """A sentence where the file is gone or its SHA-256 is not the index's. Raises OSError where it
    cannot be read."""
    if shard.path.is_file() and file_sha256(shard.path) == shard.sha256:
        return None
    problem = (
        "damaged: its sha256 is not the one in index.json" if shard.path.exists() else "missing"
    )
    return f"{shard.path} is {problem}; {_restore(shard.path.parent)}"


def write_index(folder: Path, index: dict) -> None:
    """Write index.json, the last file of a source. `index`: Index's fields."""
    index = {"format_version": FORMAT_VERSION, **index}
    write_atomically(folder / "index.json", json.dumps(index | {"sha256": digest(index)}, indent=1))


def remove_shards(folder: Path) -> None:
    """Remove shards, hashes and index, finished or not, from the folder of a source; other files
    stay."""
    for path in folder.iterdir():
        if re.fullmatch(r"\.?((train|val)_\d{5}\.bin|hashes\.npy|index\.json)(\.tmp)?", path.name):
            path.unlink()
