#!/usr/bin/env bash
# Triton 3.9's interpreter refuses a mask that joins a tensor of flags with a comparison of two scalars.
#
# Versions: triton 3.9.0 (which torch 2.15.0 brings) refuses; 3.7.1 (torch 2.13.0) takes it. Its compiler takes it in
#     both.
# Behaviour: the comparison's result is typed as the integers that were compared, so that `flags & (a < b)` is a tensor
#     of integers. Loads, which take flags only since then, raise "mask has unsupported dtype". The same condition
#     written as a comparison of a tensor works.
# Output seen:
#     flags & (head < heads): ValueError: mask has unsupported dtype
#     flags & (k < columns): the sum is 6.0
# What follows: fp8/producer_kernels.py gives rope_grad's rotation a number of columns, not a flag.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.9.0
cat > "$folder/masks.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def by_scalars(x, result, n, head, heads, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    flags = k < n
    tl.store(result, tl.sum(tl.load(x + k, mask=flags & (head < heads), other=0.0), 0))


@triton.jit
def by_columns(x, result, n, columns, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    flags = k < n
    tl.store(result, tl.sum(tl.load(x + k, mask=flags & (k < columns), other=0.0), 0))


def outcome(kernel, *numbers):
    x, result = torch.arange(8.0), torch.zeros(1)
    try:
        kernel[(1,)](x, result, *numbers, BLOCK=8)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return f"{type(error).__name__}: {error}"
    return f"the sum is {result.item()}"


scalars = outcome(by_scalars, 4, 1, 3)
columns = outcome(by_columns, 4, 4)
print("flags & (head < heads):", scalars)
print("flags & (k < columns):", columns)
is_as_seen = "unsupported dtype" in scalars and columns == "the sum is 6.0"
raise SystemExit(not is_as_seen)
PY
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/masks.py"
