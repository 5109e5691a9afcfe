"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/study               # every finished run under it; writes out/study/law/precision.*
    python scaling/precision.py out/a_bf16 out/a_fp8 out=report loss=as_trained margin=0.25
    python scaling/precision.py out/study --all         # prints every table, else as many as 40 lines hold
    python scaling/precision.py --report out/a_bf16 out/a_fp8   # of one training: losses, time, memory, speed (report.py)

Prints each recipe's gap over all sizes with its verdict, which recipe is the best by the declared rule (pairs.rank), the gap
per size beside the null (BF16 against BF16 with another seed, and with the same one rounded differently), what the gap costs
in compute under two laws, then each pair. A single pair's standard error is over validation sequences: evaluation noise
alone. Intervals are over independent pairs and hold for this validation set.
"""

import itertools
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

import matplotlib
import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from runtime.cli import UserError, field_lines, read_options, run_command
from scaling.dynamics import draw_pair
from scaling.figures import RC, STYLES, counts_axis, render, settle, sheet, styles, write_files
from scaling.pairs import (
    KIND,
    MOST,
    PRECISION_LAWS,
    SMALLEST,
    at,
    clusters,
    costs,
    fit_trend,
    freedom,
    gap_of,
    human,
    judged,
    measure,
    n_converted,
    null_pairs,
    over,
    pairs,
    percents,
    rank,
    read_margin,
    surfaces,
    throughput,
)
from scaling.records import LAW_FOLDER, check_comparable, counted_as, read_runs, usable

ARMS = {"bf16": "in BF16", "as_trained": "as trained"}
LINES = 40                  # that the console gets without --all
SHOWN = 5                   # warnings among them
FEW = 16                    # pairs that the tables list one by one
SAME_BUDGET = 1.15          # ratios of tokens to parameters that differ by less are one budget, rounded to whole steps
OVER = f"more than {MOST:,}"
BANDS = 2                   # recipes, at most, whose common gaps are drawn as bands: more cover each other
LAW_STYLES = (("#444444", "-"), ("#888888", (0, (5, 1))), ("#000000", "-."))
FARTHEST = 1.5e9            # parameters: the published laws are drawn up to the largest model of the study


@dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[str, ...]          # a folder of runs such as out/study, or run folders
    out: str | None = None          # folder for precision.json, precision.png, pair.png, their .svg (default: PATH/law)
    loss: Literal["bf16", "as_trained"] = "bf16"    # which is judged; bf16: both arms evaluated through BF16 matmuls
    margin: float | None = None     # per cent of the loss that counts as equivalent (default: the study's; here: after the fact)
    n: Literal["total", "nonembed"] | None = None   # which parameters N counts (default: what study.json says, else total)
    all: bool = False               # print every table

    POSITIONAL: ClassVar = ("paths",)


# ------------------------------------------------------------------------------------------------------------ analysis

def analyse(records, found, arm: str, margin) -> dict:
    """Everything that precision.json holds but notes and inputs, Estimates as they are; gaps in per cent of the BF16 loss.

    found: Pairs of `records`; arm: "bf16" or "as_trained", the evaluation that is judged; margin: a Margin or None."""
    laws, sources, reason = surfaces([run for run in records if run.recipe == "bf16" and not run.repeat], f"loss_{arm}")
    sizes, common, first = [], {}, lambda pair: (pair.fp8.N, pair.fp8.tokens, pair.fp8.recipe)
    for N, D, recipe in sorted({first(p) for p in found}):
        chosen = [p for p in found if first(p) == (N, D, recipe)]
        nats, tput, run = over(chosen, lambda p: gap_of(p, arm).nats), throughput(chosen), chosen[0].fp8
        sizes.append({**at(run), "recipe": recipe, "runs": [p.fp8.run_id for p in chosen], **percents(chosen), "nats": nats,
                      "throughput": tput, "costs": [costs(law, law.N_of(run), D, nats, **tput) for law in laws[N]]})
        sizes[-1] |= _judged(chosen, sizes[-1][arm], margin)
    for recipe in sorted({p.fp8.recipe for p in found}):
        common[recipe] = _common([p for p in found if p.fp8.recipe == recipe], arm, margin)
    return {"conventions": {"N": f"params_{records[0].convention}"}, "loss": arm, "margin": margin,
            "null": measure(records, null_pairs(records)[0], arm), "common": common, "ranking": rank(found, arm), "sizes": sizes,
            "laws": sources, "no_own_law": reason,
            "pairs": [{"pair_id": p.bf16.pair_id, "bf16": p.bf16.run_id, "fp8": p.fp8.run_id, "recipe": p.fp8.recipe,
                       **at(p.fp8), "gap_bf16": p.in_bf16, "gap_as_trained": p.as_trained,
                       "tok_per_s_ratio": p.tok_per_s_ratio, "device": p.fp8.device,
                       "extra_tokens": {law.name: law.extra_tokens(gap_of(p, arm).nats, p.fp8.tokens) for law in laws[p.fp8.N]}}
                      for p in found]}


def _common(chosen, arm: str, margin) -> dict:
    """One recipe's gap over all sizes: 100 delta of ln L_FP8 = ln L_BF16 + delta, its trend over size, its verdict."""
    logs = {name: over(chosen, lambda p, name=name: 100 * math.log1p(gap_of(p, name).percent / 100)) for name in ARMS}
    grouped = clusters([{p.bf16.trunk, p.fp8.trunk} for p in chosen])
    effect = logs[arm].mean if logs[arm].se and abs(logs[arm].mean) > logs[arm].half else margin and margin.percent
    trend = fit_trend([np.exp(np.mean([math.log(chosen[i].fp8.N) for i in own])) for own in grouped],
                      [np.mean([gap_of(chosen[i], arm).percent for i in own]) for own in grouped], effect and abs(effect))
    return {**logs, "pairs": len(chosen), "sizes": len({p.fp8.N for p in chosen}), "trend": trend,
            **_judged(chosen, logs[arm], margin)}


