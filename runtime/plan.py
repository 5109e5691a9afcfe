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
from pathlib import Path

import torch

from fp8 import selection
from fp8.recipes import RECIPES
from lib.errors import MachineError, UserError, memory_error
from lib.machine import GIB, end_with_parent
from lib.text import duration
from model import GPT
from runtime import optim, parallel
from runtime.checkpoint import latest, run_on_rank0, step_of
from runtime.config import Config, apply_overrides, read_config
from runtime.data import Data
from runtime.log import peak_flops
from runtime.roofline import highest_ratio, modelled_ratio
from runtime.run import is_finished
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


def plan(config: Config, gpu: str) -> list[str]:
    """The plan of a run on GPUs of this name ("" where none is named), as lines. Raises UserError
    for an unknown GPU."""
    if gpu and peak_flops(gpu) is None:
        raise UserError(
            f"--plan {gpu}: the peak of that GPU is not in runtime/log.py; try h100, h200, b200 or"
            " a100"
        )
    model = GPT.on_meta(config.model)
    layers = selection.select(model, config.fp8, gpu.upper() or None)
    c, tokens, steps, policy = (
        model.counts(),
        config.total_tokens,
        config.total_steps,
        config.checkpoint,
    )
    total, nonembed = c["params_total"], c["params_nonembed"]
    # of a branch, those after its branch point
    own = steps - (config.parent[1] if config.parent else 0)
    own_tokens = own * config.data.tokens_per_step
    in_fp8 = sum(layer.params for layer in layers if layer.recipe)
    gpus = config.parallel.replicate * (config.parallel.shard or 1)
    by_muon = c["params_matmul"] - c["params_head"] if config.optim.kind == "muon" else 0
    kept = (
        max(2, policy.keep)
        + policy.best
        + len(policy.at)
        + (steps // policy.forever if policy.forever else 0)
        + (policy.rolling is not None)
    )
    size = 12 * total - 4 * by_muon
    page = [
        f"plan of {config.run}: nothing is trained",
        "",
        "parameters",
        _row("total", total, "with embedding and head" + ", one tied matrix" * config.model.tied),
        _row("non-embedding", nonembed, "without embedding and head (Kaplan)"),
        _row("matmul", c["params_matmul"], "every Linear, the head once"),
        _row("in FP8", in_fp8, f"fp8.recipe={config.fp8.recipe}"),
        "",
        "budget",
        _row(
            "tokens",
            tokens,
            f"{tokens / total:.2f} per parameter, {tokens / nonembed:.2f} per non-embedding"
            " parameter",
        ),
        _row(
            "steps",
            steps,
            f"of {config.data.tokens_per_step:,} tokens, context {config.model.n_ctx}",
        ),
    ]
    if own < steps:
        page.append(
            _row("of this branch", own, f"after step {steps - own}: FLOPs and hours are of these")
        )
    page += ["", "FLOPs of training"]
    for name, key in (
        ("6N total", "flops_per_token_6n_total"),
        ("6N non-embedding", "flops_per_token_6n_nonembed"),
        ("6N matmul", "flops_per_token_6n_matmul"),
        ("+ attention", "flops_per_token"),
        ("+ causal attention", "flops_per_token_causal"),
    ):
        page.append(f"  {name:22} {c[key] * own_tokens:.4e}   {c[key]:,} per token")
    if by_muon:
        update = sum(
            optim.newton_schulz_flops(p.shape[1], rows)
            for p, rows in optim.muon_parts(model).items()
        )
        share = update / (c["flops_per_token"] * config.data.tokens_per_step)
        page.append(
            f"  {'Muon':22} {update * own:.4e}   {update:.4e} an update, {share:.1%} of the step's,"
            f" shared by {gpus} GPU(s); not in the hours below"
        )
    copied = 0 if gpus > 1 else c["params_matmul"] - (0 if config.fp8.kernels else in_fp8)
    return [
        *page,
        "",
        *_memory(config, c, by_muon, copied, in_fp8, gpus),
        "",
        *selection.table(layers, config.fp8.recipe, "cuda"),
        "",
        *_hours(config, c["flops_per_token"], own_tokens, in_fp8, gpus, gpu),
        "",
        "disk",
        _gib(
            "checkpoint",
            size,
            f"fp32 weights and moments; {kept} kept = {size * kept / GIB:.1f} GiB, one more while"
            " saving; host memory for one or two",
        ),
        _gib(
            "training tokens",
            (2 if config.model.vocab_size <= 2**16 else 4) * tokens,
            "if each is seen once",
        ),
    ]


def _row(name: str, value: int, remark: str) -> str:
    return f"  {name:22} {value:>22,}   {remark}"


def _gib(name: str, size: float, remark: str) -> str:
    return f"  {name:22} {size / GIB:10.2f} GiB   {remark}"


def _memory(
    config: Config, counts: dict[str, int], by_muon: int, copied: int, in_fp8: int, gpus: int
) -> list[str]:
    """Per GPU; `by_muon` parameters have one moment, of `copied` ones there is a copy, cast once a
    step. Within 4 % of what the runs on one GPU of bench/results took."""
    n, nonembed = counts["params_total"], counts["params_nonembed"]
    m, p, f, shard = config.model, config.parallel, config.fp8, config.parallel.shard or 1
    micro_batch = 1 if config.data.micro_batch == "auto" else config.data.micro_batch
    tokens = micro_batch * m.n_ctx
    accumulating = shard > 1 and config.accumulation(gpus) > 1
    # BF16 tensors a block keeps per token: its two inputs, two norms' outputs, attention's output,
    # qkv, of which v is a part, the rotated q and k, gate+up, product
    q_width = m.n_head * m.head_dim  # channels of q, and of attention's output
    block = 2 * (4 * m.n_embd + 3 * q_width + 3 * m.kv_heads * m.head_dim + 3 * m.n_ffn)
    if (
        f.recipe in RECIPES
        and RECIPES[f.recipe].keeps_fp8_alone
        and in_fp8 >= counts["params_matmul"] - counts["params_head"]
    ):
        # norms' outputs and product as FP8 alone, attention's output as both
        if f.kernels and f.scaling != "delayed":
            block -= 2 * m.n_embd - q_width + m.n_ffn
        else:  # Inductor makes norms' outputs and product anew
            block -= 4 * m.n_embd + 2 * m.n_ffn
    # With parallel.recompute each block's input and attention's output, and one block at a time
    # whole.
    activations = tokens * (
        m.n_layer * 2 * (m.n_embd + q_width) + block if p.recompute else m.n_layer * block
    )
    # FSDP2 gathers blocks in BF16, the one at work and the next, and embedding, head and last norm
    # in fp32 (the root's).
    gathered = (
        2 * nonembed * (min(1, 2 / m.n_layer) if p.reshard else 1) + 4 * (n - nonembed)
        if shard > 1
        else 0
    )
    # BF16, overwritten by their gradient, in FP8 beside it; without the compiler also the fp32
    # copy, its softmax, their gradient
    logits = (
        min(tokens, m.loss_chunk or tokens)
        * m.vocab_padded
        * ((4 if f.head else 2) if p.compile else 12)
    )
    exchange = 10 * by_muon / shard / GIB if gpus > 1 else 0
    rows = [
        ("weights", 4 * n / shard, "fp32"),
        (
            "copies",
            2 * copied,
            "of the Linears' weights, cast once a step: BF16, or FP8 in two layouts",
        ),
        ("gathered", gathered, "estimated: blocks in BF16, embedding and head in fp32"),
        (
            "gradients",
            4 * n * (1 if accumulating else 1 / shard),
            "fp32" + ", unsharded while they accumulate" * accumulating,
        ),
        (
            "optimizer",
            (8 * n - 4 * by_muon) / shard,
            "fp32 moments"
            + f"; Muon's exchange takes {exchange:.2f} GiB where the activations were"
            * bool(exchange),
        ),
        (
            "activations",
            activations,
            "estimated: what the backward pass needs, BF16" + ", blocks recomputed" * p.recompute,
        ),
        ("logits", logits, "estimated: BF16 and their gradient"),
    ]
    rows += [
        (
            "sum",
            sum(size for _, size, _ in rows),
            "estimated; the allocator and the compiler's buffers come on top",
        )
    ]
    told = " (auto: the start tries larger ones)" * (config.data.micro_batch == "auto")
    return [
        f"memory per GPU of {gpus}, parallel.shard={shard}, micro-batch {micro_batch}{told}",
        *(_gib(*row) for row in rows if row[1]),
    ]


def _hours(
    config: Config, flops_per_token: int, own_tokens: int, in_fp8: int, gpus: int, gpu: str
) -> list[str]:
    """Hours in BF16 and FP8, estimated; `in_fp8` counts the parameters that are converted."""
    recipe, peaks = config.fp8.recipe, peak_flops(gpu)
    if peaks is None:
        return ["hours: name a GPU, as in --plan h100"]
    bf16_peak, fp8_peak = peaks
    again = 4 / 3 if config.parallel.recompute else 1  # the forward pass, a third, runs twice
    hours = flops_per_token * own_tokens * again / (bf16_peak * ASSUMED_MFU * gpus) / 3600
    lines = [
        (
            f"hours on {gpus} x {gpu}: estimated, at an assumed mfu_bf16 of {ASSUMED_MFU:.0%} of"
            f" {bf16_peak / 1e12:.1f} TFLOP/s"
        ),
        f"  {'BF16':22} {hours:10.1f} h",
    ]
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
    if ratio := modelled_ratio(config, gpu, gpus):
        return [
            *lines,
            (
                f"  {'FP8':22} {hours / ratio:10.1f} h   MODELLED from published ceilings:"
                f" {ratio:.2f}x of BF16's speed (python -m runtime.roofline); not measured"
            ),
        ]
    most = highest_ratio(config, in_fp8, flops_per_token, (bf16_peak, fp8_peak))
    return [
        *lines,
        (
            f"  {'FP8, at the very best':22} {hours / most:10.1f} h   {most:.2f}x of BF16's speed:"
            " an upper bound, matmuls at the ratio of the peaks, casts free; small layers can be"
            " slower than BF16"
        ),
    ]


def cpu_estimate(config: Config, world: parallel.World) -> str | None:
    """A line on how long the run will take on a machine without a GPU, where that is long, for rank
    0 to print before the model is built; else None. From the speed of matmuls that are timed here.
    Raises UserError as selection.select() does."""
    if world.device.type != "cpu" or not world.is_main:
        return None
    saved = latest(config.run_dir)
    steps = config.total_steps - (
        step_of(saved) if saved else config.parent[1] if config.parent else 0
    )
    model = GPT.on_meta(config.model)
    flops_per_step = model.counts()["flops_per_token"] * config.data.tokens_per_step
    if flops_per_step * steps < LONG_FLOPS:
        return None
    layers = selection.select(model, config.fp8)
    emulated_share = sum(layer.params for layer in layers if layer.recipe) / sum(
        layer.params for layer in layers
    )
    # Emulated FP8 multiplies dequantised values in fp32, which many CPUs do faster than BF16.
    s_per_flop = emulated_share / cpu_matmul_speed(torch.float32) + (
        1 - emulated_share
    ) / cpu_matmul_speed(torch.bfloat16)
    step_s = flops_per_step * s_per_flop / world.size
    built = "built and compiled" if config.parallel.compile else "built"
    return (
        f"no GPU here: {steps:,} steps will take about {_long_duration(step_s * steps)} on this"
        f" CPU, the first one {_long_duration(step_s)} once the model is {built} (by the"
        f" {world.size / s_per_flop / 1e9:.2g} GFLOP/s of matmuls timed here)"
    )


def cpu_matmul_speed(dtype: torch.dtype) -> float:
    """FLOP/s of this process's threads in the three matmuls of a Linear, forward, for its input and
    for its weight, of which one layout can be ten times slower than another."""
    n = 256
    x, weight = torch.ones(2, n, n, dtype=dtype)  # no random numbers: the run's own are drawn later
    turns, began = 0, time.perf_counter()
    while turns == 0 or time.perf_counter() - began < CPU_TIMED_S:
        y = x @ weight.t()
        y @ weight
        y.t() @ x
        turns += 1
    return turns * 3 * 2 * n**3 / (time.perf_counter() - began)


def _long_duration(seconds: float) -> str:
    return f"{seconds / 86400:,.0f} days" if seconds > 2 * 86400 else duration(seconds)


# --------------------------------------------------------------------------- data.micro_batch=auto


def resolve_micro_batch(config: Config, world: parallel.World) -> Config:
    """`config` with a number in data.micro_batch, the same on all ranks: all of them call this
    together, before train(). Raises UserError where no candidate fits or the run would be refused
    anyway, MachineError where a trial fails otherwise."""
    if config.data.micro_batch != "auto":
        return config
    return apply_overrides(
        config, [f"data.micro_batch={run_on_rank0(world, lambda: _decide(config, world))}"]
    )


def _decide(config: Config, world: parallel.World) -> int:
    # refuses the folder of another run before trials
    finished, numbers = is_finished(config), candidates(config, world.size)
    if (config.run_dir / "config.json").exists():
        n = read_config(config.run_dir).micro_batch
        if finished or n in numbers:
            print(f"data.micro_batch=auto: {n}, which {config.run_dir} was begun with", flush=True)
            return n
    Data(config, *load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer)).hashes)
    first = next((i for i, n in enumerate(numbers) if n * config.model.n_ctx >= FIRST_TOKENS), 0)
    # the same computation in one process
    alone = "parallel.replicate=1", "parallel.shard=none", "fp8.all_gather=false"
    found = search(
        numbers,
        first,
        lambda n: try_one(apply_overrides(config, [*alone, f"data.micro_batch={n}"]), world.device),
    )
    if found is None:
        raise UserError(
            f"data.micro_batch=auto found none of {numbers} that fits with the whole model on"
            f" {world.device}: give parallel.recompute=true or model.loss_chunk=1024, or, where"
            " ranks share it, data.micro_batch=1"
        )
    print(
        f"data.micro_batch=auto: {found} it is; give the other run of a BF16/FP8 pair"
        f" data.micro_batch={found}",
        flush=True,
    )
    return found


