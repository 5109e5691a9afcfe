"""Select the Linears whose matmuls run in FP8, convert them, report what was done.

FP8 is a property of the run, not of the model: converting changes how a Linear multiplies, while its name, its fp32 weight
and hence every checkpoint stay the same. The recipes, as data, are in runtime/quantize.py:

    recipe               output y = x w'   input gradient = g w   weight gradient = g' x   scales
    tensorwise           E4M3 x E4M3       E5M2 x E4M3            E5M2 x E4M3              one per tensor
    tensorwise_gw_hp     E4M3 x E4M3       E5M2 x E4M3            BF16 x BF16              one per tensor
    rowwise              E4M3 x E4M3       E4M3 x E4M3            E4M3 x E4M3              one per row, powers of 2
    rowwise_with_gw_hp   E4M3 x E4M3       E4M3 x E4M3            BF16 x BF16              one per row, powers of 2
    amax                 E4M3 x E4M3       E5M2 x E4M3            E5M2 x E4M3              one per tensor, powers of 2
    cscale               E4M3 x E4M3       E5M2 x E4M3            E5M2 x E4M3              constant, one per kind of tensor
    mxfp8                E4M3 x E4M3       E4M3 x E4M3            E4M3 x E4M3              one per 32 values, powers of 2
    auto                 per Linear: the recipe that runtime/speed.py's table of this GPU says is faster than BF16, or BF16

All but cscale scale by the operand's current largest magnitude (dynamic scaling). amax and cscale: Training and inference of
large language models using 8-bit floating point (2309.17224). On a GPU torchao computes the first five, or with
fp8.kernels=true runtime/fp8_linear.py computes tensorwise, tensorwise_gw_hp and amax: the same roundings, fewer passes over
memory. mxfp8 runs on Blackwell through torchao; other GPUs emulate its numerics in BF16. On a CPU every recipe is emulated:
operands rounded to float8, dequantised, multiplied in fp32. The numerics are real, the speed is not.

With fp8.all_gather=true torchao wraps each converted weight in a tensor subclass that FSDP2 gathers as float8, half the bytes
of BF16. Checkpoints, statistics of weights and evaluation in BF16 need the fp32 shard inside the wrapper: unwrap().
"""

import contextlib
import fnmatch
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from model import Linear
from runtime import fp8_linear
from runtime.cli import UserError
from runtime.config import FP8_KERNELS, WITH_KERNELS, FP8Config
from runtime.quantize import RECIPES, QuantisedLinear, Recipe, for_loss_scale
from runtime.speed import choose, load_table

# Compute capability from which torch has a float8 matmul with such scales (ATen's scaled_mm checks).
CAPABILITY = {"tensorwise": (8, 9), "tensorwise_gw_hp": (8, 9), "amax": (8, 9), "cscale": (8, 9), "rowwise": (9, 0),
              "rowwise_with_gw_hp": (9, 0)}
MX_CAPABILITY = (10, 0)     # Blackwell; below it mxfp8 is emulated
# What `auto` may choose where the table says that it pays: the recipes made for speed.
CANDIDATES = ("tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp")
KERNEL_CANDIDATES = tuple(f"{recipe}{WITH_KERNELS}" for recipe in CANDIDATES if recipe in FP8_KERNELS)


def by_name(recipe: str) -> FP8Config:
    """The settings with this label: a recipe's name, followed by WITH_KERNELS or not."""
    return FP8Config(recipe=recipe.removesuffix(WITH_KERNELS), kernels=recipe.endswith(WITH_KERNELS))


