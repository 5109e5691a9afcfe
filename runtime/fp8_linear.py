"""Linears that multiply in FP8 with casts by our own Triton kernels (fp8.kernels=true), which read each tensor once.

The recipes are torchao's tensorwise, tensorwise_gw_hp and amax. Except for the head's gradient, every operand has torchao's
scale (largest magnitude of the tensor, fp64 division), format and rounding, bit for bit; forward with fast accumulation,
backward without. What differs is the memory traffic:

    largest magnitudes      x.abs().amax(-1).amax(): Inductor fuses the first stage with the kernel that produces x
    FP8 copies              one kernel reads x once and writes both layouts that the three matmuls need (cast_both)
    kept for the backward   the transposed FP8 copy of x, 1 byte a value instead of BF16's 2
    weights                 quantised by refresh() once per optimizer step, not in every micro-batch; under FSDP2, which frees
                            gathered weights, at every use
    weight gradients        leave the matmul in fp32, as sharded weights' are, without a rounding to BF16 in between
    the head                the gradient of the logits leaves one kernel as FP8 in both layouts (cross_entropy_grad), never as
                            BF16. Its scale is that of a bound, not of its largest magnitude: |softmax - one-hot| is at most 1,
                            so no value exceeds the largest token's factor

tensorwise_gw_hp keeps x and its weight gradient in BF16 and needs no second layout: Inductor compiles its casts. On a CPU the
operators are plain torch, the reference for runtime/fp8_kernels.py, which is imported when the first tensor is on a GPU:
CPU users lack triton.
"""

import types

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from model import GPT
from runtime.quantize import E5M2, Operand, Recipe, cast, scale_of, scaled_mm, to_float8

NO_TARGET = -100        # target of a token without loss: ignore_index of F.cross_entropy


# ---------------------------------------------------------------------------------------------------------- the operators

@torch.library.custom_op("nanofp8::cast_both", mutates_args=(), device_types="cpu")
def cast_both(x: torch.Tensor, scale: torch.Tensor, format: torch.dtype,
              want_rows: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) times scale (), rounded to `format`, saturating: (q (M, K), its transpose (K, M)).

    All are row-major; without want_rows q is empty, (0,)."""
    q = cast(x, scale, format)
    return q if want_rows else q.new_empty(0), q.t().contiguous()


@cast_both.register_kernel("cuda")
def _(x, scale, format, want_rows=True):
    from runtime import fp8_kernels
    q, qt = _empty(x, format, want_rows)
    fp8_kernels.cast_both(x, scale, format, q if want_rows else None, qt)
    return q, qt


@cast_both.register_fake
def _(x, scale, format, want_rows=True):
    return _empty(x, format, want_rows)


def _empty(x, format, want_rows=True):
    M, K = x.shape
    return x.new_empty((M, K) if want_rows else (0,), dtype=format), x.new_empty((K, M), dtype=format)


@torch.library.custom_op("nanofp8::cross_entropy_grad", mutates_args=(), device_types="cpu")
def cross_entropy_grad(logits: torch.Tensor, lse: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor,
                       scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(exp(logit - lse) - [is target]) * grad * scale in E5M2: (q (M, V), its transpose (V, M)); zero rows for NO_TARGET.

    logits (M, V) BF16; lse (M,) fp32, their log-sum-exp; targets (M,) int64; grad (M,) fp32, each token's factor; scale ()."""
    p = torch.exp(logits.float() - lse[:, None])
    p -= F.one_hot(targets.clamp(min=0), logits.size(1))
    q = cast(p.masked_fill((targets == NO_TARGET)[:, None], 0.0), (grad * scale)[:, None], E5M2)
    return q, q.t().contiguous()


@cross_entropy_grad.register_kernel("cuda")
def _(logits, lse, targets, grad, scale):
    from runtime import fp8_kernels
    q, qt = _empty(logits, E5M2)
    fp8_kernels.cross_entropy_grad(logits, lse, targets, grad, scale, q, qt)
    return q, qt


@cross_entropy_grad.register_fake
def _(logits, lse, targets, grad, scale):
    return _empty(logits, E5M2)


# ---------------------------------------------------------------------------------------------------------- the matmuls
#
# Float8 matmuls need their second operand column-major: the transpose of a row-major copy.

def _both(x: torch.Tensor, operand: Operand, want_rows: bool = True):
    """x (M, K) -> its FP8 copy, that copy's transpose, the inverse () of the scale."""
    scale = scale_of(x, operand)
    return *cast_both(x, scale, operand.format, want_rows), scale.reciprocal()


def _weight_forward(w, q, inverse, recipe: Recipe):
    """The second operand of y = x w' and the inverse of its scale."""
    q, inverse = (q, inverse) if q is not None else to_float8(w, recipe.weight)
    return q.t(), inverse


def _weight_backward(w, qt, inverse, recipe: Recipe):
    """The second operand of g w and the inverse of its scale. Without lasting copies w itself was kept, not its FP8 copy: FSDP2
    frees w between the passes, a copy would stay."""
    qt, inverse = (qt, inverse) if qt is not None else _both(w, recipe.weight_for_input_grad, want_rows=False)[1:]
    return qt.t(), inverse


class KernelMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N); q (N, K), qt (K, N), inverse (): KernelLinear.copies()."""

    @staticmethod
    def forward(ctx, x, w, q, qt, inverse, recipe):
        x = x.contiguous()
        if recipe.input_for_weight_grad.format is None:
            (xq, x_inverse), kept = to_float8(x, recipe.input), x
        else:
            xq, kept, x_inverse = _both(x, recipe.input)
        ctx.save_for_backward(kept, x_inverse, w if qt is None else None, qt, inverse)
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, w.dtype
        return scaled_mm(xq, x_inverse, *_weight_forward(w, q, inverse, recipe), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, g):
        kept, x_inverse, w, qt, inverse = ctx.saved_tensors
        recipe, g = ctx.recipe, g.contiguous()
        weight = _weight_backward(w, qt, inverse, recipe)
        if recipe.grad_for_weight_grad.format is None:
            grad_x = scaled_mm(*to_float8(g, recipe.grad), *weight, ctx.dtype)
            return grad_x, (g.t() @ kept).to(ctx.w_dtype), None, None, None, None
        gq, gt, g_inverse = _both(g, recipe.grad)
        grad_x = scaled_mm(gq, g_inverse, *weight, ctx.dtype)
        return grad_x, scaled_mm(gt, g_inverse, kept.t(), x_inverse, ctx.w_dtype), None, None, None, None


class HeadLoss(torch.autograd.Function):
    """h (M, C), w (V, C), targets (M,) -> cross-entropy of each row (M,), fp32, nats; q, qt, inverse as for KernelMatmul."""

    @staticmethod
    def forward(ctx, h, w, targets, q, qt, inverse, recipe):
        hq, ht, h_inverse = _both(h.contiguous(), recipe.input)
        logits = scaled_mm(hq, h_inverse, *_weight_forward(w, q, inverse, recipe), h.dtype, fast=True)
        l32 = logits.float()
        largest = l32.amax(-1, keepdim=True)
        lse = (largest + (l32 - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)
        picked = l32.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
        ctx.save_for_backward(ht, h_inverse, logits, lse, targets, w if qt is None else None, qt, inverse)
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, h.dtype, w.dtype
        return torch.where(targets == NO_TARGET, 0.0, lse - picked)

    @staticmethod
    def backward(ctx, grad):
        ht, h_inverse, logits, lse, targets, w, qt, inverse = ctx.saved_tensors
        grad = grad.contiguous()
        scale = scale_of(grad, ctx.recipe.grad)     # of a bound: reads (M,) instead of (M, V)
        gq, gt = cross_entropy_grad(logits, lse, targets, grad, scale)
        g_inverse = scale.reciprocal()
        grad_h = scaled_mm(gq, g_inverse, *_weight_backward(w, qt, inverse, ctx.recipe), ctx.dtype)
        return grad_h, scaled_mm(gt, g_inverse, ht.t(), h_inverse, ctx.w_dtype), None, None, None, None, None


# ---------------------------------------------------------------------------------------------------------- the modules

class KernelLinear(nn.Linear):
    """A Linear without bias that multiplies in FP8 by `recipe`; made by swap(). Its weight stays what it was."""
    recipe: Recipe
    version: int | None     # of the weight when its FP8 copies were made

    def forward(self, x):
        rows, copies = x.reshape(-1, x.shape[-1]), self.copies()    # (M, K)
        if torch.is_grad_enabled():
            y = KernelMatmul.apply(rows, self.weight, *copies, self.recipe)
        else:                                   # no matmul will need a transpose
            weight = _weight_forward(self.weight, copies[0], copies[2], self.recipe)
            y = scaled_mm(*to_float8(rows, self.recipe.input), *weight, x.dtype, fast=True)
        return y.view(*x.shape[:-1], -1)

    def copies(self) -> tuple[torch.Tensor | None, ...]:
        """The weight's FP8 copies (N, K) and (K, N) and the inverse () of their scale; all None where refresh() made none."""
        if self.q is not None and not torch.compiler.is_compiling():    # a compiled step cannot compare versions
            assert self.weight._version == self.version, "fp8.refresh_fp8_weights(model) is due: the weights have changed"
        return self.q, self.qt, self.inverse


def swap(model: nn.Module, name: str, recipe: Recipe) -> None:
    """Make the Linear `name` a KernelLinear, in place; a GPT's head with FP8 weight gradients also changes how the loss is
    computed. The FP8 copies are buffers outside checkpoints; until refresh() fills them, each use quantises the weight."""
    module = model.get_submodule(name)
    module.__class__ = KernelLinear
    module.recipe, module.version = recipe, None
    for buffer in ("q", "qt", "inverse"):
        module.register_buffer(buffer, None, persistent=False)
    if isinstance(model, GPT) and module is model.head and recipe.grad_for_weight_grad.format is not None:
        model.token_losses = types.MethodType(_token_losses, model)


def _token_losses(model: GPT, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """GPT.token_losses through HeadLoss; the plain way without gradients, in BF16 (in_bf16 swaps the head's class), and where
    the head has hooks, as a probe's or a diagnosis's: only a call of the module runs them."""
    head = model.head
    is_hooked = not torch.compiler.is_compiling() and (head._forward_hooks or head._forward_pre_hooks)
    if type(head) is not KernelLinear or is_hooked or not torch.is_grad_enabled():
        return GPT.token_losses(model, h, targets)
    return HeadLoss.apply(h, head.weight, targets, *head.copies(), head.recipe)


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Quantise the weights of all KernelLinears again, into the same memory; due whenever weights have changed."""
    if isinstance(model, FSDPModule):
        return
    for module in model.modules():
        if isinstance(module, KernelLinear):
            new = _both(module.weight, module.recipe.weight)
            if module.q is None:
                module.q, module.qt, module.inverse = new
            for old, copy in zip((module.q, module.qt, module.inverse), new, strict=True):
                old.copy_(copy)
            module.version = module.weight._version
