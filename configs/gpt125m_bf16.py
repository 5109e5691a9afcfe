"""124M parameters in BF16 on the full mixture: the baseline of gpt125m_fp8."""

from configs.gpt50m_bf16 import build

# 20 x 123,587,328 = 2.47B tokens = 4,715 steps of 256 sequences; a forward pass sees 65,536 tokens
# on each GPU.
config = build(
    run="gpt125m_bf16",
    n_layer=12,
    n_embd=768,
    n_ffn=2048,
    tokens_per_step=524_288,
    micro_batch=32,
    lr=8e-4,
)
