"""Rows as people read them: a table and a figure."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.rows import CellRow, Provenance, TimedRow, rows_of
from fp8.recipes import RECIPES
from lib.files import write_atomically
from lib.text import grid


def newest(rows: Sequence[CellRow]) -> dict[tuple[str | None, str], CellRow]:
    """The last row of each cell by (gpu, cell), those of a size together, BF16 first."""
    last = {(row.provenance.gpu, row.cell.name): row for row in rows}
    return dict(sorted(last.items(), key=lambda item: item[1].compared_size))


def size_name(size: str) -> str:
    """A size as people write it: 1.5B for 1p5b, 125M for 125m; a peer's model as it is called."""
    if size[0].isdigit():
        return size.replace("p", ".").upper()
    return size


WORDS = {  # words of a label -> how a figure calls them
    "kernels": "our kernels",
    "delayed": "delayed scales",
    "bounded": "bounded scales",
    "head": "head too",
    "documents": "document mask",
    "bf16": "BF16",
    "fp8": "FP8",
    "nanogpt": "nanoGPT",
}


def precision_in_words(cell: Cell) -> str:
    """A cell's precision in words, such as "tensorwise, our kernels, head too" or "nanochat,
    FP8"."""
    if cell.peer_name is not None:
        words = list(filter(None, (cell.peer_name, cell.peer_precision)))
    else:
        words = cell.fp8.label_words
    if _is_cast_by_torchao(cell):
        words.insert(1, "torchao")
    if cell.document_mask:
        words.append("documents")
    return ", ".join(WORDS.get(word, word) for word in words)


def _is_cast_by_torchao(cell: Cell) -> bool:
    recipe = RECIPES.get(cell.fp8.recipe)
    return recipe is not None and recipe.on_gpu == "torchao" and not cell.fp8.kernels


def rows_beside_peers(out: Path) -> list[CellRow]:
    """Rows of our own sizes that bench.peers took, in the file beside `out`: a figure of all sizes
    needs them too."""
    path = out.with_name(f"{out.stem}_peers.jsonl")
    if not path.is_file():
        return []
    return [row for row in rows_of(path) if row.cell.peer is None and not row.cell.model]


# Title of a column -> its text of a row.
COLUMNS: dict[str, Callable[[TimedRow], str]] = {
    "size": lambda row: row.cell.size,
    "label": lambda row: row.cell.label,
    "T": lambda row: str(row.cell.T),
    "micro_batch": lambda row: str(row.cell.micro_batch),
    "tok_per_s": lambda row: f"{row.tok_per_s:,.0f}",
    "step_ms": lambda row: f"{row.step_ms:,.1f}",
    "mfu_bf16": lambda row: number_text(row.mfu_bf16, ".1%"),
    "ratio": lambda row: number_text(row.ratio, ".3f"),
    "drift": lambda row: number_text(row.drift, "+.1%"),
    "peak_gib": lambda row: number_text(row.measured.peak_gib, ".1f"),
    "compile_s": lambda row: f"{row.measured.compile_s:.0f}",
    "loss_difference": lambda row: number_text(row.loss_difference, ".4f"),
}


def number_text(value: float | None, form: str) -> str:
    """A number in a format; "" for None."""
    return "" if value is None else format(value, form)


def rows_page(rows: Sequence[CellRow]) -> str:
    """The newest rows as Markdown: what was measured, what does not count and why, where it comes
    from."""
    newest_rows = list(newest(rows).values())
    parts = []
    for gpu in dict.fromkeys(row.provenance.gpu for row in newest_rows):
        rows_of_gpu = [row for row in newest_rows if row.provenance.gpu == gpu]
        lines = [[text(row) for text in COLUMNS.values()] for row in valid_rows(rows_of_gpu)]
        parts.append(f"## {gpu or 'No GPU: a rehearsal, its times say nothing about one'}")
        parts.append(grid([list(COLUMNS), *lines]))
        parts.append("\n".join(_notes(rows_of_gpu)))
    return "\n\n".join(parts) or "Nothing has been measured."


def valid_rows(rows: Sequence[CellRow]) -> list[TimedRow]:
    """The rows that count, in their order."""
    return [row for row in rows if isinstance(row, TimedRow) and row.valid]


def _notes(rows: Sequence[CellRow]) -> list[str]:
    """What does not count, where the rows come from, and the kernels of attention."""
    notes = [f"- not counted: {row.cell.name}: {row.remark}" for row in rows if not row.valid]
    notes += dict.fromkeys(_provenance_text(row.provenance) for row in rows)
    kernels = {row.attention_kernel for row in rows if isinstance(row, TimedRow)}
    notes += [f"- attention: `{kernel}`" for kernel in sorted(filter(None, kernels))]
    return notes


def _provenance_text(provenance: Provenance) -> str:
    commit = str(provenance.commit)[:10]
    if provenance.dirty:
        commit += " with changes"
    return (
        f"- {provenance.run}: commit {commit}, driver {provenance.driver}, torch"
        f" {provenance.torch}, torchao {provenance.torchao}; `{provenance.command}`"
    )


def draw_ratios(rows: Sequence[CellRow], path: Path) -> None:
    """A figure of the valid rows of the newest row's GPU, if there are any: speed per FLOP over
    BF16, by size."""
    import matplotlib

    from lib.plots import RC, render, sheet

    if not rows:
        return
    gpu = rows[-1].provenance.gpu
    rows_of_gpu = [row for row in newest(rows).values() if row.provenance.gpu == gpu]
    compared_rows = [row for row in valid_rows(rows_of_gpu) if row.ratio]
    if not compared_rows:
        return
    cost = {row.compared_size: row.measured.flops_per_token for row in compared_rows}
    sizes = sorted(cost, key=lambda size: cost[size])
    with matplotlib.rc_context(RC):
        figure, ((panel,),) = sheet(
            (7.4, 3.2),
            1,
            1,
            f"Training speed over BF16 on {gpu or 'a CPU (a rehearsal)'},"
            f" T={compared_rows[0].cell.T}",
            "Each between two BF16 runs on one device; per model FLOP (6 a matmul parameter + 12 L"
            " H D T per token).",
        )
        _draw_lines(panel, compared_rows, sizes)
        write_atomically(path, render(figure, "png"))


def _draw_lines(panel: Any, rows: Sequence[TimedRow], sizes: list[str]) -> None:
    """A line a label over the sizes, the fastest first in the legend, and BF16 at 1."""
    from lib.plots import STYLES

    fastest_first = sorted(rows, key=lambda row: -(row.ratio or 0.0))
    names = {row.cell.label: precision_in_words(row.cell) for row in fastest_first}
    for i, (label, name) in enumerate(names.items()):
        turn, number = divmod(i, len(STYLES) - 1)
        style = STYLES[1 + number]  # blue is BF16's
        line_style = {key: style[key] for key in ("color", "marker", "linestyle", "linewidth")}
        of_label = [row for row in rows if row.cell.label == label]
        points = sorted((sizes.index(row.compared_size), row.ratio) for row in of_label)
        xs, ys = zip(*points, strict=True)
        fill = "none" if turn else "full"
        panel.plot(xs, ys, label=name, **line_style, fillstyle=fill)
    panel.axhline(1.0, color="#999999", linewidth=0.8)
    panel.set_xticks(range(len(sizes)), map(size_name, sizes))
    panel.set(
        xlabel="size of the model",
        ylabel="speed over BF16, per FLOP",
        xlim=(-0.4, len(sizes) - 0.6),
    )
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
