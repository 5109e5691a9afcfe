#!/usr/bin/env bash
# transformers cuts attention where position_ids do not grow by one, but only in calls without a mask and a cache.
#
# transformers 5.23.0 with torch 2.13.0, on a CPU. Where a call has no attention_mask and no cache, a step of the
# positions other than +1 counts as the beginning of another document. Three things follow that nobody expects:
# 1. Documents packed into a row, their positions counted from 0 each, see each other in a plain call, since use_cache
#    is true by default, in training mode too. With use_cache=False they do not. Gradient checkpointing sets that, so
#    it changes the loss.
# 2. An attention_mask of ones is another mask than none.
# 3. Positions with a gap (as in training on skipped positions for longer contexts) or closer than one (interpolation)
#    cut one document: the last token no longer sees the first, while it does with a mask of ones.
#
# What is run: a random Llama (2 layers, width 32), training mode; two documents of 8 tokens, as a batch and packed;
# then one document of 16 tokens, of which the first is changed.
#
# Output seen (numbers depend on the random weights):
#   loss of two documents as a batch      4.2283
#   packed                                4.7572
#   packed, use_cache=False               4.2283
#   packed, and a mask of ones            4.7572
#   packed, gradient checkpointing        4.2283
#   positions 0..7, 100..107: the first token moves the last logits by 0.000, with a mask of ones by 0.702
#   positions 0, 0.5, 1, ..: the first token moves the last logits by 0.000, with a mask of ones by 0.582
#
# Remedy: give a mask of four dimensions, or state use_cache and the mask in every call.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0

cd "$work"
cat > packed.py <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256)).train()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 0.0, 0.5)
tokens = torch.randint(0, 64, (1, 16))
labels = tokens.clone()
labels[0, 8] = -100  # the second document's first token has nothing before it
ones = torch.ones_like(tokens)
packed = torch.arange(8).repeat(2)[None]


def loss(**settings) -> float:
    return round(model(tokens, labels=labels, position_ids=packed, **settings).loss.item(), 4)


batch = tokens.view(2, 8)
losses = {
    "loss of two documents as a batch": round(model(batch, labels=batch).loss.item(), 4),
    "packed": loss(),
    "packed, use_cache=False": loss(use_cache=False),
    "packed, and a mask of ones": loss(use_cache=False, attention_mask=ones),
}
model.gradient_checkpointing_enable()
losses["packed, gradient checkpointing"] = loss()
model.gradient_checkpointing_disable()
for name, value in losses.items():
    print(f"{name:37} {value:.4f}")
apart, plain, uncached, masked, checkpointed = losses.values()
is_switched = apart == uncached == checkpointed and plain == masked and plain - apart > 0.1


def influence(positions, mask) -> float:
    """How far the first token moves the logits after the last."""
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 64
    with torch.no_grad():
        both = [model(t, position_ids=positions, attention_mask=mask, use_cache=False).logits for t in (tokens, other)]
    return (both[0] - both[1])[0, -1].abs().max().item()


is_cut = True
for name, positions in {
    "0..7, 100..107": torch.cat([torch.arange(8), torch.arange(100, 108)])[None],
    "0, 0.5, 1, ..": 0.5 * torch.arange(16)[None],
}.items():
    without, with_ones = influence(positions, None), influence(positions, ones)
    print(
        f"positions {name}: the first token moves the last logits by {without:.3f}, with a mask of ones by"
        f" {with_ones:.3f}"
    )
    is_cut = is_cut and without == 0 and with_ones > 0.1
sys.exit(0 if is_switched and is_cut else 1)
PY
"$work/venv/bin/python" packed.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
