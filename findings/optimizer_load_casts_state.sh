#!/usr/bin/env bash
# Optimizer.load_state_dict() of torch turns fp32 moments of BF16 weights into BF16, and from then on they stand still.
#
# Versions: torch 2.13.0, CPU build.
# It casts each floating-point tensor of a parameter's state, but one named "step", to the parameter's dtype. An
# optimizer that keeps fp32 moments for BF16 weights, as many of one's own do, so goes on in BF16 after a resume: the
# running mean of squares, which shrinks by a factor of 0.999 a step, is rounded back to where it was, as long as the
# gradients are smaller. Nothing is said of it, and the first losses look right.
#
# What is run: RMSprop with fp32 state on a BF16 weight; 100 steps with gradients of 1, then 2,000 with gradients of
# 0.01, with and without a save and a load between the two.
#
# Output seen:
#   not interrupted          torch.float32, mean of squares 0.0952 after 100 steps, 0.0130 after 2,100
#   saved and loaded         torch.bfloat16, mean of squares 0.0952 after 100 steps, 0.0952 after 2,100
#
# Remedy: put the saved tensors into optimizer.state after load_state_dict().
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys
from copy import deepcopy

import torch


class RMSprop32(torch.optim.Optimizer):
    """RMSprop that keeps its mean of squares in fp32."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean_square"] = torch.zeros_like(weight, dtype=torch.float32)
                mean_square, gradient = state["mean_square"], weight.grad.float()
                mean_square.mul_(0.999).add_(0.001 * gradient.square())
                weight.sub_(group["lr"] * gradient / (mean_square.sqrt() + 1e-8))


def train(optimizer: RMSprop32, weight: torch.Tensor, steps: int, gradient: float) -> torch.Tensor:
    """The mean of squares after the steps."""
    weight.grad = torch.full_like(weight, gradient)
    for _ in range(steps):
        optimizer.step()
    return optimizer.state[weight]["mean_square"]


def trained(name: str, is_resumed: bool) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = RMSprop32([weight])
    before = train(optimizer, weight, 100, 1.0).item()
    if is_resumed:
        saved = deepcopy(optimizer.state_dict())
        optimizer = RMSprop32([weight])
        optimizer.load_state_dict(saved)
    after = train(optimizer, weight, 2000, 0.01)
    print(
        f"{name:24} {after.dtype}, mean of squares {before:.4f} after 100 steps, {after.item():.4f} after 2,100"
    )
    return after


whole, resumed = trained("not interrupted", False), trained("saved and loaded", True)
stands_still = whole.item() < 0.02 and resumed.item() > 0.09
sys.exit(0 if stands_still and (whole.dtype, resumed.dtype) == (torch.float32, torch.bfloat16) else 1)
PY
