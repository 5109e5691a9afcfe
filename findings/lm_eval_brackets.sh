#!/usr/bin/env bash
# lm-eval's bigbench_dyck_languages_generate_until counts any brackets as right, if there are as many as in the answer.
#
# Versions: lm-eval 0.4.13.
# Behaviour: the tasks of BIG-bench that generate their answers share a template, whose exact_match has
#     ignore_punctuation: true. Of an answer made of brackets and blanks only the blanks remain.
# Output seen:
#     "] )" for "> }": exact_match 1, with punctuation 0
#     "] ) ]" for "> }": exact_match 0, with punctuation 0
# What follows: scores of that task by its YAML measure the length of the answer; eval/core22.py counts punctuation.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm_eval==0.4.13 pyyaml==6.0.3
cat > "$folder/brackets.py" <<'PY'
import pathlib

import lm_eval
from lm_eval.api.metrics import exact_match_hf_evaluate

folder = pathlib.Path(lm_eval.__file__).parent / "tasks/bigbench"
assert "ignore_punctuation: true" in (folder / "generate_until_template_yaml").read_text()


def score(answer, ignore):
    values = exact_match_hf_evaluate(
        predictions=[answer], references=["> }"], ignore_punctuation=ignore
    )
    return round(float(values["exact_match"]))


for answer in "] )", "] ) ]":
    print(f'"{answer}" for "> }}": exact_match {score(answer, True)}, with punctuation {score(answer, False)}')
raise SystemExit(score("] )", True) != 1)
PY
"$folder/venv/bin/python" "$folder/brackets.py" 2>/dev/null
