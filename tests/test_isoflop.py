"""The best size per budget is found without a parabola's bias, and budgets without a minimum are named."""

import json

import numpy as np
import pytest

from scaling.laws import Points, envelope, fit_isoflop, optimum

EPOCH = {"E": 1.817218, "A": 477.826, "B": 2143.417, "alpha": 0.34731, "beta": 0.367172}
HOFFMANN = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}


def best(p, C):
    """(N*, exponent a) of a law in closed form."""
    total = p["alpha"] + p["beta"]
    return (p["alpha"] * p["A"] / (p["beta"] * p["B"])) ** (1 / total) * (C / 6) ** (p["beta"] / total), p["beta"] / total


def grid(p, budgets, wide, sizes=7, centre=1.0, sd=0.0, scatter=0.0, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for C in budgets:
        N = centre * best(p, C)[0] * np.geomspace(1 / wide, wide, sizes)
        c = C * np.exp(rng.uniform(-scatter, scatter, sizes))
        L = p["E"] + p["A"] * N ** -p["alpha"] + p["B"] * (c / 6 / N) ** -p["beta"]
        rows.append(np.array([N, c / 6 / N, c, L * np.exp(rng.normal(0, sd, sizes))]))
    return Points(*np.hstack(rows), np.arange(sizes * len(budgets)))


BUDGETS = np.geomspace(1e18, 1e21, 7)


@pytest.mark.parametrize(("p", "published"), [(EPOCH, (-0.1, -0.5, -1.1, -2.0)), (HOFFMANN, (0.4, 1.5, 3.4, 6.2))])
def test_bias_is_much_smaller_than_the_parabolas(p, published):
    for wide, parabola in zip((2, 4, 8, 16), published, strict=True):
        points = grid(p, [2.7e20], wide)
        x = np.log(points.N)
        bend, slope, _ = np.polyfit(x - x.mean(), points.loss, 2)
        truth = np.log(best(p, 2.7e20)[0])
        biased = 100 * np.expm1(x.mean() - slope / 2 / bend - truth)
        assert biased == pytest.approx(parabola, abs=0.06)                     # the published bias of the usual method
        ours = 100 * np.expm1(np.log(fit_isoflop(points).budgets[0]["N"]) - truth)
        assert abs(ours) < max(0.1 * abs(biased), 0.01), (wide, ours, biased)


def test_exponents_are_recovered_from_scattered_budgets():
    fit = fit_isoflop(grid(EPOCH, BUDGETS, 8, sizes=9, centre=1.3, scatter=0.02))
    a = best(EPOCH, 1.0)[1]
    assert fit.identified and fit.form == "isoflop" and fit.clusters is None and fit.interval == "t"
    assert fit.parameters["a"] == pytest.approx(a, abs=4e-3) and fit.parameters["b"] == pytest.approx(1 - a, abs=4e-3)
    N, D = optimum(fit, np.array([1e19, 1e20]))
    assert np.allclose(N, best(EPOCH, np.array([1e19, 1e20]))[0], rtol=0.02)
    assert np.allclose(6 * N * D, [1e19, 1e20], rtol=0.02)
    for row, C in zip(fit.budgets, BUDGETS, strict=True):
        assert row["sizes"] == 9 and row["reason"] is None and row["C"] == pytest.approx(C, rel=0.02)
        assert row["N"] == pytest.approx(best(EPOCH, C)[0], rel=0.05)      # the scatter of C is noise in L
    content = json.loads(json.dumps(fit.plain(), allow_nan=False))
    assert content["a"] == fit.parameters["a"] and len(content["budgets"]) == 7 and fit.formula().startswith("N* ~ C^0.51")


def test_a_drifting_grid_does_not_shift_the_exponent():
    """Centre 1x to 3x over the budgets: a parabola gives .5227 for .5139."""
    parts = [grid(EPOCH, [C], 4, centre=c) for C, c in zip(BUDGETS, np.geomspace(1, 3, 7), strict=True)]
    points = Points(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("N", "D", "C", "loss", "cluster")))
    fit = fit_isoflop(points)
    assert fit.identified and fit.parameters["a"] == pytest.approx(0.5139, abs=0.0044)      # half of the parabola's shift


def test_interval_covers():
    a, hits = best(EPOCH, 1.0)[1], []
    for seed in range(150):
        low, high = fit_isoflop(grid(EPOCH, BUDGETS, 8, sizes=9, sd=2e-3, seed=seed)).ci95["a"]
        hits.append(low < a < high)
    assert np.mean(hits) >= 0.9


@pytest.mark.parametrize("trunk", [2e-3, 5e-3])
def test_interval_covers_where_one_trajectory_serves_every_budget(trunk):
    """Ten sizes that pass six budgets each: the budgets' minima share the sizes' luck, so trajectories count, not budgets."""
    N, C = np.repeat(np.geomspace(3e7, 3e9, 10), 6), np.tile(np.geomspace(3e19, 6e20, 6), 10)
    D, label, a, hits = C / 6 / N, np.repeat(np.arange(10), 6), best(EPOCH, 1.0)[1], []
    truth = EPOCH["E"] + EPOCH["A"] * N ** -EPOCH["alpha"] + EPOCH["B"] * D ** -EPOCH["beta"]
    for seed in range(60):
        rng = np.random.default_rng(seed)
        loss = truth * np.exp(rng.normal(0, trunk, 10)[label] + rng.normal(0, trunk / 10, 60))
        fit = fit_isoflop(Points(N, D, C, loss, label))
        if fit.ci95:
            assert fit.interval == "cluster" and fit.clusters == 10
            hits.append(fit.ci95["a"][0] < a < fit.ci95["a"][1])
    assert len(hits) >= 30 and np.mean(hits) >= 0.9


