"""Say what a budget of GPU hours buys in BF16 and in FP8, and which extra run would narrow the 1.5B prediction most.

    python scaling/plan.py --gpus 8 --hours 24 --gpu h100
    python scaling/plan.py gpus=8 hours=24 gpu=h100 law=out/chinchilla/law/law.json runs=out/chinchilla
    python scaling/plan.py gpus=8 hours=24 gpu=h100 study=configs/study_chinchilla.py

FP8 trains more tokens in the same hours and pays for it with a loss gap: both are counted. Whatever was not measured on
that GPU is assumed or bounded, and printed as such. The extra runs are trajectories, a trunk with its branches; what
they buy is counted in percentage points of the standard error of the predicted loss ("points").
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from model import GPT
from runtime import fp8
from runtime.cli import UserError, command, grid, run_command, si
from runtime.config import fp8_overrides, load_config, positive
from runtime.log import PEAK_FLOPS, peak_flops
from runtime.plan import ASSUMED_MFU
from runtime.roofline import modelled_ratio
from scaling.laws import log_law, terms
from scaling.pairs import EPOCH, Surface
from scaling.records import read_json, read_runs, usable, without_repeats
from scaling.study import ROOT, expand, load_study

TARGET = ("gpt1p5b", 20)        # the run whose prediction is to be narrowed: size, tokens per parameter
REACH = 10                      # runs or gaps at sizes more than this factor away from all sizes here are not used
RATIOS = (5, 10, 20, 40)        # tokens per parameter of the candidates where no study names them
EPOCH_REACH = (1.296e22, 0.456, 341.0)        # of Epoch's 240 points: largest 6 N D (FLOPs), tokens per parameter from, to
SIGMA = 1e-3                    # noise of ln(loss) of one run, assumed when designs are compared
# Correlation of the noise of two points of one trajectory, assumed: no public study repeats trunks with their branches. The
# bound of four trunks with three branches each grows from 0.30 % without any to 0.46 % at 0.5, 0.53 % at 0.9.
RHO = 0.5
# Where too few runs are done to identify the law, a prior stands in, in (ln E, ln A/N^alpha, ln B/D^beta at the target,
# alpha, beta): nothing known of the terms, exponents scattered as the published ones are (alpha .24 to .50, beta .28 to .52).
PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.1, 0.1])
SINGULAR = 1e-10        # smallest over largest eigenvalue of the scaled information below which nothing is identified


@dataclass(frozen=True, kw_only=True)
class Options:
    gpus: int                           # number of GPUs
    hours: float                        # hours on them
    gpu: str                            # their name, as in runtime/log.py
    law: str | None = None              # law.json of scaling/fit.py; without one, Epoch's published law
    runs: str | None = None             # a folder of runs, whose measured speed on that GPU counts in place of an assumed one
    gap: float | None = None            # FP8's loss over BF16's in per cent; without it precision.json beside law.json, else 0
    recipe: str = "tensorwise"          # the FP8 recipe, or a study's arm such as tensorwise+kernels+head
    study: str | None = None            # whose trunks with branches are the candidates; else our sizes at 5, 10, 20, 40

    def __post_init__(self):
        if problems := positive(self, "gpus", "hours"):
            raise UserError(problems[0])
        if self.peak is None or self.peak[1] is None:
            known = ", ".join(name for name, (_, fp8_peak) in PEAK_FLOPS.items() if fp8_peak)
            raise UserError(f"gpu={self.gpu}: no FP8 peak of that GPU is known to runtime/log.py; there are {known}")

    @property
    def peak(self) -> tuple[float, float | None] | None:
        """BF16 and FP8 FLOP/s of one GPU."""
        return peak_flops(self.gpu)


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    return command(__doc__, Options, arguments, lambda options: "\n".join(plan(options)))


def plan(options: Options) -> list[str]:
    sizes, notes = read_sizes(options)
    try:
        law, (gap, gap_note) = read_law(options.law), read_gap(options, sizes)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"law={options.law}, or the precision.json beside it, is of another version ({type(error).__name__}: "
                        f"{error}): make it anew with scaling/fit.py or scaling/precision.py") from None
    flops = options.gpus * options.peak[0] * options.hours * 3600      # the budget, at the BF16 peak
    best, optima = [], [["", "N*", "D*", "D/N", "predicted loss", "beyond the law's points"]]
    for name, arm_gap in (("BF16", 0), ("FP8", gap)):
        N, D = optimum(law.surface, sizes, flops, name == "FP8")
        best.append(law.surface.loss(N, D))
        optima.append([name, si(N), si(D), f"{D / N:.1f}", f"{best[-1] * (1 + arm_gap):.4f}", law.beyond(N, D)])
    rows = [["", "N", "D", "D/N", "BF16 loss", "D/N in FP8", "FP8 loss", "speed-up", "break-even gap [%]", optima[0][-1]]]
    for size in sizes:
        N, D, most = size.N, *(float(tokens(size.N, [size], flops, in_fp8)) for in_fp8 in (False, True))
        rows.append([size.name, si(N), si(D), f"{D / N:.1f}", f"{law.surface.loss(N, D):.4f}", f"{most / N:.1f}",
                     f"{law.surface.loss(N, most) * (1 + gap):.4f}", f"{size.speedup:.3f}",
                     f"{100 * break_even(law.surface, N, D, size.speedup):.2f}", law.beyond(N, most)])
    return [f"{options.gpus} x {options.gpu} for {options.hours:g} h", "", "law: " + law.note, *notes, gap_note,
            "", "compute-optimal for the budget", grid(optima),
            f"FP8 equals BF16 at a gap of {100 * (best[0] / best[1] - 1):.2f} %, each at its own best size", "",
            "the repository's sizes for the whole budget", grid(rows), "", *advice(law, sizes, options)]


# ------------------------------------------------------------------------------------------------- sizes and their speed

@dataclass(frozen=True)
class Size:
    """One of the repository's sizes, with what a token costs there; speeds are of one GPU."""
    name: str
    N: int
    flops_per_token: float
    mfu: float                  # of the BF16 peak
    speedup: float              # FP8 tokens per second over BF16's


