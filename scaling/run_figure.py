"""Draw one run's training from its metrics.jsonl: losses, gradient norm, learning rate, speed, all that went wrong.

`draw_run` reads a finished run as well as one that is still going or was cut short; scaling/figures.py RUN is the command.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from runtime.cli import UserError
from scaling.figures import RC, human, page, render, steps_axis, write
from scaling.gap import running_mean, window_of
from scaling.records import read_text

# Okabe-Ito, a shape of its own for each name; a name that is not here gets one of OTHERS.
MARKS = {"SKIP": ("v", "#E69F00"), "SPIKE": ("^", "#CC79A7"), "ROLLBACK": ("X", "#D55E00"), "STOP": ("P", "#000000"),
         "resume": (">", "#009E73"), "save failed": ("s", "#56B4E9"), "bad checkpoint": ("D", "#8B5A00"),
         "stopped": ("h", "#000000"), "branch": ("<", "#444444")}
OTHERS = (("*", "#444444"), ("p", "#777777"), ("d", "#999999"))
TRAIN, UNDONE = "#0072B2", "#999999"
GPU = ("gpu_util_pct", "gpu_mem_pct", "gpu_power_w")
FIELDS = ("loss", "grad_norm", "lr", "tok_per_s", *GPU, "step_s", "since_start")
LABELS = {"loss": "loss\n[nats/token]", "grad_norm": "gradient\nnorm", "lr": "learning\nrate", "tok_per_s": "speed\n[tokens/s]",
          "gpu_util_pct": "GPU\n[%]"}
HEIGHTS = {"loss": 2.3}     # inches, of the others 0.85
COLUMNS = 5                 # of the legend


@dataclass
class History:
    """A run's rows as arrays; NaN is what was not finite, or not told."""
    train: dict[str, np.ndarray]                                        # "step", "ok", FIELDS -> a value per step that counts
    undone: list[dict[str, np.ndarray]]                                 # the same of each stretch that a rollback took back
    val: np.ndarray                                                     # (n, 2): step, loss
    undone_val: np.ndarray
    marks: dict[str, list[dict]] = field(default_factory=dict)          # name -> rows: a verdict that is not OK, an event
    notes: list[str] = field(default_factory=list)


def draw_run(run: Path, folder: Path | None = None) -> None:
    """Write run.png into `folder` (run/figures by default), say where and what was left out.

    Raises UserError where the run has no step to draw, or where `folder` cannot be written."""
    folder = folder or run / "figures"
    history = read_history(run)
    with matplotlib.rc_context(RC):
        content = render(draw(history, run.resolve().name), "png")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "run.png", content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    print("\n".join([*history.notes, f"wrote {folder}/: run.png"]))


def read_history(run: Path) -> History:
    """What metrics.jsonl tells, the last of a repeated step. Raises UserError where there is no such file or no step in it."""
    path = run / "metrics.jsonl"
    if not any((run / name).is_file() for name in (path.name, f"{path.name}.gz")):
        raise UserError(f"{run} {'has no metrics.jsonl' if run.is_dir() else 'is no folder'}: expected the folder of a run, "
                          f"such as out/demo_s_fp8")
    lines = read_text(path).split("\n")
    rows = [row for row in map(_row, lines) if row]
    torn = [i for i, line in enumerate(lines, 1) if line and not _row(line)]
    history = History(_columns({row["step"]: row for row in rows if row["kind"] == "train"}), [],
                      *(_losses(rows, kind) for kind in ("val", "undone_val")))
    stretch = {}
    for row in [*rows, {"kind": "end"}]:
        if stretch and row["kind"] not in ("undone", "undone_val"):
            history.undone.append(_columns(stretch))
            stretch = {}
        if row["kind"] == "undone":
            stretch[row["step"]] = row
    for row in rows:
        name = row.get("event" if row["kind"] == "event" else "verdict")
        if row["kind"] in ("event", "train", "undone") and isinstance(name, str) and name != "OK":
            name = "ROLLBACK" if name == "rollback" else name.replace("_", " ")[:14]
            history.marks.setdefault(name, []).append(row)      # of a rollback both, the step judged and the event
    if not len(history.train["step"]) and not history.undone:
        raise UserError(f"{path} has no step to draw yet: expected a line like "
                          f'{{"kind": "train", "step": 1, "loss": 5.8, ...}}')
    if torn and torn[-1] == len(lines):
        torn.pop()      # the run is being written, or was cut there
    if torn:
        history.notes.append(f"{path}: left out {len(torn)} line{'s' * (len(torn) > 1)} that cannot be read, "
                             f"the first is line {torn[0]}")
    return history


