"""757M parameters in BF16 on the full mixture: the baseline of gpt760m_fp8."""

from configs.mixture import MIXTURE
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig

config = Config(
    run="gpt760m_bf16",
    tokens_per_param=20,            # 20 x 756,819,456 = 15.14B tokens = 28,871 steps
    model=GPTConfig(n_layer=24, n_embd=1536, n_ffn=4096, n_head=12, n_ctx=2048),
    data=DataConfig(
        dir="data",
        mixture=MIXTURE,
        tokens_per_step=524_288,        # 256 sequences of 2,048 tokens
        micro_batch=8,                  # x 2,048 = 16,384 tokens per forward pass and GPU
    ),
    optim=OptimConfig(lr=4e-4),
)
