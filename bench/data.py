"""Measure how fast text becomes shards, and how fast training reads them.

    python bench/data.py                                        200 MB of text, 1 and 2 processes
    python bench/data.py mb=1000 processes=1,8,16 out=out/data_speed.json
    python bench/data.py mb=3 processes=1 repeats=1 scale=2e7      a rehearsal

The text is what this Python installation contains, repeated until there is enough of it, each copy of a document with
a line of its own, so that none counts as a duplicate; half in parquet, half in jsonl.gz. Taken in turns, so that what
drifts cancels in the ratios:

    raw         tiktoken.encode_to_numpy on documents in memory, one process
    at once     the same in n processes at the same time: what the machine itself allows
    prepare     `prepare_data.py local` as a user starts it: reading, tokenising, hashing, dropping copies, writing, syncing;
                gross of all, net without its start (the slope between a tenth of the text and all of it); and in seconds of
                all cores, which other users of the machine hardly change

Then, each alone: the loader from warm page cache on one core; the order of a run and the dropping of copies at full `scale`,
on files without content; the writing of shards; and the plan for `scale` tokens on `cores` cores that follows. Linux only:
memory and CPU time come from /proc.
"""

import gzip
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, zip_longest
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from bench import data_plan, data_scale
from bench.raw import Raw
from bench.turns import ratios
from prepare import harvest
from runtime.cli import UserError, read_options
from runtime.machine import device_name
from runtime.rows import write_atomically
from runtime.shards import read_index

ROOT = Path(__file__).resolve().parents[1]
FILES = 8                       # of the text, half of them parquet
FEW = 200                       # documents at least of a short run: enough that some fall to the val split
RAW_MB = 50                     # of it that a raw turn encodes: the same mix, in shorter turns
WRITE_TOKENS = 240_000_000      # of random shards


@dataclass(frozen=True, kw_only=True)
class Options:
    POSITIONAL: ClassVar[tuple[str, ...]] = ()
    mb: float = 200                     # megabytes of text
    processes: tuple[int, ...] = (1, 2)
    repeats: int = 3                    # turns of each
    scale: float = 31e9                 # tokens of the plan
    cores: int = 16                     # of the plan
    folder: str = "out/bench_data"      # on the disk to be measured; must not exist yet
    out: str | None = None              # JSON of all numbers


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done, 1 the machine failed us, 2 the user's mistake."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = read_options(Options, arguments)
        if not (options.mb >= 3 and min(options.processes, default=0) >= 1 and options.repeats >= 1 and options.scale >= 2e7
                and options.cores >= 1):
            raise UserError("mb must be 3 or more, scale 2e7, processes, repeats and cores 1")
        if not Path("/proc/self/stat").exists():
            raise UserError("bench/data.py reads memory and CPU time from /proc: run it on Linux")
        folder = Path(options.folder)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"folder={folder} cannot be made ({error.strerror}): it must not exist and is removed") from error
        try:
            results = bench(options, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if options.out:
            write_atomically(Path(options.out), json.dumps(results, indent=1).encode())
    except UserError as error:
        print(f"bench/data.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench/data.py: {error}", file=sys.stderr)
        return 1
    return 0


def bench(options: Options, folder: Path) -> dict:
    """Print everything; returns the numbers. Raises OSError where a command fails."""
    results = {"machine": f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores", "python": sys.version.split()[0],
               "packages": {name: _version(name) for name in ("numpy", "tiktoken", "pyarrow", "datasets")}}
    print(json.dumps(results))
    results["preparing"] = preparing(list(some_text(options.mb)), folder, options)
    print("\n".join(data_plan.speeds(results["preparing"])))
    source = folder / "out" / "bench"
    results["loader"] = [data_scale.loader(source, folder / f"loader{m}", m, options.repeats) for m in (4, 16)]
    results["order"] = data_scale.run_apart(data_scale.order, folder / "order", options.scale)
    results["layout"] = data_scale.run_apart(data_scale.layout, folder / "layout", options.scale)
    shutil.rmtree(folder / "layout")
    results["write"] = data_scale.run_apart(data_scale.write, folder / "write", min(options.scale, WRITE_TOKENS))
    print("\n".join([*data_plan.scaled(results), *data_plan.plan(results, options.scale, options.cores)]))
    return results


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ----------------------------------------------------------------------------------------------------------------- text

def some_text(mb: float) -> Iterator[str]:
    """What is installed, over and over, until there are `mb` megabytes; its first line tells each from all others."""
    harvested, size, most = [], 0, mb * 1e6
    sources = (harvest.documents(name, note=lambda _: None) for name in harvest.LICENSES)
    for text in chain.from_iterable(zip_longest(*sources, fillvalue="")):      # by turns: a little text has some of all
        harvested += [text] * bool(text)
        size += len(text.encode())
        if size >= most:
            break
    random.Random(0).shuffle(harvested)     # every fourth text is a mix too
    size, number = 0, 0
    while size < most:
        text = f"document {number}\n{harvested[number % len(harvested)]}"
        size, number = size + len(text.encode()), number + 1
        yield text


def write_files(folder: Path, texts: list[str]) -> list[Path]:
    """The texts dealt to FILES files, parquet and jsonl.gz by turns."""
    import pyarrow
    import pyarrow.parquet
    folder.mkdir()
    paths = []
    for i in range(FILES):
        own = texts[i::FILES]
        paths.append(folder / f"{i:02d}{'.jsonl.gz' if i % 2 else '.parquet'}")
        if i % 2:
            with gzip.open(paths[-1], "wt", compresslevel=6) as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in own)
        else:
            pyarrow.parquet.write_table(pyarrow.table({"text": own}), paths[-1], row_group_size=1000)
    return paths


