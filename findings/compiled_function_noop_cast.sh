#!/usr/bin/env bash
# An autograd Function whose forward pass ends with a cast to the dtype at hand has gradients of zero, compiled by torch 2.11.
#
# Versions: torch 2.11.0 (Linux, its CUDA build, run on a CPU); right in 2.12.1, 2.13.0 and 2.14.1.
# Behaviour: y.to(dtype) returns y itself where y has that dtype, so the line looks like a precaution. If it is the value
#     that forward() returns, torch.compile traces the Function without an error or a warning, the output is right, and
#     every gradient is zero: also with backend="eager", so that it is Dynamo's doing and no kernel's.
# Output seen:
#     forward() returns x @ w: gradients are autograd's
#     forward() returns (x @ w).to(x.dtype): output equal, gradients zero
# What follows: no call where nothing is cast (in_dtype() of fp8/matmul.py). Compare gradients, not losses alone, of
#     compiled and uncompiled code on the oldest torch that is allowed. A test that counts on newer versions alone cannot
#     see it; ours looks whether the output is what a call was given.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 numpy==2.3.4
cat > "$folder/gradients.py" <<'PY'
import torch


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class CastProduct(Product):
    @staticmethod
    def forward(ctx, x, w):
        return Product.forward(ctx, x, w).to(x.dtype)


def passes(function, is_compiled):
    """The output and both gradients."""
    torch.manual_seed(0)
    x, w = (torch.randn(32, 32, requires_grad=True) for _ in range(2))

    def apply(x, w):
        return function.apply(x, w)

    if is_compiled:
        apply = torch.compile(apply, backend="eager", fullgraph=True)
    y = apply(x, w)
    return y.detach(), *torch.autograd.grad(y.sum(), (x, w))


is_as_stated = True
for words, function in (("x @ w", Product), ("(x @ w).to(x.dtype)", CastProduct)):
    y, *gradients = passes(function, is_compiled=True)
    expected_y, *expected = passes(function, is_compiled=False)
    are_right = all(map(torch.allclose, gradients, expected))
    are_zero = not any(gradient.any() for gradient in gradients)
    output = "equal" if torch.allclose(y, expected_y) else "another"
    if are_right:
        print(f"forward() returns {words}: gradients are autograd's")
    else:
        print(f"forward() returns {words}: output {output}, gradients {'zero' if are_zero else 'wrong'}")
    is_as_stated &= output == "equal" and (are_right if function is Product else are_zero)
raise SystemExit(not is_as_stated)
PY
"$folder/venv/bin/python" "$folder/gradients.py"
