"""Everything that a GPU at hand for minutes can show, the most valuable first.

    python -m bench.borrowed seconds=540       the parts in order; each result a line at once
    python -m bench.borrowed seconds=540       again: goes on with what is missing
    python -m bench.borrowed list=true         what each part shows, its seconds, what is there
    python -m bench.borrowed parts=tests,1p5b  these alone
    python -m bench.borrowed rehearse=true     on a CPU, tiny, without what a bare machine lacks
    python -m bench.borrowed report=true       the results as Markdown
    python -m bench.borrowed write=true        the same, and into docs/speed.md and README.md

It needs a checkout, torch, torchao, numpy and pytest; a part that needs more, such as other code
bases below data/peers, is left out where that is not there. A part is a process of its own with a
time limit, what it prints goes to OUT/<part>.log, its results to OUT/borrowed.jsonl, those of
single cells to bench/results and those of Linears to fp8/speed.json as ever; a rehearsal writes
below OUT/rehearsal alone. Before each part the time left is compared with what the part took the
last time, or is guessed to take; what does not fit is left out and named, and a later, shorter part
may still fit. Of a part that times cells three have to fit, and the next call times those that have
no row yet. A part that takes twice as long as expected is cut, so that one alone cannot eat the
time of all. The tests run again at each commit. A part that failed runs again, after all others."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from bench.rows import CellRow, rows_of
from bench.timing import TURN, WARM_S, expected_s
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import append_line, read_rows, to_line
from lib.machine import ROOT, killed_with_parent, nvidia_smi
from lib.text import duration, grid, nearest
from lib.values import FilePath
from runtime.config import positive
from runtime.environment import environment

LINES = "borrowed.jsonl"
BARE = ROOT / "bench" / "bare"  # its sitecustomize.py hides what a bare machine lacks
CELLS = "bench/results/h100.jsonl"  # where bench.throughput keeps the rows of a GPU
PEER_CELLS = "bench/results/h100_peers.jsonl"  # and bench.peers
SETUP = "setup.json"  # in the folder of a part: the GPU, torch and commit that its files are of
KEPT_S = 15.0  # left at the end, to write and to go
# of a part's time, in which Python and torch start and the part writes what it has: its own budget
# is less by so much, or it would be killed before it has written
START_S = 12.0
LONGEST = 2  # times what a part was expected to take, after which it is cut
UNFINISHED = 3  # exit code of the commands whose budget has left something
SCHEMA_VERSION = 1

Outcome = Literal["done", "failed", "cut", "left out"]


@dataclass(frozen=True)
class RatioTarget:
    """What a cell of bench.throughput has to reach."""

    cell: str  # size/label
    least_ratio: float  # FP8's tokens/s per FLOP over BF16's


@dataclass(frozen=True, kw_only=True)
class BorrowedPart:
    """One process. In its words {out} stands for the part's own folder, {budget} for the seconds
    that it may take once it has started, {cells} for those of its cells that have no row yet; a
    word with {commit} goes where commit= is not given."""

    name: str
    shows: str  # what will be known by it
    measures: str  # quantities, with their units
    answers: str  # the question, where no number is aimed at
    targets: tuple[RatioTarget, ...] = ()  # numbers that are aimed at
    guess_s: float  # until it has run on this GPU
    words: tuple[str, ...]  # behind `python`
    # name of a package, and words that are added on a machine which has it
    words_with: tuple[str, tuple[str, ...]] | None = None
    rehearsal: tuple[str, ...]  # on a CPU
    results: str = ""  # file of JSON lines in the part's folder that holds its results
    # folder that a plain checkout does not have, and how to get it; without it the part is left out
    needs: tuple[str, str] | None = None
    rehearsal_without: tuple[str, ...] = ()  # its rehearsal where that folder is not there
    # of a part that goes on where it stopped: it may take all the time that is left, and guess_s
    # is what it takes at least
    exit_code_when_unfinished: int | None = None
    cells: tuple[str, ...] = ()  # of bench.throughput, each of which must get a row in CELLS
    is_due_at_each_commit: bool = False


_COMMIT = "commit={commit}"


def _cells(sizes: str, labels: str) -> tuple[str, ...]:
    return tuple(f"{size}/{label}" for size in sizes.split() for label in labels.split())


def _timing(
    name: str,
    shows: str,
    guess_s: float,
    cells: tuple[str, ...],
    answers: str,
    targets: tuple[RatioTarget, ...] = (),
) -> BorrowedPart:
    """A part that times cells of bench.throughput."""
    command = ("-m", "bench.throughput", "suite=h100", "budget={budget}", f"out={CELLS}", _COMMIT)
    return BorrowedPart(
        name=name,
        shows=shows,
        measures=_RATIO,
        answers=answers,
        targets=targets,
        guess_s=guess_s,
        words=(*command, "cells={cells}"),
        rehearsal=_TOY_CELLS,
        exit_code_when_unfinished=UNFINISHED,
        cells=cells,
    )


_TOY_CELLS = ("-m", "bench.throughput", "suite=toy", "budget={budget}", "out={out}/../toy.jsonl")
_TOY_MODEL = (
    "set=model.n_layer=1,model.n_head=2,model.n_embd=64,model.n_ffn=128,model.n_ctx=64,"
    "data.tokens_per_step=128,data.micro_batch=1,eval.tokens=1024,parallel.compile=off"
)
_TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "bench.outcomes", "tests/test_gpu.py")
_STUDY = ("scaling/sweep.py", "configs/study_h100.py")
_RATIO = "tokens/s per FLOP over BF16's before and after it; tokens/s, MFU, GiB, 30 kernels"
_TRAINING = "loss of each step, tokens/s, GiB of tensors beside --plan's"
_NEAR_PLAN = "memory within 5 % of --plan, and FP8's losses like BF16's"
OURS, TORCHAO = "tensorwise+kernels", "tensorwise"
_PEERS = ("nanogpt=data/peers/nanoGPT", "nanochat=data/peers/nanochat")

PARTS = (
    BorrowedPart(
        name="tests",
        shows="every recipe against fp64, our kernels against torchao bit for bit, resume, saves",
        measures="the outcome of each test, passed, failed or skipped, and its seconds",
        answers="all pass",
        guess_s=150,
        words=_TESTS,
        words_with=("xdist", ("-n", "4")),  # four tests at a time
        rehearsal=(*_TESTS, "--collect-only"),
        results="outcomes.jsonl",
        is_due_at_each_commit=True,
    ),
    BorrowedPart(
        name="flagship",
        shows="sixty steps of gpt350m in BF16 and FP8 as a user runs them; memory against --plan",
        measures=_TRAINING,
        answers=_NEAR_PLAN,
        guess_s=110,
        # the config's own 524,288 tokens a step would take five minutes; two micro-batches remain
        words=("-m", "bench.trainings", "configs/gpt350m_bf16.py", "configs/gpt350m_fp8.py")
        + ("steps=60", "seconds={budget}", "out={out}", "set=data.tokens_per_step=65536"),
        rehearsal=("-m", "bench.trainings", "configs/gpt350m_bf16.py", "configs/gpt350m_fp8.py")
        + ("steps=3", "seconds={budget}", "out={out}", _TOY_MODEL),
        results="trainings.jsonl",
    ),
    _timing(
        "1p5b",
        "1.5B: FP8 over BF16 by our kernels, with head, by producers that write FP8, by torchao",
        480,
        _cells("1p5b", f"{OURS} {OURS}+bounded {OURS}+bounded+head {OURS}+head {TORCHAO}"),
        "whether producers that write FP8 gain what the model says",
        (
            RatioTarget(f"1p5b/{OURS}+bounded", 1.40),
            RatioTarget(f"1p5b/{OURS}+bounded+head", 1.45),
        ),
    ),
    _timing(
        "350m",
        "350M: FP8 over BF16 by our kernels, with head, by torchao",
        160,
        _cells("350m", f"{OURS} {OURS}+head {TORCHAO}"),
        "the default FP8 path at the present commit",
    ),
    _timing(
        "125m_and_760m",
        "125M with head, which has never been timed, and 760M",
        260,
        _cells("125m 760m", f"{OURS}+head {OURS}"),
        "the default FP8 path at the present commit",
        (RatioTarget(f"125m/{OURS}+head", 1.12),),
    ),
    BorrowedPart(
        name="125m_memory",
        shows="sixty steps of gpt125m in BF16 and FP8 at its own batch, against --plan",
        measures=_TRAINING,
        answers=_NEAR_PLAN,
        guess_s=100,
        words=("-m", "bench.trainings", "configs/gpt125m_bf16.py", "configs/gpt125m_fp8.py")
        + ("steps=60", "seconds={budget}", "out={out}", "set=data.tokens_per_step=131072"),
        rehearsal=("-m", "bench.trainings", "configs/gpt125m_bf16.py", "configs/gpt125m_fp8.py")
        + ("steps=3", "seconds={budget}", "out={out}", _TOY_MODEL),
        results="trainings.jsonl",
    ),
    _timing(
        "blockwise",
        "whether the compiled blockwise recipe trains at 1.5B, within a limit of its own",
        220,
        ("1p5b/blockwise",),
        "whether it compiles and trains at all",
    ),
    BorrowedPart(
        name="fourway",
        shows="BF16 eager and compiled, rowwise, tensorwise, as configured; 350M, 1.5B, T = 4096",
        measures="loss by step, tokens/s, TFLOP/s, MFU, time with and without compilation, GiB",
        answers="what compilation and FP8 gain each; a figure of four panels",
        guess_s=300,
        words=("-m", "bench.throughput", "suite=fourway", "budget={budget}", "out={out}"),
        rehearsal=("-m", "bench.throughput", "suite=fourway-toy", "budget={budget}", "out={out}"),
        results="trainings.jsonl",
    ),
    BorrowedPart(
        name="peers",
        shows="nanoGPT and nanochat in turns with ours, per FLOP, at 125M and 1.5B",
        measures=_RATIO,
        answers="whether our BF16 is as fast as theirs, our FP8 faster than nanochat's",
        guess_s=200,
        words=("-m", "bench.peers", *_PEERS, "budget={budget}", f"out={PEER_CELLS}", _COMMIT),
        rehearsal=("-m", "bench.peers", *_PEERS, "suite=toy", "budget={budget}")
        + ("out={out}/../toy_peers.jsonl",),
        needs=("data/peers", "the checkouts nanoGPT and nanochat, at the commits of bench.peers"),
        exit_code_when_unfinished=UNFINISHED,
        rehearsal_without=("-m", "bench.peers", "table=true", "out={out}/../toy.jsonl"),
    ),
    BorrowedPart(
        name="linears",
        shows="every Linear of the six sizes by each recipe: the table of fp8.recipe=auto",
        measures="time of BF16 over that of FP8, forward and backward, by shape",
        answers="which Linears gain nothing by FP8",
        guess_s=60,
        words=("-m", "bench.kernels", "budget={budget}", _COMMIT),
        rehearsal=("-m", "bench.kernels", "shapes=64x64", "tokens=64", "recipes=tensorwise")
        + ("turns=1", "out={out}/speed.json"),
        exit_code_when_unfinished=UNFINISHED,
    ),
    BorrowedPart(
        name="study",
        shows="runs of configs/study_h100.py: what FP8 costs on real text, in slices",
        measures="validation loss in BF16 of pairs, nats a token",
        answers="what FP8 costs at 3M to 24M parameters",
        guess_s=60,
        words=(*_STUDY, "run=true", "limit={budget}"),
        rehearsal=_STUDY,
        rehearsal_without=_STUDY,
        needs=("data/h100", "shards by the commands at the top of configs/study_h100.py"),
        exit_code_when_unfinished=UNFINISHED,
    ),
)


@dataclass(frozen=True, kw_only=True)
class BorrowedRow:
    """A line of borrowed.jsonl: what became of a part, or one result of it."""

    schema_version: int = SCHEMA_VERSION
    part: str
    run: str  # when the call began, UTC
    gpu: str | None  # null in a rehearsal
    commit: str | None
    driver: str | None = None
    torch: str | None = None
    outcome: Outcome | None = None  # null in a line with a result
    why: str | None = None  # of an outcome that is not done
    seconds: float | None = None  # of the part's process
    result: dict[str, Any] = field(default_factory=dict)  # of a line with a result


@dataclass(frozen=True, kw_only=True)
class Options:
    seconds: float = 540.0  # of this call, its start included
    out: FilePath = "bench/results/borrowed"  # folder of the lines and logs
    parts: tuple[str, ...] = ()  # these alone, though they are done; () = all that are not
    commit: str | None = None  # of these files, where git does not tell it
    rehearse: bool = False  # tiny sizes on a CPU: says nothing about a GPU
    list: bool = False  # print the parts instead of running them
    report: bool = False  # print the results as Markdown
    write: bool = False  # print them and put them into docs/speed.md and README.md


@command(__doc__, Options)
def main(options: Options) -> str | int:
    problems = positive(options, "seconds")
    if problems:
        raise UserError(problems[0])
    names = [part.name for part in PARTS]
    for name in options.parts:
        if name not in names:
            raise UserError(f"parts={name!r} is no part{nearest(name, names)}")
    folder = Path(options.out)
    if options.report or options.write:
        from bench import borrowed_report

        return borrowed_report.report(folder, ROOT / CELLS, is_to_write=options.write)
    if options.list:
        return format_parts(folder)
    if options.rehearse:
        folder = folder / "rehearsal"  # else a part on the GPU would take its files for its own
    call = Call(options, folder)
    return call.run()


class Call:
    """One call of the command: its parts within its seconds."""

    def __init__(self, options: Options, folder: Path):
        """Raises UserError where there is no GPU, or `folder` holds what another has made."""
        if not options.rehearse and not torch.cuda.is_available():
            raise UserError(
                "this needs a CUDA GPU, and torch sees none here: rehearse=true runs every part on"
                " the CPU at tiny sizes"
            )
        _refuse_foreign_folders(folder)
        self.options = options
        self.folder = folder
        self.end = time.monotonic() + options.seconds
        device = torch.device("cpu" if options.rehearse else "cuda")
        env = asdict(environment(device, ROOT))
        self.gpu = None if options.rehearse else env["device"]
        self.head = {
            "run": env["t_start"],
            "gpu": self.gpu,
            "commit": options.commit or env["git_commit"],
            "driver": nvidia_smi("driver_version")[0],
            "torch": env["torch"],
        }
        folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """0 where all parts are done whose folders are there, 1 where one failed, was cut or left
        out."""
        if self.head["commit"] is None:
            print("git tells no commit: give commit=, or no row will say what has run", flush=True)
        outcomes = []
        for part in self.due():
            missing = self._missing_folder(part)
            if missing is None or self._has_rehearsal_without(part):
                outcomes.append(self.run_part(part))
            else:
                self._end(part, "left out", missing, None)
        if not self.options.rehearse:
            places = [self.folder, CELLS, PEER_CELLS, "fp8/speed.json"]
            print(f"results are in {', '.join(map(str, places))}", flush=True)
        if all(outcome == "done" for outcome in outcomes):
            return 0
        print("the same command goes on with what is missing", flush=True)
        return 1

    def due(self) -> list[BorrowedPart]:
        """What is to run, in this order: the parts that were asked for; or those that are not done
        on this GPU, those last that this commit has tried in vain."""
        if self.options.parts:
            return [part for part in PARTS if part.name in self.options.parts]
        missing = [part for part in PARTS if not self._is_done(part)]
        return sorted(missing, key=self._was_tried)  # stable: else as in PARTS

    def _is_done(self, part: BorrowedPart) -> bool:
        done = [row for row in self.rows_here(part) if row.outcome == "done"]
        if part.is_due_at_each_commit:
            done = [row for row in done if row.commit == self.head["commit"]]
        return done != []

    def _was_tried(self, part: BorrowedPart) -> bool:
        """Whether it ended at this commit in a way that another try will hardly change: it failed,
        or was cut though it does not go on where it stopped."""
        tries = [row for row in self.rows_here(part) if row.outcome not in (None, "left out")]
        if not tries or tries[-1].commit != self.head["commit"]:
            return False
        return tries[-1].outcome == "failed" or part.exit_code_when_unfinished is None

    def _missing_folder(self, part: BorrowedPart) -> str | None:
        """In words, the folder that the part needs and a plain checkout does not have."""
        if part.needs is None or (ROOT / part.needs[0]).is_dir():
            return None
        folder, content = part.needs
        return f"there is no {folder} ({content})"

    def _has_rehearsal_without(self, part: BorrowedPart) -> bool:
        return self.options.rehearse and part.rehearsal_without != ()

    def rows_here(self, part: BorrowedPart) -> list[BorrowedRow]:
        """The part's rows of this GPU and this version of torch."""
        setup = (part.name, self.gpu, self.head["torch"])
        rows = read_borrowed_rows(self.folder)
        return [row for row in rows if (row.part, row.gpu, row.torch) == setup]

    def estimate(self, part: BorrowedPart) -> float:
        """Seconds that the part is expected to take: of cells, what others of their sizes took on
        this GPU; of another part, what it took here, or the guess."""
        if part.cells:
            return self._seconds_of_cells(self.cells_due(part))
        taken = [
            row.seconds
            for row in self.rows_here(part)
            if row.outcome == "done" and row.seconds is not None
        ]
        return taken[-1] * 1.1 if taken else part.guess_s

    def least(self, part: BorrowedPart) -> float:
        """Seconds without which the part is not begun: of cells, those of one between two of BF16;
        of another part, of all of it."""
        if not part.cells:
            return self.estimate(part)
        return min(self._seconds_of_cells([cell]) for cell in self.cells_due(part))

    def _seconds_of_cells(self, cells: Sequence[str]) -> float:
        """With their BF16 cells, one before and one after each turn."""
        rows = self._rows_of_cells()
        total = START_S + WARM_S
        sizes = [cell.partition("/")[0] for cell in cells]
        for size in dict.fromkeys(sizes):
            n_cells = sizes.count(size)
            n_bf16 = math.ceil(n_cells / TURN) + 1
            total += (n_cells + n_bf16) * expected_s(size, rows)
        return total

    def _rows_of_cells(self) -> list[CellRow]:
        """Those of this GPU and this version of torch."""
        setup = (self.gpu, self.head["torch"])
        rows = rows_on_gpu(ROOT / CELLS)
        return [row for row in rows if (row.provenance.gpu, row.provenance.torch) == setup]

    def cells_due(self, part: BorrowedPart) -> list[str]:
        """The part's cells without a final row of this commit, or since the part was begun; of a
        part that is done and asked for again, without one of this call."""
        runs = [str(self.head["run"])]
        if not self._is_done(part):
            runs += [row.run for row in self.rows_here(part) if row.outcome in ("cut", "failed")]
        timed = set()
        for row in self._rows_of_cells():
            is_of_commit = not self._is_done(part) and self._is_of_this_commit(row)
            if row.is_final and (is_of_commit or row.provenance.run >= min(runs)):
                timed.add(row.cell.name)
        return [cell for cell in part.cells if cell not in timed]

    def _is_of_this_commit(self, row: CellRow) -> bool:
        commit = row.provenance.commit
        return commit is not None and commit == self.head["commit"] and not row.provenance.dirty

    def run_part(self, part: BorrowedPart) -> Outcome:
        left_s = self.end - time.monotonic() - KEPT_S
        needed_s, expected = 0.0, left_s
        if not self.options.rehearse:
            if part.cells and not self.cells_due(part):
                return self._end(part, "done", None, None)
            needed_s, expected = self.least(part), self.estimate(part)
        if left_s < max(needed_s, 1.0):
            why = f"needs {needed_s:.0f} s, {max(0.0, left_s):.0f} s are left"
            return self._end(part, "left out", why, None)
        print(f"[{left_s:5.0f} s left] {part.name}: {part.shows}", flush=True)
        part_folder = self._prepare_folder(part)
        start = time.monotonic()
        limit_s = left_s if self._may_take_all(part) else min(left_s, LONGEST * expected)
        try:
            exit_code = self._process(part, part_folder, limit_s)
        finally:  # after Ctrl-C too
            for result in self._results(part, part_folder):
                self._add(part, result=result)
        seconds = time.monotonic() - start
        if exit_code is None:
            return self._end(part, "cut", f"not done after {seconds:.0f} s", seconds)
        if exit_code not in (0, part.exit_code_when_unfinished):
            log = self._log(part)
            why = f"exit code {exit_code}: {_last_line(log)} ({log})"
            return self._end(part, "failed", why, seconds)
        missing = [] if self.options.rehearse else self.cells_due(part)
        if missing:
            return self._end(part, "cut", f"no row of {', '.join(missing)}", seconds)
        if exit_code != 0:
            return self._end(part, "cut", "it goes on where it stopped", seconds)
        return self._end(part, "done", None, seconds)

    def _prepare_folder(self, part: BorrowedPart) -> Path:
        """The part's folder. What is in it of another GPU, torch or commit goes, and what is in it
        of a part that is done: its lines are in LINES, and the part would take the rest for its
        own."""
        folder = self.folder / part.name
        setup_file = folder / SETUP
        setup = {key: self.head[key] for key in ("gpu", "torch", "commit")}
        is_same = read_rows(setup_file) == [setup]
        if folder.exists() and (self._is_done(part) or not is_same):
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        setup_file.write_bytes(to_line(setup))
        return folder

    def _may_take_all(self, part: BorrowedPart) -> bool:
        goes_on = part.exit_code_when_unfinished is not None and not part.cells
        return self.options.rehearse or goes_on

    def _process(self, part: BorrowedPart, part_folder: Path, limit_s: float) -> int | None:
        """Its exit code, None where it was stopped because time was up."""
        out = str(part_folder.resolve())  # the part runs in ROOT
        folders = [str(ROOT), os.environ.get("PYTHONPATH")]  # a wheel may lie in one of the second
        surroundings = {**os.environ, "BORROWED_OUT": out}
        if self.options.rehearse:
            folders.insert(0, str(BARE))
            surroundings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # pytest alone, as there
        surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        with open(self._log(part), "w") as log:
            process = subprocess.Popen(
                [sys.executable, *self._filled_words(part, part_folder, limit_s)],
                cwd=ROOT,
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=killed_with_parent(),
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
                process.wait()

    def _filled_words(self, part: BorrowedPart, part_folder: Path, limit_s: float) -> list[str]:
        values = {
            "{out}": str(part_folder.resolve()),  # the part runs in ROOT
            "{budget}": str(max(1, int(limit_s - START_S))),
            "{cells}": ",".join(self.cells_due(part)),
            "{commit}": str(self.options.commit),
        }
        filled = []
        for word in self._words(part):
            if word == _COMMIT and self.options.commit is None:
                continue
            for name, value in values.items():
                word = word.replace(name, value)
            filled.append(word)
        return filled

    def _words(self, part: BorrowedPart) -> tuple[str, ...]:
        """Behind `python`, with {out}, {budget}, {cells} and {commit}."""
        if self.options.rehearse:
            if self._missing_folder(part) and part.rehearsal_without:
                return part.rehearsal_without
            return part.rehearsal
        if part.words_with is None:
            return part.words
        package, more_words = part.words_with
        return part.words + more_words if find_spec(package) else part.words

    def _log(self, part: BorrowedPart) -> Path:
        return self.folder / f"{part.name}.log"

    def _results(self, part: BorrowedPart, part_folder: Path) -> Iterator[dict[str, Any]]:
        """What the part has written that no line holds yet."""
        path = part_folder / part.results
        if not part.results or not path.is_file():
            return
        results_there = [row.result for row in self.rows_here(part)]
        for result in read_rows(path):
            if result not in results_there:
                yield result

    def _end(
        self, part: BorrowedPart, outcome: Outcome, why: str | None, seconds: float | None
    ) -> Outcome:
        self._add(part, outcome=outcome, why=why, seconds=seconds)
        words = f"{part.name}: {outcome}"
        if seconds is not None:
            words += f" in {duration(seconds)}"
        print(words if why is None else f"{words}: {why}", flush=True)
        return outcome

    def _add(self, part: BorrowedPart, **values: Any) -> None:
        row = BorrowedRow(part=part.name, **self.head, **values)
        append_line(self.folder / LINES, to_line(asdict(row)))


def _refuse_foreign_folders(out: Path) -> None:
    """Raises UserError where a folder has the name of a part, which would remove it at its start,
    and was made by another command or version."""
    for part in PARTS:
        folder = out / part.name
        if folder.is_dir() and any(folder.iterdir()) and not (folder / SETUP).is_file():
            raise UserError(
                f"{folder} holds files that are not this command's, as there is no {SETUP}, and it"
                " would remove them: give another out=, or move them away"
            )


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it printed nothing"


def read_borrowed_rows(folder: Path) -> list[BorrowedRow]:
    """All rows of OUT; of a part that ran again the later ones come last. Raises UserError for a
    row of another version."""
    path = folder / LINES
    if not path.is_file():
        return []
    rows = []
    for values in read_rows(path):
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{path} has a line of schema_version={version!r}, and this code"
                f" reads {SCHEMA_VERSION}: give another out="
            )
        rows.append(BorrowedRow(**values))
    return rows