def _judged(chosen, found, margin) -> dict:
    """pairs.judged, but no verdict on FP8 where nothing was FP8."""
    said = judged(found, margin) | {"converted": n_converted(chosen)}
    return said | {"verdict": "BF16 again: no Linear converted"} if said["converted"] == [0, 0] else said


# -------------------------------------------------------------------------------------------------------------- tables

def headline(result: dict) -> str:
    """A line per recipe with its verdict, the best recipe, the null beside which they stand."""
    if not result["pairs"]:
        return "No BF16/FP8 pair among these runs: there is no gap to report."
    arm, pooled = result["loss"], result["null"]["pooled"]
    lines = [f"FP8 minus BF16, {ARMS[arm]}, in per cent of the loss, ± half a 95 % t-interval over independent pairs"]
    wide = max(map(len, result["common"]))
    for recipe, one in result["common"].items():
        lines.append(f"  {recipe:{wide}}  {_shown(one[arm])} %  {one['verdict']}  ({one[arm].n} independent of {one['pairs']} "
                     f"pair{'s' * (one['pairs'] > 1)}, {one['sizes']} size{'s' * (one['sizes'] > 1)})")
    if len(result["common"]) > 1:
        lines.append(f"Best: {result['ranking']['reason']}")
    if pooled:
        lines.append(f"Null: 95 % of the differences of two BF16 seeds lie within ±{pooled['band']:.2g} % "
                     f"({pooled['runs']} runs, {freedom(pooled['dof'])})")
    return "\n".join(lines)


def tables(result: dict) -> str:
    """Markdown of analyse's result: common gap, ranking, gap per size beside the null, its cost, each pair."""
    return "\n\n".join(_tables(result))


def _tables(result: dict) -> list[str]:
    blocks = [_common_table(result)]
    if len(result["common"]) > 1 or result["ranking"]["left_out"]:
        blocks.append(_ranking_table(result))
    if result["sizes"] or result["null"]["sizes"] or result["null"]["same_seed"]["sizes"]:
        blocks += [_grid(result), _size_table(result)]
    if result["pairs"]:
        blocks += [_cost_table(result), _pair_table(result) if len(result["pairs"]) <= FEW else "Each pair is in precision.json."]
    return [block for block in blocks if block]


