"""Time single Linears in BF16 against FP8 on the GPU at hand, for fp8.recipe=auto to go by; our cast kernels; matmuls alone.

    python -m bench.kernels budget=540                      every Linear shape of configs/gpt*_bf16.py; again: what is missing
    python -m bench.kernels shapes=2048x11264 recipes=tensorwise,tensorwise+kernels,tensorwise+kernels+fast_backward
    python -m bench.kernels casts                           our Triton kernels, checked, then timed against a copy of their bytes
    python -m bench.kernels matmuls                         TFLOP/s of the three matmuls of each Linear of 1.5B, BF16 and FP8
    python -m bench.kernels shapes=64x64 tokens=64 out=out/cpu.json         a rehearsal without a GPU, uncompiled

A Linear is timed as RMSNorm -> Linear -> sigmoid on `tokens` rows of random BF16, forward and backward, compiled in one graph:
the casts to FP8 can fuse with norm and sigmoid as they do in training; being in both arms, these pull the ratio towards 1, as in
training. Gradient accumulation and what BF16 and +kernels do once a step (casting the weight) are not timed. FP8 runs between two
turns of BF16 and is compared with their mean, so that what drifts cancels. The table gets the median ratio BF16 / FP8 of the
turns, their 10th and 90th percentile, GPU, versions and commits (runtime/speed.py has its format), after every row.
"""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
import torch.nn as nn

from model import GPT, Linear, RMSNorm
from runtime import fp8, speed
from runtime.cli import UserError, command, nearest, run_command
from runtime.config import FP8_SCALED_MM, WITH_FAST_BACKWARD, RecipeName, load_config
from runtime.log import environment
from runtime.machine import nvidia_smi
from runtime.rows import write_atomically

ROOT = Path(__file__).resolve().parents[1]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, kw_only=True)
class Options:
    what: Literal["linears", "casts", "matmuls"] = "linears"
    out: str = str(speed.SHIPPED.relative_to(ROOT))     # table that receives the rows of linears
    shapes: tuple[str, ...] = ()    # Linears to time, inputs x outputs, as 2048x11264,2048x2048; () = those of the six sizes
    recipes: tuple[str, ...] = ()   # recipes to time; () = those that auto chooses from
    tokens: int = 16384             # M, rows of the input: the tokens of a micro-batch
    turns: int = 7                  # of FP8 per row, each between two of BF16
    budget: float | None = None     # seconds after which no further row is begun; none = all rows

    POSITIONAL: ClassVar = ("what",)

    def __post_init__(self):
        if self.tokens < 16 or self.tokens % 16:
            raise UserError(f"tokens={self.tokens} must be a multiple of 16: FP8 matmuls need it for the weight gradient")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done or out of budget, 1 a row failed, 2 the user's mistake, 130 interrupted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def work(options: Options) -> int:
        if options.what == "linears":
            return time_linears(options, device, shlex.join(["python", "-m", "bench.kernels", *arguments]))
        if options.what == "matmuls":
            return time_matmuls(options, device)
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"        # read when the kernels are defined, hence the late import
        from runtime import fp8_kernels
        return time_casts(fp8_kernels, device)
    return command(__doc__, Options, arguments, work)


def milliseconds(call: Callable, device: torch.device) -> float:
    """Of one call, the median; on a GPU the GPU's own time."""
    if device.type == "cuda":
        from triton.testing import do_bench
        return do_bench(call, return_mode="median")
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times))


