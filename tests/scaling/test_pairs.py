"""scaling/paired and pairing.py: gaps, nulls, equivalence, ranking and what a gap costs, against scipy,
simulation, published tables."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import brentq, curve_fit
from scipy.stats import linregress, nct, ttest_1samp
from scipy.stats import t as student

from scaling.paired.cost import (
    EPOCH,
    Surface,
    costs,
    local_surface,
    own_surface,
    surfaces,
    throughput,
)
from scaling.paired.estimates import clusters, estimate, power, smallest_seen, tost
from scaling.paired.gaps import Gap, Pair, over, over_sizes, over_tokens
from scaling.paired.nulls import measure
from scaling.paired.published import kumar_gap, sun_gap
from scaling.paired.ranking import rank
from scaling.pairing import pairs
from scaling.precision import analyse
from scaling.records import read_runs
from scaling.verdicts import Margin, verdict
from tests.helpers.scaling_runs import edit, strict, write_branches, write_run

DECLARED = Margin(0.25, "study.json", True)
# nominal counts, 20 tokens per parameter, as in the published tables
SIZES = np.array([125e6, 250e6, 350e6, 1.5e9])
# parameters without the vocabulary -> all
SHAPES = {3_150_000: 16_000_000, 6_490_000: 25_800_000, 12_600_000: 38_300_000}
# nats, of two seeds
LOSS, GAP, NULL = {1: 2.20, 2: 2.21}, {1: 0.010, 2: 0.014}, {1: 0.002, 2: -0.004}
SEEDS, BUDGETS = (1, 2), (40_000, 90_000)
# per cent, the BF16 run's own
NOISE = {(40_000, 1): 0.05, (40_000, 2): -0.1, (90_000, 1): 0.075, (90_000, 2): -0.02}
# 0.005 per cent, of each cell
OWN = {"rowwise": (1, -1, 1, -1), "tensorwise": (1, 1, -1, -1), "cscale": (1, -1, -1, 1)}


def sample(n, mean=0.0, sd=1.0, seed=0):
    """n values with exactly this mean and standard deviation."""
    z = np.random.default_rng(seed).normal(size=n)
    return mean + sd * (z - z.mean()) / z.std(ddof=1)


def analysed(folder, convention=None):
    records = read_runs([folder], convention)[0]
    return analyse(records, pairs(records)[0], "bf16", None)


@pytest.mark.parametrize(
    "n, mean, sd, words",
    [
        (2, 0.1, 0.1, "undecided"),
        (6, 0.1, 0.21, "undecided"),  # the second: p between .05 and .1
        (30, 0.24, 0.1, "costs 0.24 %"),
        (5, 0.5, 0.1, "costs 0.5 %"),
        (5, -0.5, 0.1, "gains 0.5 %"),
        (6, 0.1, 0.05, "costs 0.1 %, within ±0.25 % (TOST, p="),
        (8, 0.01, 0.1, "equivalent within ±0.25 % (TOST, p="),
        (5, 0.01, 0.5, "undecided: interval -0.61 to +0.63"),
    ],
)
def test_intervals_and_tost_are_scipys_and_verdicts_follow_them(n, mean, sd, words):
    values = sample(n, mean, sd)
    found, theirs = estimate(values), ttest_1samp(values, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert (found.mean, found.sd, found.n) == pytest.approx((mean, sd, n))
    theirs = max(
        ttest_1samp(values, -0.25, alternative="greater").pvalue,
        ttest_1samp(values, 0.25, alternative="less").pvalue,
    )
    p = tost(found, 0.25)
    assert p == pytest.approx(theirs, rel=1e-9) and verdict(found, DECLARED, p).startswith(words)
    for same in ([mean], [mean] * 3, [0.0, 0.0]):  # without spread
        found = estimate(same)
        assert (
            found.mean == pytest.approx(same[0])
            and found.se is found.half is tost(found, 1) is None
        )


def test_power_is_the_noncentral_t():
    for n, gap in itertools.product((3, 10, 40), (0.0, 0.3, -1.0)):
        quantile, shift = student.ppf(0.975, n - 1), gap * math.sqrt(n)
        theirs = nct.sf(quantile, n - 1, shift) + nct.cdf(-quantile, n - 1, shift)
        assert power(n, gap) == pytest.approx(theirs, abs=2e-6), (n, gap)
    for n in (2, 3, 100):  # n = 2: where scipy's noncentral t gives up
        assert power(n, smallest_seen(0.4, n) / 0.4) == pytest.approx(0.8, abs=1e-6)


def fake(
    percent, N=1, D=1, trunk="", seed=0, recipe="tensorwise", speed=None, device="GPU", linears=8
):
    """A pair as far as estimates over pairs and their ranking look at it; the gap as trained is 1.5
    times as large."""
    shared = {
        "N": N,
        "params_total": N,
        "params_nonembed": N,
        "tokens": D,
        "seed": seed,
        "recipe": recipe,
        "device": device,
    }
    bf16, fp8 = (
        SimpleNamespace(trunk=f"{arm}{trunk}", run_id=f"{recipe}_{N}_{seed}", **shared)
        for arm in "bf"
    )
    gaps = {
        arm: Gap(factor * percent, factor * percent, None)
        for arm, factor in (("bf16", 1), ("as_trained", 1.5))
    }
    return Pair(bf16, fp8, gaps, speed, linears)


def test_intervals_cover_with_clusters_of_unequal_size_and_branches_counted_as_runs_do_not():
    """95 % nominal over 2,000 studies of six trunks with one to four branches, most of whose noise
    is the trunk's."""
    rng, covered = np.random.default_rng(5), []
    for _ in range(2000):
        found = [
            fake(0.2 + shift + rng.normal(0, 0.03), trunk=i)
            for i, shift in enumerate(rng.normal(0, 0.1, 6))
            for _ in range(1 + i % 4)
        ]
        both = (
            over(found, "percent")["bf16"],
            estimate([pair.gap["bf16"].percent for pair in found]),
        )
        covered.append([one.low < 0.2 < one.high for one in both])
    honest, naive = np.mean(covered, axis=0)
    assert both[0].n == 6 and honest == pytest.approx(0.95, abs=0.015) and naive < 0.85
    shared = clusters([{1, 2}, {5}, {3, 4}, {2, 3}, {5, 6}, {7}])  # through a third
    assert [own.tolist() for own in shared] == [[0, 2, 3], [1, 4], [5]]


