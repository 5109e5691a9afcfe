"""Draw loss against compute, tokens, parameters: every precision in one figure, the paired gap below.

Nothing here fits: `draw` takes groups of runs with their laws. It uses matplotlib's objects without pyplot, so no
window system is asked for, no global state is left behind. As a command it draws what FP8 did inside one run:

    python scaling/figures.py --fp8 out/RUN [out=DIR]       # from out/RUN/probe.jsonl; DIR is out/RUN/figures
"""

import io
import os
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

# Okabe-Ito colours, told apart by colour-blind readers; marker and dash differ too, for grey prints. The first style
# lies underneath, wide and hollow, so that a second curve on top of it leaves both visible.
STYLES = (
    {"color": "#0072B2", "marker": "o", "markersize": 8.5, "linestyle": "-", "linewidth": 2.6,
     "markerfacecolor": "white"},
    {"color": "#D55E00", "marker": "s", "markersize": 3.8, "linestyle": (0, (3.2, 1.6)), "linewidth": 1.2},
    {"color": "#009E73", "marker": "D", "markersize": 3.6, "linestyle": (0, (5, 1.2, 1, 1.2)), "linewidth": 1.2},
    {"color": "#CC79A7", "marker": "^", "markersize": 4.4, "linestyle": (0, (1, 1.2)), "linewidth": 1.4},
)
AXES = (("C", "compute C [FLOPs]"), ("D", "training tokens D"), ("N", "parameters N"))
BEYOND = 10                             # the laws are drawn to this many times the largest compute
RC = {"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5,
      "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "svg.hashsalt": "scaling",
      "font.family": "DejaVu Sans"}


def human(count: float) -> str:
    """A count with three digits and a letter: 39.2k, 125M, 1.54B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def draw(groups, pairs, loss_key: str, ray: tuple[float, float] | None) -> Figure:
    """The figure of all groups (fit.Group) with the pairs' gaps (precision.Pair) under it.

    ray: smallest and largest tokens per parameter if the runs share one ratio, else None."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.4, 4.2 if pairs else 3.4))
        heights = (3.2, 1) if pairs else (1,)
        panels = figure.subplots(len(heights), 3, squeeze=False, sharex="col", sharey="row",
                                 gridspec_kw={"height_ratios": heights})
        figure.subplots_adjust(left=0.075, right=0.985, top=0.88 if pairs else 0.85, bottom=0.235 if pairs else 0.28,
                               wspace=0.07, hspace=0.1)
        for column, (axis, label) in enumerate(AXES):
            _draw_losses(panels[0, column], groups, axis)
            if pairs:
                _draw_gaps(panels[1, column], groups, pairs, axis, loss_key)
            panels[-1, column].set_xlabel(label)
            _log_ticks(panels[-1, column].xaxis, axis)
        _set_loss_axis(panels[0, 0], groups)
        panels[0, 0].set_ylabel("validation loss [nats/token]")
        if pairs:
            panels[1, 0].set_ylabel("gap [%]")
        figure.align_ylabels()
        _label(figure, panels[0, 0], groups, pairs, loss_key, ray)
        FigureCanvasAgg(figure).draw()  # ticks and labels take these settings now, not savefig's
        _make_room_for_ylabels(figure, panels[:, 0])
        figure.canvas.draw()
    return figure


def render(figure: Figure, form: str) -> bytes:
    """The figure as the bytes of a "png" or "svg" file, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format=form, dpi=200, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def write(path: Path, content: bytes) -> None:
    """Write by a temporary name, so that a reader finds the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments=None) -> int:
    """Draw one run's FP8 figures; 0 on success, 2 with a sentence on stderr for a mistake in the run or the arguments."""
    from scaling.dynamics import draw_run  # here, because it imports this module
    from scaling.records import RecordError
    run, folder, words = None, None, list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        while words:
            word = words.pop(0)
            if word == "--fp8" and words and run is None:
                run = Path(words.pop(0))
            elif word.startswith("out=") and word != "out=" and folder is None:
                folder = Path(word[4:])
            else:
                raise RecordError(f"{word!r} is not understood here: give --fp8 out/RUN once and, if wanted, out=DIR")
        if run is None:
            raise RecordError("no run given: name one such as --fp8 out/RUN")
        draw_run(run, folder)
    except RecordError as error:
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


