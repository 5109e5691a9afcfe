"""Fill one panel of the loss figure: losses, reducible losses or paired gaps over compute, tokens or parameters.

A group (groups.Group) is one precision. Colour family, marker and dash tell precisions apart, shades of the family tell
sizes apart. Precisions of a pair lie on top of each other, so the first is drawn wide and hollow underneath.
"""

import itertools

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN, CARETUP
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from scaling.captions import human, name_of
from scaling.curves import (
    best_so_far,
    floor_of,
    is_spread,
    is_surface,
    law_lines,
    predictions,
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
    {"color": "#000000", "shades": "Greys", "marker": "v", "markersize": 4.0, "linestyle": (0, (3, 3)), "linewidth": 1.0},
)
RECIPES = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "auto")       # of STYLES, in their order
MANY = 60               # from this many points on, they are drawn small, translucent where they are of one group
LABEL = 9               # points
FORMS = {"facecolor": "none", "edgecolor": "#777777", "hatch": "//////", "linewidth": 0.4}     # the spread of model forms
HALO = [withStroke(linewidth=2.2, foreground="white")]


def styles(recipes) -> list[dict]:
    """A style per recipe: each of RECIPES has its own in every figure, others take what is left and then repeat."""
    left = itertools.cycle([style for style, name in zip(STYLES, RECIPES, strict=True) if name not in recipes] or STYLES)
    return [STYLES[RECIPES.index(name)] if name in RECIPES else next(left) for name in recipes]


def shade(style, size: float, sizes) -> tuple:
    """The style's colour for a model of `size` parameters among `sizes`: pale for the smallest, dark for the largest."""
    low, high = np.log(min(sizes)), np.log(max(sizes))
    share = (np.log(size) - low) / (high - low) if high > low else 0.6
    return matplotlib.colormaps[style["shades"]](0.45 + 0.5 * share)


def draw_losses(panel, groups, axis: str) -> None:
    """Final losses, laws with their bands, held-out runs; over compute every training curve and their envelope too."""
    grid, sizes = _start(panel, groups, axis), sizes_of(groups)
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
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
            panel.plot(x, loss, color=colour, **_line_style(style, groups), zorder=2)
        _draw_points(panel, groups, group, style, sizes, group.x[axis], group.loss)
        for held in group.held_out:
            _draw_star(panel, held, getattr(held, axis), 0.0, style)


def label_sizes(panel, groups, axis: str) -> None:
    """Write sizes beside the training curves, sizes or ratios beside the law's lines; limits and page must stand."""
    group, (low, high) = groups[0], span(groups, axis)
    grid = np.geomspace(low / 1.6, high, 240)
    if axis == "C":
        ends = {}
        for record, (x, loss) in zip(group.records, smooth_curves(group), strict=True):
            if len(x) and x[-1] > ends.get(record.N, (0, 0))[0]:
                ends[record.N] = (x[-1], loss[-1])
        anchors = [(*end, human(N)) for N, end in ends.items()]
    elif is_spread(group):
        lines = [(x, loss, human(each) if axis == "D" else f"{each:.{0 if each >= 10 else 2}{'f' if each >= 10 else 'g'}}×")
                 for x, _, _, loss, _, _, each in law_lines(group, axis, grid)]
        if axis == "N" and any(loss[0] > panel.get_ylim()[1] for _, loss, _ in lines):
            _label_inside(panel, groups, lines)
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
    bars = [(to_axes((x, low))[1], *to_axes((x, high))) for _, x, _, low, high in predictions(groups, axis)]
    under = 1
    for (x, own, label), y in reversed(list(zip(places, heights, strict=True))):
        end, where = "right" if axis == "N" else "left", "center"
        wide = 0.7 * LABEL * len(label) / width
        if axis in "CD" and any(x < at + 9 / width and at - 9 / width < x + wide and bottom < y + step / 2 and y - step / 2 < top
                               for bottom, at, top in bars):     # below its curve, where no bar stands
            under = max(min(own - 1.1 * step, under - step), step)
            x, y, end, where = x - 9 / width, under, "right", "top"
        panel.text(x, y, label, transform=panel.transAxes, fontsize=LABEL, ha=end, va=where, color="#333333",
                   path_effects=HALO, zorder=8)


