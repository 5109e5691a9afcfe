"""A tiny opinionated model, its log-likelihoods one token at a time, folders like a finished run's,
texts of many kinds."""

import json
import os
import queue
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from eval import inference
from eval.hf.importing import write_checkpoint
from eval.lm import CheckpointLM
from model import GPTConfig
from runtime.checkpoint import name_of, read_manifest, seal
from runtime.config import Config, DataConfig, FP8Config, OptimConfig
from runtime.parallel import World
from runtime.tokenizer import load_tokenizer
from tests.conftest import ALONE, TINY, asked, write_shards
from tests.helpers.text_files import BEGINS, write_tokenizer
from tests.test_model import build_rough

BYTES, CPU = load_tokenizer("byte"), torch.device("cpu")


def call(command, *arguments: object):
    """A command that must succeed."""
    assert command.main([str(argument) for argument in arguments]) == 0


def refused(capsys: pytest.CaptureFixture[str], command, *arguments: object):
    """What a command says of the user's mistake, in one line."""
    said = asked(capsys, command.main, *arguments, code=2)
    assert said.count("\n") == 1
    return said


def build(config=TINY, seed: int = 1):
    """A model that has opinions: each token of the past moves the logits."""
    return build_rough(config, seed).requires_grad_(False).eval()


def rigged(logits_of):
    """A model whose head is replaced by a function of the last hidden states."""
    model = build()
    model.head.forward = logits_of
    return model


def generate(
    model, ids, n_new: int, temperature: float = 0.0, top_k=None, generator=None, **more: object
):
    """The new tokens of eval/sample.py's stream(), (B, at most n_new)."""
    return torch.stack(
        list(inference.stream(model, ids, n_new, temperature, top_k, generator, **more)), dim=1
    )


def greedy_text(model, prompt, n_new: int):
    """What a model says after the bytes of `prompt` until it ends the text, replacement characters
    for what is none."""
    ids = generate(model, torch.tensor([list(prompt)]), n_new, ends=(256,))[0].tolist()
    return bytes(ids[: ids.index(256)] if 256 in ids else ids).decode(errors="replace")


def build_lm(model, micro_batch: int = 4, tokenizer=BYTES):
    return CheckpointLM(model, tokenizer, micro_batch, CPU, ALONE)


def on_two_ranks(monkeypatch: pytest.MonkeyPatch, module, work):
    """What work(world) returns or raises on each of two ranks, threads that meet in gather()."""
    inbox = queue.Queue(), queue.Queue()

    def gather(value, world):
        inbox[1 - world.rank].put(value)
        other = inbox[world.rank].get(timeout=60)
        return [other, value] if world.rank else [value, other]

    monkeypatch.setattr(module, "gather", gather)
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(work, World(rank, rank, 2, CPU)) for rank in range(2)]
        return [future.exception() or future.result() for future in done]


def request(*args: object):
    return SimpleNamespace(args=args)


def directly(model, context, continuation):
    """Log-likelihood and greediness one token at a time, each from a forward pass over at most
    n_ctx tokens of past.

    The past is what a left-truncated whole has: nothing earlier than n_ctx + 1 tokens before the
    end."""
    ids = (context + continuation)[-(model.config.n_ctx + 1) :]
    total, greedy = 0.0, True
    for t in range(len(ids) - len(continuation), len(ids)):
        logits = model(torch.tensor([ids[:t]]))[0, -1].double()
        total += logits.log_softmax(0)[ids[t]].item()
        greedy &= int(logits[:257].argmax()) == ids[t]
    return total, greedy


def expected_pair(model, context: str, continuation: str):
    # lm-eval's rule: blanks at the end of a context belong to the continuation
    stripped = context.rstrip()
    return directly(
        model,
        list(stripped.encode()) or [256],
        list((context[len(stripped) :] + continuation).encode()),
    )


def rolled(model, prefix, ids):
    """Sum over disjoint windows of n_ctx tokens, the last one with as much past as fits: the
    definition, spelled out."""
    n = model.config.n_ctx
    return sum(
        directly(model, prefix + ids[:start], ids[start : start + n])[0]
        for start in range(0, len(ids), n)
    )


def words(rng: random.Random, n: int):
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(n))


def build_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A finished run of build()'s weights with its data, its checkpoint at step 1; the working
    directory is above it. What the harness sets in the environment is undone after the test."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    for source in ("prose", "code"):
        ids = [np.array([256, *words(rng, 80).encode()], "<u2") for _ in range(250)]
        write_shards(
            tmp_path / "data" / source,
            {"train": [], "val": [np.concatenate(ids[:125]), np.concatenate(ids[125:])]},
        )
    folder = tmp_path / "out" / "tiny"
    write_run(folder, step=1, mixture={"prose": 0.5, "code": 0.5}, **asdict(TINY))
    (folder / "summary.json").write_text(json.dumps({"run_id": "tiny", "steps": 1}))
    with mock.patch.dict(os.environ):
        yield folder


def write_run(
    folder: Path,
    tokenizer: str = "byte",
    fp8=None,
    step: int = 6,
    mixture=None,
    data_dir: str = "data",
    start_from=None,
    state=None,
    seed: int = 1,
    **model: object,
):
    """A Config and its rough GPT in fp32, after writing folder/config.json and
    folder/checkpoints/step_.."""
    vocab_size = load_tokenizer(tokenizer).vocab_size
    model = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 64,
        "n_ffn": 96,
        "n_ctx": 24,
        "vocab_size": vocab_size,
    } | model
    config = Config(
        run=folder.name,
        steps=6,
        start_from=start_from,
        out=str(folder.parent),
        model=GPTConfig(**model),
        fp8=fp8 or FP8Config(),
        optim=OptimConfig(lr=1e-2),
        data=DataConfig(
            dir=str(data_dir),
            mixture=mixture or {"web": 3, "code": 1},
            tokenizer=tokenizer,
            tokens_per_step=384,
            micro_batch=4,
        ),
    )
    gpt = build(config.model, seed)
    path = folder / "checkpoints" / name_of(step)
    path.mkdir(parents=True)
    write_checkpoint(
        path, config, {name: p.detach() for name, p in gpt.named_parameters()}, state or {}
    )
    seal(path, read_manifest(path) | {"step": step})
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    return config, gpt


def make_llama(
    folder: Path,
    *,
    architecture: str = "Llama",
    dtype=torch.bfloat16,
    shard_size: str = "50GB",
    **changes: object,
):
    """Write a tiny random Llama and a byte-level BPE with begin and end of text, as save_pretrained
    lays them out."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 420,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 5.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    }
    config = getattr(transformers, f"{architecture}Config")(**sizes | changes)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder, vocab=400, post_processor=BEGINS)
    return folder
