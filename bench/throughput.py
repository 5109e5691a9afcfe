"""Time training of each size in FP8 against BF16 of the same size, one process a cell, in turns BF16, FP8, BF16, FP8, BF16.

    python -m bench.throughput --suite h100 --budget 560        on one GPU what is missing, the most valuable first
    python -m bench.throughput --suite h100 cells=125m/tensorwise           these cells, though they have rows
    python -m bench.throughput --suite toy                      the same path on a CPU: a rehearsal, says nothing about a GPU
    python -m bench.throughput --table                          rows of OUT as Markdown, a figure beside OUT
    python -m bench.throughput --check NEW.jsonl                exit code 1 where a ratio of NEW lost more than 3 % against OUT

A cell builds, compiles and initialises the model as train.py does, takes 20 updates on one batch (their losses and the first
gradients are held against BF16's), then times whole optimizer steps: micro-steps, clipping, AdamW, the step's host read. A row
goes to OUT when its cell ends (bench/results/README.md lists the fields), what the cell printed to a .log beside it. A cell that
fails costs its row alone; where BF16 is out of memory its size is repeated at half the micro-batch.
"""

import ctypes
import json
import math
import os
import re
import secrets
import shlex
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn

from model import GPT
from runtime import fp8, parallel
from runtime.cli import UserError, command, grid, nearest, run_command
from runtime.config import Config, fp8_overrides, load_config
from runtime.log import environment, peak_flops
from runtime.machine import GIB, memory_error, nvidia_smi, read_rows, to_line, write_atomically
from runtime.parallel import World, build
from runtime.roofline import MICRO_BATCH, TOKENS_PER_STEP

ROOT = Path(__file__).resolve().parents[1]
SANITY_STEPS = 20
# Of the config's peak rate, that the 20 updates rise to: at all of it they learn a small batch by heart so fast that FP8's
# rounding alone is 0.05 to 0.12 nats behind; at a tenth it is 0.01 (2 x 128 and 4 x 256 wide, on a CPU).
SANITY_RATE = 0.1
# Of the 20 losses from BF16's: beyond both of these something else is being trained. The second, a share of BF16's own fall, is
# for losses that fall fast, where the same lag is more nats.
MOST_DIFFERENCE, MOST_LAG = 0.05, 0.03
# Of the first gradients' norm of each kind of parameter from BF16's: every recipe was within 3 % (2 x 128, 4 x 256, 6 x 384 wide,
# three seeds, on a CPU); a lost gradient is 100 % away.
MOST_NORM = 0.15
MOST_DRIFT = 0.03       # between the two BF16 cells around an FP8 cell, on a GPU
MOST_LOSS = 0.03        # of a ratio, for --check
CLOCKS = {"sm_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu",
          "slowed_by": "clocks_event_reasons.active"}
SLOWED = 0xE8           # NVML's reasons that make a time worthless: hardware slowdown, software or hardware thermal, power brake
TIMED_S = {"cuda": 10.0, "cpu": 0.5}        # of whole steps, at least two
WARM_S = 20.0           # of matmuls before the first cell: a cold GPU's clocks are higher than those of all that follow
CELL_LIMIT_S = 420      # a cell that has not ended by then never will
GUESS_S = {"125m": 75, "350m": 100, "760m": 110, "1p5b": 150}      # of a cell, until one of the size was timed here
BASELINE = "bf16"
VERSIONS = ("torch", "torchao", "triton", "cuda", "cudnn", "python")
ATTENTION = re.compile(r"^(?!triton).*(sdpa|flash|fmha|attention)", re.IGNORECASE)
FIT = re.compile(r"cudnn|flash.*sm90|sm90.*flash", re.IGNORECASE)       # for Hopper


# --------------------------------------------------------------------------------------------------------- what is timed

