"""Model what a training step takes on one GPU: FLOPs and bytes over ceilings. Nothing here is a
measurement of this project.

    python -m runtime.roofline  four sizes on an H100, and with casts that cost nothing
    python -m runtime.roofline gpu=h200 sizes=1p5b context=2048

The bytes are counted from the kernels that Inductor plans for model.py on an H100
(bench/compiler_plan.py); the ceilings are published figures. Overlap and caches are not modelled.
`--plan` and the sweep's table take FP8's speed over BF16's from here (modelled_ratio). Thirteen
constants are assumed, or were chosen with an eye on the thirteen published figures that
tests/runtime/test_plan.py holds them against: to come out near proves little.

    M tokens of a micro-batch   K inputs, N outputs of a Linear
    x input   g gradient of the output   w weight
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from fp8.casts import BF16_CASTS, ZERO_CASTS, Casts
from fp8.recipes import RECIPES
from fp8.selection import casting
from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import ROOT
from model import GPT, GPTConfig
from runtime.config import Config, load_config, positive
from runtime.log import PEAK_FLOPS, peak_flops

MICRO_BATCH = {"125m": 64, "350m": 32, "760m": 16, "1p5b": 16}  # sequences of 1,024 tokens
TOKENS, TOKENS_PER_STEP = 16_384, 524_288  # of a micro-batch that nobody chose; of a step
BUCKETS = ("matmul", "cast", "attention", "pointwise", "loss", "optimizer", "other")


# What a Hopper can do, for large operands: published or assumed. Bandwidth: bytes/s of a pointwise
# kernel, read and written; a copy reaches 3.0 of an H100's 3.35 TB/s (published), kernels less.
GPUS = {"h100": 2.75e12, "h200": 3.95e12}
# FLOP/s that a large matmul sustains, by format; fp8_fp32 is FP8 that writes fp32. 794 and 1403
# TFLOP/s are the best of any shape (ml-engineering, mamf); 0.92 of it fits random data at the
# shapes of training (nanochat: 65536 x 1664 x 6656 in 2.00 ms BF16, 1.45 ms FP8 with its casts).
# Rowwise, forward alone, lies between the 575 that d26's 0.90 asks for and the 790 of 8B's 1.10;
# what the others lose without fast accumulation is in it.
RATES = {"bf16": 725e12, "fp8": 1300e12, "fp8_fp32": 1300e12, "fp8_rowwise": 680e12}
HALF_K = (80, 200)  # K at which a matmul reaches half its rate, in BF16 and in FP8
SMS = 132
ATTENTION = 560e12  # FLOP/s of causal attention over an endless context, masked half not counted
HALF_T = 512  # context at which attention reaches half its rate: 373 TFLOP/s at 1,024, 527 at 8,192
NARROW_HEAD = 0.7  # of that rate, with heads narrower than 128
# rows x columns of the output per SM, share of the rate
TILES = (((128, 256), 1.0), ((256, 128), 1.0), ((128, 128), 0.9))
IDLE = 0.04  # of everything else: launches, tails, clocks


# FP8Config.label without a head in FP8 -> what its casts move; another has no modelled speed
CASTS = {"bf16": BF16_CASTS}
CASTS |= {
    f"{recipe.name}{settings}": casts
    for recipe in RECIPES.values()
    for settings, casts in recipe.casts.items()
}
CASTS["zero casts"] = ZERO_CASTS
# printed, in this order: with the head in BF16, then in FP8
LABELS = (
    "bf16",
    "tensorwise",
    "tensorwise_gw_hp",
    "rowwise",
    "rowwise_with_gw_hp",
    "tensorwise+kernels",
    "tensorwise+kernels+delayed",
    "tensorwise+kernels+bounded",
    "tensorwise_gw_hp+kernels",
    "zero casts",
)
LABELS_WITH_HEAD = (
    "tensorwise",
    "tensorwise+kernels",
    "tensorwise+kernels+delayed",
    "tensorwise+kernels+bounded",
    "zero casts",
)


def linears(model: GPTConfig, gated: bool = True) -> list[tuple[str, int, int, int]]:
    """(name, inputs K, outputs N, how many) of every Linear. gated: SwiGLU, as here; else one
    matrix up, one down."""
    C, F, L = model.n_embd, model.n_ffn, model.n_layer
    q_width = model.n_head * model.head_dim  # channels of q, and of attention's output
    qkv_width = q_width + 2 * model.kv_heads * model.head_dim
    return [
        ("qkv", C, qkv_width, L),
        ("out", q_width, C, L),
        ("gate_up", C, (1 + gated) * F, L),
        ("down", F, C, L),
        ("head", C, model.vocab_padded, 1),
    ]


def matmul_seconds(bandwidth: float, format: str, M: int, K: int, N: int) -> float:
    """(M, K) @ (K, N), with K split where the output has too few tiles for the SMs. A sum over
    HALF_K terms runs at half the rate."""
    rate = RATES[format] * K / (K + HALF_K[format != "bf16"])
    best = math.inf
    for (rows, columns), share in TILES:
        tiles = math.ceil(M / rows) * math.ceil(N / columns)
        work = 2 * K * rows * columns * tiles / (rate * share)
        for parts in (1, 2, 4, 8, 16):
            waves = tiles * parts / SMS
            # fp32 partial sums, written and read
            summed = 8 * M * N * parts / bandwidth if parts > 1 else 0.0
            best = min(best, work * math.ceil(waves) / waves + summed)
    size = 2 if format == "bf16" else 1
    return max(
        best, (size * (M * K + K * N) + (4 if format == "fp8_fp32" else 2) * M * N) / bandwidth
    )


def step(
    bandwidth: float,
    model: GPTConfig,
    label: str,
    micro_batch: int,
    tokens_per_step: int,
    shard: int = 1,
    bf16: Casts = CASTS["bf16"],
    gated: bool = True,
    rope: int = 10 + 12,
    head: Casts | None = None,
) -> dict[str, float]:
    """Modelled seconds of a micro-batch of `label`, a key of CASTS, with its part of the optimizer
    step, by BUCKETS, on one GPU, which sees `tokens_per_step` and updates 1 / `shard` of the
    weights; norms' parameters are left out.

    bf16: what the Linears do that stay in BF16. head: what the head does; None: it stays in BF16.
    For other people's models: gated as in linears(); rope: bytes per value of attention's output,
    forward and backward, which lays q, k, v side by side again."""
    tokens = micro_batch * model.n_ctx
    accumulation = max(1, tokens_per_step // tokens)
    buckets = dict.fromkeys(BUCKETS, 0.0)
    params_added_within = 0  # parameters whose gradients their matmul adds up
    for name, K, N, count in linears(model, gated):
        casts = bf16 if label == "bf16" else CASTS[label]
        if name == "head":
            casts = head or bf16
        buckets["matmul"] += count * _linear_seconds(bandwidth, casts, tokens, K, N)
        buckets["cast"] += count * _cast_seconds(bandwidth, casts, name, tokens, K, N, accumulation)
        if casts.adds and name != "head" and accumulation > 1:
            params_added_within += count * K * N
    embedding = model.vocab_padded * model.n_embd
    params = sum(count * K * N for _, K, N, count in linears(model, gated))
    if not model.tied:
        params += embedding
    gradient_bytes = _gradient_bytes(params, params_added_within, accumulation)
    # of the embedding's, scattered
    gradient_bytes += (14 if model.tied else 4) * embedding + 20 * tokens * model.n_embd
    pointwise_bytes = tokens * _pointwise_bytes(model, gated, rope)
    buckets["attention"] = _attention_seconds(model, tokens)
    buckets["pointwise"] = (pointwise_bytes + gradient_bytes) / bandwidth
    # logits read forward, read and written backward
    buckets["loss"] = 6 * tokens * model.vocab_padded / bandwidth
    # clip 4 + 8, AdamW 16 + 12
    buckets["optimizer"] = 40 * params / shard / bandwidth / accumulation
    buckets["other"] = IDLE * sum(buckets.values())
    return buckets


def _linear_seconds(bandwidth: float, casts: Casts, tokens: int, K: int, N: int) -> float:
    """The three matmuls of a Linear (K, N): output, input gradient, weight gradient."""
    sizes = ((tokens, K, N), (tokens, N, K), (N, tokens, K))
    return sum(
        matmul_seconds(bandwidth, format, *size)
        for format, size in zip(casts.formats, sizes, strict=True)
    )


def _cast_seconds(
    bandwidth: float, casts: Casts, name: str, tokens: int, K: int, N: int, accumulation: int
) -> float:
    """Casts of a Linear's operands in a micro-batch, with its part of those once a step."""
    input_s = casts.x.of(name).seconds(tokens * K, bandwidth)
    gradient_s = casts.g.of(name).seconds(tokens * N, bandwidth)
    weight_s = casts.w.seconds(K * N, bandwidth)
    step_s = casts.w_step.seconds(K * N, bandwidth)  # once a step
    return input_s + gradient_s + weight_s + step_s / accumulation


