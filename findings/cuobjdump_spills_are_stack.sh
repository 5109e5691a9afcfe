#!/usr/bin/env bash
# cuobjdump --dump-resource-usage says LOCAL:0 of a kernel that spills its registers: spills are in STACK.
#
# Versions: triton 3.7.1 (Linux x86-64) and the cuobjdump 12.8 in its package; sm_90, no GPU needed.
# Behaviour: spilled registers are stored to local memory (STL in the machine code), and ptxas -v counts them as spill
#     stores. cuobjdump counts them in STACK, with whatever else lies on the stack, and leaves LOCAL at 0. Triton's own
#     n_spills is asked of the driver when a kernel is loaded, so without a GPU there is none.
# Output seen, of a tile of 64 x 64 in one warp:
#     at most 32 registers: 614 stores of spills; STACK:1720 LOCAL:0
#     at most 255 registers: 0 stores of spills; STACK:0 LOCAL:0
# What follows: "no spills" is shown by STACK:0, or by no STL in the code, never by LOCAL:0.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet triton==3.7.1
cat > "$folder/spill.py" <<'PY'
import re
import subprocess
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def column_sums(x, out, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    values = tl.load(x + rows * SIZE + columns)
    tl.store(out + rows * SIZE + columns, values / tl.sum(values, 0)[None, :])


source = ASTSource(column_sums, {"x": "*fp32", "out": "*fp32", "SIZE": "constexpr"}, {"SIZE": 64})
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for maxnreg in (32, 255):
    options = {"num_warps": 1, "maxnreg": maxnreg}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
    code = subprocess.run([tool, "--dump-sass", "kernel.cubin"], capture_output=True, text=True).stdout
    usage = subprocess.run(
        [tool, "--dump-resource-usage", "kernel.cubin"], capture_output=True, text=True
    ).stdout
    stack, local = (re.search(rf"{name}:(\d+)", usage)[1] for name in ("STACK", "LOCAL"))
    spills = len(re.findall(r"\bSTL\b", code))
    print(f"at most {maxnreg} registers: {spills} stores of spills; STACK:{stack} LOCAL:{local}")
PY
cd "$folder"
TRITON_CACHE_DIR="$folder/cache" venv/bin/python spill.py | tee seen
diff seen - <<'SEEN' || { echo "the behaviour has changed"; exit 1; }
at most 32 registers: 614 stores of spills; STACK:1720 LOCAL:0
at most 255 registers: 0 stores of spills; STACK:0 LOCAL:0
SEEN
