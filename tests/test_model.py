"""model.py: forward pass and gradients against a second implementation in numpy; initial weights,
dtypes, counts and refusals against closed forms. That transformers computes the same bits, with
Llama 3's RoPE too, and the same texts from a cache: tests/eval/test_export.py; several tokens
behind a cache that texts share: tests/eval/test_lm.py."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig, RMSNorm

TINY = GPTConfig(n_layer=3, n_head=4, n_embd=48, n_ffn=80, n_ctx=24, vocab_size=200)
VARIANTS = {
    "plain": TINY,
    "untied": replace(TINY, tied=False),
    "gqa": replace(TINY, n_kv_head=2),
    "one_kv_head": replace(TINY, n_kv_head=1),
    "qk_norm": replace(TINY, qk_norm=True),
    # 80 channels of attention in a width of 48
    "wide_heads": replace(TINY, n_kv_head=2, head_size=20),
    # a width that no 3 heads share
    "narrow_heads": replace(TINY, n_head=3, n_embd=40, head_size=8, qk_norm=True),
    "everything": replace(
        TINY, tied=False, n_kv_head=2, qk_norm=True, rope_theta=300.0, norm_eps=1e-3
    ),
}


def build(config: GPTConfig, seed: int = 1, compute_dtype=torch.float32):
    model = GPT(config, compute_dtype=compute_dtype)
    model.init_weights(seed)
    return model


def build_rough(config: GPTConfig, seed: int = 1, compute_dtype=torch.float32):
    """With weights large enough for every path to matter, and norm weights that are not ones."""
    model = build(config, seed, compute_dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data.copy_(
            1 + 0.3 * noise
            if "norm" in name
            else noise * (1.5 if "wte" in name or "head" in name else 0.25)
        )
    return model


def tokens(config: GPTConfig, B: int = 2, T: int | None = None, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (B, T or config.n_ctx), generator=generator)


def reference_logits(model: GPT, x: torch.Tensor, seen=None):
    """Logits (B, T, V) from the published equations, in float64, sharing no code with model.py. To
    a list `seen` each block adds its attention logits (B, H, T, T), without the mask, and the
    inputs of its last Linear (B, T, F)."""
    c = model.config
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    (B, T), H, K, D = (
        x.shape,
        c.n_head,
        c.n_kv_head or c.n_head,
        c.head_size or c.n_embd // c.n_head,
    )
    # (B, T, C), (D / 2,)
    h, frequencies = w["wte.weight"][x.numpy()], c.rope_theta ** (-np.arange(0, D, 2) / D)
    for i in range(c.n_layer):
        block = {
            n.removeprefix(f"layers.{i}."): v for n, v in w.items() if n.startswith(f"layers.{i}.")
        }
        heads = rms(h, block["norm1.weight"], c.norm_eps) @ block["attn.qkv.weight"].T
        heads = heads.reshape(B, T, H + 2 * K, D).swapaxes(1, 2)  # (B, H + 2 K, T, D)
        q, k, v = np.split(heads, [H, H + K], axis=1)
        if c.qk_norm:
            q, k = (
                rms(q, block["attn.q_norm.weight"], c.norm_eps),
                rms(k, block["attn.k_norm.weight"], c.norm_eps),
            )
        k, v = (np.repeat(part, H // K, axis=1) for part in (k, v))
        # (B, H, T, T)
        scores = turn(q, frequencies) @ turn(k, frequencies).swapaxes(2, 3) / math.sqrt(D)
        unmasked = scores.copy()
        scores[..., *np.triu_indices(T, 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = (p / p.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(B, T, H * D)
        h = h + out @ block["attn.out.weight"].T
        gate, up = np.split(
            rms(h, block["norm2.weight"], c.norm_eps) @ block["mlp.gate_up.weight"].T, 2, axis=-1
        )
        swiglu = gate / (1 + np.exp(-gate)) * up
        h = h + swiglu @ block["mlp.down.weight"].T
        if seen is not None:
            seen.append((unmasked, swiglu))
    return rms(h, w["norm.weight"], c.norm_eps) @ w["wte.weight" if c.tied else "head.weight"].T


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turn(x, frequencies):
    """Channels i and i + D/2 of position t are a complex number that turns by t * frequencies[i]; x
    (..., T, D)."""
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * np.outer(np.arange(x.shape[-2]), frequencies))
    return np.concatenate((turned.real, turned.imag), axis=-1)


def cross_entropy64(logits, y):
    """Of each token, by the definition."""
    peak = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - peak).sum(-1)) + peak[..., 0]
    return log_sum - np.take_along_axis(logits, y.numpy()[..., None], -1)[..., 0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_loss_equal_the_float64_reference(name: str):
    config = VARIANTS[name]
    model, x, y = build_rough(config), tokens(config), tokens(config, seed=9)
    expected = reference_logits(model, x)
    got = model(x).detach().double().numpy()
    assert got.shape == (2, config.n_ctx, 256)
    assert np.abs(expected).max() > 5  # the comparison is of numbers that are not all near zero
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)
    losses = model(x, y)
    assert losses.dtype == torch.float32
    np.testing.assert_allclose(
        losses.detach().numpy(), cross_entropy64(expected, y).sum(1), rtol=1e-5
    )
    later = (
        model(torch.cat((x[:, :10], (x[:, 10:] + 7) % config.vocab_size), dim=1))
        .detach()
        .double()
        .numpy()
    )
    np.testing.assert_allclose(
        later[:, :10], got[:, :10], rtol=0, atol=1e-6, err_msg="future tokens change past logits"
    )
    with pytest.raises(AssertionError, match="25 tokens in a context of 24"):
        model(tokens(config, T=25))


def test_gradients_equal_finite_differences_of_the_float64_reference():
    config = replace(VARIANTS["everything"], n_layer=2, n_ctx=6, vocab_size=20, tied=True)
    model, x, y = build_rough(config), tokens(config), tokens(config, seed=4)
    model(x, y).sum().backward()
    rng = np.random.default_rng(0)
    for name, p in model.named_parameters():
        i = int(rng.choice(np.flatnonzero(p.grad.abs().flatten() > p.grad.abs().max() / 4)))
        flat, kept_tensors, ends = p.data.view(-1), p.data.view(-1)[i].item(), []
        for step in (2.0**-9, -(2.0**-9)):
            flat[i] = kept_tensors + step
            ends.append((cross_entropy64(reference_logits(model, x), y).sum(), flat[i].item()))
        flat[i] = kept_tensors
        (high, up), (low, down) = ends
        assert p.grad.view(-1)[i].item() == pytest.approx((high - low) / (up - down), rel=0.01), (
            name
        )


def kept_by_backward(model: GPT, *tokens: object, weights: float = 1.0):
    """The losses, their backward pass done, and shape and dtype of each tensor that was kept for
    it."""
    kept_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept_tensors.append((t.shape, t.dtype)) or t, lambda t: t
    ):
        losses = model(*tokens)
    (losses * weights).sum().backward()
    return losses, kept_tensors


@pytest.mark.parametrize("chunk, tied", [(1, True), (7, True), (7, False), (1000, False)])
def test_a_loss_in_chunks_is_that_of_the_whole_and_keeps_no_logits(chunk: int, tied: bool):
    whole, parts = (build_rough(replace(TINY, tied=tied, loss_chunk=n)) for n in (None, chunk))
    x, y, rows, weights = tokens(TINY), tokens(TINY, seed=5), [], torch.tensor([1.0, -0.5])
    parts.head.register_forward_hook(lambda module, args, out: rows.append(out.shape[:-1].numel()))
    (want, kept_tensors), (got, kept_in_parts) = (
        kept_by_backward(model, x, y, weights=weights) for model in (whole, parts)
    )
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(
            q.grad, p.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item(), msg=name
        )
    # once forward, once again in the backward pass
    assert max(rows) == min(chunk, 48) and sum(rows) == 2 * 48
    assert 256 in [shape[-1] for shape, _ in kept_tensors if shape] and 256 not in [
        shape[-1] for shape, _ in kept_in_parts if shape
    ]


def kept_of_a_step(backend):
    """Shape and dtype of what a step of a model in BF16, with 1,000 logits, keeps."""
    config = replace(TINY, n_layer=1, vocab_size=1000, vocab_multiple=1)
    model, x = build(config, compute_dtype=torch.bfloat16), tokens(config)
    if backend != "eager":
        model.compile(backend=backend, dynamic=False, fullgraph=True)
    return model, kept_by_backward(model, x, x)[1]


# By the partitioner that the compiler uses too: it decides what is kept and what is computed again.
PARTITIONER = "aot_eager_decomp_partition"


@pytest.mark.parametrize("backend, has_fp32", [("eager", True), (PARTITIONER, False)])
def test_a_compiled_step_keeps_logits_in_bf16(backend: str, has_fp32: bool):
    """Eager keeps fp32 ones: the test can see them."""
    _, kept_tensors = kept_of_a_step(backend)
    logits = [dtype for shape, dtype in kept_tensors if shape[-1:] == (1000,)]
    assert (torch.float32 in logits) is has_fp32
    assert has_fp32 or logits == [torch.bfloat16]


def test_a_compiled_step_keeps_no_fp32_copy_larger_than_a_blocks_input():
    model, kept_tensors = kept_of_a_step(PARTITIONER)
    weights = {weight.shape for weight in model.parameters()}
    in_fp32 = [
        shape for shape, dtype in kept_tensors if dtype == torch.float32 and shape not in weights
    ]
    size_of_input = 2 * TINY.n_ctx * TINY.n_embd
    assert not [shape for shape in in_fp32 if shape.numel() >= size_of_input]


# ---------------------------------------------------------------------------------- initial weights


def named(config: GPTConfig, seed: int = 1):
    return dict(build(config, seed).named_parameters())


def test_initial_weights_depend_on_the_seed_alone():
    a, b, other_seed = named(TINY), named(TINY), named(TINY, seed=2)
    for name, weight in a.items():
        assert torch.equal(weight, b[name]), name
        assert torch.equal(weight, other_seed[name]) == ("norm" in name), name


def test_neither_order_nor_depth_moves_a_draw():
    """Those that a deeper model scales aside."""
    weights, deeper = named(TINY), named(replace(TINY, n_layer=5, tied=False))
    for name, weight in weights.items():
        if not name.endswith(("out.weight", "down.weight")):
            assert torch.equal(weight, deeper[name]), name


def test_no_two_weights_are_the_same_draw():
    weights = named(replace(TINY, tied=False))
    assert not torch.equal(weights["head.weight"], weights["wte.weight"])
    assert not torch.equal(weights["layers.0.attn.qkv.weight"], weights["layers.1.attn.qkv.weight"])


@pytest.fixture
def from_meta():
    """A model that was on the meta device, without values yet."""
    model = GPT.on_meta(TINY, torch.float32)
    assert all(weight.is_meta for weight in model.parameters())
    return model.to_empty(device="cpu")


def test_a_model_by_way_of_meta_has_the_weights_of_any_other(from_meta):
    from_meta.init_weights(1)
    assert from_meta.head.weight is from_meta.wte.weight
    assert torch.equal(from_meta(tokens(TINY)), build(TINY)(tokens(TINY)))


def test_initial_weights_leave_the_global_generator_alone(from_meta):
    state = torch.get_rng_state()
    from_meta.init_weights(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_dict_has_no_rope_tables(from_meta):
    names = {name for name, _ in from_meta.named_parameters()}
    assert from_meta.state_dict().keys() == names | {"head.weight"}


@pytest.mark.parametrize("n_layer", [1, 8])
def test_init_scales(n_layer: int):
    config = GPTConfig(
        n_layer=n_layer, n_head=4, n_embd=256, n_ffn=512, n_ctx=16, vocab_size=1000, tied=False
    )
    for name, p in build(config).named_parameters():
        residual, n = name.endswith(("attn.out.weight", "mlp.down.weight")), p.numel()
        std = (
            0
            if "norm" in name
            else math.sqrt(2 / (5 * 256)) / (math.sqrt(2 * n_layer) if residual else 1)
        )
        # 4 standard errors
        assert p.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * n)), name
        assert abs(p.mean().item() - ("norm" in name)) <= 4 * std / math.sqrt(n), name


def test_a_frequent_tokens_gradient_is_summed_in_fp32_under_bf16_compute():
    """A CPU's embedding in BF16 stops at 256 terms (findings/cpu_embedding_bf16_gradient.sh)."""
    config = replace(TINY, n_layer=1, n_ctx=1024, tied=False)
    model = build(config, compute_dtype=torch.bfloat16)
    gradients: list[torch.Tensor] = []

    def keep_gradient(_module, _ids, output):
        output.register_hook(gradients.append)

    model.wte.register_forward_hook(keep_gradient)
    same = torch.full((2, config.n_ctx), 7)
    model(same, same).sum().backward()
    terms = gradients[0].double().flatten(0, 1)  # (B * T, C)
    assert model.wte.weight.grad is not None
    difference = model.wte.weight.grad[7].double() - terms.sum(0)
    assert difference.norm() < 1e-5 * terms.sum(0).norm()


