"""The smallest size of the H100 study, in BF16: 16.1M parameters, 3.2M without embedding and
head."""

import math

from model import GPTConfig
from runtime.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    ProbeConfig,
)

# Peak learning rate of the smallest size, NONEMBED there. Provisional: a guess until
# configs/study_h100_lr.py has been run.
LR, NONEMBED = 4e-3, 3_213_568


def build(*, run: str, n_layer: int, n_embd: int, n_ffn: int, nonembed: int) -> Config:
    """What the sizes share. The learning rate goes as N^-1/2, at one batch and one number of tokens
    per parameter for all sizes: the rule of scaling/learning_rate.py."""
    return Config(
        run=run,
        steps=math.ceil(20 * nonembed / 65_536),  # 20 tokens per parameter outside the vocabulary
        model=GPTConfig(
            n_layer=n_layer, n_embd=n_embd, n_ffn=n_ffn, n_head=n_embd // 128, n_ctx=1024
        ),
        data=DataConfig(
            dir="data/h100",
            # Up to four passes over a source, repeated text is almost as good as new (2305.16264).
            mixture={"prose": 0.11, "arxiv": 0.10, "python": 0.64, "c": 0.15},
            tokens_per_step=65_536,  # 64 sequences of 1,024 tokens
            micro_batch=64,  # all of a step in one pass
            max_epochs=8,
        ),
        optim=OptimConfig(
            lr=round(LR * (nonembed / NONEMBED) ** -0.5, 6), warmup_share=0.05, schedule="wsd"
        ),
        checkpoint=CheckpointConfig(every=1000, keep=1, best=False),
        eval=EvalConfig(every=None, tokens=262_144),
        log=LogConfig(every=100),
        probe=ProbeConfig(every=100),
    )


config = build(run="h100_3m_bf16", n_layer=4, n_embd=256, n_ffn=704, nonembed=3_213_568)
