"""Measure the loss on a fixed set of validation sequences, in order, on all ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

# a question may wait for the device: not at each batch, yet seconds apart at most
BATCHES_BETWEEN_QUESTIONS = 8


@dataclass(frozen=True)
class ValLoss:
    """Summed cross-entropy of each validation sequence, by source; everything else follows from
    it."""

    sequences: dict[str, np.ndarray]  # source -> (n,) float64, nats
    weights: dict[str, float]  # source -> share of the mixture
    # source -> (n,) int64: tokens of each sequence that were to be foretold
    targets: dict[str, np.ndarray]

    def source_loss(self, source: str) -> float:
        """Mean over a source's targets, nats per token."""
        return float(self.sequences[source].mean() / self.targets[source].mean())

    @property
    def loss(self) -> float:
        """Mixture-weighted mean, nats per token."""
        return sum(w * self.source_loss(s) for s, w in self.weights.items())

    @property
    def standard_error(self) -> float | None:
        """Of `loss` over the drawing of validation sequences, nats per token; None with one
        sequence in a source."""
        if min(map(len, self.sequences.values())) < 2:
            return None
        # Of a ratio of two means, where sequences have unequally many targets (Cochran 1977, 6.3);
        # else of a mean.
        variances = []
        for source, weight in self.weights.items():
            targets = self.targets[source]
            residuals = self.sequences[source] - self.source_loss(source) * targets
            factor = (weight / targets.mean()) ** 2
            variances.append(factor * residuals.var(ddof=1) / len(residuals))
        return math.sqrt(sum(variances))


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    val: dict,
    weights: dict[str, float],
    micro_batch: int,
    device: torch.device,
    rank: int = 0,
    size: int = 1,
    gather: Callable = lambda t: t[None],
    is_stopping: Callable[[], bool] = lambda: False,
) -> ValLoss | None:
    """The loss of `model` on every sequence of `val` (source -> set with len(), targets,
    batch(start, stop) -> x, y).

    Batches of `micro_batch` go to the ranks in turn. Every batch is full and every rank runs
    equally many, the last sequence repeated where they run out: one compiled shape, and no rank
    alone in a collective. `gather` stacks equally shaped tensors of all ranks. None where
    `is_stopping`, asked now and then and by all ranks alike, says so."""
    sequences = {}
    for source in weights:
        n = len(val[source])
        batches = -(-n // (micro_batch * size)) * size
        losses = torch.zeros(batches // size, micro_batch, dtype=torch.float64, device=device)
        for i, batch in enumerate(range(rank, batches, size)):
            rows = np.minimum(np.arange(batch * micro_batch, (batch + 1) * micro_batch), n - 1)
            x, y = val[source].batch(int(rows[0]), int(rows[-1]) + 1)
            if len(x) < micro_batch:
                repeat = torch.from_numpy(rows - rows[0])
                x, y = x[repeat], y[repeat]
            losses[i] = model(x.to(device), y.to(device))
            if (i + 1) % BATCHES_BETWEEN_QUESTIONS == 0 and is_stopping():
                return None
        everyone = gather(losses)  # (size, batches / size, micro_batch)
        sequences[source] = everyone.transpose(0, 1).reshape(-1)[:n].cpu().numpy()
    return ValLoss(sequences, dict(weights), {source: val[source].targets for source in weights})


def bits_per_byte(loss: float, val) -> float:
    """Nats per token on a validation set, as bits per byte of its text: comparable between
    tokenizers."""
    return loss / math.log(2) * val.tokens / val.text_bytes
