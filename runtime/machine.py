"""Ask the machine: git, the device's name, why torch cannot use a GPU, whether an error means too little memory.

torch is imported by the functions that need it: scaling/ asks git on machines without it.
"""

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from runtime.cli import MachineError
from runtime.rows import read_bytes

GIB = 2**30


def git(folder: Path, *words: str) -> str | None:
    """What a git command prints in `folder`, without the last line's end; None without git or outside a repository."""
    try:        # a diff holds what the files do, which may be other than UTF-8, and may end in lines of white space
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, encoding="utf-8", errors="replace",
                              check=True, timeout=60).stdout.rstrip("\n")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device) -> str:
    """Of a torch.device: a GPU's name as its driver reports it, a CPU's model and torch's number of threads."""
    import torch
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(r"^model name\s*:\s*(.*\S)", read_bytes("/proc/cpuinfo").decode(errors="replace"), re.M)
    return f"cpu {model[1] if model else platform.machine()}, {torch.get_num_threads()} threads"


def nvidia_smi(*fields: str, work: Callable = lambda: time.sleep(0.05)) -> list[str | None]:
    """What nvidia-smi tells of the first visible GPU, None for what it does not; `work` is done again and again meanwhile."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    try:
        asked = subprocess.Popen(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", gpu],
                                 stdout=subprocess.PIPE, text=True)
    except OSError:
        return [None] * len(fields)
    while asked.poll() is None:
        work()
    told = [None if "[" in value else value.strip() for value in asked.communicate()[0].split(",")]     # [N/A]
    return told if asked.returncode == 0 else [None] * len(fields)


# ------------------------------------------------------------------------------------------------------ a usable device

def check_device() -> None:
    """Raises MachineError where there is an NVIDIA GPU that this torch cannot use: days on a CPU by mistake.

    A machine without a GPU, and one whose GPUs CUDA_VISIBLE_DEVICES="" hides, train on the CPU."""
    import torch
    visible, there = os.environ.get("CUDA_VISIBLE_DEVICES"), count_gpus()
    if torch.cuda.is_available() or visible in ("", "-1") or not there:
        return
    try:
        torch.cuda.init()
        reason = f"it counts no GPU, CUDA_VISIBLE_DEVICES={visible}"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
    raise MachineError(f"this machine shows {there} NVIDIA GPU(s), but torch {torch.__version__} for CUDA {torch.version.cuda} "
                       f"cannot use any ({reason}): install a build of torch that fits the driver "
                       f"(https://pytorch.org/get-started), correct CUDA_VISIBLE_DEVICES, or set it to '' to train on the CPU on "
                       f"purpose")


def count_gpus() -> int:
    """NVIDIA GPUs that the driver's folder lists, else those with a device file: torch counts none where it cannot use them."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")) or list(Path("/dev").glob("nvidia[0-9]*")))


# --------------------------------------------------------------------------------------------------------------- memory

# What torch, cuBLAS, NCCL, C++ and the kernel (ENOMEM) say when memory is short; the classes of the errors tell less.
OUT_OF_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator|can't allocate memory|Cannot allocate memory|std::bad_alloc|ALLOC_FAILED", re.I)


def memory_error(error: BaseException | None) -> BaseException | None:
    """The error that means too little memory on GPU or CPU, among `error` and those it was raised from; else None.

    Compiler and checkpoints wrap what they meet in errors of their own."""
    for _ in range(20):     # causes may form a circle
        if error is None or isinstance(error, MemoryError) or (
                isinstance(error, RuntimeError | OSError) and OUT_OF_MEMORY.search(str(error))):
            return error
        error = error.__cause__ or error.__context__
    return None


def out_of_memory(error: BaseException, config, world) -> str | None:
    """The sentence for an error that means too little memory: where, what torch says, what helps; None for any other error.

    config: the run's Config. world: its rank, size and device."""
    import torch
    found, where = memory_error(error), str(world.device)
    if found is None:
        return None
    if world.device.type == "cuda":
        where += f", {torch.cuda.max_memory_allocated(world.device) / GIB:.2f} GiB of tensors at the peak"
    said = str(found).partition("\n")[0].partition(" If reserved")[0].rstrip(". ") or type(found).__name__
    d, m, remedies = config.data, config.model, []
    # settings that need less memory and change the run's numbers by rounding alone, the cheapest first
    smaller = [n for n in range(1, d.micro_batch // 2 + 1) if d.tokens_per_step % (n * m.n_ctx * world.size) == 0
               and (config.fp8.recipe == "off" or n * m.n_ctx % 32 == 0)]      # FP8 multiplies by tiles of 16 or 32 tokens
    if smaller:
        remedies.append(f"data.micro_batch={smaller[-1]} (now {d.micro_batch}; a step keeps its tokens)")
    if not config.parallel.recompute:
        remedies.append("parallel.recompute=true (about a third more computing)")
    if (m.loss_chunk or d.micro_batch * m.n_ctx) > 1024:
        remedies.append(f"model.loss_chunk=1024 (now {m.loss_chunk or 'none'}; logits of so many tokens at a time)")
    remedies.append(f"more GPUs (now {world.size}): torchrun --nproc_per_node, the weights and moments are shared among them")
    return f"out of memory on rank {world.rank} ({where}): {said}; what was saved stays. Try {'; or '.join(remedies)}"
