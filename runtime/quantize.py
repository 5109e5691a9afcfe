"""The FP8 recipes as data, and their arithmetic in plain torch: scales, rounding, emulated matmuls.

A Linear does three matmuls a step: y = x w', input gradient = g w, weight gradient = g' x. A recipe says for each of
their operands which format it takes (E4M3, E5M2: FP8 formats for deep learning, 2209.05433; or BF16) and which values
share a scale. An operand is multiplied by its scale and rounded to the format, saturating; the matmul's result is divided
by the scales.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn as nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-12             # least amax, so that an all-zero tensor has a scale (torchao's value)
BLOCK = 32              # values that share one scale in MX formats (OCP Microscaling specification 1.0, section 5)


@dataclass(frozen=True)
class Operand:
    """How one operand is converted to FP8."""
    format: torch.dtype | None  # None: it stays in BF16
    scaling: Literal["tensor", "row", "block", "constant"] = "tensor"   # which values share a scale
    power_of_2: bool = False    # scale rounded down to a power of two: scaling itself then rounds nothing
    exponent: int = 0           # "constant" only: the scale is 2 ** exponent


@dataclass(frozen=True)
class Recipe:
    """The operands of y = x w' (input, weight), of input gradient = g w (grad, weight_for_input_grad) and of
    weight gradient = g' x (grad_for_weight_grad, input_for_weight_grad)."""
    name: str
    input: Operand
    weight: Operand
    grad: Operand
    weight_for_input_grad: Operand
    input_for_weight_grad: Operand
    grad_for_weight_grad: Operand

    @property
    def multiple(self) -> int:
        """Inputs and outputs of a Linear must be multiples of this."""
        return BLOCK if self.input.scaling == "block" else 16


def _uniform(name: str, input: Operand, weight: Operand, grad: Operand, **changes: Operand) -> Recipe:
    """A recipe whose operands are scaled alike in both of their matmuls, except for `changes`."""
    return replace(Recipe(name, input, weight, grad, weight, input, grad), **changes)


_BF16 = Operand(None)
_TENSOR, _TENSOR_GRAD = Operand(E4M3), Operand(E5M2)
_TENSOR_2, _TENSOR_GRAD_2 = Operand(E4M3, power_of_2=True), Operand(E5M2, power_of_2=True)
_ROW, _MX = Operand(E4M3, "row", power_of_2=True), Operand(E4M3, "block", power_of_2=True)
_GW_HP = {"input_for_weight_grad": _BF16, "grad_for_weight_grad": _BF16}
# cscale: activations after an RMSNorm have rms 1; weights start at std sqrt(0.4 / C), about 2^-6; gradients, in units of
# one token's loss, are around 2^-8. In the demo runs these constants saturate nothing, and at most 1.3 % of a Linear's
# activations underflow.
_CSCALE = (Operand(E4M3, "constant", exponent=0), Operand(E4M3, "constant", exponent=6),
           Operand(E5M2, "constant", exponent=8))

RECIPES = {recipe.name: recipe for recipe in (
    _uniform("tensorwise", _TENSOR, _TENSOR, _TENSOR_GRAD),
    _uniform("tensorwise_gw_hp", _TENSOR, _TENSOR, _TENSOR_GRAD, **_GW_HP),
    _uniform("rowwise", _ROW, _ROW, _ROW),
    _uniform("rowwise_with_gw_hp", _ROW, _ROW, _ROW, weight_for_input_grad=_TENSOR_2, **_GW_HP),
    _uniform("amax", _TENSOR_2, _TENSOR_2, _TENSOR_GRAD_2),
    _uniform("cscale", *_CSCALE),
    _uniform("mxfp8", _MX, _MX, _MX),
)}


def for_loss_scale(recipe: Recipe, loss_scale: float) -> Recipe:
    """The recipe for a loss multiplied by `loss_scale` before the backward pass, as a mean over a step's tokens is: dynamic
    scales follow by themselves, a constant gradient scale is divided by it (rounded to a power of two)."""
    if recipe.grad.scaling != "constant":
        return recipe
    grad = replace(recipe.grad, exponent=recipe.grad.exponent - round(math.log2(loss_scale)))
    return replace(recipe, grad=grad, grad_for_weight_grad=grad)


