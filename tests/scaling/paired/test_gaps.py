"""scaling/paired/gaps.py: gaps over pairs count independent trajectories; their changes over tokens
and size are regressions that cover what they say."""

import math

import numpy as np
import pytest
from scipy.stats import linregress
from scipy.stats import t as student

from scaling.paired.estimates import Estimate, estimate
from scaling.paired.gaps import (
    Pair,
    gap_of_sequences,
    is_idle,
    mean_gap,
    mean_gaps,
    slope_over_sizes,
    slope_over_tokens,
)
from tests.helpers.paired_runs import fake_pair

# nominal counts, 20 tokens per parameter, as in published tables
SIZES = (125_000_000, 250_000_000, 350_000_000, 1_500_000_000)


def covers(found: Estimate | None, truth: float) -> bool:
    assert found is not None and found.low is not None and found.high is not None
    return found.low < truth < found.high


def branching_study(rng: np.random.Generator, gap: float) -> list[Pair]:
    """Six trunks with one to four branches, most of whose noise is the trunk's."""
    pairs = []
    for trunk, shift in enumerate(rng.normal(0, 0.1, 6)):
        for _ in range(1 + trunk % 4):
            pairs.append(fake_pair(gap + shift + rng.normal(0, 0.03), trunk=trunk))
    return pairs


def test_the_mean_gap_covers_with_trunks_of_unequal_size() -> None:
    rng = np.random.default_rng(5)
    studies = [branching_study(rng, 0.2) for _ in range(2000)]
    covered = [covers(mean_gap(pairs, "bf16", "percent"), 0.2) for pairs in studies]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_branches_counted_as_runs_would_not_cover() -> None:
    rng = np.random.default_rng(5)
    studies = [branching_study(rng, 0.2) for _ in range(500)]
    naive = [estimate([pair.gap["bf16"].percent for pair in pairs]) for pairs in studies]
    assert np.mean([covers(found, 0.2) for found in naive]) < 0.85


def test_the_branches_of_a_trunk_count_once() -> None:
    pairs = branching_study(np.random.default_rng(0), 0.2)
    assert mean_gap(pairs, "bf16", "percent").n == 6 < len(pairs)


def test_each_evaluation_has_its_mean_gap() -> None:
    gaps = mean_gaps([fake_pair(0.2, trunk=trunk) for trunk in range(3)], "percent")
    assert (gaps["bf16"].mean, gaps["as_trained"].mean) == pytest.approx((0.2, 0.3))


def branches_over_sizes() -> tuple[np.ndarray, np.ndarray, list[Pair]]:
    """Sizes and gaps, 100 ln of the losses' ratio, of twelve trunks, and pairs of two branches each
    around them."""
    N = np.repeat(SIZES, 3)
    log_gaps = np.random.default_rng(3).normal(0, 0.1, 12)
    pairs = []
    for trunk, (size, log_gap) in enumerate(zip(N, log_gaps, strict=True)):
        for shift in (1, -1):
            percent = 100 * math.expm1((log_gap + shift) / 100)
            pairs.append(fake_pair(percent, int(size), trunk=trunk))
    return N, log_gaps, pairs


def test_the_change_over_sizes_is_a_regression_of_trajectories() -> None:
    N, log_gaps, pairs = branches_over_sizes()
    expected = linregress(np.log10(N), log_gaps)
    half = student.ppf(0.975, 10) * expected.stderr
    found = slope_over_sizes(pairs, "bf16")
    assert found is not None
    assert (found.mean, found.half) == pytest.approx((expected.slope, half), rel=1e-6)


def test_fewer_than_three_sizes_have_no_change() -> None:
    _, _, pairs = branches_over_sizes()
    assert slope_over_sizes(pairs[:18:8], "bf16") is None


def test_sizes_that_differ_by_rounding_are_one() -> None:
    sizes = [1e8, 1e8 * (1 + 1e-14), 2e8, 2e8]
    pairs = [fake_pair(1, size, trunk=trunk) for trunk, size in enumerate(sizes)]
    assert slope_over_sizes(pairs, "bf16") is None


