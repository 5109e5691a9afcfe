"""Draw the paired analysis of precision.py: gap against size, training curves of one pair."""

import itertools
import math
from dataclasses import replace

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from scaling.captions import KIND
from scaling.figures import RC, human, page
from scaling.gap import running_mean, window_of
from scaling.gap_tables import ARMS, freedom, name_of
from scaling.panels import styles
from scaling.published import PRECISION_LAWS
from scaling.records import read_curve

BF16_COLOR, FP8_COLOR = "#0072B2", "#D55E00"     # Okabe-Ito; BF16 is blue in every figure of this project
LAW_STYLES = (("#444444", "-"), ("#888888", (0, (5, 1))), ("#000000", "-."))
FARTHEST = 1.5e9            # parameters: the published laws are drawn up to the largest model of the study
BANDS = 2                   # recipes, at most, whose common gaps are drawn as bands: more cover each other
ASIDE = 0.05                # of N, at most: beside laws over N a point must stand at its N


# ------------------------------------------------------------------------------------------------- gap against size


def draw_precision(result: dict):
    """The figure of precision.analyse's result, which holds at least one pair: gap [%], then nats beside published laws."""
    arm, sizes, margin, pooled = result["loss"], result["sizes"], result["margin"], result["null"]["pooled"]
    counted, same = result["conventions"]["N"], result["null"]["same_seed"]
    recipes, n, free = list(result["common"]), len(result["pairs"]), sum(one[arm].n for one in result["common"].values())
    ratios = [row["tokens"] / row["params_total"] for row in sizes]     # as the published laws count
    ratio = float(np.exp(np.mean(np.log(ratios))))
    parts = [f"Both arms evaluated {ARMS[arm]}." if arm == "bf16" else "Each arm evaluated as it was trained.",
             "Bars: 95 % t-interval over independent pairs, none for one pair; those of two pairs may leave the axis."
             + " Coloured bands: the common gap's interval." * (len(recipes) <= BANDS)]
    different = len({row["N"] for row in sizes})
    if len({(row["N"], row["tokens"]) for row in sizes}) > different:
        parts.append("Left, at each size further right: more tokens per parameter.")
    limit, bands = _reach(sizes, arm, margin, [one for one in (pooled, same["pooled"]) if one])
    parts.append(f"{_shade('Grey', pooled, bands)}: null, 95 % of the differences of two BF16 runs with other seeds (n = "
                 f"{pooled['runs']} runs, {freedom(pooled['dof'])})." if pooled else
                 "No null band: no two BF16 seeds at one size.")
    if same["pooled"]:
        parts.append(f"{_shade('Darker grey', same['pooled'], bands)}: the same of one seed, rounded otherwise (n = "
                     f"{same['pooled']['pairs']} pair{'s' * (same['pooled']['pairs'] > 1)}, {freedom(same['pooled']['dof'])}).")
    elif same["equal"]:
        parts.append("No null of one seed: such runs are equal to the last bit here.")
    parts.append(f"Margin {'' if margin.is_declared else 'not '}declared before the runs." if margin else "No margin.")
    parts.append(f"Right: published laws at {ratio:.3g} tokens per parameter, dotted outside the sizes they were fitted to; "
                 "open triangle: upper end of the interval of a gap not above 0 (without interval: not shown). "
                 f"N = {counted}" + ", right params_total, which the laws count" * (counted != "params_total")
                 + (f", points within {100 * ASIDE:g} % of it." if different < len(sizes) else "."))
    with matplotlib.rc_context(RC):
        title = f"Loss of FP8 minus loss of BF16 against size (n = {n} pair{'s' * (n > 1)}{f', {free} independent' * (free < n)})"
        figure, panels = page(3.5, 1, 2, title, " ".join(parts), top=0.52, wspace=0.24)
        left, right = panels[0]
        place = _places(sizes)
        _draw_percent(left, sizes, place, arm, result["common"], margin, [
            (one, *look) for one, *look in ((pooled, "null", "#DDDDDD"), (same["pooled"], "null of one seed", "#B0B0B0"))
            if one in bands], limit)
        _draw_nats(right, sizes, _places(sizes, 2 * math.log1p(ASIDE), "params_total"), recipes, ratio)
        if counted != "params_total":
            left.set_xlabel(f"{KIND[counted.removeprefix('params_')]}parameters N")
            right.set_xlabel("parameters N, all")
        handles, names = left.get_legend_handles_labels()
        for one, name in ((pooled, "null"), (same["pooled"], "null of one seed")):
            if one and one not in bands:
                handles.append(Patch(fill=False, linewidth=0))
                names.append(f"{name}, ±{one['band']:.2g} % (beyond the axis)")
        _legend(figure, handles, names)
        FigureCanvasAgg(figure).draw()          # ticks take these settings now, not savefig's
    return figure


