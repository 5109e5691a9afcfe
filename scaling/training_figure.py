"""Draw the losses of one training in several precisions."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lib.plots import STYLES, settle, sheet, steps_axis, styled, styles
from lib.text import si
from scaling.histories import finite, running_mean, window_of
from scaling.training_report import TrainingRun

# a difference is smoothed over so many times as many steps as a loss: it is noise about little
CALM = 3
TRAINING, VALIDATION = "training loss\n[nats/token]", "validation loss\n[nats/token]"
DIFFERENCE = "training loss\nminus BF16 [%]"
MARKERS = 9  # of a line
WORST = 1.5  # times the best line's upper end: one run that diverged governs no axis

Lines = dict[str, tuple[np.ndarray, np.ndarray]]  # label -> steps, values


@styled
def draw_losses(runs: Sequence[TrainingRun]) -> Figure:
    """Training loss, validation loss, and the difference to the BF16 arm where there is one, over
    steps."""
    first = runs[0]
    window = window_of(first.history.train["step"])
    train = {run.label: finite(run.history.train, "loss") for run in runs}
    panels: dict[str, Lines] = {
        TRAINING: {label: (x, running_mean(y)) for label, (x, y) in train.items()},
        VALIDATION: {run.label: finite(run.history.val, "loss") for run in runs},
    }
    caption = f"Training: mean over {window} steps. Validation: each run as it was trained."
    if first.record.is_baseline and len(runs) > 1:
        panels[DIFFERENCE] = _differences(train, first.label)
        caption += f" Minus BF16: mean over {CALM * window} steps; above zero: worse than BF16."
    looks = _looks(runs)
    title = (
        f"Loss: {si(first.record.params_total)} parameters, {si(first.record.tokens)} tokens (n = 1"
        " run each)"
    )
    handles = [Line2D([], [], label=label, **style) for label, style in looks.items()]
    size = (7.4, 1.1 + 1.8 * len(panels))
    figure, axes = sheet(size, len(panels), 1, title, caption, handles, sharex=True)
    for panel, (name, lines) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_lines(panel, lines, looks)
        _set_limits(panel, lines, is_difference=name == DIFFERENCE)
        panel.set_ylabel(name)
    steps_axis(axes[-1, 0])
    return settle(figure)


def _differences(train: Lines, base_label: str) -> Lines:
    """Each line minus the BF16 arm's at the steps that both have, in per cent of it."""
    base_steps, base_loss = train[base_label]
    differences = {}
    for label, (steps, loss) in train.items():
        shared, of_base, of_line = np.intersect1d(base_steps, steps, return_indices=True)
        base = base_loss[of_base]
        difference = running_mean(loss[of_line] - base, CALM)
        differences[label] = (shared, 100 * difference / running_mean(base, CALM))
    return differences


def _looks(runs: Sequence[TrainingRun]) -> dict[str, dict]:
    """Label -> style; blue is BF16's alone."""
    has_base = runs[0].record.is_baseline
    fp8_runs = runs[1:] if has_base else runs
    of_labels = styles(["bf16", *(run.label for run in fp8_runs)])
    if not has_base:
        of_labels = of_labels[1:]
    return {
        run.label: {
            "color": style["color"],
            "marker": style["marker"],
            "linewidth": 2.2 if style is STYLES[0] else 1.2,
            "markersize": 3.6,
        }
        for run, style in zip(runs, of_labels, strict=True)
    }


def _draw_lines(panel: Axes, lines: Lines, looks: dict[str, dict]) -> None:
    for offset, (label, (x, y)) in enumerate(lines.items()):
        # markers at places of their own, so that lines on each other stay told apart
        distance = max(1, len(x) // MARKERS)
        first = (offset * distance) // 5 % distance
        panel.plot(x, y, **looks[label], markevery=(first, distance))


def _set_limits(panel: Axes, lines: Lines, is_difference: bool) -> None:
    """By each line but its first tenth: the first steps govern no axis."""
    ends = [np.quantile(y[len(y) // 10 :], (0.01, 0.99)) for _, y in lines.values() if len(y)]
    if not ends:
        return
    low, high = np.min(ends), np.max(ends)
    if not is_difference:
        high = min(high, WORST * min(end[1] for end in ends))
    room = 0.1 * (high - low) + 1e-6
    panel.set_ylim(low - room, high + room)
