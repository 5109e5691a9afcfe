"""Turn what a child answered into the row of a cell: times, ratio, utilisation, verdict.

A step is accumulation x a micro-step + the optimizer's update. A turn's micro-step is the mean over the turn (what hiccups cost
counts); the cell's is the median over its turns. The ratio of a turn is the baseline's step over this one's, the baseline's being
the mean of the turns before and after it: a linear drift cancels.
"""

import math

import numpy as np

from bench.ceilings import backend_of
from bench.children import ChildError
from bench.suites import Cell

SANITY_STEPS = 20
# Of the losses of 20 steps from BF16's: beyond both of these something else is being trained. The second, a share of BF16's
# own fall, is for losses that fall fast, where the same lag is more nats.
MOST_DIFFERENCE, MOST_LAG = 0.05, 0.03
# Of the first gradients' norm of each kind of parameter from BF16's, with the same weights and batch: every recipe was within 3 %
# (2 x 128, 4 x 256, 6 x 384 wide, three seeds, on a CPU); a lost gradient is 100 % away.
MOST_NORM = 0.15
ATTENTION = {"cudnn", "flash3"}     # what is fit for Hopper: with another a BF16 baseline is slow, and FP8 is flattered
UNFIT = {"hardware slowdown", "hardware thermal", "software thermal", "power brake"}    # the power cap is ordinary


def seconds_of(answer: dict) -> list[float]:
    """answer["seconds"]. Raises ChildError unless it is a list of positive, finite numbers."""
    values = answer.get("seconds")
    if not isinstance(values, list) or not values or not all(
            isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in values):
        raise ChildError(f"its times are no times: {str(values)[:80]}")
    return values


def step_s(cell: Cell, turn: list[float], optimizer_s: float) -> float:
    """Seconds of one optimizer step, by one turn's micro-steps."""
    return cell.tokens_per_step / (cell.micro_batch * cell.T) * float(np.mean(turn)) + optimizer_s


def cell_row(cell: Cell, start: dict, turns: list[list[float]], optimizer: list[float], sanity: dict, profile: dict,
             recompiles: int, peaks: tuple[float, float | None] | None, clocks: dict | None, compiled_beside: int,
             most_drift: float, baseline: dict | None = None, around: list[list[float]] = (),
             twin: dict | None = None) -> dict:
    """The row, "run" excepted. `baseline`: the row of the BF16 cell in this call; `around`: its turns, one more than `turns`;
    `twin`: the row whose losses the cell's must be close to, if any."""
    optimizer_s = float(np.median(optimizer))
    steps = [step_s(cell, turn, optimizer_s) for turn in turns]
    middle = float(np.median(steps))
    rate = cell.tokens_per_step / middle
    flops, fp8_flops = start.get("flops_per_token"), start.get("fp8_flops_per_token") or 0
    bf16_peak, fp8_peak = peaks or (None, None)
    tcu = None
    if flops and bf16_peak and (fp8_peak or not fp8_flops):
        tcu = ((flops - fp8_flops) / bf16_peak + (fp8_flops / fp8_peak if fp8_flops else 0)) * rate
    losses = sanity.get("losses")
    row = {
        "kind": "cell", "size": cell.size, "label": cell.label, "T": cell.T, "micro_batch": cell.micro_batch,
        "planned_micro_batch": cell.planned or cell.micro_batch, "tokens_per_step": cell.tokens_per_step,
        **{key: value for key, value in start.items() if key != "ok"},
        "turns": turns, "micro_s": _quantiles([s for turn in turns for s in turn], ("p10", "median", "p90")),
        "optimizer_s": optimizer_s, "step_s": middle, "tok_per_s": rate, "recompiles": recompiles,
        "baseline": baseline and baseline["label"], "baseline_size": baseline and baseline["size"], "ratio": None,
        "tflops": flops and flops * rate / 1e12, "mfu_bf16": flops and bf16_peak and flops * rate / bf16_peak, "tcu": tcu,
        "losses": losses, "largest_difference": None, "clocks": clocks, "drift": _drift(around or turns),
        "compiled_beside": compiled_beside, "buckets": profile.get("buckets"), "profiled_step_s": profile.get("step_s"),
        "kernels": profile.get("kernels"),
        "attention_kernel": profile.get("attention_kernel") or start.get("attention_kernel"),
        "profile_error": profile.get("profile_error") or start.get("profile_error"),
    }
    if baseline:
        theirs = [step_s(_as_cell(baseline), turn, baseline["optimizer_s"]) for turn in around]
        ratios = [(theirs[i] + theirs[i + 1]) / 2 / mine for i, mine in enumerate(steps)]
        row["ratio"] = _quantiles(ratios, ("p10", "median", "p90"))
        row["baseline_turns"] = around
    if twin and _are_finite(losses) and _are_finite(twin["losses"]):
        row["largest_difference"] = max(abs(a - b) for a, b in zip(losses, twin["losses"], strict=False))
    row["gradient_norms"] = sanity.get("gradient_norms")
    row["invalid_because"] = "; ".join(_problems(cell, row, sanity, baseline, twin, most_drift)) or None
    row["valid"] = row["invalid_because"] is None
    return row


