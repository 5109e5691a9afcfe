"""Read a table of published points into arrays that a law can be fitted to.

Nothing in the table is guessed: a cell that is no plain number is refused by file, line, column and value, and no unit
is converted. What is left out (a filter, an empty loss, the highest losses) is counted and listed by line.
"""

import csv
import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.cli import UserError, nearest
from scaling.laws import Points
from scaling.records import LARGEST

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
MISSING = {"", "nan", "na", "n/a", "null", "none", "inf", "+inf", "-inf", "infinity", "-infinity"}     # of a loss
SMALL_COUNT = 1e4           # no language model of the literature is smaller: the column is likely in millions or billions
SHOWN = 8                   # values or line numbers that a sentence names before "and ... more"


@dataclass(frozen=True)
class Selection:
    """The points chosen from a table, what was chosen, and what a reader should know of it."""

    points: Points
    axes: str                   # "NDC", or "N" where the table gives neither tokens nor compute: D and C are 1 then
    source: dict                # for law.json: file, sha256, columns, conventions, filters, rows, lines left out
    notes: list[str]


def read_points(path, n: str, loss: str, d: str | None = None, c: str | None = None, where=(), drop_highest: int = 0,
                cluster: str | None = None) -> Selection:
    """Points of a comma-, tab-, semicolon- or |-separated table with one header line (UTF-8).

    n, loss, d, c, cluster: column names. With c, D = C / (6 N); with d, C = 6 N D; with neither only N is known.
    where: texts COLUMN=VALUE; a row must have, in each column named, one of the values given for it.
    drop_highest: leave out that many of the highest losses. cluster: rows with equal text there are one trajectory.
    Raises UserError for a table, a column, a condition or a cell that cannot be meant."""
    if d is not None and c is not None:
        raise UserError("d and c are both given; choose one: with d, C = 6 N D; with c, D = C / (6 N)")
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): --points wants one table, such as a .csv file") from None
    wanted = [name for name in (n, loss, d, c, cluster) if name is not None]
    header, rows = _rows(path, content, wanted)
    at = {name: _column(path, header, name) for name in wanted}
    chosen, filters = _filter(path, header, rows, where)
    missing, values = [], []
    for line, row in chosen:
        if row[at[loss]].lower() in MISSING:
            missing.append(line)
        else:
            axes = [_number(path, line, name, row[at[name]]) for name in (n, d or c, loss) if name is not None]
            values.append((line, row[at[cluster]] if cluster else line, *axes))
    if not values:
        raise UserError(f"{path}: no row is left to fit: {len(rows)} rows, {len(chosen)} meet the conditions, none of "
                          f"them has a finite {loss!r}")
    if not 0 <= drop_highest < len(values):
        raise UserError(f"drop_highest={drop_highest} would leave none of {len(values)} points of {path}: give fewer")
    # Stable: of equal losses the one that stands first in the file goes first.
    highest = sorted(sorted(values, key=lambda value: -value[-1])[:drop_highest])
    dropped = {value[0] for value in highest}
    values = [value for value in values if value[0] not in dropped]
    points = _points(path, values, d, c, cluster)
    left_out = {"loss_missing": missing, "highest_losses": sorted(dropped)}
    source = {
        "file": path.name, "sha256": hashlib.sha256(content).hexdigest(),
        "columns": {"N": n, "D": d, "C": c, "loss": loss, "cluster": cluster}, "filters": filters,
        "rows": len(rows), "rows_filtered_out": len(rows) - len(chosen), "lines_left_out": left_out,
        "conventions": {"N": f"column {n!r}, as counted there",
                        "D": f"column {d!r}" if d else f"column {c!r} / (6 N)" if c else None,
                        "C": f"column {c!r}" if c else "6 N D" if d else None,
                        "loss": f"column {loss!r}, taken as nats per token"},
    }
    return Selection(points, "NDC" if d or c else "N", source, _notes(path, source, points, len(chosen)))


def _points(path, values, d, c, cluster) -> Points:
    labels, N, loss = (np.array([value[i] for value in values]) for i in (1, 2, -1))
    D = C = np.ones(len(N))
    if d or c:
        third = np.array([value[3] for value in values])
        with np.errstate(all="ignore"):
            D, C = (third, 6 * N * third) if d else (third / (6 * N), third)
        for i in np.flatnonzero(~((D > 0) & (D < LARGEST) & (C > 0) & (C < LARGEST))):
            raise UserError(f"{path}: N={N[i]:g} gives D={D[i]:g} and C={C[i]:g}; expected finite numbers above zero")
    return Points(N=N, D=D, C=C, loss=loss, cluster=labels)


