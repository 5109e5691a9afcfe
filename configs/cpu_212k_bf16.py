"""212k parameters on bytes of text, LaTeX and code: of the study on a CPU
(configs/study_cpu.py)."""

from configs.cpu_30k_bf16 import build

# 20 x 212,448 parameters = 4.25M tokens = 4,150 steps
config = build(run="cpu_212k_bf16", n_layer=2, n_embd=96, nonembed=184_800)
