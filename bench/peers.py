"""Time nanoGPT, nanochat and torchtitan, from checkouts kept outside this repository, in turns with our BF16, per FLOP.

    python -m bench.peers --nanogpt DIR --nanochat DIR --torchtitan DIR --budget 560     on one GPU, whichever are given
    python -m bench.peers --suite toy --nanogpt DIR         small models on a CPU: a rehearsal, nanoGPT trains in fp32 there
    python -m bench.peers --table

    nanogpt                 karpathy/nanoGPT: autocast to BF16, compiled, fused AdamW
    nanochat_bf16, _fp8     karpathy/nanochat: compiled, Muon with AdamW, without clipping; its own tensorwise FP8
    torchtitan_bf16, _fp8   pytorch/torchtitan at v0.2.2, its packages installed: Llama of our dimensions, untied, autocast,
                            compiled block by block, fused AdamW; torchao's tensorwise but for the head

Each trains a micro-step and an update as its own training script does, with that script's defaults; batches, T and the stopwatch
are bench/throughput.py's. Left out are data loading and learning rate schedules. What is not theirs:

    FlashAttention 3    comes from a hub; without it nanochat falls back to torch's attention, as it says itself. That knows no
                        sliding window, so window_pattern is "L" (whole context), which nanochat recommends for that case.
    zero weights        nanochat begins with attn.c_proj and mlp.c_proj at zero: two of the three matmuls of every other Linear of
                        a block would multiply zeros at first, which a GPU does faster. They get random values.

FLOPs per token are ours (model.GPT.counts): 6 a weight of a Linear, the head once, plus 12 L H D T. Lookups count nothing, so
nanochat's value embeddings, half of d12's parameters, do not; nor do Muon's matmuls.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from bench.throughput import BASELINE, ROOT, Cell, Subject, show, time_all
from runtime.cli import UserError, command, run_command
from runtime.roofline import MICRO_BATCH

# Sizes in the peers' own words. nanochat's depth d has width 64 d, rounded up to heads of 128.
SIZES = {
    "nanogpt_124m": {"n_layer": 12, "n_head": 12, "n_embd": 768}, "nanogpt_xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "nanochat_d12": {"n_layer": 12, "n_head": 6, "n_kv_head": 6, "n_embd": 768},
    "nanochat_d26": {"n_layer": 26, "n_head": 13, "n_kv_head": 13, "n_embd": 1664},
    "torchtitan_125m": {"n_layers": 12, "n_heads": 6, "dim": 768, "vocab_size": 50304},
    "torchtitan_1p5b": {"n_layers": 28, "n_heads": 16, "dim": 2048, "vocab_size": 50304},
    "nanogpt_toy": {"n_layer": 2, "n_head": 2, "n_embd": 96, "vocab_size": 256},
    "nanochat_toy": {"n_layer": 2, "n_head": 1, "n_kv_head": 1, "n_embd": 128, "vocab_size": 256},
    "torchtitan_toy": {"n_layers": 2, "n_heads": 2, "dim": 96, "vocab_size": 256, "multiple_of": 256},
}
# Our own model at their dimensions: the same work within 1 % (a SwiGLU of 8/3 C has as many weights as their MLP of 4 C).
_CHAT = {"vocab_size": 32768, "tied": False, "qk_norm": True}
OURS = {
    "ours_d12": {"n_layer": 12, "n_head": 6, "n_embd": 768, "n_ffn": 2048, **_CHAT},
    "ours_d26": {"n_layer": 26, "n_head": 13, "n_embd": 1664, "n_ffn": 4480, **_CHAT},      # 8/3 x 1664 = 4437, to tiles of 128
    "ours_toy": {"n_layer": 2, "n_head": 2, "n_embd": 96, "n_ffn": 256, "vocab_size": 256},
}
LABELS = {"nanogpt": ("nanogpt",), "nanochat": ("nanochat_bf16", "nanochat_fp8"),
          "torchtitan": ("torchtitan_bf16", "torchtitan_fp8")}
URLS = {"nanogpt": "karpathy/nanoGPT", "nanochat": "karpathy/nanochat", "torchtitan": "pytorch/torchtitan"}
# Beside which size of ours: (a peer's size, micro-batch of 1,024 tokens).
BESIDE = {"125m": {"nanogpt": ("nanogpt_124m", 64), "nanochat": ("nanochat_d12", 64), "torchtitan": ("torchtitan_125m", 64)},
          "1p5b": {"nanogpt": ("nanogpt_xl", 16), "nanochat": ("nanochat_d26", 32), "torchtitan": ("torchtitan_1p5b", 16)}}
# The files that are used of each checkout; the commit that this was written for, and SHA-256 of the files, in this order.
USED = {
    "nanogpt": ("3adf61e", "7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c", ("model.py",)),
    "nanochat": ("92d63d4", "db8f978f3b79917faf305d94e2f1c81ca758e51fd6bdd445c0fd8e9232778ac8", tuple(
        f"nanochat/{room}.py" for room in ("__init__", "common", "optim", "flash_attention", "fp8", "gpt"))),
    "torchtitan": ("v0.2.2", "77c548079ca35d35f0999dcccac519e348357676a2bef5428b531636d5746589", tuple(
        f"torchtitan/models/llama3/model/{room}.py" for room in ("args", "model"))),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["h100", "toy"] = "h100"      # on one GPU, or a rehearsal on a CPU
    nanogpt: str | None = None      # folder of a checkout
    nanochat: str | None = None     # the same
    torchtitan: str | None = None   # the same
    budget: float = 560.0           # seconds after which nothing runs any more
    out: str | None = None          # JSON lines that receive the rows; none = bench/results/peers.jsonl, toy_peers.jsonl
    table: bool = False             # print the rows of OUT, draw the figure beside it


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done or out of budget, 2 the user's mistake, 130 interrupted."""
    def work(options: Options) -> str:
        out = Path(options.out or ROOT / "bench" / "results" / f"{'toy_' * (options.suite == 'toy')}peers.jsonl")
        if not options.table:
            folders = {peer: str(Path(folder).expanduser().resolve()) for peer in USED if (folder := getattr(options, peer))}
            if not folders:
                raise UserError("name a checkout at least: --nanogpt DIR, --nanochat DIR or --torchtitan DIR")
            for peer, folder in folders.items():
                print(check(peer, folder))
            told = shlex.join(["python", "-m", "bench.peers", *arguments])
            time_all(groups_of(options.suite, folders), out, options.budget, told)
        return show(out)
    return command(__doc__, Options, arguments, work)


