"""Print what a training step should take by a model of its bytes and FLOPs, beside what was measured.

    python bench/roofline.py                            the four sizes on an H100, the levers
    python bench/roofline.py --gpu h200 sizes=1p5b
    python bench/roofline.py --results bench/results/h100.jsonl         measured ceilings, predicted against measured

All numbers are modelled: sums of FLOPs and bytes over ceilings (bench/step_model.py), which are published
figures and assumptions until --results replaces them. How near they come to published runs (bench/evidence.py) is
printed each time: speeds in BF16 from 3 % below to 8 % above, tensorwise ratios .02 to .06 below (d26: 1.140 for 1.17).

The zero-cast ceiling of 1.5B is 1.48 here (1.53 with the head). An earlier estimate was 1.41, with FP8 matmuls at 1,180 TFLOP/s
x K / (K + 300) and fewer bytes of casts. With the bytes that Inductor plans, those rates give 1.38 (1.41), yet no published run's
ratio: d26 1.07 for 1.17. What the ratios would be at them stands among what they hang on; timed matmuls will decide.
"""

import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from bench import evidence, step_model
from bench.step_model import BUCKETS, CASTS, FP8, Casts, Ceilings, Moved, Shape, Step, shape_of, step
from bench.suites import MICRO_BATCH, TOKENS_PER_STEP
from model import GPTConfig
from runtime.cli import UserError, field_lines, nearest, read_options
from runtime.config import load_config
from runtime.log import peak_flops
from runtime.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
LABELS = ("bf16", "tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "auto", "tensorwise+kernels",
          "tensorwise_gw_hp+kernels", "auto+kernels", "tensorwise+head", "tensorwise+kernels+head")


