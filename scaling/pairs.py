"""Measure the paired gap of FP8 to BF16: pairs, the noise of seeds, equivalence, ranking, what a
gap costs in compute.

Each FP8 run stands against the BF16 run that shares everything else, on the same validation
sequences. A null is what two BF16 runs differ by: of other seeds (other data, another beginning),
or of one seed that is rounded differently (a repeat). FP8 can be blamed for what lies beyond the
latter alone. Statistics assume independent, roughly normal values: `clusters` says which values are
not. A gap costs compute under a law L(N, D), our own or a published one."""

import itertools
import math
import zipfile
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from scipy.optimize import brentq
from scipy.sparse.csgraph import connected_components
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit

from lib.errors import UserError
from lib.text import listed, si
from scaling.law_words import refusal_words
from scaling.laws import Points, fit_form
from scaling.records import Record, check_comparable, read_study

ALPHA = 0.05
NO_SPEED = "the table gives no speed"
POWER = 0.8
LOSS_TOLERANCE = 1e-4  # of val_losses.npz against summary.json: float32 sums on a GPU, no more
# Record.convention -> what stands before "parameters"
KIND = {"total": "", "nonembed": "non-embedding ", None: ""}
NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)  # of an integral over -1 to 1


@dataclass(frozen=True)
class Estimate:
    """Mean of n independent values with its 95 % t-interval; sd to high are None where the values
    carry no spread."""

    n: int
    mean: float
    sd: float | None = None
    se: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        return None if self.se is None else self.high - self.mean

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


def estimate(values) -> Estimate:
    """The Estimate of independent values, shape (n,); equal ones are copies, not a sample without
    noise: no interval."""
    values = np.asarray(values, dtype=float)
    n, mean = len(values), float(values.mean())
    sd = float(values.std(ddof=1)) if n > 1 else 0.0
    if sd <= 1e-12 * abs(values).max():
        return Estimate(n, mean)
    se = sd / math.sqrt(n)
    half = float(stdtrit(n - 1, 1 - ALPHA / 2)) * se
    return Estimate(n, mean, sd, se, mean - half, mean + half)


def clusters(labels) -> list[np.ndarray]:
    """Indices of `labels`, the set of trajectories that each value rests on, in groups that share
    one, also through a third."""
    count, group = connected_components(
        np.array([[bool(mine & its) for its in labels] for mine in labels]), directed=False
    )
    return [np.flatnonzero(group == i) for i in range(count)]


def grouped(items, key) -> list[tuple]:
    """(key, the items that have it), in order of the keys."""
    return [(one, list(some)) for one, some in itertools.groupby(sorted(items, key=key), key)]


# -------------------------------------------------------------- equivalence, what a design can see


@dataclass(frozen=True)
class Margin:
    """What a gap may lie within and be called equivalent: per cent of the loss; `source` says who
    declared it, when."""

    percent: float
    source: str
    is_declared: bool  # before any of the runs began


def read_margin(records, given: float | None = None) -> Margin | None:
    """The margin of the study.json beside the records' folders, or `given` on the command line;
    None without either."""
    found = (
        [] if given is None else [Margin(given, "given on the command line, after the fact", False)]
    )
    for folder, some in (
        grouped(records, lambda record: record.folder.parent) if given is None else ()
    ):
        if study := read_study(folder):
            try:
                declared = datetime.fromisoformat(study["declared"])
                late = sum(
                    not one.t_start or datetime.fromisoformat(one.t_start) < declared
                    for one in some
                )
                when = f"after {late} of {len(some)} runs had begun" if late else "before the runs"
                found.append(
                    Margin(
                        float(study["margin_percent"]),
                        f"{folder}/study.json, declared {study['declared']}, {when}",
                        not late,
                    )
                )
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{folder}/study.json cannot be read ({type(error).__name__}): give"
                    " margin=PERCENT"
                ) from None
    percents = sorted({margin.percent for margin in found})
    if len(percents) > 1 or any(not 0 < percent < 100 for percent in percents):
        raise UserError(
            f"margin: {', '.join(map(str, percents))}; expected one number of per cent of the loss,"
            " above 0 and below 100: correct it, analyse one study at a time, or give"
            " margin=PERCENT"
        )
    # the late one, where there is one
    return min(found, key=lambda margin: margin.is_declared, default=None)


