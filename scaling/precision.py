"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/study               # every finished run under it; writes out/study/law/precision.*
    python scaling/precision.py out/a_bf16 out/a_fp8 out=report loss=as_trained margin=0.25
    python scaling/precision.py out/study --all         # prints every table, else as many as 40 lines hold

Prints each recipe's gap over all sizes with its verdict, which recipe is the best by the declared rule (pairs.rank), the gap
per size beside the null (BF16 against BF16 with another seed, and with the same one rounded differently), what the gap costs
in compute under two laws. Intervals are over independent pairs and hold for this validation set; each pair is in precision.json,
its standard error over validation sequences is evaluation noise alone.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import matplotlib
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from runtime.cli import UserError, command, grid, run_command, si
from scaling import pairs
from scaling.figures import RC, STYLES, as_json, counts_axis, settle, sheet, styles, write_with
from scaling.records import check_comparable, counted_as, law_folder, read_runs, usable

ARMS = {"bf16": "in BF16", "as_trained": "as trained"}
LINES = 40                  # that the console gets without --all
SHOWN = 5                   # warnings among them
BANDS = 2                   # recipes, at most, whose common gaps are drawn as bands: more cover each other
LAW_STYLES = (("#444444", "-"), ("#888888", (0, (5, 1))), ("#000000", "-."))
FARTHEST = 1.5e9            # parameters: the published laws are drawn up to the largest model of the study
MARGIN_LINE = {"color": "#000000", "linewidth": 0.8, "linestyle": (0, (4, 2))}


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[str, ...]          # a folder of runs such as out/study, or run folders
    out: str | None = None          # folder for precision.json, precision.png, precision.svg (default: PATH/law)
    loss: Literal["bf16", "as_trained"] = "bf16"    # which is judged; bf16: both arms evaluated through BF16 matmuls
    margin: float | None = None     # per cent of the loss that counts as equivalent (default: the study's; here: after the fact)
    n: Literal["total", "nonembed"] | None = None   # which parameters N counts (default: what study.json says, else total)
    all: bool = False               # print every table

    POSITIONAL: ClassVar = ("paths",)


# ------------------------------------------------------------------------------------------------------------ analysis

def analyse(records, found, arm: str, margin) -> dict:
    """What precision.json holds but notes and inputs, Estimates as they are; gaps in per cent of the BF16 loss. found: Pairs of
    `records`; arm: "bf16" or "as_trained", the evaluation that is judged; margin: a Margin or None."""
    laws, reason = pairs.surfaces([run for run in records if run.recipe == "bf16" and not run.repeat], f"loss_{arm}")
    nulls, found = ([p for p in found if p.is_null is is_null] for is_null in (True, False))
    sizes, common, cell_of = [], {}, lambda pair: (pair.fp8.N, pair.fp8.tokens, pair.fp8.recipe)
    for N, D, recipe in sorted(set(map(cell_of, found))):
        chosen = [p for p in found if cell_of(p) == (N, D, recipe)]
        nats, speed, run = pairs.over(chosen, lambda p: p.gap(arm).nats), pairs.throughput(chosen), chosen[0].fp8
        price = [pairs.costs(law, getattr(run, f"params_{law.counts}"), D, nats, **speed) for law in laws[N]]
        gaps = pairs.percents(chosen)
        sizes.append({**pairs.at(run), "recipe": recipe, "runs": [p.fp8.run_id for p in chosen], **gaps, "nats": nats,
                      "throughput": speed, "costs": price, **pairs.judged(chosen, gaps[arm], margin)})
    for recipe in sorted({p.fp8.recipe for p in found}):
        common[recipe] = _common([p for p in found if p.fp8.recipe == recipe], arm, margin)
    return {"conventions": {"N": f"params_{records[0].convention}"}, "loss": arm, "margin": margin,
            "null": pairs.measure(records, nulls, arm), "common": common,
            "ranking": pairs.rank(found, arm), "sizes": sizes,
            "laws": {law.name: law.source for some in laws.values() for law in some}, "no_own_law": reason,
            "pairs": [{"pair_id": p.bf16.pair_id, "bf16": p.bf16.run_id, "fp8": p.fp8.run_id, "recipe": p.fp8.recipe,
                       **pairs.at(p.fp8), "gap_bf16": p.in_bf16, "gap_as_trained": p.as_trained,
                       "tok_per_s_ratio": p.tok_per_s_ratio, "device": p.fp8.device} for p in found]}


