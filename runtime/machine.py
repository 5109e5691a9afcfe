"""Say in a sentence what the machine lacks: a GPU that torch can use, or memory."""

import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.cli import MachineError
from runtime.config import Config

GIB = 2**30
# What torch, cuBLAS, NCCL, C++ say when memory is short; the classes of the errors tell less.
OUT_OF_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator|can't allocate memory|Cannot allocate memory|std::bad_alloc|ALLOC_FAILED", re.I)
ASKED_FOR = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTP]iB)", re.I)


# --------------------------------------------------------------------------------------------------------------- device

def check_device() -> None:
    """Raises MachineError where a GPU was meant to train, yet this torch cannot use it: days on a CPU by mistake.

    A machine without a GPU, and one whose GPUs are hidden by CUDA_VISIBLE_DEVICES="", train on the CPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return
    on_purpose = "or set CUDA_VISIBLE_DEVICES='' to train on the CPU on purpose"
    there = _gpus_there()
    if torch.version.cuda is None:      # ROCm's torch counts its own GPUs; NVIDIA's are not its concern
        if there and getattr(torch.version, "hip", None) is None:
            raise MachineError(f"this machine has {_gpus(there)}, but torch {torch.__version__} was built for the CPU alone: "
                               f"install torch's CUDA build (https://pytorch.org/get-started), {on_purpose}")
        return
    if torch.cuda.is_available():
        _check_architecture()
        return
    if not there and visible is None:
        return
    try:
        torch.cuda.init()
        reason = "it counts no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(". ") if str(error).strip() else type(error).__name__
    if "driver" in reason.lower():
        advice = f"update the NVIDIA driver, or install a torch that was built for it (this one wants CUDA {torch.version.cuda})"
    elif visible is not None:
        advice = f"correct CUDA_VISIBLE_DEVICES={visible!r}, which must name GPUs of this machine"
    else:
        advice = "see whether `nvidia-smi` finds the GPU, and restart the machine or leave it out if it does not"
    raise MachineError(f"this machine shows {_gpus(there)}, but torch {torch.__version__} cannot use any ({reason}): {advice}, "
                       f"{on_purpose}")


def _gpus_there() -> int:
    """NVIDIA GPUs that the driver, or only the bus, knows of; 0 where neither is told."""
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return len(list(driver.iterdir()))
    return len([p for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)])


def _gpus(n: int) -> str:
    return "no NVIDIA GPU" if n == 0 else "an NVIDIA GPU" if n == 1 else f"{n} NVIDIA GPUs"


def _check_architecture() -> None:
    """Without kernels for a GPU the first one that is started dies of "no kernel image is available"."""
    named = torch.cuda.get_arch_list()
    built = [match.groups() for match in (re.fullmatch(r"(sm|compute)_(\d+)[af]?", name) for name in named) if match]
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        # Machine code runs within its major version from its minor on; compute_ is compiled for any later GPU at start.
        fitting = (divmod(int(n), 10) <= (major, minor) and (kind == "compute" or int(n) // 10 == major) for kind, n in built)
        if built and not any(fitting):
            raise MachineError(f"torch {torch.__version__} has no kernels for GPU {i}, {torch.cuda.get_device_name(i)} "
                               f"(sm_{major}{minor}); it was built for {', '.join(named)}: install a torch "
                               f"that supports it, or leave it out with CUDA_VISIBLE_DEVICES")


# --------------------------------------------------------------------------------------------------------------- memory

def out_of_memory(error: BaseException, config: Config, world) -> str | None:
    """The sentence for an error that means too little memory, on the GPU or the CPU; None for any other error.

    `world` tells rank, size and device; None before there is one. Peak and total in GiB where the device knows them.
    """
    found = next((e for e in _chain(error) if _is_out_of_memory(e)), None)
    if found is None:
        return None
    rank, device = (world.rank, world.device) if world is not None else (0, torch.device("cpu"))
    where = f"out of memory on rank {rank} ({_device_name(device)}): {_peak(device)}"
    if asked := _asked_for(found):
        where += f", {asked} more were asked for"
    return f"{where}; what was saved stays. Try {'; or '.join(_remedies(config, world.size if world is not None else 1))}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those it was raised from: the compiler and the checkpoints wrap what happened in errors of theirs."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):      # fork, mmap and threads ask the kernel directly
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def _asked_for(error: BaseException) -> str | None:
    match = ASKED_FOR.search(str(error))
    if match is None:
        return None
    size = float(match[1].rstrip(".")) * 2 ** (10 * ("bKMGTP".index(match[2][0])))
    return f"{size / GIB:.2f} GiB"


def _device_name(device: torch.device) -> str:
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _peak(device: torch.device) -> str:
    if device.type == "cuda":
        return (f"{torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB of tensors at the peak, "
                f"{torch.cuda.max_memory_reserved(device) / GIB:.2f} with the allocator's reserve, of "
                f"{torch.cuda.get_device_properties(device).total_memory / GIB:.2f} GiB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB      # Linux counts in KiB
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    within = f", limited to {limit / GIB:.2f} GiB of addresses" if limit != resource.RLIM_INFINITY else ""
    return f"{peak:.2f} GiB at the peak of {total:.2f} GiB in this machine{within}"


def _remedies(config: Config, size: int) -> Iterator[str]:
    """Settings that need less memory and leave the run's numbers alone to rounding, the cheapest first."""
    d, m, p = config.data, config.model, config.parallel
    smaller = [n for n in range(1, d.micro_batch // 2 + 1) if d.tokens_per_step % (n * m.n_ctx * size) == 0
               and (config.fp8.recipe == "off" or n * m.n_ctx % 32 == 0)]      # FP8 multiplies by tiles of 16 or 32 tokens
    if smaller:
        yield f"data.micro_batch={smaller[-1]} (now {d.micro_batch}; a step keeps its tokens)"
    tokens = d.micro_batch * m.n_ctx
    if not p.recompute:
        yield "parallel.recompute=true (about a third more computing)"
    if (m.loss_chunk or tokens) > 1024:
        yield f"model.loss_chunk=1024 (now {m.loss_chunk or 'none'}; logits of so many tokens at a time)"
    if p.replicate > 1:
        yield f"parallel.replicate=1 (now {p.replicate}; the weights are shared by all ranks)"
    elif not p.reshard and size > 1:
        yield "parallel.reshard=true (gathered weights are dropped after a block's forward pass)"
    yield f"more GPUs (now {size}): torchrun --nproc_per_node, the weights and moments are shared among them"
