"""Read anyone's paired losses from a table: a row for each run, or for each point of its loss
curve.

Rows pair where their pair column, N and D are equal and only the arm differs. Points of one curve
share the run's trajectory, so they count once in every interval."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.text import listed
from scaling.gap_words import TableColumns
from scaling.paired.gaps import Gap, Pair
from scaling.tables import FEWEST_PARAMETERS, Table, loss_doubts, read_table, unit_doubts

# cells of the arm column, in any case, that name the baseline
BASELINES = ("bf16", "bfloat16", "baseline")


@dataclass(frozen=True)
class TableRun:
    """One row, as far as the statistics of pairs look at a run; counts are 1 where the table does
    not give them."""

    run_id: str
    pair_id: str
    recipe: str  # the cell of the arm column
    is_baseline: bool
    N: int
    tokens: int
    loss_bf16: float  # nats per token; a table has one loss, so both evaluations are that one
    loss_as_trained: float
    trunk: str
    seed: str
    summary_sha256: str  # of the table
    convention: str = "total"
    repeat: int = 0
    device: str = ""  # unknown, so there is no speed
    tokenizer_sha256: str = ""
    val_sha256: str = ""

    @property
    def params_total(self) -> int:
        return self.N

    @property
    def params_nonembed(self) -> int:
        return self.N


@dataclass(frozen=True)
class TablePairs:
    runs: list[TableRun]
    pairs: list[Pair]
    doubts: list[str]  # what may make the analysis another than was meant
    notes: list[str]  # what was left out, by line
    sha256: str  # of the table
    columns: TableColumns


def read_table_pairs(
    path: Path, arm: str, pair: str, loss: str, n: str = "", d: str = "", base: str = ""
) -> TablePairs:
    """The pairs of a table; arm, pair, loss, n, d: column names, base: the baseline's text in the
    arm column.

    Raises UserError for a row without a plain loss above zero, two rows of one arm and pair, no
    baseline or no pair."""
    table = read_table(path, [name for name in (arm, pair, loss, n, d) if name])
    base = base or _baseline(path, table, arm)
    columns = TableColumns(arm, pair, loss, n, d, base)
    runs = _runs_by_key(path, table, columns)
    pairs, unpaired = _match(runs, base)
    if not pairs:
        raise UserError(
            f"{path} holds no pair: no row of {arm}={base} shares its {pair}, N and D with another"
            " arm's"
        )
    doubts = []
    if n and d:
        N = np.array([run.N for run in runs.values()], dtype=float)
        D = np.array([run.tokens for run in runs.values()], dtype=float)
        doubts += unit_doubts(N, D, path.name)
        doubts += mixed_unit_doubts({line: run.N for line, run in runs.items()}, path.name)
    losses = np.array([run.loss_bf16 for run in runs.values()])
    doubts += loss_doubts(losses, loss, path.name)
    if unpaired:
        doubts.append(f"unpaired rows of {path.name}: lines {listed(unpaired)}")
    return TablePairs(list(runs.values()), pairs, doubts, list(table.notes), table.sha256, columns)


def mixed_unit_doubts(N: Mapping[int | str, int], name: str) -> list[str]:
    """A line where some rows count parameters as nobody has them and others do not; N: line of the
    table -> its parameters."""
    small = [line for line, count in N.items() if count < FEWEST_PARAMETERS]
    if not small or len(small) == len(N):
        return []
    return [
        f"{name}: N is below {FEWEST_PARAMETERS:g} parameters at lines {listed(small)} and up to"
        f" {max(N.values()):.4g} at others: are those in millions or billions? Give counts such as"
        " 1.24e8; nothing is converted"
    ]


def _runs_by_key(path: Path, table: Table, columns: TableColumns) -> dict[int | str, TableRun]:
    """Line -> run. Raises UserError for two rows of one arm, pair, N and D."""
    runs: dict[int | str, TableRun] = {}
    lines: dict[tuple, int | str] = {}
    for line, row in table.rows.items():
        run = _run(TableRow(path, line, row), table.sha256, columns)
        first = lines.setdefault(_key(run), line)
        if first != line:
            has_sizes = columns.n_column and columns.d_column
            missing = "" if has_sizes else "; give --n and --d where they tell these rows apart"
            raise UserError(
                f"{path} lines {first} and {line} are both the {run.recipe} run of pair"
                f" {run.pair_id!r}{missing}"
            )
        runs[line] = run
    return runs


def _key(run: TableRun) -> tuple[str, str, int, int]:
    return run.recipe, run.pair_id, run.N, run.tokens


def _match(runs: Mapping[int | str, TableRun], base: str) -> tuple[list[Pair], list[int | str]]:
    """(pairs, lines of the rows that have no partner)."""
    by_key = {_key(run): run for run in runs.values()}
    pairs, unpaired = [], []
    paired_keys = set()
    for line, run in runs.items():
        if run.is_baseline:
            continue
        key = (base, *_key(run)[1:])
        if key in by_key:
            pairs.append(_pair(by_key[key], run))
            paired_keys.add(key)
        else:
            unpaired.append(line)
    unpaired += [
        line for line, run in runs.items() if run.is_baseline and _key(run) not in paired_keys
    ]
    return pairs, unpaired


def _baseline(path: Path, table: Table, arm: str) -> str:
    names = list(dict.fromkeys(row[arm] for row in table.rows.values()))
    matching = [name for name in names if name.lower() in BASELINES]
    if len(matching) != 1:
        raise UserError(
            f"{path}: which {arm} is the baseline? Give base=NAME, one of {listed(names)}"
        )
    return matching[0]


@dataclass(frozen=True)
class TableRow:
    """One row of a table, whose cells are read as numbers."""

    path: Path
    line: int | str
    cells: Mapping[str, str]

    def number(self, name: str) -> float:
        try:
            value = float(self.cells[name])
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise UserError(
                f"{self.path} line {self.line}, column {name!r}: {self.cells[name]!r} is no plain"
                " finite number above zero such as 1.24e8"
            )
        return value

    def count(self, name: str) -> int:
        """1 where the table does not give it."""
        if not name:
            return 1
        value = self.number(name)
        if value < FEWEST_PARAMETERS and value != round(value):
            raise UserError(
                f"{self.path} line {self.line}, column {name!r}: {self.cells[name]} is no count; is"
                " it in millions or billions? Give counts such as 1.24e8, nothing is converted"
            )
        return round(value)


def _run(row: TableRow, sha256: str, columns: TableColumns) -> TableRun:
    recipe, pair_id = row.cells[columns.arm_column], row.cells[columns.pair_column]
    if not recipe or not pair_id:
        name = columns.pair_column if recipe else columns.arm_column
        raise UserError(f"{row.path} line {row.line}: the cell of {name!r} is empty")
    N = row.count(columns.n_column)
    loss = row.number(columns.loss_column)
    return TableRun(
        run_id=f"{row.path.name} line {row.line}",
        pair_id=pair_id,
        recipe=recipe,
        is_baseline=recipe == columns.baseline,
        N=N,
        tokens=row.count(columns.d_column),
        loss_bf16=loss,
        loss_as_trained=loss,
        trunk=f"{recipe} {pair_id} {N}",
        seed=pair_id,
        summary_sha256=sha256,
    )


def _pair(baseline: TableRun, run: TableRun) -> Pair:
    nats = run.loss_bf16 - baseline.loss_bf16
    gap = Gap(nats, 100 * nats / baseline.loss_bf16, None)
    return Pair(baseline, run, {"bf16": gap, "as_trained": gap}, None, 1)