def tost(found: Estimate, margin: float) -> float | None:
    """p of the two one-sided t-tests that the mean lies within +-margin (Schuirmann 1987), the
    larger; None: no interval."""
    return (
        None
        if found.se is None
        else float(stdtr(found.n - 1, -(margin - abs(found.mean)) / found.se))
    )


def chi2_quantiles(dof: int) -> np.ndarray:
    """Quantiles of chi squared at even probabilities, NODES mapped to 0 to 1: shape (200,)."""
    return 2 * gammaincinv(dof / 2, (1 + NODES) / 2)


def power(n: int, gap: float) -> float:
    """Probability that n values of standard deviation 1 around `gap` give a t-interval without 0:
    the noncentral t's tails, by quadrature over the sample's sd, because scipy.stats.nct gives nan
    where n is 2 or the shift large."""
    # of the sample's sd over the true one: even quantiles
    spreads = np.sqrt(chi2_quantiles(n - 1) / (n - 1))
    spread, shift = float(stdtrit(n - 1, 1 - ALPHA / 2)) * spreads, abs(gap) * math.sqrt(n)
    return 0.5 * float(WEIGHTS @ (ndtr(shift - spread) + ndtr(-(spread + shift))))


def smallest_seen(sd: float, n: int) -> float:
    """The smallest gap that n values (at least 2) of standard deviation sd see with a probability
    of 80 %."""
    return sd * brentq(lambda gap: power(n, gap) - POWER, 0, 20)


def verdict(found: Estimate, margin: Margin | None, p: float | None) -> str:
    """A sentence's end for a gap in per cent with the p of its test against the margin; never "no
    loss"."""
    if found.se is None:
        return f"no interval (n = {found.n})"
    within = ""
    if margin and p is not None and p < ALPHA:
        within = (
            f"within ±{margin.percent:g} % (TOST,"
            f" p={p:.2g}{'' if margin.is_declared else ', margin after the fact'})"
        )
    if found.low > 0 or found.high < 0:
        return f"{'costs' if found.mean > 0 else 'gains'} {abs(found.mean):.3g} %" + (
            f", {within}" if within else ""
        )
    return (
        f"equivalent {within}"
        if within
        else f"undecided: interval {found.low:+.2g} to {found.high:+.2g}"
    )


def judged(chosen, found: Estimate, margin: Margin | None, p: float | None) -> dict:
    """Of one recipe's pairs with their gap in per cent and the p of its equivalence: verdict,
    tost_p, smallest_seen [%]; None where unknown."""
    return {
        "verdict": (
            "BF16 again: no Linear converted" if is_idle(chosen) else verdict(found, margin, p)
        ),
        "tost_p": p,
        "smallest_seen": found.se and smallest_seen(found.sd, found.n),
    }


# ----------------------------------------------------------------------------------- pairs of runs


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


def pairs(records) -> tuple[list[Pair], list[str]]:
    """Match each FP8 run, and each repeat of a BF16 run, a null in FP8's place, with the BF16 run
    of its pair_id, smallest model first; plus a line for each run left alone. Raises UserError for
    two BF16 runs of a pair, partners of other sequences."""
    partners, found, paired = {}, [], set()
    for record in records:
        if (
            record.recipe == "bf16"
            and not record.repeat
            and partners.setdefault(record.pair_id, record) is not record
        ):
            raise UserError(
                f"{partners[record.pair_id].run_id} and {record.run_id} are both the BF16 run of"
                f" pair {record.pair_id}: leave one out"
            )
    for run in sorted(records, key=lambda run: (run.N, run.tokens, run.recipe, run.seed)):
        base = partners.get(run.pair_id)
        # an FP8 run's repeat is no null
        if base and base is not run and (run.recipe == "bf16" or not run.repeat):
            found.append(_pair(base, run))
            paired |= {run.folder} | ({base.folder} if run.recipe != "bf16" else set())
    return found, [
        f"unpaired {run.run_id}: no partner with its pair_id {run.pair_id}"
        for run in records
        if run.folder not in paired
    ]


