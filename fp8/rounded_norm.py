"""Norms whose weights are rounded to FP8 with the Linears behind them.

Such a norm saves nothing; it is a published cause of instability (2506.20752): a norm's weights lie
near each other, so that a block of them shares a binade, and under OCP's rule for the scale those
in its upper quarter all saturate to one value."""

from typing import Any

import torch

from fp8.recipes import Operand
from fp8.rounding import fake_quantise
from model import RMSNorm


class RoundedWeight(torch.autograd.Function):
    """A norm's weight (n,) -> rounded as `operand` says, (n,) fp32; its gradient passes
    unchanged."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, operand: Operand) -> torch.Tensor:
        return fake_quantise(weight[None], operand)[0]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g, None


class RoundedNorm(RMSNorm):
    """Stands in the place of an RMSNorm and takes over its weight: the same Parameter under the
    same name. `operand` says how it is rounded for the product with the normalised rows. FSDP2
    casts it to BF16 as it gathers it, so that it is rounded twice there."""

    def __init__(self, norm: RMSNorm, operand: Operand):
        torch.nn.Module.__init__(self)  # RMSNorm's would make a weight
        self.weight = norm.weight
        self.eps = norm.eps
        self.operand = operand
        self.is_rounded = True  # precision.in_bf16() does without

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight
        if self.is_rounded:
            weight = RoundedWeight.apply(weight, self.operand)
        return weight.to(x.dtype) * x32.to(x.dtype)
