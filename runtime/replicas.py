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
    of_ranks = all_concatenate(checksums(weights.values()), world).cpu()  # (ranks, tensors)
    layout = world.mesh.mesh.cpu()  # (replicas, shards) of ranks
    sums = of_ranks[layout]  # (replicas, shards, tensors)
    is_unequal = (sums != sums[:1]).any(0).any(0)  # (tensors,)
    if not is_unequal.any():
        return
    if not _are_finite_everywhere(weights.values(), world):
        return  # all ranks will see a loss that is not finite, and the guard goes back
    name = list(weights)[int(is_unequal.nonzero()[0])]
    raise MachineError(
        f"after step {step} {_describe_unequal(sums, layout)}, to begin with {name}, though all are"
        " updated alike: one of their GPUs computes wrongly, or they are of different kinds; test"
        " them, leave that machine out, or let different kinds drift apart"
        " (parallel.check_replicas=false), and run the same command again: it goes on from the"
        " checkpoint before"
    )


def _describe_unequal(sums: torch.Tensor, layout: torch.Tensor) -> str:
    """Which ranks of `layout`, (replicas, shards), have another row of `sums`, (replicas, shards,
    tensors), than most replicas of their shard; where no majority agrees, all of that shard."""
    outvoted: list[int] = []
    undecided: list[int] = []
    n_replicas, n_shards = layout.shape
    for shard in range(n_shards):
        _, kinds, counts = sums[:, shard].unique(dim=0, return_inverse=True, return_counts=True)
        ranks = layout[:, shard]
        if 2 * int(counts.max()) > n_replicas:
            outvoted += ranks[kinds != counts.argmax()].tolist()
        else:
            undecided += ranks.tolist()
    phrases = []
    if outvoted:
        phrases.append(f"the weights of {_ranks(outvoted)} are no longer those of most replicas")
    if undecided:
        phrases.append(f"the weights of {_ranks(undecided)} are no longer equal")
    return " and ".join(phrases)


def _ranks(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _are_finite_everywhere(tensors: Iterable[Any], world: World) -> bool:
    """Whether all values on all ranks are; one exchange."""
    # a norm that overflows is as good as one: weights of 1e19 are no weights
    norms = torch.stack([torch.linalg.vector_norm(_local(tensor)) for tensor in tensors])
    return bool(all_concatenate(norms.isfinite(), world).all())


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def checksums(tensors: Iterable[Any]) -> torch.Tensor:
    """The sum of the bits of each fp32 tensor as whole numbers modulo 2^32, (tensors,) int32: it is
    exact, so the order of the sum does not matter, and one bit changes it. Of a sharded tensor,
    this rank's part."""
    sums = []
    for tensor in tensors:
        bits = _local(tensor).contiguous().view(torch.int32)
        # Without a dtype, torch sums whole numbers as int64, to which it casts the tensor first: a
        # copy of twice its size.
        sums.append(bits.sum(dtype=torch.int32))
    return torch.stack(sums)
