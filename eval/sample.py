"""Continue a prompt with a trained model.

    python -m eval.sample out/RUN "prompt" n=3 tokens=200 temperature=0.8 top_k=200 seed=1

    n             continuations of the same prompt, drawn side by side; a single one is printed as it grows
    tokens        new tokens at most; a continuation ends earlier with its document or with the model's context
    temperature   0 takes the likeliest token each time, 1 samples from the model's own distribution
    top_k         sample from the k likeliest tokens only; none = from all
    seed          of the sampling
    device        auto (a GPU where there is one), cpu, cuda
    dtype         bfloat16 (as trained) or float32
    fp8           off, or any fp8.recipe of training (tensorwise, rowwise, ..): the Linears it converts multiply in FP8,
                  whatever trained the run

Without a prompt the model starts a document of its own. A prompt that looks like key=value goes as prompt="key=value".
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TextIO, get_type_hints

import torch

from eval.options import read_options
from model import GPT, KVCache
from runtime import fp8
from runtime.checkpoint import load_model
from runtime.config import Config, ConfigError, FP8Config, read_config
from runtime.tokenizer import Tokenizer, load_tokenizer

REPLACEMENT = "\ufffd"      # what an incomplete UTF-8 sequence decodes to
Recipe = get_type_hints(FP8Config)["recipe"]    # the annotation: "off" and every recipe's name


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    prompt: str = ""
    n: int = 1
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 200
    seed: int = 1337
    device: str = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    fp8: Recipe = "off"

    POSITIONAL: ClassVar = ("run", "prompt")

    def __post_init__(self):
        for name, low, high in (("n", 1, 1024), ("tokens", 1, 2**31), ("top_k", 1, 2**31), ("seed", 0, 2**63 - 1)):
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise ConfigError(f"{name}={value} must be between {low} and {high}")
        if self.temperature != 0 and not 0.01 <= self.temperature <= 100:   # beyond them fp32 logits overflow or are all alike
            raise ConfigError(f"temperature={self.temperature} must be 0 (the likeliest token) or between 0.01 and 100")


# ----------------------------------------------------------------------------------------------------------- generation

@torch.no_grad()        # and not inference_mode, under which torchao's rowwise FP8 Linear cannot reshape its input
def stream(model: GPT, ids: torch.Tensor, n_new: int, temperature: float, top_k: int | None,
           generator: torch.Generator | None = None, eot: int | None = None) -> Iterator[torch.Tensor]:
    """Yield the next token of each row, (B,) int64, n_new times, or until the context is full or all rows have ended.

    ids (B, T) are prompts of equal length, T >= 1. A row that has emitted `eot` goes on with `eot`. Only the
    tokenizer's vocab_size ids can come out, never the rows that pad the vocabulary. temperature 0 is argmax.
    """
    config = model.config
    assert 1 <= ids.size(1) <= config.n_ctx, f"a prompt of {ids.size(1)} tokens in a context of {config.n_ctx}"
    cache, x = KVCache(), ids
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    # The last token needs no place of its own in the context: nothing is computed from it.
    for _ in range(min(n_new, config.n_ctx - ids.size(1) + 1)):
        logits = model.head(model.hidden(x, cache)[:, -1]).float()[:, :config.vocab_size]      # (B, V)
        token = _choose(logits, temperature, top_k, generator)
        if eot is not None:
            token = token.masked_fill(ended, eot)
            ended = ended | (token == eot)
        yield token
        if ended.all():
            return
        x = token[:, None]      # (B, 1)


def generate(model: GPT, ids: torch.Tensor, n_new: int, temperature: float = 0.0, top_k: int | None = None,
             generator: torch.Generator | None = None, eot: int | None = None) -> torch.Tensor:
    """The new tokens alone, (B, at most n_new) int64; see stream() for when they are fewer."""
    tokens = list(stream(model, ids, n_new, temperature, top_k, generator, eot))
    return torch.stack(tokens, dim=1) if tokens else ids[:, :0]


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]       # (B, 1)
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)


# -------------------------------------------------------------------------------------------------------------- loading

class Inference(NamedTuple):
    """A model ready to be asked, and what it takes to ask it."""
    model: GPT
    tokenizer: Tokenizer
    device: torch.device
    layers: list[fp8.Layer]     # the verdict on every Linear; nothing is converted where fp8=off


def load_for_inference(run_dir: str, device: str, dtype: str, recipe: str = "off") -> Inference:
    """The newest checkpoint of a run, its Linears in FP8 by `recipe`, its other weights stored in the compute dtype.

    A BF16 Linear casts its weight at each use; storing the cast weight gives the same numbers for half the memory
    traffic. An FP8 Linear quantises its fp32 weight at each use, as in training: the losses are those of training,
    the memory is not that of an FP8 server. Raises ConfigError where the run cannot be read, the device does not exist,
    or the recipe cannot run on it or on this model.
    """
    where, config = pick_device(device), read_config(run_dir)
    if recipe != "off" and dtype != "bfloat16":
        raise ConfigError(f"fp8={recipe} multiplies FP8 into BF16, so dtype={dtype} cannot be had with it: drop one of the two")
    settings = check_recipe(config, recipe, where)
    tokenizer = read_tokenizer(config)
    model, _ = load_model(run_dir, device=where, compute_dtype=getattr(torch, dtype))
    layers = fp8.convert(model, settings)
    quantised = {id(model.get_submodule(layer.name).weight) for layer in layers if layer.reason is None}
    for p in model.parameters():
        if id(p) not in quantised:
            p.data = p.data.to(model.compute_dtype)     # parameters only: BF16 RoPE tables would blur the positions
    return Inference(model.eval(), tokenizer, where, layers)


def check_recipe(config: Config, recipe: str, device: torch.device) -> FP8Config:
    """What to convert: the run's own choice of Linears where this recipe trained it, else the recipe's defaults.

    Raises ConfigError where the device or the model's sizes refuse the recipe, before a checkpoint is read.
    """
    own = config.fp8.recipe == recipe
    settings = replace(config.fp8, all_gather=False) if own else FP8Config(recipe=recipe)   # nothing is sharded here
    fp8.check_hardware(settings, device)
    with torch.device("meta"):
        fp8.select(GPT(config.model), settings, torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    return settings


def read_tokenizer(config: Config) -> Tokenizer:
    try:
        return load_tokenizer(config.data.tokenizer)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def fp8_lines(layers: list[fp8.Layer], recipe: str, device: torch.device) -> list[str]:
    """Which Linears run in FP8, then how many, then what to know of this device; nothing where fp8=off."""
    return fp8.table(layers, recipe, device.type) if recipe != "off" else []


def pick_device(name: str) -> torch.device:
    """The device that `name` means; "auto" is the GPU where there is one. Raises ConfigError where there is no such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name!r} is not usable here ({reason}): give auto, cpu or cuda") from error


