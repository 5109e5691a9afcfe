"""Tests of prepare_data.py: from text to shards, again, cut off in the middle, with wrong input."""

import gzip
import json
import random
import tracemalloc
from hashlib import blake2b, sha256

import numpy as np
import pytest
from text_files import DOCUMENTS, PACK, jsonl, parquet, refused, some_documents

from prepare import harvest, source
from prepare.job import Job
from prepare.phases import prepare
from prepare.source import Source, batches
from prepare_data import main
from runtime import progress, shards
from runtime.tokenizer import load_tokenizer


def in_split(document, split, val_per_10k=2000):
    """The split rule, told a second time."""
    number = int.from_bytes(blake2b(document.encode(), digest_size=8).digest(), "little")
    return (number % 10_000 < val_per_10k) == (split == "val")


def tokens(folder, split):
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}_*.bin"))])


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def local(*files, out, **options):
    options = {"name": "mine", "tokenizer": "byte", "val_share": "0.2", "processes": 1, "out": out} | options
    return main(["local", *map(str, files), *(f"{key}={value}" for key, value in options.items())])


# --------------------------------------------------------------------------------------------------------------- shards

@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_shards_hold_the_documents_in_order(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_bytes(jsonl(DOCUMENTS))
    assert local(file, out=tmp_path, tokenizer=tokenizer, license="CC0-1.0") == 0
    index, tok = json.loads((tmp_path / "mine/index.json").read_text()), load_tokenizer(tokenizer)
    for split in "train", "val":
        chosen = [d for d in DOCUMENTS if in_split(d, split)]
        ids = tokens(tmp_path / "mine", split)
        assert ids.tolist() == [i for d in chosen for i in [tok.eot, *tok.encode(d).tolist()]]
        assert (ids == tok.eot).sum() == len(chosen), "text that spells <|endoftext|> stays text"
        if tokenizer == "byte":
            assert ids.tolist() == [i for d in chosen for i in [256, *d.encode()]]
        found = index["splits"][split]
        data = (tmp_path / "mine" / f"{split}_00000.bin").read_bytes()
        shard = {"file": f"{split}_00000.bin", "tokens": len(ids), "sha256": sha256(data).hexdigest()}
        assert found == {"documents": len(chosen), "text_bytes": sum(len(d.encode()) for d in chosen),
                         "tokens": len(ids), "shards": [shard]}
    assert (index["format_version"], index["dtype"], index["source"], index["duplicates"]) == (2, "uint16", "mine", {})
    assert (index["files"], index["skipped"], index["is_whole"], index["budget"]) == (["a.jsonl"], [], True, None)
    assert index["tokenizer"] == tokenizer and index["tokenizer_sha256"] == tok.sha256
    assert index["vocab_size"] == tok.vocab_size
    assert index["license"] == "CC0-1.0" and "% 10000 < 2000" in index["split_rule"] and "a.jsonl" in index["dataset"]


def test_all_formats_and_packings_give_the_same_shards(tmp_path):
    expected = {split: [i for d in DOCUMENTS if in_split(d, split) for i in [256, *d.encode()]]
                for split in ("train", "val")}
    for form, data in (".jsonl", jsonl(DOCUMENTS)), (".parquet", parquet(DOCUMENTS)), (".txt", None):
        for packing, pack in PACK.items():
            folder = tmp_path / (form + packing).strip(".")
            folder.mkdir()
            contents = [data] if data else [d.encode() for d in DOCUMENTS]
            files = [folder / f"{i:02d}{form}{packing}" for i in range(len(contents))]
            for file, one in zip(files, contents, strict=True):
                file.write_bytes(pack(one))
            assert local(*files, out=folder) == 0
            for split in expected:
                assert tokens(folder / "mine", split).tolist() == expected[split], folder


def test_shards_are_cut_at_their_size(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_bytes(jsonl(DOCUMENTS))
    assert local(file, out=tmp_path / "whole") == 0
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    assert local(file, out=tmp_path / "cut") == 0
    index = shards.read_index(tmp_path / "cut/mine")
    for split in "train", "val":
        assert (tokens(tmp_path / "cut/mine", split) == tokens(tmp_path / "whole/mine", split)).all()
        sizes = [shard.tokens for shard in index.splits[split].shards]
        assert len(sizes) > 2 and set(sizes[:-1]) == {100} and 0 < sizes[-1] <= 100
    assert main(["--verify", str(tmp_path)]) == 0


def test_copies_and_empty_documents_are_dropped_and_counted(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_bytes(jsonl([*DOCUMENTS, "", " \n ", *DOCUMENTS[:3], None]) + b"\n  \n")
    assert local(file, out=tmp_path) == 0
    assert "3 documents dropped that came before, 3 empty ones" in capsys.readouterr().out
    index = shards.read_index(tmp_path / "mine")
    assert (index.duplicates, index.empty) == ({"mine": 3}, 3)
    assert sum(split.documents for split in index.splits.values()) == len(DOCUMENTS)


def test_half_characters_of_json_become_replacement_characters(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude42"}\n' + jsonl(DOCUMENTS))
    assert local(file, out=tmp_path) == 0
    everything = bytes(i for split in ("train", "val") for i in tokens(tmp_path / "mine", split) if i < 256).decode()
    assert "a\ufffdb" in everything and "🙂" in everything


def test_memory_does_not_grow_with_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1_000_000)

    class Big:
        name, bytes = "big.txt", None

        def read(self, skip_rows):
            rng = random.Random(0)
            return batches((rng.randbytes(50_000).hex() for _ in range(400)), skip_rows)      # 40 MB
    big = Source("big", lambda known: [Big()], "d", "r", "l")
    job = Job(out=tmp_path, tokenizer=load_tokenizer("byte"), val_per_10k=500, processes=1, worker=1,
              workers=1, grams=None, skip_bad=False, is_quiet=True)
    tracemalloc.start()
    try:
        prepare([big], job)
        assert tracemalloc.get_traced_memory()[1] < 40e6, "a few batches of 2 MB and their ids, of a source of 40 MB, 80 on disk"
    finally:
        tracemalloc.stop()
    assert shards.read_index(tmp_path / "big").splits["train"].tokens > 3e7


# ---------------------------------------------------------------------------------------------------------------- again

def test_a_complete_folder_is_left_alone(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_bytes(jsonl(DOCUMENTS))
    assert local(file, out=tmp_path) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").iterdir()}
    capsys.readouterr()
    assert local(file, out=tmp_path) == 0
    assert "mine is complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").iterdir()} == before


def test_a_folder_of_something_else_is_not_overwritten(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    arguments = ["local", file, "name=mine", f"out={tmp_path}"]
    file.write_bytes(jsonl(DOCUMENTS))
    assert local(file, out=tmp_path) == 0
    before = content(tmp_path)
    assert "holds shards of tokenizer='byte', not 'gpt2'" in refused(capsys, *arguments, "val_share=0.2")
    arguments.append("tokenizer=byte")
    assert "holds shards of split_rule=" in refused(capsys, *arguments, "val_share=0.3")
    assert "column code" in refused(capsys, *arguments, "val_share=0.2", "column=code")
    assert content(tmp_path) == before
    file.write_bytes(jsonl(DOCUMENTS[1:]))
    assert "was made when local: a.jsonl; column text held something else: delete it" in refused(
        capsys, *arguments, "val_share=0.2")


def test_copies_across_sources_are_dropped(tmp_path):
    texts = {"one": DOCUMENTS[:25], "two": DOCUMENTS[20:], "three": DOCUMENTS[:5] + some_documents(20, 7)}
    for name, documents in texts.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_bytes(jsonl(documents))
        assert local(file, out=tmp_path / "data", name=name) == 0
    duplicates = {name: shards.read_index(tmp_path / "data" / name).duplicates for name in texts}
    assert duplicates == {"one": {}, "two": {"one": 5}, "three": {"one": 5}}


def test_a_source_of_copies_alone_is_a_sentence(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_bytes(jsonl(DOCUMENTS))
    assert local(file, out=tmp_path / "data") == 0
    said = refused(capsys, "local", file, "name=yours", "tokenizer=byte", "val_share=0.2", "processes=1",
                   f"out={tmp_path / 'data'}")
    assert "yours" in said and "mine" in said


def test_a_budget_counts_training_tokens(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_bytes(jsonl(DOCUMENTS))
    assert local(file, out=tmp_path, tokens=1000) == 0
    index, ended = shards.read_index(tmp_path / "mine"), {"train": [], "val": []}
    for document in DOCUMENTS:
        split = "train" if in_split(document, "train") else "val"
        ended[split] += [256, *document.encode()]
        if len(ended["train"]) >= 1000:
            break
    for split, ids in ended.items():
        assert tokens(tmp_path / "mine", split).tolist() == ids
    assert (index.is_whole, index.budget) == (False, 1000)
    capsys.readouterr()
    assert local(file, out=tmp_path, tokens=900) == 0 and "is complete" in capsys.readouterr().out     # it holds as many
    assert "training tokens, not the 5,000 asked for" in refused(
        capsys, "local", file, "name=mine", "tokenizer=byte", "val_share=0.2", f"out={tmp_path}", "tokens=5000")


# ------------------------------------------------------------------------------------------------------------ verifying

def test_verify_names_the_bad_shard(tmp_path, capsys):
    for name, documents in {"mine": DOCUMENTS, "yours": some_documents(40, 1)}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_bytes(jsonl(documents))
        assert local(file, out=tmp_path / "data", name=name) == 0
    assert main(["--verify", str(tmp_path / "data")]) == main(["verify", str(tmp_path / "data/mine")]) == 0
    assert capsys.readouterr().out.count("OK  ") == 3
    shard = tmp_path / "data/mine/val_00000.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    said = refused(capsys, "--verify", tmp_path / "data")
    assert f"{shard} is damaged" in said and "yours" not in said
    shard.unlink()
    assert f"{shard} is missing" in refused(capsys, "--verify", tmp_path / "data/mine")
    assert "there is no" in refused(capsys, "--verify", tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------------------ bad input

@pytest.mark.parametrize("arguments, expected", [
    (["local", "nowhere.txt", "name=mine"], "there is no file nowhere.txt"),
    (["local", ".", "name=mine"], ". is a folder: name the files in it"),
    (["local", "name=mine"], "no file is named"),
    (["local", "x.txt"], "name='' must be one folder name"),
    (["local", "x.txt", "name=../up"], "name='../up' must be one folder name"),
    (["local", "x.txt", "nmae=mine"], "there is no key 'nmae'; did you mean 'name'"),
    (["local", "x.txt", "--colum", "text"], "there is no key 'colum'; did you mean 'column'"),
    (["local", "x.txt", "name="], "name= is empty: give it a value, or leave it out"),
    (["demo", "tokenizer=gpt3"], "there is no tokenizer 'gpt3'; there are: gpt2, byte"),
    (["demo", "x.txt"], "demo takes no 'x.txt'"),
    (["demo", "val_share=0.9"], "val_share=0.9 must be a number from 0.0001 to 0.5"),
    (["demo", "val_share=nan"], "val_share=nan is not a number"),
    (["tokens=31e9"], "tokens=31e9 does not say what to prepare: name a source"),
    (["--tokens=31e9", "out=x"], "--tokens=31e9 does not say what to prepare"),
    (["dmo"], "there is no command 'dmo'; did you mean 'demo'"),
    (["--verify", "out=x"], "there is no key 'out'; there are: none"),
    (["local", "x.txt", "name=mine", "tokens=-1"], "tokens=-1.0 must be a count, such as tokens=31e9"),
    (["local", "x.txt", "name=mine", "tokens=many"], "tokens='many'"),
    (["local", "x.txt", "name=mine", "processes=0"], "processes=0 must be a number from 1"),
    (["local", "x.txt", "name=mine", "worker=0/2"], "worker='0/2' must be this one's number, from 1"),
    (["local", "x.txt", "name=mine", "worker=3/2"], "such as worker=3/16"),

    (["local", "x.txt", "name=mine", "decontaminate=nowhere.jsonl"], "nowhere.jsonl"),
    (["fineweb_edu", "pyhton"], "there is no source 'pyhton'; did you mean 'python'"),
    (["python", "python"], "python is named twice"),
    (["fineweb_edu", "column=code"], "there is no key 'column'"),
    (["hf:owner/name", "other"], "one data set at a time"),
])
def test_a_wrong_command_line_is_a_sentence(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_full_or_forbidden_disk_is_a_sentence(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(jsonl(DOCUMENTS))
    (tmp_path / "file").write_text("in the way")
    said = refused(capsys, "local", tmp_path / "a.jsonl", "name=mine", f"out={tmp_path / 'file'}")
    assert str(tmp_path / "file") in said and "the same command goes on" not in said


def test_help_shows_the_usage(capsys):
    assert main(["--help"]) == main([]) == 0
    assert "python prepare_data.py demo" in capsys.readouterr().out


def test_demo_writes_four_sources_and_stays_when_the_installation_ages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harvest, "documents", lambda source, note: iter(some_documents(300, len(source))))
    monkeypatch.setattr(harvest, "revision", lambda source: "CPython 3.11")
    assert main(["demo", f"--out={tmp_path / 'demo'}"]) == 0
    assert sorted(path.name for path in (tmp_path / "demo").iterdir() if path.is_dir()) == ["c", "prose", "python", "science"]
    index = shards.read_index(tmp_path / "demo/science")
    assert (index.tokenizer, index.dataset, index.license) == ("byte", "installed", "BSD-3-Clause")
    assert "% 10000 < 400" in index.split_rule
    before = content(tmp_path)
    monkeypatch.setattr(harvest, "revision", lambda source: "CPython 3.12")
    capsys.readouterr()
    assert main(["demo", f"out={tmp_path / 'demo'}"]) == 0
    assert "c was made from CPython 3.11; delete it to harvest what is installed now" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_progress_is_told_while_files_are_read(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(jsonl(some_documents(3000)), 1))
    clock = iter(range(0, 1_000_000, 61))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(source, "BATCH_BYTES", 20_000)
    assert local(file, out=tmp_path) == 0
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) > 5 and all("/s, " in line and line.startswith("mine: ") for line in lines)
    assert f"{tmp_path / 'mine'}: writing " in last
    shares = [int(line.removeprefix("mine: ").split("%")[0]) for line in lines]
    assert shares == sorted(shares) and shares[0] < 60 and "100%" in lines[-1] and "0 s left" in lines[-1], lines