def _pair(bf16: Record, fp8: Record) -> Pair:
    check_comparable([bf16, fp8])
    base, other = map(load_val_losses, (bf16, fp8))
    for name in ("source", "n_tokens"):
        if not np.array_equal(base[name], other[name]):
            raise UserError(
                f"{bf16.folder}/val_losses.npz and {fp8.folder}/val_losses.npz differ in {name!r}:"
                " a paired gap needs the same validation sequences in the same order"
            )
    gaps = {arm: _gap(other[arm] - base[arm], base, bf16, arm) for arm in ("bf16", "as_trained")}
    alike = all(
        getattr(fp8, key) == getattr(bf16, key) for key in ("device", "n_gpu", "is_compiled")
    )
    converted = fp8.summary["precision"]["layers_converted"]
    return Pair(
        bf16,
        fp8,
        gaps,
        fp8.tok_per_s_median / bf16.tok_per_s_median if alike else None,
        len(converted),
    )


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


def _gap(difference, losses, base: Record, arm: str) -> Gap:
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


def load_val_losses(record: Record) -> dict[str, np.ndarray]:
    """A run's val_losses.npz: as_trained and bf16 (nats per sequence), source, n_tokens; each of
    shape (sequences,)."""
    path, names = record.folder / "val_losses.npz", ("as_trained", "bf16", "source", "n_tokens")
    try:
        with (
            np.load(path, allow_pickle=False) as file,
            np.errstate(divide="ignore", invalid="ignore"),
        ):
            losses = {name: file[name] for name in names}
            said = {arm: _gap(losses[arm], losses, record, arm).nats for arm in names[:2]}
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): leave the run out, copy the file from"
            " where it was trained, or write it again: delete summary.json and repeat the run's"
            " command"
        ) from None
    for arm, loss in said.items():
        if (
            not abs(loss - (expected := getattr(record, f"loss_{arm}")))
            <= LOSS_TOLERANCE * expected
        ):
            raise UserError(
                f"{path}: {arm!r} gives a loss of {loss:.6f}, summary.json says"
                f" loss_{arm}={expected:.6f}; the two files are not from one evaluation, or one is"
                " damaged"
            )
    return losses


def measure(records, repeated, arm: str) -> dict:
    """The null of other seeds per size and tokens ("sizes"), then "pooled", and that of the same
    seed ("same_seed"), from the null Pairs `repeated`; in per cent of the loss under `arm`. Other
    seeds: a difference has variance 2 SD^2; branches of one trunk add no freedom. Same seed: root
    mean square around 0, as the order is arbitrary; equal to the last bit: no null."""
    rows, trunks, pooled, same = [], {}, None, None
    for (N, _), some in grouped(
        [r for r in records if r.is_baseline and not r.repeat], lambda r: (r.N, r.tokens)
    ):
        runs = list({r.trunk: r for r in some}.values())
        if len(runs) > 1:
            sd = (
                100
                * math.sqrt(2)
                * float(np.std(np.log([getattr(run, f"loss_{arm}") for run in runs]), ddof=1))
            )
            rows.append({**at(runs[0]), "runs": len(runs), "dof": len(runs) - 1, "sd_percent": sd})
            trunks.setdefault(N, set()).update(run.trunk for run in runs)
    if rows:
        variance = np.average(
            [row["sd_percent"] ** 2 for row in rows], weights=[row["dof"] for row in rows]
        )
        freedom = sum(
            min(len(some) - 1, sum(row["dof"] for row in rows if row["N"] == N))
            for N, some in trunks.items()
        )
        pooled = {"runs": sum(row["runs"] for row in rows), **_null(variance, freedom)}
    again = [p for p in repeated if any(gap.nats for gap in p.gap.values())]
    if again:
        variance = np.mean([p.gap[arm].percent ** 2 for p in again])
        same = {"pairs": len(again), **_null(variance, len(trajectories(again)))}
    sizes = [
        {**at(some[0].bf16), "pairs": len(some), **over(some, "percent")}
        for _, some in grouped(again, lambda p: (p.bf16.N, p.bf16.tokens))
    ]
    return {
        "sizes": rows,
        "pooled": pooled,
        "same_seed": {"sizes": sizes, "equal": len(repeated) - len(again), "pooled": same},
    }


