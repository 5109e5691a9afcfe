"""The GPT, in one file: configuration, blocks, initialisation, forward pass, parameter and FLOP
counts.

A Llama-family decoder, so that a checkpoint exports to LlamaForCausalLM (Qwen3ForCausalLM with
QK-norm) tensor for tensor: RMSNorm before each sub-layer, half-split RoPE, grouped-query attention,
SwiGLU, no biases.

    B batch  T time  C channels (n_embd)  H query heads  K key/value heads  D head size (head_dim)
    F ffn  V vocabulary

Weights are stored in fp32. The activations carry the compute dtype (BF16 in training) from the
embedding on, and each Linear casts its weight to it: no autocast, so the BF16 and FP8 arms of a
comparison cast at the same places."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NO_TARGET = -100  # the target of a token without loss: ignore_index of F.cross_entropy


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    n_layer: int  # blocks
    n_head: int  # query heads
    n_embd: int  # width C, in channels; a multiple of n_head, or give head_size
    n_ffn: int  # hidden width of the SwiGLU, in channels
    n_kv_head: int | None = None  # key/value heads (grouped-query attention); none = n_head
    head_size: int | None = None  # channels of a head (HF's head_dim), even; none = n_embd / n_head
    n_ctx: int = 1024  # context length T, in tokens
    vocab_size: int = 50257  # tokens the tokenizer can emit (gpt2 50257, byte 257)
    # rows of embedding and head are padded to a multiple of this: whole tensor-core tiles
    vocab_multiple: int = 128
    tied: bool = True  # one matrix for the embedding and the head
    qk_norm: bool = False  # RMSNorm on each query and key head before RoPE (exports as Qwen3)
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    rope_theta: float = 10_000.0  # base of the RoPE wavelengths
    # llama3 scaling: wavelengths beyond the original context grow by this; none = off
    rope_factor: float | None = None
    # llama3 scaling: fewer turns than this per original context are fully stretched
    rope_low_freq: float = 1.0
    # llama3 scaling: more turns than this per original context stay as they are
    rope_high_freq: float = 4.0
    rope_original_ctx: int = 8192  # llama3 scaling: context length, in tokens, before the stretch
    # tokens per cross-entropy chunk, so that logits never exist whole; none = one chunk
    loss_chunk: int | None = None

    @property
    def head_dim(self) -> int:
        """D, the channels of a head: model.head_size where it is given, else an equal share of the
        width."""
        if self.head_size is not None:
            return self.head_size
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def vocab_padded(self) -> int:
        # the extra rows are never a target
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def params_total(self) -> int:
        """Parameters by closed form; GPT.counts() asserts that the modules agree."""
        C, D = self.n_embd, self.head_dim
        block = (
            2 * C * D * (self.n_head + self.kv_heads)
            + 3 * C * self.n_ffn
            + 2 * C
            + 2 * D * self.qk_norm
        )
        return self.n_layer * block + C + self.vocab_padded * C * (1 if self.tied else 2)

    def problems(self) -> list[str]:
        """One sentence for each size that no model can have; an empty list is a sound
        configuration."""
        out = [
            f"model.{f.name}={value} must be a positive, finite number"
            for f in fields(self)
            if type(value := getattr(self, f.name)) in (int, float) and not 0 < value < math.inf
        ]
        if out:
            return out
        if self.head_size is not None:
            if self.head_size % 2:
                out.append(
                    f"model.head_size={self.head_size} is odd, but RoPE rotates pairs of channels:"
                    " give an even number"
                )
        elif self.n_embd % self.n_head:
            out.append(
                f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head}: give a"
                " width that is a multiple of the number of heads, or the channels of a head in"
                " model.head_size"
            )
        elif self.head_dim % 2:
            out.append(
                f"model.n_embd={self.n_embd} over model.n_head={self.n_head} heads gives heads of"
                f" {self.head_dim} channels, but RoPE rotates pairs: give an even head size"
            )
        if self.n_head % self.kv_heads:
            out.append(
                f"model.n_head={self.n_head} is not divisible by model.n_kv_head={self.n_kv_head}: "
                "each key/value head serves a whole number of query heads"
            )
        if self.rope_factor is not None and self.rope_high_freq <= self.rope_low_freq:
            out.append(
                f"model.rope_high_freq={self.rope_high_freq} must be above"
                f" model.rope_low_freq={self.rope_low_freq}"
            )
        return out


class Linear(nn.Linear):
    """A Linear without bias that computes in the dtype of its input."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (1910.07467), in Hugging Face's order: fp32 inside, cast back,
    then the weight."""

    def __init__(self, n: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * x32.to(x.dtype)


def rope_frequencies(config: GPTConfig, device: torch.device | None = None) -> Tensor:
    """Radians per position of each channel pair, shape (D/2,), fp32; with Llama 3's stretch where
    rope_factor is set.

    Source: RoFormer, 2104.09864 (equation 15); the stretch as published with Llama 3.1, its
    operations in the order of Hugging Face's transformers, whose last bits it shares: the
    difference grows with the position."""
    D = config.head_dim
    freq = 1.0 / config.rope_theta ** (
        torch.arange(0, D, 2, dtype=torch.float32, device=device) / D
    )
    if config.rope_factor is None:
        return freq
    factor, low, high = config.rope_factor, config.rope_low_freq, config.rope_high_freq
    wavelength, context = 2 * math.pi / freq, config.rope_original_ctx
    stretched = torch.where(wavelength > context / low, freq / factor, freq)
    # between the two limits: 1 leaves a wavelength as it is, 0 stretches it fully
    keep = (context / wavelength - low) / (high - low)
    blended = (1 - keep) * stretched / factor + keep * stretched
    return torch.where(
        (wavelength < context / high) | (wavelength > context / low), stretched, blended
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i of each head with channel i + D/2 (half-split RoPE); x (B, T, H, D), cos and
    sin (T, D/2)."""
    # (B, T, H, 2, D/2); fp32: BF16 cosines would blur distant positions
    halves = x.float().unflatten(-1, (2, -1))
    cos, sin = cos[:, None, None], torch.stack((-sin, sin), dim=1)[:, None]  # (T, 1, 1 or 2, D/2)
    # Not chunk() and cat(): without them the compiler turns q's and k's gradients and lays them
    # beside v's in one kernel.
    return (halves * cos + halves.flip(-2) * sin).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.H, self.K, self.D = config.n_head, config.kv_heads, config.head_dim
        # one matmul: FP8 pays on wide outputs
        self.qkv = Linear(config.n_embd, (self.H + 2 * self.K) * self.D)
        self.out = Linear(self.H * self.D, config.n_embd)
        self.q_norm = RMSNorm(self.D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.D, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: "KVCache | None" = None,
        mask: Any = None,
    ) -> Tensor:
        B, T, _ = x.shape
        H, K, D = self.H, self.K, self.D
        q, k, v = self.qkv(x).view(B, T, -1, D).split((H, K, K), dim=2)  # (B, T, H or K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # Rotated in this layout, which attention's output takes from q: (B, T, H, D) needs no copy
        # before the last matmul.
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T, D)
        if cache is not None:
            k, v = cache.append(self, k, v)  # (B, K, past + T, D)
        # A single new token sees everything cached before it, so only longer inputs need the causal
        # mask. Several tokens behind a cached past need it as a tensor: is_causal would count from
        # the past's first token.
        S = k.size(2)  # past + T
        if 1 < T < S:
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        is_causal = mask is None and T > 1
        y = self.attend(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=H != K)
        return self.out(y.transpose(1, 2).reshape(B, T, H * D))  # (B, T, C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D); `options` as torch's function has
        them."""
        return F.scaled_dot_product_attention(q, k, v, **options)


class MLP(nn.Module):
    """SwiGLU (2002.05202) with gate and up projections fused into one matmul."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_up = Linear(config.n_embd, 2 * config.n_ffn)
        self.down = Linear(config.n_ffn, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (B, T, F) each
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: "KVCache | None" = None,
        mask: Any = None,
    ) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, cache, mask)
        return x + self.mlp(self.norm2(x))


