"""12.8M parameters without the vocabulary's, 38.6M with them, in BF16: of the H100 study."""

from configs.h100_3m_bf16 import build

config = build(run="h100_12m_bf16", n_layer=4, n_embd=512, n_ffn=1408, nonembed=12_849_664)
