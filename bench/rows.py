"""A row of bench.throughput and bench.peers: what a line of bench/results/*.jsonl holds.

docs/schemas.md is made of the comments here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.errors import UserError
from lib.files import read_rows
from lib.schema import schema_table

SCHEMA_VERSION = 1  # rows without one are older and have the same keys


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell, complete in itself. The keys from flops_per_token to loss_difference are absent
    where the cell failed."""

    schema_version: int = SCHEMA_VERSION  # of this list of keys
    cell: str  # size/label
    run: str  # when the call that made it began, UTC, ISO 8601
    command: str  # the call
    wall_s: float  # seconds of the whole cell
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
    size: str  # 125m .. 1p5b, or a peer's model
    # bf16, or fp8.recipe with +kernels, +delayed or +bounded, +head, +fast_backward;
    # either with +documents; a peer's name
    label: str
    T: int  # context length, in tokens
    micro_batch: int  # sequences
    tokens_per_step: int  # training tokens of an optimizer step
    device: str  # "cuda" or "cpu"
    model: dict  # keys that differ from the size's config, or a peer's own
    peer: str | None  # folder of the peer's checkout
    flops_per_token: int | None = None  # 6 a matmul parameter + 12 L H D T, no causal discount
    params_total: int | None = None  # all parameters
    params_matmul: int | None = None  # of every Linear, the head once
    # seconds of each timed optimizer step: accumulation, clip, AdamW, host read
    steps_s: list[float] | None = None
    step_ms: float | None = None  # mean of steps_s, milliseconds
    tok_per_s: float | None = None  # tokens per second at the mean
    tflops: float | None = None  # 10^12 flops_per_token a second at the mean
    mfu_bf16: float | None = None  # share of the dense BF16 peak, whatever the precision
    # tflops over the mean of the BF16 cells before and after it; null until the second is there,
    # when the row is written again
    ratio: float | None = None
    baseline: str | None = None  # size and label of these BF16 cells
    drift: float | None = None  # the second BF16 cell's speed over the first one's, minus 1
    compile_s: float | None = None  # the first update over the median of the next ones, seconds
    peak_gib: float | None = None  # most memory of tensors
    reserved_gib: float | None = None  # most memory of the allocator
    losses: list[float] | None = None  # of the updates on one batch, before each
    gradient_norms: dict[str, float] | None = None  # L2 by kind of parameter, of the first update
    loss_difference: float | None = None  # the largest distance of a loss from BF16's
    graph_breaks: int | None = None  # 0 in a good row
    recompiles: int | None = None  # 0 in a good row
    attention_kernel: str | None = None  # name of the longest kernel of attention
    kernels: list[tuple[str, float]] | None = (
        None  # the longest kernels of a micro-step: name, milliseconds
    )
    # under load: SM MHz, W, degrees C, NVML's reasons for a lower clock as bits
    clocks: dict[str, float | None] | None = None
    # whether the row counts: finite falling losses near BF16's, gradient norms within 15 %, no
    # recompilation, a fit attention, no thermal slowdown, little drift
    valid: bool = False
    invalid_because: str | None = None  # why not
    failure: str | None = None  # instead of all numbers, where a cell failed
    oom: bool | None = None  # whether it failed for want of memory


def rows_of(path: Path) -> list[dict]:
    """The rows of a file, by Row's keys. Raises UserError where there is no such file, or a row is
    of another schema_version."""
    if not path.is_file():
        raise UserError(f"there is no {path}: give a file that this benchmark has written")
    rows = read_rows(path)
    _check_versions(path, rows)
    return rows


def _check_versions(path: Path, rows: Sequence[dict]) -> None:
    for number, row in enumerate(rows, 1):
        version = row.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{path}, row {number}, is of schema_version={version!r}, and this code reads"
                f" {SCHEMA_VERSION}: read it with the code that wrote it"
            )


def schema_section() -> str:
    """The part of docs/schemas.md on bench/'s rows."""
    return (
        "# What bench.throughput and bench.peers write\n\nMade of the comments in `bench/rows.py`;"
        " a test compares the two.\n\n## bench/results/*.jsonl, each line\n\n"
        f"{schema_table(Row)}\n"
    )
