"""Draw runs of one training in several precisions: loss over steps, GPU memory, utilisation, cumulative time.

An arm here is report.Arm. Colours are Okabe-Ito's; each arm has a dash and a marker of its own as well, for print in grey.
"""

import itertools

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from scaling.dynamics import running_mean, window_of
from scaling.figures import RC, page, steps_axis
from scaling.pairs import human

BF16 = {"color": "#0072B2", "marker": "o", "linestyle": "-", "linewidth": 2.2}
STYLES = tuple({"color": color, "marker": marker, "linestyle": dash, "linewidth": 1.2} for color, marker, dash in (
    ("#D55E00", "s", (0, (4, 1.5))), ("#009E73", "D", (0, (1.2, 1.2))), ("#CC79A7", "^", (0, (6, 1.5, 1.2, 1.5))),
    ("#E69F00", "v", (0, (2.5, 1))), ("#56B4E9", "P", (0, (8, 2))), ("#000000", "X", (0, (1, 2.5))),
    ("#8B5A00", "*", (0, (4, 1, 1, 1, 1, 1)))))
MARKS = 9           # along a line
HOLLOW = {"markersize": 4.6, "markerfacecolor": "white", "markeredgewidth": 0.9}       # a validation
COLUMNS = 4         # of the legend
LEFT = 0.115
CALM = 3            # a difference is smoothed over so many times as many steps as a loss: it is noise about little


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit, its seconds and its name, in which so long a time is a number that is read easily."""
    return (3600.0, "h") if seconds >= 2 * 3600 else (60.0, "min") if seconds >= 300 else (1.0, "s")


def begin_of(are_compiled) -> tuple[str, str]:
    """What the first step after a start takes beyond the others, as a column calls it, and a sentence about it.

    It is no compilation where no run compiled."""
    flags = set(are_compiled)
    name = "compilation" if True in flags else "the first step's extra"
    sentence = f"{name.capitalize()}: what the first step after each start took beyond the median step"
    return name, sentence + (", of an eager run too." if flags == {True, False} else ".")


def draw_losses(arms) -> Figure:
    """Training loss, validation loss, and the difference to the BF16 arm where there is one, over steps."""
    base = next((arm for arm in arms if arm.record.recipe == "bf16"), None)
    others = [arm for arm in arms if arm is not base]
    has_gap = base is not None and bool(others)
    heights = [2.1, 1.6, 1.6][:2 + has_gap]
    window = window_of(arms[0].history.train["step"])
    smoothed = f"mean over {window} steps" if window > 1 else "each step"
    caption = f"Training: {smoothed}, without losses that are not finite. Validation (hollow marks): each run as it was trained."
    if has_gap:
        caption += (f" Below: loss minus the BF16 run's on the same tokens, in per cent of it; line: training, mean over "
                    f"{CALM * window} steps; hollow: validation. Above zero: worse than BF16.")
    caption += " What lies beyond an axis, such as the first steps, is cut."
    with matplotlib.rc_context(RC):
        figure, panels = _sheet(arms, heights, _title("Loss", arms), caption, sharex=True)
        train, val = panels[:2]
        for i, (arm, style) in enumerate(styled(arms)):
            steps, loss = _finite(arm.history.train["step"], arm.history.train["loss"])
            if len(steps):
                train.plot(steps, running_mean(loss), **style, **_marks(i, len(steps)))
            val.plot(*arm.history.val.T, **style | {"linewidth": 0.8 * style["linewidth"]}, **HOLLOW)
            if has_gap and arm is not base:
                _draw_gap(panels[2], base, arm, i, style)
        _set_loss(train, [_finite(arm.history.train["step"], arm.history.train["loss"])[1] for arm in arms])
        _set_loss(val, [arm.history.val[:, 1] for arm in arms])
        for panel, label in zip(panels, ("training loss\n[nats/token]", "validation loss\n[nats/token]", "minus BF16 [%]"),
                                strict=False):
            panel.set_ylabel(label)
        if has_gap:
            _set_gap(panels[2])
            panels[2].axhline(0, color=BF16["color"], linewidth=1.4, zorder=1)
        steps_axis(panels[-1])
        return _finish(figure)


def draw_gpu(arms) -> Figure | None:
    """Memory and utilisation of the first rank's GPU over time; None where no arm's rows tell either."""
    rows = {"gpu_mem_pct": "memory\nallocated [%]", "gpu_util_pct": "utilisation\n[%]"}
    told = [arm for arm in arms if arm.clock is not None and any(np.isfinite(arm.history.train[key]).any() for key in rows)]
    if not told:
        return None
    size, unit = unit_of(max(arm.clock[0, -1] for arm in told))
    silent = [arm.label for arm in arms if arm not in told]
    caption = ("One GPU, that of the first rank; mean over a fortieth of the steps. Time: sum of the steps' times since the "
               "start." + f" Not told by the rows of {', '.join(silent)}." * bool(silent))
    with matplotlib.rc_context(RC):
        title = _title("GPU memory and utilisation", told)
        figure, panels = _sheet(told, [1.6, 1.6], title, caption, sharex=True)
        for panel, (key, label) in zip(panels, rows.items(), strict=True):
            for i, (arm, style) in enumerate(styled(arms)):
                if arm in told:
                    values = arm.history.train[key]
                    time, values = _finite(arm.clock[0] / size, np.where((values >= 0) & (values <= 100), values, np.nan))
                    if len(time):
                        panel.plot(time, running_mean(values), **style, **_marks(i, len(time)))
            panel.set(ylim=(0, 104), ylabel=label)
        panels[-1].set_xlabel(f"time [{unit}]")
        return _finish(figure)


def draw_time(arms) -> Figure | None:
    """Cumulative time over steps, with what begin_of() names and without it; None where no arm's rows tell their time."""
    told = [arm for arm in arms if arm.clock is not None]
    if not told:
        return None
    size, unit = unit_of(max(arm.clock[0, -1] for arm in told))
    begin, sentence = begin_of(arm.record.is_compiled for arm in told)
    caption = (f"Sum of the times of all steps, those that a rollback took back included. {sentence} At each end: the total. "
               "Each panel has its own scale.")
    with matplotlib.rc_context(RC):
        figure, panels = _sheet(told, [2.9], _title("Cumulative time", told), caption, columns=2, sharex=True)
        for panel, row, title in zip(panels, (0, 1), (f"with {begin}", f"without {begin}"), strict=True):
            ends = []
            for i, (arm, style) in enumerate(styled(arms)):
                if arm in told:
                    steps, time = arm.history.train["step"], arm.clock[row] / size
                    panel.plot(steps, time, **style, **_marks(i, len(steps)))
                    ends.append((time[-1], steps[-1]))
            panel.set_title(title, loc="left")
            panel.set_ylim(0, 1.06 * max(max(ends)[0], 1e-9))
            _label_ends(panel, ends)
            steps_axis(panel)
        panels[0].set_ylabel(f"cumulative time [{unit}]")
        return _finish(figure)


