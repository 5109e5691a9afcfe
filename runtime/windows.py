"""Cut the shards of one source into windows.

A window is n_ctx tokens of one shard and the token after them, which is only a target; windows do not overlap. In a masked
source some tokens are context alone: as targets they are NO_TARGET, which torch's cross-entropy passes over.
"""

import numpy as np
import torch

from runtime.annotations import ConfigError
from runtime.shards import CONTEXT, Index

NO_TARGET = -100        # F.cross_entropy's ignore_index


class Windows:
    """The windows of one split of one source, numbered through its shards: len(), then read() by number."""

    def __init__(self, index: Index, split: str, n_ctx: int):
        self.n_ctx, self.vocab_size, self.is_masked = n_ctx, index.vocab_size, index.is_masked
        self.shards = [shard for shard in index.splits[split].shards if shard.tokens]   # a mapping of nothing is an error
        # The last token of a shard is only a target, hence the - 1.
        per_shard = [max(0, shard.tokens - 1) // n_ctx for shard in self.shards]
        self.ends = np.cumsum([0, *per_shard])
        # Plain arrays over the mapping: slicing a np.memmap costs more than copying the window.
        self.tokens = [np.asarray(np.memmap(shard.path, index.dtype, "r")) for shard in self.shards]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, window: int, row: np.ndarray) -> None:
        """Copies the n_ctx + 1 tokens of one window into `row` (uint32), CONTEXT where it is set.

        Raises ConfigError for an id outside the vocabulary."""
        shard, start = self._find(window)
        row[:] = self.tokens[shard][start:start + self.n_ctx + 1]
        largest = (row & ~CONTEXT if self.is_masked else row).max()
        if largest >= self.vocab_size:
            path = self.shards[shard].path
            raise ConfigError(f"{path} holds the id {largest} near token {start}, but its tokenizer has "
                              f"{self.vocab_size}: the file is damaged; list all damage with "
                              f"`python prepare_data.py --verify {path.parent}`")

    def targets(self, window: int) -> int:
        """How many tokens of a window the model is to foretell; without a mask nothing is read."""
        if not self.is_masked:
            return self.n_ctx
        shard, start = self._find(window)
        return int(np.count_nonzero(self.tokens[shard][start + 1:start + self.n_ctx + 1] < CONTEXT))

    def targets_of_split(self) -> int:
        """How many of all tokens, those of no window included, are targets somewhere."""
        return sum(int(np.count_nonzero(tokens < CONTEXT)) if self.is_masked else len(tokens) for tokens in self.tokens)

    def _find(self, window: int) -> tuple[int, int]:
        """The number of its shard, and its first token there."""
        shard = int(np.searchsorted(self.ends, window, "right")) - 1
        return shard, (window - int(self.ends[shard])) * self.n_ctx


class Validation:
    """The fixed validation windows of one source: the same ones, in the same order, in every run of equal n_ctx.

    Attributes: n_ctx; targets, how many each window has, (windows,) int64; tokens, all of them; text_bytes, their UTF-8
    bytes: tokens x the mean bytes per target of the whole split. End-of-text tokens count as tokens of no bytes, so bits
    per byte = summed nats / ln 2 / text_bytes charges the text with the price of its ends. Where not all windows are chosen
    text_bytes is an estimate, yet the same one in every run.
    """

    def __init__(self, windows: Windows, text_bytes: int, tokens_at_most: int):
        """`text_bytes`: of the targets of the whole split."""
        self.n_ctx, self._windows = windows.n_ctx, windows
        count = min(len(windows), -(-tokens_at_most // windows.n_ctx))
        self.selection = np.arange(count) * len(windows) // max(1, count)      # evenly strided
        self.targets = np.array([windows.targets(int(w)) for w in self.selection], np.int64)
        self.tokens = int(self.targets.sum())
        self.text_bytes = round(self.tokens * text_bytes / max(1, windows.targets_of_split()))

    def __len__(self) -> int:
        return len(self.selection)

    def batch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows start to stop (exclusive) as x and y, int64 (stop - start, n_ctx) on the CPU; short at the end."""
        return read_batch([(self._windows, int(w)) for w in self.selection[start:stop]], self.n_ctx)


def read_batch(rows: list[tuple[Windows, int]], n_ctx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows by number as x and y, int64 (rows, n_ctx): y is x one token on, NO_TARGET where that is context alone."""
    tokens = np.empty((len(rows), n_ctx + 1), np.uint32)
    for row, (windows, window) in zip(tokens, rows, strict=True):
        windows.read(window, row)
    x, y = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
    if any(windows.is_masked for windows, _ in rows):
        x &= int(~CONTEXT)
        y[y >= int(CONTEXT)] = NO_TARGET
    return torch.from_numpy(x), torch.from_numpy(y)
