"""A run's folder made on the spot, with a checkpoint of a rough model, and texts of many kinds for its tokenizer."""

import json
import random
import warnings

import torch.distributed.checkpoint as dcp
from model_reference import build_rough

from model import GPTConfig
from runtime.checkpoint import FORMAT_VERSION, describe, name_of, seal, sha256_of
from runtime.config import Config, DataConfig, FP8Config, OptimConfig
from tests.conftest import ROOT

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_ffn": 96, "n_ctx": 24}
VOCABULARY = {"gpt2": 50257, "byte": 257}


def write_run(folder, tokenizer="byte", fp8=None, step=6, mixture=None, data_dir="data", start_from=None, state=None,
              **model):
    """A Config and its GPT in fp32, after writing folder/config.json and folder/checkpoints/step_..; quicker than a training."""
    config = Config(run=folder.name, steps=6, start_from=start_from, out=str(folder.parent),
                    model=GPTConfig(**{**SIZES, "vocab_size": VOCABULARY.get(tokenizer), **model}), fp8=fp8 or FP8Config(),
                    data=DataConfig(dir=str(data_dir), mixture=mixture or {"web": 3, "code": 1}, tokenizer=tokenizer,
                                    tokens_per_step=384, micro_batch=4), optim=OptimConfig(lr=1e-2))
    gpt = build_rough(config.model).requires_grad_(False)
    path = folder / "checkpoints" / name_of(step)
    path.mkdir(parents=True)
    tensors = {f"model.{name}": p.detach() for name, p in gpt.named_parameters()}
    with warnings.catch_warnings(action="ignore"):      # that torch.distributed is not in use
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    seal(path, {"format_version": FORMAT_VERSION, "step": step, "state": state or {}, "config": config.to_dict(), "torch": "",
                "world_size": 1, "tensors": describe(tensors),
                "files": {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in path.iterdir()}})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return config, gpt


def documents(n=300):
    """Code, prose, scripts, emoji, runs of white space, odd line ends, numbers, control characters, special tokens' spelling."""
    rng = random.Random(0)
    code = "".join(path.read_text() for path in sorted((ROOT / "runtime").glob("*.py"))[:6])
    prose = (ROOT / "README.md").read_text()
    words = ["naïve", "Straße", "Ελληνικά", "русский", "中文字符", "日本語", "한국어", "العربية", "עברית", "हिन्दी", "ไทย",
             "🙂", "👩\u200d👧", "e\u0301", "\u200b", "ﬁ", "\ufeff", "\x00", "\x7f", "it's", "I'LL", "3.14159",
             "1234567890", "1e-5", "£5", "½", "¿qué?", "...", "--", "==", "<s>", "[INST]", "<|endoftext|>x"]
    letters = (range(0x20, 0x7F), range(0xA0, 0xD800), range(0x1F000, 0x1FB00))
    kinds = (lambda: code[(start := rng.randrange(len(code) - 900)):start + rng.randrange(900)],
             lambda: prose[(start := rng.randrange(len(prose) - 900)):start + rng.randrange(900)],
             lambda: "".join(rng.choice(words) + rng.choice((" ", "  ", "\n", "\t", "\r\n", "\u3000", "")) for _ in range(60)),
             lambda: "".join(rng.choice(" \t\n\r\x0b\u00a0\u2003ab1.") for _ in range(200)),
             lambda: "".join(chr(rng.choice(rng.choice(letters))) for _ in range(80)))
    return ["", " ", "\n\n\n", "<|endoftext|>", "a<|endoftext|>b", *(rng.choice(kinds)() for _ in range(n - 5))]