def in_turns(a: Callable, b: Callable, turns: int, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of A and B in the turns A B A B .. A: (turns + 1), (turns)."""
    a_ms, b_ms = [milliseconds(a, device)], []
    for _ in range(turns):
        b_ms.append(milliseconds(b, device))
        a_ms.append(milliseconds(a, device))
    return np.array(a_ms), np.array(b_ms)


def ratios(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A / B of each turn of B (n) against the mean of its two neighbours among A's (n + 1): a linear drift cancels."""
    return (a[:-1] + a[1:]) / 2 / b


# -------------------------------------------------------------------------------------------------------------- Linears

class Piece(nn.Module):
    """What is timed; the Linear lies in a Sequential so that runtime.fp8 can swap it."""
    compute_dtype = torch.bfloat16      # as a GPT has it

    def __init__(self, K: int, N: int):
        super().__init__()
        self.norm = RMSNorm(K, 1e-5)
        self.linear = nn.Sequential(Linear(K, N))

    def forward(self, x):
        return torch.sigmoid(self.linear(self.norm(x)))


def time_linears(options: Options, device: torch.device, command: str) -> int:
    """Time what the table lacks, smallest shapes first; returns the exit code. Raises UserError."""
    out = ROOT / options.out        # an absolute one stays as it is
    if device.type == "cpu" and out.resolve() == speed.SHIPPED:
        raise UserError(f"a CPU's timings say nothing about a GPU and stay out of {options.out}: run this on a GPU, or give "
                        f"out=ANOTHER.json to rehearse")
    shapes, recipes, env = shapes_of(options), recipes_of(options, device), environment(device, ROOT)
    setup = {"torch": env["torch"], "torchao": env["torchao"], "driver": nvidia_smi("driver_version")[0],
             "timer": "CUDA events" if device.type == "cuda" else
             "perf_counter, uncompiled: a rehearsal on a CPU, says nothing about a GPU"}
    table: dict = {"format_version": speed.FORMAT_VERSION, "measured": {}, "published": {}}
    if out.exists():
        speed.load_table(out)       # raises UserError for a file that is none
        table = json.loads(out.read_text(encoding="utf-8"))
    entries = table["measured"].setdefault(speed.architecture_of(env["device"]) or "cpu", [])
    if not any(entry["gpu"] == env["device"] for entry in entries):
        entries.append({"gpu": env["device"], "date": None, **setup, "commit": None, "command": command, "rows": []})
    entry = next(entry for entry in entries if entry["gpu"] == env["device"])
    out.parent.mkdir(parents=True, exist_ok=True)       # now, not when a row is lost for want of it
    if differs := [key for key in setup if entry[key] != setup[key]]:
        raise UserError(f"{options.out} holds rows of this GPU with {differs[0]} {entry[differs[0]]}, here it is "
                        f"{setup[differs[0]]}: rows of two setups do not mix; give out=ANOTHER.json, or take the entry of "
                        f"{env['device']} out of the file to time anew")
    there = {tuple(row[key] for key in ("recipe", "K", "N", "M")) for row in entry["rows"]}
    todo = [(recipe, K, N) for K, N in shapes for recipe in recipes if (recipe, K, N, options.tokens) not in there]
    print(f"{env['device']}: {len(todo)} rows to time, {len(shapes) * len(recipes) - len(todo)} are there", flush=True)
    commits = [*(entry["commit"] or "").split(", "), env["git_commit"]]
    began, longest, failed = time.perf_counter(), 0.0, 0
    for i, (recipe, K, N) in enumerate(todo):
        start = time.perf_counter()
        if options.budget is not None and i and start - began + longest > options.budget:
            print(f"{len(todo) - i} rows are left, the same command goes on")
            break
        try:
            row, ms = time_linear(recipe, K, N, options, device)
        except Exception as error:      # one recipe's missing kernel or memory must not cost the other rows
            failed += 1
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{recipe:26} {K:6d} x {N:<6d} FAILED: {said}", flush=True)
            continue
        entry["rows"].append(row)
        entry |= {"date": env["t_start"][:10], "commit": ", ".join(dict.fromkeys(filter(None, commits))) or None,
                  "command": command}
        write_atomically(out, speed.to_text(table))
        longest = max(longest, time.perf_counter() - start)
        print(f"{recipe:26} {K:6d} x {N:<6d} {row['ratio']:.3f}x ({row['ratio_p10']:.3f} to {row['ratio_p90']:.3f})  "
              f"BF16 {ms:.3f} ms", flush=True)
    return 1 if failed else 0


def time_linear(recipe: str, K: int, N: int, options: Options, device: torch.device) -> tuple[dict, float]:
    """The row of one Linear, plus BF16's median milliseconds. Raises RuntimeError where FP8 computes no finite numbers."""
    emulate = nullcontext()
    if device.type == "cuda":
        import torch._inductor.config as inductor
        torch.compiler.reset()      # each row compiles the same code for other shapes: dynamo's limit of variants is 8
        emulate = inductor.patch(emulate_precision_casts=recipe.startswith("rowwise"))      # as parallel.set_torch_flags does
    torch.manual_seed(0)            # never zeros: a GPU multiplies them with less power, hence faster
    x = torch.randn(options.tokens, K, device=device, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(options.tokens, N, device=device, dtype=torch.bfloat16)
    bf16, quantised = (linear_step(name, K, N, x, g) for name in ("off", recipe))
    bf16()
    with emulate:
        if not all(gradient.isfinite().all() for gradient in quantised()):
            raise RuntimeError("a gradient is not finite: the time of such a Linear means nothing")
        bf16_ms, fp8_ms = in_turns(bf16, quantised, options.turns, device)
    p10, median, p90 = np.quantile(ratios(bf16_ms, fp8_ms), (0.1, 0.5, 0.9)).tolist()
    return {"recipe": recipe, "K": K, "N": N, "M": options.tokens, "ratio": round(median, 4), "ratio_p10": round(p10, 4),
            "ratio_p90": round(p90, 4)}, float(np.median(bf16_ms))


def linear_step(recipe: str, K: int, N: int, x: torch.Tensor, g: torch.Tensor) -> Callable:
    """One forward and backward pass of a Piece under `recipe`, as a function that returns the gradients of x and weights."""
    with torch.device(x.device):
        piece = Piece(K, N)
    nn.init.ones_(piece.norm.weight)
    nn.init.normal_(piece.linear[0].weight, std=K ** -0.5)
    if recipe == "off":
        fp8.keep_bf16_copies(piece.linear)      # as in training on one process
    else:
        fp8.convert(piece.linear, fp8.by_name(recipe), device_type=x.device.type)
    fp8.refresh_weight_copies(piece)      # once, as in a step of many micro-batches
    if x.device.type == "cuda":
        piece.compile(dynamic=False, fullgraph=True)
    inputs = (x, *piece.parameters())
    return lambda: torch.autograd.grad(piece(x), inputs, g)


def shapes_of(options: Options) -> list[tuple[int, int]]:
    """(inputs K, outputs N) of the Linears asked for, else of those of the gpt*_bf16 configs, each once, smallest first."""
    shapes = set()
    for text in options.shapes:
        pair = re.fullmatch(r"([1-9]\d{0,7})x([1-9]\d{0,7})", text)
        if not pair or any(int(n) % 16 for n in pair.groups()):
            raise UserError(f"shapes={text!r} is no shape: write inputs x outputs, both multiples of 16, as 2048x11264")
        shapes.add((int(pair[1]), int(pair[2])))
    for path in [] if shapes else (ROOT / "configs").glob("gpt*_bf16.py"):
        with torch.device("meta"):
            model = GPT(load_config(path).model)
        shapes |= {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, Linear)}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def recipes_of(options: Options, device: torch.device) -> list[str]:
    """The recipes asked for. One that this GPU lacks is a mistake where it was named, else a line."""
    known = [name for name in get_args(RecipeName) if name not in ("off", "auto")]
    known += [f"{name}{fp8.WITH_KERNELS}" for name in fp8.FP8_KERNELS]
    known += [f"{name}{WITH_FAST_BACKWARD}" for name in known if name.split("+")[0] in FP8_SCALED_MM]
    recipes = []
    for recipe in dict.fromkeys(options.recipes or fp8.CANDIDATES + fp8.KERNEL_CANDIDATES):
        if recipe not in known:
            raise UserError(f"recipes={recipe!r} is no FP8 recipe{nearest(recipe, known)}")
        try:
            fp8.check_hardware(fp8.by_name(recipe), device)
            recipes.append(recipe)
        except UserError as error:
            if options.recipes:
                raise
            print(f"{recipe} left out: {error}")
    return recipes


# ------------------------------------------------------------------------------------------------------ casts and matmuls

# what is cast, rows M, columns K, its dtype, FP8's: 16 x 1024 tokens at 1.5B, 64 x 1024 at 125M
BF16 = torch.bfloat16
CASTS = (("x of qkv, out, gate_up, 1.5B", 16384, 2048, BF16, E4M3), ("x of down, 1.5B", 16384, 5632, BF16, E4M3),
         ("g of gate_up, 1.5B", 16384, 11264, BF16, E5M2), ("g of out, down, 1.5B", 16384, 2048, BF16, E5M2),
         ("weight of gate_up, 1.5B", 11264, 2048, torch.float32, E4M3), ("x of qkv, 125M", 65536, 768, BF16, E4M3),
         ("logits, 1.5B", 16384, 50304, BF16, E5M2))
REHEARSAL = (("x", 144, 48, BF16, E4M3), ("g", 48, 144, BF16, E5M2), ("logits", 48, 80, BF16, E5M2))


def time_casts(kernels, device: torch.device) -> int:
    """Check, then time each case in turns with a copy of the bytes that it cannot avoid; on a CPU, in Triton's interpreter, the
    check alone. Returns the exit code: 1 where a value is wrong."""
    failed = 0
    for what, M, K, source, format in CASTS if device.type == "cuda" else REHEARSAL:
        torch.manual_seed(0)
        x = torch.randn(M, K, device=device, dtype=source)
        q = torch.full((M, K), 0x55, dtype=torch.uint8, device=device).view(format)
        qt = torch.full((K, M), 0x55, dtype=torch.uint8, device=device).view(format)
        call, want = (_loss_grad if what.startswith("logits") else _cast)(kernels, x, format, q, qt)
        call()
        a, b = (t.contiguous().view(torch.uint8).int() for t in (q, want))
        off = torch.where((a ^ b) > 127, (a & 127) + (b & 127), (a - b).abs()).max().item()      # two signs: by way of zero
        # The loss's gradient may differ by one step of the format; the interpreter rounds to FP8 wrongly, up to a factor of two.
        if not torch.equal(q.view(torch.uint8), qt.t().contiguous().view(torch.uint8)):
            failed, said = failed + 1, "WRONG: the two layouts hold different values"
        elif off > (8 if device.type == "cpu" else what.startswith("logits")):
            failed, said = failed + 1, f"WRONG: a value is {off} steps of its format off"
        elif device.type == "cpu":
            said = "right in Triton's interpreter; times need a GPU"
        else:
            size = M * K * (source.itemsize + 2)
            half = torch.randint(0, 255, (size // 2,), dtype=torch.uint8, device=device)
            target = torch.empty_like(half)
            copy_ms, ms = in_turns(partial(target.copy_, half), call, 5, device)
            said = (f"{np.median(ms):8.4f} ms, {np.median(ratios(copy_ms, ms)):.1%} of the pace of a copy, which moves "
                    f"{size / np.median(copy_ms) / 1e6:,.0f} GB/s")
        print(f"{what:32} {M:6d} x {K:<6d} {said}", flush=True)
    return 1 if failed else 0


def _cast(kernels, x, format, q, qt):
    scale = torch.tensor(torch.finfo(format).max / 8, device=x.device)
    return lambda: kernels.cast_both(x, scale, q, qt), fp8.cast(x, scale, format)


def _loss_grad(kernels, logits, format, q, qt):
    logits, largest = 3 * logits, torch.finfo(format).max
    M, V = logits.shape
    lse, targets = torch.logsumexp(logits.float(), 1), torch.randint(0, V, (M,), device=logits.device)
    grad, scale = torch.full((M,), 2.0**-19, device=logits.device), torch.tensor(largest * 2.0**19, device=logits.device)
    want = (logits.float() - lse[:, None]).exp_()
    want[torch.arange(M, device=logits.device), targets] -= 1
    want = (want * (grad * scale)[:, None]).clamp_(-largest, largest).to(format)
    return lambda: kernels.cross_entropy_grad(logits, lse, targets, grad, scale, q, qt), want


def time_matmuls(options: Options, device: torch.device) -> int:
    """TFLOP/s of (M, K) @ (K, N) on random data, operands stored as cuBLAS wants them; FP8 with one scale a tensor."""
    M, one = options.tokens, torch.ones((), device=device)
    of_1p5b = ((2048, 6144), (2048, 2048), (2048, 11264), (5632, 2048), (2048, 50304))
    for K, N in shapes_of(options) if options.shapes else of_1p5b:
        for name, (m, k, n) in {"forward": (M, K, N), "input's gradient": (M, N, K), "weight's gradient": (N, M, K)}.items():
            a, b = (torch.randn(rows, k, device=device, dtype=BF16) for rows in (m, n))
            a8, b8 = a.to(E4M3 if name == "forward" else E5M2), b.to(E4M3)
            fast = (True,) if name == "forward" else (False, True)
            calls = [partial(torch.mm, a, b.t()), *(partial(fp8.scaled_mm, a8, one, b8.t(), one, BF16, how) for how in fast)]
            bf16, *quantised = (2 * m * k * n / milliseconds(call, device) / 1e9 for call in calls)
            print(f"{K:6d} x {N:<6d} {name:18} BF16 {bf16:8.1f} TFLOP/s" + "".join(
                f", FP8{', accumulating fast' * how} {rate:8.1f}: {rate / bf16:.2f}x"
                for how, rate in zip(fast, quantised, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
