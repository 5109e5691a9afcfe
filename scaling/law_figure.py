"""Draw a group's losses with their laws over compute, tokens and parameters, the gaps of its pairs,
and where the loss is lowest; the figure of scaling/fit.py."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lib.plots import RC, STYLES, counts_axis, settle, sheet, styles
from lib.text import si
from scaling.gap_figure import DrawnGap, draw_gaps, gap_at, gap_handles
from scaling.gap_words import EVALUATION_WORDS, KIND
from scaling.groups import Group
from scaling.law_lines import MANY, LawLine, lines_of, shown_groups
from scaling.laws import minima_of
from scaling.paired.estimates import grouped
from scaling.paired.gaps import Pair, mean_gaps
from scaling.predictions import Held

# of the loss figure
LARGE = RC | {
    "font.size": 10.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
}
AXES = {"C": "compute C [FLOPs]", "D": "training tokens D", "N": "parameters N"}
WIDTH = 6.6  # inches
# Heights of the rows in inches: losses above gaps, losses alone, gaps, minima of budgets
LOSS_ROW, LONE_LOSS_ROW, GAP_ROW, OPTIMA_ROW = 3.0, 3.2, 1.0, 1.7
AROUND_ROWS = 1.55  # inches for title, caption and labels
LEGEND_ROW, LEGEND_COLUMNS = 0.19, 3  # inches of a row; entries beside each other
BEYOND = 10  # without a held-out run the laws are drawn to this many times the largest compute
BEYOND_HELD = 2.0  # times the farthest held-out run
AROUND = 1.6  # the axes of D and N end at so many times the points' ends
GAP_ROOM = 0.12  # of what the gaps span, above and below them
GRID = 240  # points of a line
BINS = 24  # per decade of compute, to smooth training curves
CLOUD_SIZE = 9  # area of a marker among MANY points
# the spread of model forms
HATCH: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": "#777777",
    "hatch": "//////",
    "linewidth": 0.4,
}
GREY = "#666666"


@matplotlib.rc_context(LARGE)
def draw(groups: Sequence[Group], pairs: Sequence[Pair], loss_key: str) -> Figure:
    """The figure of the groups: losses with their laws over C, D and N, then the pairs' gaps where
    there are any, then the minima of compute budgets where those are headlined."""
    groups, unshown = shown_groups(groups)
    recipes = [group.recipe for group in groups]
    pairs = [pair for pair in pairs if pair.fp8.recipe in recipes]
    axes = _shared_axes(groups)
    by_minima = next((group for group in groups if group.frontier is not None), None)
    handles = _legend(groups)
    if pairs:
        handles += gap_handles(_all_gaps(groups, pairs, axes[0], loss_key))
    heights = _row_heights(bool(pairs), by_minima is not None)
    legend_rows = math.ceil(len(handles) / LEGEND_COLUMNS)
    figure, panels = sheet(
        (WIDTH, sum(heights) + AROUND_ROWS + LEGEND_ROW * legend_rows),
        len(heights),
        len(axes),
        _title(groups, loss_key),
        _caption(groups, unshown),
        handles,
        LEGEND_COLUMNS,
        height_ratios=heights,
        width_ratios=[1.25, 1, 1][: len(axes)],
    )
    lowest_row = panels[0]
    if pairs:
        lowest_row = panels[1]
        _share_axes(panels[0], panels[1])
    _draw_loss_row(panels[0], axes, groups)
    if pairs:
        _draw_gap_row(panels[1], axes, groups, pairs, loss_key)
    for axis, panel in zip(axes, lowest_row, strict=True):
        panel.set_xlabel(_axis_label(axis, groups[0]))
    if by_minima is not None:
        _draw_optima(panels[-1], by_minima, recipes)
    figure.align_ylabels(panels[:, 0])
    return settle(figure)


def _shared_axes(groups: Sequence[Group]) -> list[str]:
    """Those of AXES that all groups' points have."""
    return [axis for axis in AXES if all(axis in group.x for group in groups)]


def _row_heights(has_gaps: bool, has_minima: bool) -> list[float]:
    """Inches of each row of panels, from the top."""
    heights = [LOSS_ROW, GAP_ROW] if has_gaps else [LONE_LOSS_ROW]
    if has_minima:
        heights.append(OPTIMA_ROW)
    return heights


