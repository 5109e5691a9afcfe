"""Draw loss against compute, tokens and parameters, the paired gap below; hold the plot style of the repository.

Nothing here fits: `draw` takes groups of runs with their laws. It uses matplotlib's objects without pyplot, so no
window system is asked for, no global state is left behind. As a command it draws one run, whole or still going:

    python scaling/figures.py out/RUN [out=DIR]             # its training, from metrics.jsonl; DIR is out/RUN/figures
    python scaling/figures.py --fp8 out/RUN [out=DIR]       # what FP8 did inside it, from probe.jsonl
"""

import io
import itertools
import json
import math
import textwrap
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, LogLocator, MaxNLocator, NullFormatter, NullLocator
from scipy.stats import binned_statistic

from runtime.cli import UserError, command, run_command, si
from runtime.machine import write_atomically
from scaling.laws import on_one_ray
from scaling.pairs import KIND

RC = {"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5,
      "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "svg.hashsalt": "scaling",
      "font.family": "DejaVu Sans"}
LARGE = RC | {"font.size": 10.5, "axes.labelsize": 10.5, "xtick.labelsize": 9.5, "ytick.labelsize": 9.5}    # of the loss figure
# Okabe-Ito colours, told apart by colour-blind readers; marker and dash differ too, for grey prints.
STYLES = (
    {"color": "#0072B2", "shades": "Blues", "marker": "o", "markersize": 5.8, "linestyle": "-", "linewidth": 2.0, "hollow": True},
    {"color": "#D55E00", "shades": "Oranges", "marker": "s", "markersize": 3.2, "linestyle": (0, (2.4, 1.8)), "linewidth": 1.0},
    {"color": "#009E73", "shades": "Greens", "marker": "D", "markersize": 3.2, "linestyle": (0, (5, 1, 1, 1)), "linewidth": 1.0},
    {"color": "#CC79A7", "shades": "RdPu", "marker": "^", "markersize": 4.0, "linestyle": (0, (1, 1.2)), "linewidth": 1.2},
    {"color": "#000000", "shades": "Greys", "marker": "v", "markersize": 4.0, "linestyle": (0, (3, 3)), "linewidth": 1.0},
    {"color": "#E69F00", "shades": "YlOrBr", "marker": "P", "markersize": 4.0, "linestyle": (0, (6, 2)), "linewidth": 1.0},
    {"color": "#56B4E9", "shades": "GnBu", "marker": "X", "markersize": 4.0, "linestyle": (0, (2, 4)), "linewidth": 1.0},
)
RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "auto")       # of the first STYLES, in their order
AXES = {"C": "compute C [FLOPs]", "D": "training tokens D", "N": "parameters N"}
EVALUATED = {"loss_bf16": "evaluated in BF16", "loss_as_trained": "evaluated as trained"}
MANY = 60               # from this many points on, they are drawn small and translucent
BEYOND = 10             # without a held-out run the laws are drawn to this many times the largest compute
BINS = 24               # per decade of compute, to smooth training curves
FEW = 6                 # at most so many lines of one size, or of one ratio, in a panel
FORMS = {"facecolor": "none", "edgecolor": "#777777", "hatch": "//////", "linewidth": 0.4}     # the spread of model forms


# ------------------------------------------------------------------------------------------------ one style for all figures

def sheet(size, rows: int, columns: int, title: str, caption: str, handles=(), n_columns: int = 4, **shared):
    """An empty page of `size` inches: title (which heads the legend, else both overlap), legend, panels with a grid, caption;
    (figure, panels). n_columns: of the legend at most; the page grows where long names leave room for fewer."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    big = matplotlib.rcParams["font.size"]
    title = textwrap.fill(title, int(size[0] * 124 / big))
    if handles:
        longest = max(len(handle.get_label()) for handle in handles)
        n = max(1, min(n_columns, int(size[0] * 72 / (big - 1) / (0.55 * longest + 4.2))))
        figure.legend(handles=handles, loc="outside upper left", ncols=n, frameon=False, title=title, alignment="left",
                      title_fontsize=big + 1, fontsize=big - 1, borderaxespad=0.2, columnspacing=1.4, handlelength=2.2)
        figure.set_figheight(size[1] + big / 50 * (math.ceil(len(handles) / n) - math.ceil(len(handles) / n_columns)))
    else:
        figure.suptitle(title, x=0.01, ha="left", fontsize=big + 1)
    figure.supxlabel(textwrap.fill(caption, int(size[0] * 164 / big)), x=0.01, ha="left", fontsize=big - 2, color="#444444")
    for text in figure.findobj(Text):
        text.set_parse_math(False)              # names of runs, events and tables are data: a $ is a $
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        panel.grid(True, color="#E4E4E4", linewidth=0.5)
        panel.set_axisbelow(True)
    return figure, panels


def styles(recipes) -> list[dict]:
    """A style per recipe: each of RECIPES has its own in every figure, others take what is left and then repeat."""
    left = itertools.cycle([style for style, name in zip(STYLES, RECIPES, strict=False) if name not in recipes]
                           + list(STYLES[len(RECIPES):]))
    return [STYLES[RECIPES.index(name)] if name in RECIPES else next(left) for name in recipes]


def steps_axis(panel) -> None:
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: si(x) if x >= 0 else ""))


def counts_axis(axis, in_words: bool = True) -> None:
    """A few round values on a log axis whose limits stand: in words, such as 3M, or as 3 x 10^19."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(MaxNLocator(3) if decades < 0.3 else LogLocator(
        subs=(1, 2, 5) if decades < 1 else (1, 3) if decades < 1.8 else (1,), numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda x, _: si(x)) if in_words else LogFormatterSciNotation(
        minor_thresholds=(math.inf, math.inf)))
    axis.set_minor_formatter(NullFormatter())


