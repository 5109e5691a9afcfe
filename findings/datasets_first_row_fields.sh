#!/usr/bin/env bash
# datasets drops a field that the first row lacks, in from_list() and in map(), and says nothing.
#
# datasets 5.2.0. Dataset.from_list() takes its columns from the first dictionary, and map() from the first result of
# its function: keys that come later are dropped with their values. So scores that only some documents have, or a
# "reason" that a filter adds where it has one, depend on the order of the rows. The other way round, a field that a
# later row lacks is None in from_list(). Keys within a nested dictionary, and load_dataset("json") of the same rows,
# keep all. An iterable dataset's map() keeps all too.
#
# What is run: two rows, of which the second alone has a score, by each way.
#
# Output seen:
#   from_list           [{'i': 0}, {'i': 1}]
#   map                 [{'i': 0, 'lang': 'en'}, {'i': 1, 'lang': 'en'}]
#   load_dataset json   [{'i': 0, 'score': None}, {'i': 1, 'score': 0.5}]
#   nested              [{'meta': {'i': 0, 'score': None}}, {'meta': {'i': 1, 'score': 0.5}}]
#   map of an iterable  [{'i': 0, 'lang': 'en'}, {'i': 1, 'lang': 'en', 'score': 0.5}]
#
# Remedy: name all fields, features=Features(..), or each key in each row.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > fields.py <<'PY'
import json
import sys
from pathlib import Path

from datasets import Dataset, load_dataset

ROWS = [{"i": 0}, {"i": 1, "score": 0.5}]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def annotated(row: dict) -> dict:
    return {"lang": "en"} if row["i"] == 0 else {"lang": "en", "score": 0.5}


plain = Dataset.from_list([{"i": 0}, {"i": 1}])
read = {
    "from_list": Dataset.from_list(ROWS),
    "map": plain.map(annotated),
    "load_dataset json": load_dataset("json", data_files="rows.jsonl")["train"],
    "nested": Dataset.from_list([{"meta": row} for row in ROWS]),
    "map of an iterable": plain.to_iterable_dataset().map(annotated),
}
keeps = {}
for name, dataset in read.items():
    rows = list(dataset)
    print(f"{name:19} {rows}")
    keeps[name] = "0.5" in str(rows)
sys.exit(0 if list(keeps.values()) == [False, False, True, True, True] else 1)
PY
"$work/venv/bin/python" fields.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
