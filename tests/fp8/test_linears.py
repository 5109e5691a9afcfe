"""Each recipe's three matmuls against fp64 arithmetic, torchao and torchao's prototypes. On our own
kernels: fp8/test_kernels.py; on several ranks: runtime/test_two_ranks.py.

The reference of every recipe is here: OPERANDS."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fp8.linears import set_position, torchao_blockwise, torchao_mx
from fp8.noise import noise_at
from fp8.recipes import RECIPES, Operand, Recipe, from_label, multiple_of
from fp8.rounding import fake_quantise, rotated
from tests.helpers.fp8_models import (
    KERNELS,
    KINDS,
    Passes,
    distance,
    linear,
    operands,
    passes,
)

# which tests of other rooms import here
from tests.helpers.fp8_models import NAMES as NAMES
from tests.helpers.fp8_models import NATIVE as NATIVE
from tests.helpers.fp8_models import SIZE as SIZE
from tests.helpers.fp8_models import build as build
from tests.helpers.fp8_models import tokens as tokens

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, "e2m1"
Format = torch.dtype | str | None
LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
MANTISSA_AND_LEAST_EXPONENT = {E4M3: (3, -6), E5M2: (2, -14), E2M1: (1, 0)}

# ---------------------------------------------------------------------------- the reference in fp64


def rounded(x: torch.Tensor, format: Format, noise: torch.Tensor | None = None) -> torch.Tensor:
    """x in fp64, rounded to the format by its definition, not by torch's casts; with noise in
    [0, 1) up with the probability that makes the mean exact."""
    (bits, least), largest = MANTISSA_AND_LEAST_EXPONENT[format], LARGEST[format]
    x = x.clamp(-largest, largest)
    exponent = torch.floor(torch.log2(x.abs().clamp(min=1e-300))).clamp(min=least)
    step = 2.0 ** (exponent - bits)
    if noise is not None:
        floor = torch.floor(x / step)
        return (floor + (noise < x / step - floor)) * step
    # torch.round: half to even, as the formats do
    return (torch.round(x / step) * step).clamp(-largest, largest)


# What a scale is shared by: "tensor"; "power", a tensor's that is a power of two; "row", a power of
# two as torchao has it; a tile (along the dimension that stays, that is summed over); a number, the
# exponent of a constant scale.
Scaling = str | tuple[int, int] | int | None


def quantised(
    x: torch.Tensor, operand: tuple[Format, Scaling], dim: int, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (M, N) rounded as (format, scaling) says and dequantised, in fp64, and its scales; `dim` is
    what the matmul sums over."""
    format, scaling = operand
    if format is None:
        return x.double(), None
    if isinstance(scaling, tuple):
        return quantised_in_tiles(x, format, scaling, dim, noise)
    if isinstance(scaling, int):
        scale = torch.tensor([[2.0**scaling]])
    else:
        scale = scale_of_amax(x.double().abs(), format, scaling, dim)
    return rounded((x.float() * scale).double(), format) / scale.double(), scale.double()


def scale_of_amax(
    magnitudes: torch.Tensor, format: Format, scaling: Scaling, dim: int
) -> torch.Tensor:
    """fp32 scales that bring the largest value to the format's, or below it to a power of two."""
    if scaling == "row":
        amax = magnitudes.amax(dim, keepdim=True)
    else:
        amax = magnitudes.max().view(1, 1)
    scale = (LARGEST[format] / amax.clamp(min=1e-12)).float()
    return scale if scaling == "tensor" else 2.0 ** scale.log2().floor()


