"""scaling/paired/nulls.py: what BF16 runs differ by, of other seeds and of one seed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from scaling.paired.nulls import Null, measure_nulls
from tests.helpers.paired_runs import FakeRun, fake_pair

LOSSES = {1: 2.20, 2: 2.21, 3: 2.18}  # nats, of three seeds
REPEATS = (0.1, -0.3, 0.2)  # per cent


def null_of_seeds(**changes: object) -> Null:
    runs = [
        FakeRun(run_id=f"{seed}", seed=seed, trunk=f"{seed}", loss_bf16=loss, **changes)
        for seed, loss in LOSSES.items()
    ]
    return measure_nulls(runs, [], "bf16")


def test_the_null_of_other_seeds_is_the_spread_of_a_difference() -> None:
    pooled = null_of_seeds().pooled
    sd = 100 * math.sqrt(2) * np.std(np.log(list(LOSSES.values())), ddof=1)
    assert pooled is not None and (pooled.runs, pooled.dof) == (3, 2)
    assert pooled.sd_percent == pytest.approx(sd)


def test_its_band_holds_95_percent_of_the_differences() -> None:
    pooled = null_of_seeds().pooled
    assert pooled is not None
    assert pooled.band == pytest.approx(student.ppf(0.975, 2) * pooled.sd_percent)


@pytest.mark.parametrize("change", [{"repeat": 1}, {"is_baseline": False}])
def test_repeats_and_fp8_runs_are_no_seeds(change: dict) -> None:
    assert null_of_seeds(**change).pooled is None


def test_branches_of_one_trunk_add_no_freedom_over_budgets() -> None:
    runs = [
        FakeRun(seed=seed, trunk=f"{seed}", tokens=tokens, loss_bf16=loss)
        for tokens in (10, 20)
        for seed, loss in LOSSES.items()
    ]
    pooled = measure_nulls(runs, [], "bf16").pooled
    assert pooled is not None and (pooled.runs, pooled.dof) == (6, 2)


def test_the_null_of_one_seed_is_the_root_mean_square_around_nought() -> None:
    """Which of two runs came first is arbitrary."""
    repeats = [fake_pair(percent, trunk=percent) for percent in REPEATS]
    pooled = measure_nulls([], repeats, "bf16").same_seed.pooled
    assert pooled is not None and (pooled.pairs, pooled.dof) == (3, 3)
    assert pooled.sd_percent == pytest.approx(math.hypot(*REPEATS) / math.sqrt(3))


def test_repeats_of_one_trunk_add_no_freedom() -> None:
    repeats = [fake_pair(percent, D=D) for D, percent in enumerate(REPEATS, 5)]
    pooled = measure_nulls([], repeats, "bf16").same_seed.pooled
    assert pooled is not None and (pooled.pairs, pooled.dof) == (3, 1)
    assert pooled.band == pytest.approx(student.ppf(0.975, 1) * pooled.sd_percent)


def test_repeats_that_are_equal_to_the_last_bit_are_counted_apart() -> None:
    repeats = [fake_pair(0.1, D=5), fake_pair(0.0, D=40)]
    same_seed = measure_nulls([], repeats, "bf16").same_seed
    assert same_seed.equal == 1 and same_seed.pooled is not None and same_seed.pooled.pairs == 1


def test_repeats_that_differ_in_one_evaluation_alone_are_a_null() -> None:
    repeat = fake_pair(0.1)
    as_trained = replace(repeat.gap["as_trained"], nats=0.0, percent=0.0)
    differing = replace(repeat, gap={**repeat.gap, "as_trained": as_trained})
    assert measure_nulls([], [differing], "bf16").same_seed.equal == 0