def settle(figure: Figure) -> Figure:
    """Lay the figure out once: ticks and labels take the settings of now, not those of the moment when it is saved."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def render(figure: Figure, form: str) -> bytes:
    """The figure as the bytes of a "png" or "svg" file, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format=form, dpi=200, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def write_files(folder: Path, files: dict[str, str | bytes | dict]) -> None:
    """Write folder/name for each name, in order; a dict as strict JSON, dataclasses in it as objects. Raises UserError where the
    folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content if isinstance(content, str | bytes) else (
                json.dumps(content, indent=1, allow_nan=False, default=asdict) + "\n"))
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None


def write_with(folder: Path, name: str, figure: Figure | None, texts: dict[str, str | dict]) -> str:
    """folder/name.png and .svg, then the texts: whoever finds those finds all of it. Returns what was written, in words."""
    images = {f"{name}.{form}": render(figure, form) for form in ("png", "svg") if figure}
    write_files(folder, images | texts)
    return f"wrote {folder}/: {', '.join([*texts, *images])}"


# ------------------------------------------------------------------------------------------------------ the page of three panels

@matplotlib.rc_context(LARGE)
def draw(groups, pairs, loss_key: str) -> Figure:
    """The figure of fit.Groups: losses with their laws over C, D and N, then the pairs' gaps where there are any."""
    groups, others = drawn(groups)
    pairs = [pair for pair in pairs if pair.fp8.recipe in [group.recipe for group in groups]]
    axes = [axis for axis in AXES if all(axis in group.x for group in groups)]
    rows = [3.0, 1.0] if pairs else [3.2]
    handles = _legend(groups)
    size = (6.6, sum(rows) + 1.55 + 0.19 * math.ceil(len(handles) / 3))
    figure, panels = sheet(size, len(rows), len(axes), _title(groups, loss_key), _caption(groups, pairs, others), handles, 3,
                           sharex="col", sharey="row", height_ratios=rows, width_ratios=[1.25, 1, 1][:len(axes)])
    for axis, column in zip(axes, panels.T, strict=True):
        _draw_losses(column[0], groups, axis)
        if pairs:
            _draw_gaps(column[1], groups, axis, pairs, loss_key)
        column[-1].set_xlabel(KIND[groups[0].convention].replace(" ", "\n") * (axis == "N") + AXES[axis])
    first, losses = panels[0, 0], np.concatenate([group.loss for group in groups])
    # Around the points and what is predicted; training curves and wide intervals may leave the panel.
    far = [one for group in groups for held in group.held_out for one in (held.loss, held.prediction and held.prediction.loss)]
    far += [float(form.predict(BEYOND * group.x["C"].max())) for group in groups for form in group.bands.get("C", ())]
    low, high = min([losses.min(), *filter(None, far)]), losses.max()
    room = max(np.log(high / low), 0.02)
    first.set_ylim(low * np.exp(-0.08 * room), high * np.exp(0.2 * room))
    first.yaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 2.5, 5, 10)))
    first.yaxis.set_major_formatter("{x:g}")
    first.yaxis.set_minor_locator(NullLocator())
    for panel, label in zip(panels[:, 0], ("validation loss\n[nats/token]", "gap to\nBF16 [%]"), strict=False):
        panel.set_ylabel(label)
    figure.align_ylabels()
    return settle(figure)


