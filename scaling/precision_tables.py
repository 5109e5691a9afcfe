"""The page of scaling/precision.py: its headline and tables in Markdown."""

import math
from collections.abc import Sequence

from lib.text import grid, si
from scaling.gap_prediction_words import format_gap_law
from scaling.gap_words import Words, format_estimate, words_of
from scaling.pages import format_table
from scaling.paired.cost import SMALLEST, Cost
from scaling.paired.estimates import Estimate
from scaling.paired.gaps import Place
from scaling.precision_result import (
    PrecisionResult,
    RankingResult,
    RecipeDifference,
    RecipeGap,
    SizeDifference,
    SizeGap,
)
from scaling.reason_words import SENTENCES, sentence_of
from scaling.verdicts import format_equivalence

LARGE_GAP = 5.0  # per cent: from here on 100 ln(1 + x) is visibly less than 100 x


def format_tables(result: PrecisionResult) -> list[str]:
    """The headline first: common gap, ranking, gap per size beside the nulls, its cost. A table
    without N and D has neither of the last two."""
    words = words_of(result.table, result.loss)
    headline = _format_headline(result, words)
    if result.differences:  # which were asked for
        headline += "\n\n" + _format_differences(result.differences, result.loss, words)
    blocks = [headline]
    if len(result.common) > 1:
        blocks.append(_format_ranking(result.ranking, words))
    if words.has_sizes:
        blocks += [_format_sizes(result, words), _format_costs(result, words)]
    return blocks


def _judged(gap: RecipeGap | SizeGap | SizeDifference, evaluation: str) -> Estimate:
    return gap.bf16 if evaluation == "bf16" else gap.as_trained


# ---------------------------------------------------------------------------------------- headline


def _format_headline(result: PrecisionResult, words: Words) -> str:
    """A row per recipe with its verdict and what the design can see; the best recipe, the nulls,
    the margin."""
    rows = [_headline_row(recipe, gap, result.loss, words) for recipe, gap in result.common.items()]
    text = [_explain_headline(words), *_explain_large_gaps(result, words)]
    if len(result.common) > 1:
        text.append(f"Best: {result.ranking.reason}")
    text += _format_nulls(result, words)
    text.append(_format_margin(result))
    for recipe, gap in result.common.items():
        if gap.equivalence is not None:
            text.append(f"{recipe}: {format_equivalence(gap.equivalence, result.margin)}.")
    text += [format_gap_law(recipe, law) for recipe, law in result.gap_laws.items()]
    return "\n".join([format_table(rows), "", *text])


def _headline_row(recipe: str, gap: RecipeGap, evaluation: str, words: Words) -> dict[str, object]:
    judged = _judged(gap, evaluation)
    row: dict[str, object] = {
        words.recipe: recipe,
        "gap [%]": format_estimate(judged),
        "verdict": gap.verdict,
        "independent pairs": f"{judged.n} of {gap.pairs}",
    }
    if words.has_sizes:
        row["sizes"] = gap.sizes
        row["per decade of N [%]"] = format_estimate(gap.over_sizes)
        row["per doubling of D [%]"] = format_estimate(gap.over_tokens)
    row["sees from [%]"] = gap.smallest_seen
    return row


def _explain_headline(words: Words) -> str:
    extent, changes = "over all pairs", ""
    if words.has_sizes:
        extent = "over all sizes"
        changes = " Per decade of N, per doubling of D at a size: its change."
    return (
        f"{words.arms} minus {words.baseline}, {words.loss}, in per cent of the loss, {extent}, ±"
        f" half a 95 % t-interval over independent pairs ({words.dependent} count once).{changes}"
        " Seen: with a probability of 80 %."
    )


def _explain_large_gaps(result: PrecisionResult, words: Words) -> list[str]:
    means = [_judged(gap, result.loss).mean for gap in result.common.values()]
    farthest = max(means, key=abs)
    if abs(farthest) <= LARGE_GAP:
        return []
    return [
        f"Over all sizes a gap and its changes are in 100 ln(loss / loss of {words.baseline});"
        f" {farthest:+.3g} % here is a loss that differs by"
        f" {100 * math.expm1(farthest / 100):+.3g} %."
    ]


def _format_nulls(result: PrecisionResult, words: Words) -> list[str]:
    lines = []
    for name, pooled in (
        (f"other {words.seeds}", result.null.pooled),
        ("same seed", result.null.same_seed.pooled),
    ):
        if pooled is not None:
            lines.append(
                f"Null, {name}: 95 % of the differences of two {words.baseline} runs lie within"
                f" ±{pooled.band:.2g} % (SD {pooled.sd_percent:.3f} %, degrees of freedom:"
                f" {pooled.dof})."
            )
    return lines


def _format_margin(result: PrecisionResult) -> str:
    if result.margin is None:
        return "No margin was declared: no equivalence test."
    return f"Margin ±{result.margin.percent:g} %: {result.margin.source}."


def _format_differences(
    differences: Sequence[RecipeDifference], evaluation: str, words: Words
) -> str:
    """A row for each difference over all sizes, and below it one for each size."""
    rows = []
    for difference in differences:
        name = f"{difference.recipe} minus {difference.minus}"
        parts: list[tuple[str, RecipeGap | SizeDifference]] = [("all", difference.gap)]
        if words.has_sizes:
            parts += [(si(size.N), size) for size in difference.sizes]
        for place, part in parts:
            row: dict[str, object] = {"difference": name}
            if words.has_sizes:
                row[words.N] = place
            row["independent pairs"] = f"{_judged(part, evaluation).n} of {part.pairs}"
            for name_of_loss, heading in words.gap_columns.items():
                of_loss = heading.removeprefix("gap")
                row[f"difference{of_loss}"] = format_estimate(getattr(part, name_of_loss))
            row["verdict"] = part.verdict
            rows.append(row)
    text = (
        f"Over the pairs that both have; {words.dependent} count once. Over all sizes a difference"
        " is 100 ln(loss / loss of the second), at a size in per cent of the second's loss."
    )
    return f"{format_table(rows)}\n\n{text}"


