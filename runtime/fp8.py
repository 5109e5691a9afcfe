"""FP8: the recipes, their rounding, which Linears they convert, and the Linears that multiply by
them.

Converting changes how a Linear multiplies, while its name, its fp32 weight and hence every
checkpoint stay the same. docs/fp8.md has the recipes, their sources and what computes them where.

An operand is multiplied by its scale and rounded to its format, saturating; the matmul's result is
divided by the scales. All but cscale scale by the operand's current largest magnitude; with
fp8.scaling=delayed by those of past steps, see DelayedScales.

On a GPU torchao multiplies, or with fp8.kernels=true the KernelLinears below: the same roundings,
fewer passes over memory. What neither has is emulated, as is every recipe on a CPU: operands are
rounded, dequantised, multiplied."""

import contextlib
import fnmatch
import logging
import math
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lib.command import read_options
from lib.errors import UserError
from model import GPT, Linear
from runtime.bf16_in_fp32 import LinearInFp32
from runtime.config import (
    FP8_KERNELS,
    FP8_MULTIPLES,
    FP8_SCALED_MM,
    WITH_KERNELS,
    FP8Config,
    fp8_overrides,
)
from runtime.speed import choose, load_table

# torch has no E2M1 that it could compute with
E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, "e2m1"
# Largest value, smallest normal one, distance from 1 to the next.
FORMATS: dict[torch.dtype | str | None, tuple[float, float, float]] = {
    E4M3: (448.0, 2.0**-6, 0.125),
    E5M2: (57344.0, 2.0**-14, 0.25),
    E2M1: (6.0, 1.0, 0.5),
}
EPS = 1e-12  # least amax, so that an all-zero tensor has a scale (torchao's value)
NO_TARGET = -100  # target of a token without loss: ignore_index of F.cross_entropy
# Major compute capabilities for which torchao has the matmuls of these (Blackwell, Hopper):
# elsewhere they are emulated.
NATIVE_ON = {"mxfp8": range(10, 100), "blockwise": range(9, 10)}
FOR_BOTH = ("tensor", "constant")  # scalings whose values serve a matmul over either dimension
# on every GPU
EMULATED = (
    "tensorwise_gi_hp",
    "mxfp8_e5m2",
    "blockwise_e5m2",
    "nvfp4",
    "nvfp4_nearest",
    "nvfp4_hadamard",
)
# What `auto` may choose where the table says that it pays: the recipes made for speed.
CANDIDATES = ("tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp")
KERNEL_CANDIDATES = tuple(
    f"{recipe}{WITH_KERNELS}" for recipe in CANDIDATES if recipe in FP8_KERNELS
)


# ------------------------------------------------------------------------------------- the recipes


@dataclass(frozen=True)
class Operand:
    """How one operand is converted to FP8."""

    format: torch.dtype | str | None  # None: it stays in BF16
    # which values share a scale
    scaling: Literal["tensor", "row", "block", "tile", "constant"] = "tensor"
    # scale rounded down to a power of two: scaling itself then rounds nothing
    power_of_2: bool = False
    exponent: int = 0  # "constant" only: the scale is 2 ** exponent
    # of "tile" and "block", along the dimension that stays and that which is summed over
    tile: tuple[int, int] = (1, 1)
    is_stochastic: bool = False  # rounded up with a probability that makes the mean exact


@dataclass(frozen=True)
class Recipe:
    """The operands of y = x w' (input, weight), input gradient = g w (grad, weight), weight
    gradient = g' x (grad, input)."""

    name: str
    input: Operand
    weight: Operand
    grad: Operand
    weight_again: Operand | None = None  # of the input gradient, where it is another
    has_bf16_weight_grad: bool = False  # both operands of the weight gradient stay in BF16
    has_bf16_input_grad: bool = False  # both operands of the input gradient stay in BF16
    is_rotated: bool = False  # they go through _rotated()
    # the backward matmuls accumulate fast, as the forward one does; on a GPU
    fast_backward: bool = False


