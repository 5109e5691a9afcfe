"""Prompts and responses at training and evaluation: which tokens count; tests/test_prepare.py: what lies in the shards."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from eval import held_out
from model import GPTConfig
from runtime.config import Config, DataConfig, EvalConfig, OptimConfig
from runtime.data import open_data
from runtime.run import save_sequence_losses
from runtime.shards import read_index
from runtime.tokenizer import load_tokenizer
from tests.test_prepare import LOSS_MASK_BIT, PAIRS, local, write_pairs
from tests.text_files import write_tokenizer


@pytest.mark.parametrize("kind", ["byte", "gpt2", "folder"])
def test_validation_counts_targets_and_bytes_of_responses_and_held_out_tasks_read_both(tmp_path, kind):
    name = str(write_tokenizer(tmp_path / "tokenizer")) if kind == "folder" else kind
    file, tok = write_pairs(tmp_path / "chat.jsonl", PAIRS), load_tokenizer(name)
    assert local(file, out=tmp_path / "data", name="chat", tokenizer=name, instruct="true", val_share=0.3) == 0
    config = Config(run="t", out=str(tmp_path / "out"), steps=6, optim=OptimConfig(lr=1e-3), eval=EvalConfig(tokens=160),
                    model=GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=16, vocab_size=tok.vocab_size),
                    data=DataConfig(dir=str(tmp_path / "data"), mixture={"chat": 1}, tokenizer=name, tokens_per_step=128,
                                    micro_batch=2, max_epochs=99))
    split, val = read_index(tmp_path / "data/chat").splits["val"], open_data(config, tok.sha256).val("chat")
    _, y = val.batch(0, len(val))
    assert val.targets.tolist() == (y != -100).sum(1).tolist() and val.tokens == val.targets.sum() < len(val) * 16
    raw = np.fromfile(split.shards[0].path, "<u4")
    assert val.text_bytes == round(val.tokens * split.text_bytes / int((raw < LOSS_MASK_BIT).sum()))
    losses = SimpleNamespace(sequences={"chat": np.arange(len(val), dtype=float)}, targets={"chat": val.targets})
    save_sequence_losses(tmp_path / "val_losses.npz", losses, losses)
    assert np.load(tmp_path / "val_losses.npz")["n_tokens"].tolist() == val.targets.tolist()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.json").write_text(json.dumps(config.to_dict()))
    ((_, texts),) = held_out._sources(str(config.run_dir))
    found = [texts[i] for i in range(len(texts))]
    assert len(found) == split.documents and set(found) <= {p + r for p, r in PAIRS if r.strip()}
