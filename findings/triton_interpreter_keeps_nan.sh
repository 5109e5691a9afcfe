#!/usr/bin/env bash
# A NaN that Triton 3.7's interpreter keeps is lost on a GPU: tl.clamp to +-448 makes 448 of it, and tl.maximum the other operand.
#
# Versions: triton 3.7.1, torch 2.13.0 (CPU build), numpy 2.3.4; compiled for sm_90, no GPU needed. 3.9.0 compiles
#     the same, but its interpreter drops the NaN too (clamped it is -448).
# Behaviour: by default (propagate_nan=NONE) the compiler writes max.f32, min.f32 and, for symmetric limits,
#     min.xorsign.abs.f32; by PTX's definition each of them returns the operand that is no NaN. The interpreter uses
#     numpy's maximum, minimum and clip, which return the NaN. tl.max, the reduction, drops it in both. So a test that a
#     NaN in the activations comes out of a cast to FP8 passes in the interpreter; on a GPU a finite number comes out.
# Output seen:
#     interpreter: maximum nan, minimum nan, clamp nan, max of four 3.0
#     compiled: maximum max.f32, minimum min.f32, clamp min.xorsign.abs.f32
#     compiled, propagate_nan=ALL: maximum max.NaN.f32, minimum min.NaN.f32, clamp min.NaN.xorsign.abs.f32
# What follows: give propagate_nan=tl.PropagateNan.ALL where a NaN has to stay one, and test it on a GPU or in the PTX.
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
def maximum(x, out, SIZE: tl.constexpr, PROPAGATE: tl.constexpr):
    k = tl.arange(0, SIZE)
    tl.store(out + k, tl.maximum(tl.load(x + k), 1e-12, propagate_nan=PROPAGATE))


@triton.jit
def minimum(x, out, SIZE: tl.constexpr, PROPAGATE: tl.constexpr):
    k = tl.arange(0, SIZE)
    tl.store(out + k, tl.minimum(tl.load(x + k), 448.0, propagate_nan=PROPAGATE))


@triton.jit
def clamp(x, out, SIZE: tl.constexpr, PROPAGATE: tl.constexpr):
    k = tl.arange(0, SIZE)
    tl.store(out + k, tl.clamp(tl.load(x + k), -448.0, 448.0, propagate_nan=PROPAGATE))


@triton.jit
def largest(x, out, SIZE: tl.constexpr):
    tl.store(out, tl.max(tl.load(x + tl.arange(0, SIZE)), 0))
PY
cat > "$folder/interpret.py" <<'PY'
import math

import torch
import triton.language as tl
from kernels import clamp, largest, maximum, minimum

x, results = torch.tensor([math.nan, 1.0, 3.0, -4.0]), {}
for kernel in (maximum, minimum, clamp):
    out = torch.zeros(4)
    kernel[(1,)](x, out, SIZE=4, PROPAGATE=tl.PropagateNan.NONE)
    results[kernel.__name__] = out[0].item()
out = torch.zeros(1)
largest[(1,)](x, out, SIZE=4)
results["max of four"] = out.item()
print("interpreter: " + ", ".join(f"{name} {value}" for name, value in results.items()))
PY
cat > "$folder/compile.py" <<'PY'
import re

import triton
import triton.language as tl
from kernels import clamp, maximum, minimum
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def instruction(kernel, propagate):
    """The PTX instructions with which the kernel takes a maximum or a minimum."""
    types = {"x": "*fp32", "out": "*fp32", "SIZE": "constexpr", "PROPAGATE": "constexpr"}
    source = ASTSource(kernel, types, {"SIZE": 128, "PROPAGATE": propagate})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return " and ".join(sorted(set(re.findall(r"\b(?:max|min)\.[\w.]+", code))))


for name, propagate in (("", tl.PropagateNan.NONE), (", propagate_nan=ALL", tl.PropagateNan.ALL)):
    written = [f"{kernel.__name__} {instruction(kernel, propagate)}" for kernel in (maximum, minimum, clamp)]
    print(f"compiled{name}: " + ", ".join(written))
PY
{
  TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/interpret.py"
  "$folder/venv/bin/python" "$folder/compile.py"
} | tee "$folder/seen"
sed -n 's/^#     \(interpreter: .*\|compiled.*\)/\1/p' "$0" | diff "$folder/seen" - || { echo "the behaviour has changed"; exit 1; }
