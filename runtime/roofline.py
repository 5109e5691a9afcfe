"""Model what a training step takes on one GPU: FLOPs and bytes over ceilings. Nothing here is a measurement of this project.

    python -m runtime.roofline                              four sizes on an H100, FP8's zero-cast ceiling, published runs
    python -m runtime.roofline gpu=h200 sizes=1p5b context=2048

The bytes are counted from the kernels that Inductor plans for model.py on an H100 (dev/compiler_plan.py); the ceilings are
published figures. Sums of times: what overlaps, and what the caches hold, is not modelled. `--plan` and the sweep's table take
FP8's speed over BF16's from here where nobody has measured it (modelled_ratio).

Thirteen constants are assumed, or were chosen with an eye on published runs, and held against thirteen published figures
(ANCHORS): to come out proves little. docs/speed.md says how near they come.

    M tokens of a micro-batch   K inputs, N outputs of a Linear   x input   g gradient of the output   w weight
"""

import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from model import GPTConfig
from runtime.cli import command, run_command
from runtime.config import Config, load_config
from runtime.log import PEAK_FLOPS, peak_flops

BUCKETS = ("matmul", "cast", "attention", "pointwise", "loss", "optimizer", "other")


@dataclass(frozen=True)
class Ceilings:
    """What a GPU can do, for large operands: published or assumed."""
    name: str
    flops: dict[str, float]         # FLOP/s that a large matmul sustains, by format; fp8_fp32 is FP8 that writes fp32
    bandwidth: float                # bytes/s of a pointwise kernel, read and written
    attention: float                # FLOP/s of causal attention over an endless context, masked half not counted
    transposed: float = 0.8         # of the bandwidth, where Inductor writes a transposed copy (pytorch#130015); assumed
    ours: float = 0.85              # of the bandwidth, for runtime/fp8_kernels.py; assumed
    half_k: tuple[float, float] = (80, 200)     # K at which a matmul reaches half its rate, in BF16 and in FP8
    sms: int = 132


# 794 and 1403 TFLOP/s are the best of any shape (ml-engineering, mamf); 0.92 of it fits random data at the shapes of training
# (nanochat: 65536 x 1664 x 6656 in 2.00 ms BF16, 1.45 ms FP8 with its casts). Rowwise, forward alone, lies between the 575 that
# d26's 0.90 asks for and the 790 of 8B's 1.10; what the others lose without fast accumulation is in it.
_HOPPER = {"bf16": 725e12, "fp8": 1300e12, "fp8_fp32": 1300e12, "fp8_rowwise": 680e12}
GPUS = {
    "h100": Ceilings("H100 SXM 700 W", _HOPPER, 2.75e12, 560e12),      # copy: 3.0 of 3.35 TB/s (published); kernels less
    "h200": Ceilings("H200 SXM", _HOPPER, 3.95e12, 560e12),
}
HALF_T = 512            # context at which attention reaches half its rate: 373 TFLOP/s at 1,024, 527 at 8,192
NARROW_HEAD = 0.7       # of that rate, with heads narrower than 128
TILES = (((128, 256), 1.0), ((256, 128), 1.0), ((128, 128), 0.9))   # rows x columns of the output per SM, share of the rate
IDLE = 0.04             # of everything else: launches, tails, clocks


class Moved(NamedTuple):
    """Bytes that casts move per element of a tensor, beside what every recipe moves."""
    amax: float = 0.0           # read to find the largest magnitude, by a kernel of its own
    cast: float = 0.0           # read and written as it lies
    transposed: float = 0.0     # by a kernel of Inductor's that writes a transposed copy, alone or besides
    ours: float = 0.0           # by our kernel, which writes both copies
    spared: float = 0.0         # written and read in BF16's graph, but not in this one

    def seconds(self, elements: float, c: Ceilings) -> float:
        straight = self.amax + self.cast - self.spared
        return elements * (straight + self.transposed / c.transposed + self.ours / c.ours) / c.bandwidth


