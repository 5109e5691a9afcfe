"""Convert the selected Linears of a model: put one that multiplies in FP8 in the place of each."""

from dataclasses import replace

import torch
import torch.nn as nn

from fp8.delayed import norm_before
from fp8.head_loss import FP8Head, check_is_cross_entropy
from fp8.kernels import BF16KernelLinear, ConstantScaleLinear, FP8KernelLinear
from fp8.linears import EmulatedLinear, PrototypeLinear, torchao_linear
from fp8.producers import fuse_producers
from fp8.recipes import RECIPES, FP8Config, Operand, Recipe, for_loss_scale
from fp8.rounded_norm import RoundedNorm
from fp8.selection import Layer, implementation, is_native, select
from model import GPT, Linear, RMSNorm


def convert(
    model: nn.Module,
    config: FP8Config,
    loss_scale: float = 1.0,
    device_type: str = "cpu",
    has_kernels: bool | None = None,
) -> list[Layer]:
    """Convert the selected Linears of `model`; returns the verdict on every Linear. Weights, their
    names and hence checkpoints stay. Raises UserError as select() and implementation() do, and
    where the head's loss is another than the one that our kernels compute.

    loss_scale as in for_loss_scale(); device_type "cuda" or "cpu": where the model, perhaps on the
    meta device, will run; has_kernels as in select()."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    layers = select(model, config, gpu, has_kernels)
    for layer in layers:
        if layer.recipe is None:
            continue
        scaled = for_loss_scale(RECIPES[layer.recipe], loss_scale)
        recipe = replace(scaled, fast_backward=config.fast_backward)
        linear = model.get_submodule(layer.name)
        assert isinstance(linear, nn.Linear)
        if _computes_loss(layer, recipe, config):
            assert isinstance(model, GPT)
            check_is_cross_entropy(model.loss_of_logits)
        model.set_submodule(layer.name, converted(linear, layer, recipe, config, device_type))
        if recipe.norm:
            _round_norm_before(model, layer.name, recipe.norm)
    if config.scaling == "bounded" and isinstance(model, GPT):
        fuse_producers(model)
    return layers


def converted(
    linear: nn.Linear, layer: Layer, recipe: Recipe, config: FP8Config, device_type: str
) -> nn.Module:
    """What stands in the place of a Linear, by its verdict."""
    computed_by = implementation(recipe.name, layer.kernels, config.all_gather, device_type)
    if computed_by == "kernels":
        kernel_linear = FP8Head if _computes_loss(layer, recipe, config) else FP8KernelLinear
        is_bounded = config.scaling == "bounded" and norm_before(layer.name) != ""
        return kernel_linear(linear, recipe, config.scaling != "current", is_bounded)
    if computed_by == "torchao":
        return torchao_linear(linear, recipe, config, is_emulated=device_type == "cpu")
    if computed_by == "prototype":
        return PrototypeLinear(linear, recipe, is_native(recipe.name))
    if computed_by == "matmul":
        return ConstantScaleLinear(linear, recipe)
    return EmulatedLinear(linear, recipe)


def _round_norm_before(model: nn.Module, linear: str, operand: Operand) -> None:
    """Let the norm before the Linear of this name, if there is one, round its weight."""
    name = norm_before(linear)
    if name:
        norm = model.get_submodule(name)
        assert isinstance(norm, RMSNorm)
        model.set_submodule(name, RoundedNorm(norm, operand))


def _computes_loss(layer: Layer, recipe: Recipe, config: FP8Config) -> bool:
    """Whether a Linear is a head whose loss our kernels compute with its matmuls: where the config
    names them, because the scale of its gradient is then another one than torchao's."""
    is_asked_for = layer.kernels and config.kernels is True
    return is_asked_for and layer.name == "head" and not recipe.has_bf16_weight_grad


def keep_bf16_copies(model: nn.Module) -> None:
    """Let every Linear that FP8 leaves alone cast its weight once a step too. Not under FSDP2,
    which casts what it gathers."""
    plain = {name: module for name, module in model.named_modules() if type(module) is Linear}
    for name, linear in plain.items():
        model.set_submodule(name, BF16KernelLinear(linear))