def test_the_change_over_sizes_is_the_regression_of_independent_trajectories():
    N, gaps = np.repeat(SIZES, 3), np.random.default_rng(3).normal(0, 0.1, 12)
    branches = [
        fake(gap + shift, size, trunk=i)
        for i, (size, gap) in enumerate(zip(N, gaps, strict=True))
        for shift in (1, -1)
    ]
    # a trunk's branches count once
    theirs, found = linregress(np.log10(N), gaps), over_sizes(branches, "bf16")
    assert (found.mean, found.half) == pytest.approx(
        (theirs.slope, student.ppf(0.975, 10) * theirs.stderr), rel=1e-6
    )
    # but for rounding
    two_sizes = [
        fake(1, size, trunk=i) for i, size in enumerate([1e8, 1e8 * (1 + 1e-14), 2e8, 2e8])
    ]
    assert over_sizes(two_sizes, "bf16") is over_sizes(branches[:18:8], "bf16") is None


def test_the_change_over_tokens_is_each_trunks_own_and_covers():
    """One line through all pairs of two sizes with other budgets would take the sizes' levels for
    the effect of tokens."""
    rng, truth, covered, naive = np.random.default_rng(7), 0.05, 0, 0
    for study in range(1000):
        found, is_branch = [], study % 2  # half of the studies are of runs that are no branches
        for i, budgets in enumerate([(5, 10, 20), (5, 10), (5, 10, 20)] * 2):
            level = rng.normal(0.1 * (i > 2), 0.1)
            found += [
                fake(
                    level + truth * math.log2(D) + rng.normal(0, 0.01),
                    1 + i // 3,
                    D * (1 + 9 * (i > 2)),
                    f"{i}" if is_branch else f"{i}_{D}",
                    i % 3,
                )
                for D in budgets
            ]
        slope = over_tokens(found, "bf16")
        line = linregress(
            [math.log2(p.fp8.tokens) for p in found], [p.gap["bf16"].percent for p in found]
        )
        covered += slope.low < truth < slope.high
        naive += abs(line.slope - truth) < student.ppf(0.975, len(found) - 2) * line.stderr
    assert slope.n == 6 and covered / 1000 == pytest.approx(0.95, abs=0.02) and naive / 1000 < 0.85
    assert over_tokens(found[:1] + found[5:6], "bf16") is None