def _legend(figure, handles, names):
    """Above the panels, in as many columns as the page is wide; what rows it takes beyond one are taken from the panels."""
    height, renderer = figure.get_figheight(), FigureCanvasAgg(figure).get_renderer()
    for columns in range(min(6, len(names)), 0, -1):
        legend = figure.legend(handles, names, loc="upper left", bbox_to_anchor=(0.069, 1 - 0.25 / height), ncols=columns,
                               frameon=False, borderpad=0, borderaxespad=0, columnspacing=1.5)
        if legend.get_window_extent(renderer).width <= 0.92 * figure.bbox.width or columns == 1:
            break
        legend.remove()
    rows = -(-len(names) // columns)
    figure.subplots_adjust(top=1 - (0.52 + 0.17 * (rows - 1)) / height)


def _places(sizes, widest_room: float = 0.9, counts: str = "N") -> list[float]:
    """x of each row, sorted by N: its N, moved aside where several rows share it, by widest_room in ln N in all."""
    places, widest = [], np.diff(np.log(sorted({row[counts] for row in sizes})))
    room = min([widest_room, *(0.6 * widest)] if len(widest) else [widest_room, 0.6])
    for N, rows in itertools.groupby(row[counts] for row in sizes):
        n = len(list(rows))
        places += [N * math.exp(room * ((i + 0.5) / n - 0.5)) for i in range(n)]
    return places


def _reach(sizes, arm, margin, nulls) -> tuple[float, list]:
    """Half the height of the axis in per cent, and the nulls whose band it holds: one far beyond it would colour the whole
    panel, or flatten the gaps."""
    reach = [abs(row[arm].mean) for row in sizes] + ([margin.percent] if margin else [])
    reach += [max(abs(row[arm].low), abs(row[arm].high)) for row in sizes if row[arm].half and row[arm].n > 2]
    limit = 1.2 * max([*reach, 1e-3])
    fitting = [one for one in nulls if one["band"] < 2.5 * limit]
    return max([limit, *(1.15 * one["band"] for one in fitting)]), fitting


def _looks(recipes):
    """(recipe, (colour, marker)) of each, as in the loss figure."""
    looks = [(style["color"], style["marker"]) for style in styles(["bf16", *recipes])[1:]]
    return list(zip(recipes, looks, strict=True))


def _shade(name: str, null: dict, bands) -> str:
    return name if null in bands else "Not drawn, beyond the axis"


def _draw_percent(panel, sizes, place, arm, common, margin, bands, limit):
    for one, name, color in sorted(bands, key=lambda band: -band[0]["band"]):      # the narrower one on top
        panel.axhspan(-one["band"], one["band"], color=color, linewidth=0, zorder=0, label=f"{name}, ±{one['band']:.2g} %")
    if margin:
        for i, y in enumerate((-margin.percent, margin.percent)):
            panel.axhline(y, color="#000000", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1,
                          label=None if i else f"margin, ±{margin.percent:g} %")
    panel.axhline(0, color=BF16_COLOR, linewidth=1.2, zorder=2.5)
    for recipe, (color, marker) in _looks(common):
        if common[recipe][arm].half and len(common) <= BANDS:
            panel.axhspan(common[recipe][arm].low, common[recipe][arm].high, color=color, alpha=0.25, linewidth=0, zorder=2)
        rows = [(x, row[arm]) for x, row in zip(place, sizes, strict=True) if row["recipe"] == recipe]
        panel.errorbar([x for x, _ in rows], [found.mean for _, found in rows], yerr=[found.half or 0 for _, found in rows],
                       linestyle="none", color=color, marker=marker, markersize=4.5, capsize=2.5, elinewidth=1.1, zorder=3,
                       label=name_of(recipe, common[recipe]["converted"]))
    panel.set(ylim=(-limit, limit), ylabel="gap [%]")
    _size_axis(panel, min(place) / 1.5, 1.5 * max(place))
    # Labels at the sizes themselves, where they have room: the points stand beside them.
    spacing, ticks = 0.1 * math.log(2.25 * max(place) / min(place)), []
    for N in sorted({row["N"] for row in sizes}):
        ticks += [N] if not ticks or math.log(N / ticks[-1]) > spacing else []
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())


