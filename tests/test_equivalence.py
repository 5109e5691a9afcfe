"""scaling/equivalence.py: intervals, TOST, power and clusters against scipy, simulation, and the planning tables."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components
from scipy.stats import linregress, nct, ttest_1samp
from scipy.stats import t as student

from runtime.cli import UserError
from scaling.pairs import (
    Margin,
    clusters,
    estimate,
    fit_trend,
    pairs_to_see,
    pairs_to_show,
    power,
    read_margin,
    smallest_seen,
    tost,
    tost_power,
    verdict,
)

DECLARED = Margin(0.25, "study.json", True)


def sample(n, mean=0.0, sd=1.0, seed=0):
    """n values with exactly this mean and standard deviation."""
    z = np.random.default_rng(seed).normal(size=n)
    return mean + sd * (z - z.mean()) / z.std(ddof=1)


@pytest.mark.parametrize("n", [2, 3, 4, 10])
def test_the_interval_is_scipys(n):
    values = np.random.default_rng(n).normal(0.1, 0.3, n)
    found, theirs = estimate(values), ttest_1samp(values, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert (found.mean, found.sd, found.n) == pytest.approx((values.mean(), values.std(ddof=1), n))


@pytest.mark.parametrize("values", [[0.3], [0.3, 0.3, 0.3], [0.0, 0.0]])
def test_values_without_spread_have_no_interval(values):
    found = estimate(values)
    assert found.mean == values[0] and found.se is found.half is found.low is tost(found, -1, 1) is None
    assert "no interval" in verdict(found, DECLARED)


def test_half_widths_are_those_of_the_planning_table():
    for n, half in {2: 8.98, 3: 2.48, 4: 1.59, 5: 1.24, 6: 1.05, 8: 0.84, 12: 0.64}.items():
        assert round(estimate(sample(n)).half, 2) == half


@pytest.mark.parametrize("n, mean", [(3, 0.05), (8, -0.1), (8, 0.3), (30, 0.24)])
def test_tost_is_two_of_scipys_one_sided_tests(n, mean):
    values = sample(n, mean, 0.1)
    theirs = max(ttest_1samp(values, -0.25, alternative="greater").pvalue, ttest_1samp(values, 0.25, alternative="less").pvalue)
    assert tost(estimate(values), -0.25, 0.25) == pytest.approx(theirs, rel=1e-10)


def test_tost_rejects_at_its_margin_five_times_in_a_hundred_and_never_more():
    """Size by simulation: the true gap is the margin, so each "equivalent" is an error."""
    rng, n, runs = np.random.default_rng(1), 6, 4000
    for sd, limit in ((0.02, 0.05), (0.3, 0.05)):       # well below the margin the size is alpha, above it less
        wrong = np.mean([tost(estimate(rng.normal(0.25, sd, n)), -0.25, 0.25) < 0.05 for _ in range(runs)])
        assert wrong < limit + 0.011
        assert sd > 0.1 or wrong == pytest.approx(0.05, abs=0.011)


@pytest.mark.parametrize("n, sd, gap", [(2, 0.05, 0.0), (4, 0.15, 0.05), (10, 0.3, 0.0), (10, 0.3, -0.1)])
def test_power_of_tost_is_that_of_a_simulation(n, sd, gap):
    rng = np.random.default_rng(2)
    draws = rng.normal(gap, sd, (200_000, n))
    se = draws.std(axis=1, ddof=1) / math.sqrt(n)
    passed = (np.abs(draws.mean(axis=1)) + student.ppf(0.95, n - 1) * se < 0.25).mean()
    assert tost_power(sd, n, 0.25, gap) == pytest.approx(passed, abs=0.004)


@pytest.mark.parametrize("n", [3, 5, 10, 40])
@pytest.mark.parametrize("gap", [0.0, 0.3, -1.0, 2.0])
def test_power_is_the_noncentral_t(n, gap):
    quantile, shift = student.ppf(0.975, n - 1), gap * math.sqrt(n)
    assert power(1.0, n, gap) == pytest.approx(nct.sf(quantile, n - 1, shift) + nct.cdf(-quantile, n - 1, shift), abs=2e-6)


def test_power_of_two_pairs_where_scipys_noncentral_t_gives_up():
    draws = np.random.default_rng(3).normal(smallest_seen(1.0, 2), 1, (200_000, 2))
    t = draws.mean(axis=1) / (np.abs(draws[:, 0] - draws[:, 1]) / 2)
    assert (np.abs(t) > student.ppf(0.975, 1)).mean() == pytest.approx(0.8, abs=0.004)


@pytest.mark.parametrize("sd, needed", [(0.0008, (8, 4, 3)), (0.0015, (20, 7, 5)), (0.002, (34, 10, 6)), (0.003, (73, 20, 10))])
def test_pairs_needed_are_those_of_the_planning_table(sd, needed):
    assert tuple(pairs_to_see(sd, gap) for gap in (0.001, 0.002, 0.003)) == needed
    if sd == 0.002:
        assert (pairs_to_see(sd, 0.004), pairs_to_see(sd, 0.008)) == (5, 3)


def test_plans_are_the_fewest_and_say_when_there_are_too_many():
    for sd, margin in ((0.1, 0.25), (0.3, 0.25), (1.0, 0.25)):
        n = pairs_to_show(sd, margin)
        assert tost_power(sd, n, margin) >= 0.8 > (tost_power(sd, n - 1, margin) if n > 2 else 0)
        n = pairs_to_see(sd, margin)
        assert power(sd, n, margin) >= 0.8 > (power(sd, n - 1, margin) if n > 2 else 0)
    assert pairs_to_see(1.0, 1e-4) is None and pairs_to_show(1.0, 1e-4) is None


@pytest.mark.parametrize("n", [2, 3, 7, 100, 5000])
def test_smallest_seen_is_seen_four_times_in_five(n):
    assert power(0.4, n, smallest_seen(0.4, n)) == pytest.approx(0.8, abs=1e-6)


# -------------------------------------------------------------------------------------------------------- clusters


def test_clusters_are_connected_components():
    rng = np.random.default_rng(4)
    for _ in range(30):
        labels = [set(rng.integers(0, 12, 2).tolist()) for _ in range(9)]
        graph = np.array([[bool(a & b) for b in labels] for a in labels])
        count, theirs = connected_components(graph)
        ours = clusters(labels)
        assert sorted(sum(ours, [])) == list(range(9)) and len(ours) == count
        assert {frozenset(own) for own in ours} == {frozenset(np.flatnonzero(theirs == i)) for i in range(count)}


def test_clusters_join_through_a_third():
    assert clusters([{"a"}, {"b"}, {"c"}, {"a", "c"}, {"d"}]) == [[0, 2, 3], [1], [4]]
    assert clusters([]) == []


def test_intervals_cover_and_branches_counted_as_runs_do_not():
    """Nominal 95 % over 2,000 simulations: trunks of four branches each, most of whose noise is the trunk's."""
    rng, trunks, branches, truth = np.random.default_rng(5), 5, 4, 0.2
    honest = naive = 0
    for _ in range(2000):
        gaps = truth + rng.normal(0, 0.1, (trunks, 1)) + rng.normal(0, 0.03, (trunks, branches))
        labels = [{f"t{i}"} for i in range(trunks) for _ in range(branches)]
        values = gaps.ravel()
        found = estimate([values[own].mean() for own in clusters(labels)])
        honest += found.low < truth < found.high
        found = estimate(values)
        naive += found.low < truth < found.high
    assert honest / 2000 == pytest.approx(0.95, abs=0.015)
    assert naive / 2000 < 0.80


