"""Tokenizers that are folders: ids against rules of our own, roles, damage; shards of 32 bits from the command to the batch."""

import json
from dataclasses import replace

import numpy as np
import pytest
import regex
import tokenizers
from eval_runs import call

import prepare_data
from runtime.cli import UserError
from runtime.config import EvalConfig
from runtime.data import open_data
from runtime.shards import read_index
from runtime.tokenizer import GPT2_PATTERN, byte_letters, load_tokenizer
from tests.conftest import encode_document, tiny_config
from tests.test_tokenizer import HOSTILE, merged
from tests.text_files import BEGINS, DOCUMENTS, jsonl, write_tokenizer

TEXTS = [*HOSTILE, "<|end|>", "a<|begin|>b<|end|><|end|>", "def f():\n\treturn 0.5  \n", *DOCUMENTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_ids_are_the_merges_and_text_returns(folder):
    """Merges by hand; the pieces are GPT-2's, which ByteLevel takes too."""
    tok, letters = load_tokenizer(str(folder)), byte_letters()
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    for text in TEXTS:
        ids, pieces = tok.encode(text), regex.findall(GPT2_PATTERN, text[:2000])
        due = [model["vocab"][part] for piece in pieces for part in merged([letters[b] for b in piece.encode()], ranks)]
        assert ids.dtype == np.uint16 and (ids.tolist() == due or len(text) > 2000)
        assert tok.decode(ids) == text and not {0, 1} & set(ids.tolist()), "text that spells a special token stays text"
        assert encode_document(tok, text).tolist() == [1, 0, *ids.tolist()]
    assert tok.decode(tok.encode("a\ud800b")) == "a\ufffdb" and tok.decode([1, 0]) == "<|end|><|begin|>"
    with pytest.raises(ValueError, match=f"has ids 0 to {tok.vocab_size - 1}, but was given"):
        tok.decode([tok.vocab_size])


def test_what_the_folder_says_of_length_and_frame_is_not_obeyed(folder, tmp_path):
    """Truncation, padding, tokens put around a text: for a model's input, not for documents."""
    made = tokenizers.Tokenizer.from_file(str(write_tokenizer(tmp_path, post_processor=BEGINS) / "tokenizer.json"))
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    other = load_tokenizer(str(tmp_path))
    assert all(np.array_equal(other.encode(text), load_tokenizer(str(folder)).encode(text)) for text in TEXTS)
    assert other.adds_start, "it is noted, though: a model's input begins so"
    assert not any(load_tokenizer(name).adds_start for name in (str(folder), "gpt2", "byte")), "a bos token's name adds none"


@pytest.mark.parametrize("roles, prefix", [
    ({"eos_token": "<|end|>", "bos_token": "<|begin|>"}, (1, 0)), ({"eos_token": "<|end|>"}, (1,)),
    ({"eos_token": {"content": "<|end|>", "lstrip": False}, "bos_token": {"content": "<|begin|>"}}, (1, 0)),
    ({"eos_token": "<|begin|>", "bos_token": "<|begin|>"}, (0,))])
def test_roles_and_identity_which_is_rules_and_roles(folder, tmp_path, roles, prefix):
    usual, tok = (load_tokenizer(str(path)) for path in (folder, write_tokenizer(tmp_path, roles | {"padding_side": 9})))
    assert (tok.prefix, tok.eot, tok.start) == (prefix, prefix[0], prefix[-1])
    assert (tok.sha256 == usual.sha256) == (prefix == (1, 0))
    for other in {"vocab": 300}, {"spare": 1}:
        assert load_tokenizer(str(write_tokenizer(tmp_path, **other))).sha256 != usual.sha256


@pytest.mark.parametrize("file, content, sentence", [
    ("tokenizer.json", None, "has no tokenizer.json"), ("tokenizer.json", "{}", "cannot be read"),
    ("tokenizer_config.json", None, "cannot be read"), ("tokenizer_config.json", "{}", "says eos_token=None"),
    ("tokenizer_config.json", '{"eos_token": "<eos>"}', "eos_token='<eos>' .* a token of tokenizer.json must")])
def test_a_folder_that_is_no_tokenizer_is_a_sentence(tmp_path, file, content, sentence):
    path = write_tokenizer(tmp_path) / file
    path.write_text(content) if content else path.unlink()
    with pytest.raises(UserError, match=sentence):
        load_tokenizer(str(tmp_path))


def config(out, tokenizer, vocab_size):
    tiny = tiny_config(out, out)
    return replace(tiny, eval=EvalConfig(tokens=64), model=replace(tiny.model, vocab_size=vocab_size), data=replace(
        tiny.data, mixture={"mine": 1}, tokenizer=str(tokenizer), tokens_per_step=128, max_epochs=9))


def test_shards_of_32_bits_and_data_of_another_tokenizer(folder, tmp_path, capsys):
    """70,000 ids and more, from the command to the batch."""
    wide, data_dir = write_tokenizer(tmp_path / "wide", spare=70_000), tmp_path / "data"
    (tmp_path / "a.jsonl").write_bytes(jsonl(DOCUMENTS))
    call(prepare_data, "local", tmp_path / "a.jsonl", f"tokenizer={wide}", "name=mine", "val_share=0.3", "processes=2",
         f"out={data_dir}")
    index, tok = read_index(data_dir / "mine"), load_tokenizer(str(wide))
    raw = json.loads((data_dir / "mine/index.json").read_text())
    assert (raw["dtype"], raw["tokenizer"], raw["tokenizer_sha256"]) == ("uint32", "folder", tok.sha256)
    assert str(wide) not in json.dumps(raw) and "is_masked" not in raw, "no machine's path, and no mask where there is none"
    ids = np.concatenate([np.fromfile(split.shards[0].path, "<u4") for split in index.splits.values()])
    found = [piece.tolist() for piece in np.split(ids, (ids == tok.eot).nonzero()[0][1:])]
    assert sorted(found) == sorted(encode_document(tok, document).tolist() for document in DOCUMENTS)
    x, y = open_data(config(data_dir, wide, tok.vocab_size + 8), tok.sha256).batch(0, 0, 0, 1)
    assert (x[:, 1:] == y[:, :-1]).all() and x.max() < tok.vocab_size
    call(prepare_data, "--show", data_dir)
    assert f"folder (sha256 {tok.sha256[:9]}..., {tok.vocab_size:,} ids)" in capsys.readouterr().out

    size, another = tok.vocab_size, load_tokenizer(str(folder)).sha256
    with pytest.raises(UserError, match="made with tokenizer=folder .* another tokenizer .*: set data.tokenizer to"):
        open_data(config(data_dir, folder, size), another)
    with pytest.raises(UserError, match=f"holds ids below {size}, but model.vocab_size=300: set model.vocab_size={size}"):
        open_data(config(data_dir, wide, 300), tok.sha256)
    made, moved = config(data_dir, wide, size), config(data_dir, "/else/where", size)
    assert made.identity() == moved.identity() != config(data_dir, "gpt2", 50257).identity()      # the shards say which it is
