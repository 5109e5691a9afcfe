"""A run becomes a folder that transformers loads."""

import os
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from eval.hf.card import model_card
from eval.hf.config import hf_config
from eval.hf.files import as_json, new_folder
from eval.hf.float8 import FLOAT8, store_float8
from eval.hf.tokenizer import write_tokenizer
from eval.hf.weights import FILE_BYTES, to_hf, write_safetensors
from eval.inference import load_for_inference
from fp8.recipes import RECIPES
from lib.errors import UserError
from runtime.checkpoint import name_of, read_manifest
from runtime.config import config_from_dict


def export(
    run: str, folder: str, dtype: str, recipe: str, license: str, step: int | None = None
) -> str:
    """Writes the folder; returns the line that tells people of it.

    dtype: "bf16" or "fp32". recipe: "off", or the recipe of FP8 by which the Linears that it
    converts are stored in float8."""
    # "." has no name to put a temporary one beside
    run_dir, target = Path(run), Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there already and not an empty folder: name a new one")
    torch_dtype = "float32" if dtype == "fp32" else "bfloat16"
    loadable = [
        name
        for name, r in RECIPES.items()
        if r.weight.format is FLOAT8 and r.weight.scaling in ("tensor", "row")
    ]
    if recipe not in ("off", *loadable):
        raise UserError(
            f"float8={recipe} has no counterpart that torchao's inference loads: use one of"
            f" {', '.join(loadable)}"
        )
    model, tokenizer, _, layers, step = load_for_inference(
        str(run_dir), "cpu", torch_dtype, recipe, step
    )
    # of the converted Linears in fp32
    weights = {name: p.data for name, p in model.named_parameters()}
    del model  # its weights go as they are cast
    manifest = read_manifest(run_dir / "checkpoints" / name_of(step))
    config = config_from_dict(manifest["config"])
    chosen = [f"{layer.name}.weight" for layer in layers if layer.recipe and layer.name != "head"]
    form = (
        f"{len(chosen)} Linears in float8 ({recipe}), the head and the rest bf16"
        if chosen
        else dtype
    )
    with new_folder(target) as tmp:
        for name in weights.keys() - chosen:  # one after the other: what is cast is freed
            weights[name] = weights[name].to(getattr(torch, torch_dtype))
        about = hf_config(config.model, torch_dtype) | write_tokenizer(
            tokenizer, config.model.n_ctx, config.model.vocab_padded, tmp
        )
        tensors, metadata = to_hf(config.model, weights), {}
        if chosen:
            tensors, metadata, about["quantization_config"] = store_float8(
                config.model, tensors, weights, chosen, recipe
            )
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda t: t.nbytes,
            max_shard_size=FILE_BYTES,
            filename_pattern="model{suffix}.safetensors",
        )
        for file, names in split.filename_to_tensors.items():
            write_safetensors(
                tmp / file, {name: tensors[name] for name in names}, {"format": "pt", **metadata}
            )
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (tmp / "model.safetensors.index.json").write_text(as_json(index))
        (tmp / "config.json").write_text(as_json(about))
        (tmp / "README.md").write_text(
            model_card(run_dir, config, manifest, form, license), encoding="utf-8"
        )
    return (
        f"step {step}: {about['architectures'][0]}, {form},"
        f" {split.metadata['total_size'] / 2**20:.1f} MiB -> {target}"
    )