def _draw_losses(panel, groups, axis: str) -> None:
    """Final losses, laws with their bands, held-out runs with their predictions; over compute every training curve too.
    Darker colours are larger models; over parameters more tokens per parameter, where points differ in that."""
    held = [getattr(held, axis) for group in groups for held in group.held_out]
    beyond = 2.0 if held else BEYOND if axis == "C" else BEYOND**0.5        # where an extrapolation would be read
    low = min(group.x[axis].min() for group in groups)
    high = beyond * max(*held, *(group.x[axis].max() for group in groups), 0)
    grid, is_by_ratio, named = np.geomspace(low / 1.6, high, 240), axis == "N" and any(map(is_spread, groups)), {}
    each = [group.x["D"] / group.x["N"] if is_by_ratio else group.x["N"] for group in groups]
    among = np.concatenate([*each, [held.D / held.N if is_by_ratio else held.N for group in groups for held in group.held_out]])
    panel.set(xscale="log", yscale="log", xlim=(low / 1.6, high))
    counts_axis(panel.xaxis, in_words=axis != "C")
    for group, style, values in zip(groups, styles([group.recipe for group in groups]), each, strict=True):
        is_cloud = len(group.loss) >= MANY
        wide = style.get("hollow") and not is_cloud         # two laws that coincide must both be seen
        look = {"linestyle": style["linestyle"], "linewidth": style["linewidth"] if wide else 1.0, "alpha": 0.6 if wide else 1}
        for record, (tokens, loss) in zip(group.records, group.curves, strict=True) if axis == "C" else ():
            panel.plot(*smooth(tokens * record.flops_per_token, loss), color=_shade(style, record.N, among), alpha=0.5,
                       linewidth=0.7, linestyle="-" if wide else style["linestyle"], zorder=1)
        if forms := group.bands.get(axis):
            losses = np.array([form.predict(grid) for form in forms])
            panel.fill_between(grid, losses.min(axis=0), losses.max(axis=0), **FORMS, zorder=1.2)
        for line in lines_of(group, axis, grid):
            if line.low is not None:
                panel.fill_between(line.x, line.low, line.high, zorder=1.1, facecolor=(style["color"], 0.12), lw=0.5,
                                   edgecolor=(style["color"], 0.4))
            colour = _shade(style, line.each, among) if line.each else style["color"]
            drawn_line, = panel.plot(line.x, line.loss, color=colour, **look, zorder=2)
            if line.each:
                named.setdefault(f"{float(f'{line.each:.2g}'):g}" if is_by_ratio else si(line.each), drawn_line)
        colours = _shade(style, values, among)              # (n, 4)
        panel.scatter(group.x[axis], group.loss, s=9 if is_cloud else style["markersize"]**2, marker=style["marker"], zorder=3,
                      alpha=0.7 if is_cloud else 1, facecolors="white" if wide else colours, edgecolors=colours,
                      linewidths=1.4 if wide else 0)
        size = 14 if wide else 8.5
        for held in group.held_out:     # a star where it ended, hollow at its prediction while it has not; that as a bar
            x, said, colour = getattr(held, axis), held.prediction, style["color"]
            if said is not None:
                panel.errorbar(x, said.loss, yerr=[[said.loss - said.low], [said.high - said.loss]], color=colour, marker="_",
                               markersize=1.5 * size, capsize=0.35 * size, zorder=4)
            y, face, edge, width = (said.loss, "white", colour, 1) if held.loss is None else (held.loss, colour, "white", 0.4)
            panel.plot(x, y, marker="*", linestyle="none", markersize=size, zorder=6, color=colour, markerfacecolor=face,
                       markeredgecolor=edge, markeredgewidth=width)
    if named:
        panel.legend(named.values(), named, title="D / N" if is_by_ratio else "N", loc="upper right", fontsize=8, framealpha=0.8,
                     title_fontsize=8, handlelength=1.2, labelspacing=0.15, borderpad=0.3, edgecolor="none").set_zorder(9)


def _draw_gaps(panel, groups, axis: str, pairs, loss_key: str) -> None:
    """FP8 minus BF16 of each pair in percent, with one standard error of the evaluation."""
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.4)
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
        at = {record.run_id: x for record, x in zip(group.records, group.x[axis], strict=True)}
        chosen = [pair for pair in pairs if pair.fp8.run_id in at]
        gaps = [pair.gap(loss_key.removeprefix("loss_")) for pair in chosen]
        if chosen:
            se = [100 * (gap.se or 0.0) / getattr(pair.bf16, loss_key) for gap, pair in zip(gaps, chosen, strict=True)]
            panel.errorbar([at[pair.fp8.run_id] for pair in chosen], [gap.percent for gap in gaps], yerr=se, linestyle="none",
                           color=style["color"], marker=style["marker"], markersize=style["markersize"], capsize=2,
                           elinewidth=0.9, alpha=0.6 if len(chosen) > 12 else 1)


