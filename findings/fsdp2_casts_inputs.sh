#!/usr/bin/env bash
# FSDP2 with BF16 parameters rounds positions that a block is given as fp32: 2,047 becomes 2,048.
#
# Versions: torch 2.13.0, CPU build, gloo.
# MixedPrecisionPolicy(param_dtype=torch.bfloat16) casts each floating-point argument of a wrapped module's forward, not
# only the activations (cast_forward_inputs=True, the default). Positions, times of a diffusion and angles of RoPE that
# the model hands to its blocks arrive with 8 bits. A buffer of the block stays fp32, so the same numbers are exact
# where the block owns them. Integers and complex numbers are not cast.
#
# What is run: a block that is wrapped by fully_shard on one rank, given positions 0 to 2,047 as fp32.
#
# Output seen:
#   not wrapped                     torch.float32, 2048 different positions of 2048, the last is 2047
#   fully_shard, BF16 parameters    torch.bfloat16, 641 different positions of 2048, the last is 2048
#   cast_forward_inputs=False       torch.float32, 2048 different positions of 2048, the last is 2047
#
# Remedy: cast_forward_inputs=False and casts of one's own, or tables as buffers of the block.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
cat > inputs.py <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.positions = positions
        return self.linear(x.to(self.linear.weight.dtype))


def seen(name: str, policy: MixedPrecisionPolicy | None) -> int:
    """How many different positions the block sees."""
    block = Block()
    if policy:
        fully_shard(block, mp_policy=policy)
    block(torch.randn(1, 2048, 4), torch.arange(2048, dtype=torch.float32))
    n = block.positions.unique().numel()
    last = block.positions[-1].item()
    print(f"{name:31} {block.positions.dtype}, {n} different positions of 2048, the last is {last:.0f}")
    return n


dist.init_process_group("gloo")
counts = [
    seen("not wrapped", None),
    seen("fully_shard, BF16 parameters", MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    seen(
        "cast_forward_inputs=False",
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    ),
]
dist.destroy_process_group()
sys.exit(0 if counts[0] == counts[2] == 2048 and counts[1] < 1000 else 1)
PY
OMP_NUM_THREADS=1 "$work/venv/bin/torchrun" --standalone --nproc_per_node=1 inputs.py 2> log ||
    { code=$?; tail -n 5 log; exit "$code"; }
