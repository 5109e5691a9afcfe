"""Tests of runtime/tokenizer.py against OpenAI's hashes and a second byte-pair encoder; tokenizers
that are folders."""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tiktoken
import tokenizers
from tiktoken_ext.openai_public import r50k_pat_str
from transformers import AutoTokenizer

from eval.hf import tokenizer as hf_tokenizer
from lib.errors import UserError
from runtime import tokenizer as room
from runtime.tokenizer import (
    BYTE_LETTERS,
    GPT2_PATTERN,
    VOCAB_SIZE,
    keep_tokenizer,
    load_tokenizer,
    token_bytes,
    vocab_bpe,
)
from tests.helpers.text_files import BEGINS, DOCUMENTS, write_tokenizer

# both as OpenAI serves them
VOCAB_BPE = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
ENCODER_JSON = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"

HOSTILE = [
    "",
    " ",
    "\n\n\n",
    "<|endoftext|>",
    "a<|endoftext|>b<|endoftext|>",
    "'s 'll I'LL don't",
    "\x00\x01\x7f",
    "\r\n\t ",
    "naïve café ﬁ Ω",
    "日本語のテキスト",
    "👩\u200d👧 \u200b\ufeff",
    "x" * 3000,
    " " * 3000,
    "0" * 3000,
    "é" * 999 + "!",
]
TEXTS = [*HOSTILE, "<|end|>", "a<|begin|>b<|end|><|end|>", "def f():\n\treturn 0.5  \n", *DOCUMENTS]


def merged(parts, ranks):
    """Byte-pair encoding as the textbook has it: of the neighbours the pair of lowest rank is
    merged first."""
    while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]:
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def letters_of_bytes() -> dict[int, str]:
    """As the paper's code defines them: printable bytes stay, the rest follow U+00FF."""
    letters, n_others = {}, 0
    for byte in range(256):
        if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD):
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + n_others)
            n_others += 1
    return letters


@pytest.fixture(scope="module")
def official_ids() -> dict[str, int]:
    """encoder.json, rebuilt from vocab.bpe's text; its hash certifies the ids."""
    letters = letters_of_bytes().values()
    single = sorted(letters, key=lambda letter: (ord(letter) > 255, ord(letter)))
    merged = [merge.replace(" ", "") for merge in vocab_bpe().decode().splitlines()[1:]]
    tokens = [*single, *merged, "<|endoftext|>"]
    ids = {token: i for i, token in enumerate(tokens)}
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == ENCODER_JSON
    return ids


def test_ranks_of_gpt2_are_the_official_ids(official_ids: dict[str, int]):
    letters = letters_of_bytes()
    spelled = ["".join(letters[byte] for byte in token) for token in token_bytes()]
    assert [official_ids[token] for token in spelled] == list(range(50256))


def test_gpt2_has_the_official_size_and_end_of_text(official_ids: dict[str, int]):
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.eot == official_ids["<|endoftext|>"] == 50256
    assert gpt2.vocab_size == len(official_ids) == VOCAB_SIZE["gpt2"]


def test_a_tokenizers_hash_is_that_of_its_rules():
    assert hashlib.sha256(vocab_bpe()).hexdigest() == VOCAB_BPE
    assert load_tokenizer("gpt2").sha256 == VOCAB_BPE != load_tokenizer("byte").sha256


