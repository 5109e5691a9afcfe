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
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it

from eval.export import layout, publish
from model import GPTConfig
from runtime.checkpoint import FORMAT_VERSION, cause, describe, file_sha256, name_of, seal
from runtime.cli import UserError, type_problems
from runtime.config import Config, DataConfig, OptimConfig
from runtime.tokenizer import keep_tokenizer, load_tokenizer

EXACT = (torch.float32, torch.bfloat16, torch.float16)      # fp32 holds each of their values
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
SIZES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size", "n_ffn": "intermediate_size",
         "n_ctx": "max_position_embeddings", "vocab_size": "vocab_size"}
ROPE = {"rope_factor": "factor", "rope_low_freq": "low_freq_factor", "rope_high_freq": "high_freq_factor"}
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", *ROPE.values()}
# What computes otherwise than model.py: biases, another activation, sums in slices, narrower rotations, quantised weights, code
# of the model's own, which is never run.
HELD = {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu", "swish"), "pretraining_tp": (1,),
        "partial_rotary_factor": (1,), "quantization_config": ({},), "compression_config": ({},), "auto_map": ({},)}
NOT_EXACT = "this model cannot be held exactly"


def import_checkpoint(folder: str, run_dir: str) -> Path:
    """Write the run; returns the folder of its checkpoint. It appears by one rename: whole or not at all.

    Raises UserError where `folder` holds no model that can be held exactly or `run_dir` exists; OSError where writing failed:
    then nothing is left.
    """
    source, target = Path(folder), Path(run_dir)
    if not source.is_dir():
        raise UserError(f"{source} is no folder: give the local folder of a downloaded model, the one that holds config.json")
    if os.path.lexists(target):
        raise UserError(f"{target} exists: choose another out/RUN, or remove that one")
    raw = _read_json(source / "config.json")
    model, files, tokenizer = gpt_config(raw), _open_weights(source), load_tokenizer(str(source))
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(f"{source}: its tokenizer has {tokenizer.vocab_size} ids, but config.json has vocab_size="
                        f"{model.vocab_size}: the two do not belong together")
    config = Config(
        run=target.name, out=str(target.parent), model=model, steps=1, optim=OptimConfig(lr=2e-5),
        data=DataConfig(dir="data", mixture={"imported": 1.0}, tokens_per_step=model.n_ctx, micro_batch=1,
                        tokenizer=str(target / "tokenizer")))
    part = target.with_name(f".tmp_{target.name}")
    try:
        shutil.rmtree(part, ignore_errors=True)     # what a killed import left
        checkpoint = part / "checkpoints" / name_of(0)
        checkpoint.mkdir(parents=True)
        keep_tokenizer(part, folder)
        weights = dict(from_hf(model, files, lambda name: files[name].get_tensor(name)))
        write_checkpoint(checkpoint, config, weights, {"imported": {
            "folder": source.resolve().name, "architecture": raw["architectures"][0], "tokenizer_sha256": tokenizer.sha256}})
        (part / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
        publish(part, part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
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


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}: give the folder of a downloaded model") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON of a model ({error}): download it again") from error


def _open_weights(source: Path) -> dict:
    """The open file of each tensor; its header is checked against its length, nothing is read yet."""
    from safetensors import SafetensorError, safe_open
    files: dict = {}
    for path in sorted(source.glob("*.safetensors")):
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(f"{path} is no whole safetensors file ({error}): the download is incomplete, repeat it") from error
        if twice := sorted(files.keys() & set(opened.keys())):
            raise UserError(f"{path} and another file of the folder both hold {_some(twice)}: keep those of one download")
        files |= dict.fromkeys(opened.keys(), opened)
    if not files:
        raise UserError(f"{source} has no *.safetensors: get the model in that format; pickles (.bin, .pth) can run code and "
                        f"GGUF is no training format, so neither is read")
    return files


