"""1.07M parameters on bytes of text, LaTeX and code: of the study on a CPU
(configs/study_cpu.py)."""

from configs.cpu_30k_bf16 import build

# 20 x 1,071,520 parameters = 21.43M tokens = 20,929 steps
config = build(run="cpu_1m_bf16", n_layer=4, n_embd=160, nonembed=1_025_440)
