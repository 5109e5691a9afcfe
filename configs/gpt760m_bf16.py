"""757M parameters in BF16 on the full mixture: the baseline of gpt760m_fp8."""

from configs.gpt50m_bf16 import build

# 20 x 756,819,456 = 15.14B tokens = 28,871 steps of 256 sequences; a forward pass sees 16,384
# tokens on each GPU.
config = build(
    run="gpt760m_bf16",
    n_layer=24,
    n_embd=1536,
    n_ffn=4096,
    tokens_per_step=524_288,
    micro_batch=8,
    lr=4e-4,
)