def _markdown(head: str, rows: list[str]) -> list[str]:
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def _common_table(result: dict) -> str:
    """A row per recipe: the gap over all sizes, what the design can see; below it the trend over size."""
    margin = result["margin"]
    if not result["pairs"]:
        return ""
    shown, rows, trends = f"±{margin.percent:g} %" if margin else "margin", [], []
    for recipe, one in result["common"].items():
        found, trend = one[result["loss"]], one["trend"]
        seen = "" if one["smallest_seen"] is None else f"{one['smallest_seen']:.2g}"
        plans = [(one[key] or OVER) if margin and found.sd else "" for key in ("pairs_to_see_margin", "pairs_to_show_margin")]
        rows.append(f"| {recipe} | {_shown(found)} | {found.n} of {one['pairs']} | {one['sizes']} | {one['verdict']} | {seen} | "
                    f"{plans[0]} | {plans[1]} |")
        trends.append(f"Trend over size (not the form declared), {recipe}: " + (
            f"{trend.slope:+.3g} ± {trend.half:.2g} % per decade of N." if trend.reason is None else
            f"not estimable: {trend.reason}" + ("." if trend.half is None or trend.needed is None and "rival" not in trend.reason
                                                else f"; it would take {trend.needed or OVER} pairs at each size.")))
    text = ("Common gap: 100 δ of ln L_FP8 = ln L_BF16 + δ over all sizes, ± half a 95 % t-interval over independent pairs "
            "(branches of one trunk count once). Sees gaps, pairs to see and to show: with 80 % probability at the spread found; "
            "to show: if the true gap is 0. "
            + (f"Margin ±{margin.percent:g} %: {margin.source}." if margin else "No margin was declared: no equivalence test."))
    head = (f"| recipe | common gap {ARMS[result['loss']]} [%] | independent pairs | sizes | verdict | sees gaps from [%] "
            f"| pairs to see {shown} | pairs to show within {shown} |")
    return "\n".join([*_markdown(head, rows), "", text, *trends])


def _ranking_table(result: dict) -> str:
    """A row per recipe by the declared rule (pairs.rank), then which one is the best and why."""
    found, rows, text = result["ranking"], [], []
    for row in found["recipes"]:
        above, ratio, (fewest, most) = row["difference"], row["throughput"]["ratio"], row["converted"]
        rows.append(f"| {row['recipe']} | {_shown(row['gap'])} | {_shown(above) if above else ''} | "
                    f"{'yes' if row['ties'] else 'no'} | {f'{ratio:.3f}' if ratio else 'no number'} | "
                    f"{fewest}{f' to {most}' * (most > fewest)} |")
    if rows:
        text = ["Pairs at the largest budget of each size, the same sizes and seeds for all; a tie: the interval of the "
                "difference holds 0, or there is none. With a few pairs almost any recipe ties, and speed decides where it "
                "means something."]
    text += [found["reason"]] + [f"Not ranked: {one['recipe']} ({one['reason']})." for one in found["left_out"]]
    head = (f"| recipe, lowest gap first | gap {ARMS[result['loss']]} [%] | above the first [%] | ties with it | tok/s FP8/BF16 "
            "| Linears in FP8 |")
    return "\n".join([*_markdown(head, rows), ""] * bool(rows) + [" ".join(text)])


def _grid(result: dict) -> str:
    """The judged gap at a glance: a row per size and recipe, a column per budget; "" for more than six budgets."""
    null, arm = result["null"], result["loss"]
    rows = [("BF16, two seeds: SD", row, f"{row['sd_percent']:.3f}", row["runs"]) for row in null["sizes"]]
    rows += [("BF16, same seed", row, _shown(row[arm]), row[arm].n) for row in null["same_seed"]["sizes"]]
    rows += [(name_of(row["recipe"], row["converted"]), row, _shown(row[arm]), row[arm].n) for row in result["sizes"]]
    columns = []                        # tokens per parameter that count as one budget
    for ratio in sorted(row["tokens_per_param"] for _, row, *_ in rows):
        if not columns or ratio > SAME_BUDGET * columns[-1][0]:
            columns.append([])
        columns[-1].append(ratio)
    if len(columns) > 6:
        return ""
    lines, labels = {}, list(dict.fromkeys(label for label, *_ in rows))        # (N, label) -> pairs or runs, its cells
    for label, row, cell, n in rows:
        line = lines.setdefault((row["N"], labels.index(label)), [0, *[""] * len(columns)])
        line[0] = max(line[0], n)
        place = 1 + next(i for i, own in enumerate(columns) if row["tokens_per_param"] <= own[-1])
        line[place] = f"{line[place]}, {cell}" if line[place] else cell
    heads = [f"at {sum(own) / len(own):.2g}" for own in columns]
    head = f"| size N | | pairs or seeds | {heads[0]} tokens per parameter [%] |" + "".join(f" {one} |" for one in heads[1:])
    return "\n".join(_markdown(head, [f"| {human(N)} | {labels[i]} | {' | '.join(map(str, cells))} |"
                                      for (N, i), cells in sorted(lines.items())]))


