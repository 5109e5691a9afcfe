"""Say what a run would cost before it is trained (--plan), and find the micro-batch it trains
fastest with (micro_batch=auto).

data.micro_batch=auto: before the run each candidate is tried in a process of its own, on rank 0's
device: whatever it allocates, compiles or breaks ends with it. A trial trains a few micro-batches
as the run will, then passes one through the model as the evaluation in BF16 does, uncompiled and
hence the hungrier of the two at large micro-batches. Several ranks are tried for with the model
whole on one GPU."""

import math
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8 import selection
from fp8.matmul import has_bf16_units
from fp8.recipes import RECIPES, multiple_of
from lib.errors import MachineError, UserError, memory_error
from lib.machine import GIB, end_with_parent
from lib.text import duration
from model import GPT
from runtime import documents, optim, parallel
from runtime.checkpoint import latest, run_on_rank0, step_of
from runtime.config import Config, apply_overrides, read_config
from runtime.data import Data
from runtime.log import peak_flops
from runtime.roofline import highest_ratio, modelled_ratio
from runtime.run_folder import is_finished
from runtime.tokenizer import load_tokenizer, tokenizer_of
from runtime.training_step import end_unjudged_step, forward_backward

# of the BF16 peak, on Hopper: published figures are 0.41 to 0.51 below 2B parameters
ASSUMED_MFU = 0.45
# of the free memory that a trial may take; fragments of a long run and NCCL's buffers need the rest
SHARE = 0.94
# of the first trial: fewer at a time leave a GPU idle, and are tried only where these do not fit
FIRST_TOKENS = 8192
# a larger micro-batch must be faster by this: less is noise, and memory is not for nothing
GAIN = 1.01
LONG_FLOPS = 1e14  # a run of fewer is done in minutes on any CPU, and needs no warning
CPU_TIMED_S = 0.2  # of matmuls, for that warning
MEASURED_S = 0.5  # least duration of what is timed, of which the best of three counts


# -------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Costs:
    """What a run needs, counted from its configuration; nothing is measured."""

    counts: dict[str, int]  # as GPT.counts() returns them
    layers: list[selection.Layer]  # the choice of recipe for every Linear
    cast_by: selection.Casting  # what fp8.kernels comes to on a GPU
    n_gpus: int  # replicate x shard
    steps: int  # training steps of this run; of a branch, those after its branch point
    tokens: int  # training tokens of these steps
    params_fp8: int  # of the Linears in FP8
    params_muon: int  # that Muon updates, which keeps one moment of each, AdamW two
    update_flops: int  # of an update by Muon, beside forward and backward; 0 with AdamW
    checkpoint_bytes: int  # fp32 weights and moments
    n_checkpoints: int  # that stay on disk, at most


def count_costs(config: Config, gpu: str) -> Costs:
    """The costs of a run on GPUs of this name ("" where none is named). Raises UserError as
    selection.select() does."""
    model = GPT.on_meta(config.model)
    cast_by = selection.casting(config.fp8, "cuda", has_whole_weights=_shard(config) == 1)
    layers = selection.select(model, config.fp8, gpu.upper() or None, cast_by.is_ours)
    counts = model.counts()
    parent_step = config.parent[1] if config.parent else 0
    steps = config.total_steps - parent_step
    params_muon = update_flops = 0
    if config.optim.kind == "muon":
        params_muon = counts["params_matmul"] - counts["params_head"]
        for p, rows in optim.muon_parts(model).items():
            update_flops += optim.newton_schulz_flops(p.shape[1], rows)
    return Costs(
        counts=counts,
        layers=layers,
        cast_by=cast_by,
        n_gpus=config.parallel.replicate * _shard(config),
        steps=steps,
        tokens=config.total_tokens - config.tokens_at(parent_step),
        params_fp8=sum(layer.params for layer in layers if layer.recipe),
        params_muon=params_muon,
        update_flops=update_flops,
        checkpoint_bytes=12 * counts["params_total"] - 4 * params_muon,
        n_checkpoints=_count_checkpoints(config),
    )


