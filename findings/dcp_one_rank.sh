#!/usr/bin/env bash
# torch.distributed.checkpoint keeps one rank's value of a key that all save: a number of one, a tensor of another.
#
# Versions: torch 2.13.0, CPU build, gloo.
# save() takes a key that several ranks hold for copies of one thing and writes one of them, without a comparison. Which
# one follows from sizes: each goes to the rank that has the least to write so far. States that differ by rank under one
# key (random generators, positions of data loaders, delayed scales) are lost: after load() all ranks go on with the state
# of one rank, and not all keys with that of the same. Resumed ranks then draw the same dropout or read the same data.
#
# What is run: two ranks save {"seed": 100 + rank, "generator": a tensor of the rank's number} and load it.
#
# Output seen:
#   rank 0 saved seed 100, generator 0 and loads seed 100, generator 1
#   rank 1 saved seed 101, generator 1 and loads seed 100, generator 1
#
# Remedy: the rank in the key, as in f"generator_{rank}".
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
cat > ranks.py <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
dcp.save({"seed": 100 + rank, "generator": torch.tensor([rank])}, checkpoint_id="saved")
state = {"seed": -1, "generator": torch.tensor([-1])}
dcp.load(state, checkpoint_id="saved")
loaded = (state["seed"], state["generator"].item())
lines = [None, None]
dist.all_gather_object(lines, (rank, *loaded))
if rank == 0:
    for number, seed, generator in lines:
        print(
            f"rank {number} saved seed {100 + number}, generator {number} and loads seed {seed}, generator {generator}"
        )
dist.destroy_process_group()
sys.exit(0 if loaded == (100, 1) else 1)
PY
OMP_NUM_THREADS=1 "$work/venv/bin/torchrun" --standalone --nproc_per_node=2 ranks.py 2> log ||
    { code=$?; tail -n 5 log; exit "$code"; }
