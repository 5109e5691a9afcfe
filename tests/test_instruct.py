"""Prompts and responses: what lies in the shards, which tokens count at training and evaluation."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from eval import held_out
from model import GPTConfig
from prepare_data import main
from runtime.config import Config, DataConfig, EvalConfig, OptimConfig
from runtime.data import open_data
from runtime.run import save_sequence_losses
from runtime.shards import read_index
from runtime.tokenizer import load_tokenizer
from tests.test_prepare import local, split_of
from tests.text_files import some_documents, write_tokenizer

LOSS_MASK_BIT = 2**31
PAIRS = list(zip(some_documents(60, 3), some_documents(60, 4), strict=True))
# The same two texts parted elsewhere are another pair; an empty prompt is one too; rows without a response are none.
PAIRS += [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("abc", " \n"), ("", ""), PAIRS[0], (PAIRS[1][0], "other")]


@pytest.mark.parametrize("kind", ["byte", "gpt2", "folder"])
def test_prompts_are_context_and_responses_targets(tmp_path, kind, capsys):
    name, file = str(write_tokenizer(tmp_path / "tokenizer")) if kind == "folder" else kind, tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"id": i, "prompt": p, "response": r}) + "\n" for i, (p, r) in enumerate(PAIRS)))
    assert local(file, out=tmp_path / "data", name="chat", tokenizer=name, instruct="true", val_share=0.3) == 0
    tok, index = load_tokenizer(name), read_index(tmp_path / "data/chat")
    assert index.is_masked and index.dtype == "<u4" and index.duplicates == {"chat": 1} and index.empty == 3
    expected = {split: SimpleNamespace(ids=[], targets=[], bytes=0, documents=0) for split in ("train", "val")}
    for prompt, response in dict.fromkeys(pair for pair in PAIRS if pair[1].strip()):
        first, *rest = tok.prefix
        head, tail = [*rest, *tok.encode(prompt).tolist()], tok.encode(response).tolist()
        of = expected[split_of(f"{prompt}\0{response}".encode(), 3000)]
        of.ids += [first, *head, *tail]
        of.targets += [True, *[False] * len(head), *[True] * len(tail)]
        of.bytes, of.documents = of.bytes + len(response.encode()), of.documents + 1
    for split, of in expected.items():
        raw = np.fromfile(tmp_path / f"data/chat/{split}_00000.bin", "<u4")
        assert (raw & ~np.uint32(LOSS_MASK_BIT)).tolist() == of.ids and (raw < LOSS_MASK_BIT).tolist() == of.targets
        assert (index.splits[split].text_bytes, index.splits[split].documents) == (of.bytes, of.documents)
    assert main(["--show", str(tmp_path / "data")]) == 0
    assert "the responses and the ends of documents" in capsys.readouterr().out

    config = Config(run="t", out=str(tmp_path / "out"), steps=6, optim=OptimConfig(lr=1e-3), eval=EvalConfig(tokens=160),
                    model=GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=16, vocab_size=tok.vocab_size),
                    data=DataConfig(dir=str(tmp_path / "data"), mixture={"chat": 1}, tokenizer=name, tokens_per_step=128,
                                    micro_batch=2, max_epochs=99))
    val = open_data(config, tok.sha256).val("chat")
    _, y = val.batch(0, len(val))
    assert val.targets.tolist() == (y != -100).sum(1).tolist() and val.tokens == val.targets.sum() < len(val) * 16
    assert val.text_bytes == round(val.tokens * expected["val"].bytes / sum(expected["val"].targets))
    losses = SimpleNamespace(sequences={"chat": np.arange(len(val), dtype=float)}, targets={"chat": val.targets})
    save_sequence_losses(tmp_path / "val_losses.npz", losses, losses)
    assert np.load(tmp_path / "val_losses.npz")["n_tokens"].tolist() == val.targets.tolist()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.json").write_text(json.dumps(config.to_dict()))
    ((_, *texts),) = held_out._sources(str(config.run_dir))
    found = held_out._pick(*texts, 999, "seed", lambda text: text)
    assert len(found) == expected["val"].documents and set(found) <= {p + r for p, r in PAIRS if r.strip()}
