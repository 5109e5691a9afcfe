"""Draw loss against compute, tokens, parameters: every precision in one figure, the paired gap below.

Nothing here fits: `draw` takes groups of runs with their laws. It uses matplotlib's objects without pyplot, so no
window system is asked for, no global state is left behind. As a command it draws one run, whole or still going:

    python scaling/figures.py out/RUN [out=DIR]             # its training, from metrics.jsonl; DIR is out/RUN/figures
    python scaling/figures.py --fp8 out/RUN [out=DIR]       # what FP8 did inside it, from probe.jsonl
"""

import io
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from runtime.cli import UserError, read_options
from scaling.captions import AXES, KIND, SUPERSCRIPT, caption, human, title
from scaling.command import run
from scaling.curves import drawn, floor_of, loss_limits, reducible_limits
from scaling.panels import LABEL, draw_gaps, draw_losses, draw_predictions, draw_reducible, label_sizes, legend
from scaling.records import write

RC = {"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5,
      "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "svg.hashsalt": "scaling",
      "font.family": "DejaVu Sans"}
LABELS = {draw_losses: "validation loss\n[nats/token]", draw_reducible: "reducible\n[nats/token]", draw_gaps: "gap [%]"}
WIDTH = 6.6             # inches of the loss figure; printed in a column of 3.4 its text is still 5 points high
LARGE = RC | {"font.size": 10.5, "axes.labelsize": 10.5, "xtick.labelsize": 9.5, "ytick.labelsize": 9.5}


def draw(groups, pairs, loss_key: str, ray: tuple[float, float] | None) -> Figure:
    """The figure of the groups (groups.Group): losses, then reducible losses and the pairs' gaps where there are any.

    curves.drawn says which groups are shown.
    pairs: of precision.Pair. ray: smallest and largest tokens per parameter if the points share one ratio, else None."""
    groups, others = drawn(groups)
    pairs = [pair for pair in pairs if pair.fp8.recipe in [group.recipe for group in groups]]
    with matplotlib.rc_context(LARGE):
        axes = [axis for axis in AXES if all(axis in group.x for group in groups)]
        labels = AXES | {"N": KIND[groups[0].convention].replace(" ", "\n") + AXES["N"]}      # too long for one line
        rows = {draw_losses: 2.5}
        if any(floor_of(group) is not None for group in groups):
            rows[draw_reducible] = 1.5
        if pairs:
            rows[draw_gaps] = 0.8
        figure, panels = _sheet(list(rows.values()), len(axes), title(groups, loss_key), legend(groups),
                                caption(groups, pairs, loss_key, ray, others), labels["N"].count("\n"))
        for column, axis in enumerate(axes):
            for panel, fill in zip(panels[:, column], rows, strict=True):
                fill(panel, groups, axis, **({"pairs": pairs, "loss_key": loss_key} if fill is draw_gaps else {}))
                panel.grid(True, color="#DDDDDD", linewidth=0.5)
                panel.set_axisbelow(True)
            panels[-1, column].set_xlabel(labels[axis])
            _log_ticks(panels[-1, column].xaxis, _power_of_ten if axis == "C" else lambda m, e: human(m * 10.0**e),
                       5.5 if axis == "C" else 3.6)
        _set_loss_axis(panels[0, 0], groups)
        for panel, label in zip(panels[:, 0], [LABELS[fill] for fill in rows], strict=True):
            panel.set_ylabel(label)
        if draw_reducible in rows:
            panels[1, 0].set_ylim(reducible_limits(groups))
            _log_ticks(panels[1, 0].yaxis, _plain_or_power, 6)
        figure.align_ylabels()
        for column, axis in enumerate(axes):
            draw_predictions(panels[0, column], groups, axis)
            if draw_reducible in rows:
                draw_predictions(panels[1, column], groups, axis, reduced=True)
        FigureCanvasAgg(figure).draw()  # ticks and labels take these settings now, not savefig's
        _make_room_for_ylabels(figure, panels[:, 0])
        for panel, axis in zip(panels[0], axes, strict=True):
            label_sizes(panel, groups, axis)
        figure.canvas.draw()
    return figure


