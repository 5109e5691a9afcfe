#!/usr/bin/env bash
# lm-eval shows a question other few-shot examples on two GPUs than on one, and its cache of requests keeps old ones.
#
# lm-eval 0.4.13. A task draws its examples from one random stream, question after question, and each rank of
# `accelerate launch` starts that stream anew for its share of the questions. So all questions but the first see other
# examples with another number of GPUs, and questions on different ranks see the same. Scores of the same model differ.
# `--cache_requests true` stores the prompts under the task's name, the number of examples, the ranks and the tokenizer.
# The seed is not in the key, nor is the prompt's wording: with another `--seed`, or after an edit of the task's YAML,
# the old prompts are scored. Scores over seeds then have no spread at all.
#
# What is run: prompts of a task of six questions and two examples each, by one rank and by two; then those of two seeds
# and of two wordings, with the cache and without.
#
# Output seen:
#   one rank  example24: yes  example14: yes  question0:
#   two ranks example24: yes  example14: yes  question0:
#   one rank  example3: yes  example0: yes  question1:
#   two ranks example24: yes  example14: yes  question1:
#   ..
#   1 of 6 prompts are equal
#   another seed: from the cache 'example24: yes  example14: yes  question0:', without 'example4: yes  example18: yes
#     question0:'
#   another wording: from the cache 'example24: yes  example14: yes  question0:', without 'Q: example24: yes  Q: ..'
#
# Remedy: compare scores of equal numbers of GPUs; a folder LM_HARNESS_CACHE_PATH of its own for each seed and wording.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lm_eval==0.4.13

cd "$work"
export LM_HARNESS_CACHE_PATH="$work/requests" HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > prompts.py <<'PYTHON'
import sys

import datasets
from lm_eval.api.task import ConfigurableTask


def rows(name: str, n: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"q": [f"{name}{i}" for i in range(n)], "a": ["yes"] * n})


def prompts(seed: int = 1234, wording: str = "{{q}}:", rank: int = 0, ranks: int = 1, cache: bool = False) -> dict:
    """What stands before the answer, by question."""
    config = dict(
        task="questions",
        custom_dataset=lambda **_: datasets.DatasetDict(test=rows("question", 6), train=rows("example", 30)),
        test_split="test",
        fewshot_split="train",
        num_fewshot=2,
        output_type="multiple_choice",
        doc_to_text=wording,
        doc_to_target="{{a}}",
        doc_to_choice=["yes", "no"],
    )
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(seed)
    task.build_all_requests(rank=rank, world_size=ranks, cache_requests=cache)
    return {instance.doc["q"]: instance.args[0].replace("\n", " ").strip() for instance in task.instances}


one = prompts()
two = prompts(rank=0, ranks=2) | prompts(rank=1, ranks=2)
for question in sorted(one):
    print(f"one rank  {one[question]}")
    print(f"two ranks {two[question]}")
n_equal = sum(one[question] == two[question] for question in one)
print(f"{n_equal} of {len(one)} prompts are equal")

prompts(cache=True)
kept = {
    "another seed": (prompts(seed=1, cache=True), prompts(seed=1)),
    "another wording": (prompts(wording="Q: {{q}}:", cache=True), prompts(wording="Q: {{q}}:")),
}
for name, (cached, fresh) in kept.items():
    print(f"{name}: from the cache {cached['question0']!r}, without {fresh['question0']!r}")
is_stale = all(cached == one and fresh != one for cached, fresh in kept.values())
sys.exit(0 if n_equal == 1 and is_stale else 1)
PYTHON
"$work/venv/bin/python" prompts.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
