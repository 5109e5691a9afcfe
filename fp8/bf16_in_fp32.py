"""Multiply BF16 values in fp32 on a CPU, and round each result once: what a BF16 unit computes.

The product of two BF16 values is exact in fp32, as on a BF16 unit, and the sum is taken in fp32, as
there. A CPU without such units (avx512_bf16, AMX) needs five times as long for its own BF16
matmuls, and three times for attention's gradient. Attention's weights alone are rounded less often:
torch's kernel rounds them to BF16 between its two matmuls."""

from typing import Any

import torch
import torch.nn as nn

from fp8.linears import ConvertedLinear, EmulatedLinear
from fp8.matmul import in_dtype
from model import Attention, Linear


class MatmulInFp32(torch.autograd.Function):
    """x (M, K) in BF16, w (N, K) in fp32, taken as BF16 -> x w' (M, N) in BF16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        w32 = w.to(x.dtype).float()
        ctx.save_for_backward(x32, w32)
        ctx.dtype, ctx.w_dtype = x.dtype, w.dtype
        return in_dtype(x32 @ w32.t(), x.dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x32, w32 = ctx.saved_tensors
        g32 = g.float()
        grad_x = (g32 @ w32).to(ctx.dtype)
        grad_w = (g32.t() @ x32).to(ctx.dtype).to(ctx.w_dtype)
        return grad_x, grad_w


class LinearInFp32(ConvertedLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (M, K)
        return MatmulInFp32.apply(rows, self.weight).view(*x.shape[:-1], -1)


class AttentionInFp32(Attention):
    """Stands in the place of an Attention, whose Linears and norms it takes over."""

    def __init__(self, attention: Attention):
        nn.Module.__init__(self)  # Attention's would make new ones
        vars(self).update(vars(attention))  # a variant's own too

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        y = super().attend(q.float(), k.float(), v.float(), **how)
        return y.to(q.dtype)


def convert(model: nn.Module) -> None:
    """Replace every Linear that FP8 leaves alone, and every attention, and emulate FP8 in fp32 too;
    weights and names stay."""
    for name, module in list(model.named_modules()):
        if type(module) is Attention:
            model.set_submodule(name, AttentionInFp32(module))
    for name, module in list(model.named_modules()):
        if type(module) is Linear:
            model.set_submodule(name, LinearInFp32(module))
        if isinstance(module, EmulatedLinear):
            module.has_units = False
    model.is_in_fp32 = True  # type: ignore[assignment]  # in_bf16() evaluates the same way
