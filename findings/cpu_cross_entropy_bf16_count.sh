#!/usr/bin/env bash
# F.cross_entropy of BF16 logits counts its targets in BF16, and on a CPU sums their losses in BF16 too.
#
# Versions: torch 2.13.0, CPU build; the same in 2.15.0 (its CUDA build, run on a CPU).
# Behaviour: the mean's gradient is divided by the number of targets as BF16 rounds it: of 257 targets by 256, of 65,664 by
#     65,536. So sums over micro-batches of different lengths weigh them wrongly. The loss itself is a BF16 sum over BF16
#     losses and can be off by more than the rounding of the result: of 64 equal losses of 6.25 the mean is 6.156.
# Output seen, of equal logits:
#     64 targets, 512 classes: loss 6.15625, exactly 6.23832 (6.25 in BF16)
#     257 targets, 4 classes: gradient 1.00391 times what it should be
#     300 targets, 4 classes: gradient 1.00250 times what it should be
#     1,024 targets, 4 classes: gradient 1.00000 times what it should be
#     65,664 targets, 4 classes: gradient 1.00195 times what it should be
# What follows: logits.float() before the loss. Under autocast torch does that by itself; a model that is BF16
#     altogether does not.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/losses.py" <<'PY'
import math

import torch
import torch.nn.functional as F


def gradient_factor(targets):
    """The gradient of a logit that is not its target's, of four equal ones, over 1/4 of a target's share."""
    logits = torch.zeros(targets, 4, dtype=torch.bfloat16, requires_grad=True)
    F.cross_entropy(logits, torch.zeros(targets, dtype=torch.long)).backward()
    return logits.grad[0, 1].item() * targets / 0.25


torch.set_num_threads(1)
loss = F.cross_entropy(torch.zeros(64, 512, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.long)).item()
exact = math.log(512)
print(f"64 targets, 512 classes: loss {loss:.5f}, exactly {exact:.5f} ({torch.tensor(exact).bfloat16().item()} in BF16)")
factors = {targets: gradient_factor(targets) for targets in (257, 300, 1024, 65664)}
for targets, factor in factors.items():
    print(f"{targets:,} targets, 4 classes: gradient {factor:.5f} times what it should be")
raise SystemExit(not (abs(loss - exact) > 0.05 and factors[257] > 1.003 and factors[1024] == 1))
PY
"$folder/venv/bin/python" "$folder/losses.py"
