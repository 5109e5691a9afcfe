"""Linears on torch's float8 matmul with our own casts, and with copies of the weight that last.

Every operand has torchao's scale (fp64 division), format and rounding, bit for bit. Where BF16
multiplies the weight gradient, no operand needs a second layout, and Inductor compiles the casts.
BF16 Linears of one process go the same way: a comparison with them is one of the matmuls. On a CPU
the operators are plain torch, the reference for fp8/triton_kernels.py, which is imported when the
first tensor is on a GPU: CPU users lack triton. Float8 matmuls need their second operand
column-major: the transpose of a row-major copy.

The head's loss is in fp8/head_loss.py; who makes the copies anew, and when, in fp8/precision.py."""

from typing import Any, NamedTuple

import torch
import torch.nn as nn

from fp8.linears import ConvertedLinear, EmulatedLinear
from fp8.matmul import (
    add_scaled_weight_grad,
    add_weight_grad,
    adds_scaled_products,
    mm,
    scaled_mm,
)
from fp8.recipes import Operand, Recipe
from fp8.rounding import cast, scale_of


class LinearTensors(NamedTuple):
    """What a Linear multiplies with, beside its weight (N, K): buffers of KernelLinear, each None
    where there is none."""

    q: torch.Tensor | None = None  # the weight's copy (N, K), in FP8 or BF16
    qt: torch.Tensor | None = None  # its transpose (K, N), in FP8
    scale: torch.Tensor | None = None  # () of both
    total: torch.Tensor | None = None  # the weight's lasting gradient, see keep_gradients()
    # with fp8.scaling=delayed or bounded, all (): the scales of input and gradient, known before
    # the pass, and the largest magnitudes that the pass has seen; None where the scale is a bound's
    x_scale: torch.Tensor | None = None
    x_amax: torch.Tensor | None = None
    g_scale: torch.Tensor | None = None
    g_amax: torch.Tensor | None = None


NO_TENSORS = LinearTensors()


class SavedOperands(NamedTuple):
    """What the backward pass of an FP8 Linear needs of its forward pass."""

    x: torch.Tensor  # (M, K) where BF16 multiplies the weight gradient, else FP8 (K, M)
    x_inverse: torch.Tensor  # () of the input's scale
    weight: torch.Tensor | None  # (N, K); None where there is a copy
    qt: torch.Tensor | None  # as in LinearTensors
    scale: torch.Tensor | None
    total: torch.Tensor | None
    g_scale: torch.Tensor | None
    g_amax: torch.Tensor | None


class QuantisedGrad(NamedTuple):
    """The output's gradient g (M, N) for the two matmuls of a backward pass."""

    g: torch.Tensor | None  # unrounded; None where only the FP8 copies exist
    q: torch.Tensor  # FP8 (M, N)
    qt: torch.Tensor | None  # FP8 (N, M); None where BF16 multiplies the weight gradient
    inverse: torch.Tensor  # () of its scale


# ------------------------------------------------------------------------ forward and backward pass


class FP8Linear(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N); the tensors are those of LinearTensors, in its order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        recipe: Recipe,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, w.dtype
        y, saved = multiply_input(x, w, recipe, LinearTensors(*tensors))
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        recipe, saved = ctx.recipe, SavedOperands(*ctx.saved_tensors)
        g = g.contiguous()
        weight = transposed_weight(saved, recipe)
        needs_transpose = not recipe.has_bf16_weight_grad
        quantised = quantise(g, recipe.grad, needs_transpose, saved.g_scale, saved.g_amax)
        grad = QuantisedGrad(g, *quantised)
        grad_x = multiply_grad(grad, weight, recipe, ctx.dtype)
        grad_w = weight_gradient(grad, saved, recipe, ctx.w_dtype)
        return grad_x, grad_w, None, *[None] * len(LinearTensors._fields)


