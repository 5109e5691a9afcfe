"""Draw the training of one run: loss, norm and speed with all that went wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lib.plots import (
    BLUE,
    GREY,
    ORANGE,
    STYLES,
    counts_axis,
    settle,
    sheet,
    steps_axis,
    styled,
)
from lib.text import si
from scaling.histories import History, finite, running_mean, to_number, window_of

# A shape of its own for each name, later ones over earlier ones; any other name gets OTHER.
MARKS = {
    "SKIP": ("v", "#E69F00"),
    "SPIKE": ("^", "#CC79A7"),
    "ROLLBACK": ("X", ORANGE),
    "STOP": ("P", "#000000"),
    "save failed": ("s", "#56B4E9"),
    "bad checkpoint": ("D", "#8B5A00"),
    "stopped": ("h", "#000000"),
    "resume": (">", "#009E73"),
    "branch": ("<", "#444444"),
}
OTHER = ("*", "#444444")
SIZE = 5.5  # of a mark, in points
LARGE = {"stopped": 9.0}  # a resume begins at the step of the stop and is drawn over it
TASK_MARKERS = ("o", "s", "^", "D")
TASKS = "tasks"  # the panel with the scores on eval.tasks
LABELS = {
    "loss": "loss\n[nats/token]",
    TASKS: "task\naccuracy",
    "grad_norm": "gradient\nnorm",
    "lr": "learning\nrate",
    "tok_per_s": "speed\n[tokens/s]",
    "gpu_util_pct": "GPU busy\n[%]",
}
HEIGHTS = {"loss": 2.3, TASKS: 1.3}  # inches; other panels are lower
VALIDATION_LOOK: dict[str, Any] = {
    "marker": "D",
    "markersize": 3.4,
    "markerfacecolor": "white",
    "linestyle": "",
}


@styled
def draw(history: History, name: str) -> Figure:
    """The page of one run, called `name`; panels for what the rows hold."""
    is_there = {
        "gpu_util_pct": np.isfinite(history.train["gpu_util_pct"]).any(),
        TASKS: bool(history.tasks),
    }
    keys = [key for key in LABELS if is_there.get(key, True)]
    heights = [HEIGHTS.get(key, 0.85) for key in keys]
    steps = _steps(history)
    looks = _mark_looks(history)
    handles = _handles(history, looks)
    figure, axes = sheet(
        (7.4, sum(heights) + 0.9 + 0.17 * (len(handles) // 5)),
        len(keys),
        1,
        f"Training of {name} (n = 1 run, steps {min(steps):,} to {max(steps):,})",
        _caption(history),
        handles,
        5,
        sharex=True,
        height_ratios=heights,
    )
    panels: dict[str, Axes] = dict(zip(keys, axes[:, 0], strict=True))
    for key, panel in panels.items():
        if key == TASKS:
            _draw_tasks(panel, history)
        else:
            _draw_column(panel, history, key)
    panels["tok_per_s"].yaxis.set_major_formatter(FuncFormatter(lambda y, _: si(y) if y else "0"))
    panels["lr"].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    validation = history.val["step"], history.val["loss"]
    panels["loss"].plot(*validation, color="#000000", **VALIDATION_LOOK, zorder=3)
    room = max(0.6, 0.01 * np.ptp(steps))
    panels["loss"].set_xlim(min(steps) - room, max(steps) + room)
    for mark, style in looks.items():
        _draw_mark(panels, history.marks[mark], style)
    steps_axis(axes[-1, 0])
    figure.align_ylabels()
    return settle(figure)


def _steps(history: History) -> list[int]:
    """All steps, undone ones too."""
    stretches = [history.train, *history.undone]
    return [int(step) for columns in stretches for step in columns["step"]]


def _caption(history: History) -> str:
    return (
        f"Line: mean over {window_of(history.train['step'])} OK steps; faint: single steps. Marks:"
        " verdicts at their value or at the edge, events at the foot; in brackets: how many."
    )


def _mark_looks(history: History) -> dict[str, dict]:
    """Mark -> its style, in order of MARKS, then of the names."""
    order = list(MARKS)
    names = sorted(
        history.marks, key=lambda name: (order.index(name) if name in MARKS else len(order), name)
    )
    looks = {}
    for name in names:
        shape, color = MARKS.get(name, OTHER)
        looks[name] = {
            "color": color,
            "marker": shape,
            "linestyle": "",
            "markersize": LARGE.get(name, SIZE),
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
            "clip_on": False,
            "in_layout": False,
            "zorder": 5,
        }
    return looks


def _handles(history: History, looks: dict[str, dict]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=BLUE, linewidth=1.4, label="training"),
        Line2D([], [], color="#000000", **VALIDATION_LOOK, label="validation"),
    ]
    if history.undone:
        handles.append(Line2D([], [], color=GREY, linewidth=1, label="undone"))
    for task, style in _task_looks(history).items():
        handles.append(Line2D([], [], label=task, **style))
    for name, style in looks.items():
        rows = history.marks[name]
        events = sum(row["kind"] == "event" for row in rows)
        count = max(events, len(rows) - events)  # of a rollback the step and the event are one
        handles.append(Line2D([], [], label=f"{name} ({count:,})", **style))
    return handles


def _task_looks(history: History) -> dict[str, dict[str, Any]]:
    """Task -> the style of its curve. Where there are more tasks than colours, colours repeat with
    another marker."""
    looks = {}
    for number, task in enumerate(history.tasks):
        style = STYLES[1 + number % (len(STYLES) - 1)]  # the first is the training's
        marker = TASK_MARKERS[number // (len(STYLES) - 1) % len(TASK_MARKERS)]
        looks[task] = {
            "color": style["color"],
            "marker": marker,
            "markersize": 3.4,
            "linewidth": 1.1,
            "linestyle": "-",
        }
    return looks


def _draw_tasks(panel: Axes, history: History) -> None:
    panel.set_ylabel(LABELS[TASKS])
    looks = _task_looks(history)
    for task, (steps, accuracies) in history.tasks.items():
        panel.plot(steps, accuracies, **looks[task])
    panel.yaxis.set_major_locator(MaxNLocator(4))
    panel.margins(y=0.1)


def _draw_column(panel: Axes, history: History, key: str) -> None:
    panel.set_ylabel(LABELS[key])
    for columns in history.undone:
        panel.plot(columns["step"], columns[key], color=GREY, linewidth=0.7, alpha=0.8, zorder=1.5)
    panel.plot(*finite(history.train, key), color=BLUE, linewidth=0.5, alpha=0.35, zorder=2)
    x, y = finite(history.train, key, is_ok=True)
    line = y if key == "lr" else running_mean(y)
    panel.plot(x, line, color=BLUE, linewidth=1.3, zorder=2.5)
    _set_limits(panel, history, key, y)


def _set_limits(panel: Axes, history: History, key: str, values: np.ndarray) -> None:
    """One spike governs no limit: what lies beyond is cut, its mark stands at the edge. values: of
    the steps whose verdict was OK."""
    if key == "loss" and len(values):
        low, high = np.quantile(values, (0.002, 0.98))
        ends = [low, high, running_mean(values)[0], *finite(history.val, "loss")[1]]
        room = max(0.06 * np.ptp(ends), 0.01 * abs(high), 1e-6)
        panel.set_ylim(min(ends) - room, max(ends) + room)
    elif key == "grad_norm" and len(values) and np.quantile(values, 0.002) > 0:
        panel.set_yscale("log")
        panel.set_ylim(np.quantile(values, 0.002) / 1.3, 2 * np.quantile(values, 0.98))
        counts_axis(panel.yaxis)
    elif key in ("tok_per_s", "lr", "gpu_util_pct"):
        panel.yaxis.set_major_locator(MaxNLocator(3))
        panel.margins(y=0.15)
        panel.set_ylim(bottom=0)


def _draw_mark(panels: dict[str, Axes], rows: Sequence[dict], style: dict[str, Any]) -> None:
    """Verdicts at their loss and norm, events at the foot of the loss with a line through all."""
    events = [row for row in rows if row["kind"] == "event"]
    verdicts = [row for row in rows if row["kind"] != "event"]
    for key in ("loss", "grad_norm"):
        low, high = panels[key].get_ylim()
        values = np.nan_to_num([to_number(row.get(key)) for row in verdicts], nan=high)
        panels[key].plot([row["step"] for row in verdicts], np.clip(values, low, high), **style)
    foot = panels["loss"].get_ylim()[0]
    panels["loss"].plot([row["step"] for row in events], [foot for _ in events], **style)
    line: dict[str, Any] = {"color": style["color"], "linewidth": 0.7, "linestyle": (0, (4, 2))}
    for row in events:
        for panel in panels.values():
            panel.axvline(row["step"], **line, alpha=0.8, zorder=1.2)