def format_parts(folder: Path) -> str:
    """A table of the parts: what each shows, its seconds, its last outcome on a GPU."""
    rows = [row for row in read_borrowed_rows(folder) if row.outcome and row.gpu]
    has_run = [row for row in rows if row.outcome != "left out"]
    last = {row.part: row for row in rows + has_run}
    table = [["part", "shows", "seconds", "last time on a GPU"]]
    for part in PARTS:
        row = last.get(part.name)
        if row is None:
            table.append([part.name, part.shows, f"{part.guess_s:.0f} (guessed)", "has not run"])
            continue
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        last_time = f"{row.outcome}, {row.run}, commit {str(row.commit)[:7]}"
        if row.why:
            last_time += f": {row.why}"
        table.append([part.name, part.shows, seconds, last_time])
    return grid(table)


def parts_table() -> str:
    """Markdown: what each part shows when a GPU is at hand, in their order."""
    lines = [["part", "shows", "measures", "aims at", "seconds, guessed"]]
    for part in PARTS:
        aims = [f"{target.least_ratio:.2f} in {target.cell}" for target in part.targets]
        aims.append(part.answers)
        lines.append([part.name, part.shows, part.measures, "; ".join(aims), f"{part.guess_s:.0f}"])
    return grid(lines)


def rows_on_gpu(path: Path) -> list[CellRow]:
    """The rows of bench.throughput that a GPU has made, [] where there are none."""
    if not path.is_file():
        return []
    return [row for row in rows_of(path) if row.provenance.gpu]


if __name__ == "__main__":
    raise SystemExit(run_command(main))