def test_a_norms_gradient_over_many_tokens_is_right_to_bf16():
    """torch's LayerNorm is 16 % off here (findings/cpu_layer_norm_bf16_gradients.sh)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16384, 48, generator=generator).bfloat16()
    noise = torch.randn(x.shape, generator=generator)
    grad = (x.float() + noise).bfloat16()
    norm = RMSNorm(48, 1e-5)
    torch.nn.init.ones_(norm.weight)
    norm(x).backward(grad)
    x64 = x.double()
    normalised = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = (grad.double() * normalised).sum(0)
    assert norm.weight.grad is not None
    # each term and the sum are rounded to BF16: 2^-9
    torch.testing.assert_close(norm.weight.grad.double(), exact, rtol=2**-7, atol=0)


@pytest.mark.parametrize("chunk", [None, 7])
def test_bf16_compute_keeps_fp32_weights_and_gradients_and_norms_inside(chunk: int | None):
    config = replace(VARIANTS["everything"], loss_chunk=chunk)
    model, x, y, seen = (
        build(config, compute_dtype=torch.bfloat16),
        tokens(config),
        tokens(config, seed=2),
        {},
    )
    for name, module in model.named_modules():
        if not list(module.children()) or name in ("layers.0", "layers.1", "layers.2"):
            module.register_forward_hook(
                lambda module, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)})
            )
    loss = model(x, y)
    loss.sum().backward()
    # the embedding is read in fp32, then cast once
    assert seen.pop("wte") == (torch.int64, torch.float32)
    assert (
        set(seen.values()) == {(torch.bfloat16, torch.bfloat16)}
        and {"head", "layers.2"} < seen.keys()
    )
    assert {t.dtype for p in model.parameters() for t in (p, p.grad, loss, model.cos)} == {
        torch.float32
    }
    linear, h = (
        model.layers[0].mlp.gate_up,
        torch.randn(99, 48, generator=torch.Generator().manual_seed(0)).bfloat16(),
    )
    assert torch.equal(linear(h), torch.nn.functional.linear(h, linear.weight.bfloat16())), (
        "by the rounded weight"
    )
    norm = RMSNorm(48, 1e-5)  # fp32 inside, rounded in Hugging Face's order
    norm.weight.data.copy_(1 + 0.1 * h[0])
    normalised = (h.float() / (h.float().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16()
    # 1/sqrt may differ from rsqrt in a last bit
    assert (norm(h) != norm.weight.bfloat16() * normalised).float().mean() < 0.01


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "n_layer, vocab_size, multiple, V", [(1, 128, 128, 128), (4, 257, 128, 384), (1, 420, 1, 420)]
)
def test_counts_agree_with_hand_formulas(
    name: str, n_layer: int, vocab_size: int, multiple: int, V: int
):
    config = replace(
        VARIANTS[name], n_layer=n_layer, vocab_size=vocab_size, vocab_multiple=multiple
    )
    model = GPT.on_meta(config)
    C, H, F, T = config.n_embd, config.n_head, 80, 24
    D, K = config.head_size or 12, config.n_kv_head or H
    matmul = n_layer * (C * H * D + 2 * C * K * D + H * D * C + C * F + C * F + F * C) + V * C
    nonembed = matmul - V * C + n_layer * (2 * C + (2 * D if config.qk_norm else 0)) + C
    total = nonembed + V * C * (1 if config.tied else 2)
    # One token attends to T keys: 2 T H D for the scores, 2 T H D for the values, forward; three
    # times that with the backward.
    attention = n_layer * 3 * (2 + 2) * T * H * D
    assert config.vocab_padded == V == len(model.wte.weight) and config.params_total == total
    assert model.counts() == {
        "params_total": total,
        "params_nonembed": nonembed,
        "params_matmul": matmul,
        "params_embed_tok": V * C,
        "params_head": V * C,
        "flops_per_token_6n_matmul": 6 * matmul,
        "flops_per_token_6n_total": 6 * total,
        "flops_per_token_6n_nonembed": 6 * nonembed,
        "flops_per_token_attn": attention,
        "flops_per_token_attn_causal": attention // 2,
        "flops_per_token": 6 * matmul + attention,
        "flops_per_token_causal": 6 * matmul + attention // 2,
    }
    model, x = build(replace(config, n_ctx=32)), tokens(config, T=32)
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(x, x).sum().backward()
    assert counter.get_total_flops() == pytest.approx(
        model.counts()["flops_per_token"] * x.numel(), rel=1e-9
    )


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"n_embd": 50}, "model.n_embd=50 is not divisible by model.n_head=4"),
        ({"n_embd": 12}, "model.n_embd=12 .* even head size"),
        ({"n_embd": 50}, "channels of a head in model.head_size"),
        ({"head_size": 7}, "model.head_size=7 is odd"),
        ({"head_size": 0}, "model.head_size=0 must be a positive"),
        ({"n_kv_head": 3}, "model.n_head=4 is not divisible by model.n_kv_head=3"),
        ({"n_kv_head": 0}, "model.n_kv_head=0 must be a positive"),
        ({"norm_eps": float("nan")}, "model.norm_eps=nan must be a positive"),
        ({"rope_factor": 8.0, "rope_low_freq": 4.0}, "model.rope_high_freq=4.0 must be above"),
        (
            {"vocab_size": -5, "n_ffn": -1, "rope_theta": 0.0},
            "model.n_ffn=-1 .*; model.vocab_size=-5 .*; model.rope_theta=0.0",
        ),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        GPT(replace(TINY, **change))
