"""Tests of prepare/decontaminate.py against plain sets of words."""

import hashlib
import json
import random
import unicodedata

import pytest

from prepare.decontaminate import found_in, read_grams
from runtime.cli import UserError
from tests.text_files import write, write_rows

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def reference(text: str) -> set[tuple[str, ...]]:
    """The 13-grams of a text, from the definition alone."""
    bare = ["".join(c for c in word if unicodedata.category(c)[0] not in "PS") for word in text.lower().split()]
    words = [word for word in bare if word]
    return {tuple(words[i:i + 13]) for i in range(len(words) - 12)}


def compare(evaluation: list[str], documents: list[str], folder) -> int:
    """How many of the documents are found, by us and by sets of words alike."""
    (_, grams), wanted = read_grams([write(folder / "eval.jsonl", evaluation)]), set().union(*map(reference, evaluation))
    found = [found_in(grams, document) for document in documents]
    assert len(grams) == len(wanted) and found == [not wanted.isdisjoint(reference(document)) for document in documents]
    return sum(found)


def test_what_is_found_is_what_sets_of_words_find(tmp_path):
    """Few words, so that long matches, near misses and other cuts of the same letters all come by chance."""
    rng = random.Random(0)
    texts = [" ".join(rng.choice(["a", "a", "a", "a", "ab", "aa b"]) for _ in range(rng.randrange(40))) for _ in range(3000)]
    assert 50 < compare(texts[:60], texts[60:], tmp_path) < 2500


def test_case_punctuation_and_white_space_of_any_script(tmp_path):
    rng = random.Random(1)
    pieces = ["don't", "DON’T", "dont", "Straße", "STRASSE", "İstanbul", "ΣΊΣΥΦΟΣ", "σίσυφος", "日本", "𠀋", "𐐀", "𐐨", "x",
              "👍", "…", "$", "“quoted”", "\u0301", "\u200b", "1.5", "15", "ﬁ", "\x00"]
    gaps = [" ", "\n", "\u00a0", "\u2003", "\x1f", "\t \r\n", " — ", "-", "\u3000", "\x85"]
    texts = ["".join(rng.choice(pieces) + rng.choice(gaps) for _ in range(rng.randrange(45))) for _ in range(400)]
    copies = [rng.choice(["", "so "]) + "!" + text.title().replace(" ", " \n") for text in texts]
    assert 40 < compare(texts[:100], texts[100:] + copies, tmp_path) < 450


TEXTS = [LONG, LONG.replace("one", "uno"), LONG.replace("two", "due")]
ROWS = [{"q": TEXTS[0], "choices": {"text": [TEXTS[1], "short"], "n": 3}}, {"q": TEXTS[2], "choices": None}]
LINES = "\n\n".join(map(json.dumps, ROWS))


@pytest.mark.parametrize("name, content", [
    ("rows.jsonl", LINES), ("lines.json", LINES), ("bom.jsonl", f"\ufeff{LINES}\n"), ("list.json", json.dumps(ROWS)),
    ("nested.json", json.dumps({"data": {"rows": ROWS}})), ("all.txt", "\r\n".join(TEXTS)), ("rows.parquet", None)])
def test_every_string_of_a_file_is_looked_for(tmp_path, name, content, capsys):
    path = tmp_path / name
    path.write_text(content) if content else write_rows(path, ROWS)
    (tmp_path / "more.txt").write_text(LONG + " fourteen")
    files, grams = read_grams([str(path), str(tmp_path / "more.txt")])
    assert all(found_in(grams, text) for text in [*TEXTS, "so " + LONG[4:] + " fourteen"])
    assert not found_in(grams, LONG.replace("three", "tre"))
    assert files[0] == {"file": name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    out = capsys.readouterr().out
    if name != "all.txt":
        assert out.startswith(f"{path}: 4 texts, 3 stretches of 13 words to look for; 1 texts are shorter")
        assert len(grams) == 4


@pytest.mark.parametrize("name, content, sentence", [
    ("none.txt", None, "No such file"), ("a.csv", b"", "as .txt, .json, .jsonl"), ("a.txt", b"", "no text of 13 words"),
    ("a.txt", LONG[:-9].encode(), "no text of 13 words"), ("a.json", b'{"a": ', "cannot be read .*Expecting value"),
    ("a.jsonl", b'{"a": 1} {"b": 2}', "cannot be read .*Extra data"), ("a.json", b"[" * 200_000, "cannot be read"),
    ("a.parquet", b"PAR1 no", "cannot be read")])
def test_a_file_that_cannot_serve_is_a_sentence(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        read_grams([str(tmp_path / name)])
    assert name in str(caught.value) and "\n" not in str(caught.value)
