"""Time nanoGPT, nanochat and torchtitan, from checkouts kept outside this repository, in turns with
our BF16, per FLOP.

    python -m bench.peers --nanogpt DIR --nanochat DIR --torchtitan DIR --budget 560  on one GPU
    python -m bench.peers --suite toy --nanogpt DIR  a rehearsal on a CPU, where nanoGPT has fp32
    python -m bench.peers --table

Checkouts are timed where their folders are given:

    nanogpt                karpathy/nanoGPT: autocast to BF16, compiled, fused AdamW
    nanochat_bf16, _fp8    karpathy/nanochat: compiled, Muon with AdamW, without clipping; its own
                           tensorwise FP8
    torchtitan_bf16, _fp8  pytorch/torchtitan at v0.2.2, its packages installed: Llama of our
                           dimensions, untied, autocast, compiled block by block, fused AdamW;
                           torchao's tensorwise but for the head

Each trains a micro-step and an update as its own training script does, with that script's defaults;
batches, T and the stopwatch are bench/throughput.py's. Left out are data loading and learning rate
schedules. What is not theirs:

    FlashAttention 3  comes from a hub; without it nanochat falls back to torch's attention, as it
                      says itself. That knows no sliding window, so window_pattern is "L" (whole
                      context), which nanochat recommends for that case.
    zero weights      nanochat begins with attn.c_proj and mlp.c_proj at zero: two of the three
                      matmuls of every other Linear of a block would multiply zeros at first, which
                      a GPU does faster. They get random values.

FLOPs per token are ours (model.GPT.counts): 6 a weight of a Linear, the head once, plus 12 L H D T.
Lookups count nothing, so nanochat's value embeddings, half of d12's parameters, do not; nor do
Muon's matmuls."""

from dataclasses import dataclass, replace
from pathlib import Path

from bench import throughput
from bench.cells import BASELINE, Cell
from bench.peer_models import BESIDE, IN_FP8, LABELS, OURS, USED, check
from lib.command import run_command
from lib.errors import UserError
from lib.values import FilePath
from runtime.roofline import MICRO_BATCH


@dataclass(frozen=True, kw_only=True)
class Options(throughput.Options):
    nanogpt: FilePath | None = None  # folder of a checkout
    nanochat: FilePath | None = None  # the same
    torchtitan: FilePath | None = None  # the same


def main(arguments: list[str]) -> int:
    return throughput.run(__doc__, "peers", Options, arguments, groups_for)


def groups_for(options: Options) -> list[list[Cell]]:
    """The suite's groups with the checkouts that are named. Raises UserError."""
    folders = {}
    for peer in USED:
        folder = getattr(options, peer)
        if folder:
            folders[peer] = str(Path(folder).resolve())
    if not folders:
        raise UserError(
            "name a checkout at least: --nanogpt DIR, --nanochat DIR or --torchtitan DIR"
        )
    for peer, folder in folders.items():
        print(check(peer, folder))
    return groups_of(options.suite, folders)


def groups_of(suite: str, folders: dict[str, str]) -> list[list[Cell]]:
    """Each our BF16, then what takes turns with it; folders: checkout by peer."""
    if suite == "toy":
        return [_toy_group(folders)]
    groups = []
    labels = (BASELINE, "tensorwise+kernels")
    for size, depth in (("125m", "d12"), ("1p5b", "d26")):
        ours = [Cell(size, label, MICRO_BATCH[size]) for label in labels]
        groups.append([*ours, *_peer_cells(size, folders)])
        if "nanochat" in folders:
            name = f"ours_{depth}"
            micro_batch, _ = BESIDE[size][f"nanochat_{depth}"]
            groups.append([Cell(name, label, micro_batch, model=OURS[name]) for label in labels])
    return groups


def _peer_cells(size: str, folders: dict[str, str]) -> list[Cell]:
    """The peers' cells beside a size of ours."""
    cells = []
    for peer, folder in folders.items():
        for name, (micro_batch, dimensions) in BESIDE[size].items():
            if name.startswith(peer):
                cells += [
                    Cell(name, label, micro_batch, model=dimensions, peer=folder)
                    for label in LABELS[peer]
                ]
    return cells


def _toy_group(folders: dict[str, str]) -> list[Cell]:
    """Small models on a CPU, without the peers' FP8."""
    ours = Cell("ours_toy", BASELINE, 4, model=OURS["ours_toy"])
    peers = [cell for cell in _peer_cells("toy", folders) if cell.label not in IN_FP8]
    return [replace(cell, T=64, tokens_per_step=1024, device="cpu") for cell in (ours, *peers)]


if __name__ == "__main__":
    raise SystemExit(run_command(main))