def _common(chosen, arm: str, margin) -> dict:
    """One recipe's gap over all sizes: 100 delta of ln L_FP8 = ln L_BF16 + delta, its trends over size and tokens, verdict."""
    logs = {name: pairs.over(chosen, lambda p, name=name: p.log_percent(name)) for name in ARMS}
    is_established = logs[arm].se and abs(logs[arm].mean) > logs[arm].half
    effect = abs(logs[arm].mean) if is_established else margin and margin.percent
    grouped = pairs.trajectories(chosen)
    trend = pairs.fit_trend([np.exp(np.mean([math.log(chosen[i].fp8.N) for i in own])) for own in grouped],
                      [np.mean([chosen[i].gap(arm).percent for i in own]) for own in grouped], effect)
    return {**logs, "pairs": len(chosen), "sizes": len({p.fp8.N for p in chosen}), "trend": trend,
            "over_tokens": pairs.over_tokens(chosen, arm), **pairs.judged(chosen, logs[arm], margin)}


# -------------------------------------------------------------------------------------------------------------- tables

def tables(result: dict) -> list[str]:
    """Markdown of analyse's result, the headline first: common gap, ranking, gap per size beside the nulls, its cost."""
    if not result["pairs"]:
        return ["No BF16/FP8 pair among these runs: there is no gap to report.", _sizes(result)]
    return [_headline(result), *[_ranking(result)] * (len(result["common"]) > 1), _sizes(result), _costs(result)]


def _headline(result: dict) -> str:
    """A row per recipe with its verdict and what the design can see; the best recipe, the null, the margin."""
    arm, margin, pooled = result["loss"], result["margin"], result["null"]["pooled"]
    shown = f"±{margin.percent:g} %" if margin else "margin"
    rows = [["recipe", "gap [%]", "verdict", "independent pairs", "sizes", "per doubling of D [%]", "sees from [%]",
             f"pairs to see {shown}", f"to show within {shown}"]]
    for recipe, one in result["common"].items():
        plans = [one[f"pairs_to_{plan}_margin"] or pairs.OVER if margin and one[arm].se else "" for plan in ("see", "show")]
        rows.append([recipe, str(one[arm]), one["verdict"], f"{one[arm].n} of {one['pairs']}", f"{one['sizes']}",
                     str(one["over_tokens"] or ""), f"{one['smallest_seen']:.2g}" if one[arm].se else "", *map(str, plans)])
    text = [f"FP8 minus BF16, {ARMS[arm]}, in per cent of the loss, over all sizes, ± half a 95 % t-interval over independent "
            "pairs (branches of one trunk count once); per doubling of the training tokens D: its change at a size, over trunks "
            "(over seeds where runs are no branches); seen or shown: with a probability of 80 %."]
    text += [f"Best: {result['ranking']['reason']}"] * (len(rows) > 2)
    text += [f"Null: 95 % of the differences of two BF16 seeds lie within ±{pooled['band']:.2g} % ({pooled['runs']} runs, "
             f"degrees of freedom: {pooled['dof']})."] if pooled else []
    text.append(f"Margin ±{margin.percent:g} %: {margin.source}." if margin else "No margin was declared: no equivalence test.")
    return "\n".join([grid(rows), "", *text])


def _ranking(result: dict) -> str:
    """A row per recipe by the declared rule (pairs.rank)."""
    rows = [["recipe, lowest gap first", "gap [%]", "above the first [%]", "ties with it", "tok/s FP8/BF16", "Linears in FP8"]]
    for row in result["ranking"]["recipes"]:
        above, ratio = row["difference"], row["throughput"]["ratio"]
        rows.append([row["recipe"], str(row["gap"]), str(above or ""), "yes" if row["ties"] else "no",
                     f"{ratio:.3f}" if ratio else "no number", " to ".join(map(str, sorted(set(row["converted"]))))])
    left_out = [f"Not ranked: {one['recipe']} ({one['reason']})." for one in result["ranking"]["left_out"]]
    return "\n".join([grid(rows), "", "Pairs at the largest common budget of each size, the same sizes and seeds for all; a tie: "
                      "the interval of the difference holds 0, or there is none.", *left_out])


