"""1.54B parameters in BF16 on the full mixture: the baseline of gpt1p5b_fp8."""

from configs.mixture import MIXTURE
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig

config = Config(
    run="gpt1p5b_bf16",
    tokens_per_param=20,            # 20 x 1,541,785,600 = 30.84B tokens = 29,408 steps
    model=GPTConfig(n_layer=28, n_embd=2048, n_ffn=5632, n_head=16, n_ctx=2048),
    data=DataConfig(
        dir="data",
        mixture=MIXTURE,
        tokens_per_step=1_048_576,      # 512 sequences of 2,048 tokens
        micro_batch=8,                  # x 2,048 = 16,384 tokens per forward pass and GPU
    ),
    optim=OptimConfig(lr=3e-4),
)