# ---------------------------------------------------------------------------------------------------------- entry point

def stable_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids` without a character at the end that later tokens may still complete."""
    return tokenizer.decode(ids).rstrip(REPLACEMENT)


def sample(options: Options, out: TextIO) -> None:
    """Print `options.n` continuations of the prompt to `out`. Raises ConfigError on a mistake of the user's."""
    model, tokenizer, device, layers = load_for_inference(options.run, options.device, options.dtype, options.fp8)
    for line in fp8_lines(layers, options.fp8, device)[-2:]:      # how many, and what this device makes of it
        print(line, file=sys.stderr)
    prompt = tokenizer.encode(options.prompt).tolist() or [tokenizer.eot]
    n_ctx = model.config.n_ctx
    if len(prompt) > n_ctx:
        raise ConfigError(f"the prompt has {len(prompt)} tokens, but the context of {options.run} holds {n_ctx}: "
                          f"shorten the prompt")
    generator = torch.Generator(device).manual_seed(options.seed)
    ids = torch.tensor([prompt] * options.n, device=device)
    steps = stream(model, ids, options.tokens, options.temperature, options.top_k, generator, tokenizer.eot)
    if options.n == 1:
        new, shown = [], ""
        out.write(options.prompt)
        for token in steps:
            new += [int(token)] if int(token) != tokenizer.eot else []
            text = stable_text(tokenizer, new)
            out.write(text[len(shown):])
            out.flush()
            shown = text
        out.write(tokenizer.decode(new)[len(shown):] + "\n")
    else:
        rows = torch.stack(list(steps), dim=1).tolist()     # n lists of new tokens
        for i, row in enumerate(rows, 1):
            row = row[:row.index(tokenizer.eot)] if tokenizer.eot in row else row
            out.write(f"{'-' * 32} {i} of {options.n}\n{options.prompt}{tokenizer.decode(row)}\n")
    if len(prompt) + options.tokens > n_ctx + 1:
        print(f"the context of {n_ctx} tokens allows {n_ctx - len(prompt) + 1} new ones, not tokens={options.tokens}",
              file=sys.stderr)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(__doc__)
        return 0 if arguments else 2
    try:
        sample(read_options(Options, arguments), sys.stdout)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
