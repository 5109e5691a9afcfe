"""What is timed: the cells of each suite, and our model as a cell has it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from fp8 import selection
from fp8.recipes import FP8Config, from_label
from lib.errors import UserError
from lib.machine import ROOT
from runtime import documents
from runtime.config import Config, load_config
from runtime.optim import MuonAdamW
from runtime.parallel import World, build
from runtime.roofline import MICRO_BATCH, TOKENS_PER_STEP
from runtime.training_step import end_unjudged_step, forward_backward

BF16 = FP8Config()  # the precision that others are compared with
DOCUMENTS = "+documents"  # end of a label: with data.document_mask


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is timed: a model, ours or a peer's, in one precision at one batch."""

    # 125m .. 1p5b of configs/gpt<size>_bf16.py, a peer's model, or what `model` spells out
    size: str
    micro_batch: int  # sequences
    fp8: FP8Config = BF16  # section fp8 of our config; of a peer nothing is said by it
    # data.document_mask, on documents of half a context on average
    document_mask: bool = False
    T: int = 1024  # context length, tokens
    tokens_per_step: int = TOKENS_PER_STEP  # training tokens of an optimizer step
    device: str = "cuda"  # "cuda" or "cpu"
    # keys of GPTConfig that differ from the size's; a peer's own
    model: dict = field(default_factory=dict)
    peer: str | None = None  # folder of the checkout that peer_models.py builds; null: our model
    peer_name: str | None = None  # nanogpt, nanochat, torchtitan
    peer_precision: str | None = None  # bf16 or fp8 of a peer that has both

    @property
    def label(self) -> str:
        """How people and files call the precision: FP8Config.label, with +documents where there is
        a mask; a peer's name and precision. Nothing is read back from it."""
        if self.peer_name is not None:
            return "_".join(filter(None, (self.peer_name, self.peer_precision)))
        return self.fp8.label + DOCUMENTS if self.document_mask else self.fp8.label

    @property
    def name(self) -> str:
        return f"{self.size}/{self.label}"

    @property
    def is_baseline(self) -> bool:
        """Whether it is our model in BF16 and nothing else is set."""
        return self.peer is None and self.fp8 == BF16 and not self.document_mask


def our_cell(size: str, label: str, micro_batch: int, **values: Any) -> Cell:
    """A cell of our model in the precision that a person names as FP8Config.label does. Without
    +kernels the casts are torchao's. Raises UserError for an unknown label."""
    return Cell(size=size, micro_batch=micro_batch, fp8=precision_named(label), **values)


def precision_named(label: str) -> FP8Config:
    fp8 = from_label(label)
    if fp8.is_on and fp8.kernels == "auto":
        return replace(fp8, kernels=False)
    return fp8


def cell_from(values: dict[str, Any]) -> Cell:
    """The cell that asdict() and JSON have made `values` of."""
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values["fp8"].items()
    }
    return Cell(**(values | {"fp8": FP8Config(**settings)}))


@dataclass
class Subject:
    """A model in memory with its micro-step and update: ours below, the peers' in
    peer_models.py."""

    model: nn.Module
    vocab: int  # tokens are drawn from range(vocab)
    # x, y (B, T) int64 -> mean loss per token, (), fp32, detached; gradients add up in .grad; no
    # wait for the GPU
    micro_step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer | MuonAdamW
    update: Callable[[], None]  # clip, step, zero gradients, as at a step's end
    counts: dict  # flops_per_token, params_total, params_matmul
    describe: list[str] = field(default_factory=list)  # lines for people


TOY = {
    "toy_s": {"n_layer": 1, "n_head": 2, "n_embd": 64, "n_ffn": 128, "vocab_size": 257},
    "toy_m": {"n_layer": 1, "n_head": 2, "n_embd": 128, "n_ffn": 256, "vocab_size": 257},
}
H100 = (  # sizes, and labels to time each of them in; the most valuable first
    (
        "1p5b",
        "tensorwise+kernels tensorwise+kernels+delayed tensorwise+kernels+delayed+head tensorwise",
    ),
    ("1p5b 350m", "tensorwise+kernels+bounded tensorwise+kernels+bounded+head"),
    ("760m 350m 125m", "tensorwise+kernels tensorwise+kernels+head"),
    ("1p5b", "tensorwise+kernels+head rowwise"),
    (
        "760m 350m 125m",
        "tensorwise rowwise tensorwise+kernels+delayed tensorwise+kernels+delayed+head",
    ),
    ("125m 1p5b 350m 760m", "auto+kernels tensorwise_gw_hp+kernels rowwise_with_gw_hp"),
    ("1p5b", "tensorwise+kernels+fast_backward rowwise+fast_backward blockwise"),
)


