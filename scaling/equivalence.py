"""Judge a mean of independent differences: interval, equivalence test, what the design could have seen.

Everything here assumes independent, roughly normal values; `clusters` says which values are not.
"""

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from scipy.stats import t as student

from runtime.cli import UserError

ALPHA = 0.05
POWER = 0.8
MOST = 100_000              # pairs; beyond it a plan says "more than"
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)   # of an integral over -1 to 1
# Forms in question (constant N_eff/N against a constant relative gap) differ by half of the gap in a decade of N.
TREND_SHARE = 0.5


@dataclass(frozen=True)
class Estimate:
    """Mean of n independent values with its 95 % t-interval; sd to high are None where the values carry no spread."""

    n: int
    mean: float
    sd: float | None = None
    se: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        """Half the interval."""
        return None if self.se is None else self.high - self.mean


def estimate(values) -> Estimate:
    """The Estimate of independent values, shape (n,), n at least 1.

    Values that are all equal are copies, not a sample without noise: they get a mean, no interval."""
    values = np.asarray(values, dtype=float)
    n, mean = len(values), float(values.mean())
    sd = float(values.std(ddof=1)) if n > 1 else 0.0
    if sd <= 1e-12 * abs(values).max():
        return Estimate(n, mean)
    se = sd / math.sqrt(n)
    half = float(student.ppf(1 - ALPHA / 2, n - 1)) * se
    return Estimate(n, mean, sd, se, mean - half, mean + half)


def clusters(labels) -> list[list[int]]:
    """Indices of `labels` in groups that share a label, be it through a third.

    labels: for each value the set of trajectories that it rests on. k clusters leave k - 1 degrees of freedom, however
    many values there are: branches of one run, or two recipes against one BF16 run, are no new sample."""
    found = []                          # (all labels of the cluster, its indices)
    for i, mine in enumerate(labels):
        touching = [cluster for cluster in found if cluster[0] & set(mine)]
        merged = set(mine).union(*(own for own, _ in touching)), sorted(sum((own for _, own in touching), [i]))
        found = [cluster for cluster in found if cluster not in touching] + [merged]
    return sorted(indices for _, indices in found)


# --------------------------------------------------------------------------------------------- equivalence


@dataclass(frozen=True)
class Margin:
    """What a gap may lie within and be called equivalent: per cent of the loss; `source` says who declared it, when."""

    percent: float
    source: str
    is_declared: bool                   # before any of the runs began


def read_margin(records, given: str | None = None) -> Margin | None:
    """The margin of the study.json beside the records' folders, or `given` on the command line; None without either.

    Raises UserError for a damaged study.json, for two studies that declare different margins, for a wrong `given`."""
    studies = [path for path in sorted({record.folder.parent / "study.json" for record in records}) if path.is_file()]
    if given is not None:
        percent = _above_zero(given, f"margin={given}")
        return Margin(percent, "given on the command line, after the fact", False)
    found = {}
    for path in studies:
        try:
            study = json.loads(path.read_bytes())
            percent, declared = study["margin_percent"], datetime.fromisoformat(study["declared"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); expected an object with "
                              "margin_percent and declared, as scaling/sweep.py writes it: restore it or give margin=PERCENT, "
                              "which counts as declared after the fact") from None
        percent = _above_zero(percent, f"{path}: margin_percent {json.dumps(percent)}")
        begun = [datetime.fromisoformat(record.t_start) for record in records
                 if record.folder.parent == path.parent and record.t_start]
        declared = declared.replace(tzinfo=declared.tzinfo or UTC)
        early = sum(start < declared for start in begun)
        source = f"{path}, declared {study['declared']}" + (
            f", after {early} of {len(begun)} runs had begun" if early else " before the runs" if begun else
            "; no run says when it began")
        found[percent] = Margin(percent, source, bool(begun) and not early)
    if len(found) > 1:
        raise UserError(f"{' and '.join(map(str, studies))} declare different margins ({', '.join(map(str, found))} %): "
                          "analyse one study at a time, or give margin=PERCENT")
    return next(iter(found.values()), None)


