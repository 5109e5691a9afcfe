"""Say what a budget of GPU hours buys in BF16 and in FP8, and which extra run would narrow the 1.5B prediction most.

    python scaling/plan.py --gpus 8 --hours 24 --gpu h100
    python scaling/plan.py gpus=8 hours=24 gpu=h100 law=out/chinchilla/law/law.json runs=out/chinchilla
    python scaling/plan.py gpus=8 hours=24 gpu=h100 study=configs/study_chinchilla.py

FP8 trains more tokens in the same hours and pays for it with a loss gap: both are counted. Whatever was not measured on
that very GPU is assumed or bounded, and printed as such. The extra runs are trajectories, a trunk with its branches; what
they buy is counted in percentage points of the standard error of the predicted loss ("points").
"""

import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from model import GPT
from runtime import fp8
from runtime.cli import UserError, field_lines, read_options, run_command
from runtime.config import FP8Config, RecipeName, load_config, positive
from runtime.log import PEAK_FLOPS, peak_flops
from runtime.plan import ASSUMED_MFU
from runtime.progress import si
from scaling.intervals import with_bootstrap
from scaling.laws import Fit, Points, fit_chinchilla
from scaling.pairs import EPOCH, Surface
from scaling.records import read_json, read_runs, usable, without_repeats
from scaling.study import ROOT, expand, load_study

TARGET = ("gpt1p5b", 20)        # the run whose prediction is to be narrowed: size, tokens per parameter
REACH = 10                      # runs this many times smaller than all sizes here say nothing of them, a gap this far off neither
RATIOS = (5, 10, 20, 40)        # of the candidates where no study names them
SHOWN = 12                      # candidates printed
FLOPS = (1e15, 1e32)            # budgets taken: below, 50M parameters see so few tokens that no law speaks of them
# Smallest and largest 6 N D (FLOPs), and tokens per parameter, of the 240 points of Epoch's law.
EPOCH_COMPUTE, EPOCH_RATIO = (1.397e18, 1.296e22), (0.456, 341.0)
FAR_COMPUTE, FAR_RATIO = 100, 3         # times beyond a law's points from where on its prediction is called an extrapolation
SIGMA = 1e-3                            # noise of ln(loss) that a design is judged at
# Correlation of the noise of two points of one trajectory: a trunk's luck is its branches' luck. Assumed, for no public
# study repeats trunks with their branches; the bound of a study of four trunks with three branches each grows from
# 0.30 % without any to 0.46 % at 0.5 and 0.53 % at 0.9, so that there be some matters more than how much.
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
    recipe: RecipeName = "tensorwise"   # the FP8 recipe
    study: str | None = None            # whose trunks with branches are the candidates; else our sizes at 5, 10, 20, 40

    POSITIONAL: ClassVar = ()

    def __post_init__(self):
        if problems := list(positive(self, "", "gpus", "hours")):
            raise UserError(problems[0])
        if not -5 < (self.gap or 0) < 50:
            raise UserError(f"gap={self.gap:g} must be FP8's loss over BF16's in per cent, such as 0.3")
        if self.recipe in ("off", "auto"):
            raise UserError(f"recipe={self.recipe} must be one FP8 recipe, such as tensorwise")
        if self.peak is None:
            raise UserError(f"gpu={self.gpu}: the peak of that GPU is not in runtime/log.py; there are {', '.join(PEAK_FLOPS)}")
        if not FLOPS[0] <= self.flops <= FLOPS[1]:
            raise UserError(f"gpus={self.gpus} hours={self.hours:g} are {self.flops:.2g} FLOPs at the peak of {self.gpu}: a "
                            f"budget must lie between {FLOPS[0]:g} and {FLOPS[1]:g}")

    @property
    def peak(self) -> tuple[float, float | None] | None:
        return peak_flops(self.gpu)

    @property
    def flops(self) -> float:
        """The budget, at the BF16 peak."""
        return self.gpus * self.peak[0] * self.hours * 3600


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print("\n".join([__doc__, "Options, as name=value or --name value:", *field_lines("", Options)]))
        return 0 if arguments else 2
    try:
        print("\n".join(plan(read_options(Options, arguments))))
    except UserError as error:
        print(f"scaling/plan.py: {error}", file=sys.stderr)
        return 2
    return 0


