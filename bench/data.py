"""Measure how fast text becomes shards and how fast training reads them, as ratios of one run.

    python -m bench.data                                    100 MB of text, 1 and 2 processes
    python -m bench.data mb=1000 processes=1,8,16
    python -m bench.data mb=3 processes=1 repeats=1         a rehearsal

The text is what this Python installation contains, repeated until there is enough of it; a first line of its own keeps each
copy of a document from counting as a duplicate. In turns, so that what drifts cancels in the ratios: raw, which is
tiktoken.encode_to_numpy by tiktoken's own pattern on the documents, in n processes at the same time, and `prepare_data.py
local` with n processes as a user starts it. Then the loader: Data.batch on one core, from the page cache.
"""

import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, zip_longest
from pathlib import Path

import torch

from model import GPTConfig
from prepare import harvest
from runtime import tokenizer
from runtime.cli import command, run_command
from runtime.config import Config, DataConfig, EvalConfig, OptimConfig
from runtime.data import open_data
from runtime.machine import device_name
from runtime.shards import read_index

ROOT = Path(__file__).resolve().parents[1]
N_CTX, TOKENS_PER_STEP = 1024, 2**19
LOADED_TOKENS = 2**25           # of one turn of the loader, at most


@dataclass(frozen=True, kw_only=True)
class Options:
    mb: float = 100                     # megabytes of text
    processes: tuple[int, ...] = (1, 2)
    repeats: int = 3                    # turns of each
    folder: str = "out"                 # on the disk to be measured; what is written there is removed


def main(arguments: list[str]) -> int:
    return command(__doc__, Options, arguments, bench)


def bench(options: Options) -> None:
    """Print all numbers."""
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_data_", dir=options.folder) as name:
        folder = Path(name)
        texts = list(some_text(options.mb))
        files = [folder / f"{i}.jsonl" for i in range(8)]
        for i, file in enumerate(files):
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[i::len(files)]))
        mb = sum(len(text.encode()) for text in texts) / 1e6
        print(f"{mb:.1f} MB of text in {len(texts):,} documents on {device_name(torch.device('cpu'))}")
        for n in options.processes:
            turns = [(raw(texts, n), prepare(files, folder / "out", n), raw(texts, 1) / n) for _ in range(options.repeats)]
            encoded, whole, _ = (mb / min(column) for column in zip(*turns, strict=True))
            ratio, of_one = (statistics.median(turn[i] / turn[1] for turn in turns) for i in (0, 2))
            print(f"{n} processes: raw tiktoken {encoded:.1f} MB/s, prepare_data.py {whole:.1f} MB/s, median ratio {ratio:.2f}"
                  f" ({of_one:.2f} of {n} x one raw process)")
        print(f"loader: {max(loader(folder / 'out', options.repeats)) / 1e6:.0f}M tokens/s on one core")


def some_text(mb: float) -> Iterator[str]:
    """What is installed, its sources by turns, over and over until there are `mb` megabytes."""
    def harvested():
        return chain.from_iterable(zip_longest(*(harvest.documents(name) for name in harvest.LICENSES)))

    size = 0
    for number, document in enumerate(filter(None, chain.from_iterable(harvested() for _ in count()))):
        text = f"document {number}\n{document}"
        size += len(text.encode())
        yield text
        if size >= mb * 1e6:
            return


def raw(texts: list[str], n: int) -> float:
    """Seconds until n processes, which hold their share of the documents in memory, have encoded it."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(n, _hold, (texts, n)) as pool:
        pool.map(_encode, [None] * n, chunksize=1)      # warm: imported, built, paged in
        began = time.perf_counter()
        pool.map(_encode, range(n), chunksize=1)
        return time.perf_counter() - began


def _hold(texts: list[str], n: int) -> None:
    global encode, shares
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str  # its own pattern; ours gives the same ids faster
    ranks = {token: rank for rank, token in enumerate(tokenizer.token_bytes())}
    # With its special token, as GPT-2 has it: without any, tiktoken searches for the empty string, which is slower.
    encode = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                               special_tokens={tokenizer.END_OF_TEXT: len(ranks)}).encode_to_numpy
    shares = [texts[i::n] for i in range(n)]


def _encode(share: int | None) -> None:
    for text in shares[share or 0][:None if share is not None else 20]:
        encode(text, disallowed_special=())


def prepare(files: list[Path], out: Path, n: int) -> float:
    """Seconds of the command."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    subprocess.run([sys.executable, ROOT / "prepare_data.py", "local", *files, "name=bench", f"out={out}", f"processes={n}",
                    "val_share=0.05"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def loader(folder: Path, repeats: int) -> list[float]:
    """Tokens/s of each turn, on one core; the first turn, which fills the page cache, is left out."""
    index = read_index(folder / "bench")
    steps = max(1, min(LOADED_TOKENS, index.splits["train"].tokens) // TOKENS_PER_STEP)
    data = open_data(Config(
        run="bench", steps=steps * (repeats + 1), optim=OptimConfig(lr=1e-3), eval=EvalConfig(tokens=N_CTX),
        model=GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=N_CTX, vocab_size=index.vocab_size),
        data=DataConfig(dir=str(folder), mixture={"bench": 1.0}, tokenizer="gpt2", tokens_per_step=TOKENS_PER_STEP,
                        micro_batch=8, max_epochs=1e6)), index.tokenizer_sha256)
    rates = []
    for turn in range(repeats + 1):
        began, tokens = time.perf_counter(), 0
        for step in range(turn * steps, (turn + 1) * steps):
            for micro in range(TOKENS_PER_STEP // (8 * N_CTX)):
                tokens += data.batch(step, micro, 0, 1)[0].numel()
        rates.append(tokens / (time.perf_counter() - began))
    return rates[1:]


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
