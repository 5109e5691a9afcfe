"""Decide which window of which source each sequence of a run reads.

Pure functions of whole numbers: the same on every machine, at every world size, in every precision.


windows: Cut the shards of one source into windows.

A window is n_ctx tokens of one shard and the token after them, which is only a target; windows do not overlap. In a masked
source some tokens are context alone: as targets they are NO_TARGET, which torch's cross-entropy passes over.


data: Serve the micro-batch of (step, micro, rank) from token shards.

Nothing here has state: the order of the whole run is a pure function of the seed, the mixture and the shards. Sequence
i of the run belongs to a source (the mixture's weights hold to within one sequence at every i), is the source's k-th,
and a keyed permutation, another one in each epoch, says which window the k-th is. A resume needs the step number alone,
any number of ranks sees the same sequences in a step, two runs of one seed see the same tokens in the same order.

"""

import json
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from runtime.cli import UserError
from runtime.config import Config
from runtime.shards import LOSS_MASK_BIT, Index, Verification, read_index
from runtime.tokenizer import tokenizer_kind

# ---------------------------------------------------------------------------------------------------------------- order

WEIGHT_STEPS = 2**20        # a mixture of no simple ratio is rounded to shares of this
FEISTEL_ROUNDS = 6


def shares(mixture: dict[str, float]) -> dict[str, int]:
    """Whole numbers in the ratio of the weights, without a common factor; their sum is the period of the mixture.

    Exact for weights that are fractions with a denominator up to 1000 (0.07, 1/3, 80); others are rounded to shares of
    2**20 by largest remainder. Raises ValueError for a weight that rounds to nothing.
    """
    near = {name: Fraction(weight).limit_denominator(1000) for name, weight in mixture.items()}
    scale = math.lcm(*(fraction.denominator for fraction in near.values()))
    counts = _reduced({name: int(fraction * scale) for name, fraction in near.items()})
    is_exact = all(abs(near[name] / Fraction(weight) - 1) < 1e-12 for name, weight in mixture.items())
    if is_exact and sum(counts.values()) <= WEIGHT_STEPS:
        return counts
    total = sum(map(Fraction, mixture.values()))
    quotas = {name: Fraction(weight) * WEIGHT_STEPS / total for name, weight in mixture.items()}
    counts = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    for name in by_remainder[:WEIGHT_STEPS - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if not count:
            raise ValueError(f"data.mixture gives {name!r} the weight {mixture[name]}, less than a millionth of the "
                             f"total: leave the source out or give it more")
    return _reduced(counts)


def _reduced(counts: dict[str, int]) -> dict[str, int]:
    factor = math.gcd(*counts.values())
    return {name: count // factor for name, count in counts.items()} if factor else counts


def schedule(counts: list[int], length: int) -> np.ndarray:
    """(length,) uint16: the source of each sequence, such that every prefix holds its share of each to within one.

    Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): with n sources of share a of P, the
    x-th sequence (from 0) of a source may come once K a / P - x >= 1 / (2n - 2), where K counts from 1; of those that
    may, the one is taken whose deviation would reach 1 - 1 / (2n - 2) first. No prefix deviates by more than that.
    """
    n, period, c = len(counts), sum(counts), 2 * len(counts) - 2
    if n == 1:
        return np.zeros(length, np.uint16)
    table = np.empty(length, np.uint16)
    common = math.lcm(*counts)
    # In whole numbers, so that every machine decides alike: releases are slots, deadlines slots times c common / P.
    release = [-(-period // (c * a)) for a in counts]
    deadline = [(c - 1) * (common // a) for a in counts]
    drawn = [0] * n
    for k in range(length):
        s = min((s for s in range(n) if release[s] <= k + 1), key=deadline.__getitem__)
        table[k] = s
        drawn[s] += 1
        release[s] = -(-period * (1 + c * drawn[s]) // (c * counts[s]))
        deadline[s] += c * (common // counts[s])
    return table


def permute(position: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """Where a permutation of range(n), chosen by `key`, sends each position; O(1) memory, the same on every machine.

    A Feistel network over the next even power of two, walked until the value is below n again (Black and Rogaway 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = blake2b(key, digest_size=8 * FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    value, outside = position.astype(np.uint64), np.ones(len(position), bool)
    while outside.any():
        left, right = value[outside] >> half, value[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        value[outside] = left << half | right
        outside = value >= n
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Each bit of the result depends on every bit of x (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# -------------------------------------------------------------------------------------------------------------- windows

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
        """Copies the n_ctx + 1 tokens of one window into `row` (uint32), LOSS_MASK_BIT where it is set.

        Raises UserError for an id outside the vocabulary."""
        shard, start = self._find(window)
        row[:] = self.tokens[shard][start:start + self.n_ctx + 1]
        largest = (row & ~LOSS_MASK_BIT if self.is_masked else row).max()
        if largest >= self.vocab_size:
            path = self.shards[shard].path
            raise UserError(f"{path} holds the id {largest} near token {start}, but its tokenizer has "
                              f"{self.vocab_size}: the file is damaged; list all damage with "
                              f"`python prepare_data.py --verify {path.parent}`")

    def targets(self, window: int) -> int:
        """How many tokens of a window the model is to foretell; without a mask nothing is read."""
        if not self.is_masked:
            return self.n_ctx
        shard, start = self._find(window)
        return int(np.count_nonzero(self.tokens[shard][start + 1:start + self.n_ctx + 1] < LOSS_MASK_BIT))

    def targets_of_split(self) -> int:
        """How many of all tokens, those of no window included, are targets somewhere."""
        return sum(int(np.count_nonzero(tokens < LOSS_MASK_BIT)) if self.is_masked else len(tokens) for tokens in self.tokens)

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
        x &= int(~LOSS_MASK_BIT)
        y[y >= int(LOSS_MASK_BIT)] = NO_TARGET
    return torch.from_numpy(x), torch.from_numpy(y)


# ----------------------------------------------------------------------------------------------------------------- data

def open_data(config: Config, tokenizer_sha256: str) -> "Data":
    """The data of a run: all shards of every source in the mixture, checked against their index.json.

    Raises UserError: a missing or damaged file, shards of another tokenizer, a source too short for one window, a run
    that would see a source more than data.max_epochs times.
    """
    indexes = {}
    for name in config.data.mixture:
        folder, wanted = Path(config.data.dir) / name, config.data.tokenizer
        kind = tokenizer_kind(wanted)
        try:
            index = indexes[name] = read_index(folder)
        except ValueError as error:
            raise UserError(str(error)) from error
        if index.tokenizer != kind:
            its = "the path of that folder" if index.tokenizer == "folder" else index.tokenizer
            raise UserError(f"{folder} was made with tokenizer={index.tokenizer}, but data.tokenizer={wanted}: set "
                              f"data.tokenizer={its} and model.vocab_size={index.vocab_size}, or prepare "
                              f"the text with `python prepare_data.py` and tokenizer={wanted} into another folder")
        if index.tokenizer_sha256 != tokenizer_sha256 and kind == "folder":
            raise UserError(f"{folder} was made with another tokenizer than the one in {wanted} "
                              f"({index.tokenizer_sha256[:9]}..., not {tokenizer_sha256[:9]}...): set data.tokenizer to the "
                              f"folder of that one, or prepare the text with tokenizer={wanted} into another folder")
        if index.tokenizer_sha256 != tokenizer_sha256:
            raise UserError(f"{folder} was made with other rules of tokenizer={wanted} ({index.tokenizer_sha256[:9]}"
                              f"..., not {tokenizer_sha256[:9]}...): delete the folder and prepare it again with "
                              f"`python prepare_data.py`")
        # An imported model's embedding may have rows that its tokenizer does not use.
        if index.vocab_size > config.model.vocab_size or (kind != "folder" and index.vocab_size < config.model.vocab_size):
            raise UserError(f"{folder} holds ids below {index.vocab_size}, but model.vocab_size="
                              f"{config.model.vocab_size}: set model.vocab_size={index.vocab_size}")
    return Data(config, indexes)


# ----------------------------------------------------------------------------------------------------------------- data

class Data:
    """Built by open_data(). Sources are in alphabetical order, so the order a mixture was typed in changes nothing."""

    def __init__(self, config: Config, indexes: dict[str, Index]):
        self.config, self.indexes, self.sources = config, indexes, sorted(indexes)
        self.n_ctx, self.sequences_per_step = config.model.n_ctx, config.data.tokens_per_step // config.model.n_ctx
        self.n_sequences = config.total_steps * self.sequences_per_step     # of the whole run
        try:
            counts = shares({name: config.data.mixture[name] for name in self.sources})
        except ValueError as error:
            raise UserError(str(error)) from error
        self.period, self._counts = sum(counts.values()), np.array(list(counts.values()))
        self._plan_order(self.n_sequences)
        self._verification: Verification | None = None
        self._train = [Windows(indexes[name], "train", self.n_ctx) for name in self.sources]
        self._val = {name: Validation(Windows(index, "val", self.n_ctx), index.splits["val"].text_bytes, config.eval.tokens)
                     for name, index in sorted(indexes.items())}
        self._rows = lru_cache(maxsize=2)(self._locate_step)    # a step at a time: one call costs as much as hundreds
        whole, rest = divmod(self.n_sequences, self.period)
        self.planned = whole * self._counts + np.bincount(self._table[:rest], minlength=len(self.sources))   # sequences
        if problems := [p for s in range(len(self.sources)) for p in self._problems(s)]:
            raise UserError("\n".join(problems))

    @property
    def train_sha256(self) -> str:
        """Identity of the training tokens on disk, whatever the mixture makes of them."""
        return _identity((name, self.indexes[name].splits["train"]) for name in self.sources)

    @property
    def val_sha256(self) -> str:
        """Identity of the validation set: tokens and the windows chosen from them."""
        selections = [[name, self.n_ctx, val.selection.tolist()] for name, val in self._val.items()]
        return _identity(((name, self.indexes[name].splits["val"]) for name in self.sources), selections)

    @property
    def weights(self) -> dict[str, float]:
        """Each source's share of the mixture, as resolved; together 1."""
        return {name: int(count) / self.period for name, count in zip(self.sources, self._counts, strict=True)}

    @property
    def epochs(self) -> dict[str, float]:
        """How often the run sees each source's training tokens."""
        return {name: int(self.planned[s]) / len(self._train[s]) for s, name in enumerate(self.sources)}

    def val(self, source: str) -> Validation:
        return self._val[source]

    def describe(self) -> list[str]:
        """A line per source: share of the mixture as resolved, training tokens there are, planned ones, epochs."""
        return [f"data: {name:12} share {self.weights[name]:.4f} ({self._counts[s]}/{self.period})  "
                f"{len(self._train[s]) * self.n_ctx:,} tokens there, {self.planned[s] * self.n_ctx:,} planned "
                f"= {self.epochs[name]:.2f} epochs; {self._val[name].tokens:,} to validate on"
                for s, name in enumerate(self.sources)]

    def locate(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source number and training window, int64 each, of the run's sequences of these numbers (from 0).

        A run that left steps out reads on past its plan: mixture and epochs go on as in a longer run.
        """
        assert sequences.min() >= 0
        period, position = np.divmod(sequences, self.period)
        if position.max() >= len(self._table):
            self._plan_order(2 * int(position.max()))
        source = self._table[position].astype(np.int64)
        epoch, place = np.divmod(period * self._counts[source] + self._ordinal[position],
                                 np.array([len(windows) for windows in self._train])[source])
        window = np.empty(len(sequences), np.int64)
        for s, e in sorted(set(zip(source.tolist(), epoch.tolist(), strict=True))):
            chosen = (source == s) & (epoch == e)
            key = f"{self.config.seed}/{self.sources[s]}/{e}".encode()
            window[chosen] = permute(place[chosen], len(self._train[s]), key)
        return source, window

    def _plan_order(self, length: int) -> None:
        """The mixture's order over the first `length` sequences of its period: a longer one begins as a shorter one."""
        table = schedule(self._counts.tolist(), min(self.period, length))
        ordinal = np.empty(len(table), np.int64)        # which of its source's sequences each is
        for s in range(len(self.sources)):
            ordinal[table == s] = np.arange((table == s).sum())
        self._ordinal, self._table = ordinal, table

    def targets(self, step: int) -> int:
        """Targets of a step's sequences, over all ranks: tokens_per_step where no source is masked, 0 or more where one is."""
        if not any(windows.is_masked for windows in self._train):
            return self.config.data.tokens_per_step
        return sum(self._train[s].targets(w) for s, w in self._rows(step))

    def batch(self, step: int, micro: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y, int64 (micro_batch, n_ctx) on the CPU; y is x one token on, -100 where that is a prompt's. `step` counts
        from 0.

        A step's sequences are dealt micro-batch by micro-batch and, within one, rank by rank, so all ranks together
        read the same sequences in a step however many they are. Raises UserError for an id outside the vocabulary.
        """
        size = self.config.data.micro_batch
        place = (micro * world_size + rank) * size
        assert 0 <= rank < world_size and 0 <= place <= self.sequences_per_step - size
        rows = self._rows(step)[place:place + size]
        return read_batch([(self._train[s], w) for s, w in rows], self.n_ctx)

    def _locate_step(self, step: int) -> list[tuple[int, int]]:
        source, window = self.locate(step * self.sequences_per_step + np.arange(self.sequences_per_step))
        return list(zip(source.tolist(), window.tolist(), strict=True))

    def stream(self, start_step: int, stop_step: int, rank: int, world_size: int,
               device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's micro-batches of steps start_step to stop_step (exclusive), in order, on the device.

        Steps past the planned ones are served too. The next two batches are prepared by a background thread; its errors
        are raised here, in their turn, and what verify() found at once. close() the generator, or let it go, and the
        thread ends.
        """
        is_cuda = torch.device(device).type == "cuda"

        def prepare(step: int, micro: int):
            return [t.pin_memory() if is_cuda else t for t in self.batch(step, micro, rank, world_size)]

        accumulation = self.config.accumulation(world_size)
        order = ((step, micro) for step in range(start_step, stop_step) for micro in range(accumulation))
        with ThreadPoolExecutor(1, "data") as thread:
            ahead = deque(thread.submit(prepare, *place) for place in islice(order, 2))
            while ahead:
                self._raise_damage()
                try:
                    x, y = ahead.popleft().result()
                except UserError as error:
                    _met_here(error)
                    raise
                ahead.extend(thread.submit(prepare, *place) for place in islice(order, 1))
                yield x.to(device, non_blocking=is_cuda), y.to(device, non_blocking=is_cuda)

    def verify(self, rank: int, size: int) -> None:
        """Begin to hash this rank's share of all shards, training and validation, in the background.

        Ranks that read the same disk share the work: `rank` of `size` of them. A size tells at open that a file was cut,
        the hash alone that a bit of it flipped, and the ids of such a file are mostly possible ones.
        """
        shards = [shard for name in self.sources for split in self.indexes[name].splits.values() for shard in split.shards]
        self._verification = Verification(sorted(shards, key=lambda shard: -shard.tokens)[rank::size])

    def verified(self) -> None:
        """Wait until verify() is through. Raises UserError naming a damaged shard, OSError for one it could not read."""
        if self._verification is not None:
            self._verification.wait()
        self._raise_damage()

    def _raise_damage(self) -> None:
        problem = self._verification and self._verification.problem
        if isinstance(problem, Exception):
            raise problem
        if problem:
            raise _met_here(UserError(f"{problem}; then run the same command again: it goes on from the last checkpoint"))

    def _problems(self, s: int) -> Iterator[str]:
        name, there, limit = self.sources[s], len(self._train[s]), self.config.data.max_epochs
        folder = Path(self.config.data.dir) / name
        for split, count in ("train", there), ("val", len(self._val[name])):
            if not count:
                yield (f"{folder} has {self.indexes[name].splits[split].tokens} {split} tokens, too few for one window "
                       f"of model.n_ctx={self.n_ctx} tokens and a target: prepare more text, or a larger val_share=")
        if len(self._val[name]) and not self._val[name].tokens:
            yield (f"{folder}: prompts fill all {len(self._val[name])} validation windows of model.n_ctx={self.n_ctx} tokens, "
                   f"which leaves no response to measure: raise eval.tokens")
        if there and self.planned[s] > limit * there:
            steps = int(limit * there) * self.period // int(self._counts[s]) // self.sequences_per_step
            yield (f"this run plans {self.planned[s] * self.n_ctx:,} tokens of {name}, but {folder} has "
                   f"{there * self.n_ctx:,}: {self.planned[s] / there:.2f} epochs, and data.max_epochs={limit:g}; set "
                   f"data.max_epochs={math.ceil(100 * self.planned[s] / there) / 100:g}, or steps={steps} at most, or "
                   f"give {name} less of data.mixture, or prepare more text")


def _met_here(error: UserError) -> UserError:
    """Other ranks read other shards and may know nothing of it: the note says that this one must be heard."""
    error.add_note("met by this rank, perhaps alone")
    return error


def _identity(splits, *more) -> str:
    shards = [[name, [[s.path.name, s.tokens, s.sha256] for s in split.shards]] for name, split in splits]
    return sha256(json.dumps([shards, *more]).encode()).hexdigest()