def _share_axes(upper: Sequence[Axes], lower: Sequence[Axes]) -> None:
    """One axis of x for each panel and that below it, which alone has its labels."""
    for panel, panel_below in zip(upper, lower, strict=True):
        panel_below.sharex(panel)
        panel.tick_params(labelbottom=False)


def _draw_loss_row(row: Sequence[Axes], axes: Sequence[str], groups: Sequence[Group]) -> None:
    panels = dict(zip(axes, row, strict=True))
    for axis, panel in panels.items():
        _draw_losses(panel, groups, axis)
    _set_loss_limits(panels, groups)
    row[0].set_ylabel("validation loss\n[nats/token]")


def _axis_label(axis: str, group: Group) -> str:
    if axis != "N":
        return AXES[axis]
    return KIND[group.convention].replace(" ", "\n") + AXES[axis]


def _set_loss_limits(panels: dict[str, Axes], groups: Sequence[Group]) -> None:
    """Each panel around its points and what is predicted there; training curves and wide intervals
    may leave it. Laws are extrapolated over compute alone, so that panel may reach lower."""
    losses = np.concatenate([group.loss for group in groups])
    lowest = min([losses.min(), *_losses_held_out(groups)])
    for axis, panel in panels.items():
        low = lowest
        if axis == "C":
            low = min([low, *_losses_of_forms(groups)])
        room = max(np.log(losses.max() / low), 0.02)
        panel.set_ylim(low * np.exp(-0.08 * room), losses.max() * np.exp(0.2 * room))
        panel.yaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 2.5, 5, 10)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())
    for left_panel, panel in itertools.pairwise(panels.values()):
        if panel.get_ylim() == left_panel.get_ylim():
            panel.tick_params(labelleft=False)


def _losses_held_out(groups: Sequence[Group]) -> list[float]:
    """What is predicted of the held-out runs, and what they measured."""
    losses = []
    for held in itertools.chain.from_iterable(group.held_out for group in groups):
        if held.prediction:
            losses.append(held.prediction.loss)
        if held.loss:
            losses.append(held.loss)
    return losses


def _losses_of_forms(groups: Sequence[Group]) -> list[float]:
    """What the model forms say at BEYOND times the largest compute."""
    losses = []
    for group in groups:
        for form in group.bands.get("C", ()):
            losses.append(float(form.predict(BEYOND * group.x["C"].max())))
    return losses


# ------------------------------------------------------------------------------------ losses, laws


@dataclass(frozen=True)
class Shading:
    """What the shades of a panel mean: darker is more of it."""

    by: str  # "N", "D / N" or "C [FLOPs]"
    ends: tuple[float, float]  # the smallest value, which is palest, and the largest

    def value_of(self, group: Group) -> np.ndarray:
        """(n,) of the group's points."""
        if self.by == "D / N":
            return group.x["D"] / group.x["N"]
        return group.x["N" if self.by == "N" else "C"]

    def colour(self, style: dict[str, Any], value: np.ndarray | float) -> Any:
        """The style's colour for a value (number or array)."""
        low, high = np.log(self.ends)
        share = (np.log(value) - low) / (high - low) if high > low else 0.6 + 0 * value
        return matplotlib.colormaps[style["shades"]](0.45 + 0.5 * share)

    def name(self, value: float) -> str:
        """The value in a legend."""
        if self.by == "N":
            return si(value)
        if self.by == "D / N":
            return f"{float(f'{value:.2g}'):g}"
        return f"{value:.1e}"


@dataclass(frozen=True)
class Appearance:
    """How one group is drawn."""

    style: dict[str, Any]
    is_cloud: bool  # many points, drawn small and translucent

    @property
    def is_wide(self) -> bool:
        """Wide, pale lines and hollow markers: two laws that coincide must both be seen."""
        return bool(self.style.get("hollow")) and not self.is_cloud

    @property
    def points(self) -> dict[str, Any]:
        """Of panel.scatter, all but the colours."""
        if self.is_cloud:
            return {"s": CLOUD_SIZE, "alpha": 0.7, "linewidths": 0}
        width = 1.4 if self.is_wide else 0
        return {"s": self.style["markersize"] ** 2, "alpha": 1, "linewidths": width}

    @property
    def line(self) -> dict[str, Any]:
        return {
            "linestyle": self.style["linestyle"],
            "linewidth": self.style["linewidth"] if self.is_wide else 1.0,
            "alpha": 0.6 if self.is_wide else 1,
        }


