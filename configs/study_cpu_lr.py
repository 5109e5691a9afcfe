"""The learning-rate sweep of the study on a CPU: its smallest size at four peak rates, before
anything else is trained.

    python scaling/ledger.py configs/study_cpu_lr.py --run      the runs; again: what is missing
    python scaling/ledger.py configs/study_cpu_lr.py --restore  their summaries -> out/cpu_lr
    python scaling/learning_rate.py out/cpu_lr                  the optimum, LR of cpu_30k_bf16.py

The rule across sizes, stated before the sweep: rate ~ N^-1/2 of the parameters outside the
vocabulary, at one batch and one number of tokens per parameter for all sizes
(scaling/learning_rate.py has its sources). The rates of 212k parameters test the rule, and choose
nothing. 0.012 was best of 0.003 to 0.024 at 33k parameters on other text (docs/findings.md); as
0.006, an end at first, was best here, 0.003 was added."""

from scaling.study import Size, Study

study = Study(
    name="cpu_lr",
    sizes=(
        Size(config="configs/cpu_30k_bf16.py", seeds=(1, 2), lr=(0.003, 0.006, 0.012, 0.024)),
        Size(config="configs/cpu_212k_bf16.py", seeds=(1,), lr=(0.001, 0.002, 0.004, 0.008)),
    ),
    recipes=("bf16",),
    tokens_per_param=(20,),
    margin_percent=0.25,  # nothing is compared in precision here; a study has to name one
)
