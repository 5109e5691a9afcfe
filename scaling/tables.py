"""Read a table of published points or of someone's runs: delimited text, or a chart exported from
Weights & Biases.

Nothing is guessed about numbers: cells stay text, stripped. What is recognised is the layout alone:
the separator (comma, tab, semicolon, else spaces), and W&B's chart export, which has one column for
each run."""

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
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
SPACED = "the table is separated by spaces: quote names that hold one, or use commas"
# what a column of losses seems to hold -> words of its name, "_" between them
OTHER_LOSSES = {
    "bits per byte": re.compile(r"(?<![a-z])(bpb|bits_per_byte)(?![a-z])"),
    "bits per character": re.compile(r"(?<![a-z])(bpc|bits_per_char(acter)?)(?![a-z])"),
    "bits per token": re.compile(r"(?<![a-z])bits_per_token(?![a-z])"),
    "perplexities": re.compile(r"(?<![a-z])(ppl|perplexity)(?![a-z])"),
}
# nats per token: ln of 440,000; a guess among all tokens of a vocabulary costs less
HIGHEST_LOSS = 13.0
USUAL_RATIOS = 0.05, 100_000.0  # tokens per parameter


Line = int | str  # of a file, or the run of a chart export
Row = dict[str, str]  # column -> cell


@dataclass(frozen=True)
class Table:
    """The rows of one file that are not blank."""

    header: list[str]
    rows: dict[Line, Row]  # line number, or run of a chart export -> {column: cell}
    sha256: str  # of the file's bytes
    # what a reader should know about how it was read
    notes: list[str] = field(default_factory=list)
    is_chart: bool = False  # a chart export: a row is a run, with its last value


def read_table(path: Path, names: Sequence[str] = ()) -> Table:
    """The table in a UTF-8 file with one header line; `names`: columns that must be there once.
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
    else:
        rows: dict[Line, Row] = {}
        for line, cells in numbered:
            rows[line] = dict(zip(header, cells, strict=True))
        table = Table(header, rows, sha256)
    for name in names:
        _check_column(path, table, name)
    return table


def _check_column(path: Path, table: Table, name: str) -> None:
    """Raise UserError where the table has not one column of this name."""
    count = table.header.count(name)
    if count == 1:
        return
    remedy = ""
    if table.is_chart:
        columns = ", ".join(table.header[1:])
        remedy = f"; the chart holds {RUN}, {columns}: give the others by --runs TABLE"
    elif count == 0:
        remedy = nearest(name, table.header)
    raise UserError(f"{path} has {count} columns called {name!r}{remedy}")


def joined(table: Table, path: Path, runs_path: Path) -> Table:
    """`table` with the columns of a second one, which has a row for each run named in the first's
    column "run"."""
    if RUN not in table.header:
        raise UserError(
            f"runs={runs_path}: {path} has no column {RUN!r} by which its rows name their run"
        )
    described = read_table(runs_path)
    name_column = _name_column(described, runs_path)
    names = Counter(row[name_column] for row in described.rows.values())
    by_name = {row[name_column]: row for row in described.rows.values()}
    new_columns = [name for name in described.header if name not in table.header and name]
    rows: dict[Line, Row] = {}
    for line, row in table.rows.items():
        run = row[RUN]
        if names[run] != 1:
            raise UserError(
                f"{runs_path} has {names[run]} rows for the run {run!r} of {path}; expected one"
            )
        rows[line] = row | {name: by_name[run][name] for name in new_columns}
    return Table(table.header + new_columns, rows, table.sha256, table.notes, table.is_chart)


def _name_column(table: Table, path: Path) -> str:
    """The column that names the runs which a table describes."""
    for name in NAME_COLUMNS:
        if name in table.header:
            return name
    raise UserError(f"{path} has no column that names runs (one of {', '.join(NAME_COLUMNS)})")


def _cells(path: Path, lines: list[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """(the header, the stripped cells of each other line that is not blank with its number)."""
    header_line = next((line for line in lines if line.strip()), "")
    separator = max(",\t;", key=header_line.count)
    is_spaced = separator not in header_line and " " in header_line.strip()
    if is_spaced:
        separator = " "
        lines = [line.strip() for line in lines]
    rows = _split(path, lines, separator)
    header = rows.pop(0)[1] if rows else []
    if is_spaced and rows and all(len(cells) == len(header) + 1 for _, cells in rows):
        header = ["", *header]  # as R and pandas print: the rows' names have no header
    _check_widths(path, header, rows, SPACED if is_spaced else "repair the line")
    return header, rows


def _check_widths(
    path: Path, header: list[str], rows: list[tuple[int, list[str]]], remedy: str
) -> None:
    """Raise UserError where a line has more or fewer cells than the header."""
    for line, cells in rows:
        if len(cells) != len(header):
            raise UserError(
                f"{path} line {line}: {len(cells)} cells where the header has {len(header)};"
                f" {remedy}"
            )


def _split(path: Path, lines: list[str], separator: str) -> list[tuple[int, list[str]]]:
    """The stripped cells of each line that is not blank, with its number."""
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=separator == " ", strict=True)
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
    return rows


def _chart_metrics(header: list[str]) -> list[str]:
    """The metrics of a W&B chart export, whose columns but the first are all "RUN - METRIC"; [] for
    another table."""
    if len(header) < 2:
        return []
    matches = [match for match in map(CHART_COLUMN.fullmatch, header[1:]) if match is not None]
    if len(matches) < len(header) - 1:
        return []
    has_bounds = any(match["bound"] for match in matches)
    if not has_bounds and header[0] not in STEP_COLUMNS:
        return []  # a table whose names hold a dash
    return list(dict.fromkeys(match["metric"] for match in matches))


def _chart(
    path: Path,
    header: list[str],
    numbered: list[tuple[int, list[str]]],
    metrics: list[str],
    sha256: str,
) -> Table:
    """A row for each run: its last value of each metric, and the first column's value in that
    line."""
    axis = header[0]
    rows: dict[Line, Row] = {}
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


def unit_doubts(N: np.ndarray, D: np.ndarray | None, name: str) -> list[str]:
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


def loss_doubts(losses: np.ndarray, column: str, name: str) -> list[str]:
    """A line where losses seem to be no nats per token, by the words of their column's name or by
    their middle."""
    words = re.sub(r"[^a-z]+", "_", column.lower())
    kinds = [kind for kind, pattern in OTHER_LOSSES.items() if pattern.search(words)]
    middle = float(np.median(losses))
    if not kinds and middle > HIGHEST_LOSS:
        kinds = [f"perplexities, {middle:.3g} in the middle"]
    if not kinds:
        return []
    remedy = "multiply them by ln 2 and, where they are per byte or character, by those of a token"
    if kinds[0].startswith("perplexities"):
        remedy = "give their logarithms"
    return [
        f"{name}: column {column!r} seems to hold {kinds[0]}: losses count as nats per token here,"
        f" as published laws and every line below do; {remedy}. Nothing is converted"
    ]
