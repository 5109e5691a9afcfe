"""Small configurations of every kind, and a second implementation of the forward pass in float64 numpy."""

import math
from dataclasses import replace

import numpy as np
import torch

from model import GPT, GPTConfig

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
                group = head // (c.n_head // K)
                q, k, v = (a @ part[n * D:(n + 1) * D].T for part, n in ((wq, head), (wk, group), (wv, group)))
                if c.qk_norm:
                    q, k = rms(q, block["attn.q_norm.weight"], c.norm_eps), rms(k, block["attn.k_norm.weight"], c.norm_eps)
                scores = turn(q, frequencies) @ turn(k, frequencies).T / math.sqrt(D)
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
    """Channels i and i + D/2 of position t are a complex number that turns by t * frequencies[i]; x (T, D)."""
    first, second = np.split(x, 2, axis=1)
    turned = (first + 1j * second) * np.exp(1j * np.outer(np.arange(len(x)), frequencies))
    return np.concatenate((turned.real, turned.imag), axis=1)


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
