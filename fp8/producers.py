"""Blocks whose norms, SwiGLU and RoPE leave FP8 themselves, in both layouts (fp8.scaling=bounded).

A FP8 matmul needs its operands as rows, the weight gradient's as columns. Where the kernel that
computes a tensor writes both, no kernel reads it again to cast or transpose it, which is possible
because every scale is known before the pass (fp8/delayed.py). ProducerBlock takes the place of a
Block; a sub-layer is one or two autograd Functions. Its result is a Branch of the residual stream,
whose gradient the backward pass of the next norm writes as FP8.

The numerics are those of the Block's own modules, model.py's with the Linears of fp8/kernels.py:
what cannot be fused (evaluation, hooks, recomputation, a cache) runs through them. On a CPU the
operators are plain torch, the reference for fp8/producer_kernels.py.

    M rows (B * T)  C width  F hidden width of the SwiGLU  D head size  qt columns: the transpose"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from fp8.kernels import (
    FP8KernelLinear,
    LinearTensors,
    QuantisedGrad,
    SavedOperands,
    empty_layouts,
    multiply_grad,
    multiply_quantised,
    transposed_weight,
    weight_gradient,
)
from fp8.recipes import E4M3, E5M2, Recipe
from fp8.rounding import cast
from lib.errors import UserError
from model import GPT, Block, KVCache, rotate

Layouts = tuple[Tensor, Tensor]  # FP8 rows q (M, K) and columns qt (K, M)
N_TENSORS, N_SAVED = len(LinearTensors._fields), len(SavedOperands._fields)
# Programs of norm_grad's kernel: at most one for each SM of an H100 or H200 (132), all with as many
# rows where a micro-batch has a multiple of 4,096 tokens.
NORM_GRAD_PROGRAMS = 128


# ---------------------------------------------------------------------------------------- operators


@torch.library.custom_op("nanofp8::norm", mutates_args=())
def norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm of x + branch, (M, C) each, with weight (C,): the sum (M, C), empty without a branch;
    1 / rms (M,), fp32; the normalised rows times scale () in E4M3, q (M, C) and qt (C, M)."""
    total, rstd, q, qt = _norm_outputs(x, branch)
    if x.is_cuda:
        from fp8 import producer_kernels

        producer_kernels.launch_norm(x, branch, weight, eps, scale, total, rstd, q, qt)
        return total, rstd, q, qt
    if branch is not None:
        total.copy_(x + branch)
        x = total
    x32 = x.float()
    rstd.copy_(torch.rsqrt(x32.square().mean(-1) + eps))
    unit = (x32 * rstd[:, None]).to(x.dtype)
    return total, rstd, *_write(weight.to(x.dtype) * unit, scale, q, qt)


