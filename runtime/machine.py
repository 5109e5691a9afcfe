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

from runtime.cli import MachineError, memory_error
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


def check_device() -> None:
    """Raises MachineError where there is an NVIDIA GPU that this torch cannot use: days on a CPU by mistake.

    A machine without a GPU, and one whose GPUs CUDA_VISIBLE_DEVICES="" hides, train on the CPU."""
    import torch
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not count_gpus():
        return
    raise MachineError(f"this machine shows {count_gpus()} NVIDIA GPU(s), but torch {torch.__version__} for CUDA "
                       f"{torch.version.cuda} cannot use any: install a build of torch that fits the driver "
                       f"(https://pytorch.org/get-started), correct CUDA_VISIBLE_DEVICES, or set it to '' for the CPU")


def count_gpus() -> int:
    """NVIDIA GPUs that the driver's folder lists, else those with a device file: torch counts none where it cannot use them."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")) or list(Path("/dev").glob("nvidia[0-9]*")))


def out_of_memory(error: BaseException, config, world) -> str | None:
    """The sentence for an error that means too little memory in the run of `config` on the ranks of `world`, else None."""
    import torch
    if (found := memory_error(error)) is None:
        return None
    peak = ""
    if world.device.type == "cuda":
        peak = f", {torch.cuda.max_memory_allocated(world.device) / GIB:.2f} GiB of tensors at the peak"
    said = str(found).partition("\n")[0].partition(" If reserved")[0].rstrip(". ") or type(found).__name__
    return (f"out of memory on rank {world.rank} ({world.device}{peak}): {said}; what was saved stays. Try a smaller "
            f"data.micro_batch (now {config.data.micro_batch}; a step keeps its tokens), parallel.recompute=true (about a third "
            f"more computing), model.loss_chunk=1024 (logits of so many tokens at a time) or more GPUs (now {world.size})")
