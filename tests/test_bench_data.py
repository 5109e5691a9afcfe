"""bench/data.py: the numbers it prints are of the work it names."""

import json
import re

import pytest

from bench import data
from bench.data import main, some_text


def test_a_rehearsal_from_end_to_end(tmp_path, capsys):
    out, folder = tmp_path / "speed.json", tmp_path / "bench"
    assert main(["mb=1.5", "processes=1", "repeats=1", f"folder={folder}", f"out={out}"]) == 0
    said, results = capsys.readouterr().out, json.loads(out.read_text())
    assert not folder.exists(), "nothing stays behind"
    assert 1.5 <= results["mb"] < 1.7 and f"{results['documents']:,} documents" in said
    (row,), rates = results["preparing"], results["loader_tok_per_s"]
    assert row["processes"] == 1 and row["ratio"] == pytest.approx(row["prepare_mb_per_s"][0] / row["raw_mb_per_s"][0])
    assert float(re.search(r"median ratio ([\d.]+)", said)[1]) == pytest.approx(row["ratio"], abs=0.006)
    assert len(rates) == 1 and f"loader: {rates[0] / 1e6:.0f}M tokens/s" in said


def test_the_text_has_no_copies_and_the_size_asked_for():
    texts = list(some_text(1))
    size = sum(len(text.encode()) for text in texts)
    assert len(set(texts)) == len(texts) and 1e6 <= size < 1e6 + len(texts[-1].encode())


def test_raw_encodes_each_document_once(monkeypatch):
    encoded = []
    data._hold([f"text {i}" for i in range(7)], 2)
    monkeypatch.setattr(data, "encode", lambda text, **_: encoded.append(text))
    for share in range(2):
        data._encode(share)
    assert sorted(encoded) == [f"text {i}" for i in range(7)]


@pytest.mark.parametrize("words", [["mb=0"], ["processes=0"], ["repeats=0"], ["folder=."], ["speed=1"]])
def test_mistakes_are_a_sentence(words, capsys):
    assert main(words) == 2 and len(capsys.readouterr().err.splitlines()) == 1
