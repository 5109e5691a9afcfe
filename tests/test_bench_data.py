"""bench/data.py: the numbers it prints are of the work it names."""

import re

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
