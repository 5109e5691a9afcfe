"""Which Linears FP8 converts, and what the hardware can do."""

import fnmatch
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from fp8.recipes import (
    CANDIDATES,
    EMULATED,
    FP8_MULTIPLES,
    FP8_SCALED_MM,
    KERNEL_CANDIDATES,
    NATIVE_ON,
    RECIPES,
    WITH_KERNELS,
    FP8Config,
    Recipe,
    for_loss_scale,
)
from fp8.speed import choose, load_table
from lib.errors import UserError


@dataclass(frozen=True)
class Layer:
    """The verdict on one Linear: converted by `recipe`, or left in BF16."""

    name: str
    shape: tuple[int, int]  # (inputs K, outputs N)
    recipe: str | None  # None where left in BF16
    why: str  # it is left there, or `auto` chose the recipe; "" where the config named it
    kernels: bool  # converted to our kernels, not torchao's

    @property
    def params(self) -> int:
        return self.shape[0] * self.shape[1]


def select(model: nn.Module, config: FP8Config, gpu: str | None = None) -> list[Layer]:
    """The verdict on every Linear of `model`, which may be on the meta device; `gpu` is the name
    that `auto` looks up.

    Raises UserError where config contradicts itself, a pattern matches nothing (a typo there once
    quantised a head for months: torchtitan#4008), dimensions do not suit FP8 matmuls, or nothing is
    left to convert, which only `auto` may do."""
    for problem in config.problems():
        raise UserError(problem)
    linears = {
        name: (m.in_features, m.out_features)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    }
    for field in ("include", "skip"):
        for pattern in getattr(config, field):
            if not any(_matches(name, pattern) for name in linears):
                raise UserError(
                    f"fp8.{field}={pattern!r} matches no Linear; there are:"
                    f" {', '.join(dict.fromkeys(map(_pattern, linears)))}"
                )
    timings, layers = load_table() if config.recipe == "auto" else {}, []
    # -1: in none
    blocks = {
        name: int(name.split(".")[1]) if name.startswith("layers.") else -1 for name in linears
    }
    n_blocks = 1 + max(blocks.values(), default=-1)
    for name, shape in linears.items():
        block, kernels = blocks[name], config.kernels
        skip = next((pattern for pattern in config.skip if _matches(name, pattern)), None)
        why = next(
            (
                why
                for is_so, why in (
                    (config.recipe == "off", "fp8.recipe=off"),
                    (name == "head" and not config.head, "head (fp8.head=false)"),
                    (skip, f"fp8.skip={skip}"),
                    (
                        config.include
                        and not any(_matches(name, pattern) for pattern in config.include),
                        "not in fp8.include",
                    ),
                    (0 <= block < config.first_bf16, f"fp8.first_bf16={config.first_bf16}"),
                    (
                        block >= max(0, n_blocks - config.last_bf16),
                        f"fp8.last_bf16={config.last_bf16}",
                    ),
                    (
                        config.recipe == "auto" and any(n % 16 for n in shape),
                        "not a multiple of 16",
                    ),
                )
                if is_so
            ),
            "",
        )
        recipe: Any = None if why else config.recipe
        if recipe == "auto":
            chosen, why = choose(
                timings, gpu, *shape, CANDIDATES + (KERNEL_CANDIDATES if kernels else ())
            )
            recipe, kernels = (
                chosen and chosen.removesuffix(WITH_KERNELS),
                WITH_KERNELS in (chosen or ""),
            )
        layers.append(Layer(name, shape, recipe, why, bool(recipe) and kernels))
    if unfit := [
        layer
        for layer in layers
        if layer.recipe and any(n % FP8_MULTIPLES[layer.recipe] for n in layer.shape)
    ]:
        raise UserError(
            _told_unfit(
                unfit,
                config,
                is_all=len(unfit) == sum(layer.recipe is not None for layer in layers),
            )
        )
    if config.recipe not in ("off", "auto") and not any(layer.recipe for layer in layers):
        raise UserError(
            f"fp8.recipe={config.recipe} is left with nothing to convert: keep fewer Linears in"
            " BF16 by fp8.include, fp8.skip, fp8.first_bf16 and fp8.last_bf16, or set"
            " fp8.recipe=off"
        )
    return layers


