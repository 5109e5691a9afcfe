"""learning_rate.json: the best peak learning rate of a sweep, and other sizes' rates by a rule.

RateResult is the schema of the file; docs/schemas.md is made of its fields and comments. The runs
may differ in the peak rate, the seed and the size alone; runs of one size and number of tokens are
one sweep. A parabola in ln(rate) goes through the lowest loss and its two neighbours. The loss is
that of validation in BF16, averaged over the seeds that every rate has.

The rule is rate ~ N^-1/2 at a fixed number of tokens per parameter and a fixed batch. The 1,911
dense runs of Step Law (2503.04715), refitted as here, give exponents of -0.48 to -0.81 at their ten
batches, 2409.19913 -0.55 and muP's 1/width at a fixed depth -0.5 (2203.03466). Where the batch
grows with the model, DeepSeek LLM (2401.02954) has N^-0.25."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scaling.paired.estimates import grouped
from scaling.typed_json import read_typed

SCHEMA_VERSION = 1
RULES = {"fixed batch (the rule)": -0.5, "growing batch (DeepSeek LLM)": -0.25}
FLAT = 0.001  # rates that cost less than 0.1 % of the loss, by the parabola, count as equally good


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    run: str
    N: int  # non-embedding parameters
    tokens: int
    lr: float  # peak rate
    seed: int
    status: str  # "ok", "diverged" or "unfinished"
    loss: float | None = None  # nats per validation token in BF16, if "ok"


@dataclass(frozen=True)
class RateRow:
    """The runs of one rate."""

    lr: float  # peak rate
    runs: list[str]  # their names
    seeds: list[int]  # of the runs
    status: str  # "ok", or what befell the first run that is not
    # geometric mean over the seeds that every rate has, nats per token; null: it diverged, or lacks
    # a seed
    loss: float | None
    percent: float | None  # above the lowest loss of the sweep


@dataclass(frozen=True)
class Optimum:
    """Where the parabola of ln loss over ln rate is lowest."""

    lr: float  # peak rate
    loss: float  # nats per token
    bracket: list[float]  # the rates below and above the best one
    curvature: float  # of ln loss by ln rate squared
    rates: list[float]  # that the parabola goes through
    # between these the loss is within 0.1 % of the lowest; not beyond the rates of the parabola
    flat: list[float]


@dataclass(frozen=True)
class Sweep:
    """The runs of one size and number of tokens."""

    N: int  # non-embedding parameters
    tokens: int  # that each run was trained on
    seeds: list[int]  # that every rate has
    rows: list[RateRow]  # in rising order of the rate
    optimum: Optimum | None  # null: the rates do not hold it
    reason: str | None = None  # why there is no optimum


@dataclass(frozen=True)
class Base:
    """What the rule starts from: the optimum of the smallest size."""

    N: int  # non-embedding parameters
    tokens: int  # of its runs
    lr: float  # peak rate


@dataclass(frozen=True)
class RateResult:
    """What learning_rate.json holds. A file of older code has format_version in place of
    schema_version."""

    schema_version: int  # of this list of keys
    N: str  # key of summary.json that counts the parameters
    loss: str  # key of summary.json
    rules: dict[str, float]  # name -> exponent of N
    sweeps: list[Sweep]  # smallest size first
    base: Base | None = None  # null: the smallest size has no optimum
    # N (non-embedding parameters) and the rate by each rule
    rates: list[dict[str, float]] = field(default_factory=list)
    # of each larger size with an optimum: N, lr, the rate by each rule, the exponent between them
    checks: list[dict[str, float]] = field(default_factory=list)


def read_result(path: Path) -> RateResult:
    """A learning_rate.json, also of older code. Raises UserError as read_typed()."""
    return read_typed(RateResult, path, SCHEMA_VERSION, "learning_rate")


def analyse(trials: Sequence[Trial], sizes: Sequence[float] = ()) -> RateResult:
    """Each size's sweep, the base of the rule, rates for `sizes` (non-embedding parameters)."""
    groups = grouped(trials, lambda trial: (trial.N, trial.tokens))
    sweeps = [judge(members) for _, members in groups]
    # Of each size the longest runs count: the rate of a trunk serves all of its branches.
    smallest, *larger = {sweep.N: sweep for sweep in sweeps}.values()
    result = RateResult(SCHEMA_VERSION, "params_nonembed", "loss_bf16", RULES, sweeps)
    if smallest.optimum is None:
        return result
    base = Base(smallest.N, smallest.tokens, smallest.optimum.lr)
    all_sizes = [base.N, *(sizes or (2 * base.N, 4 * base.N, 8 * base.N))]
    return RateResult(
        SCHEMA_VERSION,
        result.N,
        result.loss,
        RULES,
        sweeps,
        base=base,
        rates=[{"N": N, **_ruled(base, N)} for N in all_sizes],
        checks=[_check(base, sweep.N, sweep.optimum) for sweep in larger if sweep.optimum],
    )


