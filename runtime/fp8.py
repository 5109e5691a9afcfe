"""Reach the fp32 shards of weights that FSDP2 gathers as float8.

With fp8.all_gather=true torchao wraps each converted weight in a tensor of its own kind, and FSDP2 asks that one what to
send: the shard as float8, half the bytes of BF16. Everything but the gathering is about the shard itself, found here:
a checkpoint (the wrapper would need torchao to be read), a statistic of the weight, an evaluation in BF16.


fp8: Choose the Linears whose matmuls run in FP8, swap them, say so.

FP8 is a property of the run, not of the model: the swap changes how a Linear multiplies, while its name, its fp32
weight and hence every checkpoint stay as they are. The recipes, as data, are in runtime/quantize.py:

    recipe               output y = x w'   input gradient = g W   weight gradient = g' x   scales
    tensorwise           E4M3 x E4M3       E5M2 x E4M3            E5M2 x E4M3              one per tensor
    tensorwise_gw_hp     E4M3 x E4M3       E5M2 x E4M3            BF16 x BF16              one per tensor
    rowwise              E4M3 x E4M3       E4M3 x E4M3            E4M3 x E4M3              one per row, powers of 2
    rowwise_with_gw_hp   E4M3 x E4M3       E4M3 x E4M3            BF16 x BF16              one per row, powers of 2
    amax                 E4M3 x E4M3       E5M2 x E4M3            E5M2 x E4M3              one per tensor, powers of 2
    cscale               E4M3 x E4M3       E5M2 x E4M3            E5M2 x E4M3              constant, one per kind of tensor
    mxfp8                E4M3 x E4M3       E4M3 x E4M3            E4M3 x E4M3              one per 32 values, powers of 2
    auto                 per Linear: the recipe that runtime/speed.py's table of this GPU says is faster than BF16, or BF16

All but cscale follow each operand's current largest magnitude (dynamic scaling). torchao computes the first five;
amax, cscale: Training and inference of large language models using 8-bit floating point (2309.17224). mxfp8 runs on
Blackwell through torchao; on other GPUs its numerics are emulated in BF16. fp8.kernels=true computes tensorwise,
tensorwise_gw_hp and amax by runtime/fp8_linear.py instead: the same roundings, fewer passes over memory. On a CPU every recipe
is emulated: operands rounded to float8, dequantised, multiplied in fp32. The numerics are real, the speed is not.

"""

import contextlib
import fnmatch
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from model import Linear
from runtime import fp8_linear
from runtime.cli import UserError
from runtime.config import FP8_KERNELS, WITH_KERNELS, FP8Config
from runtime.fp8_linear import KernelLinear
from runtime.quantize import RECIPES, QuantisedLinear, Recipe, for_loss_scale
from runtime.speed import choose, load_table

# --------------------------------------------------------------------------------------------------------------- gather

def is_wrapped(weight: torch.Tensor) -> bool:
    """Whether `weight`, sharded or not yet, will be gathered as float8."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    # By name: a BF16 run must not import torchao to find out that it wraps nothing.
    return type(local).__name__ == "WeightWithDynamicFloat8CastTensor"


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a DTensor of an ordinary tensor; what is not wrapped, or not sharded, comes back as it is."""
    if not (isinstance(tensor, DTensor) and is_wrapped(tensor)):
        return tensor
    return DTensor.from_local(tensor._local_tensor._tensor.detach(), tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride())


