"""Translate a model between our names, sizes and fused matrices and those of Hugging Face's Llama family.

    model.py                        LlamaForCausalLM, or Qwen3ForCausalLM where query and key heads are normalised
    wte.weight                      model.embed_tokens.weight
    layers.0.norm1.weight           model.layers.0.input_layernorm.weight
    layers.0.attn.qkv.weight        model.layers.0.self_attn.{q,k,v}_proj.weight, one below the other
    layers.0.attn.out.weight        model.layers.0.self_attn.o_proj.weight
    layers.0.attn.q_norm.weight     model.layers.0.self_attn.q_norm.weight (k_norm likewise)
    layers.0.norm2.weight           model.layers.0.post_attention_layernorm.weight
    layers.0.mlp.gate_up.weight     model.layers.0.mlp.{gate,up}_proj.weight, one below the other
    layers.0.mlp.down.weight        model.layers.0.mlp.down_proj.weight
    norm.weight                     model.norm.weight
    head.weight                     lm_head.weight (a tied one is not repeated)

Source: configuration and modelling of both in transformers 5.23; both rotate RoPE by halves, as model.py does.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from model import GPTConfig
from runtime.cli import UserError, type_problems

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
EXACT = (torch.float32, torch.bfloat16, torch.float16)      # fp32 holds each of their values
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", *LLAMA3}
SILU = ("silu", "swish")


# ------------------------------------------------------------------------------------------------------- configuration

def hf_config(config: GPTConfig, dtype: str) -> dict:
    """The content of config.json for weights stored as `dtype` ("fp32" or "bf16"), without the roles of tokens.

    The position encoding stands there twice: as transformers 5 writes it, and as the versions before read it.
    """
    architecture = "Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"
    scaling = None
    if config.rope_factor is not None:
        scaling = {"rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": config.rope_low_freq,
                   "high_freq_factor": config.rope_high_freq, "original_max_position_embeddings": config.rope_original_ctx}
    return {
        "architectures": [architecture], "model_type": MODEL_TYPES[architecture],
        "vocab_size": config.vocab_padded, "hidden_size": config.n_embd, "intermediate_size": config.n_ffn,
        "num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size, "max_position_embeddings": config.n_ctx, "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied, "use_cache": True,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta, "rope_scaling": scaling,
        "dtype": DTYPES[dtype], "torch_dtype": DTYPES[dtype],
    }


def gpt_config(raw: dict) -> GPTConfig:
    """The model that a config.json describes. What the file leaves out has the default of its architecture.

    Raises UserError in one sentence for whatever model.py cannot compute exactly, or where a size is missing.
    """
    architecture = _architecture(raw)
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    sizes = {ours: _size(raw, theirs) for ours, theirs in (
        ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads"), ("n_embd", "hidden_size"),
        ("n_ffn", "intermediate_size"), ("n_ctx", "max_position_embeddings"), ("vocab_size", "vocab_size"))}
    _refuse_what_computes_otherwise(raw, is_qwen3)
    heads = _size(raw, "num_key_value_heads") if is_qwen3 or raw.get("num_key_value_heads") is not None else sizes["n_head"]
    config = GPTConfig(
        **sizes, n_kv_head=heads, qk_norm=is_qwen3, vocab_multiple=1 if sizes["vocab_size"] % 128 else 128,
        tied=_flag(raw, "tie_word_embeddings"), norm_eps=_number(raw, "rms_norm_eps", 1e-6), **_rope(raw, sizes["n_ctx"]))
    if problems := type_problems("model", config) or config.problems():
        raise UserError("config.json describes no model that can be built: " + "; ".join(problems))
    if (size := raw.get("head_dim", 128 if is_qwen3 else None)) is not None and size != config.head_size:
        raise UserError(f"config.json has head_dim={size!r}, but heads here are hidden_size / num_attention_heads = "
                          f"{config.head_size} channels wide: this model cannot be held exactly")
    return config


def _architecture(raw: dict) -> str:
    named = raw.get("architectures")
    if not (isinstance(named, list) and len(named) == 1 and named[0] in list(MODEL_TYPES)):
        raise UserError(f"config.json has architectures={named!r}: only {' and '.join(MODEL_TYPES)} compute what model.py does")
    if raw.get("model_type", MODEL_TYPES[named[0]]) != MODEL_TYPES[named[0]]:
        raise UserError(f"config.json has model_type={raw['model_type']!r}, which is not {named[0]}'s: the file is damaged")
    return named[0]


def _refuse_what_computes_otherwise(raw: dict, is_qwen3: bool) -> None:
    refused = [f"{key}={raw[key]!r} (no Linear here has a bias)" for key in ("attention_bias", "mlp_bias") if raw.get(key)]
    if raw.get("hidden_act", "silu") not in SILU:
        refused.append(f"hidden_act={raw['hidden_act']!r} (only silu)")
    if raw.get("pretraining_tp", 1) not in (1, None):
        refused.append(f"pretraining_tp={raw['pretraining_tp']!r} (its sums are taken in slices)")
    # Llama knows no window; Qwen3's applies where it is switched on.
    if raw.get("use_sliding_window") or (not is_qwen3 and raw.get("sliding_window") is not None):
        refused.append(f"sliding_window={raw.get('sliding_window')!r} (attention here sees the whole context)")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        refused.append("layer_types other than full_attention (attention here sees the whole context)")
    refused += [f"{key} (quantised weights are not what was trained)" for key in ("quantization_config", "compression_config")
                if raw.get(key)]
    refused += ["auto_map (code of its own, which is never run)"] if raw.get("auto_map") else []
    if refused:
        raise UserError(f"config.json has {', '.join(refused)}: this model cannot be held exactly")


def _rope(raw: dict, n_ctx: int) -> dict:
    """Ours of the position encoding, found where transformers looks for it and in the same order."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json has rope parameters that are no table ({rope!r}): the file is damaged")
    if strange := sorted(set(rope) - ROPE_KEYS):
        raise UserError(f"config.json has rope parameters that are not known here ({_some(strange)}): this model cannot be "
                          f"held exactly")
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UserError(f"config.json has partial_rotary_factor={share!r}, but whole heads are rotated here: this model cannot "
                          f"be held exactly")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = {"rope_theta": _number(rope if rope.get("rope_theta") is not None else raw, "rope_theta", 10_000.0)}
    if kind == "default":
        return theta
    if kind != "llama3":
        raise UserError(f"config.json has rope_type={kind!r}, but only default and llama3 are known here: this model cannot be "
                          f"held exactly")
    original = "original_max_position_embeddings"
    place = raw if raw.get(original) is not None else rope if rope.get(original) is not None else {original: n_ctx}
    factor, low, high = (_number(rope, key) for key in LLAMA3)
    return theta | {"rope_factor": factor, "rope_low_freq": low, "rope_high_freq": high,
                    "rope_original_ctx": _size(place, original)}