def _draw_nats(panel, sizes, place, recipes, ratio):
    shown, values = [], []
    for recipe, (color, marker) in _looks(recipes):
        for x, row in zip(place, sizes, strict=True):
            found = row["nats"]
            high = found.mean if found.high is None else found.high
            if row["recipe"] != recipe or high <= 0:
                continue
            above = found.mean > 0
            panel.plot(x, found.mean if above else high, marker=marker if above else "v", color=color, markersize=4.5,
                       markerfacecolor=color if above else "none", linestyle="none", zorder=3)
            if found.high is not None:
                panel.plot([x, x], [found.low if found.low > 0 else 1e-9, high], color=color, linewidth=1.1, zorder=2)
            shown += [found.mean if above else high, min(high, 10 * max(found.mean, high / 10))]
    low, high = min(place) / 2, max(1.5 * max(place), 1.3 * FARTHEST)
    for (name, law, fitted), (color, dash) in zip(PRECISION_LAWS, LAW_STYLES, strict=True):
        N = np.geomspace(low, high, 200)
        nats, inside = law(N, ratio * N), (fitted[0] <= N) & (fitted[1] >= N)
        panel.plot(N, nats, color=color, linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
        panel.plot(N[inside], nats[inside], color=color, linestyle=dash, linewidth=1.8, zorder=1, label=name)
        values += [nats.min(), nats.max()]
    panel.set_yscale("log")
    panel.set(ylim=(min(values + shown) / 2.5, 8 * max(values + shown)), ylabel="gap [nats/token]")
    panel.yaxis.set_major_locator(LogLocator(10, numticks=9))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.legend(loc="upper right", frameon=False, fontsize=7, borderaxespad=0, handlelength=2.8, labelspacing=0.25)
    _size_axis(panel, low, high)


def _size_axis(panel, low, high):
    panel.set_xscale("log")
    panel.set(xlim=(low, high), xlabel="parameters N")
    panel.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if math.log10(high / low) < 2.5 else (1,), numticks=12))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(True, color="#EEEEEE", linewidth=0.5)
    panel.set_axisbelow(True)


# ---------------------------------------------------------------------------------------------- one pair's training


def draw_pair(pair):
    """Smoothed training loss of both arms of a precision.Pair over tokens, their difference below; or None with a note."""
    curves = [dict(zip(*_whole_curve(record), strict=True)) for record in (pair.bf16, pair.fp8)]
    tokens = np.array(sorted(curves[0].keys() & curves[1].keys()))
    if len(tokens) < 2:
        return None, [f"pair.png is not drawn: {pair.fp8.run_id} and {pair.bf16.run_id} have no training step in common in "
                      "metrics.jsonl"]
    loss = [np.array([curve[t] for t in tokens]) for curve in curves]
    gap, window = loss[1] - loss[0], window_of(tokens)
    late = tokens >= 0.05 * tokens[-1]
    caption = (f"Lines: mean over {window} step{'s' * (window > 1)}; faint: single steps. Same data in the same order, so the "
               "batches' own difficulty cancels below. Diamonds: validation at the end, in BF16 (filled), as trained (hollow). "
               "One pair says nothing of another seed. The first 5 % of the steps may leave the axes.")
    with matplotlib.rc_context(RC):
        title = f"Training loss of {human(pair.fp8.params_total)} parameters in BF16 and FP8 {pair.fp8.recipe} (n = 1 pair)"
        figure, panels = page(3.6, 2, 1, title, caption, top=0.3, left=0.11, hspace=0.12,
                              sharex=True, gridspec_kw={"height_ratios": (1.5, 1)})
        top, below = panels[:, 0]
        for values, color, width, dash, name in ((loss[0], BF16_COLOR, 2.4, "-", f"BF16: {pair.bf16.run_id}"),
                                                 (loss[1], FP8_COLOR, 1.1, (0, (3.2, 1.6)), f"FP8: {pair.fp8.run_id}")):
            top.plot(tokens, running_mean(values), color=color, linewidth=width, linestyle=dash, label=name)
        smooth = [running_mean(values)[late] for values in loss]
        low, high = min(map(np.min, smooth)), max(map(np.max, smooth))
        top.set(ylim=(low - 0.08 * (high - low), high + 0.08 * (high - low)), ylabel="training loss\n[nats/token]")
        top.legend(loc="upper right", frameon=False)
        below.axhline(0, color="#444444", linewidth=0.8)
        below.plot(tokens, gap, color=FP8_COLOR, alpha=0.25, linewidth=0.5)
        below.plot(tokens, running_mean(gap), color=FP8_COLOR, linewidth=1.4)
        ends = [pair.in_bf16.nats, pair.as_trained.nats]
        for nats, face in zip(ends, (BF16_COLOR, "none"), strict=True):
            below.plot(tokens[-1], nats, "D", color=BF16_COLOR, markerfacecolor=face, markersize=4.5, clip_on=False, zorder=4)
        limit = 1.3 * max(np.abs(running_mean(gap)[late]).max(), *map(abs, ends), 1e-9)
        below.set(ylim=(-limit, limit), ylabel="FP8 − BF16\n[nats/token]", xlabel="training tokens")
        below.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
        below.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x) if x > 0 else "0"))
        for panel in (top, below):
            panel.grid(True, color="#EEEEEE", linewidth=0.5)
            panel.set_axisbelow(True)
        figure.align_ylabels()
        FigureCanvasAgg(figure).draw()
    return figure, []


def _whole_curve(record):
    """read_curve, before a branch's first step continued by the run that it branched off, where that lies beside it."""
    tokens, loss = read_curve(record)
    if record.parent_run is None or not len(tokens):
        return tokens, loss
    earlier, height = read_curve(replace(record, folder=record.folder.parent / record.parent_run, parent_run=None))
    before = earlier < tokens[0]
    return np.concatenate([earlier[before], tokens]), np.concatenate([height[before], loss])
