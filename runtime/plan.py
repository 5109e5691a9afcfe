"""Say what a run would cost before it is run: parameters, tokens, FLOPs, memory, hours, disk.

Counts are exact, from the modules. Memory of weights, gradients and optimizer follows from them; activations and
hours are estimates and are printed as such. Hours follow from bench/throughput.py's measurements where it has timed this
model and precision on such a GPU (bench/results/*.jsonl), else from an assumed MFU.
"""

from pathlib import Path

import torch

from model import GPT
from runtime import fp8, metrics
from runtime.config import Config, ConfigError
from runtime.measured import RESULTS, Speed, labels, measured

# Share of the BF16 peak that a compiled model of these sizes may reach on Hopper. Assumed from published figures
# (0.41 to 0.51 below 2B parameters), for whatever bench/throughput.py has not measured.
ASSUMED_MFU = 0.45
GIB = 2**30


def plan(config: Config, gpu: str, compute_dtype: torch.dtype, results: Path = RESULTS) -> list[str]:
    """The plan of a run on GPUs of this name ("" where none is named), as lines. Raises ConfigError for an unknown GPU.

    results: the folder of bench/throughput.py's rows."""
    with torch.device("meta"):
        model = GPT(config.model, compute_dtype)
    layers = fp8.select(model, config.fp8, gpu.upper() if gpu else None)
    peak = metrics.peak_flops(gpu) if gpu else None
    if gpu and peak is None:
        raise ConfigError(f"--plan {gpu}: the peak of that GPU is not in runtime/metrics.py; try h100, h200, b200 or a100")
    counts, speeds = model.counts(), {}
    if gpu:
        speeds = {label: measured(config, counts, label, gpu, results) for label in labels(config) if label}
    return plan_lines(config, counts, layers, fp8.table(layers, config.fp8.recipe, "cuda"), gpu, peak, speeds)


def plan_lines(config: Config, counts: dict[str, int], layers: list, fp8_table: list[str], gpu: str,
               peak: tuple[float, float | None] | None, speeds: dict[str, Speed | None]) -> list[str]:
    """The plan as lines for people. `layers` as fp8.select() gives them, `peak` (BF16, FP8) FLOP/s of one `gpu`, `speeds`
    of labels() on it."""
    c, tokens = counts, config.total_tokens
    token_bytes = 2 if config.model.vocab_size <= 2**16 else 4      # instruction data always takes 4
    gpus = config.parallel.replicate * (config.parallel.shard or 1)
    policy, steps = config.checkpoint, config.total_steps
    kept = max(2, policy.keep) + policy.best + len(policy.at) + (steps // policy.forever if policy.forever else 0) + (
        policy.rolling is not None)
    budget = f"{config.tokens_per_param:g} tokens per parameter" if config.tokens_per_param else f"steps={config.steps}"
    return [
        f"plan of {config.run}: nothing is trained", "",
        "parameters",
        _row("total", c["params_total"], "with embedding and head" + (", one tied matrix" if config.model.tied else "")),
        _row("non-embedding", c["params_nonembed"], "without embedding and head (Kaplan)"),
        _row("matmul", c["params_matmul"], "every Linear, the head once"),
        _row("in FP8", sum(layer.params for layer in layers if layer.reason is None), f"fp8.recipe={config.fp8.recipe}"), "",
        f"budget: {budget}",
        _row("tokens", tokens, f"{tokens / c['params_total']:.2f} per parameter (total), "
             f"{tokens / c['params_nonembed']:.2f} per non-embedding parameter"),
        _row("steps", config.total_steps, f"of {config.data.tokens_per_step:,} tokens, context {config.model.n_ctx}"), "",
        "FLOPs of training",
        *(f"  {name:22} {c[key] * tokens:.4e}   {c[key]:,} per token" for name, key in (
            ("6N total", "flops_per_token_6n_total"), ("6N non-embedding", "flops_per_token_6n_nonembed"),
            ("6N matmul", "flops_per_token_6n_matmul"), ("+ attention", "flops_per_token"),
            ("+ causal attention", "flops_per_token_causal"))), "",
        *_memory(config, counts, gpus), "",
        *fp8_table, "",
        *_hours(config, counts, layers, gpus, gpu, peak, speeds), "",
        "disk",
        _gib("checkpoint", 12 * c["params_total"], f"fp32 weights and two moments; {kept} kept = "
             f"{12 * c['params_total'] * kept / GIB:.1f} GiB, one more while saving; host memory for one or two"),
        _gib("training tokens", token_bytes * tokens, f"{token_bytes} bytes each, if each is seen once"),
    ]


