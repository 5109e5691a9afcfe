"""The comparison that projects like this one publish: BF16 eager, BF16 compiled, FP8 rowwise and
tensorwise compiled, and what configs/gpt*_fp8.py do, long context, one sequence a micro-batch.

    python -m bench.throughput --suite fourway --budget 480      350M and 1.5B on one GPU
    python -m bench.throughput --suite fourway-toy --budget 120  a rehearsal on a CPU

Each arm is a training by train.py (bench/trainings.py) of 1,000 steps of one sequence, or as many
as time allows; a row each in OUT/trainings.jsonl. The table and the figure of four panels say
loss, tokens/s, TFLOP/s, MFU, time of training with and without compilation, memory. Noise in the
place of text: the losses say whether the arms learn alike, not how well."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import number_text, size_name
from bench.trainings import TrainingRow, read_trainings, train_on_noise, training_text
from lib.errors import UserError
from lib.files import write_atomically
from lib.machine import ROOT
from lib.text import duration, grid

STEPS = 1000
ARMS = {  # name -> the config's file behind the size, and its settings
    "BF16 eager": ("bf16", ("parallel.compile=off",)),
    "BF16 compiled": ("bf16", ("parallel.compile=block",)),
    "FP8 rowwise": ("fp8", ("parallel.compile=block", "fp8.recipe=rowwise")),
    "FP8 tensorwise": ("fp8", ("parallel.compile=block", "fp8.kernels=false")),
    "FP8 as configured": ("fp8", ("parallel.compile=block",)),
}


@dataclass(frozen=True)
class Suite:
    sizes: dict[str, str]  # name of a size -> <stem> of its configs/<stem>_<precision>.py
    context: int  # T, tokens; a step is one such sequence
    steps: int
    overrides: tuple[str, ...] = ()


SUITES = {
    "fourway": Suite({"350m": "gpt350m", "1p5b": "gpt1p5b"}, 4096, STEPS),
    "fourway-toy": Suite(
        {"toy": "gpt50m"},
        64,
        12,
        (
            "model.n_layer=2",
            "model.n_head=2",
            "model.n_embd=64",
            "model.n_ffn=128",
            "model.vocab_multiple=64",  # 50,304 rows take a CPU seconds a step
            "parallel.cpu_fp32=auto",
            "eval.tokens=1024",
        ),
    ),
}


def train_arms(name: str, budget_s: float, folder: Path) -> str:
    """Train what is missing in `folder` within `budget_s` seconds; the table, and the figure's
    path. Raises UserError where nothing was trained."""
    suite = SUITES[name]
    end = time.monotonic() + budget_s
    rows = []
    todo = [(size, arm) for size in suite.sizes for arm in ARMS]
    for number, (size, arm) in enumerate(todo):
        share_s = (end - time.monotonic()) / (len(todo) - number)
        if share_s <= 0:
            break
        row = _train(suite, size, arm, folder, share_s)
        left_s = max(0.0, end - time.monotonic())
        print(f"[{left_s:5.0f} s left] {training_text(row)}", flush=True)
        rows.append(row)
    if not rows:
        raise UserError(f"budget={budget_s:g} leaves no time for a training: give more seconds")
    return fourway_page(folder)


def all_trained(name: str, folder: Path) -> bool:
    """Whether each arm of a suite has trained as far as it was to, or had time to."""
    suite = SUITES[name]
    names = {_run_name(size, arm) for size, arm in itertools.product(suite.sizes, ARMS)}
    return names <= {row.name for row in read_trainings(folder) if row.is_sound}


def _train(suite: Suite, size: str, arm: str, folder: Path, limit_s: float) -> TrainingRow:
    precision, settings = ARMS[arm]
    overrides = [
        *suite.overrides,
        *settings,
        f"model.n_ctx={suite.context}",
        f"data.tokens_per_step={suite.context}",
        "data.micro_batch=1",
    ]
    return train_on_noise(
        ROOT / f"configs/{suite.sizes[size]}_{precision}.py",
        overrides,
        steps=suite.steps,
        folder=folder,
        limit_s=limit_s,
        name=_run_name(size, arm),
    )


def _run_name(size: str, arm: str) -> str:
    return f"{size}_{arm.lower().replace(' ', '_')}"


def _cells() -> dict[str, tuple[str, str]]:
    """Name of a run -> (size, arm)."""
    sizes = [size for suite in SUITES.values() for size in suite.sizes]
    return {_run_name(size, arm): (size, arm) for size, arm in itertools.product(sizes, ARMS)}


def fourway_page(folder: Path) -> str:
    """The table of what `folder` holds, and the figure's path where it could be drawn."""
    rows = read_trainings(folder)
    lines = [arms_table(rows)]
    if not any(row.losses for row in rows):
        return lines[0]
    try:
        path = folder / "fourway.png"
        draw_arms(rows, path)
        lines.append(str(path))
    except ImportError:  # a machine for an hour may lack matplotlib
        pass
    return "\n\n".join(lines)


