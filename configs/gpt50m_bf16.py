"""53M parameters in BF16 on the full mixture: the baseline of gpt50m_fp8."""

from configs.mixture import MIXTURE
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig


def build(
    *,
    run: str,
    n_layer: int,
    n_embd: int,
    n_ffn: int,
    tokens_per_step: int,
    micro_batch: int,
    lr: float,
) -> Config:
    """What the sizes from 50M to 1.5B share: a context of 2,048, heads of 128, 20 training tokens
    per parameter."""
    return Config(
        run=run,
        tokens_per_param=20,
        model=GPTConfig(
            n_layer=n_layer, n_embd=n_embd, n_ffn=n_ffn, n_head=n_embd // 128, n_ctx=2048
        ),
        data=DataConfig(
            dir="data", mixture=MIXTURE, tokens_per_step=tokens_per_step, micro_batch=micro_batch
        ),
        optim=OptimConfig(lr=lr),
    )


# 20 x 53,027,328 = 1.06B tokens = 4,046 steps of 128 sequences; a forward pass sees 32,768 tokens
# on each GPU.
config = build(
    run="gpt50m_bf16",
    n_layer=8,
    n_embd=512,
    n_ffn=1536,
    tokens_per_step=262_144,
    micro_batch=16,
    lr=1e-3,
)
