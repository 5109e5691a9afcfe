"""Model what a training step takes on one GPU: FLOPs and bytes over ceilings.

Nothing in this file is a measurement of this project. The bytes are counted from the kernels that Inductor (torch 2.11)
plans for model.py on an H100, compiled without one; the ceilings are published figures until bench/throughput.py has
measured them (bench/evidence.py). Sums of times: what overlaps, and what the caches hold, is not modelled.

Thirteen constants are assumed, or were chosen with an eye on published runs: three rates and two half lengths of matmuls, the
share of narrow tiles, the bandwidth and two shares of it, three of attention, the idle share. The published figures that they are
held against are thirteen as well (bench/evidence.py; bench/roofline.py prints how near each comes): to come out proves little.

    M tokens of a micro-batch   K inputs, N outputs of a Linear   x input   g gradient of the output   w weight
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from model import GPTConfig

BUCKETS = ("matmul", "cast", "attention", "pointwise", "loss", "optimizer", "other")
FP8 = ("fp8", "fp8_fp32", "fp8_rowwise")     # formats of matmuls, as bench/ceilings.py names them; fp8_fp32 writes fp32
PASSES = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Ceilings:
    """What a GPU can do, for large operands; all of it assumed unless `measured` says otherwise."""
    name: str
    flops: dict[str, float]         # FLOP/s that a large matmul sustains, by format
    bandwidth: float                # bytes/s of a pointwise kernel, read and written
    attention: float                # FLOP/s of causal attention over an endless context, masked half not counted
    transposed: float = 0.8         # of the bandwidth, where Inductor writes a transposed copy (pytorch#130015); assumed
    ours: float = 0.85              # of the bandwidth, for runtime/fp8_kernels.py; assumed until bench/kernels.py has run
    half_k: dict[str, float] = field(default_factory=lambda: {"bf16": 80, **dict.fromkeys(FP8, 200)})     # see matmul_seconds
    sms: int = 132
    # (format, M, K, N) -> seconds; ("attention", heads, T, width of a head) -> seconds a token and layer, forward and backward
    measured: dict[tuple, float] = field(default_factory=dict)
    corrected: dict[str, float] = field(default_factory=dict)       # format -> measured over modelled seconds, median


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
    """Bytes that casts move per element of a tensor, over those that BF16 moves."""
    amax: float = 0.0           # read to find the largest magnitude, by a kernel of its own
    cast: float = 0.0           # read and written as it lies
    transposed: float = 0.0     # by a kernel of Inductor's that writes a transposed copy, alone or besides
    ours: float = 0.0           # by our kernel, which writes both copies
    spared: float = 0.0         # written and read in BF16's graph, but not in this one

    def seconds(self, elements: float, c: Ceilings) -> float:
        straight = self.amax + self.cast - self.spared
        return elements * (straight + self.transposed / c.transposed + self.ours / c.ours) / c.bandwidth

    @property
    def total(self) -> float:
        return self.amax + self.cast + self.transposed + self.ours - self.spared


@dataclass(frozen=True)
class Casts:
    """What a recipe does to each Linear's tensors: `x` and `g` by the Linear's name, `w` per micro-batch and per step."""
    formats: tuple[str, str, str]       # of the matmuls, in the order of PASSES
    x: dict[str, Moved]
    g: dict[str, Moved]
    w: Moved
    w_step: Moved = Moved()


_NONE = dict.fromkeys(("qkv", "out", "gate_up", "down", "head"), Moved())
# Ours: the weight's copies of the step's beginning are read, and the weight gradient's matmul writes fp32 itself.
_W_OURS = Moved(spared=12)
# A norm's output is not written where only its FP8 copy is read (spares 2); SwiGLU's neither (spares 6), but each pass over
# it reads both halves again. The weight gradient's amax is found anew, and casts begin at BF16: two passes of each.
_X_TENSOR = {"qkv": Moved(2, 3, 3, spared=2), "out": Moved(4, 3, 3), "gate_up": Moved(2, 3, 3, spared=2),
             "down": Moved(8, 5, 5, spared=6), "head": Moved(2, 3, 3, spared=2)}
_G_TENSOR = {"qkv": Moved(2, 0, 4, spared=4), "out": Moved(0, 0, 4), "gate_up": Moved(2, 0, 4), "down": Moved(0, 0, 4),
             "head": Moved(2, 0, 4, spared=4)}
_X_OURS = {"qkv": Moved(ours=4), "out": Moved(2, ours=4), "gate_up": Moved(ours=4), "down": Moved(ours=4), "head": Moved(ours=4)}
_G_OURS = {"qkv": Moved(ours=4), "out": Moved(0, 2, ours=4), "gate_up": Moved(ours=4), "down": Moved(0, 2, ours=4),
           "head": Moved(ours=4, spared=4)}

_X_GW_HP = {"qkv": Moved(0, 3), "out": Moved(2, 3), "gate_up": Moved(0, 3), "down": Moved(4, 5), "head": Moved(0, 3)}
_G_GW_HP = {"qkv": Moved(2, 1), "out": Moved(0, 3), "gate_up": Moved(2, 3), "down": Moved(0, 3), "head": Moved(2, 1)}
# Rows: one kernel finds the amax and casts; columns once more for the weight gradient. Behind a rowwise matmul of the backward
# pass comes a multiplication by its scales (ao#2184), which keeps the norms' backward passes from fusing: 11 or 37 bytes.
_X_ROW = {"qkv": Moved(2, 1, 3, spared=2), "out": Moved(2, 7, 3), "gate_up": Moved(2, 1, 3, spared=2),
          "down": Moved(4, 5, 5, spared=6), "head": Moved(2, 1, 3, spared=2)}
_G_ROW = {"qkv": Moved(2, 0, 4, spared=4), "out": Moved(2, 31, 4), "gate_up": Moved(2, 0, 4), "down": Moved(2, 31, 4),
          "head": Moved(2, 0, 4, spared=4)}
_X_ROW_GW_HP = {"qkv": Moved(0, 1), "out": Moved(0, 7), "gate_up": Moved(0, 1), "down": Moved(0, 3), "head": Moved(0, 1)}
_G_ROW_GW_HP = {"qkv": Moved(0, 1), "out": Moved(0, 11), "gate_up": Moved(0, 3), "down": Moved(0, 11), "head": Moved(0, 1)}
# Row scales reach the matmul in the forward pass alone: backward, without fast accumulation, torchao multiplies by one scale of
# 1 and applies those of the rows afterwards (float8_ops.py).
_FP8, _OURS, _ROWS = ("fp8",) * 3, ("fp8", "fp8", "fp8_fp32"), ("fp8_rowwise", "fp8", "fp8")

CASTS = {
    "bf16": Casts(("bf16",) * 3, _NONE, _NONE, Moved()),
    "tensorwise": Casts(_FP8, _X_TENSOR, _G_TENSOR, Moved(4, 5, 5, spared=6)),
    "tensorwise_gw_hp": Casts(("fp8", "fp8", "bf16"), _X_GW_HP, _G_GW_HP, Moved(4, 5, 5, spared=6)),
    "rowwise": Casts(_ROWS, _X_ROW, _G_ROW, Moved(0, 5, 5, spared=6)),
    "rowwise_with_gw_hp": Casts((*_ROWS[:2], "bf16"), _X_ROW_GW_HP, _G_ROW_GW_HP, Moved(4, 5, 5, spared=6)),
    # The weight in both layouts, once a step: 4 for the amax, 4 + 2 for the copies.
    "tensorwise+kernels": Casts(_OURS, _X_OURS, _G_OURS, _W_OURS, Moved(amax=4, ours=6)),
    "tensorwise_gw_hp+kernels": Casts(("fp8", "fp8", "bf16"), {n: Moved(m.amax, ours=3) for n, m in _X_OURS.items()},
                                      dict.fromkeys(_NONE, Moved(ours=3)), Moved(spared=6), Moved(amax=4, ours=6)),
}
CASTS["amax"], CASTS["amax+kernels"] = CASTS["tensorwise"], CASTS["tensorwise+kernels"]
FREE = Casts(_FP8, _NONE, _NONE, _W_OURS)       # the zero-cast ceiling


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that a step's time depends on."""
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
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def params_matmul(self) -> int:
        return sum(linear.count * linear.K * linear.N for linear in linears(self))

    @property
    def params(self) -> int:
        return self.params_matmul + (0 if self.tied else self.vocab * self.n_embd)

    @property
    def flops_per_token(self) -> int:
        """As GPT.counts() defines it: 6 a matmul parameter and 12 L H D T."""
        return 6 * self.params_matmul + 12 * self.n_layer * self.n_embd * self.n_ctx


