"""Time the FP8 kernels of runtime/fp8_kernels.py against a copy of as many bytes.

    python bench/kernels.py                         every case below, every tile (estimated: three minutes on an H100)
    python bench/kernels.py budget=120 out=out/kernels.json
    python bench/kernels.py                         without a GPU: a rehearsal in Triton's interpreter, values alone, no times

Each case is first checked against plain torch, then timed in turns with a copy (copy, kernel, copy, .. , copy), so that a
drifting clock cancels. Its share is the time that the copy takes for the bytes that the kernel cannot avoid (read the input
once, write each FP8 copy once) over the time that the kernel takes: 100 % is a kernel as fast as a copy. "compiled" is what
torch.compile makes of the same few lines of torch, timed likewise. OUT gets all rows after every case, whatever cuts the rest.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from bench.turns import in_turns, ratios
from runtime.cli import UserError, field_lines, read_options
from runtime.log import environment
from runtime.rows import write_atomically

ROOT = Path(__file__).resolve().parents[1]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CHECK_ROWS = 4096               # rows that the reference computes at a time: fp32 logits of all would not fit
COPY_BYTES = 2**30              # most bytes that the copy reads; its time is scaled to the kernel's bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    out: str | None = None          # JSON file that receives the rows; none = only print
    repeats: int = 15               # turns of each kernel, each between two turns of the copy
    budget: float | None = None     # seconds after which no further case is begun; none = all cases

    POSITIONAL: ClassVar = ()

    def __post_init__(self):
        for name, value in (("repeats", self.repeats), ("budget", self.budget)):
            if value is not None and not 1 <= value <= 2**20:
                raise UserError(f"{name}={value} must be between 1 and {2**20}")
        if self.out is not None and not Path(self.out).parent.is_dir():
            raise UserError(f"out={self.out} must lie in a folder that exists")


@dataclass(frozen=True)
class Case:
    """One call: what is cast, where it occurs."""
    kernel: str         # cast_both or cross_entropy_grad
    what: str
    M: int              # rows: tokens of a micro-batch, a weight's outputs
    K: int              # columns
    source: torch.dtype
    format: torch.dtype
    rows: bool = True   # the row-major copy, too

    @property
    def floor(self) -> int:
        """Bytes that cannot be avoided."""
        return self.M * self.K * (self.source.itemsize + 1 + self.rows)


def _x(what, M, K, rows=True):
    return Case("cast_both", what, M, K, torch.bfloat16, E4M3, rows)


def _g(what, M, K):
    return Case("cast_both", what, M, K, torch.bfloat16, E5M2)


def _loss(what, M, V):
    return Case("cross_entropy_grad", what, M, V, torch.bfloat16, E5M2)


CASES = (       # 16 x 1024 tokens at 1.5B, 64 x 1024 at 125M; the most valuable first
    _x("x of qkv, out, gate_up, 1.5B", 16384, 2048), _g("g of gate_up, 1.5B", 16384, 11264), _x("x of down, 1.5B", 16384, 5632),
    _loss("logits, 1.5B", 16384, 50304), _g("g of qkv, 1.5B", 16384, 6144), _g("g of out, down, 1.5B", 16384, 2048),
    Case("cast_both", "weight of gate_up, 1.5B", 11264, 2048, torch.float32, E4M3),
    _x("x of qkv, 125M", 65536, 768), _g("g of gate_up, 125M", 65536, 4096), _loss("logits, 125M", 65536, 50304),
    _x("x of qkv, 1.5B, transposed alone", 16384, 2048, rows=False),
)
REHEARSAL = (_x("x", 144, 48), _g("g", 48, 144), _x("x transposed alone", 48, 32, rows=False), _loss("logits", 48, 80))
TILES = {       # (rows, columns, warps, group); the tile in use is timed first
    "cast_both": ((128, 128, 8, 1), (128, 64, 8, 8), (128, 64, 4, 8), (64, 128, 4, 8), (256, 64, 8, 8), (128, 256, 8, 8),
                  (128, 128, 4, 8)),
    "cross_entropy_grad": ((128, 64, 8, 1), (128, 64, 4, 8), (64, 128, 4, 8), (128, 128, 16, 8), (128, 128, 8, 8),
                           (256, 64, 8, 8)),
}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done or out of budget, 1 wrong values or the machine, 2 the user's mistake, 130 interrupted."""
    if {"-h", "--help"} & set(arguments):
        print("\n".join([__doc__, *field_lines("", Options)]))
        return 0
    try:
        options = read_options(Options, arguments)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"        # read when the kernels are defined, hence the late import
        from runtime import fp8_kernels
        return bench(options, fp8_kernels, device)
    except UserError as error:
        print(f"bench/kernels.py: {error}", file=sys.stderr)
        return 2
    except (ImportError, OSError) as error:
        print(f"bench/kernels.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench/kernels.py: interrupted", file=sys.stderr)
        return 130


