"""Join each sharded matrix at one rank, its owner, and hand what the owner makes of it back: two
collectives, whatever the number of matrices. Muon's (runtime/optim.py).

A replica is n ranks that hold a whole model together, rank i of it the i-th part of each matrix's
rows, as FSDP2 cuts; several replicas hold the same. Owners may lie in any replica. An owner hears
the ranks of its own replica alone, and answers all ranks of all replicas."""

import math
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


class ShardExchange:
    """For the matrices (rows, columns) that each rank owns, in the order of ranks."""

    def __init__(self, owned: list[list[DTensor]]):
        self.matrices = list(chain.from_iterable(owned))
        self.owned = owned
        self.rank = dist.get_rank()
        self.n_ranks = dist.get_world_size()
        self.replica_size = self.matrices[0].device_mesh.size(-1)
        first = self.rank // self.replica_size * self.replica_size
        self.replica = range(first, first + self.replica_size)  # the ranks of this rank's replica
        # values of one rank's shards that each owner needs
        self.counts = [sum(map(self._size, matrices)) for matrices in owned]

    def _height(self, matrix: DTensor) -> int:
        """Rows of a shard, padded to those of the highest."""
        return math.ceil(matrix.shape[0] / self.replica_size)

    def _size(self, matrix: DTensor) -> int:
        """Values of a padded shard."""
        return self._height(matrix) * matrix.shape[1]

    def flatten(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """This rank's shards (rows of its part, columns), in the order of `matrices`, as one padded
        vector."""
        padded = []
        for shard, matrix in zip(shards, self.matrices, strict=True):
            padded.append(_pad(shard, self._height(matrix)).flatten())
        return torch.cat(padded)

    def unflatten(self, flat: torch.Tensor, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views of flatten()'s vector, of the shapes of `shards`."""
        parts = flat.split([self._size(matrix) for matrix in self.matrices])
        return [
            part[: shard.numel()].view_as(shard) for part, shard in zip(parts, shards, strict=True)
        ]

    def gather(self, flat: torch.Tensor) -> torch.Tensor:
        """What the ranks of the replica hold of this rank's own matrices: (replica_size, values of
        a rank's padded shards)."""
        own_count = self.counts[self.rank]
        gathered = flat.new_empty(self.replica_size, own_count)
        start = sum(self.counts[: self.replica[0]])
        stop = sum(self.counts[: self.replica[-1] + 1])
        received = [own_count if rank in self.replica else 0 for rank in range(self.n_ranks)]
        sent = [count if rank in self.replica else 0 for rank, count in enumerate(self.counts)]
        dist.all_to_all_single(gathered.view(-1), flat[start:stop], received, sent)
        return gathered

    def own_shards(self, gathered: torch.Tensor) -> Iterator[tuple[DTensor, torch.Tensor]]:
        """Each matrix of this rank, with its shards (replica_size, values of a padded shard), views
        of gather()'s result."""
        own_matrices = self.owned[self.rank]
        sizes = [self._size(matrix) for matrix in own_matrices]
        return zip(own_matrices, gathered.split(sizes, dim=1), strict=True)

    def join(self, shards: torch.Tensor, matrix: DTensor) -> torch.Tensor:
        """The whole matrix (rows, columns) of its padded shards."""
        return shards.reshape(-1, matrix.shape[1])[: matrix.shape[0]]

    def cut(self, whole: torch.Tensor, shards: torch.Tensor) -> None:
        """Write a whole matrix (rows, columns) into its padded shards, the inverse of join()."""
        rows = shards.numel() // whole.shape[1]
        shards.copy_(_pad(whole, rows).view(self.replica_size, -1))

    def scatter(self, gathered: torch.Tensor, flat: torch.Tensor) -> None:
        """Hand each rank of every replica its shards of this rank's matrices, and fill `flat` by
        what the other owners hand over."""
        answers = gathered.repeat(self.n_ranks // self.replica_size, 1).view(-1)
        sent = [self.counts[self.rank]] * self.n_ranks
        dist.all_to_all_single(flat, answers, self.counts, sent)


def _pad(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """With zeros below, to so many rows."""
    return F.pad(matrix, (0, 0, 0, rows - len(matrix)))