def draw_reducible(panel, groups, axis: str) -> None:
    """What `reducible` leaves of every loss, with the one straight line that the law makes of it."""
    grid, sizes = _start(panel, groups, axis), sizes_of(groups)
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
        if floor_of(group) is None:
            continue
        x, N, D, loss, *_ = law_lines(group, axis, grid)[0]     # any of the panel's lines: they become one
        panel.plot(x, reducible(group, axis, N, D, loss), color=style["color"], **_line_style(style, groups), zorder=2)
        rest, shown = rest_of(group, axis)
        _draw_points(panel, groups, group, style, sizes, group.x[axis][shown], rest[shown], group.x["N"][shown])
        for held in group.held_out:
            _draw_star(panel, held, getattr(held, axis), reducible(group, axis, held.N, held.D, 0.0), style)
    if any(map(is_surface, groups)):
        panel.text(0.04, 0.05, {"C": "$L - E$", "D": r"$L - E - A/N^{\alpha}$", "N": r"$L - E - B/D^{\beta}$"}[axis], ha="left",
                   va="bottom", transform=panel.transAxes, fontsize=LABEL, path_effects=HALO)    # the law falls: a free corner


def draw_gaps(panel, groups, axis: str, pairs, loss_key: str) -> None:
    """FP8 minus BF16 of each pair in percent, with one standard error of the evaluation."""
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.4)
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
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


def draw_predictions(panel, groups, axis: str, reduced: bool = False) -> None:
    """Frozen predictions as bars with a tick at the predicted loss; arrow heads where a bar leaves the axis, which must stand."""
    bottom, top = panel.get_ylim()
    for i, x, middle, low, high in predictions(groups, axis, reduced):
        style = styles([group.recipe for group in groups])[i]
        wide = style.get("hollow")
        thick = 1.4 if wide else 1
        look = {"color": style["color"], "markeredgewidth": thick, "markersize": 12 if wide else 7, "linestyle": "none"}
        panel.vlines(x, max(low, bottom), min(high, top), color=style["color"], linewidth=thick, zorder=4)
        for y, is_out, head in ((max(low, bottom), low < bottom, CARETDOWN), (min(high, top), high > top, CARETUP)):
            head = {"marker": head, "markersize": 6 if wide else 4} if is_out else {"marker": "_"}
            panel.plot([x], [y], zorder=4, **look | head)
        panel.plot([x], [middle], marker="_", zorder=5, **look | {"markersize": 23 if wide else 18})     # wider than the stars


def _label_inside(panel, groups, lines) -> None:
    """Write each label at its own line, as high as it is clear of points and of other lines: for steep lines that leave the
    panel at the top."""
    frame, point = panel.get_window_extent(), panel.figure.dpi / 72
    bottom = panel.get_ylim()[0]
    bars = [(x, y) for _, x, _, low, high in predictions(groups, "N") for y in np.geomspace(max(low, bottom), high, 20)]
    held = [(one.N, one.loss) for group in groups for one in group.held_out if one.loss]
    marks = panel.transData.transform(np.concatenate(
        [np.column_stack([group.x["N"], group.loss]) for group in groups] + [np.reshape(bars + held, (-1, 2))]))
    paths, taken = [panel.transData.transform(np.column_stack(line[:2])) for line in lines], []
    for i, (path, (*_, label)) in enumerate(zip(paths, lines, strict=True)):
        text = panel.text(0, 0, label, transform=None, fontsize=LABEL - 1, ha="center", va="center", color="#333333",
                          path_effects=HALO, zorder=8)
        box = text.get_window_extent()
        half = np.array([box.width, box.height]) / 2
        others = np.concatenate([np.empty((0, 2)), *paths[:i], *paths[i + 1:]])
        best = (np.inf, None)
        for side in (0, -1, 1):                 # on the line, left of it, right of it
            for place in path + [side * (half[0] + 3 * point), 0]:
                if (abs(place - [(frame.x0 + frame.x1) / 2, (frame.y0 + frame.y1) / 2]) + half
                        > [frame.width / 2 - 2 * point, frame.height / 2 - 2 * point]).any():
                    continue
                hidden = sum(int((abs(some - place) < half + gap * point).all(axis=1).sum()) for some, gap in (
                    (marks, 3), (others, 2), (path, 0) if side else (path[:0], 0)))
                hidden += 1000 * sum(bool((abs(other - place) < half + size + (6 * point, 2 * point)).all())
                                     for other, size in taken)
                if hidden < best[0]:
                    best = (hidden, place)
        if best[1] is None:                     # the line is not in the panel
            text.remove()
            continue
        taken.append((best[1], half))
        text.set_transform(panel.transAxes)     # pixels change with the resolution
        text.set_position(panel.transAxes.inverted().transform(best[1]))


