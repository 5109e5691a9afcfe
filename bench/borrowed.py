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
time limit, what it prints goes to OUT/<part>.log, its results to OUT/borrowed.jsonl, and those of
single cells to bench/results as ever. Before each part the time left is compared with what the
part took the last time, or is guessed to take; what does not fit is left out and named, and a
later, shorter part may still fit. A part that takes twice as long as expected is cut, so that one
alone cannot eat the time of all; of cells, those that have no row yet are named."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from bench.rows import CellRow, rows_of
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import read_rows, to_line
from lib.machine import ROOT, nvidia_smi
from lib.text import duration, grid, nearest
from lib.values import FilePath
from runtime.config import positive
from runtime.environment import environment

LINES = "borrowed.jsonl"
BARE = ROOT / "bench" / "bare"  # its sitecustomize.py hides what a bare machine lacks
CELLS = "bench/results/h100.jsonl"  # where bench.throughput keeps the rows of a GPU
PEER_CELLS = "bench/results/h100_peers.jsonl"  # and bench.peers
KEPT_S = 15.0  # left at the end, to write and to go
LONGEST = 2  # times what a part was expected to take, after which it is cut
SCHEMA_VERSION = 1

Outcome = Literal["done", "failed", "cut", "left out"]


@dataclass(frozen=True)
class RatioTarget:
    """What a cell of bench.throughput has to reach."""

    cell: str  # size/label
    least_ratio: float  # FP8's tokens/s per FLOP over BF16's


@dataclass(frozen=True, kw_only=True)
class BorrowedPart:
    """One process. In its words {out} stands for the part's own folder, {budget} for the whole
    seconds that it may take."""

    name: str
    shows: str  # what will be known by it
    measures: str  # quantities, with their units
    answers: str  # the question, where no number is aimed at
    targets: tuple[RatioTarget, ...] = ()  # numbers that are aimed at
    guess_s: float  # until it has run on this GPU
    words: tuple[str, ...]  # behind `python`
    rehearsal: tuple[str, ...]  # on a CPU
    results: str = ""  # file of JSON lines in the part's folder that holds its results
    # folder that a plain checkout does not have, and how to get it; without it the part is left out
    needs: tuple[str, str] | None = None
    rehearsal_without: tuple[str, ...] = ()  # its rehearsal where that folder is not there
    # of a part that goes on where it stopped: it may take all the time that is left
    exit_code_when_unfinished: int | None = None
    cells: tuple[str, ...] = ()  # of bench.throughput, each of which must get a row in CELLS


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
    command = ("-m", "bench.throughput", "suite=h100", "budget={budget}", f"out={CELLS}")
    return BorrowedPart(
        name=name,
        shows=shows,
        measures=_RATIO,
        answers=answers,
        targets=targets,
        guess_s=guess_s,
        words=(*command, f"cells={','.join(cells)}"),
        rehearsal=_TOY_CELLS,
        cells=cells,
    )