def _shade(style, value, among):
    """The style's colour for a value (number or array): pale for the smallest of `among`, dark for the largest."""
    low, high = np.log(min(among)), np.log(max(among))
    share = (np.log(value) - low) / (high - low) if high > low else 0.6 + 0 * value
    return matplotlib.colormaps[style["shades"]](0.45 + 0.5 * share)


def _legend(groups) -> list:
    """A group's marker and line, then in grey what is alike in all of them."""
    handles, grey, held = [], "#666666", [held for group in groups for held in group.held_out]
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
        hollow = style.get("hollow") and len(group.loss) < MANY
        look = {key: style[key] for key in ("marker", "markersize", "linestyle", "linewidth", "color")}
        handles.append(Line2D([], [], **look, label=name_of(group), markeredgewidth=1.4 if hollow else 0,
                              markerfacecolor="white" if hollow else style["color"]))
    star = {"color": grey, "markersize": 10, "linestyle": "none"}
    is_there = any(one.loss is not None for one in held)
    alike = (
        (any(len(tokens) for group in groups for tokens, _ in group.curves),
         Line2D([], [], color=grey, linewidth=0.8, alpha=0.8, label="training loss")),
        (any(group.lines or is_surface(group) for group in groups), Patch(facecolor=grey, alpha=0.3, label="law, 95 % interval")),
        (any(group.bands for group in groups), Patch(**FORMS, label="other model forms")),
        (held, Line2D([], [], marker="*", **star, markerfacecolor=grey if is_there else "white",
                      label="held-out run" + " to come" * (not is_there))),
        (any(one.prediction for one in held), Line2D([], [], marker="|", **star, label="its prediction, 95 %")))
    return handles + [handle for is_drawn, handle in alike if is_drawn]


def _title(groups, loss_key: str) -> str:
    n = ", ".join(dict.fromkeys(str(len(group.loss)) for group in groups))
    if not groups[0].records:
        return f"Loss in {name_of(groups[0])} (n = {n} points)"
    arms = " and ".join(map(name_of, groups)) if len(groups) < 3 else f"{len(groups)} precisions"
    return f"Validation loss of {arms}, {EVALUATED[loss_key]} (n = {n}{' each' * (len(groups) > 1 and ',' not in n)})"


def _caption(groups, pairs, others) -> str:
    """The first group's law, then what the lines are; law.json has the laws of all with their intervals."""
    first, axis, parts = groups[0], "C" if "C" in groups[0].x else "N", []
    if law := first.laws["chinchilla"] if is_surface(first) else first.lines.get(axis):
        parts.append(f"{name_of(first)}: {law.formula()}.")
    if any(map(is_surface, groups)):
        parts.append("Lines: lowest loss for a compute, of one size N, of one ratio D / N.")
    elif any(map(is_spread, groups)):
        parts.append("Over D and N, lines join points of one size, of one ratio D / N.")
    elif "D" in first.x:
        parts.append(f"All at {np.median(first.x['D'] / first.x['N']):.3g} tokens per {KIND[first.convention]}parameter.")
    parts += ["Gap bars: ± 1 standard error."] * bool(pairs)
    parts += [f"Not drawn, fewer sizes or no such law: {', '.join(map(name_of, others))}."] * bool(others)
    return " ".join(parts)


def name_of(group) -> str:
    """The recipe as the reader knows it, or the table's name."""
    return name_recipe(group.recipe) if group.records else textwrap.shorten(group.recipe, 40, placeholder="…")


def name_recipe(recipe: str) -> str:
    """With its number format: BF16, FP8 rowwise, FP4 nvfp4."""
    return "BF16" if recipe == "bf16" else f"FP{4 if recipe.startswith('nvfp4') else 8} {recipe}"


# ------------------------------------------------------------------------------------------------------------ lines of the laws

# A line of a law, arrays of one shape; `each`: its size or its tokens per parameter, None for one of all points.
Line = namedtuple("Line", "x loss low high each", defaults=(None, None, None))


def is_surface(group) -> bool:
    """Whether an identified L(N, D) heads the group, so that no single curve over one axis is its law."""
    return group.headline == "chinchilla"


