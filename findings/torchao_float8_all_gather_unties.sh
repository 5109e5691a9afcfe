#!/usr/bin/env bash
# torchao's float8 all-gather unties a head from its embedding without a word: the two are trained apart from then on.
#
# Versions: torchao 0.18.0 with torch 2.13.0 (CPU build, gloo).
# Behaviour: convert_to_float8_training keeps the Parameter of a Linear, and with it a tie. With
#     enable_fsdp_float8_all_gather=True it wraps the weight and makes a new Parameter of it, which shares its memory until
#     fully_shard gives each Parameter a shard of its own. Optimizer, parameter count and checkpoint then have two.
# Output seen, of a tied model of 32 x 16 on one rank, after one step of AdamW with a learning rate of .1:
#     enable_fsdp_float8_all_gather=False: 512 parameters, head and embedding at most 0.0 apart
#     enable_fsdp_float8_all_gather=True: 1024 parameters, head and embedding at most 0.2 apart
# What follows: leave a tied head out by module_filter_fn, or set head.weight = embedding.weight again and have no FP8
#     all-gather for it.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4 torchao==0.18.0
cat > "$folder/tied.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def train(in_float8):
    """Parameters, and how far head and embedding are apart after a step."""
    torch.manual_seed(0)
    model = Tied()
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=in_float8)
    convert_to_float8_training(model, config=config)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(16)[None]).logsumexp(-1).sum().backward()
    optimizer.step()
    apart = model.embedding.weight.full_tensor() - model.head.weight.full_tensor()
    return sum(p.numel() for p in model.parameters()), apart.abs().max().item()


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
results = {in_float8: train(in_float8) for in_float8 in (False, True)}
for in_float8, (count, apart) in results.items():
    print(f"enable_fsdp_float8_all_gather={in_float8}: {count} parameters, head and embedding at most {apart:.1f} apart")
dist.destroy_process_group()
raise SystemExit(not (results[False] == (512, 0.0) and results[True][0] == 1024 and results[True][1] > 0.1))
PY
"$folder/venv/bin/python" -W ignore "$folder/tied.py" "$folder" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
