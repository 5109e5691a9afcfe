#!/usr/bin/env bash
# torch 2.13.0: the first nn.Embedding on the meta device imports 823 modules (torch._refs, sympy, parts of
# dynamo), two seconds of CPU, because its reset_parameters() calls normal_ on a meta tensor, which falls back to
# a reference written in Python. nn.Linear on meta, which draws by uniform_, imports none.
#
# Who pays: every program that builds a model on meta to count it, shard it or load it, at each start, in each
# rank. Who draws the weights later anyway avoids it by nn.Embedding.from_pretrained(torch.empty(..), freeze=False).
#
# Output seen with torch 2.13.0+cpu, Python 3.11:
#   Linear, meta                         0 modules imported   0.002 s of CPU
#   Embedding.from_pretrained, meta      0 modules imported   0.000 s of CPU
#   Embedding, cpu                       0 modules imported   0.001 s of CPU
#   Embedding, meta                    823 modules imported   2.574 s of CPU
#   Embedding, meta, again               0 modules imported   0.003 s of CPU
#
# Ends with 1 if this changes: fewer than 500 modules for the first, or any for the others.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys
import time

import torch


def cost(build):
    before = set(sys.modules)
    start = time.process_time()
    build()
    return len(set(sys.modules) - before), time.process_time() - start


linear = cost(lambda: torch.nn.Linear(8, 8, device="meta"))
empty = cost(lambda: torch.nn.Embedding.from_pretrained(torch.empty(8, 8, device="meta"), freeze=False))
on_cpu = cost(lambda: torch.nn.Embedding(8, 8))
embedding = cost(lambda: torch.nn.Embedding(8, 8, device="meta"))
second = cost(lambda: torch.nn.Embedding(8, 8, device="meta"))
for name, (modules, seconds) in {
    "Linear, meta": linear,
    "Embedding.from_pretrained, meta": empty,
    "Embedding, cpu": on_cpu,
    "Embedding, meta": embedding,
    "Embedding, meta, again": second,
}.items():
    print(f"{name:32} {modules:5} modules imported {seconds:7.3f} s of CPU")
is_as_seen = embedding[0] > 500 and max(linear[0], empty[0], on_cpu[0], second[0]) < 20
sys.exit(0 if is_as_seen else "this has changed")
PY
