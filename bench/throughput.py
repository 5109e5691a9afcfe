"""Measure training speed on one GPU: ceilings, our sizes in BF16 and FP8, the peers, each FP8 cell in turns with BF16.

    python bench/throughput.py --suite h100 --budget 560        what fits; the same command does the rest, about nine calls
    python bench/throughput.py --suite h100 --nanogpt DIR --nanochat DIR     the peers too, from their checkouts
    python bench/throughput.py --suite h100 --cells 125m/tensorwise+kernels  these cells, though they have rows
    python bench/throughput.py --suite toy                      the same path on two CPU cores: a rehearsal, no evidence
    python bench/throughput.py --table                          rows as Markdown, figures beside them
    python bench/throughput.py --check NEW.jsonl                exit 1 where a ratio of NEW lost more than 3 % against OUT

Every cell is a process of its own (bench/cell.py), several of which compile at the same time; then one alone works while the
others wait. Rows go to OUT as they come (bench/results/README.md tells their fields), what the processes say to a .log beside
it. A cell that is out of memory is tried once more, with half the micro-batch. At the budget's end what runs is killed; no row
is lost.
"""

import json
import shlex
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch

from bench import ceilings, loop, suites
from bench.bookkeeping import Book, run_row
from bench.children import Child, ChildError
from bench.clocks import Clocks
from bench.group import OutOfBudget, Timer
from bench.journal import Journal, rows_of
from bench.suites import Group, Loop
from runtime.cli import UserError, field_lines, nearest, read_options
from runtime.rows import read_bytes

ROOT = Path(__file__).resolve().parents[1]
CEILING_LIMIT_S = 90    # for one row of phase 0, its process's start included


@dataclass(frozen=True, kw_only=True)
class Options:
    suite: Literal["h100", "toy"] = "h100"      # what to measure: one GPU, or a rehearsal on a CPU
    budget: float = 560.0           # seconds after which nothing runs any more
    out: str | None = None          # JSON lines that receive the rows; none = bench/results/<suite>.jsonl
    nanogpt: str | None = None      # folder of a checkout of nanoGPT, to be timed too
    nanochat: str | None = None     # the same of nanochat
    cells: tuple[str, ...] = ()     # time only these, as SIZE/LABEL, though they have rows; () = all that have none
    commit: str | None = None       # of the files at hand, where they lie in no git checkout
    table: bool = False             # print the rows of OUT as Markdown, draw the figures beside it
    check: str | None = None        # JSON lines to hold against OUT

    POSITIONAL: ClassVar = ()

    def __post_init__(self):
        if not 1 <= self.budget <= 1e6:
            raise UserError(f"budget={self.budget} must be between 1 and 1,000,000 seconds")
        if self.table and self.check:
            raise UserError("--table and --check are two commands: give one of them")


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 done or out of budget, 1 a check or the machine failed, 2 the user's mistake, 130 interrupted."""
    if {"-h", "--help"} & set(arguments):
        print("\n".join([__doc__, *field_lines("", Options)]))
        return 0
    try:
        options = read_options(Options, arguments)
        out = Path(options.out) if options.out else ROOT / "bench" / "results" / f"{options.suite}.jsonl"
        if options.table:
            return table(out)
        if options.check:
            return check(out, Path(options.check))
        return measure(options, out, shlex.join(["python", "bench/throughput.py", *arguments]))
    except UserError as error:
        print(f"bench/throughput.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench/throughput.py: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench/throughput.py: interrupted; the rows so far stay, the same command goes on from there", file=sys.stderr)
        return 130


# ----------------------------------------------------------------------------------------------------------- measuring

def measure(options: Options, out: Path, command: str) -> int:
    """Time what is missing, within the budget. Raises UserError, OSError, KeyboardInterrupt; no child outlives it."""
    began = time.monotonic()
    suite, peers = _suite(options)
    jobs = _jobs(suite, options.cells)
    journal, clocks = Journal(out), None
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        book = Book(journal, run_row(options.suite, suite.device, command, options.commit, ROOT) | {"peers": peers})
        clocks = Clocks(is_on=suite.device == "cuda")

        def say(line: str) -> None:
            print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

        timer = Timer(suite, book, began + options.budget, out.with_suffix(".log"), clocks, say)
        timer.forced = {cell.key for group in jobs for cell in _cells(group)} if options.cells else set()
        say(f"{book.run['gpu'] or book.run['cpu']}: {options.suite}, rows go to {out}")
        left = 0
        try:
            if not options.cells:
                time_ceilings(suite, timer)
            for again in (False, True):     # what failed in an earlier call comes last
                left = sum(timer.time_group(job, again) if isinstance(job, Group) else 0 if again else time_loop(job.group, timer)
                           for job in jobs)
        except OutOfBudget:
            left = None
        say("the budget is spent; the same command goes on with what is missing" if left is None else
            f"{left} cells are left, the same command goes on with them" if left else "nothing is left to time")
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
        if clocks:
            clocks.close()
        journal.close()


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def _suite(options: Options) -> tuple[suites.Suite, dict[str, str]]:
    """The suite, and what there is to say of the peers' checkouts."""
    if options.suite == "toy":
        if options.nanogpt or options.nanochat:
            raise UserError("suite=toy has no peers: leave nanogpt and nanochat out, or take suite=h100")
        return suites.toy(), {}
    if not torch.cuda.is_available():
        raise UserError("suite=h100 needs a CUDA GPU, and torch sees none here: take suite=toy to rehearse on the CPU")
    folders = {"nanogpt": options.nanogpt, "nanochat_bf16": options.nanochat}
    if any(folders.values()):
        from bench import peers

        folders = {name: peers.check(name, folder) for name, folder in folders.items() if folder}
    return suites.h100(options.nanogpt, options.nanochat), {name: says for name, says in folders.items() if says}


