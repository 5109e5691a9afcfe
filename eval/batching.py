"""Batches of token sequences that compute a shared beginning once.

A row is a sequence of tokens, named by its place in the caller's list."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix

LEAST_SHARED = 8  # tokens: below, the second forward pass costs more than it saves
# sequences share a beginning while it is at least this part of what their neighbours share
LIKE = 0.75


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass; with a shared beginning, for one over each group's first `shared`
    tokens and some over what follows."""

    shared: int  # tokens that the rows of a group have in common; 0: nothing is computed twice
    groups: list[list[int]]  # rows

    @property
    def n_rows(self) -> int:
        return sum(map(len, self.groups))


@dataclass(frozen=True)
class _Group:
    """Rows that share their first `shared` tokens; a row alone shares nothing."""

    shared: int
    rows: list[int]


def make_batches(rows: Sequence[tuple[int, ...]], budget: int) -> list[Batch]:
    """Batches of all rows (different from each other, none empty), padded to at most `budget`
    tokens where one row has no more. Those without a shared beginning go first, the longest
    leading: memory runs out at once or never."""
    groups = _group_by_beginning(rows)
    alone = [group.rows for group in groups if not group.shared]
    sharing = [group for group in groups if group.shared]
    batches = []
    for places in chunks([len(rows[row]) for (row,) in alone], 0, budget, like=0):
        batches.append(Batch(0, [alone[place] for place in places]))
    for places in chunks([group.shared for group in sharing], 0, budget):
        shortest = sharing[places[-1]].shared
        batches.append(Batch(shortest, [sharing[place].rows for place in places]))
    return batches


def _group_by_beginning(rows: Sequence[tuple[int, ...]]) -> list[_Group]:
    """Every row once, in groups of neighbours that share most."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    # tokens that each has in common with the next; commonprefix knows tuples too
    with_next = [len(commonprefix([rows[a], rows[b]])) for a, b in pairwise(order)] + [0]
    groups = []
    i = 0
    while i < len(order):
        start, shared = i, 0
        while with_next[i] >= LEAST_SHARED:
            joined = min(shared, with_next[i]) if shared else with_next[i]
            # the next has more in common with those behind it
            if joined < LIKE * max(shared, with_next[i + 1]):
                break
            shared, i = joined, i + 1
        groups.append(_Group(shared, order[start : i + 1]))
        i += 1
    return groups


def chunks(lengths: Sequence[int], past: int, budget: int, like: float = LIKE) -> list[list[int]]:
    """Places of `lengths`, longest first, in chunks of at most `budget` tokens, padding and the
    past included; in a chunk each is at least `like` times the longest."""
    longest_first = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    chunks_so_far: list[list[int]] = []
    for place in longest_first:
        if chunks_so_far:
            chunk = chunks_so_far[-1]
            longest = lengths[chunk[0]]
            fits = (len(chunk) + 1) * (past + longest) <= budget
            if fits and longest * like <= lengths[place]:
                chunk.append(place)
                continue
        chunks_so_far.append([place])
    return chunks_so_far
