"""Store a run's Linears as float8 weights that torchao's inference loads.

Each fused matrix is rounded as its recipe rounds it in training, from the fp32 weights, then cut in Hugging Face's parts: the
float8 values, scales are those which the run's own matmuls saw (runtime/fp8.py). Activations are scaled while running,
per tensor or per row as the recipe does, by torchao's rule, which knows no powers of two. The head, like the embedding, stays
BF16.

Source: torchao 0.18, Float8Tensor with its layout in safetensors files; transformers reads it from quantization_config.
"""

import contextlib
import logging

import torch

from eval.hf_layout import layout, to_hf
from eval.sample import check_recipe
from model import GPT, GPTConfig
from runtime import fp8
from runtime.cli import UserError
from runtime.config import Config
from runtime.fp8 import RECIPES, scale_of

FORMAT = torch.float8_e4m3fn
LINEARS = ("qkv.weight", "out.weight", "gate_up.weight", "down.weight")
MULTIPLE = 16       # rows and columns of a matrix that GPUs multiply in float8


def check(config: Config, recipe: str) -> list[str]:
    """Names of the Linears to store as float8: those that the run converts, or the recipe's defaults, without the head.

    Raises UserError where torchao's inference has no such scaling or a part's sizes do not fit.
    """
    loadable = [name for name, r in RECIPES.items() if r.weight.format is FORMAT and r.weight.scaling in ("tensor", "row")]
    if recipe not in loadable:
        raise UserError(f"float8={recipe} has no counterpart that torchao's inference loads: use one of {', '.join(loadable)}")
    settings = check_recipe(config, recipe, torch.device("cpu"))
    with torch.device("meta"):
        layers = fp8.select(GPT(config.model), settings)
    chosen = [layer.name for layer in layers if layer.recipe and layer.name != "head"]
    for name in chosen:
        for part, shape in layout(config.model)[f"{name}.weight"]:
            if any(n % MULTIPLE for n in shape):
                raise UserError(f"float8={recipe} cannot store {part} of {shape[0]} x {shape[1]}: float8 matmuls need "
                                  f"multiples of {MULTIPLE}; export without float8=")
    return chosen


def quantise(weights: dict[str, torch.Tensor], chosen: list[str], recipe: str) -> dict[str, torch.Tensor]:
    """Replace the chosen fp32 matrices by float8 ones, in place; returns what each row is multiplied by, (N, 1) fp32."""
    scales, operand = {}, RECIPES[recipe].weight
    for name in (f"{linear}.weight" for linear in chosen):
        weight = weights[name]
        scale = scale_of(weight, operand)
        largest = torch.finfo(FORMAT).max
        weights[name] = (weight * scale).clamp(-largest, largest).to(FORMAT)
        scales[name] = scale.reciprocal() * torch.ones(len(weight), 1)
    return scales


def store(config: GPTConfig, weights: dict[str, torch.Tensor], scales: dict[str, torch.Tensor],
          recipe: str) -> tuple[dict[str, torch.Tensor], dict[str, str], dict]:
    """Our tensors, the float8 ones with their rows' scales -> what lies in the files, the files' metadata, and the part of
    config.json by which transformers finds torchao."""
    with _quiet():
        from torchao.core.config import config_to_dict
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8Tensor, PerRow, PerTensor
        from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs
    is_row = RECIPES[recipe].weight.scaling == "row"
    settings = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow() if is_row else PerTensor())
    activations = QuantizeTensorToFloat8Kwargs(FORMAT, settings.granularity[0])
    tensors, kept = to_hf(config, weights), ["lm_head"]
    for ours, parts in layout(config).items():
        rows = [shape[0] for _, shape in parts]
        for (name, shape), scale in zip(parts, scales[ours].split(rows) if ours in scales else parts, strict=True):
            if ours in scales:
                tensors[name] = Float8Tensor(
                    tensors[name], scale.contiguous() if is_row else scale[:1].clone(), mm_config=settings.mm_config,
                    block_size=[1 if is_row else shape[0], shape[1]], act_quant_kwargs=activations, dtype=torch.bfloat16)
            elif ours.endswith(LINEARS):
                kept.append(name.removesuffix(".weight"))
    return *flatten_tensor_state_dict(tensors), {
        "quant_method": "torchao", "quant_type": {"default": config_to_dict(settings)}, "modules_to_not_convert": kept,
        "include_input_output_embeddings": False, "untie_embedding_weights": False}


@contextlib.contextmanager
def _quiet():
    """torchao warns, when it is imported, of compiled extensions for other hardware and of a deprecated call of its own."""
    logs = {log: log.level for log in map(logging.getLogger, ("torchao", "torch.utils._pytree"))}
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for log, level in logs.items():
            log.setLevel(level)
