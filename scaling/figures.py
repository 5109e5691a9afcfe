"""Draw loss against compute, tokens, parameters: every precision in one figure, the paired gap below.

Nothing here fits: `draw` takes groups of runs with their laws. It uses matplotlib's objects without pyplot, so no
window system is asked for, no global state is left behind. As a command it draws one run, whole or still going:

    python scaling/figures.py out/RUN [out=DIR]             # its training, from metrics.jsonl; DIR is out/RUN/figures
    python scaling/figures.py --fp8 out/RUN [out=DIR]       # what FP8 did inside it, from probe.jsonl
"""


import io
import itertools
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.collections import LineCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN, CARETUP
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from runtime.cli import UserError, read_options
from runtime.rows import write_atomically as write
from scaling.command import run
from scaling.laws import NAMES, ONE_RAY, envelope, frontier
from scaling.pairs import KIND, human

BEYOND = 10             # without a held-out run the laws are drawn to this many times the largest compute
BINS = 24               # per decade of compute, to smooth training curves
FEW = 6                 # at most so many lines of one size, or of one ratio, in a panel


def span(groups, axis: str) -> tuple[float, float]:
    """From the smallest run to beyond the held-out ones or, without those, to where an extrapolation would be read."""
    high = max(group.x[axis].max() for group in groups)
    held = [getattr(held, axis) for group in groups for held in group.held_out]
    has_law = any(axis == "C" or is_surface(group) or not is_spread(group) for group in groups)
    beyond = 2.0 if held else 1.6 if not has_law else BEYOND if axis == "C" else BEYOND**0.5
    return min(group.x[axis].min() for group in groups), beyond * max([*held, high] if held else [high])


def sizes_of(groups) -> list[float]:
    """All sizes, those of held-out runs included."""
    return sorted({float(N) for group in groups for N in [*group.x["N"], *(held.N for held in group.held_out)]})


def is_surface(group) -> bool:
    """Whether an identified L(N, D) heads the group, so that no single curve over one axis is its law."""
    return group.headline == "chinchilla"


def is_spread(group) -> bool:
    """Whether the group's points lie at several tokens-per-parameter ratios: then loss over N or D alone is no one curve."""
    ratios = group.points.D / group.points.N
    return "D" in group.x and bool(ratios.max() > ONE_RAY * ratios.min())


def floor_of(group) -> float | None:
    """The irreducible loss E of the law that heads the group; None where it has none that the points identify."""
    law = group.laws.get(group.headline)
    return law.parameters["E"] if group.headline in ("chinchilla", "ray") and law.identified else None


def drawn(groups) -> tuple[list, list]:
    """The groups that the figure shows, and those that it only names: of fewer sizes than another, or without a floor where
    some law has one.

    A recipe tried at two sizes of four has a power law over its own sizes, which beside the others' frontier says nothing."""
    sizes = {id(group): len(set(group.x["N"].tolist())) for group in groups}
    shown = [group for group in groups if sizes[id(group)] == max(sizes.values())]
    shown = [group for group in shown if floor_of(group) is not None] or shown
    return shown, [group for group in groups if not any(group is one for one in shown)]


def law_lines(group, axis: str, grid) -> list[tuple]:
    """(x, N, D, loss, low, high, each) of each law line over `grid`, arrays of its shape; each: the line's size or ratio.

    N, D and each are None where one line stands for all points; low and high are None without an interval. Spread points
    without an identified L(N, D) have no law over tokens or parameters: there, lines join the points of one size or ratio."""
    if is_spread(group) and not is_surface(group) and axis != "C":
        return _joined(group, axis)
    if not is_surface(group):
        law = group.lines.get(axis)
        return [] if law is None else [_line(law, grid, None, None, None, (grid,))]
    law, points = group.laws["chinchilla"], group.points
    if axis == "C":
        N, D = _cheapest(group, grid)
        return [_line(law, grid, N, D, None, (N, D))]
    if axis == "D":
        return [_line(law, grid, np.full(len(grid), N), grid, N, (np.full(len(grid), N), grid))
                for N in sorted({*_few(points.N), *(float(held.N) for held in group.held_out)})]
    return [_line(law, grid, grid, ratio * grid, ratio, (grid, ratio * grid)) for ratio in _few(points.D / points.N)]