def _gradient_bytes(params: int, added_within: int, accumulation: int) -> float:
    """Bytes a micro-batch moves to add its gradients up, but for a step's first one. Those that a
    matmul adds to (`added_within` parameters) are read once more, and zeroed once a step."""
    added_apart = 12 * (accumulation - 1) / accumulation * (params - added_within)
    return added_apart + (4 + 4 / accumulation) * added_within


def _pointwise_bytes(model: GPTConfig, gated: bool, rope: int) -> int:
    """A token's pointwise bytes in BF16, as Inductor plans them: norms with the residual sums 2 x
    (8 forward + 8 backward), RoPE, the activation; then the embedding and the last norm."""
    q_width = model.n_head * model.head_dim
    activation = (16 if gated else 10) * model.n_ffn
    return model.n_layer * (32 * model.n_embd + rope * q_width + activation) + 16 * model.n_embd


def _attention_seconds(model: GPTConfig, tokens: int) -> float:
    """Attention is 2 + 5 matmuls of T / 2 columns, the causal half."""
    narrow = 1.0 if model.head_dim >= 128 else NARROW_HEAD
    rate = ATTENTION * model.n_ctx / (model.n_ctx + HALF_T) * narrow
    q_width = model.n_head * model.head_dim
    return model.n_layer * tokens * 7 * q_width * model.n_ctx / rate