SLOPE = 0.05  # per cent per doubling of the tokens


def study_over_tokens(rng: np.random.Generator, is_branch: bool) -> list[Pair]:
    """Two sizes of three seeds, whose budgets and levels differ."""
    pairs = []
    for trunk, budgets in enumerate([(5, 10, 20), (5, 10), (5, 10, 20)] * 2):
        is_large = trunk > 2
        level = rng.normal(0.1 * is_large, 0.1)
        for budget in budgets:
            gap = level + SLOPE * math.log2(budget) + rng.normal(0, 0.01)
            name = f"{trunk}" if is_branch else f"{trunk}_{budget}"
            D = budget * (10 if is_large else 1)
            pairs.append(fake_pair(gap, 1 + trunk // 3, D, name, trunk % 3))
    return pairs


@pytest.mark.parametrize("is_branch", [True, False])
def test_the_change_over_tokens_covers(is_branch: bool) -> None:
    rng = np.random.default_rng(7)
    studies = [study_over_tokens(rng, is_branch) for _ in range(1000)]
    covered = [covers(slope_over_tokens(pairs, "bf16"), SLOPE) for pairs in studies]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_one_line_through_all_pairs_takes_levels_for_effects_of_tokens() -> None:
    rng = np.random.default_rng(7)
    covered = []
    for _ in range(300):
        pairs = study_over_tokens(rng, True)
        x = [math.log2(pair.fp8.tokens) for pair in pairs]
        line = linregress(x, [pair.gap["bf16"].percent for pair in pairs])
        half = student.ppf(0.975, len(pairs) - 2) * line.stderr
        covered.append(abs(line.slope - SLOPE) < half)
    assert np.mean(covered) < 0.85


def test_the_change_over_tokens_has_a_slope_for_each_curve() -> None:
    found = slope_over_tokens(study_over_tokens(np.random.default_rng(7), True), "bf16")
    assert found is not None and found.n == 6


def test_a_change_over_tokens_is_one_of_the_logarithm_of_the_losses_ratio() -> None:
    """As the mean over sizes is: from 10 to 21 % is a step of 100 ln 1.1."""
    pairs = []
    for seed in (0, 1):
        pairs += [fake_pair(10, 1, 5, seed, seed), fake_pair(21, 1, 10, seed, seed)]
    found = slope_over_tokens(pairs, "bf16")
    assert found is not None and found.mean == pytest.approx(100 * math.log(1.1))


def test_a_single_budget_has_no_change_over_tokens() -> None:
    pairs = [fake_pair(0.1, 1, 5, "a"), fake_pair(0.2, 2, 50, "b", seed=1)]
    assert slope_over_tokens(pairs, "bf16") is None


def test_a_gap_of_sequences_is_weighted_by_source() -> None:
    """Two sources of two sequences: 0.1 and 0.3 nats per token, weights 1 and 3."""
    difference = np.array([1.0, 1.0, 3.0, 3.0])
    source, tokens = np.array([0, 0, 1, 1]), np.full(4, 10)
    gap = gap_of_sequences(difference, source, tokens, [0.25, 0.75], baseline_loss=2.0)
    assert (gap.nats, gap.percent, gap.se) == pytest.approx((0.25, 12.5, 0.0))


def test_a_source_of_one_sequence_has_no_standard_error() -> None:
    gap = gap_of_sequences(np.ones(3), np.array([0, 0, 1]), np.full(3, 10), [0.5, 0.5], 2.0)
    assert gap.se is None


def test_runs_without_a_linear_in_fp8_are_idle() -> None:
    assert is_idle([fake_pair(0.1, linears=0)])
    assert not is_idle([fake_pair(0.1, linears=0), fake_pair(0.1, linears=1)])


def test_the_error_over_two_sequences_by_hand() -> None:
    """.1 and .3 nats over a token each: sd .141 of a sequence, .1 of their mean."""
    one_source, one_token = np.zeros(2, int), np.ones(2)
    gap = gap_of_sequences(np.array([0.1, 0.3]), one_source, one_token, [1.0], 2.0)
    assert gap.se == pytest.approx(0.1)