# ------------------------------------------------------------------------------------------------------- the rounding

def scale_of(x: torch.Tensor, operand: Operand, dim: int = -1) -> torch.Tensor:
    """The fp32 scale of `x` (any shape), which broadcasts to it; `dim` is the dimension that the matmul sums over."""
    if operand.scaling == "constant":
        return torch.full((), 2.0**operand.exponent, device=x.device)
    magnitude, largest = x.detach().abs(), torch.finfo(operand.format).max
    if operand.scaling == "block":
        axis = dim % x.ndim
        blocks = magnitude.float().unflatten(axis, (-1, BLOCK))
        amax = blocks.amax(axis + 1, keepdim=True)
        # E8M0 holds 2^-127 .. 2^127; rounded so that nothing saturates (torchao's RCEIL mode).
        exponent = torch.where(amax > 0, torch.ceil(torch.log2(amax.double() / largest)), -127).clamp(-127, 127)
        return torch.exp2(-exponent).float().expand_as(blocks).flatten(axis, axis + 1)
    # In two stages: Inductor can fuse the first, row by row, with the kernel that produces x (a norm).
    amax = magnitude.amax(-1).amax() if operand.scaling == "tensor" else magnitude.amax(dim, keepdim=True)
    scale = (largest / amax.double().clamp(min=EPS)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if operand.power_of_2 else scale


def fake_quantise(x: torch.Tensor, operand: Operand, dim: int = -1) -> torch.Tensor:
    """x (any shape) quantised and dequantised, in fp32: the values that the matmul multiplies; `dim` as in scale_of()."""
    x = x.float()
    if operand.format is None:
        return x
    scale = scale_of(x, operand, dim)
    return _round(x * scale, operand.format).mul_(scale.reciprocal())


def _round(x: torch.Tensor, format: torch.dtype) -> torch.Tensor:
    """fp32 x, overwritten: saturated, rounded to the nearest value of `format`, ties to even; NaN stays.

    Equal to x.clamp(-largest, largest).to(format).float() bit for bit, which a CPU computes value by value."""
    largest = torch.finfo(format).max
    lowest = torch.finfo(format).smallest_normal
    x.clamp_(-largest, largest)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=lowest)     # of two, at or below |x|
    # fp32 keeps 23 bits behind the leading one: of the sum with 1.5 * 2^23 of the format's steps, none below a step.
    shift = power.mul_(1.5 * 2**23 * torch.finfo(format).eps)
    return x.add_(shift).sub_(shift)


def cast(x: torch.Tensor, scale: torch.Tensor, format: torch.dtype) -> torch.Tensor:
    """x * scale in `format`, saturating, rounded to nearest even."""
    largest = torch.finfo(format).max       # torch before 2.12 does not saturate by itself
    return (x.float() * scale).clamp(-largest, largest).to(format)


def to_float8(x: torch.Tensor, operand: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) in the operand's format, and the inverse () of its scale."""
    scale = scale_of(x, operand)
    return cast(x, scale, operand.format), scale.reciprocal()


def scaled_mm(a: torch.Tensor, a_inverse: torch.Tensor, b: torch.Tensor, b_inverse: torch.Tensor, dtype: torch.dtype,
              fast: bool = False) -> torch.Tensor:
    """(a * a_inverse) @ (b * b_inverse) in `dtype`, (M, N), of float8 a (M, K) and b (K, N), column-major.

    The inverses of the scales broadcast to a and b. On a GPU torch's float8 matmul, with `fast` accumulation or without. On a
    CPU the dequantised values in fp32: torch's own float8 matmul runs in oneDNN's scalar reference loop on Intel CPUs with
    AMX, hundreds of times slower.
    """
    if a.device.type == "cpu":
        return ((a.float() * a_inverse) @ (b.float() * b_inverse)).to(dtype)
    return torch._scaled_mm(a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast)


# ---------------------------------------------------------------- Linears on CPUs, and by recipes that torchao's lack

