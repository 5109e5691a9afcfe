"""Time training of each size in FP8 against BF16 of the same size, one process a cell, up to four
in FP8 between two in BF16.

    python -m bench.throughput --suite h100 --budget 560  on one GPU what is missing, the most valuable first
    python -m bench.throughput --suite toy                the same path on a CPU: a rehearsal, says nothing about a GPU
    python -m bench.throughput --table                    rows of OUT as Markdown, a figure beside OUT
    python -m bench.throughput --check NEW.jsonl          exit code 1 where a ratio of NEW lost more than 3 % against OUT

A cell builds, compiles and initialises the model as train.py does, takes eight updates on one batch
(their losses and the first gradients are held against BF16's), then times whole optimizer steps:
micro-steps, clipping, AdamW, the step's host read. A row goes to OUT when its cell ends
(bench/results/README.md lists the fields), what the cell printed to a .log beside it. A cell that
fails costs its row alone; where BF16 is out of memory its size is repeated at half the micro-batch.
"""

import ctypes
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn

from fp8 import selection
from fp8.recipes import KERNELS, fp8_overrides
from lib.command import command, run_command
from lib.errors import UserError, memory_error
from lib.files import read_rows, to_line, write_atomically
from lib.machine import GIB, ROOT, nvidia_smi
from lib.text import grid, nearest
from lib.values import FilePath
from runtime.config import Config, load_config
from runtime.log import environment, peak_flops
from runtime.parallel import World, build
from runtime.roofline import MICRO_BATCH, TOKENS_PER_STEP
from runtime.training_step import end_unjudged_step, forward_backward

# Updates on one batch. Later ones fall too fast to be compared: torchao's own recipe was an update
# behind, 0.49 nats, in the twentieth of 1.5B, and in the tenth of 760M BF16's loss rose (on an
# H200).
SANITY_STEPS = 8
# Of the config's peak rate, that these updates rise to: at all of it they learn a small batch by
# heart so fast that FP8's rounding alone is 0.05 to 0.12 nats behind; at a tenth it is 0.01 (2 x
# 128 and 4 x 256 wide, on a CPU).
SANITY_RATE = 0.1
# Of the losses from BF16's: beyond both of these something else is being trained. The second, a
# share of BF16's own fall, is for losses that fall fast, where the same lag is more nats.
MOST_DIFFERENCE, MOST_LAG = 0.05, 0.03
# of the first gradients' norm by kind of parameter: on a CPU within 3 %, a lost gradient is 100 %
# away
MOST_NORM = 0.15
MOST_DRIFT = 0.03  # between the two BF16 cells around an FP8 cell, on a GPU
MOST_LOSS = 0.03  # of a ratio, for --check
CLOCKS = {
    "sm_mhz": "clocks.sm",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "slowed_by": "clocks_event_reasons.active",
}
# NVML's reasons that make a time worthless: hardware slowdown, software or hardware thermal, power
# brake
SLOWED = 0xE8
TIMED_S = {"cuda": 6.0, "cpu": 0.5}  # of whole steps, at least two
# of matmuls before the first cell: a cold GPU's clocks are higher than those of all that follow
WARM_S = 10.0
CELL_LIMIT_S = 420  # a cell that has not ended by then never will
TURN = 4  # FP8 cells, at most, between two of BF16
GUESS_S = 60  # of a cell, until one of its size was timed here
BASELINE = "bf16"
ATTENTION = re.compile(r"^(?!triton).*(sdpa|flash|fmha|attention)", re.IGNORECASE)
FIT = re.compile(r"cudnn|flash.*sm90|sm90.*flash", re.IGNORECASE)  # for Hopper


# ----------------------------------------------------------------------------------- what is timed


@dataclass(frozen=True)
class Cell:
    """One row to be. `size` names configs/gpt<size>_bf16.py, a peer's model, or what `model` spells
    out."""

    size: str
    label: str  # bf16, or a recipe with +kernels, +delayed, +head, +fast_backward; a peer's name
    micro_batch: int  # sequences
    T: int = 1024
    tokens_per_step: int = TOKENS_PER_STEP
    device: str = "cuda"
    # keys of GPTConfig that differ from the size's; a peer's own
    model: dict = field(default_factory=dict)
    peer: str | None = None  # folder of its checkout: bench/peers.py builds it

    @property
    def name(self) -> str:
        return f"{self.size}/{self.label}"


