"""Turn a run into a folder that Hugging Face's transformers loads, or such a folder into a run.

    python -m eval.export out/RUN DIR                   the newest sound checkpoint -> DIR
    python -m eval.export out/RUN DIR float8=rowwise    its Linears as float8 weights, for torchao's inference
    python -m eval.export --from-hf DIR out/RUN         a Llama-family checkpoint -> a run, to sample, score, continue

    dtype       bf16 (default) or fp32, the weights' own: then the logits of both sides are equal bit by bit
    float8      a recipe of training, tensorwise, rowwise, ..: which Linears, how they are rounded (eval/float8.py)
    license     the model's, as the Hub names it (apache-2.0, mit, ..), for the card; the data's are listed there

DIR must be new or empty. It gets the weights (model.safetensors, in several files beyond 5 GB), config.json, the tokenizer,
generation_config.json and a model card, README.md; written under another name, synced and renamed: whole or not there.
Nothing here needs transformers. The weights are held in fp32 meanwhile: 4 bytes a parameter.
"""

import os
import re
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import torch

from eval import float8
from eval.hf_layout import hf_config, to_hf
from eval.hf_tokenizer import as_json, write_tokenizer
from eval.model_card import write_model_card
from eval.run_tokenizer import read_tokenizer
from eval.sample import Recipe
from eval.weights import DTYPES, newest_weights, write_safetensors, written
from runtime.checkpoint import sync_folder
from runtime.cli import UserError, read_options
from runtime.config import config_from_dict, read_config

FILE_BYTES = 5 * 10**9      # of weights in one file, where one tensor is no larger


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    folder: str | None = None
    from_hf: str | None = None
    dtype: Literal["bf16", "fp32"] = "bf16"
    float8: Recipe = "off"
    license: str = "other"

    POSITIONAL: ClassVar = ("run", "folder")

    def __post_init__(self):
        given = [f.name for f in fields(self) if f.name not in ("run", "from_hf") and getattr(self, f.name) != f.default]
        if self.from_hf is not None and given:
            raise UserError("--from-hf takes a folder to read and the run to make, nothing else: "
                              f"drop {', '.join(given)}; python -m eval.export --from-hf DIR out/RUN")
        if self.from_hf is None and self.folder is None:
            raise UserError("the folder to write is missing: python -m eval.export out/RUN DIR")
        if self.float8 != "off" and self.dtype != "bf16":
            raise UserError(f"float8={self.float8} multiplies into BF16, so dtype={self.dtype} cannot be had with it: drop one "
                              f"of the two")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.license):
            raise UserError(f"license={self.license!r} is no name that the Hub knows: expected one like apache-2.0 or mit")


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 written, 1 the machine failed us, 2 the user's mistake."""
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0 if argv else 2
    return written("eval.export", lambda: _export_or_import(read_options(Options, argv)))


def _export_or_import(options: Options) -> str:
    if options.from_hf is None:
        return export(options)
    from eval.from_hf import import_checkpoint
    return f"{options.from_hf} -> {import_checkpoint(options.from_hf, options.run)}"


def export(options: Options) -> str:
    """Writes the folder; returns the line that tells people of it. Raises UserError, OSError, MemoryError."""
    run_dir, folder = Path(options.run), Path(os.path.abspath(options.folder))     # "." has no name to put a temporary one beside
    if folder.is_symlink() or folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not an empty folder: name a new one")
    config, recipe = read_config(run_dir), options.float8
    chosen = float8.check(config, recipe) if recipe != "off" else []
    tokenizer = read_tokenizer(config, run_dir)
    manifest, weights = newest_weights(run_dir, "eval.export")
    config = config_from_dict(manifest["config"])
    model = config.model
    if tokenizer.vocab_size > model.vocab_padded:
        raise UserError(f"the tokenizer of {run_dir} has {tokenizer.vocab_size} ids, but its model {model.vocab_padded} rows: "
                          f"they do not belong together")
    tmp = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    tmp.mkdir(parents=True)
    try:
        about = {**hf_config(model, options.dtype), **write_tokenizer(tokenizer, model.n_ctx, model.vocab_padded, tmp)}
        scales = float8.quantise(weights, chosen, recipe) if chosen else {}
        for name in weights:        # one after the other: what is cast is freed
            if name not in scales:
                weights[name] = weights[name].to(DTYPES[options.dtype])
        if scales:
            tensors, metadata, about["quantization_config"] = float8.store(model, weights, scales, recipe)
        else:
            tensors, metadata = to_hf(model, weights), {}
        size = _write_weights(tmp, tensors, metadata)
        (tmp / "config.json").write_text(as_json(about))
        write_model_card(tmp, run_dir, config, manifest, tokenizer, options.dtype, recipe, chosen, options.license)
        for path in tmp.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(tmp)
        os.replace(tmp, folder)     # an empty folder may lie there
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    form = f"{len(chosen)} Linears in float8 ({recipe}), the head and the rest bf16" if chosen else options.dtype
    return f"step {manifest['step']}: {about['architectures'][0]}, {form}, {size / 2**20:.1f} MiB -> {folder}"


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> int:
    """model.safetensors, or several files with an index; returns their tensors' bytes."""
    files: list[dict] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = tensor
    total, places = sum(t.nbytes for t in tensors.values()), {}
    for i, part in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        write_safetensors(folder / name, part, {"format": "pt", **metadata})
        places |= dict.fromkeys(part, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(as_json(index))
    return total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
