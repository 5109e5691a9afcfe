"""Draw a learning-rate sweep: loss against the peak rate for each size, beside the rates that the rule gives."""

import itertools
import math

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FixedFormatter, FixedLocator, LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from scaling.figures import RC, page
from scaling.pairs import human

# Okabe-Ito, as in the other figures; the first is BF16's blue.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v"))
RULE_STYLES = ("-", (0, (4, 2)), (0, (1, 2)))
ROOM = 1.4          # of the highest loss that is shown, for the legend
TOP = 0.08          # losses farther than 8 % above the lowest of their size leave the panel, marked at its edge


def draw_rates(found: dict, name: str):
    """The figure of learning_rate.analyse's result; `name` is the sweep's."""
    runs = sum(len(row["runs"]) for sweep in found["sweeps"] for row in sweep["rows"])
    caption = "Validation loss in BF16 above the lowest of its size; cross: diverged or unfinished; arrow: beyond the axis. "
    caption += ("Line: parabola through three rates, tick: its minimum, band: within 0.1 %. Right: optimum, bar: rates beside "
                "it; lines: rates by the rule, from the smallest size." if found["base"] else "No optimum is bracketed.")
    with matplotlib.rc_context(RC):
        figure, panels = page(2.9, 1, 2 if found["base"] else 1, f"Peak learning rate, {name} (n = {runs} runs)", caption,
                              top=0.3, left=0.085, wspace=0.26)
        top = 0.0
        for sweep, (color, marker) in zip(found["sweeps"], itertools.cycle(STYLES), strict=False):
            top = max(top, _draw_sweep(panels[0, 0], sweep, color, marker))
        panels[0, 0].set_xscale("log")
        panels[0, 0].set(xlabel="peak learning rate", ylabel="loss above the lowest [%]", ylim=(-0.06 * top, ROOM * top))
        _ticks(panels[0, 0].xaxis, {row["lr"]: f"{row['lr']:g}" for sweep in found["sweeps"] for row in sweep["rows"]})
        _draw_beyond(panels[0, 0], found["sweeps"], top)
        panels[0, 0].legend(frameon=False, loc="upper left")
        if found["base"]:
            _draw_rules(panels[0, 1], found)
        FigureCanvasAgg(figure).draw()          # ticks take these settings now, not savefig's
    return figure


def _draw_sweep(panel, sweep, color, marker) -> float:
    """Its points, its parabola; returns the highest loss that it wants on the axis, in per cent."""
    label = f"N = {human(sweep['N'])}, {human(sweep['tokens'])} tokens"
    rows = [row for row in sweep["rows"] if row["loss"] is not None]
    panel.plot([row["lr"] for row in rows], [row["percent"] for row in rows], linestyle="none", marker=marker, markersize=4.5,
               color=color, label=label, zorder=3)
    wanted = [row["percent"] for row in rows if row["percent"] < 100 * TOP]
    if best := sweep["optimum"]:
        lowest = min(row["loss"] for row in rows)
        x = np.geomspace(best["rates"][0] / 1.2, best["rates"][-1] * 1.2, 100)
        y = best["loss"] * np.exp(best["curvature"] * np.log(x / best["lr"]) ** 2)
        panel.plot(x, 100 * (y / lowest - 1), color=color, linewidth=1.2, zorder=2)
        panel.plot(best["lr"], 100 * (best["loss"] / lowest - 1), marker="|", markersize=11, color=color, zorder=4)
        panel.axvspan(*best["flat"], color=color, alpha=0.12, linewidth=0, zorder=0)
    return max([0.5, *wanted])


def _draw_beyond(panel, sweeps, top: float) -> None:
    """Rates without a point on the axis, at its upper edge."""
    for sweep, (color, _) in zip(sweeps, itertools.cycle(STYLES), strict=False):
        for row in sweep["rows"]:
            if row["loss"] is None or row["percent"] > top:
                panel.plot(row["lr"], 1.12 * top, marker="x" if row["loss"] is None else "^", color=color, markersize=5,
                           clip_on=False)


def _draw_rules(panel, found) -> None:
    sizes = np.array(sorted({row["N"] for row in found["rates"]} | {sweep["N"] for sweep in found["sweeps"]}), dtype=float)
    for (name, power), style in zip(found["rules"].items(), itertools.cycle(RULE_STYLES), strict=False):
        panel.plot(sizes, found["base"]["lr"] * (sizes / found["base"]["N"]) ** power, color="#444444", linestyle=style,
                   linewidth=1, label=f"$N^{{{power:g}}}$, {name}")
    longest = {sweep["N"]: (sweep, style) for sweep, style in zip(found["sweeps"], itertools.cycle(STYLES), strict=False)}
    for N, (sweep, (color, marker)) in longest.items():
        if best := sweep["optimum"]:
            low, high = best["bracket"]
            panel.errorbar(N, best["lr"], yerr=[[best["lr"] - low], [high - best["lr"]]], color=color, marker=marker,
                           markersize=4.5, capsize=2.5, elinewidth=1)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set(xlabel="non-embedding parameters N", ylabel="peak learning rate",
              xlim=(sizes[0] / 1.3, max(sizes[-1], math.sqrt(2) * sizes[0]) * 1.3))
    _ticks(panel.xaxis, {N: human(N) for N in sizes})
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    low, high = panel.get_ylim()
    panel.set_ylim(low, high * (high / low) ** 0.35)
    panel.legend(frameon=False, loc="upper right")


def _ticks(axis, labels: dict[float, str]) -> None:
    """Ticks at these values of a logarithmic axis, labels where they have room."""
    shown, span = [], math.log(max(labels) / min(labels)) or 1.0
    for value in sorted(labels):
        shown += [value] if not shown or math.log(value / shown[-1]) > 0.11 * span else []
    axis.set_major_locator(FixedLocator(shown))
    axis.set_major_formatter(FixedFormatter([labels[value] for value in shown]))
    axis.set_minor_locator(NullLocator())
