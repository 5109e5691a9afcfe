"""Tests of prepare/twins.py: near twins of validation documents, against the plainest count."""

import random

import numpy as np
import pytest
from text_files import jsonl, refused, some_documents

from prepare import twins
from prepare_data import main
from runtime import shards
from runtime.shards import read_index


def windows(text: str) -> set[bytes]:
    data = text.encode()
    return {data[i:i + twins.WIDTH] for i in range(len(data) - twins.WIDTH + 1)}


def documents(index, split) -> list[str]:
    ids = np.concatenate([np.fromfile(shard.path, "<u2") for shard in index.splits[split].shards])
    return bytes(np.where(ids == 256, 255, ids).astype(np.uint8)).decode("latin-1").split("\xff")[1:]


@pytest.fixture
def source(tmp_path, capsys):
    """Half the documents are an earlier one with some words changed; some are shorter than a stretch."""
    rng, made = random.Random(3), []
    for text in some_documents(160, 7):
        text = text.encode("ascii", "replace").decode()
        made.append(text)
        if rng.random() < 0.5:
            words = text.split(" ")
            for _ in range(rng.choice([1, 2, 5, 30])):
                words[rng.randrange(len(words))] = rng.choice(["other", "words", "9"])
            made.append((" ".join(words) + " again ") * rng.choice([1, 1, 2]))
    rng.shuffle(made)
    (tmp_path / "a.jsonl").write_bytes(jsonl([*made, "tiny", "tiny too"]))
    assert main(["local", str(tmp_path / "a.jsonl"), "name=mine", f"out={tmp_path / 'out'}", "tokenizer=byte", "val_share=0.3",
                 "processes=1"]) == 0
    capsys.readouterr()
    return tmp_path / "out/mine"


@pytest.mark.parametrize("chunk", [500, 3_000, twins.CHUNK])
def test_shares_are_those_of_the_plainest_count(source, monkeypatch, chunk):
    monkeypatch.setattr(twins, "CHUNK", chunk)
    index = read_index(source)
    train = [windows(text) for text in documents(index, "train")]
    val = documents(index, "val")
    expected = [max(len(windows(text) & other) for other in train) / max(1, len(windows(text))) for text in val]
    found, tokens = twins.measure(index)
    assert tokens.tolist() == [len(text) for text in val]
    if chunk >= 3_000:      # a document is whole in a chunk
        assert found.tolist() == expected and 0.1 < np.mean(found >= twins.SHARE) < 0.8 and min(found) == 0
    else:
        assert (found <= np.array(expected)).all() and found.sum() > 0


def test_documents_that_no_stretch_fits_in_count_as_no_twins(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(jsonl([f"short {i}" for i in range(40)]))
    assert main(["local", str(tmp_path / "a.jsonl"), "name=mine", f"out={tmp_path}", "tokenizer=byte", "val_share=0.3",
                 "processes=1"]) == 0
    capsys.readouterr()
    assert main(["--twins", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    count = read_index(tmp_path / "mine").splits["val"].documents
    assert said == f"mine         0 of {count} validation documents (0.0%), 0.0% of their tokens, have a near twin in training\n"


def test_several_shards_are_read(source, tmp_path, monkeypatch, capsys):
    whole, _ = twins.measure(read_index(source))
    monkeypatch.setattr(shards, "SHARD_TOKENS", 5_000)
    assert main(["local", str(tmp_path / "a.jsonl"), "name=mine", f"out={tmp_path / 'cut'}", "tokenizer=byte", "val_share=0.3",
                 "processes=1"]) == 0
    index = read_index(tmp_path / "cut/mine")
    assert len(index.splits["train"].shards) > 2
    cut, tokens = twins.measure(index)
    assert tokens.sum() == index.splits["val"].tokens - index.splits["val"].documents
    pieces = len(index.splits["val"].shards) - 1        # a document that ends in the next shard is two
    assert pieces > 0 and len(whole) <= len(cut) <= len(whole) + pieces and abs(cut.mean() - whole.mean()) < 0.1


def test_the_command_says_it_of_each_source(source, tmp_path, capsys):
    assert main(["--twins", str(source.parent)]) == 0
    said, (found, tokens) = capsys.readouterr().out, twins.measure(read_index(source))
    is_twin = found >= 0.5
    assert said.startswith(f"mine         {is_twin.sum()} of {len(found)} validation documents ({is_twin.mean():.1%}), "
                           f"{tokens[is_twin].sum() / tokens.sum():.1%} of their tokens")
    assert "holds no finished source" in refused(capsys, "--twins", tmp_path / "nowhere")
    assert "there is no key 'tokens'" in refused(capsys, "--twins", "tokens=3")
    (source / "index.json").write_text("{")
    assert "index.json" in refused(capsys, "--twins", source.parent)