def quantised_in_tiles(
    x: torch.Tensor,
    format: Format,
    tile: tuple[int, int],
    dim: int,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantised() where each tile has a scale."""
    if dim == 0:
        q, scale = quantised_in_tiles(x.t(), format, tile, 1, None if noise is None else noise.t())
        return q.t(), scale
    tiles = x.float().unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
    amax = tiles.abs().amax((1, 3), keepdim=True).double()
    scale = scale_of_tiles(amax, format, tile).float().expand_as(tiles).reshape(x.shape)
    q = rounded((x.float() * scale).double(), format, noise) / scale.double()
    return q, scale[:, :: tile[1]].double()


def scale_of_tiles(amax: torch.Tensor, format: Format, tile: tuple[int, int]) -> torch.Tensor:
    if tile == (1, 32):  # MX: powers of two by which nothing saturates
        return 2.0 ** -torch.ceil(torch.log2(amax / LARGEST[format])).clamp(min=-127)
    if format is not E2M1:
        return LARGEST[format] / amax.clamp(min=1e-12)
    # NVFP4: tiles' scales are E4M3 numbers, for which the tensor has an fp32 scale
    whole = (448 / (amax.max() / 6).clamp(min=1e-12)).float()
    in_e4m3 = rounded((amax.float() / 6 * whole).double(), E4M3).clamp(min=2**-9)
    return whole / in_e4m3.float()


# How y = x w' rounds its input and weight, the input gradient g w its gradient and weight, the
# weight gradient g' x both.
TENSOR, POWER, ROW, MX, BF16 = (
    (E4M3, "tensor"),
    (E4M3, "power"),
    (E4M3, "row"),
    (E4M3, (1, 32)),
    (None, None),
)
MX_GRAD = (E5M2, (1, 32))
ROW_128, SQUARE_128, ROW_128_GRAD = (E4M3, (1, 128)), (E4M3, (128, 128)), (E5M2, (1, 128))
ROW_16, SQUARE_16 = (E2M1, (1, 16)), (E2M1, (16, 16))
OPERANDS = {
    "tensorwise": (TENSOR, TENSOR, (E5M2, "tensor"), TENSOR, (E5M2, "tensor"), TENSOR),
    "tensorwise_gw_hp": (TENSOR, TENSOR, (E5M2, "tensor"), TENSOR, BF16, BF16),
    "tensorwise_gi_hp": (TENSOR, TENSOR, BF16, BF16, (E5M2, "tensor"), TENSOR),
    "tensorwise_o_hp": (BF16, BF16, (E5M2, "tensor"), TENSOR, (E5M2, "tensor"), TENSOR),
    "rowwise": (ROW,) * 6,
    "rowwise_with_gw_hp": (ROW, ROW, ROW, POWER, BF16, BF16),
    "amax": (POWER, POWER, (E5M2, "power"), POWER, (E5M2, "power"), POWER),
    "cscale": ((E4M3, 0), (E4M3, 6), (E5M2, 8), (E4M3, 6), (E5M2, 8), (E4M3, 0)),
    "mxfp8": (MX,) * 6,
    "mxfp8_e5m2": (MX, MX, MX_GRAD, MX, MX_GRAD, MX),
    "mxfp8_norms": (MX,) * 6,
    "blockwise": (ROW_128, SQUARE_128, ROW_128, SQUARE_128, ROW_128, ROW_128),
    "blockwise_e5m2": (ROW_128, SQUARE_128, ROW_128_GRAD, SQUARE_128, ROW_128_GRAD, ROW_128),
    **dict.fromkeys(
        ("nvfp4", "nvfp4_nearest", "nvfp4_hadamard"),
        (ROW_16, SQUARE_16, ROW_16, SQUARE_16, ROW_16, ROW_16),
    ),
}


Noises = tuple[torch.Tensor | None, torch.Tensor | None]


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def reference(
    recipe: str,
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    noise: Noises = (None, None),
    turned: Callable[[torch.Tensor], torch.Tensor] = unchanged,
) -> Passes:
    """Output, input gradient, weight gradient of y = x w' in fp64 from explicitly quantised x (M,
    K), w (N, K), g (M, N).

    noise: of g's roundings for the two gradients; turned: what the operands of the weight gradient
    go through before."""

    def q(*arguments: object) -> torch.Tensor:
        return quantised(*arguments)[0]

    x_, w_, g_, w_again, g_again, x_again = OPERANDS[recipe]
    return (
        q(x, x_, 1) @ q(w, w_, 1).T,
        q(g, g_, 1, noise[0]) @ q(w, w_again, 0),
        q(turned(g), g_again, 0, noise[1]).T @ q(turned(x), x_again, 0),
    )


# ------------------------------------------------------------------------ one Linear, against fp64

LOSS_SCALE = 2.0**-12  # a mean loss over 2**12 tokens: gradients 2**12 smaller, of the same values
POSITION = 1000  # of stochastic rounding


def operands_for(label: str, kind: str) -> Passes:
    """operands() of a size that the recipe takes."""
    is_in_blocks = multiple_of(from_label(label).recipe) == 128
    return operands(kind, 256, 384, 128) if is_in_blocks else operands(kind)


def noises(recipe: Recipe, g: torch.Tensor, salt: int) -> Noises:
    """What stochastic rounding adds to g for its two matmuls, where the recipe rounds so."""
    if not recipe.grad.is_stochastic:
        return None, None
    position = torch.tensor(POSITION)
    return noise_at(g.shape, position, salt), noise_at(g.shape, position, salt + 2**60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", [*RECIPES, *KERNELS])
def test_the_three_matmuls_are_those_of_explicit_quantisation(label: str, kind: str):
    """Up to the rounding of the result: to BF16, or fp32 for FP8 weight gradients of our
    kernels."""
    recipe = RECIPES[from_label(label).recipe]
    x, w, g = operands_for(label, kind)
    holder = linear(w, label, loss_scale=LOSS_SCALE)
    set_position(holder, POSITION)
    noise = noises(recipe, g, getattr(holder[0], "salt", 0))
    turned = rotated if recipe.is_rotated else unchanged
    expected = reference(recipe.name, x, w, g, noise, turned)
    y, grad_x, grad_w = passes(holder, x, g * LOSS_SCALE)
    computed = y, grad_x / LOSS_SCALE, grad_w / LOSS_SCALE
    distances = list(map(distance, computed, expected))
    assert all(d < 4e-3 for d in distances), distances  # not max(): it can lose a NaN
    if label in ("tensorwise+kernels", "amax+kernels"):
        assert distances[2] < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_fake_quantise_rounds_as_the_matmuls_do(name: str, kind: str):
    """By which probes measure."""
    recipe, bf16 = RECIPES[name], Operand(None)
    x, w, g = operands_for(name, kind)
    noise = noises(recipe, g, 7)
    turned = rotated if recipe.is_rotated else unchanged
    x_first, w_first = recipe.input, recipe.weight
    if recipe.has_bf16_output:
        x_first = w_first = bf16
    g_first, w_again = recipe.grad, recipe.weight_again or recipe.weight
    if recipe.has_bf16_input_grad:
        g_first = w_again = bf16
    g_again, x_again = recipe.grad, recipe.input
    if recipe.has_bf16_weight_grad:
        g_again = x_again = bf16

    def q(tensor: torch.Tensor, operand: Operand, dim: int = -1, noise=None) -> torch.Tensor:
        return fake_quantise(tensor, operand, dim, noise).double()

    fake = (
        q(x, x_first) @ q(w, w_first).T,
        q(g, g_first, noise=noise[0]) @ q(w, w_again, 0),
        q(turned(g), g_again, 0, noise[1]).T @ q(turned(x), x_again, 0),
    )
    expected = reference(name, x, w, g, noise, turned)
    distances = list(map(distance, fake, expected))
    assert all(d < 1e-6 for d in distances), distances


# --------------------------------------------------------------------------------- against torchao


@pytest.fixture
def fast_sums(monkeypatch: pytest.MonkeyPatch, emulated_scaled_mm: None) -> list[bool]:
    """Of each float8 matmul of torchao's, whether it was to accumulate fast."""
    asked_for: list[bool] = []
    multiply = torch._scaled_mm

    def noted(*arguments: object, **options: object):
        asked_for.append(options["use_fast_accum"])
        return multiply(*arguments, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    return asked_for


TORCHAO = [recipe.name for recipe in RECIPES.values() if recipe.on_gpu == "torchao"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", TORCHAO)
def test_the_emulation_on_a_cpu_is_what_torchao_computes_on_a_gpu(
    recipe: str, kind: str, emulated_scaled_mm: None
):
    """Same scales, same float8 values, same roundings of the result; another order of sums may tip
    a rounding to BF16."""
    x, w, g = operands(kind)
    ours, torchaos = linear(w, recipe), linear(w, recipe, "cuda")
    assert type(ours[0]).__name__ == "EmulatedLinear"
    assert type(torchaos[0]).__name__ == "Float8Linear"
    for our_tensor, torchaos_tensor in zip(passes(ours, x, g), passes(torchaos, x, g), strict=True):
        assert (our_tensor != torchaos_tensor).float().mean() < 0.01
        assert distance(our_tensor, torchaos_tensor) <= 1e-3


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("recipe", TORCHAO)
def test_backward_matmuls_accumulate_fast_where_that_is_asked_for(
    recipe: str, is_fast: bool, fast_sums: list[bool]
):
    x, w, g = operands("random")
    label = f"{recipe}+fast_backward" if is_fast else recipe
    passes(linear(w, label, "cuda"), x, g)
    backward_matmuls = 1 if recipe.endswith("gw_hp") else 2
    assert fast_sums == [True] + backward_matmuls * [is_fast]


def assert_same_passes(ours, torchaos, kind: str) -> None:
    """Up to the order of sums."""
    x, _, g = operands(kind, 256, 384, 128)
    distances = list(map(distance, passes(ours, x, g), passes(torchaos, x, g)))
    assert all(d < 1e-3 for d in distances), distances


@pytest.mark.parametrize("kind", KINDS)
def test_the_emulation_of_mxfp8_is_what_torchaos_prototype_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Of weights in BF16, by torchao's own emulation."""
    from torchao.prototype.moe_training import mxfp8_linear

    multiply = mxfp8_linear._to_mxfp8_then_scaled_mm

    def emulated(x, w, _, mode):
        return multiply(x, w, mxfp8_linear.KernelPreference.EMULATED, mode)

    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(mxfp8_linear, "_to_mxfp8_then_scaled_mm", emulated)
    _, w, _ = operands(kind, 256, 384, 128)
    ours, torchaos = linear(w.bfloat16(), "mxfp8"), linear(w, "mxfp8")
    torchaos[0].forward = partial(torchao_mx, w=torchaos[0].weight)
    assert_same_passes(ours, torchaos, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_emulation_of_blockwise_is_what_torchaos_prototype_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """With its references in the place of its GPU kernels."""
    from torchao.prototype.blockwise_fp8_training import kernels
    from torchao.prototype.blockwise_fp8_training import linear as blockwise

    rows = kernels.torch_blockwise_scale_act_quant_lhs
    squares = kernels.torch_blockwise_scale_weight_quant
    for name, quantise in {
        "act_quant_lhs": rows,
        "act_quant_rhs": kernels.torch_blockwise_scale_act_quant_rhs,
        "act_quant_transposed_lhs": lambda x, _: rows(x.t().contiguous()),
        "weight_quant_rhs": lambda w, block_size: squares(w),
        "weight_quant_transposed_rhs": lambda w, block_size: [t.t() for t in squares(w)],
    }.items():
        monkeypatch.setattr(blockwise, f"triton_fp8_blockwise_{name}", quantise)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(blockwise, "_run_blockwise_mm", multiply_blocks)
    _, w, _ = operands(kind, 256, 384, 128)
    ours, torchaos = linear(w, "blockwise"), linear(w, "blockwise")
    torchaos[0].forward = partial(torchao_blockwise, w=torchaos[0].weight)
    assert_same_passes(ours, torchaos, kind)


def multiply_blocks(mat_a, mat_b, scale_a, scale_b, out_dtype, triton_scale_b=None, **_: object):
    """What torchao's GPU kernel computes of dequantised blocks."""
    a = dequantised(mat_a, scale_a)
    b = dequantised(mat_b, scale_b if triton_scale_b is None else triton_scale_b)
    return (a @ b).to(out_dtype)


def dequantised(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.float() * F.interpolate(scale[None, None], q.shape)[0, 0]
