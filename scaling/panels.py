"""Fill one panel of the loss figure: losses, reducible losses or paired gaps over compute, tokens or parameters.

A group (groups.Group) is one precision. Colour family, marker and dash tell precisions apart, shades of the family tell
sizes apart. Precisions of a pair lie on top of each other, so the first is drawn wide and hollow underneath.
"""

import matplotlib
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from scaling.captions import human, name_of
from scaling.curves import (
    best_so_far,
    floor_of,
    is_spread,
    is_surface,
    law_lines,
    reducible,
    rest_of,
    sizes_of,
    smooth_curves,
    span,
)

# Okabe-Ito colours, told apart by colour-blind readers; marker and dash differ too, for grey prints.
STYLES = (
    {"color": "#0072B2", "shades": "Blues", "marker": "o", "markersize": 5.8, "linestyle": "-", "linewidth": 2.0, "hollow": True},
    {"color": "#D55E00", "shades": "Oranges", "marker": "s", "markersize": 3.2, "linestyle": (0, (2.4, 1.8)), "linewidth": 1.0},
    {"color": "#009E73", "shades": "Greens", "marker": "D", "markersize": 3.2, "linestyle": (0, (5, 1, 1, 1)), "linewidth": 1.0},
    {"color": "#CC79A7", "shades": "RdPu", "marker": "^", "markersize": 4.0, "linestyle": (0, (1, 1.2)), "linewidth": 1.2},
)
MANY = 60               # from this many points on, they are drawn small and translucent
LABEL = 9               # points
FORMS = {"facecolor": "none", "edgecolor": "#777777", "hatch": "//////", "linewidth": 0.4}     # the spread of model forms
HALO = [withStroke(linewidth=2.2, foreground="white")]


def styles(groups) -> list[dict]:
    """A style per group; beyond the fourth they repeat."""
    return [STYLES[i % len(STYLES)] for i in range(len(groups))]


def shade(style, size: float, sizes) -> tuple:
    """The style's colour for a model of `size` parameters among `sizes`: pale for the smallest, dark for the largest."""
    low, high = np.log(min(sizes)), np.log(max(sizes))
    share = (np.log(size) - low) / (high - low) if high > low else 0.6
    return matplotlib.colormaps[style["shades"]](0.45 + 0.5 * share)


def draw_losses(panel, groups, axis: str) -> None:
    """Final losses, laws with their bands, held-out runs; over compute every training curve and their envelope too."""
    grid, sizes = _start(panel, groups, axis), sizes_of(groups)
    for group, style in zip(groups, styles(groups), strict=True):
        if axis == "C":
            _draw_curves(panel, group, style, sizes)
        if forms := group.bands.get(axis):
            values = np.array([form.predict(grid) for form in forms])
            panel.fill_between(grid, values.min(axis=0), values.max(axis=0), **FORMS, zorder=1.2)
        for x, N, _, loss, low, high, _ in law_lines(group, axis, grid):
            if low is not None:
                panel.fill_between(x, low, high, zorder=1.1, facecolor=(style["color"], 0.12), lw=0.5,
                                   edgecolor=(style["color"], 0.4))
            colour = shade(style, N[0], sizes) if axis == "D" and N is not None else style["color"]
            panel.plot(x, loss, color=colour, **_line_style(style, group), zorder=2)
        _draw_points(panel, group, style, sizes, group.x[axis], group.loss)
        for held in group.held_out:
            _draw_held(panel, held, getattr(held, axis), 0.0, style)


