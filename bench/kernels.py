"""Time single Linears in BF16 against FP8 on the GPU at hand, for fp8.recipe=auto to go by; our
cast kernels; matmuls alone.

    python -m bench.kernels budget=540  every shape of configs/gpt*_bf16.py that is missing
    python -m bench.kernels shapes=2048x11264 recipes=tensorwise,tensorwise+kernels
    python -m bench.kernels casts       our Triton kernels against a copy of as many bytes
    python -m bench.kernels matmuls     TFLOP/s of the three matmuls of 1.5B's Linears
    python -m bench.kernels shapes=64x64 tokens=64 out=out/cpu.json  a rehearsal on a CPU

A Linear is timed as RMSNorm -> Linear -> sigmoid on `tokens` rows of random BF16, forward and
backward, compiled in one graph: the casts to FP8 can fuse with norm and sigmoid as they do in
training; being in both arms, these pull the ratio towards 1, as in training. Gradient accumulation
and what BF16 and +kernels do once a step (casting the weight) are not timed. FP8 runs between two
turns of BF16 and is compared with their mean, so that what drifts cancels. The table gets the
median ratio BF16 / FP8 of the turns, their 10th and 90th percentile, GPU, versions and commits
(fp8/speed.py has its format), after every row."""

import re
import shlex
import time
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn

from fp8 import selection, speed
from fp8.convert import convert, keep_bf16_copies
from fp8.head_loss import cross_entropy_grad
from fp8.kernels import cast_both
from fp8.matmul import scaled_mm
from fp8.precision import Precision
from fp8.recipes import CANDIDATES, KERNEL_CANDIDATES, from_label, needs_precision_casts
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import write_atomically
from lib.machine import ROOT, nvidia_smi
from lib.values import FilePath
from model import GPT, Linear, RMSNorm
from runtime.config import load_config
from runtime.environment import environment

UNFINISHED = 3  # exit code where the budget has left something, as scaling/sweep.py's
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Literal["linears", "casts", "matmuls"] = "linears"
    out: FilePath = str(speed.SHIPPED.relative_to(ROOT))  # table that receives the rows of linears
    # Linears to time, inputs x outputs, as 2048x11264,2048x2048; () = those of the six sizes
    shapes: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()  # recipes to time; () = those that auto chooses from
    tokens: int = 16384  # M, rows of the input: the tokens of a micro-batch
    turns: int = 7  # of FP8 per row, each between two of BF16
    commit: str | None = None  # of these files, where git does not tell it
    budget: float | None = None  # seconds after which no further row is begun; none = all rows


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 a row failed, 2 the user's mistake, 3 rows are left, 130
    interrupted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words = shlex.join(["python", "-m", "bench.kernels", *arguments])

    def work(options: Options) -> int | None:
        if options.what == "linears":
            return time_linears(options, device, words)
        if options.what == "casts":
            return time_casts(device)
        return time_matmuls(options, device)

    return command(__doc__, Options, "what")(work)(arguments)


def milliseconds(call: Callable, device: torch.device) -> float:
    """Of one call, the median; on a GPU the GPU's own time."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, return_mode="median")
    return 1e3 * float(np.median(timeit.repeat(call, timer=time.perf_counter, number=1, repeat=5)))


def in_turns(
    a: Callable, b: Callable, turns: int, device: torch.device
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Milliseconds of A and B in the turns A B A B .. A, (turns + 1) and (turns), and A / B
    (turns): of each turn of B against the mean of its two neighbours among A's, so that a linear
    drift cancels."""
    ms = np.array([milliseconds(call, device) for call in (a, *(b, a) * turns)])
    return ms[::2], ms[1::2], (ms[:-2:2] + ms[2::2]) / 2 / ms[1::2]


# ----------------------------------------------------------------------------------------- Linears