def _norm_outputs(x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x.new_empty(0) if branch is None else torch.empty_like(x)
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return total, rstd, *empty_layouts(x, E4M3)


norm.register_fake(lambda x, branch, weight, eps, scale: _norm_outputs(x, branch))


@torch.library.custom_op("nanofp8::norm_grad", mutates_args=("amax",))
def norm_grad(
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad_total: Tensor,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad (M, C) of norm()'s output -> the gradient (M, C) of its x, grad_total (M, C) that comes
    past the norm added; that of its weight as sums over parts of the rows (NORM_GRAD_PROGRAMS, C),
    fp32; the first times scale () in E5M2, q (M, C) and qt (C, M); amax () is raised."""
    outputs = _norm_grad_outputs(x)
    grad_x, sums, q, qt = outputs
    if x.is_cuda:
        from fp8 import producer_kernels

        inputs = grad, x, rstd, weight, grad_total, scale, amax
        producer_kernels.launch_norm_grad(*inputs, *outputs)
        return outputs
    gradient, grad_weight = norm_gradient(grad, x, rstd, weight, grad_total)
    grad_x.copy_(gradient)
    sums.zero_()[0] = grad_weight
    _raise(amax, gradient)
    return grad_x, sums, *_write(gradient, scale, q, qt)


def _norm_grad_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = x.new_empty(NORM_GRAD_PROGRAMS, x.shape[1], dtype=torch.float32)
    return torch.empty_like(x), sums, *empty_layouts(x, E5M2)


norm_grad.register_fake(
    lambda grad, x, rstd, weight, grad_total, scale, amax: _norm_grad_outputs(x)
)


@torch.library.custom_op("nanofp8::swiglu", mutates_args=("amax",))
def swiglu(gate_up: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of gate_up (M, 2 F) times scale () in E4M3, q (M, F) and qt (F, M); amax ()
    is raised to the product's largest magnitude."""
    q, qt = _swiglu_outputs(gate_up)
    if gate_up.is_cuda:
        from fp8 import producer_kernels as kernels

        kernels.launch(kernels.swiglu, (gate_up, scale, amax), q, qt, q.shape[1])
        return q, qt
    gate, up = gate_up.chunk(2, dim=-1)
    product = F.silu(gate) * up
    _raise(amax, product)
    return _write(product, scale, q, qt)


def _swiglu_outputs(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    M, width = gate_up.shape
    return empty_layouts(gate_up.new_empty(M, width // 2), E4M3)


swiglu.register_fake(lambda gate_up, scale, amax: _swiglu_outputs(gate_up))


@torch.library.custom_op("nanofp8::swiglu_grad", mutates_args=("amax",))
def swiglu_grad(
    grad: Tensor, gate_up: Tensor, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of swiglu()'s gate_up (M, 2 F), of grad (M, F), times scale () in E5M2:
    q (M, 2 F) and qt (2 F, M); amax () is raised."""
    q, qt = empty_layouts(gate_up, E5M2)
    if grad.is_cuda:
        from fp8 import producer_kernels as kernels

        inputs = grad, gate_up, scale, amax
        kernels.launch(kernels.swiglu_grad, inputs, q, qt, grad.shape[1])
        return q, qt
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    gradient = torch.cat((grad_gate, grad * F.silu(gate)), dim=-1)
    _raise(amax, gradient)
    return _write(gradient, scale, q, qt)


swiglu_grad.register_fake(lambda grad, gate_up, scale, amax: empty_layouts(gate_up, E5M2))


@torch.library.custom_op("nanofp8::rope_grad", mutates_args=("amax",))
def rope_grad(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    amax: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of rotated q and k, and of v, (B, T, heads, D) each, side by side as the QKV
    Linear has its outputs, times scale () in E5M2: q (M, N) and qt (N, M); cos and sin (T, D/2);
    amax () is raised."""
    q, qt = _rope_outputs(grad_q, grad_k, grad_v)
    if grad_q.is_cuda:
        from fp8 import producer_kernels

        gradients, tables = (grad_q, grad_k, grad_v), (cos, sin)
        producer_kernels.launch_rope_grad(gradients, tables, scale, amax, q, qt)
        return q, qt
    # the inverse of a rotation: by the negative angle
    turned = [rotate(grad, cos, -sin).flatten(2) for grad in (grad_q, grad_k)]
    rows = torch.cat((*turned, grad_v.flatten(2)), dim=-1).flatten(0, 1)
    _raise(amax, rows)
    return _write(rows, scale, q, qt)


def _rope_outputs(*gradients: Tensor) -> tuple[Tensor, Tensor]:
    B, T = gradients[0].shape[:2]
    width = sum(grad.shape[2] * grad.shape[3] for grad in gradients)
    return empty_layouts(gradients[0].new_empty(B * T, width), E5M2)


rope_grad.register_fake(lambda q, k, v, cos, sin, scale, amax: _rope_outputs(q, k, v))


@torch.library.custom_op("nanofp8::copy_both", mutates_args=("amax",))
def copy_both(x: Tensor, scale: Tensor, amax: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (M, K) times scale () in `format`, q (M, K) and qt (K, M), for what no kernel of ours
    computes; amax () is raised."""
    q, qt = empty_layouts(x, format)
    if x.is_cuda:
        from fp8 import producer_kernels as kernels

        kernels.launch(kernels.copy, (x, scale, amax), q, qt, x.shape[1])
        return q, qt
    _raise(amax, x)
    return _write(x, scale, q, qt)


copy_both.register_fake(lambda x, scale, amax, format: empty_layouts(x, format))


def _raise(amax: Tensor, x: Tensor) -> None:
    amax.copy_(torch.maximum(amax, x.abs().amax()))


def _write(x: Tensor, scale: Tensor, q: Tensor, qt: Tensor) -> tuple[Tensor, Tensor]:
    q.copy_(cast(x, scale, q.dtype))
    return q, qt.copy_(q.t())


# ---------------------------------------------------------------------------------- residual stream


class Branch(NamedTuple):
    """What a sub-layer adds to the residual stream.

    Its gradient in FP8 needs edges of autograd, which have the dtype of the forward pass: `rows`
    and `columns` are never filled nor read, their gradients are the two layouts."""

    y: Tensor  # (M, C)
    rows: Tensor  # (M, C) in E5M2
    columns: Tensor  # (C, M) in E5M2
    g_scale: Tensor  # () of the gradient, of the Linear that y comes from
    g_amax: Tensor  # () to raise

    @classmethod
    def of(cls, outputs: tuple[Tensor, Tensor, Tensor], linear: LinearTensors) -> "Branch":
        """Of what a Function returns as y, rows, columns, and the Linear before them."""
        assert linear.g_scale is not None and linear.g_amax is not None
        return cls(*outputs, linear.g_scale, linear.g_amax)


NO_BRANCH = (None,) * len(Branch._fields)


class Residual(NamedTuple):
    """The residual stream between two sub-layers: the sum of both, which the kernel of the next
    norm computes."""

    total: Tensor  # (M, C)
    branch: Branch

    def sum(self) -> Tensor:
        """Both added up (M, C), for what has no kernel."""
        return ResidualSum.apply(self.total, *self.branch)


class ResidualSum(torch.autograd.Function):
    """total (M, C) and a Branch -> their sum (M, C)."""

    @staticmethod
    def forward(
        ctx: Any,
        total: Tensor,
        y: Tensor,
        rows: Tensor,
        columns: Tensor,
        g_scale: Tensor,
        g_amax: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(g_scale, g_amax)
        return total + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        g_scale, g_amax = ctx.saved_tensors
        return grad, grad, *copy_both(grad.contiguous(), g_scale, g_amax, E5M2), None, None


# --------------------------------------------------------------------------------------- sub-layers


class QKVPass(torch.autograd.Function):
    """Norm, QKV matmul, RoPE: x (M, C) and a Branch, or Nones -> their sum (M, C), rotated q and k
    and v (B, T, heads, D). heads: of q and of k. tensors: LinearTensors of the Linear, in their
    order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        rows: Tensor | None,
        columns: Tensor | None,
        g_scale: Tensor | None,
        g_amax: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        recipe: Recipe,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        linear = LinearTensors(*tensors)
        H, K = heads
        saved_norm, h = normalise(x, y, norm_weight, eps, linear, g_scale, g_amax)
        qkv, saved = multiply(h, weight, recipe, linear, x.dtype)
        T, D = cos.shape[0], 2 * cos.shape[1]
        q, k, v = qkv.view(-1, T, H + 2 * K, D).split((H, K, K), dim=2)
        ctx.recipe, ctx.w_dtype = recipe, weight.dtype
        ctx.save_for_backward(cos, sin, *saved_norm, *saved)
        return saved_norm.total, rotate(q, cos, sin), rotate(k, cos, sin), v

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple:
        cos, sin, *tensors = ctx.saved_tensors
        norm = SavedNorm(*tensors[:N_NORM])
        recipe, saved = ctx.recipe, SavedOperands(*tensors[N_NORM:])
        gradients = [grad.contiguous() for grad in (grad_q, grad_k, grad_v)]
        layouts = rope_grad(*gradients, cos, sin, *scale_and_amax(saved))
        grad_h, grad_w = backward_matmuls(layouts, saved, recipe, norm.total.dtype, ctx.w_dtype)
        none = [None] * (4 + N_TENSORS)
        return *norm_gradients(grad_h, norm, grad_total), None, grad_w, *none


class OutPass(torch.autograd.Function):
    """The matmul of attention's output: x (M, K), w (N, K) -> y, rows and columns of a Branch, y =
    x w' (M, N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        linear = LinearTensors(*tensors)
        assert linear.x_scale is not None and linear.x_amax is not None
        layouts = copy_both(x.contiguous(), linear.x_scale, linear.x_amax, E4M3)
        y, saved = multiply(layouts, weight, recipe, linear, x.dtype)
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, weight.dtype
        ctx.save_for_backward(*without_amax(saved))
        return y, *empty_layouts(y, E5M2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_rows: Tensor, grad_columns: Tensor) -> tuple:
        saved, layouts = SavedOperands(*ctx.saved_tensors), (grad_rows, grad_columns)
        gradients = backward_matmuls(layouts, saved, ctx.recipe, ctx.dtype, ctx.w_dtype)
        return *gradients, *[None] * (1 + N_TENSORS)


class MLPPass(torch.autograd.Function):
    """Norm, gate+up, SwiGLU, down: x (M, C) and a Branch -> their sum (M, C); y (M, C), rows and
    columns of the next Branch. tensors: LinearTensors of gate+up, then of down."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        columns: Tensor,
        g_scale: Tensor,
        g_amax: Tensor,
        norm_weight: Tensor,
        eps: float,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        recipe: Recipe,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate_up = LinearTensors(*tensors[:N_TENSORS])
        down = LinearTensors(*tensors[N_TENSORS:])
        assert down.x_scale is not None and down.x_amax is not None
        saved_norm, h = normalise(x, y, norm_weight, eps, gate_up, g_scale, g_amax)
        hidden, saved_gate_up = multiply(h, gate_up_weight, recipe, gate_up, x.dtype)  # (M, 2 F)
        layouts = swiglu(hidden, down.x_scale, down.x_amax)
        out, saved_down = multiply(layouts, down_weight, recipe, down, x.dtype)
        ctx.recipe, ctx.w_dtype = recipe, down_weight.dtype
        ctx.save_for_backward(hidden, *saved_norm, *saved_gate_up, *without_amax(saved_down))
        return saved_norm.total, out, *empty_layouts(out, E5M2)

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor, grad_out: Tensor, grad_rows: Tensor, grad_columns: Tensor
    ) -> tuple:
        hidden, *tensors = ctx.saved_tensors
        norm, operands = SavedNorm(*tensors[:N_NORM]), tensors[N_NORM:]
        recipe, dtype, w_dtype = ctx.recipe, hidden.dtype, ctx.w_dtype
        gate_up, down = SavedOperands(*operands[:N_SAVED]), SavedOperands(*operands[N_SAVED:])
        layouts = grad_rows, grad_columns
        grad_product, grad_down = backward_matmuls(layouts, down, recipe, dtype, w_dtype)
        layouts = swiglu_grad(grad_product, hidden, *scale_and_amax(gate_up))
        grad_h, grad_gate_up = backward_matmuls(layouts, gate_up, recipe, dtype, w_dtype)
        none = [None] * (1 + 2 * N_TENSORS)
        gradients = norm_gradients(grad_h, norm, grad_total)
        return *gradients, None, grad_gate_up, grad_down, *none


class SavedNorm(NamedTuple):
    """What the backward pass of a norm needs of its forward pass."""

    total: Tensor  # (M, C)
    rstd: Tensor  # (M,) 1 / rms
    weight: Tensor  # (C,)
    g_scale: Tensor | None  # as in Branch; None where there was none
    g_amax: Tensor | None


N_NORM = len(SavedNorm._fields)


def normalise(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    linear: LinearTensors,
    g_scale: Tensor | None,
    g_amax: Tensor | None,
) -> tuple[SavedNorm, Layouts]:
    """norm() of x and y, a Branch's or None, by the scale of the Linear behind it: with the sum,
    which without a branch is x; both layouts."""
    assert linear.x_scale is not None
    total, rstd, q, qt = norm(x, y, weight, eps, linear.x_scale)
    if y is None:
        total = x.view_as(x)  # autograd takes an input that is returned for one changed in place
    return SavedNorm(total, rstd, weight, g_scale, g_amax), (q, qt)


def multiply(
    layouts: Layouts,
    weight: Tensor,
    recipe: Recipe,
    linear: LinearTensors,
    dtype: torch.dtype,
) -> tuple[Tensor, SavedOperands]:
    """The output (M, N) of a Linear whose input is q (M, K) and qt (K, M)."""
    q, qt = layouts
    assert linear.x_scale is not None
    inverse = linear.x_scale.reciprocal()
    return multiply_quantised(q, qt, inverse, weight, recipe, linear, dtype)


def without_amax(saved: SavedOperands) -> SavedOperands:
    """For a Linear whose gradient the next norm writes: autograd refuses a saved tensor that has
    changed since, and that norm raises the amax."""
    return saved._replace(g_amax=None)


def scale_and_amax(saved: SavedOperands) -> tuple[Tensor, Tensor]:
    """Scale and amax of the gradient of a Linear's output."""
    assert saved.g_scale is not None and saved.g_amax is not None
    return saved.g_scale, saved.g_amax


def backward_matmuls(
    layouts: Layouts,
    saved: SavedOperands,
    recipe: Recipe,
    dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a Linear's input (M, K) and weight (N, K), of that of its output, q (M, N) and
    qt (N, M)."""
    assert saved.g_scale is not None
    q, qt = layouts
    grad = QuantisedGrad(None, q, qt, saved.g_scale.reciprocal())
    grad_x = multiply_grad(grad, transposed_weight(saved, recipe), recipe, dtype)
    return grad_x, weight_gradient(grad, saved, recipe, w_dtype)


def norm_gradients(grad: Tensor, norm: SavedNorm, grad_total: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of normalise()'s x, of the Branch's five tensors, of the norm's weight; grad (M, C)
    is that of the normalised rows, grad_total (M, C) comes past the norm."""
    x, rstd, weight, g_scale, g_amax = norm
    grad_total = grad_total.contiguous()
    if g_scale is None or g_amax is None:
        grad_x, grad_weight = norm_gradient(grad, x, rstd, weight, grad_total)
        return grad_x, *NO_BRANCH, grad_weight
    scale_and_amax = g_scale, g_amax
    grad_x, sums, q, qt = norm_grad(grad, x, rstd, weight, grad_total, *scale_and_amax)
    grad_weight = sums.sum(0).to(x.dtype).to(weight.dtype)
    return grad_x, grad_x, q, qt, None, None, grad_weight


def norm_gradient(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, grad_total: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of norm()'s x, with grad_total (M, C) that comes past the norm, and of its weight;
    grad (M, C) is that of its output. Plain torch, which Inductor makes one kernel of."""
    x32, r = x.float(), rstd[:, None]
    unit = (x32 * r).to(x.dtype)
    grad_weight = (grad * unit).sum(0).to(weight.dtype)
    grad32 = (grad * weight.to(x.dtype)).float()
    along_x = (grad32 * x32).mean(-1, keepdim=True)
    grad_x = grad32 * r - x32 * (r * r * r * along_x)
    return grad_total + grad_x.to(x.dtype), grad_weight


# ------------------------------------------------------------------------------------------- blocks


class ProducerBlock(Block):
    """A Block whose kernels write FP8 themselves. It stands in the place of another one, whose
    modules and attributes it takes over: every name in the state dict stays."""

    def __init__(self, block: Block):
        nn.Module.__init__(self)  # Block's would make new ones
        vars(self).update(vars(block))
        # whether the next block takes a Residual
        self.leaves_residual = False

    def forward(  # type: ignore[override]
        self,
        x: Tensor | Residual,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None = None,
        mask: Any = None,
    ) -> Tensor | Residual:
        if cache is not None or not self.is_fused():
            if isinstance(x, Residual):
                x = x.sum().view(-1, cos.shape[0], x.total.shape[1])  # (B, T, C)
            return super().forward(x, cos, sin, cache, mask)
        residual = self._mlp(self._attention(x, cos, sin, mask))
        if self.leaves_residual:
            return residual
        return residual.sum().view(-1, cos.shape[0], residual.total.shape[1])  # (B, T, C)

    def _attention(self, x: Tensor | Residual, cos: Tensor, sin: Tensor, mask: Any) -> Residual:
        attn, qkv, out = self.attn, self.attn.qkv, self.attn.out
        assert isinstance(qkv, FP8KernelLinear) and isinstance(out, FP8KernelLinear)
        total, branch = x if isinstance(x, Residual) else (x.flatten(0, 1), NO_BRANCH)
        total, q, k, v = QKVPass.apply(
            total,
            *branch,
            self.norm1.weight,
            self.norm1.eps,
            qkv.weight,
            cos,
            sin,
            (attn.H, attn.K),
            qkv.recipe,
            *qkv.tensors(),
        )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T, D)
        is_causal = mask is None and q.shape[2] > 1
        y = attn.attend(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=attn.H != attn.K)
        rows = y.transpose(1, 2).flatten(2).flatten(0, 1)  # (M, H * D)
        tensors = out.tensors()
        outputs = OutPass.apply(rows, out.weight, out.recipe, *tensors)
        return Residual(total, Branch.of(outputs, tensors))

    def _mlp(self, x: Residual) -> Residual:
        norm, gate_up, down = self.norm2, self.mlp.gate_up, self.mlp.down
        assert isinstance(gate_up, FP8KernelLinear) and isinstance(down, FP8KernelLinear)
        tensors = down.tensors()
        total, *outputs = MLPPass.apply(
            x.total,
            *x.branch,
            norm.weight,
            norm.eps,
            gate_up.weight,
            down.weight,
            gate_up.recipe,
            *gate_up.tensors(),
            *tensors,
        )
        return Residual(total, Branch.of(outputs, tensors))

    def is_fused(self) -> bool:
        """Whether our Functions compute the pass: not without gradients, and not where modules have
        hooks, as a probe's, or other Linears, as in an evaluation in BF16."""
        if not torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling():
            return True
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.modules()):
            return False
        return can_fuse(self)


def fuse_producers(model: GPT) -> None:
    """Put a ProducerBlock in the place of every Block that can be one. Raises UserError where the
    model has blocks that this file does not know."""
    if any(map(can_fuse, model.blocks())):
        check_are_known_blocks(model)
    blocks = [ProducerBlock(block) if can_fuse(block) else block for block in model.blocks()]
    for block, following in zip(blocks, blocks[1:], strict=False):
        if isinstance(block, ProducerBlock):
            block.leaves_residual = isinstance(following, ProducerBlock)
    for number, block in enumerate(blocks):
        model.layers[number] = block


def describe(model: GPT) -> str:
    """The line that the start of a run prints."""
    blocks = model.blocks()
    n_fused = sum(isinstance(block, ProducerBlock) for block in blocks)
    line = f"fp8: {n_fused} of {len(blocks)} blocks write FP8 themselves"
    if n_fused == len(blocks):
        return line
    return f"{line}; not those with QK-norm, parallel.recompute or a Linear in BF16"


def can_fuse(block: Block) -> bool:
    """Whether all Linears of a block multiply by our kernels and nothing stands between the QKV
    matmul and RoPE, as QK-norm does."""
    attn, mlp = block.attn, block.mlp
    linears = (attn.qkv, attn.out, mlp.gate_up, mlp.down)
    are_ours = all(isinstance(linear, FP8KernelLinear) for linear in linears)
    return are_ours and attn.q_norm is None


# ------------------------------------------------------------------------------------ known blocks


@torch.no_grad()
def check_are_known_blocks(model: GPT) -> None:
    """Raise UserError unless model.py's blocks, in the model's configuration, compute what
    ProducerBlock does: by value, in a small model. Else a variant of model.py would be trained as
    if it were none."""
    sizes: dict[str, Any] = {"n_head": 2, "n_kv_head": 1, "head_size": 8, "n_embd": 32, "n_ffn": 48}
    small = replace(model.config, **sizes, n_ctx=16, vocab_size=257, vocab_multiple=1)
    small_model = GPT.on_meta(small, torch.float32).to_empty(device="cpu")
    for p in small_model.parameters():  # none zero, that every module shows
        p.copy_(_waves(p.shape))
    angles = _waves((small.n_ctx, small.head_dim // 2))
    x, cos, sin = _waves((2, small.n_ctx, small.n_embd)), angles.cos(), angles.sin()
    for number, block in enumerate(small_model.blocks()):
        if not _is_known_block(block, x, cos, sin):
            raise UserError(
                "fp8.scaling=bounded computes model.py's Block in kernels that write FP8, and block"
                f" {number} of this model computes something else: set fp8.scaling=delayed, or"
                " teach fp8/producers.py that block"
            )


def _waves(shape: Sequence[int]) -> Tensor:
    """Values between -1 and 1 without a random number: a run's own must not move."""
    n = math.prod(shape)
    return torch.arange(1.0, n + 1.0, device="cpu").sin().view(shape)


def _is_known_block(block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    try:
        expected = _known_block(block, x, cos, sin)
    except (AttributeError, RuntimeError):  # other modules, or Linears of other shapes
        return False
    return torch.allclose(block(x, cos, sin), expected, rtol=1e-3, atol=1e-3)


def _known_block(block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What ProducerBlock computes, but for FP8 and attention itself, which it leaves to the Block:
    x (B, T, C) -> (B, T, C)."""
    attn, mlp = block.attn, block.mlp
    H, K = attn.H, attn.K
    h = F.rms_norm(x, x.shape[2:], block.norm1.weight, block.norm1.eps)
    heads = F.linear(h, attn.qkv.weight).unflatten(2, (H + 2 * K, -1)).transpose(1, 2)
    q, k, v = heads.split((H, K, K), dim=1)  # (B, H or K, T, D)
    q, k = _known_rotation(q, cos, sin), _known_rotation(k, cos, sin)
    y = attn.attend(q, k, v, attn_mask=None, is_causal=True, enable_gqa=H != K)
    x = x + F.linear(y.transpose(1, 2).flatten(2), attn.out.weight)
    h = F.rms_norm(x, x.shape[2:], block.norm2.weight, block.norm2.eps)
    gate, up = F.linear(h, mlp.gate_up.weight).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, mlp.down.weight)


def _known_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x (B, heads, T, D) by cos and sin (T, D/2), as rope_grad() inverts it."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
