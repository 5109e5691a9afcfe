"""demo_s_bf16 with its block matmuls in FP8, tensorwise."""

from dataclasses import replace

from configs.demo_s_bf16 import config as parent
from runtime.config import FP8Config

config = replace(parent, run="demo_s_fp8", fp8=FP8Config(recipe="tensorwise"))