@dataclass
class Subject:
    """A model in memory with its micro-step and update: ours below, the peers' in
    bench/peers.py."""

    model: nn.Module
    vocab: int  # tokens are drawn from range(vocab)
    # x, y (B, T) int64 -> mean loss per token, (), fp32, detached; gradients add up in .grad; no
    # wait for the GPU
    micro_step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    update: Callable[[], None]  # clip, step, zero gradients, as at a step's end
    counts: dict  # flops_per_token, params_total, params_matmul
    describe: list[str] = field(default_factory=list)  # lines for people


TOY = {
    "toy_s": {"n_layer": 1, "n_head": 2, "n_embd": 64, "n_ffn": 128, "vocab_size": 257},
    "toy_m": {"n_layer": 1, "n_head": 2, "n_embd": 128, "n_ffn": 256, "vocab_size": 257},
}
H100 = (  # sizes, and labels to time each of them in; the most valuable first
    (
        "1p5b",
        "tensorwise+kernels tensorwise+kernels+delayed tensorwise+kernels+delayed+head tensorwise",
    ),
    ("760m 350m 125m", "tensorwise+kernels tensorwise+kernels+head"),
    ("1p5b", "tensorwise+kernels+head rowwise"),
    (
        "760m 350m 125m",
        "tensorwise rowwise tensorwise+kernels+delayed tensorwise+kernels+delayed+head",
    ),
    ("125m 1p5b 350m 760m", "auto+kernels tensorwise_gw_hp+kernels rowwise_with_gw_hp"),
    ("1p5b", "tensorwise+kernels+fast_backward rowwise+fast_backward blockwise"),
)


def groups_of(suite: str) -> list[list[Cell]]:
    """Each a BF16 cell, then those that take turns with it."""
    if suite == "toy":
        return [
            [Cell(size, label, 4, 64, 1024, "cpu", TOY[size]) for label in (BASELINE, "tensorwise")]
            for size in TOY
        ]
    return [
        [Cell(size, label, MICRO_BATCH[size]) for label in (BASELINE, *labels.split())]
        for sizes, labels in H100
        for size in sizes.split()
    ]


def config_of(cell: Cell) -> Config:
    """The Config that train.py would be given for a cell of ours. Raises UserError for an unknown
    size, label or key."""
    changes = {f"model.{key}": str(value).lower() for key, value in cell.model.items()}
    changes |= {
        "model.n_ctx": cell.T,
        "data.micro_batch": cell.micro_batch,
        "data.tokens_per_step": cell.tokens_per_step,
        "data.tokenizer": "./none",
        "run": "cell",  # no text is read
        "parallel.compile": "block",
    }  # as studies, as runs on several GPUs
    if cell.label != BASELINE and KERNELS not in cell.label:
        changes["fp8.kernels"] = "false"  # a cell without them measures torchao's casts
    return load_config(
        ROOT / "configs" / f"gpt{'50m' if cell.model else cell.size}_bf16.py",
        [*(f"{key}={value}" for key, value in changes.items()), *fp8_overrides(cell.label)],
    )


def build_ours(cell: Cell, device: torch.device) -> Subject:
    """Our model, built, compiled and initialised as train.py does it; its micro-step and update are
    train.py's lines."""
    config = config_of(cell)
    selection.check_hardware(config.fp8, device)
    built = build(config, World(0, 0, 1, device))
    if cell.label != BASELINE and not any(layer.recipe for layer in built.layers):
        raise UserError(f"{cell.label} converts nothing here: it would be BF16 once more")
    model, optimizer, precision = built.model, built.optimizer, built.precision
    tokens = cell.micro_batch * cell.T
    model.init_weights(config.seed, built.assign)
    precision.after_update()
    precision.set_position(0)
    precision.before_step(built.loss_scale)

    def micro_step(x, y):
        return forward_backward(model, x, y, built.loss_scale) / tokens

    def update():
        end_unjudged_step(model, optimizer, precision, config.optim.clip)
        precision.before_step(built.loss_scale)

    counts = {
        key: model.counts()[key] for key in ("flops_per_token", "params_total", "params_matmul")
    }
    lines = [*built.flags, *selection.table(built.layers, config.fp8.recipe, device.type)]
    return Subject(model, config.model.vocab_size, micro_step, optimizer, update, counts, lines)


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


# -------------------------------------------------------------------------- a cell, in its process


def measure(cell: Cell) -> dict:
    """Everything about a cell that needs no other. Run in a process of its own, which it leaves
    warm and full."""
    from torch._dynamo.utils import counters

    from bench.peers import load  # which imports this module

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
        told = dict(zip(CLOCKS, map(_number, nvidia_smi(*CLOCKS.values(), work=step)), strict=True))
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


