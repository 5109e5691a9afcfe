"""Find documents that share 13 words in a row with evaluation texts.

The 13-grams of GPT-3 (Brown et al. 2020, appendix C): of words in lower case, split at white space, without punctuation
and symbols. GPT-3 cut 200 characters around a find out of the document; here found_in() is for leaving out the whole
document. Grams are kept and compared as 64-bit hashes: a false find has odds of 1e-12 a gram among 20 million.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from runtime.cli import UserError

WORDS = 13
CHARS = 65_536          # of a text at a time, so that the arrays stay in the cache; a gram that stretches over more is missed
BASE = 0x9E3779B97F4A7C15       # odd, so that it has an inverse modulo 2**64
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
        return any(self._are_here(grams).any() for grams in _grams(text))

    def _are_here(self, grams: np.ndarray) -> np.ndarray:
        spots = self._spot(grams, 8 * len(self._bits))
        grams = grams[(self._bits[spots >> 3] >> (spots & 7).astype(np.uint8) & 1).astype(bool)]
        return self.hashes[np.searchsorted(self.hashes[:-1], grams)] == grams

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
            of_text = list(_grams(text))
            texts, short, grams = texts + 1, short + (not of_text), grams + of_text
        if not grams:
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
    except ImportError as error:
        raise UserError(f"decontaminate={path}: reading parquet needs the package pyarrow: pip install pyarrow") from error
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

def _grams(text: str) -> Iterator[np.ndarray]:
    """uint64 hashes of all grams of a text, a stretch of at most CHARS characters at a time; nothing where there are none."""
    text, begin = text.lower(), 0
    while begin < len(text):
        stretch = text[begin:begin + CHARS]
        words, starts, is_cut = _words(stretch)
        is_end = begin + CHARS >= len(text)
        grams = _rolled(words[:-1] if is_cut and not is_end else words)
        if len(grams):
            yield grams
        if is_end:
            return
        # Go on with the first gram that the last word is in; words of thousands of characters are passed one by one.
        places = [*starts[max(0, len(starts) - WORDS):][:2].tolist(), len(stretch)]
        begin += places[0] or places[1]


def _words(stretch: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Of each word its hash, and where in the stretch it starts; whether the last one may go on after the stretch."""
    codes = (np.frombuffer(stretch.encode(), np.uint8) if stretch.isascii() else
             np.frombuffer(stretch.encode("utf-32-le", "surrogatepass"), "<u4"))
    kinds = _kinds().take(codes, mode="clip")
    at = np.flatnonzero(kinds != 0)     # without punctuation
    is_word = np.zeros(len(at) + 2, np.int8)
    is_word[1:-1] = kinds[at] == 2
    edges = np.flatnonzero(is_word[1:] != is_word[:-1])
    starts, ends = edges[::2], edges[1::2]
    powers, inverses = _powers()
    sums = np.zeros(len(at) + 1, np.uint64)
    np.cumsum(powers[:len(at)] * codes[at], out=sums[1:])       # the whole arithmetic is modulo 2**64
    hashes = (sums[ends] - sums[starts]) * inverses[starts]
    hashes ^= hashes >> np.uint64(32)
    return hashes * np.uint64(0xD6E8FEB86659FD93), at[starts], is_word[-2] == 1


def _rolled(words: np.ndarray) -> np.ndarray:
    """The hash of each WORDS words in a row."""
    powers, inverses = _powers()
    sums = np.zeros(len(words) + 1, np.uint64)
    np.cumsum(powers[:len(words)] * words, out=sums[1:])
    grams = (sums[WORDS:] - sums[:-WORDS]) * inverses[:max(0, len(words) + 1 - WORDS)]
    grams ^= grams >> np.uint64(29)
    return grams * np.uint64(0xD6E8FEB86659FD93)


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """BASE**i and its inverse, i < CHARS."""
    first = np.ones(CHARS, np.uint64), np.ones(CHARS, np.uint64)
    for powers, base in zip(first, (BASE, pow(BASE, -1, 1 << 64)), strict=True):
        powers[1:] = base
    return tuple(np.cumprod(powers, dtype=np.uint64) for powers in first)


@cache
def _kinds() -> np.ndarray:
    """Of each character of the first two planes: 0 punctuation or symbol, 1 white space, 2 part of a word; then a 2 that
    stands for all others."""
    kinds = [1 if chr(code).isspace() else 0 if unicodedata.category(chr(code))[0] in "PS" else 2 for code in range(0x20000)]
    return np.array([*kinds, 2], np.uint8)