def bench(options: Options, kernels, device: torch.device) -> int:
    """Check, then time every case with the room `kernels`; returns the exit code."""
    cases = CASES if device.type == "cuda" else REHEARSAL
    env = environment(device, ROOT)
    head = {key: env[key] for key in ("device", "torch", "triton", "cuda", "git_commit", "git_dirty", "t_start")}
    print(f"{head['device']}, torch {head['torch']}, triton {head['triton']}", flush=True)
    began, rows, failed = time.perf_counter(), [], 0
    for i, case in enumerate(cases):
        if options.budget is not None and i and time.perf_counter() - began > options.budget:
            print(f"out of budget: {len(cases) - i} of {len(cases)} cases are left")
            break
        try:
            for row in run_case(case, options, kernels, device):
                rows.append(row)        # at once: what fails later in this case takes nothing back
        except Exception as error:      # one case's fault must not cost the others; triton's errors are no RuntimeErrors
            failed += 1
            print(f"{case.what}: FAILED: {_line(error)}", flush=True)
        if options.out is not None:
            write_atomically(Path(options.out), json.dumps({**head, "rows": rows}, indent=1) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for line in best_tiles(rows):
        print(line)
    if device.type == "cpu":
        print(f"{len(cases) - failed} of {len(cases)} cases right in Triton's interpreter; times need a GPU")
    return 1 if failed else 0


def run_case(case: Case, options: Options, kernels, device: torch.device) -> Iterator[dict]:
    """The rows of one case, each printed as it comes; in the end RuntimeError where a tile failed, which then has no row."""
    default = kernels.CAST_TILE if case.kernel == "cast_both" else kernels.GRAD_TILE
    inputs = _inputs(case, device)
    tiles = [default, *(kernels.Tile(*tile) for tile in TILES[case.kernel])]
    calls: dict[str, Callable] = {}
    failed = 0
    print(f"{case.what}: {case.M} x {case.K}, {case.floor / 1e6:,.0f} MB", flush=True)
    q = torch.empty((case.M, case.K), dtype=case.format, device=device) if case.rows else None
    qt = torch.empty((case.K, case.M), dtype=case.format, device=device)
    for tile in tiles:
        for copy in (q, qt):
            if copy is not None:
                copy.view(torch.uint8).fill_(0x55)      # what this tile leaves out must not be right by the last one's work
        name, call = "x".join(map(str, tile)), _call(case, inputs, kernels, q, qt, tile)
        try:
            call()
            _check(case, inputs, q, qt, exact=device.type == "cuda")
            calls[name] = call
        except Exception as error:
            failed += 1
            print(f"    {name} FAILED: {_line(error)}", flush=True)
    if device.type == "cuda":
        torch.compiler.reset()
        yield from _time(case, options, device, {**calls, "compiled": _compiled(case, inputs)}, default)
    if failed:
        raise RuntimeError(f"{failed} of {len(tiles)} tiles")


def _time(case: Case, options: Options, device: torch.device, calls: dict[str, Callable], default) -> Iterator[dict]:
    """Time each call in turns with a copy; its row. `default`: the tile in use."""
    copied = min(case.floor // 2, COPY_BYTES)
    source, target = (torch.randint(0, 255, (copied,), dtype=torch.uint8, device=device) for _ in range(2))
    for name, call in calls.items():
        for _ in range(3):
            call()
        copy_s, kernel_s = in_turns(lambda: target.copy_(source), call, options.repeats, device)
        shares = ratios(copy_s, kernel_s) * case.floor / (2 * copied)
        low, share, high = np.quantile(shares, (0.1, 0.5, 0.9)).tolist()
        ms, gb_per_s = float(np.median(kernel_s)) * 1e3, 2 * copied / float(np.median(copy_s)) / 1e9
        row = {"kind": "kernel", "kernel": case.kernel, "what": case.what, "M": case.M, "K": case.K, "bytes": case.floor,
               "tile": None if name == "compiled" else dict(zip(default._fields, map(int, name.split("x")), strict=True)),
               "in_use": name == "x".join(map(str, default)), "ms": round(ms, 5), "copy_gb_per_s": round(gb_per_s, 1),
               "share": round(share, 4), "share_p10": round(low, 4), "share_p90": round(high, 4)}
        print(f"    {name:16} {ms:8.4f} ms  {share:6.1%} of the copy's pace ({low:.1%} to {high:.1%}), copy {gb_per_s:,.0f} GB/s",
              flush=True)
        yield row


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def best_tiles(rows: list[dict]) -> list[str]:
    """By kernel: the geometric mean share of each tile over the cases, best first; what torch.compile reaches beside it."""
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        shares: dict[str, list[float]] = {}
        for row in rows:
            if row["kernel"] == kernel:
                name = "compiled" if row["tile"] is None else str(tuple(row["tile"].values()))
                shares.setdefault(name + (" (in use)" if row["in_use"] else ""), []).append(row["share"])
        means = sorted(((float(np.exp(np.log(values).mean())), name) for name, values in shares.items()), reverse=True)
        lines.append(f"{kernel}: " + ", ".join(f"{name} {mean:.1%}" for mean, name in means))
    return lines


# ------------------------------------------------------------------------------------------- what is called, what is right

def _inputs(case: Case, device: torch.device) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)        # never zeros: a GPU moves and multiplies them with less power, hence faster
    x = torch.randn(case.M, case.K, device=device, dtype=case.source)
    if case.kernel == "cast_both":
        return x, torch.tensor(torch.finfo(case.format).max / 8, device=device)
    x *= 3
    lse = torch.cat([torch.logsumexp(rows.float(), 1) for rows in x.split(CHECK_ROWS)])
    targets = torch.randint(0, case.K, (case.M,), device=device)
    targets[::7] = -100
    grad = torch.full((case.M,), 2.0**-19, device=device)      # 1 / tokens of a step
    return x, lse, targets, grad, torch.tensor(57344 * 2.0**19, device=device)


def _call(case: Case, inputs, kernels, q, qt, tile) -> Callable:
    if case.kernel == "cast_both":
        x, scale = inputs
        return lambda: kernels.cast_both(x, scale, case.format, q, qt, tile)
    return lambda: kernels.cross_entropy_grad(*inputs, q, qt, tile)


def _reference(case: Case, inputs) -> torch.Tensor:
    """What the kernels compute, in plain torch: (M, K) of the format."""
    if case.kernel == "cast_both":
        x, scale = inputs
        value = x.float() * scale
    else:
        logits, lse, targets, grad, scale = inputs
        hot = torch.arange(case.K, device=logits.device)[None, :] == targets[:, None]
        value = ((logits.float() - lse[:, None]).exp() - hot.float()) * (grad * scale)[:, None]
        value = torch.where(targets[:, None] == -100, 0.0, value)
    largest = torch.finfo(case.format).max
    return value.clamp(-largest, largest).to(case.format)


def _compiled(case: Case, inputs) -> Callable:
    def both(*inputs):
        q = _reference(case, inputs)
        return (q if case.rows else None), q.t().contiguous()
    compiled = torch.compile(both, dynamic=False, fullgraph=True)
    return lambda: compiled(*inputs)


def _check(case: Case, inputs, q, qt, exact: bool) -> None:
    """Raise RuntimeError where a value is wrong: by a bit (cast_both), by more than one step or often (the loss's gradient).

    The interpreter rounds FP8 otherwise than hardware does, up to a factor of two: there `exact` is False.
    """
    differ = 0
    for first in range(0, case.M, CHECK_ROWS):
        part = slice(first, first + CHECK_ROWS)
        rows = inputs if case.kernel == "cast_both" else [t[part] if t.ndim else t for t in inputs]
        want = _reference(case, (inputs[0][part], inputs[1]) if case.kernel == "cast_both" else rows)
        got = qt[:, part].t()
        if q is not None and not torch.equal(q[part].view(torch.uint8), got.view(torch.uint8)):
            raise RuntimeError("the two layouts hold different values: the kernel is wrong")
        a, b = got.contiguous().view(torch.uint8).int(), want.view(torch.uint8).int()
        steps = torch.where((a ^ b) > 127, (a & 127) + (b & 127), (a - b).abs())     # two signs: by way of zero
        largest = int(steps.max())
        differ += int((steps > 0).sum())
        if largest > (8 if not exact else case.kernel != "cast_both"):
            raise RuntimeError(f"a value is {largest} steps of its format off: the kernel is wrong")
    if exact and differ > 1e-3 * case.M * case.K:
        raise RuntimeError(f"{differ} of {case.M * case.K} values are one step off, more than ties explain: the kernel is wrong")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
