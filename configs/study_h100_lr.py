"""The learning-rate sweep of the H100 study: its smallest size at five peak rates, before anything
else is trained.

    python scaling/sweep.py configs/study_h100_lr.py --run limit=540  the runs; again: what is next
    python scaling/learning_rate.py out/h100_lr                       LR of configs/h100_3m_bf16.py

Public laws, fitted to far larger sizes, say 0.0038 (DeepSeek LLM, 2401.02954), 0.0094 (2406.19146),
0.010 (2503.04715)."""

from scaling.study import Size, Study

study = Study(
    name="h100_lr",
    params="nonembed",
    sizes=(Size(config="configs/h100_3m_bf16.py", lr=(0.002, 0.004, 0.008, 0.016, 0.032)),),
    recipes=("bf16",),
    tokens_per_param=(20,),  # as long as the trunks that the rate is for: 981 steps
    margin_percent=0.25,  # nothing is compared in precision here; a study has to name one
)
