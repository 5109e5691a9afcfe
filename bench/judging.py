"""Which rows count as evidence, and what a file has lost against another."""

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.cells import Cell
from bench.report import newest
from bench.rows import CellRow, Kernel, Measurement, Provenance, TimedRow
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


def judge_cell(
    cell: Cell,
    measured: Measurement,
    bf16: TimedRow | None,
    provenance: Provenance,
    wall_s: float = 0.0,
) -> TimedRow:
    """The row of a cell that is not yet compared in speed. bf16: the BF16 row that the losses of
    ours must be close to; None for BF16 itself."""
    twin = bf16 if cell.peer is None else None
    step_s = statistics.fmean(measured.steps_s)
    tok_per_s = cell.tokens_per_step / step_s
    flops = measured.flops_per_token * tok_per_s
    peak = None if provenance.gpu is None else peak_flops(provenance.gpu)
    row = TimedRow(
        cell=cell,
        provenance=provenance,
        wall_s=wall_s,
        measured=measured,
        step_ms=1e3 * step_s,
        tok_per_s=tok_per_s,
        tflops=flops / 1e12,
        mfu_bf16=flops / peak[0] if peak else None,
        attention_kernel=_attention_kernel(measured.kernels or ()),
        loss_difference=_loss_difference(measured, twin),
    )
    reasons = list(problems(row, twin))
    return replace(row, valid=not reasons, invalid_because="; ".join(reasons) or None)


def _attention_kernel(kernels: Iterable[Kernel]) -> str | None:
    """The longest kernel whose name is that of an attention."""
    for name, _ in kernels:
        if ATTENTION.search(name):
            return name
    return None


def _loss_difference(measured: Measurement, twin: TimedRow | None) -> float | None:
    """The largest distance of the losses from BF16's; None where there is none to be told."""
    losses = _losses(measured)
    if twin is None or not np.isfinite(losses).all() or losses[-1] >= losses[0]:
        return None
    return float(abs(losses - _losses(twin.measured)).max())


def _losses(measured: Measurement) -> np.ndarray:
    return np.array(measured.losses, float)  # null, as JSON has it for infinite and NaN, is NaN


def problems(row: TimedRow, twin: TimedRow | None) -> Iterator[str]:
    """Why a row is no evidence. twin: BF16's, where the losses must be close to them."""
    yield from _loss_problems(row, twin)
    measured = row.measured
    if row.cell.peer is None and (measured.graph_breaks or measured.recompiles):
        yield (
            f"{measured.graph_breaks} graph breaks and {measured.recompiles} recompilations in a"
            " step that must have none"
        )
    attention = row.attention_kernel
    is_baseline_on_gpu = twin is None and row.cell.device == "cuda"
    if is_baseline_on_gpu and attention and not FIT.search(attention):
        yield (
            f"its attention is neither cuDNN's nor FlashAttention 3's but {attention[:80]}: a slow"
            " BF16 flatters FP8"
        )
    slowed_by = (measured.clocks or {}).get("slowed_by") or 0
    if int(slowed_by) & SLOWED:
        yield "the GPU was slowed down by heat or power"


def _loss_problems(row: TimedRow, twin: TimedRow | None) -> Iterator[str]:
    """Losses that are not finite, do not fall, or are not BF16's; gradients that are not BF16's."""
    losses = _losses(row.measured)
    if not np.isfinite(losses).all():
        yield "a loss is not finite"
        return
    if losses[-1] >= losses[0]:
        yield f"its loss does not fall on a fixed batch ({losses[0]:.4f} to {losses[-1]:.4f})"
        return
    if twin is None:
        return
    bf16 = _losses(twin.measured)
    most = max(MOST_DIFFERENCE, MOST_LAG * (bf16[0] - bf16.min()))
    difference = row.loss_difference
    assert difference is not None  # these losses are finite and fall
    if not difference <= most:  # NaN where a loss of BF16's is
        yield f"its loss is {difference:.3f} away from BF16's, more than {most:.3f}"
    for kind, bf16_norm in twin.measured.gradient_norms.items():
        norm = row.measured.gradient_norms.get(kind)
        if not _is_close(norm, bf16_norm):
            yield f"the gradient of {kind} has a norm of {norm}, BF16's has {bf16_norm}"


def _is_close(norm: float | None, bf16_norm: float | None) -> bool:
    if norm == bf16_norm:
        return True
    if not norm or not bf16_norm:
        return False
    return abs(norm / bf16_norm - 1) <= MOST_NORM


def compare_with_bf16(row: TimedRow, earlier: TimedRow, later: TimedRow) -> TimedRow:
    """The row with its speed per FLOP over the mean of the BF16 cells before and after it."""
    drift = later.tok_per_s / earlier.tok_per_s - 1
    reasons = []
    if row.invalid_because:
        reasons.append(row.invalid_because)
    if row.cell.device == "cuda" and abs(drift) > MOST_DRIFT:
        reasons.append(f"BF16 drifted by {drift:+.1%} meanwhile")
    invalid = [bf16.invalid_because for bf16 in (earlier, later) if not bf16.valid]
    if invalid:
        reasons.append(f"its BF16 is invalid: {invalid[0]}")
    ratio = 2 * row.tflops / (earlier.tflops + later.tflops)
    return replace(
        row,
        ratio=ratio,
        drift=drift,
        baseline=f"{earlier.cell.size} {earlier.cell.label}",
        baseline_size=earlier.cell.size,
        valid=not reasons,
        invalid_because="; ".join(reasons) or None,
    )


def regressions(old: Sequence[CellRow], new: Sequence[CellRow]) -> list[str]:
    """What the new rows lost against the old: valid cells, ratios by more than MOST_LOSS;
    everything, if none is in both."""
    new_rows = newest(new)
    lines = []
    n_compared = 0
    for key, row in newest(old).items():
        new_row = new_rows.get(key)
        if new_row is None or not row.valid:
            continue
        if not new_row.valid:
            lines.append(f"{key}: valid before, now {new_row.remark}")
        ratios = [timed.ratio for timed in (row, new_row) if isinstance(timed, TimedRow)]
        if len(ratios) == 2 and ratios[0] and ratios[1]:
            n_compared += 1
            lines += _lost_ratio(key, ratios[0], ratios[1])
    if not lines and not n_compared:
        return ["no ratio is in both files: nothing was compared"]
    return lines


def _lost_ratio(key: tuple, ratio: float, new_ratio: float) -> list[str]:
    if new_ratio >= ratio * (1 - MOST_LOSS):
        return []
    return [f"{key}: {ratio:.3f} before, {new_ratio:.3f} now ({new_ratio / ratio - 1:+.1%})"]