def _appearances(groups: Sequence[Group]) -> list[Appearance]:
    group_styles = styles([group.recipe for group in groups])
    return [
        Appearance(style, len(group.loss) >= MANY)
        for group, style in zip(groups, group_styles, strict=True)
    ]


def _draw_losses(panel: Axes, groups: Sequence[Group], axis: str) -> None:
    """Final losses, laws with their bands, held-out runs with their predictions; over compute every
    training curve too. Darker colours are larger models; over parameters more tokens per parameter,
    where points differ in that."""
    low, high = _ends(groups, axis)
    grid = np.geomspace(low, high, GRID)
    shading = _shading(groups, axis)
    panel.set(xscale="log", yscale="log", xlim=(low, high))
    counts_axis(panel.xaxis, in_words=axis != "C")
    labelled: dict[str, Artist] = {}
    for group, appearance in zip(groups, _appearances(groups), strict=True):
        if axis == "C":
            _draw_curves(panel, group, appearance, shading)
        _draw_band(panel, group, axis, grid)
        for line in lines_of(group, axis, grid):
            drawn_line = _draw_line(panel, line, appearance, shading)
            if line.label:
                labelled.setdefault(shading.name(line.label), drawn_line)
        _draw_points(panel, group, axis, appearance, shading)
        for held in group.held_out:
            _draw_held(panel, held, axis, appearance)
    is_keyed_beside = shading.by == "C [FLOPs]" and axis == "N"
    if labelled and not is_keyed_beside:
        _draw_key(panel, labelled, shading.by)


def _ends(groups: Sequence[Group], axis: str) -> tuple[float, float]:
    """The ends of a panel's axis: around the points, to where an extrapolation would be read."""
    held = [getattr(run, axis) for group in groups for run in group.held_out]
    beyond = AROUND
    if held:
        beyond = BEYOND_HELD
    elif axis == "C":
        beyond = BEYOND
    low = min(group.x[axis].min() for group in groups)
    high = max(*held, *(group.x[axis].max() for group in groups), 0)
    return low / AROUND, beyond * high


def _shading(groups: Sequence[Group], axis: str) -> Shading:
    by = "N"
    if axis == "N" and any(group.is_spread for group in groups):
        by = "D / N"
    if axis != "C" and any(group.frontier is not None for group in groups):
        by = "C [FLOPs]"
    values = [Shading(by, (0, 0)).value_of(group) for group in groups]
    for held in itertools.chain.from_iterable(group.held_out for group in groups):
        values.append(np.array([held.D / held.N if by == "D / N" else held.N]))
    among = np.concatenate(values)
    return Shading(by, (min(among), max(among)))


def _draw_curves(panel: Axes, group: Group, appearance: Appearance, shading: Shading) -> None:
    """The training curve of each run over compute."""
    for record, (tokens, loss) in zip(group.records, group.curves, strict=True):
        panel.plot(
            *smooth(tokens * record.flops_per_token, loss),
            color=shading.colour(appearance.style, record.N),
            alpha=0.5,
            linewidth=0.7,
            linestyle="-" if appearance.is_wide else appearance.style["linestyle"],
            zorder=1,
        )


def _draw_band(panel: Axes, group: Group, axis: str, grid: np.ndarray) -> None:
    """The spread of the model forms."""
    forms = group.bands.get(axis)
    if forms:
        losses = np.array([form.predict(grid) for form in forms])
        panel.fill_between(grid, losses.min(axis=0), losses.max(axis=0), **HATCH, zorder=1.2)


def _draw_line(panel: Axes, line: LawLine, appearance: Appearance, shading: Shading) -> Artist:
    """A line of the law with its interval."""
    colour = appearance.style["color"]
    if line.low is not None and line.high is not None:
        panel.fill_between(
            line.x,
            line.low,
            line.high,
            zorder=1.1,
            facecolor=(colour, 0.12),
            lw=0.5,
            edgecolor=(colour, 0.4),
        )
    if line.label:
        colour = shading.colour(appearance.style, line.label)
    (drawn_line,) = panel.plot(line.x, line.loss, color=colour, **appearance.line, zorder=2)
    return drawn_line


