#!/usr/bin/env bash
# lm-eval 0.4.13: a package that registers a model of its own before anything has asked for one hides all of lm-eval's.
# get_model() imports lm_eval.models, which registers them, only while the registry is empty. So "hf", "vllm" and the
# rest are unknown in a process whose first step was `@register_model("mine")`, as a plugin or a wrapper around
# lm-eval's command line does it; in the other order both are known.
#
# Who is hurt: who compares a model of his own with a public one in one script, and is told that "hf" does not exist.
# Remedy: import lm_eval.models before registering.
#
# Output seen with lm-eval 0.4.13, Python 3.11:
#   registered first: hf is unknown, mine is known
#   lm_eval.models imported first: hf is known, mine is known
#
# Ends with 1 if this changes.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 lm-eval==0.4.13

cd "$work"
cat > order.py <<'PY'
import importlib
import sys

if sys.argv[1] == "models first":
    importlib.import_module("lm_eval.models")

from lm_eval.api.model import LM
from lm_eval.api.registry import get_model, register_model


@register_model("mine")
class Mine(LM):
    def loglikelihood(self, requests):
        return []

    def loglikelihood_rolling(self, requests):
        return []

    def generate_until(self, requests):
        return []


def state(name: str) -> str:
    try:
        get_model(name)
    except (KeyError, ValueError):
        return "unknown"
    return "known"


print(f"hf is {state('hf')}, mine is {state('mine')}")
PY

first=$("$work/venv/bin/python" order.py "mine first" 2>/dev/null | tail -1)
second=$("$work/venv/bin/python" order.py "models first" 2>/dev/null | tail -1)
echo "registered first: $first"
echo "lm_eval.models imported first: $second"
[ "$first" = "hf is unknown, mine is known" ]
[ "$second" = "hf is known, mine is known" ]
