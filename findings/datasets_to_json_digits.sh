#!/usr/bin/env bash
# Dataset.to_json() writes 3e-12 as 0.0 and 0.30000000000000004 as 0.3: it rounds at ten places behind the point.
#
# datasets 5.2.0. The places are counted from the point, not from the first digit, so small numbers lose all of theirs:
# probabilities, learning rates, p-values, gradient norms; a log-likelihood of -1e-11 becomes -0.0. to_csv() and
# to_parquet() of the same dataset write every digit. double_precision=15, the most that to_json() takes, moves the
# limit to 1e-15.
#
# What is run: three numbers, written and read again.
#
# Output seen:
#   to_json                        [0.0, 6e-05, 1.2345678901]
#   to_json, double_precision=15   [3e-12, 6e-05, 1.234567890123457]
#   to_csv                         [3e-12, 6e-05, 1.2345678901234567]
#   to_parquet                     [3e-12, 6e-05, 1.2345678901234567]
#
# Remedy: json.dumps() of each row, or Parquet.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 numpy==2.4.6

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > digits.py <<'PY'
import json
import sys
from pathlib import Path

import pyarrow.parquet
from datasets import Dataset

NUMBERS = [3e-12, 6e-05, 1.2345678901234567]
rows = Dataset.from_dict({"x": NUMBERS})
rows.to_json("plain.jsonl")
rows.to_json("precise.jsonl", double_precision=15)
rows.to_csv("rows.csv")
rows.to_parquet("rows.parquet")


def numbers(path: str) -> list[float]:
    return [json.loads(line)["x"] for line in Path(path).read_text().splitlines()]


read = {
    "to_json": numbers("plain.jsonl"),
    "to_json, double_precision=15": numbers("precise.jsonl"),
    "to_csv": [float(line) for line in Path("rows.csv").read_text().splitlines()[1:]],
    "to_parquet": pyarrow.parquet.read_table("rows.parquet")["x"].to_pylist(),
}
for name, values in read.items():
    print(f"{name:30} {values}")
is_zero = read["to_json"][0] == 0 and read["to_json, double_precision=15"][0] == 3e-12
sys.exit(0 if is_zero and read["to_csv"] == read["to_parquet"] == NUMBERS else 1)
PY
"$work/venv/bin/python" digits.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
