"""scaling/paired/differences.py: the gap of one recipe minus that of another, over shared pairs."""

from dataclasses import replace

import numpy as np
import pytest

from scaling.paired.differences import pairs_between
from scaling.paired.gaps import Gap, Pair, independent_gaps, is_idle
from tests.helpers.paired_runs import FakeRun, fake_pair


def pair_of_losses(bf16: float, fp8: float, recipe: str) -> Pair:
    """Of losses in nats; as trained those of FP8 are 1 % higher."""
    baseline = FakeRun("base", loss_bf16=bf16, loss_as_trained=bf16)
    run = FakeRun(recipe, recipe=recipe, loss_bf16=fp8, loss_as_trained=1.01 * fp8)
    gaps = {}
    for name, loss in (("bf16", fp8), ("as_trained", 1.01 * fp8)):
        gaps[name] = Gap(loss - bf16, 100 * (loss - bf16) / bf16, 0.001)
    return Pair(baseline, run, gaps, None, 8)


LOSSES = [pair_of_losses(2.0, 2.1, "mxfp8"), pair_of_losses(2.0, 2.3, "mxfp8_e5m2")]


@pytest.mark.parametrize(
    "evaluation, first, second", [("bf16", 2.3, 2.1), ("as_trained", 2.323, 2.121)]
)
def test_a_difference_is_that_of_the_two_losses(
    evaluation: str, first: float, second: float
) -> None:
    (pair,) = pairs_between(LOSSES, "mxfp8_e5m2", "mxfp8")
    gap = pair.gap[evaluation]
    assert gap.nats == pytest.approx(first - second)
    assert gap.log_percent == pytest.approx(100 * np.log(first / second))


def test_sequences_give_it_no_standard_error() -> None:
    assert pairs_between(LOSSES, "mxfp8_e5m2", "mxfp8")[0].gap["bf16"].se is None


def test_the_second_recipes_run_stands_in_the_baselines_place() -> None:
    (pair,) = pairs_between(LOSSES, "mxfp8_e5m2", "mxfp8")
    assert (pair.bf16.run_id, pair.fp8.run_id) == ("mxfp8", "mxfp8_e5m2")


def test_only_runs_of_one_baseline_are_paired() -> None:
    pairs = [fake_pair(0.1, seed=seed, recipe="mxfp8") for seed in (1, 2, 3)]
    pairs += [fake_pair(0.2, seed=seed, recipe="nvfp4") for seed in (2, 3, 4)]
    seeds = [pair.fp8.seed for pair in pairs_between(pairs, "nvfp4", "mxfp8")]
    assert seeds == [2, 3]


def test_branches_of_one_trunk_count_once() -> None:
    pairs = []
    for seed, level in ((1, 0.1), (2, 0.5)):
        for budget in (5, 10):
            trunk = f"mx{seed}"
            pairs.append(fake_pair(level, D=budget, trunk=trunk, seed=seed, recipe="mxfp8"))
            trunk = f"nv{seed}"
            pairs.append(fake_pair(0.0, D=budget, trunk=trunk, seed=seed, recipe="nvfp4"))
    differences = independent_gaps(pairs_between(pairs, "mxfp8", "nvfp4"), "bf16", "nats")
    assert sorted(differences) == pytest.approx([0.1, 0.5])


def test_pairs_of_other_sizes_and_budgets_are_apart_though_they_share_an_id() -> None:
    """As in a table whose pair column is a seed."""
    pairs = []
    for recipe, factor in (("mxfp8", 1), ("nvfp4", 3)):
        for N, D, gap in ((10, 1, 0.1), (20, 1, 0.2), (20, 2, 0.4)):
            pair = fake_pair(factor * gap, N=N, D=D, recipe=recipe)
            pairs.append(replace(pair, bf16=replace(pair.bf16, pair_id="seed 1")))
    nats = [pair.gap["bf16"].nats for pair in pairs_between(pairs, "nvfp4", "mxfp8")]
    assert nats == pytest.approx([0.2, 0.4, 0.8])


IN_BOTH_ORDERS = pytest.mark.parametrize("recipes", [("auto", "mxfp8"), ("mxfp8", "auto")])


@IN_BOTH_ORDERS
def test_a_difference_to_an_arm_that_converted_nothing_is_one(recipes: tuple[str, str]) -> None:
    pairs = [fake_pair(0.0, recipe="auto", linears=0), fake_pair(0.2, recipe="mxfp8", linears=8)]
    assert not is_idle(pairs_between(pairs, *recipes))


@IN_BOTH_ORDERS
def test_a_difference_to_a_run_with_its_trunk_in_fp8_is_one(recipes: tuple[str, str]) -> None:
    nothing_converted = fake_pair(0.0, recipe="auto", linears=0)
    switched = replace(fake_pair(0.2, recipe="mxfp8", linears=0), is_switched=True)
    assert not is_idle(pairs_between([nothing_converted, switched], *recipes))
