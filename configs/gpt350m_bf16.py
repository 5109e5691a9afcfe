"""360M parameters in BF16 on the full mixture: the baseline of gpt350m_fp8."""

from configs.gpt50m_bf16 import build

# 20 x 359,842,816 = 7.20B tokens = 13,727 steps of 256 sequences; a forward pass sees 32,768 tokens
# on each GPU.
config = build(
    run="gpt350m_bf16",
    n_layer=24,
    n_embd=1024,
    n_ffn=2816,
    tokens_per_step=524_288,
    micro_batch=16,
    lr=6e-4,
)
