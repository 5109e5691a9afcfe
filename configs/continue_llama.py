"""Llama-3.1-8B trained on in BF16 or FP8 on 4 GPUs: the published comparison of FP8 recipes, on
instruction data or documents.

    python -m eval.export --from-hf DIR out/llama31
    python prepare_data.py local chat.jsonl name=chat instruct=true tokenizer=out/llama31/tokenizer
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600       # a stop has time to save
    torchrun --nproc_per_node=4 train.py configs/continue_llama.py run=bf16
    torchrun --nproc_per_node=4 train.py configs/continue_llama.py run=fp8 fp8.recipe=tensorwise
    python scaling/report.py out/bf16 out/fp8 ..

DIR holds config.json, safetensors and the tokenizer of meta-llama/Llama-3.1-8B.
Another model: replace the model section by that of its out/RUN/config.json, of which n_ctx and
loss_chunk alone are free. chat.jsonl has lines {"prompt": .., "response": ..}; the loss counts
responses alone. `steps` is of an example: a pass over your data is its tokens
(data/chat/index.json) / 131,072."""

from model import GPTConfig
from runtime.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimConfig,
    ParallelConfig,
)

config = Config(
    run="continue_llama",
    start_from="out/llama31_8b/checkpoints/step_00000000",
    steps=1000,  # 1,000 x 131,072 = 131.1M tokens
    model=GPTConfig(  # Llama-3.1-8B: 8,030,261,248 parameters
        n_layer=32,
        n_embd=4096,
        n_ffn=14336,
        n_head=32,
        n_kv_head=8,
        n_ctx=4096,
        vocab_size=128256,
        tied=False,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_factor=8.0,
        rope_low_freq=1.0,
        rope_high_freq=4.0,
        rope_original_ctx=8192,
        loss_chunk=1024,  # logits of 128,256 columns never exist whole
    ),
    data=DataConfig(
        dir="data",
        mixture={"chat": 1},
        tokenizer="out/llama31_8b/tokenizer",
        tokens_per_step=131_072,  # 2 sequences x 4,096 tokens x accumulation 4 x 4 GPUs
        micro_batch=2,
    ),
    optim=OptimConfig(
        lr=2e-5,
        min_lr_ratio=0.0,
        warmup_share=0.1,
        schedule="cosine",
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.01,
        clip=1.0,
    ),
    parallel=ParallelConfig(shard=4, recompute=True),
    # a multiple of eval.every: each one has a validation loss
    checkpoint=CheckpointConfig(every=50, keep=5, best=True),
    eval=EvalConfig(every=5, tokens=131_072),
)
