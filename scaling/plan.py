"""Say what a budget of GPU hours buys in BF16 and in FP8, and which extra run would narrow the 1.5B
prediction most.

    python scaling/plan.py --gpus 8 --hours 24 --gpu h100
    python scaling/plan.py gpus=8 hours=24 gpu=h100 law=out/chinchilla/law/law.json runs=out/chinchilla

FP8 trains more tokens in the same hours and pays for it with a loss gap: both are counted. Whatever
was not measured on that GPU is assumed or bounded, and printed as such. The extra runs are
trajectories of a study, a trunk with its branches; what they buy is counted in percentage points of
the standard error of the predicted loss ("points")."""

import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

from fp8 import selection
from fp8.recipes import fp8_overrides
from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import ROOT
from lib.text import grid, si
from lib.values import FilePath
from model import GPT
from runtime.config import load_config, positive
from runtime.log import peak_flops
from runtime.plan import ASSUMED_MFU
from runtime.roofline import highest_ratio, modelled_ratio
from scaling.law_file import read_law_file
from scaling.pairs import EPOCH, Surface
from scaling.records import read_json, read_runs, usable, without_repeats
from scaling.study import expand, load_study

TARGET = ("gpt1p5b", 20)  # the run whose prediction is to be narrowed: size, tokens per parameter
REACH = 10  # runs or gaps at sizes more than this factor away from all sizes here are not used
SIGMA = 1e-3  # noise of ln(loss) of one run, assumed when designs are compared
# correlation of the noise of two points of one trajectory, assumed: no public study repeats trunks
# with branches
RHO = 0.5
# Where too few runs are done to identify the law, a prior stands in, in (ln E, ln A/N^alpha, ln
# B/D^beta at the target, alpha, beta): nothing known of the terms, exponents scattered as the
# published ones are (alpha .24 to .50, beta .28 to .52).
PRIOR_SD = np.array([1.0, 1.0, 1.0, 0.1, 0.1])
# smallest over largest eigenvalue of the scaled information below which nothing is identified
SINGULAR = 1e-10


@dataclass(frozen=True, kw_only=True)
class Options:
    gpus: int  # number of GPUs
    hours: float  # hours on them
    gpu: str  # their name, as in runtime/log.py
    law: FilePath | None = None  # law.json of scaling/fit.py; without one, Epoch's published law
    # a folder of runs, whose measured speed on that GPU counts in place of an assumed one
    runs: FilePath | None = None
    # FP8's loss over BF16's in per cent; without it precision.json beside law.json, else 0
    gap: float | None = None
    recipe: str = "tensorwise"  # the FP8 recipe, or a study's arm such as tensorwise+kernels+head
    # whose trunks with branches are the candidates; none = configs/study_chinchilla.py
    study: FilePath | None = None

    def __post_init__(self):
        if problems := positive(self, "gpus", "hours"):
            raise UserError(problems[0])
        if not (peaks := peak_flops(self.gpu)) or not peaks[1]:
            raise UserError(
                f"gpu={self.gpu}: no FP8 peak of that GPU is known to runtime/log.py; try h100,"
                " h200 or b200"
            )


@command(__doc__, Options)
def main(options: Options) -> str:
    sizes, notes = read_sizes(options)
    try:
        (law, law_note, done), (gap, gap_note) = read_law(options.law), read_gap(options, sizes)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"law={options.law}, or the precision.json beside it, lacks what BF16 runs give"
            f" ({error}): make it anew with scaling/fit.py or scaling/precision.py"
        ) from None
    # the budget, at the BF16 peak
    flops = options.gpus * peak_flops(options.gpu)[0] * options.hours * 3600
    best, optima = {}, [["", "N*", "D*", "D/N", "predicted loss"]]
    for name, arm_gap in (("BF16", 0), ("FP8", gap)):
        N, D = optimum(law, sizes, flops, name == "FP8")
        best[name] = law.loss(N, D)
        optima.append([name, si(N), si(D), f"{D / N:.1f}", f"{best[name] * (1 + arm_gap):.4f}"])
    rows = [
        [
            "",
            "N",
            "D",
            "D/N",
            "BF16 loss",
            "D/N in FP8",
            "FP8 loss",
            "speed-up",
            "break-even gap [%]",
        ]
    ]
    for size in sizes:
        N, D, most = (
            size.N,
            *(float(tokens(size.N, [size], flops, in_fp8)) for in_fp8 in (False, True)),
        )
        rows.append(
            [
                size.name,
                si(N),
                si(D),
                f"{D / N:.1f}",
                f"{law.loss(N, D):.4f}",
                f"{most / N:.1f}",
                f"{law.loss(N, most) * (1 + gap):.4f}",
                f"{size.speedup:.3f}",
                f"{100 * (law.loss(N, D) / law.loss(N, most) - 1):.2f}",
            ]
        )
    return "\n".join(
        [
            (
                f"{options.gpus} x {options.gpu} for {options.hours:g} h: {flops:.3g} FLOPs at the"
                " BF16 peak"
            ),
            "",
            "law: " + law_note,
            *notes,
            gap_note,
            "",
            "compute-optimal for the budget",
            grid(optima),
            (
                f"FP8 equals BF16 at a gap of {100 * (best['BF16'] / best['FP8'] - 1):.2f} %, each"
                " at its own best size"
            ),
            "",
            "the repository's sizes for the whole budget",
            grid(rows),
            "",
            *advice(law, done, sizes, options),
        ]
    )


