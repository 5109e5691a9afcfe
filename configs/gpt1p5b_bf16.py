"""1.54B parameters in BF16 on the full mixture: the baseline of gpt1p5b_fp8."""

from configs.gpt50m_bf16 import build

config = build(
    run="gpt1p5b_bf16",             # 20 x 1,541,785,600 parameters = 30.84B tokens = 29,408 steps
    n_layer=28, n_embd=2048, n_ffn=5632, n_head=16,
    tokens_per_step=1_048_576,      # 512 sequences of 2,048 tokens
    micro_batch=8,                  # x 2,048 = 16,384 tokens per forward pass and GPU
    lr=3e-4,
)
