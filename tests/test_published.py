"""scaling/published.py: conversions against root-finding on the law, errors against Monte Carlo, published tables."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import brentq, curve_fit
from scipy.stats import t as student

from scaling.pairs import (
    EPOCH,
    HOFFMANN,
    PRECISION_LAWS,
    Surface,
    costs,
    estimate,
    kumar_gap,
    kumar_share,
    local_surface,
    matched_speedup,
    own_surface,
    sun_gap,
    throughput,
)

SIZES = np.array([125e6, 250e6, 350e6, 1.5e9])      # nominal counts, 20 tokens per parameter, as in the tables


def test_kumar_and_sun_give_the_table_of_four_sizes():
    assert np.round(kumar_gap(SIZES), 4).tolist() == [0.0091, 0.0065, 0.0055, 0.0027]
    assert np.round(kumar_gap(SIZES, offsets=False), 4).tolist() == [0.0164, 0.0116, 0.0098, 0.0048]
    assert (round(kumar_share(), 3), round(kumar_share(offsets=False), 3)) == (0.957, 0.924)
    assert np.round(sun_gap(SIZES, 20 * SIZES), 5).tolist() == [0.00011, 0.00013, 0.00014, 0.00022]
    ends = SIZES[[0, 3]]
    assert np.round(sun_gap(ends, 20 * ends, 5, 2), 5).tolist() == [0.00015, 0.00031]
    assert np.round(sun_gap(ends, 20 * ends, 2, 1, block=32), 4).tolist() == [0.0061, 0.0123]


def test_kumars_gap_is_that_of_a_smaller_model():
    """By the definition, L(N_eff) - L(N) with the constants of Table 2, not by our closed form."""
    N = 2e8
    for offsets in (True, False):
        smaller = 4.299e3 * (kumar_share(offsets=offsets) * N)**-0.4965
        assert kumar_gap(N, offsets=offsets) == pytest.approx(smaller - 4.299e3 * N**-0.4965, rel=1e-9)
    assert kumar_gap(N, 16, 16) < 0.05 * kumar_gap(N, 8, 8) < 0.05 * kumar_gap(N, 4, 8)


def test_published_laws_disagree_in_size_and_in_sign_of_the_trend():
    values = [law(SIZES, 20 * SIZES) for _, law, _ in PRECISION_LAWS]
    ratio = values[0] / values[2]
    assert ratio.min() > 10 and ratio.max() > 85
    assert (np.diff(values[0]) < 0).all() and (np.diff(values[1]) < 0).all() and (np.diff(values[2]) > 0).all()


def test_slope_and_costs_of_a_gap_are_those_of_the_table():
    D = 20 * SIZES
    assert np.round(EPOCH.slope(D), 3).tolist() == [0.279, 0.216, 0.191, 0.112]
    table = {0.001: ((1.012, 1.022), (0.987, 0.978)), 0.0025: ((1.030, 1.056), (0.968, 0.946)),
             0.005: ((1.062, 1.117), (0.938, 0.895))}
    for share, (tokens, parameters) in table.items():
        for N, r, phi in zip((125e6, 1.5e9), tokens, parameters, strict=True):
            gap = share * EPOCH.loss(N, 20 * N)
            assert round(EPOCH.extra_tokens(gap, 20 * N), 3) == r
            assert round(EPOCH.effective_parameters(gap, N), 3) == phi


@pytest.mark.parametrize("ratio, expected", [(1.10, (1.076, 1.041, 0.985)), (1.17, (1.145, 1.108, 1.047)),
                                             (1.28, (1.252, 1.212, 1.146))])
def test_matched_speed_up_is_that_of_the_table(ratio, expected):
    N = 1.5e9
    for share, value in zip((0.001, 0.0025, 0.005), expected, strict=True):
        found = matched_speedup(EPOCH, 20 * N, share * EPOCH.loss(N, 20 * N), None, ratio)
        assert round(found.value, 3) == value and found.se_log is None


@pytest.mark.parametrize("law", [EPOCH, HOFFMANN])
@pytest.mark.parametrize("gap", [-0.01, 0.0, 0.004, 0.03])
def test_conversions_solve_the_law(law, gap):
    N, D = 3e8, 6e9
    here = law.loss(N, D)
    r = brentq(lambda r: law.loss(N, r * D) + gap - here, 0.1, 50, xtol=1e-14)
    phi = brentq(lambda phi: law.loss(phi * N, D) - gap - here, 0.1, 50, xtol=1e-14)
    assert law.extra_tokens(gap, D) == pytest.approx(r, rel=1e-9)
    assert law.effective_parameters(gap, N) == pytest.approx(phi, rel=1e-9)
    step = 1e-5
    numeric = (law.loss(N, D * math.exp(-step)) - law.loss(N, D * math.exp(step))) / (2 * step)
    assert law.slope(D) == pytest.approx(numeric, rel=1e-6)


def test_a_gap_beyond_the_law_is_none_with_the_reason():
    most = EPOCH.B * 1e9**-EPOCH.beta
    assert EPOCH.extra_tokens(most, 1e9) is EPOCH.extra_tokens(2 * most, 1e9) is None
    assert EPOCH.extra_tokens(0.999 * most, 1e9) > 1000
    found = matched_speedup(EPOCH, 1e9, 2 * most, 0.1, 1.2)
    assert found.value is found.se_log is None and "no number of tokens" in found.reason
    assert EPOCH.effective_parameters(-1.01 * EPOCH.A * 1e8**-EPOCH.alpha, 1e8) is None
    shown = costs(EPOCH, 5e7, 1e9, estimate([2 * most, 2.1 * most]), 1.2, None, None)
    assert shown["extra_tokens"] is shown["speedup"] is None and "no number of tokens" in shown["reason"]
    assert shown["extra_tokens_ci95"][1] is None


@pytest.mark.parametrize("beta", [1e-17, 1e-6, 1e-3])
@pytest.mark.parametrize("gap", [-0.5, 0.0, 1e-9, 1.9])
def test_a_law_that_is_almost_flat_gives_numbers_or_none(beta, gap):
    """Runs of one size whose losses fall by nothing: powers of it overflow."""
    law = Surface("flat", "", E=0.0, A=0.0, B=2.0, alpha=1.0, beta=beta)
    r = law.extra_tokens(gap, 1e9)
    assert r is None or 1e-100 < r < 1e100
    shown = costs(law, 5e7, 1e9, estimate([gap - 0.01, gap + 0.02]), 1.2, 0.01, None)
    numbers = [shown["extra_tokens"], shown["speedup"], *shown["extra_tokens_ci95"], *shown["speedup_ci95"]]
    assert all(one is None or math.isfinite(one) and one > 0 for one in numbers)
    assert shown["speedup"] is not None or "no number of tokens" in shown["reason"]


def test_a_speed_up_that_nothing_bounds_has_no_interval():
    """A gap of almost nought, known to a hundredth of a nat, under a law that falls by a hundred-thousandth per e-fold."""
    law = Surface("flat", "", E=0.0, A=0.0, B=2.0, alpha=1.0, beta=1e-5)
    shown = costs(law, 5e7, 1e9, estimate([-0.01, 0.010_000_001]), 1.2, 0.01, None)
    assert shown["speedup"] == pytest.approx(1.2, rel=1e-3) and shown["speedup_ci95"] == [None, None]


def test_error_of_the_speed_up_is_that_of_a_monte_carlo():
    """Gap, throughput and the law's (ln B, beta) drawn with small errors; the delta method must give their spread."""
    rng, D, gap, gap_se, ratio, ratio_se = np.random.default_rng(0), 6e9, 0.006, 0.0006, 1.17, 0.004
    covariance = np.array([[0.25, 0.0123], [0.0123, 0.00061]]) / 50
    law = replace(EPOCH, covariance=covariance)
    found = matched_speedup(law, D, gap, gap_se, ratio, ratio_se)
    shift = rng.multivariate_normal([0, 0], covariance, 200_000)
    B, beta = EPOCH.B * np.exp(shift[:, 0]), EPOCH.beta + shift[:, 1]
    gaps, ratios = rng.normal(gap, gap_se, 200_000), ratio * np.exp(rng.normal(0, ratio_se, 200_000))
    drawn = np.log(ratios) + np.log(1 - gaps / (B * D**-beta)) / beta
    # s, not r's exact derivative, is in the formula: a first-order one in gap / (B D^-beta), here 3 %.
    assert found.se_log == pytest.approx(drawn.std(), rel=0.05)
    assert math.log(found.value) == pytest.approx(drawn.mean(), abs=0.1 * drawn.std())
    slopes = beta * B * D**-beta
    assert law.slope_se(D) == pytest.approx(slopes.std(), rel=0.03)
    assert EPOCH.slope_se(D) == 0.0
    law_alone = np.log(ratio) + np.log(1 - gap / (B * D**-beta)) / beta
    assert matched_speedup(law, D, gap, 0.0, ratio).se_log == pytest.approx(law_alone.std(), rel=0.06)


