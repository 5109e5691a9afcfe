"""model.py's initial weights, dtypes, counts and refusals against closed forms and numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from model_reference import TINY, VARIANTS, build, tokens

from model import GPT, GPTConfig

# -------------------------------------------------------------------------------------------------------- initialisation

def test_fresh_model_knows_nothing():
    config = GPTConfig(n_layer=4, n_head=4, n_embd=128, n_ffn=256, n_ctx=64, vocab_size=257)
    x, y = tokens(config, B=8), tokens(config, B=8, seed=1)
    loss = build(config)(x, y).mean().item() / config.n_ctx
    # Independent logits of variance s^2 cost ln V + s^2 / 2; the head sums C terms of variance 2 / (5 C), so s^2 = 0.4.
    assert loss == pytest.approx(math.log(384) + 0.2, abs=0.05)


def test_init_depends_on_the_seed_and_on_the_name_alone():
    a, b, other = (dict(build(TINY, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], other[name]) for name in a if "norm" not in name)
    deeper = dict(build(replace(TINY, n_layer=5, tied=False)).named_parameters())
    same = [name for name in a if not name.endswith(("out.weight", "down.weight"))]
    assert all(torch.equal(a[name], deeper[name]) for name in same)     # neither order nor depth moves a draw
    matrices = [p for name, p in a.items() if name.startswith("layers.") and name.endswith("qkv.weight")]
    assert not torch.equal(matrices[0], matrices[1])


def test_init_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = GPT(TINY)
    state = torch.get_rng_state()
    model.init_weights(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("n_layer", [1, 8])
def test_init_scales(n_layer):
    config = GPTConfig(n_layer=n_layer, n_head=4, n_embd=256, n_ffn=512, n_ctx=16, vocab_size=1000, tied=False)
    for name, p in build(config).named_parameters():
        assert p.dtype == torch.float32
        if "norm" in name:
            assert (p == 1).all()
            continue
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        std = math.sqrt(2 / (5 * 256)) / (math.sqrt(2 * n_layer) if residual else 1)
        n = p.numel()
        assert p.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * n)), name      # 4 standard errors
        assert abs(p.mean().item()) < 4 * std / math.sqrt(n), name


def test_meta_to_empty_to_init_gives_the_same_model_with_its_head_tied():
    direct = build(TINY)
    with torch.device("meta"):
        model = GPT(TINY, compute_dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert model.head.weight is not model.wte.weight        # what makes tie() necessary
    model.init_weights(1)
    assert model.head.weight is model.wte.weight
    assert sum(p.numel() for p in model.parameters()) == TINY.params_total
    assert "head.weight" not in dict(model.named_parameters())
    x = tokens(TINY)
    assert torch.equal(model(x), direct(x))
    assert torch.equal(model.cos, direct.cos) and torch.equal(model.sin, direct.sin)
    assert not any(key.endswith(("cos", "sin")) for key in model.state_dict())


def test_untied_head_is_its_own_matrix():
    model = build(replace(TINY, tied=False))
    assert model.head.weight is not model.wte.weight and not torch.equal(model.head.weight, model.wte.weight)


# ---------------------------------------------------------------------------------------------------------------- dtypes

@pytest.mark.parametrize("chunk", [None, 7])
def test_bf16_compute_keeps_fp32_weights_and_gradients(chunk):
    config = replace(VARIANTS["everything"], loss_chunk=chunk)
    model, x, y = build(config, compute_dtype=torch.bfloat16), tokens(config), tokens(config, seed=2)
    seen = {}
    modules = {name: m for name, m in model.named_modules() if name and not list(m.children())}
    modules |= {f"block {i}": block for i, block in enumerate(model.layers)}
    for name, module in modules.items():
        def note(module, args, out, name=name):
            seen[name] = (args[0].dtype, out.dtype)
        module.register_forward_hook(note)
    loss = model(x, y)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert seen.pop("wte") == (torch.int64, torch.float32)      # the embedding is read in fp32, then cast once
    assert set(seen.values()) == {(torch.bfloat16, torch.bfloat16)} and "head" in seen and "block 2" in seen
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert model.cos.dtype == torch.float32


def test_linears_multiply_by_the_rounded_weight():
    model, x = build(TINY), torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = model.layers[0].mlp.gate_up
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight.bfloat16()))
    assert not torch.equal(linear(x), torch.nn.functional.linear(x.float(), linear.weight).bfloat16())


def test_bf16_loss_stays_near_fp32():
    x, y = tokens(TINY, B=8), tokens(TINY, B=8, seed=3)
    fp32, bf16 = build(TINY)(x, y), build(TINY, compute_dtype=torch.bfloat16)(x, y)
    torch.testing.assert_close(bf16, fp32, rtol=2e-3, atol=0)
    assert not torch.equal(bf16, fp32)


# ---------------------------------------------------------------------------------------------------------------- counts

@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("n_layer, vocab_size", [(1, 128), (2, 129), (4, 257)])
def test_counts_agree_with_the_modules(name, n_layer, vocab_size):
    config = replace(VARIANTS[name], n_layer=n_layer, vocab_size=vocab_size)
    with torch.device("meta"):
        model = GPT(config)
    C, D, H, K, F = 48, 12, 4, config.n_kv_head or 4, 80
    V = {128: 128, 129: 256, 257: 384}[vocab_size]
    matmul_block = C * H * D + 2 * C * K * D + H * D * C + C * F + C * F + F * C
    norms_block = 2 * C + (2 * D if config.qk_norm else 0)
    embeddings = V * C * (1 if config.tied else 2)
    counts = model.counts()
    assert config.vocab_padded == V
    assert counts["params_total"] == config.params_total == n_layer * (matmul_block + norms_block) + C + embeddings
    assert counts["params_nonembed"] == n_layer * (matmul_block + norms_block) + C
    assert counts["params_matmul"] == n_layer * matmul_block + V * C
    assert counts["params_embed_tok"] == counts["params_head"] == V * C


@pytest.mark.parametrize("vocab_size, multiple, rows", [(420, 1, 420), (420, 64, 448), (448, 64, 448), (1, 128, 128)])
def test_the_vocabulary_is_padded_to_a_multiple(vocab_size, multiple, rows):
    config = replace(TINY, vocab_size=vocab_size, vocab_multiple=multiple)
    model = build(config)
    assert model(torch.zeros(1, 2, dtype=torch.int64)).shape[-1] == len(model.wte.weight) == config.vocab_padded == rows
    assert model.counts()["params_embed_tok"] == rows * 48


@pytest.mark.parametrize("label, n_layer, n_head, n_embd, n_ffn", [
    ("53M", 8, 4, 512, 1536), ("124M", 12, 6, 768, 2048), ("257M", 16, 8, 1024, 2816), ("360M", 24, 8, 1024, 2816),
    ("757M", 24, 12, 1536, 4096), ("1.54B", 28, 16, 2048, 5632)])
def test_published_sizes(label, n_layer, n_head, n_embd, n_ffn):
    config = GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_ffn=n_ffn)
    with torch.device("meta"):
        counts = GPT(config).counts()
    total = counts["params_total"]
    assert total == config.params_total
    assert label == (f"{total / 1e9:.2f}B" if total > 999e6 else f"{total / 1e6:.0f}M")
    assert config.head_size == 128 and config.vocab_padded == 50304


def test_flops_by_hand():
    # gpt125m at T = 1024: 12 layers of (4 * 768^2 + 3 * 768 * 2048) = 84,934,656 weights, a head of 50304 * 768 = 38,633,472.
    with torch.device("meta"):
        counts = GPT(GPTConfig(n_layer=12, n_head=6, n_embd=768, n_ffn=2048)).counts()
    assert counts["params_matmul"] == 84_934_656 + 38_633_472 == 123_568_128
    assert counts["params_total"] == 123_568_128 + 25 * 768
    assert counts["flops_per_token_6n_matmul"] == 741_408_768
    assert counts["flops_per_token_6n_total"] == 6 * (123_568_128 + 19_200)
    assert counts["flops_per_token_6n_nonembed"] == 6 * (84_934_656 + 19_200)
    # One token attends to T keys: 2 T C for the scores, 2 T C for the values, forward; three times that with the backward.
    assert counts["flops_per_token_attn"] == 12 * 3 * (2 + 2) * 1024 * 768 == 113_246_208
    assert counts["flops_per_token_attn_causal"] == 56_623_104
    assert counts["flops_per_token"] == 741_408_768 + 113_246_208
    assert counts["flops_per_token_causal"] == 741_408_768 + 56_623_104


def test_flops_equal_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode
    config = replace(TINY, n_ctx=32)
    model, B = build(config), 2
    x, y = tokens(config, B=B), tokens(config, B=B, seed=1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, y).sum().backward()
    expected = model.counts()["flops_per_token"] * B * config.n_ctx
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


# ------------------------------------------------------------------------------------------------------ impossible sizes

@pytest.mark.parametrize("change, sentence", [
    ({"n_embd": 50}, "model.n_embd=50 is not divisible by model.n_head=4: give a width that is a multiple of the number "
                     "of heads"),
    ({"n_embd": 12}, "model.n_embd=12 over model.n_head=4 heads gives heads of 3 channels, but RoPE rotates pairs: give an "
                     "even head size"),
    ({"n_kv_head": 3}, "model.n_head=4 is not divisible by model.n_kv_head=3: each key/value head serves a whole number of "
                       "query heads"),
    ({"n_kv_head": 8}, "model.n_head=4 is not divisible by model.n_kv_head=8: each key/value head serves a whole number of "
                       "query heads"),
    ({"n_layer": 0}, "model.n_layer=0 must be between 1 and 16777216"),
    ({"n_head": 0}, "model.n_head=0 must be between 1 and 16777216"),
    ({"n_kv_head": 0}, "model.n_kv_head=0 must be between 1 and 16777216"),
    ({"vocab_size": -5}, "model.vocab_size=-5 must be between 1 and 16777216"),
    ({"vocab_multiple": 0}, "model.vocab_multiple=0 must be between 1 and 16777216"),
    ({"loss_chunk": 0}, "model.loss_chunk=0 must be between 1 and 16777216"),
    ({"norm_eps": float("nan")}, "model.norm_eps=nan must be a positive, finite number"),
    ({"rope_theta": float("inf")}, "model.rope_theta=inf must be a positive, finite number"),
    ({"rope_factor": 0.0}, "model.rope_factor=0.0 must be a positive, finite number"),
    ({"rope_factor": 8.0, "rope_low_freq": 4.0}, "model.rope_high_freq=4.0 must be above model.rope_low_freq=4.0"),
])
def test_impossible_sizes_are_refused_with_a_sentence(change, sentence):
    config = replace(TINY, **change)
    assert config.problems() == [sentence]
    with pytest.raises(ValueError) as caught:
        GPT(config)
    assert str(caught.value) == sentence


def test_all_problems_are_told_together():
    problems = replace(TINY, n_layer=0, n_ffn=-1, norm_eps=0.0).problems()
    assert len(problems) == 3 and any("n_ffn=-1" in p for p in problems)
    assert TINY.problems() == [] and all(config.problems() == [] for config in VARIANTS.values())
