"""Read probe.jsonl of a run, what FP8 did inside it, as arrays."""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8.probe_rows import BlockRow, LinearRow, read_probe_rows
from lib.errors import UserError
from lib.text import grid
from scaling.histories import NOTHING, to_number

OPERANDS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
SCALES, SHARES = ("scale_min", "scale", "scale_max"), ("underflow", "saturated")
PROBED = (*SCALES, *SHARES, "error", "kurtosis")
MATMULS = {
    "output_sqnr": "output",
    "input_grad_sqnr": "input gradient",
    "weight_grad_sqnr": "weight gradient",
}
OUTLIERS = ("attention_logit_max", "swiglu_amax", "swiglu_rms")
KINDS = ("qkv", "out", "gate_up", "down", "head")


@dataclass(frozen=True)
class ProbeRecord:
    """The rows of one probe file as arrays, NaN where no number was written."""

    recipe: str  # of the Linears, for people; several joined by "+"
    evaluated_in: str  # of eval.precision: the recipe that it was asked for
    steps: np.ndarray
    layers: list[str]  # in order of depth, the head last
    linear: dict[tuple[str, str], np.ndarray]  # (operand, field of PROBED) -> (layers, steps)
    matmul: dict[str, np.ndarray]  # field of MATMULS -> (layers, steps)
    last: int  # index of the last step that has every layer; of a cut-off file, too
    blocks: list[int]
    block: dict[str, np.ndarray]  # field of OUTLIERS -> (blocks, steps)


def read_probe(path: Path) -> ProbeRecord:
    """One probe file; of a step that is there twice the last one counts. Raises UserError where it
    is empty or damaged."""
    rows = read_probe_rows(path)
    linear_rows = [row for row in rows if isinstance(row, LinearRow)]
    block_rows = [row for row in rows if isinstance(row, BlockRow)]
    linear = {(row.layer, row.step): _probed_numbers(row) for row in linear_rows}
    matmul = {(row.layer, row.step): _numbers(row, MATMULS) for row in linear_rows}
    block = {(row.block, row.step): _numbers(row, OUTLIERS) for row in block_rows}
    if not rows:
        raise UserError(NOTHING.format(path))
    layers = sorted({layer for layer, _ in linear}, key=lambda layer: (*depth_of(layer), layer))
    blocks = sorted({number for number, _ in block})
    steps = sorted({row.step for row in rows})
    return ProbeRecord(
        recipe=_recipes_of(linear_rows),
        evaluated_in=_evaluated_in(linear_rows, path),
        steps=np.array(steps),
        layers=layers,
        linear=_by_step(linear, layers, steps, list(itertools.product(OPERANDS, PROBED))),
        matmul=_by_step(matmul, layers, steps, list(MATMULS)),
        last=_last_with_most_layers(linear, steps),
        blocks=blocks,
        block=_by_step(block, blocks, steps, OUTLIERS),
    )


def _recipes_of(rows: Sequence[LinearRow]) -> str:
    return "+".join(sorted({row.recipe for row in rows}))


def _evaluated_in(rows: Sequence[LinearRow], path: Path) -> str:
    """What the rows say; older ones do not, and their file is named after it."""
    names = {row.evaluated_in for row in rows} - {None}
    return "+".join(sorted(map(str, names))) or path.stem.removeprefix("probe_")


def _last_with_most_layers(linear: Mapping[tuple[str, int], Any], steps: Sequence[int]) -> int:
    """Index of the last step that has as many layers as any: a file may be cut off within one."""
    counts = Counter(step for _, step in linear)
    most = max(counts.values(), default=0)
    return max(index for index, step in enumerate(steps) if counts[step] == most)


def _numbers(row: LinearRow | BlockRow, keys: Iterable[str]) -> list[float]:
    return [to_number(getattr(row, key)) for key in keys]


def _probed_numbers(row: LinearRow) -> list[float]:
    """PROBED of each of OPERANDS; a forward pass has no gradient."""
    operands = [row.weight, row.activation, row.gradient]
    return [to_number(getattr(operand, key, None)) for operand in operands for key in PROBED]


def _by_step(rows: Mapping, keys: Sequence, steps: Sequence[int], names: Sequence) -> dict:
    """{(key, step): a number for each of names} as name -> array of shape (keys, steps)."""
    values = np.full((len(names), len(keys), len(steps)), math.nan)
    for (key, step), numbers in rows.items():
        values[:, keys.index(key), steps.index(step)] = numbers
    return dict(zip(names, values, strict=True))


def depth_of(layer: str) -> tuple[float, int, str]:
    """Block index of "layers.0.attn.qkv" (infinite outside the blocks), rank of the kind within the
    block, kind."""
    parts = layer.split(".")
    kind = parts[-1]
    block = int(parts[1]) if parts[0] == "layers" else math.inf
    rank = KINDS.index(kind) if kind in KINDS else len(KINDS)
    return block, rank, kind


def kinds_of(layers: Iterable[str]) -> dict[str, np.ndarray]:
    """Kind -> indices of its layers, in order of the kinds' ranks."""
    kinds = [depth_of(layer)[1:] for layer in layers]
    return {
        kind[1]: np.array(
            [index for index, kind_of_layer in enumerate(kinds) if kind_of_layer == kind]
        )
        for kind in sorted(set(kinds))
    }


def format_worst(probe: ProbeRecord) -> str:
    """Markdown table of the worst underflow and saturation (any layer, any step) of each kind and
    operand."""
    error_head = f"median error % at step {probe.steps[probe.last]}"
    lines = [["Linear", "operand", "worst underflow %", "worst saturated %", error_head]]
    kinds = kinds_of(probe.layers)
    for (kind, rows), operand in itertools.product(kinds.items(), OPERANDS):
        shares = [np.fmax.reduce(probe.linear[operand, share][rows], axis=None) for share in SHARES]
        errors = probe.linear[operand, "error"][rows][:, [probe.last]]
        values = [*shares, quantiles(errors, 50)[0, 0]]
        lines.append([kind, operand, *map(_format_percent, values)])
    return grid(lines)


def _format_percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.3g}"


def quantiles(values: np.ndarray, *percents: float) -> np.ndarray:
    """(percents, columns) over the finite rows of each column; NaN where a column has none."""
    with warnings.catch_warnings(action="ignore"):
        return np.nanpercentile(values, percents, axis=0)
