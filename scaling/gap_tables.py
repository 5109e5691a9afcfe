"""Write the paired analysis of precision.py as Markdown tables."""

from scaling.equivalence import MOST
from scaling.figures import human
from scaling.published import SMALLEST

ARMS = {"bf16": "in BF16", "as_trained": "as trained"}
FEW = 16                    # pairs that the console lists one by one
OVER = f"more than {MOST:,}"


def tables(result: dict) -> str:
    """Markdown of precision.analyse's result: common gap, gap per size beside the null, its cost, each pair."""
    blocks = [_common(result)]
    if result["sizes"] or result["null"]["sizes"]:
        blocks.append(_sizes(result))
    if result["pairs"]:
        blocks += [_costs(result), _pairs(result) if len(result["pairs"]) <= FEW else "Each pair is in precision.json."]
    return "\n\n".join(blocks)


def _common(result):
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


def _sizes(result):
    lines = ["| N | tokens | recipe | pairs | gap in BF16 [%] | gap as trained [%] | verdict |", "|---" * 7 + "|"]
    null = {(row["params_total"], row["tokens"]): row for row in result["null"]["sizes"]}
    by_size = {}
    for row in result["sizes"]:
        by_size.setdefault((row["params_total"], row["tokens"]), []).append(row)
    for size in sorted(null.keys() | by_size.keys()):
        head = f"| {size[0]:,} | {size[1]:,} |"
        if row := null.get(size):
            sd = f"SD {row['sd_percent']:.3f}"
            lines.append(f"{head} bf16, two seeds | {row['runs']} runs | {sd} | {sd} | null, {freedom(row['dof'])} |")
        else:
            lines.append(f"{head} bf16 | 1 run | | | no null: one BF16 seed |")
        lines += [f"{head} {row['recipe']} | {row['bf16'].n} | {_shown(row['bf16'])} | {_shown(row['as_trained'])} | "
                  f"{row['verdict']} |" for row in by_size.get(size, ())]
    lines += ["", "Gap: FP8 minus BF16 of runs that share seed and data order, ± half a 95 % t-interval over independent pairs; "
              "each row is a 5 % test of its own. Null: SD of the difference of two BF16 runs with other seeds, k - 1 degrees of "
              "freedom from k runs."]
    if pooled := result["null"]["pooled"]:
        lines[-1] += (f" Pooled over sizes: SD {pooled['sd_percent']:.3f} %, {freedom(pooled['dof'])}; 95 % of such differences "
                      f"lie within ±{pooled['band']:.2f} %.")
    return "\n".join(lines)


def _costs(result):
    laws = list(result["laws"])
    columns = " | ".join(f"extra compute, {law} [%] | N_eff/N, {law} | speed-up, {law}" for law in laws)
    lines = [f"| N | tokens | recipe | {columns} |", "|---" * (3 + 3 * len(laws)) + "|"]
    for row in result["sizes"]:
        cells = [f"{human(row['params_total'])} | {human(row['tokens'])} | {row['recipe']}"]
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
    if result["sizes"][0]["params_total"] < SMALLEST:
        text.append(f"Published laws rest on models of more than {human(SMALLEST)} parameters and on other tokens: so far below, "
                    "their numbers can be wrong by a factor of ten and more.")
    reasons = dict.fromkeys(cost["reason"] for row in result["sizes"] for cost in row["costs"] if cost["reason"])
    return "\n".join([*lines, "", " ".join([*text, *(f"No number: {reason}." for reason in reasons)])])


def _pairs(result):
    law = next(iter(result["laws"]))
    lines = ["| FP8 run | N | tokens | gap in BF16 [nats] | [%] | gap as trained [nats] | [%] | "
             f"extra compute ({law}) [%] | tok/s FP8/BF16 |", "|---" * 9 + "|"]
    for pair in result["pairs"]:
        gaps = [f"{gap.nats:+.5f}" + ("" if gap.se is None else f" ± {gap.se:.5f}") + f" | {gap.percent:+.3f}"
                for gap in (pair["gap_bf16"], pair["gap_as_trained"])]
        extra = pair["extra_tokens"].get(law)
        ratio = "other machine" if pair["tok_per_s_ratio"] is None else f"{pair['tok_per_s_ratio']:.2f}"
        lines.append(f"| {pair['fp8']} ({pair['recipe']}) | {human(pair['params_total'])} | {human(pair['tokens'])} | "
                     f"{gaps[0]} | {gaps[1]} | {'none' if extra is None else f'{100 * (extra - 1):+.2f}'} | "
                     f"{'means nothing (CPU)' if pair['device'].startswith('cpu') else ratio} |")
    return "\n".join([*lines, "", "± one standard error over the validation sequences, paired: evaluation noise, not the run's."])


def _shown(found) -> str:
    return f"{found.mean:+.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def _ends(values, form) -> str:
    """Value [low to high]; "?" for an end that the law cannot give."""
    value, *ends = ["?" if value is None else format(value, form) for value in values]
    return "none" if value == "?" else value if ends == ["?", "?"] else f"{value} [{ends[0]} to {ends[1]}]"


def freedom(dof: int) -> str:
    """So many degrees of freedom, in words."""
    return f"{dof} degree{'s' * (dof != 1)} of freedom"
