"""131k parameters on bytes of installed code and documentation: for two CPU cores, part of `make
demo`."""

from configs.demo_s_bf16 import build

# 20 x 131,392 parameters = 2.63M tokens = 2,567 steps
config = build(run="demo_l_bf16", n_embd=64, n_ffn=192, n_head=2)
