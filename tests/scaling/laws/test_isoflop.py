"""IsoFLOP minima, their exponents and the frontier, against closed forms and simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from scaling.law_words import refusal_words
from scaling.laws import Fit, Points, fit_form, fit_frontier, fit_isoflop, minima_of
from scaling.laws.fits import known
from scaling.laws.refusals import FlatExponent
from scaling.laws.valleys import Valley, fit_valleys, lowest_part
from tests.helpers.law_points import EPOCH, HOFFMANN, Law, joined, law, points_at
from tests.law_trials import ISOFLOP_DESIGNS, LAWS, best_size, isoflop_table, isoflop_trials

BUDGETS = np.geomspace(1e18, 1e21, 7)


def exponent(truth: Law) -> float:
    return truth["beta"] / (truth["alpha"] + truth["beta"])


def grid(
    truth: Law,
    budgets: list[float] | np.ndarray,
    width: float,
    sizes: int = 7,
    centre: float = 1.0,
    sd: float = 0.0,
    scatter: float = 0.0,
    seed: int = 0,
) -> Points:
    """Sizes around the best one of each budget, from 1 / width to width times as large; scatter: of
    ln C within a budget."""
    rng = np.random.default_rng(seed)
    tables = []
    for compute in budgets:
        best = centre * best_size(compute, truth)
        N = best * np.geomspace(1 / width, width, sizes)
        C = compute * np.exp(rng.uniform(-scatter, scatter, sizes))
        D = C / 6 / N
        deviation = rng.normal(0, sd, sizes)
        loss = law(N, D, truth) * np.exp(deviation)
        tables.append(Points(N, D, C, loss, np.zeros(sizes)))
    points = joined(*tables)
    return replace(points, cluster=np.arange(len(points)))


@pytest.mark.parametrize(
    ("truth", "biases"), [(EPOCH, (-0.1, -0.5, -1.1, -2.0)), (HOFFMANN, (0.4, 1.5, 3.4, 6.2))]
)
@pytest.mark.parametrize("place", range(4))
def test_bias_is_much_smaller_than_the_parabolas(truth: Law, biases: tuple[float, ...], place: int):
    """biases: of the usual method, as published for grids so wide, in per cent of N*."""
    width = (2, 4, 8, 16)[place]
    points = grid(truth, [2.7e20], width)
    best = best_size(2.7e20, truth)
    of_parabola = 100 * (lowest_of_parabola(points) / best - 1)
    assert of_parabola == pytest.approx(biases[place], abs=0.06)
    (budget,) = fit_isoflop(points).budgets or ()
    ours = 100 * (known(budget.N) / best - 1)
    assert abs(ours) < max(0.1 * abs(of_parabola), 0.01)


def lowest_of_parabola(points: Points) -> float:
    """N* by the usual method."""
    x = np.log(points.N)
    centre = x.mean()
    bend, slope, _ = np.polyfit(x - centre, points.loss, 2)
    return float(np.exp(centre - slope / 2 / bend))


@pytest.fixture(scope="module")
def scattered() -> Fit:
    """Of budgets whose computes scatter by 2 %, on a grid off its centre."""
    return fit_isoflop(grid(EPOCH, BUDGETS, 8, sizes=9, centre=1.3, scatter=0.02))


def test_exponents_are_recovered_from_scattered_budgets(scattered: Fit):
    a = exponent(EPOCH)
    assert scattered.identified and scattered.clusters is None
    assert [scattered.values["a"], scattered.values["b"]] == pytest.approx([a, 1 - a], abs=4e-3)


def test_factors_are_recovered_from_scattered_budgets(scattered: Fit):
    p = scattered.values
    tokens = p["k_d"] * 1e20 ** p["b"]
    sizes = [p["k_n"] * 1e20 ** p["a"], 1e20 / 6 / tokens]
    assert sizes == pytest.approx([best_size(1e20, EPOCH)] * 2, rel=0.02)


def test_each_budget_has_its_best_size(scattered: Fit):
    for budget, compute in zip(scattered.budgets or (), BUDGETS, strict=True):
        assert (budget.sizes, budget.reason) == (9, None)
        # the scatter of C is noise in L
        assert pytest.approx(best_size(compute, EPOCH), rel=0.05) == budget.N


def test_tokens_at_a_minimum_are_the_points_own_whatever_compute_counts():
    """C with attention and embedding may be any multiple of 6 N D; D was counted."""
    points = grid(EPOCH, BUDGETS, 8)
    tokens = minima_of(fit_isoflop(replace(points, C=1.4 * points.C))).D
    expected = [compute / 6 / best_size(compute, EPOCH) for compute in BUDGETS]
    assert tokens == pytest.approx(expected, rel=0.01)


def test_the_line_is_least_squares_and_windows_widen_its_interval(scattered: Fit):
    minima = minima_of(scattered)
    line = stats.linregress(np.log(minima.C), np.log(minima.N))
    of_windows = np.array([window.a for window in scattered.windows or ()])
    deviation = of_windows - line.slope
    doubt = 0.5 * math.sqrt(np.mean(deviation**2))
    assert doubt > 0 and scattered.se and scattered.ci95
    assert scattered.se["a"] == pytest.approx(math.hypot(line.stderr, doubt))
    half = stats.t.ppf(0.975, 5) * scattered.se["a"]
    _, high = scattered.ci95["a"]
    assert high - line.slope == pytest.approx(half)


def test_the_scatter_is_that_of_the_minima_around_their_line(scattered: Fit):
    minima = minima_of(scattered)
    x, y = np.log(minima.C), np.log(minima.N)
    slope = scattered.values["a"]
    rms = np.std(y - slope * x) * math.sqrt(7 / 5)
    assert scattered.residual_rms == pytest.approx(rms)


def test_the_first_window_counts(scattered: Fit):
    windows = scattered.windows or ()
    assert [window.window for window in windows] == [0.1, 0.2]
    assert windows[0].a == scattered.values["a"]


def test_a_drifting_grid_shifts_the_exponent_half_as_much_as_a_parabola():
    """From 1x to 3x over the budgets: a parabola gives .5227 for .5139."""
    drifting = [
        grid(EPOCH, [compute], 4, centre=centre)
        for compute, centre in zip(BUDGETS, np.geomspace(1, 3, 7), strict=True)
    ]
    points = joined(*drifting)
    fit = fit_isoflop(replace(points, cluster=np.tile(np.arange(7), 7)))
    assert fit.identified and fit.values["a"] == pytest.approx(0.5139, abs=0.0044)


@pytest.mark.parametrize("trunk", [2e-3, 5e-3])
def test_interval_covers_where_one_trajectory_serves_every_budget(trunk: float):
    """Ten sizes that pass six budgets each: the budgets' minima share the sizes' luck, so
    trajectories count, not budgets."""
    N = np.repeat(np.geomspace(3e7, 3e9, 10), 6)
    C = np.tile(np.geomspace(3e19, 6e20, 6), 10)
    D = C / 6 / N
    label = np.repeat(np.arange(10), 6)
    hits = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        of_trunk = rng.normal(0, trunk, 10)
        of_branch = rng.normal(0, trunk / 10, 60)
        loss = law(N, D) * np.exp(of_trunk[label] + of_branch)
        fit = fit_isoflop(points_at(N, D, loss, label))
        if fit.ci95:
            assert fit.interval == "cluster" and fit.clusters == 10
            low, high = fit.ci95["a"]
            hits.append(low < exponent(EPOCH) < high)
    assert len(hits) >= 20 and np.mean(hits) >= 0.9


# ------------------------------------------------------------------------ budgets without a minimum

BAD_BUDGETS = (
    ({"width": 4, "sizes": 4}, "4 sizes"),
    ({"width": 2, "centre": 20}, "no interior minimum"),
    ({"width": 2, "centre": 0.05}, "no interior minimum"),
)


@pytest.mark.parametrize(("shape", "reason"), BAD_BUDGETS)
def test_a_budget_without_a_minimum_is_named_and_changes_nothing(
    shape: dict[str, float], reason: str
):
    good = grid(EPOCH, BUDGETS[:3], 8)
    fit = fit_isoflop(joined(good, grid(EPOCH, [1e23], **shape)))
    *sound, bad = fit.budgets or ()
    assert [budget.reason for budget in sound] == [None] * 3 and bad.N is None
    assert reason in str(refusal_words(bad.reason))
    assert fit.values["a"] == fit_isoflop(good).values["a"]


def test_ridges_are_no_valleys():
    good = grid(EPOCH, BUDGETS[:3], 8)
    assert not fit_isoflop(replace(good, loss=6 - good.loss)).identified


def test_an_exponent_whose_interval_holds_zero_is_refused():
    fits = [
        fit_isoflop(grid(EPOCH, BUDGETS[:3], 8, sizes=9, sd=1e-2, seed=seed)) for seed in range(12)
    ]
    flat = [fit for fit in fits if fit.ci95 and min(fit.ci95["a"][0], fit.ci95["b"][0]) <= 0]
    assert flat
    for fit in flat:
        assert not fit.identified and isinstance(fit.reason, FlatExponent)


def test_two_budgets_give_no_exponent():
    two = fit_isoflop(grid(EPOCH, BUDGETS[:2], 8))
    assert two.parameters == {"a": None, "b": None}
    words = str(refusal_words(two.reason))
    assert "2 of 2 compute budgets have an interior minimum" in words


@pytest.mark.parametrize("design", ISOFLOP_DESIGNS)
def test_exponents_of_ten_designs_are_unbiased_and_in_their_intervals(design: str):
    """Four laws of 12 tables each; law_trials.py isoflop draws more. A cubic through all sizes is
    off by .005 to .03 on some."""
    trials = [isoflop_trials(design, 12, truth) for truth in LAWS]
    errors = np.concatenate([error for error, _ in trials])
    inside = np.concatenate([is_inside for _, is_inside in trials])
    assert abs(errors.mean()) < 0.002 + 2.5 * errors.std() / math.sqrt(len(errors))
    # 93 % of 48, less two and a half standard deviations
    assert len(inside) >= 44 and inside.mean() >= 0.83


# ---------------------------------------------------------------------------- frontier and valleys


@pytest.fixture(scope="module")
def centred() -> Points:
    return isoflop_table(0, "centred", LAWS[0], noise=2e-4)


def test_minima_are_the_lowest_losses_of_the_law(centred: Points):
    C, N, _, lowest = minima_of(fit_isoflop(centred))
    assert lowest == pytest.approx(law(N, C / 6 / N), rel=5e-4)


def test_the_frontier_is_the_law_in_closed_form(centred: Points):
    """E + K C^-gamma."""
    frontier = fit_frontier(fit_isoflop(centred))
    gamma = EPOCH["alpha"] * exponent(EPOCH)
    assert frontier.form == "ray" and frontier.values["gamma"] == pytest.approx(gamma, abs=0.01)
    size = best_size(1e22, EPOCH)
    assert frontier.predict(1e22) == pytest.approx(law(size, 1e22 / 6 / size), rel=5e-3)


def test_the_frontier_lies_below_a_law_through_all_sizes(centred: Points):
    frontier = fit_frontier(fit_isoflop(centred))
    assert fit_form("power_c", centred).predict(1e20) > 1.01 * frontier.predict(1e20)


ALPHA, BETA = 0.3, 0.45
SIZES = (np.linspace(15, 19, 7), np.linspace(17, 22, 11))
FACTORS = ((2.0, 30.0, 1e-4), (1.9, 40.0, 2e-5))
LOWEST = [math.log(ALPHA * u / (BETA * v)) / (ALPHA + BETA) for _, u, v in FACTORS]


def valleys() -> list[Valley]:
    """Of any number and place of sizes, with factors of their own and shared exponents."""
    return [
        Valley(x, e + u * np.exp(-ALPHA * x) + v * np.exp(BETA * x))
        for x, (e, u, v) in zip(SIZES, FACTORS, strict=True)
    ]


def test_valleys_are_recovered():
    minima = fit_valleys(valleys())
    assert minima.log_size == pytest.approx(LOWEST, abs=2e-3)
    assert minima.loss_at(1, SIZES[1]) == pytest.approx(valleys()[1].loss, rel=1e-4)


def test_a_valley_whose_sizes_begin_behind_its_minimum_has_none():
    """The other valley gives the exponents, by which it would be lowest before its first size."""
    whole, rising = valleys()
    is_behind = rising.log_size > LOWEST[1] + 0.5
    cut = Valley(rising.log_size[is_behind], rising.loss[is_behind])
    minima = fit_valleys([whole, cut])
    assert minima.log_size[0] == pytest.approx(LOWEST[0], abs=2e-3)
    assert np.isnan([minima.log_size[1], minima.loss[1]]).all()


def test_one_point_far_off_a_valley_moves_little():
    spoilt = valleys()
    spoilt[1].loss[8] *= 1.05
    assert fit_valleys(spoilt).log_size == pytest.approx(LOWEST, abs=0.06)


def test_the_lowest_part_of_a_valley():
    x = np.arange(9.0)
    part = lowest_part(Valley(x, np.abs(x - 3) / 10 + 1), 0.15, 5)
    assert part.log_size.tolist() == [1, 2, 3, 4, 5]
