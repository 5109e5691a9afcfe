#!/usr/bin/env bash
# model.to(torch.bfloat16) of a transformers model blurs its positions; from_pretrained(dtype=torch.bfloat16) does not.
#
# transformers 5.24.0 with torch 2.13.0. The frequencies of RoPE are a buffer, which to(dtype), bfloat16() and half()
# cast with the weights, and which from_pretrained() leaves in fp32. They are up to 0.2 % off then, an angle of up
# to 2 radians at position 1,000: attention is another one in long contexts. Back by float(), they stay rounded. The
# buffer is not saved, so weights and files are equal, and logits are not.
#
# What is run: a random Llama (2 layers, width 64, one head) in BF16 by both ways; angles at position 2,047.
#
# Output seen:
#   from_pretrained()                      torch.float32, first cosines 0.250 -0.357 0.277 -0.748
#   from_pretrained(dtype=bfloat16)        torch.float32, first cosines 0.250 -0.357 0.277 -0.748
#   from_pretrained().to(bfloat16)         torch.bfloat16, first cosines 0.250 -0.550 -0.044 -0.936
#   from_pretrained().to(bfloat16).float() torch.float32, first cosines 0.250 -0.550 -0.044 -0.936
#   equal BF16 weights: True
#
# Remedy: from_pretrained(dtype=..), or cast parameters alone: for p in model.parameters(): p.data = p.data.bfloat16()
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > angles.py <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1)
LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=4096, **sizes)).save_pretrained("saved")


def load(**settings) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained("saved", **settings)


def cosines(name: str, model: LlamaForCausalLM) -> torch.Tensor:
    """Of the angles at position 2,047."""
    rope = model.model.rotary_emb
    values = rope(torch.zeros(1, 1, 64), torch.tensor([[2047]]))[0][0, 0]
    text = " ".join(f"{value:.3f}" for value in values[:4].tolist())
    print(f"{name:38} {rope.inv_freq.dtype}, first cosines {text}")
    return values


direct, cast = load(dtype=torch.bfloat16), load().to(torch.bfloat16)
exact = cosines("from_pretrained()", load())
kept = cosines("from_pretrained(dtype=bfloat16)", direct)
blurred = cosines("from_pretrained().to(bfloat16)", cast)
weights = [[p.detach().clone() for p in model.parameters()] for model in (direct, cast)]
back = cosines("from_pretrained().to(bfloat16).float()", cast.float())
is_equal = all(torch.equal(a, b) for a, b in zip(*weights))
print("equal BF16 weights:", is_equal)
is_blurred = torch.equal(kept, exact) and torch.equal(blurred, back) and (blurred - exact).abs().max() > 0.3
sys.exit(0 if is_equal and is_blurred else 1)
PY
"$work/venv/bin/python" angles.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
