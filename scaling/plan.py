"""Say what a budget of GPU hours buys in BF16 and in FP8, and which extra run would narrow the 1.5B
prediction most.

    python scaling/plan.py --gpus 8 --hours 24 --gpu h100
    python scaling/plan.py gpus=8 hours=24 gpu=h100 law=out/s/law/law.json runs=out/s

FP8 trains more tokens in the same hours and pays for it with a loss gap: both are counted. Whatever
was not measured on that GPU is assumed or bounded, and printed as such. The extra runs are
trajectories of a study, a trunk with its branches; what they buy is counted in percentage points of
the standard error of the predicted loss ("points")."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8 import selection
from fp8.recipes import from_label
from lib.command import command, run_command
from lib.errors import UserError
from lib.machine import ROOT
from lib.text import grid, si
from lib.values import FilePath
from model import GPT
from runtime.config import Config, load_config, positive
from runtime.log import peak_flops
from runtime.plan import ASSUMED_MFU
from runtime.roofline import highest_ratio, modelled_ratio
from scaling.budgets import SizeOnGPU, optimum, tokens
from scaling.designs import RHO, SIGMA, Point, bound
from scaling.law_file import read_law_file
from scaling.laws.forms import CHINCHILLA
from scaling.paired.cost import EPOCH, Surface
from scaling.precision_result import read_precision
from scaling.records import Record, read_runs, usable, without_repeats
from scaling.study import expand, load_study

TARGET = ("gpt1p5b", 20)  # the run whose prediction is to be narrowed: size, tokens per parameter
REACH = 10  # runs or gaps at sizes more than this factor away from all sizes here are not used


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

    def __post_init__(self) -> None:
        problems = positive(self, "gpus", "hours")
        if problems:
            raise UserError(problems[0])
        peaks = peak_flops(self.gpu)
        if not peaks or not peaks[1]:
            raise UserError(
                f"gpu={self.gpu}: no FP8 peak of that GPU is known to runtime/log.py; try h100,"
                " h200 or b200"
            )

    @property
    def bf16_peak(self) -> float:
        """FLOP/s of one GPU."""
        return _peaks(self.gpu)[0]


def _peaks(gpu: str) -> tuple[float, float]:
    """BF16 and FP8 peak of a GPU whose name was checked."""
    peaks = peak_flops(gpu)
    assert peaks is not None and peaks[1] is not None
    return peaks[0], peaks[1]


@command(__doc__, Options)
def main(options: Options) -> str:
    sizes, notes = read_sizes(options)
    try:
        law, gap = read_law(options.law), read_gap(options, sizes)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"law={options.law}, or the precision.json beside it, lacks what BF16 runs give"
            f" ({error}): make it anew with scaling/fit.py or scaling/precision.py"
        ) from None
    flops = options.gpus * options.bf16_peak * options.hours * 3600  # at the BF16 peak
    parts = [
        (
            f"{options.gpus} x {options.gpu} for {options.hours:g} h: {flops:.3g} FLOPs at the"
            " BF16 peak"
        ),
        "",
        f"law: {law.note}",
        *notes,
        gap.note,
        "",
        "compute-optimal for the budget",
        *_format_optima(law.surface, sizes, flops, gap.share),
        "",
        "the repository's sizes for the whole budget",
        _format_sizes(law.surface, sizes, flops, gap.share),
        "",
        *advice(law.surface, law.done, sizes, options),
    ]
    return "\n".join(parts)


def _format_optima(law: Surface, sizes: Sequence[SizeOnGPU], flops: float, gap: float) -> list[str]:
    """The table of the best sizes, and the gap at which both precisions are equal."""
    lines = [["", "N*", "D*", "D/N", "predicted loss"]]
    best = {}
    for name, arm_gap in (("BF16", 0.0), ("FP8", gap)):
        N, D = optimum(law, sizes, flops, name == "FP8")
        best[name] = law.loss(N, D)
        lines.append([name, si(N), si(D), f"{D / N:.1f}", f"{best[name] * (1 + arm_gap):.4f}"])
    break_even = 100 * (best["BF16"] / best["FP8"] - 1)
    return [
        grid(lines),
        f"FP8 equals BF16 at a gap of {break_even:.2f} %, each at its own best size",
    ]


def _format_sizes(law: Surface, sizes: Sequence[SizeOnGPU], flops: float, gap: float) -> str:
    heads = ["", "N", "D", "D/N", "BF16 loss", "D/N in FP8", "FP8 loss", "speed-up"]
    lines = [[*heads, "break-even gap [%]"]]
    for size in sizes:
        N = size.N
        in_bf16 = float(tokens(N, [size], flops, False))
        in_fp8 = float(tokens(N, [size], flops, True))
        loss, fp8_loss = law.loss(N, in_bf16), law.loss(N, in_fp8)
        break_even = 100 * (loss / fp8_loss - 1)
        lines.append(
            [
                size.name,
                si(N),
                si(in_bf16),
                f"{in_bf16 / N:.1f}",
                f"{loss:.4f}",
                f"{in_fp8 / N:.1f}",
                f"{fp8_loss * (1 + gap):.4f}",
                f"{size.speedup:.3f}",
                f"{break_even:.2f}",
            ]
        )
    return grid(lines)


# ------------------------------------------------------------------------------- sizes and speeds


@dataclass(frozen=True)
class Speeds:
    """What finished runs measured on the GPU; parameters -> median over runs."""

    mfu: dict[int, float]  # of BF16
    speedup: dict[int, float]  # FP8's MFU over it


def read_sizes(options: Options) -> tuple[list[SizeOnGPU], list[str]]:
    """The repository's sizes with exact counts, smallest first; MFU and FP8's speed-up as measured
    on that GPU, else assumed and bounded. Plus a line on each."""
    overrides = from_label(options.recipe).overrides
    configs = {
        path.stem.removesuffix("_bf16"): load_config(path, overrides)
        for path in sorted((ROOT / "configs").glob("gpt*_bf16.py"))
    }
    totals = [config.model.params_total for config in configs.values()]
    speeds = measured_speeds(options, min(totals) / REACH, max(totals) * REACH)
    sizes = [_size(name, config, speeds, options) for name, config in configs.items()]
    is_modelled = any(modelled_ratio(config, options.gpu) for config in list(configs.values())[-1:])
    return sorted(sizes, key=lambda size: size.N), _speed_notes(speeds, is_modelled, options)


def _size(name: str, config: Config, speeds: Speeds, options: Options) -> SizeOnGPU:
    N = config.model.params_total
    model = GPT.on_meta(config.model)
    flops_per_token = model.counts()["flops_per_token"]
    mfu = _near(speeds.mfu, N) if speeds.mfu else ASSUMED_MFU
    if speeds.speedup:
        return SizeOnGPU(name, N, flops_per_token, mfu, _near(speeds.speedup, N))
    speedup = modelled_ratio(config, options.gpu)
    if not speedup:
        layers = selection.select(model, config.fp8, options.gpu.upper())
        in_fp8 = sum(layer.params for layer in layers if layer.recipe)
        speedup = highest_ratio(config, in_fp8, flops_per_token, _peaks(options.gpu))
    return SizeOnGPU(name, N, flops_per_token, mfu, speedup)


def _speed_notes(speeds: Speeds, is_modelled: bool, options: Options) -> list[str]:
    mfu = f"assumed, {ASSUMED_MFU:.0%}"
    if speeds.mfu:
        mfu = "as measured, between sizes by interpolation"
    speedup = (
        "an upper bound, from the share of FLOPs in FP8 with casts free; small sizes can be slower"
    )
    if is_modelled:
        speedup = "MODELLED by python -m runtime.roofline, nothing measured"
    if speeds.speedup:
        speedup = f"measured, {options.recipe} at {len(speeds.speedup)} sizes"
    return [f"speed: mfu_bf16 {mfu}", f"FP8's speed-up: {speedup}"]


def measured_speeds(options: Options, smallest: float, largest: float) -> Speeds:
    """Of the finished runs in runs= on that GPU whose size lies between these."""
    records = []
    for record in _finished_runs(options.runs):
        if _is_on(record, options.gpu) and smallest <= record.params_total <= largest:
            records.append(record)
    bf16 = _median_mfu([record for record in records if record.is_baseline], options)
    fp8 = _median_mfu([record for record in records if record.recipe == options.recipe], options)
    return Speeds(bf16, {N: value / bf16[N] for N, value in fp8.items() if N in bf16})


def _median_mfu(records: Sequence[Record], options: Options) -> dict[int, float]:
    """Parameters -> median over the runs of that size, of the BF16 peak."""
    mfu: dict[int, list[float]] = {}
    for record in records:
        flops = record.tok_per_s_median * record.flops_per_token
        peak = record.n_gpu * options.bf16_peak
        mfu.setdefault(record.params_total, []).append(flops / peak)
    return {N: float(np.median(values)) for N, values in mfu.items()}


def _finished_runs(folder: str | None) -> list[Record]:
    if not folder:
        return []
    records, _ = read_runs([folder])
    return without_repeats(usable(records)[0])[0]


def _is_on(record: Record, gpu: str) -> bool:
    return peak_flops(record.device) == peak_flops(gpu) and gpu.lower() in record.device.lower()


def _near(values: Mapping[int, float], N: float) -> float:
    """Interpolated in ln N."""
    sizes = sorted(values)
    return float(np.interp(math.log(N), np.log(sizes), [values[size] for size in sizes]))


# ----------------------------------------------------------------------------------- law and gap


@dataclass(frozen=True)
class LawSource:
    surface: Surface  # L(N, D) of BF16
    note: str  # where it comes from
    done: dict[str, Point]  # run -> where it stands, of the runs that are done


@dataclass(frozen=True)
class GapSource:
    share: float  # FP8's loss over BF16's, less 1
    note: str  # where it comes from


def read_law(path: str | None) -> LawSource:
    """The BF16 runs' own L(N, D) from a law.json, else Epoch's. Raises KeyError or TypeError for a
    file of another version."""
    published = (
        f"{EPOCH.source}, up to 1.3e22 FLOPs: another corpus and tokenizer, so compare its losses"
        " with each other alone"
    )
    if path is None:
        return LawSource(EPOCH, published, {})
    content = read_law_file(Path(path))
    if content.get("conventions", {}).get("N") == "params_nonembed":
        raise UserError(
            f"{path} counts non-embedding parameters: make one that counts all (scaling/fit.py RUNS"
            " n=total out=DIR)"
        )
    # a table's law.json has one set of laws
    law = content.get("groups", {"bf16": content})["bf16"]["laws"][CHINCHILLA]
    done = _points_of(content)
    if not law["identified"]:
        note = f"{path} identifies no L(N, D) ({law['reason']}), so {published}"
        return LawSource(EPOCH, note, done)
    constants = {key: law[key] for key in ("E", "A", "B", "alpha", "beta")}
    reach = ""
    if done:
        reach = f" up to {max(6 * point.N * point.D for point in done.values()):.3g} FLOPs"
    note = f"{path}, {law['n']} points{reach}; fit.py --predict says how wide its predictions are"
    return LawSource(Surface(path, path, **constants), note, done)


def _points_of(content: dict[str, Any]) -> dict[str, Point]:
    """The BF16 runs behind a law.json."""
    return {
        run["run_id"]: Point(run["N"], run["D"], run["trunk"])
        for run in content.get("inputs", [])
        if run["recipe"] == "bf16"
    }


def read_gap(options: Options, sizes: Sequence[SizeOnGPU]) -> GapSource:
    """FP8's relative loss gap: gap=, else precision.json beside law=, else 0."""
    if options.gap is not None:
        return GapSource(options.gap / 100, f"FP8's loss gap: {options.gap:g} %, as given")
    path = Path(options.law).parent / "precision.json" if options.law else None
    if path is not None and path.is_file():
        smallest, largest = sizes[0].N / REACH, sizes[-1].N * REACH
        rows = [row for row in read_precision(path).sizes if row.recipe == options.recipe]
        rows_in_reach = [row for row in rows if smallest <= row.params_total <= largest]
        if rows_in_reach:
            # the gap over all sizes holds those out of reach too
            pairs = [row.bf16.n for row in rows_in_reach]
            gap = float(np.average([row.bf16.mean for row in rows_in_reach], weights=pairs))
            note = f"FP8's loss gap: {gap:+.3f} % for {options.recipe}, from {path}"
            if len(rows_in_reach) < len(rows):
                note += f" without sizes below {si(smallest)} or above {si(largest)} parameters"
            return GapSource(gap / 100, note)
    return GapSource(
        0.0,
        f"FP8's loss gap: not measured for {options.recipe} at such sizes and counted as 0;"
        " give one with gap=",
    )


