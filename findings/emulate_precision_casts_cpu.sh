#!/usr/bin/env bash
# torch._inductor.config.emulate_precision_casts=True does nothing on a CPU up to torch 2.12.
#
# Versions: torch 2.11.0 and 2.12.1 (Linux, their CUDA builds, run on a CPU); obeyed by 2.13.0 and 2.14.1. The script
#     runs 2.12.1.
# Behaviour: the option keeps the roundings to BF16 that fused code leaves out, so that compiled results can be held
#     against uncompiled ones bit for bit. The loops that Inductor writes in C++ ignore it there, without a word.
# Output seen, of (x * 1.1).bfloat16().float():
#     emulate_precision_casts=False: another result than uncompiled
#     emulate_precision_casts=True: another result than uncompiled
# What follows: a test that compares bits on a CPU rounds both sides once more instead (tests/fp8/test_emulation.py).
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.12.1 numpy==2.3.4
cat > "$folder/casts.py" <<'PY'
import torch
import torch._inductor.config as inductor


def there_and_back(x):
    return (x * 1.1).bfloat16().float()


torch.manual_seed(0)
x = torch.randn(64, 64)
rounded = there_and_back(x)
results = []
for is_on in (False, True):
    torch._dynamo.reset()
    with inductor.patch(emulate_precision_casts=is_on):
        compiled = torch.compile(there_and_back)(x)
    is_rounded = torch.equal(compiled, rounded)
    results.append(is_rounded)
    print(f"emulate_precision_casts={is_on}: {'no other' if is_rounded else 'another'} result than uncompiled")
raise SystemExit(any(results))
PY
"$folder/venv/bin/python" "$folder/casts.py"
