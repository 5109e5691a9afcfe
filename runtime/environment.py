"""What a process runs on and from: env.json of a run, and the head of a benchmark's rows."""

import os
import platform
import re
import shlex
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

import torch

from lib.machine import device_name, git

# Environment variables that env.json holds: those of these prefixes whose name does not suggest a
# secret.
PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "PYTORCH_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_RESTART_COUNT",
    "PYTHONHASHSEED",
    "WANDB_MODE",
)
SECRET = re.compile("key|token|secret|pass|auth|cred", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """env.json of a run; null stands for what cannot be told."""

    command: str  # the command line, the same wherever the repository lies
    t_start: str  # UTC, ISO 8601: in a run's env.json of its first start
    git_commit: str | None  # of the repository
    git_dirty: bool  # whether there were uncommitted changes
    git_diff: str | None  # these changes
    python: str  # its version
    platform: str  # operating system and its version
    device: str  # name of the GPU, or of the CPU with its threads
    cuda: str | None  # version that torch was built for
    cudnn: int | None  # version that torch has loaded
    torch: str  # its version
    torchao: str | None  # its version
    numpy: str | None  # its version
    triton: str | None  # its version
    variables: dict[str, str]  # environment variables of PREFIXES but SECRET
    config_files: list[str] = field(default_factory=list)  # that the config was made from


def environment(device: torch.device, root: Path) -> Environment:
    """What this process runs on; `root` is the repository."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and not SECRET.search(name)
    }
    return Environment(
        command=shlex.join(sys.argv).replace(f"{root}/", ""),
        t_start=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        git_commit=git(root, "rev-parse", "HEAD"),
        git_dirty=bool(git(root, "status", "--porcelain")),
        git_diff=git(root, "diff", "HEAD"),
        python=platform.python_version(),
        platform=platform.platform(),
        device=device_name(device),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        torch=torch.__version__,
        torchao=_version("torchao"),
        numpy=_version("numpy"),
        triton=_version("triton"),
        variables=variables,
    )


def _version(package: str) -> str | None:
    return next((installed.version for installed in distributions(name=package)), None)