def test_interval_of_the_speed_up_uses_students_t_of_the_pairs():
    nats = estimate([0.004, 0.006, 0.005])
    shown = costs(EPOCH, 3e8, 6e9, nats, 1.2, 0.002, None)
    found = matched_speedup(EPOCH, 6e9, nats.mean, nats.se, 1.2, 0.002)
    half = student.ppf(0.975, 2) * found.se_log
    assert np.log(shown["speedup_ci95"]) == pytest.approx([math.log(found.value) - half, math.log(found.value) + half])
    assert shown["extra_tokens_ci95"] == [EPOCH.extra_tokens(nats.low, 6e9), EPOCH.extra_tokens(nats.high, 6e9)]
    low, high = shown["effective_parameters_ci95"]
    assert low < shown["effective_parameters"] < high
    unknown = costs(EPOCH, 3e8, 6e9, nats, 1.2, None, None)     # one ratio of throughputs: its error is not 0 but unknown
    assert unknown["speedup"] == shown["speedup"] and unknown["speedup_ci95"] == [None, None]
    one = costs(EPOCH, 3e8, 6e9, estimate([0.004]), 1.2, None, None)
    assert one["speedup"] > 1 and one["speedup_ci95"] == one["extra_tokens_ci95"] == [None, None]


def test_own_law_is_recovered_and_its_slope_has_the_error_of_a_second_solver():
    N, D = (axis.ravel() for axis in np.meshgrid([5e7, 1.25e8, 2.5e8, 3.5e8], [1e9, 2e9, 4e9, 8e9, 1.6e10]))
    runs = np.arange(len(N))
    own, reason = own_surface(N, D, EPOCH.loss(N, D), runs)
    assert reason is None and own.slope(6e9) == pytest.approx(EPOCH.slope(6e9), rel=1e-5)
    loss = EPOCH.loss(N, D) * np.exp(np.random.default_rng(1).normal(0, 2e-4, len(N)))
    own, _ = own_surface(N, D, loss, runs)

    def log_law(_, e, a, b, alpha, beta):               # natural parameters, plain squares: noise is well below Huber's delta
        return np.log(np.exp(e) + np.exp(a) * N**-alpha + np.exp(b) * D**-beta)
    start = [math.log(EPOCH.E), math.log(EPOCH.A), math.log(EPOCH.B), EPOCH.alpha, EPOCH.beta]
    best, covariance = curve_fit(log_law, N, np.log(loss), start)
    s = best[4] * math.exp(best[2]) * 6e9**-best[4]
    gradient = np.array([0, 0, s, 0, s * (1 / best[4] - math.log(6e9))])
    assert own.slope(6e9) == pytest.approx(s, rel=2e-3)
    # From twenty runs the bootstrap differs from the second solver's delta method by its own bias, sqrt(15/20) in width.
    assert own.slope_se(6e9) == pytest.approx(math.sqrt(gradient @ covariance @ gradient), rel=0.3)
    few = [0, 1, 2, 5, 6, 7, 10, 11, 12, 4]                # few runs, each its own trajectory: the fit's own t covariance
    own, _ = own_surface(N[few], D[few], loss[few], runs[few])
    N, D, loss = N[few], D[few], loss[few]
    best, covariance = curve_fit(log_law, N, np.log(loss), start)
    s = best[4] * math.exp(best[2]) * 6e9**-best[4]
    gradient = np.array([0, 0, s, 0, s * (1 / best[4] - math.log(6e9))])
    assert own.slope_se(6e9) == pytest.approx(math.sqrt(gradient @ covariance @ gradient), rel=0.05)


