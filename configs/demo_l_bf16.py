"""131k parameters on bytes of installed code and documentation: for two CPU cores, part of `make demo`."""

from configs.demo import build

config = build(
    run="demo_l_bf16",              # 20 x 131,392 parameters = 2.63M tokens = 2,567 steps
    n_layer=2, n_embd=64, n_ffn=192, n_head=2,
    lr=6e-3,
)
