#!/usr/bin/env bash
# Reading a DataLoader that shuffles nothing moves torch's random generator: validation changes the dropout that follows.
#
# Versions: torch 2.13.0, CPU build.
# Each iter() of a DataLoader draws a seed for workers from the global generator, also with num_workers=0 and
# shuffle=False, where none is needed. So a run that validates every 100 steps has other dropout, noise and shuffles
# than the same run that validates every 200 steps, and losses of the two differ from the first validation on.
#
# What is run: a random number after a validation over a DataLoader of four items, and after none.
#
# Output seen:
#   no validation                           0.4963
#   validation, shuffle=False               0.0885
#   validation twice                        0.3074
#   validation, a generator of its own      0.4963
#
# Remedy: DataLoader(generator=torch.Generator()).
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys

import torch
from torch.utils.data import DataLoader


def number_after(name: str, times: int, generator: torch.Generator | None = None) -> float:
    """The first random number after so many passes over the data."""
    loader = DataLoader([1, 2, 3, 4], shuffle=False, num_workers=0, generator=generator)
    torch.manual_seed(0)
    for _ in range(times):
        assert len(list(loader)) == 4
    number = torch.rand(1).item()
    print(f"{name:39} {number:.4f}")
    return number


none = number_after("no validation", 0)
plain = number_after("validation, shuffle=False", 1)
twice = number_after("validation twice", 2)
own = number_after("validation, a generator of its own", 1, torch.Generator())
sys.exit(0 if own == none and len({none, plain, twice}) == 3 else 1)
PY