def _cells(group: Group) -> tuple[suites.Cell, ...]:
    return (group.baseline, *group.members)


def _jobs(suite: suites.Suite, names: tuple[str, ...]) -> list[Group | Loop]:
    """The suite's jobs, or the first group that has each of the named cells, cut down to them."""
    if not names:
        return list(suite.jobs)
    groups = [job for job in suite.jobs if isinstance(job, Group)]
    known = list(dict.fromkeys(f"{cell.size}/{cell.label}" for group in groups for cell in _cells(group)))
    wanted: dict[Group, list] = {}
    for name in dict.fromkeys(names):
        if name not in known:
            raise UserError(f"cells={name!r} is no cell of this suite{nearest(name, known)}")
        at, cell = next((group, cell) for group in groups for cell in _cells(group) if f"{cell.size}/{cell.label}" == name)
        wanted.setdefault(at, []).append(cell)
    return [replace(group, members=tuple(cell for cell in cells if cell != group.baseline), beside=())
            for group, cells in wanted.items()]


def time_ceilings(suite: suites.Suite, timer: Timer) -> None:
    """Phase 0: what the machine can do at our shapes. A ceiling that fails is a line in the log, no end."""
    have = [key for row in timer.book.rows if (key := ceilings.key_of(row))]
    spec = {"device": suite.device, "have": have, "shapes": [
        {"size": cell.size, "B": cell.micro_batch, "T": cell.T, "C": c.n_embd, "H": c.n_head, "D": c.head_size, "F": c.n_ffn,
         "V": c.vocab_padded} for cell in suite.ceilings for c in [suites.config_of(cell)]]}
    if not ceilings.missing(spec):
        return
    child = Child("ceilings", [sys.executable, str(ROOT / "bench" / "ceilings.py"), json.dumps(spec)], timer.log, ROOT, {})
    try:
        while "row" in (answer := timer.within(child.read, CEILING_LIMIT_S)):
            timer.book.add(answer["row"])
        timer.say("ceilings: " + answer["said"])
    except ChildError as error:
        timer.say(f"ceilings FAILED: {error}")
    finally:
        child.kill()


def time_loop(group: Group, timer: Timer) -> int:
    """train.py against each cell of the group; returns how many are left for want of time."""
    book, left = timer.book, 0
    for cell in _cells(group):
        if any(row["kind"] == "loop" and (row["size"], row["label"]) == (cell.size, cell.label) for row in book.rows):
            continue
        which = {"size": cell.size, "label": cell.label, "T": cell.T, "micro_batch": cell.micro_batch}
        if book.in_this_call("cell", **which) is None:      # a ratio of two calls would be none
            timer.forced |= {cell.key}
            timer.time_group(Group(group.baseline, tuple(one for one in group.members if one == cell)))
            timer.forced -= {cell.key}
        beside = book.in_this_call("cell", **which)
        if beside is None or timer.left_s() < suites.GUESSES["loop_s"][cell.size]:
            left += 1
            continue
        try:
            rate = loop.tokens_per_second(cell, timer.log, timer.left_s)
        except ChildError as error:
            if timer.left_s() <= 0:
                raise OutOfBudget from None
            timer.say(f"train.py, {cell.size} {cell.label} FAILED: {error}; its words are in {timer.log}")
            continue
        of_cell = rate / beside["tok_per_s"]
        book.add({"kind": "loop", "size": cell.size, "label": cell.label, "tok_per_s": rate, "of_cell": of_cell})
        timer.say(f"train.py, {cell.size} {cell.label}: {rate:,.0f} tok/s, {of_cell:.3f} of its cell's")
    return left


# ------------------------------------------------------------------------------------------------------------- reading

def table(out: Path) -> int:
    """Print the table; the figures go beside OUT, where matplotlib is installed."""
    from bench.speed_table import table as lines

    if not out.is_file():
        raise UserError(f"there is no {out}: nothing was measured into it; give out=FILE, from the working folder")
    rows = rows_of(read_bytes(out))
    print("\n".join(lines(rows)))
    try:
        from bench.speed_figure import figures
    except ImportError as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 0
    for path in figures(rows, out.parent):
        print(path)
    return 0


def check(accepted: Path, new: Path) -> int:
    """1 where `new` lost against `accepted`, every loss a line."""
    from bench.speed_table import compare

    rows = []
    for path in (accepted, new):
        if not path.is_file():
            raise UserError(f"there is no {path}: --check NEW.jsonl holds NEW.jsonl against out=ACCEPTED.jsonl")
        rows.append(rows_of(read_bytes(path)))
    losses = compare(*rows)
    print("\n".join(map(str, losses)) if losses else f"{new} has lost nothing against {accepted}")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
