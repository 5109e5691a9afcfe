"""What scales without a pass over the tensor cost: fp8.scaling=bounded beside current scales, at
33k parameters, ten seeds.

    python prepare_data.py demo out=data/demo
    python scaling/sweep.py configs/study_bounded.py --run jobs=2
    python scaling/precision.py out/bounded

All arms on the data and the initial weights of their BF16 run. On a CPU the kernels' stand-ins
compute what the kernels do, bit for bit. study_bounded_529k.py is the same at 529k parameters."""

from scaling.study import Size, Study

study = Study(
    name="bounded",
    sizes=(Size(config="configs/demo_s_bf16.py", seeds=tuple(range(1337, 1347))),),
    recipes=("bf16", "tensorwise+kernels", "tensorwise+kernels+bounded"),
    tokens_per_param=(20,),
    margin_percent=1.0,
)