def _sheet(heights, columns: int, above_all, handles, below_all, more_lines: int):
    """The page with its texts and a grid of empty panels; heights of the rows in inches; more_lines: of an axis label."""
    above_all, below_all = _wrapped(above_all, LARGE["font.size"]), _wrapped(below_all, LABEL)
    lines = -(-len(handles) // 3)
    above = 0.12 + 0.18 * (above_all.count("\n") + 1) + 0.19 * lines
    below = 0.64 + 0.155 * (below_all.count("\n") + 1) + 0.17 * more_lines
    height = above + sum(heights) + 0.12 * (len(heights) - 1) + below
    figure = Figure(figsize=(WIDTH, height))
    panels = figure.subplots(len(heights), columns, squeeze=False, sharex="col", sharey="row",
                             gridspec_kw={"height_ratios": heights, "width_ratios": [1.4, 1, 1][:columns]})
    figure.subplots_adjust(left=0.115, right=0.985, top=1 - above / height, bottom=below / height, wspace=0.08,
                           hspace=0.12 * len(heights) / sum(heights))
    figure.text(0.012, 1 - 0.05 / height, above_all, ha="left", va="top", parse_math=False)
    figure.text(0.012, 0.06 / height, below_all, fontsize=LABEL, color="#333333", va="bottom", linespacing=1.15, parse_math=False)
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.014, 1 - (above - 0.07) / height), ncols=3, frameon=False,
                  handlelength=2.2, columnspacing=1.4, borderpad=0, borderaxespad=0, fontsize=9.5, labelspacing=0.25)
    return figure, panels


def _wrapped(text: str, size: float) -> str:
    """The text in lines that fit the page, by the widths of its letters at `size` points; a long word is broken."""
    font, renderer = FontProperties(family=LARGE["font.family"], size=size), RendererAgg(1, 1, 100)
    lines, room = [""], 100 * WIDTH * 0.97      # hinting makes letters a little wider or narrower at other resolutions

    def width(words):
        return renderer.get_text_width_height_descent(words, font, ismath=False)[0]

    for word in text.split(" "):
        while width(word) > room:
            fits = next(n for n in range(len(word), 0, -1) if width(word[:n]) <= room)
            lines, word = [*lines, word[:fits]], word[fits:]
        longer = f"{lines[-1]} {word}".lstrip(" ")
        lines = [*lines[:-1], longer] if width(longer) <= room else [*lines, word]
    return "\n".join(lines)


def _make_room_for_ylabels(figure, panels):
    """Move the left edge in by as much as a label sticks out: how wide the tick labels are depends on the values."""
    edge = min(panel.yaxis.label.get_window_extent().x0 for panel in panels) / figure.bbox.width
    figure.subplots_adjust(left=figure.subplotpars.left + 0.01 - edge)


def render(figure: Figure, form: str) -> bytes:
    """The figure as the bytes of a "png" or "svg" file, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format=form, dpi=200, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def write_with(figure: Figure, folder: Path, name: str, content: dict, as_file: str) -> None:
    """folder/name.png and .svg, then `content` as the JSON folder/as_file: whoever finds that finds all of it.

    Raises UserError where the folder cannot be written."""
    text = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for form in ("png", "svg"):
            write(folder / f"{name}.{form}", render(figure, form))
        write(folder / as_file, text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str                    # folder of a run, such as out/RUN
    fp8: bool = False           # what FP8 did inside it
    out: str | None = None      # folder that receives the figures

    POSITIONAL: ClassVar = ("run",)


def main(arguments=None) -> int:
    """Draw one run's figures; 0 on success, 2 with a sentence on stderr for a mistake in the run or the arguments."""
    from scaling import dynamics, run_figure  # here, because they import this module
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        options = read_options(Options, words)
        draw_run = dynamics.draw_run if options.fp8 else run_figure.draw_run
        draw_run(Path(options.run), Path(options.out) if options.out else None)
    except UserError as error:
        print(f"scaling/figures.py: {error}", file=sys.stderr)
        return 2
    return 0