def _notes(path, source, points, chosen) -> list[str]:
    notes = []
    if source["filters"]:
        conditions = "; ".join(f"{name} = {' or '.join(values)}" for name, values in source["filters"].items())
        notes.append(f"{chosen} of {source['rows']} rows of {path.name} meet {conditions}")
    for key, why in (("loss_missing", "their loss is empty or not finite"), ("highest_losses", "the highest losses")):
        if lines := source["lines_left_out"][key]:
            notes.append(f"left out {len(lines)} of {chosen} rows, {why}: line{'s' * (len(lines) > 1)} {_listed(lines)}")
    for name in "ND" if source["conventions"]["D"] else "N":
        values = getattr(points, name)
        if values.max() < SMALL_COUNT:
            notes.append(f"{name} is at most {values.max():g}: if the table counts in millions or billions, so do A, B, K "
                         "and tokens per parameter here; exponents and E are the same in any unit, nothing is converted")
    return notes


# ------------------------------------------------------------------------------------------------ the text of a table


def _rows(path: Path, content: bytes, wanted) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header and (line number, cells) of every row that is not blank; all cells stripped."""
    try:
        text = content.decode("utf-8-sig")
    except ValueError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error}): save the table as comma-separated UTF-8 text") from None
    if not text.strip() or "\0" in text:
        raise UserError(f"{path} is {'no text' if text.strip() else 'empty'}: expected a header line and a line for each point")
    first = next(line for line in text.splitlines() if line.strip())

    def fitness(mark):      # the header names most of the wanted columns under the right separator, then has most cells
        cells = [cell.strip() for cell in next(csv.reader([first], delimiter=mark))]
        return sum(name in cells for name in wanted), len(cells)

    mark = max(",\t;|", key=fitness)
    reader, rows, before = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True), [], 0
    try:
        for cells in reader:
            line, before = before + 1, reader.line_num      # a quoted cell may hold line breaks: a row's first line
            if any(cell.strip() for cell in cells):
                rows.append((line, [cell.strip() for cell in cells]))
    except csv.Error as error:
        raise UserError(f"{path} line {before + 1}: {error}; is a quotation mark left open there?") from None
    (_, header), rows = rows[0], rows[1:]
    for line, cells in rows:
        while len(cells) > len(header) and cells[-1] == "":     # separators at a line's end
            cells.pop()
        if len(cells) != len(header):
            raise UserError(f"{path} line {line}: {len(cells)} cells where the header has {len(header)}; repair the line")
    if not rows:
        raise UserError(f"{path} has a header but no row under it")
    return header, rows


def _column(path: Path, header: list[str], name: str) -> int:
    """The index of the one column called `name`."""
    if header.count(name) != 1:
        raise UserError(f"{path}: {header.count(name)} columns are called {name!r}; rename all but one" if name in header else
                        f"{path} has no column {name!r}{nearest(name, [one for one in header if one])}")
    return header.index(name)


def _number(path: Path, line: int, column: str, text: str) -> float:
    value = float(text) if NUMBER.fullmatch(text) else None
    if value is not None and 0 < value < LARGEST:
        return value
    advice = " (write it without commas and units, such as 1.24e8)" * (value is None and any(one.isdigit() for one in text))
    raise UserError(f"{path} line {line}, column {column!r}: {text!r} is no plain finite number above zero{advice}")


def _filter(path, header, rows, where):
    """The rows that meet the conditions COLUMN=VALUE, and {column: values asked for}."""
    filters = {}
    for condition in where:
        # A name or a value may itself hold "=": the first split that names a column counts.
        parts = condition.split("=")
        splits = [("=".join(parts[:i]).strip(), "=".join(parts[i:]).strip()) for i in range(1, len(parts))]
        if not splits:
            raise UserError(f"where {condition!r} lacks its '=': write COLUMN=VALUE")
        name, value = next((split for split in splits if split[0] in header), splits[0])
        column = _column(path, header, name)
        if not any(_equal(row[column], value) for _, row in rows):
            raise UserError(f"{path}: no row has {name}={value}; values there: "
                            f"{_listed(list(dict.fromkeys(row[column] for _, row in rows)))}")
        filters.setdefault(name, []).append(value)
    chosen = [(line, row) for line, row in rows
              if all(any(_equal(row[header.index(name)], value) for value in values) for name, values in filters.items())]
    if not chosen:
        raise UserError(f"{path}: no row meets all of {'; '.join(f'{k}={v}' for k, vs in filters.items() for v in vs)}")
    return chosen, filters


def _equal(cell: str, value: str) -> bool:
    """As numbers where both are (20 is 20.0), else as texts."""
    if NUMBER.fullmatch(cell) and NUMBER.fullmatch(value):
        return float(cell) == float(value)
    return cell == value


def _listed(values) -> str:
    shown = ", ".join(str(value) or "(empty)" for value in values[:SHOWN])
    return shown + (f" and {len(values) - SHOWN} more" if len(values) > SHOWN else "")
