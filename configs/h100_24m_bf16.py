"""25.4M parameters without the vocabulary's, 57.6M with them, in BF16: the largest of the H100 study, predicted first.

    python train.py configs/h100_24m_bf16.py
"""

from configs.h100 import build, learning_rate

config = build(
    run="h100_24m_bf16",
    n_layer=5, n_embd=640, n_ffn=1792,
    steps=7_753,    # 20 x 25,402,240 non-embedding parameters / 65,536 tokens a step
    lr=learning_rate(25_402_240),
)
