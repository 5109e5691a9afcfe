"""A row of bench.throughput and bench.peers, which is a line of bench/results/*.jsonl: types, one
writer and one reader.

docs/schemas.md is made of the comments here."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from bench.cells import DOCUMENTS, Cell, cell_from, precision_named
from fp8.recipes import FP8Config
from lib.errors import UserError
from lib.files import read_rows, to_line

SCHEMA_VERSION = 2  # of a row without one: 1

Kernel = tuple[str, float]  # name, milliseconds
Fields = TypeVar("Fields")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What all rows of a call share."""

    run: str  # when the call began, UTC, ISO 8601
    command: str  # the call
    gpu: str | None  # name of the GPU; null on a CPU
    driver: str | None  # version of NVIDIA's driver
    power_limit_w: float | None  # of the GPU, W
    torch: str  # its version
    torchao: str | None  # its version
    triton: str | None  # its version
    cuda: str | None  # version that torch was built for
    cudnn: int | str | None  # its version
    python: str  # its version
    commit: str | None  # of the tree that ran
    dirty: bool | None  # whether that tree had changes; null where git does not tell


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the process of a cell answers."""

    flops_per_token: int  # 6 a matmul parameter + 12 L H D T, no causal discount
    params_total: int  # all parameters
    params_matmul: int  # of every Linear, the head once
    # seconds of each timed optimizer step: accumulation, clip, AdamW, host read
    steps_s: list[float]
    compile_s: float  # the first update over the median of the next ones, seconds
    peak_gib: float | None = None  # most memory of tensors; null on a CPU
    reserved_gib: float | None = None  # most memory of the allocator; null on a CPU
    # of the updates on one batch, before each; null for infinite and NaN
    losses: list[float | None]
    gradient_norms: dict[str, float | None]  # L2 by kind of parameter, of the first update
    graph_breaks: int  # 0 in a good row
    recompiles: int  # 0 in a good row
    # the longest kernels of a micro-step: name, milliseconds; null on a CPU
    kernels: list[Kernel] | None = None
    # under load: SM MHz, W, degrees C, NVML's reasons for a lower clock as bits; null on a CPU
    clocks: dict[str, float | None] | None = None


@dataclass(frozen=True, kw_only=True)
class CellFailure:
    """What is said of a cell that has no numbers."""

    failure: str  # why, in words
    oom: bool | None = None  # whether for want of memory; null where that is not known


@dataclass(frozen=True, kw_only=True)
class RowHead:
    """What every row has."""

    cell: Cell
    provenance: Provenance
    wall_s: float  # seconds of the whole cell


@dataclass(frozen=True, kw_only=True)
class FailedRow(RowHead):
    """The row of a cell that failed."""

    failure: CellFailure

    @property
    def valid(self) -> bool:
        return False

    @property
    def is_final(self) -> bool:
        """Whether the cell needs no other row."""
        return True

    @property
    def compared_size(self) -> str:
        """The size of ours that the row belongs to, or the peer's model itself."""
        return self.cell.size

    @property
    def remark(self) -> str | None:
        """Why the row does not count."""
        return self.failure.failure


@dataclass(frozen=True, kw_only=True)
class TimedRow(RowHead):
    """The row of a cell that was timed."""

    measured: Measurement
    step_ms: float  # mean of steps_s, milliseconds
    tok_per_s: float  # tokens per second at the mean
    tflops: float  # 10^12 flops_per_token a second at the mean
    mfu_bf16: float | None  # share of the dense BF16 peak, whatever the precision
    attention_kernel: str | None  # name of the longest kernel of attention
    loss_difference: float | None  # the largest distance of a loss from BF16's
    # tflops over the mean of the BF16 cells before and after it; null until the second is there,
    # when the row is written again
    ratio: float | None = None
    baseline: str | None = None  # size and label of these BF16 cells
    baseline_size: str | None = None  # their size
    drift: float | None = None  # the second BF16 cell's speed over the first one's, minus 1
    # whether the row counts: finite falling losses near BF16's, gradient norms within 15 %, no
    # recompilation, a fit attention, no thermal slowdown, little drift
    valid: bool = False
    invalid_because: str | None = None  # why not

    @property
    def is_final(self) -> bool:
        """Whether the cell needs no other row."""
        return self.ratio is not None

    @property
    def compared_size(self) -> str:
        """The size of ours that the row belongs to; a peer's model until it is compared."""
        return self.baseline_size or self.cell.size

    @property
    def remark(self) -> str | None:
        """Why the row does not count."""
        return self.invalid_because


CellRow = TimedRow | FailedRow

# ------------------------------------------------------------------------------------------ writer

