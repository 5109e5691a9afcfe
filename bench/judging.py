"""Which rows count as evidence, and what a file has lost against another."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import torch

from bench.cells import Cell
from bench.report import newest
from runtime.log import peak_flops

# Of the losses from BF16's: beyond both of these something else is being trained. The second, a
# share of BF16's own fall, is for losses that fall fast, where the same lag is more nats.
MOST_DIFFERENCE, MOST_LAG = 0.05, 0.03
# of the first gradients' norm by kind of parameter: on a CPU within 3 %, a lost gradient is 100 %
# away
MOST_NORM = 0.15
MOST_DRIFT = 0.03  # between the two BF16 cells around an FP8 cell, on a GPU
MOST_LOSS = 0.03  # of a ratio, for --check
# NVML's reasons that make a time worthless: hardware slowdown, software or hardware thermal, power
# brake
SLOWED = 0xE8
ATTENTION = re.compile(r"^(?!triton).*(sdpa|flash|fmha|attention)", re.IGNORECASE)
FIT = re.compile(r"cudnn|flash.*sm90|sm90.*flash", re.IGNORECASE)  # for Hopper


def cell_row(cell: Cell, found: dict, baseline: dict | None) -> dict:
    """The row of a cell but for what Timer knows; `baseline`: BF16's row, which the losses of ours
    must be close to."""
    row = {
        "cell": cell.name,
        **asdict(cell),
        "ratio": None,
        "drift": None,
        "baseline": None,
        **found,
        "valid": False,
        "invalid_because": None,
    }
    if "failure" in found:
        return row
    step_s = statistics.fmean(found["steps_s"])
    rate = cell.tokens_per_step / step_s
    flops = found["flops_per_token"] * rate
    peak = peak_flops(torch.cuda.get_device_name()) if cell.device == "cuda" else None
    attention = next((name for name, _ in found["kernels"] or () if ATTENTION.search(name)), None)
    row |= {
        "step_ms": 1e3 * step_s,
        "tok_per_s": rate,
        "tflops": flops / 1e12,
        "mfu_bf16": flops / peak[0] if peak else None,
        "attention_kernel": attention,
        "loss_difference": None,
    }
    row["invalid_because"] = (
        "; ".join(problems(row, baseline if cell.peer is None else None)) or None
    )
    return row | {"valid": row["invalid_because"] is None}


def problems(row: dict, twin: dict | None) -> Iterator[str]:
    """Why a row is no evidence; twin: BF16's, from which the loss_difference is taken."""
    losses = np.array(row["losses"], float)  # null, as JSON has it for infinite and NaN, is NaN
    if not np.isfinite(losses).all():
        yield "a loss is not finite"
    elif losses[-1] >= losses[0]:
        yield f"its loss does not fall on a fixed batch ({losses[0]:.4f} to {losses[-1]:.4f})"
    elif twin:
        theirs = np.array(twin["losses"], float)
        row["loss_difference"] = float(abs(losses - theirs).max())
        most = max(MOST_DIFFERENCE, MOST_LAG * (theirs[0] - theirs.min()))
        if not row["loss_difference"] <= most:
            yield f"its loss is {row['loss_difference']:.3f} away from BF16's, more than {most:.3f}"
        for kind, norm in twin["gradient_norms"].items():
            ours = row["gradient_norms"].get(kind)
            if ours != norm and not (ours and norm and abs(ours / norm - 1) <= MOST_NORM):
                yield f"the gradient of {kind} has a norm of {ours}, BF16's has {norm}"
    if row["peer"] is None and (row["graph_breaks"] or row["recompiles"]):
        yield (
            f"{row['graph_breaks']} graph breaks and {row['recompiles']} recompilations in a step"
            " that must have none"
        )
    if (
        twin is None
        and (name := row["attention_kernel"])
        and not FIT.search(name)
        and row["device"] == "cuda"
    ):
        yield (
            f"its attention is neither cuDNN's nor FlashAttention 3's but {name[:80]}: a slow BF16"
            " flatters FP8"
        )
    if int((row["clocks"] or {}).get("slowed_by") or 0) & SLOWED:
        yield "the GPU was slowed down by heat or power"


def compared(row: dict, before: dict, after: dict) -> dict:
    """A cell's row with its speed per FLOP over the mean of the BF16 cells before and after it."""
    drift, why = after["tok_per_s"] / before["tok_per_s"] - 1, [row["invalid_because"]]
    if row["device"] == "cuda" and abs(drift) > MOST_DRIFT:
        why.append(f"BF16 drifted by {drift:+.1%} meanwhile")
    why += [
        f"its BF16 is invalid: {one['invalid_because']}"
        for one in (before, after)
        if not one["valid"]
    ][:1]
    return row | {
        "ratio": 2 * row["tflops"] / (before["tflops"] + after["tflops"]),
        "drift": drift,
        "baseline": f"{before['size']} {before['label']}",
        "valid": not any(why),
        "invalid_because": "; ".join(filter(None, why)) or None,
    }


def check(old: list[dict], new: list[dict]) -> list[str]:
    """What the new rows lost against the old: valid cells, ratios by more than MOST_LOSS;
    everything, if none is in both."""
    before, now = newest(old), newest(new)
    both = [key for key in before if key in now and before[key]["valid"]]
    lost = [
        f"{key}: valid before, now {now[key].get('failure') or now[key]['invalid_because']}"
        for key in both
        if not now[key]["valid"]
    ]
    ratios = [
        (key, before[key]["ratio"], now[key]["ratio"])
        for key in both
        if before[key]["ratio"] and now[key]["ratio"]
    ]
    lost += [
        f"{key}: {a:.3f} before, {b:.3f} now ({b / a - 1:+.1%})"
        for key, a, b in ratios
        if b < a * (1 - MOST_LOSS)
    ]
    return lost or ([] if ratios else ["no ratio is in both files: nothing was compared"])
