"""Linears with lasting copies.

Every operand has torchao's scale (fp64 division), format and rounding, bit for bit, but for the
head's gradient: its scale is that of a bound, |softmax - one-hot| <= 1. Where BF16 multiplies the
weight gradient, no operand needs a second layout, and Inductor compiles the casts. BF16 Linears
of one process go the same way: a comparison with them is one of the matmuls. On a CPU the
operators are plain torch, the reference for fp8/triton_kernels.py, which is imported when the
first tensor is on a GPU: CPU users lack triton. Float8 matmuls need their second operand
column-major: the transpose of a row-major copy."""

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from fp8.matmul import add_weight_grad, mm, scaled_mm
from fp8.recipes import BF16, E5M2, Operand, Recipe
from fp8.rounding import FORMATS, _scale, cast, scale_of
from fp8.sharded import is_wrapped, max_over_ranks
from model import GPT, Linear

NO_TARGET = -100  # target of a token without loss: ignore_index of F.cross_entropy


class KernelLinear(nn.Linear):
    """A Linear without bias that multiplies by `recipe`, in FP8 on our kernels or in BF16. Its
    weight stays what it was; the copies of it are buffers outside checkpoints."""

    recipe: Recipe
    version: int | None  # of the weight when its copies were made
    has_bound = False  # of a head whose loss is computed with its matmul
    # Buffers, or None where there is none: q, the weight's copy (N, K), qt, its transpose (K, N) in
    # FP8, the scale () of both; total, its lasting gradient, see keep_gradients(). x_scale, x_amax,
    # g_scale, g_amax () are those of DelayedScales.

    def forward(self, x):
        rows, copies = x.reshape(-1, x.shape[-1]), self.copies()  # (M, K)
        if torch.is_grad_enabled() or self.recipe.weight.format is None:
            y = KernelMatmul.apply(
                rows,
                self.weight,
                *copies,
                self.recipe,
                self.total,
                self.x_scale,
                self.x_amax,
                self.g_scale,
                self.g_amax,
            )
        else:  # no matmul will need a transpose: any number of rows
            q, _, inverse = _quantised(rows, self.recipe.input, False, self.x_scale)
            y = scaled_mm(
                q,
                inverse,
                *_weight(self.weight, copies[0], copies[2], self.recipe.weight),
                x.dtype,
                fast=True,
            )
        return y.view(*x.shape[:-1], -1)

    def copies(self) -> tuple:
        """q, qt and scale, once it is sure that they are the weight's."""
        # a compiled step cannot compare versions
        if self.q is not None and not torch.compiler.is_compiling():
            assert self.weight._version == self.version, (
                "fp8.refresh_weight_copies(model) is due: the weights have changed"
            )
            assert self.weight.grad is self.total or self.total is None, (
                "fp8.zero_gradients(model) alone may free gradients"
            )
        return self.q, self.qt, self.scale


def _use_kernels(module: Any, recipe: Recipe, is_delayed: bool = False) -> None:
    """Make a Linear a KernelLinear, in place."""
    module.__class__, module.recipe, module.version, module.is_delayed = (
        KernelLinear,
        recipe,
        None,
        is_delayed,
    )
    for buffer in ("q", "qt", "scale", "total", "x_scale", "x_amax", "g_scale", "g_amax"):
        module.register_buffer(buffer, None, persistent=False)


def keep_bf16_copies(model: nn.Module) -> None:
    """Let every Linear that FP8 leaves alone cast its weight once a step too. Not under FSDP2,
    which casts what it gathers."""
    for module in model.modules():
        if type(module) is Linear:
            _use_kernels(module, BF16)


def keep_gradients(model: GPT) -> None:
    """Give the blocks' weights whose gradient is a BF16 matmul one that lasts, and that the matmul
    itself adds to: half the bytes. zero_gradients() then takes the place of the optimizer's
    zero_grad().

    Not the head, which may be called in pieces and shares its weight; not under FSDP2, which
    reduces what a pass returns."""
    for m in _kernel_linears(model.layers):
        if m.recipe.has_bf16_weight_grad:
            m.total = torch.empty_like(m.weight)
    zero_gradients(model)


def zero_gradients(model: nn.Module) -> None:
    """Free all gradients, or fill those of keep_gradients() with zeros."""
    kept = [m for m in _kernel_linears(model) if m.total is not None]
    model.zero_grad()
    for m in kept:
        m.weight.grad = m.total
    if kept:
        torch._foreach_zero_([m.total for m in kept])


def _kernel_linears(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, KernelLinear)]