def test_an_exponent_whose_interval_holds_0_is_not_identified():
    points = grid(EPOCH, BUDGETS[:3], 8, sizes=9, sd=1e-2, seed=5)
    fits = [fit_isoflop(grid(EPOCH, BUDGETS[:3], 8, sizes=9, sd=1e-2, seed=seed)) for seed in range(12)]
    wide = [fit for fit in fits if fit.ci95 and min(fit.ci95["a"][0], fit.ci95["b"][0]) <= 0]
    assert len(points.loss) == 27 and wide and all(not fit.identified and "contains 0" in fit.reason for fit in wide)


def test_noise_is_averaged_not_followed():
    """N* of one budget under 0.1 % noise: a curve through every point would miss by 5 to 13 %."""
    truth = np.log(best(EPOCH, 1e20)[0])
    errors = [np.log(fit_isoflop(grid(EPOCH, [1e20], 16, sizes=16, sd=1e-3, seed=seed)).budgets[0]["N"]) - truth
              for seed in range(100)]
    assert np.sqrt(np.mean(np.square(errors))) < 0.02


def test_budgets_without_a_minimum_are_named():
    good = grid(EPOCH, BUDGETS[:3], 8)
    for points, reason in (
            (grid(EPOCH, [1e23], 4, sizes=4), "4 sizes; a minimum needs 5"),
            (grid(EPOCH, [1e23], 2, centre=20), "the smallest size has the lowest loss: no interior minimum"),
            (grid(EPOCH, [1e23], 2, centre=0.05), "the largest size has the lowest loss: no interior minimum")):
        both = Points(*(np.concatenate([getattr(one, name) for one in (good, points)])
                        for name in ("N", "D", "C", "loss", "cluster")))
        fit = fit_isoflop(both)
        assert [row["reason"] for row in fit.budgets] == [None, None, None, reason] and fit.budgets[3]["N"] is None
        assert fit.identified and fit.parameters["a"] == fit_isoflop(good).parameters["a"]
    upside_down = Points(good.N, good.D, good.C, 6 - good.loss, good.cluster)
    assert not fit_isoflop(upside_down).identified


def test_the_minimum_is_taken_not_the_maximum_beside_it():
    x = np.linspace(-0.9, 1.5, 9)
    hump = Points(np.exp(18 + x), np.ones(9), np.full(9, 1e20), np.exp(1 + 0.02 * (x**3 - 1.2 * x)), np.arange(9))
    assert fit_isoflop(hump).budgets[0]["N"] == pytest.approx(np.exp(18 + 0.4**0.5), rel=1e-6)


def test_too_few_budgets():
    fit = fit_isoflop(grid(EPOCH, BUDGETS[:2], 8))
    assert not fit.identified and fit.parameters == {"a": None, "b": None} and len(fit.budgets) == 2
    assert fit.reason == ("2 of 2 compute budgets have an interior minimum over at least 5 sizes; the exponents need 3")
    one = Points([1e8], [1e9], [6e17], [3.0], [0])
    assert fit_isoflop(one).budgets[0]["reason"] == "1 sizes; a minimum needs 5"
    empty = Points([], [], [], [], [])
    assert fit_isoflop(empty).reason.startswith("0 of 0 compute budgets")


def test_repeated_sizes_are_averaged():
    points = grid(EPOCH, BUDGETS, 8)
    twice = Points(*(np.tile(getattr(points, name), 2) for name in ("N", "D", "C")),
                   np.concatenate([points.loss * 1.01, points.loss / 1.01]), np.arange(2 * len(points.N)))
    assert fit_isoflop(twice).parameters == pytest.approx(fit_isoflop(points).parameters, rel=1e-6)
    assert {row["sizes"] for row in fit_isoflop(twice).budgets} == {7}


def test_envelope_steps_from_size_to_size():
    curves = []
    for N in (1e7, 1e8, 1e9):
        D = np.geomspace(1e7, 1e12, 400)
        curves.append((6 * N * D, EPOCH["E"] + EPOCH["A"] * N ** -EPOCH["alpha"] + EPOCH["B"] * D ** -EPOCH["beta"]))
    C, loss, index = envelope(curves)
    assert len(C) == len(loss) == len(index) == 1500 and (np.diff(C) > 0).all() and (np.diff(loss) < 1e-12).all()
    assert sorted(set(index)) == [0, 1, 2] and (np.diff(index) >= 0).all()     # one step up per size
    for c, low, i in zip(C[::100], loss[::100], index[::100], strict=True):
        each = [np.interp(np.log(c), np.log(x), y, left=np.inf, right=np.inf) for x, y in curves]
        assert low == pytest.approx(min(each)) and np.argmin(each) == i


def test_envelope_of_gaps_and_nothing():
    assert [len(one) for one in envelope([])] == [0, 0, 0] and [len(one) for one in envelope([([], [])])] == [0, 0, 0]
    C, loss, index = envelope([([1e15, 1e16, np.nan], [3.0, 2.5, 2.0]), ([1e18, 1e19], [2.2, np.inf])])
    assert (C >= 1e15 * (1 - 1e-9)).all() and not ((C > 1.01e16) & (C < 0.99e18)).any() and np.isfinite(loss).all()
    assert set(index) <= {0, 1}
