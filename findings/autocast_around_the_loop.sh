#!/usr/bin/env bash
# One torch.autocast around a training loop trains nothing that is seen: forward passes use the first BF16 copies for ever.
#
# Versions: torch 2.13.0, CPU build.
# autocast casts an fp32 weight to BF16 once and keeps the copy until the outermost autocast block is left, so that a
# weight that is used twice is cast once. It does not notice that the optimizer changes the weight in between. With the
# block around the loop instead of around the forward pass, the weights move at each step, by gradients of the first
# weights, and losses stay as they were. There is no error and no warning. A validation inside the block scores the first
# weights too, under no_grad(); under inference_mode(), which does not use the copies, it scores the true ones.
#
# What is run: five steps of SGD on a Linear of 16 by 16, the block inside of the loop and around it.
#
# Output seen:
#   block in the loop            losses 1.404 1.382 1.362 1.342 1.323, the weight moved by 0.217
#     then no_grad() 1.305, inference_mode() 1.305
#   block around the loop        losses 1.404 1.404 1.404 1.404 1.404, the weight moved by 0.225
#     then no_grad() 1.404, inference_mode() 1.301
#   the same, without the cache  losses 1.404 1.382 1.362 1.342 1.323, the weight moved by 0.217
#     then no_grad() 1.305, inference_mode() 1.305
#
# Remedy: the block around the forward pass alone, or cache_enabled=False.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys
from contextlib import nullcontext

import torch


def trained(around: bool, cache: bool = True) -> list[str]:
    """The losses of five steps and of two validations; the block of autocast is around the loop or in it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 16), torch.randn(64, 16)

    def block(is_used: bool):
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache) if is_used else nullcontext()

    def loss_now() -> torch.Tensor:
        with block(not around):
            return (model(x).float() - y).pow(2).mean()

    losses = []
    with block(around):
        for _ in range(5):
            loss = loss_now()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(f"{loss.item():.3f}")
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                losses.append(f"{loss_now().item():.3f}")
    name = "block around the loop" if around else "block in the loop"
    name = name if cache else "the same, without the cache"
    moved = (model.weight - before).norm().item()
    print(f"{name:28} losses {' '.join(losses[:5])}, the weight moved by {moved:.3f}")
    print(f"  then no_grad() {losses[5]}, inference_mode() {losses[6]}")
    return losses


inside, around, uncached = trained(around=False), trained(around=True), trained(around=True, cache=False)
is_stale = len(set(around[:6])) == 1 and len(set(inside[:5])) == 5 and around[6] < inside[4]
sys.exit(0 if is_stale and uncached == inside else 1)
PY
