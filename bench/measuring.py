"""A cell, in its own process: updates on one batch, then whole steps by the clock."""

import math
import re
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from bench.cells import Cell, Subject, build_ours
from bench.peer_models import build_peer
from bench.rows import Kernel, Measurement
from lib.machine import GIB, nvidia_smi

# Updates on one batch. Later ones fall too fast to be compared: torchao's own recipe was an update
# behind, 0.49 nats, in the twentieth of 1.5B, and in the tenth of 760M BF16's loss rose (on an
# H200).
SANITY_STEPS = 8
# Of the config's peak rate, that these updates rise to: at all of it they learn a small batch by
# heart so fast that FP8's rounding alone is 0.05 to 0.12 nats behind; at a tenth it is 0.01 (2 x
# 128 and 4 x 256 wide, on a CPU).
SANITY_RATE = 0.1
CLOCKS = {
    "sm_mhz": "clocks.sm",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "slowed_by": "clocks_event_reasons.active",
}
TIMED_S = {"cuda": 6.0, "cpu": 0.5}  # of whole steps, at least two
MOST_STEPS = 20  # that are timed


def tokens_like_text(
    sequences: int, T: int, vocab: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y (sequences, T) int64: random tokens, the k-th as frequent as 1 / (k + 2.7), as words are
    in text (Mandelbrot's form of Zipf's law): there is something to learn, and the embedding's
    gradient meets its tokens as often as in training."""
    frequencies = 1.0 / (torch.arange(vocab, dtype=torch.float64) + 2.7)
    drawn = torch.multinomial(
        frequencies,
        sequences * (T + 1),
        replacement=True,
        generator=torch.Generator().manual_seed(0),
    )
    t = drawn.view(sequences, T + 1)
    return t[:, :-1].contiguous().to(device), t[:, 1:].contiguous().to(device)


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """L2 norm of the gradients of each kind of parameter: layers.3.attn.qkv.weight is of the kind
    layers.*.attn.qkv.weight."""
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        kind = re.sub(r"\.\d+\.", ".*.", name.replace("_orig_mod.", ""))
        norm = (
            0.0 if p.grad is None else torch.linalg.vector_norm(p.grad, dtype=torch.float64).item()
        )
        squares[kind] = squares.get(kind, 0.0) + norm**2
    return {kind: math.sqrt(square) for kind, square in squares.items()}


def measure_cell(cell: Cell) -> Measurement:
    """Everything about a cell that needs no other. Run in a process of its own, which it leaves
    warm and full."""
    from torch._dynamo.utils import counters

    device = torch.device("cuda", 0) if cell.device == "cuda" else torch.device("cpu")
    subject = build_peer(cell, device) if cell.peer else build_ours(cell, device)
    print("\n".join(subject.describe))
    accumulation = cell.tokens_per_step // (cell.micro_batch * cell.T)
    x, y = tokens_like_text(4 * cell.micro_batch, cell.T, subject.vocab, device)
    batches = list(zip(x.split(cell.micro_batch), y.split(cell.micro_batch), strict=True))
    first = _first_updates(subject, batches[0], accumulation)
    usual_s = statistics.median(first.seconds[1:])

    def step() -> float:
        """Seconds of one optimizer step."""
        start = time.perf_counter()
        loss: Any = 0.0  # a tensor from the first micro-step on
        for micro in range(accumulation):
            loss += subject.micro_step(*batches[micro % len(batches)])
        subject.update()
        loss.item()  # train.py's host read, which waits for all of it
        return time.perf_counter() - start

    clocks = _read_clocks(step, device)
    graphs = counters["stats"]["unique_graphs"]
    n_steps = math.ceil(TIMED_S[device.type] / (accumulation * usual_s))
    steps_s = [step() for _ in range(min(MOST_STEPS, max(2, n_steps)))]
    recompiles = counters["stats"]["unique_graphs"] - graphs
    measured = Measurement(
        **subject.counts,
        compile_s=max(0.0, first.seconds[0] - usual_s),
        steps_s=steps_s,
        losses=first.losses,
        gradient_norms=first.norms,
        graph_breaks=sum(counters["graph_break"].values()),
        recompiles=recompiles,
        clocks=clocks,
    )
    if device.type != "cuda":
        return measured
    return replace(
        measured,
        peak_gib=torch.cuda.max_memory_allocated() / GIB,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        kernels=_kernels(lambda: subject.micro_step(*batches[0])),
    )


@dataclass(frozen=True)
class FirstUpdates:
    """SANITY_STEPS updates on one batch."""

    losses: list[float | None]  # before each; NaN where it is
    seconds: list[float]  # of each
    norms: dict[str, float | None]  # of the first gradients, by kind of parameter


def _first_updates(
    subject: Subject, batch: tuple[torch.Tensor, torch.Tensor], accumulation: int
) -> FirstUpdates:
    """The batch stands for all of a step's."""
    rates = [(group, group["lr"]) for group in subject.optimizer.param_groups]
    losses: list[float | None] = []
    seconds = []
    norms: dict[str, float | None] = {}
    for i in range(SANITY_STEPS):
        start = time.perf_counter()
        for group, rate in rates:
            group["lr"] = rate * SANITY_RATE * (i + 1) / SANITY_STEPS
        losses.append(subject.micro_step(*batch).item())
        norms = norms or dict(gradient_norms(subject.model))
        gradients = [p.grad for p in subject.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, float(accumulation))
        subject.update()
        seconds.append(time.perf_counter() - start)
    return FirstUpdates(losses, seconds, norms)


def _read_clocks(step: Callable[[], float], device: torch.device) -> dict | None:
    """What the GPU says of its clocks under steps, which warm it; None on a CPU."""
    if device.type != "cuda":
        step()  # the first one is not timed
        return None
    torch.cuda.reset_peak_memory_stats()  # the compiler's own trials are no part of a step
    values = nvidia_smi(*CLOCKS.values(), work=step)
    return dict(zip(CLOCKS, map(to_number, values), strict=True))


def to_number(text: str | None) -> float | None:
    """What nvidia-smi prints of a number; None of what a GPU does not tell."""
    if text is None:
        return None
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


def _kernels(work: Callable) -> list[Kernel]:
    """(name, milliseconds) of the kernels of one micro-step, the longest 30 first; none where the
    profiler does not work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        kernels = [
            (event.key[:160], event.self_device_time_total / 1e3)
            for event in profile.key_averages()
        ]
    except Exception:  # must not cost the row
        traceback.print_exc()
        return []
    return sorted(kernels, key=lambda row: -row[1])[:30]