_BF16 = Operand(None)
_TENSOR, _TENSOR_GRAD = Operand(E4M3), Operand(E5M2)
_TENSOR_2, _TENSOR_GRAD_2 = Operand(E4M3, power_of_2=True), Operand(E5M2, power_of_2=True)
_ROW = Operand(E4M3, "row", power_of_2=True)
_MX = Operand(E4M3, "block", tile=(1, 32))  # OCP Microscaling specification 1.0, section 5
_ROW_128, _SQUARE_128 = Operand(E4M3, "tile", tile=(1, 128)), Operand(E4M3, "tile", tile=(128, 128))
_ROW_16, _SQUARE_16 = Operand(E2M1, "tile", tile=(1, 16)), Operand(E2M1, "tile", tile=(16, 16))
_ROW_16_GRAD = replace(_ROW_16, is_stochastic=True)
# Activations after an RMSNorm have rms 1; weights start at std sqrt(0.4 / C), about 2^-6;
# gradients, in units of one token's loss, are around 2^-8. In the demo runs these constants
# saturate nothing, and at most 1.3 % of a Linear's activations underflow.
_ONE, _UP, _UP_GRAD = (
    Operand(E4M3, "constant"),
    Operand(E4M3, "constant", exponent=6),
    Operand(E5M2, "constant", exponent=8),
)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", _TENSOR, _TENSOR, _TENSOR_GRAD),
        Recipe("tensorwise_gw_hp", _TENSOR, _TENSOR, _TENSOR_GRAD, has_bf16_weight_grad=True),
        Recipe("tensorwise_gi_hp", _TENSOR, _TENSOR, _TENSOR_GRAD, has_bf16_input_grad=True),
        Recipe("rowwise", _ROW, _ROW, _ROW),
        Recipe(
            "rowwise_with_gw_hp",
            _ROW,
            _ROW,
            _ROW,
            weight_again=_TENSOR_2,
            has_bf16_weight_grad=True,
        ),
        Recipe("amax", _TENSOR_2, _TENSOR_2, _TENSOR_GRAD_2),
        Recipe("cscale", _ONE, _UP, _UP_GRAD),
        Recipe("mxfp8", _MX, _MX, _MX),
        Recipe("mxfp8_e5m2", _MX, _MX, replace(_MX, format=E5M2)),
        Recipe("blockwise", _ROW_128, _SQUARE_128, _ROW_128),
        Recipe("blockwise_e5m2", _ROW_128, _SQUARE_128, replace(_ROW_128, format=E5M2)),
        Recipe("nvfp4", _ROW_16, _SQUARE_16, _ROW_16_GRAD),
        Recipe("nvfp4_nearest", _ROW_16, _SQUARE_16, _ROW_16),
        Recipe("nvfp4_hadamard", _ROW_16, _SQUARE_16, _ROW_16_GRAD, is_rotated=True),
    )
}
# of KernelLinears alone
BF16 = Recipe("bf16", Operand(None), Operand(None), Operand(None), has_bf16_weight_grad=True)


def for_loss_scale(recipe: Recipe, loss_scale: float) -> Recipe:
    """The recipe for a loss multiplied by `loss_scale` before the backward pass, as a mean over a
    step's tokens is: dynamic scales follow by themselves, a constant gradient scale is divided by
    it (rounded to a power of two)."""
    return replace(
        recipe,
        grad=replace(recipe.grad, exponent=recipe.grad.exponent - round(math.log2(loss_scale))),
    )


# ------------------------------------------------------------------------------------ the rounding


def scale_of(x: torch.Tensor, operand: Operand, dim: int = -1) -> torch.Tensor:
    """The fp32 scale of `x` (any shape), which broadcasts to it; `dim` is the dimension that the
    matmul sums over."""
    if operand.scaling == "constant":
        return torch.full((), 2.0**operand.exponent, device=x.device)
    magnitude = x.detach().abs()
    if operand.tile != (1, 1):
        tiles = _in_tiles(magnitude.float(), operand, dim)
        return _tile_scale(tiles, operand).expand_as(tiles).reshape(x.shape)
    # In two stages: Inductor can fuse the first, row by row, with the kernel that produces x (a
    # norm).
    amax = (
        magnitude.amax(-1).amax()
        if operand.scaling == "tensor"
        else magnitude.amax(dim, keepdim=True)
    )
    return _scale(amax, FORMATS[operand.format][0], operand.power_of_2)


def _scale(amax: torch.Tensor, largest: Any, power_of_2: bool = False) -> torch.Tensor:
    """The fp32 scales by which the largest magnitudes `amax` become a format's `largest` value, a
    number or one for each."""
    scale = (amax.double().clamp(min=EPS).reciprocal() * largest).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale


def _in_tiles(x: torch.Tensor, operand: Operand, dim: int) -> torch.Tensor:
    """x (any shape) as (tiles, rows of a tile, tiles, columns of a tile)."""
    rows, columns = operand.tile if dim % x.ndim == x.ndim - 1 else operand.tile[::-1]
    return x.reshape(-1, x.shape[-1]).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _tile_scale(magnitude: torch.Tensor, operand: Operand) -> torch.Tensor:
    """The scale of each tile of _in_tiles(); of E2M1 as NVFP4 has it: an E4M3 number times one of
    the tensor."""
    amax, largest = magnitude.amax((1, 3), keepdim=True), FORMATS[operand.format][0]
    if operand.scaling == "block":
        # E8M0 holds 2^-127 .. 2^127; rounded so that nothing saturates (torchao's RCEIL mode).
        exponent = torch.ceil(torch.log2(amax.double() / largest))
        return torch.exp2(-torch.where(amax > 0, exponent, -127).clamp(-127, 127)).float()
    if operand.format == E2M1:
        whole = _scale(amax.amax() / largest, FORMATS[E4M3][0])
        # E4M3's least value: no scale is 0
        return whole / _round(amax / largest * whole, E4M3).clamp_(min=2**-9)
    return _scale(amax, largest)