@dataclass(frozen=True)
class Cell:
    """One row to be. `size` names configs/gpt<size>_bf16.py, a peer's model, or what `model` spells out."""
    size: str
    label: str                      # bf16, bf16_eager, a recipe with +kernels, +delayed, +head, +fast_backward; a peer's name
    micro_batch: int                # sequences
    T: int = 1024
    tokens_per_step: int = TOKENS_PER_STEP
    device: str = "cuda"
    model: dict | None = None       # keys of GPTConfig that differ from the size's; for a peer, of its own
    peer: str | None = None         # folder of its checkout: bench/peers.py builds it

    @property
    def key(self) -> tuple:
        return self.size, self.label, self.T


@dataclass
class Subject:
    """A model in memory with its micro-step and update: ours below, the peers' in bench/peers.py."""
    model: nn.Module
    vocab: int                      # tokens are drawn from range(vocab)
    # x, y (B, T) int64 -> mean loss per token, (), fp32, detached; gradients add up in .grad; no wait for the GPU
    micro_step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizers: list[torch.optim.Optimizer]
    update: Callable[[], None]      # clip, step, zero gradients, as at a step's end
    counts: dict                    # flops_per_token, params_total, params_matmul
    describe: list[str] = field(default_factory=list)       # lines for people


TOY = {"toy_s": {"n_layer": 1, "n_head": 2, "n_embd": 64, "n_ffn": 128, "vocab_size": 257},
       "toy_m": {"n_layer": 1, "n_head": 2, "n_embd": 128, "n_ffn": 256, "vocab_size": 257}}
GROUPS = {      # (size, labels) in the order of their value
    "h100": (("1p5b", ("tensorwise+kernels", "tensorwise+kernels+head", "tensorwise+kernels+delayed")),
             *((size, ("tensorwise+kernels", "tensorwise+kernels+delayed")) for size in ("350m", "760m", "125m")),
             *((size, ("tensorwise", "rowwise")) for size in ("1p5b", "350m", "760m", "125m")),
             *((size, ("auto+kernels", "tensorwise_gw_hp+kernels", "rowwise_with_gw_hp"))
               for size in ("125m", "1p5b", "350m", "760m")),
             *((size, ("tensorwise+kernels+head",)) for size in ("125m", "350m", "760m")),
             *((size, ("tensorwise+kernels+delayed+head",)) for size in ("1p5b", "125m", "350m", "760m")),
             ("1p5b", ("tensorwise+kernels+fast_backward", "rowwise+fast_backward", "blockwise"))),
    "toy": (("toy_s", ("tensorwise",)), ("toy_m", ("tensorwise",)))}


def groups_of(suite: str) -> list[list[Cell]]:
    """Each a BF16 cell, then those that take turns with it."""
    if suite == "toy":
        return [[Cell(size, label, 4, 64, 1024, "cpu", TOY[size]) for label in (BASELINE, *labels)]
                for size, labels in GROUPS["toy"]]
    return [[Cell(size, label, MICRO_BATCH[size]) for label in (BASELINE, *labels)] for size, labels in GROUPS[suite]]


def config_of(cell: Cell) -> Config:
    """The Config that train.py would be given for a cell of ours. Raises UserError for an unknown size, label or key."""
    base = ROOT / "configs" / f"gpt{'50m' if cell.model else cell.size}_bf16.py"
    changes = {f"model.{key}": value for key, value in (cell.model or {}).items()}
    changes |= {"model.n_ctx": cell.T, "data.micro_batch": cell.micro_batch, "data.tokens_per_step": cell.tokens_per_step,
                "run": "cell", "data.tokenizer": "./synthetic" if "model.vocab_size" in changes else "gpt2"}     # nothing is read
    changes["parallel.compile"] = "off" if cell.label == "bf16_eager" else "block"      # as studies, as runs on several GPUs
    return load_config(base, [*(f"{key}={str(value).lower() if value is True or value is False else value}"
                                for key, value in changes.items()), *fp8_overrides(cell.label.removesuffix("_eager"))])


