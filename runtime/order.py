"""Decide which window of which source each sequence of a run reads.

Pure functions of whole numbers: the same on every machine, at every world size, in every precision.
"""

import math
from fractions import Fraction
from hashlib import blake2b

import numpy as np

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