def fake_quantise(
    x: torch.Tensor, operand: Operand, dim: int = -1, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """x (any shape) quantised and dequantised, in fp32: the values that the matmul multiplies;
    `dim` as in scale_of().

    noise: for stochastic rounding, values from 0 to 1 (exclusive) of x's shape; without it x is
    rounded to nearest."""
    x, shape = x.float(), x.shape
    if operand.format is None:
        return x
    # one scale a tile: of each value torch 2.11 does not compile on a CPU
    if operand.tile != (1, 1):
        x, noise = (
            _in_tiles(x, operand, dim),
            (None if noise is None else _in_tiles(noise, operand, dim)),
        )
        scale = _tile_scale(x.detach().abs(), operand)
    else:
        scale = scale_of(x, operand, dim)
    return _round(x * scale, operand.format, noise).mul_(scale.reciprocal()).reshape(shape)


def _round(
    x: torch.Tensor, format: torch.dtype | str, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 x, overwritten: saturated, rounded to the nearest value of `format`, ties to even; NaN
    stays.

    Equal to x.clamp(-largest, largest).to(format).float() bit for bit, which a CPU computes value
    by value. With `noise` each value goes down or up: up where its noise is below its share of the
    way."""
    largest, lowest, eps = FORMATS[format]
    x.clamp_(-largest, largest)
    # of two, at or below |x|
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=lowest)
    if noise is not None:
        step = power.mul_(eps)
        x.div_(step)
        down = x.floor()
        return down.add_(noise < x - down).mul_(step)
    # fp32 keeps 23 bits behind the leading one: of the sum with 1.5 * 2^23 of the format's steps,
    # none below a step.
    shift = power.mul_(1.5 * 2**23 * eps)
    return x.add_(shift).sub_(shift)


def noise_at(shape: torch.Size, position: torch.Tensor, salt: torch.Tensor | int) -> torch.Tensor:
    """Uniform values from 0 to 1 (exclusive), fp32 (M, N): a function of salt, column and position
    + row alone.

    position: () int64. By SplitMix64's finaliser (Steele et al. 2014) on the value's number, in
    wrapping int64."""
    rows = position + torch.arange(shape[0], device=position.device)
    z = (
        rows[:, None] * shape[1] + torch.arange(shape[1], device=position.device)
    ) * -0x61C8864680B583EB + salt
    # logical shifts: >> keeps the sign
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
    return (z >> 40 & 0xFFFFFF).float() * 2.0**-24


def cast(x: torch.Tensor, scale: torch.Tensor, format: Any) -> torch.Tensor:
    """x * scale in `format`, one of torch's own, saturating, rounded to nearest even."""
    largest = FORMATS[format][0]  # torch before 2.12 does not saturate by itself
    return (x.float() * scale).clamp(-largest, largest).to(format)


def scaled_mm(
    a: torch.Tensor,
    a_inverse: torch.Tensor,
    b: torch.Tensor,
    b_inverse: torch.Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """(a * a_inverse) @ (b * b_inverse) in `dtype`, (M, N), of float8 a (M, K) and b (K, N),
    column-major; inverses broadcast.

    On a GPU torch's float8 matmul, accumulating `fast` or not. On a CPU the dequantised values in
    fp32: torch's own float8 matmul runs in oneDNN's scalar reference loop on Intel CPUs with AMX,
    hundreds of times slower."""
    if a.device.type == "cpu":
        return ((a.float() * a_inverse) @ (b.float() * b_inverse)).to(dtype)
    return torch._scaled_mm(
        a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast
    )


def mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a (M, K) @ b (K, N) in `dtype`: on a GPU as the matmul sums it up, on a CPU rounded to a's
    dtype in between."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else (a @ b).to(dtype)


@torch.library.custom_op("nanofp8::add_weight_grad", mutates_args=("total",))
def add_weight_grad(total: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> None:
    """total (N, K) fp32 += g' x of BF16; on a GPU the matmul begins with `total`, whose bytes are
    read and written once."""
    if total.is_cuda:
        torch.addmm(total, g.t(), x, out_dtype=total.dtype, out=total)
    else:
        total += mm(g.t(), x, total.dtype)


add_weight_grad.register_fake(lambda total, g, x: None)


# ------------------------------------------------------------------------ selection and conversion


def by_name(label: str) -> FP8Config:
    """The settings with this label, such as tensorwise+kernels."""
    return read_options(FP8Config, [text.removeprefix("fp8.") for text in fp8_overrides(label)])


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


# ------------------------------------------------------ Linears emulated, and torchao's prototypes


class QuantisedLinear(nn.Linear):
    """A Linear without bias whose matmuls follow `recipe`; its class and fields are set by
    convert()."""

    recipe: Recipe
    is_native: bool  # the GPU has these matmuls, and torchao a prototype of them
    # Both () int64, see set_position(): tensors, because torch.compile would compile each layer
    # anew for a number of its own.
    position: Any = None
    salt: Any = None

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])  # (M, K)
        if self.recipe.input.scaling == "constant" and x.is_cuda:
            x_scale, g_scale = (
                scale_of(rows, operand) for operand in (self.recipe.input, self.recipe.grad)
            )
            y = KernelMatmul.apply(
                rows, self.weight, None, None, None, self.recipe, None, x_scale, None, g_scale
            )
        # Of a prompt there may be any number.
        elif self.is_native and x.is_cuda and len(rows) % FP8_MULTIPLES[self.recipe.name] == 0:
            y = (_torchao_mx if self.recipe.name == "mxfp8" else _torchao_blockwise)(
                rows, self.weight
            )
        else:
            y = EmulatedMatmul.apply(rows, self.weight, self.position, self.salt, self.recipe)
        return y.view(*x.shape[:-1], -1)


class EmulatedMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N), operands rounded as the recipe says, then multiplied;
    numerics only.

    On a CPU in fp32: products of float8 values are exact there, and only their sums and the result
    round, as on real units. On a GPU in x's dtype, exact for mxfp8's power-of-two scales, or in
    fp32 for tiles and tensors. position (), salt: of noise_at()."""

    @staticmethod
    def forward(ctx, x, w, position, salt, recipe):
        qx, qw = _emulated(x, recipe.input, x.dtype), _emulated(w, recipe.weight, x.dtype)
        reuses_x = recipe.input.scaling in FOR_BOTH and not recipe.has_bf16_weight_grad
        ctx.save_for_backward(qx if reuses_x else x, w, position, salt)
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, w.dtype
        return (qx @ qw.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x, w, position, salt), recipe, dtype = ctx.saved_tensors, ctx.recipe, ctx.dtype
        noise = [
            None if position is None else noise_at(g.shape, position, salt + more)
            for more in (0, 2**60)
        ]
        qg = qg_w = _emulated(g, recipe.grad, dtype, -1, noise[0])
        if recipe.has_bf16_input_grad:
            qg = _emulated(g, _BF16, dtype)
            qw = _emulated(w.to(dtype), _BF16, dtype)
        else:
            qw = _emulated(w, recipe.weight_again or recipe.weight, dtype, 0)
        if recipe.has_bf16_weight_grad:
            qg_w = g
        elif recipe.input.scaling not in FOR_BOTH:  # nor is the gradient's
            qg_w = _emulated(
                _rotated(g) if recipe.is_rotated else g, recipe.grad, dtype, 0, noise[1]
            )
            x = _emulated(_rotated(x) if recipe.is_rotated else x, recipe.input, dtype, 0)
        return (qg @ qw).to(dtype), (qg_w.t() @ x).to(dtype).to(ctx.w_dtype), None, None, None


def _emulated(
    x: torch.Tensor,
    operand: Operand,
    dtype: torch.dtype,
    dim: int = -1,
    noise: torch.Tensor | None = None,
):
    """x dequantised after rounding as `operand` says: fp32 on a CPU, by tiles and by tensors, else
    `dtype`."""
    q = fake_quantise(x, operand, dim, noise)
    return q if x.device.type == "cpu" or operand.scaling in ("tile", "tensor") else q.to(dtype)


# Hadamard's matrix (Sylvester's construction) with fixed random signs, orthogonal.
HADAMARD = [
    [(-1) ** ((i & j).bit_count() + (0x5A39 >> j & 1)) / 4 for j in range(16)] for i in range(16)
]


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """x (M, N), every 16 rows multiplied by HADAMARD, which leaves products and spreads outliers;
    fp32."""
    return (torch.tensor(HADAMARD, device=x.device) @ x.float().unflatten(0, (-1, 16))).flatten(
        0, 1
    )


def noise_of(module: Any, g: torch.Tensor) -> torch.Tensor | None:
    """The noise with which a converted Linear rounds its output's gradient g (..., N) for the
    input's; None: to nearest."""
    position = getattr(module, "position", None)
    return (
        None
        if position is None
        else noise_at(g.flatten(0, -2).shape, position, module.salt).view_as(g)
    )


def set_position(model: nn.Module, position: int, seed: int = 0) -> None:
    """Number among the run's tokens of the first token that the next pass through `model` sees:
    with the seed and the layer it decides the noise of recipes with stochastic rounding. Without a
    position they round to nearest."""
    for name, m in model.named_modules():
        if isinstance(m, QuantisedLinear) and m.recipe.grad.is_stochastic:
            if m.position is None:
                salt = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
                m.position = torch.zeros((), dtype=torch.int64, device=m.weight.device)
                m.salt = torch.full_like(m.position, int.from_bytes(salt, "little"))
            m.position.fill_(position)


def _torchao_mx(x, w):
    from torchao.prototype.moe_training import mxfp8_linear as mx

    return mx._to_mxfp8_then_scaled_mm(
        x.contiguous(), w.to(x.dtype), mx.KernelPreference.AUTO, mx.ScaleCalculationMode.RCEIL
    )


def _torchao_blockwise(x, w):
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    # before it, Triton's matmuls
    has_cublas = tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)
    return fp8_blockwise_mm.apply(x.contiguous(), w, 128, x.dtype, not has_cublas)


