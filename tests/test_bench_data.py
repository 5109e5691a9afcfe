"""bench/data.py: the numbers it prints are of the work it names."""

import re

from bench import data
from bench.data import main, some_text


def test_a_rehearsal_from_end_to_end(tmp_path, capsys):
    assert main(["mb=1.5", "processes=1", "repeats=1", f"folder={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "nothing stays behind"
    raw, prepared, ratio = map(float, re.search(
        r"raw tiktoken ([\d.]+) MB/s, prepare_data.py ([\d.]+) MB/s, median ratio ([\d.]+)", said).groups())
    assert abs(ratio - prepared / raw) < 0.02 + 0.06 / raw and re.search(r"loader: [1-9]\d*M tokens/s on one core", said)


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