@dataclass(frozen=True)
class Layer:
    """The verdict on one Linear: converted by `recipe`, or left in BF16 (recipe None) for `reason`."""
    name: str
    shape: tuple[int, int]      # (inputs K, outputs N)
    reason: str | None          # for staying in BF16; None where converted
    recipe: str | None          # None where left in BF16
    why: str = ""               # why `auto` chose the recipe
    kernels: bool = False       # converted to our kernels, not torchao's

    @property
    def params(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def verdict(self) -> str:
        notes = ", ".join(filter(None, ["kernels" * self.kernels, self.why]))
        return f"kept BF16: {self.reason}" if self.reason else f"-> {self.recipe}" + f" ({notes})" * bool(notes)


# ------------------------------------------------------------------------------------------------------------- selection

def select(model: nn.Module, config: FP8Config, gpu: str | None = None) -> list[Layer]:
    """The verdict on every Linear of `model`, which may be on the meta device; `gpu` is the name that `auto` looks up.

    Raises UserError where config contradicts itself, where a pattern matches nothing (a typo there once quantised a head for
    months: torchtitan#4008), where a chosen Linear's dimensions are not multiples of 16 (mxfp8: 32), which GPUs require, or
    where nothing is left to convert; only `auto` may convert nothing, and table() then says so.
    """
    for problem in config.problems():
        raise UserError(problem)
    linears = {name: (m.in_features, m.out_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for field in ("include", "skip"):
        for pattern in getattr(config, field):
            if not any(_matches(name, pattern) for name in linears):
                raise UserError(f"fp8.{field}={pattern!r} matches no Linear; there are: "
                                f"{', '.join(dict.fromkeys(map(_pattern, linears)))}")
    timings = load_table() if config.recipe == "auto" else None
    n_blocks = 1 + max(map(_block, linears), default=-1)
    layers = []
    for name, shape in linears.items():
        block, recipe, kernels, why = _block(name), config.recipe, config.kernels, ""
        skip = next((pattern for pattern in config.skip if _matches(name, pattern)), None)
        reason = next((reason for is_so, reason in (
            (recipe == "off", "fp8.recipe=off"),
            (name == "head" and not config.head, "head (fp8.head=false)"),
            (skip, f"fp8.skip={skip}"),
            (config.include and not any(_matches(name, pattern) for pattern in config.include), "not in fp8.include"),
            (0 <= block < config.first_bf16, f"fp8.first_bf16={config.first_bf16}"),
            (block >= max(0, n_blocks - config.last_bf16), f"fp8.last_bf16={config.last_bf16}"),
            (recipe == "auto" and any(n % 16 for n in shape), "not a multiple of 16"),
        ) if is_so), None)
        if recipe == "auto" and reason is None:
            chosen, why = choose(timings, gpu, *shape, CANDIDATES + (KERNEL_CANDIDATES if kernels else ()))
            if chosen is None:
                reason = why
            else:
                recipe, kernels = chosen.removesuffix(WITH_KERNELS), chosen.endswith(WITH_KERNELS)
        if reason is None and any(n % RECIPES[recipe].multiple for n in shape):
            raise UserError(f"fp8.recipe={recipe} cannot convert {name} of {shape[0]} x {shape[1]}: FP8 matmuls need "
                            f"multiples of {RECIPES[recipe].multiple}; change the model's width or add fp8.skip={name}")
        layers.append(Layer(name, shape, None, recipe, why, kernels) if reason is None else Layer(name, shape, reason, None))
    if config.recipe not in ("off", "auto") and not any(layer.recipe for layer in layers):
        raise UserError(f"fp8.recipe={config.recipe} is left with nothing to convert: fp8.include, fp8.skip, fp8.first_bf16 "
                        f"and fp8.last_bf16 together keep every Linear in BF16; keep fewer or set fp8.recipe=off")
    return layers


def _matches(name: str, pattern: str) -> bool:
    """'layers.0.*' and 'layers.0.attn.qkv' are whole names; 'attn.out' is the tail of one."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _block(name: str) -> int:
    """The number of the block that a Linear belongs to; -1 outside all blocks."""
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def recipes(layers: list[Layer], loss_scale: float) -> dict[str, Recipe]:
    """Name of each converted Linear -> how its operands are rounded."""
    return {layer.name: for_loss_scale(RECIPES[layer.recipe], loss_scale) for layer in layers if layer.recipe}


def by_layer(layers: list[Layer]) -> dict[str, str]:
    """Name of each converted Linear -> name of its recipe."""
    return {layer.name: layer.recipe for layer in layers if layer.recipe}


def table(layers: list[Layer], recipe: str, device_type: str) -> list[str]:
    """The verdicts as printed lines: one per group of like-named Linears, the total, then warnings."""
    groups = Counter((_pattern(layer.name), *layer.shape, layer.verdict) for layer in layers)
    lines = [f"fp8: {pattern:20} {k:6d} x {n:<6d} x{count:<3d} {verdict}" for (pattern, k, n, verdict), count in groups.items()]
    converted = [layer for layer in layers if layer.recipe]
    share = sum(layer.params for layer in converted) / sum(layer.params for layer in layers)
    lines.append(f"fp8: {len(converted)} of {len(layers)} Linears, {share:.1%} of the matmul parameters, in FP8")
    if recipe == "auto" and not converted:
        lines.append("fp8: auto found nothing that FP8 would make faster here: THIS RUN IS BF16")
    if converted and device_type == "cpu":
        lines.append("fp8: emulated on this CPU: float8 values multiplied in fp32, real numerics, slower than BF16")
    elif recipe == "mxfp8" and not _has_mx():
        lines.append("fp8: no MX units here (Blackwell has them): mxfp8 is emulated in BF16, real numerics, slower than BF16")
    return lines


def check_hardware(config: FP8Config, device: torch.device) -> None:
    """Raise UserError where `device` cannot run the recipe: training on in BF16 would be silent."""
    need = CAPABILITY.get(config.recipe) if device.type == "cuda" else None
    if need and (have := torch.cuda.get_device_capability(device)) < need:
        raise UserError(f"fp8.recipe={config.recipe} needs a GPU of compute capability {need[0]}.{need[1]} or later, but "
                        f"{torch.cuda.get_device_name(device)} has {have[0]}.{have[1]}: use fp8.recipe=off (BF16) here, or an "
                        f"H100-class GPU")


def _has_mx() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MX_CAPABILITY


# ------------------------------------------------------------------------------------------------------------ conversion

def convert(model: nn.Module, config: FP8Config, loss_scale: float = 1.0, device_type: str | None = None) -> list[Layer]:
    """Convert the selected Linears of `model` in place; returns the verdict on every Linear. Raises as select() does.

    loss_scale: what the loss is multiplied by before the backward pass; constant gradient scales undo it.
    device_type: "cuda" or "cpu", where the model, perhaps still on the meta device, will run; None = a GPU where there is one.
    """
    has_gpu = torch.cuda.is_available()
    is_on_cpu = (device_type or ("cuda" if has_gpu else "cpu")) == "cpu"
    layers = select(model, config, torch.cuda.get_device_name() if has_gpu else None)
    by_torchao: dict[str, set[str]] = {}    # recipe -> Linears
    for layer in layers:
        if layer.kernels:
            fp8_linear.swap(model, layer.name, RECIPES[layer.recipe])
        # torchao alone can gather float8; on a CPU its own emulation then multiplies.
        elif layer.recipe in ("cscale", "mxfp8") or layer.recipe and is_on_cpu and not config.all_gather:
            module = model.get_submodule(layer.name)
            module.__class__ = QuantisedLinear
            module.recipe = for_loss_scale(RECIPES[layer.recipe], loss_scale)
            module.has_mx = layer.recipe == "mxfp8" and _has_mx()
        elif layer.recipe:
            by_torchao.setdefault(layer.recipe, set()).add(layer.name)
    for recipe, chosen in by_torchao.items():
        _float8().convert_to_float8_training(model, config=_torchao_config(recipe, config.all_gather, is_on_cpu),
                                             module_filter_fn=lambda _, name, chosen=chosen: name in chosen)
    done = {name for name, module in model.named_modules() if _is_converted(module)}
    assert done == by_layer(layers).keys(), f"asked for {by_layer(layers)}, converted {done}"
    return layers


def _torchao_config(recipe: str, all_gather: bool, emulate: bool):
    """torchao's configuration of a recipe; tensorwise_gw_hp and amax are its tensorwise with one setting changed."""
    float8 = _float8()
    if recipe == "amax":
        config = float8.Float8LinearConfig(round_scales_to_power_of_2=True)
    elif recipe == "tensorwise_gw_hp":
        x, g = (float8.CastConfig(scaling_type=float8.config.ScalingType.DISABLED) for _ in range(2))   # it changes each
        config = float8.Float8LinearConfig(cast_config_input_for_grad_weight=x, cast_config_grad_output_for_grad_weight=g)
    else:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return replace(config, enable_fsdp_float8_all_gather=all_gather, emulate=emulate)


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module) is not Linear


def _float8():
    """torchao.float8, imported when first needed: BF16 runs and readers of checkpoints never load it."""
    logging.disable(logging.WARNING)    # of compiled extensions for other hardware, of a deprecated call of its own
    try:
        import torchao.float8.float8_linear
    finally:
        logging.disable(logging.NOTSET)
    return torchao.float8


# ---------------------------------------------------------------------------------- weights: updates, shards, evaluation

def refresh_fp8_weights(model: nn.Module) -> None:
    """Recompute what is derived from the weights: FP8 copies, and scales of weights gathered as float8 by one all-reduce.

    Call it whenever the weights have changed, between two passes: all-gathers with scales of older weights are wrong."""
    if any(is_wrapped(p) for p in model.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
        precompute_float8_dynamic_scale_for_fsdp(model)
    fp8_linear.refresh(model)


def is_wrapped(weight: torch.Tensor) -> bool:
    """Whether `weight`, sharded or not yet, will be gathered as float8."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    return type(local).__name__ == "WeightWithDynamicFloat8CastTensor"      # by name: a BF16 run must not import torchao


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded wrapped weight as a DTensor of plain fp32 on the same memory; any other tensor unchanged."""
    if not (isinstance(tensor, DTensor) and is_wrapped(tensor)):
        return tensor
    return DTensor.from_local(tensor._local_tensor._tensor.detach(), tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride())


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 holds gathered: a forward pass without a backward one leaves the root's gathered, and with
    parallel.reshard=false every block's. Call it before changing shards between two passes: the next forward pass would use
    the old weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class GatheredLinear(nn.Linear):
    """A Linear without bias that gathers `shard` in its input's dtype, for evaluation in BF16: FSDP2 would gather float8."""
    shard: DTensor

    def forward(self, x):
        return F.linear(x, self.shard.to(x.dtype).full_tensor())


@contextlib.contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the block, every converted Linear of `model` multiplies in BF16, from the same weights, uncompiled.

    Both arms of a comparison are measured this way, so that a gap between them is a gap between their weights. The
    class is swapped, not the module: names, Parameters, sharding and hooks stay as they are.
    """
    classes = {module: type(module) for module in model.modules() if _is_converted(module)}
    reshard(model)      # gathered weights have lost their fp32 shards
    for module in classes:
        module.__class__ = Linear
        if is_wrapped(module.weight):
            module.__class__, module.shard = GatheredLinear, unwrap(module.weight)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
            vars(module).pop("shard", None)