def plan(options: Options) -> list[str]:
    sizes, speed_notes = read_sizes(options)
    law, none = read_law(options.law), (0.0, 0.0, 0.0)
    gap = read_gap(options.law, options.recipe, options.gap, (sizes[0].N / REACH, sizes[-1].N * REACH))
    lines = [f"{options.gpus} x {options.gpu} for {options.hours:g} h", "", "law: " + law.note, *speed_notes]
    has_fp8 = options.peak[1] is not None
    lines += ["FP8's loss gap: " + gap[1] if has_fp8 else f"FP8: {options.gpu} has no FP8 matmuls, so there is BF16 alone", "",
              "compute-optimal for the budget", f"  {'':6}{'N*':>9}{'D*':>9}{'D/N':>8}  predicted loss"]
    best = []
    for in_fp8, its_gap in ((False, none), (True, gap[0]))[:1 + has_fp8]:
        N, D = optimum(law.surface, sizes, options.flops, in_fp8)
        best.append(law.surface.loss(N, D))
        notes = [law.beyond(N, D), "beyond the sizes that speed is known for" * (not sizes[0].N <= N <= sizes[-1].N)]
        lines.append(f"  {'FP8' if in_fp8 else 'BF16':6}{si(N):>9}{si(D):>9}{D / N:8.1f}  "
                     + "   ".join([_loss(law, N, D, its_gap), *filter(None, notes)]))
    if has_fp8:
        lines.append(f"  FP8 is level with BF16 at a gap of {100 * (best[0] / best[1] - 1):.2f} % when each arm trains its own "
                     f"best size")
    lines += ["", "the repository's sizes for the whole budget", f"  {'':9}{'N':>7}{'D':>8}{'D/N':>8}  {'BF16 loss':24}"
              + (f"{'D/N FP8':>8}  {'FP8 loss':24}{'speed-up':>9}{'break-even gap':>16}" if has_fp8 else "")]
    for size in sizes:
        D = most = float(tokens(size.N, [size], options.flops, False))
        line = f"  {size.name:9}{si(size.N):>7}{si(D):>8}{D / size.N:8.1f}  {_loss(law, size.N, D, none):24}"
        if has_fp8:
            most = D * size.speedup
            line += (f"{most / size.N:8.1f}  {_loss(law, size.N, most, gap[0]):24}{size.speedup:9.3f}"
                     f"{100 * break_even(law.surface, size.N, D, size.speedup):15.2f}%")
        lines.append(f"{line}   {law.beyond(size.N, max(D, most))}".rstrip())
    return lines + ["", *advice(law, sizes, options)]


def _loss(law: "Law", N: float, D: float, gap) -> str:
    """The predicted loss, with the 95 % interval of one run where law (and gap) have one."""
    text = f"{law.surface.loss(N, D) * (1 + gap[0]):.4f}"
    if law.fit is None or (around := law.fit.interval_at(N, D, new_run=True)) is None:
        return text
    return text + f" ({float(around[1]) * (1 + gap[1]):.4f} to {float(around[2]) * (1 + gap[2]):.4f})"


# ------------------------------------------------------------------------------------------------- sizes and their speed

@dataclass(frozen=True)
class Size:
    """One of the repository's sizes, with what a token costs there; speeds are of one GPU."""
    name: str
    N: int
    flops_per_token: float
    mfu: float                  # of the BF16 peak
    speedup: float | None       # FP8 tokens per second over BF16's; None where the GPU has no FP8 matmuls


def read_sizes(options: Options) -> tuple[list[Size], list[str]]:
    """The repository's sizes with exact counts; MFU and FP8's speed-up as measured on that GPU, else assumed and bounded."""
    measured, notes = _measured(options)
    sizes, (bf16_peak, fp8_peak) = [], options.peak
    for path in sorted((ROOT / "configs").glob("gpt*_bf16.py")):
        with torch.device("meta"):
            model = GPT(load_config(path).model)
        counts, speedup = model.counts(), None
        if fp8_peak is not None:
            layers = fp8.select(model, replace(FP8Config(), recipe=options.recipe), options.gpu.upper())
            # Of the three matmuls of a step, the gw_hp recipes leave the weight gradient in BF16.
            per_param = 4 if options.recipe.endswith("gw_hp") else 6
            share = per_param * sum(layer.params for layer in layers if layer.reason is None) / counts["flops_per_token"]
            speedup = 1 / (1 - share * (1 - bf16_peak / fp8_peak))
        name = path.stem.removesuffix("_bf16")
        sizes.append(Size(name, counts["params_total"], counts["flops_per_token"], ASSUMED_MFU, speedup))
    sizes.sort(key=lambda size: size.N)
    if base := measured.get("bf16", {}):
        sizes = [replace(size, mfu=_near(base, size.N)) for size in sizes]
    notes.append("speed: mfu_bf16 measured, between sizes by interpolation" if base else
                 f"speed: an assumed mfu_bf16 of {ASSUMED_MFU:.0%}, nothing measured on {options.gpu}")
    if both := {N: mfu / base[N] for N, mfu in measured.get(options.recipe, {}).items() if N in base}:
        sizes = [replace(size, speedup=_near(both, size.N)) for size in sizes]
        notes.append(f"FP8's speed-up: measured, {options.recipe} against bf16 at {len(both)} size{'s' * (len(both) > 1)}")
    elif fp8_peak is not None:
        notes.append("FP8's speed-up: an upper bound, from the share of FLOPs in FP8 with casts free; small sizes can be slower "
                     "than BF16")
    return sizes, notes