class Linear(NamedTuple):
    name: str
    K: int
    N: int
    count: int


def shape_of(config: GPTConfig) -> Shape:
    return Shape(config.n_layer, config.n_embd, config.n_ffn, config.n_head, config.n_ctx, config.vocab_padded, config.kv_heads,
                 tied=config.tied)


def linears(shape: Shape) -> list[Linear]:
    """Every Linear of a model, equal ones counted; norms are left out of all parameter counts here."""
    C, F, L = shape.n_embd, shape.n_ffn, shape.n_layer
    qkv = C + 2 * (shape.kv_heads or shape.n_head) * shape.head_size
    return [Linear("qkv", C, qkv, L), Linear("out", C, C, L), Linear("gate_up", C, 2 * F if shape.gated else F, L),
            Linear("down", F, C, L), Linear("head", C, shape.vocab, 1)]


# ------------------------------------------------------------------------------------------------------- seconds of parts

def matmul_seconds(c: Ceilings, format: str, M: int, K: int, N: int) -> float:
    """(M, K) @ (K, N): as measured, else by the model, which splits K where the output has too few tiles for the SMs.

    A sum over K = c.half_k terms runs at half the rate."""
    if (format, M, K, N) in c.measured:
        return c.measured[format, M, K, N]
    rate = c.flops[format] * K / (K + c.half_k[format])
    best = math.inf
    for (rows, columns), share in TILES:
        tiles = math.ceil(M / rows) * math.ceil(N / columns)
        work = 2 * K * rows * columns * tiles / (rate * share)
        for parts in (1, 2, 4, 8, 16):
            waves = tiles * parts / c.sms
            summed = 8 * M * N * parts / c.bandwidth if parts > 1 else 0.0     # fp32 partial sums, written and read
            best = min(best, work * math.ceil(waves) / waves + summed)
    size = 2 if format == "bf16" else 1
    best = max(best, (size * (M * K + K * N) + (4 if format == "fp8_fp32" else 2) * M * N) / c.bandwidth)
    return best * c.corrected.get(format, 1.0)


