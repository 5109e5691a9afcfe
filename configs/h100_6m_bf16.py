"""6.5M parameters without the vocabulary's, 25.8M with them, in BF16: of the H100 study."""

from configs.h100_3m_bf16 import build

config = build(run="h100_6m_bf16", n_layer=4, n_embd=384, n_ffn=896, nonembed=6_491_520)