def arm_of(row: TrainingRow) -> tuple[str, str]:
    """(size, arm) of a row of this comparison."""
    return _cells()[row.name]


# Title of a column -> its text of a row.
COLUMNS: dict[str, Callable[[TrainingRow], str]] = {
    "size": lambda row: size_name(arm_of(row)[0]),
    "arm": lambda row: arm_of(row)[1],
    "steps": lambda row: f"{row.steps:,}",
    "loss": lambda row: f"{row.losses[-1]:.3f}" if row.losses else "",
    "tokens/s": lambda row: number_text(row.tok_per_s, ",.0f"),
    "TFLOP/s": lambda row: number_text(row.tflops, ".3g"),
    "MFU": lambda row: number_text(row.mfu_bf16, ".1%"),
    "training": lambda row: duration(row.trained_s) if row.seconds else "",
    "without compilation": lambda row: _duration_text(row.compiled_s),
    f"{STEPS:,} steps": lambda row: _duration_text(row.seconds_of(STEPS)),
    "GiB": lambda row: number_text(row.mem_gib, ".1f"),
    "remark": lambda row: row.failure or "",
}


def _duration_text(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def arms_table(rows: Sequence[TrainingRow]) -> str:
    """Markdown."""
    lines = [[text(row) for text in COLUMNS.values()] for row in rows]
    return grid([list(COLUMNS), *lines])


def draw_arms(rows: Sequence[TrainingRow], path: Path) -> None:
    """Four panels of those that have trained: loss by step, tokens/s, time of training, memory."""
    import matplotlib

    from lib.plots import RC, render, sheet

    trained = [row for row in rows if row.losses]
    devices = ", ".join(sorted({row.device for row in trained if row.device})) or "no device"
    with matplotlib.rc_context(RC):
        figure, ((loss, speed), (seconds, memory)) = sheet(
            (9.0, 6.0),
            2,
            2,
            f"Five ways to train, T = {trained[0].context:,}, on {devices}",
            "One sequence a step, noise in the place of text. Hatched: what the first step took"
            " longer, compilation above all.",
        )
        _draw_losses(loss, trained)
        thousands = [(row.tok_per_s or 0.0) / 1e3 for row in trained]
        _draw_bars(speed, trained, thousands, "thousand tokens/s")
        _draw_seconds(seconds, trained)
        _draw_memory(memory, trained)
        write_atomically(path, render(figure, "png"))


def _draw_losses(panel: Any, rows: Sequence[TrainingRow]) -> None:
    """A line an arm over the steps: a colour an arm, a dash a size."""
    from lib.plots import STYLES

    sizes = list(dict.fromkeys(arm_of(row)[0] for row in rows))
    for row in rows:
        size, arm = arm_of(row)
        style = {
            "color": STYLES[list(ARMS).index(arm)]["color"],
            "linestyle": ("-", "--")[sizes.index(size)],
        }
        panel.plot(
            range(1, row.steps + 1), row.losses, **style, linewidth=0.8, label=_arm_name(row)
        )
    panel.set(xlabel="step", ylabel="training loss [nats/token]")
    panel.legend(frameon=False, fontsize=6)


def _draw_seconds(panel: Any, rows: Sequence[TrainingRow]) -> None:
    """A bar an arm without compilation, which lies hatched behind it; all arms of as many steps,
    since those that time stopped have all trained as long."""
    steps = max(row.steps for row in rows)
    compiled_s = [row.seconds_of(steps) or 0.0 for row in rows]
    _draw_bars(panel, rows, compiled_s, f"seconds of {steps:,} steps, at the median's pace")
    compile_s = [row.compile_s or 0.0 for row in rows]
    hatched = {"color": "white", "edgecolor": "k", "hatch": "///"}
    panel.barh(range(len(rows)), compile_s, left=compiled_s, **hatched)
    longest_s = max(map(sum, zip(compiled_s, compile_s, strict=True)))
    panel.set_xlim(right=1.05 * longest_s)


def _draw_memory(panel: Any, rows: Sequence[TrainingRow]) -> None:
    gib = [row.mem_gib or 0.0 for row in rows]
    _draw_bars(panel, rows, gib, "memory of tensors [GiB]")
    if all(row.mem_gib is None for row in rows):
        middle = {"x": 0.5, "y": 0.5, "transform": panel.transAxes, "ha": "center"}
        panel.text(s="not measured", **middle)


def _draw_bars(
    panel: Any, rows: Sequence[TrainingRow], values: Sequence[float], xlabel: str
) -> None:
    """A bar an arm, the first on top."""
    places = range(len(rows))
    panel.barh(places, values, color="#0072B2")
    panel.set(xlabel=xlabel)
    panel.set_xlim(left=0.0)
    panel.set_yticks(places, [_arm_name(row) for row in rows])
    panel.invert_yaxis()


def _arm_name(row: TrainingRow) -> str:
    size, arm = arm_of(row)
    return f"{size_name(size)} {arm}"
