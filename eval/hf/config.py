"""config.json of Hugging Face's format: written for a model of our_name, read as one."""

import json
import math
import re
from dataclasses import dataclass, fields
from typing import Any

from lib.errors import UserError
from lib.values import type_problems
from model import GPTConfig

# Classes of transformers that compute what model.py does -> the model_type by which transformers
# finds each.
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3ForCausalLM": "qwen3",
}


# Keys of GPTConfig that an export keeps: those that config.json has a place for, and two that
# change no logit of a token.
KNOWN_KEYS = {
    "n_layer",
    "n_head",
    "n_embd",
    "n_ffn",
    "n_kv_head",
    "head_size",
    "n_ctx",
    "vocab_size",
    "vocab_multiple",
    "tied",
    "qk_norm",
    "norm_eps",
    "rope_theta",
    "rope_factor",
    "rope_low_freq",
    "rope_high_freq",
    "rope_original_ctx",
    "loss_chunk",
}


def check_keys(config: GPTConfig) -> None:
    """Raise UserError where a variant of model.py is switched on that config.json cannot name: its
    export would be another model."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in KNOWN_KEYS and value != field.default:
            raise UserError(
                f"model.{field.name}={str(value).lower()} has no counterpart in"
                f" {', '.join(MODEL_TYPES)}: such a model cannot be exported"
            )


def hf_config(config: GPTConfig, dtype: str) -> dict:
    """The content of config.json for weights stored as `dtype` ("float32" or "bfloat16"), without
    the roles of tokens.

    The position encoding stands there twice: as transformers 5 writes it, and as the versions
    before read it."""
    scaling = _rope_scaling(config)
    architecture = _architecture_of(config)
    # else its default of 4,096 tokens
    window = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        **window,
        "vocab_size": config.vocab_padded,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_ffn,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.n_ctx,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        "rope_parameters": {
            **(scaling or {"rope_type": "default"}),
            "rope_theta": config.rope_theta,
        },
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _rope_scaling(config: GPTConfig) -> dict | None:
    if config.rope_factor is None:
        return None
    values = {hf_name: getattr(config, our_name) for our_name, hf_name in ROPE.items()}
    return {"rope_type": "llama3", **values}


def _architecture_of(config: GPTConfig) -> str:
    """The class of transformers that computes what model.py does.

    LlamaConfig refuses a width that is no multiple of the heads, whatever head_dim says; Mistral's,
    a Llama but for its window, takes it."""
    if config.qk_norm:
        return "Qwen3ForCausalLM"
    if config.n_embd % config.n_head:
        return "MistralForCausalLM"
    return "LlamaForCausalLM"


SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_ffn": "intermediate_size",
    "n_ctx": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
ORIGINAL_CTX = "original_max_position_embeddings"
ROPE = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_original_ctx": ORIGINAL_CTX,
}
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE.values()}


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """The keys of a config.json that decide what is computed, with transformers' types; the
    defaults are LlamaConfig's."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    num_key_value_heads: int | None = None  # none = num_attention_heads
    head_dim: int | None = None  # none = hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    # of versions that have no rope_parameters, whose own counts before it
    rope_theta: float | None = 10_000.0
    rope_parameters: dict | None = None  # as transformers 5 writes it
    # as the versions before wrote it; counts before rope_parameters
    rope_scaling: dict | None = None
    original_max_position_embeddings: int | None = None  # counts before the one in rope_parameters
    partial_rotary_factor: float | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: int | None = 1
    is_causal: bool = True
    layer_types: list | None = None
    sliding_window: int | None = None  # tokens that a token sees
    use_sliding_window: bool = False  # Qwen3 alone: whether sliding_window applies
    max_window_layers: int = 28  # Qwen3 alone: layers before this one have no window
    per_layer_config: dict | None = None  # layer -> keys that differ there
    quantization_config: dict | None = None
    compression_config: dict | None = None
    auto_map: dict | None = None  # names code in the folder
    # the file or index to read instead of model.safetensors
    transformers_weights: str | None = None
    attention_dropout: float | None = 0.0  # in training alone


# What the architectures leave to their own defaults, where another than LlamaConfig's.
DEFAULTS: dict[str, dict] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}
# transformers refuses null there
NEVER_NULL = {"MistralForCausalLM": "num_key_value_heads", "Qwen3ForCausalLM": "head_dim"}


