"""Continue a prompt with a trained model.

    python -m eval.sample out/RUN "prompt" n=3 tokens=200 temperature=0.8 top_k=200 seed=1

    n             continuations of the same prompt, drawn together; the first is printed as it grows, the others below it
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
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, TextIO, get_type_hints

import torch

from eval.run_tokenizer import read_tokenizer
from eval.streaming import Piece, pieces
from model import GPT, KVCache
from runtime import fp8
from runtime.checkpoint import DamagedError, latest, load_model
from runtime.cli import UserError, read_options, type_problems
from runtime.config import Config, FP8Config, read_config
from runtime.tokenizer import Tokenizer

Recipe = get_type_hints(FP8Config)["recipe"]    # the annotation: "off" and every recipe's name


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a model. Raises UserError where a value has another type or lies beyond its bounds."""
    prompt: str = ""
    n: int = 1
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 200
    seed: int = 1337

    def __post_init__(self):
        if problems := type_problems("", self):
            raise UserError("\n".join(problems))
        for name, low, high in (("n", 1, 1024), ("tokens", 1, 2**31), ("top_k", 1, 2**31), ("seed", 0, 2**63 - 1)):
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise UserError(f"{name}={value} must be between {low} and {high}")
        if self.temperature != 0 and not 0.01 <= self.temperature <= 100:   # beyond them fp32 logits overflow or are all alike
            raise UserError(f"temperature={self.temperature} must be 0 (the likeliest token) or between 0.01 and 100")


@dataclass(frozen=True, kw_only=True)
class Options(Request):
    run: str
    device: str = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    fp8: Recipe = "off"

    POSITIONAL: ClassVar = ("run", "prompt")


# ----------------------------------------------------------------------------------------------------------- generation

@torch.no_grad()        # and not inference_mode, under which torchao's rowwise FP8 Linear cannot reshape its input
def stream(model: GPT, ids: torch.Tensor, n_new: int, temperature: float, top_k: int | None,
           generator: torch.Generator | None = None, eot: int | None = None,
           n_ids: int | None = None) -> Iterator[torch.Tensor]:
    """Yield the next token of each row, (B,) int64, n_new times, or until the context is full or all rows have ended.

    ids (B, T) are prompts of equal length, T >= 1. A row that has emitted `eot` goes on with `eot`. Only ids below
    vocab_size can come out, never the rows that pad the vocabulary, and only those below `n_ids` where the tokenizer has
    fewer, as an imported model's may. temperature 0 is argmax. Raises UserError where the model has diverged.
    """
    config = model.config
    n_ids = min(config.vocab_size, n_ids or config.vocab_size)
    assert 1 <= ids.size(1) <= config.n_ctx, f"a prompt of {ids.size(1)} tokens in a context of {config.n_ctx}"
    cache, x = KVCache(), ids
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    # The last token needs no place of its own in the context: nothing is computed from it.
    for _ in range(min(n_new, config.n_ctx - ids.size(1) + 1)):
        logits = model.head(model.hidden(x, cache)[:, -1]).float()[:, :n_ids]      # (B, V)
        if not logits.isfinite().all():
            raise UserError("the model's logits are not finite numbers, no token can be drawn from them: its run has diverged")
        token = _choose(logits, temperature, top_k, generator)
        if eot is not None:
            token = token.masked_fill(ended, eot)
            ended = ended | (token == eot)
        yield token
        if ended.all():
            return
        x = token[:, None]      # (B, 1)