# One of the repository's sizes. mfu: in BF16, of one GPU's BF16 peak; speedup: FP8's tokens per
# second over BF16's.
Size = namedtuple("Size", "name N flops_per_token mfu speedup")


def read_sizes(options: Options) -> tuple[list[Size], list[str]]:
    """The repository's sizes with exact counts; MFU and FP8's speed-up as measured on that GPU,
    else assumed and bounded."""
    found, peaks = {}, peak_flops(options.gpu)
    configs = {
        path.stem.removesuffix("_bf16"): load_config(path, fp8_overrides(options.recipe))
        for path in sorted((ROOT / "configs").glob("gpt*_bf16.py"))
    }
    every = [config.model.params_total for config in configs.values()]
    for record in (
        without_repeats(usable(read_runs([options.runs])[0])[0])[0] if options.runs else []
    ):
        is_there = (
            peak_flops(record.device) == peaks and options.gpu.lower() in record.device.lower()
        )
        if is_there and min(every) / REACH <= record.params_total <= max(every) * REACH:
            mfu = record.tok_per_s_median * record.flops_per_token / (record.n_gpu * peaks[0])
            found.setdefault((record.recipe, record.params_total), []).append(mfu)
    base = {N: float(np.median(mfu)) for (recipe, N), mfu in found.items() if recipe == "bf16"}
    both = {
        N: float(np.median(mfu)) / base[N]
        for (recipe, N), mfu in found.items()
        if recipe == options.recipe and N in base
    }
    sizes = []
    for name, config in configs.items():
        model, modelled = GPT.on_meta(config.model), modelled_ratio(config, options.gpu)
        N, per_token = config.model.params_total, model.counts()["flops_per_token"]
        in_fp8 = sum(
            layer.params
            for layer in selection.select(model, config.fp8, options.gpu.upper())
            if layer.recipe
        )
        assumed = modelled or highest_ratio(config, in_fp8, per_token, peaks)
        sizes.append(
            Size(
                name,
                N,
                per_token,
                _near(base, N) if base else ASSUMED_MFU,
                _near(both, N) if both else assumed,
            )
        )
    notes = [
        (
            "speed: mfu_bf16"
            f" {'as measured, between sizes by interpolation' if base else f'assumed, {ASSUMED_MFU:.0%}'}"
        ),
        "FP8's speed-up: "
        + (
            f"measured, {options.recipe} at {len(both)} sizes"
            if both
            else (
                "MODELLED by python -m runtime.roofline, nothing measured"
                if modelled
                else (
                    "an upper bound, from the share of FLOPs in FP8 with casts free; small sizes"
                    " can be slower"
                )
            )
        ),
    ]
    return sorted(sizes, key=lambda size: size.N), notes


def _near(values: dict[int, float], N: float) -> float:
    return float(
        np.interp(math.log(N), np.log(sorted(values)), [values[one] for one in sorted(values)])
    )


def tokens(N, sizes, flops: float, in_fp8: bool):
    """Training tokens of an N-parameter model for `flops` at the BF16 peak; between the sizes by
    interpolation in ln N, beyond them with attention's share of a token's FLOPs falling as N^-1/3,
    as it does when depth grows with width."""
    N = np.asarray(N, dtype=float)

    def along(values):
        return np.exp(np.interp(np.log(N), np.log([size.N for size in sizes]), np.log(values)))

    beyond = N / np.clip(N, sizes[0].N, sizes[-1].N)
    per_token = N * (
        6 + (along([size.flops_per_token / size.N for size in sizes]) - 6) * beyond ** (-1 / 3)
    )
    speed = along([size.speedup for size in sizes]) if in_fp8 else 1.0
    return flops * along([size.mfu for size in sizes]) * speed / per_token


