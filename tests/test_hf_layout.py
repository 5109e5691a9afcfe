"""eval/hf_layout.py against transformers' own configurations and position encoding, published config.json files, hostile ones."""

import json
from dataclasses import replace

import pytest
import torch
from model_reference import TINY, VARIANTS, build_rough

from eval.hf_layout import from_hf, gpt_config, hf_config, layout, to_hf
from model import GPT, GPTConfig, rope_frequencies
from runtime.cli import UserError

# Sizes and position encoding as the published files state them.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
    "use_cache": True, "vocab_size": 128256}
OURS_31_8B = GPTConfig(n_layer=32, n_head=32, n_embd=4096, n_ffn=14336, n_kv_head=8, n_ctx=131072, vocab_size=128256, tied=False,
                       rope_theta=500_000.0, rope_factor=8.0)
LLAMA_1_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
    "vocab_size": 32000}       # what is not said has Llama's own default
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936}


def rotary(raw):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    return LlamaRotaryEmbedding(LlamaConfig(**{key: value for key, value in raw.items() if key != "torch_dtype"}))


@pytest.mark.parametrize("change", [
    {}, {"rope_theta": 500_000.0}, {"rope_theta": 500_000.0, "rope_factor": 8.0},
    {"rope_theta": 500_000.0, "rope_factor": 5.0, "rope_low_freq": 2.0, "rope_high_freq": 8.0, "rope_original_ctx": 4096}])
def test_position_tables_are_transformers_bit_for_bit(change):
    config = replace(TINY, n_embd=256, n_head=2, n_ctx=5000, n_layer=1, **change)    # heads of 128 channels
    theirs, model = rotary(hf_config(config, "fp32")), GPT(config)
    model.init_buffers()
    assert torch.equal(rope_frequencies(config), theirs.inv_freq)
    cos, sin = theirs(torch.zeros(1), torch.arange(5000)[None])
    assert torch.equal(model.cos, cos[0, :, :64]) and torch.equal(model.sin, sin[0, :, :64])
    assert torch.equal(cos[0, :, :64], cos[0, :, 64:])


# ------------------------------------------------------------------------------------------------------- configuration

@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_written_is_read_as_the_same_model(name):
    config = VARIANTS[name]
    raw = json.loads(json.dumps(hf_config(config, "bf16")))
    expected = replace(config, n_kv_head=config.kv_heads, vocab_size=config.vocab_padded)
    assert gpt_config(raw) == expected
    assert raw["dtype"] == "bfloat16" and raw["architectures"] == ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"]
    for gone in (("rope_theta", "rope_scaling"), ("rope_parameters",)):      # transformers 5 reads the one, before it the other
        assert gpt_config({key: value for key, value in raw.items() if key not in gone}) == expected


def test_published_configurations_are_read_as_they_are_meant():
    assert gpt_config(LLAMA_31_8B) == OURS_31_8B
    assert OURS_31_8B.params_total == 8_030_261_248
    seven = gpt_config(LLAMA_1_7B)
    assert (seven.rope_theta, seven.rope_factor, seven.kv_heads, seven.norm_eps) == (10_000.0, None, 32, 1e-6) and not seven.tied
    assert seven.params_total == 6_738_415_616
    qwen = gpt_config(QWEN3)
    assert qwen.qk_norm and qwen.rope_theta == 1e6 and qwen.params_total == 8_190_735_360


def test_transformers_own_files_are_read(tmp_path):
    from transformers import LlamaConfig, Qwen3Config
    scaling = {"rope_parameters": {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}}
    for cls, change in ((LlamaConfig, scaling), (Qwen3Config, {})):
        config = cls(hidden_size=4096, architectures=[cls.__name__.replace("Config", "ForCausalLM")], **change)
        ours = gpt_config(json.loads(config.to_json_string()))
        assert (ours.n_layer, ours.vocab_size, ours.n_ffn) == (32, config.vocab_size, config.intermediate_size)
        assert ours.rope_theta == config.rope_parameters["rope_theta"] and (ours.rope_factor or 0) == (8.0 if change else 0)


def test_a_vocabulary_is_padded_by_no_row_it_does_not_have():
    for vocab, multiple in ((128256, 128), (32000, 128), (32001, 1), (50257, 1)):
        config = gpt_config({**LLAMA_31_8B, "vocab_size": vocab})
        assert (config.vocab_padded, config.vocab_multiple) == (vocab, multiple)