def _shard(config: Config) -> int:
    """Ranks that share the weights: as named, else one."""
    return config.parallel.shard or 1


def _count_checkpoints(config: Config) -> int:
    policy = config.checkpoint
    n_checkpoints = max(2, policy.keep, policy.average or 0) + len(policy.at)
    if policy.best:
        n_checkpoints += 1
    if policy.forever is not None:
        n_checkpoints += config.total_steps // policy.forever
    if policy.rolling is not None:
        n_checkpoints += 1
    return n_checkpoints


def plan(config: Config, gpu: str) -> list[str]:
    """The plan of a run on GPUs of this name ("" where none is named), as lines. Raises UserError
    for an unknown GPU, and where candidates() finds no micro-batch."""
    if gpu and peak_flops(gpu) is None:
        raise UserError(
            f"--plan {gpu}: the peak of that GPU is not in runtime/log.py; try h100, h200, b200 or"
            " a100"
        )
    config, holders = _as_started(config, gpu)
    costs = count_costs(config, gpu)
    if config.data.micro_batch == "auto":
        candidates(config, costs.n_gpus)  # refused where the start would find none
    lines = [f"plan of {config.run}: nothing is trained", *holders]
    for section in (
        _describe_parameters(config, costs),
        _describe_budget(config, costs),
        _describe_flops(config, costs),
        _describe_memory(config, costs),
        selection.verdict_lines(costs.layers, config.fp8.recipe, "cuda", costs.cast_by),
        _hours(config, costs, gpu),
        _describe_disk(config, costs),
    ):
        lines += ["", *section]
    return lines


def _as_started(config: Config, gpu: str) -> tuple[Config, list[str]]:
    """The config with parallel.shard as the start would choose it, where several GPUs leave it
    open; and a line on who holds the weights. Raises UserError as fits_memory()."""
    p = config.parallel
    memory_gib = _memory_gib(gpu)
    if p.shard is not None or p.replicate == 1 or memory_gib is None:
        return config, []
    available = PLANNED_SHARE * memory_gib * GIB
    if fits_memory(config, p.replicate, available):
        line = f"each of {p.replicate} GPUs holds the whole model (replicas)"
        shape = p.replicate, 1
    else:
        line = f"{p.replicate} GPUs share the weights (FSDP2)"
        shape = 1, p.replicate
    words = [f"parallel.replicate={shape[0]}", f"parallel.shard={shape[1]}"]
    reason = f"by {PLANNED_SHARE:g} of {memory_gib} GiB a GPU; parallel.shard=N decides"
    return apply_overrides(config, words), [f"{line}: {reason}"]


def _memory_gib(gpu: str) -> int | None:
    """A GPU's memory by its name; None where it is not known."""
    for name, memory_gib in MEMORY_GIB.items():
        if name.lower() in gpu.lower():
            return memory_gib
    return None


def _describe_parameters(config: Config, costs: Costs) -> list[str]:
    counts = costs.counts
    tied = ", one tied matrix" if config.model.tied else ""
    return [
        "parameters",
        _row("total", counts["params_total"], f"with embedding and head{tied}"),
        _row("non-embedding", counts["params_nonembed"], "without embedding and head (Kaplan)"),
        _row("matmul", counts["params_matmul"], "every Linear, the head once"),
        _row("in FP8", costs.params_fp8, f"fp8.recipe={config.fp8.recipe}"),
    ]


def _describe_budget(config: Config, costs: Costs) -> list[str]:
    tokens = config.total_tokens
    per_parameter = tokens / costs.counts["params_total"]
    per_nonembed = tokens / costs.counts["params_nonembed"]
    lines = [
        "budget",
        _row(
            "tokens",
            tokens,
            f"{per_parameter:.2f} per parameter, {per_nonembed:.2f} per non-embedding parameter",
        ),
        _row(
            "steps",
            config.full_steps,
            f"of {config.data.tokens_per_step:,} tokens, context {config.model.n_ctx}",
        ),
        *[f"  {line}" for line in config.ramp.describe(config.data.tokens_per_step)],
    ]
    if costs.steps < config.total_steps:
        branch_point = config.total_steps - costs.steps
        remark = f"after step {branch_point}: FLOPs and hours are of these"
        lines.append(_row("of this branch", costs.steps, remark))
    return lines


