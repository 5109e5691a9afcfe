"""1.54B parameters in BF16 on the full mixture: the baseline of gpt1p5b_fp8."""

from configs.gpt50m_bf16 import build

# 20 x 1,541,785,600 = 30.84B tokens = 29,408 steps of 512 sequences; a forward pass sees 16,384
# tokens on each GPU.
config = build(
    run="gpt1p5b_bf16",
    n_layer=28,
    n_embd=2048,
    n_ffn=5632,
    tokens_per_step=1_048_576,
    micro_batch=8,
    lr=3e-4,
)
