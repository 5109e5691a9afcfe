#!/usr/bin/env bash
# lm_eval --use_cache gives every model the scores of the first: its keys are hashes of the questions alone.
#
# lm-eval 0.4.13 with transformers 5.24.0 and torch 2.13.0, on a CPU. The database of --use_cache holds answers under
# the hash of a request's type and arguments. Neither the model nor its revision, dtype or tokenizer is in the key or
# elsewhere in the file. A second call with the same file and another --model_args computes nothing and reports the
# first model's scores under the second's name: all checkpoints of a run score alike, and a BF16 model as its FP8 twin.
#
# What is run: a task of 200 questions for two random Llamas (2 layers, width 32) by simple_evaluate(), which is what
# the command line calls: each alone, then one after the other with use_cache="answers".
#
# Output seen (numbers depend on the random weights):
#   alone            first: acc 0.245   second: acc 0.290
#   with use_cache   first: acc 0.245   second: acc 0.245
#   the results with use_cache name {'pretrained': 'second', 'dtype': 'float32'}
#
# Remedy: a file of its own for each model, revision and dtype.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0 lm_eval==0.4.13

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > scores.py <<'PY'
import random
import sys

import datasets
import lm_eval
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(64)]
rules = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<end>", *WORDS])}, "<end>"))
rules.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>", pad_token="<end>")
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
for seed, name in enumerate(("first", "second")):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=65, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.6)
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)

draw = random.Random(0)
rows = [{"q": " ".join(draw.choices(WORDS, k=5)), "choices": draw.sample(WORDS, 4)} for _ in range(200)]
task = dict(
    task="questions",
    custom_dataset=lambda **_: datasets.DatasetDict(test=datasets.Dataset.from_list(rows)),
    test_split="test",
    output_type="multiple_choice",
    doc_to_text="{{q}}",
    doc_to_target=0,
    doc_to_choice="{{choices}}",
)


def scored(name: str, use_cache: str | None) -> dict:
    """lm-eval's results for the model in the folder `name`."""
    return lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": name, "dtype": "float32"},
        tasks=[task],
        device="cpu",
        batch_size=16,
        use_cache=use_cache,
        bootstrap_iters=0,
    )


def accuracy(results: dict) -> float:
    return results["results"]["questions"]["acc,none"]


alone = [accuracy(scored(name, None)) for name in ("first", "second")]
first, second = (scored(name, "answers") for name in ("first", "second"))
cached = [accuracy(first), accuracy(second)]
print(f"alone            first: acc {alone[0]:.3f}   second: acc {alone[1]:.3f}")
print(f"with use_cache   first: acc {cached[0]:.3f}   second: acc {cached[1]:.3f}")
print("the results with use_cache name", second["config"]["model_args"])
sys.exit(0 if alone[0] != alone[1] and cached == [alone[0], alone[0]] else 1)
PY
"$work/venv/bin/python" scores.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
