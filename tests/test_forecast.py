"""Forecasts: their intervals by closed form, by coverage of known laws, by sizes held out of real ladders."""

import csv
import math
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.cli import UserError
from scaling.laws import GAMMAS, Points, fit_power
from scaling.pairs import EPOCH
from scaling.predict import FLOOR, forecast
from tests.conftest import ROOT

SMALL = (53e6, 124e6, 257e6, 360e6)
TARGET = (1.54e9, 30.8e9)
GADRE = ROOT.parent / "shared" / "reference" / "gadre2024_104runs.csv"
# Constants that give the slopes -dL/d ln D at 20 tokens per parameter published for OLMo's ladder (.179 at 125M to .121 at
# 1.5B) and its compute exponent of about .1: a truth whose exponent lies outside GAMMAS' middle.
OLMO_LIKE = SimpleNamespace(loss=lambda N, D: 1.15 + 57.0 * N**-0.232 + 32.9 * D**-0.1548)


def points_of(truth, ratios=(20,), sizes=SMALL, noise=0.0, tuning=0.0, rng=None, seeds=1, trunk=None):
    """A ladder with noise in each run and, per size, a loss that is off as a badly tuned size's is. trunk: noise that the
    runs of one size and seed share, as branches of one run do; they are one trajectory then."""
    N = np.repeat(np.array(sizes, dtype=float), len(ratios) * seeds)
    D = N * np.tile(ratios, len(sizes) * seeds)
    loss, label = truth.loss(N, D), np.repeat(np.arange(len(sizes) * seeds), len(ratios))
    if rng is not None:
        loss = loss * np.exp(noise * rng.normal(size=len(N)) + (trunk or 0) * rng.normal(size=len(sizes) * seeds)[label]
                             + tuning * np.repeat(rng.normal(size=len(sizes)), len(ratios) * seeds))
    return Points(N, D, 6 * N * D, loss, np.arange(len(N)) if trunk is None else label)


def at(N, D):
    return N, D, 6 * N * D


def forms(said):
    return {row["form"]: row for row in said["forms"]}


# --------------------------------------------------------------------------------------------------------- the forecast


def test_the_interval_is_the_union_of_its_forms():
    said = forecast(points_of(EPOCH), at(*TARGET))
    rows = said["forms"]
    assert [row["form"] for row in rows] == ["power_c", *(f"ray gamma={gamma:.2f}" for gamma in GAMMAS)]
    assert said["low"] == min(row["low"] for row in rows) and said["high"] == max(row["high"] for row in rows)
    assert said["parts"]["model_form"] == [min(row["loss"] for row in rows), max(row["loss"] for row in rows)]
    assert said["headline"] == "ray gamma=0.16" and said["loss"] == forms(said)["ray gamma=0.16"]["loss"]
    assert said["extrapolation"] == pytest.approx((TARGET[0] / SMALL[-1]) ** 2, rel=0.01)
    noisy = forecast(points_of(EPOCH), at(*TARGET), seed_sd=0.05)       # here no form has both the lowest loss and the lowest low
    assert noisy["low"] == min(row["low"] for row in noisy["forms"]) < noisy["forms"][0]["low"]
    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses)         # a larger exponent ends higher, the pure power law lowest


