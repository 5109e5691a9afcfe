#!/usr/bin/env bash
# datatrove's MinHash takes texts that differ in their numbers for copies, and keeps all copies of texts under five words.
#
# datatrove 0.10.1 with spacy 3.8.18. Before hashing each number is replaced by 0 and punctuation is dropped
# (TextNormConfig, norm_numbers=True). So of exercises in arithmetic, rows of tables and logs by one template a single one
# stays. Texts of fewer words than n_grams, which is five, have no n-gram and no signature: they pass, however often they
# are there.
#
# What is run: signatures, buckets, clusters and filter with the default MinhashConfig, on four exercises with other
# numbers and results, and on five copies of one sentence of four words and of one of five.
#
# Output seen:
#   4 exercises, all different     1 kept
#   the same, norm_numbers=False   4 kept
#   5 copies of four words         5 kept
#   5 copies of five words         1 kept
#
# Remedy: TextNormConfig(norm_numbers=False) for such data, and exact deduplication before.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datatrove==0.10.1 numpy==2.4.6 spacy==3.8.18 xxhash==3.8.2 regex==2026.11.19 \
    tokenizers==0.23.3

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > copies.py <<'PY'
import shutil
import sys

from datatrove.data import Document
from datatrove.pipeline.dedup import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.utils.text import TextNormConfig


def n_kept(name: str, texts: list[str], config: MinhashConfig) -> int:
    """How many of the texts pass the four stages."""
    shutil.rmtree("stages", ignore_errors=True)
    documents = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]
    MinhashDedupSignature("stages/signatures", config=config).run(iter(documents))
    for bucket in range(config.num_buckets):
        stage = MinhashDedupBuckets("stages/signatures", "stages/buckets", config=config)
        stage.run(rank=bucket, world_size=config.num_buckets)
    MinhashDedupCluster("stages/buckets", "stages/remove", config=config).run()
    n = len(list(MinhashDedupFilter("stages/remove").run(iter(documents))))
    print(f"{name:30} {n} kept")
    return n


exercises = [
    f"Tom has {a} apples and buys {b} more. How many does he have now? {a} + {b} = {a + b}"
    for a, b in ((1, 2), (30, 45), (7, 8), (512, 64))
]
as_given, exact = MinhashConfig(), MinhashConfig(norm_config=TextNormConfig(norm_numbers=False))
counts = [
    n_kept("4 exercises, all different", exercises, as_given),
    n_kept("the same, norm_numbers=False", exercises, exact),
    n_kept("5 copies of four words", 5 * ["Thank you very much."], as_given),
    n_kept("5 copies of five words", 5 * ["Yes, thank you very much."], as_given),
]
sys.exit(0 if counts == [1, 4, 5, 1] else 1)
PY
"$work/venv/bin/python" copies.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