def label_sizes(panel, groups, axis: str) -> None:
    """Write sizes beside the training curves, sizes or ratios beside the law's lines; limits and page must stand."""
    group, (low, high) = groups[0], span(groups, axis)
    grid = np.geomspace(low / 1.6, high, 240)
    if axis == "C":
        ends = {}
        for record, (x, loss) in zip(group.records, smooth_curves(group), strict=True):
            if len(x) and x[-1] > ends.get(record.params_total, (0, 0))[0]:
                ends[record.params_total] = (x[-1], loss[-1])
        anchors = [(*end, human(N)) for N, end in ends.items()]
    elif is_spread(group):
        lines = [(x, loss, human(each) if axis == "D" else f"{each:.{0 if each >= 10 else 2}{'f' if each >= 10 else 'g'}}×")
                 for x, _, _, loss, _, _, each in law_lines(group, axis, grid)]
        if axis == "N" and any(loss[0] > panel.get_ylim()[1] for _, loss, _ in lines):
            _label_inside(panel, lines)
            return
        end = -1 if axis == "D" else 0
        anchors = [(x[end], loss[end], label) for x, loss, label in lines]
    else:
        return
    to_axes = (panel.transData + panel.transAxes.inverted()).transform
    width, height = 72 * panel.get_window_extent().size / panel.figure.dpi      # points
    step = 1.15 * LABEL / height
    away = 3 if is_surface(group) else 6        # points; joined points have a marker at the end of their line
    shift = {"C": (5 / width, 0.6 * step), "D": (away / width, 0), "N": (-away / width, 0)}[axis]
    places = [(*(to_axes(anchor[:2]) + shift), anchor[2]) for anchor in sorted(anchors, key=lambda anchor: anchor[1])]
    heights = []
    for _, y, _ in places:      # from the lowest up, each clear of the one below it
        heights.append(max(y, step / 2, heights[-1] + step if heights else 0))
    for i in range(len(places) - 1, -1, -1):
        heights[i] = min(heights[i], 1 - step / 2 if i == len(places) - 1 else heights[i + 1] - step)
    for (x, _, label), y in zip(places, heights, strict=True):
        panel.text(x, y, label, transform=panel.transAxes, fontsize=LABEL, ha="right" if axis == "N" else "left", va="center",
                   color="#333333", path_effects=HALO, zorder=6)


def draw_reducible(panel, groups, axis: str) -> None:
    """What `reducible` leaves of every loss, with the one straight line that the law makes of it."""
    grid, sizes = _start(panel, groups, axis), sizes_of(groups)
    for group, style in zip(groups, styles(groups), strict=True):
        if floor_of(group) is None:
            continue
        x, N, D, loss, *_ = law_lines(group, axis, grid)[0]     # any of the panel's lines: they become one
        panel.plot(x, reducible(group, axis, N, D, loss), color=style["color"], **_line_style(style, group), zorder=2)
        rest, shown = rest_of(group, axis)
        _draw_points(panel, group, style, sizes, group.x[axis][shown], rest[shown], group.x["N"][shown])
        for held in group.held_out:
            _draw_held(panel, held, getattr(held, axis), reducible(group, axis, held.N, held.D, 0.0), style)
    if any(map(is_surface, groups)):
        panel.text(0.96, 0.94, {"C": "$L - E$", "D": r"$L - E - A/N^{\alpha}$", "N": r"$L - E - B/D^{\beta}$"}[axis], ha="right",
                   va="top", transform=panel.transAxes, fontsize=LABEL, path_effects=HALO)


def draw_gaps(panel, groups, axis: str, pairs, loss_key: str) -> None:
    """FP8 minus BF16 of each pair in percent, with one standard error of the evaluation."""
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.4)
    for group, style in zip(groups, styles(groups), strict=True):
        order = {record.run_id: i for i, record in enumerate(group.records)}
        chosen = [pair for pair in pairs if pair.fp8.run_id in order]
        gaps = [pair.in_bf16 if loss_key == "loss_bf16" else pair.as_trained for pair in chosen]
        if chosen:
            x = [group.x[axis][order[pair.fp8.run_id]] for pair in chosen]
            se = [100 * (gap.se or 0.0) / getattr(pair.bf16, loss_key) for gap, pair in zip(gaps, chosen, strict=True)]
            panel.errorbar(x, [gap.percent for gap in gaps], yerr=se, linestyle="none", color=style["color"],
                           marker=style["marker"], markersize=style["markersize"], capsize=2, elinewidth=0.9,
                           alpha=0.6 if len(chosen) > 12 else 1)
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, -0.15 * high), max(high, -0.15 * low))


def _label_inside(panel, lines) -> None:
    """Write each label on its own line, from the top down: for steep lines that leave the panel at the top."""
    low, high = np.log(panel.get_ylim())
    for i, (x, loss, label) in enumerate(lines):
        y = np.exp(high - (0.06 + 0.08 * i) * (high - low))
        panel.text(np.interp(-y, -loss, x), y, label, fontsize=LABEL - 1, ha="center", va="center", color="#333333",
                   path_effects=HALO, zorder=6)