def draw(history: History, name: str) -> Figure:
    """The page of one run, called `name`; panels for what the rows hold."""
    has_gpu = any(np.isfinite(history.train[key]).any() for key in GPU)
    keys = [key for key in LABELS if key != "gpu_util_pct" or has_gpu]
    heights = [HEIGHTS.get(key, 0.85) for key in keys]
    title = f"Training of {name} (n = 1 run, steps {min(_steps(history)):,} to {max(_steps(history)):,})"
    lines = -(-(3 + len(history.marks)) // COLUMNS)     # of the legend
    figure, panels = page(sum(heights) + 1.2 + 0.16 * lines, len(keys), 1, title, _caption(history), top=0.3 + 0.16 * lines,
                          left=0.115, right=0.925 if has_gpu else 0.985, hspace=0.2, sharex=True,
                          gridspec_kw={"height_ratios": heights})
    panels = dict(zip(keys, panels[:, 0], strict=True))
    for key, panel in panels.items():
        for columns in history.undone if key != "gpu_util_pct" else ():
            panel.plot(columns["step"], columns[key], color=UNDONE, linewidth=0.7, alpha=0.8, zorder=1.5)
        if key != "gpu_util_pct":
            _draw_line(panel, history.train, key)
        panel.set_ylabel(LABELS[key])
        panel.grid(True, color="#EEEEEE", linewidth=0.5)
        panel.set_axisbelow(True)
    panels["loss"].plot(*history.undone_val.T, "D", color=UNDONE, markersize=3.4, markerfacecolor="none", zorder=3)
    panels["loss"].plot(*history.val.T, "D", color="#000000", markersize=3.4, markerfacecolor="white", zorder=3)
    _set_axes(panels, history)
    if has_gpu:
        _draw_gpu(panels["gpu_util_pct"], history.train)
    handles = [Line2D([], [], color=TRAIN, linewidth=1.4, label="training"),
               *([Line2D([], [], color="#000000", marker="D", markersize=3.4, markerfacecolor="white", linestyle="",
                         label="validation")] if len(history.val) else []),
               *([Line2D([], [], color=UNDONE, linewidth=1, label="undone")] if history.undone else []),
               *_draw_marks(panels, history)]
    legend = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.115, 1 - 0.24 / figure.get_figheight()),
                           ncols=COLUMNS, frameon=False, columnspacing=1.3, handlelength=1.5, borderpad=0, borderaxespad=0)
    for text in legend.get_texts():
        text.set_parse_math(False)      # an event's name is data
    figure.align_ylabels()
    FigureCanvasAgg(figure).draw()
    return figure


def _draw_line(panel, columns, key) -> None:
    """Single steps, faint; over them the running mean of those that were OK."""
    if key != "lr":
        known = np.isfinite(columns[key])
        panel.plot(columns["step"][known], columns[key][known], color=TRAIN, linewidth=0.5, alpha=0.35, zorder=2)
    steps, values = _accepted(columns, key)
    if len(values):
        panel.plot(steps, running_mean(values) if key != "lr" else values, "." if len(values) == 1 else "-", color=TRAIN,
                   linewidth=1.3, zorder=2.5)


def _draw_gpu(panel, columns) -> None:
    """Percentages on the left axis, watts on the right."""
    right = panel.twinx()
    right.spines["right"].set_visible(True)
    for axis, key, color, dash, label in ((panel, "gpu_util_pct", TRAIN, "-", "busy"),
                                          (panel, "gpu_mem_pct", "#000000", (0, (4, 2)), "memory"),
                                          (right, "gpu_power_w", "#D55E00", (0, (1, 1)), "power")):
        known = np.isfinite(columns[key])
        if known.any():
            axis.plot(columns["step"][known], running_mean(columns[key][known]), color=color, linestyle=dash, linewidth=1.3,
                      label=label)
    panel.set_ylim(0, 109)
    right.set_ylim(0, 1.4 * max(np.nanmax([*columns["gpu_power_w"], 1]), 1))     # below the percentages
    right.set_ylabel("power [W]")
    panel.legend(handles=[line for axis in (panel, right) for line in axis.get_lines() if line.get_label()[0] != "_"],
                 loc="lower right", ncols=3, framealpha=0.8, edgecolor="none", borderpad=0.2)


