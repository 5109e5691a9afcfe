"""The record of a finished run: summary.json and val_losses.npz, which scaling/ reads.

Summary is the schema of summary.json; docs/schemas.md is made of its fields and comments."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8.recipes import FP8Config
from fp8.selection import Layer, weights_cast_from
from lib.machine import GIB, device_name
from lib.schema import schema_table
from runtime import optim
from runtime.config import Config
from runtime.data import Data
from runtime.environment import Environment
from runtime.guard import Diagnosis, Guard, Verdict
from runtime.log import lineage, pair_id, peak_flops, throughput
from runtime.metrics_file import EVENTS, EventRow, TasksRow, TrainRow, ValidationRow
from runtime.parallel import World
from runtime.run_start import Progress, Start
from runtime.validation import ValLoss, bits_per_byte


@dataclass(frozen=True)
class PrecisionSummary:
    """In what the Linears of a run were computed."""

    # label for people: "bf16", or that of the fp8 section, such as tensorwise+kernels
    recipe: str
    fp8: FP8Config | None  # the fp8 section; null in BF16
    bits: int  # of the narrowest number format, its trunk's included: 16 (BF16), 8 or 4
    # label of the trunk's precision before the branch point; null without a switch
    switched_from: str | None
    # the trunk's fp8 section, null for BF16; before it those of its own trunks; [] without a switch
    switched_from_fp8: list[FP8Config | None]
    compile: bool  # whether torch.compile was used
    layers_converted: list[str]  # names of the Linears in FP8
    layers_recipes: dict[str, str]  # Linear -> its recipe
    layers_kernels: list[str]  # names of the Linears on our own kernels
    layers_skipped: dict[str, str]  # Linear in BF16 -> why
    # what weights are rounded to FP8 from: "fp32", or "bf16" where FSDP2 gathers blocks' so; null
    # where no Linear is in FP8
    weights_cast_from: str | None


@dataclass(frozen=True)
class SourceSummary:
    """One source of the mixture."""

    weight: float  # its share of the mixture, as rounded; the shares sum to 1
    epochs: float  # times that the run saw its training tokens
    loss_as_trained: float  # validation loss in the precision of the training, nats per token
    loss_bf16: float  # the same with all Linears in BF16
    # loss_as_trained per byte of text, in bits: comparable between tokenizers
    bpb_as_trained: float
    bpb_bf16: float  # loss_bf16 per byte of text, in bits


@dataclass(frozen=True)
class Summary:
    """What summary.json holds. A loss is a mean over the validation tokens of each source, weighted
    by the mixture, in nats per token."""

    schema_version: int  # of this list of keys
    run_id: str  # name of the run
    # hash of all that the weights depend on but the fp8 section: a BF16 and an FP8 run of one
    # pair_id are compared
    pair_id: str
    parent_run: str | None  # run whose checkpoint this one branched off; null from scratch
    parent_step: int | None  # step of that checkpoint
    # run or imported model whose weights alone were taken, here or by the trunk
    continued_from: str | None
    status: str  # "ok", or "diverged" where the last steps were skipped by the guard
    git_commit: str | None  # of the code at the last start
    torch: str  # its version
    torchao: str | None  # its version
    t_start: str  # first start of the run, UTC, ISO 8601
    device: str  # name of the GPU, or of the CPU
    n_gpu: int  # ranks, which on a CPU are processes
    seed: int  # of initialisation and order of data
    repeat: int  # 1 = a null run: the same training once more
    data_sha256: str  # hash of the training tokens on disk
    val_sha256: str  # hash of the validation tokens and of the windows chosen from them
    tokenizer_sha256: str  # hash of the tokenizer, as the shards name it
    vocab_size: int  # tokens that the tokenizer can emit
    vocab_padded: int  # rows of embedding and head
    n_layer: int  # blocks
    n_head: int  # query heads
    n_embd: int  # width, in channels
    n_ffn: int  # hidden width of the MLP, in channels
    n_ctx: int  # context length, in tokens
    params_total: int  # all parameters, a tied matrix once
    params_nonembed: int  # without embedding and head (Kaplan)
    params_matmul: int  # of every Linear, the head once
    params_embed_tok: int  # of the embedding
    params_head: int  # of the head, also where it shares the embedding's matrix
    flops_per_token_6n_total: int  # 6 x params_total
    flops_per_token_6n_nonembed: int  # 6 x params_nonembed
    flops_per_token_6n_matmul: int  # 6 x params_matmul
    flops_per_token_attn: int  # of training, in attention over the whole context: 12 L H D T
    flops_per_token_attn_causal: int  # the same over the past alone, half of it
    flops_per_token: int  # of training: flops_per_token_6n_matmul + flops_per_token_attn
    flops_per_token_causal: int  # flops_per_token_6n_matmul + flops_per_token_attn_causal
    params_fp8: int  # of the Linears in FP8
    steps: int  # training steps
    tokens: int  # training tokens
    # training tokens of a step, all ranks together; the first ones have fewer with data.ramp
    tokens_per_step: int
    optimizer: str  # "AdamW", or "Muon" for the blocks' matrices
    lr_peak: float  # highest learning rate
    warmup_steps: int  # steps of tokens_per_step over which the learning rate rises
    beta1: float  # decay of the first moment
    beta2: float  # decay of the second moment
    eps: float  # added to the root of the second moment
    weight_decay: float  # on matrices
    clip: float  # largest global gradient norm
    schedule: str  # "cosine" or "wsd"
    is_annealed: bool  # whether the last step had a lower learning rate than the peak
    precision: PrecisionSummary  # in what the Linears were computed
    loss_as_trained: float  # validation loss in the precision of the training
    # standard error of loss_as_trained over the choice of validation sequences; null with one
    # sequence in a source
    loss_as_trained_se_seq: float | None
    loss_bf16: float  # validation loss of the same weights with all Linears in BF16
    loss_bf16_se_seq: float | None  # standard error of loss_bf16, likewise
    # validation loss in BF16 of the mean of the weights of averaged_steps; null without
    # checkpoint.average
    loss_bf16_average: float | None
    averaged_steps: list[int]  # steps of the checkpoints whose weights were averaged
    sources: dict[str, SourceSummary]  # source -> its part
    # training loss of the last step that had targets, nats per token; null where none had
    train_loss_last: float | None
    skipped_steps: int  # steps that the guard skipped
    steps_without_targets: int  # steps that read prompts alone
    rollbacks: int  # times that the run went back to a checkpoint
    tok_per_s_median: float  # tokens per second, all ranks, median over steps after the warm-up
    step_s_median: float  # seconds of a step, median over the same
    compile_s: float  # seconds of the first steps of all starts beyond the median
    tflops_median: float  # 10^12 flops_per_token a second, all GPUs, at the median
    # share of the dense BF16 peak of all GPUs, whatever the precision; null for an unknown GPU
    mfu_bf16: float | None
    wall_s: float  # seconds of wall time, all starts
    probe_s: float  # of these, spent in probes
    probe_share: float  # probe_s over wall_s
    mem_peak_gib: float | None  # largest memory allocated on rank 0's GPU; null on a CPU


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Average:
    """The mean of the weights of some checkpoints, validated."""

    steps: list[int]  # of the checkpoints
    in_bf16: ValLoss  # validation with all Linears in BF16


@dataclass(frozen=True)
class Finished:
    """What rank 0 knows at the end of a run, of which its summary is made."""

    config: Config
    world: World
    data: Data
    counts: dict[str, Any]  # as GPT.counts() returns them
    layers: list[Layer]  # the choice of recipe for every Linear
    guard: Guard
    progress: Progress
    start: Start
    environment: dict  # what env.json holds
    rows: list[dict]  # of metrics.jsonl
    as_trained: ValLoss  # validation in the precision of the training
    in_bf16: ValLoss  # validation with all Linears in BF16
    average: Average | None = None  # with checkpoint.average


def summarise(run: Finished) -> Summary:
    """The record of a run that has ended."""
    config, world, o = run.config, run.world, run.config.optim
    steps = config.total_steps
    name = device_name(world.device)
    peaks = peak_flops(name)
    speed = throughput(
        run.rows,
        config.data.tokens_per_step,
        run.counts["flops_per_token"],
        peaks[0] * world.size if peaks else None,
        config.ramp.small_steps,
    )
    return Summary(
        schema_version=SCHEMA_VERSION,
        run_id=config.run,
        pair_id=pair_id(config, run.start.origin),
        **lineage(config, run.start.origin),
        status="ok" if run.guard.consecutive == 0 else "diverged",
        **{key: run.environment[key] for key in ("git_commit", "torch", "torchao", "t_start")},
        device=name,
        n_gpu=world.size,
        seed=config.seed,
        repeat=config.repeat,
        data_sha256=run.data.train_sha256,
        val_sha256=run.data.val_sha256,
        tokenizer_sha256=run.data.tokenizer_sha256,
        vocab_size=config.model.vocab_size,
        vocab_padded=config.model.vocab_padded,
        n_layer=config.model.n_layer,
        n_head=config.model.n_head,
        n_embd=config.model.n_embd,
        n_ffn=config.model.n_ffn,
        n_ctx=config.model.n_ctx,
        **run.counts,
        params_fp8=sum(layer.params for layer in run.layers if layer.recipe),
        steps=steps,
        tokens=config.total_tokens,
        tokens_per_step=config.data.tokens_per_step,
        optimizer=optim.NAMES[o.kind],
        lr_peak=o.lr,
        warmup_steps=o.warmup_steps(config.full_steps),
        beta1=o.beta1,
        beta2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip=o.clip,
        schedule=o.schedule,
        # the schedule has ended, or this would not be written
        is_annealed=optim.learning_rate(config.full_steps - 1, config.full_steps, o) < o.lr,
        precision=_precision(config, world, run.layers, run.start),
        loss_as_trained=run.as_trained.loss,
        loss_as_trained_se_seq=run.as_trained.standard_error,
        loss_bf16=run.in_bf16.loss,
        loss_bf16_se_seq=run.in_bf16.standard_error,
        loss_bf16_average=run.average.in_bf16.loss if run.average else None,
        averaged_steps=run.average.steps if run.average else [],
        sources={source: _source(run, source) for source in run.data.sources},
        train_loss_last=_last_train_loss(run.rows),
        skipped_steps=run.guard.skipped,
        steps_without_targets=run.guard.without_targets,
        rollbacks=run.guard.rollbacks,
        **speed,
        wall_s=run.progress.seconds,
        probe_s=run.progress.probe_seconds,
        probe_share=run.progress.probe_seconds / run.progress.seconds,
        mem_peak_gib=_peak_memory(world.device),
    )


def _precision(
    config: Config, world: World, layers: Sequence[Layer], start: Start
) -> PrecisionSummary:
    converted = [layer for layer in layers if layer.recipe]
    cast_from = weights_cast_from(
        layers, config.fp8.all_gather, world.device.type, world.has_whole_weights
    )
    trunks = start.trunk_precisions
    return PrecisionSummary(
        recipe=config.fp8.label,
        fp8=_settings(config.fp8),
        bits=min(fp8.bits for fp8 in (*trunks, config.fp8)),
        switched_from=start.switched_from,
        switched_from_fp8=[_settings(fp8) for fp8 in trunks],
        compile=bool(config.parallel.compile),
        layers_converted=[layer.name for layer in converted],
        layers_recipes={layer.name: layer.recipe for layer in layers if layer.recipe},
        layers_kernels=[layer.name for layer in converted if layer.kernels],
        layers_skipped={layer.name: layer.why for layer in layers if not layer.recipe},
        weights_cast_from=cast_from,
    )


def _settings(fp8: FP8Config) -> FP8Config | None:
    return fp8 if fp8.is_on else None


def _source(run: Finished, source: str) -> SourceSummary:
    as_trained = run.as_trained.source_loss(source)
    in_bf16 = run.in_bf16.source_loss(source)
    validation = run.data.val[source]
    return SourceSummary(
        weight=run.data.weights[source],
        epochs=run.data.epochs[source],
        loss_as_trained=as_trained,
        loss_bf16=in_bf16,
        bpb_as_trained=bits_per_byte(as_trained, validation),
        bpb_bf16=bits_per_byte(in_bf16, validation),
    )


def _last_train_loss(rows: list[dict]) -> float | None:
    """Of the last step that had targets, nats per token; None where none had."""
    for row in reversed(rows):
        if row["kind"] == "train" and row["verdict"] != Verdict.NO_TARGET.value:
            return row["loss"]
    return None


def _peak_memory(device: torch.device) -> float | None:
    """GiB that this process has had allocated at once; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / GIB


