"""3.2M parameters without the vocabulary's, 16.1M with them, in BF16: the smallest of the H100 study.

    python train.py configs/h100_3m_bf16.py
"""

from configs.h100 import build, learning_rate

config = build(
    run="h100_3m_bf16",
    n_layer=4, n_embd=256, n_ffn=704,
    steps=981,      # 20 x 3,213,568 non-embedding parameters / 65,536 tokens a step
    lr=learning_rate(3_213_568),
)
