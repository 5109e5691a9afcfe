"""What the file system and the machine are asked for: files that a kill leaves whole, git, devices,
memory.

Rows of metrics.jsonl, in the order in which things happened:

    {"kind": "train", "step", "loss", "verdict", ...}     a training step; "val": a validation after it
    {"kind": "undone", ...}, {"kind": "undone_val", ...}  the same, undone by a rollback
    {"kind": "event", "event": name, "step", ...}         anything else: a resume, a rollback, a failed save
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from runtime.cli import MachineError, UserError, memory_error

GIB = 2**30
ROOT = Path(__file__).resolve().parents[1]  # of the repository


def read_bytes(path: str | Path) -> bytes:
    """The content of a file; b"" where there is none."""
    with suppress(FileNotFoundError):
        return Path(path).read_bytes()
    return b""


def read_rows(path: str | Path, unwritten: bytes = b"") -> list:
    """The values of a file of JSON lines, [] where there is none, without damaged lines such as one
    that a kill cut short."""
    values = []
    for line in (read_bytes(path) + unwritten).splitlines():
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def metrics_rows(values: list) -> list[dict]:
    """Those values that are rows of a metrics.jsonl: objects with a kind and a step."""
    return [
        row
        for row in values
        if isinstance(row, dict) and type(row.get("step")) is int and "kind" in row
    ]


def to_line(row: dict) -> bytes:
    """A row as a line of strict JSON; NaN and infinities, which JSON lacks, become null."""
    strict = json.loads(json.dumps(row), parse_constant=lambda name: None)
    return (json.dumps(strict) + "\n").encode()


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, piece by piece, which replaces `path` once all of it is on disk; after an
    error nothing is left, and the error names the file, which that of a full disk does not."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            # a rename can outlive a power cut that the file's content does not
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno and not error.filename:  # one of words alone would lose them
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)  # it may have filled the disk
    sync_folder(path.parent)  # the caller may delete next what the file was made of


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value) -> str:
    """SHA-256 of `value` as JSON with sorted keys, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file: afterwards it holds all of `content` or, after a kill, power cut or error,
    what it held before."""
    with new_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: dict) -> None:
    """Write strict JSON atomically. Raises ValueError for a NaN in it, which would be a bug of
    ours."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextmanager
def alone(folder: Path, words: str | None = None) -> Iterator[None]:
    """Holds a lock on `folder`, after whoever has it, or raises UserError(words). Where there are
    no locks it goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if words else 0))
            except BlockingIOError as error:
                raise UserError(words) from error
        yield
    finally:
        os.close(descriptor)


def end_with_parent() -> None:
    """Ends this process of a multiprocessing pool as soon as its parent has ended, even by
    SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


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
    told = [None if "[" in value else value.strip() for value in asked.communicate()[0].split(",")]
    return told if asked.returncode == 0 else [None] * len(fields)


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