# Conventions of counting FLOPs -> key of GPT.counts().
FLOPS = {
    "6N total": "flops_per_token_6n_total",
    "6N non-embedding": "flops_per_token_6n_nonembed",
    "6N matmul": "flops_per_token_6n_matmul",
    "+ attention": "flops_per_token",
    "+ causal attention": "flops_per_token_causal",
}


def _describe_flops(config: Config, costs: Costs) -> list[str]:
    lines = ["FLOPs of training"]
    if config.data.document_mask:
        lines[0] += ", of causal attention: data.document_mask saves some of it"
    for name, key in FLOPS.items():
        per_token = costs.counts[key]
        lines.append(f"  {name:22} {per_token * costs.tokens:.4e}   {per_token:,} per token")
    if costs.update_flops:
        of_step = costs.counts["flops_per_token"] * config.data.tokens_per_step
        share = costs.update_flops / of_step
        lines.append(
            f"  {'Muon':22} {costs.update_flops * costs.steps:.4e}   {costs.update_flops:.4e} an"
            f" update, {share:.1%} of the step's, shared by {costs.n_gpus} GPU(s); not in the hours"
            " below"
        )
    return lines


def _describe_disk(config: Config, costs: Costs) -> list[str]:
    token_bytes = 2 if config.model.vocab_size <= 2**16 else 4
    kept_gib = costs.checkpoint_bytes * costs.n_checkpoints / GIB
    return [
        "disk",
        _gib(
            "checkpoint",
            costs.checkpoint_bytes,
            f"fp32 weights and moments; {costs.n_checkpoints} kept = {kept_gib:.1f} GiB, one more"
            " while saving; host memory for one or two",
        ),
        _gib("training tokens", token_bytes * config.total_tokens, "if each is seen once"),
    ]


def _row(name: str, value: int, remark: str) -> str:
    return f"  {name:22} {value:>22,}   {remark}"


def _gib(name: str, size: float, remark: str) -> str:
    return f"  {name:22} {size / GIB:10.2f} GiB   {remark}"


# ------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Share:
    """What one use of a GPU's memory takes."""

    name: str
    size: float  # in bytes
    note: str


def _describe_memory(config: Config, costs: Costs) -> list[str]:
    micro_batch = _planned_micro_batch(config)
    auto = ""
    if config.data.micro_batch == "auto":
        auto = " (auto: the start tries larger ones)"
    shard = _shard(config)
    lines = [
        f"memory per GPU of {costs.n_gpus}, parallel.shard={shard}, micro-batch {micro_batch}{auto}"
    ]
    for share in memory_shares(config, costs):
        if share.size:
            lines.append(_gib(share.name, share.size, share.note))
    return lines


def _planned_micro_batch(config: Config) -> int:
    """Sequences of a forward pass; one where the start is to find out."""
    return 1 if config.data.micro_batch == "auto" else config.data.micro_batch


def memory_shares(config: Config, costs: Costs) -> list[Share]:
    """What fills a GPU's memory, and last its sum. Within 4 % of what the runs on one GPU of
    bench/results took."""
    shares = [
        _weights(config, costs),
        _copies(config, costs),
        _gathered(config, costs),
        _gradients(config, costs),
        _moments(config, costs),
        _activations(config, costs),
        _logits(config),
    ]
    total = sum(share.size for share in shares)
    note = "estimated; the allocator and the compiler's buffers come on top"
    return [*shares, Share("sum", total, note)]


# Of GPUs by a part of their name, the first that fits, as the driver counts it: 80 GB are 79.
MEMORY_GIB = {"H200": 140, "H100": 79, "B200": 178, "A100": 79}
# Of a GPU's memory that the estimate may fill: the allocator and NCCL's buffers need the rest.
PLANNED_SHARE = 0.9


