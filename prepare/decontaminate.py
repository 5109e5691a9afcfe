"""Find documents that share 13 words in a row with evaluation texts.

The 13-grams of GPT-3 (Brown et al. 2020, appendix C): of words in lower case, split at white space,
without punctuation and symbols. GPT-3 cut 200 characters around a find out of the document; here
found_in() is for leaving out the whole document. Grams are kept and compared as 64-bit hashes of
words' 32-bit ones: a false find has odds of 1e-12 a gram among 20 million, one that differs in a
single word passes for the same with odds of 2e-10."""

import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from lib.errors import UserError
from prepare.parquet_reader import is_list_type
from runtime.shards import file_sha256
from runtime.tokenizer import clean

WORDS = 13
BASE = 0x9E3779B97F4A7C15  # odd: no word of a gram loses bits


def found_in(grams: np.ndarray, text: str) -> bool:
    """Whether a gram of the evaluation texts, by read_grams(), is one of `text`."""
    # in order they are found sooner: memory is read in one direction
    grams_of_text = np.sort(_grams(text))
    nearest = grams[np.searchsorted(grams[:-1], grams_of_text)]
    return bool((nearest == grams_of_text).any())


def read_grams(paths: Iterable[str]) -> tuple[list[dict], np.ndarray]:
    """{file, sha256} of each file, for index.json, and the grams, uint64 and sorted, of every text
    in the files: all of a .txt; each string of .json, .jsonl and .parquet, however nested. Prints a
    line per file. Raises UserError: a file that cannot be read or has no gram."""
    files = []
    grams = [np.empty(0, np.uint64)]
    for path in map(Path, paths):
        grams.append(_grams_of_file(path))
        files.append({"file": path.name, "sha256": file_sha256(path)})
    return files, np.unique(np.concatenate(grams))


def _grams_of_file(path: Path) -> np.ndarray:
    try:
        grams = [_grams(text) for value in _values(path) for text in _strings(value)]
    except (ValueError, OSError, RecursionError) as error:
        # pyarrow's own errors are the first two
        raise UserError(
            f"decontaminate={path} cannot be read as .txt, .json, .jsonl or .parquet:"
            f" {str(error).splitlines()[0]}"
        ) from error
    long_enough = [grams_of_text for grams_of_text in grams if len(grams_of_text)]
    if not long_enough:
        raise UserError(
            f"decontaminate={path} has no text of {WORDS} words or more to look for: leave it out"
        )
    unique = np.unique(np.concatenate(long_enough))
    print(
        f"{path}: {len(grams):,} texts, {len(unique):,} stretches of {WORDS} words to look"
        f" for; {len(grams) - len(long_enough):,} texts are shorter and are not looked for"
    )
    return unique


def _values(path: Path) -> Iterable:
    """The texts of a file, in whatever lists and tables it has them."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        batches = pyarrow.parquet.ParquetFile(path).iter_batches(1000)
        columns = (column for batch in batches for column in batch.columns)
        return (value for column in columns for value in _parquet_values(column))
    text = path.read_text("utf-8-sig")  # a text of another encoding would match nothing
    try:
        return [text if path.suffix == ".txt" else json.loads(text)]
    except json.JSONDecodeError as error:  # many a .json holds a row a line, as .jsonl does
        if error.msg != "Extra data":
            raise
        return map(json.loads, filter(str.strip, text.split("\n")))


def _parquet_values(array: Any) -> Iterator:
    """The texts of a column of parquet, and what values of type JSON spell; dates and numbers
    are not even converted."""
    import pyarrow.compute
    from pyarrow import types

    kind = array.type
    if types.is_struct(kind):
        for place in range(kind.num_fields):
            yield from _parquet_values(pyarrow.compute.struct_field(array, place))
    elif is_list_type(kind):
        yield from _parquet_values(array.flatten())
    elif types.is_dictionary(kind):
        yield from _parquet_values(array.dictionary_decode())
    elif isinstance(kind, pyarrow.JsonType):
        yield from (json.loads(text) for text in array.storage.to_pylist() if text is not None)
    elif _is_string(kind):
        yield from array.to_pylist()
    else:
        yield from _binary_values(array)


def _is_string(kind: Any) -> bool:
    from pyarrow import types

    layouts = (types.is_string, types.is_large_string, types.is_string_view)
    return any(is_layout(kind) for is_layout in layouts)


def _binary_values(array: Any) -> Iterator[str]:
    """Of binary values those that are text in UTF-8; none of another type."""
    from pyarrow import types

    layouts = (types.is_binary, types.is_large_binary, types.is_binary_view)
    if not any(is_layout(array.type) for is_layout in layouts):
        return
    for raw in filter(None, array.to_pylist()):
        with suppress(UnicodeDecodeError):  # else it is no text
            yield raw.decode()


def _strings(value: object) -> Iterator[str]:
    """Every string in lists and tables, keys aside."""
    if isinstance(value, str):
        yield value
        return
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _grams(text: str) -> np.ndarray:
    """uint64 hashes of all grams of a text; none where it has fewer words."""
    words = clean(text).lower().translate(_dropped()).split()
    hashes = np.fromiter(map(crc32, map(str.encode, words)), np.uint64, len(words))
    grams = np.zeros(max(0, len(words) + 1 - WORDS), np.uint64)
    for i in range(WORDS):
        grams += hashes[i : i + len(grams)] * np.uint64(pow(BASE, i, 1 << 64))
    grams ^= grams >> np.uint64(29)
    return grams * np.uint64(0xD6E8FEB86659FD93)


@cache
def _dropped() -> dict[int, None]:
    """Punctuation and symbols."""
    return dict.fromkeys(
        code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "PS"
    )
