"""Choose the points of a law from a table of published results.

Nothing in the table is guessed: a cell that is no plain number is refused by file, line, column and
value, and no unit is converted. What is left out (a filter, an empty loss, the highest losses) is
counted and listed by line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.files import file_sha256
from lib.text import listed, nearest
from scaling.laws import Points
from scaling.tables import Line, Row, Table, joined, loss_doubts, read_table, unit_doubts

Rows = dict[Line, Row]

# Columns with one of these names may say which rows are one training run.
NAMES_OF_RUNS = {
    "run",
    "run_id",
    "run_name",
    "runid",
    "name",
    "id",
    "model",
    "model_name",
    "trial",
    "experiment",
    "trajectory",
}
# What an unfinished run may have for a loss.
MISSING = {"", "nan", "na", "n/a", "null", "none", "inf", "+inf", "-inf", "infinity", "-infinity"}
ONE_SIZE = 1.01  # largest over smallest N of the rows of one run


@dataclass(frozen=True)
class Columns:
    """Which columns of the table hold what."""

    N: str  # parameters
    D: str | None  # training tokens; null where the table has none
    C: str | None  # training FLOPs; null where the table has none
    loss: str  # losses
    cluster: str | None  # the training run; null where none names it

    @property
    def of_numbers(self) -> list[str]:
        return [name for name in (self.N, self.loss, self.D, self.C) if name]

    @property
    def has_tokens(self) -> bool:
        """Whether tokens and compute are known."""
        return bool(self.D or self.C)

    @property
    def derived(self) -> str | None:
        """How tokens follow from compute or compute from tokens; None where neither does."""
        if bool(self.D) == bool(self.C):
            return None
        return "C = 6 N D" if self.D else "D = C / (6 N)"


@dataclass(frozen=True)
class TableFile:
    """A file that was read."""

    file: str  # its name
    sha256: str  # of its bytes


@dataclass(frozen=True)
class LinesLeftOut:
    """Rows of the table that meet the conditions and are no points."""

    loss_missing: list[Line]  # lines whose loss is empty or not finite
    highest_losses: list[Line]  # lines that --drop-highest leaves out
    # lines that repeat an earlier one in every cell: no second run
    copies: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class TableSource:
    """Where the points of a table come from."""

    file: str  # its name
    sha256: str  # of its bytes
    runs: TableFile | None  # the second table, which describes the runs; null without --runs
    rows: int  # rows of the table
    filters: dict[str, list[str]]  # column -> the values that a row may have there
    columns: Columns  # which columns hold what
    derived: (
        str | None
    )  # "C = 6 N D" or "D = C / (6 N)"; null where the table gives both or neither
    lines_left_out: LinesLeftOut  # rows that meet the conditions and are no points


@dataclass(frozen=True, eq=False)
class Selection:
    """What was chosen from a table; n points."""

    points: Points  # D and C are 1 where the table gives neither
    axes: str  # "NDC", or "N" where the table gives neither tokens nor compute
    source: TableSource
    notes: list[str]  # what a reader should know
    lines: tuple[Line, ...]  # (n,) where each point stands in the file
    # name -> label of each point (n,), of columns that may name runs though nobody said so
    run_columns: dict[str, np.ndarray]


def read_points(
    path: str | Path,
    n: str,
    loss: str,
    d: str = "",
    c: str = "",
    where: Sequence[str] = (),
    drop_highest: int = 0,
    cluster: str = "",
    runs: str = "",
) -> Selection:
    """Points of a table separated by commas, tabs, semicolons or spaces with one header line
    (UTF-8), or of W&B's chart export.

    n, loss, d, c, cluster: column names. With c alone, D = C / (6 N); with d alone, C = 6 N D; with
    both, they are taken as they stand; with neither only N is known. runs: a second table that
    describes the runs that the first one names. where: texts COLUMN=VALUE; a row must have one of
    the values given for each column. drop_highest: so many of the highest losses are left out.
    cluster: equal text there is one trajectory, an empty cell a row of its own. Raises UserError
    where a column is absent, a cell is no number, or no row is left."""
    path = Path(path)
    columns = Columns(n, d or None, c or None, loss, cluster or None)
    filters = _filters(where)
    table = _read(path, runs, columns, filters)
    rows = table.rows
    matching = _matching_lines(path, rows, filters)
    distinct, copies = _without_copies(rows, matching)
    finite = _finite_lines(path, rows, distinct, loss, drop_highest)
    missing = [line for line in distinct if rows[line][loss].lower() in MISSING]
    numbers = {name: _numbers(path, rows, finite, name) for name in columns.of_numbers}
    is_highest = _is_highest(numbers[loss], drop_highest)
    lines = _at(finite, ~is_highest)
    left_out = LinesLeftOut(missing, _at(finite, is_highest), copies)
    of_points = {name: values[~is_highest] for name, values in numbers.items()}
    points = _points(of_points, columns, _trajectories(rows, lines, cluster))
    source = TableSource(
        file=path.name,
        sha256=table.sha256,
        runs=_table_file(Path(runs)) if runs else None,
        rows=len(rows),
        filters=filters,
        columns=columns,
        derived=columns.derived,
        lines_left_out=left_out,
    )
    return Selection(
        points=points,
        axes="NDC" if columns.has_tokens else "N",
        source=source,
        notes=_notes(path, table, points, source, len(matching)),
        lines=tuple(lines),
        run_columns={} if cluster else _run_columns(rows, lines, points.N, columns.of_numbers),
    )


def _table_file(path: Path) -> TableFile:
    return TableFile(path.name, file_sha256(path))


# ------------------------------------------------------------------------------- which rows count


def _matching_lines(path: Path, rows: Rows, filters: dict[str, list[str]]) -> list[Line]:
    """The lines that meet the conditions. Raises UserError as _check_filters()."""
    _check_filters(path, rows, filters)
    return [line for line, row in rows.items() if _meets(row, filters)]


def _without_copies(rows: Rows, lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """(the lines, those that repeat an earlier one in every cell): counted as runs, copies would
    make intervals narrow."""
    seen: set[tuple[str, ...]] = set()
    distinct, copies = [], []
    for line in lines:
        cells = tuple(rows[line].values())
        if cells in seen:
            copies.append(line)
        else:
            distinct.append(line)
        seen.add(cells)
    return distinct, copies


def _finite_lines(
    path: Path,
    rows: Rows,
    matching: Sequence[Line],
    loss: str,
    drop_highest: int,
) -> list[Line]:
    """Those of the matching lines that have a loss. Raises UserError where drop_highest leaves none
    of them."""
    finite = [line for line in matching if rows[line][loss].lower() not in MISSING]
    if not 0 <= drop_highest < len(finite):
        raise UserError(
            f"{path}: no row is left to fit: {len(rows)} rows, {len(matching)} meet the conditions,"
            f" {len(finite)} of them have a finite {loss!r}, drop_highest={drop_highest}"
        )
    return finite


def _filters(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Column -> the values that a row may have there, of texts COLUMN=VALUE."""
    filters: dict[str, list[str]] = {}
    for condition in conditions:
        name, _, value = condition.partition("=")
        filters.setdefault(name.strip(), []).append(value.strip())
    return filters