def _draw_marks(panels, history: History) -> list[Line2D]:
    """Verdicts at their loss and gradient norm, events at the foot of the loss with a line through all; legend handles."""
    others, handles, taken = iter(OTHERS * len(history.marks)), [], {}
    ordered = sorted(history.marks, key=lambda name: (list(MARKS).index(name) if name in MARKS else len(MARKS), name))
    for name in ordered:
        (shape, color), rows = MARKS.get(name) or next(others), history.marks[name]
        style = {"color": color, "marker": shape, "linestyle": "", "markersize": 5.5, "markeredgecolor": "white",
                 "markeredgewidth": 0.5, "clip_on": False, "zorder": 5}
        for key, panel in panels.items():
            verdicts = [row for row in rows if row["kind"] != "event"] if key in ("loss", "grad_norm") else []
            low, high = panel.get_ylim()
            heights = [min(max(value if math.isfinite(value := _number(row.get(key))) else high, low), high) for row in verdicts]
            panel.plot([row["step"] for row in verdicts], heights, **style)
            events = [row["step"] for row in rows if row["kind"] == "event"]
            for step in events:
                panel.axvline(step, color=color, linewidth=0.7, linestyle=(0, (4, 2)), alpha=0.8, zorder=1.2)
            if key == "loss":       # marks that would hide each other stand on each other
                width = max(1, 0.013 * np.ptp(panel.get_xlim()))
                levels = [taken.setdefault((name, step), sum(abs(step - other) < width for _, other in taken)) for step in events]
                panel.plot(events, [low + 0.07 * min(level, 12) * (high - low) for level in levels], **style)
        events = sum(row["kind"] == "event" for row in rows)
        handles.append(Line2D([], [], label=f"{name} ({max(events, len(rows) - events):,})", **style))
    return handles


def _set_axes(panels, history: History) -> None:
    """Limits that one spike does not govern: what lies beyond them is cut, its mark stands at the edge."""
    steps = _steps(history)
    room = max(0.6, 0.01 * np.ptp(steps))
    panels["loss"].set_xlim(min(steps) - room, max(steps) + room)
    for key, panel in panels.items():
        values = _accepted(history.train, key)[1]
        if key in ("loss", "grad_norm") and len(values):
            low, high = np.quantile(values, (0.002, 0.98))
            if key == "loss":
                ends = [low, high, running_mean(values)[0], *history.val[:, 1]]
                room = max(0.06 * np.ptp(ends), 0.01 * abs(high), 1e-6)
                panel.set_ylim(min(ends) - room, max(ends) + room)
            elif low > 0:
                panel.set_yscale("log")
                low, high = panel.set_ylim(low / 1.3, high * 2)
                ticks = [m * 10.0**e for e in range(-30, 30) for m in (1, 1.5, 2, 3, 5, 7) if low <= m * 10.0**e <= high]
                while len(ticks) > 4:
                    ticks = ticks[::2]
                panel.yaxis.set_major_locator(FixedLocator(ticks))
                panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y)))
                panel.yaxis.set_minor_locator(NullLocator())
        elif key == "tok_per_s":
            panel.set_ylim(0, 1.15 * max(np.quantile(values, 0.99), 1e-6) if len(values) else 1)
            panel.yaxis.set_major_locator(MaxNLocator(3))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y) if y else "0"))
        elif key == "lr":
            panel.set_ylim(0, 1.12 * max(values.max(initial=0), 1e-12))
            panel.yaxis.set_major_locator(MaxNLocator(3))
            panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    steps_axis(list(panels.values())[-1])


def _accepted(columns, key) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of what was finite in the steps that were OK."""
    known = np.isfinite(columns[key]) & (columns["ok"] > 0)
    return columns["step"][known], columns[key][known]


def _caption(history: History) -> str:
    window = window_of(history.train["step"])
    parts = [f"Line: mean over {window} OK steps; faint: single steps." if window > 1 else "Line: every step that was OK."]
    if len(history.val):
        parts.append("Diamonds: validation.")
    if history.undone:
        parts.append("Grey: steps that a rollback took back; their steps were done again on other data.")
    if history.marks:
        parts.append("Marks: verdicts that were not OK stand at their value, or at the edge where it is beyond the axis or not "
                     "finite; events on the foot of the loss, with a dashed line. In brackets: how many.")
    return " ".join(parts)


def _steps(history: History) -> list[int]:
    return [int(step) for columns in (history.train, *history.undone) for step in columns["step"]]


def _row(line: str) -> dict | None:
    """A line's row, or None where it is none: not JSON, no kind, no step that a run could have."""
    try:
        row = json.loads(line)
        return row if isinstance(row["kind"], str) and type(row["step"]) is int and 0 <= row["step"] < 2**53 else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _columns(rows: dict[int, dict]) -> dict[str, np.ndarray]:
    ordered = [rows[step] for step in sorted(rows)]
    return {"step": np.array([row["step"] for row in ordered], dtype=float),
            "ok": np.array([row.get("verdict", "OK") == "OK" for row in ordered], dtype=float),
            **{key: np.array([_number(row.get(key)) for row in ordered], dtype=float) for key in FIELDS}}


def _losses(rows: list[dict], kind: str) -> np.ndarray:
    found = {row["step"]: _number(row.get("loss")) for row in rows if row["kind"] == kind}
    return np.array([pair for pair in sorted(found.items()) if math.isfinite(pair[1])], dtype=float).reshape(-1, 2)


def _number(value) -> float:
    """A row's value, NaN where it is no number that can be drawn."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 else math.nan