def test_a_repeat_is_the_null_of_its_seed_and_no_partner(tmp_path):
    """Two seeds in BF16, FP8 and BF16 once more; of FP8 too there is a repeat, no pair."""
    for seed, loss in LOSS.items():
        for name, shift, gap in (
            ("bf16", 0, 0),
            ("null", NULL[seed], 0),
            ("fp8", 0, GAP[seed]),
            ("fp8_again", 0, GAP[seed]),
        ):
            write_run(
                tmp_path / f"{name}_{seed}",
                loss=loss + shift,
                gap=gap,
                seed=seed,
                recipe="tensorwise" if gap else "bf16",
                repeat=int(name in ("null", "fp8_again")),
            )
    runs, _ = read_runs([tmp_path])
    for order in (runs, runs[::-1]):
        found, notes = pairs(order)
        assert sorted(
            (p.bf16.run_id, p.fp8.run_id, round(p.gap["bf16"].nats, 6)) for p in found
        ) == [
            ("bf16_1", "fp8_1", 0.01),
            ("bf16_1", "null_1", 0.002),
            ("bf16_2", "fp8_2", 0.014),
            ("bf16_2", "null_2", -0.004),
        ]
        assert sorted(note.split(":")[0] for note in notes) == [
            "unpaired fp8_again_1",
            "unpaired fp8_again_2",
        ]
    null = analysed(tmp_path)["null"]
    # around nought: which came first is arbitrary
    same = 100 * math.hypot(NULL[1] / LOSS[1], NULL[2] / LOSS[2]) / math.sqrt(2)
    # a repeat is no third run
    other = 100 * math.sqrt(2) * np.std(np.log([*LOSS.values()]), ddof=1)
    for pooled, sd, dof in ((null["same_seed"]["pooled"], same, 2), (null["pooled"], other, 1)):
        assert [*pooled.values()] == pytest.approx([2, dof, sd, student.ppf(0.975, dof) * sd])
    found, notes = pairs([run for run in runs if run.run_id not in ("bf16_1", "fp8_2")])
    assert [pair.fp8.run_id for pair in found] == ["null_2"]
    assert {"unpaired bf16_2", "unpaired fp8_1", "unpaired null_1"} <= {
        note.split(":")[0] for note in notes
    }


def test_equal_bits_are_no_null_and_branches_add_no_freedom():
    branches = [fake(percent, D=D) for D, percent in ((5, 0.1), (10, -0.3), (20, 0.2), (40, 0.0))]
    same = measure([], branches, "bf16")["same_seed"]
    sd = math.hypot(0.1, 0.3, 0.2) / math.sqrt(3)
    assert same["equal"] == 1 and [*same["pooled"].values()] == pytest.approx(
        [3, 1, sd, student.ppf(0.975, 1) * sd]
    )


def test_our_law_and_trend_are_of_our_count_of_parameters(tmp_path):
    """Three sizes at 5, 10 and 20 tokens per parameter without the vocabulary, losses from a known
    law of those."""
    for path in write_branches(tmp_path, SHAPES, (5, 10, 20), noise=1e-4).glob("*/summary.json"):
        N = strict(path)["params_total"]
        edit(path, params_nonembed=N, params_total=SHAPES[N])
    edit(tmp_path / "study.json", params="nonembed")
    result = analysed(tmp_path)
    row = result["sizes"][0]
    assert (row["N"], row["params_total"], row["tokens_per_param"]) == (3_150_000, 16_000_000, 5)
    # each under the law's own A, alpha and count of N
    (own, epoch), nats = row["costs"], row["nats"].mean
    assert own["effective_parameters"] == pytest.approx(
        (1 + nats / (40.0 * 3_150_000**-0.35)) ** (-1 / 0.35), rel=0.02
    )
    assert epoch["effective_parameters"] == pytest.approx(EPOCH.effective_parameters(nats, 16e6))
    for found, count in (
        (result, "params_nonembed"),
        (analysed(tmp_path, convention="total"), "params_total"),
    ):
        slope, _ = np.polyfit(
            *np.transpose(
                [(math.log10(pair[count]), pair["gap_bf16"].percent) for pair in found["pairs"]]
            ),
            1,
        )
        assert found["common"]["tensorwise"]["over_sizes"].mean == pytest.approx(slope, rel=1e-6)