def _joined(group, axis):
    points, lines = group.points, []
    values = points.N if axis == "D" else points.D / points.N
    each = np.array(_few(values))
    alike = np.isclose(values[:, None], each, rtol=0.05)        # (points, lines)
    if not alike.any(axis=1).all():
        return []
    for own, value in zip(alike.T, each, strict=True):
        x = np.unique(group.x[axis][own])       # several seeds are one place
        means = [[some[own & (group.x[axis] == at)].mean() for at in x] for some in (points.N, points.D, group.loss)]
        lines.append((x, *map(np.array, means), None, None, float(value)))
    return lines


def _line(law, x, N, D, each, where):
    with np.errstate(over="ignore"):
        interval = law.interval_at(*where) if law.identified else None
    loss, low, high = (law.predict(*where), None, None) if interval is None else interval
    return x, N, D, loss, low, None if high is None else np.minimum(high, 1e9 * loss), each


def _cheapest(group, compute):
    """(N, D), of the shape of `compute`: where the law's loss is lowest for so many FLOPs, counted as the group's points are.

    A vocabulary's share of a token's FLOPs falls with size, so that the best size is larger than 6 N D would have it."""
    law = group.laws["chinchilla"]
    N, D, _ = frontier(law, compute)
    if group.records:
        N = N * np.geomspace(1e-2, 1e2, 2001)[:, None]     # (sizes, compute)
        D = compute / (6 * N * _flops_over_6n(group, N))
        best = law.predict(N, D).argmin(axis=0), np.arange(len(compute))
        N, D = N[best], D[best]
    return N, D


def _flops_over_6n(group, N):
    """FLOPs per token in the group's convention over 6 N, at sizes N; beyond its points as at the last of them."""
    share = np.log(group.x["C"] / (6 * group.x["N"] * group.x["D"]))
    sizes = np.log(group.x["N"])
    slope, height = np.polyfit(sizes, share, 1) if np.ptp(sizes) > 0 else (0.0, share.mean())
    return np.exp(height + slope * np.clip(np.log(N), sizes.min(), sizes.max()))


def _few(values) -> list[float]:
    """The distinct values (within 5 %) where they are few, else three round ones that span them."""
    values = np.sort(values)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(np.log(values)) > np.log(1.05)]))
    if len(starts) <= FEW:
        return [float(np.median(some)) for some in np.split(values, starts[1:])]
    near = np.quantile(values, (0.05, 0.5, 0.95))
    return sorted({float(min((m * 10.0 ** np.floor(np.log10(v)) for m in (1, 2, 5, 10)), key=lambda r: abs(np.log(r / v))))
                   for v in near})


def reducible(group, axis: str, N, D, loss):
    """The part of `loss` that is a power law of this axis, if the law that heads the group holds.

    Off a ray this is L - E over compute, L - E - A N^-alpha over tokens, L - E - B D^-beta over parameters."""
    if not is_surface(group):
        return loss - group.lines[axis].parameters["E"]
    p = group.laws["chinchilla"].parameters
    return loss - p["E"] - {"C": 0.0, "D": p["A"] * N ** -p["alpha"], "N": p["B"] * D ** -p["beta"]}[axis]


def rest_of(group, axis: str) -> tuple:
    """`reducible` of the group's losses, and which of them a log axis can hold: noise leaves some at or below zero."""
    points = group.points
    rest = reducible(group, axis, points.N, points.D, group.loss)
    law = group.laws["chinchilla"].predict(points.N, points.D) if is_surface(group) else group.lines[axis].predict(group.x[axis])
    return rest, rest > 0.3 * reducible(group, axis, points.N, points.D, law).min()