def is_bf16(cell: Cell, gpu: str | None) -> bool:
    """Whether fp8.recipe=auto would convert nothing on this GPU: the cell would be BF16 once more."""
    if cell.peer or cell.label.split("+")[0] != "auto":
        return False
    config = config_of(cell)
    with torch.device("meta"):
        layers = fp8.select(GPT(config.model), config.fp8, gpu)
    return not any(layer.recipe for layer in layers)


def build_ours(cell: Cell, device: torch.device) -> Subject:
    """Our model, built, compiled and initialised as train.py does it; its micro-step and update are train.py's lines."""
    config = config_of(cell)
    fp8.check_hardware(config.fp8, device)
    built = build(config, World(0, 0, 1, device))
    model, optimizer, step_scale, tokens = built.model, built.optimizer, built.loss_scale, cell.micro_batch * cell.T
    model.init_weights(config.seed, built.assign)
    fp8.refresh_weight_copies(model)
    fp8.set_position(model, 0)
    built.scales.begin(step_scale)

    def micro_step(x, y):
        micro_loss = model(x, y).sum()
        (micro_loss * step_scale).backward()
        return micro_loss.detach() / tokens

    def update():
        parallel.clip_gradients(model, config.optim.clip)
        built.scales.end(step_scale)
        optimizer.step()
        fp8.refresh_weight_copies(model)
        fp8.zero_gradients(model)
        built.scales.begin(step_scale)

    counts = {key: built.counts[key] for key in ("flops_per_token", "params_total", "params_matmul")}
    lines = [*built.flags, *fp8.table(built.layers, config.fp8.recipe, device.type)]
    return Subject(model, config.model.vocab_size, micro_step, [optimizer], update, counts, lines)