def _above_zero(value, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if not 0 < number < 100:
        raise UserError(f"{what} is no margin: expected per cent of the loss, above 0 and below 100")
    return number


def tost(found: Estimate, low: float, high: float) -> float | None:
    """p of the two one-sided t-tests that the mean lies within low to high (Schuirmann 1987); None without an interval."""
    if found.se is None:
        return None
    return float(max(student.sf((found.mean - low) / found.se, found.n - 1),
                     student.sf((high - found.mean) / found.se, found.n - 1)))


def tost_power(sd: float, n: int, margin: float, gap: float = 0.0) -> float:
    """Probability that n values of standard deviation sd around `gap` are found within +-margin."""
    se, quantile = sd / math.sqrt(n), float(student.ppf(1 - ALPHA, n - 1))
    widest = margin / (quantile * se)               # the sample's sd, in units of sd, beyond which nothing passes
    passing = float(chi2.cdf((n - 1) * widest**2, n - 1))
    spread = quantile * se * _spreads(n, passing)
    return passing / 2 * float(WEIGHTS @ (norm.cdf((margin - spread - gap) / se) - norm.cdf((spread - margin - gap) / se)))


def _spreads(n: int, upto: float) -> np.ndarray:
    """Quantiles of the sample's sd over the true one, at even probabilities up to `upto`: given it the mean is normal."""
    return np.sqrt(chi2.ppf(upto * (1 + NODES) / 2, n - 1) / (n - 1))


# ------------------------------------------------------------------------------------------ what a design can see


def power(sd: float, n: int, gap: float) -> float:
    """Probability that n values of standard deviation sd around `gap` give a t-interval without 0.

    The noncentral t's tails, by quadrature over the sample's sd: scipy.stats.nct gives nan where n is 2 or the shift large."""
    spread, shift = float(student.ppf(1 - ALPHA / 2, n - 1)) * _spreads(n, 1.0), abs(gap) * math.sqrt(n) / sd
    return 0.5 * float(WEIGHTS @ (norm.sf(spread - shift) + norm.sf(spread + shift)))


def smallest_seen(sd: float, n: int) -> float:
    """The smallest gap that n values (at least 2) of standard deviation sd see with a probability of 80 %."""
    return sd * brentq(lambda gap: power(1.0, n, gap) - POWER, 0, 20)


def pairs_to_see(sd: float, gap: float) -> int | None:
    """How many pairs see `gap` with a probability of 80 %; None beyond 100,000."""
    return _fewest(lambda n: power(sd, n, gap) >= POWER)


def pairs_to_show(sd: float, margin: float) -> int | None:
    """How many pairs show equivalence within +-margin with a probability of 80 % where the true gap is 0."""
    return _fewest(lambda n: tost_power(sd, n, margin) >= POWER)


def _fewest(enough) -> int | None:
    """The smallest n from 2 on for which `enough`, which once true stays true; None beyond MOST."""
    high = 2
    while not enough(high):
        high *= 2
        if high > MOST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return max(high, 2)


# -------------------------------------------------------------------------------------------------- trend over size


@dataclass(frozen=True)
class Trend:
    """Change of the gap [%] per decade of N, or the reason why none is given; `needed` pairs per size would give one."""

    slope: float | None
    half: float | None                  # half the 95 % interval, given wherever it can be computed
    reason: str | None
    needed: int | None = None


def fit_trend(N, gaps, size_of_effect: float | None) -> Trend:
    """The slope of `gaps` (per cent, shape (n,), independent) over log10 N, where it can tell rival forms apart.

    Forms that are discussed differ by half of the gap per decade (TREND_SHARE), so an interval wider than that is no
    answer: a slope is given only where half of it is at most TREND_SHARE * size_of_effect. size_of_effect: the gap if
    there is one, else the margin, in per cent; None where neither is known."""
    x, y = np.round(np.log10(np.asarray(N, dtype=float)), 9), np.asarray(gaps, dtype=float)
    sizes, n = len(set(x)), len(x)
    if sizes < 3 or n < 4:
        return Trend(None, None, f"{sizes} size{'s' * (sizes != 1)} with {n} independent pair{'s' * (n != 1)}: a trend "
                                 "needs at least 3 sizes and 4 pairs")
    spread = float(np.sum((x - x.mean())**2))
    slope = float((x - x.mean()) @ y / spread)
    residual = y - y.mean() - slope * (x - x.mean())
    sd = math.sqrt(residual @ residual / (n - 2))
    if sd <= 1e-12 * np.abs(y).max():
        return Trend(None, None, f"the {n} gaps lie on one line to the last digit: copies, not independent pairs")
    half = float(student.ppf(1 - ALPHA / 2, n - 2)) * sd / math.sqrt(spread)
    if size_of_effect is None:
        return Trend(None, half, f"known to ±{half:.3g} per decade only, and no gap is established that could have a trend")
    wanted = TREND_SHARE * size_of_effect
    if half <= wanted:
        return Trend(slope, half, None)
    levels = np.array(sorted(set(x)))
    per_pair = float(np.sum((levels - levels.mean())**2))
    needed = _fewest(lambda k: student.ppf(1 - ALPHA / 2, k * sizes - 2) * sd / math.sqrt(k * per_pair) <= wanted)
    return Trend(None, half, f"known to ±{half:.3g} per decade only, where rival forms differ by {wanted:.3g}", needed)


# ------------------------------------------------------------------------------------------------------------ words


def verdict(found: Estimate, margin: Margin | None = None) -> str:
    """A sentence's end for a gap in per cent; never "no loss"."""
    if found.se is None:
        return ("one pair: no interval" if found.n == 1 else
                f"no interval: {found.n} equal gaps are copies, not independent pairs")
    within = ""
    if margin and (p := tost(found, -margin.percent, margin.percent)) < ALPHA:
        within = (f"within ±{margin.percent:g} % (TOST, p={p:.2g}" + ("" if margin.is_declared else
                  ", margin after the fact") + ")")
    if found.low > 0 or found.high < 0:
        return f"{'costs' if found.mean > 0 else 'gains'} {abs(found.mean):.3g} %" + (f", {within}" if within else "")
    if within:
        return f"equivalent {within}"
    return (f"undecided: interval {found.low:+.2g} to {found.high:+.2g}, could not have seen less than "
            f"{smallest_seen(found.sd, found.n):.2g}")


def judged(found: Estimate, margin: Margin | None) -> dict:
    """verdict, tost_p, smallest_seen [%] and the pairs that would see the margin or show equivalence; None where unknown."""
    seen = found.se is not None
    plans = {name: plan(found.sd, margin.percent) if seen and margin else None
             for name, plan in (("pairs_to_see_margin", pairs_to_see), ("pairs_to_show_margin", pairs_to_show))}
    return {"verdict": verdict(found, margin), "tost_p": margin and tost(found, -margin.percent, margin.percent),
            "smallest_seen": smallest_seen(found.sd, found.n) if seen else None, **plans}
