"""Draw what FP8 did inside a run: scales, underflow and saturation, kurtosis and what it costs each
matmul, outliers."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lib.plots import STYLES, counts_axis, settle, sheet, steps_axis, styled
from scaling.probes import (
    MATMULS,
    OPERANDS,
    SCALES,
    SHARES,
    ProbeRecord,
    depth_of,
    kinds_of,
    quantiles,
)

HOLLOW: dict[str, Any] = {
    "markersize": 4.4,
    "markerfacecolor": "none",
    "markeredgewidth": 0.6,
    "linestyle": "none",
}
INFERENCE_MARKERS = "sDo^v<>"
MOST_BLOCK_LABELS = 16


# ------------------------------------------------------------------------------------------ scales


@styled
def draw_scales(probe: ProbeRecord, inference: dict[str, ProbeRecord], name: str) -> Figure:
    """Scales over depth at the last probed step (top), over training (bottom), one column for each
    operand. inference: recipe -> probe of it."""
    caption = (
        f"Top: every Linear at step {probe.steps[probe.last]}, whiskers from its smallest to its"
        " largest scale. Bottom: median over Linears, bands 10 to 90 % and smallest to largest. A"
        " tensor is multiplied by its scale before FP8."
    )
    markers = dict(zip(inference, itertools.cycle(INFERENCE_MARKERS), strict=False))
    sources = [probe, *inference.values()]
    layers = list(dict.fromkeys(layer for source in sources for layer in source.layers))
    looks: dict[str, Any] = dict(zip(kinds_of(layers), itertools.cycle(STYLES), strict=False))
    title = (
        f"Scales of FP8 tensors in {name} ({probe.recipe}; n = {len(probe.layers)} Linears,"
        f" {len(probe.steps)} probed steps)"
    )
    handles = _scale_handles(looks, markers)
    figure, panels = sheet((7.4, 4.9), 2, 3, title, caption, handles, 8, sharey="col")
    blocks = {depth_of(layer)[0] for layer in layers}
    end = int(max(blocks - {math.inf}, default=-1)) + 1  # where the head is drawn
    for operand, top, bottom in zip(OPERANDS, *panels, strict=True):
        _draw_over_depth(top, probe, operand, looks, end)
        for recipe, marker in markers.items():
            _draw_inference(top, inference[recipe], operand, looks, end, marker)
        _draw_over_training(bottom, probe, operand)
        if not np.isfinite(probe.linear[operand, "scale"]).any():
            top.text(0.5, 0.5, "no scale: these stay in BF16", transform=top.transAxes, ha="center")
        _set_depth_axis(top, operand, end, has_head=math.inf in blocks)
    for panel in panels[:, 0]:
        panel.set_ylabel("log$_2$ of the scale")
    return settle(figure)


def _scale_handles(looks: dict[str, Any], markers: dict[str, str]) -> list[Line2D]:
    handles = []
    for kind, style in looks.items():
        marker_style = {"color": style["color"], "marker": style["marker"]}
        handles.append(Line2D([], [], **marker_style, markersize=2.4, label=kind))
    for recipe, marker in markers.items():
        label = f"inference, {recipe}"
        handles.append(Line2D([], [], color="#444444", marker=marker, label=label, **HOLLOW))
    return handles


def _scales(probe: ProbeRecord, operand: str) -> list[np.ndarray]:
    """log2 of the smallest, the whole tensor's and the largest scale, each (layers, steps)."""
    return [_log2(probe.linear[operand, key]) for key in SCALES]


def _depths(
    source: ProbeRecord, rows: np.ndarray, kind: str, looks: dict[str, Any], end: int
) -> list:
    """Where the layers of one kind stand over depth: kinds beside each other in their block."""
    shift = 0.14 * (list(looks).index(kind) - (len(looks) - 1) / 2)
    return [min(depth_of(source.layers[i])[0] + shift, end) for i in rows]


def _draw_over_depth(
    panel: Axes, probe: ProbeRecord, operand: str, looks: dict[str, Any], end: int
) -> None:
    last = probe.last
    low, middle, high = (scale[:, last] for scale in _scales(probe, operand))
    for kind, rows in kinds_of(probe.layers).items():
        x = _depths(probe, rows, kind, looks, end)
        color, marker = looks[kind]["color"], looks[kind]["marker"]
        panel.vlines(x, low[rows], high[rows], color=color, linewidth=0.7, alpha=0.7)
        panel.plot(x, middle[rows], f"{marker}-", color=color, markersize=2.4, linewidth=0.8)


def _draw_inference(
    panel: Axes, source: ProbeRecord, operand: str, looks: dict[str, Any], end: int, marker: str
) -> None:
    middle = _scales(source, operand)[1][:, source.last]
    for kind, rows in kinds_of(source.layers).items():
        x = _depths(source, rows, kind, looks, end)
        panel.plot(x, middle[rows], marker=marker, color=looks[kind]["color"], **HOLLOW)


