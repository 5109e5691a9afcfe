"""The peers' models: built from a checkout, trained as each's own script does."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from bench.cells import Cell, Subject
from lib.errors import UserError
from lib.machine import git

# Beside each size of ours the peers' own, in their words, and its micro-batch of 1,024 tokens.
# nanochat's depth d has width 64 d, rounded up to heads of 128.
BESIDE = {
    "125m": {
        "nanogpt_124m": (64, {"n_layer": 12, "n_head": 12, "n_embd": 768}),
        "nanochat_d12": (64, {"n_layer": 12, "n_head": 6, "n_kv_head": 6, "n_embd": 768}),
        "torchtitan_125m": (64, {"n_layers": 12, "n_heads": 6, "dim": 768, "vocab_size": 50304}),
    },
    "1p5b": {
        "nanogpt_xl": (16, {"n_layer": 48, "n_head": 25, "n_embd": 1600}),
        "nanochat_d26": (32, {"n_layer": 26, "n_head": 13, "n_kv_head": 13, "n_embd": 1664}),
        "torchtitan_1p5b": (16, {"n_layers": 28, "n_heads": 16, "dim": 2048, "vocab_size": 50304}),
    },
    "toy": {
        "nanogpt_toy": (4, {"n_layer": 2, "n_head": 2, "n_embd": 96, "vocab_size": 256}),
        "nanochat_toy": (
            4,
            {"n_layer": 2, "n_head": 1, "n_kv_head": 1, "n_embd": 128, "vocab_size": 256},
        ),
        "torchtitan_toy": (
            4,
            {"n_layers": 2, "n_heads": 2, "dim": 96, "vocab_size": 256, "multiple_of": 256},
        ),
    },
}
# Our own model at their dimensions: the same work within 1 % (a SwiGLU of 8/3 C has as many weights
# as their MLP of 4 C).
_CHAT = {"vocab_size": 32768, "tied": False, "qk_norm": True}
OURS = {
    "ours_d12": {"n_layer": 12, "n_head": 6, "n_embd": 768, "n_ffn": 2048, **_CHAT},
    # 8/3 x 1664 = 4437, to tiles of 128
    "ours_d26": {"n_layer": 26, "n_head": 13, "n_embd": 1664, "n_ffn": 4480, **_CHAT},
    "ours_toy": {"n_layer": 2, "n_head": 2, "n_embd": 96, "n_ffn": 256, "vocab_size": 256},
}
PRECISIONS: dict[str, tuple[str | None, ...]] = {  # of each peer; None: it has no choice of them
    "nanogpt": (None,),
    "nanochat": ("bf16", "fp8"),
    "torchtitan": ("bf16", "fp8"),
}
# The repository, the commit that this was written for, a file to know it by.
USED = {
    "nanogpt": ("karpathy/nanoGPT", "3adf61e", "model.py"),
    "nanochat": ("karpathy/nanochat", "92d63d4", "nanochat/gpt.py"),
    "torchtitan": ("pytorch/torchtitan", "v0.2.2", "torchtitan/models/llama3/model/model.py"),
}


def check_checkout(peer: str, folder: str) -> str:
    """What the checkout in `folder` is, in words. Raises UserError where it is none."""
    repository, commit, file = USED[peer]
    if not (Path(folder) / file).is_file():
        raise UserError(
            f"{peer}={folder} has no {file}: give a checkout of https://github.com/{repository} at"
            f" {commit}"
        )
    held_commit = None
    if (Path(folder) / ".git").exists():
        held_commit = git(Path(folder), "describe", "--always", "--tags", "--dirty")
    return f"{peer} at {held_commit or 'an unknown commit'}; this was written for {commit}"


def build_peer(cell: Cell, device: torch.device) -> Subject:
    """The peer's model of a cell, initialised and set to compile at its first micro-step. Imports
    the checkout's code and sets the process's matmul precision as the peer does: meant for a
    process of its own."""
    assert cell.peer is not None and cell.peer_name is not None
    sys.path.insert(1, cell.peer)  # behind our own folder, before what is installed
    torch.manual_seed(0)
    builders = {"nanogpt": _nanogpt, "nanochat": _nanochat, "torchtitan": _torchtitan}
    subject = builders[cell.peer_name](cell, device, cell.peer_precision == "fp8")
    checkout = check_checkout(cell.peer_name, cell.peer)
    subject.describe.insert(0, f"{cell.size}: {checkout}, under torch {torch.__version__}")
    return subject


def _nanogpt(cell: Cell, device: torch.device, is_fp8: bool) -> Subject:
    # there is a model.py here, too
    assert cell.peer is not None
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(cell.peer) / "model.py")
    assert spec is not None and spec.loader is not None
    # dataclasses look their module up there
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    config = module.GPTConfig(
        **{"block_size": cell.T, "vocab_size": 50304, "dropout": 0.0, "bias": False, **cell.model}
    )
    with device:  # drawn there: the CPU would need a minute for XL
        model = module.GPT(config)
    compiled = torch.compile(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # nanoGPT's own rule: no autocast on a CPU, where it trains in fp32
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return compiled(x, y)[1]

    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    return _subject(cell, model, config.vocab_size, loss_of, optimizer, clip=1.0)


def _nanochat(cell: Cell, device: torch.device, is_fp8: bool) -> Subject:
    os.environ["NANOCHAT_DTYPE"] = "bfloat16"  # its choice on an H100; its CPU default is fp32
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a benchmark downloads no attention kernel
    gpt, fp8, attention = (
        importlib.import_module(f"nanochat.{room}") for room in ("gpt", "fp8", "flash_attention")
    )
    torch.set_float32_matmul_precision("high")
    config = gpt.GPTConfig(
        **{"sequence_len": cell.T, "vocab_size": 32768, "window_pattern": "L", **cell.model}
    )
    with torch.device("meta"):
        model = gpt.GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    zeros = [p for p in model.parameters() if p.ndim == 2 and not p.count_nonzero()]
    for p in zeros:
        nn.init.normal_(p, std=0.4 * p.size(1) ** -0.5)  # of the size that nanochat gives mlp.c_fc
    if is_fp8:  # the Linears that its base_train converts
        recipe = fp8.Float8LinearConfig.from_recipe_name("tensorwise")
        fp8.convert_to_float8_training(model, config=recipe, module_filter_fn=_is_nanochats_fp8)
    optimizer = model.setup_optimizer(
        unembedding_lr=0.008, embedding_lr=0.3, scalar_lr=0.5, matrix_lr=0.02, weight_decay=0.28
    )
    return _subject(
        cell,
        model,
        config.vocab_size,
        torch.compile(model, dynamic=False),
        optimizer,
        None,
        [
            "attention by"
            f" {'FlashAttention 3' if attention.USE_FA3 else 'torch (no FlashAttention 3 here)'},"
            f" window_pattern {config.window_pattern}; {len(zeros)} weights that begin at zero were"
            " given random values"
        ],
    )


def _is_nanochats_fp8(linear: nn.Linear, name: str) -> bool:
    """As nanochat's base_train decides."""
    sizes = linear.in_features, linear.out_features
    return min(sizes) >= 128 and all(size % 16 == 0 for size in sizes)


