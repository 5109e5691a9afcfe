"""Tests of runtime/shards.py: no index, however damaged, brings a traceback."""

import json

import pytest
from text_files import N_CTX, VOCAB, write_source

from runtime.shards import read_index, remove_shards


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
