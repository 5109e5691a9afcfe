#!/usr/bin/env bash
# The gradient of an embedding in BF16 stops growing, on a CPU, once a token has come up often: 4,096 times 1 gives 256.
#
# Versions: torch 2.13.0, CPU build; the same in 2.15.0 (its CUDA build, run on a CPU).
# Behaviour: the backward pass of F.embedding, and of a table indexed by weight[ids], adds each occurrence to a BF16 number,
#     which from 256 on no longer changes when 1 is added. index_add and scatter_add, to which the same sum is given, keep
#     it in fp32 and are right, and so is Inductor.
# Output seen, of 4,096 positions that all hold token 0, each with a gradient of 1:
#     F.embedding: 256
#     weight[ids]: 256
#     index_add: 4096
#     scatter_add: 4096
#     F.embedding, compiled: 4096
#     F.embedding of an fp32 weight, its output cast to BF16: 4096
# What follows: keep the embedding in fp32 and cast what it gives (model.py does). A model that is BF16 altogether, or
#     whose embedding FSDP2 gathers with param_dtype=bfloat16, trains its frequent tokens on too small a gradient on a CPU.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/embed.py" <<'PY'
import torch
import torch.nn.functional as F

N = 4096
ids = torch.zeros(N, dtype=torch.long)
ones = torch.ones(N, 4, dtype=torch.bfloat16)
zeros = torch.zeros(8, 4, dtype=torch.bfloat16)


def gradient(embed, dtype=torch.bfloat16):
    """What the table's first number gets from N positions with a gradient of 1 each."""
    weight = torch.zeros(8, 4, dtype=dtype, requires_grad=True)
    embed(ids, weight).backward(ones)
    return weight.grad[0, 0].item()


sums = {
    "F.embedding": gradient(F.embedding),
    "weight[ids]": gradient(lambda ids, weight: weight[ids]),
    "index_add": zeros.index_add(0, ids, ones)[0, 0].item(),
    "scatter_add": zeros.scatter_add(0, ids[:, None].expand(-1, 4), ones)[0, 0].item(),
    "F.embedding, compiled": gradient(torch.compile(lambda ids, weight: F.embedding(ids, weight))),
    "F.embedding of an fp32 weight, its output cast to BF16": gradient(
        lambda ids, weight: F.embedding(ids, weight).bfloat16(), torch.float32
    ),
}
for name, total in sums.items():
    print(f"{name}: {total:.0f}")
raise SystemExit(list(sums.values()) != [256, 256, N, N, N, N])
PY
"$folder/venv/bin/python" "$folder/embed.py"
