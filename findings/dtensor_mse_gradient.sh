#!/usr/bin/env bash
# mse_loss of sharded DTensors has the right value and a gradient as many times too large as there are shards.
#
# Versions: torch 2.13.0, CPU build, gloo. 2.15.0 (its CUDA build, run on a CPU) does the same, but for cross_entropy,
#     whose value is right there.
# Behaviour: F.mse_loss, F.huber_loss and F.smooth_l1_loss divide their gradient by the elements of the rank's own shard,
#     not by those of the whole tensor. With uneven shards each shard has a factor of its own, and the value is wrong too:
#     the mean of the shards' means. F.l1_loss and .mean() of the same differences are right. Where gradients are
#     normalised, by clipping or by Adam, little of it shows.
#     F.cross_entropy is right in its gradient, but up to 2.13 not in its value where shards hold different numbers of
#     ignored targets: that is the mean of their means.
# Output seen, of 4 ranks, against plain tensors:
#     mse_loss, 8 rows: value 1.000 times, gradient 4.000 to 4.000 times
#     huber_loss, 8 rows: value 1.000 times, gradient 4.000 to 4.000 times
#     smooth_l1_loss, 8 rows: value 1.000 times, gradient 4.000 to 4.000 times
#     l1_loss, 8 rows: value 1.000 times, gradient 1.000 to 1.000 times
#     mean of squares, 8 rows: value 1.000 times, gradient 1.000 to 1.000 times
#     cross_entropy, 8 rows: value 1.000 times, gradient 1.000 to 1.000 times
#     cross_entropy, 8 rows, one ignored: value 1.089 times, gradient 1.000 to 1.000 times
#     mse_loss, 7 rows: value 0.936 times, gradient 3.500 to 7.000 times
# What follows: take losses of plain tensors, and reduce sums and counts yourself.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/losses.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

SIZE = 4


def value_and_gradient(loss, x, target):
    x = x.detach().requires_grad_()
    value = loss(x, target)
    value.backward()
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in (value.detach(), x.grad)]


def compare(name, loss, x, target, mesh):
    """How many times the plain tensors' value and gradient the DTensors' are: value, least, greatest."""
    sharded = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, target)]
    value, gradient = value_and_gradient(loss, *sharded)
    plain_value, plain_gradient = value_and_gradient(loss, x, target)
    factors = (gradient / plain_gradient)[plain_gradient != 0]
    times = [(value / plain_value).item(), factors.min().item(), factors.max().item()]
    if dist.get_rank() == 0:
        print(f"{name}: value {times[0]:.3f} times, gradient {times[1]:.3f} to {times[2]:.3f} times", flush=True)
    return [round(t, 2) for t in times]


def rank_main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    mesh = init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 8, 5, generator=generator)
    ids = torch.randint(5, (8,), generator=generator)
    ignored = ids.clone()
    ignored[0] = -100
    found = [
        compare("mse_loss, 8 rows", F.mse_loss, x, y, mesh),
        compare("huber_loss, 8 rows", F.huber_loss, x, y, mesh),
        compare("smooth_l1_loss, 8 rows", F.smooth_l1_loss, x, y, mesh),
        compare("l1_loss, 8 rows", F.l1_loss, x, y, mesh),
        compare("mean of squares, 8 rows", lambda x, y: (x - y).square().mean(), x, y, mesh),
        compare("cross_entropy, 8 rows", F.cross_entropy, x, ids, mesh),
        compare("cross_entropy, 8 rows, one ignored", F.cross_entropy, x, ignored, mesh),
        compare("mse_loss, 7 rows", F.mse_loss, x[:7], y[:7], mesh),
    ]
    dist.destroy_process_group()
    is_so = found[:3] == [[1, 4, 4]] * 3 and found[3:6] == [[1, 1, 1]] * 3
    is_so = is_so and found[6][0] != 1 and found[6][1:] == [1, 1] and found[7][1:] == [3.5, 7]
    raise SystemExit(not is_so)


if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1],), nprocs=SIZE)
PY
"$folder/venv/bin/python" -W ignore "$folder/losses.py" "$folder" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