def matmuls(linear: Linear, M: int) -> dict[str, tuple[int, int, int]]:
    """The three matmuls of a Linear on M tokens, each as (M, K, N) of its own, by PASSES."""
    return {"forward": (M, linear.K, linear.N), "input_grad": (M, linear.N, linear.K), "weight_grad": (linear.N, M, linear.K)}


def linear_seconds(c: Ceilings, linear: Linear, casts: Casts, M: int, accumulation: int) -> tuple[float, float]:
    """(matmuls, FP8's casts over BF16's) of one Linear per micro-batch; what a step does once counts in parts."""
    products = matmuls(linear, M)
    matmul = sum(matmul_seconds(c, f, *products[p]) for p, f in zip(PASSES, casts.formats, strict=True))
    weight = linear.K * linear.N
    cast = (casts.x[linear.name].seconds(M * linear.K, c) + casts.g[linear.name].seconds(M * linear.N, c)
            + casts.w.seconds(weight, c) + casts.w_step.seconds(weight, c) / accumulation)
    return matmul, cast


def attention_seconds(c: Ceilings, shape: Shape, M: int) -> float:
    """Forward and backward of all layers: as measured, else 2 + 5 matmuls of T/2 columns, the causal half."""
    if timed := c.measured.get(("attention", shape.n_head, shape.n_ctx, shape.head_size)):
        return shape.n_layer * M * timed
    rate = c.attention * shape.n_ctx / (shape.n_ctx + HALF_T) * (1.0 if shape.head_size >= 128 else NARROW_HEAD)
    return shape.n_layer * M * 7 * shape.n_embd * shape.n_ctx / rate


