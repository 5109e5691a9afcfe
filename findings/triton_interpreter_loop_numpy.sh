#!/usr/bin/env bash
# Triton 3.6's interpreter cannot run a loop to a kernel's argument with numpy 2.4, though pip installs the two together.
#
# Versions: triton 3.6.0 (which torch 2.11.0 brings) with numpy 2.4.6; right with numpy 2.3.4, and triton 3.7.1 with both.
# Behaviour: the interpreter keeps an argument as an array of one element and turns it into a loop's bound by int(), which
#     numpy 2.4 allows of arrays without dimensions alone; before, it was a deprecation. A bound that is tl.constexpr works.
#     Triton names no version of numpy, so nothing warns at installation, and compiled kernels are not affected.
# Output seen:
#     triton 3.6.0, numpy 2.4.6, n an argument: TypeError: only 0-dimensional arrays can be converted to Python scalars
#     triton 3.6.0, numpy 2.4.6, n a constant: the sum is 6.0
#     triton 3.6.0, numpy 2.3.4, n an argument: the sum is 6.0
#     triton 3.7.1, numpy 2.4.6, n an argument: the sum is 6.0
# What follows: on torch 2.11 test kernels with numpy<2.4.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/loop.py" <<'PY'
import sys

import numpy
import torch
import triton
import triton.language as tl


@triton.jit
def to_an_argument(x, result, n):
    total = 0.0
    for k in range(0, n):
        total += tl.load(x + k)
    tl.store(result, total)


@triton.jit
def to_a_constant(x, result, n: tl.constexpr):
    total = 0.0
    for k in range(0, n):
        total += tl.load(x + k)
    tl.store(result, total)


kernel = to_a_constant if sys.argv[1] == "a constant" else to_an_argument
result = torch.zeros(1)
try:
    kernel[(1,)](torch.arange(4.0), result, 4)
    outcome = f"the sum is {result.item()}"
except Exception as error:
    while error.__cause__ is not None:
        error = error.__cause__
    outcome = f"{type(error).__name__}: {error}"
print(f"triton {triton.__version__}, numpy {numpy.__version__}, n {sys.argv[1]}: {outcome}")
PY
loop() { TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/loop.py" "$1"; }
use() { "$folder/venv/bin/pip" install --quiet --no-deps "$@"; }
{
    use triton==3.6.0
    loop "an argument"
    loop "a constant"
    use numpy==2.3.4
    loop "an argument"
    use triton==3.7.1 numpy==2.4.6
    loop "an argument"
} | tee "$folder/seen"
cat > "$folder/expected" <<'END'
triton 3.6.0, numpy 2.4.6, n an argument: TypeError: only 0-dimensional arrays can be converted to Python scalars
triton 3.6.0, numpy 2.4.6, n a constant: the sum is 6.0
triton 3.6.0, numpy 2.3.4, n an argument: the sum is 6.0
triton 3.7.1, numpy 2.4.6, n an argument: the sum is 6.0
END
cmp "$folder/seen" "$folder/expected"
