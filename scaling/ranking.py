"""Choose the best FP8 recipe of a study by a rule that is fixed before its runs.

Ranked is every recipe that converts a Linear in each of its pairs and ran in all that is compared: the sizes and seeds, at the
largest budget of each size, where more than half of the recipes ran. First is the lowest common gap (FP8 minus BF16, with its
sign). A recipe whose gap exceeds the first's by no more than chance would (the paired difference's 95 % interval holds 0, or
one pair gives none) ties with it, and of those that tie the fastest is the best; where speed means nothing, the first is.

With a few pairs the interval is wide and almost any recipe ties, so speed will mostly decide. Once a recipe is chosen, extend
the larger sizes by it alone: where two of three recipes ran there, those sizes are compared too, and the third is not ranked.
"""

import math

from scaling.captions import human
from scaling.equivalence import estimate
from scaling.null import at
from scaling.pairs import gap_of, n_converted
from scaling.published import throughput


def rank(found, arm: str) -> dict:
    """The ranking of the recipes of `found` (pairs.Pair) by the evaluation `arm`, best gap first, gaps in per cent.

    {"best", "reason", "cells", "recipes", "left_out"}; best is None where no recipe can be ranked, reason is a sentence."""
    by_recipe, left_out = _converting(found)
    longest = {}
    for p in (p for chosen in by_recipe.values() for p in chosen):
        longest[p.fp8.N] = max(longest.get(p.fp8.N, 0), p.fp8.tokens)
    cells = {recipe: {(p.fp8.N, p.fp8.seed): p for p in chosen if p.fp8.tokens == longest[p.fp8.N]}
             for recipe, chosen in by_recipe.items()}
    present = [cell for own in cells.values() for cell in own]
    compared = [cell for cell in sorted(set(present)) if 2 * present.count(cell) > len(cells)]
    ranked = []
    for recipe, own in cells.items():
        lacking = [f"{human(N)} seed {seed}" for N, seed in compared if (N, seed) not in own]
        if lacking or not compared:
            reason = (f"no finished pair at the largest budget of {', '.join(lacking)}" if lacking else
                      "ran at no size and seed where more than half of the recipes did")
            left_out.append({"recipe": recipe, "reason": reason})
            continue
        chosen = [own[cell] for cell in compared]
        ranked.append({"recipe": recipe, "gap": estimate([_log_percent(p, arm) for p in chosen]), "pairs": chosen})
    ranked.sort(key=lambda one: (one["gap"].mean, one["recipe"]))
    rows = [_row(one, ranked[0], arm) for one in ranked]
    best, reason = _best(rows, compared)
    where = [{**at(p.fp8), "seed": p.fp8.seed} for p in ranked[0]["pairs"]] if ranked else []
    return {"best": best, "reason": reason, "cells": where, "recipes": rows, "left_out": left_out}


def _converting(found) -> tuple[dict, list[dict]]:
    """recipe -> its pairs, for the recipes that convert something everywhere; a reason for each of the others."""
    by_recipe, left_out = {}, []
    for recipe in sorted({p.fp8.recipe for p in found}):
        chosen = [p for p in found if p.fp8.recipe == recipe]
        nothing = [p.fp8.run_id for p in chosen if n_converted([p]) == [0, 0]]
        if nothing:
            left_out.append({"recipe": recipe, "reason": f"converts no Linear in {len(nothing)} of {len(chosen)} pairs "
                                                         f"({nothing[0]}): it is BF16 there"})
        else:
            by_recipe[recipe] = chosen
    return by_recipe, left_out


def _log_percent(pair, arm: str) -> float:
    """100 ln(FP8's loss / BF16's)."""
    return 100 * math.log1p(gap_of(pair, arm).percent / 100)


def _row(one: dict, first: dict, arm: str) -> dict:
    difference = None
    if one is not first:
        difference = estimate([_log_percent(own, arm) - _log_percent(its, arm)
                               for own, its in zip(one["pairs"], first["pairs"], strict=True)])
    return {"recipe": one["recipe"], "gap": one["gap"], "difference": difference,
            "ties": difference is None or difference.low is None or difference.low <= 0,
            "throughput": throughput(one["pairs"]), "converted": n_converted(one["pairs"])}


def _best(rows: list[dict], compared) -> tuple[str | None, str]:
    """The best recipe, and the sentence that says why."""
    if not rows:
        return None, "No recipe converts a Linear and ran wherever more than half of the others did: none is ranked."
    first, tied = rows[0], [row for row in rows if row["ties"]]
    where = f"{len(compared)} pair{'s' * (len(compared) > 1)} at the largest budget of " + " and ".join(
        dict.fromkeys(human(N) for N, _ in compared))
    if len(rows) == 1:
        return first["recipe"], f"{first['recipe']} is the only recipe that can be ranked, over {where}."
    lead = f"{first['recipe']} has the lowest gap, {first['gap'].mean:+.3f} % over {where}"
    if len(tied) == 1:
        return first["recipe"], f"{lead}; every other recipe's is higher by more than chance: {first['recipe']} is the best."
    names = ", ".join(row["recipe"] for row in tied[1:])
    lead += f"; not told apart from it: {names}"
    if lacking := [row for row in tied if row["throughput"]["ratio"] is None]:
        why = f"{lacking[0]['recipe']}: {lacking[0]['throughput']['reason']}"
        return first["recipe"], f"{lead}. Speed cannot decide ({why}), so the gap does: {first['recipe']} is the best."
    best = max(tied, key=lambda row: row["throughput"]["ratio"])
    return best["recipe"], (f"{lead}. Of these {best['recipe']} is the fastest, {best['throughput']['ratio']:.3f} of BF16's "
                            f"tokens per second: it is the best.")
