"""124M parameters in BF16 on the full mixture: the baseline of gpt125m_fp8."""

from configs.gpt50m_bf16 import build

config = build(
    run="gpt125m_bf16",             # 20 x 123,587,328 parameters = 2.47B tokens = 4,715 steps
    n_layer=12, n_embd=768, n_ffn=2048, n_head=6,
    tokens_per_step=524_288,        # 256 sequences of 2,048 tokens
    micro_batch=32,                 # x 2,048 = 65,536 tokens per forward pass and GPU
    lr=8e-4,
)