@dataclass(frozen=True)
class Casts:
    """What a recipe does to each Linear's tensors: `x` and `g` by the Linear's name, `w` per micro-batch and per step."""
    formats: tuple[str, str, str]       # of the matmuls: forward, input's gradient, weight's gradient
    x: dict[str, Moved]
    g: dict[str, Moved]
    w: Moved
    w_step: Moved = Moved()
    adds: bool = False                  # weight gradients are added up within their matmul, but the head's (keep_gradients)


NAMES = ("qkv", "out", "gate_up", "down", "head")


def _by(*moved: Moved) -> dict[str, Moved]:
    return dict(zip(NAMES, moved, strict=True))


_NONE = dict.fromkeys(NAMES, Moved())
# A norm's output is not written where only its FP8 copy is read (spares 2); SwiGLU's neither (spares 6), but each pass over
# it reads both halves again. The weight gradient's amax is found anew, and casts begin at BF16: two passes of each.
_X_TENSOR = _by(Moved(2, 3, 3, spared=2), Moved(4, 3, 3), Moved(2, 3, 3, spared=2),
                Moved(8, 5, 5, spared=6), Moved(2, 3, 3, spared=2))
_G_TENSOR = _by(Moved(2, 0, 4, spared=4), Moved(0, 0, 4), Moved(2, 0, 4), Moved(0, 0, 4), Moved(2, 0, 4, spared=4))
_X_OURS = _by(Moved(ours=4), Moved(2, ours=4), Moved(ours=4), Moved(ours=4), Moved(ours=4))
_G_OURS = _by(Moved(ours=4), Moved(0, 2, ours=4), Moved(ours=4), Moved(0, 2, ours=4), Moved(ours=4, spared=4))

# Scales known before: Inductor casts in the kernel that makes x, whose transposed copy it makes anew in the backward pass from
# what that keeps (a norm's input, gate and up), and in the one that makes g, which then leaves it in both layouts alone. As
# dev/compiler_plan.py has it: 7,613 kB a token at 1.5B, 1,652 above BF16; these sum up to 1,663.
_X_DELAYED = _by(Moved(0, 1, 3, spared=2), Moved(0, 3, 3), Moved(0, 1, 3, spared=2), Moved(0, 1, 5, spared=2),
                 Moved(0, 1, 3, spared=2))
_G_DELAYED = _by(Moved(transposed=2, spared=2), Moved(transposed=4), Moved(transposed=2, spared=2), Moved(transposed=4),
                 Moved(ours=4, spared=4))

_X_GW_HP = _by(Moved(0, 3), Moved(2, 3), Moved(0, 3), Moved(4, 5), Moved(0, 3))
_G_GW_HP = _by(Moved(2, 1), Moved(0, 3), Moved(2, 3), Moved(0, 3), Moved(2, 1))
# Rows: one kernel finds the amax and casts; columns once more for the weight gradient. Behind a rowwise matmul of the backward
# pass comes a multiplication by its scales (ao#2184), which keeps the norms' backward passes from fusing: 11 or 37 bytes.
_X_ROW = _by(Moved(2, 1, 3, spared=2), Moved(2, 7, 3), Moved(2, 1, 3, spared=2), Moved(4, 5, 5, spared=6),
             Moved(2, 1, 3, spared=2))
_G_ROW = _by(Moved(2, 0, 4, spared=4), Moved(2, 31, 4), Moved(2, 0, 4), Moved(2, 31, 4), Moved(2, 0, 4, spared=4))
_X_ROW_GW_HP = _by(Moved(0, 1), Moved(0, 7), Moved(0, 1), Moved(0, 3), Moved(0, 1))
_G_ROW_GW_HP = _by(Moved(0, 1), Moved(0, 11), Moved(0, 3), Moved(0, 11), Moved(0, 1))
# Row scales reach the matmul in the forward pass alone: backward, without fast accumulation, torchao multiplies by one scale of
# 1 and applies those of the rows afterwards (float8_ops.py).
_FP8, _OURS, _ROWS = ("fp8",) * 3, ("fp8", "fp8", "fp8_fp32"), ("fp8_rowwise", "fp8", "fp8")

