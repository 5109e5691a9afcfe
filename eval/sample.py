"""Continue a prompt with a trained model.

    python -m eval.sample out/RUN "prompt" n=3 tokens=200 temperature=0.8 top_k=200 seed=1

A continuation ends earlier with its document (at any of the tokens that the tokenizer, its
generation_config.json or config.json name as ends) or with the model's context; of several the
first is printed as it grows. A prompt that spells a special token, such as <|endoftext|>, holds
that token. Without a prompt the model starts a document of its own. A prompt that looks like
key=value goes as prompt="key=value"."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TextIO

import torch

from eval.inference import Recipe, load_for_inference, prompt_ids, stream
from fp8 import selection
from lib.command import command, run_command
from lib.errors import UserError
from lib.values import FilePath
from runtime.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


@dataclass(frozen=True, kw_only=True)
class Options:
    run: FilePath  # folder of a run
    prompt: str = ""
    n: int = 1  # continuations of the same prompt, drawn together
    tokens: int = 200  # new tokens at most
    # 0 takes the likeliest token each time, 1 samples from the model's own distribution
    temperature: float = 0.8
    top_k: int | None = 200  # sample from the k likeliest tokens only; none = from all
    seed: int = 1337  # of the sampling
    device: str = "auto"  # auto (a GPU where there is one), cpu, cuda
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # as trained, or float32
    # the Linears that this recipe converts multiply in FP8, whatever trained the run
    fp8: Recipe = "off"
    step: int | None = None  # of a checkpoint that was kept; none = the newest

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("tokens", 1), ("top_k", 1), ("temperature", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name}={value} must be at least {least}")


def show(
    steps: Iterable[list[int]], tokenizer: Tokenizer, prompt: str, n: int, out: TextIO
) -> None:
    """Print n continuations one below the other, the first as it grows. `steps`: the next token of
    each, of one that has ended a token that ends texts."""
    begin = prompt_ids(tokenizer, prompt)
    rows = [list(begin) for _ in range(n)]
    prompt_letters = len(tokenizer.decode(begin))
    printed = prompt_letters  # letters of the first row
    out.write(_heading(0, n) + prompt)
    for tokens in steps:
        for row, token in zip(rows, tokens, strict=True):
            if token not in tokenizer.ends:
                row.append(token)
        # without a character that a later token may complete
        whole = tokenizer.decode(rows[0]).rstrip(REPLACEMENT)
        out.write(whole[printed:])
        out.flush()
        printed = max(printed, len(whole))
    out.write(tokenizer.decode(rows[0])[printed:] + "\n")
    for number in range(1, n):
        text = tokenizer.decode(rows[number])[prompt_letters:]
        out.write(f"{_heading(number, n)}{prompt}{text}\n")


def _heading(number: int, n: int) -> str:
    """Above each of several continuations."""
    return f"{'-' * 32} {number + 1} of {n}\n" if n > 1 else ""


@command(__doc__, Options, "run", "prompt")
def main(options: Options) -> None:
    model, tokenizer, device, layers, _ = load_for_inference(
        options.run, options.device, options.dtype, options.fp8, options.step
    )
    if options.fp8 != "off":
        for line in selection.total_lines(layers, options.fp8, device.type):
            print(line, file=sys.stderr)
    ids, n_ctx = prompt_ids(tokenizer, options.prompt), model.config.n_ctx
    if len(ids) > n_ctx:
        raise UserError(
            f"the prompt has {len(ids)} tokens, but the context of this model holds {n_ctx}:"
            " shorten the prompt"
        )
    prompts = torch.tensor(ids, device=device).repeat(options.n, 1)
    generator = torch.Generator(device).manual_seed(options.seed)
    steps = stream(
        model,
        prompts,
        options.tokens,
        options.temperature,
        options.top_k,
        generator,
        tokenizer.ends,
        tokenizer.vocab_size,
    )
    show(map(torch.Tensor.tolist, steps), tokenizer, options.prompt, options.n, sys.stdout)
    if len(ids) + options.tokens > n_ctx + 1:
        print(
            f"the context of {n_ctx} tokens allows {n_ctx - len(ids) + 1} new ones, not"
            f" tokens={options.tokens}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
