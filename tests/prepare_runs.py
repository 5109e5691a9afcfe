"""Start, kill and compare runs of prepare_data.py, and say what they must write: what the tests of its faults are made of."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tests.conftest import ROOT
from tests.text_files import PACK, jsonl, parquet, some_documents

HANG_S = 180        # a run that takes so long on a loaded machine hangs
# Of the small sources below: some pieces per file, some shards per split, batches of some documents.
SIZES = {"SHARD_TOKENS": 2_000, "PIECE_TOKENS": 1_500, "BATCH_BYTES": 700}


def last_of_each(words) -> list[str]:
    """A command's words without the settings that later ones replace, each of which may stand there once."""
    words = list(map(str, words))
    return [word for i, word in enumerate(words)
            if not any(later.startswith(word.partition("=")[0] + "=") for later in words[i + 1:] if "=" in word)]


# --------------------------------------------------------------------------------------------------------------- runs

class Run:
    """prepare_data.py as a process that leads a group of its own; its output, with that of its children, goes to a log."""

    def __init__(self, arguments, log: Path, launcher=(), env=None, **faults):
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *(launcher or ["-m", "tests.faulty_prepare"]), *map(str, arguments)], cwd=ROOT, stdout=file,
                stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {}),
                     "FAULTY_PREPARE": json.dumps({"sizes": SIZES} | faults)})

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"hangs: {self.output[-3000:]}") from None

    def kill(self) -> None:
        """kill -9, all of its processes at once; returns when the first is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(HANG_S)

    def kill_parent(self) -> None:
        """kill -9 to the first process alone; the others must end by themselves."""
        self.process.kill()
        self.process.wait(HANG_S)
        self.wait_for_children()

    def wait_for_children(self) -> None:
        end = time.monotonic() + 60
        while self.living():
            assert time.monotonic() < end, f"orphans: {self.living()}"
            time.sleep(0.02)

    def living(self) -> list[int]:
        """Processes of the group, dead ones that nobody has asked for left out."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state not in "ZX":
                    found.append(int(path.parent.name))
        return found


class Forge:
    """Forks runs, one at a time, off a process that has imported everything, `packages` too: for tests with hundreds of them."""

    def __init__(self, folder: Path, env=None, packages=()):
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faulty_prepare", "--serve", *packages], cwd=ROOT, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})

    def run(self, *arguments, kill_after: float | None = None, **faults) -> tuple[int, str]:
        """Exit code and output of one run; with kill_after, it is killed after so many seconds where it still runs."""
        self.count += 1
        log = self.folder / f"run{self.count:04d}.log"
        ask = {"arguments": [str(a) for a in arguments], "faults": {"sizes": SIZES} | faults, "log": str(log)}
        self.process.stdin.write(json.dumps(ask).encode() + b"\n")
        pid = int(self._line(HANG_S))
        code = self._line(HANG_S if kill_after is None else kill_after)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            code = self._line(HANG_S)
            assert kill_after is not None, f"hangs: {log.read_text()[-3000:]}"
        return int(code), log.read_text(errors="replace")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(HANG_S)
        self.process.stdout.close()

    def _line(self, timeout: float) -> bytes | None:
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return None
        return self.process.stdout.readline()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def is_a_sentence(output: str) -> bool:
    """Whether the output of a run that failed ends in words for people."""
    return bool(output.strip()) and "Traceback" not in output and 'File "' not in output


# ------------------------------------------------------------------------------------------------ sources and what is due

def texts(n_files: int, seed: int = 0, each: int = 60) -> list[list[str]]:
    """The documents of each file: empty ones, copies within a file and across files among them."""
    rng, files = random.Random(seed), []
    for number in range(n_files):
        documents = some_documents(each, 1000 * seed + number)
        documents += ["", " \n ", *rng.sample(documents, 3), *(rng.choice(file) for file in files)]
        rng.shuffle(documents)
        files.append(documents)
    return files


def write_files(folder: Path, files: list[list[str]]) -> list[Path]:
    """One kind of file after the other: .jsonl.gz, .parquet, .jsonl, .jsonl.zst."""
    kinds = [("jsonl.gz", lambda d: PACK[".gz"](jsonl(d))), ("parquet", parquet), ("jsonl", jsonl),
             ("jsonl.zst", lambda d: PACK[".zst"](jsonl(d)))]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, documents in enumerate(files):
        ending, pack = kinds[number % len(kinds)]
        paths.append(folder / f"{chr(97 + number)}.{ending}")
        paths[-1].write_bytes(pack(documents))
    return paths


def due(files: list[list[str]], budget: int | None = None, earlier: set[int] | None = None, val_per_10k: int = 2000):
    """What must be on disk, told a second time: uint16 ids of byte-tokenised shards by split, and the hashes kept."""
    seen, ids, kept = set(earlier or ()), {"train": [], "val": []}, set()
    for text in (text for file in files for text in file):
        number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        if not text.strip() or number in seen:
            continue
        seen.add(number)
        kept.add(number)
        ids["val" if number % 10_000 < val_per_10k else "train"] += [256, *text.encode()]
        if budget is not None and len(ids["train"]) >= budget:
            break
    return {split: np.array(values, np.uint16) for split, values in ids.items()}, kept


def written(folder: Path) -> dict[str, np.ndarray]:
    """The uint16 ids of each split, as they lie in the shards that index.json names."""
    index = json.loads((folder / "index.json").read_text())
    return {split: np.concatenate([np.fromfile(folder / shard["file"], "<u2") for shard in index["splits"][split]["shards"]]
                                  or [np.empty(0, np.uint16)])
            for split in ("train", "val")}


def check_against(folder: Path, files: list[list[str]], shard_tokens: int = SIZES["SHARD_TOKENS"], **how) -> None:
    """That a finished source holds what is due(), in shards of the right size, and nothing besides."""
    expected, _ = due(files, **how)
    found = written(folder)
    for split in expected:
        assert np.array_equal(found[split], expected[split]), split
        sizes = [shard["tokens"] for shard in json.loads((folder / "index.json").read_text())["splits"][split]["shards"]]
        assert set(sizes[:-1]) <= {shard_tokens} and sum(sizes) == len(expected[split])
        assert all(0 < size <= shard_tokens for size in sizes)
    assert not (folder / "parts").exists() and not list(folder.rglob("*.tmp"))
