"""A run's checkpoint as a model that answers, with its tokenizer, and the tokens it draws."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_type_hints

import torch

from fp8 import selection
from fp8.convert import convert
from fp8.selection import Layer
from lib.errors import UserError
from model import GPT, KVCache
from runtime.checkpoint import latest, load_model, step_of
from runtime.config import Config, FP8Config, read_config
from runtime.tokenizer import Tokenizer, load_tokenizer, tokenizer_of

Recipe = get_type_hints(FP8Config)["recipe"]  # the annotation: "off" and every recipe's name


# and not inference_mode, under which torchao's rowwise FP8 Linear cannot reshape its input
@torch.no_grad()
def stream(
    model: GPT,
    ids: torch.Tensor,
    n_new: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None = None,
    ends: Sequence[int] = (),
    n_ids: int | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the next token of each row, (B,) int64, n_new times, or until the context is full or
    all rows have ended.

    ids (B, T) are prompts of equal length, T >= 1. A row that has emitted one of `ends` goes on
    with the first of them. Only ids below vocab_size can come out, never the rows that pad the
    vocabulary, and only those below `n_ids` where the tokenizer has fewer, as an imported model's
    may. temperature 0 is argmax. Raises UserError where the model has diverged."""
    config = model.config
    n_ids = min(config.vocab_size, n_ids or config.vocab_size)
    assert 1 <= ids.size(1) <= config.n_ctx, (
        f"a prompt of {ids.size(1)} tokens in a context of {config.n_ctx}"
    )
    cache, x = KVCache(), ids
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    end_ids = torch.tensor(list(ends), dtype=torch.int64, device=ids.device)
    # The last token needs no place of its own in the context: nothing is computed from it.
    for _ in range(min(n_new, config.n_ctx - ids.size(1) + 1)):
        logits = model.head(model.hidden(x, cache)[:, -1]).float()[:, :n_ids]  # (B, V)
        if not logits.isfinite().all():
            raise UserError(
                "the model's logits are not finite numbers, no token can be drawn from them: its"
                " run has diverged"
            )
        if temperature == 0:
            token = logits.argmax(dim=-1)
        else:
            logits = logits / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, n_ids), dim=-1).values[:, -1:]  # (B, 1)
                logits = logits.masked_fill(logits < least, -math.inf)
            token = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)
        if ends:
            token = token.masked_fill(ended, ends[0])
            ended = torch.isin(token, end_ids)
        yield token
        if ended.all():
            return
        x = token[:, None]  # (B, 1)


class Inference(NamedTuple):
    """A model ready to be asked, and what it takes to ask it."""

    model: GPT
    tokenizer: Tokenizer
    device: torch.device
    layers: list[Layer]  # the verdict on every Linear; nothing is converted where fp8=off
    step: int  # of the checkpoint


def load_for_inference(
    run_dir: str,
    device: str,
    dtype: str,
    recipe: str = "off",
    step: int | None = None,
    average: int = 1,
) -> Inference:
    """The newest checkpoint of a run, or that of `step`, or the mean of the `average` checkpoints
    that end with it: its Linears in FP8 by `recipe`, other weights in the compute dtype.

    A BF16 Linear casts its weight at each use; storing the cast weight gives the same numbers for
    half the memory traffic. An FP8 Linear quantises its fp32 weight at each use, as in training:
    the losses are those of training, the memory is not that of an FP8 server. Raises UserError
    where the run cannot be read, the device does not exist, or the recipe cannot run on it or on
    this model."""
    torch_device, config = pick_device(device), read_config(run_dir)
    if recipe != "off" and dtype != "bfloat16":
        raise UserError(
            f"fp8={recipe} multiplies FP8 into BF16, so dtype={dtype} cannot be had with it: drop"
            " one of the two"
        )
    settings = check_recipe(config, recipe, torch_device)
    tokenizer, newest = read_tokenizer(config, run_dir), latest(Path(run_dir))
    # a run that trains keeps it until two newer ones are whole
    step = step_of(newest) if newest and step is None else step
    model, _ = load_model(
        run_dir,
        device=torch_device,
        compute_dtype=getattr(torch, dtype),
        step=step,
        average=average,
    )
    layers = convert(model, settings, device_type=torch_device.type)
    quantised = {id(model.get_submodule(layer.name).weight) for layer in layers if layer.recipe}
    for p in model.parameters():
        if id(p) not in quantised:
            # parameters only: BF16 RoPE tables would blur the positions
            p.data = p.data.to(model.compute_dtype)
    assert step is not None  # else load_model() has refused
    return Inference(model.eval(), tokenizer, torch_device, layers, step)


def check_recipe(config: Config, recipe: str, device: torch.device) -> FP8Config:
    """What to convert, where nothing is sharded: the run's own choice of Linears if this recipe
    trained it, else the recipe's defaults. Raises UserError where the device or the model's sizes
    refuse the recipe, before a checkpoint is read."""
    settings = (
        replace(config.fp8, all_gather=False)
        if config.fp8.recipe == recipe
        else FP8Config(recipe=recipe)
    )
    selection.check_hardware(settings, device)
    selection.select(
        GPT.on_meta(config.model),
        settings,
        torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    )
    return settings


def pick_device(name: str) -> torch.device:
    """The device that `name` means; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"device={name!r} is not usable here: give auto, cpu or cuda") from error


def read_tokenizer(config: Config, run_dir: str | Path) -> Tokenizer:
    """The tokenizer of a run; where it is a folder the run's own copy, or without one what the
    config names.

    Raises UserError where it cannot be read, or its ids mean other text than in the training: the
    newest checkpoint's manifest holds that tokenizer's SHA-256, an import's with its source, else
    summary.json does."""
    run_dir = Path(run_dir)
    tokenizer, newest = (
        load_tokenizer(tokenizer_of(run_dir, config.data.tokenizer)),
        latest(run_dir),
    )
    state = read_json_or_empty(newest / "manifest.json").get("state", {}) if newest else {}
    holders = (state, state.get("imported", {}), read_json_or_empty(run_dir / "summary.json"))
    trained = next(filter(None, (holder.get("tokenizer_sha256") for holder in holders)), None)
    if trained is not None and not tokenizer.goes_by(trained):
        raise UserError(
            f"{run_dir} was trained with another tokenizer than {tokenizer.name}: put it back as"
            " its tokenizer/"
        )
    return tokenizer


def read_json_or_empty(path: Path) -> dict:
    """A JSON object; {} where there is none, or a damaged one: who needs the rest of the file says
    so."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What a model reads before it goes on: the prompt, after the token that begins a text where
    the tokenizer adds it by itself; without a prompt what stands before a document's first token. A
    prompt that spells a special token holds it."""
    ids = tokenizer.encode_special(prompt).tolist()
    if not ids:
        return [tokenizer.start]
    return [tokenizer.start, *ids] if tokenizer.adds_start and ids[0] != tokenizer.start else ids
