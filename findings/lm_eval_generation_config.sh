#!/usr/bin/env bash
# lm_eval --model hf applies the repetition penalty of a model's folder to answers that the task wants greedy.
#
# lm-eval 0.4.13 with transformers 5.23.0 and torch 2.13.0, on a CPU. For a task without sampling HFLM passes
# do_sample=False alone. transformers takes all else from generation_config.json, where chat models state a
# repetition_penalty for sampling. It stays in force: answers are not those of the highest logits, and two models, or a
# model before and after fine-tuning, are scored by different rules. do_sample and temperature of the file are off.
#
# What is run: a random Llama (2 layers, width 32, 64 words), its answer of twelve tokens to one prompt, by its
# generation_config.json.
#
# Output seen (words depend on the random weights):
#   nothing                  w24 w61 w31 w52 w46 w31 w24 w2 w61 w30 w46 w30
#   do_sample=True, top_k=3  w24 w61 w31 w52 w46 w31 w24 w2 w61 w30 w46 w30
#   repetition_penalty=1.3   w24 w61 w31 w52 w46 w21 w8 w30 w44 w32 w57
#
# Remedy: a generation_config.json with the special tokens alone, as eval/public_models.py makes it.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 lm_eval==0.4.13

cd "$work"
export HF_HUB_OFFLINE=1
cat > answers.py <<'PYTHON'
import sys
from types import SimpleNamespace

import tokenizers
import torch
from lm_eval.models.huggingface import HFLM
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
words = ["<begin>", "<end>", *(f"w{i}" for i in range(62))]
rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<end>"))
rules.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, bos_token="<begin>", eos_token="<end>", pad_token="<end>")
tokenizer.save_pretrained("model")
sizes = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=512, **sizes)).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 0.0, 0.5)
request = SimpleNamespace(args=("w1 w2 w3 w4", {"until": [], "max_gen_toks": 12, "do_sample": False}))

answers = {}
for name, settings in {
    "nothing": {},
    "do_sample=True, top_k=3": {"do_sample": True, "top_k": 3},
    "repetition_penalty=1.3": {"repetition_penalty": 1.3},
}.items():
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=1, **settings)
    model.save_pretrained("model")
    lm = HFLM(pretrained="model", batch_size=1, device="cpu", dtype="float32")
    (answers[name],) = lm.generate_until([request], disable_tqdm=True)
    print(f"{name:24} {answers[name]}")
plain, sampled, penalised = answers.values()
sys.exit(0 if plain == sampled and plain != penalised else 1)
PYTHON
"$work/venv/bin/python" answers.py > out 2> log || { code=$?; cat out; tail -n 5 log; exit "$code"; }
cat out