@pytest.mark.parametrize("N", [1.9e8, 1.54e9], ids=["among the points", "beyond them"])
def test_the_power_laws_interval_is_that_of_a_straight_line(N):
    """Closed form: t-interval of one new point of ordinary regression, sigma never below the best form's residuals."""
    points = points_of(EPOCH, noise=2e-3, rng=np.random.default_rng(3))
    said = forecast(points, at(N, 20 * N))
    row, x, x0 = forms(said)["power_c"], np.log(points.C), math.log(at(N, 20 * N)[2])
    share = 1 + 1 / 4 + (x0 - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    sigma = max(FLOOR, min(one["residual_rms"] for one in said["forms"]))
    t_2 = 4.302652729911275         # 97.5 % quantile of Student's t, 2 degrees of freedom
    # Huber's estimate is a little less certain than least squares: at most by pi / 2 in variance
    width = math.log(row["high"] / row["loss"]) / (t_2 * sigma * math.sqrt(share))
    assert row["sigma"] == sigma and 1 - 1e-9 <= width < math.sqrt(math.pi / 2)
    assert row["loss"] == pytest.approx(float(fit_power(points.C, points.loss).predict(math.exp(x0))))


def test_the_noise_is_at_least_that_of_seeds_and_the_floor():
    width = {sd: np.ptp([said["low"], said["high"]]) for sd in (0.0, FLOOR, 5e-3)
             for said in [forecast(points_of(EPOCH), at(*TARGET), seed_sd=sd)]}
    assert width[0.0] == width[FLOOR] < width[5e-3]
    assert forms(forecast(points_of(EPOCH), at(*TARGET), 5e-3))["power_c"]["sigma"] == 5e-3


def test_power_and_ray_laws_take_the_targets_ratio_alone():
    mixed, alone = points_of(EPOCH, (5, 20, 20.5, 40)), points_of(EPOCH, (20, 20.5))
    some, other = forms(forecast(mixed, at(*TARGET))), forms(forecast(alone, at(*TARGET)))
    for name in set(some) & set(other) - {"chinchilla"}:
        assert some[name]["loss"] == other[name]["loss"] and some[name]["n"] == 8
    assert forecast(mixed, at(*TARGET))["points"] == {"all": 16, "at_this_ratio": 8}


def test_chinchillas_law_leads_where_the_points_identify_it_and_refutes_what_misses_them():
    seven = (20e6, 34e6, 53e6, 90e6, 124e6, 257e6, 360e6)
    said = forecast(points_of(EPOCH, (5, 10, 20, 40), sizes=seven, noise=3e-4, rng=np.random.default_rng(0)), at(*TARGET))
    assert said["headline"] == "chinchilla" and said["loss"] == pytest.approx(EPOCH.loss(*TARGET), rel=0.01)
    refuted = {one["form"]: one["reason"] for one in said["forms_left_out"]}
    assert "the points refute it" in refuted["power_c"] and "power_c" not in forms(said)
    assert said["parts"]["all_forms"][0] < said["low"] and said["high"] - said["low"] < 0.15
    # Few sizes fix E, A and alpha with nothing to spare, however many runs each has: there nothing may be refuted.
    for sizes, seeds in ((SMALL[:3], 1), (SMALL, 1), (SMALL, 3)):
        few = points_of(EPOCH, (5, 10, 20, 40), sizes=sizes, noise=1e-3, rng=np.random.default_rng(0), seeds=seeds)
        assert "power_c" in forms(forecast(few, at(*TARGET)))


def test_a_headline_of_chinchillas_law_counts_trajectories():
    """Branches that share their trunk's luck: the law answers with the interval of its trajectories, or not at all."""
    rng, hits, answered = np.random.default_rng(3), [], 0
    for _ in range(40):
        said = forecast(points_of(EPOCH, (5, 10, 20, 40), noise=2e-4, trunk=1e-3, seeds=3, rng=rng), at(*TARGET))
        if said["headline"] == "chinchilla":
            answered += 1
            low, high = said["parts"]["headline_interval"]
            hits.append(low <= EPOCH.loss(*TARGET) * math.exp(1e-3 * rng.normal()) <= high)
    assert answered >= 20 and np.mean(hits) >= 0.88         # 95 % of 40, less two standard deviations


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_interval_covers_where_sizes_are_badly_tuned(seeds):
    """0.4 % per size, shared by all its runs, the new one's included: seeds and branches agree, and agree wrongly."""
    rng, hits = np.random.default_rng(11), []
    for _ in range(30):
        said = forecast(points_of(EPOCH, (5, 10, 20, 40), noise=3e-4, trunk=1e-3, tuning=4e-3, seeds=seeds, rng=rng), at(*TARGET))
        hits.append(said["low"] <= EPOCH.loss(*TARGET) * math.exp(4e-3 * rng.normal()) <= said["high"])
    assert np.mean(hits) >= 0.9


def test_noise_beyond_all_numbers_is_no_interval():
    with pytest.raises(UserError, match="no law reaches"):
        forecast(points_of(EPOCH), at(*TARGET), seed_sd=1e4)


@pytest.mark.parametrize("points, why", [
    (points_of(EPOCH, sizes=SMALL[:2]), "2 of 2 points"),
    (points_of(EPOCH, (5,)), "0 of 4 points"),
    (points_of(EPOCH, (10,), sizes=SMALL[:1]), "0 of 1 points"),
])
def test_too_few_points_reach_nothing(points, why):
    with pytest.raises(UserError, match=why):
        forecast(points, at(*TARGET))


@pytest.mark.parametrize("truth", [EPOCH, OLMO_LIKE], ids=["epoch", "olmo-like"])
@pytest.mark.parametrize("ratios", [(20,), (5, 10, 20, 40)], ids=["one ray", "four ratios"])
def test_the_interval_covers_what_a_new_run_does(truth, ratios):
    """200 ladders of four sizes in all, 0.1 % noise; nominal 95 % must hold at least 90 %."""
    inside, rng = [], np.random.default_rng(7)
    for _ in range(50):
        said = forecast(points_of(truth, ratios, noise=1e-3, rng=rng), at(*TARGET))
        new = truth.loss(*TARGET) * math.exp(1e-3 * rng.normal())
        inside.append(said["low"] <= new <= said["high"])
    assert np.mean(inside) >= 0.9


# Power law and rays of gamma .13, .155, .178, .20 on the losses of 79M, 154M and 411M at 20 tokens per parameter, against
# the loss of 1.44B: signed error in per cent, by straight least squares, computed elsewhere.
HOLD_OUTS = {("c4_original", "loss_c4_val"): (-3.49, -.53, .60, 1.57, 2.46),
             ("rpj", "loss_paloma_redpajama"): (-4.17, -1.31, -.00, 1.13, 2.16),
             ("rw_original", "loss_paloma_falcon-refinedweb"): (-3.34, -.29, .81, 1.76, 2.63)}


def gadre(train_set, column):
    if not GADRE.exists():
        pytest.skip(f"{GADRE} is not there: it is no part of the repository")
    with GADRE.open() as file:
        rows = sorted((float(row["N"]), float(row["D"]), float(row[column])) for row in csv.DictReader(file)
                      if row["train_set"] == train_set and float(row["mult"]) == 1)
    return np.array(rows)


@pytest.mark.parametrize("train_set, column", HOLD_OUTS)
def test_real_ladders_hold_out_sizes(train_set, column):
    rows = gadre(train_set, column)
    N, D, loss = rows[1:4].T
    said = forecast(Points(N, D, 6 * N * D, loss, np.arange(3)), at(*rows[4, :2]))
    truth, C = rows[4, 2], 6 * N * D
    assert said["low"] <= truth <= said["high"]
    power, *rays = HOLD_OUTS[train_set, column]
    squares = fit_power(C, loss, delta=None).predict(6 * rows[4, 0] * rows[4, 1])
    assert round(100 * (squares / truth - 1), 2) == power
    assert 100 * (forms(said)["power_c"]["loss"] / truth - 1) == pytest.approx(power, abs=0.3)      # Huber's, not squares'
    errors = {float(name[-4:]): 100 * (row["loss"] / truth - 1) for name, row in forms(said).items() if "gamma" in name}
    for gamma, golden in zip((.13, .155, .178, .20), rays, strict=True):
        assert np.interp(gamma, list(errors), list(errors.values())) == pytest.approx(golden, abs=0.5)


def test_every_validation_set_of_every_real_ladder():
    """3 training sets, 4 sets in distribution, two targets each: the interval must hold all of 24."""
    inside = []
    for train_set, _ in HOLD_OUTS:
        for column in ("loss_openlm", "loss_c4_val", "loss_paloma_falcon-refinedweb", "loss_paloma_redpajama"):
            rows = gadre(train_set, column)
            for target in (4, 5):       # 1.44B, 6.89B
                N, D, loss = rows[1:4].T
                said = forecast(Points(N, D, 6 * N * D, loss, np.arange(3)), at(*rows[target, :2]))
                inside.append(said["low"] <= rows[target, 2] <= said["high"])
    assert all(inside) and len(inside) == 24
