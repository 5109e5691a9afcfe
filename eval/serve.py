"""Serve a page to type prompts into, with the run's loss curve beside it.

    python -m eval.sample out/RUN --serve port=8000

    port          of the page; 0 takes one that is free
    host          127.0.0.1 lets this machine alone use it, 0.0.0.0 everybody who can reach the machine: there is no password
    device        auto (a GPU where there is one), cpu, cuda
    dtype         bfloat16 (as trained) or float32
    fp8           off, or any fp8.recipe of training: the Linears it converts multiply in FP8

It answers from the newest checkpoint there is when it starts, also of a run that still trains; the curve is the one at the
time when the page is loaded. Ctrl-C ends it. What a program may ask: see eval/server.py.
"""

import sys
from dataclasses import dataclass
from html import escape
from ipaddress import ip_address
from pathlib import Path
from string import Template
from typing import ClassVar, Literal

import torch

from eval.curve import loss_svg, read_losses
from eval.sample import Inference, Recipe, fp8_lines, load_for_inference
from eval.server import ROWS, Server
from runtime.checkpoint import latest, step_of
from runtime.cli import UserError, read_options
from runtime.config import read_config

PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    port: int = 8000
    host: str = "127.0.0.1"
    device: str = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    fp8: Recipe = "off"

    POSITIONAL: ClassVar = ("run",)

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise UserError(f"port={self.port} must be between 0 (any that is free) and 65535")


def serve(options: Options) -> None:
    """Until Ctrl-C. Raises UserError on a mistake of the user's."""
    with Server(options.host, options.port) as server:
        try:
            load(server, options)
            if not ip_address(server.server_address[0].partition("%")[0]).is_loopback:
                print(f"warning: host={options.host} lets everybody who can reach this machine use the page, "
                      f"which asks for no password", file=sys.stderr)
            print(f"{options.run}: {server.url}   (Ctrl-C ends it)", flush=True)
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            server.is_stopping.set()
            server.line.is_empty(10)        # the process should not end within a matrix product
            print()


def load(server: Server, options: Options) -> None:
    checkpoint = latest(Path(options.run))
    server.ready = load_for_inference(options.run, options.device, options.dtype, options.fp8)
    facts = model_facts(options, server.ready, step_of(checkpoint) if checkpoint else 0)
    server.page = lambda nonce: page(Path(options.run), facts, server.ready.model.config.n_ctx, nonce)


def model_facts(options: Options, ready: Inference, step: int) -> list[tuple[str, str]]:
    """What stands beside the page's curve, name and value."""
    config, m = read_config(options.run), ready.model.config
    runs_fp8 = fp8_lines(ready.layers, options.fp8, ready.device)[-2:]      # how many, and what this device makes of it
    return [("parameters", f"{m.params_total:,} in {m.n_layer} blocks of width {m.n_embd:,}"),
            ("context", f"{m.n_ctx:,} tokens of a vocabulary of {m.vocab_size:,}"),
            ("trained in", "BF16" if config.fp8.recipe == "off" else f"FP8, {config.fp8.recipe}") if step else
            ("trained", "not here: imported weights"),
            *([("trained on", f"{step * config.data.tokens_per_step:,} tokens in {step:,} steps")] if step else []),
            ("answers in", "; ".join([f"{options.dtype} on {ready.device.type}", *runs_fp8]))]


def page(run: Path, facts: list[tuple[str, str]], n_ctx: int, nonce: str) -> str:
    """The page's HTML, with the losses of now; nothing in it is taken for markup."""
    name = run.resolve().name
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts)
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        nonce=nonce, name=escape(name), facts=rows, curve=loss_svg(name, *read_losses(run)), rows=ROWS, n_ctx=n_ctx)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(__doc__)
        return 0 if arguments else 2
    try:
        serve(read_options(Options, arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
