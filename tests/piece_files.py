"""Pieces of tokens and what the assembly must make of them: material for the tests of prepare/assemble.py."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from prepare import assemble, copies
from prepare.source import DOCUMENT, Piece
from runtime import shards

FACTS = {"source": "s", "license": "CC0-1.0"}


@dataclasses.dataclass(frozen=True)
class Document:
    hash: int
    ids: tuple[int, ...]        # empty: it was left out, as empty (bytes=0) or contaminated
    bytes: int


def some_documents(rng, n, hashes=None, longest=12):
    """`n` documents of which some came before, some are empty and some contaminated."""
    pool = [rng.randrange(2**64) for _ in range(hashes or n)]
    kinds = rng.choices(["text", "empty", "contaminated"], [20, 1, 1], k=n)
    documents = []
    for kind in kinds:
        hash = rng.choice(pool)
        if kind == "text":      # the ids are a function of the hash, as those of a text are of the text
            length = random.Random(hash).randrange(1, longest)
            documents.append(Document(hash, tuple(random.Random(hash + 1).randrange(50_000) for _ in range(length)), length * 3))
        else:
            documents.append(Document(hash * (kind != "empty"), (), 7 * (kind != "empty")))
    return documents


def write_pieces(folder, files, cut):
    """Pieces of these input files, each a list of documents; cut(documents) -> lists of documents, a piece each."""
    parts, pieces = folder / "parts", []
    parts.mkdir(parents=True)
    for number, documents in enumerate(files):
        stretches, row = cut(documents), 0
        for i, stretch in enumerate(stretches):
            stem = parts / f"{number:05d}_{i:04d}"
            table = np.array([(d.hash, len(d.ids), d.bytes) for d in stretch], DOCUMENT)
            np.save(f"{stem}.npy", table)
            np.array([i for d in stretch for i in d.ids], "<u2").tofile(f"{stem}.bin")
            Path(f"{stem}.json").write_text("{}")
            pieces.append(Piece(stem, number, (row, row + len(stretch)), len(stretch), int(table["tokens"].sum()),
                                i == len(stretches) - 1))
            row += len(stretch)
    return pieces


def cut_at_random(rng):
    def cut(documents):
        marks = sorted(rng.randrange(len(documents) + 1) for _ in range(rng.randrange(5)))
        return [documents[a:b] for a, b in zip([0, *marks], [*marks, len(documents)], strict=True)]
    return cut


def whole(documents):
    return [documents]


def reference(files, name, earlier, val_per_10k, budget):
    """What the assembly must make, told in plain Python: splits {split: documents}, and the counts."""
    splits, seen, duplicates, left_out = {"train": [], "val": []}, {}, {}, {"empty": 0, "contaminated": 0}
    for source, hashes in reversed(earlier.items()):
        seen |= dict.fromkeys(hashes, source)
    last_file, train_tokens = len(files) - 1, 0
    for number, document in ((n, d) for n, documents in enumerate(files) for d in documents):
        if not document.ids:
            left_out["contaminated" if document.bytes else "empty"] += 1
        elif document.hash in seen:
            duplicates[seen[document.hash]] = duplicates.get(seen[document.hash], 0) + 1
        else:
            seen[document.hash] = name
            split = "val" if document.hash % 10_000 < val_per_10k else "train"
            splits[split].append(document)
            train_tokens += len(document.ids) * (split == "train")
            if budget is not None and train_tokens >= budget:
                last_file = number
                break
    return splits, duplicates, left_out, last_file, budget is not None and train_tokens >= budget


def expected_shards(splits, shard_tokens):
    """Name -> bytes."""
    files = {}
    for split, documents in splits.items():
        ids = np.array([i for d in documents for i in d.ids], "<u2")
        for i in range(0, len(ids), shard_tokens):
            files[f"{split}_{i // shard_tokens:05d}.bin"] = ids[i:i + shard_tokens].tobytes()
    return files


def shards_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def save_hashes(path, hashes):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.array(sorted(hashes), "<u8"))
    return path


@pytest.fixture
def small(monkeypatch):
    """Everything that is cut is cut often."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", 50)
    monkeypatch.setattr(copies, "SORTED_AT_ONCE", 20)
    monkeypatch.setattr(assemble, "READ_BYTES", 14)
