#!/usr/bin/env bash
# torch 2.13.0: a program that never compiles pays for the compiler. Each of the calls below, as the first of its
# process, imports Dynamo or the reference operators with sympy: 490 to 820 modules, .3 to 1.1 seconds of CPU.
#
#   - every optimizer of torch.optim: its constructor is wrapped so that Dynamo leaves it alone, and the wrapper
#     imports Dynamo;
#   - use_deterministic_algorithms(False), the flag's own default: it sets a twin flag in Inductor's configuration;
#   - nn.Embedding on the meta device: its normal_() falls back to a reference written in Python. nn.Linear, which
#     draws by uniform_(), does not;
#   - Module.to_empty() of a model on meta: empty_like() of a meta tensor falls back in the same way;
#   - torch.distributed.checkpoint, .fsdp and .tensor, which import sympy by way of DTensor.
#
# Who pays: every start, in each rank, and every test that is a process. What counts or plans a model without an
# optimizer can avoid all five: nn.Embedding.from_pretrained(torch.empty(..), freeze=False), torch.empty(p.shape) in
# the place of to_empty(), asking for the flag before it is set, imports of what shards where there is something to shard.
#
# Output seen with torch 2.13.0+cpu, Python 3.11 (seconds depend on the machine):
#   Linear on meta                       0 modules   0.001 s of CPU   Dynamo: False
#   Embedding on the CPU                 0 modules   0.001 s of CPU   Dynamo: False
#   from_pretrained(empty) on meta       0 modules   0.000 s of CPU   Dynamo: False
#   is the flag set                      0 modules   0.000 s of CPU   Dynamo: False
#   Embedding on meta                  823 modules   1.012 s of CPU   Dynamo: True
#   to_empty() of a Linear on meta     487 modules   0.301 s of CPU   Dynamo: False
#   flag set to its default            823 modules   1.039 s of CPU   Dynamo: True
#   SGD of one tensor                  823 modules   1.101 s of CPU   Dynamo: True
#   torch.distributed.tensor           520 modules   0.570 s of CPU   Dynamo: False
#   torch.distributed.checkpoint       685 modules   0.630 s of CPU   Dynamo: False
#
# Ends with 1 if this changes: at most 300 modules, or 20 and more for the first four.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$work"
cat > cost.py <<'PY'
import sys
import time

import torch

CASES = {
    "Linear on meta": "torch.nn.Linear(8, 8, device='meta')",
    "Embedding on the CPU": "torch.nn.Embedding(8, 8)",
    "from_pretrained(empty) on meta": (
        "torch.nn.Embedding.from_pretrained(torch.empty(8, 8, device='meta'), freeze=False)"
    ),
    "is the flag set": "torch.are_deterministic_algorithms_enabled()",
    "Embedding on meta": "torch.nn.Embedding(8, 8, device='meta')",
    "to_empty() of a Linear on meta": "torch.nn.Linear(8, 8, device='meta').to_empty(device='cpu')",
    "flag set to its default": "torch.use_deterministic_algorithms(False)",
    "SGD of one tensor": "torch.optim.SGD([torch.zeros(8, requires_grad=True)])",
    "torch.distributed.tensor": "import torch.distributed.tensor",
    "torch.distributed.checkpoint": "import torch.distributed.checkpoint",
}
FEW = 4  # the first four import next to nothing
name, is_few = list(CASES)[int(sys.argv[1])], int(sys.argv[1]) < FEW
modules = set(sys.modules)
start = time.process_time()
exec(CASES[name])
seconds = time.process_time() - start
count = len(set(sys.modules) - modules)
print(f"{name:32} {count:5} modules {seconds:7.3f} s of CPU   Dynamo: {'torch._dynamo' in sys.modules}")
sys.exit(0 if (count < 20 if is_few else count > 300) else "this has changed")
PY
for case in 0 1 2 3 4 5 6 7 8 9; do "$work/venv/bin/python" cost.py $case; done
