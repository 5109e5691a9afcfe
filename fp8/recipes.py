"""The recipes of FP8: every fact about each, as data, and the section of a config that chooses one.

    python -m fp8.recipes          the tables of README.md and docs/fp8.md, made from these facts
    python -m fp8.recipes --write  put them there

Config choices, refusals, the plan, the model of speed and the tables of the documentation are made
from RECIPES. To add a recipe, add an entry here and its reference to tests/fp8/test_linears.py
(OPERANDS); fp8/README.md has the steps."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

import torch

from fp8 import casts
from fp8.casts import Casts
from fp8.trained_precision import BF16_BITS
from lib.bounds import within
from lib.command import command, read_options, run_command
from lib.errors import UserError
from lib.machine import ROOT

# --------------------------------------------------------------------------------------- operands

# torch has no E2M1 that it could compute with
E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, "e2m1"
Format = torch.dtype | str
FORMAT_NAMES: dict[Format | None, str] = {E4M3: "E4M3", E5M2: "E5M2", E2M1: "E2M1", None: "BF16"}
# scalings whose values serve a matmul over either dimension
FOR_BOTH_DIMENSIONS = ("tensor", "constant")


@dataclass(frozen=True)
class Operand:
    """How one operand is converted to FP8."""

    format: Format | None  # None: it stays in BF16
    # which values share a scale
    scaling: Literal["tensor", "row", "block", "tile", "constant"] = "tensor"
    # scale rounded down to a power of two: scaling itself then rounds nothing
    power_of_2: bool = False
    exponent: int = 0  # "constant" only: the scale is 2 ** exponent
    # of "tile" and "block", along the dimension that stays and that which is summed over
    tile: tuple[int, int] = (1, 1)
    is_stochastic: bool = False  # rounded up with a probability that makes the mean exact
    # "block" only: scaled as OCP's specification has it, by the power of two at the largest
    # magnitude alone, so that magnitudes above 1.75 of E4M3's largest power of two saturate
    saturates: bool = False

    def __post_init__(self) -> None:
        if self.saturates and self.scaling != "block":
            raise ValueError(f"saturates=True needs scaling='block', not {self.scaling!r}")

    @property
    def is_exact_in_bf16(self) -> bool:
        """Whether dequantised values are BF16 numbers: where every scale is a power of two."""
        return self.format is None or self.power_of_2 or self.scaling in ("block", "constant")


BF16_OPERAND = Operand(None)


# ---------------------------------------------------------------------------------------- recipes

# Who multiplies on a GPU where our kernels do not:
#   torchao    torchao's Float8Linear, with its recipe `torchao_name`
#   prototype  a prototype of torchao on GPUs of the generations `native_on`, emulated on others
#   matmul     torch's float8 matmul on plain casts: for scales that need no pass over a tensor
#   emulated   operands rounded, dequantised, multiplied
OnGPU = Literal["torchao", "prototype", "matmul", "emulated"]
FP8_MATMUL: tuple[OnGPU, ...] = ("torchao", "matmul")  # these end in torch's float8 matmul
# behind a recipe's name, as in FP8Config.label
KERNELS, DELAYED, BOUNDED = "+kernels", "+delayed", "+bounded"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that is known of a recipe.

    Its operands are those of y = x w' (input, weight), input gradient = g w (grad, weight), weight
    gradient = g' x (grad, input)."""

    name: str
    input: Operand
    weight: Operand
    grad: Operand
    weight_again: Operand | None = None  # of the input gradient, where it is another
    has_bf16_output: bool = False  # both operands of the output stay in BF16
    has_bf16_weight_grad: bool = False  # both operands of the weight gradient stay in BF16
    has_bf16_input_grad: bool = False  # both operands of the input gradient stay in BF16
    # the operands of the weight gradient are multiplied by a Hadamard matrix before
    is_rotated: bool = False
    norm: Operand | None = None  # of the weights of norms before its Linears; None: fp32, as BF16
    # the backward matmuls accumulate fast, as the forward one does; on a GPU. Set by a run's config
    fast_backward: bool = False

    multiple: int = 16  # inputs and outputs of a Linear must be multiples of it
    on_gpu: OnGPU | None = None  # None: nothing computes it on a GPU, where it is refused
    torchao_name: str = ""  # of torchao's recipe, from which the operands here may differ
    native_on: tuple[int, ...] = ()  # major compute capabilities that "prototype" runs on
    capability: tuple[int, int] = (0, 0)  # least one of a GPU that can run it; ATen checks it too
    has_kernels: bool = False  # our kernels compute it as well
    can_gather: bool = False  # fp8.all_gather=true gathers its weights as float8
    is_fast: bool = False  # made for speed: `auto` may choose it
    # bytes that casts move, by what stands behind the name in a label: "", "+kernels", ..
    casts: dict[str, Casts] = field(default_factory=dict, compare=False, repr=False)

    scales: str = ""  # README's table: which values share a scale
    use: str = ""  # docs/fp8.md's table: where it fits

    def __post_init__(self) -> None:
        for rule in self._broken_rules():
            raise ValueError(f"recipe {self.name}: {rule}")

    def _broken_rules(self) -> Iterator[str]:
        """The rules between the fields that this recipe contradicts."""
        if bool(self.torchao_name) != (self.on_gpu == "torchao"):
            yield "torchao_name goes with on_gpu='torchao'"
        if bool(self.native_on) != (self.on_gpu == "prototype"):
            yield "native_on goes with on_gpu='prototype'"
        if self.has_kernels and not self.has_one_scale_a_tensor:
            yield "our kernels scale whole tensors"
        if self.has_bf16_output and self.on_gpu != "emulated":
            yield "an emulation alone leaves the output in BF16"
        if self.norm and self.on_gpu != "emulated":
            yield "an emulation alone rounds the weights of norms"

    @property
    def weight_of_input_grad(self) -> Operand:
        """How the weight is rounded for the matmul of the input gradient."""
        # no `or`: torch 2.11 cannot trace the truth of a dataclass
        return self.weight if self.weight_again is None else self.weight_again

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.input, self.weight, self.grad, self.weight_of_input_grad

    @property
    def has_one_scale_a_tensor(self) -> bool:
        """Whether each operand has one scale, found from its largest magnitude."""
        return all(operand.scaling == "tensor" for operand in self.operands)

    @property
    def is_scaled_by_row(self) -> bool:
        return self.input.scaling == "row"

    @property
    def is_stochastic(self) -> bool:
        return any(operand.is_stochastic for operand in self.operands)

    @property
    def bits(self) -> int:
        """Of the narrowest format, 8 or 4."""
        return 4 if any(operand.format == E2M1 for operand in self.operands) else 8

    @property
    def fp8_matmuls(self) -> int:
        """How many of a Linear's three matmuls multiply FP8."""
        return 3 - self.has_bf16_output - self.has_bf16_weight_grad - self.has_bf16_input_grad

    @property
    def needs_fp32_emulation(self) -> bool:
        """Whether BF16 would round dequantised operands: an emulation then multiplies in fp32, and
        not in TF32."""
        return not all(operand.is_exact_in_bf16 for operand in self.operands)

    @property
    def is_emulated_on_gpus(self) -> bool:
        """Whether a GPU emulates it, or those do that lack a prototype."""
        return self.on_gpu in ("emulated", "prototype")

    @property
    def needs_precision_casts(self) -> bool:
        """Whether Inductor must keep BF16's roundings on a GPU: without them a compiled rowwise
        Linear behind an RMSNorm turns NaN (pytorch#150859)."""
        return self.is_scaled_by_row

    @property
    def keeps_fp8_alone(self) -> bool:
        """Whether, on a GPU, the backward pass needs nothing of a Linear's input but its FP8 copy:
        one scale a tensor serves both matmuls."""
        return self.has_kernels and not self.has_bf16_weight_grad

    @property
    def on_gpu_in_words(self) -> str:
        """Who multiplies on a GPU, as docs/fp8.md's table says it."""
        if self.on_gpu is None:
            return "refused"
        if self.on_gpu == "prototype":
            generation = "Hopper" if self.native_on == HOPPER else "Blackwell"
            return f"torchao's prototype on {generation}, else emulated"
        if self.on_gpu == "matmul":
            return "torch's float8 matmul"
        return self.on_gpu