# ----------------------------------------------------------------------------------------------------------- trend

SIZES = np.array([125e6, 250e6, 350e6, 1.5e9])


@pytest.mark.parametrize("seeds, half", [(1, 5.46), (2, 2.20), (3, 1.63), (5, 1.19)])
def test_half_width_of_a_trend_is_that_of_the_planning_table(seeds, half):
    N, y = np.repeat(SIZES, seeds), np.random.default_rng(seeds).normal(0, 0.1, 4 * seeds)
    found, theirs = fit_trend(N, y, None), linregress(np.log10(N), y)
    assert found.half == pytest.approx(student.ppf(0.975, 4 * seeds - 2) * theirs.stderr, rel=1e-6)
    sd = theirs.stderr * math.sqrt(4 * seeds * np.log10(N).var())
    assert found.half / sd == pytest.approx(half, abs=0.01)


def test_a_trend_is_given_only_where_it_could_tell_rival_forms_apart():
    rng = np.random.default_rng(6)
    N = np.repeat(SIZES, 5)
    clear = fit_trend(N, 0.3 - 0.1 * np.log10(N / 1e8) + rng.normal(0, 0.01, 20), 0.3)
    assert clear.reason is None and clear.slope == pytest.approx(-0.1, abs=0.02)
    vague = fit_trend(SIZES, 0.3 + sample(4, 0, 0.1), 0.3)
    assert vague.slope is None and "0.15" in vague.reason and vague.needed > 1
    x = np.log10(SIZES)
    sd = vague.half / student.ppf(0.975, 2) * math.sqrt(4 * x.var())
    for pairs, enough in ((vague.needed, True), (vague.needed - 1, False)):
        half = student.ppf(0.975, 4 * pairs - 2) * sd / math.sqrt(pairs * 4 * x.var())
        assert bool(half <= 0.15) is enough
    assert "3 sizes" in fit_trend([1e8, 1e8, 2e8, 2e8], [1, 2, 3, 4], 1.0).reason
    assert "no gap is established" in fit_trend(SIZES, [1, 2, 1, 2], None).reason


