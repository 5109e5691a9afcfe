"""The largest size of the H100 study, in BF16: 57.6M parameters, 25.4M without embedding and
head."""

from configs.h100_3m_bf16 import build

config = build(run="h100_24m_bf16", n_layer=5, n_embd=640, n_ffn=1792, nonembed=25_402_240)
