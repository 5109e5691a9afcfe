"""33k parameters on bytes of installed code and documentation: for two CPU cores, part of `make demo`."""

from configs.demo import build

config = build(
    run="demo_s_bf16",              # 20 x 32,928 parameters = 0.66M tokens = 644 steps
    n_layer=2, n_embd=32, n_ffn=64, n_head=1,
    lr=6e-3,
)