class BF16Linear(torch.autograd.Function):
    """x (M, K), w (N, K), its copy q in x's dtype, total as in LinearTensors -> x w' (M, N)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        q: torch.Tensor,
        total: torch.Tensor | None,
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.w_dtype = w.dtype
        ctx.save_for_backward(x, q, total)
        return x @ q.t()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        x, q, total = ctx.saved_tensors
        g = g.contiguous()
        grad_x = g @ q
        grad_w = bf16_weight_gradient(g, x, total, ctx.w_dtype)
        return grad_x, grad_w, None, None


def multiply_input(
    x: torch.Tensor, w: torch.Tensor, recipe: Recipe, tensors: LinearTensors
) -> tuple[torch.Tensor, SavedOperands]:
    """x (M, K), w (N, K) -> y (M, N), and what the backward pass needs."""
    x = x.contiguous()
    needs_transpose = not recipe.has_bf16_weight_grad
    xq, xt, x_inverse = quantise(x, recipe.input, needs_transpose, tensors.x_scale, tensors.x_amax)
    kept = x if xt is None else xt
    return multiply_quantised(xq, kept, x_inverse, w, recipe, tensors, x.dtype)


def multiply_quantised(
    xq: torch.Tensor,
    kept: torch.Tensor,
    x_inverse: torch.Tensor,
    w: torch.Tensor,
    recipe: Recipe,
    tensors: LinearTensors,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, SavedOperands]:
    """The FP8 copy xq (M, K) of x, the inverse () of its scale, w (N, K) -> y (M, N) in `dtype` and
    what the backward pass needs; `kept` of x, see SavedOperands.x."""
    weight = quantised_weight(w, tensors.q, tensors.scale, recipe.weight)
    y = scaled_mm(xq, x_inverse, *weight, dtype, fast=True)
    # Without lasting copies w itself is kept, not its FP8 copy: FSDP2 frees w between the passes, a
    # copy would stay.
    saved = SavedOperands(
        x=kept,
        x_inverse=x_inverse,
        weight=w if tensors.qt is None else None,
        qt=tensors.qt,
        scale=tensors.scale,
        total=tensors.total,
        g_scale=tensors.g_scale,
        g_amax=tensors.g_amax,
    )
    return y, saved


def transposed_weight(saved: SavedOperands, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The second operand of the input gradient g w, and the inverse of its scale."""
    return quantised_weight(saved.weight, saved.qt, saved.scale, recipe.weight, is_transposed=True)


