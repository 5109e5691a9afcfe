#!/usr/bin/env bash
# torch's LayerNorm on a CPU sums its weight's and bias's gradients over tokens in BF16: a sum stops growing at 256 ones.
#
# Versions: torch 2.13.0, CPU build; the same in 2.15.0 (its CUDA build, run on a CPU).
# Behaviour: the backward pass adds one token after another in the dtype of the activations, also where weight and bias
#     are fp32, as they are under autocast. From 256 on a BF16 number does not change when 1 is added. Each thread has a
#     sum of its own, so the number of threads changes the result. F.rms_norm sums in fp32, and so does LayerNorm
#     compiled by Inductor.
# Output seen, of one thread: the difference from fp64, relative to the gradient, for gradients of mean 0 and deviation 1,
#     and the bias's gradient where each token gives 1
#     256 tokens: weight 2%, bias 2%, of RMSNorm's weight 0%; 256 tokens of 1 give 256
#     2,048 tokens: weight 5%, bias 4%, of RMSNorm's weight 0%; 2,048 tokens of 1 give 256
#     16,384 tokens: weight 16%, bias 20%, of RMSNorm's weight 0%; 16,384 tokens of 1 give 256
#     compiled: 16,384 tokens of 1 give 16,384
# What follows: a GPT-2 that is trained under autocast on a CPU has the wrong gradients in its norms, the more so the larger
#     its micro-batch. Compile it, or give the norm fp32.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/gradients.py" <<'PY'
import torch
from torch import nn

WIDTH = 64


def gradients(norm, x, grad):
    """The gradients of the norm's parameters, in fp64."""
    norm(x).backward(grad)
    return [p.grad.double() for p in norm.parameters()]


def differences(kind, x, grad):
    """Per parameter the distance of its gradient from that of fp64, relative to the latter."""
    exact = gradients(kind(WIDTH).double(), x.double(), grad.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(kind(WIDTH), x, grad.to(kind(WIDTH)(x).dtype))
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)]


def bias_of_ones(tokens, is_compiled):
    norm = nn.LayerNorm(WIDTH)
    forward = torch.compile(norm) if is_compiled else norm
    x = torch.randn(tokens, WIDTH).bfloat16()
    y = forward(x)
    y.backward(torch.ones_like(y))
    return norm.bias.grad[0].item()


torch.set_num_threads(1)
torch.manual_seed(0)
for tokens in (256, 2048, 16384):
    x, grad = torch.randn(2, tokens, WIDTH).bfloat16()
    weight, bias = differences(nn.LayerNorm, x, grad)
    (rms,) = differences(nn.RMSNorm, x, grad)
    ones = bias_of_ones(tokens, is_compiled=False)
    print(f"{tokens:,} tokens: weight {weight:.0%}, bias {bias:.0%}, of RMSNorm's weight {rms:.0%};"
          f" {tokens:,} tokens of 1 give {ones:,.0f}")
compiled = bias_of_ones(tokens, is_compiled=True)
print(f"compiled: {tokens:,} tokens of 1 give {compiled:,.0f}")
is_so = min(weight, bias) > 0.05 and ones == 256 and rms < 0.01 and compiled == tokens
raise SystemExit(not is_so)
PY
"$folder/venv/bin/python" "$folder/gradients.py"
