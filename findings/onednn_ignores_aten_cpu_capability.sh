#!/usr/bin/env bash
# ATEN_CPU_CAPABILITY=avx2 does not make torch compute as a CPU without AVX-512 does: oneDNN has a switch of its own.
#
# Versions: torch 2.13.0, CPU build, on an AMD EPYC with AVX-512 and BF16 units.
# Behaviour: ATEN_CPU_CAPABILITY=avx2 is offered against losses that differ between CPUs (pytorch issues 155423, 155552).
#     It holds for torch's own kernels (softmax, attention). Matmuls of BF16 operands go on with AVX-512, by oneDNN, until
#     ONEDNN_MAX_CPU_ISA=AVX2 is set too. Matmuls in fp32 are MKL's; on AMD they keep their bits whatever is set. Intel's
#     guide offers MKL_ENABLE_INSTRUCTIONS=AVX2 for Intel's CPUs alone; not tried there, and not judged by this script.
# Output seen, of the same tensors; "changed" is against the CPU's own choice of instructions:
#     ATEN_CPU_CAPABILITY=avx2: softmax changed, BF16 matmul equal, fp32 matmul equal
#     and ONEDNN_MAX_CPU_ISA=AVX2: softmax changed, BF16 matmul changed, fp32 matmul equal
#     and MKL_ENABLE_INSTRUCTIONS=AVX2: softmax changed, BF16 matmul changed, fp32 matmul equal
# What follows: set all three (scaling/cpu_kind.py). Runs of an AMD CPU without AVX-512 were then repeated to the bit.
#
# Exit code: 0 where it behaves so, or where the CPU has no AVX-512 to show it; 1 where it has changed.
set -eu
if ! grep -q avx512f /proc/cpuinfo; then
  echo "this CPU has no AVX-512: nothing to compare"
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/compute.py" <<'PY'
import hashlib
import json

import torch

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
a, b = (torch.randn(1024, 96, generator=generator) for _ in range(2))
results = {
    "softmax": a.softmax(-1),
    "BF16 matmul": (a.bfloat16() @ b.bfloat16().T).float(),
    "fp32 matmul": a @ b.T,
}
print(json.dumps({name: hashlib.sha256(x.numpy().tobytes()).hexdigest() for name, x in results.items()}))
PY
cat > "$folder/compare.py" <<'PY'
import json
import os
import subprocess
import sys

SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}


def hashes(**switches):
    command = [sys.executable, sys.argv[1]]
    output = subprocess.run(command, env={**environment, **switches}, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(output)


def words(found):
    changes = {name: "equal" if found[name] == own[name] else "changed" for name in own}
    return ", ".join(f"{name} {change}" for name, change in changes.items())


own = hashes()
avx2 = {"ATEN_CPU_CAPABILITY": "avx2"}
aten = words(hashes(**avx2))
avx2["ONEDNN_MAX_CPU_ISA"] = "AVX2"
onednn = words(hashes(**avx2))
avx2["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
mkl = words(hashes(**avx2))
print(f"ATEN_CPU_CAPABILITY=avx2: {aten}")
print(f"and ONEDNN_MAX_CPU_ISA=AVX2: {onednn}")
print(f"and MKL_ENABLE_INSTRUCTIONS=AVX2: {mkl}")
is_as_stated = aten.startswith("softmax changed, BF16 matmul equal") and onednn.startswith(
    "softmax changed, BF16 matmul changed"
)
if "AuthenticAMD" in open("/proc/cpuinfo").read():
    is_as_stated = is_as_stated and all("fp32 matmul equal" in line for line in (aten, onednn, mkl))
raise SystemExit(not is_as_stated)
PY
"$folder/venv/bin/python" "$folder/compare.py" "$folder/compute.py"