def groups_of(suite: str) -> list[list[Cell]]:
    """Each a BF16 cell, then those that take turns with it."""
    if suite == "h100":
        return [
            [our_cell(size, label, MICRO_BATCH[size]) for label in ("bf16", *labels.split())]
            for sizes, labels in H100
            for size in sizes.split()
        ]
    if suite == "documents":
        sizes = ("1p5b", "350m", "125m")
        baselines = [our_cell(size, "bf16", MICRO_BATCH[size]) for size in sizes]
    else:
        small = {"T": 64, "tokens_per_step": 1024, "device": "cpu"}
        baselines = [our_cell(size, "bf16", 4, model=TOY[size], **small) for size in TOY]
    if suite == "toy":
        fp8 = precision_named("tensorwise")
        return [[baseline, replace(baseline, fp8=fp8)] for baseline in baselines]
    return [[baseline, replace(baseline, document_mask=True)] for baseline in baselines]


def config_of(cell: Cell, compile: str = "block") -> Config:
    """The Config that train.py would be given for a cell of ours; compile: parallel.compile, as
    studies and runs on several GPUs have it. Raises UserError for an unknown size, label or key."""
    changes: dict[str, object] = {
        f"model.{key}": str(value).lower() for key, value in cell.model.items()
    }
    changes |= {
        "model.n_ctx": cell.T,
        "data.micro_batch": cell.micro_batch,
        "data.tokens_per_step": cell.tokens_per_step,
        "data.tokenizer": "./none",
        "run": "cell",  # no text is read
        "parallel.compile": compile,
        "data.document_mask": str(cell.document_mask).lower(),
    }
    if cell.fp8.kernels is False:
        changes["fp8.kernels"] = "false"  # which FP8Config.overrides leaves out
    base = "50m" if cell.model else cell.size
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return load_config(ROOT / "configs" / f"gpt{base}_bf16.py", [*overrides, *cell.fp8.overrides])


def build_ours(
    cell: Cell, device: torch.device, compile: str = "block", cpu_fp32: bool = False
) -> Subject:
    """Our model, built, compiled and initialised as train.py does it; its micro-step and update are
    train.py's lines. cpu_fp32: parallel.cpu_fp32."""
    config = config_of(cell, compile)
    config = replace(config, parallel=replace(config.parallel, cpu_fp32=cpu_fp32))
    cast_by = selection.casting(config.fp8, device.type, has_whole_weights=True)
    selection.check_hardware(config.fp8, device, cast_by.is_ours)
    built = build(config, World(0, 0, 1, device))
    if cell.fp8.is_on and not any(layer.recipe for layer in built.layers):
        raise UserError(f"{cell.label} converts nothing here: it would be BF16 once more")
    model, optimizer, precision = built.model, built.optimizer, built.precision
    tokens = cell.micro_batch * cell.T
    model.init_weights(config.seed, built.assign)
    precision.after_update()
    precision.set_position(0)
    precision.before_step(built.loss_scale)

    numbers = document_numbers(cell.micro_batch, cell.T).to(device)
    is_flex = documents.uses_flex(config, device)

    def micro_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = None
        if cell.document_mask:  # made anew for each micro-batch, as in a run
            mask = documents.attention_mask(numbers, is_flex)
        losses = forward_backward(model, x, y, built.loss_scale, mask=mask)
        return losses.squeeze(0) / tokens

    def update() -> None:
        end_unjudged_step(model, optimizer, precision, config.optim.clip)
        precision.before_step(built.loss_scale)

    counts = {
        key: model.counts()[key] for key in ("flops_per_token", "params_total", "params_matmul")
    }
    lines = [*built.flags, *selection.verdict_lines(built.layers, config.fp8.recipe, device.type)]
    return Subject(model, config.model.vocab_size, micro_step, optimizer, update, counts, lines)


def document_numbers(sequences: int, T: int) -> torch.Tensor:
    """The number of each token's document within its window, (sequences, T) int32; documents have
    T / 2 tokens on average."""
    generator = torch.Generator().manual_seed(0)
    is_border = torch.rand(sequences, T, generator=generator) < 2 / T
    return is_border.cumsum(1, dtype=torch.int32)