# fields of a row whose own fields are keys of a line
GROUPS = ("cell", "provenance", "measured")
# keys of a TimedRow that the line of a FailedRow has, too
_COMPARISON = ("ratio", "baseline", "baseline_size", "drift", "valid", "invalid_because")


def row_line(row: CellRow) -> bytes:
    """The row as a line of its file."""
    cell = {"cell": row.cell.name, "label": row.cell.label, **asdict(row.cell)}
    values = {
        "schema_version": SCHEMA_VERSION,
        **cell,
        **asdict(row.provenance),
        "wall_s": row.wall_s,
    }
    if isinstance(row, FailedRow):
        values |= dict.fromkeys(_COMPARISON) | {"valid": False}
        return to_line(values | asdict(row.failure))
    values |= asdict(row.measured)
    return to_line(values | {name: getattr(row, name) for name in _own_names(TimedRow)})


def _own_names(cls: type) -> list[str]:
    """The fields that are keys of a line themselves."""
    return [f.name for f in fields(cls) if f.name not in GROUPS]


# ------------------------------------------------------------------------------------------ reader


def rows_of(path: Path) -> list[CellRow]:
    """The rows of a file. Raises UserError where there is no such file, or a row is of another
    schema_version or incomplete."""
    if not path.is_file():
        raise UserError(f"there is no {path}: give a file that this benchmark has written")
    rows = []
    for number, values in enumerate(read_rows(path), 1):
        try:
            rows.append(_row_from(values))
        except UserError as error:
            raise UserError(f"{path}, row {number}, {error}") from error
    return rows


def timed_rows_of(path: Path) -> list[TimedRow]:
    """The rows of a file without those of cells that failed. Raises UserError as rows_of()."""
    return [row for row in rows_of(path) if isinstance(row, TimedRow)]


def answer_from(values: Mapping[str, Any]) -> Measurement | CellFailure:
    """What the process of a cell has answered. Raises UserError for values that are neither."""
    if "failure" in values:
        return _made(CellFailure, values)
    kernels = values.get("kernels")
    if kernels is None:
        return _made(Measurement, values)
    return _made(Measurement, {**values, "kernels": [(name, ms) for name, ms in kernels]})


def _row_from(values: Mapping[str, Any]) -> CellRow:
    version = values.get("schema_version", 1)
    if version == 1:
        values = _from_version_1(values)
    elif version != SCHEMA_VERSION:
        raise UserError(
            f"is of schema_version={version!r}, and this code reads 1 and {SCHEMA_VERSION}: read it"
            " with the code that wrote it"
        )
    _check_keys([f.name for f in fields(Cell)], values)
    settings = values["fp8"]
    if not isinstance(settings, dict) or not settings.keys() <= {f.name for f in fields(FP8Config)}:
        raise UserError(f"has fp8={settings!r}, where keys of section fp8 were expected")
    head = {
        "cell": cell_from({f.name: values[f.name] for f in fields(Cell)}),
        "provenance": _made(Provenance, values),
    }
    answer = answer_from(values)
    if isinstance(answer, CellFailure):
        return _made(FailedRow, {**values, **head, "failure": answer})
    return _made(TimedRow, {**values, **head, "measured": answer})


def _made(cls: type[Fields], values: Mapping[str, Any]) -> Fields:
    """The dataclass of those `values` that are its fields. Raises UserError where one lacks."""
    all_fields = fields(cls)  # type: ignore[arg-type]
    _check_keys([f.name for f in all_fields if f.default is MISSING], values)
    return cls(**{f.name: values[f.name] for f in all_fields if f.name in values})


def _check_keys(names: Iterable[str], values: Mapping[str, Any]) -> None:
    for name in names:
        if name not in values:
            raise UserError(f"lacks {name!r}, which a row of bench.throughput has")


def _from_version_1(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row of schema_version 1, or of none, by the keys of version 2: what is new is in the texts
    `label` and `baseline`.

    label: a recipe with settings as FP8Config.label has them, then +documents or nothing; of a
    peer its name, then _bf16, _fp8 or nothing. baseline: a size, a space, a label."""
    label = str(values.get("label", ""))
    baseline = values.get("baseline")
    new: dict[str, Any] = {
        "baseline_size": None if baseline is None else baseline.split(" ")[0],
        "document_mask": label.endswith(DOCUMENTS),
        "fp8": {},
        "peer_name": None,
        "peer_precision": None,
    }
    if values.get("peer") is not None:
        peer_name, _, peer_precision = label.partition("_")
        new |= {"peer_name": peer_name, "peer_precision": peer_precision or None}
    elif label:
        new["fp8"] = asdict(precision_named(label.removesuffix(DOCUMENTS)))
    return {**values, **new}
