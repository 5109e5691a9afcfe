"""Read a table of published points into arrays that a law can be fitted to.

Nothing in the table is guessed: a cell that is no plain number is refused by file, line, column and value, and no unit
is converted. What is left out (a filter, an empty loss, the highest losses) is counted and listed by line.
"""

import csv
import hashlib
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.cli import UserError, nearest
from scaling.laws import Points
from scaling.records import listed

MISSING = {"", "nan", "na", "n/a", "null", "none", "inf", "+inf", "-inf", "infinity", "-infinity"}     # of a loss


@dataclass(frozen=True)
class Selection:
    """The points chosen from a table, what was chosen, and what a reader should know of it."""
    points: Points
    axes: str                   # "NDC", or "N" where the table gives neither tokens nor compute: D and C are 1 then
    source: dict                # for law.json: file, sha256, rows, filters, columns, what was derived, lines left out
    notes: list[str]


def read_points(path, n: str, loss: str, d: str | None = None, c: str | None = None, where=(), drop_highest: int = 0,
                cluster: str | None = None) -> Selection:
    """Points of a comma-, tab- or semicolon-separated table with one header line (UTF-8).
    n, loss, d, c, cluster: column names; with c, D = C / (6 N); with d, C = 6 N D; with neither only N is known. where: texts
    COLUMN=VALUE; a row must have one of the values given for each column. drop_highest: so many of the highest losses are left
    out. cluster: equal text there is one trajectory, an empty cell a row of its own. Raises UserError."""
    path = Path(path)
    if d is not None and c is not None:
        raise UserError("d and c are both given; choose one: with d, C = 6 N D; with c, D = C / (6 N)")
    filters: dict[str, list[str]] = {}
    for condition in where:
        name, _, value = (part.strip() for part in condition.partition("="))
        filters.setdefault(name, []).append(value)
    counted = [name for name in (n, loss, d, c) if name is not None]
    rows, sha256 = _rows(path, [*counted, *([cluster] if cluster else []), *filters])
    for name, values in filters.items():
        there = {_value(row[name]): row[name] or "(empty)" for row in rows.values()}
        if unknown := [value for value in values if _value(value) not in there]:
            raise UserError(f"{path}: no row has {name}={unknown[0]}; values there: {listed([*there.values()])}")
    chosen = [line for line, row in rows.items()
              if all(_value(row[name]) in map(_value, values) for name, values in filters.items())]
    missing = [line for line in chosen if rows[line][loss].lower() in MISSING]
    kept = [line for line in chosen if line not in missing]
    if not 0 <= drop_highest < len(kept):
        raise UserError(f"{path}: no row is left to fit: {len(rows)} rows, {len(chosen)} meet the conditions, {len(kept)} of "
                        f"them have a finite {loss!r}, drop_highest={drop_highest}")
    values = {}
    for name, line in itertools.product(counted, kept):
        text = rows[line][name]
        value = values[name, line] = _value(text)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise UserError(f"{path} line {line}, column {name!r}: {text!r} is no plain finite number above zero such as 1.24e8")
    # Stable: of equal losses the one that stands first in the file goes first.
    dropped = sorted(sorted(kept, key=lambda line: -values[loss, line])[:drop_highest])
    kept = [line for line in kept if line not in dropped]
    N, L, third = (np.array([values[name, line] if name else 1.0 for line in kept]) for name in (n, loss, d or c))
    D, C = (third, 6 * N * third) if d else (third / (6 * N), third) if c else (third, third)
    label = np.array([rows[line][cluster] or f"line {line}" if cluster else line for line in kept])
    source = {"file": path.name, "sha256": sha256, "rows": len(rows), "filters": filters,
              "columns": {"N": n, "D": d, "C": c, "loss": loss, "cluster": cluster},
              "derived": "C = 6 N D" if d else "D = C / (6 N)" if c else None,
              "lines_left_out": {"loss_missing": missing, "highest_losses": dropped}}
    notes = [f"{len(chosen)} of {len(rows)} rows of {path.name} meet " + "; ".join(
        f"{name} = {' or '.join(some)}" for name, some in filters.items())] if filters else []
    notes += [f"left out {len(lines)} of {len(chosen)} rows, {why}: lines {listed(lines)}"
              for why, lines in (("their loss is empty or not finite", missing), ("the highest losses", dropped)) if lines]
    return Selection(Points(N, D, C, L, label), "NDC" if d or c else "N", source, notes)


def _rows(path: Path, wanted) -> tuple[dict[int, dict[str, str]], str]:
    """Line number -> {column: cell} of every row that is not blank, cells stripped; the SHA-256 of the file."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): --points wants one table as UTF-8 text, such as a .csv") from None
    first = next((line for line in lines if line.strip()), "")
    reader, rows = csv.reader(lines, delimiter=max(",\t;", key=first.count), strict=True), {}
    try:
        for cells in reader:
            if any(map(str.strip, cells)):
                rows[reader.line_num] = [cell.strip() for cell in cells]
    except csv.Error as error:          # else the rest of the table would be one cell
        raise UserError(f"{path} line {reader.line_num}: {error}: is a quotation mark left open?") from None
    header = rows.pop(min(rows, default=0), [])
    for name in wanted:
        if (found := header.count(name)) != 1:
            raise UserError(f"{path} has {found} columns called {name!r}{'' if found else nearest(name, header)}")
    for line, cells in rows.items():
        if len(cells) != len(header):
            raise UserError(f"{path} line {line}: {len(cells)} cells where the header has {len(header)}; repair the line")
    return {line: dict(zip(header, cells, strict=True)) for line, cells in rows.items()}, hashlib.sha256(content).hexdigest()


def _value(cell: str) -> float | str:
    """A number where the cell is one (20 is 20.0), else its text."""
    try:
        return float(cell)
    except ValueError:
        return cell