# ------------------------------------------------------------------------------------------------------------ preparing

def preparing(texts: list[str], folder: Path, options: Options) -> dict:
    """Seconds per MB of raw, at once and prepare in turns, and what else prepare took; a row per turn."""
    few = texts[:max(FEW, len(texts) // 10)]
    files = {name: write_files(folder / name, chosen) for name, chosen in (("few", few), ("all", texts))}
    mb = {name: sum(len(text.encode()) for text in chosen) / 1e6 for name, chosen in (("few", few), ("all", texts))}
    sample = texts[::max(1, round(mb["all"] / RAW_MB))]
    (folder / "sample.json").write_text(json.dumps(sample))
    sample_mb, rows = sum(len(text.encode()) for text in sample) / 1e6, []
    with Raw(folder / "sample.json", max(options.processes)) as raw:
        single = [raw.run(1, sample_mb)]
        for n in options.processes * options.repeats:
            at_once = raw.run(n, sample_mb)["wall"]
            runs = {name: prepare(files[name], folder / "out", n) for name in ("few", "all")}
            single.append(raw.run(1, sample_mb))
            slope = {key: (runs["all"][key] - runs["few"][key]) / (mb["all"] - mb["few"]) for key in ("wall", "cpu", "main_cpu")}
            slope["wall"] = slope["wall"] if slope["wall"] > 0 else math.nan        # too little text for a noisy machine
            rows.append({"backend": "tiktoken", "processes": n, "at_once": at_once, "gross": runs["all"]["wall"] / mb["all"],
                         "net": slope["wall"], "cpu": slope["cpu"], "main_cpu": slope["main_cpu"],
                         **{key: runs["all"][key] for key in ("main_mib", "child_mib")}})
    compare(rows, single)
    tokens = sum(split.tokens for split in read_index(folder / "out" / "bench").splits.values())
    return {"mb": mb["all"], "documents": len(texts), "tokens": tokens, "single": single, "rows": rows}


def compare(rows: list[dict], single: list[dict]) -> None:
    """Add to each row its speeds as shares of n x raw: of the turns of one raw process before and after it. Seconds of CPU are
    those of all processes together."""
    for key, of in ("at_once", "wall"), ("gross", "wall"), ("net", "wall"), ("cpu", "cpu"):
        against = ratios(np.array([turn[of] for turn in single]), np.array([row[key] for row in rows]))
        for row, ratio in zip(rows, against.tolist(), strict=True):
            row[f"{key}_ratio"] = ratio / (row["processes"] if of == "wall" else 1)


def prepare(files: list[Path], out: Path, n: int) -> dict[str, float]:
    """Runs the command as a user would: seconds of the clock, of all cores, of the main process's; peak MiB of it and of its
    largest child. Raises OSError where it fails."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, str(ROOT / "prepare_data.py"), "local", *map(str, files), "name=bench", f"out={out}",
               f"processes={n}", "val_share=0.05"]
    peak, cpu = {"main_mib": 0.0, "child_mib": 0.0}, _cpu_of_children()
    with open(f"{out}.log", "wb") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                for pid in (process.pid, *_children(process.pid)):
                    key = "main_mib" if pid == process.pid else "child_mib"
                    peak[key] = max(peak[key], data_scale.memory_mib("VmHWM", pid))
                time.sleep(0.02)
            wall = time.perf_counter() - began
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]     # user, system
        finally:
            process.kill()      # of no effect where it has ended
            process.wait()
    if process.returncode:
        raise OSError(f"{' '.join(command[:3])} ... ended with exit code {process.returncode}: {Path(log.name).read_text()}")
    return {"wall": wall, "cpu": _cpu_of_children() - cpu, "main_cpu": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), **peak}


def _cpu_of_children() -> float:
    """Seconds of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
