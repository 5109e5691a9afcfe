"""model.py against a second implementation in numpy, closed forms and numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig, KVCache, RMSNorm, rope_frequencies, rotate

TINY = GPTConfig(n_layer=3, n_head=4, n_embd=48, n_ffn=80, n_ctx=24, vocab_size=200)
VARIANTS = {
    "plain": TINY,
    "untied": replace(TINY, tied=False),
    "gqa": replace(TINY, n_kv_head=2),
    "one_kv_head": replace(TINY, n_kv_head=1),
    "qk_norm": replace(TINY, qk_norm=True),
    "llama3_rope": replace(TINY, rope_theta=500.0, rope_factor=8.0, rope_original_ctx=16),
    "everything": replace(TINY, tied=False, n_kv_head=2, qk_norm=True, rope_theta=300.0, rope_factor=4.0,
                          rope_original_ctx=16, norm_eps=1e-3),
}


def build(config, seed=1, compute_dtype=torch.float32):
    model = GPT(config, compute_dtype=compute_dtype)
    model.init_weights(seed)
    return model


def build_rough(config, seed=1, compute_dtype=torch.float32):
    """With weights large enough for every path to matter, and norm weights that are not ones."""
    model = build(config, seed, compute_dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if "norm" in name else noise * (1.5 if "wte" in name or "head" in name else 0.25))
    return model


def tokens(config, B=2, T=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (B, T or config.n_ctx), generator=generator)


# ------------------------------------------------------------------------- the reference: float64 numpy, one loop a head

def reference_logits(model, x):
    """Logits (B, T, V) from the published equations, in float64, sharing no code with model.py."""
    c = model.config
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    D, K = c.n_embd // c.n_head, c.n_kv_head or c.n_head
    frequencies = reference_frequencies(c)
    out = []
    for row in x.numpy():
        h = w["wte.weight"][row]                                                    # (T, C)
        for i in range(c.n_layer):
            block = {n.removeprefix(f"layers.{i}."): v for n, v in w.items() if n.startswith(f"layers.{i}.")}
            a = rms(h, block["norm1.weight"], c.norm_eps)
            wq, wk, wv = np.split(block["attn.qkv.weight"], [c.n_head * D, (c.n_head + K) * D])
            heads = []
            for head in range(c.n_head):
                kv = head // (c.n_head // K)
                q = a @ wq[head * D:(head + 1) * D].T
                k = a @ wk[kv * D:(kv + 1) * D].T
                v = a @ wv[kv * D:(kv + 1) * D].T
                if c.qk_norm:
                    q, k = rms(q, block["attn.q_norm.weight"], c.norm_eps), rms(k, block["attn.k_norm.weight"], c.norm_eps)
                q, k = turn(q, frequencies), turn(k, frequencies)
                scores = q @ k.T / math.sqrt(D)
                scores[np.triu_indices(len(row), 1)] = -np.inf
                p = np.exp(scores - scores.max(1, keepdims=True))
                heads.append(p / p.sum(1, keepdims=True) @ v)
            h = h + np.concatenate(heads, axis=1) @ block["attn.out.weight"].T
            a = rms(h, block["norm2.weight"], c.norm_eps)
            gate, up = np.split(a @ block["mlp.gate_up.weight"].T, 2, axis=1)
            h = h + (gate / (1 + np.exp(-gate)) * up) @ block["mlp.down.weight"].T
        head_weight = w["wte.weight"] if c.tied else w["head.weight"]
        out.append(rms(h, w["norm.weight"], c.norm_eps) @ head_weight.T)
    return np.stack(out)


def rms(x, weight, eps):
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * weight


def turn(x, frequencies):
    """Rotate the pair (i, i + D/2) of position t by t * frequency[i]: a 2 x 2 matrix for each pair."""
    half = x.shape[1] // 2
    out = np.empty_like(x)
    for t in range(len(x)):
        for i in range(half):
            angle = t * frequencies[i]
            matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            out[t, [i, i + half]] = matrix @ x[t, [i, i + half]]
    return out


def reference_frequencies(c):
    """Llama 3.1's rule pair by pair, as published: by wavelength, three cases."""
    D = c.n_embd // c.n_head
    out = []
    for i in range(D // 2):
        frequency = c.rope_theta ** (-2 * i / D)
        if c.rope_factor is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > c.rope_original_ctx / c.rope_low_freq:
                frequency /= c.rope_factor
            elif wavelength >= c.rope_original_ctx / c.rope_high_freq:
                smooth = (c.rope_original_ctx / wavelength - c.rope_low_freq) / (c.rope_high_freq - c.rope_low_freq)
                frequency = (1 - smooth) * frequency / c.rope_factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


# ---------------------------------------------------------------------------------------------------------- forward pass

@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_float64_reference(name):
    config = VARIANTS[name]
    model, x = build_rough(config), tokens(config)
    expected = reference_logits(model, x)
    got = model(x).detach().double().numpy()
    assert got.shape == (2, config.n_ctx, 256)
    assert np.abs(expected).max() > 5       # the comparison is of numbers that are not all near zero
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)


