"""Measure what two BF16 runs differ by: of other seeds (other data, another beginning), or of one
seed that is rounded differently (a repeat). FP8 can be blamed for what lies beyond the latter
alone."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from scaling.paired.estimates import Estimate, grouped
from scaling.paired.gaps import FinishedRun, Pair, Place, loss_of, mean_gaps, place_of, trajectories


@dataclass(frozen=True)
class SeedNull(Place):
    """BF16 runs of other seeds at one size and budget."""

    runs: int  # how many, of different trunks
    dof: int  # degrees of freedom of sd_percent
    sd_percent: float  # standard deviation of the difference of two runs, per cent of the loss


@dataclass(frozen=True)
class PooledSeedNull:
    """The same over all sizes and budgets."""

    runs: int  # how many
    dof: int  # branches of one trunk add none
    sd_percent: float  # standard deviation of the difference of two runs, per cent
    band: float  # half of what holds 95 % of the differences, per cent of the loss


@dataclass(frozen=True)
class RepeatNull(Place):
    """Repeats of one seed at one size and budget."""

    pairs: int  # of a run with its repeat
    bf16: Estimate  # their difference under each evaluation, per cent of the loss
    as_trained: Estimate  # the same, as they were trained


@dataclass(frozen=True)
class PooledRepeatNull:
    """The same over all sizes and budgets."""

    pairs: int  # of a run with its repeat
    dof: int  # independent trajectories
    sd_percent: float  # root mean square around 0, as the order of two runs is arbitrary
    band: float  # half of what holds 95 % of the differences, per cent of the loss


@dataclass(frozen=True)
class SameSeedNull:
    sizes: list[RepeatNull]  # a row for each size and budget
    equal: int  # repeats that are equal to the last bit: no null
    pooled: PooledRepeatNull | None  # null: no repeat differs


@dataclass(frozen=True)
class Null:
    """What BF16 runs differ by under one evaluation."""

    sizes: list[SeedNull]  # of other seeds
    pooled: PooledSeedNull | None  # null: no size has two seeds
    same_seed: SameSeedNull  # of one seed, rounded differently


def measure_nulls(records: Sequence[FinishedRun], repeats: Sequence[Pair], evaluation: str) -> Null:
    """Both nulls: of the BF16 runs among `records`, and of the pairs `repeats` of a BF16 run with
    its repeat."""
    runs = [run for run in records if run.is_baseline and not run.repeat]
    rows: list[SeedNull] = []
    trunks: dict[int, set[str]] = {}
    for (N, _), members in grouped(runs, lambda run: (run.N, run.tokens)):
        distinct = list({run.trunk: run for run in members}.values())
        if len(distinct) > 1:
            rows.append(_seed_null(distinct, evaluation))
            trunks.setdefault(N, set()).update(run.trunk for run in distinct)
    return Null(rows, _pooled_seeds(rows, trunks), _same_seed(repeats, evaluation))


def sd_of_differences(losses: ArrayLike) -> float:
    """Standard deviation of the difference of two runs, in per cent of the loss, from the losses
    (nats per token) of two or more runs alike but for the seed, shape (runs,): a difference has
    twice the variance of a run."""
    return 100 * math.sqrt(2) * float(np.std(np.log(losses), ddof=1))


def _seed_null(runs: Sequence[FinishedRun], evaluation: str) -> SeedNull:
    sd = sd_of_differences([loss_of(run, evaluation) for run in runs])
    return SeedNull(**asdict(place_of(runs[0])), runs=len(runs), dof=len(runs) - 1, sd_percent=sd)


def _pooled_seeds(rows: list[SeedNull], trunks: dict[int, set[str]]) -> PooledSeedNull | None:
    if not rows:
        return None
    variance = np.average([row.sd_percent**2 for row in rows], weights=[row.dof for row in rows])
    dof = 0
    for N, names in trunks.items():
        dof += min(len(names) - 1, sum(row.dof for row in rows if row.N == N))
    sd = math.sqrt(variance)
    return PooledSeedNull(sum(row.runs for row in rows), dof, sd, band_of(sd, dof))


def _same_seed(repeats: Sequence[Pair], evaluation: str) -> SameSeedNull:
    differing = [pair for pair in repeats if any(gap.nats for gap in pair.gap.values())]
    sizes = []
    for _, members in grouped(differing, lambda pair: (pair.bf16.N, pair.bf16.tokens)):
        place = asdict(place_of(members[0].bf16))
        gaps = mean_gaps(members, "percent")
        sizes.append(
            RepeatNull(
                **place,
                pairs=len(members),
                bf16=gaps["bf16"],
                as_trained=gaps["as_trained"],
            )
        )
    equal = len(repeats) - len(differing)
    if not differing:
        return SameSeedNull(sizes, equal, None)
    sd = math.sqrt(np.mean([pair.gap[evaluation].percent ** 2 for pair in differing]))
    dof = len(trajectories(differing))
    pooled = PooledRepeatNull(len(differing), dof, sd, band_of(sd, dof))
    return SameSeedNull(sizes, equal, pooled)


def band_of(sd: float, dof: int) -> float:
    """Half of what holds 95 % of differences whose standard deviation is sd, estimated with dof
    degrees of freedom."""
    return float(stdtrit(dof, 0.975)) * sd