def _sizes(result: dict) -> str:
    """A row per size, tokens and recipe with its verdict, below both nulls of that size; then the trend over size."""
    null, rows = result["null"], []
    for row in null["sizes"]:
        rows.append((row, "bf16, two seeds", f"{row['runs']} runs", *[f"SD {row['sd_percent']:.3f}"] * 2, "null"))
    for row in null["same_seed"]["sizes"]:
        rows.append((row, "bf16, same seed", str(row["pairs"]), str(row["bf16"]), str(row["as_trained"]),
                     "no null: equal to the last bit" if row["equal"] == row["pairs"] else "null: rounded otherwise"))
    for row in result["sizes"]:
        rows.append((row, row["recipe"], str(row["bf16"].n), str(row["bf16"]), str(row["as_trained"]), row["verdict"]))
    rows.sort(key=lambda row: (row[0]["N"], row[0]["tokens"]))
    lines = [["N", "tokens", "recipe", "pairs", "gap in BF16 [%]", "gap as trained [%]", "verdict"]]
    lines += [[f"{at['N']:,}", f"{at['tokens']:,}", *cells] for at, *cells in rows]
    text = [f"N: {result['conventions']['N']}. Null: SD of the difference of two BF16 runs, of other seeds or of one seed "
            "rounded otherwise."]
    for name, pooled in (("Other seeds", null["pooled"]), ("Same seed", null["same_seed"]["pooled"])):
        if pooled:
            text.append(f"{name}, over all sizes: SD {pooled['sd_percent']:.3f} %, degrees of freedom: {pooled['dof']}; 95 % of "
                        f"the differences lie within ±{pooled['band']:.2g} %.")
    for recipe, one in result["common"].items():
        trend = one["trend"]
        text.append(f"Trend over size, {recipe}: " + (f"not estimable: {trend.reason}." if trend.reason else
                                                      f"{trend.slope:+.3g} ± {trend.half:.2g} % per decade of N."))
    return "\n".join([grid(lines), "", *text])


def _costs(result: dict) -> str:
    """A row per size, tokens, recipe and law: what the gap costs in compute and size."""
    lines = [["N", "tokens", "recipe", "law", "extra compute [%]", "N_eff/N", "speed-up"]]
    for row, cost in [(size, cost) for size in result["sizes"] for cost in size["costs"]]:
        extra, share, speed = ([cost[key], *cost[f"{key}_ci95"]] for key in ("extra_tokens", "effective_parameters", "speedup"))
        lines.append([si(row["N"]), si(row["tokens"]), row["recipe"], cost["law"],
                      _ends([r and 100 * (r - 1) for r in extra], "+.2f"), _ends(share, ".3f"), _ends(speed, ".3f")])
    text = ["Extra compute: by more tokens at this N. Speed-up: throughput ratio net of them. In brackets: 95 % interval.",
            "; ".join(f"{name}: {source}" for name, source in result["laws"].items()) + "."]
    text += [f"No law of our own: {result['no_own_law']}."] if result["no_own_law"] else []
    if min(row["params_total"] for row in result["sizes"]) < pairs.SMALLEST:
        text.append(f"Published laws rest on models of more than {si(pairs.SMALLEST)} parameters and on other tokens: so far "
                    "below, their numbers can be wrong by a factor of ten and more.")
    reasons = dict.fromkeys(cost["reason"] for row in result["sizes"] for cost in row["costs"] if cost["reason"])
    return "\n".join([grid(lines), "", *text, *(f"No number: {reason}." for reason in reasons)])


def _ends(values, form: str) -> str:
    """Value [low to high]; "?" for an end that the law cannot give."""
    value, *ends = ["?" if one is None else format(one, form) for one in values]
    return "none" if value == "?" else value if ends == ["?", "?"] else f"{value} [{ends[0]} to {ends[1]}]"


# ---------------------------------------------------------------------------------------------------------- its figure

