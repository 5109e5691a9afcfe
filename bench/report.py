"""Rows as people read them: a table and a figure."""

from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.files import read_rows, write_atomically
from lib.text import grid


def rows_of(path: Path) -> list[dict]:
    """Raises UserError where there is no such file."""
    if not path.is_file():
        raise UserError(f"there is no {path}: give a file that this benchmark has written")
    return read_rows(path)


def newest(rows: list[dict]) -> dict[tuple, dict]:
    """The last row of each cell by (gpu, cell), those of a size together, BF16 first."""
    last = {(row["gpu"], row["cell"]): row for row in rows}
    return dict(sorted(last.items(), key=lambda item: model_of(item[1])))


def model_of(row: dict) -> str:
    """The size of ours that a row belongs to."""
    return (row["baseline"] or row["size"]).split()[0]


# Column -> format of its numbers.
COLUMNS = {
    "size": "",
    "label": "",
    "T": "",
    "micro_batch": "",
    "tok_per_s": ",.0f",
    "step_ms": ",.1f",
    "mfu_bf16": ".1%",
    "ratio": ".3f",
    "drift": "+.1%",
    "peak_gib": ".1f",
    "compile_s": ".0f",
    "loss_difference": ".4f",
}


def table(rows: list[dict]) -> str:
    """The newest rows as Markdown: what was measured, what does not count and why, where it comes
    from."""
    rows = list(newest(rows).values())
    parts = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        rows_of_gpu = [row for row in rows if row["gpu"] == gpu]
        lines = [_line(row) for row in rows_of_gpu if row["valid"]]
        parts.append(f"## {gpu or 'No GPU: a rehearsal, its times say nothing about one'}")
        parts.append(grid([list(COLUMNS), *lines]))
        parts.append("\n".join(_notes(rows_of_gpu)))
    return "\n\n".join(parts) or "Nothing has been measured."


def _line(row: dict) -> list[str]:
    return ["" if row[name] is None else format(row[name], form) for name, form in COLUMNS.items()]


def _notes(rows: list[dict]) -> list[str]:
    """What does not count, where the rows come from, and the kernels of attention."""
    notes = [
        f"- not counted: {row['cell']}: {row.get('failure') or row['invalid_because']}"
        for row in rows
        if not row["valid"]
    ]
    notes += dict.fromkeys(map(_origin, rows))
    kernels = {row.get("attention_kernel") for row in rows}
    notes += [f"- attention: `{kernel}`" for kernel in sorted(filter(None, kernels))]
    return notes


def _origin(row: dict) -> str:
    commit = str(row["commit"])[:10]
    if row["dirty"]:
        commit += " with changes"
    return (
        f"- {row['run']}: commit {commit}, driver {row['driver']}, torch {row['torch']},"
        f" torchao {row['torchao']}; `{row['command']}`"
    )


def draw(rows: list[dict], path: Path) -> None:
    """A figure of the valid rows of the newest row's GPU, if there are any: speed per FLOP over
    BF16, by size."""
    import matplotlib

    from lib.plots import RC, render, sheet

    if not rows:
        return
    gpu = rows[-1]["gpu"]
    rows = [row for row in newest(rows).values() if row["gpu"] == gpu]
    rows = [row for row in rows if row["valid"] and row["ratio"]]
    if not rows:
        return
    cost = {model_of(row): row["flops_per_token"] for row in rows}
    sizes = sorted(cost, key=lambda size: cost[size])
    with matplotlib.rc_context(RC):
        figure, ((panel,),) = sheet(
            (7.4, 3.2),
            1,
            1,
            f"Training speed on {gpu or 'a CPU (a rehearsal)'}, T={rows[0]['T']}",
            "Each between two BF16 runs on one device; per model FLOP (6 a matmul parameter + 12 L"
            " H D T per token).",
        )
        _draw_ratios(panel, rows, sizes)
        write_atomically(path, render(figure, "png"))


def _draw_ratios(panel: Any, rows: list[dict], sizes: list[str]) -> None:
    """A line a label over the sizes, and BF16 at 1."""
    from lib.plots import STYLES

    for i, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
        turn, number = divmod(i, len(STYLES) - 1)
        style = STYLES[1 + number]  # blue is BF16's
        look = {key: style[key] for key in ("color", "marker", "linestyle", "linewidth")}
        points = sorted(
            (sizes.index(model_of(row)), row["ratio"]) for row in rows if row["label"] == label
        )
        xs, ys = zip(*points, strict=True)
        panel.plot(xs, ys, label=label, **look, fillstyle="none" if turn else "full")
    panel.axhline(1.0, color="#999999", linewidth=0.8)
    panel.set_xticks(range(len(sizes)), sizes)
    panel.set(xlabel="model", ylabel="speed over BF16, per FLOP", xlim=(-0.4, len(sizes) - 0.6))
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