def tokens_like_text(sequences: int, T: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y (sequences, T) int64: random tokens, the k-th as frequent as 1 / (k + 2.7), as words are in text (Mandelbrot's form of
    Zipf's law): there is something to learn, and the embedding's gradient meets its tokens as often as in training."""
    frequencies = 1.0 / (torch.arange(vocab, dtype=torch.float64) + 2.7)
    drawn = torch.multinomial(frequencies, sequences * (T + 1), replacement=True, generator=torch.Generator().manual_seed(0))
    t = drawn.view(sequences, T + 1)
    return t[:, :-1].contiguous().to(device), t[:, 1:].contiguous().to(device)


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """L2 norm of the gradients of each kind of parameter: layers.3.attn.qkv.weight is of the kind layers.*.attn.qkv.weight."""
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        kind = re.sub(r"\.\d+\.", ".*.", name.replace("_orig_mod.", ""))
        norm = 0.0 if p.grad is None else torch.linalg.vector_norm(p.grad, dtype=torch.float64).item()
        squares[kind] = squares.get(kind, 0.0) + norm**2
    return {kind: math.sqrt(square) for kind, square in squares.items()}


# ------------------------------------------------------------------------------------------------- a cell, in its process

def measure(cell: Cell) -> dict:
    """Everything about a cell that needs no other. Run in a process of its own, which it leaves warm and full."""
    device = torch.device("cuda", 0) if cell.device == "cuda" else torch.device("cpu")
    from torch._dynamo.utils import counters
    began = time.perf_counter()
    if cell.peer is None:
        subject = build_ours(cell, device)
    else:
        from bench.peers import load  # which imports this module

        subject = load(cell, device)
    accumulation = cell.tokens_per_step // (cell.micro_batch * cell.T)
    x, y = tokens_like_text(4 * cell.micro_batch, cell.T, subject.vocab, device)
    batches = list(zip(x.split(cell.micro_batch), y.split(cell.micro_batch), strict=True))
    built = time.perf_counter()

    losses, seconds, norms, wait = [], [], None, torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rates = [(group, group["lr"]) for optimizer in subject.optimizers for group in optimizer.param_groups]
    for i in range(SANITY_STEPS):       # on one batch, which stands for all of a step's
        start = time.perf_counter()
        for group, rate in rates:
            group["lr"] = rate * SANITY_RATE * (i + 1) / SANITY_STEPS
        losses.append(subject.micro_step(*batches[0]).item())
        norms = norms or gradient_norms(subject.model)
        torch._foreach_mul_([p.grad for p in subject.model.parameters() if p.grad is not None], float(accumulation))
        subject.update()
        wait()
        seconds.append(time.perf_counter() - start)
    print("\n".join(subject.describe), file=sys.stderr)

    def step() -> float:
        start, loss = time.perf_counter(), 0.0
        for micro in range(accumulation):
            loss += subject.micro_step(*batches[micro % len(batches)])
        subject.update()
        loss.item()             # train.py's host read
        wait()
        return time.perf_counter() - start

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()        # the compiler's own trials are no part of a step
    first, graphs = step(), counters["stats"]["unique_graphs"]
    steps_s = [step() for _ in range(min(20, max(2, math.ceil(TIMED_S[device.type] / first))))]
    row = {**subject.counts, "build_s": built - began, "compile_s": max(0.0, seconds[0] - statistics.median(seconds[1:])),
           "steps_s": steps_s, "losses": losses, "gradient_norms": norms, "graph_breaks": sum(counters["graph_break"].values()),
           "recompiles": counters["stats"]["unique_graphs"] - graphs, "peak_gib": None, "clocks": None, "kernels": None}
    if device.type == "cuda":
        row |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
                "clocks": dict(zip(CLOCKS, map(_number, nvidia_smi(*CLOCKS.values(), work=step)), strict=True)),
                "kernels": _kernels(lambda: subject.micro_step(*batches[0]))}
    return row


def _number(text: str | None) -> float | None:
    with suppress(TypeError, ValueError):       # what a GPU does not tell
        return float(int(text, 16) if str(text).startswith("0x") else text)


def _kernels(work: Callable) -> list[tuple[str, float]] | None:
    """(name, milliseconds) of the kernels of one micro-step, the longest 30 first; None where the profiler does not work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        found = [(event.key[:160], event.self_device_time_total / 1e3) for event in profile.key_averages()]
    except Exception as error:
        print(f"no profile: {error}", file=sys.stderr)
        return None
    return sorted(found, key=lambda row: -row[1])[:30] or None


def cell_main(text: str) -> int:
    """The process of a cell: one JSON line on stdout, all else on stderr; exit code 1 with a "failure" in the line."""
    answer = os.dup(1)
    os.dup2(2, 1)               # whatever else prints, from C++ too
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # it ends with the process that asked
    try:
        row, code = measure(Cell(**json.loads(text))), 0
    except Exception as error:
        traceback.print_exc()
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "without a word")
        row, code = {"failure": f"{type(error).__name__}: {said}"[:400], "oom": memory_error(error) is not None}, 1
    os.write(answer, to_line(row))
    return code


# -------------------------------------------------------------------------------------------------------- cells in turns

class OutOfBudget(Exception):
    """The time is over; what was being timed is lost, no row of it is written."""


class Timer:
    """Times groups of cells on this machine within `budget` seconds; every row is in `out` as soon as it is there."""

    def __init__(self, out: Path, device: str, budget: float, command: str, commit: str | None = None):
        self.out, self.end = out, time.monotonic() + budget
        on_gpu = device == "cuda"
        env = environment(torch.device(device, 0) if on_gpu else torch.device("cpu"), ROOT)
        driver, limit = nvidia_smi("driver_version", "power.limit") if on_gpu else (None, None)
        self.head = {"kind": "cell", "run": f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}",
                     "command": command, "commit": env["git_commit"] or commit, "dirty": env["git_dirty"],
                     "gpu": env["device"] if on_gpu else None, "cpu": None if on_gpu else env["device"], "driver": driver,
                     "power_limit_w": _number(limit), **{key: env[key] for key in VERSIONS}}
        self.is_cold = on_gpu
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "ab") as file:
            file.write(b"" if out.read_bytes()[-1:] in (b"", b"\n") else b"\n")      # after a line that a kill cut short
        self.here = [row for row in rows_of(out) if (row["gpu"], row["torch"]) == (self.head["gpu"], self.head["torch"])]

    def time_group(self, group: list[Cell], again: bool = False) -> int:
        """Time those of a BF16 cell's group that have no row here (`again`: all), each between two of BF16; returns how many
        are left. Raises OutOfBudget."""
        baseline, *due = group
        done = {(row["size"], row["label"], row["T"]) for row in self.here if "failure" in row or row["ratio"]}
        due, before = [cell for cell in due if again or cell.key not in done], None
        for cell in [cell for cell in due if is_bf16(cell, self.head["gpu"])]:
            print(f"{cell.size} {cell.label}: left out, auto converts nothing here and would be BF16", flush=True)
            due.remove(cell)
        while due:
            needs = self._guess_s(due[0]) + self._guess_s(baseline) * (1 if before else 2)
            if time.monotonic() + needs > self.end:
                break
            before = before or self.time(baseline)
            if before.get("oom") and baseline.micro_batch > 1:
                return self.time_group([replace(cell, micro_batch=cell.micro_batch // 2) for cell in (baseline, *due)], True)
            if "failure" in before:
                break
            row = self.time(due.pop(0), before)
            if "failure" not in row:
                after = self.time(baseline)
                if "failure" in after:
                    break
                self._add(compared(row, before, after))
                before = after
        return len(due)

    def time(self, cell: Cell, baseline: dict | None = None) -> dict:
        """The row of one cell, timed in a process of its own. Raises OutOfBudget."""
        if self.is_cold:
            warm_up()
            self.is_cold = False
        began, name = time.monotonic(), f"{cell.size} {cell.label}"
        print(f"[{self.end - began:5.0f} s left] {name}", end=" ", flush=True)
        found = run_cell(cell, self.out.with_suffix(".log"), min(CELL_LIMIT_S, self.end - began))
        if "failure" in found and time.monotonic() >= self.end:
            raise OutOfBudget
        row = cell_row(cell, found, baseline) | self.head | {"t": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                                                            "wall_s": time.monotonic() - began}
        self._add(row)
        return row

    def _add(self, row: dict) -> None:
        with open(self.out, "ab") as file:
            file.write(to_line(row))
        self.here.append(row)
        said = f"FAILED: {row['failure']}" if "failure" in row else (
            f"{row['tok_per_s']:,.0f} tokens/s, compiled in {row['compile_s']:.0f} s" if row["ratio"] is None else
            f"{' ' * 14} {row['size']} {row['label']}: {row['ratio']:.3f} x {row['baseline']}, drift {row['drift']:+.1%}")
        print(said + f"; INVALID: {row['invalid_because']}" * (not row["valid"] and "failure" not in row), flush=True)

    def _guess_s(self, cell: Cell) -> float:
        return 1.1 * max((row["wall_s"] for row in self.here if row["size"] == cell.size), default=GUESS_S.get(cell.size, 30))


def warm_up() -> None:
    """Keep the GPU busy for WARM_S."""
    a, end = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda"), time.monotonic() + WARM_S
    while time.monotonic() < end:
        a @ a
        torch.cuda.synchronize()
    del a
    torch.cuda.empty_cache()


def run_cell(cell: Cell, log: Path, limit_s: float) -> dict:
    """What the process of a cell answers, {"failure": in words} where it does not; nothing of it is left running."""
    with open(log, "a") as words:
        words.write(f"\n==== {json.dumps(asdict(cell))}\n")
        words.flush()
        process = subprocess.Popen([sys.executable, "-m", "bench.throughput", "--cell", json.dumps(asdict(cell))], cwd=ROOT,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, start_new_session=True)
        try:
            answer = json.loads(process.communicate(timeout=limit_s)[0])
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {limit_s:.0f} s"}
        except ValueError:
            return {"failure": f"exit code {process.returncode} without an answer; its words are in {log}"}
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)      # the compiler's workers too
            process.communicate()
    return answer


def cell_row(cell: Cell, found: dict, baseline: dict | None) -> dict:
    """The row of a cell but for what Timer knows; `baseline`: BF16's row, which the losses of ours must be close to."""
    row = {**asdict(cell), "ratio": None, "drift": None, "baseline": None, **found, "valid": False, "invalid_because": None}
    if "failure" in found:
        return row
    step_s = statistics.fmean(found["steps_s"])
    rate = cell.tokens_per_step / step_s
    peak = peak_flops(torch.cuda.get_device_name(0)) if cell.device == "cuda" else None
    row |= {"step_ms": 1e3 * step_s, "tok_per_s": rate, "tflops": found["flops_per_token"] * rate / 1e12,
            "mfu_bf16": found["flops_per_token"] * rate / peak[0] if peak else None,
            "attention_kernel": next((name for name, _ in found["kernels"] or () if ATTENTION.search(name)), None)}
    is_twin = baseline is not None and cell.peer is None
    row["loss_difference"] = max(abs(a - b) for a, b in zip(found["losses"], baseline["losses"], strict=True)) if is_twin and all(
        isinstance(loss, float) for loss in found["losses"] + baseline["losses"]) else None
    row["invalid_because"] = "; ".join(problems(row, baseline if is_twin else None)) or None
    return row | {"valid": row["invalid_because"] is None}


def problems(row: dict, twin: dict | None) -> Iterator[str]:
    """Why a row is no evidence."""
    losses = row["losses"]
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        yield "a loss is not finite"
    elif losses[-1] >= losses[0]:
        yield f"its loss does not fall on a fixed batch ({losses[0]:.4f} to {losses[-1]:.4f})"
    elif row["loss_difference"] is not None:
        most = max(MOST_DIFFERENCE, MOST_LAG * (twin["losses"][0] - min(twin["losses"])))
        if row["loss_difference"] > most:
            yield f"its loss is {row['loss_difference']:.3f} away from BF16's, more than {most:.3f}"
        for kind, norm in twin["gradient_norms"].items():
            ours = row["gradient_norms"].get(kind)
            if ours != norm and not (ours and norm and abs(ours / norm - 1) <= MOST_NORM):
                yield f"the gradient of {kind} has a norm of {ours}, BF16's has {norm}"
    if row["peer"] is None and (row["graph_breaks"] or row["recompiles"]):
        yield f"{row['graph_breaks']} graph breaks and {row['recompiles']} recompilations in a step that must have none"
    if twin is None and (name := row["attention_kernel"]) and not FIT.search(name) and row["device"] == "cuda":
        yield f"its attention is neither cuDNN's nor FlashAttention 3's but {name[:80]}: a slow BF16 flatters FP8"
    if int((row["clocks"] or {}).get("slowed_by") or 0) & SLOWED:
        yield "the GPU was slowed down by heat or power"


def compared(row: dict, before: dict, after: dict) -> dict:
    """A cell's row with its speed per FLOP over the mean of the BF16 cells before and after it."""
    mean = (before["tflops"] + after["tflops"]) / 2
    drift, why = after["tok_per_s"] / before["tok_per_s"] - 1, [row["invalid_because"]] if row["invalid_because"] else []
    if row["device"] == "cuda" and abs(drift) > MOST_DRIFT:
        why.append(f"BF16 drifted by {drift:+.1%} meanwhile")
    why += [f"its BF16 is invalid: {one['invalid_because']}" for one in (before, after) if not one["valid"]][:1]
    return row | {"ratio": row["tflops"] / mean, "drift": drift, "baseline": f"{before['size']} {before['label']}",
                  "valid": not why, "invalid_because": "; ".join(why) or None}


# ------------------------------------------------------------------------------------------------------- reading the rows

def rows_of(path: Path) -> list[dict]:
    """Raises UserError where there is no such file."""
    if not path.is_file():
        raise UserError(f"there is no {path}: give a file that this benchmark has written")
    return [row for row in read_rows(path) if isinstance(row, dict) and row.get("kind") == "cell"]


def newest(rows: list[dict]) -> list[dict]:
    """The last row of each cell on each GPU, BF16 before what took turns with it."""
    last = {(row["gpu"], row["size"], row["label"], row["T"]): row for row in rows}
    return sorted(last.values(), key=lambda row: (str(row["gpu"]), row["T"], (row["baseline"] or row["size"]).split()[0],
                                                  row["label"] != BASELINE))


def table(rows: list[dict]) -> str:
    """The newest rows as Markdown: what was measured, what does not count and why, where it comes from."""
    shown, parts = newest(rows), []
    for gpu in dict.fromkeys(row["gpu"] for row in shown):
        here = [row for row in shown if row["gpu"] == gpu]
        columns = (("size", ""), ("label", ""), ("T", ""), ("micro_batch", ""), ("tok_per_s", ",.0f"), ("step_ms", ",.1f"),
                   ("tflops", ".3g"), ("mfu_bf16", ".1%"), ("ratio", ".3f"), ("drift", "+.1%"), ("peak_gib", ".1f"),
                   ("compile_s", ".0f"), ("loss_difference", ".4f"))
        lines = [[name for name, _ in columns]] + [
            ["" if row[name] is None else format(row[name], form) for name, form in columns] for row in here if row["valid"]]
        parts += [f"## {gpu or 'No GPU: a rehearsal, its times say nothing about one'}", grid(lines)]
        parts += ["\n".join(f"- not counted: {row['size']} {row['label']}: {row.get('failure') or row['invalid_because']}"
                            for row in here if not row["valid"])]
        origins = dict.fromkeys(
            f"- {row['run']}: commit {str(row['commit'])[:10]}{' with changes' * bool(row['dirty'])}, driver {row['driver']}, "
            f"torch {row['torch']}, torchao {row['torchao']}; `{row['command']}`" for row in here)
        attention = sorted({f"- attention: `{row['attention_kernel']}`" for row in here if row.get("attention_kernel")})
        parts += ["\n".join([*origins, *attention])]
    return "\n\n".join(filter(None, parts)) or "Nothing has been measured."


def draw(rows: list[dict], path: Path) -> bool:
    """A figure of the valid rows of the newest row's GPU and T: speed per FLOP over BF16, by size; False where there are none."""
    import matplotlib

    from scaling.figures import RC, STYLES, render, sheet

    last = rows[-1]
    shown = [row for row in newest(rows) if row["valid"] and row["ratio"] and (row["gpu"], row["T"]) == (last["gpu"], last["T"])]
    if not shown:
        return False
    cost = {row["baseline"].split()[0]: row["flops_per_token"] for row in sorted(shown, key=lambda row: row["peer"] is None)}
    sizes = sorted(cost, key=cost.get)      # by our own model's, where there is one
    with matplotlib.rc_context(RC):
        figure, ((panel,),) = sheet(
            (7.4, 3.2), 1, 1, f"Training speed on {last['gpu'] or 'a CPU (a rehearsal)'}, T={last['T']}",
            "Each between two BF16 runs on one device; per model FLOP (6 a matmul parameter + 12 L H D T per token).")
        for i, label in enumerate(dict.fromkeys(row["label"] for row in shown)):
            turn, style = divmod(i, len(STYLES) - 1)
            look = {key: STYLES[1 + style][key] for key in ("color", "marker", "linestyle", "linewidth")}     # blue is BF16's
            points = sorted((sizes.index(row["baseline"].split()[0]), row["ratio"]) for row in shown if row["label"] == label)
            panel.plot(*zip(*points, strict=True), label=label, **look, fillstyle="none" if turn else "full")
        panel.axhline(1.0, color="#999999", linewidth=0.8)
        panel.set_xticks(range(len(sizes)), sizes)
        panel.set(xlabel="model", ylabel="speed over BF16, per FLOP", xlim=(-0.4, len(sizes) - 0.6))
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        write_atomically(path, render(figure, "png"))
    return True


def check(old: list[dict], new: list[dict]) -> list[str]:
    """What the new rows lost against the old: ratios lower by more than MOST_LOSS, cells that no longer count. What only one of
    them holds is no loss, but nothing in common is: a check that checked nothing must not pass."""
    before, now = ({(row["gpu"], row["size"], row["label"], row["T"]): row for row in newest(rows)} for rows in (old, new))
    both = [key for key in before if key in now and before[key]["valid"]]
    lost = [f"{key}: valid before, now {now[key].get('failure') or now[key]['invalid_because']}"
            for key in both if not now[key]["valid"]]
    ratios = [(key, before[key]["ratio"], now[key]["ratio"]) for key in both if before[key]["ratio"] and now[key]["ratio"]]
    lost += [f"{key}: {a:.3f} before, {b:.3f} now ({b / a - 1:+.1%})" for key, a, b in ratios if b < a * (1 - MOST_LOSS)]
    return lost or ([] if ratios else ["no ratio is in both files: nothing was compared"])


# ----------------------------------------------------------------------------------------------------------- the command

@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["h100", "toy"] = "h100"      # what to time: on one GPU, or a rehearsal on a CPU
    budget: float = 560.0           # seconds after which nothing runs any more
    out: str | None = None          # JSON lines that receive the rows; none = bench/results/<suite>.jsonl
    cells: tuple[str, ...] = ()     # time only these, as SIZE/LABEL, though they have rows; () = all that have none
    commit: str | None = None       # of these files, where they lie in no git checkout
    table: bool = False             # print the rows of OUT, draw the figure beside it
    check: str | None = None        # JSON lines to hold against OUT


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done or out of budget, 1 a check failed, 2 the user's mistake, 130 interrupted."""
    if arguments[:1] == ["--cell"]:
        return cell_main(arguments[1])

    def work(options: Options) -> int | str:
        out = Path(options.out) if options.out else ROOT / "bench" / "results" / f"{options.suite}.jsonl"
        if options.check:
            lost = check(rows_of(out), rows_of(Path(options.check)))
            print("\n".join(lost) or f"{options.check} has lost nothing against {out}")
            return 1 if lost else 0
        if not options.table:
            groups = chosen(groups_of(options.suite), options.cells)
            time_all(groups, out, options.budget, shlex.join(["python", "-m", "bench.throughput", *arguments]), options.commit,
                     again=bool(options.cells))
        return show(out)
    return command(__doc__, Options, arguments, work)


def chosen(groups: list[list[Cell]], names: tuple[str, ...]) -> list[list[Cell]]:
    """The groups cut down to the named cells, if any are."""
    known = [f"{cell.size}/{cell.label}" for _, *members in groups for cell in members]
    if wrong := next((name for name in names if name not in known), None):
        raise UserError(f"cells={wrong!r} is no FP8 cell of this suite{nearest(wrong, known)}")
    cut = [[baseline, *(cell for cell in members if not names or f"{cell.size}/{cell.label}" in names)]
           for baseline, *members in groups]
    return [group for group in cut if len(group) > 1]


def time_all(groups: list[list[Cell]], out: Path, budget: float, command: str, commit: str | None = None,
             again: bool = False) -> None:
    """Time what is missing in `out` within `budget` seconds. Raises UserError where there is no GPU; KeyboardInterrupt."""
    device = groups[0][0].device
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("this needs a CUDA GPU, and torch sees none here: --suite toy rehearses on the CPU")
    timer = Timer(out, device, budget, command, commit)
    print(f"{timer.head['gpu'] or timer.head['cpu']}: rows go to {out}", flush=True)
    with suppress(OutOfBudget):
        if left := sum(timer.time_group(group, again) for group in groups):
            print(f"{left} cells are left, the same command goes on with them")
        return
    print("\nthe budget is spent, the same command goes on with what is missing")


def show(out: Path) -> str:
    """The table of the rows in `out`; draws the figure beside it and names it below."""
    rows = rows_of(out)
    with suppress(ImportError):     # a machine for an hour may lack matplotlib
        if rows and draw(rows, out.with_suffix(".png")):
            return f"\n{table(rows)}\n\n{out.with_suffix('.png')}"
    return f"\n{table(rows)}"


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