def precompute_scales(model: nn.Module) -> None:
    """The scales of all wrapped weights, by one all-reduce; due whenever weights have changed, between two passes.

    Without them each gathering starts with an all-reduce of its own; with those of other weights it sends nonsense."""
    if any(is_wrapped(p) for p in model.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
        precompute_float8_dynamic_scale_for_fsdp(model)


@torch.no_grad()
def full_weight(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The whole of a wrapped weight in `dtype`, cast before it is sent; all ranks must call this together."""
    return unwrap(module.weight).to(dtype).full_tensor()


def reshard(model: nn.Module) -> None:
    """Drop what FSDP2 holds gathered. A forward pass without a backward one leaves the root's weights gathered, and with
    parallel.reshard=false every block's: whoever changes the shards between two passes must call this, or the next forward
    pass runs with the weights of before."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def attach_fp32_shards(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Note at each of `modules` of `model` with a wrapped weight where its own fp32 shard is; returns these modules."""
    reshard(model)      # only shards lead to the fp32 values
    wrapped = [module for module in modules if is_wrapped(module.weight)]
    for module in wrapped:
        module.shard = unwrap(module.weight)
    return wrapped


class GatheredLinear(nn.Linear):
    """A Linear without bias that gathers `shard` in the dtype of its input, for evaluation in BF16: FSDP2 gathers float8."""
    shard: DTensor

    def forward(self, x):
        return F.linear(x, self.shard.to(x.dtype).full_tensor())


# ------------------------------------------------------------------------------------------------------------------ fp8

# Compute capability from which torch has a float8 matmul with such scales (ATen's scaled_mm checks).
CAPABILITY = {"tensorwise": (8, 9), "tensorwise_gw_hp": (8, 9), "amax": (8, 9), "cscale": (8, 9), "rowwise": (9, 0),
              "rowwise_with_gw_hp": (9, 0)}
MX_CAPABILITY = (10, 0)     # Blackwell; below it mxfp8 is emulated
# What `auto` may choose, if the table says that it pays: the recipes made for speed.
CANDIDATES = ("tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp")
KERNEL_CANDIDATES = tuple(f"{recipe}{WITH_KERNELS}" for recipe in CANDIDATES if recipe in FP8_KERNELS)


def by_name(recipe: str) -> FP8Config:
    """The settings whose label this is: a recipe, with WITH_KERNELS behind it or without."""
    return FP8Config(recipe=recipe.removesuffix(WITH_KERNELS), kernels=recipe.endswith(WITH_KERNELS))


@dataclass(frozen=True)
class Layer:
    """What becomes of one Linear: converted by `recipe`, or left in BF16 (recipe None) for `reason`."""
    name: str
    shape: tuple[int, int]      # (inputs K, outputs N)
    params: int
    reason: str | None          # of staying in BF16; None where converted
    recipe: str | None          # None where left in BF16
    why: str = ""               # what made `auto` choose the recipe
    kernels: bool = False       # converted to run on our kernels, not torchao's


def select(model: nn.Module, config: FP8Config, gpu: str | None = None) -> list[Layer]:
    """The verdict on every Linear of `model`, which may be on the meta device; `gpu` is the name that `auto` looks up.

    Raises UserError where a pattern matches nothing (a typo there once quantised a head for months: torchtitan#4008),
    where a chosen Linear's dimensions are no multiples of 16 (torch's CUDA float8 matmul needs them, its CPU one does not
    complain; mxfp8: of 32), where nothing is left to convert (only `auto` may convert nothing: it says so), or where config
    contradicts itself.
    """
    for problem in config.problems():
        raise UserError(problem)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for field in ("include", "skip"):
        for pattern in getattr(config, field):
            if not any(_matches(name, pattern) for name in linears):
                raise UserError(f"fp8.{field}={pattern!r} matches no Linear; there are: {', '.join(_patterns(linears))}")
    timings = _timings() if config.recipe == "auto" else None
    kept = _blocks_kept(linears, config)
    layers = []
    for name, module in linears.items():
        shape = (module.in_features, module.out_features)
        recipe, why = (None if config.recipe == "off" else config.recipe), ""
        kernels, reason = config.kernels, None
        if config.recipe == "off":
            reason = "fp8.recipe=off"
        elif name == "head" and not config.head:
            reason = "head (fp8.head=false)"
        elif pattern := next((p for p in config.skip if _matches(name, p)), None):
            reason = f"fp8.skip={pattern}"
        elif config.include and not any(_matches(name, p) for p in config.include):
            reason = "not in fp8.include"
        elif field := kept.get(name):
            reason = f"fp8.{field}={getattr(config, field)}"
        elif config.recipe == "auto":
            if any(n % 16 for n in shape):
                recipe, reason = None, "not a multiple of 16"
            else:
                recipe, why = choose(timings, gpu, *shape, CANDIDATES + (KERNEL_CANDIDATES if config.kernels else ()))
                reason = None if recipe else why
                recipe, kernels = recipe and recipe.removesuffix(WITH_KERNELS), recipe in KERNEL_CANDIDATES
        elif any(n % RECIPES[recipe].multiple for n in shape):
            raise UserError(f"fp8.recipe={recipe} cannot convert {name} of {shape[0]} x {shape[1]}: FP8 matmuls need "
                              f"multiples of {RECIPES[recipe].multiple}; change the model's width or add fp8.skip={name}")
        layers.append(Layer(name, shape, module.weight.numel(), reason, recipe if reason is None else None, why,
                            kernels and reason is None))
    if config.recipe not in ("off", "auto") and not any(layer.recipe for layer in layers):
        raise UserError(f"fp8.recipe={config.recipe} is left with nothing to convert: fp8.include, fp8.skip, fp8.first_bf16 "
                          f"and fp8.last_bf16 together keep every Linear in BF16; keep fewer or set fp8.recipe=off")
    return layers


def _blocks_kept(linears, config: FP8Config) -> dict[str, str]:
    """Linear -> the field that keeps its block in BF16, for the first and the last blocks."""
    block = {name: int(name.split(".")[1]) for name in linears if name.startswith("layers.")}
    count = max(block.values(), default=-1) + 1
    return ({name: "last_bf16" for name, i in block.items() if i >= count - config.last_bf16}
            | {name: "first_bf16" for name, i in block.items() if i < config.first_bf16})


def _timings():
    try:
        return load_table()
    except UserError as error:
        raise UserError(str(error)) from error


def convert(model: nn.Module, config: FP8Config, loss_scale: float = 1.0, device_type: str | None = None) -> list[Layer]:
    """Swap the selected Linears of `model` in place; returns the verdict on every Linear. Errors: see select().

    loss_scale: what the loss is multiplied by before the backward pass; constant gradient scales undo it.
    device_type: where the model, still on the meta device perhaps, will run, "cuda" or "cpu"; None = a GPU where there is one.
    """
    is_on_cpu = (device_type or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    layers = select(model, config, gpu)
    before = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    for layer in layers:
        if layer.kernels:
            fp8_linear.swap(model, layer.name, RECIPES[layer.recipe])
    theirs = [layer for layer in layers if layer.recipe and not layer.kernels]
    for name in dict.fromkeys(layer.recipe for layer in theirs):
        chosen = {layer.name for layer in theirs if layer.recipe == name}
        # torchao alone can gather float8; its own emulation then multiplies.
        if name in ("cscale", "mxfp8") or is_on_cpu and not config.all_gather:
            for layer in chosen:
                module = model.get_submodule(layer)
                module.__class__ = QuantisedLinear
                module.recipe = for_loss_scale(RECIPES[name], loss_scale)
                module.has_mx = name == "mxfp8" and _has_mx()
        else:
            _float8().convert_to_float8_training(model, config=_torchao_config(name, config.all_gather, is_on_cpu),
                                                 module_filter_fn=lambda _, fqn, chosen=chosen: fqn in chosen)
    done = {name for name, module in model.named_modules() if _is_converted(module)}
    chosen = {layer.name for layer in layers if layer.recipe}
    assert done == chosen, f"asked for {chosen}, converted {done}"
    assert before == {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    return layers


def recipes(layers: list[Layer], loss_scale: float) -> dict[str, Recipe]:
    """Name of each converted Linear -> how its operands are rounded."""
    return {layer.name: for_loss_scale(RECIPES[layer.recipe], loss_scale) for layer in layers if layer.recipe}


def _torchao_config(recipe: str, all_gather: bool = False, emulate: bool = False):
    """torchao's words for a recipe; two of ours are its tensorwise with one thing changed."""
    Config, Cast = _float8().Float8LinearConfig, _float8().CastConfig
    if recipe == "amax":
        config = Config(round_scales_to_power_of_2=True)
    elif recipe == "tensorwise_gw_hp":
        off = _float8().config.ScalingType.DISABLED
        config = Config(cast_config_input_for_grad_weight=Cast(scaling_type=off),
                        cast_config_grad_output_for_grad_weight=Cast(scaling_type=off))
    else:
        config = Config.from_recipe_name(recipe)
    return replace(config, enable_fsdp_float8_all_gather=all_gather, emulate=emulate)


def _has_mx() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= MX_CAPABILITY


def check_hardware(config: FP8Config, device: torch.device) -> None:
    """Raise UserError where `device` cannot run the recipe; training on in BF16 would be a lie."""
    if config.recipe in CAPABILITY and device.type == "cuda":
        refuse_below(config.recipe, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    if config.kernels and device.type == "cuda" and find_spec("triton") is None:
        raise UserError("fp8.kernels=true needs triton, which this Python lacks: install it (torch's CUDA wheels for Linux "
                          "bring it), or fp8.kernels=false")


def refuse_below(recipe: str, capability: tuple[int, int], gpu: str) -> None:
    """Raise UserError where a GPU of this compute capability cannot run `recipe`."""
    need = CAPABILITY[recipe]
    if capability < need:
        raise UserError(f"fp8.recipe={recipe} needs a GPU of compute capability {need[0]}.{need[1]} or later, but {gpu} has "
                          f"{capability[0]}.{capability[1]}: use fp8.recipe=off (BF16) here, or an H100-class GPU")


def by_layer(layers: list[Layer]) -> dict[str, str]:
    """The recipe of each converted Linear, by its name."""
    return {layer.name: layer.recipe for layer in layers if layer.reason is None}


def table(layers: list[Layer], recipe: str, device_type: str) -> list[str]:
    """The verdicts as lines for people: one per group of like-named Linears, then the sum, then what to know of it."""
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:
        key = (_pattern(layer.name), layer.shape, layer.reason, layer.recipe, layer.why, layer.kernels)
        groups.setdefault(key, []).append(layer)
    lines = []
    for (pattern, (k, n), reason, chosen, why, kernels), members in groups.items():
        notes = ["kernels"] * kernels + [why] * bool(why)
        verdict = f"kept BF16: {reason}" if reason else f"-> {chosen}" + (f" ({', '.join(notes)})" if notes else "")
        lines.append(f"fp8: {pattern:20} {k:6d} x {n:<6d} x{len(members):<3d} {verdict}")
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


def refresh_fp8_weights(model: nn.Module) -> None:
    """What is derived from the weights between two steps, made anew; due whenever the weights have changed."""
    precompute_scales(model)
    fp8_linear.refresh(model)


@contextlib.contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Within the block, every converted Linear of `model` multiplies in BF16, from the same weights, uncompiled.

    Both arms of a comparison are measured this way, so that a gap between them is a gap between their weights. The
    class is swapped, not the module: names, Parameters, sharding and hooks stay as they are.
    """
    modules = [m for m in model.modules() if _is_converted(m)]
    classes = [type(m) for m in modules]
    gathered = attach_fp32_shards(model, modules)
    for module in modules:
        module.__class__ = GatheredLinear if module in gathered else Linear
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls
            vars(module).pop("shard", None)


def _matches(name: str, pattern: str) -> bool:
    """'layers.0.*' and 'layers.0.attn.qkv' are whole names; 'attn.out' is the tail of one."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _patterns(names) -> list[str]:
    return list(dict.fromkeys(_pattern(name) for name in names))


def _is_converted(module: nn.Module) -> bool:
    # By name first: a BF16 run must not import torchao to find out that it has none of its Linears.
    return isinstance(module, QuantisedLinear | KernelLinear) or (
        type(module).__name__ == "Float8Linear" and isinstance(module, _float8().float8_linear.Float8Linear))


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