class KVCache:
    """Keys and values of the tokens seen so far, by attention layer; grows by concatenation."""

    def __init__(
        self, length: int = 0, kv: Mapping[nn.Module, tuple[Tensor, Tensor]] | None = None
    ):
        self.length = length  # tokens cached
        self._kv = dict(kv or {})

    def append(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (B, K, T, D) behind those of `layer` so far: (B, K, past + T, D) each."""
        if layer in self._kv:
            past_k, past_v = self._kv[layer]
            k = torch.cat((past_k, k), dim=2)
            v = torch.cat((past_v, v), dim=2)
        self._kv[layer] = (k, v)
        return k, v

    def rows(self, index: Tensor) -> "KVCache":
        """A cache of its own for the rows that index (n,) names, in that order, one as often as it
        is named."""
        return KVCache(
            self.length, {layer: (k[index], v[index]) for layer, (k, v) in self._kv.items()}
        )


def beside_z(losses: Tensor, lse: Tensor, targets: Tensor) -> Tensor:
    """Losses, log-sum-exp and targets of tokens, (n,) each -> losses and squares of log-sum-exp,
    (n, 2). Source: the z-loss of PaLM (2204.02311, section 5)."""
    return torch.stack((losses, lse.where(targets != NO_TARGET, 0.0).square()), dim=-1)


class GPT(nn.Module):
    """Tokens x (B, T) int64 -> logits (B, T, V), or with targets y (B, T) the summed cross-entropy
    of each sequence (B,), nats; with_z (B, 2): the summed squares of log-sum-exp beside it. `mask`,
    made by runtime/documents.py, replaces attention's causal mask."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        self.config = config
        self.compute_dtype = compute_dtype
        # from_pretrained() skips nn.Embedding's own random values, which init_weights() replaces.
        # On the meta device they would import torch's reference operators, a second at each start.
        self.wte = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_padded, config.n_embd), freeze=False
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = Linear(config.n_embd, config.vocab_padded)
        for table in "cos", "sin":
            self.register_buffer(
                table, torch.empty(config.n_ctx, config.head_dim // 2), persistent=False
            )
        self.tie()

    @classmethod
    def on_meta(cls, config: GPTConfig, compute_dtype: torch.dtype = torch.bfloat16) -> "GPT":
        """A model without memory for its weights: to count them, or until they are placed."""
        with torch.device("meta"):
            return cls(config, compute_dtype)

    def tie(self) -> None:
        """Make embedding and head one Parameter again; moving a model off the meta device splits
        them."""
        if self.config.tied:
            self.head.weight = self.wte.weight

    def blocks(self) -> list[Block]:
        """Where this model may be cut: the units of sharding, of per-block compilation and of
        recomputation."""
        return [block for block in self.layers if isinstance(block, Block)]

    @torch.no_grad()
    def init_weights(
        self, seed: int, assign: Callable[[Tensor, Tensor], Any] = Tensor.copy_
    ) -> None:
        """Fill every parameter and the RoPE tables; the values depend on (seed, parameter name)
        alone, not on device or sharding.

        wte, head, qkv, gate_up  normal, std sqrt(2 / (5 C)), "small init" (1910.05895): 0.020 at
                                 C = 1024
        attn.out, mlp.down       the same / sqrt(2 * n_layer): the residual sum keeps its size
        norms                    ones

        A fixed 0.02 fits widths near 1,000 alone: on the demo's, it cost 0.15 to 0.25 nats
        (docs/findings.md). `assign(parameter, full_value)` stores a value, drawn on the CPU;
        sharded parameters take only their part of it."""
        self.tie()
        for name, p in self.named_parameters():
            if "norm" in name:
                value = torch.ones(p.shape)
            else:
                std = math.sqrt(0.4 / self.config.n_embd)
                if name.endswith(("out.weight", "down.weight")):
                    std /= math.sqrt(2 * self.config.n_layer)
                key = int.from_bytes(
                    blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"
                )
                generator = torch.Generator().manual_seed(key & (2**63 - 1))
                value = torch.empty(p.shape).normal_(0.0, std, generator=generator)
            assign(p, value)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the RoPE tables, which no checkpoint holds."""
        positions = torch.arange(self.config.n_ctx, dtype=torch.float32, device=self.cos.device)
        angle = torch.outer(positions, rope_frequencies(self.config, self.cos.device))  # (T, D/2)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        cache: KVCache | None = None,
        with_z: bool = False,
        mask: Any = None,
    ) -> Tensor:
        h = self.hidden(x, cache, mask)
        if y is None:
            return self.head(h)  # (B, T, V)
        h, targets = h.view(-1, h.size(-1)), y.reshape(-1)  # (B * T, C), (B * T)
        if self.config.loss_chunk is None:
            losses = self.token_losses(h, targets, with_z)
        else:
            # recomputed in the backward pass, chunk by chunk: memory for loss_chunk rows of logits,
            # not B * T
            parts = zip(
                h.split(self.config.loss_chunk), targets.split(self.config.loss_chunk), strict=True
            )
            losses = torch.cat(
                [
                    checkpoint(self.token_losses, *part, with_z, use_reentrant=False)
                    for part in parts
                ]
            )
        return losses.unflatten(0, y.shape).sum(dim=1)

    def hidden(self, x: Tensor, cache: KVCache | None = None, mask: Any = None) -> Tensor:
        """Final hidden states (B, T, C), normalised: what the head reads."""
        past = cache.length if cache is not None else 0
        T = x.size(1)
        assert past + T <= self.config.n_ctx, (
            f"{past + T} tokens in a context of {self.config.n_ctx}"
        )
        cos, sin = self.cos[past : past + T], self.sin[past : past + T]
        h = self.wte(x).to(self.compute_dtype)
        for block in self.layers:
            h = block(h, cos, sin, cache, mask)
        if cache is not None:
            cache.length += T
        return self.norm(h)

    def token_losses(self, h: Tensor, targets: Tensor, with_z: bool = False) -> Tensor:
        """Final hidden states (n, C), targets (n,) -> cross-entropy of each token (n,), fp32,
        nats; with_z (n, 2): the square of its log-sum-exp beside it, 0 without a target. A head
        that multiplies in FP8 may compute them together with its matmul."""
        head: Any = self.head  # a Linear, or one of fp8/ in its place
        if hasattr(head, "fuses_loss") and head.fuses_loss():
            return head.token_losses(h, targets, with_z)
        logits = head(h).float()  # fp32: sums of 50k exponentials
        losses = self.loss_of_logits(logits, targets)
        return beside_z(losses, logits.logsumexp(-1), targets) if with_z else losses

    @staticmethod
    def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
        """fp32 logits (n, V), targets (n,) -> the loss of each token (n,). fp8/head_loss.py
        computes it a second time, and refuses to convert a model where the two differ. It does not
        see what is added to the loss elsewhere, as the z-loss is: add that there too, or refuse
        it."""
        return F.cross_entropy(logits, targets, reduction="none", ignore_index=NO_TARGET)

    def counts(self) -> dict[str, int]:
        """Parameters and FLOPs per token under every convention in use, counted from the modules.

        params_total      all parameters, a tied matrix once
        params_nonembed   without embedding and head (Kaplan et al., 2001.08361)
        params_matmul     weights that multiply an activation: every Linear, the head once
        flops_per_token_* training FLOPs (forward and backward): 6 a parameter; attention
                          12 L H D T (PaLM, 2204.02311, appendix B), half of it where the causal
                          mask is counted. `flops_per_token` is 6 params_matmul + the whole of
                          attention: the convention behind every MFU here."""
        c = self.config
        total = sum(p.numel() for p in self.parameters())
        matmul = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        embed = self.wte.weight.numel()  # the head has as many
        assert total == c.params_total, (
            f"{total} parameters in the modules, {c.params_total} by the formula"
        )
        nonembed = total - embed * (1 if c.tied else 2)
        attention = 12 * c.n_layer * c.n_head * c.head_dim * c.n_ctx
        return {
            "params_total": total,
            "params_nonembed": nonembed,
            "params_matmul": matmul,
            "params_embed_tok": embed,
            "params_head": embed,
            "flops_per_token_6n_total": 6 * total,
            "flops_per_token_6n_nonembed": 6 * nonembed,
            "flops_per_token_6n_matmul": 6 * matmul,
            "flops_per_token_attn": attention,
            "flops_per_token_attn_causal": attention // 2,
            "flops_per_token": 6 * matmul + attention,
            "flops_per_token_causal": 6 * matmul + attention // 2,
        }
