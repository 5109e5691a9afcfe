"""eval/loss.py: a model's loss against torch's cross-entropy; ranks, batches, stop requests; its standard error by simulation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eval.loss import ValLoss, bits_per_byte, evaluate
from model import GPT, GPTConfig

CPU = torch.device("cpu")


class Fixed(torch.utils.data.TensorDataset):
    """n validation sequences of random tokens; one has no targets, one a few."""

    def __init__(self, n, seed):
        ids = torch.randint(257, (n, 17), generator=torch.Generator().manual_seed(seed))
        self.x, self.y = ids[:, :-1], ids[:, 1:].clone()
        self.y[0], self.y[1, :9] = -100, -100
        self.targets = (self.y >= 0).sum(1).numpy()
        super().__init__(self.x, self.y)

    def batch(self, start, stop):
        return self[start:stop]


SETS, WEIGHTS = {"a": Fixed(7, 0), "b": Fixed(3, 1)}, {"a": 0.25, "b": 0.75}


@pytest.fixture
def gpt():
    """A model that notes the shape of each batch."""
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=16, vocab_size=257), torch.float32)
    gpt.init_weights(0)
    gpt.shapes = []
    gpt.register_forward_pre_hook(lambda module, args: gpt.shapes.append(tuple(args[0].shape)))
    return gpt


def test_against_torchs_cross_entropy_sequence_by_sequence(gpt):
    got = evaluate(gpt, SETS, WEIGHTS, 4, CPU)
    for name, val in SETS.items():
        want = [F.cross_entropy(gpt(x[None])[0], y, reduction="sum").item() for x, y in zip(val.x, val.y, strict=True)]
        assert got.sequences[name] == pytest.approx(want, rel=1e-6) and got.targets[name].tolist()[:3] == [0, 7, 16]
        assert got.source_loss(name) == pytest.approx(F.cross_entropy(gpt(val.x).flatten(0, 1), val.y.flatten()).item())
    assert got.loss == pytest.approx(0.25 * got.source_loss("a") + 0.75 * got.source_loss("b"))


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_and_any_batch_gives_the_same_sequences(gpt, micro_batch, size):
    reference, left = evaluate(gpt, SETS, WEIGHTS, 3, CPU), {"a": [], "b": []}
    # One rank after the other; the gather of the last hands out what the earlier ones left.
    for rank in range(size):
        sources = iter(SETS)

        def gather(t, sources=sources):
            left[source := next(sources)].append(t)
            return torch.stack((left[source] + [t] * size)[:size])

        gpt.shapes.clear()
        results = evaluate(gpt, SETS, WEIGHTS, micro_batch, CPU, rank, size, gather)
        assert len(gpt.shapes) == sum(-(-len(v) // (micro_batch * size)) for v in SETS.values()), "as many on each rank"
        assert set(gpt.shapes) == {(micro_batch, 16)}, "one shape to compile"
    for name in SETS:
        assert results.sequences[name] == pytest.approx(reference.sequences[name], rel=1e-6)


@pytest.mark.parametrize("answers, n", [([False, True], 16), ([False] * 10, 80)])
def test_an_evaluation_stops_when_asked_to_and_not_before(gpt, answers, n):
    """A validation of minutes must not outlast the half minute that a stop request is given."""
    asked = iter(answers)
    found = evaluate(gpt, {"a": Fixed(40, 0), "b": Fixed(40, 1)}, WEIGHTS, 1, CPU, is_stopping=lambda: next(asked))
    assert len(gpt.shapes) == n and (found is None) == (n == 16)


def test_standard_error_by_simulation():
    """Nats follow the targets, some sequences have none: the loss is a mean over targets, its error that of a ratio."""
    rng = np.random.default_rng(0)

    def draw():
        targets = {"a": rng.integers(0, 200, 60), "b": np.full(20, 16)}
        nats = {"a": 3.0 * targets["a"] + rng.normal(0, 40, 60) * (targets["a"] > 0), "b": rng.normal(48, 8, 20)}
        return ValLoss(nats, WEIGHTS, targets)

    spread = np.std([draw().loss for _ in range(4000)])
    assert np.mean([draw().standard_error for _ in range(200)]) == pytest.approx(spread, rel=0.03)
    assert ValLoss({"a": np.ones(1)}, {"a": 1.0}, {"a": np.full(1, 16)}).standard_error is None
    assert bits_per_byte(2 * math.log(2), SimpleNamespace(tokens=100, text_bytes=400)) == pytest.approx(0.5)