def read_sizes(options: Options) -> tuple[list[Size], list[str]]:
    """The repository's sizes with exact counts; MFU and FP8's speed-up as measured on that GPU, else assumed and bounded."""
    found, (bf16_peak, fp8_peak) = {}, options.peak
    paths = sorted((ROOT / "configs").glob("gpt*_bf16.py"))
    configs = {path.stem.removesuffix("_bf16"): load_config(path, fp8_overrides(options.recipe)) for path in paths}
    every = [config.model.params_total for config in configs.values()]
    for record in without_repeats(usable(read_runs([options.runs])[0])[0])[0] if options.runs else []:
        is_near = min(every) / REACH <= record.params_total <= max(every) * REACH
        if is_near and peak_flops(record.device) == options.peak and options.gpu.lower() in record.device.lower():
            mfu = record.tok_per_s_median * record.flops_per_token / (record.n_gpu * bf16_peak)
            found.setdefault((record.recipe, record.params_total), []).append(mfu)
    base = {N: float(np.median(mfu)) for (recipe, N), mfu in found.items() if recipe == "bf16"}
    both = {N: float(np.median(mfu)) / base[N] for (recipe, N), mfu in found.items() if recipe == options.recipe and N in base}
    sizes = []
    for name, config in configs.items():
        with torch.device("meta"):
            model = GPT(config.model)
        counts = model.counts()
        layers = fp8.select(model, config.fp8, options.gpu.upper())
        # Of the three matmuls of a step, the gw_hp recipes leave the weight gradient in BF16.
        per_param = 4 if config.fp8.recipe.endswith("gw_hp") else 6
        share = per_param * sum(layer.params for layer in layers if layer.reason is None) / counts["flops_per_token"]
        N, most = counts["params_total"], 1 / (1 - share * (1 - bf16_peak / fp8_peak))
        modelled = modelled_ratio(config, options.gpu)
        sizes.append(Size(name, N, counts["flops_per_token"],
                          _near(base, N) if base else ASSUMED_MFU, _near(both, N) if both else modelled or most))
    notes = ["speed: mfu_bf16 as measured, between sizes by interpolation" if base else
             f"speed: an assumed mfu_bf16 of {ASSUMED_MFU:.0%}, nothing measured on {options.gpu} at such sizes",
             f"FP8's speed-up: measured, {options.recipe} at {len(both)} sizes" if both else
             "FP8's speed-up: MODELLED by python -m runtime.roofline, nothing measured" if modelled else
             "FP8's speed-up: an upper bound, from the share of FLOPs in FP8 with casts free; small sizes can be slower"]
    return sorted(sizes, key=lambda size: size.N), notes


