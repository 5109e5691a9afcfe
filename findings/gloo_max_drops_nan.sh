#!/bin/bash
# gloo's all_reduce(MAX) drops a NaN, by rank and position, and can hide the maximum beside it.
#
# Versions: torch 2.13.0, CPU build, its own gloo backend.
# Behaviour: gloo's MAX compares two values, and a comparison with NaN is false. Whether the NaN survives depends on the
#     rank that brings it; torch.maximum and torch.amax keep it always.
# Output seen, of the values 10, 11 and 12 on ranks 0, 1 and 2, one of them replaced by NaN (the same on all ranks):
#     NaN on rank 0: nan
#     NaN on rank 1: 10.0      the NaN is lost, and with it rank 2's 12
#     NaN on rank 2: 11.0
# What follows: a verdict, a scale or an overflow check that is reduced by MAX over gloo must send beside each value
#     whether it is NaN.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/reduce.py" <<'PY'
import math
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for bad in range(size):
        value = torch.tensor([math.nan if rank == bad else 10.0 + rank])
        dist.all_reduce(value, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"NaN on rank {bad}: {value.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, (3, sys.argv[1]), nprocs=3)
PY
"$folder/venv/bin/python" "$folder/reduce.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN' || { echo "the behaviour has changed"; exit 1; }
NaN on rank 0: nan
NaN on rank 1: 10.0
NaN on rank 2: 11.0
SEEN
