"""Draw what FP8 did to the tensors of one run: scales, underflow, outliers.

`draw_run` reads out/RUN/probe.jsonl, the inference probes in out/RUN/eval/ and, for the gap, the neighbours of RUN;
scaling/figures.py --fp8 is the command.
"""

import itertools
import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from runtime.cli import UserError
from scaling.figures import RC, human, page, render, steps_axis, write
from scaling.gap import draw_gap
from scaling.probes import KINDS, OPERANDS, SCALES, SHARES, Probe, kinds_of, place, quantiles, read_probe, table

# Okabe-Ito, one style for each of KINDS, then two for what else there may be.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#000000", "P"), ("#E69F00", "v"),
          ("#56B4E9", "<"))
HOLLOW = ("s", "D", "o", "^", "v", "<", ">")    # one marker for each inference recipe


def draw_run(run: Path, folder: Path | None = None) -> None:
    """Write the figures of one run into `folder` (run/figures by default), print the table and what was left out.

    Raises UserError where the run has no probe rows, where they are damaged, or where `folder` cannot be written."""
    folder = folder or run / "figures"
    if not any((run / name).is_file() for name in ("probe.jsonl", "probe.jsonl.gz")):
        what = "has no probe.jsonl" if run.is_dir() else "is no folder"
        raise UserError(f"{run} {what}: expected the folder of a run trained with probe.every=STEPS, such as "
                          "probe.every=100, which writes probe.jsonl")
    probe, notes = read_probe(run / "probe.jsonl")
    figures = {}
    with matplotlib.rc_context(RC):
        if probe.layers:
            inference = {}
            for path in sorted(run.glob("eval/probe_*.jsonl")):
                inference[path.stem.removeprefix("probe_")], more = read_probe(path)
                notes += more
            figures["fp8_scales"] = draw_scales(probe, inference, run.resolve().name)
            figures["fp8_underflow"] = draw_underflow(probe, run.resolve().name)
            figures["fp8_gap"], more = draw_gap(run)
            notes += more
        else:
            notes.append(f"{run} has probed no FP8 Linear (a BF16 run?): only fp8_outliers is drawn")
        figures["fp8_outliers"] = draw_outliers(probe, run.resolve().name) if probe.blocks else None
        if not probe.blocks:
            notes.append(f"{run}/probe.jsonl has no block row: fp8_outliers is not drawn")
        files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() if figure
                 for form in ("png", "svg")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write(folder / name, content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    print("\n".join([*notes, *(["", table(probe), ""] if probe.layers else []),
                     f"wrote {folder}/: {', '.join(files)}"]))


def draw_scales(probe: Probe, inference: dict[str, Probe], name: str) -> Figure:
    """Scales over depth at the last probed step (top), over training (bottom), one column for each operand."""
    caption = (f"Top: every Linear at step {probe.steps[probe.last]}; whiskers from the smallest to the largest scale of a "
               "tensor that has several. Bottom: median over Linears, dark band 10 to 90 %, pale band smallest to largest. "
               "A tensor is multiplied by its scale before it is rounded to FP8.")
    if inference:
        caption += " Hollow: the same run's inference, at its checkpoint's step."
    figure, panels = page(4.7, 2, 3, f"Scales of FP8 tensors in {name} ({probe.recipe}; n = {len(probe.layers)} Linears, "
                           f"{len(probe.steps)} probed steps)", caption, top=0.62, hspace=0.42, sharey="col")
    sources = [("", "", probe), *((f"inference, {recipe}", marker, rows) for (recipe, rows), marker
                                  in zip(inference.items(), itertools.cycle(HOLLOW), strict=False))]
    layers = list(dict.fromkeys(layer for *_, source in sources for layer in source.layers))
    kinds, blocks = list(kinds_of(layers)), {place(layer)[0] for layer in layers}
    style = dict(zip(kinds, itertools.cycle(STYLES), strict=False))
    style |= {kind: STYLES[KINDS.index(kind)] for kind in kinds if kind in KINDS}
    end = max(blocks - {math.inf}, default=-1) + 1      # where the head is drawn
    handles = {}
    for operand, top, bottom in zip(OPERANDS, *panels, strict=True):
        for label, marker, source in sources:
            hollow = {"markersize": 4.4, "markerfacecolor": "none", "markeredgewidth": 0.6}
            low, middle, high = (_log2(source.linear[operand, field][:, source.last]) for field in SCALES)
            for kind, rows in kinds_of(source.layers).items():
                shift = 0.14 * (kinds.index(kind) - (len(kinds) - 1) / 2)   # whiskers beside each other
                x = [block + shift if (block := place(source.layers[i])[0]) < math.inf else end for i in rows]
                colour, filled = style[kind]
                if label:
                    top.plot(x, middle[rows], marker, color=colour, **hollow)
                    continue
                top.vlines(x, low[rows], high[rows], color=colour, linewidth=0.7, alpha=0.7)
                handles[kind] = top.plot(x, middle[rows], f"{filled}-", color=colour, markersize=2.4, linewidth=0.8)[0]
            if label:
                handles[label] = bottom.plot(source.steps[[source.last]], quantiles(middle[:, None], 50)[0], marker,
                                             color="#444444", **hollow)[0]
        _over_training(bottom, probe.steps, *(_log2(probe.linear[operand, field]) for field in SCALES))
        if not np.isfinite(probe.linear[operand, "scale"]).any():
            top.text(0.5, 0.5, "no scale: these stay in BF16", transform=top.transAxes, ha="center")
        top.set(title=OPERANDS[operand], xlabel="block", xlim=(-0.6, end - 0.4 + (math.inf in blocks)))
        each = max(1, round(end / 5))
        ticks = [block for block in range(0, end, each) if math.inf not in blocks or end - block > 0.8 * each]
        top.set_xticks(ticks + [end] * (math.inf in blocks), list(map(str, ticks)) + ["head"] * (math.inf in blocks))
    for panel in panels[:, 0]:
        panel.set_ylabel("log$_2$ of the scale")
    figure.legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(0.07, 1 - 0.22 / figure.get_figheight()),
                  ncols=8, frameon=False, columnspacing=1.4, handlelength=1.6, borderpad=0, borderaxespad=0)
    return figure