def _near(values: dict[int, float], N: float) -> float:
    """The value at N, by interpolation in ln N."""
    return float(np.interp(math.log(N), np.log(sorted(values)), [values[one] for one in sorted(values)]))


def tokens(N, sizes, flops: float, in_fp8: bool):
    """Training tokens of an N-parameter model for `flops` at the BF16 peak; between the sizes by interpolation in ln N, beyond
    them with attention's share of a token's FLOPs falling as N^-1/3, as it does when depth grows with width."""
    N, at = np.asarray(N, dtype=float), np.log([size.N for size in sizes])

    def along(values):
        return np.exp(np.interp(np.log(N), at, np.log(values)))

    within = np.clip(N, sizes[0].N, sizes[-1].N)
    per_token = N * (6 + (along([size.flops_per_token / size.N for size in sizes]) - 6) * (N / within) ** (-1 / 3))
    speed = along([size.speedup for size in sizes]) if in_fp8 else 1.0
    return flops * along([size.mfu for size in sizes]) * speed / per_token


def optimum(surface: Surface, sizes, flops: float, in_fp8: bool) -> tuple[float, float]:
    """(N*, D*): the size whose loss is lowest when it trains on as many tokens as the budget buys it; a gap that is the same
    share of the loss for every size does not move it."""
    def loss(log_n):
        return surface.loss(np.exp(log_n), tokens(np.exp(log_n), sizes, flops, in_fp8))

    log_n = np.linspace(math.log(1e5), math.log(1e14), 2000)    # kinks of the interpolation could trap a local search
    centre, step = log_n[int(np.argmin(loss(log_n)))], log_n[1] - log_n[0]
    N = math.exp(minimize_scalar(loss, bounds=(centre - step, centre + step), method="bounded", options={"xatol": 1e-10}).x)
    return N, float(tokens(N, sizes, flops, in_fp8))


def break_even(surface: Surface, N: float, D: float, speedup: float) -> float:
    """The relative loss gap at which FP8 on `speedup` times the tokens ends where BF16 does, at one size."""
    return surface.loss(N, D) / surface.loss(N, speedup * D) - 1


# --------------------------------------------------------------------------------------------------- the law and the gap

@dataclass(frozen=True)
class Law:
    """L(N, D) with where it comes from, and the BF16 runs that are done."""
    surface: Surface
    note: str
    points: tuple[tuple[float, float, str], ...] = ()   # N, D, trajectory of the runs that are done
    names: frozenset[str] = frozenset()                 # of these runs
    reach: tuple[float, float, float] | None = EPOCH_REACH      # of the points it was fitted to; None: not known

    def beyond(self, N: float, D: float) -> str:
        """How far N, D lie beyond the law's points, "" where they do not."""
        compute, low, high = self.reach or (math.inf, 0, math.inf)
        times = 6 * N * D / compute
        said = [f"{times:.3g} times its largest compute"] * (times > 1.5)
        said += [f"{D / N:,.0f} tokens per parameter, not {low:.3g} to {high:.3g}"] * (not low / 3 <= D / N <= 3 * high)
        return "; ".join(said)