def test_loss_is_the_reference_cross_entropy_summed_over_each_sequence():
    model, x, y = build_rough(TINY), tokens(TINY), tokens(TINY, seed=9)
    logits = reference_logits(model, x)
    log_p = logits - logits.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, y.numpy()[..., None], -1)[..., 0].sum(1)
    got = model(x, y)
    assert got.dtype == torch.float32 and got.shape == (2,)
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-5)


def test_rms_norm_equals_its_formula_and_keeps_huge_and_tiny_inputs():
    norm = RMSNorm(64, 1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 64))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for scale in (1e-6, 1.0, 1e12):
        expected = rms(x.double().numpy() * scale, norm.weight.detach().double().numpy(), 1e-5)
        np.testing.assert_allclose(norm(x * scale).detach().numpy(), expected, rtol=2e-6, atol=1e-9)


def test_rms_norm_in_bf16_rounds_in_hugging_faces_order():
    norm = RMSNorm(64, 1e-5)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(1)))
    x = (3 * torch.randn(50, 64, generator=torch.Generator().manual_seed(2))).bfloat16()
    normalised = (x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16()
    got, expected = norm(x), norm.weight.bfloat16() * normalised
    assert got.dtype == torch.bfloat16
    assert (got != expected).float().mean() < 0.01      # rsqrt against 1/sqrt may differ in a last bit before rounding
    multiplied_first = (normalised.float() * norm.weight).bfloat16()
    assert (multiplied_first != expected).any()         # the other order would show


def test_rope_turns_channel_i_with_channel_i_plus_half():
    x = torch.zeros(1, 1, 3, 8)
    x[..., 1] = 1.0
    frequencies = rope_frequencies(replace(TINY, n_embd=32, rope_theta=100.0))      # heads of 8 channels
    angle = torch.outer(torch.arange(3.0), frequencies)
    got = rotate(x, angle.cos(), angle.sin())[0, 0]
    for t in range(3):
        expected = np.zeros(8)
        expected[1], expected[5] = math.cos(t * 100 ** -0.25), math.sin(t * 100 ** -0.25)
        np.testing.assert_allclose(got[t].numpy(), expected, atol=1e-6)


def test_rope_scores_depend_on_distance_alone():
    model = build(TINY)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(12, generator=generator), torch.randn(12, generator=generator)
    turned_q = rotate(q.expand(1, 1, 24, 12), model.cos, model.sin)[0, 0]
    turned_k = rotate(k.expand(1, 1, 24, 12), model.cos, model.sin)[0, 0]
    scores = turned_q @ turned_k.T
    for distance in range(-23, 24):
        diagonal = scores.diagonal(distance)
        np.testing.assert_allclose(diagonal.numpy(), diagonal[0].item(), atol=2e-5)
    assert scores[0].std() > 0.1


@pytest.mark.parametrize("settings", [
    {}, {"rope_theta": 500_000.0}, {"rope_theta": 500_000.0, "rope_factor": 8.0},
    {"rope_theta": 500_000.0, "rope_factor": 32.0, "rope_low_freq": 2.0, "rope_high_freq": 8.0, "rope_original_ctx": 4096},
])
def test_rope_frequencies_follow_the_published_rule(settings):
    config = replace(TINY, n_embd=256, n_head=2, **settings)       # heads of 128 channels, as Llama 3.1's
    np.testing.assert_allclose(rope_frequencies(config).numpy(), reference_frequencies(config), rtol=3e-6)


def test_rope_tables_start_at_position_zero_and_end_with_the_context():
    model = build(TINY)
    assert (model.cos[0] == 1).all() and (model.sin[0] == 0).all() and model.cos.shape == model.sin.shape == (24, 6)
    assert model.sin[23, 0].item() == pytest.approx(math.sin(23), abs=1e-6)


def test_llama3_rope_has_untouched_blended_and_stretched_pairs():
    base = replace(TINY, n_embd=256, n_head=2, rope_theta=500_000.0)
    ratio = (rope_frequencies(base) / rope_frequencies(replace(base, rope_factor=8.0))).numpy()
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(8.0)
    assert ((ratio > 1.01) & (ratio < 7.99)).any() and (np.diff(ratio) > -1e-5).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_future_tokens_do_not_change_past_logits(name):
    config = VARIANTS[name]
    model, x = build_rough(config), tokens(config)
    changed = x.clone()
    changed[:, 10:] = (x[:, 10:] + 7) % config.vocab_size
    a, b = model(x), model(changed)
    torch.testing.assert_close(a[:, :10], b[:, :10], rtol=0, atol=1e-6)
    assert (a[:, 10] - b[:, 10]).abs().max() > 0.1
    h = model.wte(x).detach().requires_grad_()      # and no gradient flows from position 9 to later inputs
    out = h
    for block in model.layers:
        out = block(out, model.cos, model.sin)
    out[:, 9].square().sum().backward()
    assert (h.grad[:, 10:] == 0).all() and (h.grad[:, :10].abs().sum(-1) > 0).all()


def test_rows_of_a_batch_do_not_meet():
    model, x = build_rough(TINY), tokens(TINY, B=3)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- gradients

def test_gradients_equal_finite_differences_of_the_float64_reference():
    config = replace(VARIANTS["everything"], n_layer=2, n_ctx=6, vocab_size=20, tied=True)
    model, x, y = build_rough(config), tokens(config), tokens(config, seed=4)

    def loss64():
        logits = reference_logits(model, x)
        peak = logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(logits - peak).sum(-1)) + peak[..., 0]
        return float((log_sum - np.take_along_axis(logits, y.numpy()[..., None], -1)[..., 0]).sum())

    model(x, y).sum().backward()
    rng = np.random.default_rng(0)
    for name, p in model.named_parameters():
        i = int(rng.choice(np.flatnonzero(p.grad.abs().flatten() > p.grad.abs().max() / 4)))
        flat, step = p.data.view(-1), 2.0 ** -9
        kept = flat[i].item()
        flat[i] = kept + step
        high, up = loss64(), flat[i].item()
        flat[i] = kept - step
        low, down = loss64(), flat[i].item()
        flat[i] = kept
        assert p.grad.view(-1)[i].item() == pytest.approx((high - low) / (up - down), rel=0.01), name