# major compute capabilities
HOPPER = (9,)
BLACKWELL = tuple(range(10, 100))

_TENSOR, _TENSOR_GRAD = Operand(E4M3), Operand(E5M2)
_TENSOR_2, _TENSOR_GRAD_2 = Operand(E4M3, power_of_2=True), Operand(E5M2, power_of_2=True)
_ROW = Operand(E4M3, "row", power_of_2=True)
_MX = Operand(E4M3, "block", tile=(1, 32))  # OCP Microscaling specification 1.0, section 5
_ROW_128, _SQUARE_128 = Operand(E4M3, "tile", tile=(1, 128)), Operand(E4M3, "tile", tile=(128, 128))
_ROW_16, _SQUARE_16 = Operand(E2M1, "tile", tile=(1, 16)), Operand(E2M1, "tile", tile=(16, 16))
_ROW_16_GRAD = replace(_ROW_16, is_stochastic=True)

# float8 matmuls of ATen: one scale a tensor, one a row
_ADA, _HOPPER = (8, 9), (9, 0)

_ALL = (
    Recipe(
        name="tensorwise",
        input=_TENSOR,
        weight=_TENSOR,
        grad=_TENSOR_GRAD,
        on_gpu="torchao",
        torchao_name="tensorwise",
        capability=_ADA,
        has_kernels=True,
        can_gather=True,
        is_fast=True,
        casts={
            "": casts.TENSORWISE_CASTS,
            KERNELS: casts.TENSORWISE_KERNELS_CASTS,
            KERNELS + DELAYED: casts.TENSORWISE_DELAYED_CASTS,
            KERNELS + BOUNDED: casts.TENSORWISE_BOUNDED_CASTS,
        },
        scales="one per tensor",
        use="fastest on Hopper; one outlier coarsens its whole tensor",
    ),
    Recipe(
        name="tensorwise_gw_hp",
        input=_TENSOR,
        weight=_TENSOR,
        grad=_TENSOR_GRAD,
        has_bf16_weight_grad=True,
        on_gpu="torchao",
        torchao_name="tensorwise",
        capability=_ADA,
        has_kernels=True,
        can_gather=True,
        is_fast=True,
        casts={
            "": casts.TENSORWISE_GW_HP_CASTS,
            KERNELS: casts.TENSORWISE_GW_HP_KERNELS_CASTS,
        },
        scales="one per tensor",
        use="weight gradient in BF16: narrow layers, no transposed copies to cast",
    ),
    Recipe(
        name="tensorwise_gi_hp",
        input=_TENSOR,
        weight=_TENSOR,
        grad=_TENSOR_GRAD,
        has_bf16_input_grad=True,
        on_gpu="emulated",
        scales="one per tensor",
        use="input gradient in BF16: to tell which matmul costs",
    ),
    Recipe(
        name="tensorwise_o_hp",
        input=_TENSOR,
        weight=_TENSOR,
        grad=_TENSOR_GRAD,
        has_bf16_output=True,
        on_gpu="emulated",
        scales="one per tensor",
        use="output in BF16: to tell which matmul costs",
    ),
    Recipe(
        name="rowwise",
        input=_ROW,
        weight=_ROW,
        grad=_ROW,
        on_gpu="torchao",
        torchao_name="rowwise",
        capability=_HOPPER,
        is_fast=True,
        casts={"": casts.ROWWISE_CASTS},
        scales="one per row, powers of two",
        use="outliers stay in their row; many more casts",
    ),
    Recipe(
        name="rowwise_with_gw_hp",
        input=_ROW,
        weight=_ROW,
        grad=_ROW,
        weight_again=_TENSOR_2,
        has_bf16_weight_grad=True,
        on_gpu="torchao",
        torchao_name="rowwise_with_gw_hp",
        capability=_HOPPER,
        is_fast=True,
        casts={"": casts.ROWWISE_WITH_GW_HP_CASTS},
        scales="one per row, powers of two",
        use="the most accurate of torchao's",
    ),
    Recipe(
        name="amax",
        input=_TENSOR_2,
        weight=_TENSOR_2,
        grad=_TENSOR_GRAD_2,
        on_gpu="torchao",
        torchao_name="tensorwise",
        capability=_ADA,
        has_kernels=True,
        casts={
            "": casts.TENSORWISE_CASTS,
            KERNELS: casts.TENSORWISE_KERNELS_CASTS,
            KERNELS + DELAYED: casts.TENSORWISE_DELAYED_CASTS,
            KERNELS + BOUNDED: casts.TENSORWISE_BOUNDED_CASTS,
        },
        scales="one per tensor, powers of two",
        use="FP8-AMAX of [2309.17224](https://arxiv.org/abs/2309.17224): scales are powers of two",
    ),
    # Activations after an RMSNorm have rms 1; weights start at std sqrt(0.4 / C), about 2^-6;
    # gradients, in units of one token's loss, are around 2^-8. In the demo runs these constants
    # saturate nothing, and at most 1.3 % of a Linear's activations underflow.
    Recipe(
        name="cscale",
        input=Operand(E4M3, "constant"),
        weight=Operand(E4M3, "constant", exponent=6),
        grad=Operand(E5M2, "constant", exponent=8),
        on_gpu="matmul",
        capability=_ADA,
        scales="constant per kind of tensor",
        use="FP8-CSCALE of the same paper: constant scales, no pass for the largest magnitude",
    ),
    Recipe(
        name="mxfp8",
        input=_MX,
        weight=_MX,
        grad=_MX,
        multiple=32,
        on_gpu="prototype",
        native_on=BLACKWELL,
        scales="one per 32, powers of two",
        use="one scale for 32 values; Blackwell's units",
    ),
    Recipe(
        name="mxfp8_e5m2",
        input=_MX,
        weight=_MX,
        grad=replace(_MX, format=E5M2),
        multiple=32,
        on_gpu="emulated",
        scales="one per 32, powers of two",
        use="the same with gradients in E5M2",
    ),
    Recipe(
        name="mxfp8_norms",
        input=_MX,
        weight=_MX,
        grad=_MX,
        norm=replace(_MX, saturates=True),
        multiple=32,
        on_gpu="emulated",
        scales="one per 32, powers of two",
        use="`mxfp8` with the norms' weights in MXFP8 too, by OCP's rule for the scale, a published"
        " cause of instability (2506.20752)",
    ),
    Recipe(
        name="blockwise",
        input=_ROW_128,
        weight=_SQUARE_128,
        grad=_ROW_128,
        multiple=128,
        on_gpu="prototype",
        native_on=HOPPER,
        scales="one per 128, weights 128 x 128",
        use="DeepSeek-V3's (2412.19437)",
    ),
    Recipe(
        name="blockwise_e5m2",
        input=_ROW_128,
        weight=_SQUARE_128,
        grad=replace(_ROW_128, format=E5M2),
        multiple=128,
        on_gpu="emulated",
        scales="one per 128, weights 128 x 128",
        use="the same with gradients in E5M2",
    ),
    Recipe(
        name="nvfp4",
        input=_ROW_16,
        weight=_SQUARE_16,
        grad=_ROW_16_GRAD,
        on_gpu="emulated",
        scales="one per 16, weights 16 x 16",
        use="four bits, gradients rounded stochastically (2509.25149)",
    ),
    Recipe(
        name="nvfp4_nearest",
        input=_ROW_16,
        weight=_SQUARE_16,
        grad=_ROW_16,
        on_gpu="emulated",
        scales="one per 16, weights 16 x 16",
        use="the same with gradients rounded to nearest",
    ),
    Recipe(
        name="nvfp4_hadamard",
        input=_ROW_16,
        weight=_SQUARE_16,
        grad=_ROW_16_GRAD,
        is_rotated=True,
        on_gpu="emulated",
        scales="one per 16, weights 16 x 16",
        use="`nvfp4` with both operands of the weight gradient rotated, 16 tokens at a time",
    ),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


def names_where(condition: str) -> tuple[str, ...]:
    """Names of the recipes of which a fact, such as "has_kernels", holds."""
    return tuple(name for name, recipe in RECIPES.items() if getattr(recipe, condition))


# What `auto` may choose where the table says that it pays: the recipes made for speed.
CANDIDATES = names_where("is_fast")
KERNEL_CANDIDATES = tuple(f"{name}{KERNELS}" for name in CANDIDATES if RECIPES[name].has_kernels)
# what the table of timings calls a candidate -> its recipe
RECIPE_OF_CANDIDATE = {name: name for name in CANDIDATES}
RECIPE_OF_CANDIDATE |= {
    f"{name}{KERNELS}": name for name in CANDIDATES if RECIPES[name].has_kernels
}


def multiple_of(recipe: str) -> int:
    """What inputs and outputs of a Linear must be multiples of, under a value of fp8.recipe."""
    return RECIPES[recipe].multiple if recipe in RECIPES else 16


def needs_precision_casts(recipes: Iterable[str]) -> bool:
    """Whether Inductor must keep BF16's roundings for any of these values of fp8.recipe."""
    return any(RECIPES[name].needs_precision_casts for name in recipes if name in RECIPES)


def for_loss_scale(recipe: Recipe, loss_scale: float) -> Recipe:
    """The recipe for a loss multiplied by `loss_scale` before the backward pass, as a mean over a
    step's tokens is: dynamic scales follow by themselves, a constant gradient scale is divided by
    it (rounded to a power of two)."""
    if recipe.grad.scaling != "constant":
        return recipe
    exponent = recipe.grad.exponent - round(math.log2(loss_scale))
    return replace(recipe, grad=replace(recipe.grad, exponent=exponent))


# ------------------------------------------------------------------------- the section of a config

if TYPE_CHECKING:
    RecipeName = str
else:
    RecipeName = Literal["off", "auto", *RECIPES]


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    # how matmuls are scaled: README's table; auto = per layer, what this GPU gains from
    recipe: RecipeName = "off"
    # who casts: auto = our kernels on a GPU that holds whole weights, where the recipe has them,
    # torchao elsewhere; true = ours, also a head's loss within its matmul
    kernels: bool | Literal["auto"] = "auto"
    # delayed: activations and gradients by past steps' amaxes; bounded: the same, but behind a norm
    # by its bound, and the kernels of norm, SwiGLU and RoPE write FP8 themselves; our kernels only
    scaling: Literal["current", "delayed", "bounded"] = "current"
    # fast accumulation backward too, on GPUs: nobody is known to train with it, and one public
    # record reports NaN gradients by it
    fast_backward: bool = False
    head: bool = False  # convert the head too; the loss is sensitive to it
    first_bf16: int = within(0, math.inf, 0)  # blocks at the input that stay in BF16
    last_bf16: int = within(0, math.inf, 0)  # blocks at the output that stay in BF16
    # names or patterns of the only Linears to convert; none = all but the head
    include: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()  # names or patterns of Linears to leave in BF16, such as layers.0.*
    # several ranks: gather weights as float8, half the bytes; tensorwise family only
    all_gather: bool = False

    @property
    def label(self) -> str:
        """Its text for people and in records: "bf16", or the recipe and all else that is set but
        for all_gather, in the order of the fields, such as tensorwise+kernels+delayed+head or
        rowwise+first_bf16=2+skip=attn.out,layers.0.*

        Nothing is read back from it; from_label() is for what a person writes."""
        return "+".join(self.label_words)

    @property
    def label_words(self) -> list[str]:
        """What the label joins: the recipe, then a word a setting."""
        if self.recipe == "off":
            return ["bf16"]
        settings = [name for name in self._named() if name != "recipe"]
        return [self.recipe, *(self._word(name) for name in settings)]

    @property
    def is_on(self) -> bool:
        """Whether Linears are converted; else all is in BF16."""
        return self.recipe != "off"

    @property
    def bits(self) -> int:
        """Of the narrowest number format, 16, 8 or 4; `auto` takes recipes of 8 alone."""
        if not self.is_on:
            return BF16_BITS
        return RECIPES[self.recipe].bits if self.recipe in RECIPES else 8

    @property
    def file_label(self) -> str:
        """Its text as a part of file names."""
        return file_word(self.label)

    @property
    def overrides(self) -> list[str]:
        """The overrides that turn a BF16 config into one of this precision, all_gather aside."""
        return [f"fp8.{name}={self._text(name)}" for name in self._named()]

    def _named(self) -> list[str]:
        """Fields that the label and the overrides name."""
        return [name for name in self._changed() if name != "all_gather"]

    def _changed(self) -> list[str]:
        """Fields that have another value than their default; kernels=false changes no number."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if self.kernels is False:
            names.remove("kernels")
        return names

    def _word(self, name: str) -> str:
        """How a label names a field that is set."""
        value = getattr(self, name)
        if value is True:
            return name
        if name == "scaling":
            return str(value)
        return f"{name}={self._text(name)}"

    def _text(self, name: str) -> str:
        """A field's value as a command line has it."""
        value = getattr(self, name)
        if isinstance(value, bool):
            return str(value).lower()
        return ",".join(value) if isinstance(value, tuple) else str(value)

    def problems(self) -> Iterator[str]:
        """A sentence for each contradiction between the settings."""
        changed = self._changed()
        if self.recipe == "off" and changed:
            named = ", ".join(f"fp8.{name}" for name in changed)
            yield f"fp8.recipe=off converts nothing, yet {named} is set: name a recipe or drop it"
        for key in ("all_gather", "kernels", "scaling", "fast_backward"):
            if key in changed and self.recipe != "off":
                yield from self._recipe_problems(key)
        if self.kernels is True and self.all_gather:
            yield (
                "fp8.kernels=true casts whole weights, fp8.all_gather=true gathers them as float8:"
                " set one of the two to false"
            )
        if self.scaling != "current":
            yield from self._scaling_problems()

    def _recipe_problems(self, key: str) -> Iterator[str]:
        """A sentence where a key that is set does not work with fp8.recipe."""
        recipes = self._recipes_that_work_with(key)
        if self.recipe not in recipes:
            value = str(getattr(self, key)).lower()
            yield (
                f"fp8.{key}={value} works with {', '.join(recipes)}, not"
                f" fp8.recipe={self.recipe}: take one, or drop it"
            )

    def _recipes_that_work_with(self, key: str) -> tuple[str, ...]:
        if key == "all_gather":
            return names_where("can_gather")
        if key == "kernels":
            return ("auto", *names_where("has_kernels"))
        if key == "scaling" and self.scaling == "bounded":
            return names_where("keeps_fp8_alone")
        if key == "scaling":
            return names_where("has_kernels")
        by_matmul = [name for name, recipe in RECIPES.items() if recipe.on_gpu in FP8_MATMUL]
        return ("auto", *by_matmul)  # fast_backward

    def _scaling_problems(self) -> Iterator[str]:
        """A sentence where fp8.scaling lacks the kernels that it needs."""
        if self.all_gather:
            rival = "fp8.all_gather=true"
        elif self.kernels is False:
            rival = "fp8.kernels=false"
        else:
            return
        yield (
            f"fp8.scaling={self.scaling} needs our kernels (fp8.kernels=true): drop it or {rival}"
        )

    def size_problems(self, micro_batch_tokens: int, loss_chunk: int | None) -> Iterator[str]:
        """A sentence for each number of tokens that a weight gradient cannot sum over;
        fp8.selection checks the Linears.

        micro_batch_tokens: 0 where it is not known yet. loss_chunk: tokens, None where the head
        takes all at once or stays in BF16."""
        if self.recipe == "off":
            return
        multiple = multiple_of(self.recipe)
        sizes = {
            "model.loss_chunk": loss_chunk or 0,
            "data.micro_batch x model.n_ctx": micro_batch_tokens,
        }
        for key, size in sizes.items():
            if size % multiple:
                yield (
                    f"{key}={size} is no multiple of {multiple}, which fp8.recipe={self.recipe}"
                    " needs: change it, or fp8.recipe=off"
                )
        if loss_chunk and self.recipe in names_where("is_stochastic"):
            yield (
                f"model.loss_chunk would repeat fp8.recipe={self.recipe}'s noise in each chunk of"
                " the head: set fp8.head=false"
            )


def from_label(label: str) -> FP8Config:
    """The settings that a person names as FP8Config.label does, such as tensorwise+kernels. Raises
    UserError where no settings are called so."""
    return read_options(FP8Config, written_settings(label))


def written_settings(label: str) -> list[str]:
    """What a person names as FP8Config.label does, as key=value of FP8Config; not yet checked."""
    if label == "bf16":
        return []
    recipe, *words = label.split("+")
    return [f"recipe={recipe}", *map(_setting, words)]


def file_word(text: str) -> str:
    """A text as a part of file names."""
    return re.sub(r"[^\w.]+", "-", text)


def _setting(word: str) -> str:
    """A word of a label as key=value."""
    if "=" in word:
        return word
    if word in ("delayed", "bounded"):
        return f"scaling={word}"
    return f"{word}=true"


# ----------------------------------------------------------------- the tables of the documentation


def readme_table() -> str:
    """README's table: the formats of the three matmuls of each recipe, and what shares a scale."""
    lines = [
        "| recipe | output | input gradient | weight gradient | scales |",
        "|---|---|---|---|---|",
    ]
    for recipe in RECIPES.values():
        matmuls = [
            _matmul(recipe.input, recipe.weight, recipe.has_bf16_output),
            _matmul(recipe.grad, recipe.weight_of_input_grad, recipe.has_bf16_input_grad),
            _matmul(recipe.grad, recipe.input, recipe.has_bf16_weight_grad),
        ]
        lines.append(f"| `{recipe.name}` | {' | '.join(matmuls)} | {recipe.scales} |")
    lines.append(
        "| `auto` | | | | per Linear: the fastest on this GPU by a table of timings, or BF16 |"
    )
    return "\n".join(lines)


def _matmul(first: Operand, second: Operand, is_bf16: bool = False) -> str:
    if is_bf16:
        return "BF16 x BF16"
    return f"{FORMAT_NAMES[first.format]} x {FORMAT_NAMES[second.format]}"


def docs_table() -> str:
    """docs/fp8.md's table: where each recipe fits, and who computes it."""
    lines = ["| recipe | where it fits | on a GPU | our kernels |", "|---|---|---|---|"]
    for recipe in RECIPES.values():
        kernels = "yes" if recipe.has_kernels else ""
        lines.append(f"| `{recipe.name}` | {recipe.use} | {recipe.on_gpu_in_words} | {kernels} |")
    lines.append("| `auto` | per Linear the recipe that this GPU runs fastest, or BF16 | | yes |")
    return "\n".join(lines)


TABLES = {"README.md": readme_table, "docs/fp8.md": docs_table}
BEGIN, END = "<!-- made by python -m fp8.recipes --write -->", "<!-- end -->"


def with_table(page: str, table: str) -> str:
    """The page with `table` between the two markers. Raises UserError where they are not there."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise UserError(f"the page lacks the lines {BEGIN} and {END}: put the table between them")
    return pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", page)


@dataclass(frozen=True, kw_only=True)
class Options:
    write: bool = False  # put the tables into the pages instead of printing them


@command(__doc__, Options)
def main(options: Options) -> None:
    """Print the tables, or write them."""
    for name, table in TABLES.items():
        if options.write:
            path = ROOT / name
            path.write_text(with_table(path.read_text(), table()))
        else:
            print(f"{name}\n\n{table()}\n")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
