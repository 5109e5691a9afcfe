"""6.5M parameters without the vocabulary's, 25.8M with them, in BF16: of the H100 study.

    python train.py configs/h100_6m_bf16.py
"""

from configs.h100 import build, learning_rate

config = build(
    run="h100_6m_bf16",
    n_layer=4, n_embd=384, n_ffn=896,
    steps=1_982,    # 20 x 6,491,520 non-embedding parameters / 65,536 tokens a step
    lr=learning_rate(6_491_520),
)
