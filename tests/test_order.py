"""Tests of runtime/data.py: permutations are bijective, mixtures keep their weights at every prefix."""

import random
from fractions import Fraction

import numpy as np
import pytest

from runtime.data import permute, schedule, shares


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000, 65_537])
def test_permute_is_a_permutation_that_spreads(n):
    images = [permute(np.arange(n), n, key) for key in (b"1/a/0", b"1/a/1", b"2/a/0")]
    for image in images:
        assert sorted(image.tolist()) == list(range(n))
    if n >= 64:
        assert not (images[0] == images[1]).all() and not (images[0] == images[2]).all()
    if n >= 1000:        # rank correlation and fixed points near those of a random permutation
        for image in images:
            assert abs(np.corrcoef(image, np.arange(n))[0, 1]) < 4 / n**0.5
            assert (image == np.arange(n)).sum() <= 8
        steps = np.diff(images[0]) % n      # neighbours do not stay neighbours
        assert np.unique(steps).size > 0.55 * n


MIXTURES = [{"a": 0.8, "b": 0.07, "c": 0.03, "d": 0.1}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"a": 1},
            {"a": 0.999, "b": 0.001}, {"a": 1, "b": 2**0.5, "c": 0.1}, {"a": 80, "b": 7, "c": 3, "d": 10},
            {f"s{i}": 1 + i % 3 for i in range(12)},
            *({f"s{i}": random.Random(seed).random() + seed * i / 9 for i in range(2 + seed)} for seed in range(5))]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_weights_hold_to_within_one_sequence_at_every_prefix(mixture):
    counts = shares(mixture)
    period, n = sum(counts.values()), 20_000
    table = schedule(list(counts.values()), min(period, n))
    table = np.tile(table, -(-n // len(table)))[:n] if len(table) == period else table
    total = sum(map(Fraction, mixture.values()))
    for s, name in enumerate(mixture):
        share = Fraction(mixture[name]) / total
        so_far = np.cumsum(table == s)
        for weight, slack in (float(Fraction(counts[name], period)), 1e-6), (float(share), n * 2**-21 + 1e-6):
            assert np.abs(so_far - weight * np.arange(1, n + 1)).max() < 1 + slack
        assert abs(Fraction(counts[name], period) - share) < Fraction(1, 2**20)


def test_simple_ratios_are_exact():
    assert shares({"a": 0.8, "b": 0.07, "c": 0.03, "d": 0.1}) == {"a": 80, "b": 7, "c": 3, "d": 10}
    assert shares({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 1, "b": 1, "c": 1}
    assert shares({"a": 4.0, "b": 6.0}) == {"a": 2, "b": 3}
    assert 2**20 % sum(shares({"a": 1, "b": 2**0.5}).values()) == 0
    with pytest.raises(ValueError, match="gives 'b' the weight 1e-09, less than a millionth"):
        shares({"a": 1.0, "b": 1e-9})


def test_a_whole_period_of_a_fine_mixture_is_exact():
    counts = [170_000, 80_000, 12_143, 1]
    assert np.bincount(schedule(counts, sum(counts))).tolist() == counts
