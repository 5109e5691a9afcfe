"""Rows as people read them: a table and a figure."""

from pathlib import Path

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


def table(rows: list[dict]) -> str:
    """The newest rows as Markdown: what was measured, what does not count and why, where it comes
    from."""
    columns = {
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
    shown, parts = list(newest(rows).values()), []
    for gpu in dict.fromkeys(row["gpu"] for row in shown):
        here = [row for row in shown if row["gpu"] == gpu]
        lines = [
            ["" if row[name] is None else format(row[name], form) for name, form in columns.items()]
            for row in here
            if row["valid"]
        ]
        notes = [
            f"- not counted: {row['cell']}: {row.get('failure') or row['invalid_because']}"
            for row in here
            if not row["valid"]
        ]
        notes += dict.fromkeys(
            f"- {row['run']}: commit"
            f" {str(row['commit'])[:10]}{' with changes' * bool(row['dirty'])}, driver"
            f" {row['driver']}, torch {row['torch']}, torchao {row['torchao']}; `{row['command']}`"
            for row in here
        )
        notes += sorted(
            {
                f"- attention: `{row['attention_kernel']}`"
                for row in here
                if row.get("attention_kernel")
            }
        )
        parts += [
            f"## {gpu or 'No GPU: a rehearsal, its times say nothing about one'}",
            grid([list(columns), *lines]),
            "\n".join(notes),
        ]
    return "\n\n".join(parts) or "Nothing has been measured."


def draw(rows: list[dict], path: Path) -> None:
    """A figure of the valid rows of the newest row's GPU, if there are any: speed per FLOP over
    BF16, by size."""
    import matplotlib

    from lib.plots import RC, STYLES, render, sheet

    shown = [
        row
        for row in newest(rows).values()
        if row["valid"] and row["ratio"] and row["gpu"] == rows[-1]["gpu"]
    ]
    if not shown:
        return
    cost = {model_of(row): row["flops_per_token"] for row in shown}
    sizes = sorted(cost, key=cost.get)
    with matplotlib.rc_context(RC):
        figure, ((panel,),) = sheet(
            (7.4, 3.2),
            1,
            1,
            f"Training speed on {shown[0]['gpu'] or 'a CPU (a rehearsal)'}, T={shown[0]['T']}",
            "Each between two BF16 runs on one device; per model FLOP (6 a matmul parameter + 12 L"
            " H D T per token).",
        )
        for i, label in enumerate(dict.fromkeys(row["label"] for row in shown)):
            turn, style = divmod(i, len(STYLES) - 1)
            # blue is BF16's
            look = {
                key: STYLES[1 + style][key] for key in ("color", "marker", "linestyle", "linewidth")
            }
            points = sorted(
                (sizes.index(model_of(row)), row["ratio"]) for row in shown if row["label"] == label
            )
            panel.plot(
                *zip(*points, strict=True),
                label=label,
                **look,
                fillstyle="none" if turn else "full",
            )
        panel.axhline(1.0, color="#999999", linewidth=0.8)
        panel.set_xticks(range(len(sizes)), sizes)
        panel.set(xlabel="model", ylabel="speed over BF16, per FLOP", xlim=(-0.4, len(sizes) - 0.6))
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        write_atomically(path, render(figure, "png"))