def fits_whole(config: Config, size: int, device: torch.device) -> bool:
    """Whether a GPU such as `device` holds the whole model with its share of the activations, as
    each of `size` replicas does; a CPU's memory is not asked. Raises UserError where not even an
    equal share of weights, gradients and moments fits."""
    if device.type != "cuda":
        return True
    available = PLANNED_SHARE * torch.cuda.get_device_properties(device).total_memory
    return fits_memory(config, size, available)


def fits_memory(config: Config, size: int, available: float) -> bool:
    """fits_whole() for so many bytes a GPU."""
    gathers = config.fp8.all_gather
    whole = apply_overrides(config, [f"parallel.replicate={size}", "parallel.shard=1"])
    costs = count_costs(whole, "")
    if not gathers and memory_shares(whole, costs)[-1].size <= available:
        return True
    # weights, gradients and two moments, of which Muon has one
    of_model = (16 * costs.counts["params_total"] - 4 * costs.params_muon) / size
    if of_model > available:
        raise UserError(
            f"this model fits {size} GPUs neither whole nor sharded: weights, gradients and moments"
            f" alone need {of_model / GIB:.1f} GiB on each, of which {available / GIB:.1f} GiB can"
            f" be planned with: start {math.ceil(of_model * size / available)} or more processes"
            " with torchrun"
        )
    return False


def _weights(config: Config, costs: Costs) -> Share:
    size = 4 * costs.counts["params_total"] / _shard(config)
    return Share("weights", size, "fp32")


def _copies(config: Config, costs: Costs) -> Share:
    """FSDP2 casts what it gathers; torchao's Linears cast anew in each pass."""
    n_copied = 0
    if _shard(config) == 1:
        n_copied = costs.counts["params_matmul"]
        if not costs.cast_by.is_ours:
            n_copied -= costs.params_fp8
    return Share(
        "copies",
        2 * n_copied,
        "of the Linears' weights, cast once a step: BF16, or FP8 in two layouts",
    )


def _gathered(config: Config, costs: Costs) -> Share:
    """FSDP2 gathers blocks in BF16, the one at work and the next, and embedding, head and last norm
    in fp32 (the root's)."""
    size = 0.0
    if _shard(config) > 1:
        nonembed = costs.counts["params_nonembed"]
        share_of_blocks = min(1, 2 / config.model.n_layer) if config.parallel.reshard else 1
        size = 2 * nonembed * share_of_blocks + 4 * (costs.counts["params_total"] - nonembed)
    return Share("gathered", size, "estimated: blocks in BF16, embedding and head in fp32")


def _gradients(config: Config, costs: Costs) -> Share:
    shard = _shard(config)
    size = 4 * costs.counts["params_total"]
    does_accumulate = config.accumulation(costs.n_gpus) > 1
    if shard > 1 and does_accumulate:
        return Share("gradients", size, "fp32, unsharded while they accumulate")
    if shard == 1 and costs.n_gpus > 1 and does_accumulate:
        return Share("gradients", 2 * size, "fp32, beside the buckets in which they are reduced")
    return Share("gradients", size * (1 / shard), "fp32")


def _moments(config: Config, costs: Costs) -> Share:
    shard = _shard(config)
    size = (8 * costs.counts["params_total"] - 4 * costs.params_muon) / shard
    note = "fp32 moments"
    if costs.params_muon and costs.n_gpus > 1:
        exchange_gib = 10 * costs.params_muon / shard / GIB
        note += f"; Muon's exchange takes {exchange_gib:.2f} GiB where the activations were"
    return Share("optimizer", size, note)


def _activations(config: Config, costs: Costs) -> Share:
    """With parallel.recompute each block's input and attention's output, and one block at a time
    whole."""
    m = config.model
    tokens = _planned_micro_batch(config) * m.n_ctx
    block = _block_bytes(config, costs)
    if not config.parallel.recompute:
        size = tokens * m.n_layer * block
        return Share("activations", size, "estimated: what the backward pass needs, BF16")
    stored = m.n_layer * 2 * (m.n_embd + m.n_head * m.head_dim)
    return Share(
        "activations",
        tokens * (stored + block),
        "estimated: what the backward pass needs, BF16, blocks recomputed",
    )


