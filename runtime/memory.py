"""What a run that has no memory left says."""

from lib.errors import memory_error
from runtime.config import Config
from runtime.parallel import World


def out_of_memory(error: BaseException, config: Config, world: World) -> str | None:
    """The sentence for an error that means too little memory in the run of `config` on the ranks of
    `world`, else None."""
    cause = memory_error(error)
    if cause is None:
        return None
    first_line = str(cause).partition("\n")[0]
    problem = first_line.partition(" If reserved")[0].rstrip(". ") or type(cause).__name__
    return (
        f"out of memory on rank {world.rank} ({world.device}): {problem}; what was saved stays. Try"
        f" a smaller data.micro_batch (now {config.data.micro_batch}), parallel.recompute=true,"
        f" model.loss_chunk=1024 or more GPUs (now {world.size})"
    )