def _ruled(base: Base, N: float) -> dict[str, float]:
    """Rule -> the rate of N parameters."""
    return {name: base.lr * (N / base.N) ** power for name, power in RULES.items()}


def _check(base: Base, N: int, optimum: Optimum) -> dict[str, float]:
    exponent = math.log(optimum.lr / base.lr) / math.log(N / base.N)
    return {"N": N, "lr": optimum.lr, **_ruled(base, N), "exponent": exponent}


def judge(trials: Sequence[Trial]) -> Sweep:
    """One size's sweep: a row for each rate, the optimum, or in its place the sentence that says
    what is missing."""
    by_seed = sorted(trials, key=lambda trial: trial.seed)
    by_rate: dict[float, list[Trial]] = dict(grouped(by_seed, lambda trial: trial.lr))
    losses = _losses(by_rate)
    seeds = _common_seeds(losses)
    means = {lr: _geometric_mean([loss[seed] for seed in seeds]) for lr, loss in losses.items()}
    if not seeds:
        means = {}
    best = min(means, key=lambda lr: means[lr], default=None)
    rows = [_row(lr, tried, means, best) for lr, tried in by_rate.items()]
    optimum, reason = _optimum(means, best)
    return Sweep(trials[0].N, trials[0].tokens, seeds, rows, optimum, reason)


def _losses(by_rate: dict[float, list[Trial]]) -> dict[float, dict[int, float]]:
    """Rate -> seed -> loss, of the rates that have a loss; a rate at which one seed diverged is
    out."""
    losses = {}
    for lr, tried in by_rate.items():
        if any(trial.status not in ("ok", "unfinished") for trial in tried):
            continue
        finished = {trial.seed: trial.loss for trial in tried if trial.loss is not None}
        if finished:
            losses[lr] = finished
    return losses


def _common_seeds(losses: dict[float, dict[int, float]]) -> list[int]:
    if not losses:
        return []
    return sorted(set.intersection(*(set(loss) for loss in losses.values())))


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / max(1, len(values)))


def _row(
    lr: float, tried: Sequence[Trial], means: dict[float, float], best: float | None
) -> RateRow:
    faults = [trial.status for trial in tried if trial.status != "ok"]
    percent = None
    if best is not None and lr in means:
        percent = 100 * (means[lr] / means[best] - 1)
    return RateRow(
        lr=lr,
        runs=[trial.run for trial in tried],
        seeds=[trial.seed for trial in tried],
        status=faults[0] if faults else "ok",
        loss=means.get(lr),
        percent=percent,
    )


def _optimum(means: dict[float, float], best: float | None) -> tuple[Optimum | None, str | None]:
    """(optimum, None), or None and why there is none. means: rate -> loss, in rising order."""
    if best is None:
        return None, (
            "no seed has a loss at every rate that has one: finish the sweep, or add lower rates if"
            " all have diverged"
        )
    rates = list(means)
    if best in (rates[0], rates[-1]):
        return None, (
            f"the loss is lowest at {best:g}, at an end of the rates that have one: add rates"
            " around it, finish those begun"
        )
    # a parabola of ln loss over ln rate goes through the lowest and its neighbours
    index = rates.index(best)
    three = rates[index - 1 : index + 2]
    curvature, slope, height = np.polyfit(
        np.log(three) - np.log(best), np.log([means[rate] for rate in three]), 2
    )
    lr = best * math.exp(-slope / (2 * curvature))
    reach = math.exp(math.sqrt(FLAT / curvature))
    optimum = Optimum(
        lr=lr,
        loss=math.exp(height - slope**2 / (4 * curvature)),
        bracket=[three[0], three[2]],
        curvature=float(curvature),
        rates=three,
        # beyond its rates a parabola knows nothing: a flat one would promise decades of them
        flat=[max(lr / reach, three[0]), min(lr * reach, three[2])],
    )
    return optimum, None