def generate(model: GPT, ids: torch.Tensor, n_new: int, temperature: float = 0.0, top_k: int | None = None,
             generator: torch.Generator | None = None, eot: int | None = None, n_ids: int | None = None) -> torch.Tensor:
    """The new tokens alone, (B, at most n_new) int64; see stream() for when they are fewer."""
    tokens = list(stream(model, ids, n_new, temperature, top_k, generator, eot, n_ids))
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
    the memory is not that of an FP8 server. Raises UserError where the run cannot be read, the device does not exist,
    or the recipe cannot run on it or on this model.
    """
    where, config = pick_device(device), read_config(run_dir)
    if recipe != "off" and dtype != "bfloat16":
        raise UserError(f"fp8={recipe} multiplies FP8 into BF16, so dtype={dtype} cannot be had with it: drop one of the two")
    settings = check_recipe(config, recipe, where)
    tokenizer = read_tokenizer(config, run_dir)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(f"the tokenizer of {run_dir} has {tokenizer.vocab_size} ids, its model {config.model.vocab_size}: they "
                          f"are no pair, put back the tokenizer that the model was trained with")
    model = _load_newest(run_dir, where, getattr(torch, dtype))
    layers = fp8.convert(model, settings, device_type=where.type)
    quantised = {id(model.get_submodule(layer.name).weight) for layer in layers if layer.reason is None}
    for p in model.parameters():
        if id(p) not in quantised:
            p.data = p.data.to(model.compute_dtype)     # parameters only: BF16 RoPE tables would blur the positions
    return Inference(model.eval(), tokenizer, where, layers)


def _load_newest(run_dir: str, device: torch.device, compute_dtype: torch.dtype) -> GPT:
    """The model of a run that may be training: its newest checkpoint, while it is read, may give way to a newer one."""
    while True:
        newest = latest(Path(run_dir))
        try:
            return load_model(run_dir, device=device, compute_dtype=compute_dtype)[0]
        except DamagedError:
            if latest(Path(run_dir)) == newest:
                raise


def check_recipe(config: Config, recipe: str, device: torch.device) -> FP8Config:
    """What to convert: the run's own choice of Linears where this recipe trained it, else the recipe's defaults.

    Raises UserError where the device or the model's sizes refuse the recipe, before a checkpoint is read.
    """
    own = config.fp8.recipe == recipe
    settings = replace(config.fp8, all_gather=False) if own else FP8Config(recipe=recipe)   # nothing is sharded here
    fp8.check_hardware(settings, device)
    with torch.device("meta"):
        fp8.select(GPT(config.model), settings, torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    return settings


def fp8_lines(layers: list[fp8.Layer], recipe: str, device: torch.device) -> list[str]:
    """Which Linears run in FP8, then how many, then what to know of this device; nothing where fp8=off."""
    return fp8.table(layers, recipe, device.type) if recipe != "off" else []


def pick_device(name: str) -> torch.device:
    """The device that `name` means; "auto" is the GPU where there is one. Raises UserError where there is no such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:       # its words name twenty backends
        raise UserError(f"there is no device={name!r}: give auto, cpu or cuda") from error
    try:
        torch.empty(0, device=device)
        return device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(f"device={name!r} is not usable here ({reason}): give auto, cpu or cuda") from error


# ---------------------------------------------------------------------------------------------------------------- asking

def continuations(ready: Inference, request: Request) -> Iterator[list[Piece]]:
    """After each token the pieces of all rows that go on, or end with it; at last those that a limit ends.

    Raises UserError, at once, where the prompt does not fit the context."""
    ids, n_ctx = prompt_ids(ready.tokenizer, request.prompt), ready.model.config.n_ctx
    if len(ids) > n_ctx:
        raise UserError(f"the prompt has {len(ids)} tokens, but the context of this model holds {n_ctx}: shorten the prompt")
    generator = torch.Generator(ready.device).manual_seed(request.seed)
    prompts = torch.tensor([ids] * request.n, device=ready.device)
    steps = stream(ready.model, prompts, request.tokens, request.temperature, request.top_k, generator, ready.tokenizer.eot,
                   ready.tokenizer.vocab_size)
    return pieces(steps, ready.tokenizer, request.n, ids)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """What a model reads before it goes on: the prompt, after the token that begins a text where the tokenizer adds it by
    itself; without a prompt what stands before a document's first token."""
    ids = tokenizer.encode(prompt).tolist()
    return [tokenizer.start, *ids] if tokenizer.adds_start or not ids else ids


# ---------------------------------------------------------------------------------------------------------- entry point

def show(steps: Iterator[list[Piece]], request: Request, out: TextIO) -> None:
    """Print the continuations one below the other: the one that is next as it grows, so that all end in order."""
    waiting, over, row = [""] * request.n, [False] * request.n, 0

    def begin():
        out.write((f"{'-' * 32} {row + 1} of {request.n}\n" if request.n > 1 else "") + request.prompt)

    begin()
    out.flush()
    for step in steps:
        for piece in step:
            waiting[piece.row] += piece.text
            over[piece.row] = piece.end is not None
        while row < request.n:
            out.write(waiting[row])
            waiting[row] = ""
            if not over[row]:
                break
            out.write("\n")
            row += 1
            if row < request.n:
                begin()
        out.flush()


def sample(options: Options, out: TextIO) -> None:
    """Print `options.n` continuations of the prompt to `out`. Raises UserError on a mistake of the user's."""
    ready = load_for_inference(options.run, options.device, options.dtype, options.fp8)
    for line in fp8_lines(ready.layers, options.fp8, ready.device)[-2:]:      # how many, and what this device makes of it
        print(line, file=sys.stderr)
    show(continuations(ready, options), options, out)
    n_ctx, n_prompt = ready.model.config.n_ctx, len(prompt_ids(ready.tokenizer, options.prompt))
    if n_prompt + options.tokens > n_ctx + 1:
        print(f"the context of {n_ctx} tokens allows {n_ctx - n_prompt + 1} new ones, not tokens={options.tokens}",
              file=sys.stderr)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(__doc__)
        return 0 if arguments else 2
    try:
        sample(read_options(Options, arguments), sys.stdout)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:     # whoever read has read enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # Python flushes once more at its end
        return 1
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
