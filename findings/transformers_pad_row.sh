#!/usr/bin/env bash
# transformers' Llama never learns an embedding for the end of a document where pad_token_id is the same token.
#
# transformers 5.23.0 with torch 2.13.0. Llama, Qwen3 and others of the kind pass config.pad_token_id to nn.Embedding as
# padding_idx: that row starts as zeros and its gradient is dropped, wherever the token stands and whatever
# attention_mask says. With pad = eos, as a tokenizer without a pad token is usually set up, and with documents that are
# separated by eos, the separator enters the model as zeros for ever. GPT-2's class, which takes the same config, learns
# it. A model trained without a pad token stops learning the row as soon as its saved config names one.
# With tie_word_embeddings=True the row learns by the head alone.
#
# What is run: 20 steps of AdamW on tokens of which two of sixteen are the separator, by config.
#
# Output seen (numbers depend on the random weights):
#   Llama, pad = none                                 separator's row moved by 0.059
#   Llama, pad = separator                            separator's row moved by 0.000, its norm is 0.000
#   GPT-2, pad = separator                            separator's row moved by 0.049
#   Llama, pad = none, saved with a pad, loaded       separator's row moved by 0.000, its norm is 0.128
#
# Remedy: leave pad_token_id out of the model's config, or give padding a token of its own.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0

cd "$work"
cat > rows.py <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SEPARATOR = 3
torch.manual_seed(0)
tokens = torch.randint(4, 64, (4, 16))
tokens[:, [0, 8]] = SEPARATOR


def llama(pad):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = LlamaConfig(vocab_size=64, bos_token_id=SEPARATOR, eos_token_id=SEPARATOR, pad_token_id=pad, **sizes)
    return LlamaForCausalLM(config)


def gpt2(pad):
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=SEPARATOR, eos_token_id=SEPARATOR,
        pad_token_id=pad, tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def with_a_pad(model):
    model.config.pad_token_id = SEPARATOR
    model.save_pretrained("saved")
    return AutoModelForCausalLM.from_pretrained("saved")


def moved(name, model) -> float:
    row = model.get_input_embeddings().weight
    before = row[SEPARATOR].detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        model(tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    distance = (row[SEPARATOR] - before).norm().item()
    norm = "" if distance else f", its norm is {row[SEPARATOR].norm().item():.3f}"
    print(f"{name:49} separator's row moved by {distance:.3f}{norm}")
    return distance


distances = [
    moved("Llama, pad = none", llama(None)),
    moved("Llama, pad = separator", llama(SEPARATOR)),
    moved("GPT-2, pad = separator", gpt2(SEPARATOR)),
    moved("Llama, pad = none, saved with a pad, loaded", with_a_pad(llama(None))),
]
learns = [distance > 0 for distance in distances]
sys.exit(0 if learns == [True, False, True, False] else 1)
PY
"$work/venv/bin/python" rows.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
