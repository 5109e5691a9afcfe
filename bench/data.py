"""Measure how fast text becomes shards and how fast training reads them, as ratios of one run.

    python -m bench.data                                    100 MB of text, 1 and 2 processes
    python -m bench.data mb=1000 processes=1,8,16
    python -m bench.data mb=3 processes=1 repeats=1         a rehearsal

The text is what this Python installation contains, repeated until there is enough of it; a first
line of its own keeps each copy of a document from counting as a duplicate. In turns, so that what
drifts cancels in the ratios: raw, which is tiktoken.encode_to_numpy by tiktoken's own pattern on
the documents in memory, in one process, and `prepare_data.py local` with n processes as a user
starts it. Then the loader: Data.batch on one core, from the page cache."""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path

import torch

from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import ROOT, device_name
from lib.values import FilePath
from prepare import harvest
from runtime import tokenizer
from runtime.config import load_config
from runtime.data import Data
from runtime.shards import read_index

LOADED_TOKENS = 2**25  # of one turn of the loader, at most


@dataclass(frozen=True, kw_only=True)
class Options:
    mb: float = 100  # megabytes of text
    processes: tuple[int, ...] = (1, 2)
    repeats: int = 3  # turns of each
    folder: FilePath = "out"  # on the disk to be measured; what is written there is removed

    def __post_init__(self) -> None:
        numbers = {"mb": self.mb, "repeats": self.repeats, "processes": min(self.processes or [0])}
        for key, number in numbers.items():
            if number < 1:
                raise UserError(f"{key}={number:g} must be 1 or more")


@command(__doc__, Options)
def main(options: Options) -> None:
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_data_", dir=options.folder) as name:
        folder = Path(name)
        texts = list(some_text(options.mb))
        files = write_text_files(texts, folder)
        mb = sum(len(text.encode()) for text in texts) / 1e6
        device = device_name(torch.device("cpu"))
        print(f"{mb:.1f} MB of text in {len(texts):,} documents on {device}")
        encode = tiktokens_own()
        raw_seconds(encode, texts[:100])  # warm
        for n in options.processes:
            raw_s, prepare_s = [], []
            for _ in range(options.repeats):
                raw_s.append(raw_seconds(encode, texts))
                prepare_s.append(prepare_seconds(files, folder / "out", n))
            ratios = [one_s / (n * all_s) for one_s, all_s in zip(raw_s, prepare_s, strict=True)]
            print(
                f"{n} processes: raw tiktoken {mb / min(raw_s):.1f} MB/s in one, prepare_data.py"
                f" {mb / min(prepare_s):.1f} MB/s, median ratio {statistics.median(ratios):.2f} of"
                f" {n} x raw"
            )
        print(f"loader: {loader(folder / 'out') / 1e6:.0f}M tokens/s on one core")


def write_text_files(texts: list[str], folder: Path) -> list[Path]:
    """The texts, dealt out to eight files of JSON lines."""
    files = [folder / f"{i}.jsonl" for i in range(8)]
    for i, file in enumerate(files):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i :: len(files)]]
        file.write_text("".join(lines))
    return files


def some_text(mb: float) -> Iterator[str]:
    """What is installed, its sources by turns, over and over until there are `mb` megabytes."""
    harvested = (
        document
        for _ in count()
        for row in zip_longest(*map(harvest.documents, harvest.LICENSES))
        for document in row
        if document
    )
    size = 0
    for number, document in enumerate(harvested):
        text = f"document {number}\n{document}"
        size += len(text.encode())
        yield text
        if size >= mb * 1e6:
            return


def tiktokens_own() -> Callable:
    """encode_to_numpy of GPT-2 by tiktoken's own pattern; ours gives the same ids faster."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = {token: rank for rank, token in enumerate(tokenizer.token_bytes())}
    # With its special token, as GPT-2 has it: without any, tiktoken searches for the empty string,
    # which is slower.
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={tokenizer.END_OF_TEXT: len(ranks)},
    ).encode_to_numpy


def raw_seconds(encode: Callable, texts: list[str]) -> float:
    """Seconds to encode each document once."""
    start = time.perf_counter()
    for text in texts:
        encode(text, disallowed_special=())
    return time.perf_counter() - start


def prepare_seconds(files: list[Path], out: Path, n: int) -> float:
    """Seconds of the command."""
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            ROOT / "prepare_data.py",
            "local",
            *files,
            "name=bench",
            f"out={out}",
            f"processes={n}",
            "val_share=0.05",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def loader(folder: Path) -> float:
    """Tokens/s on one core from the page cache, which a first turn fills."""
    config = load_config(
        ROOT / "configs/gpt50m_bf16.py",
        [f"data.dir={folder}", "data.mixture=bench:1", "data.max_epochs=1e6", "eval.tokens=2048"],
    )
    index, tokens = read_index(folder / "bench"), config.data.tokens_per_step
    data = Data(config, index.tokenizer_sha256)
    steps = max(1, min(LOADED_TOKENS, index.splits["train"].tokens) // tokens)
    for first in (0, steps):
        start = time.perf_counter()
        for step in range(first, first + steps):
            for micro in range(config.accumulation(1)):
                data.batch(step, micro, 0, 1)
    return steps * tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