def architecture_named(raw: dict) -> str:
    """The class that a config.json names, by architectures or, where that is left out, model_type.

    Raises UserError where it is none that model.py computes, or the two say different things:
    transformers goes by model_type, vLLM by architectures."""
    choices = ", ".join(MODEL_TYPES)
    named, model_type = raw.get("architectures"), raw.get("model_type")
    if named is None:
        for name, kind in MODEL_TYPES.items():
            if kind == model_type:
                return name
        raise UserError(
            f"config.json has architectures=None and model_type={model_type!r}: only"
            f" {choices} can be held here"
        )
    if isinstance(named, str):
        raise UserError(
            f"config.json has architectures={named!r}, a text, where a list is needed: write"
            f" [{json.dumps(named)}]"
        )
    if not isinstance(named, list) or len(named) != 1 or named[0] not in MODEL_TYPES:
        biased = " (Qwen2's q, k and v have biases)" if named == ["Qwen2ForCausalLM"] else ""
        raise UserError(
            f"config.json has architectures={named!r}: only {choices} can be held here{biased}"
        )
    architecture = named[0]
    if model_type not in (None, MODEL_TYPES[architecture]):
        raise UserError(
            f"config.json has model_type={model_type!r} but architectures={named!r}, whose"
            f" model_type is {MODEL_TYPES[architecture]!r}: transformers would compute another"
            " model than vLLM; correct the one that is wrong"
        )
    return architecture


def gpt_config(raw: dict) -> GPTConfig:
    """The model that a config.json describes. What the file leaves out has the default of its
    architecture.

    Raises UserError in one sentence for whatever model.py cannot compute exactly, or where a size
    is missing."""
    architecture = architecture_named(raw)
    hf = _read_config(raw, architecture)
    refused = [*_refused(hf, architecture), *_refused_rope(hf)]
    if refused:
        raise UserError(f"config.json has {'; '.join(refused)}; this model cannot be held exactly")
    config = GPTConfig(
        **{our_name: getattr(hf, hf_name) for our_name, hf_name in SIZES.items()},
        **_rope_of(hf),
        n_kv_head=hf.num_key_value_heads or hf.num_attention_heads,
        head_size=_head_size(hf),
        qk_norm=architecture == "Qwen3ForCausalLM",
        vocab_multiple=1 if hf.vocab_size % 128 else 128,
        tied=hf.tie_word_embeddings,
        norm_eps=hf.rms_norm_eps,
    )
    problems = type_problems("model.", config) or config.problems()
    if problems:
        raise UserError(
            "config.json describes no model that can be built:"
            f" {_in_their_words('; '.join(problems))}"
        )
    return config


def _read_config(raw: dict, architecture: str) -> HFConfig:
    """The keys that count, with the defaults of the architecture. Raises UserError."""
    missing = [hf_name for hf_name in SIZES.values() if not raw.get(hf_name)]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}: download it again")
    names = {f.name for f in fields(HFConfig)}
    values = {key: value for key, value in raw.items() if key in names}
    hf = HFConfig(**DEFAULTS[architecture] | values)
    problems = type_problems("", hf)
    if problems:
        raise UserError(
            f"config.json has a value of the wrong kind: {'; '.join(problems)}; correct it or"
            " download it again"
        )
    never_null = NEVER_NULL.get(architecture)
    if never_null and getattr(hf, never_null) is None:
        default = DEFAULTS[architecture][never_null]
        raise UserError(
            f"config.json has {never_null}=None: {architecture} needs a number, or the key left out"
            f" for {default}"
        )
    return hf


def _head_size(hf: HFConfig) -> int | None:
    """None where a head has its equal share of the width."""
    if hf.head_dim is None or hf.head_dim * hf.num_attention_heads == hf.hidden_size:
        return None
    return hf.head_dim


