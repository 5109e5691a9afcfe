"""Tests of runtime/shards.py: no index, however damaged, brings a traceback."""

import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from text_files import N_CTX, VOCAB, write_source

from configs.mixture import MIXTURE
from runtime import shards
from runtime.shards import damage, new_file, read_index, remove_shards

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(params=[1, 2])
def folder(tmp_path, request):
    """Of both formats that are read."""
    write_source(tmp_path / "a", (20, 11), 1000, format_version=request.param)
    return tmp_path


def sealed(index):
    """The index with the hash of itself, where its format has one: told a second time."""
    rest = {key: value for key, value in index.items() if key != "sha256"}
    if "sha256" not in index:
        return index
    return rest | {"sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def refusal(folder):
    with pytest.raises(ValueError) as caught:
        read_index(folder / "a")
    return str(caught.value)


BAD_INDEXES = [b"", b"{", b"null", b"[]", b'"text"', b"7", b"\xff\xfe\x00", b"[" * 100_000, b"NaN",
               b'{"format_version": 1}', b'{"format_version": 2}', b'{"format_version": 3}', b'{"format_version": true}']


@pytest.mark.parametrize("content", BAD_INDEXES, ids=lambda c: repr(c[:12]))
def test_an_index_that_is_none_is_a_sentence(folder, content):
    (folder / "a" / "index.json").write_bytes(content)
    assert str(folder / "a" / "index.json") in refusal(folder)


def test_no_mutation_of_an_index_brings_a_traceback(folder):
    """Each value in turn is dropped or replaced, the seal made anew; the answer is a ValueError of ours or, where nothing
    depends on it, none."""
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
            path.write_text(json.dumps(sealed(index)))
            total += 1
            try:
                read_index(folder / "a")
            except ValueError as error:
                refused += 1
                assert str(folder / "a") in str(error)
    assert refused > 0.7 * total


@pytest.mark.parametrize("value", [True, -1, 1.0, "3", None])
def test_a_count_is_a_whole_number(folder, value):
    path = folder / "a" / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(sealed(index | {"vocab_size": value})))
    assert "key 'vocab_size' is" in refusal(folder)
    duplicates = value if index["format_version"] == 1 else {"other": value}
    path.write_text(json.dumps(sealed(index | {"duplicates": duplicates})))
    assert f"key '{'duplicates' if index['format_version'] == 1 else 'other'}' is" in refusal(folder)


@pytest.mark.parametrize("key, value", [("budget", "3"), ("budget", -1), ("budget", True), ("is_whole", 1), ("files", {}),
                                        ("selection", []), ("hashes_sha256", None)])
def test_each_key_of_format_2_holds_its_kind(tmp_path, key, value):
    write_source(tmp_path / "a", (3,), 0, format_version=2)
    path = tmp_path / "a" / "index.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()) | {key: value})))
    assert f"key {key!r} is" in refusal(tmp_path)


def test_an_index_may_not_name_files_elsewhere(folder):
    path = folder / "a" / "index.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text().replace("train_00000.bin", "../b/train_00000.bin")))))
    assert "must name files like train_00000.bin" in refusal(folder)


@pytest.fixture
def written(tmp_path):
    """A folder as prepare_data.py writes it, its index sealed by its own hash."""
    write_source(tmp_path / "w", (12,), 0, format_version=2)
    return tmp_path / "w"


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
    assert len(unseen) < len(sound) / 10


@pytest.mark.parametrize("key, value", [("license", "MIT"), ("duplicates", {}), ("revision", "R"), ("note", "mine"),
                                        ("budget", None), ("is_whole", True), ("empty", 0)])
def test_an_edited_index_is_refused(written, key, value):
    path = written / "index.json"
    index = json.loads(path.read_text())
    assert read_index(written).license == "l"
    path.write_text(json.dumps(index))      # another layout is no edit
    read_index(written)
    path.write_text(json.dumps(index | {key: value}))
    with pytest.raises(ValueError, match=r"index.json is damaged \((it is not what was written|key 'note' is not one)"):
        read_index(written)
    del index["sha256"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="key 'sha256' is missing"):
        read_index(written)