def cells(recipes, sizes=BUDGETS, seeds=SEEDS, ratio=20, **more):
    """recipes: name -> (mean gap in per cent, speed against BF16); BF16's own deviation is shared,
    each recipe adds its own."""
    return [
        fake(
            gap + NOISE.get((N, seed), 0) + 0.005 * OWN[recipe][i % 4],
            N,
            ratio * N,
            "",
            seed,
            recipe,
            speed,
            **more,
        )
        for i, (N, seed) in enumerate(itertools.product(sizes, seeds))
        for recipe, (gap, speed) in recipes.items()
    ]


def test_the_lowest_gap_is_first_and_the_paired_difference_decides_who_ties():
    some = cells({"rowwise": (0.1, 0.8), "tensorwise": (0.1025, 1.1), "cscale": (1.0, 1.3)})
    found, trained = (rank(some, arm) for arm in ("bf16", "as_trained"))
    assert [(row["recipe"], row["ties"]) for row in found["recipes"]] == [
        ("rowwise", True),
        ("tensorwise", True),
        ("cscale", False),
    ]
    logs = {
        name: [p.gap["bf16"].log_percent for p in some if p.fp8.recipe == name]
        for name in ("rowwise", "tensorwise")
    }
    difference = found["recipes"][1]["difference"]
    interval = ttest_1samp(
        np.subtract(logs["tensorwise"], logs["rowwise"]), 0
    ).confidence_interval()
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    assert found["best"] == "tensorwise" and "the fastest, 1.100" in found["reason"]
    assert trained["recipes"][2]["gap"].mean == pytest.approx(
        1.5 * found["recipes"][2]["gap"].mean, rel=1e-2
    )
    for rowwise, tensorwise, more, best, words in (
        ((-1.5, 0.7), (0.05, 1.4), {}, "rowwise", "no other ranked recipe"),
        ((0.1, 0.8), (0.1025, 1.1), {"device": "cpu EPYC"}, "rowwise", "a CPU has no FP8 units"),
        (
            (0.1, 0.8),
            (1.0, 1.1),
            {"sizes": BUDGETS[:1], "seeds": (1,)},
            "tensorwise",
            "over 1 pairs",
        ),
    ):
        found = rank(cells({"rowwise": rowwise, "tensorwise": tensorwise}, **more), "bf16")
        assert found["best"] == best and words in found["reason"]


def test_what_cannot_be_compared_is_not_ranked():
    some = cells({"rowwise": (0.1, 0.8), "tensorwise": (0.3, 1.1)})
    # the smaller budget does not count
    some += cells({"rowwise": (45, 0.8), "tensorwise": (5, 1.1)}, ratio=10)
    some += [
        fake(-25, N, 20 * N, "", seed, "auto", 2.0, linears=0 if (N, seed) == (40_000, 2) else 3)
        for N, seed in NOISE
    ]
    found = rank(some, "bf16")
    assert found["best"] == "rowwise" and found["recipes"][0]["gap"].n == 4
    assert (
        found["left_out"][0]["recipe"] == "auto"
        and "auto_40000_2" in found["left_out"][0]["reason"]
    )
    # the chosen recipe's further sizes and budgets undo nothing
    for more in ({"sizes": (200_000,)}, {"ratio": 40}):
        some += cells({"rowwise": (25, 0.8)}, **more)
    assert rank(some, "bf16") == found
    found = rank(
        cells({"rowwise": (0.1, 0.8), "tensorwise": (0.3, 1.1), "cscale": (0.05, 1.3)})[:-1], "bf16"
    )
    assert len(found["recipes"]) == 2 and "90k seed 2" in found["left_out"][0]["reason"]
    found = rank(
        cells({"rowwise": (0.1, 0.8)}, BUDGETS[:1])
        + cells({"tensorwise": (0.1, 0.8)}, BUDGETS[1:]),
        "bf16",
    )
    assert found["best"] is None and len(found["left_out"]) == 2


