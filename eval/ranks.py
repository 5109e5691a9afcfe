"""Share a scoring between the processes that torchrun started."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.cli import UserError
from runtime.parallel import own_keys

PATIENCE = timedelta(hours=24)      # the ranks meet when each has done its part, which may take that long


class Ranks:
    """One process among `size`; alone it gathers nothing."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0):
        self.rank, self.size, self.local_rank = rank, size, local_rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device that this process takes where the user named `name`: each rank its own GPU."""
        if self.size == 1 or name not in ("auto", "cuda") or not torch.cuda.is_available():
            return name
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"

    def gather(self, value) -> list:
        """Every rank's `value`, in the order of ranks, on all. Raises OSError where a rank is gone."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise OSError(f"a process that shared the work is gone ({str(error).splitlines()[0]})") from error
        return values

    def together(self, work: Callable):
        """work()'s result; where it fails on any rank, all raise the same: a UserError for a mistake of the user's, else an
        OSError, which names the rank and says what it met."""
        if self.size == 1:
            return work()
        result = error = None
        try:
            result = work()
        except Exception as met:    # whatever it is, the others must not wait for this rank for ever
            error = met
        told = self.gather(error and (isinstance(error, UserError), str(error) or type(error).__name__))
        for rank, other in enumerate(told):
            if other:
                is_mistake, sentence = other
                alone = "" if all(told) else f"rank {rank}: "
                raise (UserError if is_mistake else OSError)(alone + sentence) from error
        return result


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Join what torchrun started, if it did. Raises UserError where there are fewer GPUs than ranks."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if size == 1:
        yield Ranks()
        return
    n_gpu, n_local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if 0 < n_gpu < n_local:
        raise UserError(f"torchrun started {n_local} processes on this machine, which has {n_gpu} GPUs: start no more than "
                          f"GPUs, --nproc_per_node={n_gpu}")
    store = own_keys(next(dist.rendezvous("env://"))[0])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)   # objects travel, not tensors
    yield Ranks(rank, size, int(os.environ.get("LOCAL_RANK", 0)))
    dist.barrier()      # none leaves while another still listens


def is_first() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> None:
    """End the process. Among several the interpreter's own exit is skipped: a gloo job may abort there, all work done."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