def _problems(cell: Cell, row: dict, sanity: dict, baseline: dict | None, twin: dict | None, most_drift: float):
    """Why the row is no evidence."""
    losses = row["losses"]
    if not _are_finite(losses) or len(losses) < SANITY_STEPS:
        yield f"its losses are not known: {sanity.get('error') or 'one is not finite, or some are missing'}"
    elif losses[-1] >= losses[0]:
        yield f"its loss does not fall on a fixed batch ({losses[0]:.4f} to {losses[-1]:.4f})"
    if baseline and not baseline["valid"]:
        yield f"its baseline is invalid: {baseline['invalid_because']}"
    if twin and row["largest_difference"] is not None:
        most = max(MOST_DIFFERENCE, MOST_LAG * (twin["losses"][0] - min(twin["losses"])))
        if row["largest_difference"] > most:
            yield f"its loss is {row['largest_difference']:.3f} away from BF16's, more than {most:.3f}"
    if twin:
        yield from _wrong_gradients(row["gradient_norms"], twin["gradient_norms"])
    if not cell.peer and cell.label != "bf16_eager":
        for key in ("graph_breaks", "recompiles"):
            if row.get(key):
                yield f"{row[key]} {key.replace('_', ' ')} in a step that must have none"
        if cell.device == "cuda":       # where the profiler does not work nobody can tell: such a row stands, and says so
            kernel = row["attention_kernel"]
            if kernel is None and row["profile_error"] is None:
                yield "its attention kernel is not known: none of its profile's kernels is one"
            elif kernel is not None and backend_of([kernel]) not in ATTENTION:
                yield f"its attention is neither cuDNN's nor FlashAttention 3's but {kernel[:80]}"
    if abs(row["drift"]) > most_drift:
        yield f"{'the baseline' if baseline else 'it'} drifted by {row['drift']:+.1%} meanwhile"
    if unfit := UNFIT & set((row["clocks"] or {}).get("throttled") or ()):
        yield f"the GPU was slowed down by {', '.join(sorted(unfit))}"


def _wrong_gradients(ours: dict | None, theirs: dict | None):
    if not ours or not theirs or ours.keys() != theirs.keys():
        yield "the norms of its first gradients are not known, or not BF16's"
        return
    for kind, norm in theirs.items():
        if ours[kind] != norm and not (norm and abs((ours[kind] or 0.0) / norm - 1) <= MOST_NORM):     # null: not finite
            yield f"the gradient of {kind} has a norm of {ours[kind]}, BF16's has {norm}"


def _as_cell(row: dict) -> Cell:
    return Cell(row["size"], row["label"], row["micro_batch"], row["T"], row["tokens_per_step"])


def _drift(turns: list[list[float]]) -> float:
    """Last turn's mean micro-step over the first's, minus 1."""
    return float(np.mean(turns[-1]) / np.mean(turns[0]) - 1)


def _quantiles(values: list[float], names: tuple[str, ...]) -> dict:
    return dict(zip(names, np.quantile(values, (0.1, 0.5, 0.9)).tolist(), strict=True))


def _are_finite(losses) -> bool:
    return isinstance(losses, list) and bool(losses) and all(isinstance(v, int | float) and math.isfinite(v) for v in losses)
