"""Keep tokens in a folder of shards with an index.

One folder per source: train_00000.bin ..., val_00000.bin ... (little-endian uint16 token ids, an end-of-text token
before each document) and index.json, which is written last: a folder without it is unfinished. The index holds the
SHA-256 of each shard and of itself, so no flipped bit and no edit stays unseen.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMAT_VERSION = 1
KEYS = {"format_version", "dtype", "source", "tokenizer", "tokenizer_sha256", "vocab_size", "dataset", "revision", "license",
        "split_rule", "duplicates", "splits"}       # of index.json; and "sha256", of all of them
SHARD_TOKENS = 100_000_000      # 200 MB: few files, yet a damaged one is soon replaced


# -------------------------------------------------------------------------------------------------------------- reading

@dataclass(frozen=True)
class Shard:
    path: Path
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    documents: int
    text_bytes: int         # UTF-8 bytes of the documents
    tokens: int             # one end-of-text token per document included
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """What index.json says of one source."""
    source: str
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    dataset: str
    revision: str
    license: str
    split_rule: str
    duplicates: int
    splits: dict[str, Split]        # "train" and "val"


def read_index(folder: Path) -> Index:
    """The index of one source, its shards present in full length.

    Raises ValueError naming the file, what was expected and the command to run.
    """
    path = folder / "index.json"
    again = f"delete {folder} and run `python prepare_data.py` again"
    try:
        raw = json.loads(path.read_bytes().decode())
    except FileNotFoundError as error:
        known = sorted(p.parent.name for p in folder.parent.glob("*/index.json"))
        raise ValueError(f"there is no {path}" + (f" ({folder.parent} holds {', '.join(known)})" if known else "") +
                         f": make it with `python prepare_data.py local FILE... name={folder.name} "
                         f"out={folder.parent}`, or the demo's sources with `python prepare_data.py demo "
                         f"out={folder.parent}`") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {again}") from error
    try:
        if not isinstance(raw, dict):
            raise TypeError("it is no table of keys")
        if raw["format_version"] != FORMAT_VERSION or raw["dtype"] != "uint16":
            raise ValueError(f"{path} describes format_version={raw['format_version']!r:.40} and dtype={raw['dtype']!r:.40}, "
                             f"but this version reads format_version={FORMAT_VERSION} and dtype='uint16': {again}")
        if strange := raw.keys() - KEYS - {"sha256"}:
            raise TypeError(f"key {min(strange)!r:.40} is not one of its keys")
        if "sha256" in raw and raw["sha256"] != _index_sha256(raw):     # an index of earlier versions has none
            raise TypeError("it is not what was written, its own sha256 says")
        words = {key: _typed(raw, key, str) for key in
                 ("source", "tokenizer", "tokenizer_sha256", "dataset", "revision", "license", "split_rule")}
        counts = {key: _typed(raw, key, int) for key in ("vocab_size", "duplicates")}
        raw_splits = _typed(raw, "splits", dict)
        splits = {name: _read_split(folder, name, _typed(raw_splits, name, dict)) for name in ("train", "val")}
    except (KeyError, TypeError, RecursionError) as error:
        reason = f"key {error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged ({reason}): {again}") from error
    for shard in (shard for split in splits.values() for shard in split.shards):
        size = shard.path.stat().st_size if shard.path.is_file() else None
        if size != 2 * shard.tokens:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{shard.path} {found}, but {path} promises {2 * shard.tokens} bytes: list all damage "
                             f"with `python prepare_data.py --verify {folder}`, then restore the file, or {again}")
    return Index(splits=splits, **words, **counts)


def damage(folder: Path) -> Iterator[str]:
    """A sentence for each shard whose content is not the one that was written, or for an index that cannot be read."""
    try:
        index = read_index(folder)
    except ValueError as error:
        yield str(error)
        return
    for shard in (shard for split in index.splits.values() for shard in split.shards):
        if (sentence := _damage(shard)) is not None:
            yield sentence


def _damage(shard: Shard) -> str | None:
    with open(shard.path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256:
            return None
    return (f"{shard.path} is damaged: its sha256 is not the one in index.json; restore the file, or delete "
            f"{shard.path.parent} and run `python prepare_data.py` again")


class Verification:
    """Hashes shards once, in the background; `problem` is the first that was found: a sentence, or an error of its own.

    hashlib lets go of the interpreter's lock while it works, so the training thread hardly waits."""

    def __init__(self, shards: list[Shard]):
        self.problem: str | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(shards,), name="verify", daemon=True)   # keeps no run from ending
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def _run(self, shards: list[Shard]) -> None:
        for shard in shards:
            try:
                self.problem = _damage(shard)
            except Exception as error:      # whatever it is, a shard that was not hashed must not pass for a sound one
                self.problem = error
            if self.problem is not None:
                return


