"""Note where and by what code a slice of a study was run."""

import json
import subprocess
import time
from pathlib import Path

import torch

from runtime.metrics import environment
from runtime.rows import read_bytes, write_atomically
from scaling.study import ROOT

VERSIONS = ("python", "torch", "torchao", "triton", "cuda")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_row(results: Path, start: str, seconds: float, commit: str | None, runs: list[str], code: int) -> None:
    """One more line in results/slices.jsonl: when, for how long, which code on what machine, which runs ended, exit code.

    commit: of the code where git cannot tell it. dirty says whether git would commit more than `results`; null without git."""
    env = environment(torch.device("cpu"), ROOT)
    device, driver = _gpu()
    others = [f":(exclude){results.resolve()}"] if results.resolve().is_relative_to(ROOT) else []
    status = git(ROOT, "status", "--porcelain", "--", ".", *others)
    row = {"start": start, "end": now(), "seconds": round(seconds, 1), "commit": commit or env["git_commit"],
           "dirty": None if status is None else bool(status), "device": device or env["device"], "driver": driver,
           **{key: env[key] for key in VERSIONS}, "runs": runs, "exit": code}
    results.mkdir(parents=True, exist_ok=True)
    before = read_bytes(results / "slices.jsonl")
    torn = before and not before.endswith(b"\n")
    write_atomically(results / "slices.jsonl", before + b"\n" * bool(torn) + json.dumps(row).encode() + b"\n")


def write_sources(folder: Path, data) -> None:
    """folder/data.json: the index of each source of a DataConfig, once; the data themselves go with their machine."""
    indexes = {source: Path(data.dir) / source / "index.json" for source in sorted(data.mixture)}
    if not (folder / "data.json").exists() and all(index.is_file() for index in indexes.values()):
        folder.mkdir(parents=True, exist_ok=True)
        content = {source: json.loads(index.read_text()) for source, index in indexes.items()}
        write_atomically(folder / "data.json", json.dumps(content, indent=1) + "\n")


def uncommitted(folder: Path, names: list[str]) -> list[str]:
    """Those files of `folder` that are not there, or that git would commit; where git cannot tell, none of those there."""
    return [name for name in names if not (folder / name).exists() or git(folder, "status", "--porcelain", "--", name)]


def git(folder: Path, *words: str) -> str | None:
    """What git prints; None without git or outside a repository."""
    try:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu() -> tuple[str | None, str | None]:
    """Name and driver of the first GPU, by its own tool: torch would take memory for asking."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True, timeout=60)
        name, driver = done.stdout.splitlines()[0].rsplit(", ", 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None, None
    return name, driver