def _torchtitan(cell: Cell, device: torch.device, is_fp8: bool) -> Subject:
    llama, args = (
        importlib.import_module(f"torchtitan.models.llama3.model.{room}")
        for room in ("model", "args")
    )
    config = args.TransformerModelArgs(**{"max_seq_len": cell.T, **cell.model})
    with device:
        model = llama.Transformer(config)
    with torch.no_grad():
        model.init_weights(device)
    if is_fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig(),
            module_filter_fn=lambda m, name: (
                "output" not in name and m.in_features % 16 == m.out_features % 16 == 0
            ),
        )
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))
    cross_entropy = torch.compile(
        lambda logits, y: F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
    )

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return cross_entropy(model(x), y)

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    return _subject(cell, model, config.vocab_size, loss_of, optimizer, clip=1.0)


def _subject(
    cell: Cell,
    model: nn.Module,
    vocab: int,
    loss_of: Callable,
    optimizer: torch.optim.Optimizer,
    clip: float | None,
    describe: Iterable[str] = (),
) -> Subject:
    """What the peers share; loss_of(x, y) is the mean loss per token. A Linear in FP8 is an
    nn.Linear too, in each of them."""
    accumulation = cell.tokens_per_step // (cell.micro_batch * cell.T)
    n_layer = cell.model.get("n_layer") or cell.model["n_layers"]
    width = cell.model.get("n_embd") or cell.model["dim"]
    matmul = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))

    def micro_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(x, y)
        (loss / accumulation).backward()
        return loss.detach()

    def update() -> None:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    counts = {
        "flops_per_token": 6 * matmul + 12 * n_layer * width * cell.T,
        "params_matmul": matmul,
        "params_total": sum(p.numel() for p in model.parameters()),
    }
    return Subject(model, vocab, micro_step, optimizer, update, counts, [*describe])
