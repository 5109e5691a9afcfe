"""Measure the gap of each FP8 run to its BF16 partner, and how gaps change with tokens and size."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaling.paired.estimates import ALPHA, Estimate, clusters, estimate
from scaling.records import Record


@dataclass(frozen=True)
class Gap:
    """Loss of the FP8 run minus loss of its BF16 partner on the same validation tokens."""

    nats: float  # per token
    percent: float  # of the BF16 run's loss
    se: float | None  # standard error of nats over validation sequences; none with one in a source

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

    bf16: Record
    fp8: Record
    # "bf16": both runs evaluated through BF16 matmuls, what FP8 did to the weights; "as_trained":
    # each in the precision that it was trained in
    gap: dict[str, Gap]
    tok_per_s_ratio: float | None  # FP8 over BF16; none where not only the precision differs
    n_converted: int  # Linears that the FP8 run trained in FP8; auto may find that none pays


def trajectories(chosen) -> list[np.ndarray]:
    """Indices of the pairs in groups that share a trunk, such as branches of one long run."""
    return clusters([{p.bf16.trunk, p.fp8.trunk} for p in chosen])


def over(chosen, unit: str) -> dict[str, Estimate]:
    """Evaluation -> Estimate over pairs of their gaps, in a `unit` of Gap; those of one trunk count
    once, with their mean."""
    gaps = {
        arm: np.array([getattr(pair.gap[arm], unit) for pair in chosen]) for arm in chosen[0].gap
    }
    return {
        arm: estimate([values[own].mean() for own in trajectories(chosen)])
        for arm, values in gaps.items()
    }


def over_tokens(chosen, arm: str) -> Estimate | None:
    """Change of the gap [%] per doubling of the tokens at a size: the slope over log2 D within each
    trunk or, where runs are no branches, within each size and seed, whose own level drops out; None
    where none has two budgets."""
    slopes = []
    for own in clusters([{p.bf16.trunk, p.fp8.trunk, (p.fp8.N, p.fp8.seed)} for p in chosen]):
        x, y = (
            np.log2([chosen[i].fp8.tokens for i in own]),
            np.array([chosen[i].gap[arm].percent for i in own]),
        )
        if np.ptp(x) > 0:
            slopes.append((x - x.mean()) @ y / np.sum((x - x.mean()) ** 2))
    return estimate(slopes) if slopes else None


def over_sizes(chosen, arm: str) -> Estimate | None:
    """Change of the gap [%] per decade of N, through the means of independent trajectories; None
    below three sizes."""
    own = trajectories(chosen)
    x = np.round([np.mean([math.log10(chosen[i].fp8.N) for i in some]) for some in own], 9)
    if len(np.unique(x)) < 3 or len(x) < 4:
        return None
    from scipy.stats import linregress  # not above: half a second of every start

    gaps = np.array([np.mean([chosen[i].gap[arm].percent for i in some]) for some in own])
    if np.ptp(gaps) <= 1e-12 * abs(gaps).max():
        return Estimate(len(x), 0.0)  # copies show no spread, and linregress gives nan for zeros
    line = linregress(x, gaps)
    half = float(stdtrit(len(x) - 2, 1 - ALPHA / 2) * line.stderr)
    return Estimate(
        len(x),
        float(line.slope),
        None,
        float(line.stderr),
        float(line.slope) - half,
        float(line.slope) + half,
    )


def is_idle(chosen) -> bool:
    """Whether none of one recipe's runs had a Linear in FP8; a switched decay had them in its
    trunk."""
    return not any(pair.n_converted or ">" in pair.fp8.recipe for pair in chosen)


def gap_of(difference, losses, base: Record, arm: str) -> Gap:
    """Weighted gap of per-sequence differences (nats) to `base`, with the ratio estimator's
    standard error per source."""
    nats, variance, reference = 0.0, 0.0, getattr(base, f"loss_{arm}")
    for i, weight in enumerate(base.weights.values()):
        chosen = losses["source"] == i
        d, t = difference[chosen], losses["n_tokens"][chosen]
        per_token, n = d.sum() / t.sum(), len(d)
        nats += weight * per_token
        variance += (
            weight**2 * n / (n - 1) * np.sum((d - per_token * t) ** 2) / t.sum() ** 2
            if n > 1
            else math.nan
        )
    return Gap(
        float(nats),
        float(100 * nats / reference),
        float(math.sqrt(variance)) if variance >= 0 else None,
    )


def at(record) -> dict:
    """Where a run stands, in a row of results: its counts of parameters, tokens, their ratio by the
    study's convention."""
    return {
        "N": record.N,
        "params_total": record.params_total,
        "params_nonembed": record.params_nonembed,
        "tokens": record.tokens,
        "tokens_per_param": record.tokens / record.N,
    }