def _draw_points(
    panel: Axes, group: Group, axis: str, appearance: Appearance, shading: Shading
) -> None:
    """The final losses, and the minima of compute budgets."""
    if group.frontier is not None:
        minima = minima_of(group.laws["isoflop"])
        panel.plot(getattr(minima, axis), minima.loss, **_minimum_look(appearance.style["color"]))
    colours = shading.colour(appearance.style, shading.value_of(group))  # (n, 4)
    panel.scatter(
        group.x[axis],
        group.loss,
        marker=appearance.style["marker"],
        zorder=3,
        facecolors="white" if appearance.is_wide else colours,
        edgecolors=colours,
        **appearance.points,
    )


def _draw_held(panel: Axes, held: Held, axis: str, appearance: Appearance) -> None:
    """A star where the held-out run ended, hollow at its prediction while it has not; that as a
    bar."""
    x, prediction, colour = getattr(held, axis), held.prediction, appearance.style["color"]
    size = 14 if appearance.is_wide else 8.5
    if prediction is not None:
        panel.errorbar(
            x,
            prediction.loss,
            yerr=[[prediction.loss - prediction.low], [prediction.high - prediction.loss]],
            color=colour,
            marker="_",
            markersize=1.5 * size,
            capsize=0.35 * size,
            zorder=4,
        )
        y, face, edge, width = prediction.loss, "white", colour, 1.0
    if held.loss is not None:
        y, face, edge, width = held.loss, colour, "white", 0.4
    panel.plot(
        x,
        y,
        marker="*",
        linestyle="none",
        markersize=size,
        zorder=6,
        color=colour,
        markerfacecolor=face,
        markeredgecolor=edge,
        markeredgewidth=width,
    )


def _draw_key(panel: Axes, labelled: dict[str, Artist], title: str) -> None:
    """What the shades of the lines mean."""
    panel.legend(
        labelled.values(),
        labelled,
        title=title,
        loc="upper right",
        fontsize=8,
        framealpha=0.8,
        title_fontsize=8,
        handlelength=1.2,
        labelspacing=0.15,
        borderpad=0.3,
        edgecolor="none",
    ).set_zorder(9)