def optimum(surface: Surface, sizes, flops: float, in_fp8: bool) -> tuple[float, float]:
    """(N*, D*): the size whose loss is lowest when it trains on as many tokens as the budget buys
    it."""

    def loss(log_n):
        return surface.loss(np.exp(log_n), tokens(np.exp(log_n), sizes, flops, in_fp8))

    # kinks of the interpolation could trap a local search
    log_n = np.linspace(math.log(1e5), math.log(1e14), 2000)
    centre, step = log_n[int(np.argmin(loss(log_n)))], log_n[1] - log_n[0]
    N = math.exp(
        minimize_scalar(
            loss, bounds=(centre - step, centre + step), method="bounded", options={"xatol": 1e-10}
        ).x
    )
    return N, float(tokens(N, sizes, flops, in_fp8))


def read_law(path: str | None) -> tuple[Surface, str, dict[str, tuple]]:
    """The BF16 runs' own L(N, D) from a law.json, else Epoch's; where it comes from; the runs that
    are done, as run -> (N, D, trajectory). Raises KeyError or TypeError for a file of another
    version."""
    published = (
        f"{EPOCH.source}, up to 1.3e22 FLOPs: another corpus and tokenizer, so compare its losses"
        " with each other alone"
    )
    if path is None:
        return EPOCH, published, {}
    content = read_law_file(Path(path))
    if content.get("conventions", {}).get("N") == "params_nonembed":
        raise UserError(
            f"{path} counts non-embedding parameters: make one that counts all (scaling/fit.py RUNS"
            " n=total out=DIR)"
        )
    # a table's law.json has one set of laws
    said = content.get("groups", {"bf16": content})["bf16"]["laws"]["chinchilla"]
    done = {
        one["run_id"]: (one["N"], one["D"], one["trunk"])
        for one in content.get("inputs", [])
        if one["recipe"] == "bf16"
    }
    if not said["identified"]:
        return EPOCH, f"{path} identifies no L(N, D) ({said['reason']}), so {published}", done
    surface = Surface(path, path, **{key: said[key] for key in ("E", "A", "B", "alpha", "beta")})
    reach = f" up to {max(6 * N * D for N, D, _ in done.values()):.3g} FLOPs" if done else ""
    return (
        surface,
        f"{path}, {said['n']} points{reach}; fit.py --predict says how wide its predictions are",
        done,
    )


def read_gap(options: Options, sizes) -> tuple[float, str]:
    """FP8's relative loss gap and where it comes from: gap=, else precision.json beside law=, else
    0."""
    if options.gap is not None:
        return options.gap / 100, f"FP8's loss gap: {options.gap:g} %, as given"
    if options.law and (path := Path(options.law).parent / "precision.json").is_file():
        content = read_json(path)
        if any(
            row["recipe"] == options.recipe
            and sizes[0].N / REACH <= row["params_total"] <= sizes[-1].N * REACH
            for row in content["sizes"]
        ):
            gap = content["common"][options.recipe]["bf16"]["mean"]
            return gap / 100, f"FP8's loss gap: {gap:+.3f} % for {options.recipe}, from {path}"
    return (
        0.0,
        (
            f"FP8's loss gap: not measured for {options.recipe} at such sizes and counted as 0;"
            " give one with gap="
        ),
    )


def bound(law, points, target, prior: bool = False, rho: float = RHO) -> float | None:
    """The least standard error of ln L at target = (N, D) from runs at points (N, D, trajectory);
    None if they identify no law. The Cramer-Rao bound for noise SIGMA of each run's ln(loss),
    correlated by rho within a trajectory. It knows nothing of a wrong form or of badly tuned sizes,
    so it ranks designs; fit.py --predict says how wide an interval really is."""
    N, D, trunks = (
        (np.array(column) for column in zip(*points, strict=True)) if points else np.empty((3, 0))
    )
    covariance = SIGMA**2 * np.where(np.eye(len(points)), 1.0, rho * np.equal.outer(trunks, trunks))
    rows = gradient(law, N, D, target)
    information = rows.T @ np.linalg.solve(covariance, rows) + prior * np.diag(PRIOR_SD**-2)
    scale = np.sqrt(np.maximum(np.diag(information), SINGULAR))
    # the parameters' units differ; a correlation's do not
    scaled = information / np.outer(scale, scale)
    if np.linalg.matrix_rank(scaled, rtol=SINGULAR, hermitian=True) < len(scaled):
        return None
    here = gradient(law, *target, target) / scale
    return math.sqrt(here @ np.linalg.solve(scaled, here))


