"""Which Linears FP8 converts, each with its reason; who computes a recipe here; hardware that is
refused."""

import fnmatch
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn

from fp8.recipes import (
    CANDIDATES,
    KERNEL_CANDIDATES,
    RECIPE_OF_CANDIDATE,
    RECIPES,
    FP8Config,
    OnGPU,
    Recipe,
    for_loss_scale,
    multiple_of,
    names_where,
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

    @property
    def verdict(self) -> str:
        """As the start of a run prints it."""
        if not self.recipe:
            return f"kept BF16: {self.why}"
        notes = ["kernels"] if self.kernels else []
        if self.why:
            notes.append(self.why)
        return f"-> {self.recipe} ({', '.join(notes)})" if notes else f"-> {self.recipe}"


# --------------------------------------------------------------------------------------- selection


@dataclass(frozen=True)
class Casting:
    """Who casts the Linears that FP8 converts: what fp8.kernels comes to."""

    is_ours: bool  # our kernels
    why: str

    def describe(self) -> str:
        """The line that the start of a run prints."""
        verb = "cast" if self.is_ours else "do not cast"
        return f"fp8: our kernels {verb}: {self.why}"


def casting(config: FP8Config, device_type: str, has_whole_weights: bool) -> Casting:
    """Who casts on a kind of device. has_whole_weights: each rank holds all of every weight, so
    that copies of it last a step."""
    if config.kernels != "auto":
        return Casting(config.kernels, f"fp8.kernels={str(config.kernels).lower()}")
    if config.scaling != "current":
        return Casting(True, f"fp8.scaling={config.scaling} needs them")
    if config.all_gather:
        return Casting(False, "fp8.all_gather=true gathers weights as float8")
    if config.recipe != "auto" and config.recipe not in names_where("has_kernels"):
        return Casting(False, f"fp8.recipe={config.recipe} has none")
    if device_type == "cpu":
        return Casting(False, "a CPU emulates FP8")
    if not has_whole_weights:
        return Casting(False, "weights are sharded, and would be cast in every micro-batch")
    return Casting(True, "each rank holds whole weights, which are cast once a step")


def select(
    model: nn.Module,
    config: FP8Config,
    gpu: str | None = None,
    has_kernels: bool | None = None,
) -> list[Layer]:
    """The verdict on every Linear of `model`, which may be on the meta device; `gpu` is the name
    that `auto` looks up. has_kernels: Casting.is_ours; None: only where fp8.kernels=true.

    Raises UserError where config contradicts itself, a pattern matches nothing (a typo there once
    quantised a head for months: torchtitan#4008), dimensions do not suit FP8 matmuls, or nothing is
    left to convert, which only `auto` may do."""
    for problem in config.problems():
        raise UserError(problem)
    if has_kernels is None:
        has_kernels = config.kernels is True
    shapes = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    _check_patterns(config, shapes)
    layers = _layers(shapes, config, gpu, has_kernels)
    _check_sizes(layers, config)
    _check_that_one_is_converted(layers, config)
    return layers


def _layers(
    shapes: dict[str, tuple[int, int]], config: FP8Config, gpu: str | None, has_kernels: bool
) -> list[Layer]:
    """The verdict on each Linear. shapes: name -> (in, out) of a Linear."""
    n_blocks = 1 + max((_block_of(name) for name in shapes), default=-1)
    timings = load_table() if config.recipe == "auto" else {}
    layers = []
    for name, shape in shapes.items():
        reason = _reason_to_keep_bf16(name, shape, n_blocks, config)
        if reason:
            layers.append(Layer(name, shape, None, reason, kernels=False))
        elif config.recipe == "auto":
            layers.append(_choose(name, shape, has_kernels, gpu, timings))
        else:
            layers.append(Layer(name, shape, config.recipe, "", has_kernels))
    return layers


def _check_that_one_is_converted(layers: list[Layer], config: FP8Config) -> None:
    """Raise UserError where a recipe is asked for and no Linear has one."""
    if config.recipe in ("off", "auto"):
        return
    if not any(layer.recipe for layer in layers):
        raise UserError(
            f"fp8.recipe={config.recipe} is left with nothing to convert: keep fewer Linears in"
            " BF16 by fp8.include, fp8.skip, fp8.first_bf16 and fp8.last_bf16, or set"
            " fp8.recipe=off"
        )


def _reason_to_keep_bf16(
    name: str, shape: tuple[int, int], n_blocks: int, config: FP8Config
) -> str:
    """Why the config leaves a Linear in BF16; "" where it does not."""
    if config.recipe == "off":
        return "fp8.recipe=off"
    if name == "head" and not config.head:
        return "head (fp8.head=false)"
    skipping = _first_match(name, config.skip)
    if skipping is not None:
        return f"fp8.skip={skipping}"
    if config.include and _first_match(name, config.include) is None:
        return "not in fp8.include"
    block = _block_of(name)
    if 0 <= block < config.first_bf16:
        return f"fp8.first_bf16={config.first_bf16}"
    if block >= max(0, n_blocks - config.last_bf16):
        return f"fp8.last_bf16={config.last_bf16}"
    if config.recipe == "auto" and any(size % multiple_of("auto") for size in shape):
        return f"not a multiple of {multiple_of('auto')}"
    return ""


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if _matches(name, pattern)), None)