def _draw_over_training(panel: Axes, probe: ProbeRecord, operand: str) -> None:
    low, middle, high = _scales(probe, operand)
    extremes = quantiles(low, 0)[0], quantiles(high, 100)[0]
    for band, alpha in ((extremes, 0.13), (quantiles(middle, 10, 90), 0.3)):
        panel.fill_between(probe.steps, *band, color="#444444", alpha=alpha, linewidth=0)
    style: dict[str, Any] = {"color": "#000000", "markersize": 2.5, "linewidth": 1}
    panel.plot(probe.steps, quantiles(middle, 50)[0], ".-", **style)
    steps_axis(panel)


def _set_depth_axis(panel: Axes, operand: str, end: int, has_head: bool) -> None:
    """end: where the head is drawn."""
    ticks = list(range(0, end, max(1, round(end / 5))))
    last = end - 0.4
    if has_head:
        ticks.append(end)
        last += 1
    panel.set(title=OPERANDS[operand], xlabel="block", xlim=(-0.6, last))
    panel.set_xticks(ticks, ["head" if tick == end else f"{tick}" for tick in ticks])


def _log2(values: np.ndarray) -> np.ndarray:
    return np.log2(np.where(values > 0, values, math.nan))


# ---------------------------------------------------------------------------------------- underflow


@styled
def draw_underflow(probe: ProbeRecord, name: str) -> Figure:
    """Share of values that FP8 loses at either end: heat maps, Linears in order of depth by
    step."""
    count = len(probe.layers)
    title = (
        f"Values that FP8 loses in {name} ({probe.recipe}; n = {count} Linears,"
        f" {len(probe.steps)} probed steps)"
    )
    caption = (
        f"A row per Linear; within a block from the top: {', '.join(kinds_of(probe.layers))}."
        " Underflow: not zero, rounded to zero. Saturated: beyond the largest value. Light grey:"
        " none at all, or not measured."
    )
    height = min(max(0.052 * count, 1.3), 3.4)
    size = (7.4, 2 * height + 1.3)
    figure, panels = sheet(size, 2, 3, title, caption, sharex=True, sharey=True)
    blocks = [depth_of(layer)[0] for layer in probe.layers]
    edges = np.flatnonzero(np.diff(blocks, prepend=-1))  # rows at which a block begins
    for share, line in zip(SHARES, panels, strict=True):
        _draw_shares(figure, line, probe, share, edges)
    _set_block_axis(panels[0, 0], blocks, edges)
    for panel in panels[1]:
        steps_axis(panel)
    return settle(figure)


def _draw_shares(
    figure: Figure, panels: np.ndarray, probe: ProbeRecord, share: str, edges: np.ndarray
) -> None:
    """One line of heat maps on one scale; panels: one of each operand."""
    percents = {operand: 100 * probe.linear[operand, share] for operand in OPERANDS}
    norm = _log_norm(np.concatenate([values[values > 0] for values in percents.values()]))
    middles = np.arange(len(probe.layers)) + 0.5
    style: dict[str, Any] = {"cmap": "viridis", "norm": norm, "shading": "nearest"}
    for panel, (operand, values) in zip(panels, percents.items(), strict=True):
        panel.grid(False)
        positive = np.ma.masked_where(~(values > 0), values)
        panel.pcolormesh(probe.steps, middles, positive, **style, rasterized=True)
        for edge in edges[1:]:
            panel.axhline(edge, color="white", linewidth=0.5)
        panel.set(facecolor="#DDDDDD", title=f"{OPERANDS[operand]}: {share}")
    label = f"{share} [% of values]"
    scale = ScalarMappable(norm, "viridis")
    figure.colorbar(scale, ax=panels, label=label, pad=0.01, aspect=30)
    panels[0].set_ylabel("block")


def _log_norm(positive: np.ndarray) -> LogNorm:
    """Whole decades, at least one and at most six."""
    high = math.ceil(math.log10(max(positive, default=1)))
    low = math.floor(math.log10(min(positive, default=1e-3)))
    low = min(max(low, high - 6), high - 1)
    return LogNorm(10.0**low, 10.0**high, clip=True)


def _set_block_axis(panel: Axes, blocks: Sequence[float], edges: np.ndarray) -> None:
    step = math.ceil(len(edges) / MOST_BLOCK_LABELS)
    labelled = edges[::step]
    middles, names = [], []
    for edge in labelled:
        block = blocks[edge]
        middles.append(edge + blocks.count(block) / 2)
        names.append("head" if block == math.inf else f"{block}")
    panel.set_yticks(middles, names)
    panel.set_ylim(len(blocks), 0)


