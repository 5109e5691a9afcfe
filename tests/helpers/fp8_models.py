"""Linears and small GPTs converted to a recipe, operands that are hard to quantise, and what the
tests of FP8 measure of them."""

from dataclasses import replace
from typing import Any

import torch

from fp8.convert import convert
from fp8.copies import refresh_weight_copies
from fp8.recipes import RECIPES, from_label
from fp8.selection import Layer
from model import GPT, GPTConfig, Linear

# what a GPU multiplies itself, here or on Blackwell
NATIVE = [
    recipe.name
    for recipe in RECIPES.values()
    if recipe.on_gpu in ("torchao", "matmul") or recipe.name == "mxfp8"
]
KERNELS = [f"{recipe.name}+kernels" for recipe in RECIPES.values() if recipe.has_kernels]
SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_ffn": 96, "n_ctx": 32, "vocab_size": 257}
NAMES = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")  # of the Linears of a block
KINDS = ["random", "opposed", "heavy", "zero", "outlier"]  # of operands()
Passes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def build(
    label: str = "off",
    device_type: str = "cpu",
    head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    loss_scale: float = 1.0,
    seed: int = 0,
    **changes: Any,
) -> tuple[GPT, list[Layer]]:
    """A GPT on the CPU, converted to a recipe, with "+kernels" on our kernels; and the verdict on
    each Linear."""
    model = GPT.on_meta(GPTConfig(**{**SIZE, **changes}), dtype)
    layers = convert(model, replace(from_label(label), head=head), loss_scale, device_type)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    refresh_weight_copies(model)
    return model, layers


def tokens(seed: int = 0, B: int = 4, T: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a micro-batch of random bytes, (B, T) each."""
    ids = torch.randint(257, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:].contiguous()


def linear(
    w: torch.Tensor, label: str, device_type: str = "cpu", loss_scale: float = 1.0
) -> torch.nn.Sequential:
    """A Linear with weight w, converted; the Sequential that holds it."""
    module = Linear(w.shape[1], w.shape[0])
    module.weight.data.copy_(w)
    holder = torch.nn.Sequential(module)
    convert(holder, from_label(label), loss_scale, device_type)
    refresh_weight_copies(holder)
    return holder


def passes(holder: torch.nn.Sequential, x: torch.Tensor, g: torch.Tensor) -> Passes:
    """Output, input gradient, weight gradient; g is the gradient of the output."""
    leaf = x.clone().requires_grad_()
    y = holder(leaf)
    y.backward(g)
    return y.detach(), leaf.grad, holder[0].weight.grad


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, 0 for equal zeros."""
    size = b.double().norm()
    return ((a.double() - b.double()).norm() / (size if size else 1)).item()


def operands(kind: str, M: int = 32, K: int = 64, N: int = 96) -> Passes:
    """Input x (M, K), weight w (N, K) and gradient of the output g (M, N) of one of KINDS. What is
    small in one operand is large in the other: a scale along the wrong dimension shows."""
    torch.manual_seed(0)
    x, g, w = torch.randn(M, K), torch.randn(M, N), 0.05 * torch.randn(N, K)
    if kind == "opposed":
        rows, columns = torch.logspace(-3, 3, M)[:, None], torch.logspace(-3, 3, N)
        x, w, g = x * rows, w * columns[:, None], g / rows / columns
    elif kind == "heavy":  # Cauchy: a few values hold most of the norm
        x = torch.tan(1.5 * torch.rand(x.shape) * torch.sign(x))
        g = torch.tan(1.5 * torch.rand(g.shape) * torch.sign(g))
    elif kind == "zero":
        x, g = torch.zeros_like(x), torch.zeros_like(g)
    elif kind == "outlier":  # beyond E4M3's range without a scale
        x[3, 5], g[7, 11], w[2, 9] = 3e4, 5e3, 20.0
    return x.bfloat16(), w, g.bfloat16()
