"""A size of the H100 study, in BF16: 25.8M parameters, 6.5M without embedding and head."""

from configs.h100_3m_bf16 import build

config = build(run="h100_6m_bf16", n_layer=4, n_embd=384, n_ffn=896, nonembed=6_491_520)