def _read_split(folder: Path, name: str, raw: dict) -> Split:
    shards = []
    for entry in _typed(raw, "shards", list):
        if not isinstance(entry, dict) or not re.fullmatch(rf"{name}_[0-9]{{5}}\.bin", _typed(entry, "file", str)):
            raise TypeError(f"splits.{name}.shards must name files like {name}_00000.bin")
        shards.append(Shard(folder / entry["file"], _typed(entry, "tokens", int), _typed(entry, "sha256", str)))
    split = Split(*(_typed(raw, key, int) for key in ("documents", "text_bytes", "tokens")), tuple(shards))
    if split.tokens != sum(shard.tokens for shard in shards) or len({shard.path for shard in shards}) != len(shards):
        raise TypeError(f"splits.{name}.tokens is not the sum of its shards")
    if split.tokens > split.documents and not split.text_bytes:
        raise TypeError(f"splits.{name} has tokens of no text_bytes")
    return split


def _typed(raw: dict, key: str, kind: type):
    value = raw[key]
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value < 2**53):
        raise TypeError(f"key {key!r} is {str(value)[:40]!r}, not {'a count' if kind is int else kind.__name__}")
    return value


# -------------------------------------------------------------------------------------------------------------- writing

class ShardWriter:
    """Appends documents to one split; shards of SHARD_TOKENS tokens appear under their name when they are whole."""

    def __init__(self, folder: Path, split: str):
        self.documents = self.text_bytes = 0
        self._folder, self._split = folder, split
        self._shards: list[dict] = []
        self._file, self._tokens, self._hash = None, 0, None

    def add(self, text_bytes: int, ids: np.ndarray) -> None:
        self.documents += 1
        self.text_bytes += text_bytes
        while len(ids):
            if self._file is None:
                path = self._folder / f"{self._split}_{len(self._shards):05d}.bin.tmp"
                self._file, self._tokens, self._hash = open(path, "wb"), 0, hashlib.sha256()    # noqa: SIM115  outlives us
            part, ids = np.split(ids, [SHARD_TOKENS - self._tokens])
            data = part.astype("<u2").tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._tokens += len(part)
            if self._tokens == SHARD_TOKENS:
                self._close_shard()

    def finish(self) -> dict:
        """This split's part of index.json."""
        if self._file is not None:
            self._close_shard()
        return {"documents": self.documents, "text_bytes": self.text_bytes,
                "tokens": sum(shard["tokens"] for shard in self._shards), "shards": self._shards}

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def _close_shard(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name.removesuffix(".tmp")
        os.replace(self._file.name, self._folder / name)
        self._shards.append({"file": name, "tokens": self._tokens, "sha256": self._hash.hexdigest()})
        self._file = None


def write_index(folder: Path, index: dict) -> None:
    """Declares the folder complete: everything else is on disk already."""
    path = folder / "index.json"
    index = {"format_version": FORMAT_VERSION, "dtype": "uint16", **index}
    with open(f"{path}.tmp", "wb") as file:
        file.write(json.dumps(index | {"sha256": _index_sha256(index)}, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def _index_sha256(index: dict) -> str:
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def remove_shards(folder: Path) -> None:
    """Removes shards and index, whole or begun, from the folder of a source; other people's files stay."""
    for path in folder.iterdir():
        if re.fullmatch(r"((train|val)_\d{5}\.bin|index\.json)(\.tmp)?", path.name):
            path.unlink()