def _memory(config: Config, counts: dict[str, int], gpus: int) -> list[str]:
    """Per GPU. Exact: weights, gradients, optimizer. Estimated: activations kept for the backward pass."""
    m, d = config.model, config.data
    n, shard = counts["params_total"], config.parallel.shard or 1
    micro_batch, remark = (1, " (auto: the start tries larger ones)") if d.micro_batch == "auto" else (d.micro_batch, "")
    tokens = micro_batch * m.n_ctx
    accumulating = shard > 1 and config.accumulation(gpus) > 1
    gradients = 4 * n * (1 if accumulating else 1 / shard)
    # BF16 tensors a block keeps per token: its two inputs, two norms' outputs, attention's output, qkv, gate+up, product
    kept = 2 * (5 * m.n_embd + (m.n_head + 2 * m.kv_heads) * m.head_size + 3 * m.n_ffn)
    recompute = config.parallel.recompute       # each block's input, and one block at a time whole
    activations = tokens * (m.n_layer * 2 * m.n_embd + kept if recompute else m.n_layer * kept)
    # FSDP2 gathers blocks in BF16, the one at work and the next, and embedding, head and last norm in fp32 (the root's).
    blocks = 2 * counts["params_nonembed"] * (min(1, 2 / m.n_layer) if config.parallel.reshard else 1)
    gathered = 0 if shard == 1 else blocks + 4 * (n - counts["params_nonembed"])
    # BF16 and their gradient; without the compiler's fusion also the fp32 copy, its softmax and their gradient
    logits = min(tokens, m.loss_chunk or tokens) * m.vocab_padded * (4 if config.parallel.compile else 12)
    whole = "two blocks" if config.parallel.reshard else "all blocks (parallel.reshard=false)"
    total = 4 * n / shard + gathered + gradients + 8 * n / shard + activations + logits
    return [
        f"memory per GPU, on {gpus} GPU{'s' if gpus > 1 else ''} (parallel.shard={shard}), micro-batch {micro_batch}{remark}",
        _gib("weights", 4 * n / shard, "fp32"),
        *([_gib("gathered", gathered, f"estimated: {whole} in BF16, embedding and head in fp32")] if shard > 1 else []),
        _gib("gradients", gradients, "fp32" + (", unsharded while they accumulate" if accumulating else "")),
        _gib("optimizer", 8 * n / shard, "AdamW, two fp32 moments"),
        _gib("activations", activations, "estimated: what the backward pass needs, BF16, "
             + ("blocks recomputed from their inputs" if recompute else "nothing recomputed")),
        _gib("logits", logits, "estimated: BF16 and their gradient" + (", in chunks" if m.loss_chunk else "")),
        _gib("sum", total, "estimated; the allocator and the compiler's buffers come on top"),
    ]


def _hours(config: Config, counts: dict[str, int], layers: list, gpus: int, gpu: str,
           peak: tuple[float, float | None] | None, speeds: dict[str, Speed | None]) -> list[str]:
    if peak is None:
        return ["hours: name a GPU, as in --plan h100"]
    bf16_peak, fp8_peak = peak
    bf16, quantised = map(speeds.get, labels(config))
    recompute = config.parallel.recompute       # then the forward pass, a third of the FLOPs, runs twice
    passes = 4 / 3 if recompute else 1
    flops = counts["flops_per_token"] * config.total_tokens * passes
    hours = flops / (bf16_peak * ASSUMED_MFU * gpus) / 3600
    source = f"estimated, at an assumed mfu_bf16 of {ASSUMED_MFU:.0%} of {bf16_peak / 1e12:.1f} TFLOP/s"
    if bf16:
        hours, source = config.total_tokens * passes / bf16.tok_per_s / gpus / 3600, "from the measured speed of one GPU"
    lines = [f"hours on {gpus} x {gpu}: {source}" + (", what GPUs send each other not counted" if bf16 and gpus > 1 else ""),
             f"  {'BF16':22} {hours:10.1f} h" + ("   the recomputed forward pass included" if recompute else "")
             + (f"   {bf16.remark}" if bf16 else "")]
    if config.fp8.recipe == "off":
        return lines
    if fp8_peak is None:
        return [*lines, f"  {'FP8':22} {'none':>10}     {gpu} has no FP8 matmuls: this run is refused there"]
    if quantised:
        fp8_hours = config.total_tokens * passes / quantised.tok_per_s / gpus / 3600
        return [*lines, f"  {'FP8':22} {fp8_hours:10.1f} h   {quantised.remark}"]
    # Of the three matmuls of a step, these leave the weight gradient in BF16.
    share = (4 if config.fp8.recipe in ("rowwise_with_gw_hp", "tensorwise_gw_hp") else 6) + (2 if recompute else 0)
    fp8_flops = share * sum(layer.params for layer in layers if layer.reason is None) * config.total_tokens
    best = hours * (1 - fp8_flops / flops * (1 - bf16_peak / fp8_peak))
    return [*lines, f"  {'FP8, at the very best':22} {best:10.1f} h   matmuls in FP8 at the ratio of the peaks, casts free: "
                    f"{hours / best:.2f}x; unmeasured, small layers can be slower than BF16"]


def _row(name: str, value: int, remark: str) -> str:
    return f"  {name:22} {value:>22,}   {remark}"


def _gib(name: str, size: float, remark: str) -> str:
    return f"  {name:22} {size / GIB:10.2f} GiB   {remark}"