def _size_table(result: dict) -> str:
    """A row per size, tokens and recipe with its verdict, below both nulls of that size."""
    rows, null, by_size = [], result["null"], {}
    two, same = ({(row["N"], row["tokens"]): row for row in some} for some in (null["sizes"], null["same_seed"]["sizes"]))
    for row in result["sizes"]:
        by_size.setdefault((row["N"], row["tokens"]), []).append(row)
    for size in sorted({*two, *same, *by_size}):
        head = f"| {size[0]:,} | {size[1]:,} |"
        if row := two.get(size):
            sd = f"SD {row['sd_percent']:.3f}"
            rows.append(f"{head} bf16, two seeds | {row['runs']} runs | {sd} | {sd} | null, {freedom(row['dof'])} |")
        else:
            rows.append(f"{head} bf16 | 1 run | | | no null: one BF16 seed |")
        if row := same.get(size):
            equal = sum(one["nats"] == 0 for one in row["differences"])
            rows.append(f"{head} bf16, same seed | {row['pairs']} | {_shown(row['bf16'])} | {_shown(row['as_trained'])} | " + (
                "no null: equal to the last bit" if equal == row["pairs"] else "null: rounded otherwise") + " |")
        rows += [f"{head} {row['recipe']} | {row['bf16'].n} | {_shown(row['bf16'])} | {_shown(row['as_trained'])} | "
                 f"{row['verdict']} |" for row in by_size.get(size, ())]
    text = [f"N: {result['conventions']['N']}. Gap: FP8 minus BF16 of runs that share seed and data order, ± half a 95 % "
            "t-interval over independent pairs; each row is a 5 % test of its own. Null: SD of the difference of two BF16 runs "
            "with other seeds, k - 1 degrees of freedom from k runs."]
    if pooled := null["pooled"]:
        text.append(f"Pooled over sizes: SD {pooled['sd_percent']:.3f} %, {freedom(pooled['dof'])}; 95 % of such differences lie "
                    f"within ±{pooled['band']:.2f} %.")
    if pooled := null["same_seed"]["pooled"]:
        text.append(f"Same seed: BF16 once more, minus BF16, rounded otherwise; SD around 0 over {pooled['pairs']} "
                    f"pair{'s' * (pooled['pairs'] > 1)} {pooled['sd_percent']:.3f} %, {freedom(pooled['dof'])}; 95 % of such "
                    f"differences lie within ±{pooled['band']:.2g} %.")
    if equal := null["same_seed"]["equal"]:
        text.append(f"Pairs of BF16 with BF16 of the same seed that are equal to the last bit, and so no null: {equal}.")
    head = "| N | tokens | recipe | pairs | gap in BF16 [%] | gap as trained [%] | verdict |"
    return "\n".join([*_markdown(head, rows), "", " ".join(text)])


