"""What a GPU has shown, as docs/speed.md and README.md say it: made from the rows, so that no
number is typed by hand."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.borrowed import (
    PARTS,
    BorrowedPart,
    BorrowedRow,
    parts_table,
    read_borrowed_rows,
    rows_on_gpu,
)
from bench.fourway import arms_table
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
    replace(DELAYED, head=True): "the same, head too",
    BOUNDED: "tensorwise, producers write FP8",
    replace(BOUNDED, head=True): "the same, head too",
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
END = "<!-- end -->"
PROFILED = "1p5b"  # the size whose micro-step is taken apart


def report(folder: Path, cells: Path, is_to_write: bool) -> str:
    """All results as Markdown; with is_to_write the speeds go into docs/speed.md, README.md and the
    figure beside `cells`. Raises UserError where no GPU has made a row."""
    rows = [*rows_on_gpu(cells.with_name(f"{cells.stem}_peers.jsonl")), *rows_on_gpu(cells)]
    if not rows:
        raise UserError(f"{cells} holds no row of a GPU: nothing has been measured")
    table = speed_table(rows)
    if is_to_write:
        page = with_generated(PAGE.read_text(), table)
        page = with_generated(page, kernels_table(rows), KERNELS_BEGIN)
        write_atomically(PAGE, with_generated(page, parts_table(), PARTS_BEGIN))
        write_atomically(README, with_readme_row(README.read_text(), readme_row(rows)))
        figure_rows = [*rows_beside_peers(cells), *rows_on_gpu(cells)]
        draw_ratios(figure_rows, cells.with_suffix(".png"))
    gpu = gpu_of(rows)
    sections = [f"## FP8 over BF16 on {gpu}", table, "## Targets", targets_table(rows)]
    sections += _sections_of_kernels(rows)
    borrowed_rows = [row for row in read_borrowed_rows(folder) if row.gpu is not None]
    return "\n\n".join([*sections, *_sections_of_parts(borrowed_rows)])


# ------------------------------------------------------------------------------------------- speed


def gpu_of(rows: Sequence[CellRow]) -> str:
    """The name of the GPU that the last row is of, all rows being of GPUs."""
    gpu = rows[-1].provenance.gpu
    assert gpu is not None
    return gpu


def valid_rows_by_cell(rows: Sequence[CellRow]) -> dict[tuple[str, str], TimedRow]:
    """(size, label) -> our model's newest valid row on the GPU that the last row is of."""
    gpu = gpu_of(rows)
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


def speed_table(rows: Sequence[CellRow]) -> str:
    """Markdown: a column a size, BF16's tokens/s, then a row a label with the measured ratio and,
    in brackets, the modelled one."""
    rows_by_cell, modelled_ratios = valid_rows_by_cell(rows), modelled(gpu_of(rows))
    lines = [["FP8 over BF16, per FLOP (modelled before)", *map(size_name, SIZES)]]
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


def targets_table(rows: Sequence[CellRow]) -> str:
    """Markdown: each number that a part aims at, and what its cell has reached."""
    ratios = {row.cell.name: row.ratio for row in valid_rows_by_cell(rows).values()}
    lines = [["part", "cell", "target", "measured", ""]]
    for part in PARTS:
        for target in part.targets:
            ratio = ratios.get(target.cell)
            verdict = "not measured"
            if ratio is not None:
                verdict = "met" if ratio >= target.least_ratio else "missed"
            aim = f"{target.least_ratio:.2f}"
            lines.append([part.name, target.cell, aim, number_text(ratio, ".3f"), verdict])
    return grid(lines)


def profiled(rows: Sequence[CellRow]) -> dict[str, list[Kernel]]:
    """Title -> the longest kernels of PROFILED in each precision whose kernels are known."""
    rows_by_cell = valid_rows_by_cell(rows)
    columns = {}
    for fp8, title in {BF16: "BF16", **SHOWN}.items():
        row = rows_by_cell.get((PROFILED, fp8.label))
        if row is not None and row.measured.kernels:
            columns[title] = row.measured.kernels
    return columns


def kernels_table(rows: Sequence[CellRow]) -> str:
    """Markdown: where a micro-step of PROFILED goes. Raises UserError where no row tells."""
    columns = profiled(rows)
    if not columns:
        raise UserError(f"no row of {PROFILED} holds the kernels of a micro-step")
    return table_of_kinds(columns)


def _sections_of_kernels(rows: Sequence[CellRow]) -> list[str]:
    """The kernels of a micro-step by kind, then by name in each precision."""
    columns = profiled(rows)
    if not columns:
        return []
    sections = [f"## A micro-step of {size_name(PROFILED)}", table_of_kinds(columns)]
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
    """README's line on speed: our kernels at each size that was measured."""
    rows_by_cell = valid_rows_by_cell(rows)
    ratios = []
    for size in SIZES:
        row = rows_by_cell.get((size, OURS.label))
        if row is not None and row.ratio:
            ratios.append(f"{row.ratio:.2f} at {size_name(size)}")
    gpu = gpu_of(rows).removeprefix("NVIDIA ")
    return f"{README_ROW} {gpu}: {', '.join(ratios)}: docs/speed.md |"


def with_readme_row(page: str, row: str) -> str:
    """The page with its line on speed replaced. Raises UserError where there is none."""
    lines = page.split("\n")
    places = [number for number, line in enumerate(lines) if line.startswith(README_ROW)]
    if len(places) != 1:
        raise UserError(f"{README} has {len(places)} lines that begin with {README_ROW!r}, not one")
    lines[places[0]] = row
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- other results


def _sections_of_parts(rows: Sequence[BorrowedRow]) -> list[str]:
    sections = []
    for part in PARTS:
        of_part = [row for row in rows if row.part == part.name]
        outcomes = [row.outcome for row in of_part if row.outcome]
        if outcomes:
            sections.append(f"## {part.name}: {outcomes[-1]}")
        results = [row.result for row in of_part if row.result]
        if results:
            sections.append(_results_of_part(part, results))
    return sections


def _results_of_part(part: BorrowedPart, results: Sequence[Mapping[str, Any]]) -> str:
    if part.results == OUTCOMES:
        return _outcomes_of_tests([TestOutcome(**result) for result in results])
    trainings = [training_from(result) for result in results]
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
