"""Which rows count as evidence, and what a file has lost against another."""

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
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


def cell_row(cell: Cell, measured: dict, baseline: dict | None) -> dict:
    """The row of a cell but for what Timer knows; `measured`: what its process answered; `baseline`:
    BF16's row, which the losses of ours must be close to."""
    row = {
        "cell": cell.name,
        **asdict(cell),
        "ratio": None,
        "drift": None,
        "baseline": None,
        **measured,
        "valid": False,
        "invalid_because": None,
    }
    if "failure" in measured:
        return row
    row |= _speed(cell, measured)
    row["attention_kernel"] = _attention_kernel(measured["kernels"] or ())
    twin = baseline if cell.peer is None else None
    row["loss_difference"] = _loss_difference(row, twin)
    reasons = list(problems(row, twin))
    return row | {"invalid_because": "; ".join(reasons) or None, "valid": not reasons}


def _speed(cell: Cell, measured: dict) -> dict:
    step_s = statistics.fmean(measured["steps_s"])
    tok_per_s = cell.tokens_per_step / step_s
    flops = measured["flops_per_token"] * tok_per_s
    peak = peak_flops(torch.cuda.get_device_name()) if cell.device == "cuda" else None
    return {
        "step_ms": 1e3 * step_s,
        "tok_per_s": tok_per_s,
        "tflops": flops / 1e12,
        "mfu_bf16": flops / peak[0] if peak else None,
    }


def _attention_kernel(kernels: Iterable[Sequence]) -> str | None:
    """The longest kernel whose name is that of an attention."""
    for name, _ in kernels:
        if ATTENTION.search(name):
            return name
    return None


def _loss_difference(row: dict, twin: dict | None) -> float | None:
    """The largest distance of the losses from BF16's; None where there is none to be told."""
    losses = _losses(row)
    if twin is None or not np.isfinite(losses).all() or losses[-1] >= losses[0]:
        return None
    return float(abs(losses - _losses(twin)).max())


def _losses(row: dict) -> np.ndarray:
    return np.array(row["losses"], float)  # null, as JSON has it for infinite and NaN, is NaN


def problems(row: dict, twin: dict | None) -> Iterator[str]:
    """Why a row is no evidence. twin: BF16's, where the losses must be close to them."""
    yield from _loss_problems(row, twin)
    if row["peer"] is None and (row["graph_breaks"] or row["recompiles"]):
        yield (
            f"{row['graph_breaks']} graph breaks and {row['recompiles']} recompilations in a step"
            " that must have none"
        )
    attention = row["attention_kernel"]
    is_baseline_on_gpu = twin is None and row["device"] == "cuda"
    if is_baseline_on_gpu and attention and not FIT.search(attention):
        yield (
            f"its attention is neither cuDNN's nor FlashAttention 3's but {attention[:80]}: a slow"
            " BF16 flatters FP8"
        )
    slowed_by = (row["clocks"] or {}).get("slowed_by") or 0
    if int(slowed_by) & SLOWED:
        yield "the GPU was slowed down by heat or power"


def _loss_problems(row: dict, twin: dict | None) -> Iterator[str]:
    """Losses that are not finite, do not fall, or are not BF16's; gradients that are not BF16's."""
    losses = _losses(row)
    if not np.isfinite(losses).all():
        yield "a loss is not finite"
    elif losses[-1] >= losses[0]:
        yield f"its loss does not fall on a fixed batch ({losses[0]:.4f} to {losses[-1]:.4f})"
    elif twin:
        bf16 = _losses(twin)
        most = max(MOST_DIFFERENCE, MOST_LAG * (bf16[0] - bf16.min()))
        if not row["loss_difference"] <= most:
            yield f"its loss is {row['loss_difference']:.3f} away from BF16's, more than {most:.3f}"
        for kind, bf16_norm in twin["gradient_norms"].items():
            norm = row["gradient_norms"].get(kind)
            if not _is_close(norm, bf16_norm):
                yield f"the gradient of {kind} has a norm of {norm}, BF16's has {bf16_norm}"


def _is_close(norm: float | None, bf16_norm: float | None) -> bool:
    if norm == bf16_norm:
        return True
    if not norm or not bf16_norm:
        return False
    return abs(norm / bf16_norm - 1) <= MOST_NORM


def compared(row: dict, earlier: dict, later: dict) -> dict:
    """A cell's row with its speed per FLOP over the mean of the BF16 cells before and after it."""
    drift = later["tok_per_s"] / earlier["tok_per_s"] - 1
    reasons = []
    if row["invalid_because"]:
        reasons.append(row["invalid_because"])
    if row["device"] == "cuda" and abs(drift) > MOST_DRIFT:
        reasons.append(f"BF16 drifted by {drift:+.1%} meanwhile")
    invalid = [bf16["invalid_because"] for bf16 in (earlier, later) if not bf16["valid"]]
    if invalid:
        reasons.append(f"its BF16 is invalid: {invalid[0]}")
    return row | {
        "ratio": 2 * row["tflops"] / (earlier["tflops"] + later["tflops"]),
        "drift": drift,
        "baseline": f"{earlier['size']} {earlier['label']}",
        "valid": not reasons,
        "invalid_because": "; ".join(reasons) or None,
    }


def check(old: list[dict], new: list[dict]) -> list[str]:
    """What the new rows lost against the old: valid cells, ratios by more than MOST_LOSS;
    everything, if none is in both."""
    old_rows, new_rows = newest(old), newest(new)
    pairs = {
        key: (row, new_rows[key])
        for key, row in old_rows.items()
        if key in new_rows and row["valid"]
    }
    losses = [
        f"{key}: valid before, now {new_row.get('failure') or new_row['invalid_because']}"
        for key, (_, new_row) in pairs.items()
        if not new_row["valid"]
    ]
    n_compared = 0
    for key, (old_row, new_row) in pairs.items():
        old_ratio, new_ratio = old_row["ratio"], new_row["ratio"]
        if not old_ratio or not new_ratio:
            continue
        n_compared += 1
        if new_ratio < old_ratio * (1 - MOST_LOSS):
            change = new_ratio / old_ratio - 1
            losses.append(f"{key}: {old_ratio:.3f} before, {new_ratio:.3f} now ({change:+.1%})")
    if not losses and not n_compared:
        return ["no ratio is in both files: nothing was compared"]
    return losses
