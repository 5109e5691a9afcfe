#!/usr/bin/env bash
# Triton's interpreter casts to BF16 and FP8 unlike a GPU: BF16 is truncated, 1.94 becomes 1 and a NaN 384 in E4M3.
#
# Versions: triton 3.7.1 with TRITON_INTERPRET=1, torch 2.13.0 (CPU build), numpy 2.3.4.
# Behaviour: fp32 to BF16 drops the lower bits. To FP8, ties of normal numbers go away from zero, subnormal numbers are
#     truncated, a carry into an odd exponent is lost, and in E4M3 a NaN becomes a finite number. torch's casts and the
#     GPU's conversions round to nearest, ties to even, and keep NaN.
# Output seen:
#     bfloat16, 1 + 3/512, nearer to 1 + 1/128: 1, torch 1.00781
#     float8_e4m3fn, a tie, 17/16: 1.125, torch 1
#     float8_e4m3fn, 1.75 x 2^-9: 0.00195312, torch 0.00390625
#     float8_e4m3fn, 1.94, which carries: 1, torch 2
#     float8_e4m3fn, nan: 384, torch nan
#     float8_e5m2, 1.94, which carries: 1, torch 2
# What follows: a kernel that agrees with torch's casts in the interpreter may not be what it seems, and one that does
#     not may be right. Replace the interpreter's conversion by torch's cast in tests; compare bits on a GPU.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy==2.3.4
cat > "$folder/casts.py" <<'PY'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, out, SIZE: tl.constexpr):
    number = tl.arange(0, SIZE)
    value = tl.load(x + number)
    tl.store(out + number, value.to(out.dtype.element_ty))


VALUES = {
    "1 + 3/512, nearer to 1 + 1/128": 1 + 3 / 512,
    "a tie, 17/16": 17 / 16,
    "a tie, 2^-10": 2.0**-10,
    "1.75 x 2^-9": 1.75 * 2.0**-9,
    "1.94, which carries": 1.94,
    "nan": float("nan"),
}
x = torch.tensor([*VALUES.values(), 0.0, 0.0])
for format in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
    out = torch.zeros(8, dtype=format)
    cast[(1,)](x, out, SIZE=8)
    for name, a, b in zip(VALUES, out.float().tolist(), x.to(format).float().tolist()):
        if a != b and not (a != a and b != b):
            print(f"{str(format).removeprefix('torch.')}, {name}: {a:g}, torch {b:g}")
PY
"$folder/venv/bin/python" "$folder/casts.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN' || { echo "the behaviour has changed"; exit 1; }
bfloat16, 1 + 3/512, nearer to 1 + 1/128: 1, torch 1.00781
float8_e4m3fn, a tie, 17/16: 1.125, torch 1
float8_e4m3fn, 1.75 x 2^-9: 0.00195312, torch 0.00390625
float8_e4m3fn, 1.94, which carries: 1, torch 2
float8_e4m3fn, nan: 384, torch nan
float8_e5m2, 1.94, which carries: 1, torch 2
SEEN
