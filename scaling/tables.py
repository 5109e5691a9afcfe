"""Read a table of published points or of someone's runs: delimited text, or a chart exported from
Weights & Biases.

Nothing is guessed about numbers: cells stay text, stripped. What is recognised is the layout alone:
the separator (comma, tab, semicolon, else spaces), and W&B's chart export, which has one column for
each run."""

import csv
import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.text import nearest

STEP_COLUMNS = (
    "Step",
    "step",
    "_step",
    "global_step",
    "trainer/global_step",
    "Relative Time (Process)",
)
CHART_COLUMN = re.compile(r"(?P<run>.+) - (?P<metric>.+?)(?P<bound>__MIN|__MAX)?")
RUN = "run"  # the column that a chart export gets for its runs' names
NAME_COLUMNS = ("run", "Run", "Name", "name", "run_id")  # of a table that describes runs
# at the largest run of a table, below which its unit is doubted
FEWEST_PARAMETERS, FEWEST_TOKENS = 5_000, 50_000
USUAL_RATIOS = 0.05, 100_000.0  # tokens per parameter


@dataclass(frozen=True)
class Table:
    """The rows of one file that are not blank."""

    header: list[str]
    rows: dict[int | str, dict[str, str]]  # line number, or run of a chart export -> {column: cell}
    sha256: str  # of the file's bytes
    # what a reader should know about how it was read
    notes: list[str] = field(default_factory=list)
    is_chart: bool = False  # a chart export: a row is a run, with its last value


def read_table(path: Path, wanted=()) -> Table:
    """The table in a UTF-8 file with one header line; `wanted`: columns that must be there once.
    Raises UserError."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): give one table as UTF-8 text, such as a .csv"
        ) from None
    header, numbered = _cells(path, lines)
    sha256 = hashlib.sha256(content).hexdigest()
    metrics = _chart_metrics(header)
    if metrics:
        table = _chart(path, header, numbered, metrics, sha256)
        hint = (
            f"; the chart holds {RUN}, {', '.join(table.header[1:])}: give the others by --runs"
            " TABLE"
        )
    else:
        rows: dict[int | str, dict[str, str]] = {}
        rows |= {line: dict(zip(header, cells, strict=True)) for line, cells in numbered}
        table, hint = Table(header, rows, sha256), ""
    for name in wanted:
        count = table.header.count(name)
        if count != 1:
            near = nearest(name, table.header) if count == 0 and not hint else ""
            raise UserError(f"{path} has {count} columns called {name!r}{near}{hint}")
    return table


def joined(table: Table, path: Path, runs_path: Path) -> Table:
    """`table` with the columns of a second one, which has a row for each run named in the first's
    column "run"."""
    if RUN not in table.header:
        raise UserError(
            f"runs={runs_path}: {path} has no column {RUN!r} by which its rows name their run"
        )
    described = read_table(runs_path)
    name_column = next((name for name in NAME_COLUMNS if name in described.header), None)
    if name_column is None:
        raise UserError(
            f"{runs_path} has no column that names runs (one of {', '.join(NAME_COLUMNS)})"
        )
    names = Counter(row[name_column] for row in described.rows.values())
    by_name = {row[name_column]: row for row in described.rows.values()}
    for row in table.rows.values():
        name = row[RUN]
        if names[name] != 1:
            raise UserError(
                f"{runs_path} has {names[name]} rows for the run {name!r} of {path}; expected one"
            )
    more = [name for name in described.header if name not in table.header and name]
    rows = {
        line: row | {name: by_name[row[RUN]][name] for name in more}
        for line, row in table.rows.items()
    }
    return Table(table.header + more, rows, table.sha256, table.notes, table.is_chart)


def _cells(path: Path, lines: list[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """(the header, the stripped cells of each other line that is not blank with its number)."""
    first = next((line for line in lines if line.strip()), "")
    separator = max(",\t;", key=first.count)
    is_spaced = separator not in first and " " in first.strip()
    if is_spaced:
        separator = " "
        lines = [line.strip() for line in lines]
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=is_spaced, strict=True)
    rows = []
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped):
                rows.append((reader.line_num, stripped))
    except csv.Error as error:  # else the rest of the table would be one cell
        raise UserError(
            f"{path} line {reader.line_num}: {error}: is a quotation mark left open?"
        ) from None
    header = rows.pop(0)[1] if rows else []
    if is_spaced and rows and all(len(cells) == len(header) + 1 for _, cells in rows):
        header = ["", *header]  # as R and pandas print: the rows' names have no header
    for line, cells in rows:
        if len(cells) != len(header):
            remedy = "repair the line"
            if is_spaced:
                remedy = (
                    "the table is separated by spaces: quote names that hold one, or use commas"
                )
            raise UserError(
                f"{path} line {line}: {len(cells)} cells where the header has {len(header)};"
                f" {remedy}"
            )
    return header, rows


def _chart_metrics(header: list[str]) -> list[str]:
    """The metrics of a W&B chart export, whose columns but the first are all "RUN - METRIC"; [] for
    another table."""
    if len(header) < 2:
        return []
    found = [CHART_COLUMN.fullmatch(name) for name in header[1:]]
    matches = [match for match in found if match is not None]
    if len(matches) < len(found):
        return []
    has_bounds = any(match["bound"] for match in matches)
    if not has_bounds and header[0] not in STEP_COLUMNS:
        return []  # a table whose names hold a dash
    return list(dict.fromkeys(match["metric"] for match in matches))


def _chart(path: Path, header, numbered, metrics: list[str], sha256: str) -> Table:
    """A row for each run: its last value of each metric, and the first column's value in that
    line."""
    axis = header[0]
    rows: dict[int | str, dict[str, str]] = {}
    for column, name in enumerate(header[1:], 1):
        match = CHART_COLUMN.fullmatch(name)
        if match is None or match["bound"]:  # the band of a smoothed line
            continue
        row = rows.setdefault(
            match["run"], {RUN: match["run"], axis: "", **dict.fromkeys(metrics, "")}
        )
        if row[match["metric"]]:
            raise UserError(f"{path} has two columns called {name!r}")
        filled = [cells for _, cells in numbered if cells[column]]
        if filled:
            row[match["metric"]] = filled[-1][column]
            row[axis] = max(row[axis], filled[-1][0], key=_position)
    notes = [
        f"{path.name} is a chart with a column for each run: each of its {len(rows)} runs counts "
        f"with its last {' and '.join(metrics)}"
    ]
    return Table([RUN, axis, *metrics], rows, sha256, notes, True)


def _position(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return -1.0


def unit_doubts(N, D, name: str) -> list[str]:
    """Lines that doubt the unit of the counts: nobody trains so few parameters, or on so few
    tokens. D: None where unknown."""
    doubts = []
    if N.max() < FEWEST_PARAMETERS:
        doubts.append(f"N is at most {N.max():.4g} parameters: is it in millions or billions?")
    if D is not None:
        ratio = D / N
        if D.max() < FEWEST_TOKENS:
            doubts.append(f"D is at most {D.max():.4g} tokens: is it in millions or billions?")
        middle = float(np.median(ratio))  # the first points of a curve may lie at next to no tokens
        if not USUAL_RATIOS[0] <= middle <= USUAL_RATIOS[1]:
            doubts.append(
                f"{middle:.3g} tokens per parameter in the middle of its points: do N and D have"
                " the same unit?"
            )
    return [f"{name}: {doubt} Give counts such as 1.24e8; nothing is converted" for doubt in doubts]
