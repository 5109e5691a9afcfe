"""Time what the size of the real run asks of the data path: its order, its copies, its shards, its loader."""

import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from configs.mixture import MIXTURE
from prepare.assemble import Assembly
from prepare.source import DOCUMENT, Piece
from runtime.shards import SHARD_TOKENS, read_index, write_index

N_CTX, VOCAB = 1024, 50257
TOKENS_PER_STEP = 2**19
DOCUMENT_TOKENS = 1_000         # about FineWeb-Edu's mean
PIECE_TOKENS = 20_000_000       # as many as a piece of the real run holds
COPIES = 0.01                   # share of the documents that came before
LOADED_TOKENS = 2**25           # in one turn of the loader


def run_apart(work: Callable[..., dict], *arguments) -> dict:
    """work(*arguments) in a process of its own, with the MiB by which its memory grew added as "mib"."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_apart, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError as error:
        raise ChildProcessError(f"{work.__name__} died: its error is above") from error
    finally:
        process.join()


def _apart(pipe, work: Callable[..., dict], arguments: tuple) -> None:
    before = memory_mib("VmRSS", os.getpid())
    result = work(*arguments)
    pipe.send(result | {"mib": memory_mib("VmHWM", os.getpid()) - before})


def memory_mib(key: str, pid: int) -> float:
    """VmRSS, what a process holds now, or VmHWM, the most it held; 0 where it has ended.

    getrusage would count what its parent held when it was started."""
    with suppress(OSError):
        if found := re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) / 1024
    return 0.0


# --------------------------------------------------------------------------------------------------------------- loader

def loader(source: Path, folder: Path, micro_batch: int, repeats: int) -> dict:
    """Tokens per second of Data.batch at T=1024 on one core, from page cache that was read once before.

    The mixture's four sources are one prepared source under four names."""
    folder.mkdir()
    for name in MIXTURE:
        (folder / name).symlink_to(source.resolve(), target_is_directory=True)
    index = read_index(source)
    data = _open(folder, index.splits["train"].tokens, micro_batch, index.tokenizer_sha256)
    micros, rates = TOKENS_PER_STEP // (micro_batch * N_CTX), []
    steps = max(1, LOADED_TOKENS // TOKENS_PER_STEP)
    for repeat in range(repeats + 1):
        began, tokens = time.perf_counter(), 0
        for step in range(repeat * steps, (repeat + 1) * steps):
            for micro in range(micros):
                tokens += data.batch(step, micro, 0, 1)[0].numel()
        rates.append(tokens / (time.perf_counter() - began))
    return {"micro_batch": micro_batch, "tok_per_s": statistics.median(rates[1:]), "turns": rates[1:]}


def _open(folder: Path, tokens: float, micro_batch: int, sha256: str):
    """The data of a run over `tokens` tokens; only what the data path reads of its configuration is set."""
    from model import GPTConfig  # they load torch, which the other processes here have no use for
    from runtime.config import Config, DataConfig, EvalConfig, OptimConfig
    from runtime.data import open_data
    return open_data(Config(
        run="bench", steps=max(1, int(tokens) // TOKENS_PER_STEP), optim=OptimConfig(lr=1e-3), eval=EvalConfig(tokens=N_CTX),
        model=GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=N_CTX, vocab_size=VOCAB),
        data=DataConfig(dir=str(folder), mixture=MIXTURE, tokenizer="gpt2", tokens_per_step=TOKENS_PER_STEP,
                        micro_batch=micro_batch, max_epochs=1e6)), sha256)


def order(folder: Path, scale: float) -> dict:
    """Seconds to open shards of `scale` tokens, and to find a step's windows anywhere in a run over all of them.

    The shards have their length but no content, which the order does not look at."""
    for name, weight in MIXTURE.items():
        (folder / name).mkdir(parents=True)
        splits = {}
        for split, share in ("train", 1.0), ("val", 0.005):
            tokens, shards = int(scale * weight * share), []
            while tokens > 0:
                path = folder / name / f"{split}_{len(shards):05d}.bin"
                path.touch()
                shards.append({"file": path.name, "tokens": min(tokens, SHARD_TOKENS), "sha256": ""})
                tokens -= SHARD_TOKENS
                with open(path, "r+b") as file:
                    file.truncate(2 * shards[-1]["tokens"])
            total = sum(shard["tokens"] for shard in shards)
            splits[split] = {"documents": total // 1000, "text_bytes": 4 * total, "tokens": total, "shards": shards}
        write_index(folder / name, {
            "source": name, "tokenizer": "gpt2", "tokenizer_sha256": "", "vocab_size": VOCAB, "dataset": "", "revision": "",
            "license": "", "split_rule": "", "duplicates": {}, "empty": 0, "contaminated": 0, "decontaminated_against": [],
            "skipped": [], "files": [], "selection": {}, "is_whole": True, "budget": None, "hashes_sha256": "",
            "splits": splits})
    began = time.perf_counter()
    data = _open(folder, scale, 8, "")
    open_s = time.perf_counter() - began
    steps = np.linspace(0, data.n_sequences // data.sequences_per_step - 1, 200).astype(np.int64)
    began = time.perf_counter()
    for step in steps:
        data.locate(step * data.sequences_per_step + np.arange(data.sequences_per_step))
    step_s = (time.perf_counter() - began) / len(steps)
    return {"windows": data.n_sequences, "open_s": open_s, "step_s": step_s, "tok_per_s": TOKENS_PER_STEP / step_s}


# ------------------------------------------------------------------------------------------------------------- assembly

def layout(folder: Path, scale: float) -> dict:
    """Seconds to find the copies among as many documents as `scale` tokens have, and to make the decision final.

    Hashes are random, one document in a hundred is a copy; the pieces have tables, no tokens."""
    pieces = _pieces(folder, scale, has_tokens=False)
    assembly, began = Assembly(folder, pieces, {}, 50, None), time.perf_counter()
    assembly.layout()
    layout_s = time.perf_counter() - began
    assembly.commit({})
    documents, commit_s = sum(piece.documents for piece in pieces), time.perf_counter() - began - layout_s
    assert sum(assembly.duplicates.values()) == round(COPIES * documents)
    return {"documents": documents, "pieces": len(pieces), "layout_s": layout_s, "commit_s": commit_s,
            "gb": sum(path.stat().st_size for path in (folder / "parts").iterdir()) / 1e9}


def write(folder: Path, tokens: float) -> dict:
    """Seconds to make shards of pieces with `tokens` random tokens, one after another, and how much disk it took at most."""
    assembly = Assembly(folder, _pieces(folder, tokens, has_tokens=True), {}, 50, None)
    assembly.layout()
    assembly.commit({})
    began = time.perf_counter()
    splits = assembly.write()
    written = sum(split["tokens"] for split in splits.values())
    return {"tokens": written, "s_per_billion": (time.perf_counter() - began) / written * 1e9}


def _pieces(folder: Path, tokens: float, has_tokens: bool) -> list[Piece]:
    (folder / "parts").mkdir(parents=True)
    rng, pieces, earlier, copies = np.random.default_rng(0), [], None, int(COPIES * PIECE_TOKENS / DOCUMENT_TOKENS)
    for number in range(max(1, round(tokens / PIECE_TOKENS))):
        stem = folder / "parts" / f"{number:05d}_0000"
        table = np.empty(PIECE_TOKENS // DOCUMENT_TOKENS, DOCUMENT)
        table["hash"] = rng.integers(0, 2**64, len(table), np.uint64)
        table["hash"][:copies] = (table if earlier is None else earlier)["hash"][-copies:]
        table["tokens"], table["bytes"] = DOCUMENT_TOKENS, 4 * DOCUMENT_TOKENS
        np.save(stem.with_suffix(".npy"), table)
        if has_tokens:
            rng.integers(0, VOCAB, PIECE_TOKENS, np.uint16).tofile(stem.with_suffix(".bin"))
        pieces.append(Piece(stem, number, (0, len(table)), len(table), PIECE_TOKENS, True))
        earlier = table
    return pieces
