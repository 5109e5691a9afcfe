"""A row of probe.jsonl, of a run or of eval.precision: types, one writer and one reader.

docs/schemas.md is made of the comments here."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lib.errors import UserError
from lib.files import read_rows
from lib.schema import schema_table

SCHEMA_VERSION = 1  # rows without one are older and have the same keys


@dataclass(frozen=True)
class Statistics:
    """What FP8 does to one tensor; NaN and infinity are written as null."""

    amax: float  # largest magnitude
    scale_min: float  # smallest, median and largest scale
    scale: float
    scale_max: float
    underflow: float  # share of the values that are not zero and become zero
    saturated: float  # share of the values beyond the format's largest after scaling
    error: float  # ||Q(x) - x|| / ||x||
    kurtosis: float  # mean of x^4 over the square of that of x^2: 1 of equal magnitudes, 3 normal


@dataclass(frozen=True)
class LinearRow:
    """A row of probe.jsonl about a converted Linear. An operand that was not seen has no key."""

    kind: Literal["linear"]
    step: int  # optimizer step
    layer: str  # its name, such as layers.0.attn.qkv
    recipe: str  # its name
    schema_version: int = SCHEMA_VERSION  # of this list of keys
    # of eval.precision, what it was asked for: the recipe or "auto"; absent in a run's own probe
    evaluated_in: str | None = None
    weight: Statistics | None = None  # operands of y = x w'
    activation: Statistics | None = None
    gradient: Statistics | None = None  # of the output, as the input gradient's operand
    # signal-to-quantisation-noise ratio [dB] of each matmul's result, 10 log10(||y||^2 /
    # ||y_fp8 - y||^2), y in fp32: of x w', and with a backward pass of g w and of g' x
    output_sqnr: float | None = None
    input_grad_sqnr: float | None = None
    weight_grad_sqnr: float | None = None


@dataclass(frozen=True)
class BlockRow:
    """A row of probe.jsonl about a block."""

    kind: Literal["block"]
    step: int  # optimizer step
    block: int  # its number, from the input
    attention_logit_max: float  # largest q k / sqrt(D) of the first sequence
    swiglu_amax: float  # largest magnitude of SwiGLU's output
    swiglu_rms: float  # its root mean square
    schema_version: int = SCHEMA_VERSION  # of this list of keys


OPERANDS = "weight", "activation", "gradient"
STATISTICS = tuple(field.name for field in fields(Statistics))
MATMULS = "output_sqnr", "input_grad_sqnr", "weight_grad_sqnr"
BLOCK_NUMBERS = "attention_logit_max", "swiglu_amax", "swiglu_rms"
SECTIONS: dict[str, type] = {
    "probe.jsonl: a Linear": LinearRow,
    "probe.jsonl: `weight`, `activation` and `gradient`": Statistics,
    "probe.jsonl: a block": BlockRow,
}


def content_of(row: LinearRow | BlockRow) -> dict[str, Any]:
    """A row as it is written: without the operands and matmuls that were not seen."""
    return {key: value for key, value in asdict(row).items() if value is not None}


def read_probe_rows(path: Path) -> list[LinearRow | BlockRow]:
    """The rows of a file; numbers are None where null was written. Raises UserError naming the
    file and the row that is damaged or of another schema_version."""
    rows = []
    for content in read_rows(path):
        try:
            rows.append(_row_of(content))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: {json.dumps(content)[:80]} is no row of a probe ({type(error).__name__}:"
                f" {error})"
            ) from None
    return rows


def _row_of(content: dict[str, Any]) -> LinearRow | BlockRow:
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version}, not {SCHEMA_VERSION}")
    step = int(content["step"])
    if content["kind"] == "block":
        numbers = {key: content[key] for key in BLOCK_NUMBERS}
        return BlockRow("block", step, int(content["block"]), **numbers)
    operands: dict[str, Any] = {
        name: _statistics_of(content[name]) for name in ("weight", "activation")
    }
    gradient = content.get("gradient")
    if gradient:  # a forward pass has none
        operands["gradient"] = _statistics_of(gradient)
    matmuls: dict[str, Any] = {name: content.get(name) for name in MATMULS}
    return LinearRow(
        "linear",
        step,
        content["layer"],
        content["recipe"],
        evaluated_in=content.get("evaluated_in"),
        **operands,
        **matmuls,
    )


def _statistics_of(content: dict[str, Any]) -> Statistics:
    """Older rows lack the newer numbers."""
    numbers: dict[str, Any] = {name: content.get(name) for name in STATISTICS}
    return Statistics(**numbers)


def schema_section() -> str:
    """The part of docs/schemas.md on probes."""
    parts = [
        "# What a probe writes\n\nprobe.jsonl of a run (`probe.every`) and eval/probe_RECIPE.jsonl"
        " of `eval.precision`. Made of the comments in `fp8/probe_rows.py`; a test compares the"
        " two.\n"
    ]
    for title, cls in SECTIONS.items():
        parts.append(f"## {title}\n\n{schema_table(cls)}\n")
    return "\n".join(parts)
