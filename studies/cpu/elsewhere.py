"""What another kind of CPU does to a run: the rows of elsewhere.jsonl against those of runs.jsonl.

    python studies/cpu/elsewhere.py

Each run of both was trained as on a CPU without AVX-512 and on one that has it: the same packages,
seed, tokens and arithmetic. Libraries choose other kernels there, which sum in another order;
everything else is equal. So the differences are what rounding alone does, and a gap of one pair
cannot be known better than they are wide. The runs of mxfp8_norms are those that stood beside BF16
runs of the other kind of CPU until 2026-11-30."""

import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lib.command import command, run_command
from lib.machine import ROOT
from lib.text import grid
from scaling.ledger import Entry, read_entries

FOLDER = ROOT / "studies/cpu"
RUN = re.compile(r"cpu_30k_(?P<arm>\w+)_t(?P<budget>\d+)_s(?P<seed>\d+)")
CONTROL = "nvfp4"


@dataclass(frozen=True, kw_only=True)
class Options:
    pass


@dataclass(frozen=True)
class Change:
    """Of a run, or of a pair's gap, from one kind of machine to the other."""

    arm: str
    percent: float  # of the loss


@command(__doc__, Options)
def main(options: Options) -> str:
    old_entries = read_entries(FOLDER / "elsewhere.jsonl")
    new_entries = read_entries(FOLDER / "runs.jsonl")
    table = [["what", "arm", "number", "median of the sizes [%]", "largest [%]", "RMS [%]"]]
    for what, changes in (
        ("loss of a run", changes_of_losses(old_entries, new_entries)),
        ("gap of a pair", changes_of_gaps(old_entries, new_entries)),
    ):
        for arm, is_shown in (
            ("all but the control", lambda change: change.arm != CONTROL),
            (CONTROL, lambda change: change.arm == CONTROL),
        ):
            values = [change.percent for change in changes if is_shown(change)]
            sizes = [abs(value) for value in values]
            table.append(
                [
                    what,
                    arm,
                    str(len(values)),
                    f"{statistics.median(sizes):.2f}",
                    f"{max(sizes):.2f}",
                    f"{root_mean_square(values):.2f}",
                ]
            )
    return grid(table)


def changes_of_losses(old_entries: dict[str, Entry], new_entries: dict[str, Entry]) -> list[Change]:
    """Of the validation losses in BF16 of the runs that both have, from a CPU without AVX-512 to
    one that has it."""
    changes = []
    for run, entry in old_entries.items():
        first, second = entry, new_entries[run]
        if second.machine.is_avx2_alone:
            first, second = second, first
        percent = 100 * (loss_of(second) / loss_of(first) - 1)
        changes.append(Change(arm_of(run), percent))
    return changes


def changes_of_gaps(old_entries: dict[str, Entry], new_entries: dict[str, Entry]) -> list[Change]:
    """Of each arm's gap to BF16, of the same seed and budget, where both runs were repeated."""
    changes = []
    for run in old_entries:
        baseline = baseline_of(run)
        if arm_of(run).startswith("bf16") or baseline not in old_entries:
            continue
        percent = gap(new_entries, run, baseline) - gap(old_entries, run, baseline)
        changes.append(Change(arm_of(run), percent))
    return changes


def gap(entries: dict[str, Entry], run: str, baseline: str) -> float:
    """In per cent of the baseline's loss."""
    return 100 * (loss_of(entries[run]) / loss_of(entries[baseline]) - 1)


def root_mean_square(changes: Sequence[float]) -> float:
    """Not the deviation from their mean: changes in one direction are changes too."""
    return math.sqrt(statistics.fmean(change**2 for change in changes))


def loss_of(entry: Entry) -> float:
    loss = entry.summary["loss_bf16"]
    assert isinstance(loss, float)
    return loss


def arm_of(run: str) -> str:
    match = RUN.fullmatch(run)
    assert match is not None, run
    return match["arm"]


def baseline_of(run: str) -> str:
    """The BF16 run of the same seed and budget."""
    match = RUN.fullmatch(run)
    assert match is not None, run
    return f"cpu_30k_bf16_t{match['budget']}_s{match['seed']}"


if __name__ == "__main__":
    sys.exit(run_command(main))
