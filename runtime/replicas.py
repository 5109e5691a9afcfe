"""Whether replicas still hold equal weights: they begin with the same ones and get the same update,
so that another bit on one of them is a fault of its machine."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lib.errors import MachineError
from lib.sharding import is_dtensor
from runtime.parallel import World, all_concatenate


def check_replicas(weights: Mapping[str, torch.Tensor], world: World, step: int) -> None:
    """Raise MachineError, on every rank, where replicas hold other bits in `weights`, name -> an
    fp32 tensor, sharded or not. A read of the weights and one exchange; waits for the device, so
    not for every step."""
    if world.mesh is None or world.mesh["replicate"].size() == 1:
        return
    of_ranks = all_concatenate(checksums(weights.values()), world)  # (ranks, tensors)
    layout = world.mesh.mesh.to(of_ranks.device)  # (replicas, shards) of ranks
    is_other = of_ranks[layout] != of_ranks[layout[:1]]  # (replicas, shards, tensors)
    is_other_rank = is_other.any(-1)
    if not is_other_rank.any():
        return
    ranks = sorted(layout[is_other_rank].tolist())
    first_tensor = int(is_other.any(0).any(0).nonzero()[0])
    name = list(weights)[first_tensor]
    raise MachineError(
        f"after step {step} the weights of rank {', '.join(map(str, ranks))} are no longer those of"
        f" the first replica, to begin with {name}, though all are updated alike: one of their GPUs"
        " computes wrongly, or they are of different kinds; test them, or leave that machine out,"
        " and run the same command again: it goes on from the checkpoint before"
    )


def checksums(tensors: Iterable[Any]) -> torch.Tensor:
    """The sum of the bits of each fp32 tensor as whole numbers, (tensors,) int64: exact, so that
    its order does not matter. Of a sharded tensor, this rank's part."""
    sums = []
    for tensor in tensors:
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        sums.append(local.contiguous().view(torch.int32).sum(dtype=torch.int64))
    return torch.stack(sums)
