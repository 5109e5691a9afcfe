"""A cell, in its own process: updates on one batch, then whole steps by the clock."""

import math
import re
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn as nn

from bench.cells import Cell, build_ours
from bench.peer_models import load
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


def measure(cell: Cell) -> dict:
    """Everything about a cell that needs no other. Run in a process of its own, which it leaves
    warm and full."""
    from torch._dynamo.utils import counters

    device = torch.device("cuda", 0) if cell.device == "cuda" else torch.device("cpu")
    subject = load(cell, device) if cell.peer else build_ours(cell, device)
    print("\n".join(subject.describe))
    accumulation = cell.tokens_per_step // (cell.micro_batch * cell.T)
    x, y = tokens_like_text(4 * cell.micro_batch, cell.T, subject.vocab, device)
    batches = list(zip(x.split(cell.micro_batch), y.split(cell.micro_batch), strict=True))
    losses, seconds, norms = [], [], None
    rates = [(group, group["lr"]) for group in subject.optimizer.param_groups]
    for i in range(SANITY_STEPS):  # on one batch, which stands for all of a step's
        start = time.perf_counter()
        for group, rate in rates:
            group["lr"] = rate * SANITY_RATE * (i + 1) / SANITY_STEPS
        losses.append(subject.micro_step(*batches[0]).item())
        norms = norms or gradient_norms(subject.model)
        torch._foreach_mul_(
            [p.grad for p in subject.model.parameters() if p.grad is not None], float(accumulation)
        )
        subject.update()
        seconds.append(time.perf_counter() - start)

    def step() -> float:
        start, loss = time.perf_counter(), 0.0
        for micro in range(accumulation):
            loss += subject.micro_step(*batches[micro % len(batches)])
        subject.update()
        loss.item()  # train.py's host read, which waits for all of it
        return time.perf_counter() - start

    told, expected_s = None, accumulation * statistics.median(seconds[1:])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the compiler's own trials are no part of a step
        told = dict(
            zip(CLOCKS, map(to_number, nvidia_smi(*CLOCKS.values(), work=step)), strict=True)
        )
    else:
        step()  # nor is the first one timed
    graphs = counters["stats"]["unique_graphs"]
    steps_s = [step() for _ in range(min(20, max(2, math.ceil(TIMED_S[device.type] / expected_s))))]
    row = {
        **subject.counts,
        "compile_s": max(0.0, seconds[0] - statistics.median(seconds[1:])),
        "steps_s": steps_s,
        "losses": losses,
        "gradient_norms": norms,
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiles": counters["stats"]["unique_graphs"] - graphs,
        "peak_gib": None,
        "clocks": told,
        "kernels": None,
    }
    if device.type == "cuda":
        row |= {
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "kernels": _kernels(lambda: subject.micro_step(*batches[0])),
        }
    return row


def to_number(text: str | None) -> float | None:
    with suppress(TypeError, ValueError):  # what a GPU does not tell
        return float(int(text, 16) if str(text).startswith("0x") else text)


def _kernels(work: Callable) -> list[tuple[str, float]]:
    """(name, milliseconds) of the kernels of one micro-step, the longest 30 first; none where the
    profiler does not work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        found = [
            (event.key[:160], event.self_device_time_total / 1e3)
            for event in profile.key_averages()
        ]
    except Exception:  # must not cost the row
        traceback.print_exc()
        return []
    return sorted(found, key=lambda row: -row[1])[:30]