def multiply_grad(
    grad: QuantisedGrad,
    weight: tuple[torch.Tensor, torch.Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The input gradient g w (M, K)."""
    return scaled_mm(grad.q, grad.inverse, *weight, dtype, recipe.fast_backward)


def weight_gradient(
    grad: QuantisedGrad, saved: SavedOperands, recipe: Recipe, dtype: torch.dtype
) -> torch.Tensor | None:
    """The weight gradient g' x (N, K); None where it was added to the one that lasts."""
    if grad.qt is None:
        assert grad.g is not None
        return bf16_weight_gradient(grad.g, saved.x, saved.total, dtype)
    operands = grad.qt, grad.inverse, saved.x.t(), saved.x_inverse
    if saved.total is not None:
        add_scaled_weight_grad(saved.total, *operands, recipe.fast_backward)
        return None
    return scaled_mm(*operands, dtype, recipe.fast_backward)


def bf16_weight_gradient(
    g: torch.Tensor, x: torch.Tensor, total: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """g' x (N, K) of BF16 g (M, N) and x (M, K); None where it was added to `total`."""
    if total is not None:
        add_weight_grad(total, g, x)
        return None
    return mm(g.t(), x, dtype)


# ------------------------------------------------------------------------------------------- casts


def quantise(
    x: torch.Tensor,
    operand: Operand,
    needs_transpose: bool,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x (M, K) -> its FP8 copy, that copy's transpose or None, the inverse () of the scale.

    With a `scale` () that is known before, the casts are plain torch, which Inductor fuses with the
    kernel that makes x; amax () is then raised to x's largest magnitude."""
    if scale is None:
        scale = scale_of(x, operand)
        if needs_transpose:
            return *cast_both(x, scale, operand.format), scale.reciprocal()
    if amax is not None:
        amax.copy_(torch.maximum(amax, x.abs().amax(-1).amax()))
    q = cast(x, scale, operand.format)
    return q, q.t().contiguous() if needs_transpose else None, scale.reciprocal()


def quantised_weight(
    w: torch.Tensor | None,
    copy: torch.Tensor | None,
    scale: torch.Tensor | None,
    operand: Operand,
    is_transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second operand of y = x w', or of g w (is_transposed), and the inverse of its scale; cast
    here where there is no copy."""
    if scale is None:
        assert w is not None
        scale = scale_of(w, operand)
    if copy is None:
        assert w is not None
        if is_transposed:
            copy = cast_both(w, scale, operand.format)[1]
        else:
            copy = cast(w, scale, operand.format)
    return copy.t(), scale.reciprocal()


@torch.library.custom_op("nanofp8::cast_both_layouts", mutates_args=())
def cast_both(
    x: torch.Tensor, scale: torch.Tensor, format: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) times scale (), rounded to `format`, saturating: (q (M, K), its transpose (K, M)),
    all row-major."""
    return cast_into(x, scale, *empty_layouts(x, format))


cast_both.register_fake(lambda x, scale, format: empty_layouts(x, format))


def empty_layouts(x: torch.Tensor, format: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for a copy of x (M, K) in `format`, and for its transpose (K, M)."""
    return x.new_empty(x.shape, dtype=format), x.new_empty(x.shape[::-1], dtype=format)


def cast_into(
    x: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, qt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cast_both() into memory that is there; returns q and qt."""
    if x.is_cuda:
        from fp8 import triton_kernels

        return triton_kernels.launch(triton_kernels.cast_both, (x, scale), q, qt)
    q.copy_(cast(x, scale, q.dtype))
    return q, qt.copy_(q.t())


# ----------------------------------------------------------------------------------------- Linears


class KernelLinear(ConvertedLinear):
    """A Linear that multiplies by copies of its weight. The weight stays what it was; LinearTensors
    are buffers outside checkpoints, made and renewed by fp8.precision."""

    q: torch.Tensor | None
    qt: torch.Tensor | None
    scale: torch.Tensor | None
    total: torch.Tensor | None
    x_scale: torch.Tensor | None
    x_amax: torch.Tensor | None
    g_scale: torch.Tensor | None
    g_amax: torch.Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.version: int | None = None  # of the weight when its copies were made
        for name in LinearTensors._fields:
            self.register_buffer(name, None, persistent=False)

    @property
    def has_bf16_weight_grad(self) -> bool:
        """Whether BF16 multiplies the weight gradient; each subclass says."""
        raise NotImplementedError

    @property
    def can_add_weight_grad(self) -> bool:
        """Whether the weight gradient's matmul can add to a gradient that lasts over
        micro-batches."""
        return self.has_bf16_weight_grad or adds_scaled_products(self.weight.device)

    def check_copies(self) -> None:
        """Assert that the copies are the weight's; a compiled step cannot compare versions."""
        if self.q is None or torch.compiler.is_compiling():
            return
        assert self.weight._version == self.version, (
            "Precision.after_update() is due: the weights have changed"
        )
        assert self.total is None or self.weight.grad is self.total, (
            "Precision.zero_gradients() alone may free gradients"
        )


class BF16KernelLinear(KernelLinear):
    """A Linear that casts its weight to BF16 once a step, and adds its weight gradient up within
    the matmul."""

    has_bf16_weight_grad = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check_copies()
        rows = x.reshape(-1, x.shape[-1])  # (M, K)
        y = BF16Linear.apply(rows, self.weight, self.q, self.total)
        return y.view(*x.shape[:-1], -1)


class FP8KernelLinear(KernelLinear):
    """A Linear that multiplies by `recipe` on our kernels."""

    has_fused_loss = False  # of a head, see fp8/head_loss.py

    def __init__(
        self,
        linear: nn.Linear,
        recipe: Recipe,
        is_delayed: bool = False,
        is_bounded: bool = False,
    ):
        super().__init__(linear)
        self.recipe = recipe
        self.is_delayed = is_delayed  # its scales are those of fp8.delayed
        self.is_bounded = is_bounded  # its input's scale comes from the bound of the norm before it

    @property
    def has_bf16_weight_grad(self) -> bool:
        return self.recipe.has_bf16_weight_grad

    def tensors(self) -> LinearTensors:
        """What it multiplies with, once it is sure that the copies are the weight's."""
        self.check_copies()
        return LinearTensors(
            self.q,
            self.qt,
            self.scale,
            self.total,
            self.x_scale,
            self.x_amax,
            self.g_scale,
            self.g_amax,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (M, K)
        tensors = self.tensors()
        if torch.is_grad_enabled():
            y = FP8Linear.apply(rows, self.weight, self.recipe, *tensors)
        else:
            y = self._without_gradients(rows, tensors)
        return y.view(*x.shape[:-1], -1)

    def _without_gradients(self, rows: torch.Tensor, tensors: LinearTensors) -> torch.Tensor:
        """(M, K) -> (M, N) where no matmul will need a transpose: any number of rows."""
        q, _, inverse = quantise(rows, self.recipe.input, False, tensors.x_scale)
        weight = quantised_weight(self.weight, tensors.q, tensors.scale, self.recipe.weight)
        return scaled_mm(q, inverse, *weight, rows.dtype, fast=True)


class ConstantScaleLinear(EmulatedLinear):
    """A Linear of a recipe with constant scales: on a GPU torch's float8 matmul on plain casts,
    elsewhere emulated."""

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        if not rows.is_cuda:
            return super().multiply(rows)
        recipe = self.recipe
        tensors = LinearTensors(
            x_scale=scale_of(rows, recipe.input), g_scale=scale_of(rows, recipe.grad)
        )
        return FP8Linear.apply(rows, self.weight, recipe, *tensors)
