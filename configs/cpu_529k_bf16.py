"""529k parameters on bytes of text, LaTeX and code: of the study on a CPU
(configs/study_cpu.py)."""

from configs.cpu_30k_bf16 import build

# 20 x 529,280 parameters = 10.59M tokens = 10,338 steps
config = build(run="cpu_529k_bf16", n_layer=3, n_embd=128, nonembed=492_416)
