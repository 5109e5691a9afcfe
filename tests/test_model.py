"""model.py's forward pass, gradients and cache against a second implementation in numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_reference import TINY, VARIANTS, build, build_rough, reference_frequencies, reference_logits, rms, tokens

from model import KVCache, RMSNorm, rope_frequencies, rotate

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


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_filled_cache_takes_several_tokens_and_other_rows(name):
    config = VARIANTS[name]
    model, x = build_rough(config), tokens(config, B=3)
    rows = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        expected = model(x)
        cache = KVCache()
        got = torch.cat([model(x[:, a:b], cache=cache) for a, b in ((0, 5), (5, 7), (7, 20), (20, config.n_ctx))], dim=1)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * expected.abs().max().item())
        cache = KVCache()
        model(x[:, :9], cache=cache)
        other = cache.rows(rows)
        got = model(x[rows, 9:], cache=other)
        torch.testing.assert_close(got, expected[rows, 9:], rtol=0, atol=2e-5 * expected.abs().max().item())
        assert (cache.length, other.length) == (9, config.n_ctx)


def test_context_and_cache_refuse_what_they_cannot_hold():
    model = build(TINY)
    with pytest.raises(AssertionError, match="25 tokens in a context of 24"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    cache = KVCache()
    model(torch.zeros(1, 24, dtype=torch.int64), cache=cache)
    with pytest.raises(AssertionError, match="25 tokens in a context of 24"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
