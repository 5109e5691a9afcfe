"""The head's cross-entropy in one with its FP8 matmuls, on our kernels.

The gradient of the logits is written as FP8 at once, in both layouts: (M, V) numbers in BF16 never
exist. Its scale is that of a bound, |softmax - one-hot| <= 1, which holds for plain cross-entropy
alone: check_is_cross_entropy() refuses a model with another loss. A z-loss, a function of the
log-sum-exp, has a wider bound of its own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fp8.kernels import (
    FP8KernelLinear,
    LinearTensors,
    QuantisedGrad,
    SavedOperands,
    empty_layouts,
    multiply_grad,
    multiply_input,
    transposed_weight,
    weight_gradient,
)
from fp8.recipes import E5M2, Recipe
from fp8.rounding import cast, scale_of
from lib.errors import UserError
from model import NO_TARGET, beside_z


class FP8HeadLoss(torch.autograd.Function):
    """h (M, K), w (V, K), targets (M,) -> the cross-entropy of each row (M,), fp32, nats; with_lse
    also its log-sum-exp (M,). The tensors are those of LinearTensors, in its order."""

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        w: torch.Tensor,
        targets: torch.Tensor,
        recipe: Recipe,
        with_lse: bool,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ctx.recipe, ctx.dtype, ctx.w_dtype, ctx.with_lse = recipe, h.dtype, w.dtype, with_lse
        logits, saved = multiply_input(h, w, recipe, LinearTensors(*tensors))
        losses, lse = losses_of_logits(logits.float(), targets)
        ctx.save_for_backward(*saved, logits, lse, targets)
        return (losses, lse) if with_lse else losses

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, grad_lse: torch.Tensor | None = None) -> tuple:
        n_saved = len(SavedOperands._fields)
        tensors = ctx.saved_tensors  # once: a recomputation gives them once
        recipe, saved = ctx.recipe, SavedOperands(*tensors[:n_saved])
        logits, lse, targets = tensors[n_saved:]
        grad_loss = grad_loss.contiguous()
        bound = grad_loss  # bounds each row's gradient; reads (M,) instead of (M, V)
        if ctx.with_lse:
            assert grad_lse is not None
            bound = grad_loss.abs() + grad_lse.abs()
            lse = shifted_lse(lse, grad_loss, grad_lse)
        weight = transposed_weight(saved, recipe)
        scale = scale_of(bound, recipe.grad)
        q, qt = cross_entropy_grad(logits, lse, targets, grad_loss, scale)
        grad = QuantisedGrad(grad_loss, q, qt, scale.reciprocal())
        grad_h = multiply_grad(grad, weight, recipe, ctx.dtype)
        grad_w = weight_gradient(grad, saved, recipe, ctx.w_dtype)
        return grad_h, grad_w, None, None, None, *[None] * len(LinearTensors._fields)


def shifted_lse(lse: torch.Tensor, grad_loss: torch.Tensor, grad_lse: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp (M,) with which cross_entropy_grad() gives the gradient of both outputs of
    FP8HeadLoss: softmax (grad_loss + grad_lse) - one-hot grad_loss.

    exp(logit - lse) (1 + r) = exp(logit - (lse - log(1 + r))), where r = grad_lse / grad_loss. Of a
    z-loss r = 2 weight lse. Where r <= -1, or grad_lse comes without grad_loss, there is none: NaN,
    which the guard of a run sees."""
    ratio = torch.where(grad_lse == 0, 0.0, grad_lse / grad_loss)
    return lse - torch.log1p(ratio)


class FP8Head(FP8KernelLinear):
    """A head on our kernels that also computes its loss. GPT.token_losses() asks it."""

    has_fused_loss = True

    def fuses_loss(self) -> bool:
        """Whether token_losses() is to be called: not without gradients, and not where the head has
        hooks, as a probe's or a diagnosis's, which only a call of the module runs."""
        if not torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling():
            return True
        return not (self._forward_hooks or self._forward_pre_hooks)

    def token_losses(
        self, h: torch.Tensor, targets: torch.Tensor, with_z: bool = False
    ) -> torch.Tensor:
        """As GPT.token_losses(); the logits and their gradient in one with their matmuls."""
        inputs = h, self.weight, targets, self.recipe, with_z, *self.tensors()
        if not with_z:
            return FP8HeadLoss.apply(*inputs)
        losses, lse = FP8HeadLoss.apply(*inputs)
        return beside_z(losses, lse, targets)


def losses_of_logits(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy (M,) and log-sum-exp (M,) of fp32 logits (M, V); no target: 0."""
    largest = logits.amax(-1, keepdim=True)
    lse = (largest + (logits - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)
    picked = logits.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(targets == NO_TARGET, 0.0, lse - picked), lse


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
        layouts = empty_layouts(logits, E5M2)
        return triton_kernels.launch(triton_kernels.cross_entropy_grad, inputs, *layouts)
    p = torch.exp(logits.float() - lse[:, None])
    p -= F.one_hot(targets.clamp(min=0), logits.size(1))
    has_no_target = (targets == NO_TARGET)[:, None]
    q = cast(p.masked_fill(has_no_target, 0.0), (grad * scale)[:, None], E5M2)
    return q, q.t().contiguous()


cross_entropy_grad.register_fake(lambda logits, *_: empty_layouts(logits, E5M2))


def check_is_cross_entropy(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Raise UserError unless loss(logits (n, V) fp32, targets (n,)) -> (n,) is what this file
    computes: by value and gradient, on logits that tell it from cross-entropy with any more to
    it."""
    logits = torch.linspace(-4.0, 4.0, 32).view(4, 8).sin() * 5.0
    logits[1] += 30.0  # a loss that sees more than differences between logits shows
    targets = torch.tensor([0, 5, NO_TARGET, 7])
    expected, _ = losses_of_logits(logits, targets)
    with torch.enable_grad():
        logits.requires_grad_()
        computed = loss(logits, targets)
        gradient = torch.autograd.grad(computed.sum(), logits)[0]
    is_target = F.one_hot(targets.clamp(min=0), logits.shape[1])
    expected_gradient = (logits.detach().softmax(1) - is_target) * (targets != NO_TARGET)[:, None]
    if _is_close(computed, expected) and _is_close(gradient, expected_gradient):
        return
    raise UserError(
        "fp8.head=true with fp8.kernels=true computes the cross-entropy within the head's matmul,"
        " and the model's loss is another one: set fp8.head=false or fp8.kernels=false, or teach"
        " fp8/head_loss.py that loss"
    )


def _is_close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    is_same_shape = tensor.shape == expected.shape
    return is_same_shape and torch.allclose(tensor.detach(), expected, rtol=0.0, atol=2e-5)
