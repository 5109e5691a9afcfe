"""Choose the best recipe by a declared rule.

Ranked is every recipe that converts a Linear in each of its pairs and ran in all that is compared:
the sizes, budgets and seeds where more than half of the recipes ran, of each size the largest such
budget. First is the lowest common gap, with its sign. A recipe ties whose paired difference to it
is not told from 0, or has no interval; of these the fastest is the best, or the first where speed
means nothing.

The first is the lowest of several, by luck in part: alone at 5 %, one of five equal recipes would
be told from it in a quarter of all studies. So the differences of all pairs of recipes are tested
together (Holm 1979): at most one study in twenty tells any two equal recipes apart."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scaling.paired.cost import Throughput, throughput
from scaling.paired.estimates import Estimate, estimate, grouped, p_of_zero, told_together
from scaling.paired.gaps import Pair, is_idle
from scaling.paired.reasons import Reason, reason


class PairKey(NamedTuple):
    """What is compared of each recipe: one pair."""

    N: int
    tokens: int
    seed: int | str


@dataclass(frozen=True)
class Ranked:
    """One recipe's gap where all are compared, in 100 ln(L_FP8 / L_BF16)."""

    recipe: str  # its arm
    gap: Estimate  # per cent
    difference: Estimate | None  # to the first, over pairs; null of the first
    ties: bool  # with the first
    throughput: Throughput  # FP8's against BF16's, over the same pairs


@dataclass(frozen=True)
class LeftOut:
    """A recipe that is not ranked."""

    recipe: str  # its arm
    reason: Reason | str  # why; in a file its sentence


@dataclass(frozen=True)
class Ranking:
    """The recipes from the lowest gap on."""

    recipes: list[Ranked]
    left_out: list[LeftOut]
    compared: list[PairKey]

    @property
    def tied(self) -> list[Ranked]:
        """The first and those that are not told apart from it."""
        return [ranked for ranked in self.recipes if ranked.ties]

    @property
    def speed_unknown(self) -> Reason | str | None:
        """Why speed decides nothing between those that tie; None where it does."""
        for ranked in self.tied:
            if ranked.throughput.reason:
                return ranked.throughput.reason
        return None

    @property
    def is_of_one(self) -> bool:
        """Whether one recipe alone is ranked, of several."""
        return len(self.recipes) == 1 and bool(self.left_out)

    @property
    def best(self) -> Ranked | None:
        """None where none is ranked, or one alone, which is held against nothing."""
        tied = self.tied
        if self.is_of_one:
            return None
        if len(tied) < 2 or self.speed_unknown:
            return tied[0] if tied else None
        return max(tied, key=lambda ranked: ranked.throughput.ratio or 0.0)


def rank(pairs: Sequence[Pair], evaluation: str) -> Ranking:
    """The ranking of the recipes of `pairs` by how their gaps are under one evaluation."""
    pairs_of_recipe, left_out = _paired_recipes(pairs)
    compared = compared_keys([list(pair_of_key) for pair_of_key in pairs_of_recipe.values()])
    gaps: dict[str, list[float]] = {}  # recipe -> its gaps where all are compared
    for recipe, pair_of_key in pairs_of_recipe.items():
        missing = [key for key in compared if key not in pair_of_key]
        if compared and not missing:
            gaps[recipe] = [pair_of_key[key].gap[evaluation].log_percent for key in compared]
        else:
            left_out.append(LeftOut(recipe, reason("no_pair_at", cells=missing)))
    order = sorted(gaps, key=lambda recipe: (np.mean(gaps[recipe]), recipe))
    distinguished = told_from_first(gaps, order)
    recipes: list[Ranked] = []
    for recipe in order:
        speed = throughput([pairs_of_recipe[recipe][key] for key in compared])
        difference = None
        if recipes:
            difference = estimate(np.subtract(gaps[recipe], gaps[order[0]]))
        gap = estimate(gaps[recipe])
        recipes.append(Ranked(recipe, gap, difference, recipe not in distinguished, speed))
    return Ranking(recipes, left_out, compared)


def _paired_recipes(
    pairs: Sequence[Pair],
) -> tuple[dict[str, dict[PairKey, Pair]], list[LeftOut]]:
    """(recipe -> its pairs, the recipes that convert no Linear in some pair)."""
    pairs_of_recipe, left_out = {}, []
    for recipe, members in grouped(pairs, lambda pair: pair.fp8.recipe):
        idle = [pair.fp8.run_id for pair in members if is_idle([pair])]
        if idle:
            left_out.append(LeftOut(recipe, reason("converts_no_linear", runs=idle)))
        else:
            pairs_of_recipe[recipe] = {_key_of(pair): pair for pair in members}
    return pairs_of_recipe, left_out


def compared_keys(keys_of_recipes: Sequence[Sequence[PairKey]]) -> list[PairKey]:
    """The keys where more than half of the recipes ran, of each size those of the largest such
    budget."""
    counts = Counter(key for keys in keys_of_recipes for key in keys)
    shared = [key for key in sorted(counts) if 2 * counts[key] > len(keys_of_recipes)]
    largest = {key.N: key.tokens for key in shared}  # sorted: the last of a size is the largest
    return [key for key in shared if key.tokens == largest[key.N]]


def _key_of(pair: Pair) -> PairKey:
    return PairKey(pair.fp8.N, pair.fp8.tokens, pair.fp8.seed)


def told_from_first(gaps: Mapping[str, Sequence[float]], order: Sequence[str]) -> set[str]:
    """The recipes whose gap is told from that of the first in `order`, all pairs of recipes tested
    together; gaps: recipe -> its gap at each key, the same keys for all."""
    compared, p_values = [], []
    for first, second in itertools.combinations(order, 2):
        p = p_of_zero(estimate(np.subtract(gaps[second], gaps[first])))
        if p is not None:
            compared.append((first, second))
            p_values.append(p)
    is_told = told_together(p_values)
    return {
        second
        for (first, second), is_one_told in zip(compared, is_told, strict=True)
        if is_one_told and first == order[0]
    }
