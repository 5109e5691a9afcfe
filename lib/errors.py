"""Two kinds of errors that a command tells in a sentence, and what counts as out of memory."""

import re


class UserError(ValueError):
    """The user's mistake, told in one sentence: what, where, what was expected, what to do.
    Commands exit with code 2."""


class MachineError(Exception):
    """The machine, or the run itself, cannot go on; the message says what and how to help it.
    Commands exit with code 1."""


# What torch, cuBLAS, NCCL, C++ and the kernel (ENOMEM) say when memory is short; the classes of the
# errors tell less.
OUT_OF_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator|can't allocate memory|Cannot allocate"
    r" memory|std::bad_alloc|ALLOC_FAILED",
    re.I,
)


def memory_error(error: BaseException | None) -> BaseException | None:
    """The error that means too little memory on GPU or CPU, among `error` and those it was raised
    from; else None."""
    for _ in range(20):  # compiler and checkpoints wrap what they meet, causes may form a circle
        if (
            error is None
            or isinstance(error, MemoryError)
            or (isinstance(error, RuntimeError | OSError) and OUT_OF_MEMORY.search(str(error)))
        ):
            return error
        error = error.__cause__ or error.__context__
    return None
