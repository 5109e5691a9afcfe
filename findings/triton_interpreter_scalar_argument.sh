#!/usr/bin/env bash
# A float argument of a kernel keeps its fp32 on a GPU, but is rounded to fp16 by Triton's interpreter beside an fp16 tensor.
#
# Versions: triton 3.7.1, torch 2.13.0 (CPU build), numpy 2.3.4; compiled for sm_90, no GPU needed. The
#     same in 3.9.0.
# Behaviour: the compiler takes a float argument for an fp32 scalar, which makes a product with an fp16 tensor fp32. The
#     interpreter takes it for a literal, such as 1.1 in the kernel's text, and computes in fp16: a scale or a learning
#     rate is rounded, and products overflow at 65,504. Beside BF16 it fails. Integer arguments have the right type.
# Output seen:
#     interpreter, argument: 100 x 1.1 = 109.9375, 100 x 1000 = inf
#     interpreter, literal: 100 x 1.1 = 109.9375
#     compiled, argument: arith.mulf of fp32
#     compiled, literal: arith.mulf of fp16
# What follows: cast the tensor (x.to(tl.float32) * scale) or the argument (scale.to(tl.float32)) in the kernel.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy==2.3.4
cat > "$folder/kernels.py" <<'PY'
import triton
import triton.language as tl


@triton.jit
def by_argument(x, scale, out, SIZE: tl.constexpr):
    k = tl.arange(0, SIZE)
    tl.store(out + k, (tl.load(x + k) * scale).to(tl.float32))


@triton.jit
def by_literal(x, out, SIZE: tl.constexpr):
    k = tl.arange(0, SIZE)
    tl.store(out + k, (tl.load(x + k) * 1.1).to(tl.float32))
PY
cat > "$folder/interpret.py" <<'PY'
import torch
from kernels import by_argument, by_literal

x, out = torch.full((4,), 100.0, dtype=torch.float16), torch.zeros(4)
products = []
for scale in (1.1, 1000.0):
    by_argument[(1,)](x, scale, out, SIZE=4)
    products.append(f"100 x {scale:g} = {out[0].item()}")
print("interpreter, argument: " + ", ".join(products))
by_literal[(1,)](x, out, SIZE=4)
print(f"interpreter, literal: 100 x 1.1 = {out[0].item()}")
PY
cat > "$folder/compile.py" <<'PY'
import re

import triton
from kernels import by_argument, by_literal
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"x": "*fp16", "out": "*fp32", "SIZE": "constexpr"}
for name, kernel, types in (
    ("argument", by_argument, {"x": "*fp16", "scale": "fp32", "out": "*fp32", "SIZE": "constexpr"}),
    ("literal", by_literal, POINTERS),
):
    code = triton.compile(ASTSource(kernel, types, {"SIZE": 128}), target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    bits = re.search(r"arith\.mulf .*xf(\d+)>", code)[1]
    print(f"compiled, {name}: arith.mulf of fp{bits}")
PY
{
  TRITON_INTERPRET=1 "$folder/venv/bin/python" -W ignore "$folder/interpret.py"
  "$folder/venv/bin/python" "$folder/compile.py"
} | tee "$folder/seen"
sed -n 's/^#     \(interpreter, .*\|compiled, .*\)/\1/p' "$0" | diff "$folder/seen" - || { echo "the behaviour has changed"; exit 1; }
