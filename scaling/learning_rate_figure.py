"""Draw the losses of a sweep of learning rates."""

import itertools

import numpy as np
from matplotlib.figure import Figure

from lib.plots import STYLES, counts_axis, sheet, styled
from lib.text import si
from scaling.rate_sweep import RateResult

TOP = 8.0  # losses farther than 8 % above the lowest of their size leave the panel


@styled
def draw(result: RateResult, name: str) -> Figure:
    """The losses of each size over the rate; name: the sweep's."""
    runs = sum(len(row.runs) for sweep in result.sweeps for row in sweep.rows)
    figure, ((panel,),) = sheet(
        (7.4, 3.4),
        1,
        1,
        f"Peak learning rate, {name} (n = {runs} runs)",
        "Band: within 0.1 % of the optimum. Cross: diverged or unfinished.",
    )
    panel.set(xscale="log", xlabel="peak learning rate", ylabel="loss above the lowest [%]")
    for sweep, style in zip(result.sweeps, itertools.cycle(STYLES), strict=False):
        color = style["color"]
        rates = [row.lr for row in sweep.rows]
        percents = np.array([row.percent for row in sweep.rows], dtype=float)
        label = f"N = {si(sweep.N)}, {si(sweep.tokens)} tokens"
        panel.plot(rates, percents, color=color, marker=style["marker"], label=label)
        lost = [row.lr for row in sweep.rows if not row.loss]
        heights = [0.95 for _ in lost]
        panel.plot(lost, heights, "x", color=color, transform=panel.get_xaxis_transform())
        if sweep.optimum is not None:
            panel.axvspan(*sweep.optimum.flat, color=color, alpha=0.12, linewidth=0)
    panel.set_ylim(-0.1, min(TOP, panel.get_ylim()[1]))
    counts_axis(panel.xaxis)
    panel.legend(frameon=False)
    return figure