def predictions(groups, axis: str, reduced: bool = False) -> list[tuple]:
    """(index of the group, x, predicted, low, high) of every frozen prediction; `reduced` by what its law's other terms are."""
    found = []
    for i, group in enumerate(groups):
        for held in group.held_out:
            if held.prediction is not None and (not reduced or floor_of(group) is not None):
                off = reducible(group, axis, held.N, held.D, 0.0) if reduced else 0.0
                said = held.prediction
                found.append((i, getattr(held, axis), said.loss + off, said.low + off, said.high + off))
    return found


def loss_limits(groups) -> tuple[float, float]:
    """Around the points and what is predicted; training curves may leave it at the top, where they began."""
    losses = np.concatenate([group.loss for group in groups])
    far = [one.loss for group in groups for one in group.held_out if one.loss]
    far += [float(form.predict(BEYOND * group.x["C"].max())) for group in groups for form in group.bands.get("C", ())]
    low, high = _with_bars(min([losses.min(), *far]), losses.max(), predictions(groups, "C"))
    room = max(np.log(high / low), 0.02)
    return low * np.exp(-0.08 * room), high * np.exp(0.3 * room)


def reducible_limits(groups) -> tuple[float, float]:
    """Around all that `reducible` leaves of points, held-out runs and laws, over every axis."""
    values, bars = [], []
    for axis in "CDN":
        low, high = span(groups, axis)
        for group in groups:
            if floor_of(group) is not None:
                rest, shown = rest_of(group, axis)
                _, N, D, loss, *_ = law_lines(group, axis, np.geomspace(low / 1.6, high, 20))[0]
                values += [rest[shown], reducible(group, axis, N, D, loss)]
                values += [[reducible(group, axis, one.N, one.D, one.loss)] for one in group.held_out if one.loss]
        bars += predictions(groups, axis, True)
    values = np.concatenate(values)
    low, high = _with_bars(values[values > 0].min(), values.max(), bars)
    return low * (low / high) ** 0.05, high * (high / low) ** 0.05


def _with_bars(low, high, bars):
    """Limits that hold the bars too, except those wider than all else: they would squeeze the data."""
    room, ends = max(np.log(high / low), 0.02), [low, high]
    for *_, middle, bottom, top in bars:
        ends += [middle] if middle > 0 else []
        ends += [bottom, top] if bottom > 0 and np.log(top / bottom) <= room else []
    return min(ends), max(ends)


def is_cut(groups) -> bool:
    """Whether some prediction's interval leaves its axis."""
    rows = [(False, loss_limits(groups))]
    if any(floor_of(group) is not None for group in groups):
        rows.append((True, reducible_limits(groups)))
    return any(low < ends[0] or high > ends[1] for reduced, ends in rows for axis in groups[0].x
               for *_, low, high in predictions(groups, axis, reduced))


def smooth_curves(group) -> list[tuple]:
    """(FLOPs, loss) of each run, smoothed; a branch begins on its trunk's curve."""
    curves = [_smooth(tokens * record.flops_per_token, loss)
              for record, (tokens, loss) in zip(group.records, group.curves, strict=True)]
    own = {record.run_id: curve for record, curve in zip(group.records, curves, strict=True)}
    joined = []
    for record, (x, loss) in zip(group.records, curves, strict=True):
        trunk = own.get(record.parent_run)
        if trunk is not None and len(x) and len(trunk[0]) and trunk[0][0] < x[0]:
            before = trunk[0][trunk[0] < x[0]][-1:]
            x, loss = np.concatenate([before, x]), np.concatenate([np.interp(before, *trunk), loss])
        joined.append((x, loss))
    return joined


def _smooth(x, loss):
    """Means over bins of equal width in log x: even on a log axis, unlike a window of so many steps."""
    if len(x) == 0:
        return x, loss
    bins = int(np.clip(np.ceil(BINS * np.log10(x[-1] / x[0])), 4, 80))
    edges = np.geomspace(x[0], x[-1] * (1 + 1e-9), bins + 1)
    index = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    filled = count > 0
    return tuple(np.bincount(index, weights=values, minlength=bins)[filled] / count[filled] for values in (x, loss))