def _told_unfit(unfit: list[Layer], config: FP8Config, is_all: bool) -> str:
    """The sentence for Linears whose dimensions FP8 matmuls do not take, alike ones once; is_all:
    no other would be converted."""
    alike = Counter((_pattern(layer.name), layer.shape) for layer in unfit)
    told = [
        f"{pattern} of {inputs} x {outputs}" + (f" ({count} Linears)" if count > 1 else "")
        for (pattern, (inputs, outputs)), count in alike.items()
    ]
    multiple = max(FP8_MULTIPLES[layer.recipe] for layer in unfit if layer.recipe)
    # A pattern of a block's Linear skips it in all blocks: in those where it fits, too, it has the
    # same shape.
    skipped = dict.fromkeys(
        (*config.skip, *(pattern.removeprefix("layers.*.") for pattern, _ in alike))
    )
    remedy = "" if is_all else f" or give fp8.skip={','.join(skipped)}"
    return (
        f"fp8.recipe={config.recipe} cannot convert {', '.join(told)}: FP8 matmuls need multiples"
        f" of {multiple}; change the model's width{remedy or ', or set fp8.recipe=off'}"
    )


def _matches(name: str, pattern: str) -> bool:
    """'layers.0.*' and 'layers.0.attn.qkv' are whole names; 'attn.out' is the tail of one."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def recipes(layers: list[Layer], loss_scale: float) -> dict[str, Recipe]:
    """Name of each converted Linear -> how its operands are rounded."""
    return {
        layer.name: for_loss_scale(RECIPES[layer.recipe], loss_scale)
        for layer in layers
        if layer.recipe
    }


def table(layers: list[Layer], recipe: str, device_type: str) -> list[str]:
    """The verdicts as printed lines: one per group of like-named Linears, the total, then
    warnings."""
    verdicts = [
        (
            f"-> {layer.recipe}" + f" ({notes})" * bool(notes)
            if layer.recipe
            else f"kept BF16: {layer.why}"
        )
        for layer in layers
        for notes in [", ".join(filter(None, ["kernels" * layer.kernels, layer.why]))]
    ]
    groups = Counter(
        (_pattern(layer.name), *layer.shape, verdict)
        for layer, verdict in zip(layers, verdicts, strict=True)
    )
    lines = [
        f"fp8: {pattern:20} {k:6d} x {n:<6d} x{count:<3d} {verdict}"
        for (pattern, k, n, verdict), count in groups.items()
    ]
    converted = [layer for layer in layers if layer.recipe]
    share = sum(layer.params for layer in converted) / sum(layer.params for layer in layers)
    lines.append(
        f"fp8: {len(converted)} of {len(layers)} Linears, {share:.1%} of the matmul parameters,"
        " in FP8"
    )
    if recipe == "auto" and not converted:
        lines.append("fp8: auto found nothing that FP8 would make faster here: THIS RUN IS BF16")
    is_on_cpu = converted and device_type == "cpu"
    if is_on_cpu or recipe in EMULATED or recipe in NATIVE_ON and not _is_native(recipe):
        lines.append(
            f"fp8: emulated on this {'CPU' if is_on_cpu else 'GPU'}: real numerics, slower than"
            " BF16"
        )
    return lines


def check_hardware(config: FP8Config, device: torch.device) -> None:
    """Raise UserError where `device` cannot run the recipe: training on in BF16 would be silent."""
    need = (9, 0) if config.recipe.startswith("rowwise") else (8, 9)  # ATen's scaled_mm checks
    if (
        device.type == "cuda"
        and config.recipe in FP8_SCALED_MM
        and (have := torch.cuda.get_device_capability(device)) < need
    ):
        raise UserError(
            f"fp8.recipe={config.recipe} needs a GPU of compute capability {need[0]}.{need[1]} or"
            f" later, but {torch.cuda.get_device_name(device)} has {have[0]}.{have[1]}: use"
            " fp8.recipe=off (BF16) here"
        )


def _is_native(recipe: str) -> bool:
    """Whether the GPU here multiplies by `recipe`, which torchao's prototypes compute, itself."""
    return (
        recipe in NATIVE_ON
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] in NATIVE_ON[recipe]
    )
