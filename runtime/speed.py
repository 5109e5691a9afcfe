"""Say which FP8 recipe pays for a Linear of given shape, from a table of timings made beforehand.

fp8_speed.json holds ratios of BF16 time to FP8 time of one Linear, forward and backward (above 1: FP8 is faster):

    gpus        GPU name as its driver gives it -> what bench/linears.py measured on it, with the provenance
    published   other people's timings, each with its source, for GPUs whose name contains `gpu`; a GPU that we measured
                ourselves never uses them

    {"format_version": 1,
     "gpus": {"NVIDIA ...": {"measured": "2026-12-01", "torch": .., "torchao": .., "driver": .., "commit": .., "command": ..,
                             "timer": .., "rows": [{"recipe", "K", "N", "M", "ratio", "ratio_p10", "ratio_p90"}, ..]}},
     "published": [{"gpu": "H100", "source": .., "rows": [{"recipe", "K", "N", "M", "ratio"}, ..]}]}

K inputs, N outputs, M tokens. The bigger an FP8 matmul, the more of its saving is left after the casts, which read and
write M K, K N and M N numbers while the matmul does M K N products. So a timed shape speaks for all that are at least
as large in both K and N, never for a smaller one.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from runtime.cli import UserError

FORMAT_VERSION = 1
SHIPPED = Path(__file__).resolve().with_name("fp8_speed.json")
# Ratio above which a recipe pays. Repeated timings of one Linear scatter by a per cent or two, and FP8 costs accuracy:
# what may be noise is no reason to convert.
PAYS = 1.03
# Of a measured entry: key -> whether it may be null (a copy without git, a GPU whose driver does not tell its version).
PROVENANCE = {"measured": False, "torch": False, "torchao": True, "driver": True, "commit": True, "command": False,
              "timer": False}


@dataclass(frozen=True)
class Row:
    """One Linear, timed under one recipe."""
    recipe: str
    K: int                              # inputs
    N: int                              # outputs
    M: int                              # tokens
    ratio: float                        # BF16 time / FP8 time, median of the repeats
    ratio_p10: float | None = None      # of the repeats; none where published
    ratio_p90: float | None = None


@dataclass(frozen=True)
class Timings:
    """The rows of one origin."""
    origin: dict[str, str | None]       # measured: the PROVENANCE keys; published: gpu, source
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    measured: dict[str, Timings]        # by GPU name
    published: tuple[Timings, ...]


def load_table(path: str | Path = SHIPPED) -> Table:
    """The table at `path`. Raises UserError with a sentence where there is none or it is damaged."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): restore it, or python bench/linears.py "
                         f"makes it anew") from error
    except (ValueError, RecursionError) as error:       # torn, not text, a number of 5,000 digits, lists in lists in lists
        raise UserError(f"{path} is not JSON ({error}): restore it, or python bench/linears.py makes it anew") from error
    return read_table(value, str(path))


def read_table(value, path: str) -> Table:
    """The table that the JSON `value` spells; `path` names it in a UserError."""
    try:
        _keys(value, "the table", {"format_version", "gpus"}, {"published"})
        if value["format_version"] != FORMAT_VERSION or isinstance(value["format_version"], bool):
            raise UserError(f"format_version is {_show(value['format_version'])}, this version reads {FORMAT_VERSION}")
        _require(isinstance(value["gpus"], dict), "gpus", value["gpus"], "a table of GPU names")
        measured = {gpu: _timings(entry, f"gpus[{gpu!r}]", PROVENANCE) for gpu, entry in value["gpus"].items()}
        published = value.get("published", [])
        _require(isinstance(published, list), "published", published, "a list")
        return Table(measured, tuple(_timings(entry, f"published[{i}]", {"gpu": False, "source": False})
                                     for i, entry in enumerate(published)))
    except UserError as error:
        raise UserError(f"{path}: {error}; restore the file, or python bench/linears.py makes it anew") from None


def read_rows(rows: list, where: str) -> tuple[Row, ...]:
    """Measured rows as JSON has them, checked. Raises UserError: a wrong key or type, a ratio that is none, a row twice."""
    return _rows(rows, where, is_measured=True)


def to_text(value: dict) -> str:
    """The table as text, a row a line, so that a diff of two tables can be read. Raises UserError, as load_table() would."""
    read_table(value, "the new table")
    text = json.dumps(value, indent=1, allow_nan=False)
    return re.sub(r'\{\s+("recipe"[^{}]*?)\s+\}', lambda row: "{" + re.sub(r"\n\s+", " ", row[1]) + "}", text) + "\n"


