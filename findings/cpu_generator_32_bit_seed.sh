#!/usr/bin/env bash
# torch's generator on a CPU uses the lower 32 bits of its seed alone: seeds of ranks that differ above are one seed.
#
# Versions: torch 2.13.0, CPU build; the same in 2.15.0 (its CUDA build, run on a CPU).
# Behaviour: manual_seed takes 64 bits, and initial_seed() gives all of them back, but the Mersenne twister of a CPU is
#     started by the lower 32. That holds for torch.manual_seed, for a torch.Generator, and for all that is drawn from
#     them, initial weights and permutations too. A GPU's generator counts with all 64 (not run here).
# Output seen:
#     seed 1234 + (rank << 32), ranks 0 to 3: 1 different permutations of 4
#     seed 1234 + rank, ranks 0 to 3: 4 different permutations of 4
#     initial_seed() of rank 3: 12884903122
#     seed -1 and 2**32 - 1: equal
# What follows: put what tells seeds apart into the lower 32 bits: a hash, or a sum of small numbers. model.py seeds each
#     weight by a hash, whose lower bits differ.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/seeds.py" <<'PY'
import torch


def permutation(seed):
    return tuple(torch.randperm(1000, generator=torch.Generator().manual_seed(seed)).tolist())


shifted = {permutation(1234 + (rank << 32)) for rank in range(4)}
added = {permutation(1234 + rank) for rank in range(4)}
print(f"seed 1234 + (rank << 32), ranks 0 to 3: {len(shifted)} different permutations of 4")
print(f"seed 1234 + rank, ranks 0 to 3: {len(added)} different permutations of 4")
print("initial_seed() of rank 3:", torch.Generator().manual_seed(1234 + (3 << 32)).initial_seed())
are_equal = permutation(-1) == permutation(2**32 - 1)
print(f"seed -1 and 2**32 - 1: {'equal' if are_equal else 'different'}")
raise SystemExit(not (len(shifted) == 1 and len(added) == 4 and are_equal))
PY
"$folder/venv/bin/python" "$folder/seeds.py"
