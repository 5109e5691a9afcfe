"""Linears emulated, and torchao's prototypes."""

from hashlib import blake2b
from typing import Any

import torch
import torch.nn as nn

from fp8.kernels import KernelMatmul
from fp8.recipes import _BF16, FOR_BOTH, FP8_MULTIPLES, Operand, Recipe
from fp8.rounding import _rotated, fake_quantise, noise_at, scale_of


class QuantisedLinear(nn.Linear):
    """A Linear without bias whose matmuls follow `recipe`; its class and fields are set by
    convert()."""

    recipe: Recipe
    is_native: bool  # the GPU has these matmuls, and torchao a prototype of them
    # Both () int64, see set_position(): tensors, because torch.compile would compile each layer
    # anew for a number of its own.
    position: Any = None
    salt: Any = None

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])  # (M, K)
        if self.recipe.input.scaling == "constant" and x.is_cuda:
            x_scale, g_scale = (
                scale_of(rows, operand) for operand in (self.recipe.input, self.recipe.grad)
            )
            y = KernelMatmul.apply(
                rows, self.weight, None, None, None, self.recipe, None, x_scale, None, g_scale
            )
        # Of a prompt there may be any number.
        elif self.is_native and x.is_cuda and len(rows) % FP8_MULTIPLES[self.recipe.name] == 0:
            y = (_torchao_mx if self.recipe.name == "mxfp8" else _torchao_blockwise)(
                rows, self.weight
            )
        else:
            y = EmulatedMatmul.apply(rows, self.weight, self.position, self.salt, self.recipe)
        return y.view(*x.shape[:-1], -1)


class EmulatedMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N), operands rounded as the recipe says, then multiplied;
    numerics only.

    On a CPU in fp32: products of float8 values are exact there, and only their sums and the result
    round, as on real units. On a GPU in x's dtype, exact for mxfp8's power-of-two scales, or in
    fp32 for tiles and tensors. position (), salt: of noise_at()."""

    @staticmethod
    def forward(ctx, x, w, position, salt, recipe):
        qx, qw = _emulated(x, recipe.input, x.dtype), _emulated(w, recipe.weight, x.dtype)
        reuses_x = recipe.input.scaling in FOR_BOTH and not recipe.has_bf16_weight_grad
        ctx.save_for_backward(qx if reuses_x else x, w, position, salt)
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, w.dtype
        return (qx @ qw.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x, w, position, salt), recipe, dtype = ctx.saved_tensors, ctx.recipe, ctx.dtype
        noise = [
            None if position is None else noise_at(g.shape, position, salt + more)
            for more in (0, 2**60)
        ]
        qg = qg_w = _emulated(g, recipe.grad, dtype, -1, noise[0])
        if recipe.has_bf16_input_grad:
            qg = _emulated(g, _BF16, dtype)
            qw = _emulated(w.to(dtype), _BF16, dtype)
        else:
            qw = _emulated(w, recipe.weight_again or recipe.weight, dtype, 0)
        if recipe.has_bf16_weight_grad:
            qg_w = g
        elif recipe.input.scaling not in FOR_BOTH:  # nor is the gradient's
            qg_w = _emulated(
                _rotated(g) if recipe.is_rotated else g, recipe.grad, dtype, 0, noise[1]
            )
            x = _emulated(_rotated(x) if recipe.is_rotated else x, recipe.input, dtype, 0)
        return (qg @ qw).to(dtype), (qg_w.t() @ x).to(dtype).to(ctx.w_dtype), None, None, None


def _emulated(
    x: torch.Tensor,
    operand: Operand,
    dtype: torch.dtype,
    dim: int = -1,
    noise: torch.Tensor | None = None,
):
    """x dequantised after rounding as `operand` says: fp32 on a CPU, by tiles and by tensors, else
    `dtype`."""
    q = fake_quantise(x, operand, dim, noise)
    return q if x.device.type == "cpu" or operand.scaling in ("tile", "tensor") else q.to(dtype)


def noise_of(module: Any, g: torch.Tensor) -> torch.Tensor | None:
    """The noise with which a converted Linear rounds its output's gradient g (..., N) for the
    input's; None: to nearest."""
    position = getattr(module, "position", None)
    return (
        None
        if position is None
        else noise_at(g.flatten(0, -2).shape, position, module.salt).view_as(g)
    )


def set_position(model: nn.Module, position: int, seed: int = 0) -> None:
    """Number among the run's tokens of the first token that the next pass through `model` sees:
    with the seed and the layer it decides the noise of recipes with stochastic rounding. Without a
    position they round to nearest."""
    for name, m in model.named_modules():
        if isinstance(m, QuantisedLinear) and m.recipe.grad.is_stochastic:
            if m.position is None:
                salt = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
                m.position = torch.zeros((), dtype=torch.int64, device=m.weight.device)
                m.salt = torch.full_like(m.position, int.from_bytes(salt, "little"))
            m.position.fill_(position)


def _torchao_mx(x, w):
    from torchao.prototype.moe_training import mxfp8_linear as mx

    return mx._to_mxfp8_then_scaled_mm(
        x.contiguous(), w.to(x.dtype), mx.KernelPreference.AUTO, mx.ScaleCalculationMode.RCEIL
    )


def _torchao_blockwise(x, w):
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    # before it, Triton's matmuls
    has_cublas = tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)
    return fp8_blockwise_mm.apply(x.contiguous(), w, 128, x.dtype, not has_cublas)
