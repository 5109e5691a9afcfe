"""Sizes or runs that lie off a law together are noticed, independent ones are not accused."""

from dataclasses import replace
from typing import Any

import pytest

from scaling.laws import shared_fault
from tests.helpers.law_points import fitted
from tests.law_trials import fault_trial, table_of_sizes


@pytest.mark.parametrize("design", [{}, {"sizes": 4, "ratios": 4}])
def test_independent_runs_share_no_fault(design: dict[str, Any]):
    """At most 1 in 100; law_trials.py faults draws more."""
    trials = [fault_trial(seed, **design) for seed in range(60)]
    assert sum(trial.by is not None for trial in trials) <= 1


@pytest.mark.parametrize(
    ("by", "design"),
    [
        ("size", {"tuning": 3e-3}),
        ("run", {"trunk": 2e-3, "noise": 5e-4, "seeds": 3, "sizes": 5, "ratios": 4}),
    ],
)
def test_a_shared_fault_is_noticed_and_its_intervals_hold_the_truth(
    by: str, design: dict[str, Any]
):
    """Sizes tuned unequally, or branches of one run that pass for runs: intervals of points hold
    the truth half the time."""
    trials = [fault_trial(seed, **design) for seed in range(30)]
    assert sum(trial.by == by for trial in trials) >= 26
    assert sum(trial.covers for trial in trials) >= 26
    assert sum(trial.covers_as_independent for trial in trials) <= 22


def accused(tuning: float) -> int:
    """Of 20 tables whose trajectories are named, how many have sizes that share a fault."""
    count = 0
    for seed in range(20):
        points, run = table_of_sizes(seed, tuning=tuning, trunk=1e-3, seeds=3, ratios=4, noise=2e-4)
        points = replace(points, cluster=run)
        count += shared_fault(fitted(points), points) is not None
    return count


def test_what_a_trajectorys_branches_share_is_no_fault_of_its_size():
    assert accused(tuning=0.0) <= 1


def test_trajectories_of_one_size_that_agree_are_a_fault_of_the_size():
    """With trajectories named, their means are compared."""
    assert accused(tuning=5e-3) >= 16