def _read(path: Path, runs: str, columns: Columns, filters: dict[str, list[str]]) -> Table:
    """The table, joined with the one that describes its runs; each column that is named is there
    once."""
    names = [*columns.of_numbers, *filters]
    if columns.cluster:
        names.insert(len(columns.of_numbers), columns.cluster)
    if not runs:
        return read_table(path, names)
    table = joined(read_table(path), path, Path(runs))
    for name in names:
        count = table.header.count(name)
        if count != 1:
            raise UserError(
                f"{path} with {runs} has {count} columns called"
                f" {name!r}{nearest(name, table.header)}"
            )
    return table


def _check_filters(path: Path, rows: Rows, filters: dict[str, list[str]]) -> None:
    """Raise UserError for a value that no row has: it is misspelt."""
    for name, values in filters.items():
        texts = {_value(row[name]): row[name] or "(empty)" for row in rows.values()}
        for value in values:
            if _value(value) not in texts:
                raise UserError(
                    f"{path}: no row has {name}={value}; values there: {listed([*texts.values()])}"
                )


def _meets(row: dict[str, str], filters: dict[str, list[str]]) -> bool:
    """Whether the row has one of the values of each column."""
    return all(_value(row[name]) in map(_value, values) for name, values in filters.items())


def _value(cell: str) -> float | str:
    """A number where the cell is one (20 is 20.0), else its text."""
    try:
        return float(cell)
    except ValueError:
        return cell


