"""Time what the machine can do at our shapes: copies, matmuls in BF16 and FP8, attention.

    python bench/ceilings.py '{"device": "cuda", "have": [], "shapes": [{"size": "1p5b", "B": 16, "T": 1024, "C": 2048, ...}]}'

Random data, never zeros: a GPU multiplies those with less power, hence faster (894 against 788 TFLOP/s on an H200). Each is
timed for a fifth of a second without pause, at the clock that it then has; the median of ten stretches counts. One JSON line
per row on stdout, for bench/throughput.py.

copy        2 GiB read and 2 GiB written count
matmul      of the first shape's Linears, each pass: M x K @ K x N, operands stored as in training. fp8: one scale a tensor, the
            gradient in E5M2, fast accumulation forward only. fp8_fp32: the same weight gradients written in fp32, as our own
            kernels' path leaves them. fp8_rowwise: one scale a row, E4M3, fast accumulation; forward alone, for torchao's
            backward passes take no such matmul: theirs has one scale, a multiplication by rows follows.
attention   through scaled_dot_product_attention as the model calls it; FLOPs of the causal half: 2 B H T T D forward, 3.5 times
            that with the backward pass, which computes the scores again
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from runtime.fp8 import scaled_mm
from runtime.rows import to_line

STRETCHES, STRETCH_S = 10, {"cuda": 0.02, "cpu": 0.001}      # of calls one behind the other
COPY_BYTES = {"cuda": 2**31, "cpu": 2**22}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = ("bf16", "fp8", "fp8_fp32", "fp8_rowwise")
LINEARS = ("qkv", "out", "gate_up", "down", "head")
PASSES = {"forward": ("bf16", "fp8", "fp8_rowwise"), "input_grad": ("bf16", "fp8"), "weight_grad": ("bf16", "fp8", "fp8_fp32")}
# SDPA's, by what is in a kernel's name; FlashAttention 3's are Hopper's.
BACKENDS = (("cudnn", ("cudnn",)), ("flash3", ("flash", "sm90")), ("flash2", ("flash",)), ("efficient", ("fmha",)))


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    spec = json.loads(arguments[0])
    answers = os.fdopen(os.dup(1), "wb", buffering=0)       # the real stdout; whatever else prints goes to stderr
    os.dup2(2, 1)
    said = []
    for row in rows(spec):
        answers.write(to_line({"ok": True, "row": row}))
        said.append(row)
    copies = [f"copy {row['gb_per_s']:,.0f} GB/s" for row in said if row["kind"] == "copy"]
    best = [f"{dtype} matmul up to {max(tflops):,.1f} TFLOP/s" for dtype in DTYPES
            if (tflops := [row["tflops"] for row in said if row.get("dtype") == dtype])]
    backends = sorted({f"attention by {row['backend']}" for row in said if row.get("backend")})
    answers.write(to_line({"ok": True, "said": ", ".join(copies + best + backends)}))
    return 0


def key_of(row: dict) -> list | None:
    """What makes two rows rows of the same ceiling; None for a row that is none. One that failed counts."""
    if row.get("kind") == "failed":
        return row.get("ceiling")
    kinds = {"copy": (), "matmul": ("dtype", "size", "linear", "pass"), "attention": ("size",)}
    return [row["kind"], *(row.get(name) for name in kinds[row["kind"]])] if row.get("kind") in kinds else None


def missing(spec: dict) -> list[list]:
    """Keys of the rows that spec["have"] lacks."""
    size = spec["shapes"][0]["size"]
    wanted = [["copy"], *(["matmul", dtype, size, linear, which] for linear in LINEARS for which in PASSES
                          for dtype in PASSES[which]),
              *(["attention", shape["size"]] for shape in spec["shapes"])]
    return [key for key in wanted if key not in spec["have"]]


def rows(spec: dict) -> Iterator[dict]:
    """The rows that are missing; "failed" for one that this machine cannot compute."""
    device, first = torch.device(spec["device"]), spec["shapes"][0]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True    # PyTorch's default, and training's
    for key in missing(spec):
        try:
            if key[0] == "copy":
                yield _copy(device)
            elif key[0] == "matmul":
                yield {"kind": "matmul", "dtype": key[1], "size": key[2], "linear": key[3], "pass": key[4],
                       **_matmul(first, *key[1:2], *key[3:], device)}
            else:
                yield _attention(next(shape for shape in spec["shapes"] if shape["size"] == key[1]), device)
        except (RuntimeError, ValueError) as error:     # TORCH_CHECK knows both
            yield {"kind": "failed", "size": first["size"], "label": " ".join(key), "ceiling": key, "oom": False,
                   "error": (str(error).strip().splitlines() or ["no reason given"])[0][:300]}
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _copy(device: torch.device) -> dict:
    size = COPY_BYTES[device.type]
    source = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    seconds = _time(lambda: target.copy_(source), device)
    return {"kind": "copy", "gb_per_s": 2 * size / seconds / 1e9, "bytes": 2 * size}


def _matmul(shape: dict, dtype: str, linear: str, which: str, device: torch.device) -> dict:
    C, ffn, V = shape["C"], shape["F"], shape["V"]
    n_in, n_out = {"qkv": (C, 3 * C), "out": (C, C), "gate_up": (C, 2 * ffn), "down": (ffn, C), "head": (C, V)}[linear]
    tokens = shape["B"] * shape["T"]
    M, K, N = {"forward": (tokens, n_in, n_out), "input_grad": (tokens, n_out, n_in), "weight_grad": (n_out, tokens, n_in)}[which]

    def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(dtype)

    if dtype == "bf16":     # layouts of nn.Linear: x (tokens, in), weight (out, in), gradient (tokens, out)
        a = random(K, M, torch.bfloat16).t() if which == "weight_grad" else random(M, K, torch.bfloat16)
        b = random(N, K, torch.bfloat16).t() if which == "forward" else random(K, N, torch.bfloat16)
        seconds = _time(lambda: torch.mm(a, b), device)
    else:                   # cuBLAS multiplies FP8 from row-major by column-major alone: training makes copies of that layout
        is_rowwise, is_forward = dtype == "fp8_rowwise", which == "forward"
        out = torch.float32 if dtype == "fp8_fp32" else torch.bfloat16
        a = random(M, K, E4M3 if is_forward else E5M2)
        b = random(N, K, E4M3).t()
        one = [torch.ones(size, device=device) for size in (((M, 1), (1, N)) if is_rowwise else ((), ()))]
        seconds = _time(lambda: scaled_mm(a, one[0], b, one[1], out, is_forward), device)
    return {"M": M, "K": K, "N": N, "ms": seconds * 1e3, "tflops": 2 * M * K * N / seconds / 1e12}


def _attention(shape: dict, device: torch.device) -> dict:
    B, H, T, D = (shape[name] for name in "BHTD")
    q, k, v = (torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    g = torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16).transpose(1, 2)       # (B, H, T, D) by its strides

    def forward():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both():
        return torch.autograd.grad(forward(), (q, k, v), g)

    kernels, backend = _kernels(both, device)
    forward_s, both_s = _time(forward, device), _time(both, device)
    return {"kind": "attention", "size": shape["size"], "B": B, "H": H, "T": T, "D": D, "kernels": kernels, "backend": backend,
            "forward_ms": forward_s * 1e3, "both_ms": both_s * 1e3, "tflops": 3.5 * 2 * B * H * T * T * D / both_s / 1e12}


def _kernels(step: Callable, device: torch.device) -> tuple[list[str] | None, str | None]:
    """Names of the GPU kernels that `step` runs, and SDPA's backend by them; None, None where the profiler tells nothing."""
    if device.type == "cpu":
        return None, None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step()
            torch.cuda.synchronize()
        names = sorted({event.name for event in trace.events() if event.device_type == DeviceType.CUDA})
    except RuntimeError as error:
        print(f"no profile: {error}", file=sys.stderr, flush=True)
        return None, None
    if not names:
        return None, None
    return [name[:200] for name in names], backend_of(names)


def backend_of(kernels: list[str]) -> str:
    """Which of BACKENDS these kernels are; "math" for none."""
    return next((backend for backend, parts in BACKENDS
                 if any(all(part in name.lower() for part in parts) for name in kernels)), "math")


def _time(step: Callable, device: torch.device) -> float:
    """Seconds of one call, the median over STRETCHES of calls one behind the other."""
    for _ in range(3):
        step()
    began = _now(device)
    for _ in range(3):
        step()
    calls = max(1, round(STRETCH_S[device.type] / max(1e-7, (_now(device) - began) / 3)))
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(STRETCHES):
            for _ in range(calls):
                step()
            marks.append(time.perf_counter())
        return float(np.median(np.diff(marks))) / calls
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STRETCHES + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):
            step()
        event.record()
    events[-1].synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)])) / 1e3 / calls


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