# --------------------------------------------------------------------- Linears with lasting copies
#
# Every operand has torchao's scale (fp64 division), format and rounding, bit for bit, but for the
# head's gradient: its scale is that of a bound, |softmax - one-hot| <= 1. Where BF16 multiplies the
# weight gradient, no operand needs a second layout, and Inductor compiles the casts. BF16 Linears
# of one process go the same way: a comparison with them is one of the matmuls. On a CPU the
# operators are plain torch, the reference for runtime/fp8_kernels.py, which is imported when the
# first tensor is on a GPU: CPU users lack triton. Float8 matmuls need their second operand
# column-major: the transpose of a row-major copy.


class KernelLinear(nn.Linear):
    """A Linear without bias that multiplies by `recipe`, in FP8 on our kernels or in BF16. Its
    weight stays what it was; the copies of it are buffers outside checkpoints."""

    recipe: Recipe
    version: int | None  # of the weight when its copies were made
    has_bound = False  # of a head whose loss is computed with its matmul
    # Buffers, or None where there is none: q, the weight's copy (N, K), qt, its transpose (K, N) in
    # FP8, the scale () of both; total, its lasting gradient, see keep_gradients(). x_scale, x_amax,
    # g_scale, g_amax () are those of DelayedScales.

    def forward(self, x):
        rows, copies = x.reshape(-1, x.shape[-1]), self.copies()  # (M, K)
        if torch.is_grad_enabled() or self.recipe.weight.format is None:
            y = KernelMatmul.apply(
                rows,
                self.weight,
                *copies,
                self.recipe,
                self.total,
                self.x_scale,
                self.x_amax,
                self.g_scale,
                self.g_amax,
            )
        else:  # no matmul will need a transpose: any number of rows
            q, _, inverse = _quantised(rows, self.recipe.input, False, self.x_scale)
            y = scaled_mm(
                q,
                inverse,
                *_weight(self.weight, copies[0], copies[2], self.recipe.weight),
                x.dtype,
                fast=True,
            )
        return y.view(*x.shape[:-1], -1)

    def copies(self) -> tuple:
        """q, qt and scale, once it is sure that they are the weight's."""
        # a compiled step cannot compare versions
        if self.q is not None and not torch.compiler.is_compiling():
            assert self.weight._version == self.version, (
                "fp8.refresh_weight_copies(model) is due: the weights have changed"
            )
            assert self.weight.grad is self.total or self.total is None, (
                "fp8.zero_gradients(model) alone may free gradients"
            )
        return self.q, self.qt, self.scale


