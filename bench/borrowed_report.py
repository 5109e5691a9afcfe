"""What a GPU has shown, as docs/speed.md and README.md say it: made from the rows, so that no
number is typed by hand."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.borrowed import PARTS, Line, Part, read_lines, rows_on_gpu
from bench.fourway import format_table
from bench.report import draw
from bench.trainings import TrainingRow
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
SHOWN = {  # precision of the cells -> how the table calls it
    OURS: "tensorwise, our kernels",
    replace(OURS, head=True): "tensorwise, our kernels, head too",
    DELAYED: "tensorwise, our kernels, delayed scales",
    replace(DELAYED, head=True): "the same, head too",
    FP8Config(recipe="tensorwise"): "tensorwise (torchao)",
    FP8Config(recipe="rowwise"): "rowwise (torchao)",
    FP8Config(recipe="blockwise"): "blockwise",
}
PAGE = ROOT / "docs" / "speed.md"
README = ROOT / "README.md"
README_ROW = "| **FP8's speed** / BF16's |"
BEGIN = "<!-- made by python -m bench.borrowed write=true -->"
END = "<!-- end -->"


def report(folder: Path, cells: Path, is_to_write: bool) -> str:
    """All results as Markdown; with is_to_write the speeds go into docs/speed.md, README.md and the
    figure beside `cells`. Raises UserError where no GPU has made a row."""
    rows = [*rows_on_gpu(cells.with_name(f"{cells.stem}_peers.jsonl")), *rows_on_gpu(cells)]
    if not rows:
        raise UserError(f"{cells} holds no row of a GPU: nothing has been measured")
    table = speed_table(rows)
    if is_to_write:
        write_atomically(PAGE, with_table(PAGE.read_text(), table))
        write_atomically(README, with_readme_row(README.read_text(), readme_row(rows)))
        draw(rows_on_gpu(cells), cells.with_suffix(".png"))
    sections = [f"## FP8 over BF16 on {rows[-1]['gpu']}", table]
    lines = [line for line in read_lines(folder) if line.gpu is not None]
    return "\n\n".join([*sections, *_sections_of_parts(lines)])


# ------------------------------------------------------------------------------------------- speed


def measured(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """(size, label) -> the newest valid row of the GPU that the last row is of."""
    gpu = rows[-1]["gpu"]
    return {
        (row["size"], row["label"]): row
        for row in rows
        if row["valid"] and row["gpu"] == gpu and row["peer"] is None
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


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a column a size, BF16's tokens/s, then a row a label with the measured ratio and,
    in brackets, the modelled one."""
    rows_by_cell, model = measured(rows), modelled(rows[-1]["gpu"])
    lines = [["FP8 over BF16, per FLOP (modelled before)", *map(_size_name, SIZES)]]
    baseline = ["BF16, tokens/s (mfu_bf16)"]
    for size in SIZES:
        row = rows_by_cell.get((size, BF16.label))
        baseline.append("" if row is None else _tokens_per_s(row))
    lines.append(baseline)
    for fp8, name in SHOWN.items():
        cells = [
            _ratio(rows_by_cell.get((size, fp8.label)), model.get((size, fp8))) for size in SIZES
        ]
        if any(cells):
            lines.append([name, *cells])
    return grid(lines)


def _size_name(size: str) -> str:
    return "1.5B" if size == "1p5b" else size.upper()


def _tokens_per_s(row: dict[str, Any]) -> str:
    thousands = row["tok_per_s"] / 1e3
    digits = 0 if thousands >= 150 else 1
    return f"{thousands:.{digits}f}k ({row['mfu_bf16']:.0%})".replace("%", " %")


def _ratio(row: dict[str, Any] | None, modelled_ratio: float | None) -> str:
    parts = []
    if row is not None and row["ratio"]:
        parts.append(f"**{row['ratio']:.3f}**")
    if modelled_ratio is not None:
        parts.append(f"({modelled_ratio:.3f})")
    return " ".join(parts)


def with_table(page: str, table: str) -> str:
    """The page with `table` between the markers. Raises UserError where they are not there."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise UserError(f"{PAGE} lacks the lines {BEGIN} and {END}: put the table between them")
    return pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", page)


def readme_row(rows: Sequence[dict[str, Any]]) -> str:
    """README's line on speed: our kernels at each size that was measured."""
    rows_by_cell = measured(rows)
    ratios = []
    for size in SIZES:
        row = rows_by_cell.get((size, OURS.label))
        if row is not None and row["ratio"]:
            ratios.append(f"{row['ratio']:.2f} at {_size_name(size)}")
    gpu = rows[-1]["gpu"].removeprefix("NVIDIA ")
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


def _sections_of_parts(lines: Sequence[Line]) -> list[str]:
    sections = []
    for part in PARTS:
        of_part = [line for line in lines if line.part == part.name]
        outcomes = [line for line in of_part if line.outcome]
        if outcomes:
            sections.append(f"## {part.name}: {outcomes[-1].outcome}")
        results = [line.result for line in of_part if line.result]
        if results:
            sections.append(_results_of_part(part, results))
    return sections


def _results_of_part(part: Part, results: Sequence[dict[str, Any]]) -> str:
    if part.results == "outcomes.jsonl":
        return _outcomes_of_tests(results)
    trainings = [TrainingRow(**result) for result in results]
    return format_table(trainings) if part.name == "fourway" else _trainings(trainings)


def _outcomes_of_tests(results: Sequence[dict[str, Any]]) -> str:
    newest = {result["test"]: result for result in results}
    counts = Counter(result["outcome"] for result in newest.values())
    lines = [", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))]
    for test, result in newest.items():
        if result["outcome"] == "failed":
            message = result.get("message", "").strip().split("\n")[-1]
            lines.append(f"- {test}: {message}")
    return "\n".join(lines)


def _trainings(rows: Sequence[TrainingRow]) -> str:
    table = [["run", "label", "steps", "loss", "tokens/s", "GiB", "GiB by --plan", "remark"]]
    for row in rows:
        table.append(
            [
                row.name,
                row.label,
                str(row.steps),
                f"{row.losses[0]:.3f} -> {row.losses[-1]:.3f}" if row.losses else "",
                "" if row.tok_per_s is None else f"{row.tok_per_s:,.0f}",
                "" if row.mem_gib is None else f"{row.mem_gib:.1f}",
                "" if row.planned_gib is None else f"{row.planned_gib:.1f}",
                row.failure or "",
            ]
        )
    return grid(table)
