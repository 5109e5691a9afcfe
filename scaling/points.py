"""Read a table of published points into arrays that a law can be fitted to.

Nothing in the table is guessed: a cell that is no plain number is refused by file, line, column and value, and no unit
is converted. What is left out (a filter, an empty loss, the highest losses) is counted and listed by line.
"""

import csv
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.cli import UserError, nearest
from scaling.laws import Points
from scaling.records import LARGEST, listed

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
    """Points of a comma-, tab- or semicolon-separated table with one header line (UTF-8).
    n, loss, d, c, cluster: column names; with c, D = C / (6 N); with d, C = 6 N D; with neither only N is known. where: texts
    COLUMN=VALUE; a row must have one of the values given for each column. drop_highest: so many of the highest losses are left
    out. cluster: equal text there is one trajectory. Raises UserError for what cannot be meant."""
    path = Path(path)
    if d is not None and c is not None:
        raise UserError("d and c are both given; choose one: with d, C = 6 N D; with c, D = C / (6 N)")
    wanted = [name for name in (n, loss, d, c, cluster) if name is not None]
    rows, sha256 = _rows(path, wanted + [condition.partition("=")[0].strip() for condition in where])
    chosen, filters = _filter(path, rows, where)
    missing = [line for line, row in chosen.items() if row[loss].lower() in MISSING]
    kept = [line for line in chosen if line not in missing]
    if not kept:
        raise UserError(f"{path}: no row is left to fit: {len(rows)} rows, {len(chosen)} meet the conditions, none of them has a "
                        f"finite {loss!r}")
    if not 0 <= drop_highest < len(kept):
        raise UserError(f"drop_highest={drop_highest} must lie between 0 and {len(kept) - 1}: {path} has {len(kept)} points")
    values = {name: {line: _number(path, line, name, rows[line][name]) for line in kept} for name in wanted if name != cluster}
    # Stable: of equal losses the one that stands first in the file goes first.
    dropped = sorted(sorted(kept, key=lambda line: -values[loss][line])[:drop_highest])
    kept = [line for line in kept if line not in dropped]
    if cluster and (nameless := [line for line in kept if not rows[line][cluster]]):
        raise UserError(f"{path} line {nameless[0]}, column {cluster!r} is empty: name the run there, for rows without a "
                        "name would pass for one run")
    N, L, third = (np.array([values[name][line] for line in kept]) if name else np.ones(len(kept)) for name in (n, loss, d or c))
    D, C = (third, 6 * N * third) if d else (third / (6 * N), third) if c else (third, third)
    points = Points(N=N, D=D, C=C, loss=L, cluster=np.array([rows[line][cluster] if cluster else line for line in kept]))
    source = {
        "file": path.name, "sha256": sha256, "columns": {"N": n, "D": d, "C": c, "loss": loss, "cluster": cluster},
        "filters": filters, "rows": len(rows), "rows_filtered_out": len(rows) - len(chosen),
        "lines_left_out": {"loss_missing": missing, "highest_losses": dropped},
        "conventions": {"N": f"column {n!r}, as counted there",
                        "D": f"column {d!r}" if d else f"column {c!r} / (6 N)" if c else None,
                        "C": f"column {c!r}" if c else "6 N D" if d else None,
                        "loss": f"column {loss!r}, taken as nats per token"},
    }
    notes = [f"left out {len(lines)} of {len(chosen)} rows, {why}: line{'s' * (len(lines) > 1)} {listed(lines, SHOWN)}"
             for why, lines in (("their loss is empty or not finite", missing), ("the highest losses", dropped)) if lines]
    if filters:
        conditions = "; ".join(f"{name} = {' or '.join(some)}" for name, some in filters.items())
        notes.insert(0, f"{len(chosen)} of {len(rows)} rows of {path.name} meet {conditions}")
    notes += [f"{name} is at most {x.max():g}: if the table counts in millions or billions, so do A, B, K and tokens per "
              "parameter here; exponents and E are the same in any unit, nothing is converted"
              for name, x in (("N", N), ("D", D)) if x.max() < SMALL_COUNT and (name == "N" or d or c)]
    return Selection(points, "NDC" if d or c else "N", source, notes)


def _rows(path: Path, wanted) -> tuple[dict[int, dict[str, str]], str]:
    """Line number -> {column: cell} of every row that is not blank, cells stripped; the SHA-256 of the file."""
    try:
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): --points wants one table, such as a .csv file") from None
    except ValueError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error}): save the table as comma-separated UTF-8 text") from None
    first = next((line for line in lines if line.strip()), "")
    split = {mark: [cell.strip() for cell in next(csv.reader([first], delimiter=mark), [])] for mark in ",\t;"}
    # Under the right separator the header names most of the wanted columns, and then has most cells.
    mark = max(split, key=lambda mark: (sum(name in split[mark] for name in wanted), len(split[mark])))
    header, rows, reader = split[mark], {}, csv.reader(lines, delimiter=mark, strict=True)
    for name in wanted:
        if name not in header:
            raise UserError(f"{path} has no column {name!r}{nearest(name, [one for one in header if one])}")
        if header.count(name) > 1:
            raise UserError(f"{path}: {header.count(name)} columns are called {name!r}; rename all but one")
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                if len(cells) != len(header):
                    raise UserError(f"{path} line {reader.line_num}: {len(cells)} cells where the header has {len(header)}; "
                                    "repair the line")
                rows[reader.line_num] = dict(zip(header, (cell.strip() for cell in cells), strict=True))
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num}: {error}; is a quotation mark left open there?") from None
    if len(rows) < 2:
        raise UserError(f"{path} has a header but no row under it")
    del rows[min(rows)]
    return rows, hashlib.sha256(content).hexdigest()


def _number(path: Path, line: int, column: str, text: str) -> float:
    value = float(text) if NUMBER.fullmatch(text) else None
    if value is None or not 0 < value < LARGEST:
        raise UserError(f"{path} line {line}, column {column!r}: {text!r} is no plain finite number above zero (write it without "
                        "commas and units, such as 1.24e8)")
    return value


def _filter(path, rows, where):
    """The rows that meet the conditions COLUMN=VALUE, and {column: values asked for}."""
    filters = {}
    for condition in where:
        name, _, value = (part.strip() for part in condition.partition("="))
        if not any(_equal(row[name], value) for row in rows.values()):
            there = dict.fromkeys(row[name] or "(empty)" for row in rows.values())
            raise UserError(f"{path}: no row has {name}={value}; values there: {listed([*there], SHOWN)}")
        filters.setdefault(name, []).append(value)
    chosen = {line: row for line, row in rows.items()
              if all(any(_equal(row[name], value) for value in values) for name, values in filters.items())}
    if not chosen:
        raise UserError(f"{path}: no row meets all of {'; '.join(where)}")
    return chosen, filters


def _equal(cell: str, value: str) -> bool:
    """As numbers where both are (20 is 20.0), else as texts."""
    if NUMBER.fullmatch(cell) and NUMBER.fullmatch(value):
        return float(cell) == float(value)
    return cell == value
