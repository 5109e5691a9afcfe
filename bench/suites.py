"""What bench/throughput.py times, in the order of its value.

A group is a BF16 baseline with what is timed in turns with it. What a call leaves, the next one does. h100, if GUESSES hold,
which nobody has measured: one call of ten minutes gives phase 0 (bench/ceilings.py), 1.5B without and with the head, and of
125M what is then left of it; all takes about nine calls, eleven with both peers.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from model import GPTConfig
from runtime.config import load_config

ROOT = Path(__file__).resolve().parents[1]
TOKENS_PER_STEP = 524_288
BASELINE = "bf16"


@dataclass(frozen=True)
class Cell:
    """One row to be. `size` names configs/gpt<size>_bf16.py, a peer's model, or what `model` spells out."""
    size: str
    label: str
    micro_batch: int
    T: int = 1024
    tokens_per_step: int = TOKENS_PER_STEP
    device: str = "cuda"
    model: tuple[tuple[str, int], ...] | None = None    # overrides of the configuration, as pairs
    peer: str | None = None         # folder of its checkout
    like: str | None = None         # our size whose cost it is estimated by
    planned: int | None = None      # micro-batch that was out of memory: this is the second try

    @property
    def name(self) -> str:
        return f"{self.size} {self.label}, micro-batch {self.micro_batch}"

    @property
    def key(self) -> tuple:
        """What makes two rows rows of the same cell; a second try counts as the first."""
        return self.size, self.label, self.T, self.planned or self.micro_batch

    def halved(self) -> "Cell":
        return replace(self, micro_batch=self.micro_batch // 2, planned=self.planned or self.micro_batch)

    def spec(self) -> dict:
        """The argument of bench/cell.py."""
        return {"size": self.size, "label": self.label, "T": self.T, "micro_batch": self.micro_batch,
                "tokens_per_step": self.tokens_per_step, "device": self.device, "seed": 0,
                "model": dict(self.model) if self.model else None,
                "peer": {"name": self.label, "dir": self.peer} if self.peer else None}


@dataclass(frozen=True)
class Group:
    baseline: Cell
    members: tuple[Cell, ...]
    beside: tuple[str, ...] = ()    # labels that are timed again where another member is missing: to be compared in one call

    def halved(self) -> "Group":
        return replace(self, baseline=self.baseline.halved(), members=tuple(cell.halved() for cell in self.members))


@dataclass(frozen=True)
class Loop:
    """train.py itself for some steps, against the cells of a group that is timed in the same call."""
    group: Group


@dataclass(frozen=True)
class Suite:
    device: str
    jobs: tuple[Group | Loop, ...]
    ceilings: tuple[Cell, ...]      # whose attention is timed; of the first one the matmuls, too
    at_once: int            # children that compile at the same time
    turns: int              # of each FP8 cell, each between two of the baseline
    turn_s: float           # seconds of a turn
    most_drift: float       # of the baseline over a cell's turns before the cell is called invalid


MICRO_BATCH = {"125m": 64, "350m": 32, "760m": 16, "1p5b": 16}      # of 1,024 tokens
GUESSES = {     # seconds, until a cell of the size was measured: to start it, to time it, to time train.py
    "start_s": {"125m": 60, "350m": 90, "760m": 95, "1p5b": 130, "toy_s": 12, "toy_m": 14},
    "time_s": {"125m": 25, "350m": 30, "760m": 30, "1p5b": 35, "toy_s": 2, "toy_m": 2},
    "loop_s": {"125m": 75, "toy_s": 8},
}

FIRST = {"1p5b": ("tensorwise+kernels", "tensorwise+kernels+head"), "125m": ("tensorwise+kernels", "auto+kernels", "tensorwise"),
         "350m": ("tensorwise+kernels", "tensorwise"), "760m": ("tensorwise+kernels", "tensorwise")}
SECOND = ("tensorwise+kernels+head", "auto+kernels", "tensorwise_gw_hp+kernels", "tensorwise")      # what FIRST has not
THIRD = ("tensorwise_gw_hp", "rowwise_with_gw_hp", "auto", "rowwise", "bf16_eager")
OTHER_MICRO_BATCHES = {"1p5b": (8,), "125m": (32, 128), "760m": (32,), "350m": (64,)}
PEERS_KEEP = 1.12       # for the backward pass, times what our model like it does
LONG = {"1p5b": 8, "125m": 32}      # micro-batch at T = 2,048, which configs/ train at
# Beside which size of ours: nanoGPT's model; nanochat's, our model at its dimensions (peers.OURS), its micro-batch at T = 1024
# (as many tokens as its own default).
NANOGPT = {"125m": "nanogpt_124m", "1p5b": "nanogpt_xl"}
NANOCHAT = {"125m": ("nanochat_d12", "ours_d12", 64), "1p5b": ("nanochat_d26", "ours_d26", 32)}

TOY = {"toy_s": (("n_layer", 2), ("n_head", 2), ("n_embd", 64), ("n_ffn", 128), ("vocab_size", 257), ("n_ctx", 64)),
       "toy_m": (("n_layer", 3), ("n_head", 2), ("n_embd", 128), ("n_ffn", 256), ("vocab_size", 257), ("n_ctx", 64))}
TOY_LABELS = ("tensorwise", "tensorwise+kernels")


def h100(nanogpt: str | None, nanochat: str | None) -> Suite:
    """The measurements on one GPU; peers where their checkouts are given."""
    def group(size: str, labels: tuple[str, ...], micro_batch: int | None = None, peers: tuple[Cell, ...] = (), **more) -> Group:
        ours = [Cell(size, label, micro_batch or MICRO_BATCH[size], **more) for label in (BASELINE, *labels)]
        return Group(ours[0], (*ours[1:], *peers), best if peers or set(best) < set(labels) and labels != FIRST.get(size) else ())

    def rest(size: str) -> tuple[str, ...]:
        return tuple(label for label in SECOND if label not in FIRST[size])

    best = ("tensorwise+kernels",)
    jobs: list[Group | Loop] = [group(size, labels) for size, labels in FIRST.items()]
    for size, (theirs, ours, micro_batch) in NANOCHAT.items():
        peers = [Cell(NANOGPT[size], "nanogpt", MICRO_BATCH[size], peer=nanogpt, like=size)] if nanogpt else []
        peers += [Cell(theirs, f"nanochat_{kind}", micro_batch, peer=nanochat, like=size) for kind in ("bf16", "fp8") if nanochat]
        if peers:
            jobs.append(group(size, best, peers=tuple(peers)))
        if nanochat:
            from bench.peers import OURS  # only here: it imports all that a cell does

            jobs.append(group(ours, best, micro_batch, like=size, model=tuple(OURS[ours].items())))
    jobs += [group("1p5b", best + rest("1p5b")), Loop(group("125m", best))]
    jobs += [group(size, best + rest(size)) for size in ("125m", "760m", "350m")]
    jobs += [group(size, THIRD) for size in ("1p5b", "125m", "760m", "350m")]
    jobs += [group(size, best, micro_batch) for size, others in OTHER_MICRO_BATCHES.items() for micro_batch in others]
    jobs += [group(size, best, micro_batch, T=2048) for size, micro_batch in LONG.items()]
    return Suite("cuda", tuple(jobs), tuple(Cell(size, BASELINE, MICRO_BATCH[size]) for size in ("1p5b", "125m", "350m", "760m")),
                 at_once=4, turns=5, turn_s=1.0, most_drift=0.03)


def toy() -> Suite:
    """The same path on two CPU cores in about a minute; its numbers say nothing about a GPU."""
    def group(size: str) -> Group:
        cells = [Cell(size, label, 4, T=64, tokens_per_step=1024, device="cpu", model=TOY[size])
                 for label in (BASELINE, *TOY_LABELS)]
        return Group(cells[0], tuple(cells[1:]))

    groups = tuple(map(group, TOY))
    return Suite("cpu", (*groups, Loop(Group(groups[0].baseline, ()))), (groups[0].baseline,), at_once=2, turns=2, turn_s=0.1,
                 most_drift=float("inf"))


@cache
def config_of(cell: Cell) -> GPTConfig:
    """Of a cell of ours; for a peer, of the size that it is like."""
    if cell.model:
        return GPTConfig(**dict(cell.model) | {"n_ctx": cell.T})
    return replace(load_config(ROOT / "configs" / f"gpt{cell.like or cell.size}_bf16.py").model, n_ctx=cell.T)


def memory(cell: Cell) -> tuple[float, float]:
    """Bytes that a child holds while it waits, and at its peak; modelled.

    Waiting: fp32 weights, our kernels' FP8 copies of them in two layouts, a CUDA context. Peak: gradients and two moments on
    top (fp32), BF16 copies of the weights, and what the compiler's plan keeps for the backward pass (bench/inductor.py): per
    token and layer 16 C + 6 F bytes in BF16, per logit 2 and 2 for its gradient; FP8 keeps less, which is not counted here. Not
    compiled 4 more a logit. The peers keep more: by the same plan nanochat's d26 55.6 GB at 32 x 1,024 where ours keeps 49.9."""
    c = config_of(cell)
    tokens = cell.micro_batch * cell.T
    idle = (6 if "+kernels" in cell.label else 4) * c.params_total + 0.8e9
    activations = tokens * (c.n_layer * (16 * c.n_embd + 6 * c.n_ffn) + (8 if cell.label == "bf16_eager" else 4) * c.vocab_padded)
    return idle, idle + 14 * c.params_total + (PEERS_KEEP if cell.peer else 1.0) * activations