# ------------------------------------------------------------------------------- the next extra run


@dataclass(frozen=True)
class Candidate:
    """A trajectory of the study that is not done yet."""

    name: str
    points: list[Point]
    flops: float  # still to be spent on it


@dataclass(frozen=True, order=True)
class Gain:
    """What a candidate buys; the better one is smaller."""

    error: float  # standard error of the prediction after it [%]
    flops: float
    change: float  # of that error [points]
    hours: float  # of one GPU
    change_per_hour: float
    name: str


def advice(
    law: Surface, runs: Mapping[str, Point], sizes: Sequence[SizeOnGPU], options: Options
) -> list[str]:
    """Which candidate narrows the prediction of TARGET most, in all and per GPU-hour."""
    name, ratio = TARGET
    goal = {size.name: size for size in sizes}[name]

    def is_evidence(point: Point) -> bool:
        """Runs far smaller than our sizes, such as the demo's, are none for the target; nor is a
        law of such runs alone."""
        return sizes[0].N / REACH <= point.N <= 1.05 * goal.N

    candidates = candidates_of(options.study, runs)
    candidates = [candidate for candidate in candidates if is_evidence(candidate.points[0])]
    if not candidates:
        return [f"no candidate would narrow {name}: each is done, too small or too large to count"]
    done = [point for point in runs.values() if is_evidence(point)]
    if runs and not done:
        law = EPOCH
    target = (goal.N, ratio * goal.N)
    needs_prior = bound(law, done, target) is None

    def error_after(extra: Sequence[Point]) -> float:
        error = bound(law, [*done, *extra], target, needs_prior)
        assert error is not None  # a design that has no law of its own has the prior
        return 100 * error

    error_now = error_after([])
    gains = _gains(candidates, error_now, error_after, sizes, options)
    all_points = itertools.chain.from_iterable(candidate.points for candidate in candidates)
    error_after_all = error_after(list(all_points))
    prior_note = " (too few for a law: a wide prior stands in)" if needs_prior else ""
    fastest = min(gains, key=lambda gain: gain.change_per_hour)
    return [
        f"which extra run would narrow the prediction of {name} at {ratio} tokens per parameter"
        " most",
        f"Least standard error of its loss (Cramer-Rao) at {100 * SIGMA:.1f} % noise a run,"
        f" correlated by {RHO:g} within a trunk (both assumed): {error_now:.2f} % after {len(done)}"
        f" runs done{prior_note}; {error_after_all:.2f} % after all {len(candidates)}"
        " candidates too.",
        _format_gains(gains),
        f"most in all: {gains[0].name}; most per GPU-hour: {fastest.name}",
    ]


