"""Choose the Linears whose matmuls run in FP8, swap them, say so.

FP8 is a property of the run, not of the model: the swap changes how a Linear multiplies, while its name, its fp32
weight and hence every checkpoint stay as they are. Each converted Linear does three matmuls a step; torchao scales
every operand from its current largest magnitude (dynamic scaling) to one of Hopper's two formats, E4M3 or E5M2
(FP8 formats for deep learning, 2209.05433):

    recipe               output y = x W'   input gradient = g W   weight gradient = g' x   scales
    tensorwise           E4M3 x E4M3       E5M2 x E4M3            E5M2 x E4M3              one per tensor
    rowwise              E4M3 x E4M3       E4M3 x E4M3            E4M3 x E4M3              one per row, powers of 2
    rowwise_with_gw_hp   E4M3 x E4M3       E4M3 x E4M3            BF16 x BF16              one per row, powers of 2

On a CPU the same recipes run through torch's own float8 matmul: the numerics are real, the speed is not.
"""

import contextlib
import fnmatch
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn

from model import Linear
from runtime.config import ConfigError, FP8Config

# Compute capability from which torch has a float8 matmul with such scales (ATen's scaled_mm checks).
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}


@dataclass(frozen=True)
class Layer:
    """What becomes of one Linear: converted where `reason` is None, else left in BF16 for that reason."""
    name: str
    shape: tuple[int, int]      # (inputs K, outputs N)
    params: int
    reason: str | None


def select(model: nn.Module, config: FP8Config) -> list[Layer]:
    """The verdict on every Linear of `model`, which may be on the meta device.

    Raises ConfigError where a skip pattern matches nothing (a typo there once quantised a head for months:
    torchtitan#4008), where a chosen Linear's dimensions are no multiples of 16 (torch's CUDA float8 matmul needs
    them, its CPU one does not complain), or where nothing is left to convert.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for pattern in config.skip:
        if not any(_matches(name, pattern) for name in linears):
            raise ConfigError(f"fp8.skip={pattern!r} matches no Linear; there are: {', '.join(_patterns(linears))}")
    layers = []
    for name, module in linears.items():
        shape = (module.in_features, module.out_features)
        reason = None
        if config.recipe == "off":
            reason = "fp8.recipe=off"
        elif name == "head" and not config.head:
            reason = "head (fp8.head=false)"
        elif pattern := next((p for p in config.skip if _matches(name, p)), None):
            reason = f"fp8.skip={pattern}"
        elif any(n % 16 for n in shape):
            raise ConfigError(f"fp8.recipe={config.recipe} cannot convert {name} of {shape[0]} x {shape[1]}: FP8 matmuls need "
                              f"multiples of 16; change the model's width or add fp8.skip={name}")
        layers.append(Layer(name, shape, module.weight.numel(), reason))
    if config.recipe != "off" and not any(layer.reason is None for layer in layers):
        raise ConfigError(f"fp8.recipe={config.recipe} is left with nothing to convert: fp8.skip takes every Linear; "
                          f"skip fewer or set fp8.recipe=off")
    return layers


def convert(model: nn.Module, config: FP8Config) -> list[Layer]:
    """Swap the selected Linears of `model` in place; returns the verdict on every Linear. Errors: see select()."""
    layers = select(model, config)
    if config.recipe != "off":
        torchao = _float8()
        chosen = {layer.name for layer in layers if layer.reason is None}
        before = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        torchao.convert_to_float8_training(
            model, config=torchao.Float8LinearConfig.from_recipe_name(config.recipe),
            module_filter_fn=lambda _, name: name in chosen)
        done = {name for name, module in model.named_modules() if isinstance(module, _float8_linear())}
        assert done == chosen, f"asked for {chosen}, converted {done}"
        assert before == {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    return layers


def check_hardware(config: FP8Config, device: torch.device) -> None:
    """Raise ConfigError where `device` has no matmul for the recipe; training on in BF16 would be a lie."""
    if config.recipe != "off" and device.type == "cuda":
        refuse_below(config.recipe, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def refuse_below(recipe: str, capability: tuple[int, int], gpu: str) -> None:
    """Raise ConfigError where a GPU of this compute capability cannot run `recipe`."""
    need = CAPABILITY[recipe]
    if capability < need:
        raise ConfigError(f"fp8.recipe={recipe} needs a GPU of compute capability {need[0]}.{need[1]} or later, but {gpu} has "
                          f"{capability[0]}.{capability[1]}: use fp8.recipe=off (BF16) here, or an H100-class GPU")


def table(layers: list[Layer], recipe: str, device_type: str) -> list[str]:
    """The verdicts as lines for people: one per group of like-named Linears, then the sum."""
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((_pattern(layer.name), layer.shape, layer.reason), []).append(layer)
    lines = []
    for (pattern, (k, n), reason), members in groups.items():
        verdict = f"-> {recipe}" if reason is None else f"kept BF16: {reason}"
        lines.append(f"fp8: {pattern:20} {k:6d} x {n:<6d} x{len(members):<3d} {verdict}")
    converted = [layer for layer in layers if layer.reason is None]
    share = sum(layer.params for layer in converted) / sum(layer.params for layer in layers)
    lines.append(f"fp8: {len(converted)} of {len(layers)} Linears, {share:.1%} of the matmul parameters, in FP8")
    if converted and device_type == "cpu":
        lines.append("fp8: this CPU computes the float8 matmuls without FP8 units: real numerics, slower than BF16")
    return lines


@contextlib.contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the block, every converted Linear of `model` multiplies in BF16, from the same weights, uncompiled.

    Both arms of a comparison are measured this way, so that a gap between them is a gap between their weights. The
    class is swapped, not the module: names, Parameters, sharding and hooks stay as they are.
    """
    modules = [m for m in model.modules() if _is_float8_linear(m)]
    classes = [type(m) for m in modules]
    for module in modules:
        module.__class__ = Linear
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls


def _matches(name: str, pattern: str) -> bool:
    """'layers.0.*' and 'layers.0.attn.qkv' are whole names; 'attn.out' is the tail of one."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _patterns(names) -> list[str]:
    return list(dict.fromkeys(_pattern(name) for name in names))


def _is_float8_linear(module: nn.Module) -> bool:
    return type(module).__name__ == "Float8Linear" and isinstance(module, _float8_linear())


def _float8_linear() -> type:
    return _float8().float8_linear.Float8Linear


def _float8():
    """torchao.float8, imported when first needed: BF16 runs and readers of checkpoints never load it."""
    # It warns of compiled extensions for other hardware and of a deprecated call of its own: nothing a user can change.
    logs = {log: log.level for log in map(logging.getLogger, ("torchao", "torch.utils._pytree"))}
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        import torchao.float8
        import torchao.float8.float8_linear
    finally:
        for log, level in logs.items():
            log.setLevel(level)
    return torchao.float8