def best_so_far(group, curves) -> list[tuple]:
    """(FLOPs, loss, size) pieces of the curves' lower envelope: the lowest loss reached by each compute, and by which size."""
    filled = [i for i, (x, _) in enumerate(curves) if len(x) > 1]
    if not filled:
        return []
    x, loss, index = envelope([curves[i] for i in filled])
    loss = np.minimum.accumulate(loss)      # what was reached with less compute is reached
    size = np.array([group.records[filled[i]].N for i in index])
    starts = np.flatnonzero(np.concatenate([[True], np.diff(size) != 0]))
    return [(x[start:end + 1], loss[start:end + 1], float(size[start]))
            for start, end in zip(starts, [*starts[1:], len(x) - 1], strict=True)]


AXES = {"C": "compute C [FLOPs]", "D": "training tokens D", "N": "parameters N"}
GREEK = {"alpha": "α", "beta": "β", "gamma": "γ"}
SUPERSCRIPT = str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹")
SURFACE = "L = E + A/N^α + B/D^β. "
GLUE = "\N{NO-BREAK SPACE}"
EVALUATED = {"loss_bf16": "evaluated in BF16", "loss_as_trained": "evaluated as trained"}


def title(groups, loss_key: str) -> str:
    """What is drawn, of which arms, and of how many."""
    counts = [len(group.loss) for group in groups]
    n = f"n = {counts[0]}{' each' if len(counts) > 1 else ''}" if len(set(counts)) == 1 else f"n = {', '.join(map(str, counts))}"
    if not groups[0].records:
        return f"Loss in {groups[0].recipe} ({n} points)"
    arms = " or ".join(name_of(group) for group in groups)
    return f"Loss after training in {arms}, {EVALUATED[loss_key]} ({n})"


def caption(groups, pairs, loss_key: str, ray: tuple[float, float] | None, others=()) -> str:
    """What the panels are, n and law of each group, the convention, then what each mark means; others: not drawn."""
    has_runs, surface, kind = bool(groups[0].records), any(map(is_surface, groups)), KIND[groups[0].convention]
    held = sorted({one.name for group in groups for one in group.held_out})
    parts, laws = [], [_law(group) for group in groups]
    if ray:
        low, high = (f"{ratio:.3g}" for ratio in ray)
        parts.append(f"One ray = one curve: at {low if low == high else f'{low} to {high}'} tokens per {kind}parameter in every "
                     f"{'run' if has_runs else 'point'}, the panels are one curve under three labels.")
    parts.append(SURFACE * surface + "With 95 % intervals, " * any("[" in law for law in laws) + "; ".join(laws) + ".")
    if any(law is not None and law.interval == "bootstrap" for law in map(_drawn, groups)):
        parts.append("In brackets: percentiles of a bootstrap; drawn bands: from its covariance.")
    parts += _reasons(groups)
    if others:
        parts.append("Not drawn, because their points are of fewer sizes or identify no such law: "
                     f"{', '.join(map(_count, others))}.")
    counted = f"params_{groups[0].convention}" + f" ({kind}parameters)" * bool(kind)
    parts.append(f"N = {counted}, D = tokens, C = flops_per_token × D.".replace(" = ", f"{GLUE}={GLUE}") if has_runs else
                 "N, D, C as the table counts them, C as 6 N D where it lacks one of the two.")
    if any(is_spread(group) and not is_surface(group) for group in groups):
        parts.append("Over tokens and parameters, lines join the points of one size, of one number of tokens per "
                     f"{kind}parameter (×).")
    if surface:
        flops = "by the runs' own FLOPs" if has_runs else f"C{GLUE}={GLUE}6{GLUE}N{GLUE}D"
        parts.append(f"Lines: lowest loss for a compute ({flops}), loss of one size, loss at one number of tokens per "
                     f"{kind}parameter (×).")
    if any(len(tokens) for group in groups for tokens, _ in group.curves):
        parts.append("Training loss is smoothed; thick: the lowest reached by each compute, from size (pale: small) to size.")
    if any(group.bands for group in groups):
        parts.append("Hatched: power law and rays with gamma fixed in 0.10 to 0.22.")
    if held:
        parts.append(f"Star: {' and '.join(held)}, in no fit (hollow: still to come)" + "; tick and bar: prediction frozen "
                     "before, 95 %" * any(one.prediction for group in groups for one in group.held_out)
                     + ("; arrow heads: the bar goes on beyond the axis." if is_cut(groups) else "."))
    if any(map(floor_of, groups)):
        parts.append("Reducible: what the law's term in that variable leaves of each loss; straight if the law holds.")
        if hidden := sum(int((~rest_of(group, axis)[1]).sum()) for group in groups if floor_of(group) for axis in group.x):
            parts.append(f"Left out of that row, too low for a log axis: {hidden}.")
    if pairs:
        parts.append("Gap: FP8 minus BF16 of paired runs; bars: one standard error of the evaluation, not of the run.")
    return " ".join(parts).replace(" × ", f"{GLUE}×{GLUE}").replace(" %", f"{GLUE}%")