def _refused(hf: HFConfig, architecture: str) -> list[str]:
    """One phrase, with the key, its value and what would fit, for each value by which the
    computation is another than model.py's."""
    fits: dict[
        str, tuple[tuple, str]
    ] = {  # key -> the values with which it is the same, what would fit
        "attention_bias": ((False,), "false: there are no biases here"),
        "mlp_bias": ((False,), "false: there are no biases here"),
        "hidden_act": (("silu", "swish"), "silu or swish"),
        "pretraining_tp": ((None, 1), "1: sums in slices round otherwise"),
        "is_causal": ((True,), "true: a token sees those before it alone"),
        "partial_rotary_factor": ((None, 1), "1: the whole head is rotated"),
        "per_layer_config": ((None, {}), "none: all layers are of one kind"),
        "quantization_config": ((None, {}), "none: get the model in 16 or 32 bits"),
        "compression_config": ((None, {}), "none: get the model in 16 or 32 bits"),
        "auto_map": ((None, {}), "none: the folder's own code is never run"),
    }
    phrases = [
        f"{key}={getattr(hf, key)!r} where what fits is {what}"
        for key, (values, what) in fits.items()
        if getattr(hf, key) not in values
    ]
    n_layer, n_ctx = hf.num_hidden_layers, hf.max_position_embeddings
    if hf.layer_types is not None:
        if not all(kind in ("full_attention", "attention") for kind in hf.layer_types):
            phrases.append(
                f"layer_types={hf.layer_types!r} where what fits is full_attention in every layer"
            )
        elif len(hf.layer_types) != n_layer:
            phrases.append(
                f"layer_types of {len(hf.layer_types)} layers where what fits is"
                f" num_hidden_layers={n_layer}"
            )
    window = _window_of(hf, architecture)
    if window is not None and window < n_ctx:
        switch = (
            f"use_sliding_window={hf.use_sliding_window} and "
            if architecture == "Qwen3ForCausalLM"
            else ""
        )
        phrases.append(
            f"{switch}sliding_window={window} where what fits is none, or at least"
            f" max_position_embeddings={n_ctx} (in texts of {window} tokens no window is felt:"
            f" max_position_embeddings={window} fits too)"
        )
    return phrases


def _window_of(hf: HFConfig, architecture: str) -> int | None:
    """Tokens that a token sees in some layer, none = all before it."""
    if architecture == "Qwen3ForCausalLM":
        has_windows = hf.use_sliding_window and hf.max_window_layers < hf.num_hidden_layers
        if not has_windows or hf.layer_types is not None:  # which say it of each layer
            return None
    return hf.sliding_window


def _rope_dict(hf: HFConfig) -> dict:
    """What a config.json says of the position encoding in an object, where transformers looks, in
    the same order."""
    return hf.rope_scaling or hf.rope_parameters or {}


def _rope_type(hf: HFConfig) -> Any:
    rope = _rope_dict(hf)
    return rope.get("rope_type", rope.get("type", "default"))


def _refused_rope(hf: HFConfig) -> list[str]:
    """The same as _refused() for the position encoding."""
    rope, kind, phrases = _rope_dict(hf), _rope_type(hf), []
    if kind not in ("default", "llama3"):
        phrases.append(f"rope_type={kind!r} where what fits is default or llama3")
    surplus = sorted(map(str, rope.keys() - ROPE_KEYS))
    if surplus:
        phrases.append(
            f"rope_keys={surplus!r} where what fits is one encoding for all layers, of"
            f" {', '.join(sorted(ROPE_KEYS))}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        phrases.append(
            f"partial_rotary_factor={rope['partial_rotary_factor']!r} where what fits is 1: the"
            " whole head is rotated"
        )
    numbers = {"rope_theta": rope.get("rope_theta", hf.rope_theta)}
    if kind == "llama3":
        numbers |= {key: rope.get(key) for key in ROPE.values() if key != ORIGINAL_CTX}
    phrases += [
        f"{key}={value!r} where what fits is a positive number"
        for key, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
    ]
    return phrases


def _rope_of(hf: HFConfig) -> dict:
    """The keys of GPTConfig that say how positions are encoded."""
    rope: dict[str, Any] = _rope_dict(hf)
    theta: Any = rope.get("rope_theta", hf.rope_theta)  # a number: _refused_rope() has looked
    keys: dict[str, Any] = {"rope_theta": float(theta)}
    if _rope_type(hf) == "llama3":
        keys |= {our_name: rope.get(hf_name) for our_name, hf_name in ROPE.items()}
        keys["rope_original_ctx"] = (
            hf.original_max_position_embeddings
            or rope.get(ORIGINAL_CTX)
            or hf.max_position_embeddings
        )
    return keys


def _in_their_words(sentence: str) -> str:
    """A sentence about keys of the model section with the names of config.json."""
    hf_names = (
        SIZES
        | ROPE
        | {
            "n_kv_head": "num_key_value_heads",
            "head_size": "head_dim",
            "norm_eps": "rms_norm_eps",
            "rope_theta": "rope_theta",
            "tied": "tie_word_embeddings",
        }
    )
    return re.sub(r"\bmodel\.(\w+)", lambda match: hf_names.get(match[1], match[0]), sentence)