def time_linears(options: Options, device: torch.device, command: str) -> int:
    """Time what the table lacks, smallest shapes first; returns the exit code. Raises UserError."""
    out = ROOT / options.out  # an absolute one stays as it is
    if device.type == "cpu" and out.resolve() == speed.SHIPPED:
        raise UserError(
            "a CPU's timings say nothing about a GPU: give out=ANOTHER.json to rehearse"
        )
    shapes, recipes = shapes_of(options), recipes_of(options)
    asked_for = [(recipe, K, N) for K, N in shapes for recipe in recipes]
    env = asdict(environment(device, ROOT))
    table = _read_table(out)
    entry = _entry_of(table, env, device, command, options.out)
    due = _without_timed(asked_for, options.tokens, entry["rows"])
    n_timed = len(asked_for) - len(due)
    print(f"{env['device']}: {len(due)} rows to time, {n_timed} are there", flush=True)
    facts = {
        "date": env["t_start"][:10],
        "commit": _commits(entry["commit"], options.commit or env["git_commit"]),
        "command": command,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    start, n_failed = time.perf_counter(), 0
    for i, (recipe, K, N) in enumerate(due):
        if options.budget is not None and time.perf_counter() - start > options.budget:
            print(f"{len(due) - i} rows are left, the same command goes on")
            return UNFINISHED
        row = _try_linear(recipe, K, N, options, device)
        if row is None:
            n_failed += 1
            continue
        entry["rows"].append(row)
        entry |= facts
        write_atomically(out, speed.to_text(table))
    return 1 if n_failed else 0


def _without_timed(
    linears: list[tuple[str, int, int]], tokens: int, rows: list[dict]
) -> list[tuple[str, int, int]]:
    """Those (recipe, K, N) that have no row of so many tokens."""
    timed = {(row["recipe"], row["K"], row["N"]) for row in rows if row["M"] == tokens}
    return [linear for linear in linears if linear not in timed]


def _commits(earlier: str | None, commit: str | None) -> str | None:
    """The commits of an entry's rows, comma-separated, each once."""
    commits = [*(earlier or "").split(", "), commit]
    return ", ".join(dict.fromkeys(filter(None, commits))) or None


def _read_table(path: Path) -> dict:
    """fp8/speed.py's table; an empty one where there is none yet."""
    if path.exists():
        return speed.load_table(path)
    return {"format_version": speed.FORMAT_VERSION, "measured": {}, "published": {}}


def _entry_of(table: dict, env: dict, device: torch.device, command: str, out: str) -> dict:
    """The table's entry for this GPU, made where it has none. Raises UserError where the rows there
    are of another setup."""
    is_gpu = device.type == "cuda"
    setup = {
        "torch": env["torch"],
        "torchao": env["torchao"],
        "driver": nvidia_smi("driver_version")[0],
        "timer": "CUDA events" if is_gpu else "perf_counter, uncompiled: a rehearsal on a CPU",
    }
    architecture = speed.architecture_of(env["device"]) or "cpu"
    entries = table["measured"].setdefault(architecture, [])
    for entry in entries:
        if entry["gpu"] != env["device"]:
            continue
        for key, value in setup.items():
            if entry[key] != value:
                raise UserError(
                    f"{out} holds rows of this GPU with {key} {entry[key]}, here it"
                    f" is {value}: rows of two setups do not mix; give out=ANOTHER.json, or"
                    " take the entry out"
                )
        return entry
    entry = {"gpu": env["device"], "date": None, **setup}
    entry |= {"commit": None, "command": command, "rows": []}
    entries.append(entry)
    return entry


def _try_linear(recipe: str, K: int, N: int, options: Options, device: torch.device) -> dict | None:
    """The row of one Linear, which is printed; None where it fails: one recipe's missing kernel or
    memory must not cost the other rows."""
    subject = f"{recipe:26} {K:6d} x {N:<6d}"
    try:
        row, bf16_ms = time_linear(recipe, K, N, options, device)
    except Exception as error:
        print(f"{subject} FAILED: {' '.join(str(error).split())[:300]}", flush=True)
        return None
    print(
        f"{subject} {row['ratio']:.3f}x ({row['ratio_p10']:.3f} to"
        f" {row['ratio_p90']:.3f})  BF16 {bf16_ms:.3f} ms",
        flush=True,
    )
    return row


def time_linear(
    recipe: str, K: int, N: int, options: Options, device: torch.device
) -> tuple[dict, float]:
    """The row of one Linear, plus BF16's median milliseconds. Raises RuntimeError where FP8
    computes no finite numbers."""
    import torch._inductor.config as inductor

    # each row compiles the same code for other shapes: dynamo's limit of variants is 8
    torch.compiler.reset()
    torch.manual_seed(0)  # never zeros: a GPU multiplies them with less power, hence faster
    x = torch.randn(options.tokens, K, device=device, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(options.tokens, N, device=device, dtype=torch.bfloat16)
    bf16, quantised = (linear_step(name, K, N, x, g) for name in ("off", recipe))
    bf16()
    # as parallel.set_torch_flags does
    with inductor.patch(emulate_precision_casts=needs_precision_casts([from_label(recipe).recipe])):
        if not all(gradient.isfinite().all() for gradient in quantised()):
            raise RuntimeError("a gradient is not finite: the time of such a Linear means nothing")
        bf16_ms, _, ratios = in_turns(bf16, quantised, options.turns, device)
    p10, median, p90 = np.quantile(ratios, (0.1, 0.5, 0.9)).tolist()
    return {
        "recipe": recipe,
        "K": K,
        "N": N,
        "M": options.tokens,
        "ratio": round(median, 4),
        "ratio_p10": round(p10, 4),
        "ratio_p90": round(p90, 4),
    }, float(np.median(bf16_ms))


def linear_step(recipe: str, K: int, N: int, x: torch.Tensor, g: torch.Tensor) -> Callable:
    """One forward and backward pass under `recipe`, as a function that returns the gradients of x
    and weights.

    Not runtime/training_step.py's: a Linear has no loss, its output's gradient `g` is given, and
    adding to .grad is no part of what is timed."""
    with torch.device(x.device):
        # a Sequential, in which fp8 can replace it
        norm, linear = RMSNorm(K, 1e-5), nn.Sequential(Linear(K, N))
    nn.init.ones_(norm.weight)
    for weight in linear.parameters():
        nn.init.normal_(weight, std=K**-0.5)
    selection.check_hardware(from_label(recipe), x.device)
    if recipe == "off":
        keep_bf16_copies(linear)  # as in training on one process
    else:
        convert(linear, from_label(recipe), device_type=x.device.type)
    piece = nn.Sequential(norm, linear, nn.Sigmoid())
    setattr(piece, "compute_dtype", BF16)  # noqa: B010  as a GPT has it
    Precision(piece).after_update()  # once, as in a step of many micro-batches
    if x.device.type == "cuda":
        piece.compile(dynamic=False, fullgraph=True)
    inputs = (x, *piece.parameters())
    return lambda: torch.autograd.grad(piece(x), inputs, g)


def shapes_of(options: Options) -> list[tuple[int, int]]:
    """(inputs K, outputs N) of the Linears asked for, else of those of the gpt*_bf16 configs, each
    once, smallest first."""
    shapes = set()
    for text in options.shapes:
        pair = re.fullmatch(r"(\d+)x(\d+)", text)
        if not pair or any(int(n) % 16 or not int(n) for n in pair.groups()):
            raise UserError(
                f"shapes={text!r} is no shape: write inputs x outputs, both multiples of 16, as"
                " 2048x11264"
            )
        shapes.add((int(pair[1]), int(pair[2])))
    for path in [] if shapes else (ROOT / "configs").glob("gpt*_bf16.py"):
        layers = GPT.on_meta(load_config(path).model).modules()
        shapes |= {(m.in_features, m.out_features) for m in layers if isinstance(m, Linear)}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def recipes_of(options: Options) -> tuple[str, ...]:
    for recipe in options.recipes:
        config = from_label(recipe)
        for problem in config.problems():
            raise UserError(problem)
        if config.recipe in ("off", "auto"):
            raise UserError(f"recipes={recipe} is no FP8 recipe")
    return options.recipes or CANDIDATES + KERNEL_CANDIDATES


# ------------------------------------------------------------------------------- casts and matmuls

# what is cast, rows M, columns K, its dtype, FP8's: 16 x 1024 tokens at 1.5B, 64 x 1024 at 125M
CASTS = (
    ("x of qkv, out, gate_up, 1.5B", 16384, 2048, BF16, E4M3),
    ("x of down, 1.5B", 16384, 5632, BF16, E4M3),
    ("g of gate_up, 1.5B", 16384, 11264, BF16, E5M2),
    ("g of out, down, 1.5B", 16384, 2048, BF16, E5M2),
    ("weight of gate_up, 1.5B", 11264, 2048, torch.float32, E4M3),
    ("x of qkv, 125M", 65536, 768, BF16, E4M3),
    ("logits, 1.5B", 16384, 50304, BF16, E5M2),
)


def time_casts(device: torch.device) -> None:
    """Time each case in turns with a copy of the bytes that it cannot avoid; on a CPU a rehearsal,
    in torch."""
    for what, M, K, source, format in CASTS:
        if device.type == "cpu":
            M, K = M // 64, K // 64
        x = torch.randn(M, K, device=device, dtype=source)
        scale = torch.ones((), device=device)
        call = partial(cast_both, x, scale, format)
        if what.startswith("logits"):
            lse = torch.logsumexp(x.float(), 1)
            targets = torch.randint(0, K, (M,), device=device)
            weights = torch.ones(M, device=device)
            call = partial(cross_entropy_grad, x, lse, targets, weights, scale)
        n_bytes = M * K * (source.itemsize + 2)
        half = torch.randint(0, 255, (n_bytes // 2,), dtype=torch.uint8, device=device)
        copy = partial(torch.empty_like(half).copy_, half)
        copy_ms, ms, ratios = in_turns(copy, call, 5, device)
        copy_rate = n_bytes / np.median(copy_ms) / 1e6
        print(
            f"{what:32} {M:6d} x {K:<6d} {np.median(ms):8.4f} ms, {np.median(ratios):.1%} of the"
            f" pace of a copy, which moves {copy_rate:,.0f} GB/s",
            flush=True,
        )


OF_1P5B = ((2048, 6144), (2048, 2048), (2048, 11264), (5632, 2048), (2048, 50304))


def time_matmuls(options: Options, device: torch.device) -> None:
    """TFLOP/s of (M, K) @ (K, N) on random data, operands stored as cuBLAS wants them; FP8 with one
    scale a tensor."""
    M = options.tokens
    for K, N in shapes_of(options) if options.shapes else OF_1P5B:
        matmuls = {
            "forward": (M, K, N),
            "input's gradient": (M, N, K),
            "weight's gradient": (N, M, K),
        }
        for name, (m, k, n) in matmuls.items():
            print(f"{K:6d} x {N:<6d} {name:18} {_matmul_rates(name, m, k, n, device)}")


def _matmul_rates(name: str, m: int, k: int, n: int, device: torch.device) -> str:
    """TFLOP/s of (m, k) @ (k, n) in BF16 and in FP8."""
    a = torch.randn(m, k, device=device, dtype=BF16)
    b = torch.randn(n, k, device=device, dtype=BF16)
    a8, b8 = a.to(E4M3 if name == "forward" else E5M2), b.to(E4M3)
    scale = torch.ones((), device=device)

    def rate(call: Callable) -> float:
        return 2 * m * k * n / milliseconds(call, device) / 1e9

    bf16 = rate(partial(torch.mm, a, b.t()))
    text = f"BF16 {bf16:8.1f} TFLOP/s"
    for is_fast in (True,) if name == "forward" else (False, True):
        fp8 = rate(partial(scaled_mm, a8, scale, b8.t(), scale, BF16, is_fast))
        mode = ", accumulating fast" if is_fast else ""
        text += f", FP8{mode} {fp8:8.1f}: {fp8 / bf16:.2f}x"
    return text


if __name__ == "__main__":
    raise SystemExit(run_command(main))
