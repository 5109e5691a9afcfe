"""33k parameters on bytes of installed code and documentation: for two CPU cores, the smallest size
of `make demo`."""

from model import GPTConfig
from runtime.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    ProbeConfig,
)


def build(*, run: str, n_embd: int, n_ffn: int, n_head: int) -> Config:
    """What the demo's sizes share."""
    return Config(
        run=run,
        tokens_per_param=20,
        model=GPTConfig(
            n_layer=2, n_embd=n_embd, n_ffn=n_ffn, n_head=n_head, n_ctx=128, vocab_size=257
        ),
        data=DataConfig(
            dir="data/demo",
            mixture={"prose": 0.30, "science": 0.45, "python": 0.20, "c": 0.05},
            tokenizer="byte",
            tokens_per_step=1024,  # 8 sequences of 128 bytes
            micro_batch=8,
            max_epochs=2,  # how much text an installation holds differs from machine to machine
        ),
        optim=OptimConfig(lr=6e-3, warmup_share=0.05),
        # compiling for a CPU takes longer than these runs gain, and a compiler
        # auto: six times as fast in BF16 on a CPU without BF16 units
        parallel=ParallelConfig(compile=False, cpu_fp32="auto"),
        checkpoint=CheckpointConfig(every=500, keep=1),
        eval=EvalConfig(every=None, tokens=32_768),
        log=LogConfig(every=100),
        probe=ProbeConfig(every=200),
    )


# 20 x 32,928 parameters = 0.66M tokens = 644 steps
config = build(run="demo_s_bf16", n_embd=32, n_ffn=64, n_head=1)
