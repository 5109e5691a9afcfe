"""Is what FP8 costs recovered by a last phase in BF16? And does a last phase in FP8 alone cost as
much?

    python scaling/sweep.py configs/study_switch.py --run jobs=2
    python scaling/precision.py out/switch

Each trunk is trained in one precision; its decay, the last fifth, runs in the same and in another
one. nvfp4 is here because its cost is large enough to see how much of it comes back."""

from scaling.study import Size, Study

study = Study(
    name="switch",
    sizes=(Size(config="configs/demo_s_bf16.py", seeds=tuple(range(1337, 1347))),),
    tokens_per_param=(20,),
    recipes=("bf16", "tensorwise", "nvfp4"),
    switch=("tensorwise>bf16", "bf16>tensorwise", "nvfp4>bf16", "bf16>nvfp4"),
    margin_percent=1.0,
)
