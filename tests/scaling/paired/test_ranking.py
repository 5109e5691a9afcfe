"""scaling/paired/ranking.py: the best recipe by the declared rule."""

import itertools

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from scaling.paired.gaps import Pair
from scaling.paired.ranking import rank, told_from_first
from tests.helpers.paired_runs import fake_pair

SEEDS, SIZES = (1, 2), (40_000, 90_000)
# per cent, the BF16 run's own, which all recipes share
NOISE = {(40_000, 1): 0.05, (40_000, 2): -0.1, (90_000, 1): 0.075, (90_000, 2): -0.02}
# 0.005 per cent, each recipe's own in each cell
OWN_NOISE = {"rowwise": (1, -1, 1, -1), "tensorwise": (1, 1, -1, -1), "cscale": (1, -1, -1, 1)}

Recipes = dict[str, tuple[float, float]]  # name -> mean gap in per cent, speed against BF16
CLOSE: Recipes = {"rowwise": (0.1, 0.8), "tensorwise": (0.1025, 1.1), "cscale": (1.0, 1.3)}


def cells(
    recipes: Recipes,
    sizes: tuple[int, ...] = SIZES,
    seeds: tuple[int, ...] = SEEDS,
    ratio: int = 20,
    device: str = "GPU",
) -> list[Pair]:
    """A pair of each recipe at each size and seed."""
    pairs = []
    for i, (N, seed) in enumerate(itertools.product(sizes, seeds)):
        for recipe, (gap, speed) in recipes.items():
            percent = gap + NOISE.get((N, seed), 0) + 0.005 * OWN_NOISE[recipe][i % 4]
            pairs.append(fake_pair(percent, N, ratio * N, "", seed, recipe, speed, device))
    return pairs


def logs_of(pairs: list[Pair], recipe: str) -> list[float]:
    return [pair.gap["bf16"].log_percent for pair in pairs if pair.fp8.recipe == recipe]


def test_the_lowest_gap_is_first_and_paired_differences_decide_ties() -> None:
    ranking = rank(cells(CLOSE), "bf16")
    order = [(ranked.recipe, ranked.ties) for ranked in ranking.recipes]
    assert order == [("rowwise", True), ("tensorwise", True), ("cscale", False)]


def test_the_difference_to_the_first_is_a_paired_t_test() -> None:
    pairs = cells(CLOSE)
    difference = rank(pairs, "bf16").recipes[1].difference
    values = np.subtract(logs_of(pairs, "tensorwise"), logs_of(pairs, "rowwise"))
    expected = ttest_1samp(values, 0).confidence_interval()
    assert difference is not None
    assert (difference.low, difference.high) == pytest.approx((expected.low, expected.high))


def test_equal_recipes_are_told_apart_in_at_most_one_of_twenty_studies() -> None:
    """The first of five is the lowest by luck: each difference to it alone at 5 % told one of them
    apart in a quarter of the studies."""
    rng = np.random.default_rng(0)
    order = ["a", "b", "c", "d", "e"]
    studies = 0
    for _ in range(200):
        pairs = [
            fake_pair(rng.normal(0.3, 0.3), 40_000, 800_000, "", seed, recipe)
            for recipe in order
            for seed in range(10)
        ]
        recipes = rank(pairs, "bf16").recipes
        studies += not all(ranked.ties for ranked in recipes)
    assert studies <= 18  # 10 expected; above 18 in 1 of 100


def test_the_gaps_are_those_of_the_evaluation_that_is_asked_for() -> None:
    in_bf16, as_trained = (rank(cells(CLOSE), name) for name in ("bf16", "as_trained"))
    expected = 1.5 * in_bf16.recipes[2].gap.mean
    assert as_trained.recipes[2].gap.mean == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    "recipes, more, best",
    [
        (CLOSE, {}, "tensorwise"),  # the fastest of those that tie
        ({"rowwise": (-1.5, 0.7), "tensorwise": (0.05, 1.4)}, {}, "rowwise"),  # alone
        # a CPU's speed decides nothing
        ({"rowwise": (0.1, 0.8), "tensorwise": (0.1025, 1.1)}, {"device": "cpu"}, "rowwise"),
        # one pair tells nothing apart
        (
            {"rowwise": (0.1, 0.8), "tensorwise": (1.0, 1.1)},
            {"sizes": SIZES[:1], "seeds": (1,)},
            "tensorwise",
        ),
    ],
)
def test_the_best_is_the_fastest_of_those_that_tie(recipes: Recipes, more: dict, best: str) -> None:
    ranked = rank(cells(recipes, **more), "bf16").best
    assert ranked is not None and ranked.recipe == best


TWO: Recipes = {"rowwise": (0.1, 0.8), "tensorwise": (0.3, 1.1)}


def test_of_each_size_the_largest_common_budget_counts_alone() -> None:
    smaller_budget = cells({"rowwise": (45, 0.8), "tensorwise": (5, 1.1)}, ratio=10)
    ranking = rank(cells(TWO) + smaller_budget, "bf16")
    assert ranking.recipes[0].recipe == "rowwise" and ranking.recipes[0].gap.n == 4


@pytest.mark.parametrize("more", [{"sizes": (200_000,)}, {"ratio": 40}])
def test_further_sizes_and_budgets_of_one_recipe_undo_nothing(more: dict) -> None:
    pairs = cells(TWO)
    assert rank(pairs + cells({"rowwise": (25, 0.8)}, **more), "bf16") == rank(pairs, "bf16")


def test_a_recipe_that_converts_nothing_somewhere_is_left_out() -> None:
    idle = [
        fake_pair(-25, N, 20 * N, "", seed, "auto", 2.0, linears=0 if N == 40_000 else 3)
        for N, seed in NOISE
    ]
    (left_out,) = rank(cells(TWO) + idle, "bf16").left_out
    assert (left_out.recipe, left_out.reason.code) == ("auto", "converts_no_linear")
    assert left_out.reason.values["runs"] == ["auto_40000_1", "auto_40000_2"]


def test_a_recipe_that_lacks_a_compared_pair_is_left_out() -> None:
    pairs = cells({**TWO, "cscale": (0.05, 1.3)})[:-1]
    ranking = rank(pairs, "bf16")
    (left_out,) = ranking.left_out
    assert len(ranking.recipes) == 2 and left_out.recipe == "cscale"
    assert left_out.reason.values["cells"] == [(90_000, 20 * 90_000, 2)]


def test_recipes_that_share_nothing_are_not_ranked() -> None:
    pairs = cells({"rowwise": (0.1, 0.8)}, SIZES[:1]) + cells({"tensorwise": (0.1, 0.8)}, SIZES[1:])
    ranking = rank(pairs, "bf16")
    assert ranking.best is None and len(ranking.left_out) == 2


def test_a_recipe_told_from_another_alone_ties_with_the_first() -> None:
    """c is told from b; a scatters too much to be told from either."""
    gaps = {"a": [-1.0, 0.0, 1.0], "b": [0.10, 0.11, 0.12], "c": [0.90, 0.91, 0.921]}
    assert told_from_first(gaps, ["a", "b", "c"]) == set()
