"""Keep tokens in a folder of shards with an index.

One folder per source: train_00000.bin ..., val_00000.bin ... (little-endian token ids of 16 bits, or of 32 where the
tokenizer has more; an end-of-text token before each document), hashes.npy (blake2b-64 of the documents, sorted: sources
prepared later drop copies of them) and index.json, which is written last: a folder without it is unfinished. The index
holds the SHA-256 of each of these files and of itself, so no flipped bit and no edit stays unseen.

A source of prompts and responses is masked: its tokens have 32 bits, and LOSS_MASK_BIT marks those that are context alone, which
no model is taught to foretell.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

FORMAT_VERSION = 2
# The keys of index.json and what each holds, by the format that brought it; and "sha256", of all of them.
KEYS_1 = {"format_version": int, "dtype": str, "source": str, "tokenizer": str, "tokenizer_sha256": str, "vocab_size": int,
          "dataset": str, "revision": str, "license": str, "split_rule": str, "duplicates": int, "splits": dict}
KEYS_2 = {"duplicates": dict, "empty": int, "contaminated": int, "decontaminated_against": list, "skipped": list, "files": list,
          "selection": dict, "is_whole": bool, "budget": int | None, "hashes_sha256": str}
OPTIONAL = {"is_masked": bool}      # written where it is true
DTYPES = {"uint16": "<u2", "uint32": "<u4"}     # index.json's "dtype" -> NumPy's
LOSS_MASK_BIT = np.uint32(1 << 31)    # of a masked source's token, beside its id
MIXTURE = ("fineweb_edu", "python", "c", "arxiv")       # sources that are made by their name alone
SHARD_TOKENS = 100_000_000      # 200 MB or 400: few files, yet a damaged one is soon replaced


# -------------------------------------------------------------------------------------------------------------- reading

@dataclass(frozen=True)
class Shard:
    path: Path
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    documents: int
    text_bytes: int         # UTF-8 bytes of the documents; of the responses alone where the source is masked
    tokens: int             # the tokens before each document included
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
    duplicates: dict[str, int]      # documents dropped, by the source that holds the first copy
    splits: dict[str, Split]        # "train" and "val"
    empty: int = 0                  # documents of white space alone, dropped
    contaminated: int = 0           # documents dropped for words they share with ...
    decontaminated_against: list[dict[str, str]] = field(default_factory=list)      # ... these: {file, sha256}
    skipped: list[dict[str, str]] = field(default_factory=list)     # input files that could not be read: {file, reason}
    files: list[str] = field(default_factory=list)                  # input files read, in order
    selection: dict = field(default_factory=dict)                   # what was taken of each row
    is_whole: bool = True           # whether no budget cut the source short
    budget: int | None = None       # training tokens asked for
    hashes_sha256: str | None = None    # of hashes.npy; format 1 had none
    dtype: str = "<u2"              # of the shards, as NumPy calls it
    is_masked: bool = False         # whether LOSS_MASK_BIT marks tokens that are no targets


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
        words = folder.name if folder.name in MIXTURE else f"local FILE... name={folder.name}"
        raise ValueError(f"there is no {path}" + (f" ({folder.parent} holds {', '.join(known)})" if known else "") +
                         (f": {folder} is unfinished, the command that began it goes on with it" if (folder / "parts").is_dir()
                          else f": make it with `python prepare_data.py {words} out={folder.parent}`, or the demo's sources "
                               f"with `python prepare_data.py demo out={folder.parent}`")) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {again}") from error
    try:
        if not isinstance(raw, dict):
            raise TypeError("it is no table of keys")
        version = raw["format_version"]
        if version not in (1, FORMAT_VERSION) or raw["dtype"] not in list(DTYPES):
            raise ValueError(f"{path} describes format_version={version!r:.40} and dtype={raw['dtype']!r:.40}, but this "
                             f"version reads format_version={FORMAT_VERSION} or 1 and dtype='uint16' or 'uint32': {again}")
        keys = KEYS_1 if version == 1 else KEYS_1 | KEYS_2 | {key: OPTIONAL[key] for key in raw.keys() & OPTIONAL}
        if strange := raw.keys() - keys - {"sha256"}:
            raise TypeError(f"key {min(strange)!r:.40} is not one of its keys")
        if (version > 1 or "sha256" in raw) and raw["sha256"] != _index_sha256(raw):    # some of format 1 have none
            raise TypeError("it is not what was written, its own sha256 says")
        values = {key: _typed(raw, key, kind) for key, kind in keys.items()}
        if version == 1:
            values["duplicates"] = {values["source"]: values["duplicates"]} if values["duplicates"] else {}
        for source in values["duplicates"]:
            _typed(values["duplicates"], source, int)
        if values.get("is_masked") and values["dtype"] != "uint32":
            raise TypeError(f"no token of dtype={values['dtype']} can be marked as context")
        values["dtype"] = DTYPES[values["dtype"]]
        splits = {name: _read_split(folder, name, _typed(values["splits"], name, dict)) for name in ("train", "val")}
    except (KeyError, TypeError, RecursionError) as error:
        reason = f"key {error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged ({reason}): {again}") from error
    for shard in (shard for split in splits.values() for shard in split.shards):
        size = shard.path.stat().st_size if shard.path.is_file() else None
        if size != (promised := np.dtype(values["dtype"]).itemsize * shard.tokens):
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"{shard.path} {found}, but {path} promises {promised} bytes: list all damage "
                             f"with `python prepare_data.py --verify {folder}`, then restore the file, or {again}")
    return Index(**{key: values[key] for key in values.keys() - {"format_version"}} | {"splits": splits})


def damage(folder: Path) -> Iterator[str]:
    """A sentence for each file whose content is not the one that was written, or for an index that cannot be read."""
    try:
        index = read_index(folder)
    except ValueError as error:
        yield str(error)
        return
    for shard in (shard for split in index.splits.values() for shard in split.shards):
        if (sentence := _damage(shard)) is not None:
            yield sentence
    hashes = folder / "hashes.npy"
    if index.hashes_sha256 is not None and (not hashes.is_file() or file_sha256(hashes) != index.hashes_sha256):
        yield (f"{hashes} is {'damaged' if hashes.exists() else 'missing'}: training does not need it, but copies in sources "
               f"prepared after this one are found by it; restore the file, or delete {folder} and run "
               f"`python prepare_data.py` again")


def _damage(shard: Shard) -> str | None:
    if file_sha256(shard.path) == shard.sha256:
        return None
    return (f"{shard.path} is damaged: its sha256 is not the one in index.json; restore the file, or delete "
            f"{shard.path.parent} and run `python prepare_data.py` again")


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    is_count = kind in (int, int | None)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or \
            (is_count and value is not None and not 0 <= value < 2**53):
        raise TypeError(f"key {key!r:.40} is {str(value)[:40]!r}, not {'a count' if is_count else kind.__name__}")
    return value


# -------------------------------------------------------------------------------------------------------------- writing

@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which appears under its name when all of it is on disk; after an error nothing is left."""
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
        os.fsync(folder)        # what it was made of may be deleted next
    finally:
        os.close(folder)


def write_index(folder: Path, index: dict) -> None:
    """Declares the folder complete: everything else is on disk already. `index`: all but the format; "dtype" if not uint16."""
    index = {"format_version": FORMAT_VERSION, "dtype": "uint16", **index}
    with new_file(folder / "index.json") as file:
        file.write(json.dumps(index | {"sha256": _index_sha256(index)}, indent=1).encode())


def _index_sha256(index: dict) -> str:
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def remove_shards(folder: Path) -> None:
    """Removes shards, hashes and index, whole or begun, from the folder of a source; other people's files stay."""
    for path in folder.iterdir():
        if re.fullmatch(r"((train|val)_\d{5}\.bin|hashes\.npy|index\.json)(\.tmp)?", path.name):
            path.unlink()