CASTS = {
    # The weight is cast once a step (4 read, 2 written), its gradient leaves the matmul in fp32.
    "bf16": Casts(("bf16",) * 3, _NONE, _NONE, Moved(), Moved(cast=6), adds=True),
    # torchao casts weights in every micro-batch, and gradients behind the matmul (2 read, 4 written).
    "tensorwise": Casts(_FP8, _X_TENSOR, _G_TENSOR, Moved(4, 11, 5)),
    "tensorwise_gw_hp": Casts(("fp8", "fp8", "bf16"), _X_GW_HP, _G_GW_HP, Moved(4, 11, 5)),
    "rowwise": Casts(_ROWS, _X_ROW, _G_ROW, Moved(0, 11, 5)),
    "rowwise_with_gw_hp": Casts((*_ROWS[:2], "bf16"), _X_ROW_GW_HP, _G_ROW_GW_HP, Moved(4, 11, 5)),
    # The weight in both layouts, once a step: 4 for the amax, 4 + 2 for the copies.
    "tensorwise+kernels": Casts(_OURS, _X_OURS, _G_OURS, Moved(), Moved(amax=4, ours=6)),
    "tensorwise+kernels+delayed": Casts(_OURS, _X_DELAYED, _G_DELAYED, Moved(), Moved(amax=4, ours=6)),
    "tensorwise_gw_hp+kernels": Casts(("fp8", "fp8", "bf16"), {n: Moved(m.amax, ours=3) for n, m in _X_OURS.items()},
                                      dict.fromkeys(_NONE, Moved(ours=3)), Moved(), Moved(amax=4, ours=6), adds=True),
}
CASTS |= {f"amax{rest}": CASTS[f"tensorwise{rest}"] for rest in ("", "+kernels", "+kernels+delayed")}
ROPE = 10 + 12          # bytes per value of a block's input, forward and backward, which lays q, k and v side by side again
ROPE_BY_CAT = ROPE + 8  # others', where a kernel of its own does that
FREE = Casts(_FP8, _NONE, _NONE, Moved())       # the zero-cast ceiling
AUTOCAST = Casts(("bf16",) * 3, _NONE, _NONE, Moved(cast=12))   # others' BF16: weights and gradients in every micro-batch


class Shape(NamedTuple):
    """The sizes of a decoder that a step's time depends on; norms are left out of all parameter counts here."""
    n_layer: int
    n_embd: int
    n_ffn: int
    n_head: int
    n_ctx: int
    vocab: int
    kv_heads: int | None = None
    gated: bool = True          # SwiGLU; else one matrix up, one down
    tied: bool = True

    @property
    def params_matmul(self) -> int:
        return sum(count * K * N for _, K, N, count in linears(self))

    @property
    def flops_per_token(self) -> int:
        """As GPT.counts() defines it: 6 a matmul parameter and 12 L H D T."""
        return 6 * self.params_matmul + 12 * self.n_layer * self.n_embd * self.n_ctx


def shape_of(config: GPTConfig) -> Shape:
    return Shape(config.n_layer, config.n_embd, config.n_ffn, config.n_head, config.n_ctx, config.vocab_padded, config.kv_heads,
                 tied=config.tied)


