"""Time train.py itself for some steps on random tokens, as a process.

What it costs beyond a cell's micro-steps and update is the loader, the host read, the guard and the log. The process is killed
after its last step: what comes at a run's end is not timed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.children import ChildError
from bench.suites import TOY, Cell
from runtime.rows import metrics_rows, read_rows
from runtime.shards import file_sha256, write_index
from runtime.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS, STEPS = 3, 9
TOKENS = {"train": 4_000_000, "val": 400_000}


def tokens_per_second(cell: Cell, log: Path, left_s: Callable[[], float]) -> float:
    """Of a run of train.py with the cell's model and recipe, over STEPS steps. Raises ChildError: it ended, or took too long."""
    with TemporaryDirectory(prefix="loop_") as place:
        folder, config = Path(place), "gpt50m_bf16" if cell.size in TOY else f"gpt{cell.size}_bf16"
        tokenizer = "byte" if cell.size in TOY else "gpt2"
        write_random_source(folder / "data" / "random", tokenizer, TOKENS)
        arguments = [f"configs/{config}.py", "run=loop", f"out={folder / 'out'}", "steps=100000", f"data.dir={folder / 'data'}",
                     "data.mixture=random:1", f"data.tokenizer={tokenizer}", "data.max_epochs=1e6", f"model.n_ctx={cell.T}",
                     f"data.tokens_per_step={cell.tokens_per_step}", f"data.micro_batch={cell.micro_batch}",
                     "checkpoint.every=none", "eval.every=none", f"eval.tokens={TOKENS['val'] // 2}",
                     *(f"model.{key}={value}" for key, value in cell.model or ()), *_precision(cell.label)]
        with open(log, "a") as output:
            process = subprocess.Popen([sys.executable, "train.py", *arguments], cwd=ROOT, stdin=subprocess.DEVNULL,
                                       stdout=output, stderr=output, start_new_session=True)
            try:
                seconds = _watch(process, folder / "out" / "loop" / "metrics.jsonl", left_s)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return STEPS * cell.tokens_per_step / seconds


def write_random_source(folder: Path, tokenizer: str, tokens: dict[str, int]) -> None:
    """Uniformly random ids in the on-disk format of prepare_data.py."""
    folder.mkdir(parents=True)
    rules, rng, splits = load_tokenizer(tokenizer), np.random.default_rng(0), {}
    for split, n in tokens.items():
        path = folder / f"{split}_00000.bin"
        rng.integers(0, rules.vocab_size, n, dtype=np.uint16).astype("<u2").tofile(path)
        splits[split] = {"documents": 1, "text_bytes": 4 * n, "tokens": n,
                         "shards": [{"file": path.name, "tokens": n, "sha256": file_sha256(path)}]}
    np.save(folder / "hashes.npy", np.zeros(0, dtype=np.uint64))
    write_index(folder, {
        "source": folder.name, "tokenizer": rules.kind, "tokenizer_sha256": rules.sha256, "vocab_size": rules.vocab_size,
        "dataset": "random", "revision": "0", "license": "none", "split_rule": "random", "duplicates": {}, "splits": splits,
        "empty": 0, "contaminated": 0, "decontaminated_against": [], "skipped": [], "files": [], "selection": {},
        "is_whole": True, "budget": None, "hashes_sha256": file_sha256(folder / "hashes.npy")})


def _precision(label: str) -> list[str]:
    recipe, *extras = label.split("+")
    if recipe == "bf16":
        return []
    return [f"fp8.recipe={recipe}", *(f"fp8.{extra}=true" for extra in extras)]


def _watch(process: subprocess.Popen, metrics: Path, left_s: Callable[[], float]) -> float:
    """Seconds between the arrival of the rows of step WARM_UP_STEPS and STEPS steps later: all that a step costs lies between."""
    began = None
    while left_s() > 0:
        now, is_dead = time.perf_counter(), process.poll() is not None
        done = sum(row["kind"] == "train" for row in metrics_rows(read_rows(metrics)))
        if began is None and done >= WARM_UP_STEPS:
            began, first = now, done
        if began is not None and done >= first + STEPS:
            return (now - began) * STEPS / (done - first)
        if is_dead:
            raise ChildError(f"train.py ended with exit code {process.returncode} after {done} steps")
        time.sleep(0.01)
    raise ChildError("train.py was not done when the time was over")
