"""101k parameters on bytes of text, LaTeX and code: of the study on a CPU
(configs/study_cpu.py)."""

from configs.cpu_30k_bf16 import build

# 20 x 100,672 parameters = 2.01M tokens = 1,967 steps
config = build(run="cpu_101k_bf16", n_layer=2, n_embd=64, nonembed=82_240)