def _draw_losses(panel, groups, axis):
    low = min(group.x[axis].min() for group in groups)
    high = max(group.x[axis].max() for group in groups) * _beyond(axis)
    grid = np.geomspace(low / 1.25, high, 200)
    for group, style in zip(groups, _styles(groups), strict=True):
        if axis == "C":
            for record, (tokens, loss) in zip(group.records, group.curves, strict=True):
                panel.plot(*_smooth(tokens * record.flops_per_token, loss), color=style["color"], alpha=0.35, lw=0.7,
                           linestyle=style["linestyle"], zorder=1)
        if forms := group.bands.get(axis):
            values = np.array([form.predict(grid) for form in forms])
            panel.fill_between(grid, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15, lw=0)
        line = {key: style[key] for key in ("color", "linestyle", "linewidth")}
        if law := group.lines.get(axis):
            panel.plot(grid, law.predict(grid), **line, alpha=0.55 if style is STYLES[0] else 1, zorder=2)
        points = {key: value for key, value in style.items() if key not in ("linestyle", "linewidth")}
        panel.plot(group.x[axis], group.loss, linestyle="none", markeredgewidth=1.4, zorder=3, **points)
    panel.set_xscale("log")
    panel.set_xlim(low / 1.6, high)
    panel.grid(True, color="#DDDDDD", linewidth=0.5)
    panel.set_axisbelow(True)


def _draw_gaps(panel, groups, pairs, axis, loss_key):
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.4)
    for group, style in zip(groups, _styles(groups), strict=True):
        chosen = [pair for pair in pairs if pair.fp8.recipe == group.recipe]
        gaps = [pair.in_bf16 if loss_key == "loss_bf16" else pair.as_trained for pair in chosen]
        if chosen:
            order = {record.run_id: i for i, record in enumerate(group.records)}
            x = [group.x[axis][order[pair.fp8.run_id]] for pair in chosen]
            se = [100 * (gap.se or 0.0) / getattr(pair.bf16, loss_key) for gap, pair in zip(gaps, chosen, strict=True)]
            panel.errorbar(x, [gap.percent for gap in gaps], yerr=se, linestyle="none", color=style["color"],
                           marker=style["marker"], markersize=style["markersize"], capsize=2.5, elinewidth=1)
    panel.grid(True, color="#DDDDDD", linewidth=0.5)
    panel.set_axisbelow(True)
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, -0.15 * high), max(high, -0.15 * low))


def _make_room_for_ylabels(figure, panels):
    """Move the left edge in by as much as a label sticks out: how wide the tick labels are depends on the values."""
    edge = min(panel.yaxis.label.get_window_extent().x0 for panel in panels) / figure.bbox.width
    if edge < 0.008:
        figure.subplots_adjust(left=figure.subplotpars.left + 0.008 - edge)


def _styles(groups):
    return [STYLES[min(i, len(STYLES) - 1)] for i in range(len(groups))]


def _beyond(axis) -> float:
    return BEYOND if axis == "C" else BEYOND**0.5


def _smooth(x, loss, bins: int = 80):
    """Means over bins of equal width in log x: even on a log axis, unlike a window of so many steps."""
    if len(x) == 0:
        return x, loss
    edges = np.geomspace(x[0], x[-1] * (1 + 1e-9), bins + 1)
    index = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    filled = count > 0
    return tuple(np.bincount(index, weights=values, minlength=bins)[filled] / count[filled] for values in (x, loss))


def _set_loss_axis(panel, groups):
    """Log y around the points; training curves may leave it at the top, where they began near ln(vocabulary)."""
    losses = np.concatenate([group.loss for group in groups])
    ends = [float(form.predict(BEYOND * group.x["C"].max())) for group in groups for form in group.bands.get("C", ())]
    low, high = min([losses.min(), *ends]), losses.max()
    room = max(np.log(high / low), 0.02)
    panel.set_yscale("log")
    panel.set_ylim(low * np.exp(-0.08 * room), high * np.exp(0.35 * room))
    _nice_ticks(panel.yaxis, *panel.get_ylim())


def _nice_ticks(axis, low, high):
    """Round values, evenly spaced in the value: a decade's ticks would leave a loss axis with one label or none."""
    step = next(m * 10.0**e for e in range(-6, 6) for m in (1, 2, 5) if (high - low) / (m * 10.0**e) <= 7)
    ticks = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    decimals = max(0, -int(np.floor(np.log10(step) + 1e-9)))
    axis.set_major_formatter(FixedFormatter([f"{tick:.{decimals}f}" for tick in ticks]))