def test_sizes_that_differ_by_rounding_are_one():
    N = [1e8, 1e8 * (1 + 1e-14), 2e8, 2e8]
    assert "2 sizes" in fit_trend(N, [1, 2, 3, 4], 1.0).reason


# ----------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize("mean, sd, n, words", [
    (0.5, 0.1, 5, r"costs 0.5 %"), (-0.5, 0.1, 5, "gains 0.5 %"),
    (0.1, 0.05, 6, "costs 0.1 %, within ±0.25 % (TOST, p="), (0.01, 0.1, 8, "equivalent within ±0.25 % (TOST, p="),
    (0.3, 0.4, 5, "undecided: interval -0.2 to +0.8"),
    (0.01, 0.5, 5, "undecided: interval -0.61 to +0.63, could not have seen less than 0.84"),
])
def test_words_follow_numbers(mean, sd, n, words):
    said = verdict(estimate(sample(n, mean, sd)), DECLARED)
    assert said.startswith(words) and "no loss" not in said


def test_without_a_margin_nothing_is_equivalent_and_a_late_one_says_so():
    close = estimate(sample(8, 0.01, 0.1))
    assert verdict(close).startswith("undecided")
    assert "after the fact" in verdict(close, Margin(0.25, "", False)) and "after" not in verdict(close, DECLARED)


# ---------------------------------------------------------------------------------------------------------- margin


def records(folder, *starts):
    return [SimpleNamespace(folder=folder / f"run{i}", t_start=start) for i, start in enumerate(starts)]


def write_study(folder, **content):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "study.json").write_text(json.dumps({"margin_percent": 0.25, "declared": "2026-11-21T15:00:00Z", **content}))
    return folder


def test_the_margin_is_read_and_counts_as_declared_only_before_the_runs(tmp_path):
    write_study(tmp_path)
    before = read_margin(records(tmp_path, "2026-11-21T15:00:01Z", "2026-11-21T16:00:00Z"))
    assert before.percent == 0.25 and before.is_declared and "before the runs" in before.source
    late = read_margin(records(tmp_path, "2026-11-21T14:59:59Z", "2026-11-21T16:00:00+00:00"))
    assert not late.is_declared and "after 1 of 2 runs had begun" in late.source
    unknown = read_margin(records(tmp_path, None))
    assert not unknown.is_declared and "no run says when it began" in unknown.source


def test_the_command_line_overrides_and_is_after_the_fact(tmp_path):
    given = read_margin(records(write_study(tmp_path), "2026-11-21T15:00:01Z"), "0.5")
    assert given.percent == 0.5 and not given.is_declared and "after the fact" in given.source
    assert read_margin(records(tmp_path / "elsewhere", None)) is None


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "much", "", "100"])
def test_a_wrong_margin_is_refused(tmp_path, given):
    with pytest.raises(UserError, match="is no margin"):
        read_margin(records(tmp_path, None), given)


@pytest.mark.parametrize("content", [
    "", "{", "[]", "{}", '{"margin_percent": 0.25}', '{"margin_percent": 0.25, "declared": 5}',
    '{"margin_percent": 0.25, "declared": "yesterday"}', '{"margin_percent": "x", "declared": "2026-11-21T15:00:00Z"}',
    '{"margin_percent": null, "declared": "2026-11-21T15:00:00Z"}',
    '{"margin_percent": true, "declared": "2026-11-21T15:00:00Z"}',
    '{"margin_percent": NaN, "declared": "2026-11-21T15:00:00Z"}', "[" * 100_000, "\xff\xfe"])
def test_a_damaged_study_is_a_sentence(tmp_path, content):
    (tmp_path / "study.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"study\.json"):
        read_margin(records(tmp_path, None))


def test_two_studies_with_two_margins_are_refused(tmp_path):
    runs = records(write_study(tmp_path / "a"), None) + records(write_study(tmp_path / "b", margin_percent=0.5), None)
    with pytest.raises(UserError, match="different margins"):
        read_margin(runs)


def test_gaps_equal_to_the_last_digit_have_no_trend():
    trend = fit_trend([1e8, 1e8, 3e8, 1e9], [0.2] * 4, 0.2)
    assert trend.slope is None and "copies" in trend.reason
