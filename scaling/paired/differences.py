"""Set two recipes side by side: pairs in which one recipe's run takes the place of the BF16 run.

Gaps of two recipes to BF16 share the BF16 run, whose luck drops out of their difference: its
interval can be narrower than those of both gaps. Overlapping intervals do not show that two recipes
are equal."""

from collections.abc import Sequence

from scaling.paired.gaps import Gap, Pair, loss_of


def pairs_between(pairs: Sequence[Pair], recipe: str, minus: str) -> list[Pair]:
    """A pair for each BF16 run that both recipes have a pair with: the run of `minus` in the BF16
    run's place, that of `recipe` in FP8's; sorted as `pairs` is."""
    minus_of = {_baseline_key(pair): pair for pair in pairs if pair.fp8.recipe == minus}
    return [
        _between(pair, minus_of[_baseline_key(pair)])
        for pair in pairs
        if pair.fp8.recipe == recipe and _baseline_key(pair) in minus_of
    ]


def _baseline_key(pair: Pair) -> tuple[str, int, int]:
    """Of its BF16 run; a table's pair_id is shared by the points of a curve."""
    return pair.bf16.pair_id, pair.bf16.N, pair.bf16.tokens


def _between(first: Pair, second: Pair) -> Pair:
    """first's FP8 run beside second's."""
    gaps = {name: _gap_between(first, second, name) for name in first.gap}
    n_converted = max(first.n_converted, second.n_converted)  # one run in FP8 makes a difference
    is_switched = first.is_switched or second.is_switched
    return Pair(second.fp8, first.fp8, gaps, None, n_converted, is_switched)


def _gap_between(first: Pair, second: Pair, evaluation: str) -> Gap:
    """Without a standard error over validation sequences: those of the two gaps are not of
    independent sequences."""
    nats = first.gap[evaluation].nats - second.gap[evaluation].nats
    return Gap(nats, 100 * nats / loss_of(second.fp8, evaluation), None)