_TOY_CELLS = ("-m", "bench.throughput", "suite=toy", "budget={budget}", "out={out}/../toy.jsonl")
_TOY_MODEL = (
    "set=model.n_layer=1,model.n_head=2,model.n_embd=64,model.n_ffn=128,model.n_ctx=64,"
    "data.tokens_per_step=128,data.micro_batch=1,eval.tokens=1024,parallel.compile=off"
)
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
        words=("-m", "pytest", "-q", "-m", "gpu", "-n", "4", "-p", "bench.outcomes")
        + ("tests/test_gpu.py",),
        rehearsal=("-m", "pytest", "-q", "-m", "gpu", "-p", "bench.outcomes", "--collect-only")
        + ("tests/test_gpu.py",),
        results="outcomes.jsonl",
    ),
    BorrowedPart(
        name="flagship",
        shows="sixty steps of gpt350m in BF16 and FP8 as a user runs them; memory against --plan",
        measures=_TRAINING,
        answers=_NEAR_PLAN,
        guess_s=110,
        words=("-m", "bench.trainings", "configs/gpt350m_bf16.py", "configs/gpt350m_fp8.py")
        + ("steps=60", "seconds={budget}", "out={out}", "set=data.tokens_per_step=65536"),
        rehearsal=("-m", "bench.trainings", "configs/gpt350m_bf16.py", "configs/gpt350m_fp8.py")
        + ("steps=3", "seconds={budget}", "out={out}", _TOY_MODEL),
        results="trainings.jsonl",
    ),
    _timing(
        "1p5b",
        "1.5B: FP8 over BF16 by our kernels, with head, by producers that write FP8, by torchao",
        230,
        _cells("1p5b", f"{OURS} {OURS}+head {OURS}+bounded {OURS}+bounded+head {TORCHAO}"),
        "whether producers that write FP8 gain what the model says",
        (
            RatioTarget(f"1p5b/{OURS}+bounded", 1.40),
            RatioTarget(f"1p5b/{OURS}+bounded+head", 1.45),
        ),
    ),
    _timing(
        "350m",
        "350M: FP8 over BF16 by our kernels, with head, by torchao",
        120,
        _cells("350m", f"{OURS} {OURS}+head {TORCHAO}"),
        "the default FP8 path at the present commit",
    ),
    _timing(
        "125m_and_760m",
        "125M with head, which has never been timed, and 760M",
        180,
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
        120,
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
        name="linears",
        shows="every Linear of the six sizes by each recipe: the table of fp8.recipe=auto",
        measures="time of BF16 over that of FP8, forward and backward, by shape",
        answers="which Linears gain nothing by FP8",
        guess_s=240,
        words=("-m", "bench.kernels", "budget={budget}"),
        rehearsal=("-m", "bench.kernels", "shapes=64x64", "tokens=64", "recipes=tensorwise")
        + ("turns=1", "out={out}/speed.json"),
    ),
    BorrowedPart(
        name="peers",
        shows="nanoGPT and nanochat in turns with ours, per FLOP, at 125M and 1.5B",
        measures=_RATIO,
        answers="whether our BF16 is as fast as theirs, our FP8 faster than nanochat's",
        guess_s=400,
        words=("-m", "bench.peers", *_PEERS, "budget={budget}", f"out={PEER_CELLS}"),
        rehearsal=("-m", "bench.peers", *_PEERS, "suite=toy", "budget={budget}")
        + ("out={out}/../toy_peers.jsonl",),
        needs=("data/peers", "the checkouts nanoGPT and nanochat, at the commits of bench.peers"),
        rehearsal_without=("-m", "bench.peers", "table=true", "out={out}/../toy.jsonl"),
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
        exit_code_when_unfinished=3,
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
    call = Call(options, folder)
    return call.run()


class Call:
    """One call of the command: its parts within its seconds."""

    def __init__(self, options: Options, folder: Path):
        """Raises UserError where there is no GPU."""
        if not options.rehearse and not torch.cuda.is_available():
            raise UserError(
                "this needs a CUDA GPU, and torch sees none here: rehearse=true runs every part on"
                " the CPU at tiny sizes"
            )
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
        outcomes = []
        for part in self.due():
            missing = self._missing_folder(part)
            if missing is None or self._has_rehearsal_without(part):
                outcomes.append(self.run_part(part))
            else:
                self._end(part, "left out", missing, None)
        if all(outcome == "done" for outcome in outcomes):
            return 0
        print("the same command goes on with what is missing", flush=True)
        return 1

    def due(self) -> list[BorrowedPart]:
        """What is to run: the parts that were asked for, or those without a line that says done on
        this GPU."""
        if self.options.parts:
            return [part for part in PARTS if part.name in self.options.parts]
        done = {row.part for row in self.rows_here() if row.outcome == "done"}
        return [part for part in PARTS if part.name not in done]

    def _missing_folder(self, part: BorrowedPart) -> str | None:
        """In words, the folder that the part needs and a plain checkout does not have."""
        if part.needs is None or (ROOT / part.needs[0]).is_dir():
            return None
        folder, content = part.needs
        return f"there is no {folder} ({content})"

    def _has_rehearsal_without(self, part: BorrowedPart) -> bool:
        return self.options.rehearse and part.rehearsal_without != ()

    def rows_here(self) -> list[BorrowedRow]:
        """Rows of this GPU and this version of torch."""
        rows = [row for row in read_borrowed_rows(self.folder) if row.gpu == self.gpu]
        return [row for row in rows if row.torch == self.head["torch"]]

    def estimate(self, part: BorrowedPart) -> float:
        """Seconds that the part is expected to take: what it took here, or the guess."""
        taken = [
            row.seconds
            for row in self.rows_here()
            if row.part == part.name and row.outcome == "done" and row.seconds is not None
        ]
        return taken[-1] * 1.1 if taken else part.guess_s

    def run_part(self, part: BorrowedPart) -> Outcome:
        left_s = self.end - time.monotonic() - KEPT_S
        needed_s = 0.0 if self.options.rehearse else self.estimate(part)
        if left_s < max(needed_s, 1.0):
            why = f"needs {needed_s:.0f} s, {max(0.0, left_s):.0f} s are left"
            return self._end(part, "left out", why, None)
        print(f"[{left_s:5.0f} s left] {part.name}: {part.shows}", flush=True)
        part_folder = self.folder / part.name
        part_folder.mkdir(exist_ok=True)
        start = time.monotonic()
        limit_s = left_s if self._may_take_all(part) else min(left_s, LONGEST * needed_s)
        exit_code = self._process(part, part_folder, limit_s)
        seconds = time.monotonic() - start
        for result in self._results(part, part_folder):
            self._add(part, result=result)
        if exit_code is None:
            return self._end(part, "cut", f"not done after {seconds:.0f} s", seconds)
        if exit_code == part.exit_code_when_unfinished:
            return self._end(part, "cut", "it goes on where it stopped", seconds)
        if exit_code != 0:
            log = self._log(part)
            why = f"exit code {exit_code}: {_last_line(log)} ({log})"
            return self._end(part, "failed", why, seconds)
        missing = [] if self.options.rehearse else self._cells_without_row(part)
        if missing:
            return self._end(part, "cut", f"no row of {', '.join(missing)}", seconds)
        return self._end(part, "done", None, seconds)

    def _may_take_all(self, part: BorrowedPart) -> bool:
        return self.options.rehearse or part.exit_code_when_unfinished is not None

    def _cells_without_row(self, part: BorrowedPart) -> list[str]:
        """Cells that this call has not timed: bench.throughput ends well out of its budget too."""
        rows = rows_on_gpu(ROOT / CELLS)
        final_rows = [row for row in rows if row.is_final]
        timed = {row.cell.name for row in final_rows if row.provenance.run >= str(self.head["run"])}
        return [cell for cell in part.cells if cell not in timed]

    def _process(self, part: BorrowedPart, part_folder: Path, limit_s: float) -> int | None:
        """Its exit code, None where it was stopped because time was up."""
        filled = [
            word.replace("{out}", str(part_folder)).replace("{budget}", str(int(limit_s)))
            for word in self._words(part)
        ]
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "BORROWED_OUT": str(part_folder)}
        if self.options.rehearse:
            surroundings["PYTHONPATH"] = os.pathsep.join([str(BARE), str(ROOT)])
        with open(self._log(part), "w") as log:
            process = subprocess.Popen(
                [sys.executable, *filled],
                cwd=ROOT,
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
                process.wait()

    def _words(self, part: BorrowedPart) -> tuple[str, ...]:
        """Behind `python`, with {out} and {budget}."""
        if not self.options.rehearse:
            return part.words
        if self._missing_folder(part) and part.rehearsal_without:
            return part.rehearsal_without
        return part.rehearsal

    def _log(self, part: BorrowedPart) -> Path:
        return self.folder / f"{part.name}.log"

    def _results(self, part: BorrowedPart, part_folder: Path) -> Iterator[dict[str, Any]]:
        """What the part has written that no line holds yet."""
        path = part_folder / part.results
        if not part.results or not path.is_file():
            return
        results_there = [row.result for row in self.rows_here() if row.part == part.name]
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
        with open(self.folder / LINES, "ab") as file:
            file.write(to_line(asdict(row)))


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
    last = {row.part: row for row in read_borrowed_rows(folder) if row.outcome and row.gpu}
    table = [["part", "shows", "seconds", "last time on a GPU"]]
    for part in PARTS:
        row = last.get(part.name)
        if row is None:
            table.append([part.name, part.shows, f"{part.guess_s:.0f} (guessed)", "has not run"])
            continue
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        table.append([part.name, part.shows, seconds, f"{row.outcome}, {row.run}"])
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