def _over_training(panel, steps, low, middle, high):
    """Median over Linears (rows) at each step, a dark band from 10 to 90 %, a pale one over everything."""
    for band, alpha in (((quantiles(low, 0)[0], quantiles(high, 100)[0]), 0.13), (quantiles(middle, 10, 90), 0.3)):
        panel.fill_between(steps, *band, color="#444444", alpha=alpha, linewidth=0)
    panel.plot(steps, quantiles(middle, 50)[0], ".-", color="#000000", markersize=2.5, linewidth=1)
    steps_axis(panel)
    if np.ptp(panel.get_ylim()) < 2:        # constant scales
        panel.set_ylim(np.mean(panel.get_ylim()) + np.array([-1, 1]))
    panel.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def draw_underflow(probe: Probe, name: str) -> Figure:
    """Share of values that FP8 loses at either end: heat maps, Linears in order of depth by step."""
    n, blocks = len(probe.layers), [place(layer)[0] for layer in probe.layers]
    height = min(max(0.052 * n, 1.3), 3.4)      # inches of one panel
    kinds = ", ".join(kinds_of([layer for layer, block in zip(probe.layers, blocks, strict=True) if block < math.inf]))
    title = f"Values that FP8 loses in {name} ({probe.recipe}; n = {n} Linears, {len(probe.steps)} probed steps)"
    caption = (f"One row per Linear, block 0 on top; within a block from the top: {kinds}. Underflow: not zero, rounded to "
               "zero. Saturated: beyond the format's largest value. Light grey: none at all. White: not measured.")
    figure, panels = page(2 * height + 1.5, 2, 3, title, caption, right=0.875, hspace=0.42 / height, sharex="all", sharey="all")
    edges = (probe.steps[1:] + probe.steps[:-1]) / 2
    x = (np.concatenate([[2 * probe.steps[0] - edges[0]], edges, [2 * probe.steps[-1] - edges[-1]]]) if len(edges)
         else probe.steps[0] + np.array([-0.5, 0.5]))
    for share, line in zip(SHARES, panels, strict=True):
        values = {operand: 100 * probe.linear[operand, share] for operand in OPERANDS}
        found = np.concatenate([v[v > 0] for v in values.values()] or [[]])
        high = math.ceil(math.log10(found.max())) if len(found) else 0
        low = min(max(math.floor(math.log10(found.min())), high - 6), high - 1) if len(found) else -3
        norm = LogNorm(10.0**low, 10.0**high, clip=True)
        for panel, (operand, v) in zip(line, values.items(), strict=True):
            mesh = {"edgecolors": "none", "rasterized": True}
            panel.pcolormesh(x, np.arange(n + 1), np.ma.masked_where(~(v == 0), v), cmap=ListedColormap(["#DDDDDD"]), **mesh)
            panel.pcolormesh(x, np.arange(n + 1), np.ma.masked_where(~(v > 0), v), cmap="viridis", norm=norm, **mesh)
            for row in range(1, n):
                if blocks[row] != blocks[row - 1]:
                    panel.axhline(row, color="white", linewidth=0.5)
            if not np.isfinite(v).any():
                panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
            panel.set(title=f"{OPERANDS[operand]}: {share}")
        box = [panel.get_position() for panel in line]
        bar = figure.colorbar(ScalarMappable(norm, "viridis"), cax=figure.add_axes((0.89, box[0].y0, 0.014, box[0].height)))
        bar.set_label(f"{share} [% of values]")
        line[0].set_ylabel("block")
    first = {block: blocks.index(block) for block in blocks}
    each = math.ceil(len(first) * 0.125 / height)   # a label needs an eighth of an inch
    panels[0, 0].set_yticks([(start + start + blocks.count(block)) / 2 for block, start in first.items()],
                            ["head" if block == math.inf else f"{block}" if i % each == 0 else ""
                             for i, block in enumerate(first)])
    panels[0, 0].set_ylim(n, 0)
    for panel in panels.flat:
        panel.tick_params(axis="y", length=0)
    for panel in panels[1]:
        steps_axis(panel)
    return figure