def gradient(law, N, D, target) -> np.ndarray:
    """d ln L / d (ln E, ln of either term at target = (N, D), alpha, beta) at N, D of shape (n,) or
    numbers; (n, 5) or (5,)."""
    terms = np.array([law.E + 0 * N, law.A * N**-law.alpha, law.B * D**-law.beta]) / law.loss(N, D)
    return np.array(
        [*terms, -terms[1] * np.log(N / target[0]), -terms[2] * np.log(D / target[1])]
    ).T


def advice(law: Surface, runs: dict, sizes, options: Options) -> list[str]:
    """Which candidate narrows the prediction of TARGET most, in all and per GPU-hour."""
    goal = next(size for size in sizes if size.name == TARGET[0])
    # Runs far smaller than our sizes, such as the demo's, are no evidence for the target; nor is a
    # law of such runs alone.
    lowest, highest = sizes[0].N / REACH, 1.05 * goal.N
    candidates = [
        one for one in candidates_of(options.study, runs) if lowest <= one[1][0][0] <= highest
    ]
    if not candidates:
        return [
            f"no candidate would narrow {TARGET[0]}: each is done, too small or too large to count"
        ]
    done = [point for point in runs.values() if lowest <= point[0] <= highest]
    law = law if done or not runs else EPOCH
    target, mfu, rows = (goal.N, TARGET[1] * goal.N), {size.N: size.mfu for size in sizes}, {}
    prior = bound(law, done, target) is None
    now = 100 * bound(law, done, target, prior)
    # of those that differ in their seed alone the first stays
    for name, points, flops in reversed(candidates):
        then = 100 * bound(law, [*done, *points], target, prior)
        hours = flops / (peak_flops(options.gpu)[0] * _near(mfu, points[0][0])) / 3600
        rows[then, flops] = (then, then - now, hours, (then - now) / hours, name)
    ranked, every = (
        sorted(rows.values()),
        [point for _, points, _ in candidates for point in points],
    )
    return [
        (
            f"which extra run would narrow the prediction of {TARGET[0]} at {TARGET[1]} tokens per"
            " parameter most"
        ),
        f"Least standard error of its loss (Cramer-Rao) at {100 * SIGMA:.1f} % noise a run,"
        f" correlated by {RHO:g} within a trunk (both assumed): {now:.2f} % after {len(done)} runs"
        " done"
        + " (too few for a law: a wide prior stands in)"
        * prior
        + f"; {100 * bound(law, [*done, *every], target, prior):.2f} % after all"
        f" {len(candidates)} candidates too.",
        grid(
            [
                [
                    "run",
                    "standard error after [%]",
                    "change [points]",
                    "GPU-hours",
                    "points per GPU-hour",
                ],
                *(
                    [row[-1], f"{row[0]:.2f}", f"{row[1]:+.3f}", f"{row[2]:.1f}", f"{row[3]:+.4f}"]
                    for row in ranked
                ),
            ]
        ),
        (
            f"most in all: {ranked[0][-1]}; most per GPU-hour:"
            f" {min(ranked, key=lambda row: row[3])[-1]}"
        ),
    ]


def candidates_of(study: str | None, done) -> list[tuple[str, list, float]]:
    """Trajectories of a study that are not done yet: name, points (N, D, trajectory), FLOPs still
    to be spent on them."""
    families = {}
    for row in expand(load_study(study or ROOT / "configs/study_chinchilla.py")):
        if row.recipe == "bf16" and not row.held_out and not row.repeat and row.run not in done:
            # a branch needs its trunk; a repeat is no new point
            families.setdefault(row.parent or row.run, []).append(row)
    return [
        (
            f"{trunk}, {len(left)} of its runs",
            [(row.params_total, row.tokens, trunk) for row in left],
            sum(row.flops_per_token * row.own_tokens for row in left),
        )
        for trunk, left in families.items()
    ]


if __name__ == "__main__":
    raise SystemExit(run_command(main))