@pytest.mark.parametrize(
    "text, ids",
    [
        ("Hello world", [15496, 995]),  # published
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_examples_of_gpt2s_ids(text: str, ids: list[int]):
    assert load_tokenizer("gpt2").encode(text).tolist() == ids


FRAMES = {"byte": "<|endoftext|>", "gpt2": "<|endoftext|>", "folder": "<|end|><|begin|>"}


@pytest.fixture(params=FRAMES)
def tok(request: pytest.FixtureRequest, folder):
    """A tokenizer of each kind."""
    return load_tokenizer(str(folder) if request.param == "folder" else request.param)


def noise(n: int = 500) -> list[str]:
    """Texts of characters of every size."""
    rng, planes = random.Random(1), [range(128), range(0xD800), range(0xE000, 0x110000)]
    lengths = [rng.randrange(40) for _ in range(n)]
    return ["".join(chr(rng.choice(rng.choice(planes))) for _ in range(k)) for k in lengths]


def test_text_returns_unchanged(tok: str):
    for text in TEXTS + noise():
        ids = tok.encode(text)
        assert ids.dtype == np.uint16 and ids.ndim == 1
        assert not np.isin(tok.prefix, ids).any(), f"{text!r} is text alone"
        assert tok.decode(ids) == text


def test_ids_of_bytes_are_the_bytes():
    for text in TEXTS:
        assert load_tokenizer("byte").encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a\ud800b\udfff", "a\ufffdb\ufffd"),  # lone surrogates
        ("\ud83d\ude00", "😀"),  # a whole pair is the character it spells
    ],
    ids=ascii,
)
def test_surrogates_become_the_characters_that_they_spell(tok: str, text: str, expected: str):
    assert tok.decode(tok.encode(text)) == expected


def test_half_a_character_is_decoded_to_the_replacement_character(tok: str):
    assert tok.decode(tok.encode("👩")[:-1]) == "\ufffd"


@pytest.mark.parametrize("name", FRAMES)
def test_the_prefix_of_a_text_is_decoded_to_its_special_tokens(folder, name: str):
    tok = load_tokenizer(str(folder) if name == "folder" else name)
    assert tok.decode([]) == "" and tok.decode(tok.prefix) == FRAMES[name]


def test_ids_that_are_none_are_refused(tok: str):
    for ids in [tok.vocab_size], [-1], [3, 60000]:
        with pytest.raises(ValueError, match=f"ids 0 to {tok.vocab_size - 1}"):
            tok.decode(ids)


@pytest.fixture(scope="module")
def tiktokens() -> tiktoken.Encoding:
    """By its own pattern, where ours has another one."""
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        special_tokens={"<|endoftext|>": 50256},
        mergeable_ranks={token: rank for rank, token in enumerate(token_bytes())},
    )


def random_texts(n: int = 8_000) -> list[str]:
    """Of what the pattern tells apart."""
    rng, letters = random.Random(3), [*"aZ09 \n\t\r\x1c\x85\xa0\u2003\u3000'!é日🙂\u0301²"]
    letters += ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "<|endoftext|>"]
    return ["".join(rng.choices(letters, k=rng.randrange(60))) for _ in range(n)]


def texts_of_every_character() -> list[str]:
    """In 1,000 a text."""
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    characters = [[chr(code) for code in codes[i::1112]] for i in range(1112)]
    return ["".join(f"a{c} {c}{c}1" for c in piece) for piece in characters]


LONG_RUNS = ["x" + " " * 2_000_000, "\n" * 2_000_000, "a" * 100_000]


@pytest.mark.parametrize(
    "texts",
    [random_texts, texts_of_every_character, lambda: LONG_RUNS],
    ids=["random", "every character", "long runs"],
)
def test_ids_are_those_of_tiktokens_own_pattern(
    tiktokens: tiktoken.Encoding, texts: Callable[..., Any]
):
    gpt2 = load_tokenizer("gpt2")
    for text in texts():
        expected = tiktokens.encode_to_numpy(text, disallowed_special=())
        assert np.array_equal(gpt2.encode(text), expected), text[:200]


def test_a_run_of_a_million_blanks_before_a_word_is_cut_before_its_last(
    monkeypatch: pytest.MonkeyPatch,
):
    """tiktoken 0.14 fails at it. All but the last are one piece, the last is the word's where it is
    a space."""
    gpt2 = load_tokenizer("gpt2")
    run = " " * 1_000_100
    ids = [*gpt2.encode("a" + run[:-1]), *gpt2.encode(" word")]
    assert (
        gpt2.encode(f"a{run}word{run}word{run}").tolist()
        == ids + ids[1:] + gpt2.encode(run).tolist()
    )


