"""Tests of bench/data.py and its rooms: the numbers it prints are of the work it names."""

import gzip
import json
import math
import multiprocessing
import os
import re
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from bench import data, data_plan, data_scale, raw
from configs.mixture import MIXTURE
from runtime.data import Data
from runtime.tokenizer import load_tokenizer
from tests.conftest import write_shards

NUMBER = r"[\d.,]+"


def test_a_rehearsal_from_end_to_end(tmp_path, capsys):
    out, folder = tmp_path / "speed.json", tmp_path / "bench"
    assert data.main(["mb=3", "processes=1", "repeats=1", "scale=2e7", f"folder={folder}", f"out={out}"]) == 0
    said, results = capsys.readouterr().out, json.loads(out.read_text())
    assert not folder.exists(), "nothing stays behind"
    for words in ("raw tiktoken, one process:", "loader:", "order of 19,456 windows", "copies among 20,000 documents in 1 pieces",
                  "shards:", "plan for 0.0B tokens on 16 cores"):
        assert words in said
    preparing = results["preparing"]
    assert 3 < preparing["mb"] < 3.2 and len(preparing["rows"]) == 1 and len(preparing["single"]) == 2
    (row,) = preparing["rows"]
    assert (row["backend"], row["processes"], row["child_mib"]) == ("tiktoken", 1, 0) and 30 < row["main_mib"] < 2048
    for seconds, kind in ("gross", "wall"), ("at_once", "wall"), ("cpu", "cpu"):
        assert row[f"{seconds}_ratio"] == pytest.approx(sum(turn[kind] for turn in preparing["single"]) / 2 / row[seconds])
    assert row["gross"] > row["net"] or math.isnan(row["net"]), "what is taken off is the start, which takes time"
    rate = re.search(rf"one process: ({NUMBER}) MB/s", said)[1]
    assert float(rate) == pytest.approx(2 / sum(turn["wall"] for turn in preparing["single"]), abs=0.06)
    # The text is mostly ASCII of about three bytes a token; a count of the wrong thing would be far off.
    assert 1.8 < preparing["mb"] * 1e6 / preparing["tokens"] < 4


# ----------------------------------------------------------------------------------------------------------------- text

