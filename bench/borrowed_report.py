"""What a GPU has shown, as docs/speed.md and README.md say it: made from the rows, so that no
number is typed by hand."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.borrowed import (
    PARTS,
    BorrowedPart,
    BorrowedRow,
    parts_table,
    read_borrowed_rows,
    rows_on_gpu,
)
from bench.fourway import arms_table, draw_arms
from bench.kernel_kinds import table_of_kernels, table_of_kinds
from bench.outcomes import FILE as OUTCOMES
from bench.outcomes import TestOutcome
from bench.report import draw_ratios, number_text, rows_beside_peers, size_name, valid_rows
from bench.rows import CellRow, Kernel, TimedRow
from bench.trainings import TrainingRow, training_from
from fp8.recipes import FP8Config
from lib.errors import UserError
from lib.files import write_atomically
from lib.machine import ROOT
from lib.text import grid
from model import GPTConfig
from runtime.config import load_config
from runtime.roofline import CASTS, GPUS, MICRO_BATCH, TOKENS_PER_STEP, step

SIZES = ("125m", "350m", "760m", "1p5b")
BF16 = FP8Config()
OURS = FP8Config(recipe="tensorwise", kernels=True)
DELAYED = replace(OURS, scaling="delayed")
BOUNDED = replace(OURS, scaling="bounded")
SHOWN = {  # precision of the cells -> how the table calls it
    OURS: "tensorwise, our kernels",
    replace(OURS, head=True): "tensorwise, our kernels, head too",
    DELAYED: "tensorwise, our kernels, delayed scales",
    replace(DELAYED, head=True): "tensorwise, delayed scales, head too",
    BOUNDED: "tensorwise, producers write FP8",
    replace(BOUNDED, head=True): "tensorwise, producers write FP8, head too",
    FP8Config(recipe="tensorwise"): "tensorwise (torchao)",
    FP8Config(recipe="rowwise"): "rowwise (torchao)",
    FP8Config(recipe="blockwise"): "blockwise",
}
PAGE = ROOT / "docs" / "speed.md"
README = ROOT / "README.md"
README_ROW = "| **FP8's speed** / BF16's |"
BEGIN = "<!-- made by python -m bench.borrowed write=true -->"
PARTS_BEGIN = "<!-- parts, made by python -m bench.borrowed write=true -->"
KERNELS_BEGIN = "<!-- kernels, made by python -m bench.borrowed write=true -->"
TRAININGS_BEGIN = "<!-- trainings, made by python -m bench.borrowed write=true -->"
END = "<!-- end -->"
FOURWAY_FIGURE = "fourway.png"
PROFILED = "1p5b"  # the size whose micro-step is taken apart


def report(folder: Path, cells: Path, is_to_write: bool) -> str:
    """All results as Markdown; with is_to_write the speeds go into docs/speed.md, README.md and the
    figures beside `cells`. Raises UserError where no GPU has made a row."""
    rows = [*rows_on_gpu(cells.with_name(f"{cells.stem}_peers.jsonl")), *rows_on_gpu(cells)]
    if not rows:
        raise UserError(f"{cells} holds no row of a GPU: nothing has been measured")
    borrowed_rows = [row for row in read_borrowed_rows(folder) if row.gpu is not None]
    if is_to_write:
        write_atomically(PAGE, speed_page(PAGE.read_text(), rows, borrowed_rows))
        write_atomically(README, with_readme_row(README.read_text(), readme_row(rows)))
        figure_rows = [*rows_beside_peers(cells), *rows_on_gpu(cells)]
        draw_ratios(figure_rows, cells.with_suffix(".png"))
        arms = _newest_trainings(borrowed_rows, "fourway")
        if arms:
            draw_arms(arms, cells.with_name(FOURWAY_FIGURE))
    sections = []
    for gpu in gpus_of(rows):
        sections += [f"## FP8 over BF16 on {gpu}", speed_table(rows, gpu)]
        sections += [f"## Targets on {gpu}", targets_table(rows, gpu)]
        sections += _sections_of_kernels(rows, gpu)
    for name in dict.fromkeys(row.gpu for row in borrowed_rows):
        sections += _sections_of_parts([row for row in borrowed_rows if row.gpu == name])
    return "\n\n".join(sections)


def speed_page(page: str, rows: Sequence[CellRow], borrowed_rows: Sequence[BorrowedRow]) -> str:
    """docs/speed.md with all that is made from the rows."""
    tables = [speed_table(rows, gpu) for gpu in gpus_of(rows)]
    page = with_generated(page, "\n\n".join(tables))
    page = with_generated(page, kernels_table(rows), KERNELS_BEGIN)
    page = with_generated(page, trainings_text(borrowed_rows), TRAININGS_BEGIN)
    return with_generated(page, parts_table(), PARTS_BEGIN)


# ------------------------------------------------------------------------------------------- speed


def gpus_of(rows: Sequence[CellRow]) -> list[str]:
    """The names of the GPUs that the rows are of, in their order."""
    return list(dict.fromkeys(filter(None, (row.provenance.gpu for row in rows))))


def valid_rows_by_cell(rows: Sequence[CellRow], gpu: str) -> dict[tuple[str, str], TimedRow]:
    """(size, label) -> our model's newest valid row on the GPU of this name."""
    return {
        (row.cell.size, row.cell.label): row
        for row in valid_rows(rows)
        if row.provenance.gpu == gpu and row.cell.peer is None
    }


