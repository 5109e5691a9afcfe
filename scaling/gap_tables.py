"""Write the paired analysis of precision.py as Markdown tables."""

from dataclasses import fields
from pathlib import Path

from runtime.cli import UserError
from scaling.equivalence import MOST, Estimate, Margin, Trend
from scaling.figures import human
from scaling.pairs import Gap
from scaling.published import SMALLEST
from scaling.records import read_json

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
        blocks += [costs(result), pair_rows(result) if len(result["pairs"]) <= FEW else "Each pair is in precision.json."]
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


def costs(result: dict) -> str:
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


def freedom(dof: int) -> str:
    """So many degrees of freedom, in words."""
    return f"{dof} degree{'s' * (dof != 1)} of freedom"