# Python's, and two that are none
BLANKS = [chr(code) for code in range(0x3001) if chr(code).isspace() or code in (0x180E, 0x200B)]


def texts_of_blanks(n: int = 1000) -> list[str]:
    """Runs of blanks and of what stands between them."""
    rng, texts = random.Random(3), []
    for _ in range(n):
        text = ""
        for _ in range(rng.randrange(12)):
            piece = rng.choice(["x", "'s", "1", "!", "é", "\x1c", *rng.sample(BLANKS, 3)])
            text += piece * rng.choice([1, 2, 3, 9])
        texts.append(text)
    return texts


def test_where_runs_of_blanks_are_cut_no_id_changes(
    tiktokens: tiktoken.Encoding, monkeypatch: pytest.MonkeyPatch
):
    """Every run is cut here."""
    monkeypatch.setattr(room, "LONG_RUN_LENGTH", 0)
    monkeypatch.setattr(room, "LONG_RUN", re.compile(room.LONG_RUN.pattern.replace("500000", "1")))
    gpt2 = load_tokenizer("gpt2")
    for text in texts_of_blanks():
        expected = tiktokens.encode_to_numpy(text, disallowed_special=())
        assert np.array_equal(gpt2.encode(text), expected), ascii(text)


# --------------------------------------------------------------------- tokenizers that are folders


def test_ids_are_the_merges_whatever_the_folder_says_of_length_and_frame(folder, tmp_path: Path):
    """Merges by hand; the pieces are GPT-2's, which ByteLevel takes too. Truncation, padding and
    tokens put around a text are for a model's input, not for documents."""
    tok = load_tokenizer(str(folder))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    made = tokenizers.Tokenizer.from_file(
        str(write_tokenizer(tmp_path, post_processor=BEGINS) / "tokenizer.json")
    )
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    other_tokenizer = load_tokenizer(str(tmp_path))
    for text in TEXTS:
        ids, pieces = tok.encode(text), regex.findall(GPT2_PATTERN, text[:2000])
        expected = [
            model["vocab"][part]
            for piece in pieces
            for part in merged([BYTE_LETTERS[b] for b in piece.encode()], ranks)
        ]
        assert (ids.tolist() == expected or len(text) > 2000) and np.array_equal(
            other_tokenizer.encode(text), ids
        )
    assert other_tokenizer.adds_start, "it is noted, though: a model's input begins so"
    assert not any(load_tokenizer(name).adds_start for name in (str(folder), "gpt2", "byte")), (
        "a bos token's name adds none"
    )


@pytest.mark.parametrize(
    "roles, prefix",
    [
        ({"eos_token": "<|end|>", "bos_token": "<|begin|>"}, (1, 0)),
        ({"eos_token": "<|end|>"}, (1,)),
        (
            {
                "eos_token": {"content": "<|end|>", "lstrip": False},
                "bos_token": {"content": "<|begin|>"},
            },
            (1, 0),
        ),
        ({"eos_token": "<|begin|>", "bos_token": "<|begin|>"}, (0,)),
    ],
)
def test_roles_and_identity_which_is_rules_and_roles(
    folder, tmp_path: Path, roles: dict[str, Any], prefix: tuple[int, ...]
):
    usual, tok = (
        load_tokenizer(str(path))
        for path in (folder, write_tokenizer(tmp_path, roles | {"padding_side": 9}))
    )
    assert (tok.prefix, tok.eot, tok.start) == (prefix, prefix[0], prefix[-1])
    assert (tok.sha256 == usual.sha256) == (prefix == (1, 0))
    for other_tokenizer in {"vocab": 300}, {"spare": 1}:
        assert (
            load_tokenizer(str(write_tokenizer(tmp_path, **other_tokenizer))).sha256 != usual.sha256
        )


