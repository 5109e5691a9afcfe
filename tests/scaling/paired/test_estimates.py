"""scaling/paired/estimates.py: intervals, tests and power are those of scipy and of simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import nct, ttest_1samp
from scipy.stats import t as student

from scaling.paired.estimates import (
    clusters,
    estimate,
    grouped,
    p_of_zero,
    power,
    smallest_seen,
    told_together,
    tost,
)
from tests.helpers.paired_runs import exact_sample

# n, mean, standard deviation
SAMPLES = [
    (2, 0.1, 0.1),
    (6, 0.1, 0.21),
    (30, 0.24, 0.1),
    (5, -0.5, 0.1),
    (8, 0.01, 0.1),
]


@pytest.mark.parametrize("n, mean, sd", SAMPLES)
def test_an_interval_is_the_t_interval_of_scipy(n: int, mean: float, sd: float) -> None:
    values = exact_sample(n, mean, sd)
    found = estimate(values)
    interval = ttest_1samp(values, 0).confidence_interval()
    expected = (interval.low, interval.high)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)
    assert (found.mean, found.sd, found.n) == pytest.approx((mean, sd, n))


@pytest.mark.parametrize("n, mean, sd", SAMPLES)
def test_tost_is_the_larger_of_two_one_sided_tests(n: int, mean: float, sd: float) -> None:
    values = exact_sample(n, mean, sd)
    above = ttest_1samp(values, -0.25, alternative="greater").pvalue
    below = ttest_1samp(values, 0.25, alternative="less").pvalue
    assert tost(estimate(values), 0.25) == pytest.approx(max(above, below), rel=1e-9)


@pytest.mark.parametrize("values", [[0.1], [0.1] * 3, [0.0, 0.0]])
def test_values_without_spread_have_a_mean_and_no_interval(values: list[float]) -> None:
    found = estimate(values)
    assert found.mean == pytest.approx(values[0])
    assert found.se is None
    assert found.half is None
    assert tost(found, 1) is None


@pytest.mark.parametrize("n, gap", list(itertools.product((3, 10, 40), (0.0, 0.3, -1.0))))
def test_power_is_the_noncentral_t(n: int, gap: float) -> None:
    dof = n - 1
    quantile = student.ppf(0.975, dof)
    shift = gap * math.sqrt(n)
    above = nct.sf(quantile, dof, shift)
    below = nct.cdf(-quantile, dof, shift)
    expected = above + below
    assert power(n, gap) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("n", [2, 3, 100])  # n = 2: where scipy's noncentral t gives up
def test_the_smallest_gap_that_is_seen_has_a_power_of_80_percent(n: int) -> None:
    sd = 0.4
    gap = smallest_seen(sd, n)
    assert power(n, gap / sd) == pytest.approx(0.8, abs=1e-6)


def test_values_that_share_a_trajectory_through_a_third_are_one_cluster() -> None:
    labels: list[set] = [{1, 2}, {5}, {3, 4}, {2, 3}, {5, 6}, {7}]
    groups = [members.tolist() for members in clusters(labels)]
    assert groups == [[0, 2, 3], [1, 4], [5]]


def test_groups_come_in_order_of_their_keys() -> None:
    groups = grouped([3, 1, 2, 5], lambda value: value % 2)
    assert groups == [(0, [2]), (1, [3, 1, 5])]


def test_an_empty_list_has_no_groups() -> None:
    assert grouped(np.array([]), lambda value: value) == []


@pytest.mark.parametrize(
    "p_values, told",
    [
        ([0.03, 0.2], [False, False]),
        ([0.06, 0.02], [False, True]),
        ([0.02, 0.04], [True, True]),
        ([0.04], [True]),
    ],
)
def test_several_are_told_together_at_five_per_cent(
    p_values: list[float], told: list[bool]
) -> None:
    assert told_together(p_values) == told


def test_the_p_of_a_mean_is_that_of_scipys_t_test() -> None:
    values = [0.1, 0.4, -0.2, 0.5]
    assert p_of_zero(estimate(values)) == pytest.approx(ttest_1samp(values, 0).pvalue)