def read_law(path: str | None) -> Law:
    """The BF16 runs' own Chinchilla law from a law.json; else Epoch's, saying so. Raises UserError for a file that cannot be
    read, KeyError or TypeError for one of another version."""
    published = f"{EPOCH.source}: another corpus and tokenizer, so compare its losses with each other alone"
    if path is None:
        return Law(EPOCH, published)
    content = read_json(Path(path))
    if content.get("conventions", {}).get("N") == "params_nonembed":
        raise UserError(f"{path} counts non-embedding parameters: make one that counts all (scaling/fit.py RUNS n=total out=DIR)")
    groups = content.get("groups", {"bf16": content})       # a table's law.json has one set of laws
    if "bf16" not in groups:
        raise UserError(f"{path} holds no law of BF16 runs, only of {', '.join(groups)}: fit both, or plan without law=")
    runs = [one for one in content.get("inputs", []) if one["recipe"] == "bf16"]
    points, names = tuple((one["N"], one["D"], one["trunk"]) for one in runs), frozenset(one["run_id"] for one in runs)
    said = groups["bf16"]["laws"]["chinchilla"]
    if not said["identified"]:
        return Law(EPOCH, f"{path} identifies no L(N, D) ({said['reason']}), so {published}", points, names)
    surface = Surface(path, path, **{key: said[key] for key in ("E", "A", "B", "alpha", "beta")})
    ratios = [D / N for N, D, _ in points]
    reach = (max(6 * N * D for N, D, _ in points), min(ratios), max(ratios)) if points else None    # None: a published table's
    return Law(surface, f"{path}, {said['n']} points; fit.py --predict says how wide its predictions are", points, names, reach)


def read_gap(options: Options, sizes) -> tuple[float, str]:
    """FP8's relative loss gap and where it comes from: gap=, else precision.json beside law=, else 0."""
    if options.gap is not None:
        return options.gap / 100, f"FP8's loss gap: {options.gap:g} %, as given"
    path = Path(options.law).parent / "precision.json" if options.law else None
    content = read_json(path) if path is not None and path.is_file() else {"common": {}, "sizes": []}
    is_near = any(row["recipe"] == options.recipe and sizes[0].N / REACH <= row["params_total"] <= sizes[-1].N * REACH
                  for row in content["sizes"])
    if not (is_near and (said := content["common"].get(options.recipe))):
        return 0.0, f"FP8's loss gap: not measured for {options.recipe} at such sizes and counted as 0; give one with gap="
    change = said.get("over_tokens") or {}
    moves = (f"; counted as constant, though per doubling of D it changed by {change['mean']:+.3g} [{change['low']:+.3g} to "
             f"{change['high']:+.3g}] %" if change.get("low") is not None and change["low"] * change["high"] > 0 else "")
    return said["bf16"]["mean"] / 100, f"FP8's loss gap: {said['bf16']['mean']:+.3f} % for {options.recipe}, from {path}{moves}"


# ------------------------------------------------------------------------------------------------------- the run to add

def bound(law, points, target, prior: bool = False, rho: float = RHO) -> float | None:
    """The least standard error of ln L at target = (N, D) from runs at points (N, D, trajectory); None if they identify no law.
    The Cramer-Rao bound for noise SIGMA of each run's ln(loss), correlated by rho within a trajectory. It knows nothing of a
    wrong form or of badly tuned sizes, so it ranks designs; fit.py --predict says how wide an interval really is."""
    N, D, trunks = zip(*points, strict=True) if points else ((), (), ())
    rows = gradient(law, N, D, target) / SIGMA
    labels, member = np.unique(np.asarray(trunks, dtype=str), return_inverse=True)
    # J' V^-1 J with V = SIGMA^2 ((1 - rho) 1 + rho) within a trajectory, 0 between two; inverted by Sherman and Morrison.
    sums, counts = np.zeros((len(labels), rows.shape[1])), np.bincount(member, minlength=len(labels))
    np.add.at(sums, member, rows)
    shared = rho / (1 + (counts - 1) * rho)
    information = (rows.T @ rows - sums.T @ (sums * shared[:, None])) / (1 - rho) + (np.diag(PRIOR_SD**-2) if prior else 0)
    scale = np.sqrt(np.diag(information))
    if not scale.all():
        return None
    scaled = information / np.outer(scale, scale)       # the parameters' units differ; a correlation's do not
    values = np.linalg.eigvalsh(scaled)
    if values[0] < SINGULAR * values[-1]:
        return None
    here = gradient(law, *target, target)[0]
    return math.sqrt(here @ (np.linalg.inv(scaled) / np.outer(scale, scale)) @ here)