def styled(arms) -> list[tuple]:
    """(arm, how its lines look) of each: the same in every figure."""
    styles = itertools.cycle(STYLES)
    return [(arm, BF16 if arm.record.recipe == "bf16" else next(styles)) for arm in arms]


def _title(what: str, arms) -> str:
    record = arms[0].record
    precisions = f"{len(arms)} precisions" if len(arms) > 1 else arms[0].label
    return f"{what} in {precisions}: {human(record.params_total)} parameters, {human(record.tokens)} tokens (n = 1 run each)"


def _sheet(arms, heights, title, caption, columns=1, **shared):
    """The page with its legend above its panels; the panels as a flat array."""
    lines = -(-len(arms) // COLUMNS)    # of the legend
    top = 0.3 + 0.17 * lines + 0.2 * (columns > 1)
    figure, panels = page(sum(heights) + 0.8 + top, len(heights), columns, title, caption, top=top, left=LEFT,
                          right=0.93 if columns > 1 else 0.985, wspace=0.2, gridspec_kw={"height_ratios": heights}, **shared)
    handles = [Line2D([], [], label=arm.label, markersize=4, **style) for arm, style in styled(arms)]
    legend = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(LEFT, 1 - 0.24 / figure.get_figheight()),
                           ncols=-(-len(arms) // lines), frameon=False, columnspacing=1.6, handlelength=3.2, borderpad=0,
                           borderaxespad=0)
    for text in legend.get_texts():
        text.set_parse_math(False)      # a run's name is data
    for panel in panels.flat:
        panel.grid(True, color="#EEEEEE", linewidth=0.5)
        panel.set_axisbelow(True)
    return figure, panels.flatten()


def _finish(figure: Figure) -> Figure:
    figure.align_ylabels()
    FigureCanvasAgg(figure).draw()      # ticks and labels take these settings now, not savefig's
    return figure


def _marks(i: int, n: int) -> dict:
    """Markers along a line of n points, each arm's at places of its own so that lines on each other stay told apart."""
    every = max(1, n // MARKS)
    return {"markersize": 3.6, "markevery": ((i * every) // 5 % every, every)}


def _finite(x, values) -> tuple[np.ndarray, np.ndarray]:
    known = np.isfinite(values)
    return np.asarray(x)[known], values[known]


def _draw_gap(panel, base, arm, i, style) -> None:
    own, theirs = (dict(zip(*_finite(one.history.train["step"], one.history.train["loss"]), strict=True)) for one in (arm, base))
    steps = sorted(own.keys() & theirs.keys())
    if steps:
        gap, below = (running_mean(np.array(values), CALM) for values in zip(*((own[s] - theirs[s], theirs[s]) for s in steps),
                                                                      strict=True))
        panel.plot(steps, 100 * gap / np.where(below > 0, below, np.nan), **style, **_marks(i, len(steps)))
    own, theirs = (dict(one.history.val) for one in (arm, base))
    steps = sorted(step for step in own.keys() & theirs.keys() if theirs[step] > 0)
    panel.plot(steps, [100 * (own[s] - theirs[s]) / theirs[s] for s in steps], **style | {"linestyle": ""},
               **HOLLOW)


def _set_loss(panel, losses) -> None:
    """Limits that neither the first steps nor one run that diverged govern."""
    smooth = [running_mean(values) for values in losses if len(values)]
    if not smooth:
        return
    low = min(float(values.min()) for values in smooth)
    start = float(smooth[0][int(0.03 * len(smooth[0]))])
    high = min(max(float(np.quantile(values, 0.97)) for values in smooth), 1.5 * max(start, low))
    room = max(0.05 * (high - low), 1e-3 * abs(high), 1e-9)
    panel.set_ylim(low - room, max(high, start) + room)


def _set_gap(panel) -> None:
    """Limits from the lines drawn so far, their first tenth and single outliers left out; zero is within."""
    late = [np.asarray(line.get_ydata(), dtype=float)[len(line.get_ydata()) // 10:] for line in panel.get_lines()]
    ends = [np.quantile(one[np.isfinite(one)], (0.01, 0.99)) for one in late if np.isfinite(one).any()]
    low, high = min([0.0, *(low for low, _ in ends)]), max([0.0, *(high for _, high in ends)])
    room = max(0.15 * (high - low), 1e-6)
    panel.set_ylim(low - room, high + room)


def _label_ends(panel, ends) -> None:
    """The totals beside the lines' ends: moved apart where they would touch, no further than the panel's top."""
    low, high = panel.get_ylim()
    gap, ends = 0.042 * (high - low), sorted(ends)
    up, down = [value for value, _ in ends], [value for value, _ in ends]
    for i in range(1, len(ends)):
        up[i] = max(up[i], up[i - 1] + gap)
        down[-1 - i] = min(down[-1 - i], down[-i] - gap)
    ceiling = high
    for (value, step), upper, lower in reversed(list(zip(ends, up, down, strict=True))):
        at = min((upper + lower) / 2, ceiling)
        ceiling = at - gap
        panel.annotate(f"{value:,.1f}", (step, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7,
                       annotation_clip=False)