def write_val_losses(path: Path, as_trained: ValLoss, in_bf16: ValLoss) -> None:
    """val_losses.npz, for paired comparisons: summed nats of each validation sequence, (sequences,)
    float64, as trained and in BF16; its source, by number, and its targets."""
    sequences = list(as_trained.sequences.values())
    n_sequences = [len(losses) for losses in sequences]  # of each source
    np.savez(
        path,
        as_trained=np.concatenate(sequences),
        bf16=np.concatenate(list(in_bf16.sequences.values())),
        source=np.repeat(np.arange(len(sequences)), n_sequences),
        n_tokens=np.concatenate(list(as_trained.targets.values())),
    )


# ------------------------------------------------------------------------------------------ schema


def schema_page() -> str:
    """docs/schemas.md: the keys of summary.json with type and meaning."""
    parts = [
        (
            "# What the files hold that a command leaves\n\nMade of the comments in"
            " `runtime/summary.py`; a test compares the two. `python docs/schemas.py write=true`"
            " writes this page anew.\n"
        )
    ]
    for cls, title in (
        (Summary, "summary.json"),
        (PrecisionSummary, "`precision`"),
        (FP8Config, "`precision.fp8`"),
        (SourceSummary, "`sources`, each"),
        (TrainRow, 'metrics.jsonl, rows of kind "train"'),
        (ValidationRow, 'metrics.jsonl, rows of kind "val"'),
        (TasksRow, 'metrics.jsonl, rows of kind "tasks"'),
        (EventRow, 'metrics.jsonl, rows of kind "event"'),
        (Environment, "env.json"),
        (Diagnosis, "diagnosis.json"),
    ):
        parts.append(f"## {title}\n\n{schema_table(cls)}\n")
        if cls is EventRow:
            parts.append(_list_of_events())
    return "\n".join(parts)


def _list_of_events() -> str:
    return "".join(f"- `{name}`: {meaning}\n" for name, meaning in EVENTS.items())