def draw_precision(result: dict):
    """The figure of analyse's result, which holds at least one pair: gap [%] over size, then nats beside published laws."""
    arm, sizes, common, margin = result["loss"], result["sizes"], result["common"], result["margin"]
    ratio = float(np.exp(np.mean([math.log(row["tokens"] / row["params_total"]) for row in sizes])))
    looks = dict(zip(common, styles(["bf16", *common])[1:], strict=True))
    reach = _reach(result)
    nulls = [(one["band"], name, color) for one, name, color in (
        (result["null"]["pooled"], "null, other seed", "#DDDDDD"),
        (result["null"]["same_seed"]["pooled"], "null, same seed", "#B0B0B0")) if one]
    is_drawn = {name: band < 2.5 * reach for band, name, _ in nulls}       # a band far beyond the axis is named only
    handles = [Patch(color=color, linewidth=0, fill=is_drawn[name],
                     label=f"{name}, ±{band:.2g} %" + " (beyond the axis)" * (not is_drawn[name])) for band, name, color in nulls]
    if margin:
        handles.append(Line2D([], [], **MARGIN_LINE, label=f"margin, ±{margin.percent:g} %"
                              + ", after the fact" * (not margin.is_declared)))
    for recipe, look in looks.items():
        name = f"{recipe}: BF16 again" if common[recipe]["verdict"] == pairs.IDLE else recipe
        handles.append(Line2D([], [], color=look["color"], marker=look["marker"], markersize=4.5, linestyle="none", label=name))
    n, free = len(result["pairs"]), sum(one[arm].n for one in common.values())
    title = f"Loss minus that of BF16, evaluated {ARMS[arm]} (n = {n} pairs, {free} independent)"
    has_budgets = len({(row["N"], row["tokens"]) for row in sizes}) > len({row["N"] for row in sizes})
    caption = ("Bars: 95 % t-interval over independent pairs" + "; bands: of all sizes" * (len(common) <= BANDS)
               + ". Left, at each size further right: more tokens" * has_budgets
               + f". Right: published laws at {ratio:.3g} tokens per parameter, dotted beyond the sizes they were fitted to; "
               "triangle: upper end of a gap not above 0.")
    with matplotlib.rc_context(RC):
        figure, panels = sheet((7.4, 3.8), 1, 2, title, caption, handles, 4)
        left, right = panels[0]
        drawn = sorted(((band, color) for band, name, color in nulls if is_drawn[name]), reverse=True)     # the narrower on top
        for band, color in drawn:
            left.axhspan(-band, band, color=color, linewidth=0, zorder=0)
        for sign in (-1, 1) if margin else ():
            left.axhline(sign * margin.percent, **MARGIN_LINE, zorder=1)
        _draw_percent(left, result, looks)
        limit = max([reach, *(1.15 * band for band, _ in drawn)])
        left.set(ylim=(-limit, limit), ylabel="gap [%]",
                 xlabel=f"{pairs.KIND[result['conventions']['N'].removeprefix('params_')]}parameters N")
        _draw_nats(right, sizes, looks, ratio)
        return settle(figure)


def _reach(result: dict) -> float:
    """Half the height of the axis in per cent: what the gaps take; intervals of two pairs may leave it."""
    rows, margin = [row[result["loss"]] for row in result["sizes"]], result["margin"]
    reach = [abs(row.mean) for row in rows] + ([margin.percent] if margin else [])
    reach += [max(abs(row.low), abs(row.high)) for row in rows if row.half and row.n > 2]
    return 1.2 * max([*reach, 1e-3])


def _draw_percent(panel, result: dict, looks) -> None:
    """Each gap in per cent at its size; rows that share a size stand side by side, more tokens further right."""
    arm, sizes = result["loss"], result["sizes"]
    levels = sorted({row["N"] for row in sizes})
    room, place = min([0.9, *(0.6 * np.diff(np.log(levels)))]), []
    for N, some in itertools.groupby(row["N"] for row in sizes):
        n = len(list(some))
        place += [N * math.exp(room * ((i + 0.5) / n - 0.5)) for i in range(n)]
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.2, zorder=2.5)
    for recipe, look in looks.items():
        whole = result["common"][recipe][arm]
        if whole.half and len(looks) <= BANDS:
            panel.axhspan(whole.low, whole.high, color=look["color"], alpha=0.25, linewidth=0, zorder=2)
        rows = [(x, row[arm]) for x, row in zip(place, sizes, strict=True) if row["recipe"] == recipe]
        panel.errorbar([x for x, _ in rows], [found.mean for _, found in rows], yerr=[found.half or 0 for _, found in rows],
                       linestyle="none", color=look["color"], marker=look["marker"], markersize=4.5, capsize=2.5, elinewidth=1.1,
                       zorder=3)
    panel.set_xscale("log")
    panel.set_xlim(min(place) / 1.5, 1.5 * max(place))
    counts_axis(panel.xaxis)
    spacing, ticks = 0.08 * math.log(2.25 * max(place) / min(place)), []
    for N in levels:        # labels at the sizes themselves, where they have room
        ticks += [N] if not ticks or math.log(N / ticks[-1]) > spacing else []
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())


