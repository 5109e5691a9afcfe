#!/usr/bin/env bash
# torch's cast to E4M3 turns an infinity into 448, and its cast to E5M2 turns 61,440 and more into an infinity.
#
# Versions: torch 2.13.0, CPU build; the same in 2.15.0 (its CUDA build, run on a CPU).
# Behaviour: float8_e4m3fn saturates: whatever is too large becomes 448, an infinity as well, and only a NaN stays one.
#     float8_e5m2 does not: from 61,440 on it gives an infinity. float8_e4m3fnuz and float8_e5m2fnuz, of AMD's MI300, give
#     NaN. A comment in torchao 0.18.0 (to_fp8_saturated) says that up to torch 2.11 no cast saturated and that from 2.12
#     on its clamp is no longer needed; with E5M2, in which it casts gradients, it still is.
# Output seen:
#     float8_e4m3fn: 464 -> 448, 1e4 -> 448, 6e4 -> 448, 1e6 -> 448, inf -> 448, nan -> nan
#     float8_e5m2: 464 -> 448, 1e4 -> 10240, 6e4 -> 57344, 1e6 -> inf, inf -> inf, nan -> nan
#     float8_e4m3fnuz: 464 -> nan, 1e4 -> nan, 6e4 -> nan, 1e6 -> nan, inf -> nan, nan -> nan
#     float8_e5m2fnuz: 464 -> 448, 1e4 -> 10240, 6e4 -> 57344, 1e6 -> nan, inf -> nan, nan -> nan
# What follows: an overflow is seen before a cast to E4M3 or not at all (isfinite of the loss no longer tells); clamp
#     before a cast to E5M2.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/casts.py" <<'PY'
import torch

VALUES = ("464", "1e4", "6e4", "1e6", "inf", "nan")
for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    cast = torch.tensor([float(value) for value in VALUES]).to(getattr(torch, name)).float().tolist()
    print(f"{name}: " + ", ".join(f"{value} -> {result:.0f}" for value, result in zip(VALUES, cast)))
PY
"$folder/venv/bin/python" "$folder/casts.py" | tee "$folder/seen"
sed -n 's/^#     \(float8_[a-z0-9]*: 464.*\)/\1/p' "$0" | diff "$folder/seen" - || { echo "the behaviour has changed"; exit 1; }
