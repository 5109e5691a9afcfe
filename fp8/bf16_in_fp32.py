"""Multiply BF16 values in fp32 on a CPU, and round each result once: what a BF16 unit computes.

The product of two BF16 values is exact in fp32, as on a BF16 unit, and the sum is taken in fp32, as
there. A CPU without such units (avx512_bf16, AMX) needs five times as long for its own BF16
matmuls, and three times for attention's gradient. Attention's weights alone are rounded less often:
torch's kernel rounds them to BF16 between its two matmuls."""

import torch

from model import GPT, Attention, Linear


class MatmulInFp32(torch.autograd.Function):
    """x (M, K) in BF16, w (N, K) in fp32, taken as BF16 -> x w' (M, N) in BF16."""

    @staticmethod
    def forward(ctx, x, w):
        x32 = x.float()
        w32 = w.to(x.dtype).float()
        ctx.save_for_backward(x32, w32)
        ctx.dtype, ctx.w_dtype = x.dtype, w.dtype
        return (x32 @ w32.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x32, w32 = ctx.saved_tensors
        g32 = g.float()
        grad_x = (g32 @ w32).to(ctx.dtype)
        grad_w = (g32.t() @ x32).to(ctx.dtype).to(ctx.w_dtype)
        return grad_x, grad_w


class LinearInFp32(Linear):
    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])  # (M, K)
        return MatmulInFp32.apply(rows, self.weight).view(*x.shape[:-1], -1)


class AttentionInFp32(Attention):
    def attend(self, q, k, v, **how):
        y = super().attend(q.float(), k.float(), v.float(), **how)
        return y.to(q.dtype)


def convert(model: GPT) -> None:
    """Swap the classes of every Linear that FP8 leaves alone, and of every attention, in place;
    weights and names stay."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = LinearInFp32
        elif type(module) is Attention:
            module.__class__ = AttentionInFp32
    model.is_in_fp32 = True  # type: ignore[assignment]  # fp8.in_bf16() evaluates the same way
