"""Measure the gap of each FP8 run to its BF16 partner, and how gaps change with tokens and size.

A run is evaluated in two ways: "bf16", both runs of a pair through BF16 matmuls, which shows what
FP8 did to the weights; "as_trained", each in the precision that it was trained in."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from scipy.special import stdtrit

from scaling.paired.estimates import ALPHA, EQUAL, Estimate, clusters, estimate

EVALUATIONS = ("bf16", "as_trained")
Evaluation = Literal["bf16", "as_trained"]
Unit = Literal["nats", "percent", "log_percent"]


class FinishedRun(Protocol):
    """What the statistics read of a finished run."""

    @property
    def run_id(self) -> str: ...
    @property
    def pair_id(self) -> str: ...  # equal in runs that differ in precision alone
    @property
    def recipe(self) -> str: ...  # its arm of the study
    @property
    def is_baseline(self) -> bool: ...  # the arm that the others stand against
    @property
    def repeat(self) -> int: ...  # above 0: the same run once more, rounded otherwise
    @property
    def N(self) -> int: ...  # parameters by the study's convention
    @property
    def params_total(self) -> int: ...
    @property
    def params_nonembed(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seed(self) -> int | str: ...
    @property
    def trunk(self) -> str: ...  # runs of one trunk share part of their training
    @property
    def convention(self) -> str: ...  # of N: total or nonembed
    @property
    def loss_bf16(self) -> float: ...  # nats per token
    @property
    def loss_as_trained(self) -> float: ...
    @property
    def device(self) -> str: ...  # "": unknown
    @property
    def summary_sha256(self) -> str: ...  # of the file that it was read from
    @property
    def tokenizer_sha256(self) -> str: ...  # "": unknown
    @property
    def val_sha256(self) -> str: ...  # "": unknown


@dataclass(frozen=True)
class Gap:
    """Loss of the FP8 run minus loss of its BF16 partner on the same validation tokens."""

    nats: float  # per token
    percent: float  # of the BF16 run's loss
    # standard error of nats over validation sequences; null with one sequence in a source
    se: float | None

    @property
    def log_percent(self) -> float:
        return 100 * math.log1p(self.percent / 100)

    @property
    def se_percent(self) -> float | None:
        """Standard error of percent over validation sequences; None where it is unknown."""
        if self.se is None or self.nats == 0:
            return None
        return self.se * self.percent / self.nats


@dataclass(frozen=True)
class Pair:
    """A BF16 run beside the FP8 run that shares all but the precision; a null has the BF16 run's
    repeat in FP8's place."""

    bf16: FinishedRun
    fp8: FinishedRun
    gap: dict[str, Gap]  # evaluation -> gap
    tok_per_s_ratio: float | None  # FP8 over BF16; None where not only the precision differs
    n_converted: int  # Linears that the FP8 run trained in FP8; auto may find that none pays
    is_switched: bool = False  # only its decay is in this precision, its trunk was in another


@dataclass(frozen=True)
class Place:
    """Where a run stands in the plane of size and tokens."""

    N: int  # parameters by the study's convention
    params_total: int  # all parameters
    params_nonembed: int  # without embedding and head
    tokens: int  # trained on
    tokens_per_param: float  # tokens over N


def place_of(run: FinishedRun) -> Place:
    return Place(run.N, run.params_total, run.params_nonembed, run.tokens, run.tokens / run.N)


def loss_of(run: FinishedRun, evaluation: str) -> float:
    """Nats per token."""
    return run.loss_bf16 if evaluation == "bf16" else run.loss_as_trained


def trajectories(pairs: Sequence[Pair]) -> list[np.ndarray]:
    """Indices of the pairs in groups that share a trunk, such as branches of one long run."""
    return clusters([{pair.bf16.trunk, pair.fp8.trunk} for pair in pairs])


def mean_gaps(pairs: Sequence[Pair], unit: Unit) -> dict[str, Estimate]:
    """Evaluation -> Estimate over pairs of their gaps; those of one trunk count once, with their
    mean."""
    return {name: mean_gap(pairs, name, unit) for name in pairs[0].gap}


