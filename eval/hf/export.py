"""A run becomes a folder that transformers loads."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from eval.hf.card import model_card
from eval.hf.config import check_keys, hf_config
from eval.hf.files import as_json, new_folder
from eval.hf.float8 import FLOAT8, store_float8
from eval.hf.tokenizer import write_tokenizer
from eval.hf.weights import FILE_BYTES, to_hf, write_safetensors
from eval.inference import load_for_inference
from fp8.recipes import RECIPES
from lib.errors import UserError
from model import GPTConfig
from runtime.checkpoint import name_of, read_manifest
from runtime.config import config_from_dict


def export(
    run: str,
    folder: str,
    dtype: str,
    recipe: str,
    license: str,
    step: int | None = None,
    average: int = 1,
) -> str:
    """Write the folder; returns the line that tells people of it.

    dtype: "bf16" or "fp32". recipe: "off", or the recipe of FP8 by which the Linears that it
    converts are stored in float8."""
    run_dir = Path(run)
    # "." has no name to put a temporary one beside
    target = Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there already and not an empty folder: name a new one")
    _check_recipe(recipe)
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    dtype_name = str(torch_dtype).removeprefix("torch.")
    model, tokenizer, _, layers, step = load_for_inference(
        run, "cpu", dtype_name, recipe, step, average
    )
    # of the converted Linears in fp32
    weights = {name: p.data for name, p in model.named_parameters()}
    del model  # its weights go as they are cast
    manifest = read_manifest(run_dir / "checkpoints" / name_of(step))
    config = config_from_dict(manifest["config"])
    check_keys(config.model)
    quantised = [
        f"{layer.name}.weight" for layer in layers if layer.recipe and layer.name != "head"
    ]
    form = dtype
    if quantised:
        form = f"{len(quantised)} Linears in float8 ({recipe}), the head and the rest bf16"
    if average > 1:
        form += f", the mean of the last {average} checkpoints"
    with new_folder(target) as part:
        stored = _store(config.model, weights, quantised, recipe, torch_dtype)
        about = hf_config(config.model, dtype_name)
        about |= write_tokenizer(tokenizer, config.model.n_ctx, config.model.vocab_padded, part)
        about |= stored.config
        n_bytes = _write_weights(part, stored)
        (part / "config.json").write_text(as_json(about))
        card = model_card(run_dir, config, manifest, form, license)
        (part / "README.md").write_text(card, encoding="utf-8")
    return (
        f"step {step}: {about['architectures'][0]}, {form}, {n_bytes / 2**20:.1f} MiB -> {target}"
    )


def _check_recipe(recipe: str) -> None:
    """Raises UserError for a recipe whose weights torchao's inference does not load."""
    loadable = []
    for name, known_recipe in RECIPES.items():
        weight = known_recipe.weight
        if weight.format is FLOAT8 and weight.scaling in ("tensor", "row"):
            loadable.append(name)
    if recipe not in ("off", *loadable):
        raise UserError(
            f"float8={recipe} has no counterpart that torchao's inference loads: use one of"
            f" {', '.join(loadable)}"
        )


@dataclass(frozen=True)
class _Stored:
    """The weights as they lie in the files."""

    tensors: dict[str, torch.Tensor]  # by Hugging Face's name
    metadata: dict[str, str]  # of each file
    config: dict[str, Any]  # what config.json says of them


def _store(
    config: GPTConfig,
    weights: dict[str, torch.Tensor],
    quantised: list[str],
    recipe: str,
    dtype: torch.dtype,
) -> _Stored:
    """Casts `weights`, by our names, in place, one after the other: what is cast is freed."""
    for name in weights.keys() - quantised:
        weights[name] = weights[name].to(dtype)
    tensors = to_hf(config, weights)
    if not quantised:
        return _Stored(tensors, {}, {})
    tensors, metadata, quantization = store_float8(config, tensors, weights, quantised, recipe)
    return _Stored(tensors, metadata, {"quantization_config": quantization})


def _write_weights(folder: Path, stored: _Stored) -> int:
    """model.safetensors, or several files and their index; returns the bytes of all tensors."""
    split = split_state_dict_into_shards_factory(
        stored.tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        max_shard_size=FILE_BYTES,
        filename_pattern="model{suffix}.safetensors",
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {name: stored.tensors[name] for name in names}
        write_safetensors(folder / file, tensors, {"format": "pt", **stored.metadata})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(as_json(index))
    return split.metadata["total_size"]