def modelled(gpu: str) -> dict[tuple[str, FP8Config], float]:
    """(size, precision) -> the roofline's ratio over BF16 on the GPU of this name; {} where it
    knows none such."""
    names = [name for name in GPUS if name in gpu.lower()]
    if not names:
        return {}
    bandwidth = GPUS[names[0]]
    ratios = {}
    for size in SIZES:
        model = replace(load_config(ROOT / f"configs/gpt{size}_bf16.py").model, n_ctx=1024)
        bf16_seconds = _modelled_seconds(bandwidth, model, BF16, MICRO_BATCH[size])
        for fp8 in SHOWN:
            if _label_of_blocks(fp8) in CASTS:
                seconds = _modelled_seconds(bandwidth, model, fp8, MICRO_BATCH[size])
                ratios[size, fp8] = bf16_seconds / seconds
    return ratios


def _modelled_seconds(
    bandwidth: float, model: GPTConfig, fp8: FP8Config, micro_batch: int
) -> float:
    """Of a micro-batch, with its part of the optimizer step."""
    label = _label_of_blocks(fp8)
    head = CASTS[label] if fp8.head else None
    return sum(step(bandwidth, model, label, micro_batch, TOKENS_PER_STEP, head=head).values())


def _label_of_blocks(fp8: FP8Config) -> str:
    """The key of CASTS of the Linears that are not the head."""
    return replace(fp8, head=False).label


def speed_table(rows: Sequence[CellRow], gpu: str) -> str:
    """Markdown: a column a size, BF16's tokens/s, then a row a label with the measured ratio and,
    in brackets, the modelled one."""
    rows_by_cell, modelled_ratios = valid_rows_by_cell(rows, gpu), modelled(gpu)
    title = f"FP8 over BF16 on {gpu}, per FLOP (modelled before)"
    lines = [[title, *map(size_name, SIZES)]]
    baseline = ["BF16, tokens/s (mfu_bf16)"]
    for size in SIZES:
        row = rows_by_cell.get((size, BF16.label))
        baseline.append("" if row is None else _tokens_per_s(row))
    lines.append(baseline)
    for fp8, name in SHOWN.items():
        cells = [
            _ratio_text(rows_by_cell.get((size, fp8.label)), modelled_ratios.get((size, fp8)))
            for size in SIZES
        ]
        if any(cells):
            lines.append([name, *cells])
    return grid(lines)


def _tokens_per_s(row: TimedRow) -> str:
    thousands = row.tok_per_s / 1e3
    digits = 0 if thousands >= 150 else 1
    mfu = number_text(row.mfu_bf16, ".0%").replace("%", " %")
    return f"{thousands:.{digits}f}k ({mfu})"