def pointwise_bytes(shape: Shape) -> float:
    """Per token, forward and backward, BF16: as Inductor plans it for model.py."""
    C, F = shape.n_embd, shape.n_ffn
    norms = 32 * C              # two, with the residual sums: 8 forward, 8 backward each
    rope = 30 * C               # 10 forward; backward 8, and 12 to lay q, k, v side by side again
    activation = 16 * F if shape.gated else 10 * F
    return shape.n_layer * (norms + rope + activation) + 16 * C     # and the embedding, the last norm


def conversion_bytes(shape: Shape) -> float:
    """Per micro-batch, BF16's own casts: weights to BF16 (4 read, 2 written), their gradients to fp32 (2 read, 4 written)."""
    return 12 * shape.params_matmul


def gradient_bytes(shape: Shape, M: int, accumulation: int) -> float:
    """Per micro-batch: gradients added up, the embedding's scattered; the first micro-batch of a step adds to nothing."""
    table = shape.vocab * shape.n_embd
    return 12 * (accumulation - 1) / accumulation * shape.params + (14 if shape.tied else 4) * table + 20 * M * shape.n_embd


# ------------------------------------------------------------------------------------------------------------- the step

@dataclass(frozen=True)
class Step:
    """A modelled micro-batch, with its part of the optimizer step."""
    label: str
    tokens: int
    buckets: dict[str, float]       # seconds
    recipes: dict[str, str]         # Linear -> what it was modelled with

    @property
    def seconds(self) -> float:
        return sum(self.buckets.values())

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds


def casts_of(label: str) -> tuple[str, str, bool]:
    """(recipe, recipe with kernels, whether the head is converted) of a label as bench/throughput.py writes it."""
    recipe, *extras = label.split("+")
    return recipe, recipe + ("+kernels" if "kernels" in extras else ""), "head" in extras


def step(c: Ceilings, shape: Shape, label: str, micro_batch: int, tokens_per_step: int, casts: Casts | None = None,
         shard: int = 1) -> Step:
    """The modelled micro-step of `label` on one GPU, which sees `tokens_per_step` and updates 1 / `shard` of the weights;
    `casts` replaces what CASTS says of the label. KeyError: a label without a model."""
    M = micro_batch * shape.n_ctx
    accumulation = max(1, tokens_per_step // M)
    recipe, name, has_head = casts_of(label)
    candidates = [name] if recipe != "auto" else [n for n in CASTS if "+" not in n or "kernels" in label]
    buckets, recipes = dict.fromkeys(BUCKETS, 0.0), {}
    for linear in linears(shape):
        options = [(n, casts or CASTS[n]) for n in candidates]
        if linear.name == "head" and not has_head:
            options = [("bf16", CASTS["bf16"])]
        times = {n: linear_seconds(c, linear, option, M, accumulation) for n, option in options}
        recipes[linear.name] = min(times, key=lambda n: sum(times[n]))
        matmul, cast = times[recipes[linear.name]]
        buckets["matmul"] += linear.count * matmul
        buckets["cast"] += linear.count * cast
    buckets["attention"] = attention_seconds(c, shape, M)
    buckets["cast"] += conversion_bytes(shape) / c.bandwidth
    buckets["pointwise"] = (M * pointwise_bytes(shape) + gradient_bytes(shape, M, accumulation)) / c.bandwidth
    buckets["loss"] = 6 * M * shape.vocab / c.bandwidth         # logits read forward, read and written backward
    buckets["optimizer"] = 40 * shape.params / shard / c.bandwidth / accumulation   # clip 4 + 8, AdamW 16 + 12
    buckets["other"] = IDLE * sum(buckets.values())
    return Step(label, M, buckets, recipes)