def _log_ticks(axis, name):
    """At least two labelled ticks within the axis: decades, else 1-3-10, else 1-2-5-10, else finer."""
    low, high = axis.axes.get_xlim()
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for steps, enough in (((1,), 3), ((1, 3), 3), ((1, 2, 5), 2), ((1, 1.5, 2, 3, 5, 7), 0)):
        # A label at the right end would reach into the next panel.
        ticks = [(m, e) for e in decades for m in steps if low <= m * 10.0**e <= high * (low / high) ** 0.04]
        if len(ticks) >= enough:
            break
    axis.set_major_locator(FixedLocator([m * 10.0**e for m, e in ticks]))
    axis.set_minor_locator(FixedLocator([m * 10.0**e for e in decades for m in range(2, 10)]))
    compute = [f"$10^{{{e}}}$" if m == 1 else f"${m}{{\\cdot}}10^{{{e}}}$" for m, e in ticks]
    axis.set_major_formatter(FixedFormatter(compute if name == "C" else [human(m * 10.0**e) for m, e in ticks]))
    axis.axes.tick_params(axis="x", which="minor", length=2, labelbottom=False)


def _label(figure, panel, groups, pairs, loss_key, ray):
    """Title with n, legend with the laws, caption with the conventions."""
    evaluated = {"loss_bf16": "evaluated in BF16", "loss_as_trained": "evaluated as trained"}[loss_key]
    counts = [len(group.records) for group in groups]
    n = f"n = {counts[0]} each" if len(set(counts)) == 1 else f"n = {', '.join(map(str, counts))}"
    arms = " or ".join(_name(group.recipe) for group in groups)
    figure.suptitle(f"Loss after training in {arms}, {evaluated} ({n})", x=0.075,
                    y=1 - 0.05 / figure.get_figheight(), ha="left", va="top", fontsize=9)
    handles, texts = [], []
    for group, style in zip(groups, _styles(groups), strict=True):
        handles += panel.plot([], [], **style, markeredgewidth=1.4)
        law = group.lines.get("C")
        texts.append(_name(group.recipe) + (f":  {_formula(law)}" if law else ""))
    figure.legend(handles, texts, loc="upper left", bbox_to_anchor=(0.069, 1 - 0.25 / figure.get_figheight()),
                  ncols=min(len(groups), 3), frameon=False, handlelength=3.2, columnspacing=2.0,
                  borderpad=0, borderaxespad=0)
    parts = []
    if ray:
        low, high = (f"{ratio:.3g}" for ratio in ray)
        ratio = low if low == high else f"{low} to {high}"
        parts.append(f"One ray = one curve: at {ratio} tokens per parameter in every run, the three panels are one "
                     "curve under three labels.")
    parts.append("N = params_total, C = flops_per_token × D.".replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"))
    if any(group.bands for group in groups):
        parts.append("Shaded: spread of model forms (power law; rays with gamma fixed in 0.10 to 0.22).")
    if any(len(tokens) for group in groups for tokens, _ in group.curves):
        parts.append("Faint: training loss.")
    if pairs:
        parts.append("Lower row: FP8 minus BF16 of paired runs; bars: one standard error of the evaluation, not of the "
                     "run.")
    figure.text(0.075, 0.012, textwrap.fill(" ".join(parts), 132), fontsize=7, color="#444444", va="bottom")


def _name(recipe: str) -> str:
    return "BF16" if recipe == "bf16" else f"FP8 {recipe}"


def _formula(law) -> str:
    """The law on compute in mathtext."""
    p = law.parameters
    factor, exponent = ("A", "exponent") if law.form == "power" else ("K", "gamma")
    floor = "" if law.form == "power" else f"{p['E']:.3g} + "
    mantissa, _, power = f"{p[factor]:.3g}".partition("e")
    scaled = mantissa + (f"{{\\cdot}}10^{{{int(power)}}}" if power else "")
    return f"$L = {floor}{scaled}\\,C^{{{-p[exponent]:.3g}}}$"


if __name__ == "__main__":
    # As in fit.py: the script finds its siblings under the names that the tests use.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
