#!/usr/bin/env bash
# torchao's AdamWFp8 moves a weight by hundreds of learning rates where its gradient is 1,000 times smaller than another's.
#
# Versions: torchao 0.18.0 with torch 2.13.0 (CPU build).
# Behaviour: both moments are kept in E4M3 with one scale for 256 neighbours. Half of E4M3's smallest number is 1/458,752 of
#     its largest, so the second moment, a square, is 0 where a gradient is 680 times smaller than the largest of its
#     block; the first moment is kept. A step then divides a mean of many gradients by the newest one alone, which is
#     sometimes near 0. Where gradients of a block are alike it does as AdamW does.
# Output seen, of 300 steps of independent normal gradients whose sizes run evenly (on a log scale) through each block of
#     256, betas .9 and .95, the updates of the last 20 steps in learning rates:
#     all alike: second moments of 0: 0%; largest update 0.8 of AdamWFp8, 0.8 of AdamW
#     over a factor of 1000: second moments of 0: 10%; largest update 7151.1 of AdamWFp8, 0.8 of AdamW
# What follows: it is no drop-in for AdamW where channels of a weight differ much, and clipping gradients does not help, as
#     only their ratios count. AdamW8bit, whose 8 bits reach further, had 1.3 on the same gradients.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4 torchao==0.18.0
cat > "$folder/updates.py" <<'PY'
import torch
from torchao.optim import AdamWFp8

BLOCK, N, LR = 256, 4096, 1e-3


def train(kind, sizes):
    """The largest update of the last 20 of 300 steps, in learning rates, and the share of second moments that are 0."""
    weight = torch.nn.Parameter(torch.zeros(N))
    optimizer = kind([weight], lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for step in range(300):
        weight.grad = torch.randn(N, generator=generator) * sizes
        before = weight.detach().clone()
        optimizer.step()
        if step >= 280:
            largest = max(largest, ((weight.detach() - before) / LR).abs().max().item())
    moment = optimizer.state[weight]["exp_avg_sq"]
    values = moment.dequantize() if kind is AdamWFp8 else moment
    return largest, (values == 0).float().mean().item()


torch.set_num_threads(1)
factors = {}
for name, decades in (("all alike", 0.0), ("over a factor of 1000", 3.0)):
    sizes = 10 ** torch.linspace(-decades / 2, decades / 2, BLOCK).repeat(N // BLOCK)
    (fp8, zeros), (fp32, _) = train(AdamWFp8, sizes), train(torch.optim.AdamW, sizes)
    print(f"{name}: second moments of 0: {zeros:.0%}; largest update {fp8:.1f} of AdamWFp8, {fp32:.1f} of AdamW")
    factors[name] = fp8 / fp32
raise SystemExit(not (factors["all alike"] < 2 and factors["over a factor of 1000"] > 100))
PY
"$folder/venv/bin/python" -W ignore "$folder/updates.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
