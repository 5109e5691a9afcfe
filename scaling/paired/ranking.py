"""Choose the best recipe by a declared rule."""

import numpy as np

from lib.text import listed, si
from scaling.paired.cost import throughput
from scaling.paired.estimates import estimate, grouped
from scaling.paired.gaps import is_idle


def rank(found, arm: str) -> dict:
    """The ranking of the recipes of `found` (Pairs) by the evaluation `arm`, gaps in per cent.
    Ranked is every recipe that converts a Linear in each of its pairs and ran in all that is
    compared: the sizes, budgets and seeds where more than half of the recipes ran, of each size the
    largest such budget. First is the lowest common gap, with its sign. A recipe whose paired
    difference to it has a 95 % interval that holds 0 (or none) ties; of these the fastest is the
    best, or the first where speed means nothing. {"best" (None where none is ranked), "reason",
    "recipes", "left_out"}."""
    left_out, cells, rows = [], {}, []
    for recipe, some in grouped(found, lambda p: p.fp8.recipe):
        if idle := [p.fp8.run_id for p in some if is_idle([p])]:
            left_out.append(
                {
                    "recipe": recipe,
                    "reason": f"converts no Linear in {listed(idle, 1)}: it is BF16 there",
                }
            )
        else:
            cells[recipe] = {(p.fp8.N, p.fp8.tokens, p.fp8.seed): p for p in some}
    present = [cell for own in cells.values() for cell in own]
    shared = [cell for cell in sorted(set(present)) if 2 * present.count(cell) > len(cells)]
    longest = {N: tokens for N, tokens, _ in shared}
    compared = [cell for cell in shared if cell[1] == longest[cell[0]]]
    logs = {}  # recipe -> its gaps where all are compared
    for recipe, own in cells.items():
        if compared and own.keys() >= set(compared):
            logs[recipe] = [own[cell].gap[arm].log_percent for cell in compared]
        else:
            lacking = [f"{si(cell[0])} seed {cell[2]}" for cell in compared if cell not in own]
            left_out.append(
                {
                    "recipe": recipe,
                    "reason": f"no finished pair at {listed(lacking) or 'what most recipes share'}",
                }
            )
    for recipe in sorted(logs, key=lambda recipe: (np.mean(logs[recipe]), recipe)):
        difference = estimate(np.subtract(logs[recipe], logs[rows[0]["recipe"]])) if rows else None
        rows.append(
            {
                "recipe": recipe,
                "gap": estimate(logs[recipe]),
                "difference": difference,
                "ties": difference is None or difference.low is None or difference.low <= 0,
                "throughput": throughput([cells[recipe][cell] for cell in compared]),
            }
        )
    sizes = dict.fromkeys(si(N) for N, *_ in compared if N > 1)  # a table may give no N
    where = f"over {len(compared)} pairs"
    if sizes:
        where += f" at the largest common budget of {' and '.join(sizes)}"
    best, reason = _best(rows, where)
    return {"best": best, "reason": reason, "recipes": rows, "left_out": left_out}


def _best(rows: list[dict], where: str) -> tuple[str | None, str]:
    if not rows:
        return (
            None,
            (
                "No recipe that differs from the baseline ran wherever more than half of the others"
                " did: none is ranked."
            ),
        )
    tied = [row for row in rows if row["ties"]]
    first, *others = [row["recipe"] for row in tied]
    said = f"{first} has the lowest gap, {rows[0]['gap'].mean:+.3f} % {where}; "
    if not others:
        return (
            first,
            f"{said}no other ranked recipe's lies within chance of it: {first} is the best.",
        )
    said += f"not told apart from it: {', '.join(others)}. "
    if reason := next(
        (row["throughput"]["reason"] for row in tied if row["throughput"]["reason"]), None
    ):
        return first, f"{said}Speed cannot decide ({reason}), so {first} is the best."
    best = max(tied, key=lambda row: row["throughput"]["ratio"])
    return (
        best["recipe"],
        (
            f"{said}Of these {best['recipe']} is the fastest, {best['throughput']['ratio']:.3f} of"
            " BF16's tokens per second: it is the best."
        ),
    )
