"""Time nanoGPT, nanochat and torchtitan, from checkouts kept outside this repository, in turns with
our BF16, per FLOP.

    python -m bench.peers --nanogpt DIR --nanochat DIR --torchtitan DIR --budget 560  on one GPU, whichever are given
    python -m bench.peers --suite toy --nanogpt DIR  small models on a CPU: a rehearsal, nanoGPT trains in fp32 there
    python -m bench.peers --table

    nanogpt                karpathy/nanoGPT: autocast to BF16, compiled, fused AdamW
    nanochat_bf16, _fp8    karpathy/nanochat: compiled, Muon with AdamW, without clipping; its own tensorwise FP8
    torchtitan_bf16, _fp8  pytorch/torchtitan at v0.2.2, its packages installed: Llama of our dimensions, untied, autocast,
                           compiled block by block, fused AdamW; torchao's tensorwise but for the
                           head

Each trains a micro-step and an update as its own training script does, with that script's defaults;
batches, T and the stopwatch are bench/throughput.py's. Left out are data loading and learning rate
schedules. What is not theirs:

    FlashAttention 3  comes from a hub; without it nanochat falls back to torch's attention, as it says itself. That knows no
                      sliding window, so window_pattern is "L" (whole context), which nanochat recommends for that case.
    zero weights      nanochat begins with attn.c_proj and mlp.c_proj at zero: two of the three matmuls of every other Linear of
                      a block would multiply zeros at first, which a GPU does faster. They get random values.

FLOPs per token are ours (model.GPT.counts): 6 a weight of a Linear, the head once, plus 12 L H D T.
Lookups count nothing, so nanochat's value embeddings, half of d12's parameters, do not; nor do
Muon's matmuls."""

from dataclasses import dataclass
from pathlib import Path

from bench import throughput
from bench.cells import BASELINE, Cell
from bench.peer_models import BESIDE, LABELS, OURS, USED, check
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
    def groups_for(options: Options) -> list[list[Cell]]:
        folders = {
            peer: str(Path(folder).resolve()) for peer in USED if (folder := getattr(options, peer))
        }
        if not folders:
            raise UserError(
                "name a checkout at least: --nanogpt DIR, --nanochat DIR or --torchtitan DIR"
            )
        for peer, folder in folders.items():
            print(check(peer, folder))
        return groups_of(options.suite, folders)

    return throughput.run(__doc__, "peers", Options, arguments, groups_for)


def groups_of(suite: str, folders: dict[str, str]) -> list[list[Cell]]:
    """Each our BF16, then what takes turns with it; folders: checkout by peer."""

    def theirs(size, *small):
        return [
            Cell(name, label, micro_batch, *small, model=dimensions, peer=folders[peer])
            for peer in folders
            for name, (micro_batch, dimensions) in BESIDE[size].items()
            if name.startswith(peer)
            for label in LABELS[peer]
        ]

    if suite == "toy":
        small = 64, 1024, "cpu"  # T, tokens per step, device
        return [
            [
                Cell("ours_toy", BASELINE, 4, *small, model=OURS["ours_toy"]),
                *(cell for cell in theirs("toy", *small) if not cell.label.endswith("_fp8")),
            ]
        ]
    groups, labels = [], (BASELINE, "tensorwise+kernels")
    for size, depth in (("125m", "d12"), ("1p5b", "d26")):
        groups.append([Cell(size, label, MICRO_BATCH[size]) for label in labels] + theirs(size))
        if "nanochat" in folders:
            micro_batch, _ = BESIDE[size][f"nanochat_{depth}"]
            groups.append(
                [
                    Cell(f"ours_{depth}", label, micro_batch, model=OURS[f"ours_{depth}"])
                    for label in labels
                ]
            )
    return groups


if __name__ == "__main__":
    raise SystemExit(run_command(main))
