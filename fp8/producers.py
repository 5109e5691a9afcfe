"""Blocks whose norms, SwiGLU and RoPE leave FP8 themselves, in both layouts (fp8.scaling=bounded).

A FP8 matmul needs its operands as rows, the weight gradient's as columns. Where the kernel that
computes a tensor writes both, no kernel reads it again to cast or transpose it, which is possible
because every scale is known before the pass (fp8/delayed.py). ProducerBlock takes the place of a
Block; a sub-layer is one autograd Function from the norm to the last matmul, since FP8 gradients
cannot travel along autograd's edges, which have the dtype of the forward pass.

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


# --------------------------------------------------------------------------------------- sub-layers


class QKVPass(torch.autograd.Function):
    """Norm, QKV matmul, RoPE: x and branch (M, C) -> their sum (M, C), rotated q and k and v
    (B, T, heads, D). heads: of q and of k. tensors: LinearTensors of the Linear, in their order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        recipe: Recipe,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = LinearTensors(*tensors)
        H, K = heads
        total, rstd, h = normalise(x, branch, norm_weight, eps, qkv)
        y, saved = multiply(h, weight, recipe, qkv, x.dtype)
        T, D = cos.shape[0], 2 * cos.shape[1]
        q, k, v = y.view(-1, T, H + 2 * K, D).split((H, K, K), dim=2)
        ctx.recipe, ctx.w_dtype = recipe, weight.dtype
        ctx.save_for_backward(total, rstd, norm_weight, cos, sin, *saved)
        return total, rotate(q, cos, sin), rotate(k, cos, sin), v

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple:
        total, rstd, norm_weight, cos, sin, *operands = ctx.saved_tensors
        recipe, saved = ctx.recipe, SavedOperands(*operands)
        gradients = [grad.contiguous() for grad in (grad_q, grad_k, grad_v)]
        layouts = rope_grad(*gradients, cos, sin, *scale_and_amax(saved))
        grad_h, grad_w = backward_matmuls(layouts, saved, recipe, total.dtype, ctx.w_dtype)
        grad_x, grad_norm = norm_gradient(grad_h, total, rstd, norm_weight, grad_total)
        grad_branch = grad_x if ctx.needs_input_grad[1] else None
        none = [None] * (4 + N_TENSORS)
        return grad_x, grad_branch, grad_norm, None, grad_w, *none


class OutPass(torch.autograd.Function):
    """The matmul of attention's output: x (M, K), w (N, K) -> x w' (M, N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, *tensors: Tensor | None
    ) -> Tensor:
        out = LinearTensors(*tensors)
        assert out.x_scale is not None and out.x_amax is not None
        layouts = copy_both(x.contiguous(), out.x_scale, out.x_amax, E4M3)
        y, saved = multiply(layouts, weight, recipe, out, x.dtype)
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, weight.dtype
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        saved = SavedOperands(*ctx.saved_tensors)
        layouts = copy_both(grad.contiguous(), *scale_and_amax(saved), E5M2)
        gradients = backward_matmuls(layouts, saved, ctx.recipe, ctx.dtype, ctx.w_dtype)
        return *gradients, *[None] * (1 + N_TENSORS)


class MLPPass(torch.autograd.Function):
    """Norm, gate+up, SwiGLU, down: x and branch (M, C) -> their sum and the output, (M, C) each.
    tensors: LinearTensors of gate+up, then of down."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        recipe: Recipe,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        gate_up = LinearTensors(*tensors[:N_TENSORS])
        down = LinearTensors(*tensors[N_TENSORS:])
        assert down.x_scale is not None and down.x_amax is not None
        total, rstd, h = normalise(x, branch, norm_weight, eps, gate_up)
        y, saved_gate_up = multiply(h, gate_up_weight, recipe, gate_up, x.dtype)
        layouts = swiglu(y, down.x_scale, down.x_amax)
        out, saved_down = multiply(layouts, down_weight, recipe, down, x.dtype)
        ctx.recipe, ctx.w_dtype = recipe, down_weight.dtype
        ctx.save_for_backward(total, rstd, norm_weight, y, *saved_gate_up, *saved_down)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_out: Tensor) -> tuple:
        total, rstd, norm_weight, y, *operands = ctx.saved_tensors
        recipe, dtype, w_dtype = ctx.recipe, total.dtype, ctx.w_dtype
        gate_up, down = SavedOperands(*operands[:N_SAVED]), SavedOperands(*operands[N_SAVED:])
        layouts = copy_both(grad_out.contiguous(), *scale_and_amax(down), E5M2)
        grad_product, grad_down = backward_matmuls(layouts, down, recipe, dtype, w_dtype)
        layouts = swiglu_grad(grad_product, y, *scale_and_amax(gate_up))
        grad_h, grad_gate_up = backward_matmuls(layouts, gate_up, recipe, dtype, w_dtype)
        grad_x, grad_norm = norm_gradient(grad_h, total, rstd, norm_weight, grad_total)
        none = [None] * (1 + 2 * N_TENSORS)
        return grad_x, grad_x, grad_norm, None, grad_gate_up, grad_down, *none


