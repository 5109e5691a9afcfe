"""scaling/paired/gap_law.py: the law of the gap over size and tokens, its intervals, what it
refuses, its forecasts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import t, ttest_1samp

from scaling.gap_prediction_words import format_gap_law
from scaling.laws import sizes_of
from scaling.paired.cost import EPOCH
from scaling.paired.gap_cells import CannotFitGap, GapPoints, cells_of
from scaling.paired.gap_law import fit_gap
from scaling.paired.gap_power import fit_power
from scaling.reason_words import sentence_of
from tests.law_trials import (
    GAP_DESIGNS,
    GAP_TARGET,
    STEEP,
    GapDesign,
    GapTruth,
    gap_points,
    gap_trial,
    told_share,
)

PRECISE = GapDesign((3, 3, 3, 3), (5, 10, 20, 40), 1e-3)
NOISY = GapDesign((4, 3, 3), (5, 10, 20), 0.15)


# ------------------------------------------------------------------------------------- the fit


def test_a_law_with_little_noise_is_found_with_its_signs() -> None:
    law = fit_gap(gap_points(0, PRECISE, STEEP), None).law
    assert (law.a.value, law.b.value) == pytest.approx((0.2, 0.4), abs=0.003)
    assert law.k == pytest.approx(STEEP.at(law.N0, law.N0 * law.ratio0), rel=0.003)
    assert law.trend == ["a", "b"] and law.starts_at_best == law.starts == 9


def test_a_negative_gap_has_a_law_too() -> None:
    law = fit_gap(gap_points(0, PRECISE, GapTruth(-0.5, 0.2, 0.4)), None).law
    assert law.k < 0 and law.a.value == pytest.approx(0.2, abs=0.003)


def test_the_optimum_is_that_of_generalised_least_squares() -> None:
    """Reference: the dense covariance of all pairs and a general minimiser."""
    points = gap_points(3, NOISY, STEEP)
    cells = cells_of(points)
    fit = fit_power(cells, 2e5, 20, ("a", "b"))
    same = points.trajectory[:, None] == points.trajectory
    shared, variance = cells.noise.shared, cells.noise.pair_sd**2
    precision_matrix = np.linalg.inv(variance * (shared * same + (1 - shared) * np.eye(len(same))))

    def squares(theta: np.ndarray):
        residual = points.percent - GapTruth(*theta).at(points.N, points.D)
        return residual @ precision_matrix @ residual

    dense = minimize(squares, [0.4, 0.1, 0.3], method="Nelder-Mead", options={"xatol": 1e-8})
    assert (fit.k, *fit.exponents) == pytest.approx(dense.x, abs=1e-4)
    # the profile's ends: squares rise by the threshold with the other two minimised
    low, high = fit.profile(2.0).exponent_interval(0, fit.squares + 2.0)
    for end in (low, high):
        rest = minimize(lambda x, a=end: squares([x[0], a, x[1]]), [0.4, 0.3], method="Nelder-Mead")
        assert rest.fun - dense.fun == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_a_constant_gap_of_equal_branches_has_the_textbooks_interval(seed: int) -> None:
    points = gap_points(seed, GapDesign((4, 4, 4), (5, 10, 20), 0.2), GapTruth(0.3, 0, 0))
    means = [points.percent[points.trajectory == one].mean() for one in range(12)]
    theirs = ttest_1samp(means, 0).confidence_interval()
    law = fit_gap(points, None).law
    assert (law.constant_low, law.constant_high) == pytest.approx(theirs, rel=1e-6)


def test_the_noise_is_split_into_trunk_and_branch() -> None:
    points = gap_points(1, GapDesign((300,) * 3, (5, 10, 20, 40), 0.2), GapTruth(0.3, 0, 0))
    noise = cells_of(points).noise
    assert noise.pair_sd == pytest.approx(0.2, rel=0.05) and noise.noise_dof == 897
    assert noise.shared == pytest.approx(0.5, abs=0.05)


def test_one_pair_a_cell_still_has_a_noise() -> None:
    points = gap_points(1, GapDesign((1,) * 8, (5, 10, 20, 40), 0.05), STEEP)
    law = fit_gap(points, None).law
    assert law.a.low < 0.2 < law.a.high and law.trend
    assert all(form.p_of_fit is None for form in law.forms)


def test_branches_of_a_trunk_are_no_independent_pairs() -> None:
    """The same gaps as pairs of their own: twice as many degrees of freedom."""
    points = gap_points(0, NOISY, GapTruth(0.3, 0, 0))
    alone = replace(points, trajectory=np.arange(len(points.N)))
    one, other = (fit_gap(some, None).law for some in (points, alone))
    assert (one.trajectory_count, other.trajectory_count) == (10, 30)
    assert one.noise.noise_dof == 7 and other.noise.noise_dof == 27
    assert one.constant_high - one.constant_low > 1.3 * (other.constant_high - other.constant_low)


def test_the_sandwich_is_right_on_average_where_the_noise_is_as_assumed() -> None:
    """CR2 is unbiased there, so its ratio to the assumed variance is 1 on average."""
    ratios = []
    for seed in range(60):
        cells = cells_of(gap_points(seed, NOISY, STEEP))
        fit = fit_power(cells, 2e5, 20, ("a", "b"))
        ratios.append(fit.sandwich.of(np.array([0, 1.0, 0])).ratio)
    assert np.mean(ratios) == pytest.approx(1, abs=0.2)


def test_noise_at_an_extreme_size_widens_the_exponent() -> None:
    points = gap_points(2, GapDesign((6, 6, 6), (5, 10, 20), 0.1), GapTruth(0.5, 0, 0))
    ratios = []
    for N in np.unique(points.N)[:2]:
        factor = np.where(points.N == N, 5, 1)
        loud = replace(points, percent=0.5 + factor * (points.percent - 0.5))
        fit = fit_power(cells_of(loud), 2e5, 20, ("a", "b"))
        ratios.append(fit.sandwich.of(np.array([0, 1.0, 0])).ratio)
    assert ratios[0] > 2 * ratios[1]


# -------------------------------------------------------------------------- trends and their power


@pytest.mark.parametrize("name", ["3 sizes, 3 budgets, 3 seeds", "seeds 18/16/6/3 (study_cpu)"])
def test_intervals_hold_the_truth_about_95_times_in_100(name: str) -> None:
    """python tests/law_trials.py gap has eleven designs."""
    trials = [gap_trial(seed, GAP_DESIGNS[name], STEEP) for seed in range(25)]
    for key in trials[0].covers:
        assert sum(trial.covers.get(key, True) for trial in trials) >= 20, key


@pytest.mark.parametrize("k", [0.0, 0.3])
def test_a_trend_is_told_in_at_most_one_of_twenty_studies_without_one(k: float) -> None:
    share = told_share(NOISY, GapTruth(k, 0, 0), 40)
    assert share * 40 <= 6  # 2 expected; above 6 in 3 of 1,000


def test_an_exponent_must_be_told_by_the_pooled_noise_too() -> None:
    """A loud middle size hardly moves a, so the sandwich alone would tell it too easily."""
    points = gap_points(2, GapDesign((6, 6, 6), (5, 10, 20), 0.1), GapTruth(0.5, 0.1, 0))
    is_middle = sizes_of(points.N) == 1
    mean = points.percent[is_middle].mean()
    louder = mean + 4 * (points.percent - mean)
    loud = replace(points, percent=np.where(is_middle, louder, points.percent))
    law = fit_gap(loud, None).law
    cells = cells_of(loud)
    without, both = (fit_power(cells, law.N0, law.ratio0, free) for free in (("b",), ("a", "b")))
    pooled = 2 * t.sf(math.sqrt(without.squares - both.squares), law.noise.noise_dof)
    assert law.a.p == pytest.approx(pooled, rel=1e-3)


def test_a_gap_that_is_noise_has_a_constant_and_no_exponent() -> None:
    law = fit_gap(gap_points(4, NOISY, GapTruth(0, 0, 0)), None).law
    assert law.trend is None and sentence_of(law.reason) == "the gap itself is not told from zero"
    assert law.constant_low < 0 < law.constant_high and law.a.could_show is None
    words = format_gap_law("rowwise", law)
    assert "no trend of the gap can be told" in words and "^" not in words


def test_the_exponent_that_a_design_could_show_has_a_power_of_80_percent() -> None:
    design = GapDesign((6, 6, 6), (5, 10, 20), 0.15)
    laws = [fit_gap(gap_points(seed, design, GapTruth(0.5, 0, 0)), None).law for seed in range(10)]
    visible = float(np.median([law.a.could_show for law in laws]))
    told = 0
    for seed in range(25):
        law = fit_gap(gap_points(seed, design, GapTruth(0.5, visible, 0)), None).law
        told += bool(law.trend and "a" in law.trend)
    assert 15 <= told <= 24


@pytest.mark.parametrize(
    "design, reason",
    [
        (GapDesign((3, 3), (5, 10), 0.1), "2 sizes and 2 ratios"),
        (GapDesign((2, 2, 1), (5, 10, 20), 0.1), "5 independent pairs"),
        (GapDesign((3, 3, 3), (5, 10, 20), 0.0), "copies"),
    ],
)
def test_too_little_for_a_law_is_said(design: GapDesign, reason: str) -> None:
    law = fit_gap(gap_points(0, design, GapTruth(0.4, 0, 0)), None).law
    assert reason in sentence_of(law.reason) and law.trend is None and law.k is None


def test_a_gap_that_is_no_power_law_is_not_given_exponents() -> None:
    points = gap_points(0, GapDesign((5,) * 5, (5, 10, 20), 0.02), GapTruth(0.5, 0, 0))
    bump = 0.4 * np.exp(-(np.log(points.N / 2e5) ** 2))
    law = fit_gap(replace(points, percent=points.percent + bump), None).law
    assert law.trend is None and "no power law fits" in sentence_of(law.reason)


def test_a_gap_that_changes_its_sign_over_the_sizes_is_not_called_noise() -> None:
    """It is 0 on average, and each of its sizes tells it from 0."""
    points = gap_points(0, GapDesign((5,) * 3, (5, 10, 20), 0.02), GapTruth(0, 0, 0))
    law = fit_gap(replace(points, percent=points.percent + np.log10(points.N / 1.73e5)), None).law
    assert law.trend is None and "no power law fits" in sentence_of(law.reason)
    assert "which the pairs refute" in format_gap_law("rowwise", law)


def test_an_exponent_is_called_by_its_axis_where_no_law_names_it() -> None:
    law = fit_gap(gap_points(0, GapDesign((3, 3, 3), (20,), 0.2), GapTruth(0.5, 0, 0)), None).law
    assert sentence_of(law.reason) == "the exponent of N is not told from zero"


def test_one_ratio_leaves_the_exponent_of_size_alone() -> None:
    law = fit_gap(gap_points(0, GapDesign((3, 3, 3), (20,), 0.01), STEEP), None).law
    assert law.b is None and law.trend == ["a"] and law.a.low < 0.2 < law.a.high


# --------------------------------------------------------------------------- effective parameters


def effective_points(f: float, noise: float) -> GapPoints:
    """Pairs whose FP8 run behaves as one of f N parameters under Epoch's law."""
    points = gap_points(0, GapDesign((4,) * 4, (5, 10, 20, 40), noise), GapTruth(0, 0, 0))
    N, D = 1e3 * points.N, 1e3 * points.D
    exact = 100 * np.log(EPOCH.loss(f * N, D) / EPOCH.loss(N, D))
    return replace(points, N=N, D=D, percent=points.percent + exact)


