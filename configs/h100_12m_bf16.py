"""A size of the H100 study, in BF16: 38.6M parameters, 12.8M without embedding and head."""

from configs.h100_3m_bf16 import build

config = build(run="h100_12m_bf16", n_layer=4, n_embd=512, n_ffn=1408, nonembed=12_849_664)
