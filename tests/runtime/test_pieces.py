"""runtime/pieces.py: the ids of the package `tokenizers`, whatever the text and the rule of
splitting."""

import json
import random
from pathlib import Path

import pytest
import tokenizers

from runtime import pieces
from runtime.tokenizer import load_tokenizer
from tests.helpers.text_files import DIGITS_APART, DOCUMENTS, write_tokenizer
from tests.runtime.test_tokenizer import TEXTS

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA = (
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORDS}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = r"[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+|[^\s\p{L}]+[\r\n/]*|\s+(?!\S)|\s|\p{L}"


def split_by(pattern, **more: object):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    } | more
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, last]}


def random_texts():
    rng = random.Random(0)
    letters = [
        *"aZſKé019 \n\t\r'!/²ⅷ٣\u0301\u00a0\u2003\u3000\u200b日🙂",
        "'S",
        "'ll",
        "'Re",
        "'ſ",
        " 'd",
        "\r\n",
        "   ",
    ]
    for _ in range(300):
        yield "".join(rng.choices(letters, k=rng.randrange(40)))
    # Letters of all scripts, numbers, marks and places without a character yet.
    for first in range(0, 0x30000, 0x1800):
        codes = [code for code in range(first, first + 0x1800, 61) if not 0xD800 <= code < 0xE000]
        yield "".join(f"{chr(code)} {chr(code)}1" for code in codes)


RULES = {
    "gpt2": {},
    "llama": {"pre_tokenizer": split_by(LLAMA)},
    "qwen": {"pre_tokenizer": split_by(LLAMA.replace("{1,3}", "")), "normalizer": {"type": "NFC"}},
    "cased": {"pre_tokenizer": split_by(CASED)},
    "leaves gaps": {"pre_tokenizer": split_by(r"\p{L}+")},
    "gaps removed": {"pre_tokenizer": split_by(LLAMA, behavior="Removed")},
    "inverted": {"pre_tokenizer": split_by(r"\s+", invert=True)},
    "another dialect": {"pre_tokenizer": split_by(r"^\s*|\h+|\S+|\s+")},
    "two splits": {"pre_tokenizer": DIGITS_APART},
}


@pytest.mark.parametrize("name", RULES)
def test_ids_are_those_of_the_package(tmp_path: Path, name: str):
    folder = write_tokenizer(tmp_path, **RULES[name])
    ours, packages = (
        load_tokenizer(str(folder)),
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    packages.encode_special_tokens = True
    is_fast = isinstance(ours._encode, pieces._PieceEncoder)
    assert is_fast == (name in ("gpt2", "llama", "qwen", "cased"))
    for _ in range(2):  # the second time by the table
        for text in [*TEXTS, *DOCUMENTS, *random_texts()]:
            assert (
                ours.encode(text).tolist() == packages.encode(text, add_special_tokens=False).ids
            ), ascii(text)


def test_spelled_tokens_that_are_not_special_stay_tokens(tmp_path: Path):
    folder = write_tokenizer(tmp_path, pre_tokenizer=split_by(LLAMA))
    rules = json.loads((folder / "tokenizer.json").read_text())
    token = rules["added_tokens"][0] | {"id": 500, "content": "<tool>", "special": False}
    (folder / "tokenizer.json").write_text(
        json.dumps(rules | {"added_tokens": [*rules["added_tokens"], token]})
    )
    ours, packages = (
        load_tokenizer(str(folder)),
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    assert isinstance(ours._encode, pieces._PieceEncoder)
    for text in "a <tool> b", "<tool>", "<tool", "plain":
        assert ours.encode(text).tolist() == packages.encode(text, add_special_tokens=False).ids


def test_a_character_that_both_cut_otherwise_is_left_to_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ours = load_tokenizer(str(write_tokenizer(tmp_path)))
    encoder, whole = ours._encode, []
    monkeypatch.setattr(encoder, "_whole", lambda text: whole.append(text) or [7])
    monkeypatch.setattr(encoder, "_cuts_alike", lambda characters: "é" not in characters)
    assert ours.encode("café").tolist() == [7] and ours.encode("cafè").tolist() != [7]
    assert whole == ["café"]


def test_a_long_piece_and_a_full_table_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pieces, "KEPT_PIECES", 3)
    monkeypatch.setattr(pieces, "BLOCK", 5)
    folder = write_tokenizer(tmp_path, pre_tokenizer=split_by(LLAMA))
    ours, packages = (
        load_tokenizer(str(folder)),
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    packages.encode_special_tokens = True
    for text in ["x" * 5000, "x" * 100, " " * 5000 + "x", *DOCUMENTS]:
        assert ours.encode(text).tolist() == packages.encode(text, add_special_tokens=False).ids
    assert len(ours._encode._ids) <= 3 + 60
