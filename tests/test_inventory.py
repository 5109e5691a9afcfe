"""Tests of prepare/inventory.py: what is there is told in full, whatever state it is in."""

import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from text_files import DOCUMENTS, jsonl

from prepare import inventory
from prepare.parts import Parts
from prepare.source import DOCUMENT, Encoded
from prepare_data import main
from runtime.cli import UserError
from runtime.shards import read_index, write_index
from tests import conftest


def shown(*folders):
    """The lines, each of which must fit and name its source."""
    lines = list(inventory.show(list(folders)))
    assert all(len(line) <= inventory.WIDTH and line == line.rstrip() for line in lines), lines
    return lines


def told(lines, source, word):
    """What the lines say of one source under one word, joined again."""
    return " ".join(line[len(source):].strip().removeprefix(word).strip() for line in lines
                    if line.split()[:2] == [source, word])


def rewrite(folder, **changes):
    """Give an index of the present format other values, signed as it must be."""
    raw = json.loads((folder / "index.json").read_text())
    write_index(folder, {key: value for key, value in raw.items() if key != "sha256"} | changes)


@pytest.fixture
def data(tmp_path):
    """Two small sources; the second holds copies of the first one's documents."""
    for name, documents in ("one", DOCUMENTS), ("two", [*DOCUMENTS[:7], *(f"{d} again" for d in DOCUMENTS), "", " "]):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl(documents))
        assert main(["local", str(tmp_path / f"{name}.jsonl"), f"name={name}", f"out={tmp_path / 'data'}", "tokenizer=byte",
                     "val_share=0.2", "license=CC0-1.0", "processes=1"]) == 0
    return tmp_path / "data"


# ------------------------------------------------------------------------------------------------------------- finished

def test_the_table_counts_what_lies_in_the_shards(data):
    lines, sums = shown(data), {}
    for split in "train", "val":
        for name in "one", "two":
            ids = np.concatenate([np.fromfile(path, "<u2") for path in sorted((data / name).glob(f"{split}_*.bin"))])
            counts = [(ids == 256).sum(), len(ids), (ids < 256).sum()]      # documents, tokens, bytes
            sums[split] = np.add(sums.get(split, 0), counts)
            assert [name, split, *as_shown(counts)] in [line.split() for line in lines]
        assert ["all", split, *as_shown(sums[split])] in [line.split() for line in lines]


def as_shown(counts):
    documents, tokens, size = (int(count) for count in counts)
    return [f"{documents:,}", f"{tokens:,}", f"{size / tokens:.2f}", f"{2 * tokens / 1e9:.3f}"]


def test_each_source_tells_where_it_came_from_and_what_was_dropped(data):
    lines = shown(data)
    index = read_index(data / "two")
    assert told(lines, "two", "from") == f"{index.dataset} @ {index.revision}" and "two.jsonl" in index.dataset
    assert told(lines, "two", "license") == "CC0-1.0" and told(lines, "two", "tokenizer") == "byte"
    assert told(lines, "two", "dropped") == "copies 7 (first met in one 7), empty 2"
    assert told(lines, "one", "dropped") == "copies 0, empty 0"
    assert told(lines, "one", "read") == "1 file to the end: one.jsonl"
    assert not told(lines, "one", "skipped")


def test_a_budget_skipped_files_and_contamination_are_told(data):
    rewrite(data / "one", is_whole=False, budget=1_234_567, files=[f"{i}.parquet" for i in range(1_008)], contaminated=3,
            decontaminated_against=[{"file": "hellaswag.jsonl", "sha256": "0" * 64}], duplicates={"one": 4, "two": 1_500},
            skipped=[{"file": f"bad{i}.gz", "reason": "cut short"} for i in range(7)])
    lines = shown(data)
    assert told(lines, "one", "read") == ("1,008 files until there were 1,234,567 training tokens: 0.parquet, 1.parquet, "
                                          "2.parquet, 3.parquet, 4.parquet and 1,003 more")
    assert told(lines, "one", "dropped") == ("copies 1,504 (first met in one 4, two 1,500), empty 0, contaminated 3 (by "
                                             "hellaswag.jsonl)")
    skipped = told(lines, "one", "skipped")
    assert skipped.startswith("7 files: bad0.gz (cut short); bad1.gz") and skipped.endswith("bad4.gz (cut short) and 2 more")


def test_a_budget_that_was_not_reached_is_told(data):
    rewrite(data / "one", is_whole=True, budget=1_000_000)
    there = read_index(data / "one").splits["train"].tokens
    assert told(shown(data), "one", "read") == (f"1 file to the end (budget 1,000,000 training tokens, {there:,} are all there "
                                                f"are): one.jsonl")


def test_tokens_of_two_tokenizers_have_no_sum(data):
    rewrite(data / "one", tokenizer="gpt2")
    assert not [line for line in shown(data) if line.startswith("all ")]


def test_one_source_a_format_1_index_and_a_nested_folder(tmp_path):
    conftest.write_source(tmp_path / "demo" / "web", 0)
    lines = shown(tmp_path / "demo" / "web")        # the source's own folder
    assert lines[2].split() == ["web", "train", "80", "40,000", "1.00", "0.000"] and told(lines, "web", "from") == "random @ 1"
    assert not any(line.startswith("all") for line in lines)
    assert told(shown(tmp_path), "demo/web", "license") == "CC0-1.0"
    both = shown(tmp_path / "demo", tmp_path)
    assert told(both, "web", "dropped") == told(both, "demo/web", "dropped") == "copies 0, empty 0"


