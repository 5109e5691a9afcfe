"""124M parameters in BF16 on the full mixture: the baseline of gpt125m_fp8."""

from configs.mixture import MIXTURE
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig

config = Config(
    run="gpt125m_bf16",
    tokens_per_param=20,            # 20 x 123,587,328 = 2.47B tokens = 4,715 steps
    model=GPTConfig(n_layer=12, n_embd=768, n_ffn=2048, n_head=6, n_ctx=2048),
    data=DataConfig(
        dir="data",
        mixture=MIXTURE,
        tokens_per_step=524_288,        # 256 sequences of 2,048 tokens
        micro_batch=32,                 # x 2,048 = 65,536 tokens per forward pass and GPU
    ),
    optim=OptimConfig(lr=8e-4),
)
