"""30k parameters on bytes of text, LaTeX and code: the smallest size of the study on a CPU
(configs/study_cpu.py)."""

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

# Peak learning rate of the smallest size by configs/study_cpu_lr.py: optimum .0069, two seeds;
# .0056 to .0086 lose .1 %.
LR, NONEMBED = 7e-3, 20_640


def build(*, run: str, n_layer: int, n_embd: int, nonembed: int) -> Config:
    """What the sizes share: heads of 32 channels, an MLP of twice the width, one batch, one number
    of tokens per parameter.

    The learning rate goes as N^-1/2 of the parameters outside the vocabulary: the rule of
    scaling/learning_rate.py."""
    return Config(
        run=run,
        tokens_per_param=20,
        model=GPTConfig(
            n_layer=n_layer,
            n_embd=n_embd,
            n_ffn=2 * n_embd,
            n_head=n_embd // 32,
            n_ctx=128,
            vocab_size=257,
            vocab_multiple=32,  # 31 rows that no byte uses, not the 127 of whole tensor-core tiles
        ),
        data=DataConfig(
            dir="data/cpu",  # studies/cpu/corpus.py
            mixture={"prose": 0.40, "latex": 0.25, "python": 0.25, "c": 0.10},
            tokenizer="byte",
            tokens_per_step=1024,  # 8 sequences of 128 bytes
            micro_batch=8,
            max_epochs=1,  # no text is seen twice
        ),
        optim=OptimConfig(
            lr=round(LR * (nonembed / NONEMBED) ** -0.5, 6), warmup_share=0.05, schedule="wsd"
        ),
        parallel=ParallelConfig(compile=False, cpu_fp32=True),
        checkpoint=CheckpointConfig(every=2000, keep=1, best=False),
        eval=EvalConfig(every=None, tokens=65_536),
        log=LogConfig(every=100),
        probe=ProbeConfig(every=None),
    )


# 20 x 29,856 parameters = 0.60M tokens = 584 steps
config = build(run="cpu_30k_bf16", n_layer=2, n_embd=32, nonembed=NONEMBED)
