"""Time training of each size in FP8 against BF16 of the same size, one process a cell, up to four
in FP8 between two in BF16.

    python -m bench.throughput --suite h100 --budget 560  what is missing on one GPU
    python -m bench.throughput --suite toy                a rehearsal on a CPU
    python -m bench.throughput --suite documents          with data.document_mask and without
    python -m bench.throughput --suite fourway --budget 480  whole trainings in turns
    python -m bench.throughput --table                    rows of OUT as Markdown, and a figure
    python -m bench.throughput --check NEW.jsonl          exit code 1 where a ratio lost 3 %

A cell builds, compiles and initialises the model as train.py does, takes eight updates on one batch
(their losses and the first gradients are held against BF16's), then times whole optimizer steps:
micro-steps, clipping, AdamW, the step's host read. A row goes to OUT when its cell ends
(docs/schemas.md lists the fields), what the cell printed to a .log beside it. A cell that
fails costs its row alone; where BF16 is out of memory its size is repeated at half the micro-batch.
"""

import json
import shlex
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench import fourway
from bench.cells import Cell, cell_from, groups_of
from bench.judging import regressions
from bench.measuring import measure_cell
from bench.report import draw_ratios, rows_beside_peers, rows_page
from bench.rows import CellFailure, Measurement, rows_of
from bench.timing import Timer
from lib.command import command, run_command
from lib.errors import UserError, memory_error
from lib.files import to_line
from lib.machine import ROOT
from lib.text import nearest
from lib.values import FilePath

UNFINISHED = 3  # exit code where the budget has left something, as scaling/sweep.py's


@dataclass(frozen=True, kw_only=True)
class Options:
    # what to time: on one GPU, or a rehearsal on a CPU; documents: data.document_mask against no
    # mask, in BF16; fourway: whole trainings, eager and compiled
    suite: Literal["h100", "toy", "documents", "documents-toy", "fourway", "fourway-toy"] = "h100"
    budget: float = 560.0  # seconds after which nothing runs any more
    # JSON lines that receive the rows; none = a file of the suite's name in bench/results
    out: FilePath | None = None
    # time only these, as SIZE/LABEL, though they have rows; () = all that have none
    cells: tuple[str, ...] = ()
    commit: str | None = None  # of these files, where git does not tell it
    table: bool = False  # print the rows of OUT, draw the figure beside it
    check: FilePath | None = None  # JSON lines to hold against OUT


def main(arguments: list[str]) -> int:
    # the process of a cell, given as JSON: writes its row, or a "failure", to a file
    if arguments[:1] == ["--cell"]:
        Path(arguments[2]).write_bytes(to_line(asdict(_answer(arguments[1]))))
        return 0
    return run_suite(
        __doc__, "throughput", Options, arguments, lambda options: groups_of(options.suite)
    )


def _answer(cell: str) -> Measurement | CellFailure:
    """The answer of a cell, given as JSON."""
    try:
        return measure_cell(cell_from(json.loads(cell)))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        return CellFailure(failure=reason, oom=memory_error(error) is not None)


def run_suite(
    doc: str,
    name: str,
    cls: type,
    arguments: list[str],
    groups_for: Callable[[Any], list[list[Cell]]],
) -> int:
    """The command bench/<name>.py. Returns the exit code: 0 done, 1 a check or a training
    failed, 2 the user's mistake, 3 cells are left."""

    def work(options: Options) -> int | str:
        if options.suite in fourway.SUITES:
            return _run_fourway(options, name)
        out = Path(options.out or _default_out(options.suite, name))
        if options.check:
            return _check(out, Path(options.check))
        if not options.table:
            groups = choose_cells(groups_for(options), options.cells)
            words = shlex.join(["python", "-m", f"bench.{name}", *arguments])
            device = groups[0][0].device
            timer = Timer(out, device, options.budget, words, options.commit, options.cells)
            timer.run(groups)
            print(_report(out))
            return UNFINISHED if any(timer.due(group) for group in groups) else 0
        return _report(out)

    return command(doc, cls)(work)(arguments)


def _run_fourway(options: Options, name: str) -> int | str:
    if name != "throughput":
        raise UserError(f"suite={options.suite} is one of bench.throughput alone")
    folder = Path(options.out or ROOT / "bench" / "results" / options.suite)
    if options.table:
        return fourway.fourway_page(folder)
    print(fourway.train_arms(options.suite, options.budget, folder))
    return 0 if fourway.all_trained(options.suite, folder) else 1


def _default_out(suite: str, name: str) -> Path:
    file = f"{suite}.jsonl" if name == "throughput" else f"{suite}_{name}.jsonl"
    return ROOT / "bench" / "results" / file


def _check(out: Path, new: Path) -> int:
    lines = regressions(rows_of(out), rows_of(new))
    print("\n".join(lines) or f"{new} has lost nothing against {out}")
    return 1 if lines else 0


def choose_cells(groups: list[list[Cell]], names: Sequence[str]) -> list[list[Cell]]:
    """All groups where there are no `names`. Else the cells of these names, in their order, in one
    group for each BF16 cell: what is timed in turns with the same BF16 cells costs the fewest of
    them. Raises UserError for a name that no cell has."""
    if not names:
        return groups
    group_of = {cell.name: (group[0], cell) for group in groups for cell in group[1:]}
    chosen_groups: dict[str, list[Cell]] = {}
    for name in dict.fromkeys(names):
        if name not in group_of:
            raise UserError(
                f"cells={name!r} is no FP8 cell of this suite{nearest(name, list(group_of))}"
            )
        baseline, cell = group_of[name]
        chosen_groups.setdefault(repr(baseline), [baseline]).append(cell)
    return list(chosen_groups.values())


def _report(out: Path) -> str:
    """The table, and the path of the figure, which is drawn anew."""
    rows = rows_of(out)
    figure = out.with_suffix(".png")
    with suppress(ImportError):  # a machine for an hour may lack matplotlib
        draw_ratios([*rows_beside_peers(out), *rows], figure)
    page = f"\n{rows_page(rows)}\n"
    return f"{page}\n{figure}" if figure.exists() else page


if __name__ == "__main__":
    raise SystemExit(run_command(main))