def _ratio_text(row: TimedRow | None, modelled_ratio: float | None) -> str:
    texts = []
    if row is not None and row.ratio:
        texts.append(f"**{row.ratio:.3f}**")
    if modelled_ratio is not None:
        texts.append(f"({modelled_ratio:.3f})")
    return " ".join(texts)


def targets_table(rows: Sequence[CellRow], gpu: str) -> str:
    """Markdown: each number that a part aims at, and what its cell has reached."""
    last = {row.cell.name: row for row in rows if row.provenance.gpu == gpu}
    lines = [["part", "cell", "target", "measured", "verdict"]]
    for part in PARTS:
        for target in part.targets:
            row = last.get(target.cell)
            ratio = row.ratio if isinstance(row, TimedRow) else None
            verdict = _verdict(row, target.least_ratio)
            aim = f"{target.least_ratio:.2f}"
            lines.append([part.name, target.cell, aim, number_text(ratio, ".3f"), verdict])
    return grid(lines)


def _verdict(row: CellRow | None, least_ratio: float) -> str:
    """Of a cell's newest row. A row that does not count says why."""
    if row is None:
        return "not measured"
    if not row.valid:
        return f"does not count: {row.remark}"
    assert isinstance(row, TimedRow)
    if row.ratio is None:
        return "not compared"
    return "met" if row.ratio >= least_ratio else "missed"


def profiled(rows: Sequence[CellRow], gpu: str) -> dict[str, list[Kernel]]:
    """Title -> the longest kernels of PROFILED in each precision whose kernels are known."""
    rows_by_cell = valid_rows_by_cell(rows, gpu)
    columns = {}
    for fp8, title in {BF16: "BF16", **SHOWN}.items():
        row = rows_by_cell.get((PROFILED, fp8.label))
        if row is not None and row.measured.kernels:
            columns[title] = row.measured.kernels
    return columns


def kernels_table(rows: Sequence[CellRow]) -> str:
    """Markdown: where a micro-step of PROFILED goes, on the last GPU whose rows tell. Raises
    UserError where none does."""
    for gpu in reversed(gpus_of(rows)):
        columns = profiled(rows, gpu)
        if columns:
            return f"On {gpu}:\n\n{table_of_kinds(columns)}"
    raise UserError(f"no row of {PROFILED} holds the kernels of a micro-step")


def _sections_of_kernels(rows: Sequence[CellRow], gpu: str) -> list[str]:
    """The kernels of a micro-step by kind, then by name in each precision."""
    columns = profiled(rows, gpu)
    if not columns:
        return []
    sections = [f"## A micro-step of {size_name(PROFILED)} on {gpu}", table_of_kinds(columns)]
    for title, kernels in columns.items():
        sections += [f"### {title}", table_of_kernels(kernels)]
    return sections


def with_generated(page: str, table: str, begin: str = BEGIN) -> str:
    """The page with `table` between `begin` and END. Raises UserError where they are not there."""
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise UserError(f"{PAGE} lacks the lines {begin} and {END}: put the table between them")
    return pattern.sub(lambda _: f"{begin}\n{table}\n{END}", page)


def readme_row(rows: Sequence[CellRow]) -> str:
    """README's line on speed: our kernels at each size that was measured, on each GPU."""
    texts = []
    for gpu in gpus_of(rows):
        rows_by_cell = valid_rows_by_cell(rows, gpu)
        ratios = []
        for size in SIZES:
            row = rows_by_cell.get((size, OURS.label))
            if row is not None and row.ratio:
                ratios.append(f"{row.ratio:.2f} at {size_name(size)}")
        if ratios:
            texts.append(f"{gpu.removeprefix('NVIDIA ')}: {', '.join(ratios)}")
    return f"{README_ROW} {'; '.join(texts)}: docs/speed.md |"


