"""259k parameters on bytes of installed code and documentation: the largest of the rehearsal, not part of `make demo`.

    python train.py configs/demo_xl_bf16.py
"""

from configs.demo import build

config = build(
    run="demo_xl_bf16",             # 20 x 258,528 parameters = 5.17M tokens = 5,050 steps
    n_layer=2, n_embd=96, n_ffn=256, n_head=3,
    lr=6e-3,
)