def _use_kernels(module: Any, recipe: Recipe, is_delayed: bool = False) -> None:
    """Make a Linear a KernelLinear, in place."""
    module.__class__, module.recipe, module.version, module.is_delayed = (
        KernelLinear,
        recipe,
        None,
        is_delayed,
    )
    for buffer in ("q", "qt", "scale", "total", "x_scale", "x_amax", "g_scale", "g_amax"):
        module.register_buffer(buffer, None, persistent=False)


def keep_bf16_copies(model: nn.Module) -> None:
    """Let every Linear that FP8 leaves alone cast its weight once a step too. Not under FSDP2,
    which casts what it gathers."""
    for module in model.modules():
        if type(module) is Linear:
            _use_kernels(module, BF16)


def keep_gradients(model: GPT) -> None:
    """Give the blocks' weights whose gradient is a BF16 matmul one that lasts, and that the matmul
    itself adds to: half the bytes. zero_gradients() then takes the place of the optimizer's
    zero_grad().

    Not the head, which may be called in pieces and shares its weight; not under FSDP2, which
    reduces what a pass returns."""
    for m in _kernel_linears(model.layers):
        if m.recipe.has_bf16_weight_grad:
            m.total = torch.empty_like(m.weight)
    zero_gradients(model)


def zero_gradients(model: nn.Module) -> None:
    """Free all gradients, or fill those of keep_gradients() with zeros."""
    kept = [m for m in _kernel_linears(model) if m.total is not None]
    model.zero_grad()
    for m in kept:
        m.weight.grad = m.total
    if kept:
        torch._foreach_zero_([m.total for m in kept])


def _kernel_linears(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, KernelLinear)]


