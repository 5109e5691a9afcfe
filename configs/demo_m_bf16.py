"""74k parameters on bytes of installed code and documentation: for two CPU cores, part of `make
demo`."""

from configs.demo_s_bf16 import build

# 20 x 73,968 parameters = 1.48M tokens = 1,445 steps
config = build(run="demo_m_bf16", n_embd=48, n_ffn=128, n_head=1)