@pytest.mark.parametrize("f", [0.9, 1.05])
def test_the_effective_share_of_parameters_is_found_with_its_interval(f: float) -> None:
    law = fit_gap(effective_points(f, 0.02), EPOCH).law
    assert law.effective.f_low < f < law.effective.f_high
    assert law.effective.f == pytest.approx(f, abs=0.01)


def test_which_form_fits_better_is_told_only_where_the_pairs_tell_it() -> None:
    assert fit_gap(effective_points(0.9, 0.3), EPOCH).law.better_form is None
    rising = gap_points(0, PRECISE, GapTruth(0.5, -0.1, 0.5))
    rising = replace(rising, N=1e3 * rising.N, D=1e3 * rising.D)
    fit = fit_gap(rising, EPOCH)
    assert fit.law.better_form == "power law"
    refuted = {form.form: form.refuted_because for form in fit.forecast(1e10, 2e11).forecasts}
    assert refuted["effective parameters"] and refuted["power law"] is None
    single = gap_points(1, GapDesign((1,) * 8, (5, 10, 20, 40), 0.05), GapTruth(0.5, -0.1, 0.5))
    fit = fit_gap(replace(single, N=1e3 * single.N, D=1e3 * single.D), EPOCH)
    assert "fits better" in sentence_of(fit.forecast(1e10, 2e11).forecasts[2].refuted_because)


