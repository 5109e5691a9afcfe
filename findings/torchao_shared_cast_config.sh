#!/usr/bin/env bash
# torchao casts gradients to E4M3, not E5M2, if one CastConfig object is given for inputs, weights and gradients.
#
# Versions: torchao 0.18.0 with torch 2.13.0 (CPU build).
# Behaviour: CastConfig is frozen, and target_dtype=None stands for the default of its place: E4M3 for inputs and weights,
#     E5M2 for gradients. Float8LinearConfig writes that default into the object it was given. An object that is given
#     twice keeps the dtype of its first place, and one that is kept for the next config takes it
#     along. E4M3 reaches down to 2^-9, E5M2 to 2^-16: small gradients become 0.
# Output seen:
#     three equal objects: gradients in torch.float8_e5m2
#     one object three times: gradients in torch.float8_e4m3fn
#     one object, first for gradients, then for the weights of a second config: weights in torch.float8_e5m2
#     share of the input's gradients that are 0, over seven decades: 0.0% with three, 19.1% with one
# What follows: make a CastConfig for each place, or name target_dtype.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4 torchao==0.18.0
cat > "$folder/configs.py" <<'PY'
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training


def linear_config(of_input, of_weight, of_grad):
    return Float8LinearConfig(
        cast_config_input=of_input, cast_config_weight=of_weight, cast_config_grad_output=of_grad, emulate=True
    )


def zeros(config):
    """The share of zeros in the gradient that an identity passes on, of gradients over seven decades."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(64))
    convert_to_float8_training(model, config=config)
    x = torch.zeros(64, 64, requires_grad=True)
    model(x).backward(10 ** torch.linspace(-7, 0, 64 * 64).view(64, 64))
    return (x.grad == 0).float().mean().item()


three = linear_config(CastConfig(), CastConfig(), CastConfig())
print("three equal objects: gradients in", three.cast_config_grad_output.target_dtype)
shared = CastConfig()
one = linear_config(shared, shared, shared)
print("one object three times: gradients in", one.cast_config_grad_output.target_dtype)
kept = CastConfig()
linear_config(CastConfig(), CastConfig(), kept)
second = linear_config(CastConfig(), kept, CastConfig())
print("one object, first for gradients, then for the weights of a second config: weights in",
      second.cast_config_weight.target_dtype)
shares = [zeros(config) for config in (three, one)]
print(f"share of the input's gradients that are 0, over seven decades: {shares[0]:.1%} with three, {shares[1]:.1%} with one")
is_so = (
    three.cast_config_grad_output.target_dtype == torch.float8_e5m2
    and one.cast_config_grad_output.target_dtype == torch.float8_e4m3fn
    and second.cast_config_weight.target_dtype == torch.float8_e5m2
)
raise SystemExit(not is_so)
PY
"$folder/venv/bin/python" -W ignore "$folder/configs.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