def _cost_table(result: dict) -> str:
    """A row per size, tokens and recipe: what the gap costs in compute and size, under each law."""
    laws, rows = result["laws"], []
    for row in result["sizes"]:
        cells, found = [human(row["N"]), human(row["tokens"]), row["recipe"]], {cost["law"]: cost for cost in row["costs"]}
        for cost in map(found.get, laws):
            if cost is None:
                cells += ["none"] * 3
                continue
            extra, share, speed = ([cost[key], *cost[f"{key}_ci95"]]
                                   for key in ("extra_tokens", "effective_parameters", "speedup"))
            extra = [None if r is None else 100 * (r - 1) for r in extra]
            cells += [_ends(extra, "+.2f"), _ends(share, ".3f"), _ends(speed, ".3f")]
        rows.append(f"| {' | '.join(cells)} |")
    text = ["Extra compute: by more tokens at this N. Speed-up: throughput ratio net of them. In brackets: 95 % interval from "
            "the gap's, for the speed-up also from throughput and our law's slope.",
            "; ".join(f"{name}: {source}" for name, source in laws.items()) + "."]
    if result["no_own_law"]:
        text.append(f"No law of our own: {result['no_own_law']}.")
    if result["conventions"]["N"] != "params_total":
        text.append(f"Published laws take params_total, ours {result['conventions']['N']}.")
    if min(row["params_total"] for row in result["sizes"]) < SMALLEST:
        text.append(f"Published laws rest on models of more than {human(SMALLEST)} parameters and on other tokens: so far below, "
                    "their numbers can be wrong by a factor of ten and more.")
    reasons = dict.fromkeys(cost["reason"] for row in result["sizes"] for cost in row["costs"] if cost["reason"])
    head = "| N | tokens | recipe |" + "".join(f" extra compute, {law} [%] | N_eff/N, {law} | speed-up, {law} |" for law in laws)
    return "\n".join([*_markdown(head, rows), "", " ".join([*text, *(f"No number: {reason}." for reason in reasons)])])


def _pair_table(result: dict) -> str:
    """A row per pair, in nats and per cent."""
    law, rows = next(iter(result["laws"])), []
    for pair in result["pairs"]:
        gaps = [f"{gap.nats:+.5f}" + ("" if gap.se is None else f" ± {gap.se:.5f}") + f" | {gap.percent:+.3f}"
                for gap in (pair["gap_bf16"], pair["gap_as_trained"])]
        extra, ratio = pair["extra_tokens"].get(law), pair["tok_per_s_ratio"]
        ratio = "means nothing (CPU)" if pair["device"].startswith("cpu") else f"{ratio:.2f}" if ratio else "other machine"
        rows.append(f"| {pair['fp8']} ({pair['recipe']}) | {human(pair['N'])} | {human(pair['tokens'])} | {gaps[0]} | {gaps[1]} "
                    f"| {'none' if extra is None else f'{100 * (extra - 1):+.2f}'} | {ratio} |")
    head = ("| FP8 run | N | tokens | gap in BF16 [nats] | [%] | gap as trained [nats] | [%] | "
            f"extra compute ({law}) [%] | tok/s FP8/BF16 |")
    return "\n".join([*_markdown(head, rows), "",
                      "± one standard error over the validation sequences, paired: evaluation noise, not the run's."])


def name_of(recipe: str, converted: list[int]) -> str:
    """A recipe in a label: FP8 only where a Linear was converted."""
    return f"{recipe}: BF16 again" if converted == [0, 0] else f"FP8 {recipe}"


def _shown(found) -> str:
    return f"{found.mean:+.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def _ends(values, form) -> str:
    """Value [low to high]; "?" for an end that the law cannot give."""
    value, *ends = ["?" if value is None else format(value, form) for value in values]
    return "none" if value == "?" else value if ends == ["?", "?"] else f"{value} [{ends[0]} to {ends[1]}]"


# ---------------------------------------------------------------------------------------------------------- its figure

def draw_precision(result: dict):
    """The figure of analyse's result, which holds at least one pair: gap [%] over size, then nats beside published laws."""
    arm, sizes, common = result["loss"], result["sizes"], result["common"]
    n, free = len(result["pairs"]), sum(one[arm].n for one in common.values())
    ratio = float(np.exp(np.mean([math.log(row["tokens"] / row["params_total"]) for row in sizes])))
    caption = "Bars: 95 % t-interval over independent pairs" + "; bands: of all sizes" * (len(common) <= BANDS) + ". "
    if len({(row["N"], row["tokens"]) for row in sizes}) > len({row["N"] for row in sizes}):
        caption += "Left, at each size further right: more tokens. "
    caption += (f"Right: published laws at {ratio:.3g} tokens per parameter, dotted beyond the sizes they were fitted to; "
                "triangle: upper end of a gap not above 0.")
    with matplotlib.rc_context(RC):
        title = f"Loss of FP8 minus loss of BF16, evaluated {ARMS[arm]} (n = {n} pair{'s' * (n > 1)}"
        looks = dict(zip(common, styles(["bf16", *common])[1:], strict=True))
        handles = _handles(result)
        handles += [matplotlib.lines.Line2D([], [], color=look["color"], marker=look["marker"], markersize=4.5, linestyle="none",
                                            label=name_of(recipe, common[recipe]["converted"])) for recipe, look in looks.items()]
        figure, panels = sheet((7.4, 3.8), 1, 2, title + f", {free} independent" * (free < n) + ")", caption, handles, 4)
        _draw_percent(panels[0, 0], result, looks)
        _draw_nats(panels[0, 1], sizes, looks, ratio)
        if result["conventions"]["N"] != "params_total":
            panels[0, 0].set_xlabel(f"{KIND[result['conventions']['N'].removeprefix('params_')]}parameters N")
            panels[0, 1].set_xlabel("parameters N, all")
        return settle(figure)