def _measured(options: Options) -> tuple[dict[str, dict[int, float]], list[str]]:
    """recipe -> N -> median MFU of the BF16 peak, of runs on that GPU; notes on the others."""
    if options.runs is None:
        return {}, []
    records = without_repeats(usable(read_runs([options.runs])[0])[0])[0]    # repeats run otherwise, such as uncompiled
    here = [record for record in records if peak_flops(record.device) == options.peak
            and options.gpu.lower() in record.device.lower()]
    found: dict[str, dict[int, list[float]]] = {}
    for record in here:
        mfu = record.tok_per_s_median * record.flops_per_token / (record.n_gpu * options.peak[0])
        found.setdefault(record.recipe, {}).setdefault(record.params_total, []).append(mfu)
    away = sorted({record.device for record in records} - {record.device for record in here})
    return ({recipe: {N: float(np.median(values)) for N, values in by_size.items()} for recipe, by_size in found.items()},
            [f"speed: runs on {', '.join(away)} say nothing of a {options.gpu}; left out"] if away else [])


def _near(values: dict[int, float], N: float) -> float:
    """The value at N, by interpolation in ln N."""
    return float(np.interp(math.log(N), np.log(sorted(values)), [values[one] for one in sorted(values)]))


def tokens(N, sizes, flops: float, in_fp8: bool):
    """Training tokens of an N-parameter model for `flops` at the BF16 peak; between the sizes by interpolation in ln N.

    Beyond the smallest and the largest, MFU and speed-up stay, and attention's share of a token's FLOPs falls as N^-1/3,
    as it does when depth grows with width."""
    N, at = np.asarray(N, dtype=float), np.log([size.N for size in sizes])

    def along(values):
        return np.exp(np.interp(np.log(N), at, np.log(values)))

    within = np.clip(N, sizes[0].N, sizes[-1].N)
    per_token = N * (6 + (along([size.flops_per_token / size.N for size in sizes]) - 6) * (N / within) ** (-1 / 3))
    speed = along([size.speedup for size in sizes]) if in_fp8 else 1.0
    return flops * along([size.mfu for size in sizes]) * speed / per_token


def optimum(surface: Surface, sizes, flops: float, in_fp8: bool) -> tuple[float, float]:
    """(N*, D*): the size whose loss is lowest when it trains on as many tokens as the budget buys it.

    A relative gap that is the same for every size moves the loss, not the optimum."""
    def loss(log_n):
        return surface.loss(np.exp(log_n), tokens(np.exp(log_n), sizes, flops, in_fp8))

    grid = np.linspace(math.log(1e5), math.log(1e14), 2000)     # kinks of the interpolation could trap a local search
    centre, step = grid[int(np.argmin(loss(grid)))], grid[1] - grid[0]
    N = math.exp(minimize_scalar(loss, bounds=(centre - step, centre + step), method="bounded", options={"xatol": 1e-10}).x)
    return N, float(tokens(N, sizes, flops, in_fp8))


def break_even(surface: Surface, N: float, D: float, speedup: float) -> float:
    """The relative loss gap at which FP8 on `speedup` times the tokens ends where BF16 does, at one size."""
    return surface.loss(N, D) / surface.loss(N, speedup * D) - 1


# --------------------------------------------------------------------------------------------------- the law and the gap

