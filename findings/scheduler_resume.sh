#!/usr/bin/env bash
# torch's schedulers go on from a wrong learning rate for the rest of a resumed run, unless they are loaded in one order.
#
# Versions: torch 2.13.0, CPU build.
# CosineAnnealingLR and LinearLR, alone or in SequentialLR, compute a rate from the one before, which they read from the
# optimizer. load_state_dict() of a scheduler restores its step and leaves the optimizer's rate alone, though its state
# holds the right one, and building a warm-up resets it. So a resumed run is right only where the scheduler is built
# before the optimizer's state is loaded. In other orders the rate is wrong by one factor until the end. LambdaLR and
# OneCycleLR compute the rate from the step: they are wrong for one step.
# last_epoch=49, the argument for resuming, has the same fault: it takes the rate at hand as that of step 49.
#
# What is run: a run of 100 steps at rates of at most 1, interrupted after 50; its rate at step 75.
#
# Output seen:
#                                  not interrupted   built, loaded   loaded, built scheduler alone      last_epoch
#   CosineAnnealingLR                        0.146           0.146           0.146           0.293           0.293
#   LinearLR to 0                            0.250           0.250           0.250           0.500           0.500
#   SequentialLR: warm-up, cosine            0.179           0.179           0.030           0.030
#   LambdaLR: cosine                         0.146           0.146           0.146           0.146           0.146
#
# Remedy: build optimizer and scheduler, then load both; or LambdaLR.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
cat > rates.py <<'PY'
import math
import sys
from copy import deepcopy

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / 100))


def warm_up_and_cosine(optimizer):
    parts = [LinearLR(optimizer, 0.1, 1.0, 10), CosineAnnealingLR(optimizer, 90)]
    return SequentialLR(optimizer, parts, [10])


BUILD = {
    "CosineAnnealingLR": lambda optimizer, **begin: CosineAnnealingLR(optimizer, 100, **begin),
    "LinearLR to 0": lambda optimizer, **begin: LinearLR(optimizer, 1.0, 0.0, 100, **begin),
    "SequentialLR: warm-up, cosine": warm_up_and_cosine,
    "LambdaLR: cosine": lambda optimizer, **begin: LambdaLR(optimizer, cosine, **begin),
}


def new_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rate_after(steps: int, optimizer, scheduler) -> float:
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


def rates(name: str) -> list[float]:
    """The rate at step 75 by the way the run was resumed at step 50."""
    build = BUILD[name]
    optimizer = new_optimizer()
    scheduler = build(optimizer)
    rate_after(50, optimizer, scheduler)
    saved, saved_scheduler = deepcopy(optimizer.state_dict()), deepcopy(scheduler.state_dict())
    values = [rate_after(25, optimizer, scheduler)]

    optimizer = new_optimizer()  # built, loaded
    scheduler = build(optimizer)
    optimizer.load_state_dict(deepcopy(saved))
    scheduler.load_state_dict(deepcopy(saved_scheduler))
    values.append(rate_after(25, optimizer, scheduler))

    optimizer = new_optimizer()  # loaded, built
    optimizer.load_state_dict(deepcopy(saved))
    scheduler = build(optimizer)
    scheduler.load_state_dict(deepcopy(saved_scheduler))
    values.append(rate_after(25, optimizer, scheduler))

    optimizer = new_optimizer()  # scheduler alone
    scheduler = build(optimizer)
    scheduler.load_state_dict(deepcopy(saved_scheduler))
    values.append(rate_after(25, optimizer, scheduler))

    if not name.startswith("SequentialLR"):
        optimizer = new_optimizer()  # last_epoch
        optimizer.param_groups[0]["initial_lr"] = 1.0
        scheduler = build(optimizer, last_epoch=49)  # building makes the step to 50
        values.append(rate_after(25, optimizer, scheduler))
    return values


names = ("not interrupted", "built, loaded", "loaded, built", "scheduler alone", "last_epoch")
print(30 * " ", *(f"{name:>15}" for name in names))
is_same = []
for name in BUILD:
    values = rates(name)
    print(f"{name:30}", *(f"{value:15.3f}" for value in values))
    is_same.append([abs(value - values[0]) < 1e-9 for value in values[1:]])
expected = [
    [True, True, False, False],
    [True, True, False, False],
    [True, False, False],
    [True, True, True, True],
]
sys.exit(0 if is_same == expected else 1)
PY
"$work/venv/bin/python" -W ignore rates.py