def gpt_config(raw: dict) -> GPTConfig:
    """The model that a config.json describes. What the file leaves out has the default of its architecture.

    Raises UserError in one sentence for whatever model.py cannot compute exactly, or where a size is missing.
    """
    named = raw.get("architectures")
    if named not in [[name] for name in MODEL_TYPES]:
        raise UserError(f"config.json has architectures={named!r}: only {' and '.join(MODEL_TYPES)} compute what model.py does")
    is_qwen3 = named == ["Qwen3ForCausalLM"]
    # Llama knows no window; Qwen3's applies where it is switched on.
    held = HELD | ({"use_sliding_window": (False,)} if is_qwen3 else {"sliding_window": ()})
    refused = [f"{key}={raw[key]!r}" for key, values in held.items() if raw.get(key) is not None and raw[key] not in values]
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        refused.append(f"layer_types={sorted(set(raw['layer_types']))}")
    if refused:
        raise UserError(f"config.json has {', '.join(refused)}: {NOT_EXACT}")
    sizes = {ours: _number(raw, theirs, int) for ours, theirs in SIZES.items()}
    heads = _number(raw, "num_key_value_heads", int, None if is_qwen3 else sizes["n_head"])
    config = GPTConfig(
        **sizes, n_kv_head=heads, qk_norm=is_qwen3, vocab_multiple=1 if sizes["vocab_size"] % 128 else 128,
        tied=raw.get("tie_word_embeddings", False), norm_eps=_number(raw, "rms_norm_eps", float, 1e-6),
        **_rope(raw, sizes["n_ctx"]))
    if problems := type_problems("model", config) or config.problems():
        raise UserError("config.json describes no model that can be built: " + "; ".join(problems))
    if (size := raw.get("head_dim", 128 if is_qwen3 else None)) is not None and size != config.head_size:
        raise UserError(f"config.json has head_dim={size!r}, but heads here are hidden_size / num_attention_heads = "
                        f"{config.head_size} channels wide: {NOT_EXACT}")
    return config


def _rope(raw: dict, n_ctx: int) -> dict:
    """Ours of the position encoding, found where transformers looks for it and in the same order."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if strange := sorted(set(rope) - ROPE_KEYS):
        raise UserError(f"config.json has rope parameters that are not known here ({_some(strange)}): {NOT_EXACT}")
    if (share := rope.get("partial_rotary_factor")) not in (None, 1):
        raise UserError(f"config.json has partial_rotary_factor={share!r}, but whole heads are rotated here: {NOT_EXACT}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = {"rope_theta": _number(rope if rope.get("rope_theta") is not None else raw, "rope_theta", float, 10_000.0)}
    if kind == "default":
        return theta
    if kind != "llama3":
        raise UserError(f"config.json has rope_type={kind!r}, but only default and llama3 are known here: {NOT_EXACT}")
    original = "original_max_position_embeddings"
    place = raw if raw.get(original) is not None else rope
    return theta | {ours: _number(rope, theirs, float) for ours, theirs in ROPE.items()} | {
        "rope_original_ctx": _number(place, original, int, n_ctx)}


def _number(raw: dict, key: str, kind: type, default=None):
    value = default if raw.get(key) is None else raw[key]
    if type(value) not in (int, kind):
        raise UserError(f"config.json has {key}={value!r}, but needs a number")
    return kind(value)


def from_hf(config: GPTConfig, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Our name and the fp32 tensor, one after the other, of a checkpoint that holds `names`; read(name) gives one.

    Raises UserError, before anything is read, where a tensor is missing or has no place in the model, then where one has
    another shape than config.json says, a dtype that fp32 cannot hold, or a tied head differs from the embedding.
    """
    parts_of, there = layout(config), set(names)
    wanted = {name for parts in parts_of.values() for name, _ in parts}
    head = "lm_head.weight"
    if missing := sorted(wanted - there):
        raise UserError(f"the checkpoint lacks {_some(missing)}: the download is incomplete, or config.json is another model's")
    # Old checkpoints carry the frequencies of RoPE, which follow from config.json.
    strange = sorted(name for name in there - wanted - {head} if not name.endswith("rotary_emb.inv_freq"))
    if strange:
        raise UserError(f"the checkpoint holds {_some(strange)}, which config.json's model has no place for: it cannot be held "
                          f"exactly")
    for ours, parts in parts_of.items():
        whole = torch.empty((sum(shape[0] for _, shape in parts), *parts[0][1][1:]), dtype=torch.float32)
        for (name, shape), place in zip(parts, whole.split([shape[0] for _, shape in parts]), strict=True):
            place.copy_(_checked(name, read(name), shape))
        if ours == "wte.weight" and config.tied and head in there and not torch.equal(
                _checked(head, read(head), parts[0][1]).float(), whole):
            raise UserError(f"config.json ties the head to the embedding, but {head} is another matrix: set "
                              f"tie_word_embeddings to false there if the head is its own")
        yield ours, whole


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tensor.dtype not in EXACT:
        raise UserError(f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}, but only float32, bfloat16 and "
                          f"float16 become fp32 exactly: take the checkpoint that was not quantised")
    if tuple(tensor.shape) != shape:
        raise UserError(f"{name} has the shape {tuple(tensor.shape)}, but by config.json it should have {shape}: the files do "
                          f"not belong together")
    return tensor


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