def _is_highest(losses: np.ndarray, count: int) -> np.ndarray:
    """(lines,) which losses are the highest; of equal ones the first in the file goes first."""
    order = np.argsort(-losses, kind="stable")
    is_highest = np.zeros(len(losses), bool)
    is_highest[order[:count]] = True
    return is_highest


def _at(lines: list[Line], is_wanted: np.ndarray) -> list[Line]:
    return [lines[index] for index in np.flatnonzero(is_wanted)]


# ----------------------------------------------------------------------------- numbers and points


def _numbers(path: Path, rows: Rows, lines: Sequence[Line], name: str) -> np.ndarray:
    """(lines,) the cells of a column as numbers. Raises UserError for the first that is none above
    zero."""
    numbers = []
    for line in lines:
        text = rows[line][name]
        value = _value(text)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise UserError(
                f"{path} line {line}, column {name!r}: {text!r} is no plain finite number above"
                " zero such as 1.24e8"
            )
        numbers.append(value)
    return np.array(numbers)


def _points(numbers: dict[str, np.ndarray], columns: Columns, cluster: np.ndarray) -> Points:
    N, loss = numbers[columns.N], numbers[columns.loss]
    if columns.D and columns.C:
        return Points(N, numbers[columns.D], numbers[columns.C], loss, cluster)
    if columns.D:
        D = numbers[columns.D]
        return Points(N, D, 6 * N * D, loss, cluster)
    if columns.C:
        C = numbers[columns.C]
        return Points(N, C / (6 * N), C, loss, cluster)
    ones = np.ones(len(N))
    return Points(N, ones, ones, loss, cluster)


def _trajectories(rows: Rows, lines: Sequence[Line], cluster: str) -> np.ndarray:
    """(n,) the label of each point's trajectory: the cell of the column, else its line alone."""
    if not cluster:
        return np.array(lines)
    return np.array([rows[line][cluster] or f"line {line}" for line in lines])


def _run_columns(
    rows: Rows, lines: Sequence[Line], N: np.ndarray, numbers: list[str]
) -> dict[str, np.ndarray]:
    """Columns whose name says that they name runs, whose values repeat, and each value of which has
    one N."""
    columns = {}
    for name in rows[lines[0]]:
        if name in numbers or name.strip().lower().replace(" ", "_") not in NAMES_OF_RUNS:
            continue
        labels = np.array([rows[line][name] or f"line {line}" for line in lines])
        distinct, member = np.unique(labels, return_inverse=True)
        ratios = [N[member == i].max() / N[member == i].min() for i in range(len(distinct))]
        if len(distinct) < len(lines) and max(ratios) < ONE_SIZE:
            columns[name] = labels
    return columns


# --------------------------------------------------------------------------- what a reader is told


def _notes(
    path: Path, table: Table, points: Points, source: TableSource, matching: int
) -> list[str]:
    """Doubts of units, how the table was read, and what was left out of so many matching rows."""
    D = points.D if source.columns.has_tokens else None
    doubts = unit_doubts(points.N, D, path.name)
    doubts += loss_doubts(points.loss, source.columns.loss, path.name)
    return [
        *(f"WARNING: {doubt}" for doubt in doubts),
        *table.notes,
        *_notes_on_compute(points, source.columns),
        *_notes_on_filters(source, matching),
        *_notes_on_left_out(source.lines_left_out, matching),
    ]


def _notes_on_compute(points: Points, columns: Columns) -> list[str]:
    if not (columns.D and columns.C):
        return []
    ratio = points.C / (6 * points.N * points.D)
    return [f"C and D as they stand: C is {ratio.min():.3g} to {ratio.max():.3g} times 6 N D"]


def _notes_on_filters(source: TableSource, matching: int) -> list[str]:
    if not source.filters:
        return []
    conditions = [f"{name} = {' or '.join(values)}" for name, values in source.filters.items()]
    return [f"{matching} of {source.rows} rows of {source.file} meet {'; '.join(conditions)}"]


def _notes_on_left_out(left_out: LinesLeftOut, matching: int) -> list[str]:
    reasons = (
        ("which repeat another in every cell and so are no further runs", left_out.copies),
        ("their loss is empty or not finite", left_out.loss_missing),
        ("the highest losses", left_out.highest_losses),
    )
    return [
        f"left out {len(lines)} of {matching} rows, {reason}: lines {listed(lines)}"
        for reason, lines in reasons
        if lines
    ]