def choose(table: Table, gpu: str | None, K: int, N: int, candidates: tuple[str, ...]) -> tuple[str | None, str]:
    """The recipe among `candidates` that pays most for a Linear of K inputs and N outputs on `gpu`, or None; and why.

    A recipe's evidence is its row of this very shape where there is one, else the best of its rows with no more inputs
    and no more outputs. It pays where that ratio is above PAYS. `gpu` is None on a CPU, where nothing pays.
    """
    if gpu is None:
        return None, "no GPU: FP8 pays on FP8 units alone"
    kind, rows = _timed(table, gpu)
    if not rows:
        return None, "no timings of this GPU: python bench/linears.py makes them"
    found = [_evidence([row for row in rows if row.recipe == recipe], K, N) for recipe in candidates]
    best = max(filter(None, found), key=lambda row: row.ratio, default=None)    # of equals the first candidate
    if best is None:
        return None, f"nothing timed at or below {K} x {N}: python bench/linears.py shapes={K}x{N} does"
    number = f"{kind} {best.ratio:.2f}x at {best.K} x {best.N}"
    if best.ratio > PAYS:
        return best.recipe, number
    return None, f"{'BF16 is faster' if best.ratio <= 1 else 'FP8 gains too little'}: best {number}"


def _timed(table: Table, gpu: str) -> tuple[str, list[Row]]:
    if gpu in table.measured:
        return "measured", list(table.measured[gpu].rows)
    return "published", [row for timings in table.published if timings.origin["gpu"] in gpu for row in timings.rows]


def _evidence(rows: list[Row], K: int, N: int) -> Row | None:
    """The row that speaks for K x N under one recipe. A shape timed at several M counts as at its worst."""
    worst: dict[tuple[int, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.ratio):
        if row.K <= K and row.N <= N:
            worst.setdefault((row.K, row.N), row)
    return worst.get((K, N)) or max(worst.values(), key=lambda row: (row.ratio, row.K, row.N), default=None)


# -------------------------------------------------------------------------------------------------------------- checking

def _timings(entry, where: str, strings: dict[str, bool]) -> Timings:
    _keys(entry, where, {*strings, "rows"})
    for key, may_be_null in strings.items():
        text = entry[key]
        _require((isinstance(text, str) and text != "") or (text is None and may_be_null), f"{where}.{key}", text, "a text")
    return Timings({key: entry[key] for key in strings}, _rows(entry["rows"], f"{where}.rows", strings is PROVENANCE))


def _rows(values, where: str, is_measured: bool) -> tuple[Row, ...]:
    _require(isinstance(values, list), where, values, "a list")
    rows = tuple(_row(value, f"{where}[{i}]", is_measured) for i, value in enumerate(values))
    seen = set()
    for row in rows:
        if (key := (row.recipe, row.K, row.N, row.M)) in seen:
            raise UserError(f"{where} holds {row.recipe} at {row.K} x {row.N}, M={row.M} twice")
        seen.add(key)
    return rows


def _row(row, where: str, is_measured: bool) -> Row:
    ratios = ("ratio", "ratio_p10", "ratio_p90") if is_measured else ("ratio",)
    _keys(row, where, {"recipe", "K", "N", "M", *ratios})
    _require(isinstance(row["recipe"], str) and row["recipe"] != "", f"{where}.recipe", row["recipe"], "the name of a recipe")
    for key in ("K", "N", "M"):
        _require(type(row[key]) is int and row[key] > 0, f"{where}.{key}", row[key], "a positive whole number")
    for key in ratios:      # the largest float: JSON spells infinity (1e999), NaN, and whole numbers beyond any float
        _require(type(row[key]) in (int, float) and 0 < row[key] <= sys.float_info.max, f"{where}.{key}", row[key],
                 "a positive, finite number")
    if is_measured and not row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"]:
        raise UserError(f"{where}: ratio={row['ratio']} does not lie between ratio_p10={row['ratio_p10']} and "
                         f"ratio_p90={row['ratio_p90']}")
    return Row(**row)


def _keys(value, where: str, needed: set[str], optional: frozenset[str] = frozenset()) -> None:
    _require(isinstance(value, dict), where, value, "a table of keys")
    if wrong := (needed - set(value)) or (set(value) - needed - set(optional)):
        key = min(wrong)
        raise UserError(f"{where} {'lacks' if key in needed else 'has an unknown'} key {key!r}")


def _require(holds: bool, where: str, value, expected: str) -> None:
    if not holds:
        raise UserError(f"{where}={_show(value)} must be {expected}")


def _show(value) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a number of many digits"
    return text if len(text) <= 60 else f"{text[:60]}..."
