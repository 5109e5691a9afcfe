"""The sections of a run's configuration: every knob with its type, default, meaning.

Each section judges itself in problems(): one sentence for each value that cannot be. What spans sections is judged by
runtime/config.py, from where the sections are imported too.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# Recipes whose weights torchao can gather as float8 with one scale per tensor.
FP8_GATHERED = ("tensorwise", "tensorwise_gw_hp")
# Recipes that runtime/fp8_linear.py computes too: one scale per tensor, from its largest magnitude.
FP8_KERNELS = ("tensorwise", "tensorwise_gw_hp", "amax")
WITH_KERNELS = "+kernels"    # behind a recipe's name: what fp8.kernels=true makes of it
RecipeName = Literal["off", "auto", "tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "amax", "cscale", "mxfp8"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    dir: str                                # folder that holds one sub-folder of token shards per source
    mixture: dict[str, float]               # source -> its share of the training tokens; any positive scale
    tokens_per_step: int                    # training tokens per optimizer step, over all ranks
    micro_batch: int | Literal["auto"]      # sequences per forward pass and rank; auto = the fastest that fits, by trial
    tokenizer: str = "gpt2"                 # gpt2, byte, or a folder with tokenizer.json: what the shards were made with
    max_epochs: float = 1.0                 # times that a source may be seen before the run is refused

    def problems(self):
        if not self.mixture:
            yield "data.mixture={} names no source: give at least one, such as data.mixture=fineweb_edu:1"
        for source, weight in self.mixture.items():
            if not (weight > 0 and math.isfinite(weight)):
                yield f"data.mixture gives {source!r} the weight {weight}: leave a source out or give it a positive weight"
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", source):
                yield f"data.mixture names {source!r}: a source is one folder name, of letters, digits, '_', '-' and '.'"
        yield from positive(self, "data", "tokens_per_step", "max_epochs", *["micro_batch"] * (self.micro_batch != "auto"))


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float                               # peak learning rate of AdamW
    min_lr_ratio: float = 0.1               # last learning rate as a share of the peak
    warmup_share: float = 0.02              # share of all steps over which the rate climbs linearly
    schedule: Literal["cosine", "wsd"] = "cosine"   # after warm-up: cosine, or stable and then linear decay
    decay_share: float = 0.2                # wsd only: share of all steps spent decaying
    weight_decay: float = 0.1               # on matrices only, never on norms
    beta1: float = 0.9                      # decay of the first moment
    beta2: float = 0.95                     # decay of the second moment
    eps: float = 1e-8                       # added to the root of the second moment
    clip: float = 1.0                       # largest global gradient norm

    def warmup_steps(self, steps: int) -> int:
        return round(self.warmup_share * steps)

    def decay_steps(self, steps: int) -> int:
        """Updates of the wsd schedule's last part: a branch of `steps` leaves its trunk so many before its end."""
        return max(1, round(self.decay_share * steps))

    def problems(self):
        yield from positive(self, "optim", "lr", "eps", "clip")
        for name in ("min_lr_ratio", "warmup_share", "decay_share", "weight_decay"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"optim.{name}={getattr(self, name)} must lie between 0 and 1"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"optim.{name}={getattr(self, name)} must be at least 0 and below 1"
        if self.schedule == "wsd" and self.warmup_share + self.decay_share > 1:
            yield f"optim.warmup_share={self.warmup_share} plus optim.decay_share={self.decay_share} is more than the whole run"


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    recipe: RecipeName = "off"              # how the Linears' matmuls are scaled; auto = per layer, what this GPU gains from
    include: tuple[str, ...] = ()           # names or patterns of the only Linears to convert; none = all but the head
    skip: tuple[str, ...] = ()              # names or patterns of Linears to leave in BF16, such as layers.0.*
    head: bool = False                      # convert the head too; the loss is sensitive to it
    first_bf16: int = 0                     # blocks at the input that stay in BF16
    last_bf16: int = 0                      # blocks at the output that stay in BF16
    all_gather: bool = False                # several ranks: gather weights as float8, half the bytes; tensorwise family only
    kernels: bool = False                   # our kernels do the casts instead of torchao's: tensorwise family, amax, auto

    @property
    def label(self) -> str:
        """What a run's record and a table of timings call these settings: "bf16", a recipe, or a recipe with WITH_KERNELS.

        Our kernels round as torchao does, but not their weight gradients and not the head's, so they train other weights."""
        return "bf16" if self.recipe == "off" else self.recipe + WITH_KERNELS * self.kernels

    def problems(self):
        named = [name for name in ("include", "skip", "head", "first_bf16", "last_bf16", "all_gather", "kernels")
                 if getattr(self, name)]
        if self.recipe == "off" and named:
            yield (f"fp8.recipe=off converts nothing, yet {', '.join(f'fp8.{name}' for name in named)} is set: "
                   f"name a recipe or drop it")
        for name in ("first_bf16", "last_bf16"):
            if getattr(self, name) < 0:
                yield f"fp8.{name}={getattr(self, name)} must be a number of blocks, 0 or more"
        if self.all_gather and self.recipe not in ("off", *FP8_GATHERED):
            yield (f"fp8.all_gather=true cannot serve fp8.recipe={self.recipe}, whose weights have no single scale that torchao "
                   f"gathers: use one of {', '.join(FP8_GATHERED)}, or fp8.all_gather=false")
        if self.kernels and self.recipe not in ("off", "auto", *FP8_KERNELS):
            yield (f"fp8.kernels=true has no kernels for fp8.recipe={self.recipe}: use one of {', '.join(FP8_KERNELS)}, auto, or "
                   f"fp8.kernels=false")
        if self.kernels and self.all_gather:
            yield ("fp8.kernels=true casts whole weights, yet fp8.all_gather=true gathers them as float8 already: set one of the "
                   "two to false")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    replicate: int = 1                      # copies of the sharded model, gradients averaged between them (HSDP)
    shard: int | None = None                # ranks that share one copy of the weights (FSDP2); none = all that remain
    reshard: bool = True                    # several ranks: drop a block's gathered weights between forward and backward
    recompute: bool = False                 # keep only each block's input, compute the block again in the backward pass
    compile: bool = True                    # torch.compile: whole model on one rank, per block on several
    timeout: float = 300.0                  # seconds that a step may stand still before the job ends and says where it stood
    start_timeout: float = 1800.0           # the same until the first step is done (compilation, loading), and for a save

    def problems(self):
        yield from positive(self, "parallel", "replicate", "shard", "start_timeout")
        if not 1 <= self.timeout <= self.start_timeout:
            yield (f"parallel.timeout={self.timeout} must be at least 1 second and at most "
                   f"parallel.start_timeout={self.start_timeout}")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int | None = 1000                # steps between checkpoints; none = only the last
    keep: int = 3                           # newest checkpoints that stay on disk; the last two always do
    best: bool = True                       # keep that of lowest validation loss too
    forever: int | None = None              # checkpoints of every so many steps stay for good; none = of no step
    rolling: int | None = None              # steps between more saves of which only the newest stays; none = no more
    at: tuple[int, ...] = ()                # more steps to save at; these checkpoints stay for good, to branch off from

    def problems(self):
        yield from positive(self, "checkpoint", "every", "keep", "forever", "rolling")
        if self.forever and (not self.every or self.forever % self.every):
            yield (f"checkpoint.forever={self.forever} must be a multiple of checkpoint.every={self.every}: what is not saved "
                   f"cannot be kept")
        for step in self.at:
            if step < 1:
                yield f"checkpoint.at names step {step}: steps are counted from 1"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int | None = 250                 # steps between validations; none = only the last
    tokens: int = 1_048_576                 # validation tokens per source, always the same ones; all there are if fewer

    def problems(self):
        yield from positive(self, "eval", "every", "tokens")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    to: tuple[Literal["wandb", "tensorboard"], ...] = ()    # mirrors of metrics.jsonl, which is always written
    every: int = 10                         # steps between console lines where the output is no terminal

    def problems(self):
        yield from positive(self, "log", "every")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    every: int | None = None                # steps between looks at what FP8 does to each tensor; none = never
    tokens: int = 4096                      # tokens that a look passes through the model, at most; at least one sequence

    def problems(self):
        yield from positive(self, "probe", "every", "tokens")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    mode: Literal["off", "log", "act"] = "act"      # of spikes: ignored, noted, or skipped; what is not finite is never applied
    window: int = 128                       # accepted steps that a step is compared with
    threshold: float = 10.0                 # a spike lies so many robust standard deviations above their median
    skips: int = 10                         # skipped steps in a row before the run goes back to a checkpoint
    rollbacks: int = 3                      # times that a run may go back before it stops

    def problems(self):
        yield from positive(self, "guard", "skips")
        if self.window < 8:
            yield f"guard.window={self.window} must be at least 8 steps: the spread of fewer is not known"
        if not 2 <= self.threshold < math.inf:
            yield f"guard.threshold={self.threshold} must be at least 2, or ordinary steps would count as spikes"
        if self.rollbacks < 0:
            yield f"guard.rollbacks={self.rollbacks} must be a number of times, 0 or more"


def positive(section, prefix: str, *names: str) -> Iterator[str]:
    """A sentence for each of the named fields that is a number, yet not a positive, finite one."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not 0 < value < math.inf:
            yield f"{prefix}.{name}={value} must be a positive, finite number" if prefix else (
                f"{name}={value} must be a positive, finite number")
