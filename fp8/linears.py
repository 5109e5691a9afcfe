"""Linears that are emulated, and torchao's: its Float8Linear and its prototypes.

On a CPU every recipe is emulated. Our own Linears are in fp8/kernels.py; fp8/convert.py decides
which one takes a Linear's place."""

import logging
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from fp8.compiled_rounding import rounded_in_graph
from fp8.cpu_rounding import can_round, round_by_bits
from fp8.matmul import has_bf16_units, in_dtype, scaled_mm_of_bf16
from fp8.noise import noise_at
from fp8.recipes import (
    BF16_OPERAND,
    FOR_BOTH_DIMENSIONS,
    FP8Config,
    Operand,
    Recipe,
)
from fp8.rounding import fake_quantise, quantise_whole, rotated
from lib.errors import UserError


class ConvertedLinear(nn.Linear):
    """A Linear without bias that stands in the place of another one and takes over its weight:
    the same Parameter under the same name."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)  # nn.Linear's would draw a weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", None)
        self.train(linear.training)


# ---------------------------------------------------------------------------------------- emulated


def emulation_dtype(
    recipe: Recipe, device_type: str, dtype: torch.dtype, has_units: bool = False
) -> torch.dtype:
    """In which the dequantised operands of activations in `dtype` are multiplied: `dtype` where it
    holds them exactly, else fp32.

    fp32 also on a CPU whose BF16 units are not to be used (has_units): products of float8 values
    are exact there, and only their sums and the result round, as on real units. On a GPU
    runtime.parallel.set_torch_flags() keeps TF32 from rounding fp32."""
    if recipe.needs_fp32_emulation or (device_type == "cpu" and not has_units):
        return torch.float32
    return dtype


class Rounded(NamedTuple):
    """An operand of an emulated matmul."""

    values: torch.Tensor  # in emulation_dtype() and dequantised, or float8 values in BF16
    inverse: torch.Tensor | None = None  # () of the scale of float8 values

    def t(self) -> "Rounded":
        return Rounded(self.values.t(), self.inverse)

    def times(self, other: "Rounded", dtype: torch.dtype) -> torch.Tensor:
        """self (M, K) @ other (K, N) in `dtype`, rounded once."""
        if self.inverse is None or other.inverse is None:
            return in_dtype(self.values @ other.values, dtype)
        return scaled_mm_of_bf16(self.values, other.values, self.inverse * other.inverse)


class EmulatedMatmul(torch.autograd.Function):
    """x (M, K), w (N, K) -> x w' (M, N), operands rounded as the recipe says, then multiplied;
    numerics only.

    position (), salt: of noise_at(). has_units: whether the BF16 units of a CPU multiply, where
    operands or their float8 values are BF16 numbers. rounds_ahead: whether the forward pass also
    keeps what the backward pass will multiply, where that saves time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        position: torch.Tensor | None,
        salt: torch.Tensor | None,
        recipe: Recipe,
        has_units: bool,
        rounds_ahead: bool = False,
    ) -> torch.Tensor:
        how = Rounding(recipe, x.dtype, has_units)
        multiplies_x_again = not (recipe.has_bf16_weight_grad or recipe.is_rotated)
        qx, x_again = how.rounded_twice(x, recipe.input, rounds_ahead and multiplies_x_again)
        if recipe.has_bf16_weight_grad:
            x_again = None
        multiplies_w_again = not recipe.has_bf16_input_grad and recipe.weight_again is None
        qw, w_again = how.rounded_twice(w, recipe.weight, rounds_ahead and multiplies_w_again)
        if not (rounds_ahead and multiplies_w_again):
            w_again = None  # another copy of the weight would cost memory
        ctx.is_rounded = x_again is not None, w_again is not None
        ctx.save_for_backward(*(x_again or Rounded(x)), *(w_again or Rounded(w)), position, salt)
        ctx.how, ctx.w_dtype = how, w.dtype
        if recipe.has_bf16_output:
            qx = how.rounded(x, BF16_OPERAND)
            qw = how.rounded(w.to(x.dtype), BF16_OPERAND)
        return qx.times(qw.t(), x.dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple:
        x, x_inverse, w, w_inverse, position, salt = ctx.saved_tensors
        is_x_rounded, is_w_rounded = ctx.is_rounded
        how = ctx.how
        recipe, dtype = how.recipe, how.dtype
        noise = noise_again = None
        if position is not None:
            noise = noise_at(g.shape, position, salt)
            # an independent draw for the weight gradient: the salts of layers have 56 bits
            noise_again = noise_at(g.shape, position, salt + 2**60)
        multiplies_g_again = not (recipe.has_bf16_weight_grad or recipe.is_rotated)
        # g rounded along the dimension that each of its two matmuls sums over
        qg, g_again = how.rounded_twice(g, recipe.grad, multiplies_g_again, noise)

        # the input gradient g w
        if recipe.has_bf16_input_grad:
            w_bf16 = how.rounded(w.to(dtype), BF16_OPERAND)
            grad_x = how.rounded(g, BF16_OPERAND).times(w_bf16, dtype)
        elif is_w_rounded:
            grad_x = qg.times(Rounded(w, w_inverse), dtype)
        else:
            grad_x = qg.times(how.rounded(w, recipe.weight_of_input_grad, 0), dtype)

        # the weight gradient g' x
        if recipe.has_bf16_weight_grad:
            x_bf16 = how.rounded(x, BF16_OPERAND)
            grad_w = how.rounded(g, BF16_OPERAND).t().times(x_bf16, dtype)
        else:
            if recipe.is_rotated:
                g, x = rotated(g), rotated(x)
            # scales along the dimension that this matmul sums over
            if g_again is None:
                g_again = how.rounded(g, recipe.grad, 0, noise_again)
            x_again = Rounded(x, x_inverse) if is_x_rounded else how.rounded(x, recipe.input, 0)
            grad_w = g_again.t().times(x_again, dtype)
        return grad_x, grad_w.to(ctx.w_dtype), None, None, None, None, None


@dataclass(frozen=True)
class Rounding:
    """How an emulated Linear rounds an operand."""

    recipe: Recipe
    dtype: torch.dtype  # of the activations
    has_units: bool  # as EmulatedMatmul has it

    def rounded(
        self,
        x: torch.Tensor,
        operand: Operand,
        dim: int = -1,
        noise: torch.Tensor | None = None,
    ) -> Rounded:
        """x (any shape) rounded as `operand` says; `dim` and noise as in fake_quantise()."""
        on_units = self._is_on_units(x)
        if on_units and operand.format is None:
            return Rounded(x)
        if on_units and self.recipe.has_one_scale_a_tensor and not operand.is_exact_in_bf16:
            return Rounded(*quantise_whole(x, operand))
        by_bits = self._by_bits(x, operand, dim) if noise is None else None
        if by_bits is not None:
            return by_bits[0]
        dtype = emulation_dtype(self.recipe, x.device.type, self.dtype, on_units)
        return Rounded(fake_quantise(x, operand, dim, noise, dtype))

    def rounded_twice(
        self,
        x: torch.Tensor,
        operand: Operand,
        needs_both: bool,
        noise: torch.Tensor | None = None,
    ) -> tuple[Rounded, Rounded | None]:
        """x (M, N) rounded for a matmul that sums over its columns, and for another that sums over
        its rows: the same where one rounding serves both; None where it is not needed or is a
        rounding of its own."""
        if operand.scaling in FOR_BOTH_DIMENSIONS:
            q = self.rounded(x, operand, -1, noise)
            return q, q
        both = self._by_bits(x, operand, -1, 0) if needs_both and noise is None else None
        if both is not None:
            return both[0], both[1]
        return self.rounded(x, operand, -1, noise), None

    def _by_bits(self, x: torch.Tensor, operand: Operand, *dims: int) -> list[Rounded] | None:
        """x for each of `dims` where round_by_bits() rounds it."""
        if not can_round(x, operand):
            return None
        dtype = emulation_dtype(self.recipe, x.device.type, self.dtype, self._is_on_units(x))
        if torch.compiler.is_compiling():
            assert isinstance(operand.format, torch.dtype)
            values = rounded_in_graph(x, operand.format, operand.scaling, operand.tile, dims, dtype)
            return [Rounded(q) for q in values]
        by_bits = round_by_bits(x, operand, *dims)
        return None if by_bits is None else [Rounded(q.to(dtype)) for q in by_bits]

    def _is_on_units(self, x: torch.Tensor) -> bool:
        return self.has_units and not x.is_cuda and self.dtype == torch.bfloat16


class EmulatedLinear(ConvertedLinear):
    """A Linear whose matmuls follow `recipe` by emulation."""

    def __init__(self, linear: nn.Linear, recipe: Recipe):
        super().__init__(linear)
        self.recipe = recipe
        self.has_units = has_bf16_units()  # fp8.bf16_in_fp32 does without
        # Both () int64, see set_position(): tensors, because torch.compile would compile each layer
        # anew for a number of its own.
        self.position: torch.Tensor | None = None
        self.salt: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (M, K)
        return self.multiply(rows).view(*x.shape[:-1], -1)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """(M, K) -> (M, N)"""
        is_on_cpu = rows.device.type == "cpu"
        return EmulatedMatmul.apply(
            rows,
            self.weight,
            self.position,
            self.salt,
            self.recipe,
            self.has_units,
            is_on_cpu and torch.is_grad_enabled(),
        )

    def place(self, name: str, position: int, seed: int) -> None:
        """Set where in the run's tokens the next pass begins; `name` is this Linear's own."""
        if self.position is None or self.salt is None:
            salt = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            self.position = torch.zeros((), dtype=torch.int64, device=self.weight.device)
            self.salt = torch.full_like(self.position, int.from_bytes(salt, "little"))
        self.position.fill_(position)


def set_position(model: nn.Module, position: int, seed: int = 0) -> None:
    """Number among the run's tokens of the first token that the next pass through `model` sees:
    with the seed and the layer it decides the noise of recipes with stochastic rounding. Without a
    position they round to nearest."""
    for name, module in model.named_modules():
        if isinstance(module, EmulatedLinear) and module.recipe.is_stochastic:
            module.place(name, position, seed)


def noise_of(linear: nn.Module, g: torch.Tensor) -> torch.Tensor | None:
    """The noise with which a converted Linear rounds its output's gradient g (..., N) for the
    input's; None: to nearest."""
    if not isinstance(linear, EmulatedLinear) or linear.position is None or linear.salt is None:
        return None
    return noise_at(g.flatten(0, -2).shape, linear.position, linear.salt).view_as(g)


# ---------------------------------------------------------------------------- torchao's prototypes


class PrototypeLinear(EmulatedLinear):
    """A Linear that a prototype of torchao computes, on GPUs whose units it is for; emulated on
    others."""

    def __init__(self, linear: nn.Linear, recipe: Recipe, is_native: bool):
        super().__init__(linear, recipe)
        self.is_native = is_native
        if is_native:
            # which torch 2.11 does not trace by itself
            torch.compiler.allow_in_graph(torch._scaled_mm_v2)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        # of a prompt there may be any number of rows
        fits = len(rows) % self.recipe.multiple == 0
        if self.is_native and rows.is_cuda and fits:
            return PROTOTYPES[self.recipe.name](rows, self.weight)
        return super().multiply(rows)


def torchao_mx(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (M, K), w (N, K) -> (M, N) by MXFP8 on Blackwell."""
    from torchao.prototype.moe_training import mxfp8_linear as mx

    return mx._to_mxfp8_then_scaled_mm(
        x.contiguous(), w.to(x.dtype), mx.KernelPreference.AUTO, mx.ScaleCalculationMode.RCEIL
    )


def torchao_blockwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (M, K), w (N, K) -> (M, N) by scales of 128 values on Hopper."""
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    # before it, Triton's matmuls
    assert torch.version.cuda is not None
    has_cublas = tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)
    return fp8_blockwise_mm.apply(x.contiguous(), w, 128, x.dtype, not has_cublas)


# recipe -> what multiplies; each with on_gpu="prototype" has one
PROTOTYPES = {"mxfp8": torchao_mx, "blockwise": torchao_blockwise}


# --------------------------------------------------------------------------------------- torchao's


def torchao_linear(
    linear: nn.Linear, recipe: Recipe, settings: FP8Config, is_emulated: bool
) -> nn.Module:
    """torchao's Linear of a recipe in the place of `linear`, or with is_emulated torchao's own
    emulation of it. Raises UserError where torchao's recipe rounds otherwise than ours says."""
    # of compiled extensions for other hardware, of a deprecated call of its own
    logging.disable(logging.WARNING)
    import torchao.float8 as float8  # here: BF16 runs and readers of checkpoints never load it

    logging.disable(logging.NOTSET)
    base = float8.Float8LinearConfig.from_recipe_name(recipe.torchao_name)
    base = replace(base, round_scales_to_power_of_2=recipe.input.power_of_2)
    check_torchao(recipe, base)
    backward = float8.Float8GemmConfig(use_fast_accum=settings.fast_backward)
    config = replace(
        base,
        enable_fsdp_float8_all_gather=settings.all_gather,
        emulate=is_emulated,
        gemm_config_grad_input=backward,
        gemm_config_grad_weight=backward,
    )
    if recipe.has_bf16_weight_grad:
        disabled = float8.config.ScalingType.DISABLED
        x_cast = float8.CastConfig(scaling_type=disabled, target_dtype=recipe.input.format)
        g_cast = float8.CastConfig(scaling_type=disabled, target_dtype=recipe.grad.format)
        config = replace(
            config,
            cast_config_input_for_grad_weight=x_cast,
            cast_config_grad_output_for_grad_weight=g_cast,
        )
    return float8.convert_to_float8_training(linear, config=config)


def check_torchao(recipe: Recipe, config: Any) -> None:
    """Raise UserError where torchao's configuration rounds an operand otherwise than the recipe
    says: it would compute another recipe without a word."""
    operands = {
        "input": recipe.input,
        "weight": recipe.weight,
        "grad_output": recipe.grad,
        "weight_for_grad_input": recipe.weight_of_input_grad,
    }
    if not recipe.has_bf16_weight_grad:
        operands |= {
            "input_for_grad_weight": recipe.input,
            "grad_output_for_grad_weight": recipe.grad,
        }
    granularities = {"TENSORWISE": "tensor", "AXISWISE": "row"}
    for name, operand in operands.items():
        cast_config = getattr(config, f"cast_config_{name}")
        computed = Operand(
            cast_config.target_dtype,
            granularities[cast_config.scaling_granularity.name],  # type: ignore[arg-type]
            config.round_scales_to_power_of_2,
        )
        is_dynamic = cast_config.scaling_type.name == "DYNAMIC"
        if computed != operand or not is_dynamic or recipe.has_bf16_input_grad:
            raise UserError(
                f"fp8.recipe={recipe.name} cannot be computed by torchao's"
                f" {recipe.torchao_name!r}, which rounds {name} as {computed} and not as {operand}:"
                " correct on_gpu and torchao_name in fp8/recipes.py"
            )