def _null(variance: float, dof: int) -> dict:
    """band: half of what holds 95 % of differences whose variance is known from so many degrees of
    freedom."""
    return {
        "dof": dof,
        "sd_percent": math.sqrt(variance),
        "band": float(stdtrit(dof, 0.975)) * math.sqrt(variance),
    }


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


# ------------------------------------------------------------- the best recipe, by a declared rule


def rank(found, arm: str) -> dict:
    """The ranking of the recipes of `found` (Pairs) by the evaluation `arm`, gaps in per cent.
    Ranked is every recipe that converts a Linear in each of its pairs and ran in all that is
    compared: the sizes, budgets and seeds where more than half of the recipes ran, of each size the
    largest such budget. First is the lowest common gap, with its sign. A recipe whose paired
    difference to it has a 95 % interval that holds 0 (or none) ties; of these the fastest is the
    best, or the first where speed means nothing. {"best" (None where none is ranked), "reason",
    "recipes", "left_out"}."""
    left_out, cells, rows = [], {}, []
    for recipe, some in grouped(found, lambda p: p.fp8.recipe):
        if idle := [p.fp8.run_id for p in some if is_idle([p])]:
            left_out.append(
                {
                    "recipe": recipe,
                    "reason": f"converts no Linear in {listed(idle, 1)}: it is BF16 there",
                }
            )
        else:
            cells[recipe] = {(p.fp8.N, p.fp8.tokens, p.fp8.seed): p for p in some}
    present = [cell for own in cells.values() for cell in own]
    shared = [cell for cell in sorted(set(present)) if 2 * present.count(cell) > len(cells)]
    longest = {N: tokens for N, tokens, _ in shared}
    compared = [cell for cell in shared if cell[1] == longest[cell[0]]]
    logs = {}  # recipe -> its gaps where all are compared
    for recipe, own in cells.items():
        if compared and own.keys() >= set(compared):
            logs[recipe] = [own[cell].gap[arm].log_percent for cell in compared]
        else:
            lacking = [f"{si(cell[0])} seed {cell[2]}" for cell in compared if cell not in own]
            left_out.append(
                {
                    "recipe": recipe,
                    "reason": f"no finished pair at {listed(lacking) or 'what most recipes share'}",
                }
            )
    for recipe in sorted(logs, key=lambda recipe: (np.mean(logs[recipe]), recipe)):
        difference = estimate(np.subtract(logs[recipe], logs[rows[0]["recipe"]])) if rows else None
        rows.append(
            {
                "recipe": recipe,
                "gap": estimate(logs[recipe]),
                "difference": difference,
                "ties": difference is None or difference.low is None or difference.low <= 0,
                "throughput": throughput([cells[recipe][cell] for cell in compared]),
            }
        )
    sizes = dict.fromkeys(si(N) for N, *_ in compared if N > 1)  # a table may give no N
    where = f"over {len(compared)} pairs"
    if sizes:
        where += f" at the largest common budget of {' and '.join(sizes)}"
    best, reason = _best(rows, where)
    return {"best": best, "reason": reason, "recipes": rows, "left_out": left_out}