def test_lines_of_any_length_are_wrapped(data):
    rewrite(data / "one", license="word " * 100, revision="v" * 1000, dataset="x, " * 500)
    lines = shown(data)
    assert told(lines, "one", "license") == " ".join(["word"] * 100)
    assert told(lines, "one", "from").endswith("(index.json has all of it)") and len(told(lines, "one", "from")) <= 300


def test_damage_is_a_sentence_and_the_rest_is_shown(data):
    (data / "one" / "index.json").write_bytes(b"{")
    (data / "two" / "val_00000.bin").write_bytes(b"")
    rewrite_other(data)
    lines = shown(data)
    assert "cannot be read" in told(lines, "one", "damaged") and "promises" in told(lines, "two", "damaged")
    assert told(lines, "three", "license") == "CC0-1.0" and not any(line.startswith(("one  ", "two  ")) and " train " in line
                                                                    for line in lines)


def rewrite_other(data):
    conftest.write_source(data / "three", 0)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="there is no folder .*nowhere"):
        shown(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="there is no folder .*file"):
        shown(tmp_path / "file")
    for command in shown, lambda *folders: inventory.verify(list(folders)):
        with pytest.raises(UserError, match=f"{tmp_path} holds nothing prepared: `python prepare_data.py` says how"):
            command(tmp_path)
        with pytest.raises(UserError, match="there is no folder .*nowhere"):
            command(tmp_path / "nowhere")


# ----------------------------------------------------------------------------------------------------------- unfinished

def begin(folder, counts=(3, 2, 2, 1)):
    """Parts of `counts` files: the first is whole, the second begun, the third failed."""
    parts = Parts(folder, {"tokenizer": "byte"})
    parts.open([SimpleNamespace(name=f"input{i}.gz", bytes=1000) for i in range(len(counts))])
    for number, is_last in (0, True), (1, False):
        file = parts.next_file(None, None, 1, 1)
        assert file == number
        writer = parts.writer(file)
        table = np.zeros(counts[file], DOCUMENT)
        table["hash"], table["tokens"], table["bytes"] = range(1, counts[file] + 1), 1000, 999
        writer.add(Encoded(np.zeros(1000 * counts[file], np.uint16), table, counts[file], 1.0))
        writer.close(is_last)
        if is_last:
            parts.release(file)
    parts.fail(2, "its gzip member was cut short")
    return parts


CODE = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from pathlib import Path
from test_inventory import begin
parts = begin(Path({folder!r}))
print("begun", flush=True)
sys.stdin.read()
"""


def test_an_unfinished_source_tells_how_far_it_is(data):
    code = CODE.format(root=str(ROOT), folder=str(data / "arxiv" / "parts"))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout.readline() == "begun\n"
            lines = shown(data)
            assert told(lines, "arxiv", "unfinished") == ("5,000 tokens in finished pieces; of 4 input files 1 read to the "
                                                          "end, 1 being read now")
            assert f"process {worker.pid} on host" in told(lines, "arxiv", "workers")
            assert told(lines, "arxiv", "failed") == "1 input file: input2.gz (its gzip member was cut short)"
            assert told(lines, "one", "license") == "CC0-1.0", "finished ones are shown beside it"
            assert shown(data) == lines, "looking changes nothing"
        finally:
            worker.send_signal(signal.SIGKILL)
    lines = shown(data)
    assert told(lines, "arxiv", "unfinished").endswith("1 read to the end, 0 being read now")
    assert "goes on where it was cut off" in told(lines, "arxiv", "workers")
    (data / "arxiv" / "parts" / "layout.json").write_text("{}")
    assert told(shown(data), "arxiv", "unfinished").endswith("; the shards are to be made of them")


def test_parts_in_any_state_are_no_traceback(tmp_path):
    begin(tmp_path / "a" / "parts")
    for path in sorted((tmp_path / "a" / "parts").iterdir()):
        for content in b"", b"{", b"[]", b"\xff", b"7":
            shutil.copytree(tmp_path / "a", tmp_path / "b" / "a")
            (tmp_path / "b" / "a" / "parts" / path.name).write_bytes(content)
            assert any("unfinished" in line for line in shown(tmp_path / "b"))
            shutil.rmtree(tmp_path / "b")
    assert not inventory._is_held(tmp_path / "gone.lock")


# ------------------------------------------------------------------------------------------------------------ verifying

def test_verify_names_all_that_is_bad(data, capsys):
    inventory.verify([data])
    assert capsys.readouterr().out == f"OK  {data / 'one'}\nOK  {data / 'two'}\n"
    for name, file in ("one", "train_00000.bin"), ("two", "val_00000.bin"):
        content = bytearray((data / name / file).read_bytes())
        content[len(content) // 2] ^= 1
        (data / name / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        inventory.verify([data])
    assert capsys.readouterr().out == f"BAD {data / 'one'}\nBAD {data / 'two'}\n"
    assert all(f"{data / place} is damaged" in str(caught.value) for place in ("one/train_00000.bin", "two/val_00000.bin"))


def test_verify_names_what_is_unfinished(data, capsys):
    begin(data / "arxiv" / "parts")
    with pytest.raises(UserError, match=f"{data / 'arxiv'} is unfinished"):
        inventory.verify([data])
    assert capsys.readouterr().out.splitlines() == [f"unfinished {data / 'arxiv'}", f"OK  {data / 'one'}", f"OK  {data / 'two'}"]


def test_print_rows(data, capsys):
    inventory.print_rows(read_index(data / "one"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["one", "train"], ["one", "val"]] and all(row[-1] == "CC0-1.0" for row in rows)