@dataclass(frozen=True)
class Law:
    """L(N, D) with where it comes from, and the BF16 runs that are done; fit is None where the law brings no interval."""
    surface: Surface
    note: str
    fit: Fit | None = None
    N: np.ndarray = field(default_factory=lambda: np.zeros(0))      # of the runs that are done; (0,) where none is known
    D: np.ndarray = field(default_factory=lambda: np.zeros(0))
    trunks: tuple[str, ...] = ()            # the trajectory that each belongs to
    names: tuple[str, ...] = ()
    compute: tuple[float, float] | None = EPOCH_COMPUTE     # smallest and largest 6 N D of the law's points; None: not known
    ratio: tuple[float, float] | None = EPOCH_RATIO         # their tokens per parameter

    def beyond(self, N: float, D: float) -> str:
        """How far N, D lie beyond the law's points, "" where they do not."""
        if self.compute is None:
            return ""
        said, is_far = [], False
        times, share = 6 * N * D / self.compute[1], 6 * N * D / self.compute[0]
        if times > 1.5:
            said, is_far = [f"{times:.3g} times the law's largest compute"], times > FAR_COMPUTE
        elif share * FAR_COMPUTE < 1:
            said, is_far = [f"{share:.2g} of the law's smallest compute"], True
        if not self.ratio[0] / FAR_RATIO <= D / N <= self.ratio[1] * FAR_RATIO:
            said, is_far = [*said, f"{D / N:{',.0f' if D > N else '.2g'}} tokens per parameter, the law's points have "
                                   f"{self.ratio[0]:.3g} to {self.ratio[1]:.3g}"], True
        return "extrapolation: " * is_far + "; ".join(said)


def read_law(path: str | None) -> Law:
    """The BF16 runs' own Chinchilla law from a law.json, fitted anew to its inputs for the interval; else Epoch's, saying so.

    Raises UserError for a file that is not there or cannot be read."""
    published = f"{EPOCH.source}: another corpus and tokenizer, so compare its losses with each other alone"
    if path is None:
        return Law(EPOCH, published)
    if not Path(path).is_file():
        inside = next((one for one in (Path(path) / "law.json", Path(path) / "law" / "law.json") if one.is_file()), None)
        raise UserError(f"law={path} is {'a folder' if Path(path).is_dir() else 'not there'}: give "
                        f"{inside or 'the law.json that python scaling/fit.py writes, such as out/chinchilla/law/law.json'}")
    content = read_json(Path(path))
    if content.get("conventions", {}).get("N") == "params_nonembed":
        raise UserError(f"{path} counts non-embedding parameters, and a budget is planned in all of them: fit the same "
                        "runs by all of them (python scaling/fit.py RUNS n=total out=DIR) and give that law.json")
    try:
        groups = content.get("groups", {})
        recipe = "bf16" if "bf16" in groups else next(iter(groups), None)
        runs = [one for one in content.get("inputs", []) if one["recipe"] == recipe]
        N, D, loss = (np.array([float(one[key]) for one in runs]) for key in ("N", "D", "loss"))
        done = (N, D, *(tuple(str(one[key]) for one in runs) for key in ("trunk", "run_id")))
        said = (groups[recipe] if recipe else content)["laws"]["chinchilla"]
        if not said["identified"]:
            return Law(EPOCH, f"{path} identifies no L(N, D) ({said['reason']}), so {published}", None, *done)
        surface = Surface(str(path), str(path), **{key: float(said[key]) for key in ("E", "A", "B", "alpha", "beta")})
        if not runs:
            note = f"{path}, {said['n']} points; without the points themselves it has neither an interval nor a known range"
            return Law(surface, note, None, *done, None, None)
        fit = with_bootstrap(fit_chinchilla(N, D, loss, seed_sd=float(content.get("seed_noise", {}).get("used") or 0.0)),
                             Points(N, D, 6 * N * D, loss, np.array(done[2])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no law.json of this version ({type(error).__name__}: {error}): make it with "
                        "python scaling/fit.py") from None
    note = (f"{path}, {len(runs)} runs of {len(set(done[2]))} trajectories in {recipe}; "
            + ("intervals are this law's for one run, without the doubt in its form (fit.py --predict has both)" if fit.identified
               else f"no interval, because {fit.reason}"))
    ends = ((float(values.min()), float(values.max())) for values in (6 * N * D, D / N))
    return Law(surface, note, fit if fit.identified else None, *done, *ends)


def read_gap(law: str | None, recipe: str, given: float | None = None,
             within: tuple[float, float] = (0.0, math.inf)) -> tuple[tuple[float, float, float], str]:
    """FP8's relative loss gap as (mean, low, high) and where it comes from: as given in per cent, else the precision.json
    beside law.json if it has a size with a parameter count in `within`, else 0.

    Raises UserError for a file that cannot be read."""
    none = (0.0, 0.0, 0.0)
    if given is not None:
        return (given / 100,) * 3, f"{given:g} %, as given"
    path = Path(law).parent / "precision.json" if law else None
    if path is not None and path.is_file():
        try:
            content = read_json(path)
            said = content["common"].get(recipe)
            at = [row["params_total"] for row in content["sizes"] if row["recipe"] == recipe]
            if said and not any(within[0] <= N <= within[1] for N in at):
                return none, (f"{path} has one at {si(min(at))} to {si(max(at))} parameters alone, which says little of "
                              f"the sizes here: FP8's losses count none; give one with gap=")
            if said:
                ends = [said["bf16"][key] for key in ("mean", "low", "high")]
                values = tuple((ends[0] if value is None else value) / 100 for value in ends)
                text = "one pair, no interval" if ends[1] is None else f"{ends[1]:+.3f} to {ends[2]:+.3f} %"
                return values, f"{ends[0]:+.3f} % for {recipe} ({text}), from {path}"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is no precision.json of this version ({type(error).__name__}: {error}): make it with "
                            "python scaling/precision.py") from None
    return none, f"not measured for {recipe}, so FP8's losses count none: hold its true gap against the break-even gap"


