"""A tiny opinionated model, its log-likelihoods one token at a time, folders like a finished run's, texts of many kinds."""

import json
import random
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import torch

from eval import sample
from eval.from_hf import write_checkpoint
from eval.lm import CheckpointLM
from model import GPTConfig
from runtime.checkpoint import name_of, read_manifest, seal
from runtime.config import Config, DataConfig, FP8Config, OptimConfig
from runtime.tokenizer import load_tokenizer
from tests import conftest
from tests.conftest import encode_document
from tests.test_model import build_rough

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=64, n_ctx=32, vocab_size=257)
BYTES = load_tokenizer("byte")


def build(config=TINY, seed=1, compute_dtype=torch.float32):
    """A model that has opinions: each token of the past moves the logits."""
    return build_rough(config, seed, compute_dtype).requires_grad_(False).eval()


def rigged(logits_of):
    """A model whose head is replaced by a function of the last hidden states."""
    model = build()
    model.head.forward = logits_of
    return model


def generate(model, ids, n_new, temperature=0.0, top_k=None, generator=None, **more):
    """The new tokens of eval/sample.py's stream(), (B, at most n_new)."""
    return torch.stack(list(sample.stream(model, ids, n_new, temperature, top_k, generator, **more)), dim=1)


def build_lm(model, micro_batch=4):
    return CheckpointLM(model, BYTES, micro_batch, torch.device("cpu"))


def request(*args):
    return SimpleNamespace(args=args)


def directly(model, context, continuation):
    """Log-likelihood and greediness one token at a time, each from a forward pass over at most n_ctx tokens of past.

    The past is what a left-truncated whole has: nothing earlier than n_ctx + 1 tokens before the end.
    """
    ids = (context + continuation)[-(model.config.n_ctx + 1):]
    total, greedy = 0.0, True
    for t in range(len(ids) - len(continuation), len(ids)):
        logits = model(torch.tensor([ids[:t]]))[0, -1].double()
        total += (logits - logits.logsumexp(0))[ids[t]].item()
        greedy &= int(logits[:257].argmax()) == ids[t]
    return total, greedy


def expected_pair(model, context, continuation):
    stripped = context.rstrip()     # lm-eval's rule: blanks at the end of a context belong to the continuation
    continuation = context[len(stripped):] + continuation
    return directly(model, list(stripped.encode()) or [256], list(continuation.encode()))


def rolled(model, prefix, ids):
    """Sum over disjoint windows of n_ctx tokens, the last one with as much past as fits: the definition, spelled out."""
    n, total = model.config.n_ctx, 0.0
    for start in range(0, len(ids), n):
        piece = ids[start:start + n]
        past = prefix if start == 0 else ids[max(0, start + len(piece) - n - 1):start]
        total += directly(model, past, piece)[0]
    return total


def bytes_of(ids):
    ids = ids.tolist()
    return bytes(ids[:ids.index(256)] if 256 in ids else ids)


def words(rng, n):
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(n))


def build_run(tmp_path, monkeypatch):
    """A finished run of build()'s weights with its data, its checkpoint at step 1; the working directory is above it."""
    monkeypatch.chdir(tmp_path)
    protect_environment(monkeypatch)
    rng = random.Random(0)
    for source in ("prose", "code"):
        write_shards(tmp_path / "data" / source, [words(rng, 80) for _ in range(250)])
    folder = tmp_path / "out" / "tiny"
    write_run(folder, step=1, mixture={"prose": 0.5, "code": 0.5}, **asdict(TINY))
    (folder / "summary.json").write_text(json.dumps({"run_id": "tiny", "steps": 1}))
    return folder


def protect_environment(monkeypatch):
    """What the harness sets in the environment is undone after the test."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE", "DISABLE_MULTIPROC"):
        monkeypatch.setenv(name, "0")


def write_shards(folder, texts, shards=2):
    share = -(-len(texts) // shards)
    val = [np.concatenate([encode_document(BYTES, text) for text in texts[i * share:(i + 1) * share]]) for i in range(shards)]
    conftest.write_shards(folder, {"train": [], "val": val})


def make_task(folder, rows, name="sums"):
    """A folder for include=: a multiple-choice task over `rows` of q, answers, gold."""
    folder.mkdir()
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{validation: {folder / f'{name}.jsonl'}}},"
        f" cache_dir: {folder / 'cache'}}}\noutput_type: multiple_choice\nvalidation_split: validation\n"
        "doc_to_text: q\ndoc_to_choice: answers\ndoc_to_target: gold\nmetric_list:\n"
        "  - {metric: acc, aggregation: mean, higher_is_better: true}\nmetadata: {version: 1.0}\n")
    return folder


SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_ffn": 96, "n_ctx": 24}
VOCABULARY = {"gpt2": 50257, "byte": 257}


def write_run(folder, tokenizer="byte", fp8=None, step=6, mixture=None, data_dir="data", start_from=None, state=None, seed=1,
              **model):
    """A Config and its rough GPT in fp32, after writing folder/config.json and folder/checkpoints/step_.."""
    config = Config(run=folder.name, steps=6, start_from=start_from, out=str(folder.parent),
                    model=GPTConfig(**{**SIZES, "vocab_size": VOCABULARY.get(tokenizer), **model}), fp8=fp8 or FP8Config(),
                    data=DataConfig(dir=str(data_dir), mixture=mixture or {"web": 3, "code": 1}, tokenizer=tokenizer,
                                    tokens_per_step=384, micro_batch=4), optim=OptimConfig(lr=1e-2))
    gpt = build(config.model, seed)
    path = folder / "checkpoints" / name_of(step)
    path.mkdir(parents=True)
    write_checkpoint(path, config, {name: p.detach() for name, p in gpt.named_parameters()}, state or {})
    seal(path, read_manifest(path) | {"step": step})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return config, gpt


def documents(n=300):
    """Code, prose, scripts, emoji, runs of white space, odd line ends, numbers, control characters, special tokens' spelling."""
    rng = random.Random(0)
    code = "".join(path.read_text() for path in sorted((conftest.ROOT / "runtime").glob("*.py"))[:6])
    prose = (conftest.ROOT / "README.md").read_text()
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
