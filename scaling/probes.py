"""Read what a run's probes saw of its FP8 tensors into checked arrays."""

import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.cli import UserError
from scaling.records import LARGEST, read_text

OPERANDS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}
SCALES, SHARES = ("scale_min", "scale", "scale_max"), ("underflow", "saturated")
OUTLIERS = ("attention_logit_max", "swiglu_amax", "swiglu_rms")
KINDS = ("qkv", "out", "gate_up", "down", "head")
LAYER = re.compile(r"(?:layers\.(\d{1,6})\.)?[\w.]{1,80}", re.ASCII)


@dataclass(frozen=True)
class Probe:
    """The rows of one probe file as arrays, NaN where no number was written."""

    recipe: str                                 # of the Linears; several joined by "+"
    layers: list[str]                           # in order of depth, the head last
    steps: np.ndarray                           # (steps,) at which Linears were probed
    last: int                                   # index of the last step that has every layer; of a cut-off file, too
    linear: dict[tuple[str, str], np.ndarray]   # (operand, field) -> (layers, steps)
    blocks: list[int]
    block_steps: np.ndarray
    block: dict[str, np.ndarray]                # field -> (blocks, steps)


def read_probe(path: Path) -> tuple[Probe, list[str]]:
    """One probe file, plus a line if some of its lines are no JSON; of a step that is there twice the last one counts.

    Where only its .gz is there, that is read. Raises UserError naming the line where a row is not what a probe writes, or
    where there is no row at all."""
    linear, block, recipes, torn = {}, {}, {}, []
    for n, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            torn.append(n)              # a run that was killed leaves half a line; its resume writes the step again
            continue
        at = f"{path}, line {n}"
        kind = row.get("kind") if isinstance(row, dict) else None
        if kind not in ("linear", "block"):
            raise UserError(f"{at}: kind is {_shown(kind)}; expected a row of kind linear or block")
        step = _whole(at, row, "step")
        if kind == "block":
            block[_whole(at, row, "block"), step] = [_number(at, row, key, -LARGEST) for key in OUTLIERS]
            continue
        layer = row.get("layer")
        if not isinstance(layer, str) or not LAYER.fullmatch(layer):
            raise UserError(f"{at}: layer is {_shown(layer)}; expected a Linear's name such as layers.0.attn.qkv")
        if not isinstance(row.get("recipe"), str):
            raise UserError(f"{at}: recipe is {_shown(row.get('recipe'))}; expected a recipe's name")
        recipes[layer] = row["recipe"]
        linear[layer, step] = [number for operand in OPERANDS for number in _operand(at, row, operand)]
    if not linear and not block:
        raise UserError(f"{path} holds no row: the run was stopped before its first probe; lower probe.every")
    layers, steps, values = _grid(linear, lambda layer: (*place(layer), layer))
    blocks, block_steps, outliers = _grid(block, lambda block: block)
    count = [sum((layer, step) in linear for layer in layers) for step in steps.tolist()]
    last = max(i for i, n in enumerate(count) if n == max(count)) if layers else 0
    fields = itertools.product(OPERANDS, (*SCALES, *SHARES, "error"))
    notes = [f"{path}: skipped what is no JSON (cut off while written): line {', '.join(map(str, torn))}"] if torn else []
    return Probe("+".join(sorted(set(recipes.values()))), layers, steps, last, dict(zip(fields, values, strict=False)),
                 blocks, block_steps, dict(zip(OUTLIERS, outliers, strict=False))), notes


def _operand(at: str, row: dict, name: str) -> list[float]:
    """The fields of one operand; all NaN for the gradient of an inference row."""
    if row.get(name) is None and name == "gradient":
        return [math.nan] * (len(SCALES) + len(SHARES) + 1)
    if not isinstance(row.get(name), dict):
        raise UserError(f"{at}: {name} is {_shown(row.get(name))}; expected an object with amax, scale, underflow, ...")
    at = f"{at}: {name}"
    _number(at, row[name], "amax")
    return ([_number(at, row[name], key) for key in SCALES] + [_number(at, row[name], key, high=1) for key in SHARES]
            + [_number(at, row[name], "error")])


def _number(at: str, holder: dict, key: str, low: float = 0, high: float = LARGEST) -> float:
    value = holder.get(key, "missing")
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high * (1 + 1e-6):
        wanted = "a number" if low < 0 else "a share from 0 to 1" if high == 1 else "a number, at least 0"
        raise UserError(f"{at}: {key} is {_shown(value)}; expected {wanted}, or null where it is not finite")
    return float(value)


def _whole(at: str, row: dict, key: str) -> int:
    value = row.get(key, "missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise UserError(f"{at}: {key} is {_shown(value)}; expected a whole number, at least 0")
    return value


def _shown(value) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


def _grid(rows: dict, order) -> tuple[list, np.ndarray, np.ndarray]:
    """{(key, step): numbers} as keys in order, steps, and one (keys, steps) array for each number."""
    keys, steps = sorted({key for key, _ in rows}, key=order), sorted({step for _, step in rows})
    values = np.full((len(next(iter(rows.values()), ())), len(keys), len(steps)), math.nan)
    row_of, column_of = ({key: i for i, key in enumerate(names)} for names in (keys, steps))
    for (key, step), numbers in rows.items():
        values[:, row_of[key], column_of[step]] = numbers
    return keys, np.array(steps), values


def place(layer: str) -> tuple[float, int, str]:
    """Block index (infinite outside the blocks), rank of the kind within the block, kind."""
    block, kind = LAYER.fullmatch(layer)[1], layer.rsplit(".", 1)[-1]
    return int(block) if block else math.inf, KINDS.index(kind) if kind in KINDS else len(KINDS), kind


def kinds_of(layers) -> dict[str, np.ndarray]:
    """Kind of Linear -> indices of its layers."""
    kinds = [place(layer)[1:] for layer in layers]
    return {name: np.array([i for i, kind in enumerate(kinds) if kind == (rank, name)]) for rank, name in sorted(set(kinds))}


def table(probe: Probe) -> str:
    """Markdown table of the worst underflow and saturation (any layer, any step) of each kind and operand."""
    lines = [f"| Linear | operand | worst underflow % | worst saturated % | median error % at step {probe.steps[probe.last]} |",
             "|---" * 5 + "|"]
    for (kind, rows), operand in itertools.product(kinds_of(probe.layers).items(), OPERANDS):
        shares = [probe.linear[operand, field][rows] for field in SHARES]
        errors = quantiles(probe.linear[operand, "error"][rows][:, [probe.last]], 50)[0]
        cells = [100 * v for v in (*(np.fmax.reduce(share, axis=None) for share in shares), errors[0])]
        lines.append(f"| {kind} | {operand} | " + " | ".join("-" if math.isnan(v) else f"{v:.3g}" for v in cells) + " |")
    return "\n".join(lines)


def quantiles(values: np.ndarray, *percents: float) -> np.ndarray:
    """(percents, columns) over the finite rows of each column; NaN where a column has none."""
    return np.array([np.percentile(v, percents) if len(v := column[np.isfinite(column)]) else [math.nan] * len(percents)
                     for column in values.T]).T
