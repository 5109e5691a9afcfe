"""25.4M parameters without the vocabulary's, 57.6M with them, in BF16: the largest of the H100
study."""

from configs.h100_3m_bf16 import build

config = build(run="h100_24m_bf16", n_layer=5, n_embd=640, n_ffn=1792, nonembed=25_402_240)
