"""Scales known before the pass."""

import math
from typing import Any

import torch
import torch.nn as nn

from fp8.kernels import KernelLinear
from fp8.recipes import E4M3, E5M2, RECIPES, for_loss_scale
from fp8.rounding import FORMATS, _scale
from fp8.sharded import max_over_ranks

HISTORY = 4
# costs no precision, but 1 of 18 and 4 of 32 powers of two
MARGIN: dict[Any, float] = {E4M3: 2.0, E5M2: 16.0}
WIDE, CALM = 8.0, 16  # a tensor that has saturated has so many times the margin for so many steps


class DelayedScales:
    """The scales of the KernelLinears of `model` that are delayed; of none, where
    fp8.scaling=current. By all ranks alike.

    A scale covers a margin times the amaxes of the last HISTORY steps: no pass over a tensor has to
    end before its cast begins. A head's gradient whose scale follows from a bound has no row.
    Gradients are kept as those of a loss that is not scaled: its scale depends on ranks and
    targets. A run's first step has cscale's constants. An amax that is zero, infinite or, on any
    rank, NaN leaves no trace."""

    def __init__(self, model: nn.Module, ranks: int = 1):
        sides = [
            (f"{name}.{side}", m, side)
            for side in "xg"
            for name, m in model.named_modules()
            if isinstance(m, KernelLinear) and m.is_delayed and (side == "x" or not m.has_bound)
        ]
        operands = [m.recipe.input if side == "x" else m.recipe.grad for _, m, side in sides]
        device = next(model.parameters()).device
        for _, m, side in sides:
            # never moved: compiled code, a CUDA graph may hold their addresses
            for buffer in ("scale", "amax"):
                setattr(m, f"{side}_{buffer}", torch.zeros((), device=device))
        self._names, self._ranks = [name for name, *_ in sides], ranks
        self._scales, self._amaxes = (
            [getattr(m, f"{side}_{b}") for _, m, side in sides] for b in ("scale", "amax")
        )
        self._power_of_2 = any(operand.power_of_2 for operand in operands)
        self._largest = torch.tensor(
            [FORMATS[operand.format][0] for operand in operands], device=device
        )
        self._margin = torch.tensor([MARGIN[operand.format] for operand in operands], device=device)
        self._is_grad = torch.tensor(
            [side == "g" for *_, side in sides], dtype=torch.bool, device=device
        )
        self._rows = torch.zeros(len(sides), HISTORY + 1, device=device)
        # amaxes, newest first; steps
        self._history, self._wide_for = self._rows[:, :-1], self._rows[:, -1]
        self._saturated = torch.zeros(len(sides), dtype=torch.bool, device=device)
        self.begin(1.0)

    def begin(self, loss_scale: float) -> None:
        """Set the scales of a step, or of an evaluation; `loss_scale` is what the step multiplies
        its summed loss by."""
        if not self._names:
            return
        first = for_loss_scale(RECIPES["cscale"], loss_scale)
        reach = (
            self._history.amax(1)
            * torch.where(self._wide_for > 0, WIDE, 1.0)
            * torch.where(self._is_grad, loss_scale, 1.0)
        )
        scales = torch.where(
            reach > 0,
            _scale(reach * self._margin, self._largest, self._power_of_2),
            torch.where(self._is_grad, 2.0**first.grad.exponent, 2.0**first.input.exponent),
        )
        torch._foreach_copy_(self._scales, scales.unbind())
        torch._foreach_zero_(self._amaxes)

    @torch.no_grad()
    def end(self, loss_scale: float) -> torch.Tensor:
        """Enter the step's amaxes into the history; how many tensors were saturated in it on any
        rank, (), on the device."""
        if self._names:
            seen = torch.stack(self._amaxes)
            if self._ranks > 1:
                seen = max_over_ranks(seen)
            seen = seen.nan_to_num(nan=0.0, posinf=math.inf)
            # A rounded scale may lift the amax slightly beyond the largest value.
            self._saturated.copy_(seen * torch.stack(self._scales) > self._largest * (1 + 2**-20))
            seen = seen / torch.where(self._is_grad, loss_scale, 1.0)
            known = torch.where((seen > 0) & seen.isfinite(), seen, self._history.amax(1))
            self._history.copy_(torch.cat((known[:, None], self._history[:, :-1]), 1))
            self._wide_for.copy_(
                torch.where(self._saturated, CALM, (self._wide_for - 1).clamp(min=0))
            )
        return self._saturated.sum()

    def saturated(self) -> list[str]:
        """The tensors that were saturated in the step that end() has ended, as LINEAR.x and
        LINEAR.g; waits for the device."""
        return [
            name for name, is_so in zip(self._names, self._saturated.tolist(), strict=True) if is_so
        ]

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint stores, as JSON can hold it: a tensor's amaxes, newest first, and its
        steps with a wide margin."""
        return dict(zip(self._names, self._rows.tolist(), strict=True))

    def load(self, state: dict[str, list[float]] | None) -> None:
        """Go on from a state(); of None, or of a tensor that it lacks, without a history. The run
        had another recipe there."""
        rows = [(state or {}).get(name, [0.0] * (HISTORY + 1)) for name in self._names]
        self._rows.copy_(torch.tensor(rows).view_as(self._rows))