def is_spread(group) -> bool:
    """Whether the group's points lie at several tokens-per-parameter ratios: then loss over N or D alone is no one curve."""
    return bool(group.ray) and not on_one_ray(group.ray)


def drawn(groups) -> tuple[list, list]:
    """The groups that the figure shows; those that it only names, because their law says nothing beside the others' frontier: of
    fewer sizes than another, or without an irreducible loss that their points identify where some law has one."""
    sizes = [len(np.unique(group.x["N"])) for group in groups]
    shown = [group for group, size in zip(groups, sizes, strict=True) if size == max(sizes)]
    has_floor = [group for group in shown if group.headline in ("chinchilla", "ray") and group.laws[group.headline].identified]
    shown = has_floor or shown
    return shown, [group for group in groups if not any(group is one for one in shown)]


def lines_of(group, axis: str, grid) -> list[Line]:
    """The lines of the group over `grid`. Where an identified L(N, D) heads it: its frontier over compute, a line per size over
    tokens, per ratio over parameters. Else its law over one axis; where its points lie at several ratios, over D or N lines that
    join the few points of one size or one ratio, means over seeds: the eye takes a cloud of two dimensions for noise."""
    law, points = group.laws["chinchilla"], group.points
    if is_surface(group):
        if axis == "C":
            return [_line(law, grid, _cheapest(group, grid))]
        if axis == "N":
            return [_line(law, grid, (grid, ratio * grid), ratio) for ratio in _few(points.D / points.N)]
        sizes = sorted({*_few(points.N), *(float(held.N) for held in group.held_out)})
        return [_line(law, grid, (np.full(len(grid), N), grid), N) for N in sizes]
    if axis == "C" or not is_spread(group):
        return [_line(group.lines[axis], grid, (grid,))] if axis in group.lines else []
    lines, values = [], points.N if axis == "D" else points.D / points.N
    for value in _few(values) if len(group.loss) < MANY else ():
        near = np.abs(np.log(values / value)) < np.log(1.05)
        x = np.unique(group.x[axis][near])
        lines.append(Line(x, np.array([group.loss[near & (group.x[axis] == one)].mean() for one in x]), each=value))
    return [line for line in lines if len(line.x) > 1]


def _line(law, x, where, each=None) -> Line:
    with np.errstate(over="ignore"):
        interval = law.interval_at(*where) if law.identified else None
    loss, low, high = (law.predict(*where), None, None) if interval is None else interval
    return Line(x, loss, low, None if high is None else np.minimum(high, 1e9 * loss), each)


def _cheapest(group, compute):
    """(N, D), of the shape of `compute`: where the law's loss is lowest for so many FLOPs, counted as the group's points are:
    FLOPs per token go as N^k, k below 1 as the share of the vocabulary and of attention falls with size."""
    p, points = group.laws["chinchilla"].parameters, group.points
    k, height = np.polyfit(np.log(points.N), np.log(group.x["C"] / points.D), 1)
    D_at_1 = compute / np.exp(height)       # tokens of a model of one parameter
    N = (p["alpha"] * p["A"] * D_at_1 ** p["beta"] / (k * p["beta"] * p["B"])) ** (1 / (p["alpha"] + k * p["beta"]))
    return N, D_at_1 / N**k


def _few(values) -> list[float]:
    """The medians of values that lie within 5 %, ascending, FEW of them at most."""
    values = np.sort(values)
    some = np.split(values, 1 + np.flatnonzero(np.diff(np.log(values)) > np.log(1.05)))
    return [float(np.median(some[round(i)])) for i in np.linspace(0, len(some) - 1, min(len(some), FEW))]


def smooth(x, loss) -> np.ndarray:
    """Means of x and loss, (2, n), over bins of equal width in log x: even on a log axis, unlike a window of so many steps."""
    if len(x) == 0:
        return np.array([x, loss])
    bins = int(np.clip(np.ceil(BINS * np.log10(x[-1] / x[0])), 4, 80))
    means = binned_statistic(x, (x, loss), bins=np.geomspace(x[0], x[-1] * (1 + 1e-9), bins + 1)).statistic
    return means[:, np.isfinite(means[0])]


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str                    # folder of a run, such as out/RUN
    fp8: bool = False           # what FP8 did inside it
    out: str | None = None      # folder that receives the figures

    POSITIONAL: ClassVar = ("run",)


@command(__doc__, Options)
def main(options: Options) -> str:
    from scaling import dynamics  # here, because it imports this module
    return (dynamics.draw_fp8 if options.fp8 else dynamics.draw_run)(Path(options.run), options.out)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
