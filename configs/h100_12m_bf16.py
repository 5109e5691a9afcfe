"""12.8M parameters without the vocabulary's, 38.6M with them, in BF16: of the H100 study.

    python train.py configs/h100_12m_bf16.py
"""

from configs.h100 import build, learning_rate

config = build(
    run="h100_12m_bf16",
    n_layer=4, n_embd=512, n_ffn=1408,
    steps=3_922,    # 20 x 12,849,664 non-embedding parameters / 65,536 tokens a step
    lr=learning_rate(12_849_664),
)
