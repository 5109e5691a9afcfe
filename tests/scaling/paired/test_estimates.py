"""scaling/paired/estimates.py: intervals, tests and power are those of scipy and of simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import nct, ttest_1samp
from scipy.stats import t as student

from scaling.paired.estimates import clusters, estimate, grouped, power, smallest_seen, tost
from tests.helpers.paired_runs import exact_sample

SAMPLES = [(2, 0.1, 0.1), (6, 0.1, 0.21), (30, 0.24, 0.1), (5, -0.5, 0.1), (8, 0.01, 0.1)]


@pytest.mark.parametrize("n, mean, sd", SAMPLES)
def test_an_interval_is_the_t_interval_of_scipy(n: int, mean: float, sd: float) -> None:
    values = exact_sample(n, mean, sd)
    found = estimate(values)
    expected = ttest_1samp(values, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
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
    assert found.se is None and found.half is None and tost(found, 1) is None


@pytest.mark.parametrize("n, gap", list(itertools.product((3, 10, 40), (0.0, 0.3, -1.0))))
def test_power_is_the_noncentral_t(n: int, gap: float) -> None:
    quantile, shift = student.ppf(0.975, n - 1), gap * math.sqrt(n)
    expected = nct.sf(quantile, n - 1, shift) + nct.cdf(-quantile, n - 1, shift)
    assert power(n, gap) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("n", [2, 3, 100])  # n = 2: where scipy's noncentral t gives up
def test_the_smallest_gap_that_is_seen_has_a_power_of_80_percent(n: int) -> None:
    assert power(n, smallest_seen(0.4, n) / 0.4) == pytest.approx(0.8, abs=1e-6)


def test_values_that_share_a_trajectory_are_one_cluster_also_through_a_third() -> None:
    groups = clusters([{1, 2}, {5}, {3, 4}, {2, 3}, {5, 6}, {7}])
    assert [members.tolist() for members in groups] == [[0, 2, 3], [1, 4], [5]]


def test_groups_come_in_order_of_their_keys() -> None:
    groups = grouped([3, 1, 2, 5], lambda value: value % 2)
    assert groups == [(0, [2]), (1, [3, 1, 5])]


def test_an_empty_list_has_no_groups() -> None:
    assert grouped(np.array([]), lambda value: value) == []