def test_kumar_sun_and_speedups_give_the_published_tables():
    assert np.round(kumar_gap(SIZES), 4).tolist() == [0.0091, 0.0065, 0.0055, 0.0027]
    assert np.round(kumar_gap(SIZES, offsets=False), 4).tolist() == [
        0.0164,
        0.0116,
        0.0098,
        0.0048,
    ]
    assert np.round(sun_gap(SIZES, 20 * SIZES), 5).tolist() == [
        0.00011,
        0.00013,
        0.00014,
        0.00022,
    ]
    ends = SIZES[[0, 3]]
    assert np.round(sun_gap(ends, 20 * ends, 5, 2), 5).tolist() == [0.00015, 0.00031]
    assert np.round(sun_gap(ends, 20 * ends, 2, 1, block=32), 4).tolist() == [0.0061, 0.0123]
    for ratio, expected in {
        1.10: (1.076, 1.041, 0.985),
        1.17: (1.145, 1.108, 1.047),
        1.28: (1.252, 1.212, 1.146),
    }.items():
        gaps = [share * EPOCH.loss(1.5e9, 30e9) for share in (0.001, 0.0025, 0.005)]
        assert [round(EPOCH.speedup(30e9, gap, None, ratio)[0], 3) for gap in gaps] == list(
            expected
        )


def test_conversions_solve_the_law():
    law, N, D, step = EPOCH, 3e8, 6e9, 1e-5
    for gap in (-0.01, 0.004, 0.03):
        r = brentq(
            lambda r, gap=gap: law.loss(N, r * D) + gap - law.loss(N, D), 0.1, 50, xtol=1e-14
        )
        phi = brentq(
            lambda phi, gap=gap: law.loss(phi * N, D) - gap - law.loss(N, D), 0.1, 50, xtol=1e-14
        )
        assert [law.extra_tokens(gap, D), law.effective_parameters(gap, N)] == pytest.approx(
            [r, phi], rel=1e-9
        )
    numeric = (law.loss(N, D * math.exp(-step)) - law.loss(N, D * math.exp(step))) / (2 * step)
    assert law.slope(D) == pytest.approx(numeric, rel=1e-6)


def test_a_law_that_is_almost_flat_or_a_gap_beyond_it_gives_numbers_or_none():
    """Runs of one size whose losses fall by nothing: powers of it overflow."""
    for beta, gap in itertools.product((1e-17, 1e-5, 1e-3, EPOCH.beta), (-0.5, 0.0, 1.9)):
        law = Surface("flat", "", E=0.0, A=0.0, B=2.0, alpha=1.0, beta=beta)
        shown = costs(law, 5e7, 1e9, estimate([gap - 0.01, gap + 0.02]), 1.2, 0.01, None)
        for one in (
            shown["extra_tokens"],
            shown["speedup"],
            *shown["extra_tokens_ci95"],
            *shown["speedup_ci95"],
        ):
            assert one is None or math.isfinite(one) and one > 0
        assert shown["speedup"] is not None or "no number of tokens" in shown["reason"]
    assert (
        law.effective_parameters(1.0, 5e7)
        is EPOCH.effective_parameters(-1.01 * EPOCH.A * 1e8**-EPOCH.alpha, 1e8)
        is None
    )


