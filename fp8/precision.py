"""What a precision asks of whoever trains a model: the one object between FP8 and a training loop.

    precision.before_step(loss_scale)     scales of this step
        precision.set_position(tokens)    before each micro-batch
        model(x, y) .. backward()
    n_saturated = precision.after_passes()
    optimizer.step()
    precision.after_update()              copies of the weights; also after init and a restore
    precision.zero_gradients()

Every call is right in BF16 too, and does nothing where nothing is due. Order that is broken is an
AssertionError of before_step(), or of the pass where it is not compiled."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fp8.bf16_in_fp32 import MatmulInFp32
from fp8.copies import keep_gradients, kernel_linears, refresh_weight_copies, zero_gradients
from fp8.delayed import DelayedScales
from fp8.linears import set_position
from fp8.rounded_norm import RoundedNorm
from fp8.sharded import is_wrapped, reshard, unwrap


class Precision:
    """The precision of `model`, whose Linears convert() has replaced and which is in memory."""

    def __init__(self, model: nn.Module, seed: int = 0, ranks: int = 1):
        self.model = model
        self.seed = seed  # of the noise of stochastic rounding
        self.scales = DelayedScales(model, ranks)
        self._loss_scale = 1.0

    # ---------------------------------------------------------------------------- around one step

    def before_step(self, loss_scale: float) -> None:
        """Set the scales of a step, or of an evaluation; `loss_scale` is what the step multiplies
        its summed loss by."""
        for linear in kernel_linears(self.model):
            linear.check_copies()
        self._loss_scale = loss_scale
        self.scales.begin(loss_scale)

    def set_position(self, position: int) -> None:
        """Say which number among the run's tokens the next pass begins with: the noise of
        stochastic rounding follows from it."""
        set_position(self.model, position, self.seed)

    def after_passes(self) -> torch.Tensor:
        """Learn the scales of later steps; how many tensors were beyond their scale on any rank,
        (), on the device."""
        return self.scales.end(self._loss_scale)

    def after_update(self) -> None:
        """Renew the copies of the weights, which have changed: by the optimizer, by an
        initialisation, by a checkpoint."""
        refresh_weight_copies(self.model)

    def zero_gradients(self) -> None:
        """Free all gradients, or fill those that last with zeros; in place of the optimizer's
        zero_grad()."""
        zero_gradients(self.model)

    # --------------------------------------------------------------------------- around the passes

    def keep_gradients(self) -> None:
        """Let weight gradients last from here on, and matmuls add to them: for several
        micro-batches a step on one process."""
        keep_gradients(self.model)

    def reshard(self) -> None:
        """Free gathered weights, before shards are changed by anything but the optimizer."""
        reshard(self.model)

    def saturated(self) -> list[str]:
        """The tensors that after_passes() has counted, by name; waits for the device."""
        return self.scales.saturated()

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint stores; {} where no scale is delayed."""
        return self.scales.state()

    def load(self, state: dict[str, list[float]] | None) -> None:
        """Go on from a state(), or from None, that of another precision."""
        self.scales.load(state)

    def in_bf16(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, every Linear multiplies in BF16."""
        return in_bf16(self.model)


# ------------------------------------------------------------------------------ evaluation in BF16


class PlainLinear(nn.Module):
    """Multiplies in BF16 by the weight of another Linear, as it is at each call: FSDP2 puts
    gathered weights into that one."""

    def __init__(self, linear: nn.Linear, is_in_fp32: bool):
        super().__init__()
        # in a tuple: a child would be one more name for its weight
        self._linear = (linear,)
        self._is_in_fp32 = is_in_fp32
        # FSDP2 would gather float8
        is_gathered_as_float8 = is_wrapped(linear.weight)
        self._shard: Any = unwrap(linear.weight) if is_gathered_as_float8 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._shard is not None:
            return F.linear(x, self._shard.to(x.dtype).full_tensor())
        weight = self._linear[0].weight
        if self._is_in_fp32:
            rows = x.reshape(-1, x.shape[-1])  # (M, K)
            return MatmulInFp32.apply(rows, weight).view(*x.shape[:-1], -1)
        return F.linear(x, weight.to(x.dtype))


@contextlib.contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the block, every Linear of `model` multiplies in BF16, from the same weights, and no
    norm rounds its own; uncompiled. A gap between two arms measured so is one between their
    weights. A run with parallel.cpu_fp32 is evaluated by its own matmuls of BF16 values."""
    modules = list(model.named_modules())
    linears = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    # not those that a block around this one has switched off
    norms = [
        module for _, module in modules if isinstance(module, RoundedNorm) and module.is_rounded
    ]
    is_in_fp32 = getattr(model, "is_in_fp32", False)
    reshard(model)  # gathered weights have lost their fp32 shards
    for name, linear in linears.items():
        model.set_submodule(name, PlainLinear(linear, is_in_fp32))
    for norm in norms:
        norm.is_rounded = False
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for name, linear in linears.items():
            model.set_submodule(name, linear)
        for norm in norms:
            norm.is_rounded = True
