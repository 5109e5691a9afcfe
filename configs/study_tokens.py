"""Does the cost of a recipe grow with the tokens per parameter? Ten minutes on two CPU cores;
docs/findings.md has the result.

    python scaling/sweep.py configs/study_tokens.py --run jobs=2
"""

from scaling.study import Size, Study

study = Study(
    name="tokens",
    sizes=(
        Size(
            config="configs/demo_s_bf16.py",
            seeds=(1, 2, 3, 4, 5),
            recipes=("bf16", "tensorwise", "nvfp4"),
        ),
    ),
    tokens_per_param=(5, 10, 20, 40, 80),
    margin_percent=1.0,
)