def test_the_text_is_a_mix_without_copies_and_of_the_size_asked_for(tmp_path):
    texts = list(data.some_text(3))
    assert len(set(texts)) == len(texts) and 3e6 <= sum(len(t.encode()) for t in texts) < 3e6 + len(texts[-1].encode())
    for part in texts[:data.FEW], texts[data.FEW:], texts[::4], texts[1::8]:
        for words in "import ", "#define ", "Parameters\n":     # of Python, C, science
            assert any(words in text for text in part)
    paths = data.write_files(tmp_path / "files", texts)
    assert [path.name[2:] for path in paths] == [".parquet", ".jsonl.gz"] * (data.FILES // 2)
    found = [pyarrow.parquet.read_table(path)["text"].to_pylist() if path.suffix == ".parquet" else
             [json.loads(line)["text"] for line in gzip.decompress(path.read_bytes()).splitlines()] for path in paths]
    assert sorted(text for own in found for text in own) == sorted(texts)


def test_text_is_repeated_where_there_is_too_little(monkeypatch):
    monkeypatch.setattr(data.harvest, "documents", lambda name, note: iter([f"{name} " * 1000, "", "short"]))
    texts = list(data.some_text(1))
    bodies = {text.partition("\n")[2] for text in texts}
    assert len(set(texts)) == len(texts) and len(bodies) == 5 and sum(map(len, texts)) >= 1e6


def test_raw_processes_share_the_documents(tmp_path, monkeypatch):
    encoded, texts = [], [f"text {i}" for i in range(7)]
    (tmp_path / "sample.json").write_text(json.dumps(texts))
    stand_in = SimpleNamespace(encode_to_numpy=lambda text, **_: encoded.append(text))
    monkeypatch.setattr("tiktoken.Encoding", lambda *_, **__: stand_in)
    ours, theirs = multiprocessing.Pipe()
    for share in (0, 1), (0, 2), (1, 2), None:
        ours.send(share)
    raw._raw(theirs, tmp_path / "sample.json")
    assert encoded == texts + texts[::2] + texts[1::2]


def test_raw_processes_tell_seconds_per_megabyte(tmp_path):
    (tmp_path / "sample.json").write_text(json.dumps(["some words, 0.5 \n" * 5_000] * 20))
    with raw.Raw(tmp_path / "sample.json", 2) as both:
        of_one, of_ten = both.run(2, 1.0), both.run(2, 10.0)
    assert of_one["cpu"] > 0 and of_ten["cpu"] / of_one["cpu"] < 0.5 and of_one["wall"] > 0.4 * of_one["cpu"]


def test_shares_are_of_as_many_raw_processes():
    """Of the mean of the turns before and after, for a steady drift cancels so."""
    single = [{"wall": 0.08, "cpu": 0.07}, {"wall": 0.10, "cpu": 0.07}, {"wall": 0.12, "cpu": 0.09}]
    rows = [{"processes": 1, "at_once": 0.09, "gross": 0.18, "net": 0.10, "cpu": 0.14},
            {"processes": 4, "at_once": 0.0275, "gross": 0.055, "net": 0.11, "cpu": 0.16}]
    data.compare(rows, single)
    shares = [[row[f"{key}_ratio"] for key in ("at_once", "gross", "net", "cpu")] for row in rows]
    assert np.allclose(shares, [[1.0, 0.5, 0.9, 0.5], [1.0, 0.5, 0.25, 0.5]])


def test_a_command_that_fails_is_told_with_its_words(tmp_path, capsys):
    missing = tmp_path / "nowhere.parquet"
    with pytest.raises(OSError, match="ended with exit code 2: there is no file .*nowhere.parquet"):
        data.prepare([missing], tmp_path / "out", 1)


# ---------------------------------------------------------------------------------------------------------------- scale

@pytest.fixture
def source(tmp_path):
    """A prepared source of gpt2 ids: 3M training tokens, each window's first id known."""
    rng, folder, splits = np.random.default_rng(0), tmp_path / "bench", {}
    for split, tokens in ("train", 3_000_000), ("val", 50_000):
        splits[split] = [rng.integers(0, 50257, tokens, np.uint16)]
    write_shards(folder, splits, 4, tokenizer="gpt2", tokenizer_sha256=load_tokenizer("gpt2").sha256, vocab_size=50257)
    return folder


def test_the_loader_is_timed_over_whole_steps(source, tmp_path, monkeypatch):
    monkeypatch.setattr(data_scale, "LOADED_TOKENS", 2 * data_scale.TOKENS_PER_STEP)
    read, clock = [], iter([0, 10, 20, 21, 30, 34])
    batch = Data.batch

    def counted(self, step, micro, rank, world_size):
        read.append((step, micro))
        return batch(self, step, micro, rank, world_size)

    monkeypatch.setattr(Data, "batch", counted)
    monkeypatch.setattr(data_scale.time, "perf_counter", lambda: next(clock))       # turns of 10, 1 and 4 seconds
    found = data_scale.loader(source, tmp_path / "loader", 4, 2)
    assert found == {"micro_batch": 4, "tok_per_s": 2**20 * 5 / 8, "turns": [2**20, 2**18]}
    assert read == [(step, micro) for step in range(6) for micro in range(128)], "one turn to warm up, two that count"


def test_the_order_is_of_the_whole_scale(tmp_path):
    found = data_scale.order(tmp_path / "order", 3e9)
    assert found["windows"] == 3_000_000_000 // 2**19 * 512 and found["step_s"] > 0
    shards = list((tmp_path / "order").glob("*/train_*.bin"))
    assert sum(path.stat().st_size for path in shards) == pytest.approx(2 * 3e9, rel=1e-6)
    assert sum(path.stat().st_blocks for path in shards) == 0, "they take no disk"


def test_copies_and_shards_are_of_the_whole_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(data_scale, "PIECE_TOKENS", 2_000_000)
    found = data_scale.layout(tmp_path / "layout", 6e6)
    assert (found["documents"], found["pieces"]) == (6_000, 3)
    assert data_scale.write(tmp_path / "write", 6e6)["tokens"] == 5_940_000     # one in a hundred was a copy
    assert (tmp_path / "write" / "train_00000.bin").stat().st_size > 2 * 5.8e6


def test_memory_of_a_part_is_measured_in_a_process_of_its_own(tmp_path):
    found = data_scale.run_apart(_hold, 200)
    assert found["pid"] != os.getpid() and 190 < found["mib"] < 300
    (tmp_path / "file").write_text("")
    with pytest.raises(ChildProcessError, match="layout died"):
        data_scale.run_apart(data_scale.layout, tmp_path / "file", 2e7)


def _hold(mib):
    np.ones(2**20 // 8 * mib)
    return {"pid": os.getpid()}


# ----------------------------------------------------------------------------------------------------------------- plan

def row(backend, n, net, main_cpu=0.001, **more):
    return {"backend": backend, "processes": n, "at_once": 0.05, "gross": 0.1, "net": net, "main_cpu": main_cpu, "cpu": 0.1,
            "at_once_ratio": 0.9, "gross_ratio": 0.8, "net_ratio": 0.85, "cpu_ratio": 0.95, "main_mib": 300.0,
            "child_mib": 70.0, **more}


RESULTS = {
    "preparing": {"mb": 200.0, "documents": 1000, "tokens": 80_000_000, "single": [{"wall": 0.08, "cpu": 0.08}] * 3,
                  "rows": [row("tiktoken", 1, 0.1), row("tiktoken", 2, 0.05), row("tiktoken", 2, 0.04), row("tiktoken", 2, 0.9),
                           row("gigatoken", 2, 0.01, 0.02)]},
    "loader": [{"tok_per_s": 60e6, "micro_batch": 4}],
    "order": {"windows": 30_000_000, "open_s": 0.1, "step_s": 0.002, "tok_per_s": 2e8, "mib": 1.0},
    "layout": {"documents": 1_000_000, "pieces": 50, "layout_s": 1.0, "commit_s": 0.5, "mib": 100.0},
    "write": {"tokens": 1, "s_per_billion": 600.0, "mib": 10.0},
}


def test_the_plan_follows_from_the_numbers():
    """2 processes at 20 MB/s (the median), so 16 at 160; 31B tokens x (0.8 4.6 + 0.07 2.2 + 0.03 2.3 + 0.1 4.0) bytes."""
    assert sum(MIXTURE.values()) == pytest.approx(1)
    said = "\n".join(data_plan.plan(RESULTS, 31e9, 16))
    gb = 31 * (0.8 * 4.6 + 0.07 * 2.2 + 0.03 * 2.3 + 0.1 * 4.0)
    download = 31 * (0.8 * 2.9 + 0.1 * 1.49 + 0.1 * 1.19)
    assert f"{gb:.0f} GB of text" in said and f"{download:.0f} GB to download" in said
    assert f"tiktoken: {gb * 1000 / 160 / 60:.0f} min to tokenise at 160 MB/s" in said and "(10.0 a process" in said
    assert f"the network brings {download / gb * 160:.0f} MB/s" in said
    assert "feed 1000 MB/s of text to its children: 1 workers of 16 processes" in said
    # gigatoken: 100 MB/s with 2, so 800; a main process that needs 20 ms a MB feeds 50
    assert "gigatoken" in said and "at 800 MB/s" in said
    assert "feed 50 MB/s of text to its children: 16 workers of 1 processes" in said
    assert f"{31 * 1.5 / 60:.1f} min to find the copies" in said and f"{31 * 600 * 1.005 / 60:.0f} min to make the shards" in said
    disk = 2 * 31e9 * 1.005 + 31e6 * 25 + 0.6e9
    assert f"{disk / 1e9:.1f} GB of disk at most" in said


def test_the_tables_show_medians_and_shares():
    lines = list(data_plan.speeds(RESULTS["preparing"]))
    assert "12.5 MB/s, 5.00M tok/s" in lines[0]
    rows = [line.split() for line in lines if re.match("(tik|giga)token", line)]
    assert [line[:2] for line in rows] == [["tiktoken", "1"], ["tiktoken", "2"], ["gigatoken", "2"]]
    assert rows[1][2:] == ["20.0", "10.0", "20.0", "0.900", "0.800", "0.850", "1.000", "0.950", "1.00", "300", "70"]
    assert all(len(line) <= 130 for line in [*lines, *data_plan.scaled(RESULTS)])
    assert "60.0M tok/s on one core" in next(data_plan.scaled(RESULTS))


def test_too_little_text_gives_no_plan():
    results = RESULTS | {"preparing": RESULTS["preparing"] | {"rows": [row("tiktoken", 2, math.nan)]}}
    assert "too little text" in "\n".join(data_plan.plan(results, 31e9, 16))


# -------------------------------------------------------------------------------------------------------- user's mistakes

@pytest.mark.parametrize("arguments, words", [
    (["mb=1"], "mb must be 3 or more"), (["repeats=0"], "repeats"), (["processes=0"], "processes"), (["processes="], "processes"),
    (["scale=1e6"], "scale"), (["bm=3"], "did you mean 'mb'"), (["folder=/proc/none"], "cannot be made"), (["cores=0"], "cores")])
def test_a_mistake_is_a_sentence(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and said.startswith("bench/data.py: ")


def test_a_folder_that_is_there_is_not_removed(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert data.main([f"folder={tmp_path}"]) == 2
    assert "must not exist" in capsys.readouterr().err and (tmp_path / "mine").read_text() == "precious"
    assert data.main(["--help"]) == 0 and "python bench/data.py" in capsys.readouterr().out
