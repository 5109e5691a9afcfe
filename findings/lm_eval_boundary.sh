#!/usr/bin/env bash
# lm-eval does not score the part of an answer that shares a token with the prompt: two answers then have one score.
#
# lm-eval 0.4.13 with transformers 5.24.0 and torch 2.13.0, on a CPU. Prompt and answer are tokenized together, and of
# the tokens as many are cut off at the front as the prompt alone has. Where a token crosses the boundary it counts as
# the prompt's, though the prompt the model reads ends without it. The answer's beginning is nowhere: "able to" and
# "fair to" after "the man was un" both are " to" after "the man was un". Ties go to the first choice. It happens where no
# white space separates the two: with target_delimiter: "" after words, and in languages that are written without it.
#
# What is run: a byte-level BPE of 279 tokens, in which "unable" and "unfair" are tokens, and a random Llama.
#
# Output seen (numbers depend on the random weights):
#   'able to' prompt ['the', ' man', ' was', ' un'] scored [' to'] -5.7163
#   'fair to' prompt ['the', ' man', ' was', ' un'] scored [' to'] -5.7163
#   279 tokens; together: ['the', ' man', ' was', ' unable', ' to']
#
# Remedy: prompts that end where a token must end, as before a space.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0 lm_eval==0.4.13

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > boundary.py <<'PY'
import sys
from types import SimpleNamespace

import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
rules = Tokenizer(models.BPE())
rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
rules.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
)
rules.train_from_iterator(50 * ["the man was unable to", "the man was unfair to", "un able fair"], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>", pad_token="<end>")
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")


def texts(tokens: list[int]) -> list[str]:
    return [tokenizer.decode([token]) for token in tokens]


scored = []
for answer in ("able to", "fair to"):
    request = SimpleNamespace(args=("the man was un", answer))
    score = lm.loglikelihood([request], disable_tqdm=True)[0][0]
    prompt_tokens, answer_tokens = lm._encode_pair(*request.args)
    print(f"{answer!r} prompt {texts(prompt_tokens)} scored {texts(answer_tokens)} {score:.4f}")
    scored.append((texts(answer_tokens), score))
print(f"{len(tokenizer)} tokens; together:", texts(tokenizer.encode("the man was unable to")))
sys.exit(0 if scored[0] == scored[1] and scored[0][0] == [" to"] else 1)
PY
"$work/venv/bin/python" boundary.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