@pytest.mark.parametrize("chunk", [1, 7, 24, 48, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_has_the_loss_and_gradients_of_the_whole(chunk, tied):
    whole = build_rough(replace(TINY, tied=tied))
    parts = build_rough(replace(TINY, tied=tied, loss_chunk=chunk))
    x, y = tokens(TINY), tokens(TINY, seed=5)
    rows = []
    parts.head.register_forward_hook(lambda module, args, out: rows.append(out.shape[:-1].numel()))
    expected, got = whole(x, y), parts(x, y)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)
    (expected * torch.tensor([1.0, -0.5])).sum().backward()
    (got * torch.tensor([1.0, -0.5])).sum().backward()
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item(), msg=name)
    assert max(rows) == min(chunk, 48) and sum(rows) == 2 * 48     # once forward, once again in the backward pass


def test_chunked_loss_keeps_no_logits_for_the_backward_pass():
    def kept(chunk):
        model, sizes = build(replace(TINY, loss_chunk=chunk)), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model(tokens(TINY), tokens(TINY, seed=5))
        return max(sizes)

    logits = 2 * TINY.n_ctx * 256
    assert kept(None) >= logits
    assert kept(8) < logits + 1 and kept(8) <= max(2 * 24 * 160, 256 * 48)      # the widest activation or weight


def test_chunked_loss_works_without_gradients():
    with torch.no_grad():
        got = build(replace(TINY, loss_chunk=5))(tokens(TINY), tokens(TINY, seed=5))
        torch.testing.assert_close(got, build(TINY)(tokens(TINY), tokens(TINY, seed=5)), rtol=1e-6, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------- cache

@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_with_the_cache_equals_the_full_forward_pass(name):
    config = VARIANTS[name]
    model, x = build_rough(config), tokens(config, B=3)
    with torch.no_grad():
        expected = model(x)
        for prompt in (1, 2, 11, config.n_ctx):
            cache = KVCache()
            got = [model(x[:, :prompt], cache=cache)]
            got += [model(x[:, t:t + 1], cache=cache) for t in range(prompt, config.n_ctx)]
            assert cache.length == config.n_ctx
            torch.testing.assert_close(torch.cat(got, dim=1), expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def test_context_and_cache_refuse_what_they_cannot_hold():
    model = build(TINY)
    with pytest.raises(AssertionError, match="25 tokens in a context of 24"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    cache = KVCache()
    model(torch.zeros(1, 24, dtype=torch.int64), cache=cache)
    with pytest.raises(AssertionError, match="25 tokens in a context of 24"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    cache = KVCache()
    model(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(AssertionError, match="one token at a time"):
        model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)


# -------------------------------------------------------------------------------------------------------- initialisation

def test_fresh_model_knows_nothing():
    config = GPTConfig(n_layer=4, n_head=4, n_embd=128, n_ffn=256, n_ctx=64, vocab_size=257)
    x, y = tokens(config, B=8), tokens(config, B=8, seed=1)
    loss = build(config)(x, y).mean().item() / config.n_ctx
    # Independent logits of variance s^2 cost ln V + s^2 / 2; here s^2 is about 128 * 0.02^2 = 0.05.
    assert loss == pytest.approx(math.log(384) + 0.5 * 128 * 0.02 ** 2, abs=0.03)


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
        std = 0.02 / math.sqrt(2 * n_layer) if residual else 0.02
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
    ({"n_layer": 0}, "model.n_layer=0 must be at least 1"),
    ({"n_head": 0}, "model.n_head=0 must be at least 1"),
    ({"n_kv_head": 0}, "model.n_kv_head=0 must be at least 1"),
    ({"vocab_size": -5}, "model.vocab_size=-5 must be at least 1"),
    ({"loss_chunk": 0}, "model.loss_chunk=0 must be at least 1"),
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
