"""The part of docs/schemas.md on what the commands of bench/ write, made of their dataclasses.

A test compares the page with schema_page()."""

from bench.borrowed import BorrowedRow
from bench.cells import Cell
from bench.outcomes import TestOutcome
from bench.rows import GROUPS, SCHEMA_VERSION, CellFailure, Measurement, Provenance, TimedRow
from bench.trainings import TrainingRow
from lib.schema import schema_section, schema_table

# Title -> the dataclass whose fields are keys of a row of bench.throughput.
ROW_TABLES: dict[str, type] = {
    "The cell": Cell,
    "The call": Provenance,
    "Of a cell that was timed, what its process measured": Measurement,
    "Of a cell that was timed, what follows from it; of each, `wall_s`": TimedRow,
    "Of a cell that failed": CellFailure,
}
SECTIONS: dict[str, type] = {
    "trainings.jsonl of bench.trainings and of suite=fourway, each line": TrainingRow,
    "borrowed.jsonl of bench.borrowed, each line": BorrowedRow,
    "outcomes.jsonl of bench.borrowed's tests, each line": TestOutcome,
}


def schema_page() -> str:
    head = (
        "# What the commands of bench/ write\n\nMade of the comments in the dataclasses that"
        " `bench/schemas.py` names; a test compares the two.\n"
    )
    sections = [schema_section(cls, title) for title, cls in SECTIONS.items()]
    return "\n".join([head, _rows_section(), *sections])


def _rows_section() -> str:
    """Of a row of bench.throughput and bench.peers, which is made of several dataclasses."""
    parts = [
        "## bench/results/*.jsonl of bench.throughput and bench.peers, each line",
        f"`schema_version` is {SCHEMA_VERSION}. `cell` is size/label, `label` the precision in"
        " words: `bf16`, or a recipe and its settings as in FP8Config.label, either with"
        " `+documents`; a peer's name. Lines of version 1, or of none, have no `fp8`,"
        " `document_mask`, `peer_name`, `peer_precision` and `baseline_size`: their reader takes"
        " these from `label` and `baseline`.",
    ]
    for title, cls in ROW_TABLES.items():
        parts += [f"{title}:", schema_table(cls, without=GROUPS)]
    return "\n\n".join(parts) + "\n"