def _reach(result: dict) -> float:
    """Half the height of the axis in per cent: what the gaps take; intervals of two pairs may leave it."""
    rows, margin = [row[result["loss"]] for row in result["sizes"]], result["margin"]
    reach = [abs(row.mean) for row in rows] + ([margin.percent] if margin else [])
    reach += [max(abs(row.low), abs(row.high)) for row in rows if row.half and row.n > 2]
    return 1.2 * max([*reach, 1e-3])


def _bands(result: dict) -> list[tuple[float, str, str, bool]]:
    """(half width in per cent, name, colour, whether the axis holds it) of each null; one far beyond it is named, not drawn."""
    null, limit = result["null"], 2.5 * _reach(result)
    return [(one["band"], name, color, one["band"] < limit) for one, name, color in (
        (null["pooled"], "null, other seed", "#DDDDDD"), (null["same_seed"]["pooled"], "null, same seed", "#B0B0B0")) if one]


def _handles(result: dict) -> list:
    """Of the null bands and of the margin, for the legend."""
    handles = [Patch(color=color, linewidth=0, fill=fits, label=f"{name}, ±{band:.2g} %" + " (beyond the axis)" * (not fits))
               for band, name, color, fits in _bands(result)]
    if margin := result["margin"]:
        handles.append(matplotlib.lines.Line2D([], [], color="#000000", linewidth=0.8, linestyle=(0, (4, 2)), label=(
            f"margin, ±{margin.percent:g} %" + ", after the fact" * (not margin.is_declared))))
    return handles


def _draw_percent(panel, result: dict, looks) -> None:
    arm, sizes, common = result["loss"], result["sizes"], result["common"]
    nulls = sorted(((band, color) for band, _, color, fits in _bands(result) if fits), reverse=True)
    for band, color in nulls:           # the narrower one on top
        panel.axhspan(-band, band, color=color, linewidth=0, zorder=0)
    for y in (-1, 1) if result["margin"] else ():
        panel.axhline(y * result["margin"].percent, color="#000000", linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    panel.axhline(0, color=STYLES[0]["color"], linewidth=1.2, zorder=2.5)
    place = _places([row["N"] for row in sizes])
    for recipe, look in looks.items():
        whole = common[recipe][arm]
        if whole.half and len(common) <= BANDS:
            panel.axhspan(whole.low, whole.high, color=look["color"], alpha=0.25, linewidth=0, zorder=2)
        rows = [(x, row[arm]) for x, row in zip(place, sizes, strict=True) if row["recipe"] == recipe]
        panel.errorbar([x for x, _ in rows], [found.mean for _, found in rows], yerr=[found.half or 0 for _, found in rows],
                       linestyle="none", color=look["color"], marker=look["marker"], markersize=4.5, capsize=2.5, elinewidth=1.1,
                       zorder=3)
    limit = max([_reach(result), *(1.15 * band for band, _ in nulls)])
    panel.set_xscale("log")
    panel.set(xlim=(min(place) / 1.5, 1.5 * max(place)), ylim=(-limit, limit), xlabel="parameters N", ylabel="gap [%]")
    counts_axis(panel.xaxis)
    # Labels at the sizes themselves, where they have room: the points stand beside them.
    spacing, ticks = 0.08 * math.log(2.25 * max(place) / min(place)), []
    for N in sorted({row["N"] for row in sizes}):
        ticks += [N] if not ticks or math.log(N / ticks[-1]) > spacing else []
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())


def _places(N) -> list[float]:
    """x of each row, sorted by N: its N, moved aside where several rows share it."""
    widest, places = np.diff(np.log(sorted(set(N)))), []
    room = min([0.9, *(0.6 * widest)])
    for size, rows in itertools.groupby(N):
        n = len(list(rows))
        places += [size * math.exp(room * ((i + 0.5) / n - 0.5)) for i in range(n)]
    return places


