"""Read anyone's paired losses from a table: a row for each run, or for each point of its loss
curve.

Rows pair where their pair column, N and D are equal and only the arm differs. Points of one curve
share the run's trajectory, so they count once in every interval."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from lib.errors import UserError
from lib.text import listed
from scaling.gap_words import TableColumns
from scaling.paired.gaps import Gap, Pair
from scaling.records import Record
from scaling.tables import FEWEST_PARAMETERS, Table, read_table, unit_doubts

# cells of the arm column, in any case, that name the baseline
BASELINES = ("bf16", "bfloat16", "baseline")


@dataclass(frozen=True)
class TableRun:
    """One row, as far as the analysis of pairs looks at a run; counts are 1 where the table does
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
    convention: str = "total"
    repeat: int = 0
    device: str = ""  # unknown, so there is no speed
    continued_from: str | None = None

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
    runs: dict[tuple, TableRun] = {}
    lines: dict[tuple, int | str] = {}
    for line, row in table.rows.items():
        run = _run(path, line, row, arm, pair, loss, n, d, base)
        key = run.recipe, run.pair_id, run.N, run.tokens
        if key in runs:
            missing = "" if n and d else "; give --n and --d where they tell these rows apart"
            raise UserError(
                f"{path} lines {lines[key]} and {line} are both the {row[arm]} run of pair"
                f" {run.pair_id!r}{missing}"
            )
        runs[key], lines[key] = run, line
    found, alone = [], []
    for key, run in runs.items():
        if run.is_baseline:
            continue
        baseline = runs.get((base, *key[1:]))
        if baseline is None:
            alone.append(lines[key])
        else:
            found.append(_pair(baseline, run))
    paired = {id(pair.bf16) for pair in found}
    alone += [lines[key] for key, run in runs.items() if run.is_baseline and id(run) not in paired]
    if not found:
        raise UserError(
            f"{path} holds no pair: no row of {arm}={base} shares its {pair}, N and D with another"
            " arm's"
        )
    notes = [*table.notes]
    if n and d:
        counts = np.array([(run.N, run.tokens) for run in runs.values()], dtype=float)
        notes += unit_doubts(counts[:, 0], counts[:, 1], path.name)
    if alone:
        notes.append(f"unpaired rows of {path.name}: lines {listed(alone)}")
    columns = TableColumns(arm, pair, loss, n, d, base)
    return TablePairs(list(runs.values()), found, notes, table.sha256, columns)


def _baseline(path: Path, table: Table, arm: str) -> str:
    names = list(dict.fromkeys(row[arm] for row in table.rows.values()))
    matching = [name for name in names if name.lower() in BASELINES]
    if len(matching) != 1:
        raise UserError(
            f"{path}: which {arm} is the baseline? Give base=NAME, one of {listed(names)}"
        )
    return matching[0]


def _run(path, line, row, arm, pair, loss, n, d, base) -> TableRun:
    def number(name: str) -> float:
        try:
            value = float(row[name])
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise UserError(
                f"{path} line {line}, column {name!r}: {row[name]!r} is no plain finite number"
                " above zero such as 1.24e8"
            )
        return value

    def count(name: str) -> int:
        value = number(name)
        if value < FEWEST_PARAMETERS and value != round(value):
            raise UserError(
                f"{path} line {line}, column {name!r}: {row[name]} is no count; is it in millions"
                " or billions? Give counts such as 1.24e8, nothing is converted"
            )
        return round(value)

    recipe = row[arm]
    if not recipe or not row[pair]:
        raise UserError(f"{path} line {line}: the cell of {arm if not recipe else pair!r} is empty")
    N = count(n) if n else 1
    tokens = count(d) if d else 1
    return TableRun(
        run_id=f"{path.name} line {line}",
        pair_id=row[pair],
        recipe=recipe,
        is_baseline=recipe == base,
        N=N,
        tokens=tokens,
        loss_bf16=number(loss),
        loss_as_trained=number(loss),
        trunk=f"{recipe} {row[pair]} {N}",
        seed=row[pair],
    )


def _pair(baseline: TableRun, run: TableRun) -> Pair:
    nats = run.loss_bf16 - baseline.loss_bf16
    gap = Gap(nats, 100 * nats / baseline.loss_bf16, None)
    # A TableRun has what the analysis of pairs reads of a Record.
    return Pair(
        cast(Record, baseline), cast(Record, run), {"bf16": gap, "as_trained": gap}, None, 1
    )