def _start(panel, groups, axis):
    """Log axes over everything there is to show, a grid beneath; gives the abscissae for the laws."""
    low, high = span(groups, axis)
    panel.set_xscale("log")
    panel.set_yscale("log")
    # Labels of lines need room: right of them over tokens, left of them over parameters.
    left, right = ((1.6 * high / low) ** share for share in {"D": (0, 0.4), "N": (0.33, 0)}.get(axis, (0, 0))) if any(
        map(is_spread, groups)) else (1, 1)
    panel.set_xlim(low / 1.6 / left, high * right)
    return np.geomspace(low / 1.6, high, 240)


def _line_style(style, group):
    wide = style.get("hollow") and not is_many(group)       # two laws that coincide must both be seen
    return {"linestyle": style["linestyle"], "linewidth": style["linewidth"] if wide else 1.0, "alpha": 0.6 if wide else 1}


def is_many(group) -> bool:
    """Whether the group's points are drawn small and translucent."""
    return len(group.loss) >= MANY


def _draw_points(panel, group, style, sizes, x, loss, N=None):
    N = group.x["N"] if N is None else N
    colours = [shade(style, size, sizes) for size in N]
    many = is_many(group)
    hollow = style.get("hollow") and not many
    panel.scatter(x, loss, s=9.0 if many else style["markersize"] ** 2, marker=style["marker"], zorder=3,
                  alpha=0.7 if many else 1, facecolors="white" if hollow else colours, edgecolors=colours,
                  linewidths=1.4 if hollow else 0.0)


def _draw_held(panel, held, x, shift: float, style):
    """A star where the held-out run ended, hollow at its prediction while it has not; the prediction as a bar."""
    loss, wide, frozen = held.loss, style.get("hollow"), held.prediction
    if frozen is not None:
        middle, low, high = (max(y + shift, 1e-9) for y in (frozen.loss, frozen.low, frozen.high))
        panel.errorbar([x], [middle], yerr=[[middle - low], [high - middle]], color=style["color"], zorder=4,
                       elinewidth=1.4 if wide else 1, capsize=6 if wide else 3, capthick=1.4 if wide else 1)
    if loss is not None or frozen is not None:
        panel.plot([x], [(frozen.loss if loss is None else loss) + shift], marker="*", zorder=5, markersize=10 if wide else 5.5,
                   markeredgewidth=0.8, color=style["color"], linestyle="none",
                   markerfacecolor="white" if loss is None else style["color"],
                   markeredgecolor=style["color"])


def _draw_curves(panel, group, style, sizes):
    """Every run's smoothed loss, a branch from where it left its trunk, and the lowest loss reached by each compute."""
    curves = smooth_curves(group)
    for record, curve in zip(group.records, curves, strict=True):
        panel.plot(*curve, color=shade(style, record.params_total, sizes), alpha=0.5, linewidth=0.7,
                   linestyle="-" if style.get("hollow") else style["linestyle"], zorder=1)
    for x, loss, size in best_so_far(group, curves):
        panel.plot(x, loss, color=shade(style, size, sizes), zorder=1.8, linewidth=3.4 if style.get("hollow") else 1.2,
                   linestyle=style["linestyle"], solid_capstyle="butt")



def legend(groups) -> list:
    """Legend: a group's marker and line, then in grey what is alike in all of them."""
    handles, grey = [], "#666666"
    for group, style in zip(groups, styles(groups), strict=True):
        hollow = style.get("hollow") and not is_many(group)
        handles.append(Line2D([], [], marker=style["marker"], markersize=style["markersize"], linestyle=style["linestyle"],
                              linewidth=style["linewidth"], color=style["color"], markeredgewidth=1.4 if hollow else 0,
                              markerfacecolor="white" if hollow else style["color"], label=name_of(group)))
    if any(len(tokens) for group in groups for tokens, _ in group.curves):
        handles += [Line2D([], [], color=grey, linewidth=0.8, alpha=0.8, label="training loss"),
                    Line2D([], [], color=grey, linewidth=3.4, label="its lower envelope")]
    if any(group.lines or is_surface(group) for group in groups):
        handles.append(Patch(facecolor=grey, alpha=0.3, label="law, 95 % interval"))
    if any(group.bands for group in groups):
        handles.append(Patch(**FORMS, label="other model forms"))
    held = [held for group in groups for held in group.held_out]
    if held:
        is_there = any(one.loss is not None for one in held)
        handles.append(Line2D([], [], color=grey, marker="*", markersize=10, markerfacecolor=grey if is_there else "white",
                              linestyle="none", label="held-out run" if is_there else "held-out run to come"))
    return handles