def _draw_nats(panel, sizes, looks, ratio: float) -> None:
    """Each gap at its total parameters, as the published laws count, whose lines stand beside."""
    panel.set_xscale("log")
    panel.set_yscale("log", nonpositive="clip")
    totals = [row["params_total"] for row in sizes]
    low, high = min(totals) / 2, max(1.5 * max(totals), 1.3 * FARTHEST)
    N, values = np.geomspace(low, high, 200), []
    for (name, law, fitted), (color, dash) in zip(pairs.PRECISION_LAWS, LAW_STYLES, strict=True):
        nats, inside = law(N, ratio * N), (fitted[0] <= N) & (fitted[1] >= N)
        panel.plot(N, nats, color=color, linestyle=(0, (1, 2)), linewidth=0.9, zorder=1)
        panel.plot(N[inside], nats[inside], color=color, linestyle=dash, linewidth=1.8, zorder=1, label=name)
        values += [nats.min(), nats.max()]
    for row in sizes:
        found, look = row["nats"], looks[row["recipe"]]
        if found.mean > 0:
            panel.errorbar(row["params_total"], found.mean, yerr=found.half or 0, color=look["color"], marker=look["marker"],
                           markersize=4.5, elinewidth=1.1, zorder=3)
            values.append(found.mean)
        elif found.high and found.high > 0:
            panel.plot(row["params_total"], found.high, color=look["color"], marker="v", markersize=4.5, markerfacecolor="none")
            values.append(found.high)
    panel.set(xlim=(low, high), ylim=(min(values) / 2.5, 12 * max(values)), xlabel="parameters N, all", ylabel="gap [nats/token]")
    counts_axis(panel.xaxis)
    panel.yaxis.set_major_locator(LogLocator(10, numticks=9))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.legend(loc="upper right", frameon=False, fontsize=7, borderaxespad=0, handlelength=2.8, labelspacing=0.25)


# ------------------------------------------------------------------------------------------------------------- command

def main(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    return command(__doc__, Options, arguments, _run)


def _run(options: Options) -> None:
    folder = law_folder(options.paths, options.out)
    records, notes = read_runs(options.paths)
    records, left_out = usable(counted_as(records, options.n))
    if not records:
        raise UserError("\n".join(["no run is left to compare", *left_out]))
    check_comparable(records)
    found, alone = pairs.pairs(records)
    notes += left_out + alone
    result = analyse(records, found, options.loss, pairs.read_margin(records, options.margin))
    inputs = [{"run_id": r.run_id, "recipe": r.recipe, "summary_sha256": r.summary_sha256} for r in records]
    wrote = write_with(folder, "precision", draw_precision(result) if result["pairs"] else None, {
        "precision.json": as_json({"format_version": 1, **result, "notes": notes, "inputs": inputs})})
    _print(tables(result), notes, wrote, options.all)


def _print(blocks: list[str], notes: list[str], wrote: str, is_all: bool) -> None:
    """The headline, warnings, tables; without is_all as many of them as LINES hold."""
    shown = notes if is_all or len(notes) <= SHOWN else [*notes[:SHOWN - 1], f"{len(notes) - SHOWN + 1} more in precision.json"]
    parts, blocks = [blocks[0], *["\n".join(f"WARNING: {note}" for note in shown)] * bool(shown)], blocks[1:]
    while blocks and (is_all or "\n\n".join([*parts, blocks[0]]).count("\n") + 5 <= LINES):
        parts.append(blocks.pop(0))
    parts += [f"{len(blocks)} more tables: --all"] * bool(blocks)
    print("\n\n".join([*parts, wrote]))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