@pytest.mark.parametrize("change, words", [
    ({"architectures": ["MistralForCausalLM"]}, "architectures=['MistralForCausalLM']"), ({"architectures": None}, "only Llama"),
    ({"architectures": ["LlamaModel"]}, "architectures"), ({"architectures": [["x"]]}, "architectures"),
    ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "architectures"), ({"model_type": "mistral"}, "model_type"),
    ({"attention_bias": True}, "attention_bias=True"), ({"mlp_bias": True}, "mlp_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"), ({"pretraining_tp": 2}, "pretraining_tp=2"),
    ({"sliding_window": 4096}, "sliding_window=4096"), ({"layer_types": ["sliding_attention"] * 32}, "layer_types"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"), ({"auto_map": {"x": "y"}}, "auto_map"),
    ({"head_dim": 64}, "head_dim=64"), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ({"rope_scaling": {"full_attention": {"rope_type": "llama3"}}}, "full_attention"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None"), ({"rope_scaling": "llama3"}, "no table"),
    ({"rope_scaling": {**LLAMA_31_8B["rope_scaling"], "mscale": 1.0}}, "mscale"), ({"rope_theta": "1e4"}, "rope_theta='1e4'"),
    ({"rope_scaling": {**LLAMA_31_8B["rope_scaling"], "high_freq_factor": 1.0}}, "must be above"),
    ({"hidden_size": None}, "hidden_size=None"), ({"hidden_size": 4097}, "not divisible"), ({"hidden_size": True}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"), ({"num_key_value_heads": 7}, "not divisible"),
    ({"vocab_size": 10**12}, "vocab_size"), ({"vocab_size": 32000.0}, "vocab_size"), ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"), ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"), ({"max_position_embeddings": []}, "max_position_embeddings"),
])
def test_what_cannot_be_held_exactly_is_refused_in_a_sentence(change, words):
    with pytest.raises(UserError, match="config.json") as caught:
        gpt_config({**LLAMA_31_8B, **change})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("change, words", [
    ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window=4096"),
    ({"hidden_size": 1024, "num_attention_heads": 16}, "head_dim=128"),         # Qwen3-0.6B: heads wider than their share
    ({"num_key_value_heads": None}, "num_key_value_heads=None")])
def test_qwen3_has_defaults_of_its_own(change, words):
    with pytest.raises(UserError) as caught:
        gpt_config({**QWEN3, **change})
    assert words in str(caught.value)
    unsaid = {key: value for key, value in QWEN3.items() if key != "head_dim"}      # is 128 whatever the width
    assert gpt_config(unsaid).head_size == 128
    with pytest.raises(UserError, match="head_dim=128"):
        gpt_config({**unsaid, "hidden_size": 2048})


# ------------------------------------------------------------------------------------------------------------- weights

@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back_is_the_same_tensors(name):
    config = VARIANTS[name]
    ours = {name: p.detach() for name, p in build_rough(config).named_parameters()}
    theirs = to_hf(config, ours)
    assert ("lm_head.weight" in theirs) is not config.tied
    assert {t.untyped_storage().data_ptr() for t in theirs.values()} <= {t.untyped_storage().data_ptr() for t in ours.values()}
    assert sum(t.numel() for t in theirs.values()) == config.params_total and all(t.is_contiguous() for t in theirs.values())
    back = dict(from_hf(config, theirs, theirs.__getitem__))
    assert list(back) == list(layout(config)) and back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) and back[name].dtype == torch.float32 for name in ours)


def test_query_key_value_gate_and_up_lie_where_the_model_reads_them():
    config = VARIANTS["gqa"]        # 4 query and 2 key/value heads of 12 channels
    theirs = to_hf(config, {name: p.detach() for name, p in build_rough(config).named_parameters()})
    model = build_rough(config)
    block, x = model.layers[1], torch.randn(5, 48)
    q, k, v = (theirs[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert (q.shape, k.shape, v.shape) == ((48, 48), (24, 48), (24, 48))
    torch.testing.assert_close(block.attn.qkv(x), torch.cat((x @ q.T, x @ k.T, x @ v.T), dim=1))
    gate, up, down = (theirs[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    torch.testing.assert_close(block.mlp(x), torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ down.T)


def weights_of(config, **changes):
    theirs = to_hf(config, {name: p.detach() for name, p in build_rough(config).named_parameters()})
    theirs |= changes
    return {name: t for name, t in theirs.items() if t is not None}


def test_half_precision_becomes_fp32_exactly_and_old_frequencies_are_left_out():
    for dtype in (torch.bfloat16, torch.float16):
        theirs = {name: t.to(dtype) for name, t in weights_of(TINY).items()}
        theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        norm = dict(from_hf(TINY, theirs, theirs.__getitem__))["norm.weight"]
        assert norm.dtype == torch.float32 and torch.equal(norm.to(dtype), theirs["model.norm.weight"])


def test_a_repeated_tied_head_must_be_the_embedding():
    theirs = weights_of(TINY)
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"].clone()
    assert "head.weight" not in dict(from_hf(TINY, theirs, theirs.__getitem__))
    theirs["lm_head.weight"][3, 4] += 1
    with pytest.raises(UserError, match="ties the head to the embedding, but lm_head.weight is another matrix"):
        dict(from_hf(TINY, theirs, theirs.__getitem__))


@pytest.mark.parametrize("changes, words", [
    ({"model.norm.weight": None}, "lacks model.norm.weight"),
    ({"model.layers.1.self_attn.q_proj.weight": None, "model.norm.weight": None}, "q_proj.weight, model.norm.weight"),
    ({"model.layers.3.mlp.up_proj.weight": torch.ones(1)}, "no place for"),
    ({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}, "q_proj.bias"),
    ({"model.norm.weight": torch.ones(49)}, "shape (49,), but by config.json it should have (48,)"),
    ({"model.norm.weight": torch.ones(48, dtype=torch.float64)}, "stored as float64"),
    ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, "stored as int8"),
    ({"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)}, "stored as float8_e4m3fn"),
])
def test_foreign_tensors_are_named(changes, words):
    theirs = weights_of(TINY, **changes)
    with pytest.raises(UserError) as caught:
        dict(from_hf(TINY, theirs, theirs.__getitem__))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_is_read_from_a_checkpoint_of_other_names():
    with pytest.raises(UserError, match="lacks lm_head.weight"):
        list(from_hf(replace(TINY, tied=False), weights_of(TINY), lambda name: pytest.fail(f"{name} was read")))
