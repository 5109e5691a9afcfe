import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eval.loss import ValLoss, bits_per_byte, evaluate
from model import GPT, GPTConfig


class Fixed:
    """n validation sequences of random tokens."""

    def __init__(self, n, seed):
        self.targets = np.full(n, 16)
        ids = torch.randint(257, (n, 17), generator=torch.Generator().manual_seed(seed))
        self.x, self.y = ids[:, :-1], ids[:, 1:]

    def __len__(self):
        return len(self.x)

    def batch(self, start, stop):
        return self.x[start:stop], self.y[start:stop]


SETS, WEIGHTS = {"a": Fixed(7, 0), "b": Fixed(3, 1)}, {"a": 0.25, "b": 0.75}


class Counting(torch.nn.Module):
    """A model that notes the shape of each batch."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt, self.shapes = gpt, []

    def forward(self, x, y):
        self.shapes.append(tuple(x.shape))
        return self.gpt(x, y)


def model():
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=16, vocab_size=257), torch.float32)
    gpt.init_weights(0)
    return gpt


def test_against_torchs_cross_entropy_sequence_by_sequence():
    gpt = model()
    got = evaluate(gpt, SETS, WEIGHTS, 4, torch.device("cpu"))
    for name, val in SETS.items():
        want = [F.cross_entropy(gpt(x[None])[0], y, reduction="sum").item() for x, y in zip(val.x, val.y, strict=True)]
        assert got.sequences[name] == pytest.approx(want, rel=1e-6)
        assert got.source_loss(name) == pytest.approx(sum(want) / len(val) / 16)
    assert got.loss == pytest.approx(0.25 * got.source_loss("a") + 0.75 * got.source_loss("b"))


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_and_any_batch_gives_the_same_sequences(micro_batch, size):
    counting = Counting(model())
    passes, reference = counting.shapes, evaluate(counting.gpt, SETS, WEIGHTS, 3, torch.device("cpu"))

    # One rank after the other; the gather of the last hands out what the earlier ones left.
    left, results = [[] for _ in range(2)], None
    for rank in range(size):
        call = iter(range(2))

        def gather(t, call=call):
            box = left[next(call)]
            box.append(t)
            return torch.stack((box + [t] * size)[:size])

        before = len(passes)
        results = evaluate(counting, SETS, WEIGHTS, micro_batch, torch.device("cpu"), rank, size, gather)
        assert len(passes) - before == sum(-(-len(v) // (micro_batch * size)) for v in SETS.values()), "as many on each rank"
    assert set(passes) == {(micro_batch, 16)}, "one shape to compile"
    for name in SETS:
        assert results.sequences[name] == pytest.approx(reference.sequences[name], rel=1e-6)


def test_an_evaluation_stops_when_asked_to_and_not_before():
    """A validation of minutes must not outlast the half minute that a stop request is given."""
    sets, counting = {"a": Fixed(40, 0), "b": Fixed(40, 1)}, Counting(model())
    want = evaluate(counting.gpt, sets, WEIGHTS, 1, torch.device("cpu"))
    for answers, n in (([False, True], 16), ([False] * 10, 80)):
        asked = iter(answers)
        counting.shapes.clear()
        found = evaluate(counting, sets, WEIGHTS, 1, torch.device("cpu"), is_stopping=lambda asked=asked: next(asked))
        assert len(counting.shapes) == n
        assert found is None if n == 16 else all(np.array_equal(found.sequences[s], want.sequences[s]) for s in sets)


def test_standard_error_by_simulation():
    rng = np.random.default_rng(0)

    def draw():
        return ValLoss({"a": rng.normal(32, 4, 50), "b": rng.normal(48, 8, 20)}, WEIGHTS,
                       {"a": np.full(50, 16), "b": np.full(20, 16)})

    spread = np.std([draw().loss for _ in range(4000)])
    assert draw().standard_error == pytest.approx(spread, rel=0.3)
    assert np.mean([draw().standard_error for _ in range(200)]) == pytest.approx(spread, rel=0.03)
    assert ValLoss({"a": np.ones(1)}, {"a": 1.0}, {"a": np.full(1, 16)}).standard_error is None


def test_of_unequally_many_targets_each_counts_the_same():
    """Nats follow the targets, some sequences have none: the loss is a mean over targets, its error that of a ratio."""
    rng = np.random.default_rng(1)

    def draw():
        targets = rng.integers(0, 200, 60)
        return ValLoss({"a": 3.0 * targets + rng.normal(0, 5, 60) * (targets > 0)}, {"a": 1.0}, {"a": targets})

    one = draw()
    assert one.loss == pytest.approx(one.sequences["a"].sum() / one.targets["a"].sum())
    spread = np.std([draw().loss for _ in range(4000)])
    assert np.mean([draw().standard_error for _ in range(200)]) == pytest.approx(spread, rel=0.05)


def test_targets_that_are_none_cost_nothing():
    """Against torch's mean over the rest; every sequence says how many it had."""
    gpt, val = model(), Fixed(5, 2)
    val.y = val.y.clone()
    val.y[:, :9] = -100
    val.y[3] = -100
    val.targets = (val.y != -100).sum(1).numpy()
    got = evaluate(gpt, {"a": val}, {"a": 1.0}, 2, torch.device("cpu"))
    want = F.cross_entropy(gpt(val.x).flatten(0, 1), val.y.flatten()).item()
    assert got.loss == pytest.approx(want, rel=1e-6) and got.sequences["a"][3] == 0
    assert got.targets["a"].tolist() == [7, 7, 7, 0, 7]


def test_bits_per_byte_by_hand():
    assert bits_per_byte(2 * math.log(2), SimpleNamespace(tokens=100, text_bytes=400)) == pytest.approx(0.5)
