"""53M parameters in BF16 on the full mixture: the baseline of gpt50m_fp8."""

from configs.mixture import MIXTURE
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig


def build(*, run: str, n_layer: int, n_embd: int, n_ffn: int, n_head: int, tokens_per_step: int, micro_batch: int,
          lr: float) -> Config:
    """What all sizes share: 20 tokens per parameter of the full mixture."""
    return Config(
        run=run,
        tokens_per_param=20,
        model=GPTConfig(n_layer=n_layer, n_embd=n_embd, n_ffn=n_ffn, n_head=n_head, n_ctx=2048),
        data=DataConfig(dir="data", mixture=MIXTURE, tokens_per_step=tokens_per_step, micro_batch=micro_batch),
        optim=OptimConfig(lr=lr),
    )


config = build(
    run="gpt50m_bf16",              # 20 x 53,027,328 parameters = 1.06B tokens = 4,046 steps
    n_layer=8, n_embd=512, n_ffn=1536, n_head=4,
    tokens_per_step=262_144,        # 128 sequences of 2,048 tokens
    micro_batch=16,                 # x 2,048 = 32,768 tokens per forward pass and GPU
    lr=1e-3,
)
