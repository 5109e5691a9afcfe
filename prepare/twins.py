"""Measure how many validation documents have a near twin among the training documents.

Copies, word for word, are dropped when a source is made; another version of a file, or of a header's first page, is not. A
near twin of a document is one training document of its source that holds half of its stretches of 32 tokens, or more.
(Lee et al. 2021, 2107.06499, look for stretches of 50 tokens; 32 hold some 25 words of prose, fewer of code.)
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from runtime.shards import Index, Shard, read_index
from runtime.tokenizer import load_tokenizer

DOUBLINGS = 5           # a stretch is 2**5 tokens
WIDTH = 2 ** DOUBLINGS
SHARE = 0.5             # of a document's stretches
CHUNK = 1 << 24         # training tokens in memory at a time: some 0.6 GB
MOST = 2_000            # validation documents that are looked at, the first of each source
ODD = np.uint64(0x9E3779B97F4A7C15)


def describe(folder: Path) -> Iterator[str]:
    """A line per finished source of a data folder. Raises UserError: no such source, or one whose tokenizer is a folder."""
    sources = sorted(path.parent for path in folder.glob("*/index.json"))
    if not sources:
        raise UserError(f"{folder} holds no finished source: name the folder that out= was, such as data")
    for source in sources:
        try:
            index = read_index(source)
        except ValueError as error:
            raise UserError(str(error)) from error
        if index.tokenizer == "folder":
            raise UserError(f"{source} was made with a tokenizer of its own, whose documents are not told apart here: name a "
                              f"folder of sources made with gpt2 or byte")
        shares, tokens = measure(index)
        is_twin = shares >= SHARE
        yield (f"{index.source:12} {is_twin.sum():,} of {len(shares):,} validation documents ({is_twin.mean():.1%}), "
               f"{tokens[is_twin].sum() / tokens.sum():.1%} of their tokens, have a near twin in training")


def measure(index: Index) -> tuple[np.ndarray, np.ndarray]:
    """Of each validation document the largest share of its stretches that one training document holds, float64 (n,), and its
    tokens, int64 (n,). A document shorter than a stretch has none, and 0."""
    eot = load_tokenizer(index.tokenizer).eot
    documents = [ids for shard in index.splits["val"].shards for ids in _documents(shard, index.dtype, eot)][:MOST]
    stretches = [np.unique(_stretches(ids)) for ids in documents]
    counts = np.array([len(own) for own in stretches])
    # Each stretch with each document that has it, by stretch.
    owners = np.repeat(np.arange(len(documents)), counts)
    table = np.concatenate(stretches) if stretches else np.empty(0, np.uint64)
    order = np.argsort(table, kind="stable")
    table, owners = table[order], owners[order]
    best = np.zeros(len(documents), np.int64)
    for shard in index.splits["train"].shards:
        for ids in _chunks(shard, index.dtype, eot):
            document, found = _found(ids, eot, table)
            low, high = np.searchsorted(table, found), np.searchsorted(table, found, side="right")
            several = high - low        # validation documents that share the stretch
            places = np.repeat(low - np.cumsum(several) + several, several) + np.arange(several.sum())
            pairs, shared = np.unique(np.repeat(document, several) * len(documents) + owners[places], return_counts=True)
            np.maximum.at(best, pairs % max(1, len(documents)), shared)
    return best / np.maximum(counts, 1), np.array([len(ids) for ids in documents], np.int64)


def _found(ids: np.ndarray, eot: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The stretches of `ids` that are in the table: number of the document each is in, and its hash; once per document."""
    hashes = _stretches(ids)
    number = np.cumsum(ids == eot)
    may_be = np.zeros(1 << 24, bool)        # by the first bits: most stretches end here, at one byte's price
    may_be[table >> np.uint64(40)] = True
    places = np.flatnonzero(may_be[hashes >> np.uint64(40)])
    places = places[np.isin(hashes[places], table)]     # never over the border of two: its token is in no stretch of the table
    found = np.unique(np.stack([number[places].astype(np.uint64), hashes[places]], 1), axis=0)
    return found[:, 0].astype(np.int64), found[:, 1]


def _stretches(ids: np.ndarray) -> np.ndarray:
    """uint64 (n - WIDTH + 1,): a hash of each WIDTH ids in a row."""
    hashes = (ids.astype(np.uint64) + np.uint64(1)) * ODD
    for doubling in range(DOUBLINGS):
        step = 1 << doubling
        hashes = (hashes[:-step] * ODD ^ hashes[:-step] >> np.uint64(29)) + hashes[step:]
    return (hashes ^ hashes >> np.uint64(32)) * ODD


def _documents(shard: Shard, dtype: str, eot: int) -> Iterator[np.ndarray]:
    ids = np.fromfile(shard.path, dtype)
    for document in np.split(ids, np.flatnonzero(ids == eot)):
        if len(document):
            yield document[1:] if document[0] == eot else document


def _chunks(shard: Shard, dtype: str, eot: int) -> Iterator[np.ndarray]:
    """A shard's tokens, some CHUNK at a time, cut where documents begin as far as they do."""
    ids, begin = np.memmap(shard.path, dtype, "r"), 0
    while begin < len(ids):
        chunk = np.array(ids[begin:begin + CHUNK])
        starts = np.flatnonzero(chunk == eot)
        if begin + len(chunk) < len(ids) and len(starts) and starts[-1]:
            chunk = chunk[:starts[-1]]
        yield chunk
        begin += len(chunk)
