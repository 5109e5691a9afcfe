"""Convert the selected Linears of a model."""

import logging
import types
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from fp8.kernels import _token_losses, _use_kernels
from fp8.linears import QuantisedLinear
from fp8.recipes import EMULATED, NATIVE_ON, RECIPES, FP8Config, for_loss_scale
from fp8.selection import Layer, _is_native, select


def convert(
    model: nn.Module, config: FP8Config, loss_scale: float = 1.0, device_type: str = "cpu"
) -> list[Layer]:
    """Convert the selected Linears of `model` in place; returns the verdict on every Linear. Raises
    as select() does.

    loss_scale as in for_loss_scale(); device_type "cuda" or "cpu": where the model, perhaps on the
    meta device, will run."""
    is_on_cpu = device_type == "cpu"
    layers = select(
        model, config, torch.cuda.get_device_name() if torch.cuda.is_available() else None
    )
    for layer in layers:
        if layer.recipe is None:
            continue
        module: Any = model.get_submodule(layer.name)
        recipe = replace(
            for_loss_scale(RECIPES[layer.recipe], loss_scale), fast_backward=config.fast_backward
        )
        if layer.kernels:
            _use_kernels(module, recipe, config.scaling == "delayed")
            if layer.name == "head" and not recipe.has_bf16_weight_grad:
                module.has_bound = True
                model.token_losses = types.MethodType(_token_losses, model)  # type: ignore[assignment]  # of this model alone
        # torchao alone can gather float8; on a CPU its own emulation then multiplies.
        elif (
            layer.recipe in ("cscale", *NATIVE_ON, *EMULATED) or is_on_cpu and not config.all_gather
        ):
            module.__class__, module.recipe, module.is_native = (
                QuantisedLinear,
                recipe,
                _is_native(layer.recipe),
            )
            if module.is_native:
                # which torch 2.11 does not trace by itself
                torch.compiler.allow_in_graph(torch._scaled_mm_v2)
        else:
            model.set_submodule(layer.name, _by_torchao(module, layer.recipe, config, is_on_cpu))
    return layers


def _by_torchao(module: nn.Module, recipe: str, settings: FP8Config, emulate: bool) -> nn.Module:
    """torchao's Linear of a recipe; tensorwise_gw_hp and amax are its tensorwise with one setting
    changed."""
    # of compiled extensions for other hardware, of a deprecated call of its own
    logging.disable(logging.WARNING)
    import torchao.float8 as float8  # here: BF16 runs and readers of checkpoints never load it

    logging.disable(logging.NOTSET)
    off = {
        f"cast_config_{operand}_for_grad_weight": float8.CastConfig(
            scaling_type=float8.config.ScalingType.DISABLED
        )
        for operand in ("input", "grad_output")
    }  # one each: torchao changes them
    changes = {"amax": {"round_scales_to_power_of_2": True}, "tensorwise_gw_hp": off}.get(
        recipe, {}
    )
    config = float8.Float8LinearConfig.from_recipe_name(
        recipe if recipe.startswith("rowwise") else "tensorwise"
    )
    backward = float8.Float8GemmConfig(use_fast_accum=settings.fast_backward)
    return float8.convert_to_float8_training(
        module,
        config=replace(
            config,
            **changes,
            enable_fsdp_float8_all_gather=settings.all_gather,
            emulate=emulate,
            gemm_config_grad_input=backward,
            gemm_config_grad_weight=backward,
        ),
    )