def _best(rows: list[dict], where: str) -> tuple[str | None, str]:
    if not rows:
        return (
            None,
            (
                "No recipe that differs from the baseline ran wherever more than half of the others"
                " did: none is ranked."
            ),
        )
    tied = [row for row in rows if row["ties"]]
    first, *others = [row["recipe"] for row in tied]
    said = f"{first} has the lowest gap, {rows[0]['gap'].mean:+.3f} % {where}; "
    if not others:
        return (
            first,
            f"{said}no other ranked recipe's lies within chance of it: {first} is the best.",
        )
    said += f"not told apart from it: {', '.join(others)}. "
    if reason := next(
        (row["throughput"]["reason"] for row in tied if row["throughput"]["reason"]), None
    ):
        return first, f"{said}Speed cannot decide ({reason}), so {first} is the best."
    best = max(tied, key=lambda row: row["throughput"]["ratio"])
    return (
        best["recipe"],
        (
            f"{said}Of these {best['recipe']} is the fastest, {best['throughput']['ratio']:.3f} of"
            " BF16's tokens per second: it is the best."
        ),
    )


# --------------------------------------------------------------------- what a gap costs in compute

BEYOND = math.log(1e100)  # e-folds; what lies beyond is no number to print


@dataclass(frozen=True)
class Surface:
    """L(N, D) = E + A N^-alpha + B D^-beta in nats per token, D in tokens."""

    name: str
    source: str
    E: float
    A: float
    B: float
    alpha: float
    beta: float
    covariance: np.ndarray | None = None  # of (ln B, beta); None: the constants are taken as exact
    counts: str = "total"  # which parameters N is: params_total, params_nonembed

    def loss(self, N, D):
        """Nats per token; N, D: numbers or arrays of one shape."""
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    def slope(self, D) -> float:
        """s = -dL/d ln D in nats: what one e-fold of tokens gains."""
        return self.beta * self.B * D**-self.beta

    def extra_tokens(self, gap: float, D) -> float | None:
        """r: how many times the tokens make up `gap` nats at D, L(N, r D) + gap = L(N, D); None
        where no number does."""
        return _power(1 - gap / (self.B * D**-self.beta), -1 / self.beta)

    def effective_parameters(self, gap: float, N) -> float | None:
        """phi = N_eff / N, L(phi N, D) = L(N, D) + gap; None where a negative gap is more than any
        size gains, or A is 0."""
        return _power(1 + gap / (self.A * N**-self.alpha), -1 / self.alpha) if self.A else None

    def speedup(
        self, D, gap: float, gap_se: float | None, ratio: float, ratio_se_log=0.0
    ) -> tuple[float | None, float | None]:
        """(S, standard error of ln S) of S = ratio / r, how much sooner FP8 reaches BF16's loss for
        a throughput `ratio` and a gap in nats at D tokens. None where no number of tokens makes up
        the gap; no error without gap_se. SE(ln S)^2 = SE(ln ratio)^2 + (gap_se / s)^2 + (gap SE_s /
        s^2)^2 with SE_s of the slope s from the covariance."""
        r, s = self.extra_tokens(gap, D), self.slope(D)
        if r is None or gap_se is None:
            return r and ratio / r, None
        gradient = s * np.array([1.0, 1 / self.beta - math.log(D)])  # of s by ln B, by beta
        variance = (
            0.0
            if self.covariance is None
            else max(float(gradient @ self.covariance @ gradient), 0.0)
        )
        return ratio / r, math.sqrt(ratio_se_log**2 + (gap_se / s) ** 2 + gap**2 * variance / s**4)