def modelled_ratio(config: Config, gpu: str, gpus: int = 1) -> float | None:
    """Modelled speed of a run over its BF16 twin's on `gpus` of this name; None where no model
    tells: another GPU, a recipe or choice of Linears without casts here, eager or recomputed
    blocks, fp8.scaling=bounded with QK-norm."""
    f, p, m = config.fp8, config.parallel, config.model
    has_whole_weights = (p.shard or 1) == 1
    has_kernels = casting(f, "cuda", has_whole_weights).is_ours
    label = replace(f, kernels=has_kernels, head=False).label
    name = _modelled_gpu(gpu)
    if name is None or label not in CASTS or p.recompute or not p.compile:
        return None
    if f.scaling == "bounded" and m.qk_norm:  # blocks without producers
        return None
    if has_kernels and not has_whole_weights:  # under FSDP2 our kernels cast at each use
        return None
    head = None
    if f.head:
        # one whose loss is not within its matmul is ours alone, and taken to cost what torchao's do
        head = CASTS[f.recipe if f.kernels == "auto" else label]
    is_known = config.data.micro_batch != "auto"
    micro_batch = config.micro_batch if is_known else max(1, TOKENS // m.n_ctx)
    tokens = config.data.tokens_per_step // gpus
    bf16 = replace(CASTS["bf16"], adds=gpus == 1)

    def seconds(arm: str, head: Casts | None = None) -> float:
        buckets = step(GPUS[name], m, arm, micro_batch, tokens, p.shard or 1, bf16=bf16, head=head)
        return sum(buckets.values())

    return seconds("bf16") / seconds(label, head)


def _modelled_gpu(gpu: str) -> str | None:
    """The key of GPUS that a GPU's name means, such as that of "NVIDIA H100 80GB HBM3"."""
    for name in GPUS:
        if re.search(rf"\b{name}\b", gpu, re.I) and peak_flops(gpu) == peak_flops(name):
            return name
    return None


def highest_ratio(
    config: Config, in_fp8: int, flops_per_token: int, peaks: tuple[float, float]
) -> float:
    """The most that FP8 may speed a run up: the matmuls of `in_fp8` parameters at the ratio of
    (BF16, FP8) peaks, casts free."""
    again = config.parallel.recompute  # the forward pass, a third of the FLOPs
    recipe = RECIPES.get(config.fp8.recipe)
    matmuls = recipe.fp8_matmuls if recipe else 3  # of the three of a step
    flops_per_parameter = 2 * matmuls + 2 * again
    share = flops_per_parameter * in_fp8 / flops_per_token / (4 / 3 if again else 1)
    return 1 / (1 - share * (1 - peaks[0] / peaks[1]))


@dataclass(frozen=True, kw_only=True)
class Options:
    gpu: Literal["h100", "h200"] = "h100"
    # of configs/gpt<size>_bf16.py
    sizes: tuple[Literal["125m", "350m", "760m", "1p5b"], ...] = ("125m", "350m", "760m", "1p5b")
    context: int = 1024  # T, tokens

    def __post_init__(self):
        if problems := positive(self, "context"):
            raise UserError(problems[0])


@command(__doc__, Options)
def main(options: Options) -> None:
    """Each size under every label, as many tokens a micro-batch as MICRO_BATCH at 1,024."""
    bandwidth, T = GPUS[options.gpu], options.context
    peak, _ = PEAK_FLOPS[options.gpu.upper()]
    print(
        f"MODELLED step times on {options.gpu.upper()} SXM from published ceilings; nothing here is"
        " measured"
    )
    for size in options.sizes:
        model = replace(load_config(ROOT / f"configs/gpt{size}_bf16.py").model, n_ctx=T)
        micro_batch, flops_per_token = (
            max(1, MICRO_BATCH[size] * 1024 // T),
            GPT.on_meta(model).counts()["flops_per_token"],
        )
        print(f"\n{size}, T={T}, micro-batch {micro_batch}, {TOKENS_PER_STEP:,} tokens a step")
        print(
            f"  {'label':31} {'tok/s':>8} {'ratio':>6} {'mfu_bf16':>9}   "
            + "".join(f"{name:>10}" for name in BUCKETS)
        )
        size_of_step = (micro_batch, TOKENS_PER_STEP)
        steps = {label: step(bandwidth, model, label, *size_of_step) for label in LABELS}
        for label in LABELS_WITH_HEAD:
            buckets = step(bandwidth, model, label, *size_of_step, head=CASTS[label])
            steps[f"{label}+head"] = buckets
        for label, buckets in steps.items():
            seconds = sum(buckets.values())
            tok_per_s, shares = (
                micro_batch * T / seconds,
                "".join(f"{part / seconds:z10.1%}" for part in buckets.values()),
            )
            print(
                f"  {label:31} {tok_per_s:8,.0f} {sum(steps['bf16'].values()) / seconds:6.3f} "
                f"{tok_per_s * flops_per_token / peak:9.1%}   {shares}"
            )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