def _number(text: str | None) -> float | None:
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


# ---------------------------------------------------------------------------------- cells in turns


class Timer:
    """Times groups of cells on this machine within `budget` seconds; every row is in `out` as soon
    as it is there."""

    def __init__(
        self,
        out: Path,
        device: str,
        budget: float,
        command: str,
        commit: str | None = None,
        again=(),
    ):
        """again: names of cells whose rows do not count as there. Raises UserError where there is
        no GPU."""
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "this needs a CUDA GPU, and torch sees none here: --suite toy rehearses on the CPU"
            )
        self.out, self.budget, self.end = out, budget, time.monotonic() + budget
        env, (driver, limit) = (
            environment(torch.device(device), ROOT),
            nvidia_smi("driver_version", "power.limit"),
        )
        self.head = {
            "run": env["t_start"],
            "command": command,
            "commit": commit or env["git_commit"],
            "dirty": None if commit else env["git_dirty"],
            "gpu": env["device"] if device == "cuda" else None,
            "driver": driver,
            "power_limit_w": _number(limit),
            **{key: env[key] for key in ("torch", "torchao", "triton", "cuda", "cudnn", "python")},
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
        self.here = [
            row
            for row in read_rows(out)
            if row["cell"] not in again
            and (row["gpu"], row["torch"]) == (self.head["gpu"], self.head["torch"])
        ]

    def run(self, groups: list[list[Cell]]) -> None:
        """Time what is due, in this order, as long as there is time."""
        print(f"rows go to {self.out}", flush=True)
        if self.head["gpu"]:
            a, end = (
                torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda"),
                time.monotonic() + WARM_S,
            )
            while time.monotonic() < end:
                (a @ a)[0, 0].item()  # waits for it
        for group in groups:
            self.time_group(group)
        left, open_groups = (
            sum(len(self.due(group)) for group in groups),
            [group for group in groups if self.due(group)],
        )
        needed = [self.estimate(group[0], group[0], self.due(group)[0]) for group in open_groups]
        least = math.ceil(min(needed, default=0) + WARM_S + 1)  # what precedes
        goes_on = (
            "the same command goes on with them"
            if least <= self.budget
            else f"none fits: give budget={least} or more"
        )
        print(f"\n{left} cells are left, {goes_on}" if left else "\nall is timed")

    def due(self, group: list[Cell]) -> list[Cell]:
        """The cells of a group, but for its BF16, that have no row here."""
        done = {row["cell"] for row in self.here if "failure" in row or row["ratio"]}
        return [cell for cell in group[1:] if cell.name not in done]

    def estimate(self, *cells: Cell) -> float:
        """Seconds that these cells may take in all: each as long as the longest of its size did
        here, and a tenth."""
        return sum(
            1.1
            * max((row["wall_s"] for row in self.here if row["size"] == cell.size), default=GUESS_S)
            for cell in cells
        )

    def time_group(self, group: list[Cell]) -> None:
        """Time what is due of a BF16 cell's group and fits into the budget, TURN of them at most
        between two of BF16."""
        baseline, before = group[0], None
        while due := self.due(group):
            if before is None:
                if time.monotonic() + self.estimate(baseline, due[0], baseline) > self.end:
                    break
                before = self.time(baseline)
            if before.get("oom") and baseline.micro_batch > 1:
                group, before = (
                    [replace(cell, micro_batch=cell.micro_batch // 2) for cell in group],
                    None,
                )
                baseline = group[0]
                continue
            if "failure" in before:
                break
            # each asked when its turn comes
            rows = [
                self.time(cell, before, self.estimate(baseline))
                for cell in due[:TURN]
                if time.monotonic() + self.estimate(cell, baseline) <= self.end
            ]
            if not rows:
                break
            if rows := [row for row in rows if "failure" not in row]:
                after = self.time(baseline)
                if "failure" in after:
                    break
                for row in rows:
                    self._add(compared(row, before, after))
                before = after

    def time(self, cell: Cell, baseline: dict | None = None, reserve_s: float = 0.0) -> dict:
        """The row of one cell, timed in a process of its own, with so many seconds left after it;
        not kept where the budget cut it."""
        began = time.monotonic()
        print(f"[{self.end - began:5.0f} s left] {cell.name}", end=" ", flush=True)
        limit_s = min(CELL_LIMIT_S, self.end - began - reserve_s)
        found = run_cell(cell, self.out.with_suffix(".log"), limit_s)
        row = cell_row(cell, found, baseline) | self.head | {"wall_s": time.monotonic() - began}
        if "failure" not in row or row["wall_s"] < limit_s or limit_s == CELL_LIMIT_S:
            self._add(row)
        return row

    def _add(self, row: dict) -> None:
        with open(self.out, "ab") as file:
            file.write(to_line(row))
        self.here.append(row)
        said = (
            row.get("failure")
            or f"{row['tok_per_s']:,.0f} tokens/s, compiled in {row['compile_s']:.0f} s"
        )
        if row["ratio"]:
            said = (
                f"{row['cell']}: {row['ratio']:.3f} x {row['baseline']}, drift {row['drift']:+.1%}"
            )
        print(
            said + f"; INVALID: {row['invalid_because']}" * bool(row["invalid_because"]), flush=True
        )


def run_cell(cell: Cell, log: Path, limit_s: float) -> dict:
    """What the process of a cell answers, {"failure": in words} where it does not; nothing of it is
    left running."""
    prctl = ctypes.CDLL(None).prctl
    with open(log, "a") as words, tempfile.TemporaryDirectory() as scratch:
        print(f"\n==== {cell}", file=words, flush=True)
        answer = Path(scratch) / "row.json"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.throughput",
                "--cell",
                json.dumps(asdict(cell)),
                str(answer),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
            preexec_fn=lambda: prctl(1, signal.SIGKILL),
        )  # it ends with this process
        try:
            process.wait(limit_s)
            return json.loads(answer.read_bytes())
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {limit_s:.0f} s"}
        except OSError:
            return {
                "failure": (
                    f"exit code {process.returncode} without an answer; its words are in {log}"
                )
            }
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the compiler's workers too
            process.wait()


def cell_row(cell: Cell, found: dict, baseline: dict | None) -> dict:
    """The row of a cell but for what Timer knows; `baseline`: BF16's row, which the losses of ours
    must be close to."""
    row = {
        "cell": cell.name,
        **asdict(cell),
        "ratio": None,
        "drift": None,
        "baseline": None,
        **found,
        "valid": False,
        "invalid_because": None,
    }
    if "failure" in found:
        return row
    step_s = statistics.fmean(found["steps_s"])
    rate = cell.tokens_per_step / step_s
    flops = found["flops_per_token"] * rate
    peak = peak_flops(torch.cuda.get_device_name()) if cell.device == "cuda" else None
    attention = next((name for name, _ in found["kernels"] or () if ATTENTION.search(name)), None)
    row |= {
        "step_ms": 1e3 * step_s,
        "tok_per_s": rate,
        "tflops": flops / 1e12,
        "mfu_bf16": flops / peak[0] if peak else None,
        "attention_kernel": attention,
        "loss_difference": None,
    }
    row["invalid_because"] = (
        "; ".join(problems(row, baseline if cell.peer is None else None)) or None
    )
    return row | {"valid": row["invalid_because"] is None}


def problems(row: dict, twin: dict | None) -> Iterator[str]:
    """Why a row is no evidence; twin: BF16's, from which the loss_difference is taken."""
    losses = np.array(row["losses"], float)  # null, as JSON has it for infinite and NaN, is NaN
    if not np.isfinite(losses).all():
        yield "a loss is not finite"
    elif losses[-1] >= losses[0]:
        yield f"its loss does not fall on a fixed batch ({losses[0]:.4f} to {losses[-1]:.4f})"
    elif twin:
        theirs = np.array(twin["losses"], float)
        row["loss_difference"] = float(abs(losses - theirs).max())
        most = max(MOST_DIFFERENCE, MOST_LAG * (theirs[0] - theirs.min()))
        if not row["loss_difference"] <= most:
            yield f"its loss is {row['loss_difference']:.3f} away from BF16's, more than {most:.3f}"
        for kind, norm in twin["gradient_norms"].items():
            ours = row["gradient_norms"].get(kind)
            if ours != norm and not (ours and norm and abs(ours / norm - 1) <= MOST_NORM):
                yield f"the gradient of {kind} has a norm of {ours}, BF16's has {norm}"
    if row["peer"] is None and (row["graph_breaks"] or row["recompiles"]):
        yield (
            f"{row['graph_breaks']} graph breaks and {row['recompiles']} recompilations in a step"
            " that must have none"
        )
    if (
        twin is None
        and (name := row["attention_kernel"])
        and not FIT.search(name)
        and row["device"] == "cuda"
    ):
        yield (
            f"its attention is neither cuDNN's nor FlashAttention 3's but {name[:80]}: a slow BF16"
            " flatters FP8"
        )
    if int((row["clocks"] or {}).get("slowed_by") or 0) & SLOWED:
        yield "the GPU was slowed down by heat or power"


def compared(row: dict, before: dict, after: dict) -> dict:
    """A cell's row with its speed per FLOP over the mean of the BF16 cells before and after it."""
    drift, why = after["tok_per_s"] / before["tok_per_s"] - 1, [row["invalid_because"]]
    if row["device"] == "cuda" and abs(drift) > MOST_DRIFT:
        why.append(f"BF16 drifted by {drift:+.1%} meanwhile")
    why += [
        f"its BF16 is invalid: {one['invalid_because']}"
        for one in (before, after)
        if not one["valid"]
    ][:1]
    return row | {
        "ratio": 2 * row["tflops"] / (before["tflops"] + after["tflops"]),
        "drift": drift,
        "baseline": f"{before['size']} {before['label']}",
        "valid": not any(why),
        "invalid_because": "; ".join(filter(None, why)) or None,
    }


# -------------------------------------------------------------------------------- reading the rows


def rows_of(path: Path) -> list[dict]:
    """Raises UserError where there is no such file."""
    if not path.is_file():
        raise UserError(f"there is no {path}: give a file that this benchmark has written")
    return read_rows(path)


def newest(rows: list[dict]) -> dict[tuple, dict]:
    """The last row of each cell by (gpu, cell), those of a size together, BF16 first."""
    last = {(row["gpu"], row["cell"]): row for row in rows}
    return dict(sorted(last.items(), key=lambda item: model_of(item[1])))


def model_of(row: dict) -> str:
    """The size of ours that a row belongs to."""
    return (row["baseline"] or row["size"]).split()[0]


def table(rows: list[dict]) -> str:
    """The newest rows as Markdown: what was measured, what does not count and why, where it comes
    from."""
    columns = {
        "size": "",
        "label": "",
        "T": "",
        "micro_batch": "",
        "tok_per_s": ",.0f",
        "step_ms": ",.1f",
        "mfu_bf16": ".1%",
        "ratio": ".3f",
        "drift": "+.1%",
        "peak_gib": ".1f",
        "compile_s": ".0f",
        "loss_difference": ".4f",
    }
    shown, parts = list(newest(rows).values()), []
    for gpu in dict.fromkeys(row["gpu"] for row in shown):
        here = [row for row in shown if row["gpu"] == gpu]
        lines = [
            ["" if row[name] is None else format(row[name], form) for name, form in columns.items()]
            for row in here
            if row["valid"]
        ]
        notes = [
            f"- not counted: {row['cell']}: {row.get('failure') or row['invalid_because']}"
            for row in here
            if not row["valid"]
        ]
        notes += dict.fromkeys(
            f"- {row['run']}: commit"
            f" {str(row['commit'])[:10]}{' with changes' * bool(row['dirty'])}, driver"
            f" {row['driver']}, torch {row['torch']}, torchao {row['torchao']}; `{row['command']}`"
            for row in here
        )
        notes += sorted(
            {
                f"- attention: `{row['attention_kernel']}`"
                for row in here
                if row.get("attention_kernel")
            }
        )
        parts += [
            f"## {gpu or 'No GPU: a rehearsal, its times say nothing about one'}",
            grid([list(columns), *lines]),
            "\n".join(notes),
        ]
    return "\n\n".join(parts) or "Nothing has been measured."


def draw(rows: list[dict], path: Path) -> None:
    """A figure of the valid rows of the newest row's GPU, if there are any: speed per FLOP over
    BF16, by size."""
    import matplotlib

    from lib.plots import RC, STYLES, render, sheet

    shown = [
        row
        for row in newest(rows).values()
        if row["valid"] and row["ratio"] and row["gpu"] == rows[-1]["gpu"]
    ]
    if not shown:
        return
    cost = {model_of(row): row["flops_per_token"] for row in shown}
    sizes = sorted(cost, key=cost.get)
    with matplotlib.rc_context(RC):
        figure, ((panel,),) = sheet(
            (7.4, 3.2),
            1,
            1,
            f"Training speed on {shown[0]['gpu'] or 'a CPU (a rehearsal)'}, T={shown[0]['T']}",
            "Each between two BF16 runs on one device; per model FLOP (6 a matmul parameter + 12 L"
            " H D T per token).",
        )
        for i, label in enumerate(dict.fromkeys(row["label"] for row in shown)):
            turn, style = divmod(i, len(STYLES) - 1)
            # blue is BF16's
            look = {
                key: STYLES[1 + style][key] for key in ("color", "marker", "linestyle", "linewidth")
            }
            points = sorted(
                (sizes.index(model_of(row)), row["ratio"]) for row in shown if row["label"] == label
            )
            panel.plot(
                *zip(*points, strict=True),
                label=label,
                **look,
                fillstyle="none" if turn else "full",
            )
        panel.axhline(1.0, color="#999999", linewidth=0.8)
        panel.set_xticks(range(len(sizes)), sizes)
        panel.set(xlabel="model", ylabel="speed over BF16, per FLOP", xlim=(-0.4, len(sizes) - 0.6))
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        write_atomically(path, render(figure, "png"))


def check(old: list[dict], new: list[dict]) -> list[str]:
    """What the new rows lost against the old: valid cells, ratios by more than MOST_LOSS;
    everything, if none is in both."""
    before, now = newest(old), newest(new)
    both = [key for key in before if key in now and before[key]["valid"]]
    lost = [
        f"{key}: valid before, now {now[key].get('failure') or now[key]['invalid_because']}"
        for key in both
        if not now[key]["valid"]
    ]
    ratios = [
        (key, before[key]["ratio"], now[key]["ratio"])
        for key in both
        if before[key]["ratio"] and now[key]["ratio"]
    ]
    lost += [
        f"{key}: {a:.3f} before, {b:.3f} now ({b / a - 1:+.1%})"
        for key, a, b in ratios
        if b < a * (1 - MOST_LOSS)
    ]
    return lost or ([] if ratios else ["no ratio is in both files: nothing was compared"])


# ------------------------------------------------------------------------------------- the command


@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["h100", "toy"] = "h100"  # what to time: on one GPU, or a rehearsal on a CPU
    budget: float = 560.0  # seconds after which nothing runs any more
    # JSON lines that receive the rows; none = a file of the suite's name in bench/results
    out: FilePath | None = None
    # time only these, as SIZE/LABEL, though they have rows; () = all that have none
    cells: tuple[str, ...] = ()
    commit: str | None = None  # of these files, where git does not tell it
    table: bool = False  # print the rows of OUT, draw the figure beside it
    check: FilePath | None = None  # JSON lines to hold against OUT


def main(arguments: list[str]) -> int:
    # the process of a cell, given as JSON: writes its row, or a "failure", to a file
    if arguments[:1] == ["--cell"]:
        try:
            row = measure(Cell(**json.loads(arguments[1])))
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
            row = {"failure": said, "oom": memory_error(error) is not None}
        Path(arguments[2]).write_bytes(to_line(row))
        return 0
    return run(__doc__, "throughput", Options, arguments, lambda options: groups_of(options.suite))


def run(
    doc: str,
    name: str,
    cls: type,
    arguments: list[str],
    groups_for: Callable[[Options], list[list[Cell]]],
) -> int:
    """The command bench/<name>.py. Returns the exit code: 0 done or out of budget, 1 a check
    failed, 2 the user's mistake."""

    def work(options: Options) -> int | str:
        file = f"{options.suite}.jsonl" if name == "throughput" else f"{options.suite}_{name}.jsonl"
        out, cells = Path(options.out or ROOT / "bench" / "results" / file), options.cells
        if options.check:
            lost = check(rows_of(out), rows_of(Path(options.check)))
            print("\n".join(lost) or f"{options.check} has lost nothing against {out}")
            return 1 if lost else 0
        if not options.table:
            groups = groups_for(options)
            known = [cell.name for _, *members in groups for cell in members]
            if wrong := next((cell for cell in cells if cell not in known), None):
                raise UserError(
                    f"cells={wrong!r} is no FP8 cell of this suite{nearest(wrong, known)}"
                )
            groups = [
                [group[0], *(cell for cell in group[1:] if not cells or cell.name in cells)]
                for group in groups
            ]
            told = shlex.join(["python", "-m", f"bench.{name}", *arguments])
            Timer(out, groups[0][0].device, options.budget, told, options.commit, cells).run(groups)
        rows, figure = rows_of(out), out.with_suffix(".png")
        with suppress(ImportError):  # a machine for an hour may lack matplotlib
            draw(rows, figure)
        return f"\n{table(rows)}\n" + f"\n{figure}" * figure.exists()

    return command(doc, cls)(work)(arguments)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