def _power(base: float, exponent: float) -> float | None:
    """base^exponent; None for a base that is not above 0, or a result beyond 10^100 either way."""
    log = exponent * math.log(base) if base > 0 else math.inf
    return base**exponent if abs(log) < BEYOND else None


# The minimum of the summed Huber(1e-3) on Epoch AI's 240 points; the constants printed in their
# paper (482.01, 2085.43, 1.8172, .3478, .3658) are the least-absolute-deviation fit of the same
# points.
EPOCH = Surface(
    "Epoch",
    "Besiroglu et al. 2024, arXiv:2404.10102 (Huber optimum of its 240 points)",
    E=1.817218,
    A=477.826,
    B=2143.417,
    alpha=0.347310,
    beta=0.367172,
)
SMALLEST = 57e6  # parameters of the smallest model in those points
# As printed, rounded: Besiroglu et al. show that these do not minimise their own objective.
HOFFMANN = Surface(
    "Hoffmann",
    "Hoffmann et al. 2022, arXiv:2203.15556, approach 3, as printed",
    E=1.69,
    A=406.4,
    B=410.7,
    alpha=0.34,
    beta=0.28,
)


def own_surface(
    N, D, L, trunks, counts: str = "total", baseline: str = "BF16"
) -> tuple[Surface | None, str | None]:
    """Chinchilla's law of our BF16 runs, arrays of shape (runs,), trunks naming their trajectories;
    or None, and why. baseline: what their arm is called."""
    fit = fit_form("chinchilla", Points(N, D, 6 * N * D, L, trunks), resamples=1000)
    if not fit.identified:
        return None, refusal_words(fit.reason)
    # The solver's B is the factor at the centre of ln D: ln B = b + beta * centre.
    to_natural = np.array([[1.0, fit.optimum.centres[1]], [0.0, 1.0]])
    return (
        Surface(
            "own",
            f"Chinchilla's form fitted to these {fit.n} {baseline} runs",
            *(fit.parameters[key] for key in ("E", "A", "B", "alpha", "beta")),
            to_natural @ fit.optimum.covariance[np.ix_((2, 4), (2, 4))] @ to_natural.T,
            counts,
        ),
        None,
    )


def local_surface(D, L, baseline: str = "BF16") -> Surface | None:
    """L = B D^-beta through the BF16 runs of one size: what more tokens gain around these D; None
    unless the loss falls."""
    slope, height = np.polyfit(np.log(D), np.log(L), 1) if len(np.unique(D)) > 1 else (0.0, 0.0)
    return (
        Surface(
            "own, at this N",
            f"power law over tokens through the {baseline} runs of each size",
            E=0.0,
            A=0.0,
            B=math.exp(height),
            alpha=1.0,
            beta=-float(slope),
        )
        if slope < 0
        else None
    )


def surfaces(
    runs, loss_key: str, baseline: str = "BF16"
) -> tuple[dict[int, list[Surface]], str | None]:
    """N of the BF16 `runs` -> its laws: our own, else its size's, with Epoch's; else two published
    ones; why not ours. baseline: what their arm is called."""
    # N D: no int64
    N, D, L = (
        np.array([getattr(run, key) for run in runs], dtype=float)
        for key in ("N", "tokens", loss_key)
    )
    own, reason = own_surface(
        N,
        D,
        L,
        np.array([run.trunk for run in runs]),
        runs[0].convention if runs else "total",
        baseline,
    )
    ours = {
        int(size): own or local_surface(D[size == N], L[size == N], baseline)
        for size in np.unique(N)
    }
    published = [EPOCH] if any(ours.values()) else [EPOCH, HOFFMANN]
    return {size: [law, *published] if law else published for size, law in ours.items()}, reason