def normalise(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, linear: LinearTensors
) -> tuple[Tensor, Tensor, Layouts]:
    """norm() by the scale of the Linear behind it: sum, which without a branch is x, 1 / rms, both
    layouts."""
    assert linear.x_scale is not None
    total, rstd, q, qt = norm(x, branch, weight, eps, linear.x_scale)
    if branch is None:
        total = x.view_as(x)  # autograd takes an input that is returned for one changed in place
    return total, rstd, (q, qt)


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


class Residual(NamedTuple):
    """The residual stream between two ProducerBlocks, (B, T, C) each: the sum of both, which the
    next norm's kernel computes."""

    total: Tensor
    branch: Tensor


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
            whole = x.total + x.branch if isinstance(x, Residual) else x
            return super().forward(whole, cos, sin, cache, mask)
        shape = x.total.shape if isinstance(x, Residual) else x.shape  # (B, T, C)
        total, branch = self._attention(x, cos, sin, mask)  # (M, C) each
        norm, gate_up, down = self.norm2, self.mlp.gate_up, self.mlp.down
        assert isinstance(gate_up, FP8KernelLinear) and isinstance(down, FP8KernelLinear)
        total, branch = MLPPass.apply(
            total,
            branch,
            norm.weight,
            norm.eps,
            gate_up.weight,
            down.weight,
            gate_up.recipe,
            *gate_up.tensors(),
            *down.tensors(),
        )
        residual = Residual(total.view(shape), branch.view(shape))
        return residual if self.leaves_residual else residual.total + residual.branch

    def _attention(
        self, x: Tensor | Residual, cos: Tensor, sin: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor]:
        """Both parts of the residual stream behind attention, (M, C) each."""
        attn, qkv, out = self.attn, self.attn.qkv, self.attn.out
        assert isinstance(qkv, FP8KernelLinear) and isinstance(out, FP8KernelLinear)
        total, branch = x if isinstance(x, Residual) else (x, None)
        total, q, k, v = QKVPass.apply(
            total.flatten(0, 1),
            None if branch is None else branch.flatten(0, 1),
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
        return total, OutPass.apply(rows, out.weight, out.recipe, *out.tensors())

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
        expected = _known_block(block, x, cos, sin)
        if not torch.allclose(block(x, cos, sin), expected, rtol=1e-3, atol=1e-3):
            raise UserError(
                "fp8.scaling=bounded computes model.py's Block in kernels that write FP8, and block"
                f" {number} of this model computes something else: set fp8.scaling=delayed, or"
                " teach fp8/producers.py that block"
            )


def _waves(shape: Sequence[int]) -> Tensor:
    """Values between -1 and 1 without a random number: a run's own must not move."""
    n = math.prod(shape)
    return torch.arange(1.0, n + 1.0, device="cpu").sin().view(shape)


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
