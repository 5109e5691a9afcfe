"""Encode documents with tiktoken alone, in any number of processes at the same time."""

import json
import multiprocessing
import time
from pathlib import Path

from runtime import tokenizer


class Raw:
    """Processes that encode their share of the same documents when told, and hold them in memory in between."""

    def __init__(self, path: Path, processes: int):
        context, self._pipes = multiprocessing.get_context("spawn"), []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            context.Process(target=_raw, args=(theirs, path), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def __enter__(self) -> "Raw":
        for pipe in self._pipes:
            pipe.recv()
        return self

    def __exit__(self, *_) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def run(self, n: int, mb: float) -> dict[str, float]:
        """Seconds per MB until n of them, at the same time, have encoded everything once; their CPU seconds."""
        began = time.perf_counter()
        for i, pipe in enumerate(self._pipes[:n]):
            pipe.send((i, n))
        cpu = sum(pipe.recv() for pipe in self._pipes[:n])
        return {"wall": (time.perf_counter() - began) / mb, "cpu": cpu / mb}


def _raw(pipe, path: Path) -> None:
    import tiktoken
    ranks = {token: rank for rank, token in enumerate(tokenizer.token_bytes())}
    # With its special token, as GPT-2 has it: where there is none tiktoken is slower, it searches for the empty string.
    gpt2 = tiktoken.Encoding("gpt2", pat_str=tokenizer.GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={tokenizer.END_OF_TEXT: len(ranks)})
    texts = json.loads(path.read_text())
    pipe.send(None)
    while (share := pipe.recv()) is not None:
        began = time.process_time()
        for text in texts[share[0]::share[1]]:
            gpt2.encode_to_numpy(text, disallowed_special=())
        pipe.send(time.process_time() - began)