def _reasons(groups) -> list[str]:
    """Why a group is headed by a power law, with the groups' names unless all have that reason."""
    names = {}
    for group in groups:
        if group.headline not in ("chinchilla", "ray"):
            names.setdefault(group.headline_reason, []).append(name_of(group))
    return [f"{reason[0].upper()}{reason[1:]}." if len(some) == len(groups) else f"{' and '.join(some)}: {reason}."
            for reason, some in names.items()]


def _drawn(group):
    """The law behind the line over compute, or over parameters where there is no compute; None where none is fitted."""
    return group.laws["chinchilla"] if is_surface(group) else group.lines.get("C" if "C" in group.x else "N")


def _law(group) -> str:
    """n of the group and the law that is drawn, with its intervals; spaces that must not be broken are GLUE."""
    count, law = f"{_count(group)}: ", _drawn(group)
    if law is None:
        return count + "no law can be fitted"
    p, ends = law.parameters, law.ci95 or {}
    shape = ""
    if not is_surface(group):
        factor, exponent = NAMES[law.form][-2:]
        shape = "L = " + (f"{number(p['E'])} + " if "E" in p else "") + (
            f"{number(p[factor])} {'C' if 'C' in group.x else 'N'}^{number(-p[exponent])}")
    named = [f"{GREEK.get(name, name)}{GLUE}" + (f"{number(p[name])}{GLUE}" if is_surface(group) else "")
             + f"[{number(ends[name][0])},{GLUE}{number(ends[name][1])}]" for name in NAMES[law.form] if name in ends]
    return count + ", ".join([shape.replace(" ", GLUE)] * bool(shape) + named)


def _count(group) -> str:
    n, own = len(group.loss), len(set(group.points.cluster.tolist()))
    return f"{name_of(group)} (n{GLUE}={GLUE}{n}" + (f" on {own} trajectories" if own < n and group.records else "") + ")"


def number(value: float) -> str:
    """Three digits without an e: 0.0291, 97.7, 2120, 3.28·10⁵."""
    mantissa, e, power = f"{value:.3g}".partition("e")
    if not e or -5 < int(power) < 5:
        return f"{float(f'{value:.3g}'):.6g}".replace("-", "−")
    return (mantissa + "·10" + str(int(power)).translate(SUPERSCRIPT)).replace("-", "−")


def name_of(group) -> str:
    """The recipe as the reader knows it, or the table's name."""
    if not group.records:
        return group.recipe if len(group.recipe) < 30 else f"{group.recipe[:14]}…{group.recipe[-14:]}"
    return "BF16" if group.recipe == "bf16" else f"FP8 {group.recipe}"


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
    from scaling import dynamics  # here, because they import this module
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        options = read_options(Options, words)
        draw_run = dynamics.draw_run if options.fp8 else dynamics.draw_history
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
