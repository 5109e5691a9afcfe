"""gpt760m_bf16 with its QKV, attention-output and MLP matmuls in FP8, tensorwise."""

from dataclasses import replace

from configs.gpt760m_bf16 import config as parent
from runtime.config import FP8Config

config = replace(parent, run="gpt760m_fp8", fp8=FP8Config(recipe="tensorwise"))