# ------------------------------------------------------------------------------------------------------- the run to add

@dataclass(frozen=True)
class Candidate:
    """What can be run next: points (N, each of D) of one trajectory, with the FLOPs that are still to be spent on them."""
    name: str
    N: float
    D: tuple[float, ...]
    flops: float
    cluster: str                # the trajectory's label: runs that are done may have it already


def bound(law, N, D, target, prior: bool = False, clusters=None, rho: float = RHO) -> float | None:
    """The least standard error of ln L at target = (N, D) from runs at N, D of shape (n,); None where they identify no law.

    The Cramer-Rao bound: if the law is about right and each run's ln(loss) carries noise SIGMA, no unbiased fit to these
    sizes and tokens has a smaller one. It knows nothing of a wrong form or of badly tuned sizes, so it ranks designs;
    fit.py --predict says how wide an interval really is. clusters: labels of shape (n,); the noise of points that share one
    is correlated by rho. None: all independent."""
    rows = gradient(law, N, D, target) / SIGMA
    information = rows.T @ rows         # J' V^-1 J with V = SIGMA^2 ((1 - rho) 1 + rho) within a trajectory, 0 between two
    if clusters is not None:
        labels, member = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
        sums, points = np.zeros((len(labels), rows.shape[1])), np.bincount(member, minlength=len(labels))
        np.add.at(sums, member, rows)
        shared = rho / (1 + (points - 1) * rho)             # Sherman and Morrison
        information = (information - sums.T @ (sums * shared[:, None])) / (1 - rho)
    information = information + (np.diag(PRIOR_SD**-2) if prior else 0)
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
    """d ln L / d (ln E, ln of either term at target = (N, D), alpha, beta) at N, D of shape (n,); (n, 5).

    law has E, A, B, alpha, beta, such as published.Surface."""
    N, D = np.atleast_1d(np.asarray(N, dtype=float)), np.atleast_1d(np.asarray(D, dtype=float))
    size, data = law.A * N**-law.alpha, law.B * D**-law.beta
    loss = law.E + size + data
    return np.column_stack([law.E / loss, size / loss, data / loss, -np.log(N / target[0]) * size / loss,
                            -np.log(D / target[1]) * data / loss])


def narrowing(law, N, D, clusters, target):
    """(candidates -> the bound after them and the runs at N, D of trajectories `clusters`; whether these need the prior)."""
    prior = bound(law, N, D, target, clusters=clusters) is None

    def after(candidates) -> float:
        points = [*zip(N, D, clusters, strict=True), *((one.N, tokens, one.cluster) for one in candidates for tokens in one.D)]
        all_n, all_d, labels = zip(*points, strict=True) if points else ((), (), ())
        return bound(law, all_n, all_d, target, prior, labels)

    return after, prior