def groups_of(suite: str, folders: dict[str, str]) -> list[list[Cell]]:
    """Each our BF16, then what takes turns with it; folders: checkout by peer."""
    if suite == "toy":
        return [[Cell("ours_toy", BASELINE, 4, 64, 1024, "cpu", OURS["ours_toy"]),
                 *(Cell(f"{peer}_toy", LABELS[peer][0], 4, 64, 1024, "cpu", None, folder) for peer, folder in folders.items())]]
    groups = []
    for size, peers in BESIDE.items():
        theirs = [Cell(*peers[peer][:1], label, peers[peer][1], peer=folder) for peer, folder in folders.items()
                  for label in LABELS[peer]]
        groups.append([Cell(size, label, MICRO_BATCH[size]) for label in (BASELINE, "tensorwise+kernels")] + theirs)
        if "nanochat" in folders:
            depth, micro_batch = peers["nanochat"][0].partition("_")[2], peers["nanochat"][1]
            groups.append([Cell(f"ours_{depth}", label, micro_batch, model=OURS[f"ours_{depth}"])
                           for label in (BASELINE, "tensorwise+kernels")])
    return groups


def check(peer: str, folder: str) -> str:
    """What the checkout in `folder` is, in words, read without running it. Raises UserError where it is none."""
    commit, digest, files = USED[peer]
    if missing := [file for file in files if not (Path(folder) / file).is_file()]:
        raise UserError(f"{peer}={folder} is no checkout of {peer} at {commit}: it has no {missing[0]}; give the folder that "
                        f"git clone https://github.com/{URLS[peer]} makes, at {commit}")
    found = hashlib.sha256(b"".join((Path(folder) / file).read_bytes() for file in files)).hexdigest()
    return f"{peer} {commit}" if found == digest else f"{peer}, another version than {commit}: SHA-256 {found[:12]}"


def load(cell: Cell, device: torch.device) -> Subject:
    """The peer's model of a cell, initialised and set to compile at its first micro-step. Imports the checkout's code and sets
    the process's matmul precision as the peer does: meant for a process of its own. Raises UserError."""
    peer = cell.label.partition("_")[0]
    accumulation = cell.tokens_per_step // (cell.micro_batch * cell.T)
    torch.manual_seed(0)
    build = {"nanogpt": _nanogpt, "nanochat": _nanochat, "torchtitan": _torchtitan}[peer]
    try:
        subject = build(Path(cell.peer), {**SIZES[cell.size], **(cell.model or {})}, cell.T, device, accumulation,
                        cell.label.endswith("_fp8"))
    except (ImportError, AttributeError, TypeError) as error:      # a package or a name that this version lacks
        raise UserError(f"{cell.peer} is of a version that this benchmark does not know, or its packages are not installed: "
                        f"{type(error).__name__}: {error}; check out {peer} at {USED[peer][0]}") from error
    subject.describe.insert(0, f"{cell.size}: {check(peer, cell.peer)}, under torch {torch.__version__}")
    return subject