def _block_bytes(config: Config, costs: Costs) -> int:
    """Bytes that a block keeps per token for its backward pass.

    In BF16: its two inputs, two norms' outputs, attention's output, qkv, of which v is a part, the
    rotated q and k, gate+up, product."""
    m, f = config.model, config.fp8
    q_width = m.n_head * m.head_dim  # channels of q, and of attention's output
    block = 2 * (4 * m.n_embd + 3 * q_width + 3 * m.kv_heads * m.head_dim + 3 * m.n_ffn)
    are_blocks_in_fp8 = (
        costs.params_fp8 >= costs.counts["params_matmul"] - costs.counts["params_head"]
    )
    keeps_fp8_alone = f.recipe in RECIPES and RECIPES[f.recipe].keeps_fp8_alone
    if not (keeps_fp8_alone and are_blocks_in_fp8):
        return block
    # norms' outputs and product as FP8 alone, attention's output as both
    if costs.cast_by.is_ours and f.scaling != "delayed":
        return block - (2 * m.n_embd - q_width + m.n_ffn)
    # Inductor makes norms' outputs and product anew
    return block - (4 * m.n_embd + 2 * m.n_ffn)


def _logits(config: Config) -> Share:
    """BF16, overwritten by their gradient, in FP8 beside it; without the compiler also the fp32
    copy, its softmax, their gradient."""
    m = config.model
    tokens = _planned_micro_batch(config) * m.n_ctx
    if m.loss_chunk is not None:
        tokens = min(tokens, m.loss_chunk)
    bytes_per_logit = 12
    if config.parallel.compile:
        bytes_per_logit = 4 if config.fp8.head else 2
    size = tokens * m.vocab_padded * bytes_per_logit
    return Share("logits", size, "estimated: BF16 and their gradient")


# ------------------------------------------------------------------------------------------- hours


def _hours(config: Config, costs: Costs, gpu: str) -> list[str]:
    """Hours in BF16 and FP8, estimated."""
    peaks = peak_flops(gpu)
    if peaks is None:
        return ["hours: name a GPU, as in --plan h100"]
    bf16_peak, fp8_peak = peaks
    flops_per_token = costs.counts["flops_per_token"]
    flops = flops_per_token * costs.tokens
    # with recompute the forward pass, a third, runs twice
    forward_again = 4 / 3 if config.parallel.recompute else 1
    hours = flops * forward_again / (bf16_peak * ASSUMED_MFU * costs.n_gpus) / 3600
    lines = [
        (
            f"hours on {costs.n_gpus} x {gpu}: estimated, at an assumed mfu_bf16 of"
            f" {ASSUMED_MFU:.0%} of {bf16_peak / 1e12:.1f} TFLOP/s"
        ),
        f"  {'BF16':22} {hours:10.1f} h",
    ]
    recipe = config.fp8.recipe
    # the emulated are slower by far, as the lines above say
    facts = RECIPES.get(recipe)  # of off and auto there are none
    if recipe == "off" or (facts and facts.on_gpu == "emulated"):
        return lines
    if facts and facts.on_gpu is None:
        return [
            *lines,
            f"  {'FP8':22} {'none':>10}     fp8.recipe={recipe} has no implementation on a GPU:"
            " this run is refused there",
        ]
    if fp8_peak is None:
        return [
            *lines,
            f"  {'FP8':22} {'none':>10}     {gpu} has no FP8 matmuls: this run is refused there",
        ]
    ratio = modelled_ratio(config, gpu, costs.n_gpus)
    if ratio:
        lines.append(
            f"  {'FP8':22} {hours / ratio:10.1f} h   MODELLED from published ceilings:"
            f" {ratio:.2f}x of BF16's speed (python -m runtime.roofline); not measured"
        )
        if ratio < NO_GAIN:
            lines.append(f"  {'':22} {'':>10}     {_faster_remark(config, gpu, costs)}")
        return lines
    upper_ratio = highest_ratio(config, costs.params_fp8, flops_per_token, (bf16_peak, fp8_peak))
    return [
        *lines,
        (
            f"  {'FP8, at the very best':22} {hours / upper_ratio:10.1f} h   {upper_ratio:.2f}x of"
            " BF16's speed: an upper bound, matmuls at the ratio of the peaks, casts free; small"
            " layers can be slower than BF16"
        ),
    ]