def linears(shape: Shape) -> list[tuple[str, int, int, int]]:
    """(name, inputs K, outputs N, how many) of every Linear of a model."""
    C, F, L = shape.n_embd, shape.n_ffn, shape.n_layer
    qkv = C + 2 * (shape.kv_heads or shape.n_head) * (C // shape.n_head)
    return [("qkv", C, qkv, L), ("out", C, C, L), ("gate_up", C, 2 * F if shape.gated else F, L), ("down", F, C, L),
            ("head", C, shape.vocab, 1)]


def matmul_seconds(c: Ceilings, format: str, M: int, K: int, N: int) -> float:
    """(M, K) @ (K, N), with K split where the output has too few tiles for the SMs. A sum over c.half_k terms runs at half the
    rate."""
    rate = c.flops[format] * K / (K + c.half_k[format != "bf16"])
    best = math.inf
    for (rows, columns), share in TILES:
        tiles = math.ceil(M / rows) * math.ceil(N / columns)
        work = 2 * K * rows * columns * tiles / (rate * share)
        for parts in (1, 2, 4, 8, 16):
            waves = tiles * parts / c.sms
            summed = 8 * M * N * parts / c.bandwidth if parts > 1 else 0.0     # fp32 partial sums, written and read
            best = min(best, work * math.ceil(waves) / waves + summed)
    size = 2 if format == "bf16" else 1
    return max(best, (size * (M * K + K * N) + (4 if format == "fp8_fp32" else 2) * M * N) / c.bandwidth)


def linear_seconds(c: Ceilings, name: str, K: int, N: int, casts: Casts, M: int, accumulation: int) -> tuple[float, float]:
    """(matmuls, FP8's casts over BF16's) of one Linear per micro-batch; what a step does once counts in parts."""
    matmul = sum(matmul_seconds(c, f, *sizes) for f, sizes in zip(casts.formats, ((M, K, N), (M, N, K), (N, M, K)), strict=True))
    cast = (casts.x[name].seconds(M * K, c) + casts.g[name].seconds(M * N, c)
            + casts.w.seconds(K * N, c) + casts.w_step.seconds(K * N, c) / accumulation)
    return matmul, cast


class Step(NamedTuple):
    """A modelled micro-batch, with its part of the optimizer step."""
    tok_per_s: float
    seconds: float
    buckets: dict[str, float]       # of these seconds


def step(c: Ceilings, shape: Shape, label: str, micro_batch: int, tokens_per_step: int, casts: Casts | None = None,
         shard: int = 1, bf16: Casts = CASTS["bf16"], rope: int = ROPE) -> Step:
    """The modelled micro-step of `label`, a recipe with +kernels, +delayed and +head, on one GPU, which sees `tokens_per_step`
    and updates 1 / `shard` of the weights; `casts` and `bf16` replace what CASTS says of the label, of BF16. KeyError: a label
    without a model."""
    known = CASTS | {"bf16": bf16}
    M = micro_batch * shape.n_ctx
    accumulation = max(1, tokens_per_step // M)
    recipe, *extras = label.split("+")
    candidates = [name for name in CASTS if name.count("+") <= ("kernels" in extras)] if recipe == "auto" else [
        recipe + "+kernels" * ("kernels" in extras) + "+delayed" * ("delayed" in extras)]
    buckets, within = dict.fromkeys(BUCKETS, 0.0), 0        # parameters whose gradients their matmul adds up
    for linear, K, N, count in linears(shape):
        is_plain = linear == "head" and "head" not in extras
        options = [bf16] if is_plain else [casts or known[name] for name in candidates]
        seconds = [linear_seconds(c, linear, K, N, option, M, accumulation) for option in options]
        (matmul, cast), chosen = min(zip(seconds, options, strict=True), key=lambda one: sum(one[0]))
        buckets["matmul"] += count * matmul
        buckets["cast"] += count * cast
        within += count * K * N if chosen.adds and linear != "head" and accumulation > 1 else 0
    C, table = shape.n_embd, shape.vocab * shape.n_embd
    params = shape.params_matmul + (0 if shape.tied else table)
    # A token's pointwise bytes in BF16, as Inductor plans them: norms with the residual sums 2 x (8 forward + 8 backward), RoPE,
    # the activation; then the embedding and the last norm.
    pointwise = shape.n_layer * ((32 + rope) * C + (16 if shape.gated else 10) * shape.n_ffn) + 16 * C
    # Gradients added up (but for a step's first micro-batch), the embedding's scattered; within a matmul they are read once more,
    # and zeroed once a step.
    gradients = 12 * (accumulation - 1) / accumulation * (params - within) + (4 + 4 / accumulation) * within
    gradients += (14 if shape.tied else 4) * table + 20 * M * C
    # Attention is 2 + 5 matmuls of T / 2 columns, the causal half.
    rate = c.attention * shape.n_ctx / (shape.n_ctx + HALF_T) * (1.0 if C // shape.n_head >= 128 else NARROW_HEAD)
    buckets["attention"] = shape.n_layer * M * 7 * C * shape.n_ctx / rate
    buckets["pointwise"] = (M * pointwise + gradients) / c.bandwidth
    buckets["loss"] = 6 * M * shape.vocab / c.bandwidth         # logits read forward, read and written backward
    buckets["optimizer"] = 40 * params / shard / c.bandwidth / accumulation     # clip 4 + 8, AdamW 16 + 12
    buckets["other"] = IDLE * sum(buckets.values())
    whole = sum(buckets.values())
    return Step(M / whole, whole, buckets)


def modelled_ratio(config: Config, gpu: str, gpus: int = 1) -> float | None:
    """Modelled speed of a run over its BF16 twin's on `gpus` of this name; None where no model tells: another GPU, `auto`, a
    recipe without casts here, a choice of Linears other than all or all but the head, eager or recomputed blocks."""
    f, p, m = config.fp8, config.parallel, config.model
    found = [c for name, c in GPUS.items()
             if re.search(rf"\b{name}\b", gpu, re.IGNORECASE) and peak_flops(gpu) == peak_flops(name)]
    # Under FSDP2 our kernels cast at each use.
    if not found or f.label.removesuffix("+head") not in CASTS or p.recompute or not p.compile or (gpus > 1 and f.kernels):
        return None
    micro_batch = max(1, TOKENS // m.n_ctx) if config.data.micro_batch == "auto" else config.data.micro_batch
    base = replace(CASTS["bf16"], adds=gpus == 1)
    bf16, quantised = (step(found[0], shape_of(m), name, micro_batch, config.data.tokens_per_step // gpus, shard=p.shard or 1,
                            bf16=base) for name in ("bf16", f.label))
    return bf16.seconds / quantised.seconds


# ------------------------------------------------------------------------------------------------------- published runs
# nanochat: T = 2,048, yet three layers of four look back 1,024 tokens only: 832 in the mean over a row, as T = 1,664 has
D12, D24, D26 = (Shape(d, 64 * d, 256 * d, d // 2, 1664, 32768, gated=False, tied=False) for d in (12, 24, 26))
LLAMA_1B8 = Shape(24, 2048, 7168, 16, 8192, 128256, kv_heads=8, tied=False)     # fms-fsdp, llama3_1.8b
LLAMA_8B = Shape(32, 4096, 14336, 32, 8192, 128256, kv_heads=8, tied=False)
XL, SMALL = Shape(48, 1600, 6400, 25, 1024, 50304, gated=False), Shape(12, 768, 3072, 12, 1024, 50304, gated=False)
# name, shape, micro-batch, tokens per GPU and optimizer step, GPUs that share the weights, label; tokens/s of a GPU in BF16, or
# FP8's speed over BF16's: least and most where the sources differ
ANCHORS = (
    ("nanochat d24, Run 1", D24, 20, 66_560, 8, "bf16", (99_980,)),
    ("nanochat d26, LOG 2026-02-02", D26, 20, 66_560, 8, "bf16", (78_750,)),
    ("GPT-2 XL, PyTorch (ao#1297) and llm.c", XL, 12, 2**20 // 8, 8, "bf16", (46_500, 47_800)),
    ("GPT-2 124M, llm.c, 8 GPUs", SMALL, 64, 65_536, 1, "bf16", (468_100,)),
    ('nanochat d12, "still slower"', D12, 40, 66_560, 8, "tensorwise+head", (0.90, 1.00)),      # a bound on one side
    ("nanochat d24", D24, 20, 66_560, 8, "tensorwise+head", (1.07, 1.19)),
    ("nanochat d26, LOG 2026-02-02", D26, 20, 66_560, 8, "tensorwise+head", (1.17,)),
    ("nanochat d26, LOG 2026-02-02", D26, 20, 66_560, 8, "rowwise+head", (0.90,)),
    ("Llama 3 1.8B, 128 GPUs, fms-fsdp", LLAMA_1B8, 2, 2 * 8192, 128, "tensorwise", (1.18,)),
    ("Llama 3 8B, 8 GPUs, torchao", LLAMA_8B, 1, 8192, 8, "rowwise", (1.10,)),
    ("Llama 3 8B, 8 GPUs, torchao", LLAMA_8B, 1, 8192, 8, "tensorwise", (1.25,)),
)


def anchors(c: Ceilings) -> list[tuple[str, str, tuple[float, ...], float]]:
    """(name, label, published, modelled) of every published run."""
    found: list[tuple[str, str, tuple[float, ...], float]] = []
    for name, shape, micro_batch, tokens, shard, label, published in ANCHORS:
        bf16, this = (step(c, shape, one, micro_batch, tokens, shard=shard, bf16=AUTOCAST, rope=ROPE_BY_CAT)
                      for one in ("bf16", label))
        found.append((name, label, published, this.tok_per_s if label == "bf16" else bf16.seconds / this.seconds))
    # The forward pass of a Linear that nanochat timed, in ms: FP8 with the casts of input and weight.
    M, K, N = 65_536, 1664, 6656
    for form, over, ms in (("bf16", 0.0, 2.00), ("fp8", (5 * M * K + 9 * K * N) / c.bandwidth, 1.45)):
        found.append(("nanochat, 65536 x 1664 x 6656 [ms]", form, (ms,), 1e3 * (matmul_seconds(c, form, M, K, N) + over)))
    return found


MICRO_BATCH = {"125m": 64, "350m": 32, "760m": 16, "1p5b": 16}      # sequences of 1,024 tokens
TOKENS, TOKENS_PER_STEP = 16_384, 524_288                           # of a micro-batch that nobody chose; of a step
LABELS = ("bf16", "tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "auto", "tensorwise+kernels",
          "tensorwise_gw_hp+kernels", "auto+kernels", "tensorwise+kernels+delayed", "tensorwise+head", "tensorwise+kernels+head",
          "tensorwise+kernels+delayed+head")


@dataclass(frozen=True, kw_only=True)
class Options:
    gpu: Literal["h100", "h200"] = "h100"
    sizes: tuple[Literal["125m", "350m", "760m", "1p5b"], ...] = ("125m", "350m", "760m", "1p5b")   # of configs/gpt<size>_bf16.py
    context: int = 1024             # T, tokens


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 printed, 2 the user's mistake."""
    return command(__doc__, Options, arguments, show)


def show(options: Options) -> None:
    c = GPUS[options.gpu]
    print(f"MODELLED step times on {c.name} from published ceilings; nothing here is measured")
    for size in options.sizes:
        print("\n".join(["", *size_lines(c, size, options.context)]))
    print(f"\n{'published runs on H100s':39} {'label':16} {'published':>17} {'modelled':>9}")
    for name, label, published, modelled in anchors(GPUS["h100"]):
        form = ",.0f" if modelled > 1000 else ".3f"
        print(f"  {name:38}{label:16} {' to '.join(f'{value:{form}}' for value in published):>17} {modelled:9{form}}")


def size_lines(c: Ceilings, size: str, context: int) -> list[str]:
    """One size under every label, as many tokens a micro-batch as MICRO_BATCH at 1,024: tokens/s, ratio, shares of the step; then
    with all casts free."""
    config = load_config(Path(__file__).resolve().parents[1] / f"configs/gpt{size}_bf16.py")
    shape, micro_batch = shape_of(replace(config.model, n_ctx=context)), max(1, MICRO_BATCH[size] * 1024 // context)
    lines = [f"{size}, T={context}, micro-batch {micro_batch}, {TOKENS_PER_STEP:,} tokens a step, "
             f"{shape.flops_per_token / 1e9:.3f} GFLOP a token",
             f"  {'label':31} {'tok/s':>8} {'ratio':>6} {'mfu_bf16':>9}   " + "".join(f"{b:>10}" for b in BUCKETS)]
    base, (peak, _) = step(c, shape, "bf16", micro_batch, TOKENS_PER_STEP).seconds, PEAK_FLOPS[c.name.split()[0]]
    rows: list[tuple[str, str, Casts | None]] = [(label, label, None) for label in LABELS]
    rows += [("zero casts", "tensorwise", FREE), ("zero casts, head too", "tensorwise+head", FREE)]
    for name, label, casts in rows:
        s = step(c, shape, label, micro_batch, TOKENS_PER_STEP, casts)
        shares = "".join(f"{round(s.buckets[b] / s.seconds, 3) + 0.0:10.1%}" for b in BUCKETS)
        lines.append(f"  {name:31} {s.tok_per_s:8,.0f} {base / s.seconds:6.3f} "
                     f"{s.tok_per_s * shape.flops_per_token / peak:9.1%}   {shares}")
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
