"""CPU time of a training step in FP8, as a CPU emulates it, over BF16's.

    python -m bench.emulation                           2.7M parameters, 4,096 tokens a step
    python -m bench.emulation recipes=mxfp8 rounds=20
    python -m bench.emulation compile=block             compiled, which takes minutes first
    python -m bench.emulation cpu_fp32=true             on a CPU without BF16 units
    python -m bench.emulation config=configs/cpu_529k_bf16.py cpu_fp32=true    another model
    python -m bench.emulation keep_freed_memory=false   page faults as without it

One thread, all arms in one process, a step of each in turns. CPU time and the best step of each
count, since other work on the machine lengthens wall time at once and CPU time through its caches.
Page faults are the fewest of a step: pages that the system gave to the process anew. A step is a
cell's of bench.throughput: forward, backward, clipping, AdamW, the step's host read."""

import resource
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch

from bench.cells import BF16, Subject, build_ours, our_cell
from bench.measuring import tokens_like_text
from fp8.matmul import has_bf16_units
from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import keep_freed_memory
from lib.text import grid
from lib.values import FilePath
from runtime.config import load_config


class Shape(NamedTuple):
    """A model, and its step of one micro-batch."""

    model: dict[str, Any]  # keys of GPTConfig
    sequences: int
    T: int  # tokens of a sequence

    @property
    def tokens(self) -> int:
        return self.sequences * self.T


# 2.7M parameters
DEFAULT = Shape(
    {"n_layer": 3, "n_head": 4, "n_embd": 256, "n_ffn": 768, "vocab_size": 257},
    sequences=16,
    T=256,
)


class Step(NamedTuple):
    """What an optimizer step took."""

    cpu_s: float
    page_faults: int


@dataclass(frozen=True, kw_only=True)
class Options:
    # labels of arms beside BF16, as mxfp8 or rowwise+head
    recipes: tuple[str, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
    rounds: int = 10  # timed steps of each arm, after one that warms up
    compile: Literal["off", "block", "model"] = "off"  # parallel.compile of all arms
    cpu_fp32: bool = False  # parallel.cpu_fp32 of all arms, as the study on a CPU has it
    config: FilePath | None = (
        None  # file whose model and micro-batch are taken; none: 2.7M parameters
    )
    keep_freed_memory: bool = True  # as a run on a CPU does

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"rounds={self.rounds} must be at least 1: a step of each arm is timed")


@command(__doc__, Options)
def main(options: Options) -> str:
    """The table."""
    torch.set_num_threads(1)
    if options.keep_freed_memory:
        keep_freed_memory()  # as runtime/parallel.py starts a run
    shape = DEFAULT if options.config is None else _shape_of(options.config)
    arms = {}
    for label in (BF16.label, *options.recipes):
        arms[label] = _build(label, shape, options)
    vocab_size = shape.model["vocab_size"]
    x, y = tokens_like_text(shape.sequences, shape.T, vocab_size, torch.device("cpu"))
    first_steps = {label: _step(arm, x, y) for label, arm in arms.items()}
    steps: dict[str, list[Step]] = {label: [] for label in arms}
    for _ in range(options.rounds):
        for label, arm in arms.items():
            steps[label].append(_step(arm, x, y))
    return table(shape.tokens, first_steps, steps)


def _shape_of(path: str) -> Shape:
    """Of a config file. Raises UserError where its micro-batch is found by trials."""
    config = load_config(path)
    sequences = config.data.micro_batch
    if sequences == "auto":
        raise UserError(
            f"config={path} has data.micro_batch=auto, expected a number: the sequences of a step"
            " that is timed; write one there"
        )
    model = asdict(config.model)
    T = model.pop("n_ctx")
    return Shape(model, sequences, T)


def _build(label: str, shape: Shape, options: Options) -> Subject:
    cell = our_cell(
        "emulation",
        label,
        shape.sequences,
        T=shape.T,
        tokens_per_step=shape.tokens,
        device="cpu",
        model=shape.model,
    )
    return build_ours(cell, torch.device("cpu"), options.compile, options.cpu_fp32)


def _step(arm: Subject, x: torch.Tensor, y: torch.Tensor) -> Step:
    start, faults = time.process_time(), _page_faults()
    loss = arm.micro_step(x, y)
    arm.update()
    loss.item()
    return Step(time.process_time() - start, _page_faults() - faults)


def _page_faults() -> int:
    """Of this process so far, without those that read a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def table(tokens: int, first_steps: dict[str, Step], steps: dict[str, list[Step]]) -> str:
    """Markdown, from the first step of each arm and those after it, of `tokens` tokens."""
    units = "with" if has_bf16_units() else "without"
    best_of_bf16 = min(step.cpu_s for step in steps[BF16.label])
    header = ["arm", "first step, CPU s", "best step, CPU s", "over BF16", "tokens/s"]
    lines = [[*header, "page faults"]]
    for label, taken in steps.items():
        best = min(step.cpu_s for step in taken)
        numbers = [first_steps[label].cpu_s, best, best / best_of_bf16]
        counts = [f"{tokens / best:,.0f}", f"{min(step.page_faults for step in taken):,}"]
        lines.append([label, *(f"{number:.3f}" for number in numbers), *counts])
    return f"{grid(lines)}\n\none thread, a CPU {units} BF16 units, torch {torch.__version__}"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
