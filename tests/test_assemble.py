"""Tests of prepare/assemble.py, prepare/copies.py: pieces become the same shards however they were cut or dealt out."""

import hashlib
import json
import multiprocessing
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
from piece_files import (
    FACTS,
    Document,
    content,
    cut_at_random,
    expected_shards,
    reference,
    save_hashes,
    shards_of,
    small,
    some_documents,
    whole,
    write_pieces,
)

from prepare import copies
from prepare.assemble import Assembly
from prepare.source import DOCUMENT, Piece

__all__ = ["small"]     # the fixture


def test_random_sources_are_assembled_as_the_reference_says(tmp_path, small):
    rng, fulls, crossings = random.Random(0), 0, 0
    for case in range(60):
        files = [some_documents(rng, rng.randrange(40), hashes=rng.choice([None, 5, 30])) for _ in range(rng.randrange(1, 5))]
        names = [d.hash for documents in files for d in documents if d.hash]
        earlier = {name: set(rng.sample(names, rng.randrange(len(names) // 3 + 1))) | {rng.randrange(2**64) for _ in range(9)}
                   for name in ("b", "c", "a")[:rng.randrange(4)]}
        total = sum(len(d.ids) for documents in files for d in documents)
        budget, val = rng.choice([None, rng.randrange(1, total + 2), total // 3 + 1]), rng.choice([0, 500, 3000])
        splits, duplicates, left_out, last_file, is_full = reference(files, "s", earlier, val, budget)
        folder = tmp_path / str(case) / "s"
        pieces = write_pieces(folder, files, cut_at_random(rng))
        hashes = {name: save_hashes(tmp_path / str(case) / name / "hashes.npy", of) for name, of in earlier.items()}
        assembly = Assembly(folder, pieces, hashes, val, budget)
        before = sorted(path for path in folder.rglob("*"))
        assembly.layout()
        assert sorted(folder.rglob("*")) == before, "layout() writes nothing"
        counts = {split: len(documents) for split, documents in splits.items()}
        tokens = {split: sum(len(d.ids) for d in documents) for split, documents in splits.items()}
        text_bytes = {split: sum(d.bytes for d in documents) for split, documents in splits.items()}
        assert (assembly.documents, assembly.tokens, assembly.text_bytes) == (counts, tokens, text_bytes)
        assert (assembly.train_tokens, assembly.val_tokens) == (tokens["train"], tokens["val"])
        assert (assembly.duplicates, assembly.is_full, assembly.last_file) == (duplicates, is_full, last_file)
        assert {"empty": assembly.empty, "contaminated": assembly.contaminated} == left_out
        assembly.commit(FACTS)
        found = assembly.write()
        files_made = expected_shards(splits, 50)
        assert shards_of(folder) == files_made and not list((folder / "parts").glob("*.bin.tmp"))
        kept = sorted(d.hash for documents in splits.values() for d in documents)
        assert np.load(folder / "hashes.npy").tolist() == kept
        assert assembly.facts == {**FACTS, "hashes_sha256": hashlib.sha256((folder / "hashes.npy").read_bytes()).hexdigest()}
        assert found == {split: {
            "documents": counts[split], "text_bytes": text_bytes[split], "tokens": tokens[split],
            "shards": [{"file": name, "tokens": len(data) // 2, "sha256": hashlib.sha256(data).hexdigest()}
                       for name, data in files_made.items() if name.startswith(split)]} for split in ("train", "val")}
        json.dumps([found, assembly.facts, assembly.duplicates, assembly.last_file])
        fulls, crossings = fulls + is_full, crossings + any(name != "s" for name in duplicates)
    assert 15 < fulls < 55 and crossings > 15, "the cases are of all kinds"


def test_where_pieces_are_cut_changes_nothing(tmp_path, small):
    """As after kills, or with other workers: the folder is the same to the last byte, with more pieces than needed too."""
    rng = random.Random(1)
    files = [some_documents(rng, 40, hashes=90) for _ in range(4)]
    for budget in None, 300:
        made = []
        cuts = [whole, *(cut_at_random(random.Random(seed)) for seed in range(3)), lambda documents: [[d] for d in documents]]
        for case, cut in enumerate(cuts):
            folder = tmp_path / f"{budget}_{case}" / "s"
            pieces = write_pieces(folder, files, cut)
            if budget:      # no matter how much more than the budget was there by then
                needed = reference(files, "s", {}, 1000, budget)[3]
                pieces = [piece for piece in pieces if piece.file <= needed + case % 2]
            assembly = Assembly(folder, pieces, {}, 1000, budget)
            assembly.layout()
            assembly.commit(FACTS)
            counts = assembly.duplicates, assembly.empty, assembly.contaminated, assembly.last_file
            splits = assembly.write()
            made.append((content(folder), assembly.facts, splits, counts))
        assert all(one == made[0] for one in made[1:])


def test_the_budget_is_reached_by_the_last_document_and_not_exceeded_before(tmp_path):
    documents = [Document(10_000 * i + 9_000, (i,) * 10, 30) for i in range(1, 11)]      # all in train
    for budget, count, is_full in ((1, 1, True), (10, 1, True), (11, 2, True), (100, 10, True), (101, 10, False),
                                   (None, 10, False)):
        folder = tmp_path / str(budget) / "s"
        assembly = Assembly(folder, write_pieces(folder, [documents], cut_at_random(random.Random(0))), {}, 50, budget)
        assembly.layout()
        assert (assembly.documents["train"], assembly.train_tokens, assembly.is_full) == (count, 10 * count, is_full)


def test_ranges_of_hashes_leave_no_gap(tmp_path, monkeypatch):
    for at_once in 1, 3, 7, 8_000_000:
        monkeypatch.setattr(copies, "SORTED_AT_ONCE", at_once)
        edges = [int(edge) for pair in copies.hash_ranges(24) for edge in pair]
        assert len(edges) == 2 * -(-24 // at_once) and edges[0] == 0 and edges[-1] == 2**64 - 1
        assert all(low == high + 1 for high, low in zip(edges[1:-1:2], edges[2::2], strict=True))
        documents = [Document(edge, (1, 2), 3) for edge in edges + edges]
        folder = tmp_path / str(at_once) / "s"
        assembly = Assembly(folder, write_pieces(folder, [documents], lambda d: [[x] for x in d]), {}, 50, None)
        assembly.layout()
        assert assembly.duplicates == {"s": len(edges)}


def test_a_source_without_pieces_or_without_text(tmp_path):
    for name, files in ("none", []), ("rows", [[]]), ("empty", [[Document(0, (), 0)] * 3, []]):
        folder = tmp_path / name
        assembly = Assembly(folder, write_pieces(folder, files, whole), {}, 50, 10)
        assembly.layout()
        assert not assembly.is_full and assembly.tokens == assembly.documents == {"train": 0, "val": 0}
        assert assembly.last_file == len(files) - 1 and assembly.empty == 3 * (name == "empty")
        assembly.commit(FACTS)
        assert assembly.write()["train"]["shards"] == [] and len(np.load(folder / "hashes.npy")) == 0


# ----------------------------------------------------------------------------------------------------- disk, memory, cores

def test_the_disk_holds_the_tokens_and_little_more_at_any_moment(tmp_path, small):
    rng = random.Random(12)
    files = [some_documents(rng, 100) for _ in range(5)]
    folder = tmp_path / "s"
    pieces = write_pieces(folder, files, lambda d: [d[i:i + 10] for i in range(0, len(d), 10)])
    tokens = sum(piece.tokens for piece in pieces)
    most = 0

    def run(function, places):
        nonlocal most
        for place in places:
            shard = function(place)
            most = max(most, sum(path.stat().st_size for path in folder.rglob("*.bin")) // 2)
            yield shard

    assembly = Assembly(folder, pieces, {}, 300, None)
    assembly.layout()
    assembly.commit(FACTS)
    assembly.write(run)
    assert most <= tokens + 2 * 50 + 2 * max(piece.tokens for piece in pieces) + assembly.val_tokens < 1.2 * tokens
    assert not list((folder / "parts").glob("*.bin"))


def test_shards_written_by_processes_are_the_same(tmp_path, small):
    """By processes that import the room anew, two shards at a time."""
    made = []
    for case in "one", "many":
        folder = tmp_path / case / "s"
        pieces = write_pieces(folder, [some_documents(random.Random(13), 200)], cut_at_random(random.Random(14)))
        assembly = Assembly(folder, pieces, {}, 500, None)
        assembly.layout()
        assembly.commit(FACTS)
        if case == "one":
            splits = assembly.write()
        else:
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                splits = assembly.write(pool.imap)
        made.append((splits, content(folder)))
    assert made[0] == made[1] and len(made[0][1]) > 10


def test_memory_is_bounded_by_a_share_of_the_documents(tmp_path, monkeypatch):
    """A million documents in 50 pieces, hashes of all of them 8 MB: kept in memory are 3 bytes each and what is sorted."""
    monkeypatch.setattr(copies, "SORTED_AT_ONCE", 50_000)
    rng, pieces, parts = np.random.default_rng(0), [], tmp_path / "s" / "parts"
    parts.mkdir(parents=True)
    for i in range(50):
        table = np.zeros(20_000, DOCUMENT)
        table["hash"], table["tokens"], table["bytes"] = rng.integers(0, 2**64, 20_000, np.uint64), 1000, 4000
        np.save(parts / f"{i:05d}_0000.npy", table)
        pieces.append(Piece(parts / f"{i:05d}_0000", i, (0, 20_000), 20_000, 20_000_000, True))
    earlier = save_hashes(tmp_path / "a" / "hashes.npy", rng.integers(0, 2**64, 300_000, np.uint64).tolist())
    assembly = Assembly(tmp_path / "s", pieces, {"a": earlier}, 50, None)
    tracemalloc.start()
    try:
        assembly.layout()
        assembly.commit(FACTS)
        assert tracemalloc.get_traced_memory()[1] < 9e6
    finally:
        tracemalloc.stop()
    assert assembly.documents["train"] + assembly.documents["val"] == 1_000_000
    assert (np.diff(np.load(tmp_path / "s/hashes.npy")) > 0).all()


def test_a_document_that_comes_a_million_times_costs_no_memory(tmp_path, monkeypatch):
    """A range of hashes is bounded by how many different ones there are, not by the copies."""
    monkeypatch.setattr(copies, "SORTED_AT_ONCE", 50_000)
    pieces, parts = [], tmp_path / "s" / "parts"
    parts.mkdir(parents=True)
    for i in range(20):
        table = np.full(50_000, np.array((77_777, 1, 4), DOCUMENT))
        np.save(parts / f"{i:05d}_0000.npy", table)
        pieces.append(Piece(parts / f"{i:05d}_0000", i, (0, 50_000), 50_000, 50_000, True))
    assembly = Assembly(tmp_path / "s", pieces, {}, 50, None)
    tracemalloc.start()
    try:
        assembly.layout()
        assert tracemalloc.get_traced_memory()[1] < 9e6
    finally:
        tracemalloc.stop()
    assert assembly.duplicates == {"s": 999_999}


def test_the_room_loads_no_torch():
    code = "import sys, prepare.assemble; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True)
