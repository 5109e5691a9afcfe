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
from bench.cells import Cell, our_cell
from bench.peer_models import BESIDE, OURS, PRECISIONS, USED, check_checkout
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
    return throughput.run_suite(__doc__, "peers", Options, arguments, groups_for)


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
        print(check_checkout(peer, folder))
    return peer_groups(options.suite, folders)


def peer_groups(suite: str, folders: dict[str, str]) -> list[list[Cell]]:
    """Each our BF16, then what takes turns with it; folders: checkout by peer."""
    if suite == "toy":
        return [_toy_group(folders)]
    groups = []
    labels = ("bf16", "tensorwise+kernels")
    for size, depth in (("125m", "d12"), ("1p5b", "d26")):
        ours = [our_cell(size, label, MICRO_BATCH[size]) for label in labels]
        groups.append([*ours, *_peer_cells(size, folders)])
        if "nanochat" in folders:
            name = f"ours_{depth}"
            micro_batch, _ = BESIDE[size][f"nanochat_{depth}"]
            model = OURS[name]
            groups.append([our_cell(name, label, micro_batch, model=model) for label in labels])
    return groups


def _peer_cells(size: str, folders: dict[str, str]) -> list[Cell]:
    """The peers' cells beside a size of ours."""
    cells = []
    for peer, folder in folders.items():
        for name, (micro_batch, dimensions) in BESIDE[size].items():
            if name.startswith(peer):
                cells += [
                    Cell(
                        size=name,
                        micro_batch=micro_batch,
                        model=dimensions,
                        peer=folder,
                        peer_name=peer,
                        peer_precision=precision,
                    )
                    for precision in PRECISIONS[peer]
                ]
    return cells


def _toy_group(folders: dict[str, str]) -> list[Cell]:
    """Small models on a CPU, without the peers' FP8."""
    ours = our_cell("ours_toy", "bf16", 4, model=OURS["ours_toy"])
    peers = [cell for cell in _peer_cells("toy", folders) if cell.peer_precision != "fp8"]
    return [replace(cell, T=64, tokens_per_step=1024, device="cpu") for cell in (ours, *peers)]


if __name__ == "__main__":
    raise SystemExit(run_command(main))
