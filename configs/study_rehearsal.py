"""The H100 study at a hundredth of its size, for two CPU cores: the same commands in the same order, another study's name.

    python prepare_data.py demo out=data/demo
    python scaling/slice.py configs/study_rehearsal.py limit=540 jobs=2 results=out/rehearsal_results     again until it is done

Everything of configs/study_h100.py is here: sizes counted without the vocabulary's parameters, five recipes at the two
smallest, two seeds, null runs, three budgets, the largest size held out until its prediction is frozen. Its numbers are
those of models of bytes and of emulated FP8: they show that the commands work and nothing about FP8.
"""

from scaling.study import Size, Study

FP8_AT_ALL = ("tensorwise",)
ALL = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "auto")

study = Study(
    name="rehearsal",
    params="nonembed",
    sizes=(
        Size(config="configs/demo_s_bf16.py", seeds=(1337, 1338), recipes=ALL, null_seeds=(1337, 1338)),
        Size(config="configs/demo_m_bf16.py", seeds=(1337, 1338), recipes=ALL, null_seeds=(1337,)),
        Size(config="configs/demo_l_bf16.py", seeds=(1337, 1338), recipes=("bf16", *FP8_AT_ALL), null_seeds=(1337,)),
        Size(config="configs/demo_xl_bf16.py", recipes=("bf16", *FP8_AT_ALL), held_out=True),
    ),
    tokens_per_param=(5, 10, 20),
    null=("model.loss_chunk=256",),
    margin_percent=1.0,
)
