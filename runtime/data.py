"""Serve the micro-batch of (step, micro, rank) from token shards.

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
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from runtime.config import Config, ConfigError
from runtime.order import permute, schedule, shares
from runtime.shards import Index, Verification, read_index
from runtime.tokenizer import tokenizer_kind
from runtime.windows import Validation, Windows, read_batch


def open_data(config: Config, tokenizer_sha256: str) -> "Data":
    """The data of a run: all shards of every source in the mixture, checked against their index.json.

    Raises ConfigError: a missing or damaged file, shards of another tokenizer, a source too short for one window, a run
    that would see a source more than data.max_epochs times.
    """
    indexes = {}
    for name in config.data.mixture:
        folder, wanted = Path(config.data.dir) / name, config.data.tokenizer
        kind = tokenizer_kind(wanted)
        try:
            index = indexes[name] = read_index(folder)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if index.tokenizer != kind:
            its = "the path of that folder" if index.tokenizer == "folder" else index.tokenizer
            raise ConfigError(f"{folder} was made with tokenizer={index.tokenizer}, but data.tokenizer={wanted}: set "
                              f"data.tokenizer={its} and model.vocab_size={index.vocab_size}, or prepare "
                              f"the text with `python prepare_data.py` and tokenizer={wanted} into another folder")
        if index.tokenizer_sha256 != tokenizer_sha256 and kind == "folder":
            raise ConfigError(f"{folder} was made with another tokenizer than the one in {wanted} "
                              f"({index.tokenizer_sha256[:9]}..., not {tokenizer_sha256[:9]}...): set data.tokenizer to the "
                              f"folder of that one, or prepare the text with tokenizer={wanted} into another folder")
        if index.tokenizer_sha256 != tokenizer_sha256:
            raise ConfigError(f"{folder} was made with other rules of tokenizer={wanted} ({index.tokenizer_sha256[:9]}"
                              f"..., not {tokenizer_sha256[:9]}...): delete the folder and prepare it again with "
                              f"`python prepare_data.py`")
        # An imported model's embedding may have rows that its tokenizer does not use.
        if index.vocab_size > config.model.vocab_size or (kind != "folder" and index.vocab_size < config.model.vocab_size):
            raise ConfigError(f"{folder} holds ids below {index.vocab_size}, but model.vocab_size="
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
            raise ConfigError(str(error)) from error
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
            raise ConfigError("\n".join(problems))

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
        read the same sequences in a step however many they are. Raises ConfigError for an id outside the vocabulary.
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
                except ConfigError as error:
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
        """Wait until verify() is through. Raises ConfigError naming a damaged shard, OSError for one it could not read."""
        if self._verification is not None:
            self._verification.wait()
        self._raise_damage()

    def _raise_damage(self) -> None:
        problem = self._verification and self._verification.problem
        if isinstance(problem, Exception):
            raise problem
        if problem:
            raise _met_here(ConfigError(f"{problem}; then run the same command again: it goes on from the last checkpoint"))

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


def _met_here(error: ConfigError) -> ConfigError:
    """Other ranks read other shards and may know nothing of it: the note says that this one must be heard."""
    error.add_note("met by this rank, perhaps alone")
    return error


def _identity(splits, *more) -> str:
    shards = [[name, [[s.path.name, s.tokens, s.sha256] for s in split.shards]] for name, split in splits]
    return sha256(json.dumps([shards, *more]).encode()).hexdigest()
