#!/usr/bin/env bash
# A mixture of datasets' interleave_datasets() draws the same source on all ranks at once: a step of 8 ranks is one source.
#
# datasets 5.2.0. Where the shards divide evenly, split_dataset_by_node() gives each rank other rows of the sources, and
# the same random stream for the choice among sources. So all ranks read the web at one place and code at the next. With a
# sequence a rank the global batch is no mixture, and with more the noise of its shares is sqrt(ranks) times that of
# independent draws. shuffle() does not change it. Workers of one rank's DataLoader draw by seeds of their own.
#
# What is run: a mixture of 0.5 and 0.5, two sources of 8 shards each, on one rank and on eight. A row is how many of 8
# sequences are of the first source, in each of 20 global batches.
#
# Output seen:
#   1 rank             3 3 4 2 4 4 5 6 4 4 2 2 3 4 3 5 4 2 5 4
#   8 ranks            0 8 8 8 0 0 0 0 0 0 0 8 0 8 0 8 0 0 8 8
#   8 ranks, shuffled  0 8 8 0 0 8 8 0 0 0 0 8 8 8 8 8 8 0 8 8
#   8 ranks, remedied  2 4 3 6 4 4 4 6 2 4 3 5 7 2 2 3 4 3 4 6
#
# Remedy: split the sources first, then interleave_datasets() with seed + rank.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
"$work/venv/bin/python" - <<'PY'
import sys

from datasets import Dataset, IterableDataset, interleave_datasets
from datasets.distributed import split_dataset_by_node


def source(name: str) -> IterableDataset:
    rows = {"source": [name] * 800, "row": list(range(800))}
    return Dataset.from_dict(rows).to_iterable_dataset(num_shards=8)


def counts(name: str, ranks: list[IterableDataset]) -> list[int]:
    """Of the 8 sequences of each global batch, how many are of the first source."""
    readers = [iter(rank) for rank in ranks]
    batches = [[next(reader) for reader in readers for _ in range(8 // len(ranks))] for _ in range(20)]
    for batch in batches:
        assert len({(row["source"], row["row"]) for row in batch}) == 8  # other rows on each rank
    n_first = [sum(row["source"] == "first" for row in batch) for batch in batches]
    print(f"{name:18}", *n_first)
    return n_first


def mixture(sources: list[IterableDataset], seed: int = 0) -> IterableDataset:
    return interleave_datasets(sources, probabilities=[0.5, 0.5], seed=seed)


sources = [source("first"), source("second")]
mixed = mixture(sources)
shuffled = mixed.shuffle(seed=1, buffer_size=10)
one = counts("1 rank", [mixed])
eight = counts("8 ranks", [split_dataset_by_node(mixed, rank, 8) for rank in range(8)])
eight_shuffled = counts("8 ranks, shuffled", [split_dataset_by_node(shuffled, rank, 8) for rank in range(8)])
split_first = [mixture([split_dataset_by_node(part, rank, 8) for part in sources], rank) for rank in range(8)]
remedied = counts("8 ranks, remedied", split_first)
is_single = set(eight) == set(eight_shuffled) == {0, 8}
sys.exit(0 if is_single and len(set(one)) > 2 and len(set(remedied)) > 2 else 1)
PY
