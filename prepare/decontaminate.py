"""Find documents that share 13 words in a row with evaluation texts.

The 13-grams of GPT-3 (Brown et al. 2020, appendix C): of words in lower case, split at white space, without punctuation
and symbols. GPT-3 cut 200 characters around a find out of the document; here found_in() is for leaving out the whole
document. Grams are kept and compared as 64-bit hashes of words' 32-bit ones: a false find has odds of 1e-12 a gram among 20
million, one that differs in a single word passes for the same with odds of 2e-10.
"""

import hashlib
import json
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np

from runtime.cli import UserError
from runtime.tokenizer import clean

WORDS = 13
BASE = 0x9E3779B97F4A7C15       # odd: no word of a gram loses bits
FORMATS = (".txt", ".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Grams:
    """Made by read_grams()."""
    files: list[dict]           # {file, sha256} of each, for index.json
    hashes: np.ndarray          # uint64, sorted
    _bits: np.ndarray = field(init=False, repr=False)      # 32 or more bits per hash: most others end here, at one byte's price

    def __post_init__(self):
        bits = np.zeros(max(8, 1 << (32 * len(self.hashes) - 1).bit_length()), bool)
        bits[self._spot(self.hashes, len(bits))] = True
        object.__setattr__(self, "_bits", np.packbits(bits, bitorder="little"))

    def found_in(self, text: str) -> bool:
        """Whether a gram of the evaluation texts is one of `text`."""
        grams = _grams(text)
        spots = self._spot(grams, 8 * len(self._bits))
        grams = grams[(self._bits[spots >> 3] >> (spots & 7).astype(np.uint8) & 1).astype(bool)]
        return bool((self.hashes[np.searchsorted(self.hashes[:-1], grams)] == grams).any())

    @staticmethod
    def _spot(hashes: np.ndarray, bits: int) -> np.ndarray:
        return (hashes >> np.uint64(65 - bits.bit_length())).astype(np.int64)


def read_grams(paths: list[str]) -> Grams:
    """The grams of every text in the files: all of a .txt; each string of .json, .jsonl and .parquet, however nested. Prints a
    line per file: texts, grams, texts that are too short to hold one.

    Raises UserError: a file that is missing, of another kind, damaged or without any gram."""
    files, found = [], []
    for path in map(Path, paths):
        texts, short, grams = 0, 0, []
        for text in _texts(path):
            grams.append(_grams(text))
            texts, short = texts + 1, short + (not len(grams[-1]))
        if texts == short:
            raise UserError(f"{path} has no text of {WORDS} words or more, so nothing of it can be looked for: leave it out of "
                              f"decontaminate=")
        found.append(np.unique(np.concatenate(grams)))
        print(f"{path}: {texts:,} texts, {len(found[-1]):,} stretches of {WORDS} words to look for; {short:,} texts are shorter "
              f"and are not looked for")
        with open(path, "rb") as file:
            files.append({"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()})
    return Grams(files, np.unique(np.concatenate(found)))


# -------------------------------------------------------------------------------------------------------------- reading

def _texts(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise UserError(f"decontaminate={path} is a folder: name the files in it" if path.is_dir() else
                          f"decontaminate={path}: there is no such file")
    if path.suffix not in FORMATS:
        raise UserError(f"decontaminate={path}: its name must end in {', '.join(FORMATS)}")
    try:
        for value in _read_parquet(path) if path.suffix == ".parquet" else _read_text(path):
            yield from _strings(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"decontaminate={path} cannot be read ({str(error).partition(chr(10))[0]}): fetch it again") from error


def _read_text(path: Path) -> Iterator:
    text = path.read_text("utf-8-sig", errors="replace")
    if path.suffix == ".txt":
        yield text
        return
    try:
        if path.suffix == ".json":
            yield json.loads(text)
            return
    except json.JSONDecodeError as error:       # many a .json holds a row a line
        if error.msg != "Extra data":
            raise
    yield from map(json.loads, filter(str.strip, text.split("\n")))


def _read_parquet(path: Path) -> Iterator:
    import pyarrow.parquet
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1000):
            yield batch.to_pylist()
    except OSError as error:        # pyarrow's own errors are this or ValueError
        raise ValueError(error) from error


def _strings(value) -> Iterator[str]:
    """Every string in lists and tables, keys aside."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value


# -------------------------------------------------------------------------------------------------------------- hashing

def _grams(text: str) -> np.ndarray:
    """uint64 hashes of all grams of a text; none where it has fewer words."""
    words = clean(text).lower().translate(_dropped()).split()
    hashes = np.fromiter(map(crc32, map(str.encode, words)), np.uint64, len(words))
    grams = np.zeros(max(0, len(words) + 1 - WORDS), np.uint64)
    for i in range(WORDS):
        grams += hashes[i:i + len(grams)] * np.uint64(pow(BASE, i, 1 << 64))
    grams ^= grams >> np.uint64(29)
    return grams * np.uint64(0xD6E8FEB86659FD93)


@cache
def _dropped() -> dict[int, None]:
    """Punctuation and symbols."""
    return dict.fromkeys(code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "PS")
