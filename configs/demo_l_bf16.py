"""185k parameters on bytes of installed code and documentation: for two CPU cores, part of `make demo`.

    python train.py configs/demo_l_bf16.py
"""

from configs.demo import build

config = build(
    run="demo_l_bf16",              # 20 x 184,768 parameters = 3.70M tokens = 903 steps
    n_layer=3, n_embd=64, n_ffn=192, n_head=1,
    lr=1e-2,
)
