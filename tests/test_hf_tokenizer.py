"""Tokenizers that are folders: ids against rules of our own, roles, damage; shards of 32 bits from the command to the batch."""

import json
from dataclasses import replace

import numpy as np
import pytest

import prepare_data
from runtime.cli import UserError
from runtime.config import EvalConfig
from runtime.data import open_data
from runtime.shards import read_index
from runtime.tokenizer import load_tokenizer
from tests.conftest import encode_document, tiny_config
from tests.text_files import BEGINS, DOCUMENTS, jsonl, write_tokenizer

HOSTILE = ["", " ", "\n\n\n", "<|end|>", "a<|begin|>b<|end|><|end|>", "x" * 3000, " " * 3000, "naïve 日本 🙂", "\x00\x1f\ufeff",
           "def f():\n\treturn 0.5  \n", "\u2028\u200b", *DOCUMENTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """70,000 ids and more: 16 bits do not hold them."""
    return write_tokenizer(tmp_path_factory.mktemp("wide"), spare=70_000)


def merged(folder, text):
    """The ids of a text by the folder's merges, applied by hand; the pieces are GPT-2's, which ByteLevel takes too."""
    import regex

    from runtime.tokenizer import GPT2_PATTERN, byte_letters

    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    letters, ids = byte_letters(), []
    for piece in regex.findall(GPT2_PATTERN, text):
        parts = [letters[b] for b in piece.encode()]
        while len(parts) > 1:
            rank, i = min((ranks.get(pair, 10**9), i) for i, pair in enumerate(zip(parts, parts[1:], strict=False)))
            if rank == 10**9:
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        ids += [model["vocab"][part] for part in parts]
    return ids


def test_ids_are_the_merges_and_text_returns(folder):
    tok = load_tokenizer(str(folder))
    for text in HOSTILE:
        ids = tok.encode(text)
        assert ids.dtype == np.uint16 and ids.ndim == 1
        assert ids.tolist() == (merged(folder, text) if len(text) < 2000 else ids.tolist())
        assert tok.decode(ids) == text and not {0, 1} & set(ids.tolist()), "text that spells a special token stays text"
        assert encode_document(tok, text).tolist() == [1, 0, *ids.tolist()]
    assert tok.decode(tok.encode("a\ud800b")) == "a\ufffdb" and tok.decode([1, 0]) == "<|end|><|begin|>"
    with pytest.raises(ValueError, match=f"has ids 0 to {tok.vocab_size - 1}, but was given"):
        tok.decode([tok.vocab_size])


def test_what_the_folder_says_of_length_and_frame_is_not_obeyed(folder, tmp_path):
    """Truncation, padding, tokens put around a text: for a model's input, not for documents."""
    other = write_tokenizer(
        tmp_path / "t", truncation={"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                 "pad_token": "<|begin|>"}, post_processor=BEGINS)
    for text in HOSTILE:
        assert np.array_equal(load_tokenizer(str(other)).encode(text), load_tokenizer(str(folder)).encode(text))
    assert load_tokenizer(str(other)).adds_start, "it is noted, though: a model's input begins so"
    assert not any(load_tokenizer(name).adds_start for name in (str(folder), "gpt2", "byte")), "a bos token's name adds none"


@pytest.mark.parametrize("roles, prefix", [
    ({"eos_token": "<|end|>", "bos_token": "<|begin|>"}, (1, 0)), ({"eos_token": "<|end|>"}, (1,)),
    ({"eos_token": "<|end|>", "bos_token": None, "tokenizer_class": "X", "auto_map": {"AutoTokenizer": "evil.py"}}, (1,)),
    ({"eos_token": {"content": "<|end|>", "lstrip": False}, "bos_token": {"content": "<|begin|>"}}, (1, 0)),
    ({"eos_token": "<|begin|>", "bos_token": "<|begin|>"}, (0,))])
def test_roles(tmp_path, roles, prefix):
    tok = load_tokenizer(str(write_tokenizer(tmp_path, roles)))
    assert tok.prefix == prefix and tok.eot == prefix[0] and tok.start == prefix[-1]
    assert encode_document(tok, "a").tolist() == [*prefix, *tok.encode("a").tolist()]


def test_identity_is_rules_and_roles(folder, tmp_path):
    same = write_tokenizer(tmp_path / "same", {"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "padding_side": 9})
    others = [write_tokenizer(tmp_path / "roles", {"eos_token": "<|end|>"}), write_tokenizer(tmp_path / "merges", vocab=300),
              write_tokenizer(tmp_path / "spare", spare=1)]
    assert load_tokenizer(str(folder)).sha256 == load_tokenizer(str(same)).sha256
    assert len({load_tokenizer(str(path)).sha256 for path in (folder, *others)}) == 4
    assert [load_tokenizer(name).kind for name in ("gpt2", "byte", str(folder))] == ["gpt2", "byte", "folder"]


def _swap(name, content):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize("damage, sentence", [
    (lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"), "has no tokenizer.json"),
    (lambda folder: (folder / "tokenizer_config.json").unlink(), "tokenizer.json and tokenizer_config.json cannot be read"),
    (_swap("tokenizer.json", "{}"), "cannot be read"), (_swap("tokenizer_config.json", "{}"), "says eos_token=None"),
    (_swap("tokenizer_config.json", '{"eos_token": "<eos>"}'), "eos_token='<eos>' .* a token of tokenizer.json must")])
def test_a_folder_that_is_no_tokenizer_is_a_sentence(tmp_path, damage, sentence):
    damage(write_tokenizer(tmp_path))
    with pytest.raises(UserError, match=sentence):
        load_tokenizer(str(tmp_path))


def config(out, tokenizer, vocab_size):
    tiny = tiny_config(out, out)
    return replace(tiny, steps=4, eval=EvalConfig(tokens=64), model=replace(tiny.model, n_ctx=16, vocab_size=vocab_size),
                   data=replace(tiny.data, mixture={"mine": 1}, tokenizer=str(tokenizer), tokens_per_step=64, micro_batch=2,
                                max_epochs=9))


@pytest.fixture(scope="module")
def prepared(wide, tmp_path_factory):
    """A source of 32-bit ids, the ids moved up so that most need them, two processes."""
    base = tmp_path_factory.mktemp("prepared")
    (base / "a.jsonl").write_bytes(jsonl(DOCUMENTS))
    assert prepare_data.main(["local", str(base / "a.jsonl"), f"tokenizer={wide}", "name=mine", "val_share=0.3", "processes=2",
                              f"out={base / 'data'}"]) == 0
    return base / "data"


def test_shards_of_a_folders_tokenizer(prepared, wide, capsys):
    index, tok = read_index(prepared / "mine"), load_tokenizer(str(wide))
    raw = json.loads((prepared / "mine/index.json").read_text())
    assert (raw["dtype"], raw["tokenizer"], raw["tokenizer_sha256"]) == ("uint32", "folder", tok.sha256)
    assert str(wide) not in json.dumps(raw) and "is_masked" not in raw, "no machine's path, and no mask where there is none"
    ids = [np.fromfile(split.shards[0].path, "<u4").tolist() for split in index.splits.values()]
    expected = [encode_document(tok, document).tolist() for document in DOCUMENTS]
    assert sum(map(len, ids)) == sum(map(len, expected)) and index.splits["train"].tokens == len(ids[0])
    starts = [[i for i, value in enumerate(split) if value == tok.eot] + [len(split)] for split in ids]
    found = [split[a:b] for split, at in zip(ids, starts, strict=True) for a, b in zip(at, at[1:], strict=False)]
    assert sorted(found) == sorted(expected)
    data = open_data(config(prepared, wide, tok.vocab_size + 8), tok.sha256)
    x, y = data.batch(0, 0, 0, 1)
    assert (x[:, 1:] == y[:, :-1]).all() and x.max() < tok.vocab_size and data.targets(0) == 64
    assert prepare_data.main(["--show", str(prepared)]) == 0
    assert f"folder (sha256 {tok.sha256[:9]}..., {tok.vocab_size:,} ids)" in capsys.readouterr().out


def test_data_of_another_tokenizer_is_refused(prepared, wide, folder):
    sha, size = load_tokenizer(str(wide)).sha256, load_tokenizer(str(wide)).vocab_size
    with pytest.raises(UserError, match="made with tokenizer=folder .* another tokenizer .*: set data.tokenizer to"):
        open_data(config(prepared, folder, size), load_tokenizer(str(folder)).sha256)
    with pytest.raises(UserError, match=f"holds ids below {size}, but model.vocab_size=300: set model.vocab_size={size}"):
        open_data(config(prepared, wide, 300), sha)
    made, moved = config(prepared, wide, size), config(prepared, "/else/where", size)
    assert made.identity() == moved.identity() != config(prepared, "gpt2", 50257).identity()      # the shards say which it is