# A modelled ratio that a plan would print as 1.00, or less.
NO_GAIN = 1.005
# What could be faster, in the order in which numbers move away from the config's own.
FASTER = (
    ("fp8.kernels=true",),
    ("fp8.recipe=tensorwise", "fp8.kernels=true"),
    ("fp8.recipe=tensorwise", "fp8.kernels=true", "fp8.scaling=delayed"),
    ("fp8.recipe=tensorwise", "fp8.kernels=true", "fp8.head=true"),
)


def _faster_remark(config: Config, gpu: str, costs: Costs) -> str:
    """What would be faster than BF16, where this config's FP8 is not, by the same model."""
    # our kernels and replicas are refused beside it
    without_gather = ("fp8.all_gather=false",) if config.fp8.all_gather else ()
    for faster in FASTER:
        overrides = (*faster, *without_gather)
        with suppress(UserError):  # it does not go with the other settings
            ratio = modelled_ratio(apply_overrides(config, overrides), gpu, costs.n_gpus)
            if ratio is not None and ratio >= NO_GAIN:
                return f"faster: {' '.join(overrides)}, {ratio:.2f}x"
    if _shard(config) > 1:
        overrides = ("parallel.shard=1", *without_gather)
        return (
            f"faster: {' '.join(overrides)}, where the model fits each GPU: weights are cast once"
        )
    return "faster: fp8.recipe=off (BF16): a model of this width gains nothing by FP8"


def cpu_estimate(config: Config, world: parallel.World) -> str | None:
    """A line on how long the run will take on a machine without a GPU, where that is long, for rank
    0 to print before the model is built; else None. From the speed of matmuls that are timed here.
    Raises UserError as selection.select() does."""
    if world.device.type != "cpu" or not world.is_main:
        return None
    steps = config.total_steps - _first_step(config)
    model = GPT.on_meta(config.model)
    flops_per_token = model.counts()["flops_per_token"]
    flops = flops_per_token * (config.total_tokens - config.tokens_at(_first_step(config)))
    if flops < LONG_FLOPS:
        return None
    layers = selection.select(model, config.fp8)
    emulated_share = sum(layer.params for layer in layers if layer.recipe) / sum(
        layer.params for layer in layers
    )
    bf16_dtype = torch.bfloat16
    if parallel.multiplies_in_fp32(config, world.device):
        bf16_dtype = torch.float32
    # Emulated FP8 multiplies in fp32 also where a CPU has no BF16 units.
    emulation_dtype = bf16_dtype if has_bf16_units() else torch.float32
    s_per_flop = emulated_share / cpu_matmul_speed(emulation_dtype)
    s_per_flop += (1 - emulated_share) / cpu_matmul_speed(bf16_dtype)
    step_s = flops_per_token * config.tokens_at(1) * s_per_flop / world.size
    run_s = flops * s_per_flop / world.size
    built = "built and compiled" if config.parallel.compile else "built"
    return (
        f"no GPU here: {steps:,} steps will take about {_long_duration(run_s)} on this"
        f" CPU, the first one {_long_duration(step_s)} once the model is {built} (by the"
        f" {world.size / s_per_flop / 1e9:.2g} GFLOP/s of matmuls timed here)"
    )


def _first_step(config: Config) -> int:
    """The steps that a run has behind it when it is started now."""
    newest_checkpoint = latest(config.run_dir)
    if newest_checkpoint is not None:
        return step_of(newest_checkpoint)
    return config.parent[1] if config.parent else 0


def cpu_matmul_speed(dtype: torch.dtype) -> float:
    """FLOP/s of this process's threads in the three matmuls of a Linear, forward, for its input and
    for its weight, of which one layout can be ten times slower than another."""
    n = 256
    x, weight = torch.ones(2, n, n, dtype=dtype)  # no random numbers: the run's own are drawn later
    turns = 0
    started_s = time.perf_counter()
    while turns == 0 or time.perf_counter() - started_s < CPU_TIMED_S:
        y = x @ weight.t()
        y @ weight
        y.t() @ x
        turns += 1
    return turns * 3 * 2 * n**3 / (time.perf_counter() - started_s)


