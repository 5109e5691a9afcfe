"""257M parameters in BF16 on the full mixture: the baseline of gpt250m_fp8."""

from configs.gpt50m_bf16 import build

config = build(
    run="gpt250m_bf16",             # 20 x 257,065,984 parameters = 5.14B tokens = 9,807 steps
    n_layer=16, n_embd=1024, n_ffn=2816, n_head=8,
    tokens_per_step=524_288,        # 256 sequences of 2,048 tokens
    micro_batch=16,                 # x 2,048 = 32,768 tokens per forward pass and GPU
    lr=6e-4,
)