@pytest.mark.parametrize(
    "file, content, sentence",
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer_config.json", None, "cannot be read"),
        ("tokenizer_config.json", "{}", "says eos_token=None"),
        (
            "tokenizer_config.json",
            '{"eos_token": "<eos>"}',
            "eos_token='<eos>' .* a token of tokenizer.json must",
        ),
    ],
)
def test_a_folder_that_is_no_tokenizer_is_a_sentence(
    tmp_path: Path, file: str, content: str | None, sentence: str
):
    path = write_tokenizer(tmp_path) / file
    path.write_text(content) if content else path.unlink()
    with pytest.raises(UserError, match=sentence):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_drops_merges_by_chance_is_refused(tmp_path: Path):
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["model"]["dropout"] = 0.1
    path.write_text(json.dumps(rules))
    with pytest.raises(UserError, match=r"dropout=0.1 .* set it to null"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"bos_token": None}, {"added_tokens_decoder": {}}, None])
def test_roles_of_special_tokens_map_are_those_of_transformers(folder, tmp_path: Path, settings):
    write_tokenizer(tmp_path, settings or {})
    roles = {"eos_token": "<|end|>", "bos_token": {"content": "<|begin|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(roles))
    if settings is None:
        (tmp_path / "tokenizer_config.json").unlink()
    tok = load_tokenizer(str(tmp_path))
    assert tok.prefix == (1, 0) and tok.sha256 == load_tokenizer(str(folder)).sha256
    out = tmp_path / "export"
    out.mkdir()
    hf_tokenizer.write_tokenizer(tok, 8, tok.vocab_size, out)
    transformers_own = AutoTokenizer.from_pretrained(out)
    assert (transformers_own.eos_token_id, transformers_own.bos_token_id) == (1, 0)


def test_roles_of_tokenizer_config_go_before_those_of_special_tokens_map(folder, tmp_path: Path):
    write_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|begin|>"}))
    assert load_tokenizer(str(tmp_path)).prefix == (1, 0)


# ---------------------------------------------------------------------------------------- ends

ENDS = [
    ({}, (1,)),
    ({"generation_config.json": {"eos_token_id": [1, 5]}}, (1, 5)),
    ({"generation_config.json": {"eos_token_id": 5}}, (1, 5)),
    ({"config.json": {"eos_token_id": [5, 1, 7]}}, (1, 5, 7)),
    (
        {"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 5}},
        (1, 7, 5),
    ),
    ({"generation_config.json": {"eos_token_id": None}, "config.json": {"model_type": "x"}}, (1,)),
    ({"config.json": {"eos_token_id": [70_000, 5]}}, (1, 5)),  # no token of it has that id
]


def write_files(folder: Path, files):
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("files, ends", ENDS)
def test_the_ends_are_those_of_the_tokenizer_generation_config_and_config(
    tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]
):
    write_files(write_tokenizer(tmp_path / "hub"), files)
    hub = load_tokenizer(str(tmp_path / "hub"))
    assert hub.ends == ends and hub.eot == 1
    assert hub.sha256 == load_tokenizer(str(write_tokenizer(tmp_path / "plain"))).sha256
    keep_tokenizer(tmp_path, str(tmp_path / "hub"))
    assert load_tokenizer(str(tmp_path / "tokenizer")).ends == ends, "the run's copy has them all"
    assert not (tmp_path / "tokenizer/config.json").exists()
    assert load_tokenizer("gpt2").ends == (50256,) and load_tokenizer("byte").ends == (256,)


def test_a_copy_of_a_folder_that_names_its_ends_keeps_its_bytes(tmp_path: Path):
    folder = write_tokenizer(tmp_path / "hub")
    (folder / "generation_config.json").write_text('{"eos_token_id":[5,\t1], "top_p": 0.9}')
    write_files(folder, {"config.json": {"eos_token_id": 5}})
    keep_tokenizer(tmp_path, str(folder))
    copies = list((tmp_path / "tokenizer").iterdir())
    assert len(copies) == 3
    for copy in copies:
        assert copy.read_bytes() == (folder / copy.name).read_bytes()


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "<|end|>"}', '{"eos_token_id": [1, true]}']
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ends_that_cannot_be_read_are_a_sentence(tmp_path: Path, name: str, content: str):
    (write_tokenizer(tmp_path) / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} (cannot be read|holds list|has eos_token_id=)"):
        load_tokenizer(str(tmp_path))


# ------------------------------------------------------------------------------------ identity


def respell(folder: Path, target, change):
    shutil.copytree(folder, target)
    path = target / "tokenizer.json"
    rules = json.loads(path.read_text())
    change(rules)
    path.write_text(json.dumps(rules, indent=1))
    return load_tokenizer(str(target))


def merges_as_words(rules):
    rules["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in rules["model"]["merges"]
    ]


def merges_as_pairs(rules):
    rules["model"]["merges"] = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in rules["model"]["merges"]
    ]