def _gains(
    candidates: Sequence[Candidate],
    error_now: float,
    error_after: Callable[[Sequence[Point]], float],
    sizes: Sequence[SizeOnGPU],
    options: Options,
) -> list[Gain]:
    """Best first; of candidates that differ in their seed alone the first stays."""
    mfu = {size.N: size.mfu for size in sizes}
    gains = {}
    for candidate in reversed(candidates):
        error = error_after(candidate.points)
        speed = options.bf16_peak * _near(mfu, candidate.points[0].N)
        hours = candidate.flops / speed / 3600
        change = error - error_now
        gain = Gain(error, candidate.flops, change, hours, change / hours, candidate.name)
        gains[error, candidate.flops] = gain
    return sorted(gains.values())


def _format_gains(gains: Sequence[Gain]) -> str:
    heads = ["run", "standard error after [%]", "change [points]", "GPU-hours"]
    lines = [[*heads, "points per GPU-hour"]]
    for gain in gains:
        change, per_hour = f"{gain.change:+.3f}", f"{gain.change_per_hour:+.4f}"
        lines.append([gain.name, f"{gain.error:.2f}", change, f"{gain.hours:.1f}", per_hour])
    return grid(lines)


def candidates_of(study: str | None, done: Mapping[str, Point]) -> list[Candidate]:
    """The trajectories of a study that are not done yet."""
    families: dict[str, list] = {}
    for row in expand(load_study(study or ROOT / "configs/study_chinchilla.py")):
        is_new_point = row.is_baseline and not row.repeat
        if is_new_point and not row.held_out and row.run not in done:
            # a branch needs its trunk
            families.setdefault(row.parent or row.run, []).append(row)
    candidates = []
    for trunk, rows in families.items():
        points = [Point(row.params_total, row.tokens, trunk) for row in rows]
        flops = sum(row.flops_per_token * row.own_tokens for row in rows)
        candidates.append(Candidate(f"{trunk}, {len(rows)} of its runs", points, flops))
    return candidates


if __name__ == "__main__":
    raise SystemExit(run_command(main))