def _draw_nats(panel, sizes, looks, ratio: float) -> None:
    """Each gap at its total parameters, as the published laws count, whose lines stand beside."""
    panel.set_xscale("log")
    panel.set_yscale("log", nonpositive="clip")
    totals = [row["params_total"] for row in sizes]
    low, high = min(totals) / 2, max(1.5 * max(totals), 1.3 * FARTHEST)
    N, values = np.geomspace(low, high, 200), []
    for (name, law, fitted), (color, dash) in zip(PRECISION_LAWS, LAW_STYLES, strict=True):
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
    panel.set(xlim=(low, high), ylim=(min(values) / 2.5, 12 * max(values)), xlabel="parameters N", ylabel="gap [nats/token]")
    counts_axis(panel.xaxis)
    panel.yaxis.set_major_locator(LogLocator(10, numticks=9))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.legend(loc="upper right", frameon=False, fontsize=7, borderaxespad=0, handlelength=2.8, labelspacing=0.25)


# ------------------------------------------------------------------------------------------------------------- command

def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the runs or the arguments."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(__doc__ + "\nOptions, as name=value or --name value:")
        print("\n".join(field_lines("", Options)))
        return 0 if words else 2
    try:
        if "--report" in words:
            from scaling import report  # here, because it imports this module
            return report.main([word for word in words if word != "--report"])
        _run(read_options(Options, words))
    except UserError as error:
        print(f"scaling/precision.py: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: Options) -> None:
    paths = options.paths
    if options.out is None and (len(paths) > 1 or (Path(paths[0]) / "summary.json").exists()):
        raise UserError("out=DIR is missing: where several paths or a single run are given, name the folder that receives "
                        "precision.json and the figures")
    folder = Path(options.out or Path(paths[0]) / LAW_FOLDER)
    records, notes = read_runs(paths)
    records, left_out = usable(counted_as(records, options.n))
    if not records:
        raise UserError("\n".join(["no run is left to compare", *left_out]))
    check_comparable(records)
    found, alone = pairs(records)
    notes += left_out + alone + null_pairs(records)[1]
    result = analyse(records, found, options.loss, read_margin(records, options.margin))
    figures = {}
    if found:
        figures["precision"] = draw_precision(result)
        figures["pair"], more = draw_pair(max(found, key=lambda pair: pair.fp8.flops_per_token * pair.fp8.tokens))
        notes += more
    inputs = [{"run_id": r.run_id, "recipe": r.recipe, "summary_sha256": r.summary_sha256} for r in records]
    content = json.dumps({"format_version": 1, **result, "notes": notes, "inputs": inputs}, indent=1, allow_nan=False,
                         default=asdict)
    files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() if figure for form in ("png", "svg")}
    old = [f"{name}.{form}" for name in ("precision", "pair") for form in ("png", "svg")]
    old = [name for name in old if name not in files and (folder / name).exists()]
    write_files(folder, files | {"precision.json": content + "\n"})
    for name in old:
        (folder / name).unlink()        # beside the new precision.json it would pass for its own
    notes += [f"removed {', '.join(old)} of an earlier call from {folder}"] if old else []
    _print(result, notes, ", ".join([f"{folder}/precision.json", *files]), options.all)


def _print(result: dict, notes: list[str], wrote: str, is_all: bool) -> None:
    """The headline, warnings, tables; without is_all as many of them as LINES hold."""
    shown = notes if is_all or len(notes) <= SHOWN else [*notes[:SHOWN - 1], f"{len(notes) - SHOWN + 1} more in precision.json"]
    parts, blocks = [headline(result), *["\n".join(f"WARNING: {note}" for note in shown)] * bool(shown)], _tables(result)
    while blocks and (is_all or "\n\n".join([*parts, blocks[0]]).count("\n") + 5 <= LINES):
        parts.append(blocks.pop(0))
    parts += [f"{len(blocks)} more table{'s' * (len(blocks) > 1)}: --all"] * bool(blocks)
    print("\n\n".join([*parts, f"wrote {wrote}"]))


if __name__ == "__main__":
    sys.exit(run_command(main))