def draw_outliers(probe: Probe, name: str) -> Figure:
    """Largest attention logit and SwiGLU outliers over training, a line for each block."""
    title = f"Outliers in {name} (n = {len(probe.blocks)} blocks, {len(probe.block_steps)} probed steps)"
    caption = ("A line per block, from dark (first) to light (last). Labelled: the first, the last, the one that ends "
               "highest. SwiGLU: the product that enters mlp.down.")
    figure, panels = page(3.1, 1, 2, title, caption, top=0.3, right=0.91, wspace=0.5)
    ratio = probe.block["swiglu_amax"] / np.where(probe.block["swiglu_rms"] > 0, probe.block["swiglu_rms"], math.nan)
    colours = [matplotlib.colormaps["viridis"](0.82 * i / max(len(probe.blocks) - 1, 1)) for i in range(len(probe.blocks))]
    for panel, values, label in zip(panels[0], (probe.block["attention_logit_max"], ratio), (
            "largest attention logit", "largest / rms of SwiGLU product"), strict=True):
        for line, colour in zip(values, colours, strict=True):
            panel.plot(probe.block_steps, line, ".-", color=colour, linewidth=0.9, markersize=2)
        known = values[np.isfinite(values)]
        if len(known) and known.min() > 0 and known.max() / known.min() > 20:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if known.max() < 1e3 * known.min() else (1,)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y)))
            panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_ylabel(label)
        steps_axis(panel)
        panel.autoscale_view()      # transData is of no use before
        ends = {i: line[np.isfinite(line)][-1] for i, line in enumerate(values) if np.isfinite(line).any()}
        labelled = sorted({min(ends), max(ends), max(ends, key=ends.get)} if ends else (), key=ends.get)
        heights = [panel.transAxes.inverted().transform(panel.transData.transform((probe.block_steps[-1], ends[i])))[1]
                   for i in labelled]
        for j in range(1, len(heights)):        # labels must not lie on each other
            heights[j] = max(heights[j], heights[j - 1] + 0.08)
        over = max(0, *heights, 1) - 1
        for i, y in zip(labelled, heights, strict=True):
            panel.text(1.02, y - over, f"block {probe.blocks[i]}", color=colours[i], transform=panel.transAxes, va="center",
                       fontsize=7)
    return figure


def _log2(values: np.ndarray) -> np.ndarray:
    return np.log2(np.where(values > 0, values, math.nan))
