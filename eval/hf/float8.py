"""Linears as float8 weights, in the form that torchao's inference loads.

The Linears are those that the run converts, or the recipe's defaults. Each fused matrix is rounded
as its recipe rounds it in training, from the fp32 weights, then cut in Hugging Face's parts: the
float8 values and scales are those which the run's own matmuls saw (fp8/). Activations are scaled
while running, per tensor or per row as the recipe does, by torchao's rule, which knows no powers of
two. The head, like the embedding, stays BF16. Source: torchao 0.18, Float8Tensor with its layout in
safetensors files; transformers reads it from quantization_config."""

import logging
from typing import Any

import torch

from eval.hf.weights import layout
from fp8.recipes import RECIPES, Operand
from fp8.rounding import cast, scale_of
from model import GPTConfig

FLOAT8 = torch.float8_e4m3fn


def store_float8(
    config: GPTConfig,
    tensors: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    quantised: list[str],
    recipe: str,
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict]:
    """to_hf()'s `tensors` of our `weights`, the quantised ones in fp32, which leave both dicts one
    by one -> what lies in the files, the files' metadata, and the part of config.json by which
    transformers finds torchao."""
    # torchao's of extensions for other hardware, of a deprecated call of its own
    logging.disable(logging.WARNING)
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        PerTensor,
    )

    logging.disable(logging.NOTSET)
    is_row = RECIPES[recipe].weight.scaling == "row"
    settings = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow() if is_row else PerTensor()
    )
    in_bf16 = ["lm_head"]
    for our_name, parts in layout(config).items():
        if our_name in quantised:
            weight = weights.pop(our_name)
            tensors |= _float8_parts(weight, parts, RECIPES[recipe].weight, settings)
        elif our_name.startswith("layers.") and "norm" not in our_name:  # a Linear that stays BF16
            in_bf16 += [name.removesuffix(".weight") for name in parts]
    stored, metadata = flatten_tensor_state_dict(tensors)
    return (
        stored,
        metadata,
        {
            "quant_method": "torchao",
            "quant_type": {"default": config_to_dict(settings)},
            "modules_to_not_convert": in_bf16,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        },
    )


def _float8_parts(
    weight: torch.Tensor, parts: dict[str, tuple[int, ...]], operand: Operand, settings: Any
) -> dict[str, torch.Tensor]:
    """torchao's float8 tensor for each of the parts of a fused matrix, which is rounded as a
    whole. parts: name -> shape."""
    from torchao.quantization import Float8Tensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    is_row = operand.scaling == "row"
    activations = QuantizeTensorToFloat8Kwargs(FLOAT8, settings.granularity[0])
    scale = scale_of(weight, operand)
    values = cast(weight, scale, FLOAT8)
    # what each row is multiplied by, (N, 1) fp32
    inverse = scale.reciprocal() * torch.ones(len(weight), 1)
    rows = [shape[0] for shape in parts.values()]
    tensors = {}
    for name, part, factor in zip(parts, values.split(rows), inverse.split(rows), strict=True):
        tensors[name] = Float8Tensor(
            part,
            factor.contiguous() if is_row else factor[:1].clone(),
            mm_config=settings.mm_config,
            block_size=[1 if is_row else len(part), part.size(1)],
            act_quant_kwargs=activations,
            dtype=torch.bfloat16,
        )
    return tensors