def mean_gap(pairs: Sequence[Pair], evaluation: str, unit: Unit) -> Estimate:
    return estimate(independent_gaps(pairs, evaluation, unit))


def independent_gaps(pairs: Sequence[Pair], evaluation: str, unit: Unit) -> np.ndarray:
    """The mean gap of each trajectory, shape (trajectories,)."""
    gaps = np.array([getattr(pair.gap[evaluation], unit) for pair in pairs])
    return np.array([gaps[members].mean() for members in trajectories(pairs)])


def slope_over_tokens(pairs: Sequence[Pair], evaluation: str) -> Estimate | None:
    """Change of the gap, 100 ln(L_FP8 / L_BF16), per doubling of the tokens at a size: the slope
    over log2 D within each trunk or, where runs are no branches, within each size and seed, whose
    own level drops out; None where none has two budgets."""
    curves = clusters([_curve_labels(pair) for pair in pairs])
    slopes = []
    for members in curves:
        x = np.log2([pairs[i].fp8.tokens for i in members])
        y = np.array([pairs[i].gap[evaluation].log_percent for i in members])
        if np.ptp(x) > 0:
            slopes.append((x - x.mean()) @ y / np.sum((x - x.mean()) ** 2))
    return estimate(slopes) if slopes else None


def _curve_labels(pair: Pair) -> set:
    return {pair.bf16.trunk, pair.fp8.trunk, (pair.fp8.N, pair.fp8.seed)}


def slope_over_sizes(pairs: Sequence[Pair], evaluation: str) -> Estimate | None:
    """Change of the gap, 100 ln(L_FP8 / L_BF16), per decade of N, through the means of independent
    trajectories; None below three sizes."""
    groups = trajectories(pairs)
    logs = np.array([math.log10(pair.fp8.N) for pair in pairs])
    log_percents = np.array([pair.gap[evaluation].log_percent for pair in pairs])
    x = np.array([round(float(np.mean(logs[members])), 9) for members in groups])
    gaps = np.array([log_percents[members].mean() for members in groups])
    if len(np.unique(x)) < 3 or len(x) < 4:
        return None
    if np.ptp(gaps) <= EQUAL * abs(gaps).max():
        return Estimate(len(x), 0.0)  # copies show no spread, and linregress gives nan for zeros
    from scipy.stats import linregress  # not above: half a second of every start

    line = linregress(x, gaps)
    slope, se = float(line.slope), float(line.stderr)
    half = float(stdtrit(len(x) - 2, 1 - ALPHA / 2)) * se
    return Estimate(len(x), slope, None, se, slope - half, slope + half)


def is_idle(pairs: Sequence[Pair]) -> bool:
    """Whether none of one recipe's runs had a Linear in FP8; a switched decay had them in its
    trunk."""
    return not any(pair.n_converted or pair.is_switched for pair in pairs)


def gap_of_sequences(
    difference: np.ndarray,
    source: np.ndarray,
    n_tokens: np.ndarray,
    weights: Sequence[float],
    baseline_loss: float,
) -> Gap:
    """Weighted gap of per-sequence differences (nats) with the ratio estimator's standard error per
    source; arrays of shape (sequences,), source numbers the `weights`. baseline_loss: nats per
    token."""
    nats, variance = 0.0, 0.0
    for number, weight in enumerate(weights):
        is_of_source = source == number
        d, t = difference[is_of_source], n_tokens[is_of_source]
        per_token, n = d.sum() / t.sum(), len(d)
        nats += weight * per_token
        if n > 1:
            residual_squares = np.sum((d - per_token * t) ** 2)
            variance += weight**2 * n / (n - 1) * residual_squares / t.sum() ** 2
        else:
            variance = math.nan
    se = float(math.sqrt(variance)) if variance >= 0 else None
    return Gap(float(nats), float(100 * nats / baseline_loss), se)


def sequence_gap(
    difference: np.ndarray,
    losses: Mapping[str, np.ndarray],
    weights: Sequence[float],
    baseline_loss: float,
) -> Gap:
    """gap_of_sequences() of the columns of a val_losses.npz."""
    return gap_of_sequences(
        difference, losses["source"], losses["n_tokens"], weights, baseline_loss
    )