def gradient(law, N, D, target) -> np.ndarray:
    """d ln L / d (ln E, ln of either term at target = (N, D), alpha, beta) at N, D of shape (n,); (n, 5)."""
    logs = [np.log(np.atleast_1d(np.asarray(x, dtype=float)) / at) for x, at in zip((N, D), target, strict=True)]
    heights = np.log([law.E, law.A * target[0]**-law.alpha, law.B * target[1]**-law.beta])
    return log_law(*terms("chinchilla", logs), np.array([*heights, law.alpha, law.beta]))[1]


def advice(law: Law, sizes, options: Options) -> list[str]:
    """Which candidate narrows the prediction of TARGET most, in all and per GPU-hour."""
    goal = next(size for size in sizes if size.name == TARGET[0])
    # Runs far smaller than our sizes, such as the demo's, are no evidence for the target; nor is a law of such runs alone.
    lowest, highest = sizes[0].N / REACH, 1.05 * goal.N
    candidates = [one for one in candidates_of(law, sizes, options.study, goal) if lowest <= one[1][0][0] <= highest]
    if not candidates:
        return [f"no candidate would narrow {TARGET[0]}: each is done, too small or too large to count"]
    done = [point for point in law.points if lowest <= point[0] <= highest]
    surface = law.surface if done or not law.points else EPOCH
    target, mfu, rows = (goal.N, TARGET[1] * goal.N), {size.N: size.mfu for size in sizes}, {}
    prior = bound(surface, done, target) is None
    now = 100 * bound(surface, done, target, prior)
    for name, points, flops in reversed(candidates):        # of those that differ in their seed alone the first stays
        then = 100 * bound(surface, [*done, *points], target, prior)
        hours = flops / (options.peak[0] * _near(mfu, points[0][0])) / 3600
        rows[then, flops] = (then, then - now, hours, (then - now) / hours, name)
    ranked, every = sorted(rows.values()), [point for _, points, _ in candidates for point in points]
    return [
        f"which extra run would narrow the prediction of {TARGET[0]} at {TARGET[1]} tokens per parameter most",
        f"Least standard error of its loss (Cramer-Rao) at {100 * SIGMA:.1f} % noise a run, correlated by {RHO:g} within a trunk "
        f"(both assumed): {now:.2f} % after {len(done)} runs done"
        + f" ({len(law.points) - len(done)} more are too small or too large to count)" * (len(done) < len(law.points))
        + " (they identify no law, so a wide prior stands in)" * prior
        + f"; {100 * bound(surface, [*done, *every], target, prior):.2f} % after all {len(candidates)} candidates too.",
        grid([["run", "standard error after [%]", "change [points]", "GPU-hours", "points per GPU-hour"],
              *([row[-1], f"{row[0]:.2f}", f"{row[1]:+.3f}", f"{row[2]:.1f}", f"{row[3]:+.4f}"] for row in ranked)]),
        f"most in all: {ranked[0][-1]}; most per GPU-hour: {min(ranked, key=lambda row: row[3])[-1]}"]


def candidates_of(law: Law, sizes, study: str | None, goal: Size) -> list[tuple[str, tuple, float]]:
    """What is not done yet: name, points (N, D, trajectory) of one trajectory, FLOPs still to be spent on them."""
    if study is None:
        plain = [(f"{size.name} at {ratio}", size, ratio * size.N) for size in sizes if size.N < goal.N for ratio in RATIOS]
        return [(name, ((size.N, D, name),), size.flops_per_token * D) for name, size, D in plain
                if not any(abs(size.N / n - 1) < 0.05 and abs(D / d - 1) < 0.05 for n, d, _ in law.points)]
    families = {}
    for row in expand(load_study(study)):
        if row.recipe == "bf16" and not row.held_out and not row.repeat and row.run not in law.names:
            families.setdefault(row.parent or row.run, []).append(row)      # a branch needs its trunk; a repeat is no new point
    return [(f"{trunk}, {len(left)} of its runs", tuple((row.params_total, row.tokens, trunk) for row in left),
             sum(row.own_flops for row in left)) for trunk, left in families.items()]


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