@torch.no_grad()
def refresh_weight_copies(model: nn.Module) -> None:
    """Recompute the weights' FP8 and BF16 copies, and, by one all-reduce, the scales of weights
    gathered as float8: whenever the weights have changed, between two passes."""
    if any(is_wrapped(p) for p in model.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
    # Over all weights at once where that is one kernel: launches for a hundred Linears would take
    # the host longer than the GPU.
    # FSDP2 frees gathered weights: of KernelLinears only the scales stay
    is_sharded = isinstance(model, FSDPModule)
    fp8, bf16 = (
        [m for m in _kernel_linears(model) if (m.recipe.weight.format is None) == is_bf16]
        for is_bf16 in (False, True)
    )
    for m in fp8 + bf16:
        m.version = m.weight._version
    if fp8:
        operand = fp8[0].recipe.weight  # of all: what `auto` mixes rounds weights alike
        # of the weight as it is gathered: blocks in BF16, whose rounding keeps the order of
        # magnitudes
        if is_sharded:
            shards = [m.weight.to_local() for m in fp8]
            plain = max_over_ranks(
                torch.stack(
                    [
                        shard.abs().amax() if shard.numel() else shard.new_zeros(())
                        for shard in shards
                    ]
                )
            )
            in_bf16 = plain.bfloat16().float()
            amaxes = [
                p if m is model.head else rounded
                for m, p, rounded in zip(fp8, plain, in_bf16, strict=True)
            ]
        else:
            amaxes = list(torch._foreach_norm([m.weight for m in fp8], math.inf))
        scales = _scale(
            torch.stack(amaxes), FORMATS[operand.format][0], operand.power_of_2
        ).unbind()
        for m, scale in zip(fp8, scales, strict=True):
            if m.scale is None:
                m.scale = torch.empty_like(scale)
                m.q, m.qt = (None, None) if is_sharded else _empty(m.weight, operand.format)
            if not is_sharded:
                _cast_into(m.weight, scale, m.q, m.qt)
        torch._foreach_copy_([m.scale for m in fp8], scales)
    if bf16:
        dtype: Any = model.compute_dtype
        for m in bf16:
            m.q = torch.empty_like(m.weight, dtype=dtype) if m.q is None else m.q
        torch._foreach_copy_([m.q for m in bf16], [m.weight for m in bf16])


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The largest of all ranks, of each of `values` (n,); NaN where it is NaN on any rank, as on
    one process. On the device.

    gloo's own MAX compares, and a NaN compares as false: it is lost or kept by its rank, and can
    hide the maximum beside it."""
    is_nan = values.isnan()
    both = torch.stack((values.masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)))  # (2, n)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)


@torch.library.custom_op("nanofp8::cast_both_layouts", mutates_args=())
def cast_both(
    x: torch.Tensor, scale: torch.Tensor, format: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) times scale (), rounded to `format`, saturating: (q (M, K), its transpose (K, M)),
    all row-major."""
    return _cast_into(x, scale, *_empty(x, format))


cast_both.register_fake(lambda x, scale, format: _empty(x, format))


def _empty(x, format):
    return x.new_empty(x.shape, dtype=format), x.new_empty(x.shape[::-1], dtype=format)


def _cast_into(
    x: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, qt: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cast_both() into memory that is there; returns q and qt."""
    if x.is_cuda:
        from runtime import fp8_kernels

        return fp8_kernels.launch(fp8_kernels.cast_both, (x, scale), q, qt)
    q.copy_(cast(x, scale, q.dtype))
    return q, qt.copy_(q.t())


def _quantised(
    x: torch.Tensor,
    operand: Operand,
    wants_transpose: bool,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x (M, K) -> its FP8 copy, that copy's transpose or None, the inverse () of the scale.

    With a `scale` () that is known before, the casts are plain torch, which Inductor fuses with the
    kernel that makes x; amax () is then raised to x's largest magnitude."""
    has_kernel = wants_transpose and scale is None
    scale = scale_of(x, operand) if scale is None else scale
    if has_kernel:
        return *cast_both(x, scale, operand.format), scale.reciprocal()
    if amax is not None:
        amax.copy_(torch.maximum(amax, x.abs().amax(-1).amax()))
    q = cast(x, scale, operand.format)
    return q, q.t().contiguous() if wants_transpose else None, scale.reciprocal()


def _weight(
    w: torch.Tensor,
    copy: torch.Tensor | None,
    scale: torch.Tensor | None,
    operand: Operand,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second operand of y = x w', or of g w (transposed), and the inverse of its scale; cast
    here where there is no copy."""
    scale = scale_of(w, operand) if scale is None else scale
    if copy is None:
        copy = (
            cast_both(w, scale, operand.format)[1] if transposed else cast(w, scale, operand.format)
        )
    return copy.t(), scale.reciprocal()


class KernelMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N), or with targets (M,) the cross-entropy of each of its rows
    (M,), fp32, nats; the rest as KernelLinear has it."""

    @staticmethod
    def forward(
        ctx,
        x,
        w,
        q,
        qt,
        scale,
        recipe,
        total=None,
        x_scale=None,
        x_amax=None,
        g_scale=None,
        g_amax=None,
        targets=None,
    ):
        x = x.contiguous()
        ctx.recipe, ctx.dtype, ctx.w_dtype = recipe, x.dtype, w.dtype
        if recipe.weight.format is None:
            ctx.save_for_backward(x, None, None, q, None, total, None, None)
            return x @ q.t()
        xq, xt, x_inverse = _quantised(
            x, recipe.input, not recipe.has_bf16_weight_grad, x_scale, x_amax
        )
        y = scaled_mm(xq, x_inverse, *_weight(w, q, scale, recipe.weight), x.dtype, fast=True)
        # Without lasting copies w itself is kept, not its FP8 copy: FSDP2 frees w between the
        # passes, a copy would stay.
        kept = (
            x if xt is None else xt,
            x_inverse,
            w if qt is None else None,
            qt,
            scale,
            total,
            g_scale,
            g_amax,
        )
        if targets is None:
            ctx.save_for_backward(*kept)
            return y
        y32 = y.float()
        largest = y32.amax(-1, keepdim=True)
        lse = (largest + (y32 - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)
        picked = y32.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
        ctx.save_for_backward(*kept, y, lse, targets)
        return torch.where(targets == NO_TARGET, 0.0, lse - picked)

    @staticmethod
    def backward(ctx, g):
        kept, x_inverse, w, copy, scale, total, g_scale, g_amax, *loss = ctx.saved_tensors
        recipe, g = ctx.recipe, g.contiguous()
        if recipe.weight.format is None:
            grad_x = g @ copy
        else:
            weight = _weight(w, copy, scale, recipe.weight, transposed=True)
            if loss:
                g_scale = scale_of(g, recipe.grad)  # of a bound: reads (M,) instead of (M, N)
                (gq, gt), g_inverse = cross_entropy_grad(*loss, g, g_scale), g_scale.reciprocal()
            else:
                gq, gt, g_inverse = _quantised(
                    g, recipe.grad, not recipe.has_bf16_weight_grad, g_scale, g_amax
                )
            grad_x = scaled_mm(gq, g_inverse, *weight, ctx.dtype, recipe.fast_backward)
        if not recipe.has_bf16_weight_grad:
            grad_w = scaled_mm(
                gt, g_inverse, kept.t(), x_inverse, ctx.w_dtype, recipe.fast_backward
            )
        elif total is not None:
            grad_w = add_weight_grad(total, g, kept)  # None
        else:
            grad_w = mm(g.t(), kept, ctx.w_dtype)
        return grad_x, grad_w, *(None,) * 10


@torch.library.custom_op("nanofp8::cross_entropy_grad", mutates_args=())
def cross_entropy_grad(
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exp(logit - lse) - [is target]) * (grad * scale) in E5M2, saturated: (q (M, V), its
    transpose (V, M)); no target: zeros.

    logits (M, V) BF16; lse (M,) fp32, their log-sum-exp; targets (M,) int64; grad (M,) fp32, each
    token's factor; scale ()."""
    if logits.is_cuda:
        from runtime import fp8_kernels

        inputs = logits, lse, targets, grad, scale
        return fp8_kernels.launch(fp8_kernels.cross_entropy_grad, inputs, *_empty(logits, E5M2))
    p = torch.exp(logits.float() - lse[:, None])
    p -= F.one_hot(targets.clamp(min=0), logits.size(1))
    q = cast(p.masked_fill((targets == NO_TARGET)[:, None], 0.0), (grad * scale)[:, None], E5M2)
    return q, q.t().contiguous()


cross_entropy_grad.register_fake(lambda logits, *_: _empty(logits, E5M2))


def _token_losses(model: GPT, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """GPT.token_losses in one with its matmul; plainly without gradients, in BF16 (in_bf16 swaps
    the head's class), and where the head has hooks, as a probe's or a diagnosis's: only a call of
    the module runs them."""
    head: Any = model.head
    is_hooked = not torch.compiler.is_compiling() and (
        head._forward_hooks or head._forward_pre_hooks
    )
    if type(head) is not KernelLinear or is_hooked or not torch.is_grad_enabled():
        return GPT.token_losses(model, h, targets)
    return KernelMatmul.apply(
        h,
        head.weight,
        *head.copies(),
        head.recipe,
        None,
        head.x_scale,
        head.x_amax,
        None,
        None,
        targets,
    )


# -------------------------------------------------------------------- scales known before the pass

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


# ---------------------------------------------------------------------- shards, evaluation in BF16


def is_wrapped(weight: torch.Tensor) -> bool:
    """Whether `weight`, sharded or not yet, will be gathered as float8."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    # by name: a BF16 run must not import torchao
    return type(local).__name__ == "WeightWithDynamicFloat8CastTensor"


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded wrapped weight as a DTensor of plain fp32 on the same memory; any other tensor
    unchanged."""
    if not (isinstance(tensor, DTensor) and is_wrapped(tensor)):
        return tensor
    wrapper: Any = tensor._local_tensor
    return DTensor.from_local(
        wrapper._tensor.detach(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 holds gathered, as a forward pass alone leaves the root's and
    with parallel.reshard=false every block's: before shards are changed, or the next forward pass
    would use the old weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the block, every Linear of `model` multiplies in BF16, from the same weights,
    uncompiled: a gap between two arms measured so is one between their weights. Classes are
    swapped: names, Parameters, sharding and hooks stay."""
    classes: dict[Any, type] = {
        module: type(module) for module in model.modules() if isinstance(module, nn.Linear)
    }
    reshard(model)  # gathered weights have lost their fp32 shards
    plain = LinearInFp32 if getattr(model, "is_in_fp32", False) else Linear
    for module in classes:
        module.__class__ = plain
        if is_wrapped(module.weight):  # FSDP2 would gather float8
            module.forward = partial(
                lambda shard, x: F.linear(x, shard.to(x.dtype).full_tensor()), unwrap(module.weight)
            )
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
            vars(module).pop("forward", None)