def test_error_of_the_speed_up_is_that_of_a_monte_carlo():
    """Gap, throughput and the law's (ln B, beta) drawn with small errors; the delta method must
    give their spread."""
    rng, D, gap, gap_se, ratio, ratio_se = np.random.default_rng(0), 6e9, 0.006, 0.0006, 1.17, 0.004
    covariance = np.array([[0.25, 0.0123], [0.0123, 0.00061]]) / 50
    law = replace(EPOCH, covariance=covariance)
    value, se_log = law.speedup(D, gap, gap_se, ratio, ratio_se)
    shift = rng.multivariate_normal([0, 0], covariance, 200_000)
    B, beta = EPOCH.B * np.exp(shift[:, 0]), EPOCH.beta + shift[:, 1]
    gaps, ratios = (
        rng.normal(gap, gap_se, 200_000),
        ratio * np.exp(rng.normal(0, ratio_se, 200_000)),
    )
    drawn = np.log(ratios) + np.log(1 - gaps / (B * D**-beta)) / beta
    # s, not r's exact derivative, is in the formula: a first-order one in gap / (B D^-beta), here 3
    # %.
    assert se_log == pytest.approx(drawn.std(), rel=0.05)
    assert math.log(value) == pytest.approx(drawn.mean(), abs=0.1 * drawn.std())
    slope_se = law.speedup(D, gap, 0.0, ratio)[1] * law.slope(D) ** 2 / gap
    assert slope_se == pytest.approx((beta * B * D**-beta).std(), rel=0.03)
    nats = estimate([0.004, 0.006, 0.005])
    value, se_log = EPOCH.speedup(D, 0.005, nats.se, 1.2, 0.002)
    shown, unknown = (costs(EPOCH, 3e8, D, nats, 1.2, error, None) for error in (0.002, None))
    assert np.log(shown["speedup_ci95"]) == pytest.approx(
        math.log(value) + np.array([-1, 1]) * student.ppf(0.975, 2) * se_log
    )
    assert shown["extra_tokens_ci95"] == [
        EPOCH.extra_tokens(nats.low, D),
        EPOCH.extra_tokens(nats.high, D),
    ]
    # one ratio of throughputs: its error is not 0 but unknown
    assert unknown["speedup_ci95"] == [None, None]


def test_own_law_is_recovered_and_its_slope_has_the_error_of_a_second_solver():
    N, D = (axis.ravel() for axis in np.meshgrid([5e7, 1.25e8, 2.5e8, 3.5e8], [1e9, 2e9, 4e9, 8e9]))
    loss = EPOCH.loss(N, D) * np.exp(np.random.default_rng(1).normal(0, 2e-4, len(N)))

    # natural parameters, plain squares: noise is well below Huber's delta
    def log_law(_, e, a, b, alpha, beta):
        return np.log(np.exp(e) + np.exp(a) * N**-alpha + np.exp(b) * D**-beta)

    own, reason = own_surface(N, D, loss, np.arange(len(N)))
    start = [math.log(EPOCH.E), math.log(EPOCH.A), math.log(EPOCH.B), EPOCH.alpha, EPOCH.beta]
    best, covariance = curve_fit(log_law, N, np.log(loss), start)
    s = best[4] * math.exp(best[2]) * 6e9 ** -best[4]
    gradient = np.array([0, 0, s, 0, s * (1 / best[4] - math.log(6e9))])
    assert reason is None and own.slope(6e9) == pytest.approx(s, rel=2e-3)
    error = own.speedup(6e9, 0.01, 0.0, 1.0)[1] * s**2 / 0.01
    assert error == pytest.approx(math.sqrt(gradient @ covariance @ gradient), rel=0.05)


def test_a_law_of_our_own_or_the_reason_why_there_is_none(tmp_path):
    N = np.geomspace(1e8, 1e9, 6)
    own, reason = own_surface(N, 20 * N, EPOCH.loss(N, 20 * N), N)
    assert own is None and "need ratios at least 2x apart" in reason
    # a loss that rises
    assert local_surface(np.array([1e6, 2e6]), np.array([2.0, 2.1])) is None
    large = (50_000_000, 200_000_000, 800_000_000)  # 6 N D does not fit 64 bits
    runs, _ = read_runs([write_branches(tmp_path, sizes=large, recipes=("bf16",))])
    laws, reason = surfaces(runs, "loss_bf16")
    own, epoch = laws[50_000_000]
    assert (
        reason is None
        and (own.name, epoch) == ("own", EPOCH)
        and own.beta == pytest.approx(0.3, abs=0.05)
    )


def test_throughput_is_a_geometric_mean():
    def of(*ratios):
        return throughput([fake(0, speed=one) for one in ratios])

    found = of(1.1, 1.3, None)
    assert [found["ratio"], found["se_log"]] == pytest.approx(
        [math.sqrt(1.1 * 1.3), math.log(1.3 / 1.1) / 2]
    )
    assert of(1.2)["se_log"] is None and "different devices" in of(None)["reason"]
