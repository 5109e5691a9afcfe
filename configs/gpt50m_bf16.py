"""53M parameters in BF16 on the full mixture: the baseline of gpt50m_fp8."""

from configs.mixture import MIXTURE
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig

config = Config(
    run="gpt50m_bf16",
    tokens_per_param=20,            # 20 x 53,027,328 = 1.06B tokens = 4,046 steps
    model=GPTConfig(n_layer=8, n_embd=512, n_ffn=1536, n_head=4, n_ctx=2048),
    data=DataConfig(
        dir="data",
        mixture=MIXTURE,
        tokens_per_step=262_144,        # 128 sequences of 2,048 tokens
        micro_batch=16,                 # x 2,048 = 32,768 tokens per forward pass and GPU
    ),
    optim=OptimConfig(lr=1e-3),
)