def advice(law: Law, sizes, options: Options) -> list[str]:
    """Which candidate narrows the prediction of TARGET most, in all and per GPU-hour."""
    goal = next(size for size in sizes if size.name == TARGET[0])
    target = (goal.N, TARGET[1] * goal.N)
    candidates, smallest = _candidates(law, sizes, options.study, goal)
    if not candidates:
        return [f"every candidate is done: nothing is left that would narrow {TARGET[0]}"]
    counts = (smallest / REACH <= law.N) & (law.N <= 1.05 * goal.N)
    notes, surface = [], law.surface
    if away := law.N[~counts].tolist():
        notes.append(f"  {len(away)} of the {len(law.N)} runs done are left out, at {si(min(away))} to {si(max(away))} "
                     f"parameters: below a tenth of the smallest candidate's, or above {TARGET[0]}'s"
                     + ("" if counts.any() else f"; so {EPOCH.name}'s law judges"))
        surface = surface if counts.any() else EPOCH
    done = (law.N[counts], law.D[counts], [trunk for trunk, one in zip(law.trunks, counts, strict=True) if one])
    after, prior = narrowing(surface, *done, target)
    now, every, mfu = after([]), after(candidates), {size.N: size.mfu for size in sizes}
    unlike = {(one.N, one.D, one.flops): one for one in reversed(candidates)}.values()      # one of those alike but for seed
    ranked = sorted(((one, after([one])) for one in unlike), key=lambda pair: pair[1])
    rows = [(one.name, 100 * then, 100 * (then - now), one.flops / (options.peak[0] * _near(mfu, one.N)) / 3600)
            for one, then in ranked]
    best = min(rows, key=lambda row: row[2] / row[3])
    shown = rows[:SHOWN] + [best] * (best not in rows[:SHOWN])
    width = max(len(row[0]) for row in shown) + 2
    return [
        f"which extra run would narrow the prediction of {TARGET[0]} at {TARGET[1]} tokens per parameter most",
        f"  least standard error of its loss (Cramer-Rao), for {100 * SIGMA:.1f} % noise a run and a law of the right form; the "
        f"noise of points of one trunk correlates by {RHO:g}, assumed", *notes,
        f"  {100 * now:.2f} % after {counts.sum()} runs done"
        + " (they identify no law, so a wide prior stands in)" * prior
        + f"; {100 * every:.2f} % after all {len(candidates)} candidates too"
        + f", {len(candidates) - len(unlike)} of them further seeds" * (len(candidates) > len(unlike)),
        f"  {'run':{width}}{'standard error after [%]':>24}{'change [points]':>17}{'GPU-hours':>11}{'points per GPU-hour':>21}",
        *(f"  {name:{width}}{then:24.2f}{change:+17.3f}{hours:11.1f}{change / hours:+21.4f}"
          for name, then, change, hours in shown),
        *[f"  and {len(rows) - len(shown)} others that narrow it less in all"] * (len(rows) > len(shown)),
        f"  most in all: {rows[0][0]}; most per GPU-hour: {best[0]}"]


def _candidates(law: Law, sizes, study: str | None, goal: Size) -> tuple[list[Candidate], float]:
    """What is not done yet, as trajectories, and the smallest size among the runs done or not; a branch needs its trunk."""
    if study is None:
        return [Candidate(name, size.N, (ratio * size.N,), size.flops_per_token * ratio * size.N, name)
                for size in sizes if size.N < goal.N for ratio in RATIOS for name in [f"{size.name} at {ratio}"]
                if not any(abs(size.N / N - 1) < 0.05 and abs(ratio * size.N / D - 1) < 0.05
                           for N, D in zip(law.N, law.D, strict=True))], sizes[0].N
    rows = [row for row in expand(load_study(study))
            if row.recipe == "bf16" and not row.held_out and not row.repeat]     # a repeat is no new point of a law
    words = load_config(ROOT / f"configs/{goal.name}_bf16.py").model.vocab_size
    if not rows or any(load_config(ROOT / path).model.vocab_size != words for path in {row.config for row in rows}):
        raise UserError(f"study={study} has runs over another vocabulary than {goal.name}'s {words}, or none in "
                        "BF16: they say nothing of its loss; give a study of that tokenizer")
    families: dict[str, list] = {}
    for row in rows:
        families.setdefault(row.parent or row.run, []).append(row)
    found = []
    for trunk, family in families.items():
        left = [row for row in family if row.run not in law.names]
        branches = sum(row.parent is not None for row in left)
        text = f"{branches} branch{'es' * (branches > 1)}"
        name = (trunk + f" with {text}" * bool(branches)) if trunk not in law.names else f"{text} of {trunk}"
        if left:
            found.append(Candidate(name, left[0].params_total, tuple(row.tokens for row in left),
                                   sum(row.own_flops for row in left), trunk))
    return found, min(row.params_total for row in rows)


if __name__ == "__main__":
    sys.exit(run_command(main))
