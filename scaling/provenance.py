"""Note where and by what code a slice of a study was run."""

import json
import time
from pathlib import Path

import torch

from runtime.log import environment
from runtime.machine import git, nvidia_smi
from runtime.rows import parse, read_bytes, write_atomically
from scaling.study import ROOT

SLICES = "slices.jsonl"
VERSIONS = ("python", "torch", "torchao", "triton", "cuda")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def read_lines(*folders: Path) -> list[bytes]:
    """The lines of all the folders' slices.jsonl, each once, by the time when the slice began; what is torn comes first."""
    lines = dict.fromkeys(line for folder in folders for line in read_bytes(folder / SLICES).splitlines() if line.strip())
    return sorted(lines, key=lambda line: "".join(str(row.get("start")) for row in slices([line])))


def slices(lines: list[bytes]) -> list[dict]:
    """The rows of read_lines that can be read."""
    return [row for row in parse(b"\n".join(lines)) if isinstance(row, dict)]


def write_row(results: Path, folder: Path, start: str, seconds: float, commit: str | None, **told) -> None:
    """One more line in results/slices.jsonl: when, for how long, which code on what machine, and what is `told` of the slice.

    The same file lies in the `folder` of the runs: where one of the two was put back to an older state, the other knows its
    rows. commit: of the code where git cannot tell it. dirty says whether git would commit more than `results`; null without
    git."""
    env = environment(torch.device("cpu"), ROOT)
    device, driver = nvidia_smi("name", "driver_version") or (None, None)
    others = [f":(exclude){results.resolve()}"] if results.resolve().is_relative_to(ROOT) else []
    status = git(ROOT, "status", "--porcelain", "--", ".", *others)
    row = {"start": start, "end": now(), "seconds": round(seconds, 1), "commit": env["git_commit"] or commit,
           "dirty": None if status is None else bool(status), "device": device or env["device"], "driver": driver,
           **{key: env[key] for key in VERSIONS}, **told}
    lines = [*read_lines(results, folder), json.dumps(row).encode()]
    for place in (results, folder):
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / SLICES, b"".join(line + b"\n" for line in lines))


def write_sources(folder: Path, data) -> None:
    """folder/data.json: the index of each source of a DataConfig, once; the data themselves go with their machine.

    None where an index is missing or damaged: sweep.py has the sentence for it."""
    if (folder / "data.json").exists():
        return
    try:
        content = {source: json.loads((Path(data.dir) / source / "index.json").read_bytes()) for source in sorted(data.mixture)}
    except (OSError, ValueError):
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "data.json", json.dumps(content, indent=1) + "\n")


def uncommitted(results: Path, names: list[str], commit: str | None) -> list[str]:
    """Those frozen predictions in `results` that are not there, or that git would commit.

    Where there is no git, the given `commit` is believed to hold them, but for that of the slice that froze one: it is older."""
    if git(results, "rev-parse") is None:
        froze = {row.get("commit") for row in slices(read_lines(results)) if row.get("predicted")}
        return [name for name in names if not commit or commit in froze or not (results / name).exists()]
    return [name for name in names if not (results / name).exists() or git(results, "status", "--porcelain", "--", name)]


def is_ignored(results: Path, names: list[str]) -> bool:
    """Whether git is there and leaves one of these files out, so that it shows nothing of its age."""
    return any(git(results, "ls-files", "--", name) == "" for name in names)
