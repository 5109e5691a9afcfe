"""Lasting copies of weights, and lasting gradients, of the Linears in fp8/kernels.py: made, renewed
and freed here. Training calls fp8.precision.Precision, which calls this."""

import math
from typing import Any

import torch
import torch.nn as nn

from fp8.kernels import BF16KernelLinear, FP8KernelLinear, KernelLinear, cast_into, empty_layouts
from fp8.rounding import FORMATS, scale_for
from fp8.sharded import is_wrapped, max_over_ranks
from lib.sharding import is_fsdp_module


def kernel_linears(model: nn.Module) -> list[KernelLinear]:
    return [module for module in model.modules() if isinstance(module, KernelLinear)]


# -------------------------------------------------------------------------------- copies of weights


@torch.no_grad()
def refresh_weight_copies(model: nn.Module) -> None:
    """Recompute the weights' FP8 and BF16 copies, and, by one all-reduce, the scales of weights
    gathered as float8: whenever the weights have changed, between two passes."""
    if any(is_wrapped(p) for p in model.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    linears = kernel_linears(model)
    for linear in linears:
        linear.version = linear.weight._version
    fp8_linears = [linear for linear in linears if isinstance(linear, FP8KernelLinear)]
    bf16_linears = [linear for linear in linears if isinstance(linear, BF16KernelLinear)]
    if fp8_linears:
        _refresh_fp8_copies(model, fp8_linears)
    if bf16_linears:
        _refresh_bf16_copies(model, bf16_linears)


def _refresh_fp8_copies(model: nn.Module, linears: list[FP8KernelLinear]) -> None:
    """Scales over all weights at once where that is one kernel: launches for a hundred Linears
    would take the host longer than the GPU."""
    # FSDP2 frees gathered weights: there only the scales stay
    is_sharded = is_fsdp_module(model)
    operand = linears[0].recipe.weight  # of all: what `auto` mixes rounds weights alike
    format: Any = operand.format
    amaxes = _amaxes_of_shards(model, linears) if is_sharded else _amaxes(linears)
    scales = scale_for(torch.stack(amaxes), FORMATS[format][0], operand.power_of_2).unbind()
    lasting_scales = []
    for linear, scale in zip(linears, scales, strict=True):
        if linear.scale is None:
            linear.scale = torch.empty_like(scale)
            if not is_sharded:
                linear.q, linear.qt = empty_layouts(linear.weight, format)
        if linear.q is not None and linear.qt is not None:
            cast_into(linear.weight, scale, linear.q, linear.qt)
        lasting_scales.append(linear.scale)
    torch._foreach_copy_(lasting_scales, scales)


def _amaxes(linears: list[FP8KernelLinear]) -> list[torch.Tensor]:
    """The largest magnitude () of each weight."""
    return list(torch._foreach_norm([linear.weight for linear in linears], math.inf))


def _amaxes_of_shards(model: Any, linears: list[FP8KernelLinear]) -> list[torch.Tensor]:
    """The largest magnitude () of each weight as FSDP2 gathers it: blocks in BF16, whose rounding
    keeps the order of magnitudes, the head in fp32."""
    of_rank = []
    for linear in linears:
        weight: Any = linear.weight  # a DTensor
        shard = weight.to_local()
        of_rank.append(shard.abs().amax() if shard.numel() else shard.new_zeros(()))
    amaxes = max_over_ranks(torch.stack(of_rank))
    in_bf16 = amaxes.bfloat16().float()
    return [
        amax if linear is model.head else rounded
        for linear, amax, rounded in zip(linears, amaxes, in_bf16, strict=True)
    ]


def _refresh_bf16_copies(model: Any, linears: list[BF16KernelLinear]) -> None:
    copies = []
    for linear in linears:
        if linear.q is None:
            linear.q = torch.empty_like(linear.weight, dtype=model.compute_dtype)
        copies.append(linear.q)
    torch._foreach_copy_(copies, [linear.weight for linear in linears])


# ---------------------------------------------------------------------------------------- gradients


def keep_gradients(model: Any) -> None:
    """Give the blocks' weights a gradient that lasts where the matmul itself can add to it, which
    is half the bytes: in BF16, and in FP8 on GPUs from torch 2.15 on. zero_gradients() then takes
    the place of the optimizer's zero_grad().

    Not the head, which may be called in pieces and shares its weight; not under FSDP2, which
    reduces what a pass returns."""
    for linear in kernel_linears(model.layers):
        if linear.can_add_weight_grad:
            linear.total = torch.empty_like(linear.weight)
    zero_gradients(model)


def zero_gradients(model: nn.Module) -> None:
    """Free all gradients, or fill those of keep_gradients() with zeros."""
    model.zero_grad()
    totals = []
    for linear in kernel_linears(model):
        if linear.total is not None:
            linear.weight.grad = linear.total
            totals.append(linear.total)
    if totals:
        torch._foreach_zero_(totals)
