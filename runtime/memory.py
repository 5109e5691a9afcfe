"""What a run that has no memory left says."""

from lib.errors import memory_error


def out_of_memory(error: BaseException, config, world) -> str | None:
    """The sentence for an error that means too little memory in the run of `config` on the ranks of
    `world`, else None."""
    if (found := memory_error(error)) is None:
        return None
    said = (
        str(found).partition("\n")[0].partition(" If reserved")[0].rstrip(". ")
        or type(found).__name__
    )
    return (
        f"out of memory on rank {world.rank} ({world.device}): {said}; what was saved stays. Try a"
        f" smaller data.micro_batch (now {config.data.micro_batch}), parallel.recompute=true,"
        f" model.loss_chunk=1024 or more GPUs (now {world.size})"
    )