def smooth(x: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Means of x and loss, (2, n), over bins of equal width in log x: even on a log axis, unlike a
    window of so many steps."""
    if len(x) == 0:
        return np.array([x, loss])
    bins = int(np.clip(np.ceil(BINS * np.log10(x[-1] / x[0])), 4, 80))
    edges = np.geomspace(x[0], x[-1] * (1 + 1e-9), bins + 1)
    bin_of = np.searchsorted(edges, x, side="right") - 1
    counts = np.bincount(bin_of, minlength=bins)
    is_filled = counts > 0
    sums = np.array([np.bincount(bin_of, values, minlength=bins) for values in (x, loss)])
    return sums[:, is_filled] / counts[is_filled]


# ------------------------------------------------------------------------------------------- gaps


def _gaps_of(group: Group, pairs: Sequence[Pair], axis: str, loss_key: str) -> list[DrawnGap]:
    """A marker for each size and budget of the group's recipe: its pairs' gap in per cent."""
    evaluation = loss_key.removeprefix("loss_")
    run_ids = [record.run_id for record in group.records]
    place = dict(zip(run_ids, group.x[axis], strict=True))
    of_group = [pair for pair in pairs if pair.fp8.run_id in place]
    gaps = []
    for _, cell in grouped(of_group, lambda pair: (pair.fp8.params_total, pair.fp8.tokens)):
        first = cell[0]
        evaluation_se = first.gap[evaluation].se_percent if len(cell) == 1 else None
        mean = mean_gaps(cell, "percent")[evaluation]
        gaps.append(gap_at(place[first.fp8.run_id], mean, evaluation_se))
    return gaps


def _all_gaps(
    groups: Sequence[Group], pairs: Sequence[Pair], axis: str, loss_key: str
) -> list[DrawnGap]:
    gaps = [_gaps_of(group, pairs, axis, loss_key) for group in groups]
    return list(itertools.chain.from_iterable(gaps))


def _draw_gap_row(
    row: Sequence[Axes],
    axes: Sequence[str],
    groups: Sequence[Group],
    pairs: Sequence[Pair],
    loss_key: str,
) -> None:
    """Below each panel of losses the gaps over its axis; all on one scale, around what
    DrawnGap.ends says and 0."""
    gaps = _all_gaps(groups, pairs, next(iter(groups[0].x)), loss_key)
    ends = [0.0, *itertools.chain.from_iterable(gap.ends for gap in gaps)]
    room = GAP_ROOM * max(max(ends) - min(ends), 1e-3)
    for axis, panel in zip(axes, row, strict=True):
        _draw_gaps(panel, groups, axis, pairs, loss_key)
        panel.set_ylim(min(ends) - room, max(ends) + room)
    row[0].set_ylabel("gap to\nBF16 [%]")
    for panel in row[1:]:
        panel.tick_params(labelleft=False)


def _draw_gaps(
    panel: Axes, groups: Sequence[Group], axis: str, pairs: Sequence[Pair], loss_key: str
) -> None:
    """FP8 minus BF16 in per cent: the mean over seeds with its interval, or a single pair."""
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.4)
    for group, appearance in zip(groups, _appearances(groups), strict=True):
        marker = {key: appearance.style[key] for key in ("color", "marker", "markersize")}
        draw_gaps(panel, _gaps_of(group, pairs, axis, loss_key), marker)


# ----------------------------------------------------------------------- minima of compute budgets


def _draw_optima(row: Sequence[Axes], group: Group, recipes: list[str]) -> None:
    """N*(C), D*(C) and their ratio: the budgets' minima and the laws through them. recipes: of all
    groups of the figure, which decide the colours."""
    style = styles(recipes)[recipes.index(group.recipe)]
    fit = group.laws["isoflop"]
    minima, p = minima_of(fit), fit.values
    grid = np.geomspace(minima.C.min() / AROUND, BEYOND * minima.C.max(), 60)
    N_law, D_law = p["k_n"] * grid ** p["a"], p["k_d"] * grid ** p["b"]
    panels = (
        ("N* [parameters]", minima.N, N_law, _exponent_name("N", "a", group)),
        ("D* [tokens]", minima.D, D_law, _exponent_name("D", "b", group)),
        ("D* / N* [tokens/param.]", minima.D / minima.N, D_law / N_law, None),
    )
    for panel, (label, values, law, name) in zip(row, panels, strict=True):
        panel.plot(grid, law, color=style["color"], linewidth=1.4, label=name)
        panel.plot(minima.C, values, **_minimum_look(style["color"]) | {"markersize": 6})
        panel.set(xscale="log", yscale="log", xlim=(grid[0], grid[-1]), xlabel=AXES["C"])
        panel.set_ylabel(label, fontsize=9)
        values_and_law = np.concatenate([values, law])
        panel.set_ylim(values_and_law.min() / 1.5, 1.5 * values_and_law.max())
        counts_axis(panel.xaxis, in_words=False)
        panel.xaxis.set_major_locator(LogLocator(numticks=3))
        counts_axis(panel.yaxis)
        if name is not None:
            panel.legend(loc="upper left", fontsize=7.5, frameon=False, handlelength=1)


def _exponent_name(letter: str, exponent: str, group: Group) -> str:
    """Such as "N* ~ C^0.514", the interval in a second line."""
    fit = group.laws["isoflop"]
    name = f"{letter}* ~ C^{fit.parameters[exponent]:.3f}"
    if fit.ci95 and exponent in fit.ci95:
        low, high = fit.ci95[exponent]
        name += f"\n{low:.3f} to {high:.3f}"
    return name


def _minimum_look(colour: str) -> dict[str, Any]:
    return {
        "marker": "P",
        "linestyle": "none",
        "markersize": 8,
        "zorder": 5,
        "color": colour,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
    }


# -------------------------------------------------------------------------------------------- words


def _legend(groups: Sequence[Group]) -> list[Artist]:
    """A group's marker and line, then in grey what is alike in all of them."""
    handles = [
        _group_handle(group, appearance)
        for group, appearance in zip(groups, _appearances(groups), strict=True)
    ]
    held = list(itertools.chain.from_iterable(group.held_out for group in groups))
    return [*handles, *_grey_handles(groups), *_held_handles(held)]


def _grey_handles(groups: Sequence[Group]) -> list[Artist]:
    handles: list[Artist] = []
    curves = itertools.chain.from_iterable(group.curves for group in groups)
    if any(len(tokens) for tokens, _ in curves):
        handles.append(Line2D([], [], color=GREY, linewidth=0.8, alpha=0.8, label="training loss"))
    if any(group.lines or group.is_surface for group in groups):
        handles.append(Patch(facecolor=GREY, alpha=0.3, label="law, 95 % interval"))
    if any(group.bands for group in groups):
        handles.append(Patch(**HATCH, label="other model forms"))
    if any(group.frontier for group in groups):
        handles.append(_grey_marker("P", 8, "minimum of a budget"))
    return handles


def _group_handle(group: Group, appearance: Appearance) -> Artist:
    keys = ("marker", "markersize", "linestyle", "linewidth", "color")
    return Line2D(
        [],
        [],
        **{key: appearance.style[key] for key in keys},
        label=name_of(group),
        markeredgewidth=1.4 if appearance.is_wide else 0,
        markerfacecolor="white" if appearance.is_wide else appearance.style["color"],
    )


def _held_handles(held: Sequence[Held]) -> list[Artist]:
    """A star for held-out runs, a bar for their predictions."""
    if not held:
        return []
    if any(run.loss is not None for run in held):
        star = _grey_marker("*", 10, "held-out run", markerfacecolor=GREY)
    else:
        star = _grey_marker("*", 10, "held-out run to come", markerfacecolor="white")
    if not any(run.prediction for run in held):
        return [star]
    return [star, _grey_marker("|", 10, "its prediction, 95 %")]


def _grey_marker(marker: str, size: float, label: str, **options: Any) -> Artist:
    return Line2D(
        [],
        [],
        marker=marker,
        color=GREY,
        markersize=size,
        linestyle="none",
        label=label,
        **options,
    )


def _title(groups: Sequence[Group], loss_key: str) -> str:
    n = ", ".join(dict.fromkeys(str(len(group.loss)) for group in groups))
    if not groups[0].records:
        return f"Loss in {name_of(groups[0])} (n = {n} points)"
    names = f"{len(groups)} precisions"
    if len(groups) < 3:
        names = " and ".join(map(name_of, groups))
    if len(groups) > 1 and "," not in n:
        n = f"{n} each"
    evaluation = EVALUATION_WORDS[loss_key.removeprefix("loss_")]
    return f"Validation loss of {names}, evaluated {evaluation} (n = {n})"


def _caption(groups: Sequence[Group], unshown: Sequence[Group]) -> str:
    """The first group's law, then what the lines are; law.json has the laws of all with their
    intervals."""
    sentences = []
    law = _captioned_law(groups[0])
    if law is not None:
        sentences.append(f"{name_of(groups[0])}: {law.formula()}.")
    words = _words_of_lines(groups)
    if words is not None:
        sentences.append(words)
    if unshown:
        names = ", ".join(map(name_of, unshown))
        sentences.append(f"Not drawn, fewer sizes or no such law: {names}.")
    return " ".join(sentences)


def _captioned_law(group: Group) -> Any:
    if group.is_surface:
        return group.law
    return group.lines.get("C" if "C" in group.x else "N")


def _words_of_lines(groups: Sequence[Group]) -> str | None:
    """What the lines of the panels are."""
    first = groups[0]
    if any(group.is_surface for group in groups):
        return "Lines: lowest loss for a compute, of one size N, of one ratio D / N."
    if first.frontier is not None:
        return (
            "Over C the law through the budgets' minima, over D and N the valley of each budget."
            " Below: where the minima lie, exponents with 95 % intervals."
        )
    if any(group.is_spread for group in groups):
        return "Over D and N, lines join points of one size, of one ratio D / N."
    if "D" not in first.x:
        return None
    ratio = np.median(first.x["D"] / first.x["N"])
    return f"All at {ratio:.3g} tokens per {KIND[first.convention]}parameter."


def name_of(group: Group) -> str:
    """The recipe as the reader knows it, or the table's name."""
    if group.records:
        return group.records[0].precision.display_name
    return textwrap.shorten(group.recipe, 40, placeholder="…")
