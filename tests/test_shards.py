"""Tests of runtime/shards.py: no index, however damaged, brings a traceback."""

import json

import numpy as np
import pytest
from text_files import N_CTX, VOCAB, write_source

from runtime.shards import ShardWriter, read_index, remove_shards, write_index


@pytest.fixture
def folder(tmp_path):
    write_source(tmp_path / "a", (20, 11), 1000)
    return tmp_path


def refusal(folder):
    with pytest.raises(ValueError) as caught:
        read_index(folder / "a")
    return str(caught.value)


BAD_INDEXES = [b"", b"{", b"null", b"[]", b'"text"', b"7", b"\xff\xfe\x00", b"[" * 100_000, b"NaN",
               b'{"format_version": 2}']


@pytest.mark.parametrize("content", BAD_INDEXES, ids=lambda c: repr(c[:12]))
def test_an_index_that_is_none_is_a_sentence(folder, content):
    (folder / "a" / "index.json").write_bytes(content)
    assert str(folder / "a" / "index.json") in refusal(folder)


def test_no_mutation_of_an_index_brings_a_traceback(folder):
    """Each value in turn is dropped or replaced; the answer is a ValueError of ours or, where nothing depends on it,
    none.
    """
    path = folder / "a" / "index.json"
    sound = path.read_text()

    def places(node, trail=()):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            yield (*trail, key)
            yield from places(value, (*trail, key))

    refused = total = 0
    for trail in list(places(json.loads(sound))):
        for new in ["drop", None, True, -1, 1.5, 10**30, "", "../../etc/passwd", "é\x00", [], [None], {}, {"file": 1}]:
            index = json.loads(sound)
            node = index
            for key in trail[:-1]:
                node = node[key]
            if new == "drop":
                del node[trail[-1]]
            else:
                node[trail[-1]] = new
            path.write_text(json.dumps(index))
            total += 1
            try:
                read_index(folder / "a")
            except ValueError as error:
                refused += 1
                assert str(folder / "a") in str(error)
    assert refused > 0.8 * total


@pytest.mark.parametrize("value", [True, -1, 1.0, "3", None])
def test_a_count_is_a_whole_number(folder, value):
    path = folder / "a" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"duplicates": value}))
    assert "key 'duplicates' is" in refusal(folder)


def test_an_index_may_not_name_files_elsewhere(folder):
    path = folder / "a" / "index.json"
    path.write_text(path.read_text().replace("train_00000.bin", "../b/train_00000.bin"))
    assert "must name files like train_00000.bin" in refusal(folder)


@pytest.fixture
def written(tmp_path):
    """A folder as prepare_data.py writes it, its index sealed by its own hash."""
    folder = tmp_path / "w"
    folder.mkdir()
    splits = {}
    for split in "train", "val":
        writer = ShardWriter(folder, split)
        writer.add(300, np.arange(100))
        splits[split] = writer.finish()
    write_index(folder, {"source": "w", "tokenizer": "byte", "tokenizer_sha256": "0", "vocab_size": 257, "dataset": "d",
                         "revision": "r", "license": "CC0", "split_rule": "s", "duplicates": 0, "splits": splits})
    return folder


def test_no_flipped_bit_of_an_index_stays_unseen(written):
    """One in each byte. But in the white space, where a flip that leaves it JSON changes nothing."""
    path = written / "index.json"
    sound, meant = path.read_bytes(), read_index(written)
    unseen = []
    for bit in np.arange(len(sound)) * 8 + np.random.default_rng(0).integers(0, 8, len(sound)):
        content = bytearray(sound)
        content[bit // 8] ^= 1 << int(bit) % 8
        path.write_bytes(content)
        try:
            found = read_index(written)
        except ValueError as error:
            assert str(written) in str(error) and "\n" not in str(error)
        else:
            unseen.append(bit)
            assert found == meant
    assert all(chr(sound[bit // 8]).isspace() for bit in unseen)
    assert len(unseen) < len(sound) / 20


@pytest.mark.parametrize("key, value", [("license", "MIT"), ("duplicates", 1), ("revision", "R"), ("note", "mine")])
def test_an_edited_index_is_refused(written, key, value):
    path = written / "index.json"
    index = json.loads(path.read_text())
    assert read_index(written).license == "CC0"
    path.write_text(json.dumps(index))      # another layout is no edit
    read_index(written)
    path.write_text(json.dumps(index | {key: value}))
    with pytest.raises(ValueError, match=r"index.json is damaged \((it is not what was written|key 'note' is not one)"):
        read_index(written)


def test_what_was_read_is_what_was_written(folder):
    index = read_index(folder / "a")
    assert (index.source, index.vocab_size, index.duplicates) == ("a", VOCAB, 0)
    assert [shard.path.name for shard in index.splits["train"].shards] == ["train_00000.bin", "train_00001.bin"]
    assert index.splits["train"].tokens == 20 * N_CTX + 1 + 11 * N_CTX + 2


def test_only_our_own_files_are_removed(folder):
    for name in "train_00002.bin.tmp", "index.json.tmp", "notes.txt", "train.bin", "train_1.bin", "my_train_00000.bin":
        (folder / "a" / name).touch()
    remove_shards(folder / "a")
    left = sorted(path.name for path in (folder / "a").iterdir())
    assert left == ["my_train_00000.bin", "notes.txt", "train.bin", "train_1.bin"]