def candidates(config: Config, size: int) -> list[int]:
    """Powers of two and three times them by which `size` ranks can share a step, ascending."""
    # up to all sequences of a rank
    numbers, exponents = [], range(config.accumulation(size).bit_length())
    for n in sorted(odd * 2**k for odd in (1, 3) for k in exponents):
        with suppress(UserError):  # it does not divide a step, or FP8 has no tiles for it
            apply_overrides(config, [f"data.micro_batch={n}"]).accumulation(size)
            numbers.append(n)
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
            told = f"{speeds[n]:,.0f} tokens/s, {gib:.2f} GiB"
        except MemoryError:
            told = "does not fit"
        except MachineError as error:
            if not speeds:
                raise
            told = str(error)
        print(f"data.micro_batch=auto: {n:4d} sequences: {told}", flush=True)
        return n in speeds

    in_vain = 0
    for n in numbers[first:]:
        best = max(speeds.values(), default=0.0)
        if in_vain == 2 or not fits(n):
            break
        in_vain = in_vain + 1 if speeds[n] < best * GAIN else 0
    if not speeds:
        any(fits(n) for n in reversed(numbers[:first]))
    return min(
        (n for n, speed in speeds.items() if speed * GAIN > max(speeds.values())), default=None
    )


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
        raise (
            MemoryError()
            if memory_error(error)
            else MachineError(
                f"the trial ended with {type(error).__name__}: {error}"[:300]
                + "; give data.micro_batch a number"
            )
        ) from None


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

    def seconds(micro_steps: int) -> float:
        started = time.perf_counter()
        for _ in range(micro_steps):
            forward_backward(model, x, y, built.loss_scale)
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