def without_defaults(rules):
    for key in (
        "dropout",
        "unk_token",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
        "continuing_subword_prefix",
    ):
        rules["model"].pop(key, None)


def with_padding(rules):
    rules["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }


@pytest.mark.parametrize(
    "change", [merges_as_words, merges_as_pairs, without_defaults, with_padding]
)
def test_a_tokenizer_that_is_only_written_another_way_is_the_same(
    folder, tmp_path: Path, change: Callable[..., Any]
):
    assert respell(folder, tmp_path / "a", change).sha256 == load_tokenizer(str(folder)).sha256


def test_what_save_pretrained_writes_is_the_same_tokenizer(folder, tmp_path: Path):
    shutil.copytree(folder, source := tmp_path / "source")
    merges_as_words(rules := json.loads((source / "tokenizer.json").read_text()))
    (source / "tokenizer.json").write_text(json.dumps(rules))
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_bytes() != (
        source / "tokenizer.json"
    ).read_bytes()
    assert load_tokenizer(str(tmp_path / "saved")).sha256 == load_tokenizer(str(source)).sha256


@pytest.mark.parametrize(
    "change",
    [
        lambda rules: rules["model"]["merges"].reverse(),
        lambda rules: rules["added_tokens"][0].update(special=False),
        lambda rules: rules.update(normalizer={"type": "NFC"}),
        lambda rules: rules["pre_tokenizer"].update(use_regex=False),
        lambda rules: rules.update(post_processor=BEGINS),
    ],
)
def test_a_tokenizer_with_other_rules_is_another(
    folder, tmp_path: Path, change: Callable[..., Any]
):
    assert respell(folder, tmp_path / "a", change).sha256 != load_tokenizer(str(folder)).sha256


def test_a_tokenizer_goes_by_the_hash_of_its_bytes_that_older_shards_carry(folder):
    rules = (folder / "tokenizer.json").read_bytes()
    former = hashlib.sha256(rules + b"\0" + json.dumps([1, 0]).encode()).hexdigest()
    tok = load_tokenizer(str(folder))
    assert tok.goes_by(former) and tok.goes_by(tok.sha256) and tok.sha256 != former
    assert not tok.goes_by(None) and not tok.goes_by("0" * 64)


def test_the_identity_does_not_change_from_version_to_version(tmp_path: Path):
    """A hash that another version of the package gives would disown all shards made before."""
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "<e>": 3}, [("a", "b")])
    ).save(str(tmp_path / "tokenizer.json"))
    assert (
        load_tokenizer(str(tmp_path)).sha256
        == "8ed3cb13b75fdce4b32d8f74765afe3174c8121f05073ad6fddc0147ea5e6015"
    )
