"""Batches of token sequences that compute a shared beginning once."""

from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix

LEAST_SHARED = 8  # tokens: below, the second forward pass costs more than it saves
# sequences share a beginning while it is at least this part of what their neighbours share
LIKE = 0.75
# (past, groups of rows) for one forward pass; with `past`, for one over each group's first `past`
# tokens and some over what follows. Rows are told by their indices; those of a group are alike in
# their first `past` tokens.
Batch = tuple[int, list[list[int]]]


def plan(rows: Sequence[tuple[int, ...]], budget: int) -> list[Batch]:
    """Batches of all rows (different from each other, none empty), padded to at most `budget`
    tokens where one row has no more. Those without a shared beginning go first, the longest
    leading: memory runs out at once or never."""
    order = sorted(range(len(rows)), key=rows.__getitem__)  # neighbours share most
    # of tuples too: each with the next
    shared = [len(commonprefix([rows[a], rows[b]])) for a, b in pairwise(order)] + [0]
    # (0, [row]) of a row alone; (length of the shared beginning, rows that share it)
    alone, alike, i = [], [], 0
    while i < len(order):
        start, past = i, 0
        while shared[i] >= LEAST_SHARED:
            joined = min(past, shared[i]) if past else shared[i]
            # the next has more in common with those behind it
            if joined < LIKE * max(past, shared[i + 1]):
                break
            past, i = joined, i + 1
        (alike if past else alone).append((past, order[start : i + 1]))
        i += 1
    parts = chunks([len(rows[row]) for _, (row,) in alone], 0, budget, like=0)
    batches = [(0, [alone[i][1] for i in part]) for part in parts]
    parts = chunks([past for past, _ in alike], 0, budget)
    return batches + [(alike[part[-1]][0], [alike[i][1] for i in part]) for part in parts]


def chunks(lengths: Sequence[int], past: int, budget: int, like: float = LIKE) -> list[list[int]]:
    """Places of `lengths`, longest first, in chunks of at most `budget` tokens, padding and the
    past included; in a chunk each is at least `like` times the longest."""
    order, out = sorted(range(len(lengths)), key=lambda i: -lengths[i]), []
    for i in order:
        if (
            out
            and (longest := lengths[out[-1][0]]) * like <= lengths[i]
            and (len(out[-1]) + 1) * (past + longest) <= budget
        ):
            out[-1].append(i)
        else:
            out.append([i])
    return out