def _long_duration(seconds: float) -> str:
    return f"{seconds / 86400:,.0f} days" if seconds > 2 * 86400 else duration(seconds)


# --------------------------------------------------------------------------- data.micro_batch=auto


def resolve_micro_batch(config: Config, world: parallel.World) -> Config:
    """`config` with a number in data.micro_batch, the same on all ranks: all of them call this
    together, before train(). Raises UserError where no candidate fits or the run would be refused
    anyway, MachineError where a trial fails otherwise."""
    if config.data.micro_batch != "auto":
        return config
    micro_batch = run_on_rank0(world, lambda: _decide(config, world))
    return apply_overrides(config, [f"data.micro_batch={micro_batch}"])


def _decide(config: Config, world: parallel.World) -> int:
    """The micro-batch that the run was begun with, else the fastest by trial."""
    numbers = candidates(config, world.size)
    begun_with = _micro_batch_of_begun_run(config, numbers)
    if begun_with is not None:
        print(
            f"data.micro_batch=auto: {begun_with}, which {config.run_dir} was begun with",
            flush=True,
        )
        return begun_with
    # refuses data that the run would refuse, before trials
    Data(config, *load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer)).hashes)
    # the same computation in one process
    one_process = ["parallel.replicate=1", "parallel.shard=none", "fp8.all_gather=false"]
    fastest = search(
        numbers,
        _first_to_try(numbers, config.model.n_ctx),
        lambda n: try_one(
            apply_overrides(config, [*one_process, f"data.micro_batch={n}"]), world.device
        ),
    )
    if fastest is None:
        raise UserError(
            f"data.micro_batch=auto found none of {numbers} that fits with the whole model on"
            f" {world.device}: give parallel.recompute=true or model.loss_chunk=1024, or, where"
            " ranks share it, data.micro_batch=1"
        )
    print(
        f"data.micro_batch=auto: {fastest} it is; give the other run of a BF16/FP8 pair"
        f" data.micro_batch={fastest}",
        flush=True,
    )
    return fastest


def _micro_batch_of_begun_run(config: Config, numbers: list[int]) -> int | None:
    """That of the run in the folder, where it is finished or it is still among `numbers`; None
    where there is none. Raises UserError where the folder is another run's."""
    is_over = is_finished(config)
    if not (config.run_dir / "config.json").exists():
        return None
    micro_batch = read_config(config.run_dir).micro_batch
    return micro_batch if is_over or micro_batch in numbers else None


def _first_to_try(numbers: list[int], n_ctx: int) -> int:
    """The place in `numbers` of the first that has FIRST_TOKENS tokens; 0 where none has."""
    for place, n in enumerate(numbers):
        if n * n_ctx >= FIRST_TOKENS:
            return place
    return 0


def candidates(config: Config, size: int) -> list[int]:
    """Powers of two and three times them by which `size` ranks can share a step, ascending. Raises
    UserError where there is none."""
    numbers = []
    powers = [2**k for k in range(config.accumulation(size).bit_length())]  # to a rank's sequences
    for n in sorted([*powers, *(3 * power for power in powers)]):
        with suppress(UserError):  # it does not divide a step, or FP8 has no tiles for it
            apply_overrides(config, [f"data.micro_batch={n}"]).accumulation(size)
            numbers.append(n)
    if not numbers:
        among_ranks = f" among {size} ranks" if size > 1 else ""
        raise UserError(
            "data.micro_batch=auto: no micro-batch of whole sequences has a multiple of"
            f" {multiple_of(config.fp8.recipe)} tokens, which fp8.recipe={config.fp8.recipe}"
            f" needs, and divides data.tokens_per_step={config.data.tokens_per_step} evenly"
            f"{among_ranks}: change model.n_ctx or data.tokens_per_step"
        )
    return numbers


