"""What FP8 costs, measured on a CPU: five sizes over a factor of 36, four budgets, eight
precisions, repeated seeds.

    python studies/cpu/corpus.py FOLDER                  the text, equal to the byte; docs/study.md
    python scaling/ledger.py configs/study_cpu.py        what is done, the hours that remain
    python scaling/ledger.py configs/study_cpu.py --run  what is missing, one run at a time

FP8 is emulated on a CPU: its numerics are exact, its speed is not. So the study measures what FP8
costs, not what it buys.

Arms. tensorwise everywhere. mxfp8, and rowwise at the two smaller sizes: do finer scales cost less?
mxfp8_e5m2 against mxfp8: do gradients need range or precision? tensorwise_gi_hp against tensorwise:
how much does the input gradient's matmul cost? The positive control is nvfp4, four bits, whose cost
of some per cent the study must see; its stochastic rounding is slow to emulate, so at 529k
parameters it runs to 5 tokens per parameter only. A second positive control at the smallest size,
mxfp8_norms, rounds the norms' weights too, a published cause of instability. Seeds:
studies/cpu/power.py. Null runs sum the loss in other parts.

Held out: the largest size. Freeze its predictions first (scaling/fit.py out/cpu --predict RUN),
then train it by `--run only=cpu_1m_*`."""

from scaling.study import Size, Study

ALL = ("bf16", "tensorwise", "rowwise", "mxfp8", "mxfp8_e5m2", "tensorwise_gi_hp", "nvfp4")
MAIN = ("bf16", "tensorwise")

study = Study(
    name="cpu",
    sizes=(
        Size(
            config="configs/cpu_30k_bf16.py",
            seeds=tuple(range(1, 11)),
            recipes=ALL,
            null_seeds=tuple(range(1, 6)),
        ),
        Size(config="configs/cpu_30k_bf16.py", seeds=tuple(range(11, 19)), recipes=MAIN),
        Size(
            config="configs/cpu_101k_bf16.py", seeds=(1, 2, 3, 4), recipes=ALL, null_seeds=(1, 2, 3)
        ),
        Size(config="configs/cpu_101k_bf16.py", seeds=tuple(range(5, 17)), recipes=MAIN),
        Size(
            config="configs/cpu_212k_bf16.py",
            seeds=(1, 2, 3),
            recipes=("bf16", "tensorwise", "mxfp8", "mxfp8_e5m2", "nvfp4"),
            null_seeds=(1,),
        ),
        Size(config="configs/cpu_212k_bf16.py", seeds=(4, 5, 6), recipes=MAIN),
        Size(
            config="configs/cpu_529k_bf16.py",
            seeds=(1, 2, 3),
            recipes=("bf16", "tensorwise", "mxfp8", "mxfp8_e5m2"),
            tokens_per_param=(5, 10, 20),
        ),
        Size(
            config="configs/cpu_529k_bf16.py",
            seeds=(1, 2, 3),
            recipes=("nvfp4",),
            tokens_per_param=(5,),
        ),
        Size(
            config="configs/cpu_529k_bf16.py",
            seeds=(4, 5),
            recipes=("bf16", "nvfp4"),
            tokens_per_param=(5,),
        ),
        Size(
            config="configs/cpu_1m_bf16.py",
            seeds=(1, 2),
            recipes=("bf16", "tensorwise", "mxfp8"),
            tokens_per_param=(5, 10),
            held_out=True,
        ),
        # added last: `only=cpu_30k_mxfp8_norms_*` trains these runs alone
        Size(
            config="configs/cpu_30k_bf16.py",
            seeds=tuple(range(1, 19)),
            recipes=("mxfp8_norms",),
        ),
    ),
    tokens_per_param=(5, 10, 20, 40),
    null=("model.loss_chunk=64",),
    # equivalence within a quarter of a percent of the loss, as in the large study
    margin_percent=0.25,
)
