"""Arrange token sequences in batches so that a beginning which several share is computed once."""

from collections.abc import Sequence
from typing import NamedTuple

LEAST_SHARED = 8        # tokens: below, the second forward pass costs more than it saves
LIKE = 0.75             # sequences share a beginning while it is at least this part of what their neighbours share


class Batch(NamedTuple):
    """Rows for one forward pass; with `past`, for one over each group's first `past` tokens and some over what follows."""
    past: int
    groups: list[list[int]]     # indices of rows; the rows of a group are alike in their first `past` tokens


def plan(rows: Sequence[tuple[int, ...]], budget: int) -> list[Batch]:
    """Batches of all rows (different from each other, none empty), padded to at most `budget` tokens where one row has no
    more. Those without a shared beginning go first, the longest leading: memory runs out at once or never."""
    groups = _groups(rows)
    alone = sorted((group[0] for _, group in groups if len(group) == 1), key=lambda row: -len(rows[row]))
    batches, start = [], 0
    while start < len(alone):
        n = max(1, budget // len(rows[alone[start]]))
        batches.append(Batch(0, [[row] for row in alone[start:start + n]]))
        start += n
    shared = sorted(((past, group) for past, group in groups if len(group) > 1), key=lambda pair: -pair[0])
    taken: list[tuple[int, list[int]]] = []
    for past, group in shared:
        if taken and ((len(taken) + 1) * taken[0][0] > budget or past < LIKE * taken[0][0]):
            batches.append(Batch(taken[-1][0], [rows_ for _, rows_ in taken]))
            taken = []
        taken.append((past, group))
    return batches + ([Batch(taken[-1][0], [rows_ for _, rows_ in taken])] if taken else [])


def _groups(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, list[int]]]:
    """(length of the shared beginning, rows that share it), of neighbours in alphabetical order; a row alone: (0, [row])."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [_alike(rows[a], rows[b]) for a, b in zip(order, order[1:], strict=False)] + [0]      # each with the next
    groups, i = [], 0
    while i < len(order):
        start, past = i, 0
        while shared[i] >= LEAST_SHARED:
            joined = min(past, shared[i]) if past else shared[i]
            if joined < LIKE * max(past, shared[i + 1]):    # the next has more in common with those behind it
                break
            past, i = joined, i + 1
        groups.append((past, order[start:i + 1]))
        i += 1
    return groups


def _alike(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens the two begin with in common."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def chunks(lengths: Sequence[int], past: int, budget: int) -> list[list[int]]:
    """Places of `lengths`, longest first, in chunks that hold little padding and at most `budget` tokens, the past included."""
    order, out = sorted(range(len(lengths)), key=lambda i: -lengths[i]), []
    for i in order:
        if out and (longest := lengths[out[-1][0]]) * LIKE <= lengths[i] and (len(out[-1]) + 1) * (past + longest) <= budget:
            out[-1].append(i)
        else:
            out.append([i])
    return out
