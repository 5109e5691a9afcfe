#!/usr/bin/env bash
# lm_eval --model hf scores rolling log-likelihoods wrongly where texts have a common ending.
#
# lm-eval 0.4.13 with transformers 5.23.0 and torch 2.13.0, on a CPU, in fp32.
# `loglikelihood_rolling` cuts a text into windows of the model's context. The last window is filled up
# with tokens that an earlier window has scored, of which only the last few are scored again. HFLM keeps
# the logits of a batch under the tokens of a window (Collator with group_by="contexts", switched on by
# `logits_cache=True`, the default), not under the place where the scored part begins. Two windows of
# equal tokens, of which one scores more than the other, then share one set of logits, and the scored
# part of the second is taken from the wrong place.
#
# What is run: a random Llama (2 layers, width 32, context of 16 tokens, 64 words) and three texts that
# end alike but have different lengths. Each text is scored alone, together with the others, and together
# with logits_cache=False.
#
# Output seen (numbers depend on the random weights):
#   alone, in nats:                [-214.245, -236.437, -250.196]
#   together:                      [-212.897, -236.437, -251.597]
#   together, logits_cache=False:  [-214.245, -236.437, -250.196]
#   lm-eval 0.4.13: texts with a common ending get other scores together than alone
#
# What follows: scores of such texts by `lm_eval --model hf` are comparable only with logits_cache=False.
# The script ends with 0 while this holds and with 1 once scores together are those alone.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 lm_eval==0.4.13

cat > "$folder/scores.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import lm_eval
import tokenizers
import torch
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
words = ["<end>", *(f"w{i}" for i in range(63))]
rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<end>"))
rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>", pad_token="<end>")
sizes = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes)).eval()
for parameter in model.parameters():        # opinions: each token of the past moves the logits
    torch.nn.init.normal_(parameter, 0.0, 0.6)

ending = [f"w{i}" for i in range(40)]
texts = [" ".join([*(f"w{60 - i}" for i in range(n)), *ending]) for n in (1, 4, 9)]


def scores(batch: list[str], cache: bool) -> list[float]:
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=16, max_length=16, logits_cache=cache, device="cpu")
    requests = [SimpleNamespace(args=(text,)) for text in batch]
    return [round(score, 3) for score in lm.loglikelihood_rolling(requests, disable_tqdm=True)]


alone = [scores([text], True)[0] for text in texts]
together, without_cache = scores(texts, True), scores(texts, False)
print("alone, in nats:               ", alone)
print("together:                     ", together)
print("together, logits_cache=False: ", without_cache)
is_wrong = max(abs(a - b) for a, b in zip(alone, together)) > 0.5
is_right_without = max(abs(a - b) for a, b in zip(alone, without_cache)) < 0.01
if is_wrong and is_right_without:
    print(f"lm-eval {lm_eval.__version__}: texts with a common ending get other scores together than alone")
    sys.exit(0)
print("the behaviour has changed")
sys.exit(1)
PYTHON
"$folder/venv/bin/python" "$folder/scores.py" 2> "$folder/log" || { code=$?; tail -n 5 "$folder/log"; exit "$code"; }