def _nanogpt(root: Path, size: dict, T: int, device: torch.device, accumulation: int, is_fp8: bool) -> Subject:
    module = _import("nanogpt_model", root / "model.py")    # under another name than its own: there is a model.py here, too
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    config = module.GPTConfig(**{"block_size": T, "vocab_size": 50304, "dropout": 0.0, "bias": False, **size})
    with device:    # drawn there: the CPU would need a minute for XL
        model = module.GPT(config)
    compiled = torch.compile(model)

    def micro_step(x, y):
        # nanoGPT's own rule: no autocast on a CPU, where it trains in fp32
        with torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext():
            _, loss = compiled(x, y)
            scaled = loss / accumulation
        scaled.backward()
        return loss.detach()

    optimizers = [model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)]
    return Subject(model, config.vocab_size, micro_step, optimizers, _update(model, optimizers, 1.0),
                   _counts(model, nn.Linear, config.n_layer, config.n_embd, T))


def _nanochat(root: Path, size: dict, T: int, device: torch.device, accumulation: int, is_fp8: bool) -> Subject:
    os.environ["NANOCHAT_DTYPE"] = "bfloat16"           # its choice on an H100; its CPU default is fp32
    os.environ.setdefault("HF_HUB_OFFLINE", "1")        # a benchmark downloads no attention kernel
    gpt, fp8, attention = (_import_from(root, "nanochat", f"nanochat.{room}") for room in ("gpt", "fp8", "flash_attention"))
    torch.set_float32_matmul_precision("high")
    config = gpt.GPTConfig(**{"sequence_len": T, "vocab_size": 32768, "window_pattern": "L", **size})
    with torch.device("meta"):
        model = gpt.GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    zeros = [p for p in model.parameters() if p.ndim == 2 and not p.count_nonzero()]
    for p in zeros:
        nn.init.normal_(p, std=0.4 * p.size(1) ** -0.5)     # of the size that nanochat gives mlp.c_fc
    counts = _counts(model, gpt.Linear, config.n_layer, config.n_embd, T)
    if is_fp8:      # the Linears that its base_train converts
        fp8.convert_to_float8_training(
            model, config=fp8.Float8LinearConfig.from_recipe_name("tensorwise"), module_filter_fn=lambda m, _:
            m.in_features % 16 == m.out_features % 16 == 0 and min(m.in_features, m.out_features) >= 128)
    compiled = torch.compile(model, dynamic=False)

    def micro_step(x, y):
        loss = compiled(x, y)
        (loss / accumulation).backward()
        return loss.detach()

    optimizers = [model.setup_optimizer(unembedding_lr=0.008, embedding_lr=0.3, scalar_lr=0.5, matrix_lr=0.02, weight_decay=0.28)]
    return Subject(model, config.vocab_size, micro_step, optimizers, _update(model, optimizers, None), counts, [
        f"attention by {'FlashAttention 3' if attention.USE_FA3 else 'torch (no FlashAttention 3 here)'}, window_pattern "
        f"{config.window_pattern}; {len(zeros)} weights that begin at zero were given random values"])


def _torchtitan(root: Path, size: dict, T: int, device: torch.device, accumulation: int, is_fp8: bool) -> Subject:
    llama, args = (_import_from(root, "torchtitan", f"torchtitan.models.llama3.model.{room}") for room in ("model", "args"))
    config = args.TransformerModelArgs(**{"max_seq_len": T, **size})
    with device:
        model = llama.Transformer(config)
    with torch.no_grad():
        model.init_weights(device)
    counts = _counts(model, nn.Linear, config.n_layers, config.dim, T)
    if is_fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        convert_to_float8_training(model, config=Float8LinearConfig(), module_filter_fn=lambda m, name:
                                   "output" not in name and m.in_features % 16 == m.out_features % 16 == 0)
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))
    loss_of = torch.compile(lambda logits, y: F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()))

    def micro_step(x, y):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model(x), y)
        (loss / accumulation).backward()
        return loss.detach()

    optimizers = [torch.optim.AdamW(model.parameters(), lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)]
    return Subject(model, config.vocab_size, micro_step, optimizers, _update(model, optimizers, 1.0), counts)


# -------------------------------------------------------------------------------------------------------------- common

def _update(model: nn.Module, optimizers: list, clip: float | None):
    def update():
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return update


def _counts(model: nn.Module, linear: type, n_layer: int, width: int, T: int) -> dict[str, int]:
    matmul = sum(m.weight.numel() for m in model.modules() if isinstance(m, linear))
    return {"flops_per_token": 6 * matmul + 12 * n_layer * width * T, "params_matmul": matmul,
            "params_total": sum(p.numel() for p in model.parameters())}


def _import_from(root: Path, package: str, name: str) -> ModuleType:
    """A module of the checkout. Its package alone becomes importable, not the folders beside it (tasks, tests)."""
    if package not in sys.modules:
        _import(package, root / package / "__init__.py", [str(root / package)])
    return importlib.import_module(name)


def _import(name: str, path: Path, search: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)      # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