@torch.no_grad()
def refresh_weight_copies(model: nn.Module) -> None:
    """Recompute the weights' FP8 and BF16 copies, and, by one all-reduce, the scales of weights
    gathered as float8: whenever the weights have changed, between two passes."""
    if any(is_wrapped(p) for p in model.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    # Over all weights at once where that is one kernel: launches for a hundred Linears would take
    # the host longer than the GPU.
    # FSDP2 frees gathered weights: of KernelLinears only the scales stay
    is_sharded = isinstance(model, FSDPModule)
    fp8, bf16 = (
        [m for m in _kernel_linears(model) if (m.recipe.weight.format is None) == is_bf16]
        for is_bf16 in (False, True)
    )
    for m in fp8 + bf16:
        m.version = m.weight._version
    if fp8:
        operand = fp8[0].recipe.weight  # of all: what `auto` mixes rounds weights alike
        # of the weight as it is gathered: blocks in BF16, whose rounding keeps the order of
        # magnitudes
        if is_sharded:
            shards = [m.weight.to_local() for m in fp8]
            plain = max_over_ranks(
                torch.stack(
                    [
                        shard.abs().amax() if shard.numel() else shard.new_zeros(())
                        for shard in shards
                    ]
                )
            )
            in_bf16 = plain.bfloat16().float()
            amaxes = [
                p if m is model.head else rounded
                for m, p, rounded in zip(fp8, plain, in_bf16, strict=True)
            ]
        else:
            amaxes = list(torch._foreach_norm([m.weight for m in fp8], math.inf))
        scales = _scale(
            torch.stack(amaxes), FORMATS[operand.format][0], operand.power_of_2
        ).unbind()
        for m, scale in zip(fp8, scales, strict=True):
            if m.scale is None:
                m.scale = torch.empty_like(scale)
                m.q, m.qt = (None, None) if is_sharded else _empty(m.weight, operand.format)
            if not is_sharded:
                _cast_into(m.weight, scale, m.q, m.qt)
        torch._foreach_copy_([m.scale for m in fp8], scales)
    if bf16:
        dtype: Any = model.compute_dtype
        for m in bf16:
            m.q = torch.empty_like(m.weight, dtype=dtype) if m.q is None else m.q
        torch._foreach_copy_([m.q for m in bf16], [m.weight for m in bf16])


@torch.library.custom_op("nanofp8::cast_both_layouts", mutates_args=())
def cast_both(
    x: torch.Tensor, scale: torch.Tensor, format: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) times scale (), rounded to `format`, saturating: (q (M, K), its transpose (K, M)),
    all row-major."""
    return _cast_into(x, scale, *_empty(x, format))


cast_both.register_fake(lambda x, scale, format: _empty(x, format))


def _empty(x, format):
    return x.new_empty(x.shape, dtype=format), x.new_empty(x.shape[::-1], dtype=format)


def _cast_into(
    x: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, qt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cast_both() into memory that is there; returns q and qt."""
    if x.is_cuda:
        from fp8 import triton_kernels

        return triton_kernels.launch(triton_kernels.cast_both, (x, scale), q, qt)
    q.copy_(cast(x, scale, q.dtype))
    return q, qt.copy_(q.t())


def _quantised(
    x: torch.Tensor,
    operand: Operand,
    wants_transpose: bool,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x (M, K) -> its FP8 copy, that copy's transpose or None, the inverse () of the scale.

    With a `scale` () that is known before, the casts are plain torch, which Inductor fuses with the
    kernel that makes x; amax () is then raised to x's largest magnitude."""
    has_kernel = wants_transpose and scale is None
    scale = scale_of(x, operand) if scale is None else scale
    if has_kernel:
        return *cast_both(x, scale, operand.format), scale.reciprocal()
    if amax is not None:
        amax.copy_(torch.maximum(amax, x.abs().amax(-1).amax()))
    q = cast(x, scale, operand.format)
    return q, q.t().contiguous() if wants_transpose else None, scale.reciprocal()


def _weight(
    w: torch.Tensor,
    copy: torch.Tensor | None,
    scale: torch.Tensor | None,
    operand: Operand,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second operand of y = x w', or of g w (transposed), and the inverse of its scale; cast
    here where there is no copy."""
    scale = scale_of(w, operand) if scale is None else scale
    if copy is None:
        copy = (
            cast_both(w, scale, operand.format)[1] if transposed else cast(w, scale, operand.format)
        )
    return copy.t(), scale.reciprocal()


class KernelMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N), or with targets (M,) the cross-entropy of each of its rows
    (M,), fp32, nats; the rest as KernelLinear has it."""

    @staticmethod
    def forward(
        ctx,
        x,
        w,
        q,
        qt,
        scale,
        recipe,
        total=None,
        x_scale=None,
        x_amax=None,
        g_scale=None,
        g_amax=None,
        targets=None,
    ):
        x = x.contiguous()
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, w.dtype
        if recipe.weight.format is None:
            ctx.save_for_backward(x, None, None, q, None, total, None, None)
            return x @ q.t()
        xq, xt, x_inverse = _quantised(
            x, recipe.input, not recipe.has_bf16_weight_grad, x_scale, x_amax
        )
        y = scaled_mm(xq, x_inverse, *_weight(w, q, scale, recipe.weight), x.dtype, fast=True)
        # Without lasting copies w itself is kept, not its FP8 copy: FSDP2 frees w between the
        # passes, a copy would stay.
        kept = (
            x if xt is None else xt,
            x_inverse,
            w if qt is None else None,
            qt,
            scale,
            total,
            g_scale,
            g_amax,
        )
        if targets is None:
            ctx.save_for_backward(*kept)
            return y
        y32 = y.float()
        largest = y32.amax(-1, keepdim=True)
        lse = (largest + (y32 - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)
        picked = y32.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
        ctx.save_for_backward(*kept, y, lse, targets)
        return torch.where(targets == NO_TARGET, 0.0, lse - picked)

    @staticmethod
    def backward(ctx, g):
        kept, x_inverse, w, copy, scale, total, g_scale, g_amax, *loss = ctx.saved_tensors
        recipe, g = ctx.recipe, g.contiguous()
        if recipe.weight.format is None:
            grad_x = g @ copy
        else:
            weight = _weight(w, copy, scale, recipe.weight, transposed=True)
            if loss:
                g_scale = scale_of(g, recipe.grad)  # of a bound: reads (M,) instead of (M, N)
                (gq, gt), g_inverse = cross_entropy_grad(*loss, g, g_scale), g_scale.reciprocal()
            else:
                gq, gt, g_inverse = _quantised(
                    g, recipe.grad, not recipe.has_bf16_weight_grad, g_scale, g_amax
                )
            grad_x = scaled_mm(gq, g_inverse, *weight, ctx.dtype, recipe.fast_backward)
        if not recipe.has_bf16_weight_grad:
            grad_w = scaled_mm(
                gt, g_inverse, kept.t(), x_inverse, ctx.w_dtype, recipe.fast_backward
            )
        elif total is not None:
            grad_w = add_weight_grad(total, g, kept)  # None
        else:
            grad_w = mm(g.t(), kept, ctx.w_dtype)
        return grad_x, grad_w, *(None,) * 10


@torch.library.custom_op("nanofp8::cross_entropy_grad", mutates_args=())
def cross_entropy_grad(
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exp(logit - lse) - [is target]) * (grad * scale) in E5M2, saturated: (q (M, V), its
    transpose (V, M)); no target: zeros.

    logits (M, V) BF16; lse (M,) fp32, their log-sum-exp; targets (M,) int64; grad (M,) fp32, each
    token's factor; scale ()."""
    if logits.is_cuda:
        from fp8 import triton_kernels

        inputs = logits, lse, targets, grad, scale
        return triton_kernels.launch(
            triton_kernels.cross_entropy_grad, inputs, *_empty(logits, E5M2)
        )
    p = torch.exp(logits.float() - lse[:, None])
    p -= F.one_hot(targets.clamp(min=0), logits.size(1))
    q = cast(p.masked_fill((targets == NO_TARGET)[:, None], 0.0), (grad * scale)[:, None], E5M2)
    return q, q.t().contiguous()


cross_entropy_grad.register_fake(lambda logits, *_: _empty(logits, E5M2))


def _token_losses(model: GPT, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """GPT.token_losses in one with its matmul; plainly without gradients, in BF16 (in_bf16 swaps
    the head's class), and where the head has hooks, as a probe's or a diagnosis's: only a call of
    the module runs them."""
    head: Any = model.head
    is_hooked = not torch.compiler.is_compiling() and (
        head._forward_hooks or head._forward_pre_hooks
    )
    if type(head) is not KernelLinear or is_hooked or not torch.is_grad_enabled():
        return GPT.token_losses(model, h, targets)
    return KernelMatmul.apply(
        h,
        head.weight,
        *head.copies(),
        head.recipe,
        None,
        head.x_scale,
        head.x_amax,
        None,
        None,
        targets,
    )
