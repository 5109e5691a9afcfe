"""Rows as people read them: a table and a figure."""

from pathlib import Path
from typing import Any

from bench.rows import rows_of
from fp8.recipes import RECIPES
from lib.files import write_atomically
from lib.text import grid


def newest(rows: list[dict]) -> dict[tuple, dict]:
    """The last row of each cell by (gpu, cell), those of a size together, BF16 first."""
    last = {(row["gpu"], row["cell"]): row for row in rows}
    return dict(sorted(last.items(), key=lambda item: model_of(item[1])))


def model_of(row: dict) -> str:
    """The size of ours that a row belongs to."""
    return (row["baseline"] or row["size"]).split()[0]


def size_name(size: str) -> str:
    """A size as people write it: 1.5B for 1p5b, 125M for 125m; a peer's model as it is called."""
    if size[0].isdigit():
        return size.replace("p", ".").upper()
    return size


WORDS = {  # parts of a label -> how a figure calls them
    "kernels": "our kernels",
    "delayed": "delayed scales",
    "bounded": "bounded scales",
    "head": "head too",
    "documents": "document mask",
    "bf16": "BF16",
    "fp8": "FP8",
    "nanogpt": "nanoGPT",
}


def label_name(label: str) -> str:
    """A label in words: "tensorwise, our kernels, head too" for tensorwise+kernels+head, "nanochat,
    FP8" for nanochat_fp8."""
    first, *options = label.split("+")
    recipe = RECIPES.get(first)
    if recipe is None:  # BF16, or a peer and its precision
        first, *precision = first.split("_")
        options = precision + options
    elif recipe.on_gpu == "torchao" and "kernels" not in options:
        options.insert(0, "torchao")
    return ", ".join(WORDS.get(word, word) for word in (first, *options))


def rows_beside_peers(out: Path) -> list[dict]:
    """Rows of our own sizes that bench.peers took, in the file beside `out`: a figure of all sizes
    needs them too."""
    path = out.with_name(f"{out.stem}_peers.jsonl")
    if not path.is_file():
        return []
    return [row for row in rows_of(path) if row["peer"] is None and not row["model"]]


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
            f"Training speed over BF16 on {gpu or 'a CPU (a rehearsal)'}, T={rows[0]['T']}",
            "Each between two BF16 runs on one device; per model FLOP (6 a matmul parameter + 12 L"
            " H D T per token).",
        )
        _draw_ratios(panel, rows, sizes)
        write_atomically(path, render(figure, "png"))


def _draw_ratios(panel: Any, rows: list[dict], sizes: list[str]) -> None:
    """A line a label over the sizes, the fastest first in the legend, and BF16 at 1."""
    from lib.plots import STYLES

    fastest_first = sorted(rows, key=lambda row: -row["ratio"])
    for i, label in enumerate(dict.fromkeys(row["label"] for row in fastest_first)):
        turn, number = divmod(i, len(STYLES) - 1)
        style = STYLES[1 + number]  # blue is BF16's
        line_style = {key: style[key] for key in ("color", "marker", "linestyle", "linewidth")}
        points = sorted(
            (sizes.index(model_of(row)), row["ratio"]) for row in rows if row["label"] == label
        )
        xs, ys = zip(*points, strict=True)
        panel.plot(
            xs, ys, label=label_name(label), **line_style, fillstyle="none" if turn else "full"
        )
    panel.axhline(1.0, color="#999999", linewidth=0.8)
    panel.set_xticks(range(len(sizes)), map(size_name, sizes))
    panel.set(
        xlabel="size of the model",
        ylabel="speed over BF16, per FLOP",
        xlim=(-0.4, len(sizes) - 0.6),
    )
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
