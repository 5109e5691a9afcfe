"""bench/data.py: the numbers it prints are of the work it names."""

import re

from bench import data
from bench.data import main, some_text
from runtime.tokenizer import load_tokenizer


def test_a_rehearsal_from_end_to_end(tmp_path, capsys):
    assert main(["mb=1.5", "processes=2", "repeats=1", f"folder={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "nothing stays behind"
    texts = list(some_text(1.5))
    assert len(set(texts)) == len(texts) and 0 <= sum(len(text.encode()) for text in texts) - 1.5e6 < len(texts[-1].encode())
    raw, prepared, ratio = map(float, re.search(
        r"raw tiktoken ([\d.]+) MB/s in one, prepare_data.py ([\d.]+) MB/s, median ratio ([\d.]+) of 2 x raw", said).groups())
    assert abs(ratio - prepared / raw / 2) < 0.02 + 0.06 / raw and re.search(r"loader: [1-9]\d*M tokens/s on one core", said)


def test_raw_is_tiktokens_own_encoding_of_each_document_once():
    encoded, encode = [], data.tiktokens_own()
    data.raw(lambda text, **how: encoded.append((text, how)), ["a", "b"])
    assert encoded == [("a", {"disallowed_special": ()}), ("b", {"disallowed_special": ()})]
    text = "Raw text, 1,234 numbers\n\n  and  spaces'll do."
    assert encode(text).tolist() == load_tokenizer("gpt2").encode(text).tolist()
