"""Which matmul costs: tensorwise, and with one of its three left in BF16, at 33k and 131k
parameters.

    python prepare_data.py demo out=data/demo
    python scaling/sweep.py configs/study_matmul.py --run jobs=2
    python scaling/precision.py out/matmul

Ten seeds, all arms on the data and the initial weights of their BF16 run: 100 runs of 642 or 644
steps, so the larger size sees 5 tokens per parameter. An arm whose gap is smaller than tensorwise's
names the matmul that costs."""

from scaling.study import Size, Study

SEEDS = tuple(range(1337, 1347))

study = Study(
    name="matmul",
    sizes=(
        Size(config="configs/demo_s_bf16.py", seeds=SEEDS),
        Size(config="configs/demo_l_bf16.py", seeds=SEEDS, tokens_per_param=(5,)),
    ),
    recipes=("bf16", "tensorwise", "tensorwise_o_hp", "tensorwise_gi_hp", "tensorwise_gw_hp"),
    tokens_per_param=(20,),
    margin_percent=1.0,
)
