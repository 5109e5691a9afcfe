"""39k parameters on bytes of installed code and documentation: for two CPU cores, part of `make demo`.

    python train.py configs/demo_s_bf16.py
"""

from configs.demo import build

config = build(
    run="demo_s_bf16",              # 20 x 39,072 parameters = 0.78M tokens = 191 steps
    n_layer=2, n_embd=32, n_ffn=96, n_head=1,
    lr=1e-2,
)
