"""The recipes of FP8, as data, and the section of a config that chooses one."""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch

from lib.command import read_options

# Recipes that our own kernels compute too: one scale per tensor, from its largest magnitude.
FP8_KERNELS = ("tensorwise", "tensorwise_gw_hp", "amax")
WITH_KERNELS = "+kernels"  # behind a recipe's name, as in FP8Config.label
# Recipes of torch's float8 matmul, which can accumulate fast.
FP8_SCALED_MM = (*FP8_KERNELS, "cscale", "rowwise", "rowwise_with_gw_hp")
RecipeName = Literal[
    "off",
    "auto",
    "tensorwise",
    "tensorwise_gw_hp",
    "tensorwise_gi_hp",
    "rowwise",
    "rowwise_with_gw_hp",
    "amax",
    "cscale",
    "mxfp8",
    "mxfp8_e5m2",
    "blockwise",
    "blockwise_e5m2",
    "nvfp4",
    "nvfp4_nearest",
    "nvfp4_hadamard",
]
# What inputs and outputs of a Linear must be multiples of.
FP8_MULTIPLES = dict.fromkeys(get_args(RecipeName), 16) | {
    "mxfp8": 32,
    "mxfp8_e5m2": 32,
    "blockwise": 128,
    "blockwise_e5m2": 128,
}


# torch has no E2M1 that it could compute with
E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, "e2m1"

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


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    # how matmuls are scaled: README's table; auto = per layer, what this GPU gains from
    recipe: RecipeName = "off"
    # our kernels do the casts instead of torchao's: tensorwise family, amax, auto
    kernels: bool = False
    # delayed: activations and gradients by past steps' amaxes; kernels only
    scaling: Literal["current", "delayed"] = "current"
    # fast accumulation backward too: GPUs only, a CPU's emulation sums in fp32
    fast_backward: bool = False
    head: bool = False  # convert the head too; the loss is sensitive to it
    first_bf16: int = 0  # blocks at the input that stay in BF16
    last_bf16: int = 0  # blocks at the output that stay in BF16
    # names or patterns of the only Linears to convert; none = all but the head
    include: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()  # names or patterns of Linears to leave in BF16, such as layers.0.*
    # several ranks: gather weights as float8, half the bytes; tensorwise family only
    all_gather: bool = False

    @property
    def label(self) -> str:
        """Name in records and of a study's arm: "bf16", or the recipe and all else that is set but
        for all_gather, in the order of the fields, such as tensorwise+kernels+delayed+head or
        rowwise+first_bf16=2+skip=attn.out,layers.0.*"""
        if self.recipe == "off":
            return "bf16"
        words: list[str] = [self.recipe]
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default and f.name not in ("recipe", "all_gather"):
                text = ",".join(value) if isinstance(value, tuple) else value
                words.append(
                    f.name if value is True else text if f.name == "scaling" else f"{f.name}={text}"
                )
        return "+".join(words)

    def problems(self):
        if self.recipe == "off" and self != FP8Config():
            named = ", ".join(
                f"fp8.{f.name}" for f in fields(self) if getattr(self, f.name) != f.default
            )
            yield f"fp8.recipe=off converts nothing, yet {named} is set: name a recipe or drop it"
        for key, recipes in (
            ("all_gather", ("tensorwise", "tensorwise_gw_hp")),
            ("kernels", ("auto", *FP8_KERNELS)),
            ("scaling", FP8_KERNELS),
            ("fast_backward", ("auto", *FP8_SCALED_MM)),
        ):
            value = str(getattr(self, key)).lower()
            if value not in ("false", "current") and self.recipe not in ("off", *recipes):
                yield (
                    f"fp8.{key}={value} works with {', '.join(recipes)}, not"
                    f" fp8.recipe={self.recipe}: take one, or drop it"
                )
        if self.kernels and self.all_gather:
            yield (
                "fp8.kernels=true casts whole weights, fp8.all_gather=true gathers them as float8:"
                " set one of the two to false"
            )
        if self.scaling == "delayed" and not self.kernels:
            yield "fp8.scaling=delayed needs fp8.kernels=true"


def fp8_overrides(label: str) -> list[str]:
    """The overrides that turn a BF16 config into one of this FP8Config.label."""
    recipe, *rest = label.split("+")
    words = [
        word if "=" in word else f"scaling={word}" if word == "delayed" else f"{word}=true"
        for word in rest
    ]
    return [f"fp8.{word}" for word in (f"recipe={recipe}", *words)] if label != "bf16" else []


def by_name(label: str) -> FP8Config:
    """The settings with this label, such as tensorwise+kernels."""
    return read_options(FP8Config, [text.removeprefix("fp8.") for text in fp8_overrides(label)])