def page(height: float, rows: int, columns: int, title: str, caption: str, *, top=0.48, left=0.075, right=0.985,
          wspace=0.12, hspace=0.2, **shared):
    """A figure as wide as a page with its title, its caption, room for both, and its panels."""
    caption = textwrap.fill(caption, 128)
    height += 0.13 * caption.count("\n")
    figure = Figure(figsize=(7.4, height))
    figure.suptitle(title, x=left, y=1 - 0.05 / height, ha="left", va="top", fontsize=9, parse_math=False)
    figure.text(left, 0.04 / height, caption, fontsize=7, color="#444444", va="bottom", parse_math=False)
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    figure.subplots_adjust(left=left, right=right, top=1 - top / height, wspace=wspace, hspace=hspace,
                           bottom=(0.58 + 0.13 * caption.count("\n")) / height)
    return figure, panels


def steps_axis(panel) -> None:
    """Label x as optimizer steps."""
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x) if x >= 0 else ""))


def _set_loss_axis(panel, groups):
    low, high = loss_limits(groups)
    panel.set_ylim(low, high)
    if high > 10 * low:         # evenly spaced values would crowd at the top
        _log_ticks(panel.yaxis, _plain_or_power, 8)
    else:
        _value_ticks(panel.yaxis, low, high)


def _value_ticks(axis, low, high):
    """Round values, evenly spaced in the value: a decade's ticks would leave a loss axis with one label or none."""
    e = int(np.floor(np.log10((high - low) / 6)))
    step = next(m * 10.0**e for m in (1, 2, 5, 10, 20) if (high - low) / (m * 10.0**e) <= 6)
    ticks = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    power = int(np.floor(np.log10(high))) if high >= 1e6 or high < 1e-4 else 0
    decimals = max(0, power - int(np.floor(np.log10(step) + 1e-9)))
    unit = f"·10{str(power).translate(SUPERSCRIPT)}" if power else ""
    axis.set_major_formatter(FixedFormatter([f"{tick / 10.0**power:.{decimals}f}{unit}" for tick in ticks]))


def _log_ticks(axis, label, room: float):
    """As many round values as have room for their labels, `room` of them at most: 1-2-5-10, 1-3-10, or decades."""
    low, high = axis.get_view_interval()
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    edge, finer = (high / low) ** (0.08 if axis.axis_name == "x" else 0.05), []     # a label there would reach the next panel's

    def spacing(ticks):
        return np.diff(np.log([m * 10.0**e for m, e in ticks])).min() / np.log(high / low)

    for steps in ([i / 10 for i in range(10, 100)], (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [(m, e) for e in decades for m in steps if low * edge <= m * 10.0**e <= high / edge]
        if len(ticks) < 2:
            ticks = [finer[0], finer[-1]] if finer else ticks
            break
        if spacing(ticks) >= 1 / room:
            break
        finer = ticks
    while len(ticks) > 2 and spacing(ticks) < 1 / room:
        ticks = ticks[len(ticks) % 2 == 0::2]
    axis.set_major_locator(FixedLocator([m * 10.0**e for m, e in ticks]))
    axis.set_minor_locator(FixedLocator([m * 10.0**e for e in decades for m in range(1, 10)]))
    axis.set_major_formatter(FixedFormatter([label(m, e) for m, e in ticks]))
    axis.set_tick_params(which="minor", length=2, labelbottom=False, labelleft=False)


def _plain_or_power(m, e) -> str:
    return f"{m * 10.0**e:.6g}" if -5 < e < 5 else _power_of_ten(m, e)


def _power_of_ten(m, e) -> str:
    return f"$10^{{{e}}}$" if m == 1 else f"${m:g}{{\\cdot}}10^{{{e}}}$"


if __name__ == "__main__":
    sys.exit(run(main))