def _start(panel, groups, axis):
    """Log axes over everything there is to show, a grid beneath; gives the abscissae for the laws."""
    low, high = span(groups, axis)
    panel.set_xscale("log")
    panel.set_yscale("log")
    # Labels of lines need room: right of them over tokens, left of them over parameters.
    left, right = ((1.6 * high / low) ** share for share in {"D": (0, 0.4), "N": (0.43, 0)}.get(axis, (0, 0))) if any(
        map(is_spread, groups)) else (1, 1)
    panel.set_xlim(low / 1.6 / left, high * right)
    return np.geomspace(low / 1.6, high, 240)


def _line_style(style, groups):
    wide = style.get("hollow") and not is_cloud(groups)     # two laws that coincide must both be seen
    return {"linestyle": style["linestyle"], "linewidth": style["linewidth"] if wide else 1.0, "alpha": 0.6 if wide else 1}


def is_cloud(groups) -> bool:
    """Whether the points are drawn small and translucent: many, and of one group, so that none must show through another."""
    return len(groups) == 1 and len(groups[0].loss) >= MANY


def _draw_points(panel, groups, group, style, sizes, x, loss, N=None):
    N = group.x["N"] if N is None else N
    colours = [shade(style, size, sizes) for size in N]
    cloud, smaller = is_cloud(groups), 0.85 if len(group.loss) >= MANY else 1
    hollow = style.get("hollow") and not cloud
    panel.scatter(x, loss, s=9.0 if cloud else (smaller * style["markersize"]) ** 2, marker=style["marker"], zorder=3,
                  alpha=0.7 if cloud else 1, facecolors="white" if hollow else colours, edgecolors=colours,
                  linewidths=1.4 * smaller if hollow else 0.0)


def _draw_star(panel, held, x, shift: float, style):
    """A star over all else where the held-out run ended, hollow at its prediction while it has not."""
    loss, frozen = held.loss, held.prediction
    if loss is not None or frozen is not None:
        panel.plot([x], [(frozen.loss if loss is None else loss) + shift], marker="*", zorder=6, linestyle="none",
                   markersize=14 if style.get("hollow") else 8.5, color=style["color"], markeredgewidth=0.4 if loss else 1,
                   markerfacecolor="white" if loss is None else style["color"],
                   markeredgecolor=style["color"] if loss is None else "white")


def _draw_curves(panel, group, style, sizes):
    """Every run's smoothed loss, a branch from where it left its trunk, and the lowest loss reached by each compute."""
    curves = smooth_curves(group)
    for record, curve in zip(group.records, curves, strict=True):
        panel.plot(*curve, color=shade(style, record.N, sizes), alpha=0.5, linewidth=0.7,
                   linestyle="-" if style.get("hollow") else style["linestyle"], zorder=1)
    for x, loss, size in best_so_far(group, curves):
        panel.plot(x, loss, color=shade(style, size, sizes), zorder=1.8, linewidth=3.4 if style.get("hollow") else 1.2,
                   linestyle=style["linestyle"], solid_capstyle="butt")



def legend(groups) -> list:
    """Legend: a group's marker and line, then in grey what is alike in all of them."""
    handles, grey = [], "#666666"
    for group, style in zip(groups, styles([group.recipe for group in groups]), strict=True):
        hollow = style.get("hollow") and not is_cloud(groups)
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
    if any(one.prediction for one in held):
        tick, cap = (Line2D([], [], color=grey, marker="_", markersize=size, linestyle="none") for size in (15, 8))
        bar = LineCollection([], colors=[grey], linewidths=[1.4])
        handles.append(ErrorbarContainer((tick, (cap, cap), (bar,)), has_yerr=True, label="its prediction, 95 %"))
    return handles
