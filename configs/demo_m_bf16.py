"""74k parameters on bytes of installed code and documentation: for two CPU cores, part of `make demo`."""

from configs.demo import build

config = build(
    run="demo_m_bf16",              # 20 x 73,968 parameters = 1.48M tokens = 1,445 steps
    n_layer=2, n_embd=48, n_ffn=128, n_head=1,
    lr=6e-3,
)