@dataclass(frozen=True, kw_only=True)
class Options:
    gpu: str = "h100"               # h100 or h200
    sizes: tuple[str, ...] = tuple(MICRO_BATCH)     # of configs/gpt<size>_bf16.py
    context: int = 1024             # T, tokens
    results: str | None = None      # a file of bench/throughput.py: its ceilings, its cells

    POSITIONAL: ClassVar = ()

    def __post_init__(self):
        if self.gpu not in step_model.GPUS:
            raise UserError(f"gpu={self.gpu!r} has no ceilings here{nearest(self.gpu, step_model.GPUS)}")
        for size in self.sizes:
            if size not in MICRO_BATCH:
                raise UserError(f"sizes={size!r} is none of {', '.join(MICRO_BATCH)}")
        if not 16 <= self.context <= 65_536 or self.context & (self.context - 1):
            raise UserError(f"context={self.context} must be a power of two from 16 to 65536")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 printed, 1 a file that cannot be read, 2 the user's mistake."""
    if {"-h", "--help"} & set(arguments):
        print("\n".join([__doc__, *field_lines("", Options)]))
        return 0
    try:
        print("\n".join(report(read_options(Options, arguments))), flush=True)
        return 0
    except BrokenPipeError:     # whoever read has read enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # Python flushes once more at its end
        return 0
    except UserError as error:
        print(f"bench/roofline.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench/roofline.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def report(options: Options) -> list[str]:
    """All that the command prints, as lines. Raises UserError, OSError."""
    c, rows = step_model.GPUS[options.gpu], []
    if options.results:
        rows = results(options.results, options.gpu)
        c = evidence.with_measured(c, rows)
    lines = [*assumptions(c, bool(rows)), "", *evidence.anchor_lines()]
    for size in options.sizes:
        lines += ["", *size_lines(c, size, options.context)]
    lines += ["", *lever_lines(c, options.sizes, options.context), "", *doubt_lines(c, options.sizes[-1], options.context), "",
              *cast_lines()]
    return lines + (["", *against_measured(c, rows)] if rows else [])


def results(path: str, gpu: str) -> list[dict]:
    """The rows of a results file of this GPU. Raises UserError where it holds none."""
    file = next((f for f in (Path(path), ROOT / path) if f.is_file()), None)
    if not file:
        raise UserError(f"there is no {path}: give results=FILE that bench/throughput.py has written")
    rows = [row for row in read_rows(file) if isinstance(row, dict)]
    if not any(row.get("kind") in ("copy", "matmul", "attention", "cell") for row in rows):
        raise UserError(f"results={path} holds neither ceilings nor cells: give a file that bench/throughput.py has written")
    names = {row.get("gpu") for row in rows if row.get("kind") == "run"}
    if not all(name and _is_a(gpu, name) for name in names):
        raise UserError(f"results={path} was measured on {', '.join(sorted(str(n or 'a CPU') for n in names))}, not gpu={gpu}: "
                          f"give a file of that GPU, or its name")
    return rows


def _is_a(gpu: str, name: str) -> bool:
    """Whether `name`, as the driver says it, is the model of GPU: "NVIDIA H100 PCIe" and "NVIDIA GH200" are others."""
    return bool(re.search(rf"\b{gpu}\b", name, re.IGNORECASE)) and peak_flops(name) == peak_flops(gpu)


def assumptions(c: Ceilings, is_measured: bool) -> list[str]:
    """What the model rests on."""
    rates = ", ".join(f"{name} {rate / 1e12:,.0f}" for name, rate in c.flops.items())
    timed = sum(key[0] != "attention" for key in c.measured)
    said = (f"{timed} matmuls timed; others by the model times the median of measured / modelled: "
            + (", ".join(f"{name} {value:.2f}" for name, value in sorted(c.corrected.items())) or "none")) if is_measured else \
        "nothing here is measured: published figures and assumptions"
    return [
        f"MODELLED step times on {c.name}: {said}",
        f"  matmul [TFLOP/s]   {rates}, times K / (K + {c.half_k['bf16']}) in BF16, K / (K + "
        f"{c.half_k['fp8']}) in FP8, whole waves of tiles on {c.sms} SMs",
        f"  memory             {c.bandwidth / 1e12:.2f} TB/s; {c.transposed:.2f} of it where Inductor transposes FP8, "
        f"{c.ours:.2f} in our kernel",
        f"  attention          {c.attention / 1e12:,.0f} TFLOP/s of the causal half, times T / (T + {step_model.HALF_T}); x "
        f"{step_model.NARROW_HEAD} for heads below 128" + ("; as timed where it was" if len(c.measured) > timed else ""),
        f"  idle               {step_model.IDLE:.0%} of everything else",
    ]


def model_of(size: str, context: int) -> GPTConfig:
    return replace(load_config(ROOT / f"configs/gpt{size}_bf16.py").model, n_ctx=context)


def case(size: str, context: int) -> tuple[Shape, int]:
    """A size's shape and micro-batch at this context: as many tokens as in the suite."""
    return shape_of(model_of(size, context)), max(1, MICRO_BATCH[size] * 1024 // context)


def size_lines(c: Ceilings, size: str, context: int) -> list[str]:
    """One size under every label: tokens/s, ratio, shares of the step."""
    shape, micro_batch = case(size, context)
    peaks = peak_flops(c.name)
    base = step(c, shape, "bf16", micro_batch, TOKENS_PER_STEP)
    lines = [f"{size}, T={context}, micro-batch {micro_batch}, {TOKENS_PER_STEP:,} tokens a step, "
             f"{shape.flops_per_token / 1e9:.3f} GFLOP a token",
             f"  {'label':26} {'tok/s':>8} {'ratio':>6} {'TFLOP/s':>8} {'mfu_bf16':>9}   " + "".join(f"{b:>10}" for b in BUCKETS)]
    for label in LABELS:
        s = step(c, shape, label, micro_batch, TOKENS_PER_STEP)
        lines.append(_row(label, s, base, shape, peaks))
        if label.startswith("auto"):
            chosen = ", ".join(f"{name} {recipe}" for name, recipe in s.recipes.items())
            lines.append(f"  {'':26} ({chosen})")
    for label, head in (("zero casts", ""), ("zero casts, head too", "+head")):
        s = step(c, shape, "tensorwise" + head, micro_batch, TOKENS_PER_STEP, casts=step_model.FREE)
        lines.append(_row(label, s, base, shape, peaks))
    return lines


def _row(label: str, s: Step, base: Step, shape: Shape, peaks) -> str:
    flops = s.tok_per_s * shape.flops_per_token
    mfu = f"{flops / peaks[0]:9.1%}" if peaks else f"{'':9}"
    shares = "".join(f"{round(s.buckets[b] / s.seconds, 4) + 0.0:10.1%}" for b in BUCKETS)
    return f"  {label:26} {s.tok_per_s:8,.0f} {base.seconds / s.seconds:6.3f} {flops / 1e12:8.0f} {mfu}   {shares}"


def levers() -> list[tuple[str, str, Casts | None]]:
    """(what is added, label of the head's treatment, casts): each on top of those before it."""
    stock, ours = CASTS["tensorwise"], CASTS["tensorwise+kernels"]
    fused = replace(stock, x={n: m._replace(amax=2.0 if n == "out" else 0.0) for n, m in stock.x.items()},
                    g={n: m._replace(amax=0.0) for n, m in stock.g.items()})
    both = replace(stock, x=ours.x, g=ours.g)
    plain_head = replace(ours, g={**ours.g, "head": Moved(amax=2, ours=4)})     # dlogits written in BF16, then read twice
    return [("torchao's tensorwise", "tensorwise", stock),
            ("amax in the producer (not behind attention)", "tensorwise", fused),
            ("one kernel writes both layouts", "tensorwise", both),
            ("weights quantised once a step", "tensorwise", ours),
            ("head in FP8", "tensorwise+head", plain_head),
            ("loss's gradient emitted in FP8", "tensorwise+head", ours),
            ("all casts free", "tensorwise+head", step_model.FREE)]


def lever_lines(c: Ceilings, sizes: tuple[str, ...], context: int) -> list[str]:
    """What each lever gains, FP8's one after the other; then what would be lost without those of BF16."""
    lines = ["levers, each on top of those above: ratio to BF16 (gain in tokens/s)",
             f"  {'':46}" + "".join(f"{size:>18}" for size in sizes)]
    cases = {size: case(size, context) for size in sizes}
    base = {size: step(c, shape, "bf16", n, TOKENS_PER_STEP) for size, (shape, n) in cases.items()}
    before = {size: base[size].seconds for size in sizes}
    for name, label, casts in levers():
        cells = []
        for size, (shape, n) in cases.items():
            seconds = step(c, shape, label, n, TOKENS_PER_STEP, casts=casts).seconds
            cells.append(f"{base[size].seconds / seconds:9.3f} ({before[size] / seconds - 1:+6.1%})")
            before[size] = seconds
        lines.append(f"  {name:46}" + "".join(cells))
    lines.append("  BF16's own: tokens/s against the baseline")
    slow = replace(c, attention=330e12 * (1 + step_model.HALF_T / 2048))     # 330 TFLOP/s at T=2048
    for name, change in (("FlashAttention 2 instead of cuDNN", lambda shape, n: step(slow, shape, "bf16", n, TOKENS_PER_STEP)),
                         ("half the micro-batch", lambda shape, n: step(c, shape, "bf16", max(1, n // 2), TOKENS_PER_STEP)),
                         ("twice the micro-batch", lambda shape, n: step(c, shape, "bf16", n * 2, TOKENS_PER_STEP)),
                         ("logits kept in fp32", lambda shape, n: _with_fp32_logits(c, shape, n))):
        gains = [change(*cases[size]).tok_per_s / base[size].tok_per_s - 1 for size in sizes]
        lines.append(f"  {name:46}" + "".join(f"{'':9} ({gain:+6.1%})" for gain in gains))
    return lines


def doubt_lines(c: Ceilings, size: str, context: int) -> list[str]:
    """How the ratios of one size move with what is assumed."""
    shape, micro_batch = case(size, context)
    labels = ("tensorwise", "tensorwise+kernels", "tensorwise+kernels+head")
    lines = [f"what the ratios of {size} hang on", f"  {'':46}" + "".join(f"{label:>26}" for label in labels)]
    earlier = replace(c, flops=c.flops | dict.fromkeys(FP8[:2], 1180e12), half_k=c.half_k | dict.fromkeys(FP8[:2], 300))
    for name, other in (("as assumed" if not c.measured else "as measured", c),
                        ("FP8 matmuls 10 % faster", _with_fp8_at(c, 1.1)), ("FP8 matmuls 10 % slower", _with_fp8_at(c, 0.9)),
                        *([] if c.measured else [("FP8 matmuls at 1,180 TFLOP/s x K / (K + 300)", earlier)]),
                        ("memory 10 % slower", replace(c, bandwidth=0.9 * c.bandwidth)),
                        ("Inductor transposes at 0.4 of the bandwidth", replace(c, transposed=0.4)),
                        ("our kernel at 0.7 of it", replace(c, ours=0.7)), ("our kernel at all of it", replace(c, ours=1.0))):
        base = step(other, shape, "bf16", micro_batch, TOKENS_PER_STEP).seconds
        ratios = (base / step(other, shape, label, micro_batch, TOKENS_PER_STEP).seconds for label in labels)
        lines.append(f"  {name:46}" + "".join(f"{ratio:26.3f}" for ratio in ratios))
    return lines


def _with_fp8_at(c: Ceilings, factor: float) -> Ceilings:
    """FP8 matmuls, measured and modelled, at `factor` times their speed."""
    return replace(c, flops={name: rate * (1 if name == "bf16" else factor) for name, rate in c.flops.items()},
                   measured={key: value / (factor if key[0].startswith("fp8") else 1) for key, value in c.measured.items()})


def _with_fp32_logits(c: Ceilings, shape: Shape, micro_batch: int) -> Step:
    """A copy written (2 read, 4 written) and read by the loss instead, forward and backward: 6 + 2 + 2 bytes more."""
    s = step(c, shape, "bf16", micro_batch, TOKENS_PER_STEP)
    return replace(s, buckets={**s.buckets, "loss": s.buckets["loss"] + 10 * s.tokens * shape.vocab / c.bandwidth})


def cast_lines() -> list[str]:
    """Bytes that casts move per element of each tensor, over BF16's: counted from Inductor's plan for an H100."""
    names = ("qkv", "out", "gate_up", "down", "head")
    lines = ["bytes of the casts over BF16, per element of x (input), g (gradient of the output), w (weight) of each Linear",
             f"  {'':26}" + "".join(f"{'x ' + n:>10}" for n in names) + "".join(f"{'g ' + n:>10}" for n in names)
             + f"{'w / micro':>12}{'w / step':>10}"]
    for recipe in (n for n in CASTS if n != "bf16" and not n.startswith("amax")):
        k = CASTS[recipe]
        lines.append(f"  {recipe:26}" + "".join(f"{moved[n].total:10g}" for moved in (k.x, k.g) for n in names)
                     + f"{k.w.total:12g}{k.w_step.total:10g}")
    return lines


def against_measured(c: Ceilings, rows: list[dict]) -> list[str]:
    """Every valid cell of ours beside its prediction: tokens/s, ratio, milliseconds per bucket and micro-step."""
    lines = ["predicted / measured (1.00 is right)",
             f"  {'size':8} {'label':26} {'T':>5} {'micro':>6} {'tok/s':>16} {'':>6} {'ratio':>13}   "
             + "".join(f"{b:>16}" for b in BUCKETS)]
    newest = {(r.get("size"), r.get("label"), r.get("T"), r.get("micro_batch")): r for r in rows
              if r.get("kind") == "cell" and r.get("valid")}
    for (size, label, T, micro_batch), row in newest.items():
        try:
            shape = shape_of(model_of(size, T))
            s = step(c, shape, label, micro_batch, row["tokens_per_step"])
        except (UserError, KeyError, TypeError):      # peers and sizes that no config describes
            lines.append(f"  {size!s:8} {label!s:26} {'not modelled'}")
            continue
        base = step(c, shape, "bf16", micro_batch, row["tokens_per_step"])
        ratio = (row.get("ratio") or {}).get("median")
        said = f"{base.seconds / s.seconds:.3f} / {ratio:.3f}" if ratio else ""
        parts = [_part(s, bucket, row) for bucket in BUCKETS]
        lines.append(f"  {size:8} {label:26} {T:5d} {micro_batch:6d} {s.tok_per_s / 1e3:7.1f}k /{row['tok_per_s'] / 1e3:6.1f}k "
                     f"{s.tok_per_s / row['tok_per_s']:6.2f} {said:>13}   " + "".join(f"{part:>16}" for part in parts))
    return lines if newest else [*lines, "  no valid cell in this file"]


def _part(s: Step, bucket: str, row: dict) -> str:
    """Milliseconds of a bucket per micro-step, predicted / measured; the measured "other" holds what was idle."""
    if not row.get("buckets") or not row.get("step_s"):
        return ""
    # The profile is of a whole step: shares of it, times the cell's own time per token.
    measured = dict(row["buckets"])
    whole = row.get("profiled_step_s") or max(row["step_s"], sum(measured.values()))
    measured["other"] = measured.get("other", 0.0) + max(0.0, whole - sum(measured.values()))
    seconds = measured.get(bucket, 0.0) / whole * s.tokens / row["tok_per_s"]
    return f"{s.buckets[bucket] * 1e3:.1f} / {seconds * 1e3:.1f}" if math.isfinite(seconds) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