def with_readme_row(page: str, row: str) -> str:
    """The page with its line on speed replaced. Raises UserError where there is none."""
    lines = page.split("\n")
    places = [number for number, line in enumerate(lines) if line.startswith(README_ROW)]
    if len(places) != 1:
        raise UserError(f"{README} has {len(places)} lines that begin with {README_ROW!r}, not one")
    lines[places[0]] = row
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- other results


def trainings_text(rows: Sequence[BorrowedRow]) -> str:
    """Markdown: whole trainings beside --plan, and those of the comparison with its figure."""
    runs = [run for name in ("flagship", "125m_memory") for run in _newest_trainings(rows, name)]
    arms = _newest_trainings(rows, "fourway")
    texts = []
    if runs:
        texts += [f"On {runs[-1].device}, on noise, beside `--plan`:", _trainings_table(runs)]
    if arms:
        figure = (
            f"![Five ways to train: loss, speed, time, memory](../bench/results/{FOURWAY_FIGURE})"
        )
        texts += [f"Five ways to train, on {arms[-1].device}:", arms_table(arms), figure]
    return "\n\n".join(texts) or "No whole training has been timed on a GPU yet."


def _newest_trainings(rows: Sequence[BorrowedRow], name: str) -> list[TrainingRow]:
    """Of a part on the GPU of its last row, the last row of each run."""
    of_part = [row for row in rows if row.part == name and row.result]
    of_gpu = [row for row in of_part if row.gpu == of_part[-1].gpu]
    trainings = [training_from(row.result) for row in of_gpu]
    return list({training.name: training for training in trainings}.values())


def _sections_of_parts(rows: Sequence[BorrowedRow]) -> list[str]:
    """Of rows of one GPU."""
    sections = []
    for part in PARTS:
        of_part = [row for row in rows if row.part == part.name]
        ends = [row for row in of_part if row.outcome]
        if ends:
            sections.append(f"## {part.name} on {ends[-1].gpu}: {ends[-1].outcome}")
            sections.append(_end_text(ends[-1]))
        if any(row.result for row in of_part):
            sections.append(_results_of_part(part, of_part))
    return sections


def _end_text(row: BorrowedRow) -> str:
    """Where a part's outcome comes from, and why it is not done."""
    text = f"{row.run}, commit {str(row.commit)[:7]}, torch {row.torch}, driver {row.driver}"
    return text if row.why is None else f"{text}: {row.why}"


def _results_of_part(part: BorrowedPart, rows: Sequence[BorrowedRow]) -> str:
    """rows: of one part on one GPU, some with a result."""
    if part.results == OUTCOMES:
        with_result = [row for row in rows if row.result]
        of_commit = [row for row in with_result if row.commit == with_result[-1].commit]
        return _outcomes_of_tests([TestOutcome(**row.result) for row in of_commit])
    trainings = _newest_trainings(rows, part.name)
    return arms_table(trainings) if part.name == "fourway" else _trainings_table(trainings)


def _outcomes_of_tests(outcomes: Sequence[TestOutcome]) -> str:
    newest = {outcome.test: outcome for outcome in outcomes}
    counts = Counter(outcome.outcome for outcome in newest.values())
    lines = [", ".join(f"{number} {word}" for word, number in sorted(counts.items()))]
    for outcome in newest.values():
        if outcome.outcome == "failed":
            last_line = (outcome.message or "").strip().split("\n")[-1]
            lines.append(f"- {outcome.test}: {last_line}")
    return "\n".join(lines)


def _trainings_table(rows: Sequence[TrainingRow]) -> str:
    lines = [["run", "label", "steps", "loss", "tokens/s", "GiB", "GiB by --plan", "remark"]]
    for row in rows:
        losses = f"{row.losses[0]:.3f} -> {row.losses[-1]:.3f}" if row.losses else ""
        speed = number_text(row.tok_per_s, ",.0f")
        memory = [number_text(gib, ".1f") for gib in (row.mem_gib, row.planned_gib)]
        remark = row.failure or ""
        lines.append([row.name, row.label, str(row.steps), losses, speed, *memory, remark])
    return grid(lines)
