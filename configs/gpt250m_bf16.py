"""257M parameters in BF16 on the full mixture: the baseline of gpt250m_fp8."""

from configs.mixture import MIXTURE
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig

config = Config(
    run="gpt250m_bf16",
    tokens_per_param=20,            # 20 x 257,065,984 = 5.14B tokens = 9,807 steps
    model=GPTConfig(n_layer=16, n_embd=1024, n_ffn=2816, n_head=8, n_ctx=2048),
    data=DataConfig(
        dir="data",
        mixture=MIXTURE,
        tokens_per_step=524_288,        # 256 sequences of 2,048 tokens
        micro_batch=16,                 # x 2,048 = 32,768 tokens per forward pass and GPU
    ),
    optim=OptimConfig(lr=6e-4),
)
