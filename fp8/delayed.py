"""fp8.scaling=delayed and bounded: scales known before the pass.

delayed: all from what past steps held. bounded: behind a norm from its weight w, since RMSNorm's
values are at most sqrt(C) max|w|, which no step can exceed; all else delayed."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn as nn

from fp8.kernels import FP8KernelLinear
from fp8.recipes import E4M3, E5M2, RECIPES, Operand, for_loss_scale
from fp8.rounding import FORMATS, scale_for
from fp8.sharded import max_over_ranks
from lib.sharding import is_dtensor

HISTORY = 4  # steps
# costs no precision, but 1 of 18 and 4 of 32 powers of two
MARGIN: dict[Any, float] = {E4M3: 2.0, E5M2: 16.0}
WIDE = 8.0  # times the margin that a tensor has which has saturated
CALM = 16  # steps for which it has it
# A rounded scale may lift the amax slightly beyond the largest value.
ROUNDED_UP = 1 + 2**-20


@dataclass(frozen=True)
class DelayedOperand:
    """A tensor whose scale is delayed: the input (x) or the output's gradient (g) of a Linear."""

    name: str  # LINEAR.x or LINEAR.g
    linear: FP8KernelLinear
    side: Literal["x", "g"]

    @property
    def operand(self) -> Operand:
        recipe = self.linear.recipe
        return recipe.input if self.side == "x" else recipe.grad

    def make_buffers(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The Linear's scale () and amax () of this operand. Never moved afterwards: compiled code,
        a CUDA graph may hold their addresses."""
        scale = torch.zeros((), device=device)
        amax = torch.zeros((), device=device)
        if self.side == "x":
            self.linear.x_scale, self.linear.x_amax = scale, amax
        else:
            self.linear.g_scale, self.linear.g_amax = scale, amax
        return scale, amax


def delayed_operands(model: nn.Module) -> list[DelayedOperand]:
    """The inputs of all Linears with delayed scales, then their gradients. An input or a head's
    gradient whose scale follows from a bound is none."""
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FP8KernelLinear) and module.is_delayed
    }
    inputs = [
        DelayedOperand(f"{name}.x", linear, "x")
        for name, linear in linears.items()
        if not linear.is_bounded
    ]
    gradients = [
        DelayedOperand(f"{name}.g", linear, "g")
        for name, linear in linears.items()
        if not linear.has_fused_loss
    ]
    return inputs + gradients


class BoundedScales:
    """The scales of the inputs that come from a norm, where fp8.scaling=bounded; of none elsewhere.

    BF16 rounds weight, normalised value and product up by 2^-9 each at most, which E4M3 rounds down
    again: nothing is saturated."""

    def __init__(self, model: nn.Module):
        linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, FP8KernelLinear) and module.is_bounded
        }
        norms: list[Any] = [model.get_submodule(norm_before(name)) for name in linears]
        self._weights = [norm.weight for norm in norms]
        self._scales: list[torch.Tensor] = []
        for linear in linears.values():
            linear.x_scale = torch.zeros((), device=linear.weight.device)
            self._scales.append(linear.x_scale)
        self._operands = [linear.recipe.input for linear in linears.values()]
        largest_units = [math.sqrt(weight.numel()) for weight in self._weights]
        device = next(model.parameters()).device
        self._largest_units = torch.tensor(largest_units, device=device)  # (n,), a value a Linear

    @torch.no_grad()
    def begin(self) -> None:
        """Set the scales by the norms' weights as they are."""
        if not self._scales:
            return
        shards = [w.to_local() if is_dtensor(w) else w for w in self._weights]
        # of fewer rows than ranks some rank has none, of which there is no largest
        shards = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
        amaxes = torch.stack(torch._foreach_norm(shards, math.inf))
        if any(map(is_dtensor, self._weights)):
            amaxes = max_over_ranks(amaxes)
        bounds = self._largest_units * amaxes
        operand = self._operands[0]  # of all: a config names one recipe
        scales = scale_for(bounds, FORMATS[operand.format][0], operand.power_of_2)
        torch._foreach_copy_(self._scales, scales.unbind())


# the Linears behind a norm, by the end of their names -> the norm, in the place of that end
NORM_BEFORE = {"attn.qkv": "norm1", "mlp.gate_up": "norm2", "head": "norm"}


def norm_before(linear: str) -> str:
    """Name of the norm whose output the Linear of this name multiplies; "" where there is none."""
    for ending, norm in NORM_BEFORE.items():
        if linear == ending or linear.endswith(f".{ending}"):
            return linear.removesuffix(ending) + norm
    return ""


class DelayedScales:
    """The scales of the KernelLinears of `model` that are known before the pass; of none, where
    fp8.scaling=current. By all ranks alike.

    A scale covers a margin times the amaxes of the last HISTORY steps: no pass over a tensor has to
    end before its cast begins. Gradients are kept as those of a loss that is not scaled: its scale
    depends on ranks and targets. A run's first step has cscale's constants. An amax that is zero,
    infinite or, on any rank, NaN leaves no trace."""

    def __init__(self, model: nn.Module, ranks: int = 1):
        self._bounded = BoundedScales(model)
        operands = delayed_operands(model)
        formats = [operand.operand.format for operand in operands]
        device = next(model.parameters()).device
        buffers = [operand.make_buffers(device) for operand in operands]
        self._ranks = ranks
        self._names = [operand.name for operand in operands]
        self._scales = [scale for scale, _ in buffers]
        self._amaxes = [amax for _, amax in buffers]
        self._power_of_2 = any(operand.operand.power_of_2 for operand in operands)
        # all (n,), a value an operand
        self._largest = torch.tensor([FORMATS[format][0] for format in formats], device=device)
        self._margin = torch.tensor([MARGIN[format] for format in formats], device=device)
        is_grad = [operand.side == "g" for operand in operands]
        self._is_grad = torch.tensor(is_grad, dtype=torch.bool, device=device)
        self._saturated = torch.zeros(len(operands), dtype=torch.bool, device=device)
        # What a checkpoint stores, a row an operand: amaxes, newest first, and the number of steps
        # for which the margin is still wide.
        self._rows = torch.zeros(len(operands), HISTORY + 1, device=device)
        self._history = self._rows[:, :-1]
        self._wide_for = self._rows[:, -1]
        self.begin(1.0)

    def begin(self, loss_scale: float) -> None:
        """Set the scales of a step, or of an evaluation; `loss_scale` is what the step multiplies
        its summed loss by."""
        self._bounded.begin()
        if not self._names:
            return
        first = for_loss_scale(RECIPES["cscale"], loss_scale)
        widening = torch.where(self._wide_for > 0, WIDE, 1.0)
        unit = torch.where(self._is_grad, loss_scale, 1.0)
        reach = self._history.amax(1) * widening * unit
        learned = scale_for(reach * self._margin, self._largest, self._power_of_2)
        constant = torch.where(self._is_grad, 2.0**first.grad.exponent, 2.0**first.input.exponent)
        scales = torch.where(reach > 0, learned, constant)
        torch._foreach_copy_(self._scales, scales.unbind())
        torch._foreach_zero_(self._amaxes)

    @torch.no_grad()
    def end(self, loss_scale: float) -> torch.Tensor:
        """Enter the step's amaxes into the history; how many tensors were saturated in it on any
        rank, (), on the device."""
        if not self._names:
            return self._saturated.sum()
        amaxes = torch.stack(self._amaxes)
        if self._ranks > 1:
            amaxes = max_over_ranks(amaxes)
        amaxes = amaxes.nan_to_num(nan=0.0, posinf=math.inf)
        self._saturated.copy_(amaxes * torch.stack(self._scales) > self._largest * ROUNDED_UP)
        amaxes = amaxes / torch.where(self._is_grad, loss_scale, 1.0)
        is_usable = (amaxes > 0) & amaxes.isfinite()
        newest = torch.where(is_usable, amaxes, self._history.amax(1))
        self._history.copy_(torch.cat((newest[:, None], self._history[:, :-1]), 1))
        steps_left = (self._wide_for - 1).clamp(min=0)
        self._wide_for.copy_(torch.where(self._saturated, CALM, steps_left))
        return self._saturated.sum()

    def saturated(self) -> list[str]:
        """The tensors that were saturated in the step that end() has ended, as LINEAR.x and
        LINEAR.g; waits for the device."""
        flags = self._saturated.tolist()
        return [name for name, flag in zip(self._names, flags, strict=True) if flag]

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint stores, as JSON can hold it: a tensor's amaxes, newest first, and its
        steps with a wide margin."""
        return dict(zip(self._names, self._rows.tolist(), strict=True))

    def load(self, state: dict[str, list[float]] | None) -> None:
        """Go on from a state(); of None, or of a tensor that it lacks, without a history. The run
        had another recipe there."""
        empty = [0.0 for _ in range(HISTORY + 1)]
        rows = [(state or {}).get(name, empty) for name in self._names]
        self._rows.copy_(torch.tensor(rows).view_as(self._rows))