def _choose(
    name: str, shape: tuple[int, int], has_kernels: bool, gpu: str | None, timings: dict
) -> Layer:
    """What fp8.recipe=auto makes of a Linear on `gpu`."""
    candidates = CANDIDATES + (KERNEL_CANDIDATES if has_kernels else ())
    label, reason = choose(timings, gpu, *shape, candidates)
    if label is None:
        return Layer(name, shape, None, reason, kernels=False)
    return Layer(name, shape, RECIPE_OF_CANDIDATE[label], reason, label in KERNEL_CANDIDATES)


def _check_patterns(config: FP8Config, names: Iterable[str]) -> None:
    """Raise UserError where a pattern matches no Linear."""
    for field, patterns in (("include", config.include), ("skip", config.skip)):
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in names):
                linears = dict.fromkeys(map(_pattern, names))
                raise UserError(
                    f"fp8.{field}={pattern!r} matches no Linear; there are: {', '.join(linears)}"
                )


def _check_sizes(layers: list[Layer], config: FP8Config) -> None:
    """Raise UserError where the dimensions of a Linear do not suit its recipe; alike ones are named
    once."""
    converted = [layer for layer in layers if layer.recipe]
    unfit = [layer for layer in converted if any(size % _multiple(layer) for size in layer.shape)]
    if not unfit:
        return
    counts = Counter((_pattern(layer.name), layer.shape) for layer in unfit)
    shapes = [_shape_in_words(pattern, shape, n) for (pattern, shape), n in counts.items()]
    multiple = max(map(_multiple, unfit))
    # A pattern of a block's Linear skips it in all blocks: in those where it fits, too, it has the
    # same shape.
    patterns = [pattern.removeprefix("layers.*.") for pattern, _ in counts]
    skipped = ",".join(dict.fromkeys((*config.skip, *patterns)))
    remedy = f" or give fp8.skip={skipped}"
    if len(unfit) == len(converted):  # that would leave nothing
        remedy = ", or set fp8.recipe=off"
    raise UserError(
        f"fp8.recipe={config.recipe} cannot convert {', '.join(shapes)}: FP8 matmuls need multiples"
        f" of {multiple}; change the model's width{remedy}"
    )


def _multiple(layer: Layer) -> int:
    assert layer.recipe is not None
    return multiple_of(layer.recipe)


def _shape_in_words(pattern: str, shape: tuple[int, int], count: int) -> str:
    inputs, outputs = shape
    words = f"{pattern} of {inputs} x {outputs}"
    return f"{words} ({count} Linears)" if count > 1 else words


def _block_of(name: str) -> int:
    """The number of the block that a Linear is in; -1: in none."""
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


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


def verdict_lines(
    layers: list[Layer], recipe: str, device_type: str, cast_by: Casting | None = None
) -> list[str]:
    """The verdicts as printed lines: one per group of like-named Linears, then total_lines()."""
    groups = Counter((_pattern(layer.name), *layer.shape, layer.verdict) for layer in layers)
    lines = [
        f"fp8: {pattern:20} {k:6d} x {n:<6d} x{count:<3d} {verdict}"
        for (pattern, k, n, verdict), count in groups.items()
    ]
    return lines + total_lines(layers, recipe, device_type, cast_by)


