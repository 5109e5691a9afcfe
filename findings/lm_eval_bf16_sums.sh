#!/usr/bin/env bash
# lm_eval --model hf hands back the log-likelihoods of a BF16 model as BF16 numbers: three digits, ties among answers.
#
# lm-eval 0.4.13 with transformers 5.23.0 and torch 2.13.0, on a CPU. transformers leaves the logits of a BF16 model in
# BF16. HFLM takes their log-softmax in that type unless softmax_dtype is given, picks the tokens and sums them as a
# BF16 tensor. The sum, not only its terms, has 8 bits: between 256 and 512 nats it moves in steps of 2, between 2048 and
# 4096 in steps of 16. A text's score is off by as much as FP8 costs, and answers of nearly equal likelihood tie: the
# first wins. softmax_dtype=float32 sums the same logits in fp32.
#
# What is run: a random Llama in BF16 (2 layers, width 32, 64 words), texts of 20 to 500 words, and 200 questions of
# four answers of 12 words.
#
# Output seen (numbers depend on the random weights):
#    20 words: -90.50 nats, with softmax_dtype=float32 -90.56: 0.07 percent apart
#    60 words: -288.00 nats, with softmax_dtype=float32 -288.91: 0.32 percent apart
#   200 words: -960.00 nats, with softmax_dtype=float32 -959.44: 0.06 percent apart
#   500 words: -2384.00 nats, with softmax_dtype=float32 -2387.78: 0.16 percent apart
#   as given: in 5 of 200 questions two answers share the first place
#   float32 : in 0 of 200 questions two answers share the first place
#
# Remedy: --model_args softmax_dtype=float32, as eval/public_models.py gives it.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 lm_eval==0.4.13

cat > "$work/sums.py" <<'PYTHON'
import random
import sys
from types import SimpleNamespace

import tokenizers
import torch
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
random.seed(0)
words = ["<end>", *(f"w{i}" for i in range(63))]
rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<end>"))
rules.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>", pad_token="<end>")
sizes = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=512, **sizes)).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 0.0, 0.5)
model = model.to(torch.bfloat16)


def text(n: int) -> str:
    return " ".join(random.choices(words[1:], k=n))


def request(*args):
    return SimpleNamespace(args=args)


as_given = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
in_fp32 = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", softmax_dtype="float32")

largest_error = 0.0
for n in (20, 60, 200, 500):
    requests = [request(text(n))]
    (given,), (exact,) = (lm.loglikelihood_rolling(requests, disable_tqdm=True) for lm in (as_given, in_fp32))
    error = abs(given / exact - 1)
    largest_error = max(largest_error, error)
    print(f"{n:3} words: {given:.2f} nats, with softmax_dtype=float32 {exact:.2f}: {100 * error:.2f} percent apart")

questions = [request(text(5), " " + text(12)) for _ in range(200) for _ in range(4)]
ties = {}
for name, lm in {"as given": as_given, "float32": in_fp32}.items():
    scores = [score for score, _ in lm.loglikelihood(questions, disable_tqdm=True)]
    groups = [sorted(scores[4 * i : 4 * i + 4]) for i in range(200)]
    ties[name] = sum(group[-1] == group[-2] for group in groups)
    print(f"{name:8}: in {ties[name]} of 200 questions two answers share the first place")
sys.exit(0 if largest_error > 0.001 and ties["as given"] > 3 and ties["float32"] == 0 else 1)
PYTHON
"$work/venv/bin/python" "$work/sums.py" 2> "$work/log" || { code=$?; tail -n 5 "$work/log"; exit "$code"; }
