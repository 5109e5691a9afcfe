"""Bring a local Llama-family checkpoint of Hugging Face's layout into a run's folder, weights and tokenizer as they are.

What reads a run reads this one; a new run trains it on with start_from= (configs/continue_llama.py). Its checkpoint has fp32
weights and no optimizer; of its config.json the model section and data.tokenizer alone say something: nothing was trained here.

In fp32 on the CPU the logits are transformers' own, bit for bit (transformers 5.23, torch 2.13), where intermediate_size is a
multiple of 32, as in every published model: beyond it SiLU's last bit depends on where its vectors end.

Memory: the whole model as fp32 on the host and one matrix more, 4 bytes a parameter: about 32 GB for 8 billion. Weights that
can run code when they are read (pickles: .bin, .pt, .pth) are refused by their names, without opening them.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it

from eval.export import layout, new_folder
from model import GPTConfig
from runtime.checkpoint import FORMAT_VERSION, cause, describe, file_sha256, name_of, seal
from runtime.cli import UserError, type_problems
from runtime.config import Config, DataConfig, OptimConfig
from runtime.tokenizer import keep_tokenizer, load_tokenizer

EXACT = (torch.float32, torch.bfloat16, torch.float16)      # fp32 holds each of their values
SIZES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size", "n_ffn": "intermediate_size",
         "n_ctx": "max_position_embeddings", "vocab_size": "vocab_size"}
ROPE = {"rope_factor": "factor", "rope_low_freq": "low_freq_factor", "rope_high_freq": "high_freq_factor"}
ORIGINAL_CTX = "original_max_position_embeddings"
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL_CTX, *ROPE.values()}
# The values with which model.py computes the same. Others: biases, another activation, sums in slices, windows, narrower
# rotations, other position encodings, quantised weights, code of the model's own, which is never run.
HELD = {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu", "swish"), "pretraining_tp": (1,),
        "layer_types": (), "partial_rotary_factor": (1,), "rope_type": ("default", "llama3"), "rope_keys": (),
        "quantization_config": ({},), "compression_config": ({},), "auto_map": ({},)}


def import_checkpoint(folder: str, run_dir: str) -> Path:
    """Write the run; returns the folder of its checkpoint. It appears by one rename: whole or not at all.

    Raises UserError where `folder` holds no model that can be held exactly or `run_dir` exists; OSError where writing failed:
    then nothing is left.
    """
    source, target = Path(folder), Path(run_dir)
    if os.path.lexists(target):
        raise UserError(f"{target} exists: choose another out/RUN, or remove that one")
    try:
        raw = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no downloaded model: its config.json cannot be read ({error})") from error
    model, files, tokenizer = gpt_config(raw), _open_weights(source), load_tokenizer(str(source))
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(f"{source}: its tokenizer has {tokenizer.vocab_size} ids, config.json vocab_size={model.vocab_size}")
    config = Config(
        run=target.name, out=str(target.parent), model=model, steps=1, optim=OptimConfig(lr=2e-5),
        data=DataConfig(dir="data", mixture={"imported": 1.0}, tokens_per_step=model.n_ctx, micro_batch=1,
                        tokenizer=str(target / "tokenizer")))
    with new_folder(target) as part:
        checkpoint = part / "checkpoints" / name_of(0)
        checkpoint.mkdir(parents=True)
        keep_tokenizer(part, folder)
        weights = dict(from_hf(model, files, lambda name: files[name].get_tensor(name)))
        write_checkpoint(checkpoint, config, weights, {"imported": {
            "folder": source.resolve().name, "architecture": raw["architectures"][0], "tokenizer_sha256": tokenizer.sha256}})
        (part / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
    return target / "checkpoints" / name_of(0)


def write_checkpoint(path: Path, config: Config, weights: dict[str, torch.Tensor], state: dict) -> None:
    """Write the folder `path`, which is there and empty, as a checkpoint of step 0 with `weights` (our names) and no moments.

    `state` is plain JSON. Raises OSError. As runtime/checkpoint.py writes them from training, but for temporary name and rename.
    """
    tensors = {f"model.{name}": t for name, t in weights.items()}
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")      # one process is no mistake
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    except CheckpointException as error:
        raise OSError(f"{path} could not be written ({cause(error)})") from error
    files = {file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)} for file in sorted(path.iterdir())}
    seal(path, {"format_version": FORMAT_VERSION, "step": 0, "state": state, "config": config.to_dict(),
                "torch": str(torch.__version__), "world_size": 1, "tensors": describe(tensors), "files": files})


def _open_weights(source: Path) -> dict:
    """The open file of each tensor; its header is checked against its length, nothing is read yet."""
    from safetensors import SafetensorError, safe_open
    files: dict = {}
    for path in sorted(source.glob("*.safetensors")):
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} is no whole safetensors file ({error}): the download is incomplete, repeat it") from error
        if twice := files.keys() & opened.keys():
            raise UserError(f"{path} and another file of the folder both hold {_some(twice)}: keep those of one download")
        files |= dict.fromkeys(opened.keys(), opened)
    if not files:
        raise UserError(f"{source} has no *.safetensors: get the model in that format; pickles (.bin, .pth) can run code")
    return files


def gpt_config(raw: dict) -> GPTConfig:
    """The model that a config.json describes. What the file leaves out has the default of its architecture.

    Raises UserError in one sentence for whatever model.py cannot compute exactly, or where a size is missing.
    """
    if (named := raw.get("architectures")) not in (["LlamaForCausalLM"], ["Qwen3ForCausalLM"]):
        raise UserError(f"config.json has architectures={named!r}: only LlamaForCausalLM and Qwen3ForCausalLM can be held here")
    if missing := [theirs for theirs in SIZES.values() if not raw.get(theirs)]:
        raise UserError(f"config.json lacks {', '.join(missing)}: download it again")
    is_qwen3, sizes = named == ["Qwen3ForCausalLM"], {ours: raw[theirs] for ours, theirs in SIZES.items()}
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}      # where transformers looks, in the same order
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {} if kind == "default" else {ours: rope.get(theirs) for ours, theirs in ROPE.items()} | {
        "rope_original_ctx": raw.get(ORIGINAL_CTX) or rope.get(ORIGINAL_CTX) or sizes["n_ctx"]}
    config = GPTConfig(
        **sizes, **scaling, n_kv_head=raw.get("num_key_value_heads", 32 if is_qwen3 else sizes["n_head"]), qk_norm=is_qwen3,
        vocab_multiple=1 if sizes["vocab_size"] % 128 else 128, tied=raw.get("tie_word_embeddings", False),
        norm_eps=raw.get("rms_norm_eps", 1e-6), rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000))
    # Llama knows no window; Qwen3's applies where it is switched on.
    held = HELD | ({"use_sliding_window": (False,)} if is_qwen3 else {"sliding_window": ()}) | {
        "head_dim": (config.n_embd / config.n_head,)}
    found = {"head_dim": 128 if is_qwen3 else None} | raw | rope | {
        "rope_type": kind, "rope_keys": sorted(rope.keys() - ROPE_KEYS) or None,
        "layer_types": sorted({*(raw.get("layer_types") or ())} - {"full_attention"}) or None}
    if refused := [f"{key}={found[key]!r}" for key, values in held.items() if found.get(key) not in (None, *values)]:
        raise UserError(f"config.json has {', '.join(refused)}: this model cannot be held exactly")
    if problems := type_problems("model.", config) or config.problems():
        raise UserError("config.json describes no model that can be built: " + "; ".join(problems))
    return config


def from_hf(config: GPTConfig, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Our name and the fp32 tensor, one after the other, of a checkpoint that holds `names`; read(name) gives one.

    Raises UserError, before anything is read, where a tensor is missing or has no place in the model, then where one has
    another shape than config.json says, a dtype that fp32 cannot hold, or a tied head differs from the embedding.
    """
    parts_of, head = layout(config), "lm_head.weight"
    wanted = {name for parts in parts_of.values() for name, _ in parts}
    # Old checkpoints carry the frequencies of RoPE, which follow from config.json.
    there = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    missing, strange = wanted - there, there - wanted - {head}
    if missing or strange:
        raise UserError(f"of config.json's model the files lack {_some(missing)}; {_some(strange)} has no place in the model")
    for ours, parts in parts_of.items():
        whole = torch.empty((sum(shape[0] for _, shape in parts), *parts[0][1][1:]), dtype=torch.float32)
        for (name, shape), place in zip(parts, whole.split([shape[0] for _, shape in parts]), strict=True):
            tensor = read(name)
            if tensor.dtype not in EXACT or tuple(tensor.shape) != shape:
                raise UserError(f"{name} is {tensor.dtype} of {tuple(tensor.shape)}, but must be {shape} in 16 or 32 bits")
            place.copy_(tensor)
        if ours == "wte.weight" and config.tied and head in there and not torch.equal(read(head).float(), whole):
            raise UserError(f"{head} is not the embedding: set tie_word_embeddings to false in config.json if it shall not be")
        yield ours, whole


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + f" and {len(names) - 3} more" * (len(names) > 3) or "nothing"
