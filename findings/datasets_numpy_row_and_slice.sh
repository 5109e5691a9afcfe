#!/usr/bin/env bash
# datasets gives a column as float64 where one row is asked for and as float32 where several are.
#
# datasets 5.2.0. with_format("numpy") hands a single row's float64 out as it is stored, and rounds the same column to
# float32 in a slice or a batch of iter(): whole numbers lose digits from 2^24 on, so token counts
# and FLOPs that are stored as float64 change with the way they are read. with_format(None) and "pandas" keep float64.
#
# What is run: a column of float64 with 15,000,000,001 tokens, read as a row and as a slice.
#
# Output seen:
#   row                   float64 15000000001
#   slice                 float32 15000000512
#   batch of iter()       float32 15000000512
#   slice, dtype=float64  float64 15000000001
#
# Remedy: with_format("numpy", dtype=numpy.float64), or no format.
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

import numpy as np
from datasets import Dataset

rows = Dataset.from_dict({"tokens": [15_000_000_001.0, 2.0]})
assert rows.features["tokens"].dtype == "float64"
formatted = rows.with_format("numpy")
read = {
    "row": formatted[0]["tokens"],
    "slice": formatted[:1]["tokens"][0],
    "batch of iter()": next(formatted.iter(1))["tokens"][0],
    "slice, dtype=float64": rows.with_format("numpy", dtype=np.float64)[:1]["tokens"][0],
}
for name, value in read.items():
    print(f"{name:21} {value.dtype} {value:.0f}")
types = [str(value.dtype) for value in read.values()]
sys.exit(0 if types == ["float64", "float32", "float32", "float64"] else 1)
PY
