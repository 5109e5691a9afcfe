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
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from model import GPT
from runtime import fp8
from runtime.cli import UserError
from runtime.config import FP8Config, RecipeName, load_config
from runtime.log import PEAK_FLOPS, peak_flops
from runtime.plan import ASSUMED_MFU
from scaling.budget import Law, Size, break_even, optimum, read_gap, read_law, tokens
from scaling.command import read_words, run
from scaling.design import RHO, Candidate, rank, with_all
from scaling.pairs import EPOCH, human
from scaling.records import read_runs, usable, without_repeats
from scaling.study import expand, load_study

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {
    "gpus": "number of GPUs (required)", "hours": "hours on them (required)",
    "gpu": "their name, as in runtime/log.py (required)",
    "law": "law.json of scaling/fit.py; without one, Epoch's published law",
    "runs": "a folder of runs, whose measured speed on that GPU counts in place of an assumed one",
    "gap": "FP8's loss over BF16's in per cent; without it precision.json beside law.json, else 0",
    "recipe": "the FP8 recipe (default tensorwise)",
    "study": "a study file whose trunks with branches are the candidates; else the repository's sizes at 5, 10, 20, 40",
}
TARGET = ("gpt1p5b", 20)        # the run whose prediction is to be narrowed: size, tokens per parameter
REACH = 10                      # runs this many times smaller than all sizes here say nothing of them, a gap this far off neither
RATIOS = (5, 10, 20, 40)        # of the candidates where no study names them
SIGMA = 1e-3                    # noise of ln(loss) that the design is judged at
SHOWN = 12                      # candidates printed
FLOPS = (1e15, 1e32)            # budgets taken: below, 50M parameters see so few tokens that no law speaks of them


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__ + "\nOptions, as name=value or --name value:")
        print("\n".join(f"    {name:8} {meaning}" for name, meaning in OPTIONS.items()))
        return 0 if arguments else 2
    try:
        print("\n".join(_plan(_parse(arguments))))
    except UserError as error:
        print(f"scaling/plan.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments) -> dict:
    options = {"recipe": "tensorwise"} | read_words(arguments, OPTIONS, with_paths=False)[1]
    for key in ("gpus", "hours", "gpu"):
        if key not in options:
            raise UserError(f"{key}= is missing: {OPTIONS[key]}; as in gpus=8 hours=24 gpu=h100")
    for key in ("gpus", "hours", "gap"):
        if key in options:
            options[key] = _number(key, options[key])
    if not (options["gpus"] >= 1 and options["gpus"] == int(options["gpus"])):
        raise UserError(f"gpus={options['gpus']:g} must be a whole number, at least 1")
    if options["hours"] <= 0:
        raise UserError(f"hours={options['hours']:g} must be above 0")
    if not -5 < options.get("gap", 0) < 50:
        raise UserError(f"gap={options['gap']:g} must be FP8's loss over BF16's in per cent, such as 0.3")
    recipes = [name for name in get_args(RecipeName) if name not in ("off", "auto")]
    if options["recipe"] not in recipes:
        raise UserError(f"recipe={options['recipe']!r} must be one of {', '.join(recipes)}")
    options["peak"] = peak_flops(options["gpu"])
    if options["peak"] is None:
        raise UserError(f"gpu={options['gpu']}: the peak of that GPU is not in runtime/log.py; there are "
                          f"{', '.join(PEAK_FLOPS)}")
    options["flops"] = options["gpus"] * options["peak"][0] * options["hours"] * 3600
    if not FLOPS[0] <= options["flops"] <= FLOPS[1]:
        raise UserError(f"gpus={options['gpus']:g} hours={options['hours']:g} are {options['flops']:.2g} FLOPs at the peak of "
                          f"{options['gpu']}: a budget must lie between {FLOPS[0]:g} and {FLOPS[1]:g}")
    return options


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{key}={text!r} must be a number: {OPTIONS[key]}")
    return value


def _plan(options) -> list[str]:
    sizes, speed_notes = read_sizes(options)
    law, flops = read_law(options.get("law")), options["flops"]
    gap = read_gap(options.get("law"), options["recipe"], options.get("gap"), (sizes[0].N / REACH, sizes[-1].N * REACH))
    lines = [f"{options['gpus']:g} x {options['gpu']} for {options['hours']:g} h", "", "law: " + law.note, *speed_notes]
    arms = {"BF16": (False, (0.0, 0.0, 0.0))}
    if options["peak"][1] is None:
        lines.append(f"FP8: {options['gpu']} has no FP8 matmuls, so there is BF16 alone")
    else:
        arms["FP8"] = (True, gap[0])
        lines.append("FP8's loss gap: " + gap[1])
    lines += ["", "compute-optimal for the budget", f"  {'':6}{'N*':>9}{'D*':>9}{'D/N':>8}  predicted loss"]
    best = {}
    for arm, (in_fp8, its_gap) in arms.items():
        N, D = optimum(law.surface, sizes, flops, in_fp8)
        best[arm] = law.surface.loss(N, D) * (1 + its_gap[0])
        notes = [law.beyond(N, D), "beyond the sizes that speed is known for" * (not sizes[0].N <= N <= sizes[-1].N)]
        lines.append(f"  {arm:6}{human(N):>9}{human(D):>9}{D / N:8.1f}  "
                     + "   ".join([_loss(law, N, D, its_gap), *filter(None, notes)]))
    if "FP8" in best:
        even = best["BF16"] / best["FP8"] * (1 + arms["FP8"][1][0]) - 1
        lines.append(f"  FP8 is level with BF16 at a gap of {100 * even:.2f} % when each arm trains its own best size")
    lines += ["", "the repository's sizes for the whole budget", f"  {'':9}{'N':>7}{'D':>8}{'D/N':>8}  {'BF16 loss':24}"
              + (f"{'D/N FP8':>8}  {'FP8 loss':24}{'speed-up':>9}{'break-even gap':>16}" if "FP8" in arms else "")]
    for size in sizes:
        D = most = float(tokens(size.N, [size], flops, False))
        line = f"  {size.name:9}{human(size.N):>7}{human(D):>8}{D / size.N:8.1f}  {_loss(law, size.N, D, (0, 0, 0)):24}"
        if "FP8" in arms:
            most = D * size.speedup
            line += (f"{most / size.N:8.1f}  {_loss(law, size.N, most, gap[0]):24}{size.speedup:9.3f}"
                     f"{100 * break_even(law.surface, size.N, D, size.speedup):15.2f}%")
        lines.append(f"{line}   {law.beyond(size.N, max(D, most))}".rstrip())
    return lines + ["", *advice(law, sizes, options)]


def _loss(law: Law, N: float, D: float, gap) -> str:
    """The predicted loss, with the 95 % interval of one run where law (and gap) have one."""
    loss = law.surface.loss(N, D)
    text = f"{loss * (1 + gap[0]):.4f}"
    around = law.fit.interval_at(N, D, new_run=True) if law.fit else None
    if around is None:
        return text
    return text + f" ({float(around[1]) * (1 + gap[1]):.4f} to {float(around[2]) * (1 + gap[2]):.4f})"


# -------------------------------------------------------------------------------------------------------------- inputs


def read_sizes(options) -> tuple[list[Size], list[str]]:
    """The repository's sizes with exact counts; MFU and FP8's speed-up as measured on that GPU, else assumed and bounded."""
    measured, notes = _measured(options)
    sizes, (bf16_peak, fp8_peak) = [], options["peak"]
    for path in sorted((ROOT / "configs").glob("gpt*_bf16.py")):
        config = load_config(path)
        with torch.device("meta"):
            model = GPT(config.model)
        counts = model.counts()
        speedup = None
        if fp8_peak is not None:
            layers = fp8.select(model, replace(FP8Config(), recipe=options["recipe"]), options["gpu"].upper())
            # Of the three matmuls of a step, the gw_hp recipes leave the weight gradient in BF16.
            per_param = 4 if options["recipe"].endswith("gw_hp") else 6
            share = per_param * sum(layer.params for layer in layers if layer.reason is None) / counts["flops_per_token"]
            speedup = 1 / (1 - share * (1 - bf16_peak / fp8_peak))
        name = path.stem.removesuffix("_bf16")
        sizes.append(Size(name, counts["params_total"], counts["flops_per_token"], ASSUMED_MFU, speedup))
    sizes.sort(key=lambda size: size.N)
    sizes = [replace(size, mfu=_near(measured.get("bf16"), size.N) or size.mfu) for size in sizes]
    notes.append("speed: mfu_bf16 measured, between sizes by interpolation" if measured.get("bf16") else
                 f"speed: an assumed mfu_bf16 of {ASSUMED_MFU:.0%}, nothing measured on {options['gpu']}")
    base = measured.get("bf16", {})
    both = {N: mfu / base[N] for N, mfu in measured.get(options["recipe"], {}).items() if N in base}
    if both:
        sizes = [replace(size, speedup=_near(both, size.N)) for size in sizes]
        notes.append(f"FP8's speed-up: measured, {options['recipe']} against bf16 at {len(both)} size{'s' * (len(both) > 1)}")
    elif fp8_peak is not None:
        notes.append("FP8's speed-up: an upper bound, from the share of FLOPs in FP8 with casts free; small sizes can be slower "
                     "than BF16")
    return sizes, notes


def _measured(options) -> tuple[dict[str, dict[int, float]], list[str]]:
    """recipe -> N -> median MFU of the BF16 peak, of runs on that GPU; notes on the others."""
    if "runs" not in options:
        return {}, []
    records, _ = read_runs([options["runs"]])
    records, _ = without_repeats(usable(records)[0])        # repeats run otherwise, such as without the compiler
    here = [record for record in records if peak_flops(record.device) == options["peak"]
            and options["gpu"].lower() in record.device.lower()]
    found: dict[str, dict[int, list[float]]] = {}
    for record in here:
        mfu = record.tok_per_s_median * record.flops_per_token / (record.n_gpu * options["peak"][0])
        found.setdefault(record.recipe, {}).setdefault(record.params_total, []).append(mfu)
    away = sorted({record.device for record in records} - {record.device for record in here})
    return ({recipe: {N: float(np.median(values)) for N, values in by_size.items()} for recipe, by_size in found.items()},
            [f"speed: runs on {', '.join(away)} say nothing of a {options['gpu']}; left out"] if away else [])


def _near(values: dict[int, float] | None, N: float) -> float | None:
    """The value at N, by interpolation in ln N."""
    if not values:
        return None
    at = sorted(values)
    return float(np.interp(math.log(N), np.log(at), [values[one] for one in at]))


# ------------------------------------------------------------------------------------------------------------- the advice


def advice(law: Law, sizes, options) -> list[str]:
    """Which candidate narrows the prediction of TARGET most, in all and per GPU-hour."""
    goal = next(size for size in sizes if size.name == TARGET[0])
    target = (goal.N, TARGET[1] * goal.N)
    candidates, smallest = _candidates(law, sizes, options, goal)
    if not candidates:
        return [f"every candidate is done: nothing is left that would narrow {TARGET[0]}"]
    counts = (smallest / REACH <= law.N) & (law.N <= 1.05 * goal.N)
    notes, surface = [], law.surface
    if away := law.N[~counts].tolist():
        notes.append(f"  {len(away)} of the {len(law.N)} runs done are left out, at {human(min(away))} to {human(max(away))} "
                     f"parameters: below a tenth of the smallest candidate's, or above {TARGET[0]}'s"
                     + ("" if counts.any() else f"; so {EPOCH.name}'s law judges"))
        surface = surface if counts.any() else EPOCH
    done = (law.N[counts], law.D[counts], [trunk for trunk, one in zip(law.trunks, counts, strict=True) if one])
    unlike = list({(one.N, one.D, one.flops): one for one in reversed(candidates)}.values())     # one of those alike but for seed
    now, prior, ranked = rank(surface, *done, unlike, target, SIGMA)
    every = with_all(surface, *done, candidates, target, SIGMA, prior)
    mfu = {size.N: size.mfu for size in sizes}
    rows = [(one.name, 100 * after.prediction, 100 * (after.prediction - now.prediction),
             one.flops / (options["peak"][0] * _near(mfu, one.N)) / 3600) for one, after in ranked]
    best = min(rows, key=lambda row: row[2] / row[3])
    shown = rows[:SHOWN] + [best] * (best not in rows[:SHOWN])
    width = max(len(row[0]) for row in shown) + 2
    return [
        f"which extra run would narrow the prediction of {TARGET[0]} at {TARGET[1]} tokens per parameter most",
        f"  least standard error of its loss (Cramer-Rao), for {100 * SIGMA:.1f} % noise a run and a law of the right form; the "
        f"noise of points of one trunk correlates by {RHO:g}, assumed", *notes,
        f"  {100 * now.prediction:.2f} % after {counts.sum()} runs done" + (
            " (they identify no law, so a wide prior stands in); " if prior else "; ")
        + f"{100 * every.prediction:.2f} % after all {len(candidates)} candidates too"
        + f", {len(candidates) - len(unlike)} of them further seeds" * (len(candidates) > len(unlike)),
        f"  {'run':{width}}{'standard error after [%]':>24}{'change [points]':>17}{'GPU-hours':>11}{'points per GPU-hour':>21}",
        *(f"  {name:{width}}{after:24.2f}{change:+17.3f}{hours:11.1f}{change / hours:+21.4f}"
          for name, after, change, hours in shown),
        *[f"  and {len(rows) - len(shown)} others that narrow it less in all"] * (len(rows) > len(shown)),
        f"  most in all: {rows[0][0]}; most per GPU-hour: {best[0]}"]


def _candidates(law: Law, sizes, options, goal: Size) -> tuple[list[Candidate], float]:
    """What is not done yet, as trajectories, and the smallest size among the runs done or not; a branch needs its trunk."""
    if "study" not in options:
        return [Candidate(name, size.N, (ratio * size.N,), size.flops_per_token * ratio * size.N, name)
                for size in sizes if size.N < goal.N for ratio in RATIOS for name in [f"{size.name} at {ratio}"]
                if not any(abs(size.N / N - 1) < 0.05 and abs(ratio * size.N / D - 1) < 0.05
                           for N, D in zip(law.N, law.D, strict=True))], sizes[0].N
    rows = [row for row in expand(load_study(options["study"]))
            if row.recipe == "bf16" and not row.held_out and not row.repeat]     # a repeat is no new point of a law
    words = load_config(ROOT / f"configs/{goal.name}_bf16.py").model.vocab_size
    if not rows or any(load_config(ROOT / path).model.vocab_size != words for path in {row.config for row in rows}):
        raise UserError(f"study={options['study']} has runs over another vocabulary than {goal.name}'s {words}, or none in "
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
    sys.exit(run(main))
