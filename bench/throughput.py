"""Time training of each size in FP8 against BF16 of the same size, one process a cell, up to four
in FP8 between two in BF16.

    python -m bench.throughput --suite h100 --budget 560  on one GPU what is missing, the most valuable first
    python -m bench.throughput --suite toy                the same path on a CPU: a rehearsal, says nothing about a GPU
    python -m bench.throughput --suite fourway --budget 480  BF16 eager and compiled, rowwise, tensorwise: whole trainings
    python -m bench.throughput --table                    rows of OUT as Markdown, a figure beside OUT
    python -m bench.throughput --check NEW.jsonl          exit code 1 where a ratio of NEW lost more than 3 % against OUT

A cell builds, compiles and initialises the model as train.py does, takes eight updates on one batch
(their losses and the first gradients are held against BF16's), then times whole optimizer steps:
micro-steps, clipping, AdamW, the step's host read. A row goes to OUT when its cell ends
(bench/results/README.md lists the fields), what the cell printed to a .log beside it. A cell that
fails costs its row alone; where BF16 is out of memory its size is repeated at half the micro-batch.
"""

import json
import shlex
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench import fourway
from bench.cells import Cell, groups_of
from bench.judging import check
from bench.measuring import measure
from bench.report import draw, rows_of, table
from bench.timing import Timer
from lib.command import command, run_command
from lib.errors import UserError, memory_error
from lib.files import to_line
from lib.machine import ROOT
from lib.text import nearest
from lib.values import FilePath


@dataclass(frozen=True, kw_only=True)
class Options:
    # what to time: on one GPU, or a rehearsal on a CPU; fourway: whole trainings, eager and compiled
    suite: Literal["h100", "toy", "fourway", "fourway-toy"] = "h100"
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
        try:
            row = measure(Cell(**json.loads(arguments[1])))
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
            row = {"failure": said, "oom": memory_error(error) is not None}
        Path(arguments[2]).write_bytes(to_line(row))
        return 0
    return run(__doc__, "throughput", Options, arguments, lambda options: groups_of(options.suite))


def run(
    doc: str,
    name: str,
    cls: type,
    arguments: list[str],
    groups_for: Callable[[Options], list[list[Cell]]],
) -> int:
    """The command bench/<name>.py. Returns the exit code: 0 done or out of budget, 1 a check
    failed, 2 the user's mistake."""

    def work(options: Options) -> int | str:
        if options.suite in fourway.SUITES:
            if name != "throughput":
                raise UserError(f"suite={options.suite} is one of bench.throughput alone")
            folder = Path(options.out or ROOT / "bench" / "results" / options.suite)
            if options.table:
                return fourway.page(folder)
            return fourway.run(options.suite, options.budget, folder)
        file = f"{options.suite}.jsonl" if name == "throughput" else f"{options.suite}_{name}.jsonl"
        out, cells = Path(options.out or ROOT / "bench" / "results" / file), options.cells
        if options.check:
            lost = check(rows_of(out), rows_of(Path(options.check)))
            print("\n".join(lost) or f"{options.check} has lost nothing against {out}")
            return 1 if lost else 0
        if not options.table:
            groups = groups_for(options)
            known = [cell.name for _, *members in groups for cell in members]
            if wrong := next((cell for cell in cells if cell not in known), None):
                raise UserError(
                    f"cells={wrong!r} is no FP8 cell of this suite{nearest(wrong, known)}"
                )
            groups = [
                [group[0], *(cell for cell in group[1:] if not cells or cell.name in cells)]
                for group in groups
            ]
            told = shlex.join(["python", "-m", f"bench.{name}", *arguments])
            Timer(out, groups[0][0].device, options.budget, told, options.commit, cells).run(groups)
        rows, figure = rows_of(out), out.with_suffix(".png")
        with suppress(ImportError):  # a machine for an hour may lack matplotlib
            draw(rows, figure)
        return f"\n{table(rows)}\n" + f"\n{figure}" * figure.exists()

    return command(doc, cls)(work)(arguments)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
