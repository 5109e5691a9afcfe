"""Serve the micro-batch of (step, micro, rank) from token shards, and the validation windows.

Nothing here has state. The order of the whole run is a pure function of the seed, the mixture and
the shards: the same on every machine, at every world size, in every precision. Sequence i of the
run belongs to a source (the mixture's weights hold to within one sequence at every i), is the k-th
of that source, and a keyed permutation, a new one in each epoch, maps k to a window. A resume needs
only the step number.

A window is n_ctx tokens of one shard and the token after them, which is only a target; windows do
not overlap."""

import math
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from lib.errors import UserError
from lib.files import digest
from model import NO_TARGET
from runtime.config import Config
from runtime.documents import number_documents
from runtime.guard import FEW_TARGETS
from runtime.shards import LOSS_MASK_BIT, Index, Shard, missing_source, read_index, shard_damage
from runtime.tokenizer import tokenizer_kind

# read before the first step to say how many steps have no target: some milliseconds
SAMPLED_SEQUENCES = 4096
WEIGHT_STEPS = 2**20  # a mixture of no simple ratio is rounded to shares of this
FEISTEL_ROUNDS = 6


# ------------------------------------------------------------------------------------------- order


def shares(mixture: dict[str, float]) -> dict[str, int]:
    """Whole numbers in the ratio of the weights, without a common factor; their sum is the period
    of the mixture.

    Exact for weights that are fractions with a denominator up to 1000 (0.07, 1/3, 80); others are
    rounded to shares of 2**20 by largest remainder."""
    fractions = {name: Fraction(weight).limit_denominator(1000) for name, weight in mixture.items()}
    scale = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    counts = {name: int(fraction * scale) for name, fraction in fractions.items()}
    is_exact = all(
        abs(fractions[name] / Fraction(weight) - 1) < 1e-12 for name, weight in mixture.items()
    )
    if not is_exact or sum(counts.values()) > WEIGHT_STEPS * math.gcd(*counts.values()):
        counts = _rounded_shares(mixture)
    common = math.gcd(*counts.values())
    return {name: count // common for name, count in counts.items()}


def _rounded_shares(mixture: dict[str, float]) -> dict[str, int]:
    """Whole numbers about in the ratio of the weights, whose sum is WEIGHT_STEPS: what is left by
    rounding down goes to the largest remainders."""
    total = sum(map(Fraction, mixture.values()))
    quotas = {name: Fraction(weight) * WEIGHT_STEPS / total for name, weight in mixture.items()}
    counts = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    for name in by_remainder[: WEIGHT_STEPS - sum(counts.values())]:
        counts[name] += 1
    return counts


def schedule(counts: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The source of each sequence, (length,) uint16, such that every prefix holds its share of each
    to within one, and which of its source's it is, (length,) int64. A longer schedule begins as a
    shorter one.

    Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): with n sources of
    share a of P, the x-th sequence (from 0) of a source may come once K a / P - x >= 1 / (2n - 2),
    where K counts from 1; of those that may, the one is taken whose deviation would reach 1 - 1 /
    (2n - 2) first. No prefix deviates by more than that."""
    n = len(counts)
    period = sum(counts)
    c = max(1, 2 * n - 2)
    table = np.empty(length, np.uint16)
    ordinal = np.empty(length, np.int64)
    common = math.lcm(*counts)
    # In whole numbers, so that every machine decides alike: releases are slots, deadlines slots
    # times c common / P.
    release = [-(-period // (c * a)) for a in counts]
    deadline = [(c - 1) * (common // a) for a in counts]
    drawn = [0] * n
    for k in range(length):
        s = min((s for s in range(n) if release[s] <= k + 1), key=deadline.__getitem__)
        table[k] = s
        ordinal[k] = drawn[s]
        drawn[s] += 1
        release[s] = -(-period * (1 + c * drawn[s]) // (c * counts[s]))
        deadline[s] += c * (common // counts[s])
    return table, ordinal


def permute(position: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """The images of `position` under a permutation of range(n) chosen by `key`, int64; O(1) memory.

    A Feistel network over the next even power of two, walked until the value is below n again
    (Black and Rogaway 2002)."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    key_bytes = blake2b(key, digest_size=8 * FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(key_bytes, "<u8").astype(np.uint64)
    value = position.astype(np.uint64)
    outside = np.ones(len(position), bool)
    while outside.any():
        high = value[outside] >> half
        low = value[outside] & mask
        for round_key in round_keys:
            # by SplitMix64's finaliser (Steele et al. 2014): each bit depends on every bit
            mixed = low ^ round_key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed = (mixed ^ (mixed >> np.uint64(31))) & mask
            high, low = low, high ^ mixed
        value[outside] = high << half | low
        outside = value >= n
    return value.astype(np.int64)


# ----------------------------------------------------------------------------------------- windows


class Windows:
    """The windows of one split of one source, numbered through its shards."""

    def __init__(self, index: Index, split: str, n_ctx: int):
        self.n_ctx = n_ctx
        self.index = index
        self.vocab_size = index.vocab_size
        self.is_masked = index.is_masked
        # an empty file cannot be mapped
        self.shards = [shard for shard in index.splits[split].shards if shard.tokens]
        # the last token is only a target
        self.ends = np.cumsum([0, *((shard.tokens - 1) // n_ctx for shard in self.shards)])
        # Plain arrays over the mapping: slicing a np.memmap costs more than copying the window.
        self.tokens = [np.asarray(np.memmap(shard.path, index.dtype, "r")) for shard in self.shards]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, window: int) -> np.ndarray:
        """The n_ctx + 1 tokens of a window as they lie on disk. Raises UserError for an id outside
        the vocabulary."""
        shard = int(np.searchsorted(self.ends, window, "right")) - 1
        start = (window - int(self.ends[shard])) * self.n_ctx
        row = self.tokens[shard][start : start + self.n_ctx + 1]
        ids = row & ~LOSS_MASK_BIT if self.is_masked else row
        largest = ids.max()
        if largest >= self.vocab_size:
            folder = self.shards[0].path.parent
            raise _on_this_rank(
                f"{folder} holds the id {largest}, its tokenizer {self.vocab_size} ids: a shard is"
                f" damaged; `python prepare_data.py --verify {folder}` names it"
            )
        return row

    def targets(self, window: int) -> int:
        """How many of a window's tokens are to be learned."""
        if not self.is_masked:
            return self.n_ctx
        return int(np.count_nonzero(self.read(window)[1:] < LOSS_MASK_BIT))

    def has_targets(self) -> bool:
        return any(self.targets(window) for window in range(len(self)))

    def target_share(self) -> float:
        """Targets over tokens, of SAMPLED_SEQUENCES windows at most, evenly strided."""
        count = min(len(self), SAMPLED_SEQUENCES)
        sample = np.arange(count) * len(self) // count
        return sum(self.targets(window) for window in sample.tolist()) / (count * self.n_ctx)


class Validation:
    """The fixed validation windows of one source: the same, in the same order, in every run of
    equal n_ctx.

    Attributes: n_ctx; selection, the numbers of the windows; targets of each window, (windows,)
    int64; tokens, the sum of targets; text_bytes, an estimate of their UTF-8 bytes: tokens x the
    mean bytes per target of the whole split. End-of-text tokens have no bytes: bits per byte =
    summed nats / ln 2 / text_bytes includes predicting where a document ends."""

    def __init__(self, index: Index, n_ctx: int, tokens_at_most: int):
        windows = Windows(index, "val", n_ctx)
        split = index.splits["val"]
        self.n_ctx = n_ctx
        self.n_windows = len(windows)  # of which `selection` are read
        count = min(len(windows), -(-tokens_at_most // n_ctx))
        self.selection = np.arange(count) * len(windows) // max(1, count)  # evenly strided
        self._rows = [(windows, w) for w in self.selection.tolist()]
        self.targets = np.array([windows.targets(w) for _, w in self._rows], np.int64)
        self.tokens = int(self.targets.sum())
        targets_of_split = split.tokens
        if index.is_masked:
            targets_of_split = sum(
                int(np.count_nonzero(tokens < LOSS_MASK_BIT)) for tokens in windows.tokens
            )
        self.text_bytes = round(self.tokens * split.text_bytes / max(1, targets_of_split))

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows start to stop (exclusive) as x and y, (stop - start, n_ctx), fewer at the end:
        see _read_batch()."""
        return _read_batch(self._rows[start:stop], self.n_ctx)


def _read_batch(rows: list[tuple[Windows, int]], n_ctx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y, int64 (rows, n_ctx) on the CPU: y is x shifted by one token, NO_TARGET where that is
    context only."""
    tokens = np.empty((len(rows), n_ctx + 1), np.uint32)
    for row, (windows, window) in zip(tokens, rows, strict=True):
        row[:] = windows.read(window)
    x = (tokens[:, :-1] & ~LOSS_MASK_BIT).astype(np.int64)
    y = tokens[:, 1:].astype(np.int64)
    y[y >= int(LOSS_MASK_BIT)] = NO_TARGET
    return torch.from_numpy(x), torch.from_numpy(y)


# -------------------------------------------------------------------------------------------- data


class Mixture:
    """Which source each sequence of a run belongs to.

    Attributes: counts, each source's share of a period, (sources,) int64; period, their sum, in
    sequences; planned, each source's sequences in the run, (sources,) int64."""

    def __init__(self, weights: dict[str, float], n_sequences: int):
        """n_sequences: of the whole run."""
        counts = shares(weights)
        self.counts = np.array(list(counts.values()))
        self.period = sum(counts.values())
        self.n_sequences = n_sequences
        self._schedule = lru_cache(maxsize=2)(self._make_schedule)
        whole_periods, remainder = divmod(n_sequences, self.period)
        sources_of_remainder = self._schedule(n_sequences)[0][:remainder]
        self.planned = whole_periods * self.counts + np.bincount(
            sources_of_remainder, minlength=len(counts)
        )

    def _make_schedule(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        return schedule(self.counts.tolist(), min(self.period, length))

    def locate(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source number of the run's sequences of these numbers (from 0), and which of its source's
        each is, int64 both. A run that left steps out reads on past its plan."""
        period, position = np.divmod(sequences, self.period)
        length = self.n_sequences
        while length <= position.max():
            length *= 2
        table, ordinal = self._schedule(length)
        source = table[position].astype(np.int64)
        return source, period * self.counts[source] + ordinal[position]


class Data:
    """The data of a run: all shards of every source in the mixture, checked against their
    index.json. Sources are in alphabetical order, so the order a mixture was typed in changes
    nothing. Raises UserError.

    Attributes: sources, their names; weights, each one's share of the mixture as rounded, together
    1; planned, each one's sequences in the run, an array; epochs, how often the run sees each one's
    training tokens; val, each one's Validation; train_sha256, the identity of the training tokens
    on disk, whatever the mixture; val_sha256, of the validation tokens and the windows selected
    from them."""

    def __init__(self, config: Config, *tokenizer_sha256: str, eot: int | None = None):
        """tokenizer_sha256: the hashes that the run's tokenizer goes by, today's first. eot: its
        end-of-text token, which data.document_mask needs."""
        self.config = config
        self._eot = eot
        self.sources = sorted(config.data.mixture)
        self.n_ctx = config.model.n_ctx
        self.sequences_per_step = config.data.tokens_per_step // self.n_ctx
        self.n_sequences = config.full_steps * self.sequences_per_step  # of the whole run
        self._indexes = _read_indexes([Path(config.data.dir) / name for name in self.sources])
        _refuse_another_tokenizer(config, self._indexes, tokenizer_sha256)
        self.tokenizer_sha256 = _hash_in_shards(self._indexes, tokenizer_sha256)
        weights = {name: config.data.mixture[name] for name in self.sources}
        self._mixture = Mixture(weights, self.n_sequences)
        self.planned = self._mixture.planned
        self._open_windows()
        # a step at a time: one call costs as much as hundreds
        self._rows = lru_cache(maxsize=2)(self._locate_step)
        problems: list[str] = []
        for s in range(len(self.sources)):
            problems += self._problems(s)
        if problems:
            raise UserError("\n".join(problems))
        self._identify()
        self._hashed: Future = Future()  # verify() ends it

    def _open_windows(self) -> None:
        self._train = [Windows(index, "train", self.n_ctx) for index in self._indexes.values()]
        # training windows of each source, (sources,)
        self._n_windows = np.array([len(windows) for windows in self._train])
        self.val = {
            name: Validation(index, self.n_ctx, self.config.eval.tokens)
            for name, index in self._indexes.items()
        }

    def _identify(self) -> None:
        """What summaries and resumes need: shares, epochs, identities."""
        share = self._mixture.counts / self._mixture.period
        epochs = self.planned / self._n_windows
        self.weights = dict(zip(self.sources, share.tolist(), strict=True))
        self.epochs = dict(zip(self.sources, epochs.tolist(), strict=True))
        self.train_sha256 = self._identity("train")
        self.val_sha256 = self._identity(
            "val", [[name, self.n_ctx, val.selection.tolist()] for name, val in self.val.items()]
        )

    def _problems(self, s: int) -> Iterator[str]:
        """A sentence for each reason why the run cannot be trained on source number s."""
        name = self.sources[s]
        folder = Path(self.config.data.dir) / name
        splits = self._indexes[name].splits
        n_train = int(self._n_windows[s])
        n_val = self.val[name].n_windows
        if not n_train:
            yield self._problem_of_few_tokens("train", folder, splits["train"].tokens)
        if not n_val:
            yield self._problem_of_few_tokens("val", folder, splits["val"].tokens)
        if n_train and not self._train[s].has_targets():
            yield (
                f"{folder} has no target in its"
                f" {splits['train'].tokens} training tokens: they are prompts"
                " alone, from which nothing can be learned; prepare rows that have a response"
            )
        if n_val and not self.val[name].tokens:
            yield self._problem_without_targets(name)
        planned = int(self.planned[s])
        limit = self.config.data.max_epochs
        if n_train and planned > limit * n_train:
            needed = math.ceil(100 * planned / n_train) / 100
            yield (
                f"this run plans {planned * self.n_ctx:,} tokens of {name}, but {folder} has"
                f" {n_train * self.n_ctx:,} and data.max_epochs={limit:g}; set it to"
                f" {needed:g}, or give fewer steps, or {name} less"
                " of data.mixture, or prepare more text"
            )

    def _problem_of_few_tokens(self, split: str, folder: Path, tokens: int) -> str:
        remedy = "prepare more text"
        if split == "val":
            remedy += ", or raise val_share="
        return (
            f"{folder} has {tokens} {split} tokens, too"
            f" few for one window of model.n_ctx={self.n_ctx} tokens and a target: {remedy}"
        )

    def _problem_without_targets(self, name: str) -> str:
        """The sentence for a masked source none of whose selected validation windows holds a
        target."""
        index = self._indexes[name]
        folder = Path(self.config.data.dir) / name
        tokens = self.config.eval.tokens
        n_windows = self.val[name].n_windows
        selected = len(self.val[name])
        while selected < n_windows:
            selected = min(2 * selected, n_windows)
            if Validation(index, self.n_ctx, selected * self.n_ctx).tokens:
                return (
                    f"eval.tokens={tokens} selects {len(self.val[name])} of the"
                    f" {n_windows} validation windows of {folder}, all of prompts without a"
                    f" response to learn: give eval.tokens={selected * self.n_ctx} or more"
                )
        return (
            f"none of the {n_windows} validation windows of {folder} holds a response to learn:"
            " raise val_share=, or prepare data with responses"
        )

    def _identity(self, split: str, *more: object) -> str:
        """A hash of the shards of a split of every source, and of `more`."""
        files = []
        for name, index in self._indexes.items():
            shards = index.splits[split].shards
            files.append(
                [name, [[shard.path.name, shard.tokens, shard.sha256] for shard in shards]]
            )
        return digest([files, *more])

    def describe(self) -> list[str]:
        """A line per source: its share of the mixture, training tokens there are, planned ones,
        epochs; then what there is to say of targets, where a source is masked."""
        return [*self._describe_sources(), *self._describe_targets()]

    def _describe_sources(self) -> list[str]:
        lines = []
        counts, period = self._mixture.counts, self._mixture.period
        for s, name in enumerate(self.sources):
            tokens = self._n_windows[s] * self.n_ctx
            planned_tokens = self.planned[s] * self.n_ctx
            share = f"share {self.weights[name]:.4f} ({counts[s]}/{period})"
            lines.append(
                f"data: {name:12} {share}  {tokens:,} tokens there,"
                f" {planned_tokens:,} planned = {self.epochs[name]:.2f} epochs;"
                f" {self.val[name].tokens:,} to validate on"
            )
        return lines

    def _describe_targets(self) -> list[str]:
        lines = []
        for name, windows in zip(self.sources, self._train, strict=True):
            if windows.is_masked:
                lines.append(
                    f"data: {name:12} {windows.target_share():.2%} of its tokens are targets"
                    " (responses), the rest is context"
                )
        if lines:
            lines += self._describe_steps_with_few_targets()
        return lines

    def _describe_steps_with_few_targets(self) -> list[str]:
        """Lines on steps that can teach little, counted among the first; none where there are
        none."""
        steps = min(self.config.total_steps, max(1, SAMPLED_SEQUENCES // self.sequences_per_step))
        targets = np.array([self.targets(step) for step in range(steps)])
        n_without = int((targets == 0).sum())
        n_few = int(((targets > 0) & (targets < FEW_TARGETS)).sum())
        lines = []
        start = f"of the first {steps} steps have"
        if n_without:
            lines.append(f"data: {n_without} {start} no target: they are read and change no weight")
        if n_few:
            lines.append(
                f"data: {n_few} {start} fewer than {FEW_TARGETS} targets: too few for the guard to"
                " tell a spike"
            )
        if lines:
            tokens = self.config.data.tokens_per_step
            lines.append(
                f"data: a larger data.tokens_per_step (now {tokens:,}) gives each step more targets"
            )
        return lines

    def locate(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source number and training window, int64 each, of the run's sequences of these numbers
        (from 0).

        A run that left steps out reads on past its plan: mixture and epochs go on as in a longer
        run."""
        source, ordinal = self._mixture.locate(sequences)
        epoch, place = np.divmod(ordinal, self._n_windows[source])
        window = np.empty(len(sequences), np.int64)
        for s, e in sorted(set(zip(source.tolist(), epoch.tolist(), strict=True))):
            is_here = (source == s) & (epoch == e)
            key = f"{self.config.seed}/{self.sources[s]}/{e}"
            window[is_here] = permute(place[is_here], int(self._n_windows[s]), key.encode())
        return source, window

    def _locate_step(self, full_step: int) -> list[tuple[Windows, int]]:
        source, window = self.locate(
            full_step * self.sequences_per_step + np.arange(self.sequences_per_step)
        )
        return [(self._train[s], w) for s, w in zip(source.tolist(), window.tolist(), strict=True)]

    def _rows_of(self, step: int, offset: int) -> list[tuple[Windows, int]]:
        """Source and window of each of a step's sequences: all of a full step, or its part of
        one."""
        place = self.config.ramp.place(step)
        size = self.sequences_per_step // place.parts
        return self._rows(place.full_step + offset)[place.part * size : (place.part + 1) * size]

    def targets(self, step: int, offset: int = 0) -> int:
        """Targets in a step's sequences, over all ranks: its tokens where no source is masked, 0 or
        more where one is. offset as for batch()."""
        return sum(windows.targets(window) for windows, window in self._rows_of(step, offset))

    def batch(
        self, step: int, micro: int, rank: int, world_size: int, offset: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of a micro-batch, (micro_batch, n_ctx), as _read_batch() returns them; `step`
        counts from 0; `offset`: full steps' worth of data that rollbacks have left out.

        A step's sequences are dealt micro-batch by micro-batch and, within one, rank by rank, so
        all ranks together read the same sequences in a step however many they are. Raises UserError
        for an id outside the vocabulary."""
        return _read_batch(self._micro_batch(step, micro, rank, world_size, offset), self.n_ctx)

    def _micro_batch(
        self, step: int, micro: int, rank: int, world_size: int, offset: int
    ) -> list[tuple[Windows, int]]:
        """The windows of a micro-batch; the arguments as for batch()."""
        rows = self._rows_of(step, offset)
        size = self.config.micro_batch
        place = (micro * world_size + rank) * size
        assert 0 <= rank < world_size and 0 <= place <= len(rows) - size
        return rows[place : place + size]

    def documents(
        self, step: int, micro: int, rank: int, world_size: int, offset: int = 0
    ) -> torch.Tensor:
        """The number of each token's document within its window, (micro_batch, n_ctx) int32, of the
        micro-batch that batch() returns."""
        assert self._eot is not None, "documents begin with the tokenizer's end-of-text token"
        numbers = np.empty((self.config.micro_batch, self.n_ctx), np.int32)
        rows = self._micro_batch(step, micro, rank, world_size, offset)
        for row, (windows, window) in zip(numbers, rows, strict=True):
            row[:] = number_documents(windows.read(window)[:-1], windows.index.border(self._eot))
        return torch.from_numpy(numbers)

    def stream(
        self,
        start_step: int,
        stop_step: int,
        rank: int,
        world_size: int,
        device: torch.device,
        offset: int = 0,
    ) -> Generator[tuple[torch.Tensor, ...]]:
        """This rank's micro-batches of steps start_step to stop_step (exclusive), in order, on the
        device: what batch() returns and, with data.document_mask, documents(); offset as for
        batch().

        A background thread prepares the next two batches; its errors are raised in their turn,
        damage that verify() found at the next batch. Closing the generator ends the thread."""
        is_cuda = torch.device(device).type == "cuda"

        def prepare(step: int, micro: int) -> list[torch.Tensor]:
            batch = [*self.batch(step, micro, rank, world_size, offset)]
            if self.config.data.document_mask:
                batch.append(self.documents(step, micro, rank, world_size, offset))
            return [tensor.pin_memory() if is_cuda else tensor for tensor in batch]

        order = self._micro_batches(start_step, stop_step, world_size)
        with ThreadPoolExecutor(1, "data") as thread:
            ahead = deque(thread.submit(prepare, *place) for place in islice(order, 2))
            while ahead:
                if self._hashed.done():
                    self._hashed.result()
                batch = ahead.popleft().result()
                ahead.extend(thread.submit(prepare, *place) for place in islice(order, 1))
                yield tuple(tensor.to(device, non_blocking=is_cuda) for tensor in batch)

    def _micro_batches(self, start_step: int, stop_step: int, world_size: int) -> Iterator:
        """(step, micro) of a rank's micro-batches, in order."""
        for step in range(start_step, stop_step):
            parts = self.config.ramp.place(step).parts
            for micro in range(self.config.accumulation(world_size, parts)):
                yield step, micro

    def verify(self, rank: int, size: int) -> None:
        """Begin to hash this rank's share of all shards, training and validation, in the
        background: `rank` of the `size` ranks that read the same disk. Only the hash shows a
        flipped bit; most ids in such a file are still valid."""
        shards: list[Shard] = []
        for index in self._indexes.values():
            shards += index.shards
        by_size = sorted(shards, key=lambda shard: -shard.tokens)
        share_of_rank = by_size[rank::size]

        def hash_share() -> None:
            try:
                for shard in share_of_rank:
                    problem = shard_damage(shard)
                    if problem is not None:
                        raise _on_this_rank(
                            f"{problem}; then run the same command again: it goes on from the last"
                            " checkpoint"
                        )
                self._hashed.set_result(None)
            except BaseException as error:
                # also MemoryError, say: a shard that was not hashed must not pass as sound
                self._hashed.set_exception(error)

        # A daemon thread and no thread pool, whose threads would keep an interrupted run from
        # exiting. hashlib releases the interpreter's lock.
        threading.Thread(target=hash_share, name="verify", daemon=True).start()

    def verified(self) -> None:
        """Wait until verify() is done. Raises UserError naming a damaged shard, OSError for one
        that could not be read."""
        self._hashed.result()


def _read_indexes(folders: list[Path]) -> dict[str, Index]:
    """The index of each source by its name. Raises UserError, once for all sources that are
    missing."""
    if missing := [folder for folder in folders if not (folder / "index.json").exists()]:
        raise UserError(missing_source(missing))
    return {folder.name: read_index(folder) for folder in folders}


def _refuse_another_tokenizer(
    config: Config, indexes: dict[str, Index], tokenizer_sha256: tuple[str, ...]
) -> None:
    """Raises UserError where the shards of a source were not made with the run's tokenizer, or hold
    other ids than its model has."""
    kind = tokenizer_kind(config.data.tokenizer)
    for name, index in indexes.items():
        folder = Path(config.data.dir) / name
        if index.tokenizer != kind or index.tokenizer_sha256 not in tokenizer_sha256:
            raise UserError(
                f"{folder} was made with"
                f" tokenizer={index.tokenizer} ({index.tokenizer_sha256[:9]}...), but"
                f" data.tokenizer={config.data.tokenizer} is another tokenizer"
                f" ({tokenizer_sha256[0][:9]}...): set data.tokenizer to the first and"
                f" model.vocab_size={index.vocab_size}, or prepare the text with the second"
                " elsewhere"
            )
        # An imported model's embedding may have rows that its tokenizer does not use.
        has_spare_rows = index.vocab_size < config.model.vocab_size and kind != "folder"
        if index.vocab_size > config.model.vocab_size or has_spare_rows:
            raise UserError(
                f"{folder} holds ids below {index.vocab_size}, but"
                f" model.vocab_size={config.model.vocab_size}: set"
                f" model.vocab_size={index.vocab_size}"
            )


def _hash_in_shards(indexes: dict[str, Index], tokenizer_sha256: tuple[str, ...]) -> str:
    """The tokenizer's hash as the shards have it, so that runs on the same shards agree, whichever
    hash was in use when they began."""
    stored = {index.tokenizer_sha256 for index in indexes.values()}
    return [sha256 for sha256 in tokenizer_sha256 if sha256 in stored][0]


def _on_this_rank(message: str) -> UserError:
    """With a note, by which train.py prints it on every rank that meets it: other ranks read other
    shards."""
    error = UserError(message)
    error.add_note("met by this rank, perhaps alone")
    return error