def search(
    numbers: list[int], first: int, attempt: Callable[[int], tuple[float, float]]
) -> int | None:
    """The fastest of `numbers` that fits, the smaller one where two differ by less than GAIN; None
    where none fits.

    Upwards from numbers[first], until one fails or two in a row bring nothing; where not even that
    one fits, downwards from there. attempt(n): tokens/s and GiB. A MachineError of it is raised
    only where no trial before went well."""
    speeds: dict[int, float] = {}

    def fits(n: int) -> bool:
        try:
            speeds[n], gib = attempt(n)
            outcome = f"{speeds[n]:,.0f} tokens/s, {gib:.2f} GiB"
        except MemoryError:
            outcome = "does not fit"
        except MachineError as error:
            if not speeds:
                raise
            outcome = str(error)
        print(f"data.micro_batch=auto: {n:4d} sequences: {outcome}", flush=True)
        return n in speeds

    in_vain = 0
    for n in numbers[first:]:
        best = max(speeds.values(), default=0.0)
        if in_vain == 2 or not fits(n):
            break
        in_vain = in_vain + 1 if speeds[n] < best * GAIN else 0
    if not speeds:
        any(fits(n) for n in reversed(numbers[:first]))
    fastest = max(speeds.values(), default=0.0)
    return min((n for n, speed in speeds.items() if speed * GAIN > fastest), default=None)


def try_one(config: Config, device: torch.device) -> tuple[float, float]:
    """measure() in a process of its own. Raises MemoryError where it is killed, as the kernel does
    for memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_try, config, device).result()
        except BrokenProcessPool as error:
            raise MemoryError from error


def _try(config: Config, device: torch.device) -> tuple[float, float]:
    end_with_parent()
    with suppress(OSError):  # not Linux
        # the first process that the kernel kills for memory
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        return measure(config, device)
    except UserError:  # no micro-batch mends it
        raise
    except Exception as error:  # may be of a class that does not travel between processes
        if memory_error(error):
            raise MemoryError from None
        cause = f"the trial ended with {type(error).__name__}: {error}"[:300]
        raise MachineError(f"{cause}; give data.micro_batch a number") from None


def measure(config: Config, device: torch.device) -> tuple[float, float]:
    """Train a few micro-batches of random tokens as the run will; tokens/s of forward and backward,
    peak memory in GiB. The optimizer, which takes as long with any micro-batch, runs once, for its
    memory."""
    if device.type == "cuda":  # too large a trial ends, and nothing beside it
        torch.cuda.set_device(device)
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(SHARE * free / total, device)
    built = parallel.build(config, parallel.World(0, 0, 1, device))
    model, m, n = built.model, config.model, config.micro_batch
    # of the right size and no zeros, which a GPU multiplies faster; the run draws its own on the
    # CPU
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, math.sqrt(0.4 / m.n_embd)) if p.ndim > 1 else p.fill_(1.0)
    model.init_buffers()
    precision = built.precision
    precision.after_update()
    precision.set_position(0)
    precision.before_step(built.loss_scale)
    x, y = torch.randint(m.vocab_size, (2, n, m.n_ctx), device=device)
    mask = None
    if config.data.document_mask:  # of one document a window, which skips nothing
        one_document = torch.zeros_like(x, dtype=torch.int32)
        mask = documents.attention_mask(one_document, documents.uses_flex(config, device))

    def seconds(micro_steps: int) -> float:
        started = time.perf_counter()
        for _ in range(micro_steps):
            forward_backward(model, x, y, built.loss_scale, config.optim.z_loss, mask)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    seconds(2)  # compiled, and once with gradients to add to
    end_unjudged_step(model, built.optimizer, precision, config.optim.clip)
    repeats = max(2, math.ceil(MEASURED_S / seconds(1)))
    best = min(seconds(repeats) for _ in range(3)) / repeats
    precision.zero_gradients()
    with torch.no_grad(), precision.in_bf16():
        model(x, y).tolist()
    peak = (
        torch.cuda.max_memory_reserved(device)
        if device.type == "cuda"
        else (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    )  # Linux counts in KiB
    return n * m.n_ctx / best, peak / GIB
