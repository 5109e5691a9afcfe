"""Draw the loss of an FP8 run minus that of its BF16 partner over steps, within the band of BF16 seeds.

Runs are found among the sibling folders of the FP8 run: the partner by its pair_id, the band's runs by TWINS. A null run, the
partner's training once more with other rounding (repeat above 0), is no partner; it shows what rounding alone does.
"""

import itertools
import json
import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from scaling.figures import page, steps_axis
from scaling.records import LARGEST, read_text

TWINS = ("params_total", "tokens", "tokens_per_step", "lr_peak", "val_sha256")  # equal in runs that make a null band
WINDOW = 40         # losses are smoothed over a fortieth of the steps
STEADY = 4          # the band's width over four times as many: one difference crosses zero where it means nothing


def draw_gap(run: Path) -> tuple[Figure | None, list[str]]:
    """Loss of `run` minus loss of its BF16 partner over steps, or None; plus lines saying what is missing and why."""
    own = _summary(run)
    if own is None:
        return None, [f"fp8_gap is not drawn: {run} has no readable summary.json, so it is unfinished"]
    others = {folder: summary for folder in sorted(run.resolve().parent.iterdir())
              if folder != run.resolve() and (summary := _summary(folder)) and summary["precision"]["recipe"] == "bf16"}
    same = [folder for folder, summary in others.items() if summary["pair_id"] == own["pair_id"]]
    repeats = [folder for folder in same if others[folder].get("repeat")]
    partners = [folder for folder in same if folder not in repeats]
    if not partners:
        return None, [f"fp8_gap is not drawn: beside {run} there is no BF16 run with its pair_id {own['pair_id']}"]
    partner = partners[0]
    notes = [f"fp8_gap: several BF16 runs have pair_id {own['pair_id']}; {partner.name} is taken"] if partners[1:] else []
    train, val = (_difference(run, partner, kind) for kind in ("train", "val"))
    if not len(train[0]):
        return None, [*notes, f"fp8_gap is not drawn: {run} and {partner.name} have no logged training step in common"]
    twins = [folder for folder, summary in others.items() if not summary.get("repeat")
             and all(summary.get(key) is not None and summary.get(key) == own.get(key) for key in TWINS)]
    nulls = [pair for pair in itertools.combinations(twins, 2) if others[pair[0]].get("seed") != others[pair[1]].get("seed")]
    caption = (f"Above zero: FP8 is worse. Line: mean over {window_of(train[0])} steps of training; faint: single steps. "
               "Diamonds: validation, each run as it was trained. ")
    if nulls:
        caption += (f"Grey: null band, mean |difference| of BF16 runs that differ in the seed alone (n = {len(nulls)} "
                    f"pair{'s' * (len(nulls) > 1)}; smoothed alike, then over {STEADY} times as many steps); bars: the same "
                    "in validation. Another seed also draws other batches. ")
    else:
        missing = "no two BF16 runs beside it are equal but for the seed, so there is no null band"
        caption += f"{missing[0].upper()}{missing[1:]}: noise between seeds is not shown. "
        notes.append(f"fp8_gap: {missing}")
    rounding = [gap for repeat in repeats if len((gap := _difference(repeat, partner, "train"))[0])]
    if rounding:
        is_equal = not any(gap.any() for _, gap in rounding)
        caption += "The BF16 run once more, same seed and data, only rounded otherwise, " + (
            "has equal losses at each step. " if is_equal else "minus the first: dashed. ")
    figure, panels = page(3.3, 1, 1, f"Loss of {run.resolve().name} ({own['precision']['recipe']}) minus loss of {partner.name} "
                           f"(BF16), n = 1 pair", caption + "The first 5 % of the steps may leave the axis.", top=0.3, left=0.1)
    panel = panels[0, 0]
    smooth, late, reach = running_mean(train[1]), train[0] >= 0.05 * train[0][-1], [1e-6]
    band, bars = ([_difference(*pair, kind) for pair in nulls] for kind in ("train", "val"))
    if band := [(steps, running_mean(abs(running_mean(gap)), STEADY)) for steps, gap in band if len(steps)]:
        # Between the steps of the shorter run nothing is made up: beyond its end there is no band.
        band = np.array([np.interp(train[0], *pair, left=math.nan, right=math.nan) for pair in band])
        band = np.fmax.reduce(band, axis=0)
        panel.fill_between(train[0], -band, band, color="#BBBBBB", alpha=0.6, linewidth=0)
        reach.append(np.fmax.reduce(band[late]))
    for steps, gap in bars:
        panel.vlines(steps, -abs(gap), abs(gap), color="#777777", linewidth=2.2, alpha=0.6)
        reach += abs(gap).tolist()
    panel.axhline(0, color="#444444", linewidth=0.8)
    panel.plot(*train, color="#D55E00", alpha=0.25, linewidth=0.5)
    panel.plot(train[0], smooth, color="#D55E00", linewidth=1.5)
    for steps, gap in rounding if rounding and not is_equal else ():
        panel.plot(steps, again := running_mean(gap), color="#000000", linewidth=1, linestyle=(0, (4, 2)))
        reach += abs(again[steps >= 0.05 * steps[-1]]).tolist()
    panel.plot(*val, "D", color="#0072B2", markersize=4)
    limit = 1.25 * np.fmax.reduce([*reach, *abs(smooth[late]), *abs(val[1])])
    panel.set(ylim=(-limit, limit), ylabel="FP8 minus BF16 [nats/token]")
    steps_axis(panel)
    return figure, notes


def _summary(folder: Path) -> dict | None:
    """summary.json of a finished run with a pair_id and a recipe; None for anything else."""
    try:
        summary = json.loads((folder / "summary.json").read_bytes())
        return summary if isinstance(summary["pair_id"], str) and isinstance(summary["precision"]["recipe"], str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _difference(first: Path, second: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps that both runs logged, loss of the first minus loss of the second there."""
    one, other = _losses(first, kind), _losses(second, kind)
    steps = sorted(one.keys() & other.keys())
    return np.array(steps), np.array([one[step] - other[step] for step in steps])


def _losses(folder: Path, kind: str) -> dict[int, float]:
    """Step -> loss of one kind of row in metrics.jsonl; lines that cannot be read are left out."""
    losses = {}
    for line in read_text(folder / "metrics.jsonl").split("\n"):
        try:
            row = json.loads(line)
            if row["kind"] == kind and 0 < row["loss"] < LARGEST and type(row["step"]) is int:
                losses[row["step"]] = float(row["loss"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return losses


def window_of(values) -> int:
    return max(1, len(values) // WINDOW)


def running_mean(values: np.ndarray, times: int = 1) -> np.ndarray:
    """Running mean over so many times window_of values; the window is cut where it would leave the ends."""
    kernel = np.ones(min(times * window_of(values), len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