def _size(raw: dict, key: str) -> int:
    if type(value := raw.get(key)) is not int or not 1 <= value <= 2**24:
        raise UserError(f"config.json has {key}={value!r}, but needs a whole number from 1 to {2**24}")
    return value


def _number(raw: dict, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise UserError(f"config.json has {key}={value!r}, but needs a positive number")
    return float(value)


def _flag(raw: dict, key: str) -> bool:
    if type(value := raw.get(key, False)) is not bool:
        raise UserError(f"config.json has {key}={value!r}, but needs true or false")
    return value


# ------------------------------------------------------------------------------------------------------------- weights

Parts = dict[str, list[tuple[str, tuple[int, ...]]]]


def layout(config: GPTConfig) -> Parts:
    """Our name -> names and shapes of the tensors that lie in it, one below the other; in the order of the modules."""
    C, D, H, K, F, V = config.n_embd, config.head_size, config.n_head, config.kv_heads, config.n_ffn, config.vocab_padded
    out: Parts = {"wte.weight": [("model.embed_tokens.weight", (V, C))]}
    for i in range(config.n_layer):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        block: Parts = {
            "norm1.weight": [("input_layernorm.weight", (C,))],
            "attn.qkv.weight": [(f"self_attn.{name}_proj.weight", (n * D, C)) for name, n in (("q", H), ("k", K), ("v", K))],
            "attn.out.weight": [("self_attn.o_proj.weight", (C, H * D))],
            "norm2.weight": [("post_attention_layernorm.weight", (C,))],
            "mlp.gate_up.weight": [("mlp.gate_proj.weight", (F, C)), ("mlp.up_proj.weight", (F, C))],
            "mlp.down.weight": [("mlp.down_proj.weight", (C, F))],
        }
        if config.qk_norm:
            block |= {f"attn.{name}.weight": [(f"self_attn.{name}.weight", (D,))] for name in ("q_norm", "k_norm")}
        out |= {ours + name: [(theirs + part, shape) for part, shape in parts] for name, parts in block.items()}
    out["norm.weight"] = [("model.norm.weight", (C,))]
    if not config.tied:
        out["head.weight"] = [("lm_head.weight", (V, C))]
    return out


def to_hf(config: GPTConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under their names: views of `weights`, which has the names of GPT.named_parameters()."""
    out = {}
    for ours, parts in layout(config).items():
        rows = [shape[0] for _, shape in parts]
        out |= dict(zip((name for name, _ in parts), weights[ours].split(rows), strict=True))
    return out


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