class QuantisedLinear(nn.Linear):
    """A Linear without bias whose matmuls follow `recipe`; its class and fields are set by runtime.fp8.convert()."""
    recipe: Recipe
    has_mx: bool = False    # the GPU multiplies MX blocks itself

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])   # (M, K)
        if self.recipe.input.scaling == "constant" and x.is_cuda:
            y = ConstantScaleMatmul.apply(rows, self.weight, self.recipe)
        elif self.has_mx and x.is_cuda:
            y = _torchao_mx(rows, self.weight)
        else:
            y = EmulatedMatmul.apply(rows, self.weight, self.recipe)
        return y.view(*x.shape[:-1], -1)


class ConstantScaleMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N) by float8 matmuls with constant scales (2309.17224, FP8-CSCALE)."""

    @staticmethod
    def forward(ctx, x, w, recipe):
        (qx, x_inverse), (qw, w_inverse) = to_float8(x, recipe.input), to_float8(w, recipe.weight)
        ctx.save_for_backward(qx, x_inverse, w)     # w and not its FP8 copy: FSDP frees w between the passes
        ctx.recipe, ctx.dtype = recipe, x.dtype
        return scaled_mm(qx, x_inverse, qw.t(), w_inverse, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, g):
        qx, x_inverse, w = ctx.saved_tensors
        (qg, g_inverse), (qw, w_inverse) = to_float8(g.contiguous(), ctx.recipe.grad), to_float8(w, ctx.recipe.weight)
        # A float8 matmul needs its first operand row-major, its second column-major.
        grad_x = scaled_mm(qg, g_inverse, qw.t().contiguous().t(), w_inverse, ctx.dtype)
        grad_w = scaled_mm(qg.t().contiguous(), g_inverse, qx.t().contiguous().t(), x_inverse, ctx.dtype)
        return grad_x, grad_w.to(w.dtype), None


class EmulatedMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N), operands rounded as the recipe says, then multiplied; numerics only.

    On a CPU in fp32: products of float8 values are exact there, and only their sums and the result round, as on real units.
    On a GPU in x's dtype, exact for the power-of-two scales of the one recipe that is emulated there (mxfp8).
    """

    @staticmethod
    def forward(ctx, x, w, recipe):
        qx, qw = _emulated(x, recipe.input, x.dtype), _emulated(w, recipe.weight, x.dtype)
        ctx.reuses_x = _serves_both(recipe.input, recipe.input_for_weight_grad)
        ctx.reuses_w = _serves_both(recipe.weight, recipe.weight_for_input_grad)
        ctx.save_for_backward(qx if ctx.reuses_x else x, qw if ctx.reuses_w else w)
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, w.dtype
        return (qx @ qw.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x, w), recipe, dtype = ctx.saved_tensors, ctx.recipe, ctx.dtype
        qx = x if ctx.reuses_x else _emulated(x, recipe.input_for_weight_grad, dtype, 0)
        qw = w if ctx.reuses_w else _emulated(w, recipe.weight_for_input_grad, dtype, 0)
        qg = qg_w = _emulated(g, recipe.grad, dtype)
        if not _serves_both(recipe.grad, recipe.grad_for_weight_grad):
            qg_w = _emulated(g, recipe.grad_for_weight_grad, dtype, 0)
        return (qg @ qw).to(dtype), (qg_w.t() @ qx).to(dtype).to(ctx.w_dtype), None


def _emulated(x: torch.Tensor, operand: Operand, dtype: torch.dtype, dim: int = -1) -> torch.Tensor:
    """x dequantised after rounding as `operand` says: fp32 on a CPU, `dtype` on a GPU and for BF16 operands."""
    if operand.format is None:
        return x.to(dtype)
    q = fake_quantise(x, operand, dim)
    return q if x.device.type == "cpu" else q.to(dtype)


def _serves_both(one: Operand, other: Operand) -> bool:
    """Whether a tensor's rounding for one matmul serves another that sums over its other dimension."""
    return one == other and one.scaling in ("tensor", "constant")


def _torchao_mx(x, w):
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    return _to_mxfp8_then_scaled_mm(x.contiguous(), w.to(x.dtype), KernelPreference.AUTO, ScaleCalculationMode.RCEIL)
