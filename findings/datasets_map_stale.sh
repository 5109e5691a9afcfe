#!/usr/bin/env bash
# datasets' map() hands out results of old code where the code that was edited lies in an imported module.
#
# datasets 5.2.0. map() keeps its result on disk under a hash of the function, and computes it again once the function
# has changed. For the body of a function of the script that is so. A function of an imported module is hashed by its
# name: an edit of it changes no hash, and the next process gets the tokens or labels of the code before.
#
# What is run: a script that maps rows of a file by clean.scale, and by a function of its own that calls clean.scale; then
# the same script after an edit of clean.py from a factor of 10 to one of 1000, in another process.
#
# Output seen:
#   clean.py multiplies by 10    map(clean.scale) [10, 20]      map(own) [10, 20]
#   clean.py multiplies by 1000  map(clean.scale) [10, 20]      map(own) [10, 20]
#   the same, no cache           map(clean.scale) [1000, 2000]  map(own) [1000, 2000]
#
# Remedy: load_from_cache_file=False after an edit, or new_fingerprint= of a version of one's own.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
printf '{"a": 1}\n{"a": 2}\n' > rows.jsonl
cat > mapped.py <<'PY'
import sys

import clean
from datasets import load_dataset

rows = load_dataset("json", data_files="rows.jsonl")["train"]
name, *words = sys.argv[1:]
uses_cache = "fresh" not in words


def own(row: dict) -> dict:
    return clean.scale(row)


direct, indirect = (
    rows.map(function, load_from_cache_file=uses_cache)["b"][:] for function in (clean.scale, own)
)
print(f"{name:28} map(clean.scale) {str(direct):13} map(own) {indirect}")
PY

for factor in 10 1000; do
    printf 'def scale(row):\n    return {"b": row["a"] * %s}\n' "$factor" > clean.py
    "$work/venv/bin/python" mapped.py "clean.py multiplies by $factor" 2> log | tee -a seen || { tail -n 5 log; exit 1; }
done
"$work/venv/bin/python" mapped.py "the same, no cache" fresh 2> log | tee -a seen || { tail -n 5 log; exit 1; }
[ "$(sed 's/.*scale)//' seen | tr -d ' \n')" = "[10,20]map(own)[10,20][10,20]map(own)[10,20][1000,2000]map(own)[1000,2000]" ]