def test_without_a_law_of_the_losses_the_reason_is_given() -> None:
    law = fit_gap(gap_points(0, NOISY, STEEP), None, "too few sizes").law
    assert law.effective is None and law.no_effective == "too few sizes"


# -------------------------------------------------------------------------------------- forecasts


def test_a_forecast_holds_every_form_that_is_not_refuted() -> None:
    fit = fit_gap(gap_points(5, NOISY, GapTruth(0.4, 0, 0)), None)
    assert fit.law.trend is None
    forecast = fit.forecast(1e7, 2e8)
    assert forecast.headline == "constant" and forecast.gap == fit.law.constant
    power = forecast.forecasts[0]
    assert forecast.low == min(power.gap_low, fit.law.constant_low)
    assert forecast.high == max(power.gap_high, fit.law.constant_high)
    scatter = math.sqrt(
        (forecast.one_pair_high - forecast.gap) ** 2 - (forecast.high - forecast.gap) ** 2
    )
    assert scatter == pytest.approx(2.3646 * fit.law.noise.pair_sd, rel=1e-4)  # t of 7
    assert forecast.beyond_sizes == pytest.approx(10) and forecast.beyond_ratios == 1


def test_a_told_trend_refutes_the_constant() -> None:
    forecast = fit_gap(gap_points(0, PRECISE, STEEP), None).forecast(*GAP_TARGET)
    assert forecast.headline == "power law"
    assert forecast.forecasts[1].refuted_because
    assert forecast.high < 1.02 * STEEP.at(*GAP_TARGET)
    # also where no cell has a second pair, so that the misfit of its means says nothing
    single = fit_gap(gap_points(1, GapDesign((1,) * 8, (5, 10, 20, 40), 0.05), STEEP), None)
    refuted = single.forecast(*GAP_TARGET).forecasts[1].refuted_because
    assert "trend in a and b" in sentence_of(refuted)


def test_an_interval_that_says_nothing_is_no_prediction() -> None:
    fit = fit_gap(gap_points(4, NOISY, GapTruth(0, 0, 0)), None)
    with pytest.raises(CannotFitGap) as error:
        fit.forecast(1.5e9, 3e10)
    assert "says nothing: train more seeds" in sentence_of(error.value.reason)


def test_an_axis_that_the_pairs_do_not_vary_is_not_extrapolated() -> None:
    fit = fit_gap(gap_points(0, GapDesign((3, 3, 3), (20,), 0.01), STEEP), None)
    assert fit.forecast(1e7, 2e8).gap > 0
    with pytest.raises(CannotFitGap) as error:
        fit.forecast(1e7, 4e8)
    assert "ratios of tokens" in sentence_of(error.value.reason)
