"""The study in miniature, for two CPU cores: what `make demo` runs.

    python scaling/sweep.py configs/study_demo.py --run jobs=2

Three seeds at the smallest size, whose BF16 runs are the null; nvfp4 runs there too, four bits
whose cost the study must be able to see. No size is held out: two would be left, which is no law.
On models this small FP8's gap is far above that of real sizes, so the margin is wide and nothing
here is a finding."""

from scaling.study import Size, Study

study = Study(
    name="demo",
    sizes=(
        Size(
            config="configs/demo_s_bf16.py",
            seeds=(1337, 1338, 1339),
            recipes=("bf16", "tensorwise", "nvfp4"),
        ),
        Size(config="configs/demo_m_bf16.py"),
        Size(config="configs/demo_l_bf16.py"),
    ),
    tokens_per_param=(5, 10, 20),
    margin_percent=1.0,
)
