"""3.2M parameters without the vocabulary's, 16.1M with them, in BF16: the smallest of the H100 study."""

from configs.h100 import build

config = build(run="h100_3m_bf16", n_layer=4, n_embd=256, n_ffn=704, nonembed=3_213_568)
