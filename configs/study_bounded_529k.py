"""What scales without a pass over the tensor cost, as study_bounded.py, at 529k parameters: three
seeds, on the text of the study on a CPU.

    python studies/cpu/corpus.py FOLDER                 the text: docs/study.md
    python scaling/sweep.py configs/study_bounded_529k.py --run jobs=2
    python scaling/precision.py out/bounded_529k

Two and a half tokens per parameter."""

from dataclasses import replace

from configs.study_bounded import study as smaller
from scaling.study import Size

study = replace(
    smaller,
    name="bounded_529k",
    sizes=(Size(config="configs/cpu_529k_bf16.py", seeds=(1, 2, 3)),),
    tokens_per_param=(2.5,),
)
