"""What the machine is asked for: the repository's root, git, devices, parent processes."""

import ctypes
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lib.errors import MachineError
from lib.files import read_bytes

GIB = 2**30
PR_SET_PDEATHSIG = 1  # of prctl(), linux/prctl.h


ROOT = Path(__file__).resolve().parents[1]  # of the repository


def end_with_parent() -> None:
    """Ends this process of a multiprocessing pool as soon as its parent has ended, even by
    SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def killed_with_parent() -> Callable[[], object]:
    """For Popen(preexec_fn=): the process that is started ends with the one that starts it, however
    that ends. A session of its own does not end with the session that started it."""
    prctl = ctypes.CDLL(None).prctl  # found here: a child of many threads must not load anything
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# Parameters of glibc's mallopt() (malloc.h), and their values.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MALLOC_SETTINGS = (
    (M_TRIM_THRESHOLD, GIB),  # free memory at the heap's end that is given back
    (M_TOP_PAD, 64 * 2**20),  # by which the heap grows at least
    (M_MMAP_THRESHOLD, 32 * 2**20),  # the largest that it accepts
)


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, instead of giving it back to the system and
    touching its pages anew in the next step; without glibc nothing happens.

    It saves a CPU's steps their page faults: 8,500 of mxfp8's and 2,000 of BF16's at 2.7M
    parameters and 1,024 tokens, 5 and 2 % of their CPU time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in MALLOC_SETTINGS:
        mallopt(parameter, value)


def git(folder: Path, *words: str) -> str | None:
    """What a git command prints in `folder`, without the last line's end; None without git or
    outside a repository."""
    # a diff holds what the files do, which may be other than UTF-8, and may end in lines of white
    # space
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=60,
        ).stdout.rstrip("\n")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device) -> str:
    """Of a torch.device: a GPU's name as its driver reports it, a CPU's model and torch's number of
    threads."""
    import torch  # not above: scaling/ reads rows and asks git on machines without it

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(
        r"^model name\s*:\s*(.*\S)", read_bytes("/proc/cpuinfo").decode(errors="replace"), re.M
    )
    return f"cpu {model[1] if model else platform.machine()}, {torch.get_num_threads()} threads"


def nvidia_smi(*fields: str, work: Callable = lambda: time.sleep(0.05)) -> list[str | None]:
    """What nvidia-smi tells of the first visible GPU, None for what it does not; `work` is done
    again and again meanwhile."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    try:
        asked = subprocess.Popen(
            [
                "nvidia-smi",
                f"--query-gpu={','.join(fields)}",
                "--format=csv,noheader,nounits",
                "-i",
                gpu,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
    except OSError:
        return [None] * len(fields)
    while asked.poll() is None:
        work()
    # [N/A]
    answer, _ = asked.communicate()
    if asked.returncode != 0:
        return [None] * len(fields)
    return [None if "[" in value else value.strip() for value in answer.split(",")]


def check_device() -> None:
    """Raises MachineError where torch cannot use an NVIDIA GPU that CUDA_VISIBLE_DEVICES="" does
    not hide: days on a CPU."""
    import torch

    if (
        torch.cuda.is_available()
        or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        or not count_gpus()
    ):
        return
    raise MachineError(
        f"this machine shows {count_gpus()} NVIDIA GPU(s), torch {torch.__version__} can use none:"
        " install a build that fits the driver, correct CUDA_VISIBLE_DEVICES, or set it to '' for"
        " the CPU"
    )


def count_gpus() -> int:
    """NVIDIA GPUs that the driver's folder lists, else those with a device file: torch counts none
    where it cannot use them."""
    return len(
        list(Path("/proc/driver/nvidia/gpus").glob("*")) or list(Path("/dev").glob("nvidia[0-9]*"))
    )
