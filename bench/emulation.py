"""CPU time of a training step in FP8, as a CPU emulates it, over BF16's.

    python -m bench.emulation                           2.7M parameters, 4,096 tokens a step
    python -m bench.emulation recipes=mxfp8 rounds=20
    python -m bench.emulation compile=block             compiled, which takes minutes first
    python -m bench.emulation cpu_fp32=true             on a CPU without BF16 units

One thread, all arms in one process, a step of each in turns. CPU time and the best step of each
count, since other work on the machine lengthens wall time at once and CPU time through its caches.
A step is a cell's of bench.throughput: forward, backward, clipping, AdamW, the step's host read."""

import time
from dataclasses import dataclass
from typing import Literal

import torch

from bench.cells import BF16, Subject, build_ours, our_cell
from bench.measuring import tokens_like_text
from fp8.matmul import has_bf16_units
from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import keep_freed_memory
from lib.text import grid

MODEL = {"n_layer": 3, "n_head": 4, "n_embd": 256, "n_ffn": 768, "vocab_size": 257}
SEQUENCES, T = 16, 256  # of a step, in one micro-batch


@dataclass(frozen=True, kw_only=True)
class Options:
    # labels of arms beside BF16, as mxfp8 or rowwise+head
    recipes: tuple[str, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
    rounds: int = 10  # timed steps of each arm, after one that warms up
    compile: Literal["off", "block", "model"] = "off"  # parallel.compile of all arms
    cpu_fp32: bool = False  # parallel.cpu_fp32 of all arms, as the study on a CPU has it

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"rounds={self.rounds} must be at least 1: a step of each arm is timed")


@command(__doc__, Options)
def main(options: Options) -> str:
    """The table."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as runtime/parallel.py starts a run
    arms = {}
    for label in (BF16.label, *options.recipes):
        arms[label] = _build(label, options)
    x, y = tokens_like_text(SEQUENCES, T, MODEL["vocab_size"], torch.device("cpu"))
    first_s = {label: _step(arm, x, y) for label, arm in arms.items()}
    seconds: dict[str, list[float]] = {label: [] for label in arms}
    for _ in range(options.rounds):
        for label, arm in arms.items():
            seconds[label].append(_step(arm, x, y))
    return table(first_s, seconds)


def _build(label: str, options: Options) -> Subject:
    cell = our_cell(
        "emulation",
        label,
        SEQUENCES,
        T=T,
        tokens_per_step=SEQUENCES * T,
        device="cpu",
        model=MODEL,
    )
    return build_ours(cell, torch.device("cpu"), options.compile, options.cpu_fp32)


def _step(arm: Subject, x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds of CPU time of one optimizer step."""
    start = time.process_time()
    loss = arm.micro_step(x, y)
    arm.update()
    loss.item()
    return time.process_time() - start


def table(first_s: dict[str, float], seconds: dict[str, list[float]]) -> str:
    """Markdown, from the first step's seconds of each arm and those of the steps after it."""
    units = "with" if has_bf16_units() else "without"
    best_of_bf16 = min(seconds[BF16.label])
    lines = [["arm", "first step, CPU s", "best step, CPU s", "over BF16", "tokens/s"]]
    for label, steps in seconds.items():
        best = min(steps)
        numbers = [first_s[label], best, best / best_of_bf16]
        tok_per_s = f"{SEQUENCES * T / best:,.0f}"
        lines.append([label, *(f"{number:.3f}" for number in numbers), tok_per_s])
    return f"{grid(lines)}\n\none thread, a CPU {units} BF16 units, torch {torch.__version__}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