# -------------------------------------------------------------------------------- kurtosis, matmuls


@styled
def draw_matmuls(probe: ProbeRecord, name: str) -> Figure:
    """Kurtosis of each operand (top) and the SQNR of each matmul's result (bottom) over training, a
    line for each kind of Linear."""
    title = (
        f"Kurtosis and matmuls' SQNR in {name} ({probe.recipe}; n = {len(probe.layers)} Linears,"
        f" {len(probe.steps)} probed steps)"
    )
    caption = (
        "Median over the Linears of a kind; band: smallest to largest. Kurtosis: mean of x^4 over"
        " the square of that of x^2, 3 (dotted) of normal values. SQNR: 10 log10(|y|^2 /"
        " |y in FP8 - y|^2), 6 dB a bit."
    )
    looks = dict(zip(kinds_of(probe.layers), itertools.cycle(STYLES), strict=False))
    handles = _scale_handles(looks, {})
    figure, panels = sheet((7.4, 4.4), 2, 3, title, caption, handles, 8, sharex=True, sharey="row")
    for operand, panel in zip(OPERANDS, panels[0], strict=True):
        panel.set_title(OPERANDS[operand])
        panel.axhline(3, color="#444444", linewidth=0.7, linestyle=":")
        _draw_kinds(panel, probe, probe.linear[operand, "kurtosis"], looks)
    for matmul, panel in zip(MATMULS, panels[1], strict=True):
        panel.set_title(MATMULS[matmul])
        _draw_kinds(panel, probe, probe.matmul[matmul], looks)
        steps_axis(panel)
    panels[0, 0].set_yscale("log")
    counts_axis(panels[0, 0].yaxis)
    panels[0, 0].set_ylabel("kurtosis")
    panels[1, 0].set_ylabel("SQNR [dB]")
    return settle(figure)


def has_matmuls(probe: ProbeRecord) -> bool:
    """Whether a probe has numbers for draw_matmuls(); those of older versions have none."""
    values = [probe.linear[operand, "kurtosis"] for operand in OPERANDS]
    return any(np.isfinite(v).any() for v in [*values, *probe.matmul.values()])


def _draw_kinds(panel: Axes, probe: ProbeRecord, values: np.ndarray, looks: dict[str, Any]) -> None:
    """values: (layers, steps)."""
    for kind, rows in kinds_of(probe.layers).items():
        low, middle, high = quantiles(values[rows], 0, 50, 100)
        color, marker = looks[kind]["color"], looks[kind]["marker"]
        panel.fill_between(probe.steps, low, high, color=color, alpha=0.13, linewidth=0)
        panel.plot(probe.steps, middle, f"{marker}-", color=color, markersize=2.4, linewidth=0.8)


# ----------------------------------------------------------------------------------------- outliers


@styled
def draw_outliers(probe: ProbeRecord, name: str) -> Figure:
    """Largest attention logit and SwiGLU outliers over training, a line for each block."""
    title = f"Outliers in {name} (n = {len(probe.blocks)} blocks, {len(probe.steps)} probed steps)"
    caption = "A line per block. SwiGLU: the product that enters mlp.down."
    figure, panels = sheet((7.4, 3.1), 1, 2, title, caption)
    rms = probe.block["swiglu_rms"]
    ratio = probe.block["swiglu_amax"] / np.where(rms > 0, rms, math.nan)
    norm = Normalize(0, (max(probe.blocks) + 1) / 0.82)
    logit_panel, ratio_panel = panels[0]
    _draw_blocks(logit_panel, probe, probe.block["attention_logit_max"], norm)
    logit_panel.set_ylabel("largest attention logit")
    _draw_blocks(ratio_panel, probe, ratio, norm)
    ratio_panel.set_ylabel("largest / rms of SwiGLU product")
    figure.colorbar(
        ScalarMappable(norm, "viridis"),
        ax=panels,
        label="block",
        pad=0.01,
        ticks=MaxNLocator(6, integer=True),
        boundaries=np.arange(max(probe.blocks) + 2) - 0.5,
    )
    return settle(figure)


def _draw_blocks(panel: Axes, probe: ProbeRecord, values: np.ndarray, norm: Normalize) -> None:
    """values: (blocks, steps)."""
    colours = matplotlib.colormaps["viridis"]
    for line, block in zip(values, probe.blocks, strict=True):
        style: dict[str, Any] = {"color": colours(norm(block)), "linewidth": 0.9, "markersize": 2}
        panel.plot(probe.steps, line, ".-", **style)
    smallest = np.fmin.reduce(values, axis=None)
    largest = np.fmax.reduce(values, axis=None)
    if smallest > 0 and largest > 20 * smallest:
        panel.set_yscale("log")
        counts_axis(panel.yaxis)
    steps_axis(panel)
