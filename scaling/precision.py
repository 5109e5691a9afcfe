"""Measure what FP8 costs against BF16, run beside paired run on the same validation sequences.

    python scaling/precision.py out/study               # every finished run under it; writes out/study/law/precision.*
    python scaling/precision.py out/a_bf16 out/a_fp8 out=report loss=as_trained margin=0.25
    python scaling/precision.py --report out/a_bf16 out/a_fp8   # of one training: losses, time, memory, speed (report.py)

Prints the common gap, which recipe is the best by the declared rule (ranking.py), the gap per size beside the null (BF16
against BF16 with another seed, and with the same one rounded differently), what the gap costs in compute under two laws, then
each pair. A single pair's standard error is over validation sequences: evaluation noise alone. Intervals are over independent
pairs and hold for this validation set.
"""


import itertools
import json
import math
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from runtime.cli import UserError
from runtime.rows import write_atomically as write
from scaling.command import read_words, run
from scaling.dynamics import running_mean, window_of
from scaling.figures import RC, page, render, styles
from scaling.pairs import (
    KIND,
    MOST,
    PRECISION_LAWS,
    SMALLEST,
    Estimate,
    Gap,
    Margin,
    Pair,
    Trend,
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
from scaling.records import CONVENTIONS, LAW_FOLDER, check_comparable, counted_as, read_curve, read_json, read_runs, usable

__all__ = ["Gap", "Pair", "analyse", "main", "pairs"]

OPTIONS = {
    "out": "DIR that receives precision.json, precision.png, pair.png and their .svg (default: PATH/law of the one PATH)",
    "loss": "bf16 (default: both arms evaluated through BF16 matmuls) or as_trained; the one that is judged",
    "margin": "per cent of the loss within which FP8 counts as equivalent; default: the one declared in the study.json "
              "beside the runs. Given here it counts as declared after the fact",
    "n": "total or nonembed: which parameters N counts (default: what the study.json beside the runs says, else total)",
}
FIGURES = [f"{name}.{form}" for name in ("precision", "pair") for form in ("png", "svg")]


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
    repeated, _ = null_pairs(records)
    return {"conventions": {"N": f"params_{records[0].convention}"}, "loss": arm, "margin": margin,
            "null": measure(records, repeated, arm), "common": common, "ranking": rank(found, arm), "sizes": sizes,
            "laws": sources, "no_own_law": reason,
            "pairs": [{"pair_id": p.bf16.pair_id, "bf16": p.bf16.run_id, "fp8": p.fp8.run_id, "recipe": p.fp8.recipe,
                       **at(p.fp8), "gap_bf16": p.in_bf16, "gap_as_trained": p.as_trained,
                       "tok_per_s_ratio": p.tok_per_s_ratio, "device": p.fp8.device,
                       "extra_tokens": {law.name: law.extra_tokens(gap_of(p, arm).nats, p.fp8.tokens) for law in laws[p.fp8.N]}}
                      for p in found]}


def _common(chosen, arm: str, margin) -> dict:
    """One recipe's gap over all sizes: 100 delta of ln L_FP8 = ln L_BF16 + delta, its trend over size, its verdict."""
    logs = {name: over(chosen, lambda p, name=name: 100 * math.log1p(gap_of(p, name).percent / 100))
            for name in ("bf16", "as_trained")}
    grouped = clusters([{p.bf16.trunk, p.fp8.trunk} for p in chosen])
    effect = logs[arm].mean if logs[arm].se and abs(logs[arm].mean) > logs[arm].half else margin and margin.percent
    trend = fit_trend([np.exp(np.mean([math.log(chosen[i].fp8.N) for i in own])) for own in grouped],
                      [np.mean([gap_of(chosen[i], arm).percent for i in own]) for own in grouped], effect and abs(effect))
    return {**logs, "pairs": len(chosen), "sizes": len({p.fp8.N for p in chosen}), "trend": trend,
            **_judged(chosen, logs[arm], margin)}


def _judged(chosen, found, margin) -> dict:
    """equivalence.judged, but no verdict on FP8 where nothing was FP8."""
    said = judged(found, margin) | {"converted": n_converted(chosen)}
    return said | {"verdict": "BF16 again: no Linear converted"} if said["converted"] == [0, 0] else said


# ------------------------------------------------------------------------------------------------------------- command

def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the runs or the arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__ + "\nOptions, as name=value or --name value:")
        print("\n".join(f"    {name:8} {meaning}" for name, meaning in OPTIONS.items()))
        return 0 if arguments else 2
    try:
        if "--report" in arguments:
            from scaling import report  # here, because it imports this module
            report.main([word for word in arguments if word != "--report"])
        else:
            paths, options = _parse(arguments)
            _run(paths, **options)
    except UserError as error:
        print(f"scaling/precision.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(words) -> tuple[list[str], dict]:
    paths, options = read_words(words, OPTIONS)
    options = {"out": None, "loss": "bf16", "margin": None, "n": None} | options
    if not paths:
        raise UserError("no runs given: name a folder of runs such as out/study, or run folders")
    if options["loss"] not in ("bf16", "as_trained"):
        raise UserError(f"loss={options['loss']!r} must be bf16 or as_trained")
    if options["n"] not in (None, *CONVENTIONS):
        raise UserError(f"n={options['n']!r} must be {' or '.join(CONVENTIONS)}: which parameters N counts")
    if options["out"] is None and (len(paths) > 1 or (Path(paths[0]) / "summary.json").exists()):
        raise UserError("out=DIR is missing: where several paths or a single run are given, name the folder that receives "
                          "precision.json and the figures")
    folder = Path(options["out"] or Path(paths[0]) / LAW_FOLDER)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder with out=DIR")
    return paths, {"folder": folder, "arm": options["loss"], "margin": options["margin"], "convention": options["n"]}


def _run(paths, folder: Path, arm: str, margin: str | None, convention: str | None) -> None:
    records, notes = read_runs(paths)
    records, left_out = usable(counted_as(records, convention))
    if not records:
        raise UserError("\n".join(["no run is left to compare", *left_out]))
    check_comparable(records)
    found, alone = pairs(records)
    notes += left_out + alone + null_pairs(records)[1]
    result = analyse(records, found, arm, read_margin(records, margin))
    figures = {}
    if found:
        figures["precision"] = draw_precision(result)
        figures["pair"], more = draw_pair(max(found, key=lambda pair: pair.fp8.flops_per_token * pair.fp8.tokens))
        notes += more
    inputs = [{"run_id": r.run_id, "recipe": r.recipe, "summary_sha256": r.summary_sha256} for r in records]
    content = json.dumps({"format_version": 1, **result, "notes": notes, "inputs": inputs}, indent=1, allow_nan=False,
                         default=asdict)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{name}.{form}": render(figure, form) for name, figure in figures.items() if figure for form in ("png", "svg")}
        old = [name for name in FIGURES if name not in files and (folder / name).exists()]
        for name in old:
            (folder / name).unlink()    # beside the new precision.json it would pass for its own
        for name, data in {**files, "precision.json": (content + "\n").encode()}.items():
            write(folder / name, data)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another out=DIR") from None
    notes += [f"removed {', '.join(old)} of an earlier call from {folder}"] if old else []
    wrote = ", ".join([f"{folder}/precision.json", *files])
    print("\n".join([tables(result), "", *notes, *[""] * bool(notes), f"wrote {wrote}"]))


ARMS = {"bf16": "in BF16", "as_trained": "as trained"}
FEW = 16                    # pairs that the console lists one by one
SAME_BUDGET = 1.15          # ratios of tokens to parameters that differ by less are one budget, rounded to whole steps
OVER = f"more than {MOST:,}"


def tables(result: dict) -> str:
    """Markdown of precision.analyse's result: common gap, ranking, gap per size beside the null, its cost, each pair."""
    blocks = [common(result)]
    if len(result["common"]) > 1 or result["ranking"]["left_out"]:
        blocks.append(ranking(result))
    if result["sizes"] or result["null"]["sizes"] or result["null"]["same_seed"]["sizes"]:
        blocks += [grid(result), sizes(result)]
    if result["pairs"]:
        blocks += [cost_rows(result), pair_rows(result) if len(result["pairs"]) <= FEW else "Each pair is in precision.json."]
    return "\n\n".join(filter(None, blocks))


def read_result(path: Path) -> dict:
    """precision.analyse's result as precision.json at `path` holds it. Raises UserError where that is not one."""
    result = _revived(read_json(path))
    if lacking := [key for key in ("conventions", "null", "common", "ranking", "sizes", "laws", "pairs") if key not in result]:
        raise UserError(f"{path} lacks {lacking[0]!r}: write it anew, python scaling/precision.py STUDY")
    return result


def _revived(value):
    """The dataclasses that json wrote as objects, known by their fields."""
    if isinstance(value, list):
        return [_revived(one) for one in value]
    if not isinstance(value, dict):
        return value
    value = {key: _revived(one) for key, one in value.items()}
    kind = next((kind for kind in (Estimate, Margin, Trend, Gap) if [*value] == [one.name for one in fields(kind)]), dict)
    return kind(**value)


def common(result: dict) -> str:
    """A row per recipe: the gap over all sizes, what the design can see; below it the trend over size."""
    margin = result["margin"]
    if not result["pairs"]:
        return "No BF16/FP8 pair among these runs: there is no gap to report."
    shown = f"±{margin.percent:g} %" if margin else "margin"
    lines = [f"| recipe | common gap {ARMS[result['loss']]} [%] | independent pairs | sizes | verdict | sees gaps from [%] "
             f"| pairs to see {shown} | pairs to show within {shown} |", "|---" * 8 + "|"]
    for recipe, one in result["common"].items():
        found = one[result["loss"]]
        seen = "" if one["smallest_seen"] is None else f"{one['smallest_seen']:.2g}"
        plans = [(one[key] or OVER) if margin and found.sd else "" for key in ("pairs_to_see_margin", "pairs_to_show_margin")]
        lines.append(f"| {recipe} | {_shown(found)} | {found.n} of {one['pairs']} | {one['sizes']} | {one['verdict']} | {seen} | "
                     f"{plans[0]} | {plans[1]} |")
    lines += ["", "Common gap: 100 δ of ln L_FP8 = ln L_BF16 + δ over all sizes, ± half a 95 % t-interval over independent pairs "
              "(branches of one trunk count once). Sees gaps, pairs to see and to show: with 80 % probability at the spread "
              "found; to show: if the true gap is 0. "
              + (f"Margin ±{margin.percent:g} %: {margin.source}." if margin else "No margin was declared: no equivalence test.")]
    for recipe, one in result["common"].items():
        trend = one["trend"]
        lines.append(f"Trend over size (not the form declared), {recipe}: " + (
            f"{trend.slope:+.3g} ± {trend.half:.2g} % per decade of N." if trend.reason is None else
            f"not estimable: {trend.reason}" + ("." if trend.half is None or trend.needed is None and "rival" not in trend.reason
                                                else f"; it would take {trend.needed or OVER} pairs at each size.")))
    return "\n".join(lines)


def ranking(result: dict) -> str:
    """A row per recipe by the declared rule (ranking.py), then which one is the best and why."""
    found = result["ranking"]
    lines = [f"| recipe, lowest gap first | gap {ARMS[result['loss']]} [%] | above the first [%] | ties with it | "
             "tok/s FP8/BF16 | Linears in FP8 |", "|---" * 6 + "|"]
    for row in found["recipes"]:
        above, ratio, (fewest, most) = row["difference"], row["throughput"]["ratio"], row["converted"]
        lines.append(f"| {row['recipe']} | {_shown(row['gap'])} | {_shown(above) if above else ''} | "
                     f"{'yes' if row['ties'] else 'no'} | {f'{ratio:.3f}' if ratio else 'no number'} | "
                     f"{fewest}{f' to {most}' * (most > fewest)} |")
    text = [found["reason"]] + [f"Not ranked: {one['recipe']} ({one['reason']})." for one in found["left_out"]]
    if found["recipes"]:
        text.insert(0, "Gap and difference: pairs at the largest budget of each size, the same sizes and seeds for all, ± half a "
                       "95 % t-interval; a tie: the interval of the difference holds 0, or there is none. With a few pairs "
                       "almost any recipe ties, and speed decides where it means something.")
    return "\n".join([*lines * bool(found["recipes"]), ""] + [" ".join(text)]).strip()


def grid(result: dict) -> str:
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
    lines = {}                          # (N, label) -> pairs or runs, cell of each column
    for label, row, cell, n in rows:
        line = lines.setdefault((row["N"], label), [0, *[""] * len(columns)])
        line[0] = max(line[0], n)
        at = 1 + next(i for i, own in enumerate(columns) if row["tokens_per_param"] <= own[-1])
        line[at] = f"{line[at]}, {cell}" if line[at] else cell
    heads = [f"{sum(own) / len(own):.2g}" for own in columns]
    head = f"| size N | | pairs or seeds | at {heads[0]} tokens per parameter [%] | " + " | ".join(
        [f"at {one}" for one in heads[1:]] + [""])
    order = {label: i for i, label in enumerate(dict.fromkeys(label for label, *_ in rows))}
    return "\n".join([head.rstrip(), "|---" * (3 + len(columns)) + "|", *(
        f"| {human(N)} | {label} | {' | '.join(map(str, cells))} |"
        for (N, label), cells in sorted(lines.items(), key=lambda item: (item[0][0], order[item[0][1]])))])


def sizes(result: dict) -> str:
    """A row per size, tokens and recipe with its verdict, below both nulls of that size."""
    lines = ["| N | tokens | recipe | pairs | gap in BF16 [%] | gap as trained [%] | verdict |", "|---" * 7 + "|"]
    null, by_size = result["null"], {}
    two, same = ({(row["N"], row["tokens"]): row for row in rows} for rows in (null["sizes"], null["same_seed"]["sizes"]))
    for row in result["sizes"]:
        by_size.setdefault((row["N"], row["tokens"]), []).append(row)
    for size in sorted({*two, *same, *by_size}):
        head = f"| {size[0]:,} | {size[1]:,} |"
        if row := two.get(size):
            sd = f"SD {row['sd_percent']:.3f}"
            lines.append(f"{head} bf16, two seeds | {row['runs']} runs | {sd} | {sd} | null, {freedom(row['dof'])} |")
        else:
            lines.append(f"{head} bf16 | 1 run | | | no null: one BF16 seed |")
        if row := same.get(size):
            equal = sum(one["nats"] == 0 for one in row["differences"])
            lines.append(f"{head} bf16, same seed | {row['pairs']} | {_shown(row['bf16'])} | {_shown(row['as_trained'])} | " + (
                "no null: equal to the last bit" if equal == row["pairs"] else "null: rounded otherwise") + " |")
        lines += [f"{head} {row['recipe']} | {row['bf16'].n} | {_shown(row['bf16'])} | {_shown(row['as_trained'])} | "
                  f"{row['verdict']} |" for row in by_size.get(size, ())]
    lines += ["", f"N: {result['conventions']['N']}. Gap: FP8 minus BF16 of runs that share seed and data order, ± half a 95 % "
              "t-interval over independent pairs; each row is a 5 % test of its own. Null: SD of the difference of two BF16 runs "
              "with other seeds, k - 1 degrees of freedom from k runs."]
    if pooled := null["pooled"]:
        lines[-1] += (f" Pooled over sizes: SD {pooled['sd_percent']:.3f} %, {freedom(pooled['dof'])}; 95 % of such differences "
                      f"lie within ±{pooled['band']:.2f} %.")
    return "\n".join([*lines[:-1], " ".join([lines[-1], *_same_seed(null["same_seed"])])])


def _same_seed(null: dict) -> list[str]:
    """What BF16 runs of one seed that are rounded differently say, in sentences."""
    said = []
    if pooled := null["pooled"]:
        said.append(f"Same seed: BF16 once more, minus BF16, rounded otherwise; SD around 0 over {pooled['pairs']} "
                    f"pair{'s' * (pooled['pairs'] > 1)} {pooled['sd_percent']:.3f} %, {freedom(pooled['dof'])}; 95 % of such "
                    f"differences lie within ±{pooled['band']:.2g} %.")
    if equal := null["equal"]:
        said.append(f"{equal} pair{'s' * (equal > 1)} of BF16 with BF16 of the same seed {'are' if equal > 1 else 'is'} equal to "
                    "the last bit: nothing was rounded otherwise there, so it is no null.")
    return said


def cost_rows(result: dict) -> str:
    """A row per size, tokens and recipe: what the gap costs in compute and size, under each law."""
    laws = list(result["laws"])
    columns = " | ".join(f"extra compute, {law} [%] | N_eff/N, {law} | speed-up, {law}" for law in laws)
    lines = [f"| N | tokens | recipe | {columns} |", "|---" * (3 + 3 * len(laws)) + "|"]
    for row in result["sizes"]:
        cells = [f"{human(row['N'])} | {human(row['tokens'])} | {row['recipe']}"]
        found = {cost["law"]: cost for cost in row["costs"]}
        for law in laws:
            if law not in found:
                cells += ["none"] * 3
                continue
            cost = found[law]
            extra, share, speed = ([cost[key], *cost[f"{key}_ci95"]]
                                   for key in ("extra_tokens", "effective_parameters", "speedup"))
            extra = [None if r is None else 100 * (r - 1) for r in extra]
            cells += [_ends(extra, "+.2f"), _ends(share, ".3f"), _ends(speed, ".3f")]
        lines.append(f"| {' | '.join(cells)} |")
    text = ["Extra compute: by more tokens at this N. Speed-up: throughput ratio net of them. In brackets: 95 % interval from "
            "the gap's, for the speed-up also from throughput and our law's slope.",
            "; ".join(f"{name}: {source}" for name, source in result["laws"].items()) + "."]
    if result["no_own_law"]:
        text.append(f"No law of our own: {result['no_own_law']}.")
    if result["conventions"]["N"] != "params_total":
        text.append(f"Published laws take params_total, ours {result['conventions']['N']}.")
    if min(row["params_total"] for row in result["sizes"]) < SMALLEST:
        text.append(f"Published laws rest on models of more than {human(SMALLEST)} parameters and on other tokens: so far below, "
                    "their numbers can be wrong by a factor of ten and more.")
    reasons = dict.fromkeys(cost["reason"] for row in result["sizes"] for cost in row["costs"] if cost["reason"])
    return "\n".join([*lines, "", " ".join([*text, *(f"No number: {reason}." for reason in reasons)])])


def pair_rows(result: dict) -> str:
    """A row per pair, in nats and per cent."""
    law = next(iter(result["laws"]))
    lines = ["| FP8 run | N | tokens | gap in BF16 [nats] | [%] | gap as trained [nats] | [%] | "
             f"extra compute ({law}) [%] | tok/s FP8/BF16 |", "|---" * 9 + "|"]
    for pair in result["pairs"]:
        gaps = [f"{gap.nats:+.5f}" + ("" if gap.se is None else f" ± {gap.se:.5f}") + f" | {gap.percent:+.3f}"
                for gap in (pair["gap_bf16"], pair["gap_as_trained"])]
        extra = pair["extra_tokens"].get(law)
        ratio = "other machine" if pair["tok_per_s_ratio"] is None else f"{pair['tok_per_s_ratio']:.2f}"
        lines.append(f"| {pair['fp8']} ({pair['recipe']}) | {human(pair['N'])} | {human(pair['tokens'])} | "
                     f"{gaps[0]} | {gaps[1]} | {'none' if extra is None else f'{100 * (extra - 1):+.2f}'} | "
                     f"{'means nothing (CPU)' if pair['device'].startswith('cpu') else ratio} |")
    return "\n".join([*lines, "", "± one standard error over the validation sequences, paired: evaluation noise, not the run's."])


def name_of(recipe: str, converted: list[int]) -> str:
    """A recipe in a label: FP8 only where a Linear was converted."""
    return f"{recipe}: BF16 again" if converted == [0, 0] else f"FP8 {recipe}"


def _shown(found) -> str:
    return f"{found.mean:+.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def _ends(values, form) -> str:
    """Value [low to high]; "?" for an end that the law cannot give."""
    value, *ends = ["?" if value is None else format(value, form) for value in values]
    return "none" if value == "?" else value if ends == ["?", "?"] else f"{value} [{ends[0]} to {ends[1]}]"


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


if __name__ == "__main__":
    sys.exit(run(main))