def test_runs_of_one_size_give_what_tokens_gain_and_nothing_about_size():
    D = np.array([1e6, 2e6, 4e6, 4e6])
    law = local_surface(D, 30 * D**-0.2)
    assert law.beta == pytest.approx(0.2) and law.loss(123.0, 2e6) == pytest.approx(30 * 2e6**-0.2)
    r = brentq(lambda r: 30 * (r * 2e6)**-0.2 + 0.01 - 30 * 2e6**-0.2, 0.5, 2)
    assert law.extra_tokens(0.01, 2e6) == pytest.approx(r) and law.effective_parameters(0.01, 5e4) is None
    assert local_surface(D[2:], np.array([2.0, 2.1])) is None and local_surface(D[:2], np.array([2.0, 2.1])) is None


def test_own_law_that_the_runs_cannot_give_is_a_reason():
    N = np.array([5e7, 1.25e8, 2.5e8, 3.5e8, 7e8, 1.5e9])
    own, reason = own_surface(N, 20 * N, EPOCH.loss(N, 20 * N), N)
    assert own is None and "ray" in reason
    own, reason = own_surface(N[:2], N[:2], np.array([3.0, 2.9]), N[:2])
    assert own is None and reason
    own, reason = own_surface(*[np.array([])] * 4)
    assert own is None and reason


def test_throughput_is_a_geometric_mean_and_means_nothing_on_a_cpu():
    def pair(ratio, device="NVIDIA H100"):
        return SimpleNamespace(tok_per_s_ratio=ratio, fp8=SimpleNamespace(device=device))
    found = throughput([pair(1.1), pair(1.3), pair(None)])
    assert found["ratio"] == pytest.approx(math.sqrt(1.1 * 1.3)) and found["reason"] is None
    assert found["se_log"] == pytest.approx(abs(math.log(1.1 / 1.3)) / 2)
    assert throughput([pair(1.2)])["se_log"] is None
    assert throughput([pair(None)])["ratio"] is None and "different devices" in throughput([pair(None)])["reason"]
    assert throughput([pair(1.2, "cpu AMD")])["ratio"] is None and "CPU" in throughput([pair(1.2, "cpu AMD")])["reason"]


def test_epochs_constants_are_the_huber_optimum():
    assert (EPOCH.A, EPOCH.B, EPOCH.E, EPOCH.alpha, EPOCH.beta) == (477.826, 2143.417, 1.817218, 0.347310, 0.367172)
    assert isinstance(HOFFMANN, Surface) and "2203.15556" in HOFFMANN.source and "2404.10102" in EPOCH.source