def costs(surface: Surface, N, D, nats: Estimate, ratio, se_log, reason) -> dict:
    """What an estimated gap in nats costs at N, D, with 95 % intervals; None, with a reason.
    extra_tokens: r, also the extra compute at fixed size. effective_parameters: phi. speedup:
    throughput `ratio` over r. reason: why there is no ratio."""
    tokens, parameters = (
        [None if gap is None else law(gap, at) for gap in (nats.mean, nats.low, nats.high)]
        for law, at in ((surface.extra_tokens, D), (surface.effective_parameters, N))
    )
    speedup, ends = None, [None, None]
    if tokens[0] is None:
        reason = (
            f"no number of tokens makes up {nats.mean:.4f} nats under {surface.name}, by which more"
            f" data gains at most {surface.B * D**-surface.beta:.4f}, or next to nothing"
        )
    elif ratio is not None:
        speedup, error = surface.speedup(D, nats.mean, nats.se, ratio, se_log or 0.0)
        if (
            None not in (error, se_log)
            and (spread := float(stdtrit(nats.n - 1, 0.975)) * error) < BEYOND
        ):
            # one ratio of throughputs has no error to pass on
            ends = [speedup * math.exp(-spread), speedup * math.exp(spread)]
    return {
        "law": surface.name,
        "extra_tokens": tokens[0],
        "extra_tokens_ci95": tokens[1:],
        "effective_parameters": parameters[0],
        "effective_parameters_ci95": parameters[:0:-1],
        "speedup": speedup,
        "speedup_ci95": ends,
        "reason": None if speedup else reason,
    }


def throughput(chosen) -> dict:
    """Geometric mean of FP8's tokens per second over BF16's, its logarithm's standard error, or why
    there is none."""
    ratios = np.log([p.tok_per_s_ratio for p in chosen if p.tok_per_s_ratio])
    devices = [p.fp8.device for p in chosen]
    if "" in devices:
        return {"ratio": None, "se_log": None, "reason": NO_SPEED}
    if any(device.startswith("cpu") for device in devices):
        reason = "a CPU has no FP8 units: its throughput means nothing"
        return {"ratio": None, "se_log": None, "reason": reason}
    if not len(ratios):
        reason = "the arms ran on different devices, numbers of GPUs or compile settings"
        return {"ratio": None, "se_log": None, "reason": reason}
    se = float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    return {"ratio": float(np.exp(ratios.mean())), "se_log": se, "reason": None}


# Published laws of what low precision costs disagree by a factor of 10 to 85 at 125M to 1.5B
# parameters, and in whether the gap falls or rises with size: they are drawn beside measured
# points, never used in place of them. N is the total parameter count.


def kumar_gap(N, offsets=True):
    """Nats that integer weights and activations of 8 bits cost at N parameters, whatever the
    tokens; of N's shape. Kumar et al. 2024, arXiv:2411.04330, Table 2: A N_eff^-alpha - A N^-alpha,
    N_eff / N the product of 1 - e^-(P / gamma + n). 465 runs of 30M to 220M parameters, integer
    fake quantisation in the forward pass alone. The main text's formula has no n, their fit has:
    both are given. The authors: the constants are unlikely to be useful elsewhere."""
    # N_eff / N: a factor of the weights, one of the activations
    share = math.prod(
        1 - math.exp(-(8 / gamma + n * offsets))
        for gamma, n in ((2.6745, 0.3037), (2.2102, 1.4072))
    )
    return 4.299e3 * N**-0.4965 * (share**-0.4965 - 1)


def sun_gap(N, D, exponent_bits=4, mantissa_bits=3, block=128):
    """Nats that floats of so many bits cost, one scale for `block` values; of the shape of N and D.
    Sun et al. 2025, arXiv:2501.02423: D^beta / N^alpha * log2(block) / (gamma (E + .5)^delta (M +
    .5)^nu); 366 runs of 41M to 679M parameters."""
    return (
        D**0.5162
        / N**0.2368
        * math.log2(block)
        / (11334.5197 * (exponent_bits + 0.5) ** 3.1926 * (mantissa_bits + 0.5) ** 2.9543)
    )