# ----------------------------------------------------------------------------------- other tables


def _format_ranking(ranking: RankingResult, words: Words) -> str:
    rows = []
    for ranked in ranking.recipes:
        row: dict[str, object] = {
            f"{words.recipe}, lowest gap first": ranked.recipe,
            "gap [%]": format_estimate(ranked.gap),
            "above the first [%]": format_estimate(ranked.difference),
            "ties with it": "yes" if ranked.ties else "no",
        }
        if words.has_speed:
            row["tok/s FP8/BF16"] = ranked.throughput.ratio
        rows.append(row)
    compared = "The same pairs for all;"
    if words.has_sizes:
        compared = (
            "Pairs at the largest common budget of each size, the same sizes and"
            f" {words.seeds} for all;"
        )
    tie = "a tie: not told from it at 5 %, all pairs of recipes tested together (Holm)."
    left_out = [
        f"Not ranked: {recipe.recipe} ({sentence_of(recipe.reason)})."
        for recipe in ranking.left_out
    ]
    return "\n".join([format_table(rows), "", f"{compared} {tie}", *left_out])


def _format_sizes(result: PrecisionResult, words: Words) -> str:
    """A row per size, tokens and recipe with its verdict, below both nulls of that size."""
    same_seed = result.null.same_seed
    evaluations = list(words.gap_columns)
    rows: list[tuple[Place, list[str]]] = []
    for seeds in result.null.sizes:
        spread = [f"SD {seeds.sd_percent:.3f}" for _ in evaluations]
        rows.append((seeds, [words.two_seeds, f"{seeds.runs} runs", *spread, "null"]))
    for repeat in same_seed.sizes:
        gaps = [_format_gap(repeat, name) for name in evaluations]
        cells = ["bf16, same seed", str(repeat.pairs), *gaps, "null: rounded otherwise"]
        rows.append((repeat, cells))
    for size in result.sizes:
        gaps = [_format_gap(size, name) for name in evaluations]
        count = str(getattr(size, evaluations[0]).n)
        rows.append((size, [size.recipe, count, *gaps, size.verdict]))
    rows.sort(key=lambda row: (row[0].N, row[0].tokens))
    heads = [words.N, words.tokens, words.recipe, "pairs", *words.gap_columns.values(), "verdict"]
    lines = [[f"{place.N:,}", f"{place.tokens:,}", *cells] for place, cells in rows]
    text = [
        f"N: {result.conventions.N}. Null: SD of the difference of two {words.baseline} runs,"
        f" {words.null}."
    ]
    if same_seed.equal:
        text.append(f"Repeats equal to the last bit, no null: {same_seed.equal}.")
    return "\n".join([grid([heads, *lines]), "", *text])


def _format_gap(row: object, evaluation: str) -> str:
    return format_estimate(getattr(row, evaluation)) or ""


def _format_costs(result: PrecisionResult, words: Words) -> str:
    """A row per size, tokens, recipe and law: what the gap costs in compute and size."""
    costs = [(size, cost) for size in result.sizes for cost in size.costs]
    rows = [_cost_row(size, cost, words) for size, cost in costs]
    speed_up = " Speed-up: throughput ratio net of them." if words.has_speed else ""
    laws = "; ".join(f"{name}: {source}" for name, source in result.laws.items())
    text = [
        f"Extra compute: by more tokens at this N.{speed_up} In brackets: 95 % interval,"
        " which takes published laws and those of one size as exact.",
        f"{laws}. Below {si(SMALLEST)} parameters a published law can be wrong by a factor of"
        " ten and more.",
    ]
    if result.no_own_law:
        text.append(f"{words.no_own_law}: {result.no_own_law}.")
    reasons = dict.fromkeys(sentence_of(cost.reason) for _, cost in costs if cost.reason)
    if not words.has_speed:
        reasons.pop(SENTENCES["no_speed_in_table"](), None)
    text += [f"No number: {reason}." for reason in reasons]
    return "\n".join([format_table(rows), "", *text])


def _cost_row(size: SizeGap, cost: Cost, words: Words) -> dict[str, object]:
    tokens = [cost.extra_tokens, *cost.extra_tokens_ci95]
    extra = [None if ratio is None else 100 * (ratio - 1) for ratio in tokens]
    share = [cost.effective_parameters, *cost.effective_parameters_ci95]
    row: dict[str, object] = {
        words.N: si(size.N),
        words.tokens: si(size.tokens),
        words.recipe: size.recipe,
        "law": cost.law,
        "extra compute [%]": _format_interval(extra, "+.2f"),
        "N_eff/N": _format_interval(share, ".3f"),
    }
    if words.has_speed:
        row["speed-up"] = _format_interval([cost.speedup, *cost.speedup_ci95], ".3f")
    return row


def _format_interval(values: Sequence[float | None], form: str) -> str:
    """Value [low to high]; "?" for an end that the law cannot give."""
    value, low, high = ["?" if number is None else format(number, form) for number in values]
    if value == "?":
        return "none"
    if low == high == "?":
        return value
    return f"{value} [{low} to {high}]"