def test_what_was_read_is_what_was_written(tmp_path):
    for version in 1, 2:
        write_source(tmp_path / f"v{version}", (20, 11), 1000, format_version=version)
    old, new = (read_index(tmp_path / name) for name in ("v1", "v2"))
    for index in old, new:
        assert (index.tokenizer, index.vocab_size) == ("byte", VOCAB)
        assert [shard.path.name for shard in index.splits["train"].shards] == ["train_00000.bin", "train_00001.bin"]
        assert index.splits["train"].tokens == 20 * N_CTX + 1 + 11 * N_CTX + 2
    assert (new.duplicates, new.empty, new.contaminated, new.is_whole, new.budget) == ({"v2": 2, "other": 1}, 1, 4, False, 150)
    assert new.skipped == [{"file": "x.gz", "reason": "cut short"}] and new.files == ["y.gz"]
    assert new.decontaminated_against == [{"file": "e.jsonl", "sha256": "0"}] and new.selection == {"column": "text"}
    assert (old.duplicates, old.empty, old.contaminated) == ({}, 0, 0)
    assert (old.is_whole, old.budget, old.hashes_sha256) == (True, None, None)
    assert old.skipped == old.files == old.decontaminated_against == [] and old.selection == {}


def test_a_folder_that_the_first_version_wrote_is_read(tmp_path):
    """Its bytes are kept in tests/fixtures: `local` with tokenizer=byte, one copy and one empty document."""
    with tarfile.open(FIXTURES / "shards_format_1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    index = read_index(tmp_path / "format_1")
    assert list(damage(tmp_path / "format_1")) == []
    assert index.duplicates == {"format_1": 1} and index.license == "CC0-1.0" and index.hashes_sha256 is None
    ids = {name: np.fromfile(split.shards[0].path, "<u2").tolist() for name, split in index.splits.items()}
    for split, texts in (("train", ["The first format of the shards.", "val one"]),
                         ("val", ["naïve 日本 🙂", "x = 1\n", "val two", "val three"])):
        assert ids[split] == [i for text in texts for i in [256, *text.encode()]]
        assert index.splits[split].documents == len(texts)


@pytest.mark.parametrize("name", ["hashes.npy", "train_00000.bin", "val_00000.bin"])
def test_damage_names_the_file(written, name):
    assert list(damage(written)) == []
    content = bytearray((written / name).read_bytes())
    content[-1] ^= 1
    (written / name).write_bytes(content)
    (sentence,) = damage(written)
    assert sentence.startswith(f"{written / name} is damaged: ")
    (written / name).unlink()
    (sentence,) = damage(written)
    assert f"{written / name} is missing" in sentence
    if name == "hashes.npy":
        read_index(written)     # training does not need it


def test_a_missing_source_is_told_how_to_make_it(tmp_path):
    assert tuple(MIXTURE) == shards.MIXTURE
    for name, command in ("arxiv", "prepare_data.py arxiv out="), ("mine", "prepare_data.py local FILE... name=mine out="):
        with pytest.raises(ValueError, match=f"there is no .*{name}/index.json: make it with `python {command}{tmp_path}`"):
            read_index(tmp_path / name)
    (tmp_path / "arxiv" / "parts").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{tmp_path}/arxiv is unfinished, the command that began it goes on with it"):
        read_index(tmp_path / "arxiv")


def test_a_new_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(KeyError), new_file(path) as file:
        file.write(b"half")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with new_file(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole" and len(list(tmp_path.iterdir())) == 1


def test_only_our_own_files_are_removed(folder):
    for name in "train_00002.bin.tmp", "index.json.tmp", "notes.txt", "train.bin", "train_1.bin", "my_train_00000.bin", \
            "hashes.npy", "hashes.npy.tmp", "my_hashes.npy":
        (folder / "a" / name).touch()
    remove_shards(folder / "a")
    left = sorted(path.name for path in (folder / "a").iterdir())
    assert left == ["my_hashes.npy", "my_train_00000.bin", "notes.txt", "train.bin", "train_1.bin"]