def total_lines(
    layers: list[Layer], recipe: str, device_type: str, cast_by: Casting | None = None
) -> list[str]:
    """How much is in FP8; what else the recipe rounds, who casts, where that is told, and whether
    it is emulated."""
    converted = [layer for layer in layers if layer.recipe]
    share = sum(layer.params for layer in converted) / sum(layer.params for layer in layers)
    lines = [
        f"fp8: {len(converted)} of {len(layers)} Linears, {share:.1%} of the matmul parameters,"
        " in FP8"
    ]
    if not converted:
        if recipe == "auto":
            lines.append(
                "fp8: auto found nothing that FP8 would make faster here: THIS RUN IS BF16"
            )
        return lines
    if any(RECIPES[layer.recipe].norm for layer in converted if layer.recipe):
        lines.append(f"fp8: {recipe} rounds the weights of the norms before these Linears too")
    if cast_by is not None:
        lines.append(cast_by.describe())
    emulated_on = _emulated_on(recipe, device_type)
    if emulated_on:
        lines.append(f"fp8: emulated on this {emulated_on}: real numerics, slower than BF16")
    return lines


def _emulated_on(recipe: str, device_type: str) -> str:
    """The kind of device, for people, on which the recipe is emulated; "" where it is not."""
    if device_type == "cpu":
        return "CPU"
    return "GPU" if _is_emulated_on_this_gpu(recipe) else ""


def _is_emulated_on_this_gpu(recipe: str) -> bool:
    return recipe in RECIPES and RECIPES[recipe].is_emulated_on_gpus and not is_native(recipe)


# ---------------------------------------------------------------------------------------- hardware


def implementation(
    recipe: str, kernels: bool, all_gather: bool, device_type: str
) -> OnGPU | Literal["kernels"]:
    """Who multiplies by a recipe on a kind of device. Raises UserError where nobody does: another
    recipe would be computed without a word."""
    on_gpu = RECIPES[recipe].on_gpu
    if kernels:
        return "kernels"
    if device_type == "cpu":
        # torchao alone can gather float8; on a CPU its own emulation then multiplies
        return "torchao" if all_gather else "emulated"
    if on_gpu is None:
        raise UserError(
            f"fp8.recipe={recipe} has no implementation on a GPU: train with it on a CPU, take"
            " another recipe, or name one as on_gpu in fp8/recipes.py"
        )
    return on_gpu


def check_hardware(
    config: FP8Config, device: torch.device, has_kernels: bool | None = None
) -> None:
    """Raise UserError where `device` cannot run the recipe: training on in BF16 would be silent.
    has_kernels as in select()."""
    if device.type != "cuda" or config.recipe not in RECIPES:
        return
    if has_kernels is None:
        has_kernels = config.kernels is True
    implementation(config.recipe, has_kernels, config.all_gather, device.type)
    needed = RECIPES[config.recipe].capability
    capability = torch.cuda.get_device_capability(device)
    if capability < needed:
        raise UserError(
            f"fp8.recipe={config.recipe} needs a GPU of compute capability {needed[0]}.{needed[1]}"
            f" or later, but {torch.cuda.get_device_name(device)} has"
            f" {capability[0]}.{capability[1]}: use fp8.recipe=off (BF16) here"
        )


def weights_cast_from(
    layers: Iterable[Layer], all_gather: bool, device_type: str, has_whole_weights: bool
) -> Literal["fp32", "bf16"] | None:
    """The dtype from which weights are rounded to float8: "bf16" where any Linear's weight is in
    BF16 then, else "fp32"; None where no Linear is in FP8.

    FSDP2 gathers the weights of blocks in BF16 and that of the head in fp32 (runtime.parallel), but
    where it gathers float8, shards of fp32 are cast. The same weight rounded to BF16 first may
    become another float8 value: two runs of one recipe that differ in this have other operands."""
    sources = set()
    for layer in layers:
        if layer.recipe is None:
            continue
        is_gathered_in_bf16 = not has_whole_weights and not all_gather and layer.name != "head"
        is_native_prototype = layer.recipe in ROUNDS_TO_BF16_FIRST and is_native(layer.recipe)
        rounds_first = device_type == "cuda" and is_native_prototype
        sources.add("bf16" if is_gathered_in_bf16 or rounds_first else "fp32")
    if not sources:
        return None
    return "bf16" if "bf16" in sources else "fp32"


# by fp8.linears.torchao_mx, on the GPUs that have units for it
ROUNDS_TO_BF16_FIRST = ("mxfp8",)


def is_native(recipe: str) -> bool:
    """Whether the GPU here multiplies by `recipe`, which torchao's prototypes compute, itself."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] in RECIPES[recipe].native_on
